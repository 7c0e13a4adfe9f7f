//! What can go wrong in the command line itself. Errors of the crates below keep their own types; [`crate::exit`] knows both.

use lamassu_vault::VaultError;
use std::io;
use std::path::{Path, PathBuf};

/// A fault of this program's own making, or its user's.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The user's: options that make no sense, or not together.
    #[error("{0}")]
    Usage(&'static str),
    /// The user's: a value outside its bounds.
    #[error("{option} must be {rule}")]
    Member { option: &'static str, rule: &'static str },
    /// The user's: a path that is not inside the vault.
    #[error("{path:?} does not lie in {dir:?}")]
    PathOutside { path: PathBuf, dir: PathBuf },
    /// The user's: no header there.
    #[error("{dir:?} is not a vault: it has no lamassu.vault; `lamassu init DIR` makes one")]
    NotAVault { dir: PathBuf },
    /// The user's, or the store's: a vault without what opens it.
    #[error(
        "{dir:?} is not a vault as it is: it has files of one, but no lamassu.vault. Where that was lost, `lamassu key restore BACKUP DIR` puts a copy \
         back; what a clone left that was cut off can be removed"
    )]
    NoHeader { dir: PathBuf },
    /// The user's: plain files, where ciphertext is wanted.
    #[error("{dir:?} is where the vault in {vault:?} is mounted: give the vault's own directory")]
    IsAMount { dir: PathBuf, vault: PathBuf },
    /// The store's: nothing can be written there.
    #[error(
        "the store of {dir:?} is read-only, and so can the vault only be read: `lamassu mount --read-only`, `ls`, `cat`, `cp` out of it, `check` without --repair"
    )]
    StoreReadOnly { dir: PathBuf },
    /// The user's: missing, or something else than a directory.
    #[error("{dir:?} is not a directory that can be used: {source}")]
    NotADirectory { dir: PathBuf, source: std::io::Error },
    /// The user's: init wants an empty directory.
    #[error("{dir:?} is not empty: a vault is made in an empty directory, or in one that does not exist yet")]
    DirNotEmpty { dir: PathBuf },
    /// The user's: a copy is made in a place of its own.
    #[error("{path:?} exists already: a clone or snapshot is made in a directory that does not exist yet")]
    CloneExists { path: PathBuf },
    /// The user's: a copy within the original would be copied too, or change while it is copied.
    #[error("{path:?} lies in {within:?}, which belongs to the vault that is copied: choose a place outside")]
    CloneWithin { path: PathBuf, within: PathBuf },
    /// The user's: no such ciphertext file.
    #[error("cannot open the stored file {path:?}: {source}")]
    NoSuchStored { path: PathBuf, source: std::io::Error },
    /// The user's: nothing to mount on.
    #[error("mount point {path:?}: {source}{}", mountpoint_advice(.path, .source))]
    Mountpoint { path: PathBuf, source: std::io::Error },
    /// The user's: the mount would hide the store, or be a part of it.
    #[error("mount point {path:?} and the directory that is mounted must not lie in one another")]
    MountpointInVault { path: PathBuf },
    /// The user's: ciphertext is no place to work in.
    #[error("{dir:?} belongs to the vault {vault:?}: mount that without --passthrough")]
    PassthroughOfVault { dir: PathBuf, vault: PathBuf },
    /// The user's: nothing of ours is mounted there.
    #[error("{path:?} is not the mount point of a Lamassu vault; `findmnt -t fuse.lamassu` lists those there are")]
    NotAMount { path: PathBuf },
    /// The user's: files are open there.
    #[error("{path:?} is busy: end the programs that use it (`fuser -vm` lists them), or unmount with --lazy")]
    MountBusy { path: PathBuf },
    /// The store's: what was written through the mount is not all in it.
    #[error(
        "nothing was unmounted, since not everything that was written to {path:?} could be put into the store: {message}. The daemon keeps it, \
         and its log names the files: make room or mend the store, and unmount again; `lamassu umount --lazy` gives up what cannot be written"
    )]
    Unwritten {
        path: PathBuf,
        /// exit code
        code: u8,
        /// of the daemon
        message: String,
    },
    /// The user's: another process writes this vault.
    #[error("another writer has {dir:?} open{place}")]
    Locked {
        dir: PathBuf,
        /// ", mounted on …", where it is known
        place: String,
    },
    /// The store's: names too short for the format.
    #[error("the store below {dir:?} takes names of at most {found} bytes; a vault needs 64")]
    NameMax { dir: PathBuf, found: u32 },
    /// The user's: metadata integrity where a flipped bit would go unnoticed.
    #[error(
        "suite {suite} needs --integrity full: its cipher is malleable, so without the re-hash a flipped bit would be read as data"
    )]
    SuiteNeedsFull { suite: &'static str },
    /// The user's: a header that does not belong there.
    #[error(
        "the keys of {file:?} do not open the root directory of {dir:?}: it is another vault's header, or the directory is damaged; --force puts it there all the same"
    )]
    OtherVault { file: PathBuf, dir: PathBuf },
    /// The user's: the header in place has another id.
    #[error("{dir:?} has the header of another vault or zone than {file:?}; --force replaces it all the same")]
    OtherId { file: PathBuf, dir: PathBuf },
    /// The user's: what was written since the backup would be lost.
    #[error(
        "{dir:?} has keys that {file:?} lacks, made by a rotation since: what was written with them could not be read again; --force restores it all the same"
    )]
    NewerKeys { file: PathBuf, dir: PathBuf },
    /// The user's: a line that names no vault and key.
    #[error(
        "{path:?}, line {line}: a line is the id of a vault and the key of its administrator, both in hex; correct it"
    )]
    Pins { path: PathBuf, line: usize },
    /// The user's: a zone file that says nothing of a vault.
    #[error("{file:?} pins no administrator for vault {vault}: `lamassu key admin pin --zone FILE DIR` does")]
    NoZonePin { file: PathBuf, vault: String },
    /// Standard output did not take a secret that is shown once.
    #[error("the key could not be printed ({reason}), {undone}")]
    Unprinted { reason: String, undone: String },
    /// SIGINT or SIGTERM.
    #[error("stopped before the work was done")]
    Interrupted,
    /// Whoever read standard output has closed it, and wants no more.
    #[error("standard output was closed")]
    ReaderGone,
    /// What a check found and could not mend.
    #[error("problems left: {problems}; restore the files named above from a backup")]
    DamageLeft { problems: usize },
    /// What a check found that reads, and not as it was written last.
    #[error(
        "nothing is damaged, but ranges named above do not hold what was written last: {problems}; compare them with a backup if an application was told that they were synced"
    )]
    Undone { problems: usize },
    /// The store's, or whoever can write it: the history was changed.
    #[error("the history of {dir:?} does not verify: {fault}; what is shown is what does")]
    HistoryDamaged { dir: PathBuf, fault: lamassu_keys::history::Fault },
    /// What a check found and mended.
    #[error("problems mended: {problems}; the vault is clean now")]
    Repaired { problems: usize },
    /// The user's: a path outside the vault that is missing, or that is something else than is wanted.
    #[error("{path:?}: {source}")]
    LocalPath { path: PathBuf, source: VaultError },
    /// A file outside the vault.
    #[error("cannot {op} {path:?}: {source}")]
    Local { op: &'static str, path: PathBuf, source: std::io::Error },
    /// What was just made is not what has its name now.
    #[error(
        "{path:?} was exchanged for something else while it was made: somebody moves entries about in that directory"
    )]
    Moved { path: PathBuf },
    /// The store's word: which device a node is of.
    #[error("is a device node, and nothing vouches for what the store says there; --trust-store makes it")]
    DeviceNode,
    /// A file of the store, read as it is.
    #[error("the store failed: cannot {op} {path:?}: {source}")]
    Backing { op: &'static str, path: PathBuf, source: std::io::Error },
    /// Something killed the daemon before the mount was usable.
    #[error("the mount process was killed by signal {signal} before the mount was usable")]
    DaemonKilled { signal: i32 },
    /// What a daemon was asked makes no sense to it.
    #[error(
        "the request makes no sense to the process that serves the mount: it is of another version, or asked too late"
    )]
    GarbledRequest,
    /// The user's: a change, by a daemon that changes nothing.
    #[error("the vault is mounted read-only: unmount it there, or give its directory where it is not mounted")]
    ReadOnlyMount,
    /// The user's: a change of a frozen store.
    #[error("the vault is frozen: `lamassu thaw` it first")]
    Frozen,
    /// The user's: neither a mount point nor the root of a dataset.
    #[error("this is not the root of a dataset: `lamassu dataset list PATH` shows those there are")]
    NotADataset,
    /// The user's: nothing of ours is mounted there.
    #[error("{path:?} does not lie in a mounted vault; without a mount, give the vault and the path in it: VAULT PATH")]
    NotInAMount { path: PathBuf },
    /// The user's: nothing there, in a mount of ours.
    #[error("{path:?} does not exist: there is no {missing:?} in the mounted vault")]
    MissingInMount { path: PathBuf, missing: PathBuf },
    /// The user's: the way leads through a dataset, or a vault, that is not loaded.
    #[error("{path:?} lies in {above:?}, whose key is not loaded: `lamassu key load {above:?}` first")]
    AboveNotLoaded { path: PathBuf, above: PathBuf },
    /// The user's, or the administrator's who named the delegates.
    #[error(
        "only root and the user who mounted may do this; a delegate may create datasets that inherit their key, in its own directories, and list, unload and load its own"
    )]
    NotPermitted,
    /// The user's: not in /etc/passwd.
    #[error("there is no user {user:?} on this machine; give a name of /etc/passwd, or a number")]
    NoSuchUser { user: String },
    /// Nobody asked for one.
    #[error("no re-keying was begun since the vault was mounted")]
    NoRekey,
    /// The user's: a change of what is never written.
    #[error(
        "this vault is a snapshot, which nobody writes: a new key would never be used; `lamassu clone` makes a copy to work in"
    )]
    Snapshot,
    /// The user's: what `--zone` is for has been done.
    #[error("the zone has no newer key than this vault: `lamassu zone rotate FILE` makes one")]
    ZoneNotAhead,
    /// Some objects stay under older keys.
    #[error("objects that could not be re-keyed: {failed}; `lamassu check` tells what is wrong with them")]
    NotRekeyed { failed: u64 },
    /// The tree was not gone through as a whole.
    #[error("files were renamed faster than the tree could be gone through: run it again")]
    RekeyIncomplete,
    /// The user's: a proof needs a vault that nobody writes.
    #[error("the vault is mounted on {mountpoint:?}: unmount it, and give its directory")]
    RetireMounted { mountpoint: PathBuf },
    /// The user's: what a repair has moved away may be under any key.
    #[error("{dir:?} is not empty, and nobody knows which keys its files need: remove what you do not need there")]
    LostNotEmpty { dir: PathBuf },
    /// The user's: the old key is not done with.
    #[error(
        "epoch {epoch} of the {tier} key stays: without it these do not verify: {needing}. `lamassu rekey --{work}` takes them to the newest key; what is left \
         then is damaged, and `lamassu check` names it: restore or remove that first"
    )]
    EpochNeeded {
        tier: &'static str,
        epoch: u32,
        /// how many of what
        needing: String,
        /// `outer` or `full`
        work: &'static str,
    },
    /// The user's: `--fips`, and something that is not approved.
    #[error("--fips: {why}")]
    NotApproved { why: &'static str },
    /// A key server or token did not destroy its key: everything else was done.
    #[error("the vault's keys are destroyed, but not the key of {sources}; the receipt says what was answered")]
    LeftAtServer { sources: String },
    /// The daemon of a mount did not do what it was asked to; its own words.
    #[error("{message}")]
    Told {
        /// exit code
        code: u8,
        message: String,
    },
    /// The daemon's answer makes no sense.
    #[error("the process that serves {path:?} gave an answer that makes no sense: it is of another version")]
    GarbledAnswer { path: PathBuf },
    /// Some of several files failed; each was named when it did.
    #[error("{failed} of {all} could not be done")]
    SomeFailed { failed: usize, all: usize },
    /// A list of datasets with gaps; the first of these were named.
    #[error("directories that could not be looked into, where further datasets may lie: {count}")]
    NotAllSeen { count: usize },
    /// umount(2) and fusermount3 both refused.
    #[error("cannot unmount {path:?}: {reason}")]
    Umount { path: PathBuf, reason: String },
}

/// What to do about a mount point that cannot be used.
fn mountpoint_advice(path: &Path, source: &io::Error) -> String {
    match source.raw_os_error() {
        Some(libc::ENOENT) => "; make the directory first".into(),
        Some(libc::ENOTCONN) => format!(
            ": the process that served the mount there is gone; `lamassu umount {}` takes the dead mount away (of another file system: `fusermount3 -u`)",
            path.display()
        ),
        Some(_) | None => String::new(),
    }
}
