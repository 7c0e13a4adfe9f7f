//! How a program reacts to an error: the one table from errors to kinds. The command line has an exit code for each
//! kind, and answers to other processes carry the kind.
//!
//! Every `match` here is exhaustive on purpose: a new error must choose its kind.

use crate::Error;
use crate::anchors::ImportError;
use lamassu_anchor::export::ExportError;
use lamassu_anchor::{AnchorError, ServerFault as AnchorServerFault};
use lamassu_crypto::oblivious::KeyServerFault;
use lamassu_format::header::HeaderError;
use lamassu_keys::receipt::ReceiptError;
use lamassu_keys::{FileError, HistoryError, KeyError, KeyState, ServerFault, SourceError, TokenFault};
use lamassu_store::StoreError;
use lamassu_store::backend::CopyError;
use lamassu_store::file::DamageKind;
use lamassu_vault::VaultError;
use serde::{Deserialize, Serialize};

/// A kind of failure. The names are those on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// The caller's: an invalid argument.
    Usage,
    /// No such file or directory in the vault.
    NotFound,
    /// The store below failed.
    Store,
    /// The directory is not a vault, or not a usable one.
    Directory,
    /// A key source did not give a key.
    KeySource,
    /// Another process writes the vault.
    Locked,
    /// The key is valid, and opens nothing here.
    WrongKey,
    /// Ended on request before the work was done.
    Interrupted,
    /// An empty passphrase.
    EmptyPassphrase,
    /// The header cannot be read, or is invalid.
    HeaderUnreadable,
    /// The header, or the history, cannot be written.
    HeaderUnwritable,
    /// Something stored does not verify.
    Damaged,
    /// A rule forbids it.
    Refused,
    /// A key server does not answer.
    KeyServerDown,
    /// A key server's certificate is not trusted.
    KeyServerUntrusted,
    /// A key server or token does not give this caller the key.
    KeyDenied,
    /// A key server or token has no such key.
    KeyMissing,
    /// A key server's or token's answer is not a key.
    KeyAnswer,
    /// The token is locked.
    TokenLocked,
    /// A cipher failed its known answers.
    SelfTest,
    /// The key was deactivated or destroyed at its server.
    KeyRevoked,
    /// The administrator's signature is wrong, or another administrator's.
    AdministratorSignature,
    /// The key is not loaded.
    KeyNotLoaded,
    /// The vault's keys were destroyed.
    KeysDestroyed,
    /// A passphrase slot needs more memory or work than is allowed.
    TooDear,
    /// The store shows an outdated state, by the anchor.
    Stale,
    /// The vault is anchored, and its anchor is missing.
    AnchorMissing,
    /// The anchor belongs to another vault, to another state of this one, or to a later version.
    AnchorForeign,
    /// The anchor does not verify.
    AnchorDamaged,
    /// Another process has the anchor open.
    AnchorLocked,
    /// The disk of the anchor fails, or its file was removed.
    AnchorDisk,
    /// The disk of the anchor, or a quota of it, is full.
    AnchorDiskFull,
    /// The disk of the anchor is read-only.
    AnchorDiskReadOnly,
    /// The vault was written since the anchor was last told anything.
    AnchorOlder,
    /// The server that keeps the anchor does not answer.
    AnchorServerDown,
    /// It is not the server that this host has joined, or this host has joined none.
    AnchorServerUntrusted,
    /// The server refuses the anchor to this host, or has none of this vault.
    AnchorServerRefuses,
    /// A rule of the server's policy forbids it.
    AnchorServerForbids,
    /// This mount's session has ended at the server.
    SessionEnded,
    /// The server's state is older than what this host has seen.
    AnchorServerOlder,
    /// The server was restored from a backup, and waits for other hosts' reports.
    AnchorServerRestored,
    /// The server speaks other versions of the protocol.
    AnchorServerVersion,
    /// The server has failed.
    AnchorServerFails,
    /// A bug.
    Internal,
    /// The server does not know the request: it is of another version.
    UnknownRequest,
    /// Anything else, and kinds of another version's server that are unknown here.
    #[serde(other)]
    Other,
}

impl From<&Error> for FaultKind {
    fn from(error: &Error) -> FaultKind {
        host(error)
    }
}

impl From<&ReceiptError> for FaultKind {
    fn from(error: &ReceiptError) -> FaultKind {
        receipt(error)
    }
}

impl From<&VaultError> for FaultKind {
    fn from(error: &VaultError) -> FaultKind {
        vault(error)
    }
}

