//! Exit codes: the numbers of `docs/cli.md`, and the one table from errors to them.
//!
//! A number keeps its meaning for ever. Every `match` here is exhaustive on purpose: a new kind of error must choose its number.

use crate::fault::Fault;
use lamassu_crypto::selftest::SelfTestFailure;
use lamassu_format::header::HeaderError;
use lamassu_fuse::control::ControlError;
use lamassu_fuse::{MountError, OptionError};
use lamassu_keys::receipt::ReceiptError;
use lamassu_keys::{FileError, HistoryError, KeyError, KeyState, ServerFault, SourceError, TokenFault};
use lamassu_store::StoreError;
use lamassu_store::backend::CopyError;
use lamassu_vault::VaultError;

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    Done = 0,
    Other = 1,
    Usage = 2,
    NotFound = 3,
    Store = 5,
    Dir = 6,
    KeySource = 9,
    Mountpoint = 10,
    Locked = 11,
    WrongKey = 12,
    Interrupted = 15,
    NoFuse = 19,
    EmptyPassphrase = 22,
    HeaderUnreadable = 23,
    HeaderUnwritable = 24,
    Damaged = 26,
    Repaired = 27,
    Refused = 28,
    Undone = 29,
    KeyServerDown = 40,
    KeyServerUntrusted = 41,
    KeyDenied = 42,
    KeyMissing = 43,
    KeyAnswer = 44,
    TokenLocked = 45,
    SelfTest = 46,
    KeyRevoked = 47,
    AdminSignature = 50,
    KeyNotLoaded = 51,
    KeysDestroyed = 52,
    TooDear = 53,
    Internal = 70,
}

impl Code {
    /// Every code, ascending.
    pub const ALL: [Code; 32] = [
        Code::Done,
        Code::Other,
        Code::Usage,
        Code::NotFound,
        Code::Store,
        Code::Dir,
        Code::KeySource,
        Code::Mountpoint,
        Code::Locked,
        Code::WrongKey,
        Code::Interrupted,
        Code::NoFuse,
        Code::EmptyPassphrase,
        Code::HeaderUnreadable,
        Code::HeaderUnwritable,
        Code::Damaged,
        Code::Repaired,
        Code::Refused,
        Code::Undone,
        Code::KeyServerDown,
        Code::KeyServerUntrusted,
        Code::KeyDenied,
        Code::KeyMissing,
        Code::KeyAnswer,
        Code::TokenLocked,
        Code::SelfTest,
        Code::KeyRevoked,
        Code::AdminSignature,
        Code::KeyNotLoaded,
        Code::KeysDestroyed,
        Code::TooDear,
        Code::Internal,
    ];

    /// The code of a number that a process of ours ended with.
    pub fn from_number(number: i32) -> Code {
        Code::ALL.into_iter().find(|c| i32::from(c.number()) == number).unwrap_or(Code::Other)
    }

    pub const fn number(self) -> u8 {
        self as u8
    }

    /// What to do next, as far as the code tells.
    const fn hint(self) -> Option<&'static str> {
        match self {
            Code::NotFound => Some("`lamassu ls DIR` lists what the vault holds"),
            Code::KeySource => Some("`lamassu help init` explains key sources"),
            Code::Locked => Some(
                "unmount it there (to delete lamassu.lock frees nothing); reading goes on beside it: `lamassu mount --read-only`",
            ),
            Code::WrongKey => Some("give another --key SOURCE; `lamassu info DIR` lists the key slots"),
            Code::HeaderUnreadable => Some("put the copy from a backup back: `lamassu key restore BACKUP DIR`"),
            Code::KeyServerDown => {
                Some("try again when the server is up; another slot's key opens the vault meanwhile")
            }
            Code::KeyServerUntrusted => Some("name the CA that signed the server's certificate: #ca=FILE"),
            Code::NoFuse => {
                Some("FUSE needs /dev/fuse and, for others than root, the program fusermount3 (package fuse3)")
            }
            Code::KeyRevoked => Some("another slot's key may open the vault: `lamassu key list DIR` lists the slots"),
            Code::TooDear => Some(
                "`lamassu info DIR` lists the slots: --key-slot N tries one alone, another --key may cost less; --argon2-any-memory gives a slot what it asks for: only if you know who made it",
            ),
            Code::Damaged => Some("`lamassu check DIR` names every damaged file; restore those from a backup"),
            Code::Internal => Some("this is a bug in lamassu: please report it with the command and this message"),
            Code::Done
            | Code::Other
            | Code::Usage
            | Code::Store
            | Code::Dir
            | Code::Mountpoint
            | Code::Interrupted
            | Code::EmptyPassphrase
            | Code::HeaderUnwritable
            | Code::Repaired
            | Code::Refused
            | Code::Undone
            | Code::KeyDenied
            | Code::KeyMissing
            | Code::KeyAnswer
            | Code::TokenLocked
            | Code::SelfTest
            | Code::AdminSignature
            | Code::KeyNotLoaded
            | Code::KeysDestroyed => None,
        }
    }
}

