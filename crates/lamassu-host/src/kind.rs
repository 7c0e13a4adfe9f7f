//! What a program does about an error: the one table from errors to kinds. The command line has an exit code for each
//! kind, and answers to other processes carry the kind.
//!
//! Every `match` here is exhaustive on purpose: a new error must choose its kind.

use crate::Error;
use lamassu_format::header::HeaderError;
use lamassu_keys::receipt::ReceiptError;
use lamassu_keys::{FileError, HistoryError, KeyError, KeyState, ServerFault, SourceError, TokenFault};
use lamassu_store::StoreError;
use lamassu_vault::VaultError;
use serde::{Deserialize, Serialize};

/// A kind of failure. The names are those on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The caller's: an argument that makes no sense.
    Usage,
    /// No such file or directory in the vault.
    NotFound,
    /// The store below failed.
    Store,
    /// The directory is no vault, or not one that can be used.
    Directory,
    /// A key source did not give a key.
    KeySource,
    /// Another process writes the vault.
    Locked,
    /// The key is good, and opens nothing here.
    WrongKey,
    /// Ended on request before the work was done.
    Interrupted,
    /// An empty passphrase.
    EmptyPassphrase,
    /// The header cannot be read, or makes no sense.
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
    /// A key server or token does not let this caller have the key.
    KeyDenied,
    /// A key server or token has no such key.
    KeyMissing,
    /// A key server or token gave something that is no key.
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
    /// A passphrase slot asks for more memory or work than it gets.
    TooDear,
    /// A bug.
    Internal,
    /// The server does not know the request: it is of another version.
    UnknownRequest,
    /// Anything else, and what a server of another version calls by a name unknown here.
    #[serde(other)]
    Other,
}

impl From<&Error> for Kind {
    fn from(error: &Error) -> Kind {
        host(error)
    }
}

impl From<&ReceiptError> for Kind {
    fn from(error: &ReceiptError) -> Kind {
        receipt(error)
    }
}

impl From<&VaultError> for Kind {
    fn from(error: &VaultError) -> Kind {
        vault(error)
    }
}

fn host(error: &Error) -> Kind {
    match error {
        Error::At { path: _, source } | Error::MadeNotOpen { source } => host(source),
        Error::Key(e) => key(e),
        Error::File(e) => file(e),
        Error::History(e) => history(e),
        Error::Vault(e) => vault(e),
        Error::CannotOpen { dir: _, source } | Error::CannotList { dir: _, source } => vault(source),
        Error::SelfTest(_) => Kind::SelfTest,
        Error::NotADirectory { .. } | Error::NotAVault { .. } | Error::NoHeader { .. } => Kind::Directory,
        Error::Locked { .. } => Kind::Locked,
        Error::Interrupted => Kind::Interrupted,
        Error::Usage(_) | Error::Member { .. } | Error::NotADataset => Kind::Usage,
        Error::SuiteNeedsFull { .. }
        | Error::NotApproved { .. }
        | Error::NotPermitted
        | Error::NotWritable
        | Error::ReadOnlyMount
        | Error::Frozen
        | Error::Snapshot
        | Error::ZoneNotAhead
        | Error::LostNotEmpty { .. }
        | Error::EpochNeeded { .. } => Kind::Refused,
        Error::Pins { .. } => Kind::KeySource,
        Error::NoZonePin { .. } => Kind::AdministratorSignature,
        Error::Backing { .. } => Kind::Store,
        Error::UnknownRequest { .. } => Kind::UnknownRequest,
        Error::NoRandom(_)
        | Error::StoreReadOnly { .. }
        | Error::Local { .. }
        | Error::CannotSync { .. }
        | Error::NoThread { .. }
        | Error::GarbledRequest
        | Error::Unanswerable { .. }
        | Error::NoRekey
        | Error::RekeyPanicked => Kind::Other,
    }
}

