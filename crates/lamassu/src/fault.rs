//! The errors of the command line: one enum, which holds the errors of the crates below, and an [`Error`] that adds
//! where it happened. There are no other error types here, so [`crate::exit`] needs one `match`.

use lamassu_access::AccessError;
use lamassu_crypto::NoRandom;
use lamassu_crypto::selftest::SelfTestFailure;
use lamassu_format::header::HeaderError;
use lamassu_fuse::control::ControlError;
use lamassu_fuse::{MountError, OptionError};
use lamassu_host::Error as HostError;
use lamassu_host::FaultKind;
use lamassu_host::control::protocol::Failed;
use lamassu_keys::receipt::ReceiptError;
use lamassu_keys::{FileError, HistoryError, KeyError, SourceError};
use lamassu_store::StoreError;
use lamassu_vault::VaultError;
use rustix::io::Errno;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

/// The result of a command and of its parts.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A fault, and where it happened.
pub struct Error {
    fault: Box<Fault>,
    /// The innermost first.
    context: Vec<String>,
}

impl<E: Into<Fault>> From<E> for Error {
    fn from(fault: E) -> Self {
        Error { fault: Box::new(fault.into()), context: Vec::new() }
    }
}

impl Error {
    /// Adds where it happened.
    pub fn context(mut self, place: impl Display) -> Error {
        self.context.push(place.to_string());
        self
    }

    /// What went wrong.
    pub fn fault(&self) -> &Fault {
        &self.fault
    }

    /// The fault and its causes.
    pub fn causes(&self) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
        std::iter::successors(Some(&*self.fault as &(dyn std::error::Error + 'static)), |cause| cause.source())
    }

    /// All of it in one line, each part once: many texts already quote their source.
    pub fn message(&self) -> String {
        lamassu_host::error::joined(self.context.iter().rev().cloned().chain(self.causes().map(ToString::to_string)))
    }
}

/// The outermost text.
impl Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.context.last() {
            Some(place) => f.write_str(place),
            None => self.fault.fmt(f),
        }
    }
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message())
    }
}

/// Adds to an error where it happened.
pub trait Context<T> {
    /// Puts a text before that of the fault.
    fn context(self, place: impl Display) -> Result<T>;
    /// The same, made only where it is needed.
    fn with_context<D: Display>(self, place: impl FnOnce() -> D) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for Result<T, E> {
    fn context(self, place: impl Display) -> Result<T> {
        self.map_err(|error| error.into().context(place))
    }

    fn with_context<D: Display>(self, place: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|error| error.into().context(place()))
    }
}

macro_rules! of_the_host {
    ($($error:ty),*) => {
        $(impl From<$error> for Fault {
            fn from(error: $error) -> Self {
                Fault::Host(error.into())
            }
        })*
    };
}

of_the_host!(KeyError, FileError, HistoryError, HeaderError, VaultError, NoRandom, SelfTestFailure);

fn unwritten_to(kind: FaultKind) -> &'static str {
    match kind {
        FaultKind::AnchorDisk | FaultKind::AnchorDiskFull | FaultKind::AnchorDiskReadOnly => "the anchor",
        kind if is_of_server(kind) => "the anchor",
        _ => "the store",
    }
}

/// Whether the server of the anchor is at fault, or does not answer.
fn is_of_server(kind: FaultKind) -> bool {
    use FaultKind::*;
    matches!(
        kind,
        AnchorServerDown
            | AnchorServerUntrusted
            | AnchorServerForbids
            | AnchorServerOlder
            | AnchorServerRestored
            | AnchorServerVersion
            | AnchorServerFails
    )
}

fn kept_by(kind: FaultKind) -> &'static str {
    match is_of_server(kind) {
        true => "It is lost if the server ends this host's session meanwhile, which takes a term",
        false => "The daemon keeps it, and its log names the files",
    }
}

fn to_be_mended(kind: FaultKind) -> &'static str {
    match kind {
        FaultKind::AnchorDisk => "mend the disk that the anchor lies on, or put its file back",
        FaultKind::AnchorDiskFull => "make room on the disk that the anchor lies on",
        FaultKind::AnchorDiskReadOnly => "have the disk that the anchor lies on mounted for writing",
        kind if is_of_server(kind) => "wait until the server answers this host",
        _ => "make room or mend the store",
    }
}

impl From<SourceError> for Fault {
    fn from(error: SourceError) -> Self {
        KeyError::from(error).into()
    }
}