/// What to do next, where the message alone does not say it: as the code has it, unless one of the causes is better served otherwise.
pub fn hint(error: &anyhow::Error) -> Option<&'static str> {
    if is_of_dead_mount(error) {
        return Some(DEAD_MOUNT);
    }
    match error.chain().any(says_what_to_do) {
        true => None,
        false => code_of(error).hint(),
    }
}

const DEAD_MOUNT: &str = "the process that served a mount there is gone: `lamassu umount MOUNTPOINT` takes the dead mount away (of another file \
    system: `fusermount3 -u`)";

/// `ENOTCONN`, as every call to a FUSE mount gives that nobody serves any more.
fn is_of_dead_mount(error: &anyhow::Error) -> bool {
    let says_it_itself = error.chain().any(|cause| matches!(cause.downcast_ref(), Some(Fault::Mountpoint { .. })));
    let mut sources = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    !says_it_itself && sources.any(|source| source.raw_os_error() == Some(libc::ENOTCONN))
}

/// Whether the hint of the code would be wrong beside a cause, or a repetition. Hints are extras: what is not listed here has that of its code.
fn says_what_to_do(cause: &(dyn std::error::Error + 'static)) -> bool {
    let by_fault = |fault: &Fault| {
        matches!(
            fault,
            Fault::DamageLeft { .. }
                | Fault::HistoryDamaged { .. }
                | Fault::NoSuchStored { .. }
                | Fault::LocalPath { .. }
                | Fault::MissingInMount { .. }
                | Fault::RetireMounted { .. }
                | Fault::Umount { .. }
        )
    };
    // Nothing is damaged where a file is missing, or cannot be read by this user.
    let by_file = |file: &FileError| match file {
        FileError::Missing { .. } => true,
        FileError::Read { op: _, path: _, source } => source.kind() == std::io::ErrorKind::PermissionDenied,
        FileError::NotAFile { .. }
        | FileError::Header { .. }
        | FileError::Exists { .. }
        | FileError::Busy { .. }
        | FileError::Write { .. } => false,
    };
    let by_mount = |mount: &MountError| matches!(mount, MountError::HelperRefused(_));
    cause.downcast_ref().is_some_and(by_fault)
        || cause.downcast_ref().is_some_and(by_file)
        || cause.downcast_ref().is_some_and(by_mount)
}

/// The code of an error: that of the first cause in the chain that has one.
pub fn code_of(error: &anyhow::Error) -> Code {
    error.chain().find_map(code_of_cause).unwrap_or(Code::Other)
}

fn code_of_cause(cause: &(dyn std::error::Error + 'static)) -> Option<Code> {
    None.or_else(|| cause.downcast_ref().map(fault))
        .or_else(|| cause.downcast_ref().map(|_: &SelfTestFailure| Code::SelfTest))
        .or_else(|| cause.downcast_ref().map(key))
        .or_else(|| cause.downcast_ref().map(source))
        .or_else(|| cause.downcast_ref().map(file))
        .or_else(|| cause.downcast_ref().map(history))
        .or_else(|| cause.downcast_ref().map(receipt))
        .or_else(|| cause.downcast_ref().map(header))
        .or_else(|| cause.downcast_ref().map(vault))
        .or_else(|| cause.downcast_ref().map(store))
        .or_else(|| cause.downcast_ref().map(mount))
        .or_else(|| cause.downcast_ref().map(option))
        .or_else(|| cause.downcast_ref().map(control))
        .or_else(|| cause.downcast_ref().map(copy))
}

fn fault(error: &Fault) -> Code {
    match error {
        Fault::Usage(_) | Fault::Member { .. } | Fault::PathOutside { .. } => Code::Usage,
        Fault::NotAVault { .. } | Fault::NotADirectory { .. } | Fault::DirNotEmpty { .. } => Code::Dir,
        Fault::NoHeader { .. } | Fault::IsAMount { .. } => Code::Dir,
        Fault::StoreReadOnly { .. } => Code::Other,
        Fault::Unwritten { path: _, code: 0, message: _ } => Code::Other,
        Fault::Unwritten { path: _, code, message: _ } => Code::from_number((*code).into()),
        Fault::CloneExists { .. } | Fault::CloneWithin { .. } => Code::Dir,
        Fault::NoSuchStored { .. } | Fault::MissingInMount { .. } => Code::NotFound,
        Fault::Mountpoint { .. }
        | Fault::MountpointInVault { .. }
        | Fault::NotAMount { .. }
        | Fault::MountBusy { .. } => Code::Mountpoint,
        Fault::Locked { .. } => Code::Locked,
        Fault::NameMax { .. }
        | Fault::SuiteNeedsFull { .. }
        | Fault::OtherVault { .. }
        | Fault::OtherId { .. }
        | Fault::NewerKeys { .. }
        | Fault::NotApproved { .. }
        | Fault::PassthroughOfVault { .. } => Code::Refused,
        Fault::Interrupted => Code::Interrupted,
        Fault::ReaderGone => Code::Done,
        Fault::DamageLeft { .. } | Fault::HistoryDamaged { .. } => Code::Damaged,
        Fault::Repaired { .. } => Code::Repaired,
        Fault::Undone { .. } => Code::Undone,
        Fault::Pins { .. } => Code::KeySource,
        Fault::NoZonePin { .. } => Code::AdminSignature,
        Fault::Unprinted { .. } => Code::Other,
        Fault::LocalPath { path: _, source } => vault(source),
        Fault::Local { .. } | Fault::Moved { .. } | Fault::DaemonKilled { .. } => Code::Other,
        Fault::DeviceNode => Code::Refused,
        Fault::SomeFailed { .. } | Fault::NotAllSeen { .. } => Code::Other,
        // A failure that calls itself success is one all the same.
        Fault::Told { code: 0, message: _ } => Code::Other,
        Fault::Told { code, message: _ } => Code::from_number((*code).into()),
        Fault::GarbledAnswer { .. } | Fault::GarbledRequest | Fault::NoRekey | Fault::RekeyIncomplete => Code::Other,
        Fault::NotADataset | Fault::NoSuchUser { .. } => Code::Usage,
        Fault::NotInAMount { .. } => Code::Mountpoint,
        Fault::AboveNotLoaded { .. } => Code::KeyNotLoaded,
        Fault::NotPermitted
        | Fault::ReadOnlyMount
        | Fault::Frozen
        | Fault::Snapshot
        | Fault::ZoneNotAhead
        | Fault::LostNotEmpty { .. }
        | Fault::EpochNeeded { .. } => Code::Refused,
        Fault::NotRekeyed { .. } => Code::Damaged,
        Fault::RetireMounted { .. } => Code::Locked,
        Fault::LeftAtServer { .. } => Code::Other,
        Fault::Backing { .. } => Code::Store,
        Fault::Umount { .. } => Code::NoFuse,
    }
}

fn key(error: &KeyError) -> Code {
    match error {
        KeyError::WrongKey { .. } | KeyError::NoSlotOfKind { .. } => Code::WrongKey,
        KeyError::HeaderAltered | KeyError::KeychainInvalid => Code::HeaderUnreadable,
        KeyError::Header(e) => header(e),
        KeyError::NoSlot { .. } | KeyError::NoEpoch { .. } => Code::Usage,
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
        | KeyError::HasParentSlot => Code::Refused,
        KeyError::OtherParent => Code::WrongKey,
        KeyError::SignatureInvalid | KeyError::OtherAdministrator { .. } => Code::AdminSignature,
        KeyError::Destroyed(_) => Code::KeysDestroyed,
        KeyError::NothingToProve => Code::Refused,
        KeyError::Receipt(e) => receipt(e),
        KeyError::History(e) => history(e),
        KeyError::Argon2 { .. } | KeyError::Argon2Memory { .. } | KeyError::Argon2Work { .. } => Code::TooDear,
        KeyError::SlotsTooDear { .. } => Code::Refused,
        KeyError::NoRandom(_) => Code::Other,
        KeyError::OtherHeader => Code::Internal,
        KeyError::Source(e) => source(e),
        KeyError::File(e) => file(e),
    }
}

fn receipt(error: &ReceiptError) -> Code {
    match error {
        ReceiptError::Json(_)
        | ReceiptError::Version
        | ReceiptError::Unsigned
        | ReceiptError::OtherKey { .. }
        | ReceiptError::Signature => Code::Damaged,
        ReceiptError::Other => Code::Usage,
    }
}

fn history(error: &HistoryError) -> Code {
    match error {
        HistoryError::Io { .. } => Code::Store,
        HistoryError::NotAFile { .. } | HistoryError::Busy { .. } => Code::HeaderUnwritable,
        HistoryError::Damaged { .. } => Code::Damaged,
    }
}

fn source(error: &SourceError) -> Code {
    match error {
        SourceError::Syntax
        | SourceError::Combination { .. }
        | SourceError::Argument { .. }
        | SourceError::NotMade
        | SourceError::NotDestroyed
        | SourceError::NotAZone => Code::Usage,
        SourceError::EmptyPassphrase => Code::EmptyPassphrase,
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
        | SourceError::Auxiliary { .. } => Code::KeySource,
        SourceError::Server { place: _, fault } => server(fault),
        SourceError::Token(fault) => token(fault),
        SourceError::ZoneShared => Code::Refused,
        SourceError::NoRandom(_) => Code::Other,
    }
}

fn server(fault: &ServerFault) -> Code {
    match fault {
        ServerFault::Unreachable { .. } | ServerFault::Timeout { .. } => Code::KeyServerDown,
        ServerFault::Untrusted { .. } => Code::KeyServerUntrusted,
        ServerFault::Unwelcome { .. } | ServerFault::Denied { .. } | ServerFault::NotPermitted { .. } => {
            Code::KeyDenied
        }
        ServerFault::Missing { .. } | ServerFault::NoObject => Code::KeyMissing,
        ServerFault::ManyObjects | ServerFault::Unnamed | ServerFault::IdGiven => Code::KeySource,
        ServerFault::NameTaken => Code::Refused,
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
        | ServerFault::Protocol { .. } => Code::KeyAnswer,
    }
}

fn key_state(state: KeyState) -> Code {
    match state {
        KeyState::PreActive => Code::KeyDenied,
        KeyState::Deactivated | KeyState::Compromised | KeyState::Destroyed => Code::KeyRevoked,
        KeyState::Active | KeyState::Unknown(_) => Code::KeyAnswer,
    }
}

fn token(fault: &TokenFault) -> Code {
    match fault {
        TokenFault::NoModule
        | TokenFault::Module { .. }
        | TokenFault::ManyTokens { .. }
        | TokenFault::ManyObjects { .. }
        | TokenFault::Unsuitable
        | TokenFault::NoPin => Code::KeySource,
        TokenFault::NoToken | TokenFault::NoObject { .. } => Code::KeyMissing,
        TokenFault::WrongPin { .. } => Code::KeyDenied,
        TokenFault::PinLocked => Code::TokenLocked,
        TokenFault::Failed { .. } => Code::KeyAnswer,
    }
}

fn file(error: &FileError) -> Code {
    match error {
        FileError::Missing { .. } | FileError::NotAFile { .. } => Code::HeaderUnreadable,
        FileError::Header { path: _, source } => header(source),
        FileError::Exists { .. } | FileError::Busy { .. } => Code::HeaderUnwritable,
        FileError::Read { .. } => Code::HeaderUnreadable,
        FileError::Write { .. } => Code::HeaderUnwritable,
    }
}

fn header(error: &HeaderError) -> Code {
    match error {
        HeaderError::TooLarge { .. }
        | HeaderError::Json(_)
        | HeaderError::WrongFormat { .. }
        | HeaderError::Version { .. }
        | HeaderError::Feature { .. }
        | HeaderError::Member { .. }
        | HeaderError::Argon2Work { .. }
        | HeaderError::DuplicateSlot { .. } => Code::HeaderUnreadable,
    }
}

fn vault(error: &VaultError) -> Code {
    match error {
        VaultError::NotFound | VaultError::NotDirectory => Code::NotFound,
        VaultError::Invalid | VaultError::InvalidName => Code::Usage,
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
        | VaultError::NoRandom(_) => Code::Other,
        VaultError::Locked => Code::Locked,
        VaultError::KeyNotLoaded => Code::KeyNotLoaded,
        VaultError::OtherDataset | VaultError::DatasetRoot | VaultError::Frozen => Code::Refused,
        VaultError::Damaged { .. } => Code::Damaged,
        VaultError::Refused(_) => Code::Refused,
        VaultError::Store(e) => store(e),
        VaultError::Io { .. } => Code::Store,
    }
}

fn store(error: &StoreError) -> Code {
    match error {
        StoreError::Damaged(_) => Code::Damaged,
        StoreError::Io { .. } => Code::Store,
        StoreError::ReadOnly | StoreError::TooLarge | StoreError::NoRandom(_) => Code::Other,
    }
}

fn mount(error: &MountError) -> Code {
    match error {
        MountError::Mountpoint { .. } | MountError::NotEmpty(_) | MountError::Busy(_) => Code::Mountpoint,
        MountError::NoFuse(_) | MountError::Mount { .. } | MountError::NoHelper(_) | MountError::HelperRefused(_) => {
            Code::NoFuse
        }
        MountError::KeepAwake(_) => Code::Usage,
        MountError::Session(_) => Code::Other,
        MountError::Close(e) => vault(e),
    }
}

fn option(error: &OptionError) -> Code {
    match error {
        OptionError::Unknown(_) | OptionError::Unsupported(_) | OptionError::BadValue { .. } => Code::Usage,
    }
}

fn control(error: &ControlError) -> Code {
    match error {
        ControlError::NotMounted(_) => Code::Mountpoint,
        ControlError::Io { op: _, source } if source.raw_os_error() == Some(libc::ENOTCONN) => Code::Mountpoint,
        ControlError::AlreadyFrozen
        | ControlError::NotFrozen
        | ControlError::NotPermitted
        | ControlError::TooLong
        | ControlError::Io { .. } => Code::Other,
    }
}

fn copy(error: &CopyError) -> Code {
    match error {
        CopyError::Io { .. } => Code::Store,
        CopyError::Stopped => Code::Interrupted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn the_code_is_found_under_layers_of_context() {
        let deep = Err::<(), _>(KeyError::WrongKey { kind: lamassu_keys::SlotKind::Raw, tried: 1 })
            .context("a")
            .context("b")
            .unwrap_err();
        assert_eq!(code_of(&deep), Code::WrongKey);
        assert_eq!(code_of(&anyhow::anyhow!("no idea")), Code::Other);
        assert_eq!(code_of(&anyhow::Error::from(MountError::Close(VaultError::Locked))), Code::Locked);
    }

    #[test]
    fn hints_are_of_the_cause() {
        let file = |errno| {
            let source = std::io::Error::from_raw_os_error(errno);
            anyhow::Error::from(FileError::Read { op: "open", path: "v/lamassu.vault".into(), source })
        };
        assert!(hint(&file(libc::EIO)).is_some_and(|h| h.contains("key restore")));
        assert_eq!(hint(&file(libc::EACCES)), None);
        assert_eq!(hint(&FileError::Missing { path: "zone".into() }.into()), None);
        let locked = Fault::Locked { dir: "v".into(), place: String::new() };
        assert!(hint(&locked.into()).is_some_and(|h| h.contains("mount --read-only")));
        let gone = || std::io::Error::from_raw_os_error(libc::ENOTCONN);
        let dead = anyhow::Error::from(ControlError::Io { op: "open mount point", source: gone() });
        assert_eq!((code_of(&dead), hint(&dead)), (Code::Mountpoint, Some(DEAD_MOUNT)));
        let dead = Fault::NotADirectory { dir: "m".into(), source: gone() };
        assert_eq!(hint(&dead.into()), Some(DEAD_MOUNT));
        let said = Fault::Mountpoint { path: "m".into(), source: gone() };
        assert!(said.to_string().contains("lamassu umount m") && hint(&said.into()).is_none());
    }

    #[test]
    fn what_a_kernel_says_of_the_store_is_not_damage() {
        let io = || std::io::Error::from_raw_os_error(libc::EIO);
        assert_eq!(vault(&VaultError::Io { op: "x", source: io() }), Code::Store);
        assert_eq!(store(&StoreError::Io { op: "x", offset: 0, source: io() }), Code::Store);
    }

    /// docs/cli.md is what scripts rely on: each code is in its table, and nothing else is.
    #[test]
    fn the_documentation_has_the_same_numbers() {
        let page = include_str!("../../../docs/cli.md");
        let section = page.split("## Exit codes").nth(1).expect("the section");
        let documented: Vec<u8> =
            section.lines().filter_map(|line| line.strip_prefix("| ")?.split(' ').next()?.parse().ok()).collect();
        assert_eq!(documented, Code::ALL.map(Code::number));
    }
}