fn key(error: &KeyError) -> Kind {
    match error {
        KeyError::WrongKey { .. } | KeyError::NoSlotOfKind { .. } => Kind::WrongKey,
        KeyError::HeaderAltered | KeyError::KeychainInvalid | KeyError::OlderHeader { .. } => Kind::HeaderUnreadable,
        KeyError::Header(e) => header(e),
        KeyError::NoSlot { .. } | KeyError::NoEpoch { .. } => Kind::Usage,
        KeyError::LastSlot { .. }
        | KeyError::SlotsFull { .. }
        | KeyError::SlotIdsUsedUp
        | KeyError::EpochsUsedUp
        | KeyError::ZoneSuite { .. }
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
        | KeyError::HasParentSlot => Kind::Refused,
        KeyError::OtherParent => Kind::WrongKey,
        KeyError::SignatureInvalid | KeyError::OtherAdministrator { .. } => Kind::AdministratorSignature,
        KeyError::Destroyed(_) => Kind::KeysDestroyed,
        KeyError::NothingToProve => Kind::Refused,
        KeyError::Receipt(e) => receipt(e),
        KeyError::History(e) => history(e),
        KeyError::Argon2 { .. } | KeyError::Argon2Memory { .. } | KeyError::Argon2Work { .. } => Kind::TooDear,
        KeyError::SlotsTooDear { .. } => Kind::Refused,
        KeyError::NoRandom(_) => Kind::Other,
        KeyError::OtherHeader => Kind::Internal,
        KeyError::Source(e) => source(e),
        KeyError::File(e) => file(e),
    }
}

fn receipt(error: &ReceiptError) -> Kind {
    match error {
        ReceiptError::Json(_)
        | ReceiptError::Version
        | ReceiptError::Unsigned
        | ReceiptError::OtherKey { .. }
        | ReceiptError::Signature => Kind::Damaged,
        ReceiptError::Other => Kind::Usage,
    }
}

fn history(error: &HistoryError) -> Kind {
    match error {
        HistoryError::Io { .. } => Kind::Store,
        HistoryError::NotAFile { .. } | HistoryError::Busy { .. } => Kind::HeaderUnwritable,
        HistoryError::Damaged { .. } => Kind::Damaged,
    }
}

fn source(error: &SourceError) -> Kind {
    match error {
        SourceError::Syntax
        | SourceError::Combination { .. }
        | SourceError::Argument { .. }
        | SourceError::NotMade
        | SourceError::NotDestroyed
        | SourceError::NotAZone => Kind::Usage,
        SourceError::EmptyPassphrase => Kind::EmptyPassphrase,
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
        | SourceError::Auxiliary { .. } => Kind::KeySource,
        SourceError::Server { place: _, fault } => server(fault),
        SourceError::Token(fault) => token(fault),
        SourceError::ZoneShared => Kind::Refused,
        SourceError::NoRandom(_) => Kind::Other,
    }
}

fn server(fault: &ServerFault) -> Kind {
    match fault {
        ServerFault::Unreachable { .. } | ServerFault::Timeout { .. } => Kind::KeyServerDown,
        ServerFault::Untrusted { .. } => Kind::KeyServerUntrusted,
        ServerFault::Unwelcome { .. } | ServerFault::Denied { .. } | ServerFault::NotPermitted { .. } => {
            Kind::KeyDenied
        }
        ServerFault::Missing { .. } | ServerFault::NoObject => Kind::KeyMissing,
        ServerFault::ManyObjects | ServerFault::Unnamed | ServerFault::IdGiven => Kind::KeySource,
        ServerFault::NameTaken => Kind::Refused,
        ServerFault::KeyState(state) => key_state(*state),
        ServerFault::Partly { done: _, fault } => server(fault),
        ServerFault::Redirect { .. }
        | ServerFault::Status { .. }
        | ServerFault::NotDestroyed(_)
        | ServerFault::NoState
        | ServerFault::NotAKey { .. }
        | ServerFault::KeyFormat { .. }
        | ServerFault::KeyLength { .. }
        | ServerFault::Failed { .. }
        | ServerFault::TooLong { .. }
        | ServerFault::Protocol { .. } => Kind::KeyAnswer,
    }
}