impl From<ReceiptError> for Fault {
    fn from(error: ReceiptError) -> Self {
        KeyError::from(error).into()
    }
}

impl From<AccessError> for Fault {
    fn from(error: AccessError) -> Self {
        match error {
            AccessError::MasterKey(error) => error.into(),
            AccessError::NoRandom(error) => error.into(),
            error => Fault::Access(error),
        }
    }
}

impl From<Errno> for Fault {
    fn from(error: Errno) -> Self {
        io::Error::from(error).into()
    }
}

impl From<StoreError> for Fault {
    fn from(error: StoreError) -> Self {
        VaultError::from(error).into()
    }
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// An error of vaults, keys, files, or the store below.
    #[error(transparent)]
    Host(#[from] HostError),
    /// An error of mounting.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// An error of a gateway.
    #[error(transparent)]
    Gateway(#[from] lamassu_gateway::GatewayError),
    /// An error of a policy manager.
    #[error(transparent)]
    Access(AccessError),
    /// An error of volumes.
    #[error(transparent)]
    Volume(#[from] lamassu_volume::VolumeError),
    /// The user's: nbdkit is not installed.
    #[error("cannot run {program:?}: {source}")]
    NoNbdkit { program: PathBuf, source: io::Error },
    /// The user's: the plugin is not installed.
    #[error("the plugin of nbdkit is not in {dir:?}, the directory of this program: give its path by --plugin FILE")]
    NoPlugin { dir: PathBuf },
    /// The user's: an export is served there.
    #[error("another export uses {socket:?}")]
    SocketInUse { socket: PathBuf },
    /// nbdkit could not start; its messages say why.
    #[error("nbdkit has ended ({status}); its messages are above")]
    NbdkitEnded { status: ExitStatus },
    /// nbdkit was killed while it served.
    #[error(
        "nbdkit has ended ({status}) while it served: what clients had not flushed is lost, and one that reconnects \
         would not know; end them before you export again"
    )]
    NbdkitKilled { status: ExitStatus },
    /// The user's: a word of `-o`.
    #[error(transparent)]
    MountOption(#[from] OptionError),
    /// A mount could not be reached.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The system's; the context says what was tried.
    #[error(transparent)]
    System(#[from] io::Error),
    /// JSON that could not be written.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// Another failure, described by this text.
    #[error("{0}")]
    Other(&'static str),
    /// The user's: something that a file cannot replace.
    #[error("{path} is there already, and no regular file")]
    NoRegularFile { path: String },
    /// The user's: a file that `scrub --state` would replace, and remove at the end.
    #[error(
        "{path:?} is not the state of a scrub of this vault, and is left as it is: name a file outside the vault that does not exist yet"
    )]
    NotAScrubState { path: PathBuf },
    /// The user's: a state of a scrub that another user may have written.
    #[error(
        "{path:?} belongs to another user, or others may write it or its directory: what it says to be verified cannot be trusted; remove it, or name another file"
    )]
    ScrubStateOfOthers { path: PathBuf },
    /// The user's: a tree deeper than the limit.
    #[error("{path}: more than {max} directories deep; what is in it is left out")]
    TooDeep { path: String, max: usize },
    /// The store's: a directory that contains itself.
    #[error("{path}: is one of the directories that it lies in; what is in it is left out")]
    LiesInItself { path: String },
    /// The process that unmounts was killed.
    #[error("the process that unmounts was ended: {status}")]
    WorkerKilled { status: ExitStatus },
    /// The user's: a path that is not inside the vault.
    #[error("{path:?} does not lie in {dir:?}")]
    PathOutside { path: PathBuf, dir: PathBuf },
    /// The user's: plain files, where ciphertext is wanted.
    #[error("{dir:?} is where the vault in {vault:?} is mounted: give the vault's own directory")]
    IsAMount { dir: PathBuf, vault: PathBuf },
    /// The user's: no such ciphertext file.
    #[error("cannot open the stored file {path:?}: {source}")]
    NoSuchStored { path: PathBuf, source: std::io::Error },
    /// The user's: nothing to mount on.
    #[error("mount point {path:?}: {source}{}", mountpoint_advice(.path, .source))]
    Mountpoint { path: PathBuf, source: std::io::Error },
    /// The user's: the mount would hide the store, or be a part of it.
    #[error("mount point {path:?} and the directory that is mounted must not contain one another")]
    MountpointInVault { path: PathBuf },
    /// The user's: a store that others can search below a mount that others may use.
    #[error(
        "--allow-other is refused: other users of this host can reach what is stored in {dir:?} (mode {mode:04o}, owner {uid}), and so exchange \
         it behind the mount; {mend}, then mount again. The mount's root keeps its own mode: chmod MOUNTPOINT changes that"
    )]
    OpenStore { dir: PathBuf, mode: u32, uid: u32, mend: String },
    /// The user's: no Lamassu mount is there.
    #[error("{path:?} is not the mount point of a Lamassu vault; `findmnt -t fuse.lamassu` lists those there are")]
    NotAMount { path: PathBuf },
    /// The user's: files are open there.
    #[error("{path:?} is busy: end the programs that use it (`fuser -vm` lists them), or unmount with --lazy")]
    MountBusy { path: PathBuf },
    /// The store's, or the anchor's: not everything written through the mount is in it.
    #[error(
        "nothing was unmounted, since not everything that was written to {path:?} could be put into {}: {}. {}: {}, and unmount again; \
         `lamassu umount --lazy` gives up what cannot be written",
        unwritten_to(.failed.kind), .failed.message, kept_by(.failed.kind), to_be_mended(.failed.kind)
    )]
    Unwritten {
        path: PathBuf,
        /// the daemon's error
        failed: Failed,
    },
    /// Standard output did not take a secret that is shown once.
    #[error("the key could not be printed ({reason}), {undone}")]
    Unprinted { reason: String, undone: String },
    /// The reader of standard output has closed it.
    #[error("standard output was closed")]
    ReaderGone,
    /// Damage that a check found and could not repair.
    #[error("problems left: {problems}; restore the files named above from a backup")]
    DamageLeft { problems: u64 },
    /// Stale objects that a check found.
    #[error(
        "not the newest, as the anchor knows: {problems} problems, named above; restore those files, or `lamassu anchor accept` what was put \
         back on purpose"
    )]
    CheckStale { problems: u64 },
    /// Datasets that were not accepted with the vault that they lie in.
    #[error("nothing was accepted of {datasets} datasets, named above, whose header or history is not the newest")]
    DatasetsStale { datasets: usize },
    /// Differences from the anchor that a scrub found.
    #[error(
        "not as the anchor says: {findings} places, named above; restore them, or `lamassu anchor accept` what was put back on purpose"
    )]
    ScrubStale { findings: u64 },
    /// Objects that a scrub could not verify without keys.
    #[error(
        "nothing is stale, but some of it cannot be verified without a key: {pages} pages of open files, the blocks of {files} files \
         (open, or left so by a crash: `lamassu check --repair` completes these; or not written since `anchor rebuild` or `anchor accept`; \
         or with a damaged block: `lamassu check` names it), {blocks} blocks whose tree records are lost, \
         what is in {dirs} directories that a writer was moving (`lamassu check --repair` settles these), {histories} histories that \
         could not be read, and all in {datasets} datasets whose \
         anchors are not on this machine (`lamassu anchor import`; --skip-unanchored leaves them out)"
    )]
    ScrubUnverified { pages: u64, blocks: u64, files: u64, dirs: u64, histories: u64, datasets: usize },
    /// The store's: a dataset that was exchanged before a scrub reached it.
    #[error("the dataset in {dir:?} was exchanged while the command ran")]
    DatasetExchanged { dir: PathBuf },
    /// What a scrub could not read.
    #[error("nothing is stale, but the store could not be read at {places} places, named above")]
    ScrubUnreadable { places: u64 },
    /// Ranges that a check found readable, but not as they were written last.
    #[error(
        "nothing is damaged, but ranges named above do not hold what was written last: {problems}; compare them with a backup if an application was told that they were synced"
    )]
    Undone { problems: u64 },
    /// Datasets that a check could not verify. A dataset is a directory with a header, and anyone who can write to the
    /// store can put one anywhere.
    #[error(
        "no damage was found, but datasets named above were not verified, as their keys are not at hand: {datasets}. Check each by its own directory and key \
         (`lamassu path DIR NAME` tells where it lies); what you never made a dataset was made to look like one. --skip-locked leaves them out"
    )]
    NotVerified { datasets: usize },
    /// The fault of the store, or of someone who can write to it: the history was changed.
    #[error("the history of {dir:?} does not verify: {fault}; only the entries that verify are shown")]
    HistoryDamaged { dir: PathBuf, fault: lamassu_keys::history::Fault },
    /// Damage that a check found and repaired.
    #[error("problems mended: {problems}; the vault is clean now")]
    Repaired { problems: u64 },
    /// The user's: a path outside the vault that is missing, or leads to the wrong kind of entry.
    #[error("{path:?}: {source}")]
    LocalPath { path: PathBuf, source: VaultError },
    /// A new entry was exchanged for another while it was made.
    #[error(
        "{path:?} was exchanged for something else while it was made: entries are being moved about in that directory"
    )]
    Moved { path: PathBuf },
    /// A device node, whose device number only the store gives.
    #[error("is a device node, and nothing vouches for what the store says there; --trust-store makes it")]
    DeviceNode,
    /// Something killed the daemon before the mount was usable.
    #[error("the mount process was killed by signal {signal} before the mount was usable")]
    DaemonKilled { signal: i32 },
    /// This host did not join a server.
    #[error(transparent)]
    NotJoined(HostError),
    /// The user's: no Lamassu mount is there.
    #[error("{path:?} does not lie in a mounted vault; without a mount, give the vault and the path in it: VAULT PATH")]
    NotInAMount { path: PathBuf },
    /// The user's: no such path in a Lamassu mount.
    #[error("{path:?} does not exist: there is no {missing:?} in the mounted vault")]
    MissingInMount { path: PathBuf, missing: PathBuf },
    /// The user's: the way leads through a dataset, or a vault, that is not loaded.
    #[error("{path:?} lies in {above:?}, whose key is not loaded: `lamassu key load {above:?}` first")]
    AboveNotLoaded { path: PathBuf, above: PathBuf },
    /// The anchor is not in the state in which its digest was written down.
    #[error("the anchor's digest is {found} (revision {revision}), and not {expected}")]
    OtherDigest { expected: String, found: String, revision: u64 },
    /// The user's: not in /etc/passwd.
    #[error("there is no user {user:?} on this machine; give a name of /etc/passwd, or a number")]
    NoSuchUser { user: String },
    /// Some objects were not rewritten, or are between two states.
    #[error("objects that could not be rewritten: {failed}; `lamassu check` tells what is wrong with them")]
    NotRewritten { failed: u64 },
    /// The tree was not walked completely.
    #[error("files were made or renamed faster than the tree could be traversed: run the command again")]
    JobIncomplete,
    /// The user's: a proof needs a vault that is not being written.
    #[error("the vault is mounted on {mountpoint:?}: unmount it, and give its directory")]
    RetireMounted { mountpoint: PathBuf },
    /// The store's, or that of a daemon with a false answer: the keys that would be destroyed are not those of the
    /// named dataset.
    #[error(
        "the header in {dir:?} is not that of the dataset that was to be destroyed; nothing was: `lamassu info` of both tells which is which, and `lamassu key destroy {dir:?}` destroys this one"
    )]
    NotThatDataset { dir: PathBuf },
    /// A key server or token did not destroy its key: everything else was done.
    #[error("the vault's keys are destroyed, but not the key of {sources}; the receipt says what was answered")]
    LeftAtServer { sources: String },
    /// The daemon of a mount refused or failed; its own error.
    #[error("{}", .0.message)]
    Told(Failed),
    /// The daemon's answer is malformed.
    #[error("the process that serves {path:?} gave an invalid answer: it is of another version")]
    GarbledAnswer { path: PathBuf },
    /// A mount fails, so its daemon cannot be asked.
    #[error(
        "{path:?} answers with an I/O error: its store, or the server of a shared vault, does not answer or is not what it \
         was; the mount's log says which: the journal, syslog, or its --log-file"
    )]
    FailingMount { path: PathBuf },
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

/// Advice about a mount point that cannot be used.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_where_from_the_outside_in_and_each_cause_once() {
        let io = || io::Error::from_raw_os_error(libc::EIO);
        let failed: Result<()> = Err(HostError::Local { op: "read", path: "f".into(), source: io() }).context("inner");
        let error = failed.with_context(|| "outer").unwrap_err();
        assert_eq!(error.to_string(), "outer");
        assert_eq!(error.message(), format!("outer: inner: cannot read \"f\": {}", io()));
        assert_eq!(error.causes().count(), 2);
        let system = Err::<(), _>(Errno::IO).context("cannot wait").unwrap_err();
        assert_eq!(system.message(), format!("cannot wait: {}", io()));
    }
}