fn host(error: &Error) -> FaultKind {
    match error {
        Error::At { path: _, source }
        | Error::MadeNotOpen { source }
        | Error::NotTakenBack { path: _, source }
        | Error::PerhapsAtServer { server: _, path: _, source } => host(source),
        Error::Key(e) | Error::CannotSignCopy { lacks: _, source: e } => key(e),
        Error::File(e) => file(e),
        Error::History(e) => history(e),
        Error::Vault(e) => vault(e),
        Error::CannotOpen { dir: _, source }
        | Error::CannotList { dir: _, source }
        | Error::CannotCopySessions { dir: _, source }
        | Error::CannotMakeRoot { source } => vault(source),
        Error::Copy(CopyError::Io { .. } | CopyError::Exchanged { .. }) => FaultKind::Store,
        Error::Copy(CopyError::Stopped) => FaultKind::Interrupted,
        Error::SelfTest(_) => FaultKind::SelfTest,
        Error::Import(e) => import(e),
        Error::NoAnchorPlace | Error::RememberedAnchorGone { .. } => FaultKind::AnchorMissing,
        Error::NotADirectory { .. } | Error::NotAVault { .. } | Error::NoHeader { .. } | Error::HeaderIsKept { .. } => {
            FaultKind::Directory
        }
        Error::DirNotEmpty { .. } | Error::CloneExists { .. } | Error::CloneWithin { .. } => FaultKind::Directory,
        Error::Locked { .. } => FaultKind::Locked,
        Error::Interrupted => FaultKind::Interrupted,
        Error::Usage(_) | Error::Member { .. } | Error::NotADataset | Error::Profile(_) => FaultKind::Usage,
        Error::WithoutAnchor | Error::NotAnchored | Error::Unanchored => FaultKind::Usage,
        Error::SuiteNeedsFull { .. }
        | Error::NotApproved { .. }
        | Error::AnchorInStore { .. }
        | Error::AnchorAtServer { .. }
        | Error::OtherVault { .. }
        | Error::OtherId { .. }
        | Error::NewerKeys { .. }
        | Error::UnverifiedWrite
        | Error::NotPermitted
        | Error::NotWritable
        | Error::ReadOnlyMount
        | Error::SharedMount
        | Error::NotAtServer
        | Error::OfCopiedDataset { .. }
        | Error::NoNetwork { .. }
        | Error::Frozen
        | Error::JobUnderWay
        | Error::NameMax { .. }
        | Error::Snapshot
        | Error::SnapshotOfInterrupted { .. }
        | Error::ZoneNotAhead
        | Error::LostNotEmpty { .. }
        | Error::DatasetInUse { .. }
        | Error::EpochNeeded { .. } => FaultKind::Refused,
        Error::Pins { .. } => FaultKind::KeySource,
        Error::NoZonePin { .. } => FaultKind::AdministratorSignature,
        Error::Backing { .. } => FaultKind::Store,
        Error::NoTurn | Error::NoFurtherTurn => FaultKind::AnchorServerDown,
        Error::UnknownRequest { .. } => FaultKind::UnknownRequest,
        Error::NoRandom(_)
        | Error::StoreReadOnly { .. }
        | Error::Local { .. }
        | Error::CannotSync { .. }
        | Error::NoThread { .. }
        | Error::GarbledRequest
        | Error::Unanswerable { .. }
        | Error::NoJob
        | Error::JobPanicked => FaultKind::Other,
    }
}

fn key(error: &KeyError) -> FaultKind {
    match error {
        KeyError::WrongKey { .. } | KeyError::NoSlotOfKind { .. } => FaultKind::WrongKey,
        KeyError::HeaderAltered | KeyError::KeychainInvalid | KeyError::OtherHeader | KeyError::OlderHeader { .. } => {
            FaultKind::HeaderUnreadable
        }
        KeyError::Header(e) => header(e),
        KeyError::NoSlot { .. } | KeyError::NoEpoch { .. } => FaultKind::Usage,
        KeyError::LastSlot { .. }
        | KeyError::SlotsFull { .. }
        | KeyError::SlotIdsUsedUp
        | KeyError::EpochsUsedUp
        | KeyError::ZoneSuite { .. }
        | KeyError::SuiteNotOblivious { .. }
        | KeyError::DomainNotZone { .. }
        | KeyError::NotAdministrator { .. }
        | KeyError::LastAdministrator { .. }
        | KeyError::NoAdministrator
        | KeyError::HasAdministrator
        | KeyError::NoOuterKey
        | KeyError::NoZoneToShare { .. }
        | KeyError::NewestEpoch { .. }
        | KeyError::OtherEpochs { .. }
        | KeyError::OtherZone
        | KeyError::SharedKey { .. }
        | KeyError::NoParentSlot
        | KeyError::ParentSlot { .. }
        | KeyError::HasParentSlot => FaultKind::Refused,
        KeyError::OtherParent => FaultKind::WrongKey,
        KeyError::SignatureInvalid | KeyError::OtherAdministrator { .. } | KeyError::TokenUnproven { .. } => {
            FaultKind::AdministratorSignature
        }
        KeyError::Destroyed(_) => FaultKind::KeysDestroyed,
        KeyError::NothingToProve => FaultKind::Refused,
        KeyError::Receipt(e) => receipt(e),
        KeyError::History(e) => history(e),
        KeyError::Argon2 { .. }
        | KeyError::Argon2Memory { .. }
        | KeyError::Argon2Work { .. }
        | KeyError::TokenWork { .. } => FaultKind::TooDear,
        KeyError::SlotsTooDear { .. } | KeyError::TokenCannotSign => FaultKind::Refused,
        KeyError::NoRandom(_) => FaultKind::Other,
        KeyError::Source(e) => source(e),
        KeyError::File(e) => file(e),
    }
}

