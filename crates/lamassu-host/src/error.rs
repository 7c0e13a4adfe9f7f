//! Errors of this crate, by whose fault they are. Errors of lower crates keep their types inside.

use crate::anchors::ImportError;
use crate::needing::Needing;
use lamassu_crypto::NoRandom;
use lamassu_crypto::selftest::SelfTestFailure;
use lamassu_format::header::{HeaderError, VaultId};
use lamassu_format::profile::ProfileError;
use lamassu_keys::{FileError, HistoryError, KeyError};
use lamassu_store::backend::CopyError;
use lamassu_vault::VaultError;
use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An operation on a vault failed. [`crate::Kind`] says how a program reacts.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Adds the place to an error whose own text lacks it.
    #[error("{}", .path.display())]
    At {
        /// a file or directory
        path: PathBuf,
        /// the error
        source: Box<Error>,
    },
    /// Of keys, headers' contents and key sources.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// An error of a header's file.
    #[error(transparent)]
    File(#[from] FileError),
    /// An error of the history.
    #[error(transparent)]
    History(#[from] HistoryError),
    /// An error of the file system.
    #[error(transparent)]
    Vault(#[from] VaultError),
    /// The system gave no random numbers.
    #[error(transparent)]
    NoRandom(#[from] NoRandom),
    /// Of copying a vault in the store.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The user's: a vault is made in an empty directory.
    #[error("{dir:?} is not empty: a vault is made in an empty directory, or in one that does not exist yet")]
    DirNotEmpty {
        /// as given
        dir: PathBuf,
    },
    /// The store's: names too short for the format.
    #[error("the store below {dir:?} takes names of at most {found} bytes; a vault needs 64")]
    NameMax {
        /// the vault's
        dir: PathBuf,
        /// in bytes
        found: u32,
    },
    /// The tree of a new vault could not be begun.
    #[error("cannot make the root directory of the vault")]
    CannotMakeRoot {
        /// why
        source: VaultError,
    },
    /// The user's: a copy is made in a place of its own.
    #[error("{path:?} exists already: a clone or snapshot is made in a directory that does not exist yet")]
    CloneExists {
        /// as given
        path: PathBuf,
    },
    /// The user's: a copy within the original would be copied too, or change while it is copied.
    #[error("{path:?} lies in {within:?}, which belongs to the vault that is copied: choose a place outside")]
    CloneWithin {
        /// as given
        path: PathBuf,
        /// the vault, or where it is mounted
        within: PathBuf,
    },
    /// The user's: what an interruption left cannot be completed in what is never written.
    #[error(
        "{within:?} was not closed at the end of an earlier session{or_open}, and what that left can never be completed \
         in a snapshot, which is never written: unmount the vault if it is mounted, run `lamassu check --repair {dir:?}`, \
         and make the snapshot then",
        or_open = or_open_elsewhere(.within, .dir)
    )]
    SnapshotOfInterrupted {
        /// the vault's, or that of a dataset in it
        within: PathBuf,
        /// the vault's
        dir: PathBuf,
    },
    /// The copy of a vault got no record of what was interrupted in the original.
    #[error("cannot copy the record of sessions of {}", .dir.display())]
    CannotCopySessions {
        /// the original's
        dir: PathBuf,
        /// why
        source: VaultError,
    },
    /// An error in an anchor's export, while it is imported.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The user's, or the system's: nowhere to look for an anchor.
    #[error("there is no place for anchors: set HOME or XDG_STATE_HOME, or name the anchor's file with --anchor FILE")]
    NoAnchorPlace,
    /// The user's, or a disk's that is not mounted: the anchor that is to be replaced cannot be looked at.
    #[error(
        "this host remembers the vault's anchor in {}, and the file is not there: mount its disk; if it is lost, say \
         with --anchor FILE where the new one is to be",
        .path.display()
    )]
    RememberedAnchorGone {
        /// where it was
        path: PathBuf,
    },
    /// The user's: what needs the anchor in a file of this host's.
    #[error(
        "the server {server} keeps the anchor of this vault, and this cannot be done there yet: take the anchor back \
         first (`lamassu anchor move DIR FILE`)"
    )]
    AnchorAtServer {
        /// its address
        server: String,
    },
    /// The user's: what the store can put back with everything else remembers nothing.
    #[error(
        "the anchor {path:?} would lie in {within:?}, whose owner could put an older one back: choose another disk"
    )]
    AnchorInStore {
        /// the anchor's file
        path: PathBuf,
        /// the vault, or the mount that it would lie in
        within: PathBuf,
    },
    /// Taking an anchor back did not end, and the server may have given it up.
    #[error(
        "{path:?} has the anchor as it is at the server, which may have given it up by now: keep that file, and run \
         the same command again"
    )]
    NotTakenBack {
        /// the new anchor
        path: PathBuf,
        /// why
        source: Box<Error>,
    },
    /// Moving an anchor to a server was repeated and refused. The server may have accepted it the first time.
    #[error(
        "the server {server} may have accepted the anchor before, and other hosts may have used it since, so {path:?} \
         is not used as the anchor any more. When the reason is mended, run the same command again"
    )]
    PerhapsAtServer {
        /// its address
        server: String,
        /// the file that was the anchor
        path: PathBuf,
        /// why it was refused
        source: Box<Error>,
    },
    /// The user's: the anchor of a dataset that was copied with its vault is to be put at a server.
    #[error(
        "the dataset was copied with its vault and has the id of the original, for which a server keeps one anchor: that \
         of the copy is {path:?}"
    )]
    OfCopiedDataset {
        /// its file
        path: PathBuf,
    },
    /// The user's: a change that nothing would remember.
    #[error("the vault is anchored: with --anchor none it can be read, unverified, and not changed")]
    UnverifiedWrite,
    /// The user's: work on the anchor, without it.
    #[error("this works on the vault's anchor: leave out --anchor none")]
    WithoutAnchor,
    /// The user's: an anchor was named of a vault that has none.
    #[error("the vault is not anchored: leave out --anchor, or make an anchor: `lamassu anchor rebuild DIR`")]
    NotAnchored,
    /// The user's: what only an anchored vault has.
    #[error("the vault is not anchored; `lamassu anchor rebuild DIR` makes an anchor of what the store shows now")]
    Unanchored,
    /// The user's: a copy of a header that does not belong there.
    #[error(
        "the keys of {file:?} do not open the root directory of {dir:?}: it is another vault's header, or the \
         directory is damaged; --force puts it there all the same"
    )]
    OtherVault {
        /// the copy
        file: PathBuf,
        /// the vault's
        dir: PathBuf,
    },
    /// The user's: the header in place has another id.
    #[error("{dir:?} has the header of another vault or zone than {file:?}; --force replaces it all the same")]
    OtherId {
        /// the copy
        file: PathBuf,
        /// the vault's, or the zone file
        dir: PathBuf,
    },
    /// The user's: what was written since the copy was made would be lost.
    #[error(
        "{dir:?} has keys that {file:?} lacks, made by a rotation since: what was written with them could not be read \
         again; --force restores it all the same"
    )]
    NewerKeys {
        /// the copy
        file: PathBuf,
        /// the vault's, or the zone file
        dir: PathBuf,
    },
    /// A copy of a header says less than is so, and by this slot it cannot be made to say more.
    #[error("the copy is from before {lacks}, and has to be signed again to say so")]
    CannotSignCopy {
        /// before what
        lacks: &'static str,
        /// why not
        source: KeyError,
    },
    /// A cipher computes something else than it should.
    #[error(transparent)]
    SelfTest(#[from] SelfTestFailure),
    /// The user's: missing, or something else than a directory.
    #[error("{dir:?} is not a directory that can be used: {source}")]
    NotADirectory {
        /// as given
        dir: PathBuf,
        /// of the system
        source: io::Error,
    },
    /// The user's: no header there.
    #[error("{dir:?} is not a vault: it has no lamassu.vault; `lamassu init DIR` makes one")]
    NotAVault {
        /// as given
        dir: PathBuf,
    },
    /// The user's, or the store's: a vault without what opens it.
    #[error(
        "{dir:?} has files of a vault, but no lamassu.vault. If that was lost, `lamassu \
         key restore BACKUP DIR` puts a copy \
         back; what is left of a clone that was cut off can be removed"
    )]
    NoHeader {
        /// as given
        dir: PathBuf,
    },
    /// A change of the header was cut off, in a store without hard links.
    #[error(
        "{dir:?} has no lamassu.vault: it may be lamassu.vault.replacing, which a command that was cut off has left. \
         Give that its name back, with mv -n: a backup from before that command may lack its newest keys. A later \
         backup has more"
    )]
    HeaderIsKept {
        /// as given
        dir: PathBuf,
    },
    /// The store's: nothing can be written there.
    #[error(
        "the store of {dir:?} is read-only, and so the vault can only be read: `lamassu mount --read-only`, `ls`, \
         `cat`, `cp` out of it, `check` without --repair"
    )]
    StoreReadOnly {
        /// the vault's
        dir: PathBuf,
    },
    /// The vault does not open, for another reason than those above.
    #[error("cannot open the vault in {}", .dir.display())]
    CannotOpen {
        /// the vault's
        dir: PathBuf,
        /// why
        source: VaultError,
    },
    /// The store could not be asked which datasets lie in a vault.
    #[error("cannot look for datasets in {}", .dir.display())]
    CannotList {
        /// the vault's
        dir: PathBuf,
        /// why
        source: VaultError,
    },
    /// The user's: another process writes this vault.
    #[error("another writer has {dir:?} open{}", mounted_on(.mountpoint.as_deref()))]
    Locked {
        /// the vault's
        dir: PathBuf,
        /// where it is mounted, if that is known
        mountpoint: Option<PathBuf>,
    },
    /// A signal, or a request, ended it.
    #[error("stopped before the work was done")]
    Interrupted,
    /// The user's: metadata integrity where a flipped bit would go unnoticed.
    #[error(
        "suite {suite} needs --integrity full: its cipher is malleable, so without the re-hash a flipped bit would be \
         read as data"
    )]
    SuiteNeedsFull {
        /// its name
        suite: &'static str,
    },
    /// The user's: values that make no sense, or not together.
    #[error("{0}")]
    Usage(&'static str),
    /// The user's: a value outside its bounds.
    #[error("{option} must be {rule}")]
    Member {
        /// which
        option: &'static str,
        /// its bounds
        rule: &'static str,
    },
    /// The policy's: approved primitives alone, and something that is none.
    #[error("--fips: {why}")]
    NotApproved {
        /// what is not approved, and what to take instead
        why: &'static str,
    },
    /// The user's: a line that names no vault and key.
    #[error(
        "{path:?}, line {line}: a line is the id of a vault and the key of its administrator, both in hex; correct it"
    )]
    Pins {
        /// known-vaults
        path: PathBuf,
        /// from 1
        line: usize,
    },
    /// The user's: a zone file that says nothing of a vault.
    #[error("{file:?} pins no administrator for vault {vault}: `lamassu key admin pin --zone FILE DIR` does")]
    NoZonePin {
        /// the zone file
        file: PathBuf,
        /// the vault's id
        vault: VaultId,
    },
    /// A file of this host, outside every vault.
    #[error("cannot {op} {path:?}: {source}")]
    Local {
        /// what was tried
        op: &'static str,
        /// the file
        path: PathBuf,
        /// of the system
        source: io::Error,
    },
    /// A file of the store, reached by its path.
    #[error("the store failed: cannot {op} {path:?}: {source}")]
    Backing {
        /// what was tried
        op: &'static str,
        /// the file
        path: PathBuf,
        /// of the store
        source: io::Error,
    },
    /// The store's barrier failed.
    #[error("cannot sync the store")]
    CannotSync {
        /// of the store
        source: io::Error,
    },
    /// The system's: no thread.
    #[error("cannot start a thread")]
    NoThread {
        /// of the system
        source: io::Error,
    },
    /// The caller's: a program of another version, or a damaged request.
    #[error("the daemon of this mount does not know the request: it is of another version")]
    UnknownRequest {
        /// of the parser; may quote the request
        source: serde_json::Error,
    },
    /// The caller's: a request with a value that means nothing here.
    #[error(
        "the request makes no sense to the process that serves the mount: it is of another version, or asked too late"
    )]
    GarbledRequest,
    /// The program's: an answer that cannot be written down.
    #[error("an answer cannot be written as JSON")]
    Unanswerable {
        /// of the writer
        source: serde_json::Error,
    },
    /// The user's: a change, by a daemon that changes nothing.
    #[error("the vault is mounted read-only: unmount it there, or give its directory where it is not mounted")]
    ReadOnlyMount,
    /// The user's: a request about a vault that hosts have in turn.
    #[error(
        "several hosts use this vault in turn, and a shared mount refuses this: unmount it on all of them, and give \
         its directory"
    )]
    SharedMount,
    /// A change of a vault that hosts use by turns, while this host cannot have it.
    #[error("this host cannot get access to the vault now: its log says why. Nothing was changed; try again later")]
    NoTurn,
    /// Re-keying, or a change of profiles, of a vault that hosts use by turns: this host gets no turn to continue.
    #[error(
        "this host cannot get access to the vault now: its log says why. What is done stays done; run the command again \
         to continue"
    )]
    NoFurtherTurn,
    /// The user's: a vault that lies on this host alone is to be shared.
    #[error("the vault's anchor is kept on this host: `lamassu anchor move DIR server://HOST` lets other hosts use it")]
    NotAtServer,
    /// The user's: a dataset is to be destroyed that another host uses.
    #[error(
        "the dataset is in use by {by}: unload it there (`lamassu key unload`), or unmount the vault there; --force \
         destroys it all the same"
    )]
    DatasetInUse {
        /// the host
        by: String,
    },
    /// The user's: a change of a frozen store.
    #[error("the vault is frozen: `lamassu thaw` it first")]
    Frozen,
    /// The user's: new blocks would need a server, which a mount from before this host joined one cannot reach.
    #[error(
        "this mount cannot reach the server {server}, and every new block would need it: the vault was mounted before \
         this host had joined a server. Unmount the vault, mount it again, and repeat the command"
    )]
    NoNetwork {
        /// `HOST:PORT`
        server: String,
    },
    /// The user's: neither a mount point nor the root of a dataset.
    #[error("this is not the root of a dataset: `lamassu dataset list PATH` shows those there are")]
    NotADataset,
    /// The user's, or the administrator's who named the delegates.
    #[error(
        "only root and the user who mounted may do this; a delegate may create datasets that inherit their key, in \
         its own directories, and list, unload and load its own"
    )]
    NotPermitted,
    /// The user's: a delegate has no more rights in its directories than mkdir(2).
    #[error("nothing can be made in this directory: its mode, or its access list, does not let you write there")]
    NotWritable,
    /// The dataset was made; opening it failed.
    #[error("it is made, and does not open")]
    MadeNotOpen {
        /// why it does not open
        source: Box<Error>,
    },
    /// The user's: no such job to ask about.
    #[error(
        "the vault was mounted again since that was begun, or it ended long ago: begin it again, and it does what is left"
    )]
    NoJob,
    /// The user's: one job at a time.
    #[error(
        "the vault is being re-keyed, or profiles in it are being changed: wait for the end of that, or end it there"
    )]
    JobUnderWay,
    /// The program's: a panic.
    #[error("this ended by a bug, see the log; it can be begun again")]
    JobPanicked,
    /// The user's: a profile that no file has.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The user's: a change of what is never written.
    #[error(
        "this vault is a snapshot, which is never written: a new key would never be used; `lamassu clone` makes a copy \
         to work in"
    )]
    Snapshot,
    /// The user's: what adopting the zone's keys is for has been done.
    #[error("the zone has no newer key than this vault: `lamassu zone rotate FILE` makes one")]
    ZoneNotAhead,
    /// The user's: what a repair has moved away may be under any key.
    #[error("{dir:?} is not empty, and it is not known which keys its files need: remove what you do not need there")]
    LostNotEmpty {
        /// lamassu.lost
        dir: PathBuf,
    },
    /// The user's: the old key is not done with.
    #[error(
        "epoch {epoch} of the {tier} key stays: without it these do not verify: {needing}. `lamassu rekey --{work}` \
         takes them to the newest key; what is left \
         then is damaged, and `lamassu check` names it: restore or remove that first"
    )]
    EpochNeeded {
        /// which key
        tier: &'static str,
        /// which epoch
        epoch: u32,
        /// how many of what
        needing: Needing,
        /// `outer` or `full`
        work: &'static str,
    },
}