fn key_state(state: KeyState) -> Kind {
    match state {
        KeyState::PreActive => Kind::KeyDenied,
        KeyState::Deactivated | KeyState::Compromised | KeyState::Destroyed => Kind::KeyRevoked,
        KeyState::Active | KeyState::Unknown(_) => Kind::KeyAnswer,
    }
}

fn token(fault: &TokenFault) -> Kind {
    match fault {
        TokenFault::NoModule
        | TokenFault::Module { .. }
        | TokenFault::ManyTokens { .. }
        | TokenFault::ManyObjects { .. }
        | TokenFault::Unsuitable
        | TokenFault::NoPin => Kind::KeySource,
        TokenFault::NoToken | TokenFault::NoObject { .. } => Kind::KeyMissing,
        TokenFault::WrongPin { .. } => Kind::KeyDenied,
        TokenFault::PinLocked => Kind::TokenLocked,
        TokenFault::Failed { .. } => Kind::KeyAnswer,
    }
}

fn file(error: &FileError) -> Kind {
    match error {
        FileError::Missing { .. } | FileError::NotAFile { .. } => Kind::HeaderUnreadable,
        FileError::Header { path: _, source } => header(source),
        FileError::Exists { .. } | FileError::Busy { .. } => Kind::HeaderUnwritable,
        FileError::Read { .. } => Kind::HeaderUnreadable,
        FileError::Write { .. } => Kind::HeaderUnwritable,
    }
}

fn header(error: &HeaderError) -> Kind {
    match error {
        HeaderError::TooLarge { .. }
        | HeaderError::Json(_)
        | HeaderError::WrongFormat { .. }
        | HeaderError::Version { .. }
        | HeaderError::Feature { .. }
        | HeaderError::Member { .. }
        | HeaderError::Argon2Work { .. }
        | HeaderError::DuplicateSlot { .. } => Kind::HeaderUnreadable,
    }
}

fn vault(error: &VaultError) -> Kind {
    match error {
        VaultError::NotFound | VaultError::NotDirectory => Kind::NotFound,
        VaultError::Invalid | VaultError::InvalidName => Kind::Usage,
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
        | VaultError::NoRandom(_) => Kind::Other,
        VaultError::Locked => Kind::Locked,
        VaultError::KeyNotLoaded => Kind::KeyNotLoaded,
        VaultError::OtherDataset | VaultError::DatasetRoot | VaultError::Frozen => Kind::Refused,
        VaultError::Damaged { .. } => Kind::Damaged,
        VaultError::Refused(_) => Kind::Refused,
        VaultError::Store(e) => store(e),
        VaultError::Io { .. } => Kind::Store,
    }
}

fn store(error: &StoreError) -> Kind {
    match error {
        StoreError::Damaged(_) => Kind::Damaged,
        StoreError::Io { .. } => Kind::Store,
        StoreError::ReadOnly | StoreError::TooLarge | StoreError::NoRandom(_) => Kind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_says_of_the_store_is_not_damage() {
        let io = || std::io::Error::from_raw_os_error(libc::EIO);
        assert_eq!(vault(&VaultError::Io { op: "x", source: io() }), Kind::Store);
        assert_eq!(store(&StoreError::Io { op: "x", offset: 0, source: io() }), Kind::Store);
    }

    #[test]
    fn a_kind_of_another_version_is_read_as_something_else() {
        let read = |text: &str| serde_json::from_str::<Kind>(text).unwrap();
        assert_eq!(read("\"wrong-key\""), Kind::WrongKey);
        assert_eq!(read("\"a-new-kind\""), Kind::Other);
        assert_eq!(serde_json::to_string(&Kind::UnknownRequest).unwrap(), "\"unknown-request\"");
    }
}