fn receipt(error: &ReceiptError) -> FaultKind {
    match error {
        ReceiptError::Json(_)
        | ReceiptError::Version
        | ReceiptError::Unsigned
        | ReceiptError::OtherKey { .. }
        | ReceiptError::Signature => FaultKind::Damaged,
        ReceiptError::Other => FaultKind::Usage,
    }
}

fn history(error: &HistoryError) -> FaultKind {
    match error {
        HistoryError::Io { .. } => FaultKind::Store,
        HistoryError::NotAFile { .. } | HistoryError::Busy { .. } => FaultKind::HeaderUnwritable,
        HistoryError::Damaged { .. } => FaultKind::Damaged,
    }
}

fn source(error: &SourceError) -> FaultKind {
    match error {
        SourceError::Syntax
        | SourceError::Combination { .. }
        | SourceError::Argument { .. }
        | SourceError::NotMade
        | SourceError::NotDestroyed
        | SourceError::NoServers
        | SourceError::NotAServer
        | SourceError::NotAZone => FaultKind::Usage,
        SourceError::EmptyPassphrase => FaultKind::EmptyPassphrase,
        SourceError::PassphraseTooLong { .. }
        | SourceError::PassphraseNotUtf8
        | SourceError::RawLength
        | SourceError::Hex
        | SourceError::Mismatch
        | SourceError::FileTooLong { .. }
        | SourceError::NoVariable { .. }
        | SourceError::File { .. }
        | SourceError::Terminal { .. }
        | SourceError::Stdin { .. }
        | SourceError::StdinTerminal
        | SourceError::StdinTaken
        | SourceError::Descriptor { .. }
        | SourceError::NoCredentials
        | SourceError::Recovery(_)
        | SourceError::Shares(_)
        | SourceError::Auxiliary { .. } => FaultKind::KeySource,
        SourceError::Server { place: _, fault } => server(fault),
        SourceError::Token(fault) => token(fault),
        SourceError::ZoneShared => FaultKind::Refused,
        SourceError::NoRandom(_) => FaultKind::Other,
    }
}

fn server(fault: &ServerFault) -> FaultKind {
    match fault {
        ServerFault::Unreachable { .. } | ServerFault::Timeout { .. } => FaultKind::KeyServerDown,
        ServerFault::Untrusted { .. } => FaultKind::KeyServerUntrusted,
        ServerFault::Unwelcome { .. } | ServerFault::Denied { .. } | ServerFault::NotPermitted { .. } => {
            FaultKind::KeyDenied
        }
        ServerFault::Missing { .. } | ServerFault::NoObject => FaultKind::KeyMissing,
        ServerFault::ManyObjects | ServerFault::Unnamed | ServerFault::IdGiven => FaultKind::KeySource,
        ServerFault::NameTaken => FaultKind::Refused,
        ServerFault::KeyState(state) => key_state(*state),
        ServerFault::Partly { done: _, fault } => server(fault),
        ServerFault::Lamassu(fault) => lamassu_server(fault),
        ServerFault::Redirect { .. }
        | ServerFault::Status { .. }
        | ServerFault::NotDestroyed(_)
        | ServerFault::NoState
        | ServerFault::NotAKey { .. }
        | ServerFault::KeyFormat { .. }
        | ServerFault::KeyLength { .. }
        | ServerFault::Failed { .. }
        | ServerFault::TooLong { .. }
        | ServerFault::Protocol { .. } => FaultKind::KeyAnswer,
    }
}