impl From<HeaderError> for Error {
    fn from(error: HeaderError) -> Self {
        Error::Key(error.into())
    }
}

fn mounted_on(mountpoint: Option<&Path>) -> String {
    mountpoint.map(|m| format!(": mounted on {}", m.display())).unwrap_or_default()
}

impl Error {
    /// The text for people: see [`message`].
    pub fn message(&self) -> String {
        message(self)
    }

    /// The error that this one began with.
    pub fn root_cause(&self) -> &dyn std::error::Error {
        let mut error: &dyn std::error::Error = self;
        while let Some(source) = error.source() {
            error = source;
        }
        error
    }

    /// The error without the paths that were put before it.
    pub fn innermost(&self) -> &Error {
        match self {
            Error::At { path: _, source } => source.innermost(),
            other => other,
        }
    }
}

/// Says which file or directory an error concerns.
pub(crate) trait At<T> {
    /// Puts `path` before the text of an error.
    fn at(self, path: &Path) -> Result<T>;
}

impl<T, E: Into<Error>> At<T> for Result<T, E> {
    fn at(self, path: &Path) -> Result<T> {
        self.map_err(|error| Error::At { path: path.into(), source: Box::new(error.into()) })
    }
}

/// What else may have left the sessions of a dataset: a freeze keeps it from other hosts only where they take turns.
fn or_open_elsewhere(within: &Path, dir: &Path) -> &'static str {
    match within == dir {
        true => "",
        false => ", or another host that does not share it by turns has it open (then close it there first)",
    }
}

/// An error and its causes in one line, each once: many texts already quote their source.
pub fn message(error: &(dyn std::error::Error + 'static)) -> String {
    joined(std::iter::successors(Some(error), |cause| cause.source()).map(ToString::to_string))
}

/// Texts in one line, from the outside in; one that is in what stands there already is left out.
pub fn joined(parts: impl Iterator<Item = String>) -> String {
    let mut text = String::new();
    for part in parts {
        if text.is_empty() {
            text = part;
        } else if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_says_each_cause_once() {
        let inner = Error::Local { op: "read", path: "f".into(), source: io::Error::from_raw_os_error(libc::EIO) };
        let shown = inner.to_string();
        let outer = Error::At { path: "/v".into(), source: Box::new(inner) };
        assert_eq!(outer.message(), format!("/v: {shown}"));
        assert_eq!(outer.root_cause().to_string(), io::Error::from_raw_os_error(libc::EIO).to_string());
        assert!(matches!(outer.innermost(), Error::Local { .. }));
    }
}