fn key_state(state: KeyState) -> FaultKind {
    match state {
        KeyState::PreActive => FaultKind::KeyDenied,
        KeyState::Deactivated | KeyState::Compromised | KeyState::Destroyed => FaultKind::KeyRevoked,
        KeyState::Active | KeyState::Unknown(_) => FaultKind::KeyAnswer,
    }
}

fn token(fault: &TokenFault) -> FaultKind {
    match fault {
        TokenFault::NoModule
        | TokenFault::Module { .. }
        | TokenFault::ManyTokens { .. }
        | TokenFault::ManyObjects { .. }
        | TokenFault::Unsuitable
        | TokenFault::NoPin => FaultKind::KeySource,
        TokenFault::NoToken | TokenFault::NoObject { .. } => FaultKind::KeyMissing,
        TokenFault::WrongPin { .. } => FaultKind::KeyDenied,
        TokenFault::PinLocked => FaultKind::TokenLocked,
        TokenFault::Failed { .. } | TokenFault::NotDestroyed { .. } => FaultKind::KeyAnswer,
    }
}

fn file(error: &FileError) -> FaultKind {
    match error {
        FileError::Missing { .. } | FileError::NotAFile { .. } => FaultKind::HeaderUnreadable,
        FileError::Header { path: _, source } => header(source),
        FileError::Exists { .. } | FileError::Busy { .. } => FaultKind::HeaderUnwritable,
        FileError::Read { .. } => FaultKind::HeaderUnreadable,
        FileError::Write { .. } => FaultKind::HeaderUnwritable,
        FileError::Witness { path: _, source } => witness(&**source),
    }
}

fn header(error: &HeaderError) -> FaultKind {
    match error {
        HeaderError::TooLarge { .. }
        | HeaderError::Json(_)
        | HeaderError::WrongFormat { .. }
        | HeaderError::Version { .. }
        | HeaderError::Feature { .. }
        | HeaderError::Member { .. }
        | HeaderError::Argon2Work { .. }
        | HeaderError::DuplicateSlot { .. } => FaultKind::HeaderUnreadable,
    }
}

fn vault(error: &VaultError) -> FaultKind {
    match error {
        VaultError::NotFound | VaultError::NotDirectory => FaultKind::NotFound,
        VaultError::Invalid | VaultError::InvalidName => FaultKind::Usage,
        VaultError::Exists
        | VaultError::IsDirectory
        | VaultError::NotEmpty
        | VaultError::NameTooLong
        | VaultError::ReadOnly
        | VaultError::BadHandle
        | VaultError::Stale
        | VaultError::NoAttribute
        | VaultError::NoData
        | VaultError::Unsupported
        | VaultError::NoRandom(_) => FaultKind::Other,
        VaultError::Locked => FaultKind::Locked,
        VaultError::KeyNotLoaded => FaultKind::KeyNotLoaded,
        VaultError::OtherDataset | VaultError::DatasetRoot | VaultError::Frozen => FaultKind::Refused,
        VaultError::FreezeLost => FaultKind::SessionEnded,
        VaultError::Damaged { .. } => FaultKind::Damaged,
        VaultError::Refused(_) => FaultKind::Refused,
        VaultError::Outdated { .. } => FaultKind::Stale,
        VaultError::Anchor(e) => anchor(e),
        VaultError::Store(e) => store(e),
        VaultError::Io { op: _, source } => io(source),
    }
}

/// The reaction to an error of an anchor.
pub(crate) fn anchor(error: &AnchorError) -> FaultKind {
    match error {
        AnchorError::Missing { .. } => FaultKind::AnchorMissing,
        AnchorError::Foreign | AnchorError::OtherProperties { .. } | AnchorError::Version { .. } => {
            FaultKind::AnchorForeign
        }
        AnchorError::Locked { .. } => FaultKind::AnchorLocked,
        AnchorError::Older { .. } => FaultKind::AnchorOlder,
        AnchorError::Empty | AnchorError::Damaged { .. } | AnchorError::Unreadable { .. } | AnchorError::Broken => {
            FaultKind::AnchorDamaged
        }
        AnchorError::Io { op: _, path: _, source } => match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => FaultKind::AnchorDiskFull,
            Some(libc::EROFS) => FaultKind::AnchorDiskReadOnly,
            _ => FaultKind::AnchorDisk,
        },
        AnchorError::Gone { .. } => FaultKind::AnchorDisk,
        AnchorError::Server { server: _, fault } => match fault {
            AnchorServerFault::Unreachable { .. } => FaultKind::AnchorServerDown,
            AnchorServerFault::Untrusted { .. } | AnchorServerFault::NotJoined { .. } => {
                FaultKind::AnchorServerUntrusted
            }
            AnchorServerFault::Refused { .. } | AnchorServerFault::UnknownVault => FaultKind::AnchorServerRefuses,
            AnchorServerFault::Policy { .. } => FaultKind::AnchorServerForbids,
            AnchorServerFault::InUse { .. } => FaultKind::AnchorLocked,
            AnchorServerFault::Ended => FaultKind::SessionEnded,
            AnchorServerFault::Restored { .. } => FaultKind::AnchorServerRestored,
            AnchorServerFault::Older { .. } => FaultKind::AnchorServerOlder,
            AnchorServerFault::Version { .. } => FaultKind::AnchorServerVersion,
            AnchorServerFault::Failed { .. } => FaultKind::AnchorServerFails,
        },
        AnchorError::Exists { .. } | AnchorError::NotPrivate { .. } => FaultKind::Refused,
        AnchorError::Unknown { .. } | AnchorError::Order { .. } => FaultKind::Internal,
    }
}

fn import(error: &ImportError) -> FaultKind {
    match error {
        ImportError::Older { .. } => FaultKind::Refused,
        ImportError::Export(ExportError::Anchor(e)) => anchor(e),
        ImportError::Export(ExportError::Version { .. }) => FaultKind::AnchorForeign,
        ImportError::Export(ExportError::NotAnExport | ExportError::Damaged { .. } | ExportError::Unauthentic) => {
            FaultKind::AnchorDamaged
        }
        ImportError::Export(ExportError::Io { .. }) => FaultKind::Other,
    }
}

/// An error of a witness is always one of this crate.
fn witness(error: &(dyn std::error::Error + Send + Sync + 'static)) -> FaultKind {
    error.downcast_ref::<Error>().map_or(FaultKind::Other, host)
}

/// An error of the store, unless it carries one of the anchor: a session begins in both.
fn io(error: &std::io::Error) -> FaultKind {
    let inner = error.get_ref();
    match inner.and_then(|inner| inner.downcast_ref()) {
        Some(error) => anchor(error),
        None => inner.and_then(|inner| inner.downcast_ref()).map_or(FaultKind::Store, vault),
    }
}

fn store(error: &StoreError) -> FaultKind {
    match error {
        StoreError::Damaged(damage) if damage.kind == DamageKind::Stale => FaultKind::Stale,
        StoreError::Anchor(e) => anchor(e),
        StoreError::Damaged(_) => FaultKind::Damaged,
        StoreError::Io { op: _, offset: _, source } => io(source),
        StoreError::NotApproved(_) => FaultKind::Refused,
        StoreError::NotEvaluated(e) => lamassu_server(&e.fault),
        StoreError::ReadOnly | StoreError::TooLarge | StoreError::NoRandom(_) => FaultKind::Other,
    }
}

fn lamassu_server(fault: &KeyServerFault) -> FaultKind {
    match fault {
        KeyServerFault::Unreachable { .. } => FaultKind::KeyServerDown,
        KeyServerFault::Untrusted { .. } => FaultKind::KeyServerUntrusted,
        KeyServerFault::NotJoined | KeyServerFault::Refused { .. } | KeyServerFault::Limited { .. } => {
            FaultKind::KeyDenied
        }
        KeyServerFault::Unknown => FaultKind::KeyMissing,
        KeyServerFault::Exists => FaultKind::Refused,
        KeyServerFault::Retired | KeyServerFault::Deleted => FaultKind::KeyRevoked,
        KeyServerFault::Version { .. } => FaultKind::AnchorServerVersion,
        KeyServerFault::KeepsNone | KeyServerFault::Failing { .. } | KeyServerFault::Wrong(_) => FaultKind::KeyAnswer,
        KeyServerFault::NoRandom => FaultKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_says_of_the_store_is_not_damage() {
        let io = || std::io::Error::from_raw_os_error(libc::EIO);
        assert_eq!(vault(&VaultError::Io { op: "x", source: io() }), FaultKind::Store);
        assert_eq!(store(&StoreError::Io { op: "x", offset: 0, source: io() }), FaultKind::Store);
    }

    #[test]
    fn a_kind_of_another_version_is_read_as_something_else() {
        let read = |text: &str| serde_json::from_str::<FaultKind>(text).unwrap();
        assert_eq!(read("\"wrong-key\""), FaultKind::WrongKey);
        assert_eq!(read("\"a-new-kind\""), FaultKind::Other);
        assert_eq!(serde_json::to_string(&FaultKind::UnknownRequest).unwrap(), "\"unknown-request\"");
    }
}
