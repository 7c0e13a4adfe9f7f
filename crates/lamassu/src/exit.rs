//! Exit codes: the numbers of `docs/cli.md`, and the one table from errors to them.
//!
//! A number keeps its meaning for ever. Every `match` here is exhaustive on purpose: a new kind of error must choose
//! its number.

use crate::fault::{Error, Fault};
use lamassu_access::AccessError;
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_fuse::MountError;
use lamassu_fuse::control::ControlError;
use lamassu_gateway::GatewayError;
use lamassu_host::{Error as HostError, FaultKind};
use lamassu_keys::FileError;
use lamassu_store::StoreError;
use lamassu_vault::VaultError;
use lamassu_volume::VolumeError;

/// Declares [`Code`], with what to do next where the code alone says so.
macro_rules! codes {
    (@hint) => { None };
    (@hint $hint:literal) => { Some($hint) };
    ($($code:ident = $number:literal $(: $hint:literal)?,)*) => {
        /// How the program ends.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Code {
            $($code = $number,)*
        }

        impl Code {
            /// Every code, ascending.
            pub const ALL: &[Code] = &[$(Code::$code,)*];

            /// What to do next, by the code.
            const fn hint(self) -> Option<&'static str> {
                match self {
                    $(Code::$code => codes!(@hint $($hint)?),)*
                }
            }
        }
    };
}

codes! {
    Done = 0,
    Other = 1,
    Usage = 2,
    NotFound = 3: "`lamassu ls DIR` lists what the vault holds",
    Store = 5,
    Dir = 6,
    KeySource = 9: "`lamassu help init` explains key sources",
    Mountpoint = 10,
    Locked = 11:
        "unmount it there (to delete lamassu.lock frees nothing); a vault without an anchor can be read meanwhile: `lamassu mount --read-only`",
    WrongKey = 12: "give another --key SOURCE; `lamassu info DIR` lists the key slots",
    Configuration = 13: "`lamassu gateway config` prints a configuration with every option; --check-config reads one",
    Listen = 14,
    Interrupted = 15,
    NoFuse = 19: "FUSE needs /dev/fuse and, for others than root, the program fusermount3 (package fuse3)",
    NoNbdkit = 20:
        "`lamassu volume export` needs nbdkit (package nbdkit) and its plugin, which `make install` installs; --print-command shows what is run",
    EmptyPassphrase = 22,
    HeaderUnreadable = 23: "put the copy from a backup back: `lamassu key restore BACKUP DIR`",
    HeaderUnwritable = 24,
    Damaged = 26: "`lamassu check DIR` names every damaged file; restore those from a backup",
    Repaired = 27,
    Refused = 28,
    Undone = 29,
    Stale = 30:
        "the store shows something older, or other, than what was written last; if you restored it from a backup: \
         `lamassu anchor accept DIR PATH…`",
    Unverified = 31,
    KeyServerDown = 40: "try again when the server is up; another slot's key opens the vault meanwhile",
    KeyServerUntrusted = 41:
        "name the CA that signed the server's certificate: #ca=FILE; a Lamassu server (server:…) is known by its token: `lamassu host join`",
    KeyDenied = 42,
    KeyMissing = 43,
    KeyAnswer = 44,
    TokenLocked = 45,
    SelfTest = 46,
    KeyRevoked = 47: "another slot's key may open the vault: `lamassu key list DIR` lists the slots",
    AdminSignature = 50,
    KeyNotLoaded = 51,
    KeysDestroyed = 52,
    TooDear = 53:
        "`lamassu info DIR` lists the slots: --key-slot N tries one alone, another --key may cost less; --argon2-any-memory gives a slot what it asks for: only if you know who made it",
    AnchorMissing = 60:
        "name its place with --anchor FILE, or --anchor server://HOST if a server keeps it; on another machine: `lamassu \
         anchor import`; if it is lost: `lamassu anchor rebuild DIR` accepts what the store shows now",
    AnchorForeign = 61: "`lamassu anchor status DIR` tells which vault and which state an anchor is of",
    AnchorDamaged = 62:
        "put an export of it back, another one if it was one (`lamassu anchor import`), or `lamassu anchor \
         rebuild DIR`, which accepts what the store shows now",
    AnchorLocked = 63:
        "another process has the vault open, or works on its anchor: read in the mount; --anchor none reads beside it, \
         unverified",
    AnchorDisk = 64:
        "mend the disk that the anchor lies on (the kernel's log says more), or put its file back, then try again: nothing \
         is lost",
    AnchorOlder = 65:
        "put the newest anchor, or an export of it, back (`lamassu anchor import`); if there is none, `lamassu anchor \
         accept DIR` goes on with this one, and `lamassu check DIR` names what it does not know",
    AnchorServerDown = 66:
        "is the server up, and this host connected to it? The vault is whole; --anchor none reads it unverified",
    AnchorServerUntrusted = 67:
        "`lamassu-server enrol` at the server prints a token; `lamassu host join` here takes it",
    AnchorServerRefuses = 68:
        "at the server, `lamassu-server host list` tells which vaults this host may use, and `host grant` changes that",
    SessionEnded = 69:
        "unmount, and mount again; start a gateway or an export again; `freeze`, `thaw`, `snapshot`, `clone`: freeze again, and make another copy",
    Internal = 70: "this is a bug in lamassu: please report it with the command and this message",
    AnchorServerOlder = 71:
        "do not go on before it is known why: a backup of the server's state that was put back forgets what was \
         written since",
    AnchorServerFails = 72,
    AnchorServerRestored = 73:
        "on each of those hosts run `lamassu umount` (if mounted) and then any command on the vault, for example \
         `lamassu ls`; if a host is gone for good, end its grant: `lamassu-server host grant --not`",
    AnchorDiskFull = 74: "make room on the disk that the anchor lies on, then try again: nothing is lost",
    AnchorDiskReadOnly = 75:
        "have the disk that the anchor lies on mounted for writing (where an error made it read-only, the kernel's log \
         says so), then try again: nothing is lost",
    AnchorServerForbids = 76:
        "`lamassu-server policy test` at the server says what is allowed; what is there can be read: `lamassu cp`, or \
         `mount --read-only`",
    AnchorServerVersion = 77:
        "update the older of the two: the server first, since it also speaks the versions of older hosts",
}

impl Code {
    /// The code of a number with which a process of this program ended.
    pub fn from_number(number: i32) -> Code {
        Code::ALL.iter().copied().find(|c| i32::from(c.number()) == number).unwrap_or(Code::Other)
    }

    pub const fn number(self) -> u8 {
        self as u8
    }
}

/// What to do next, if the message does not say it: the code's hint, unless one of the causes has a better one.
pub fn hint(error: &Error) -> Option<&'static str> {
    if is_of_dead_mount(error) {
        return Some(DEAD_MOUNT);
    }
    if is_in_use_elsewhere(error) {
        return Some(IN_USE_ELSEWHERE);
    }
    match (error.fault(), code_of(error)) {
        (Fault::NotJoined(_), Code::AnchorServerDown) => Some(NOT_JOINED),
        (fault, _) if says_what_to_do(fault) => None,
        (_, code) => code.hint(),
    }
}

const DEAD_MOUNT: &str = "the process that served a mount there is gone: `lamassu umount MOUNTPOINT` takes the dead mount away (of another file \
    system: `fusermount3 -u`)";

const NOT_JOINED: &str =
    "is the server up, and this host connected to it? Then try again: the token is good for one use";

const IN_USE_ELSEWHERE: &str =
    "unmount it there, or wait: a host that was killed or is out of touch loses the vault when its term is over";

/// Whether another host holds a vault whose anchor a server keeps.
fn is_in_use_elsewhere(error: &Error) -> bool {
    let Fault::Host(host) = error.fault() else { return false };
    matches!(
        host.innermost(),
        HostError::Vault(VaultError::Anchor(AnchorError::Server { fault: ServerFault::InUse { .. }, .. }))
    )
}

/// `ENOTCONN`, as every call to a FUSE mount gives once its daemon has ended.
fn is_of_dead_mount(error: &Error) -> bool {
    let says_it_itself = matches!(error.fault(), Fault::Mountpoint { .. });
    let mut sources = error.causes().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    !says_it_itself && sources.any(|source| source.raw_os_error() == Some(libc::ENOTCONN))
}

/// Whether the hint of the code would be wrong for a fault, or a repetition. A fault that is not listed here has the
/// hint of its code.
fn says_what_to_do(fault: &Fault) -> bool {
    match fault {
        Fault::DamageLeft { .. }
        | Fault::ScrubStale { .. }
        | Fault::CheckStale { .. }
        | Fault::DatasetsStale { .. }
        | Fault::HistoryDamaged { .. }
        | Fault::NoSuchStored { .. }
        | Fault::LocalPath { .. }
        | Fault::MissingInMount { .. }
        | Fault::RetireMounted { .. }
        | Fault::OtherDigest { .. }
        | Fault::Umount { .. }
        | Fault::FailingMount { .. }
        | Fault::Volume(VolumeError::NotFound(_))
        | Fault::Access(_)
        | Fault::Gateway(GatewayError::InUse(_))
        | Fault::NbdkitEnded { .. }
        | Fault::NbdkitKilled { .. }
        | Fault::Mount(MountError::HelperRefused(_)) => true,
        Fault::Host(host) => match host.innermost() {
            HostError::File(FileError::Missing { .. })
            | HostError::RememberedAnchorGone { .. }
            | HostError::Vault(VaultError::Store(StoreError::NotEvaluated(_))) => true,
            // A file that this user may not read is no damage.
            HostError::File(FileError::Read { op: _, path: _, source }) => {
                source.kind() == std::io::ErrorKind::PermissionDenied
            }
            _ => false,
        },
        _ => false,
    }
}

/// The code of an error: that of its fault.
pub fn code_of(error: &Error) -> Code {
    code(error.fault())
}

impl From<FaultKind> for Code {
    fn from(kind: FaultKind) -> Code {
        match kind {
            FaultKind::Usage => Code::Usage,
            FaultKind::NotFound => Code::NotFound,
            FaultKind::Store => Code::Store,
            FaultKind::Directory => Code::Dir,
            FaultKind::KeySource => Code::KeySource,
            FaultKind::Locked => Code::Locked,
            FaultKind::WrongKey => Code::WrongKey,
            FaultKind::Interrupted => Code::Interrupted,
            FaultKind::EmptyPassphrase => Code::EmptyPassphrase,
            FaultKind::HeaderUnreadable => Code::HeaderUnreadable,
            FaultKind::HeaderUnwritable => Code::HeaderUnwritable,
            FaultKind::Damaged => Code::Damaged,
            FaultKind::Refused => Code::Refused,
            FaultKind::KeyServerDown => Code::KeyServerDown,
            FaultKind::KeyServerUntrusted => Code::KeyServerUntrusted,
            FaultKind::KeyDenied => Code::KeyDenied,
            FaultKind::KeyMissing => Code::KeyMissing,
            FaultKind::KeyAnswer => Code::KeyAnswer,
            FaultKind::TokenLocked => Code::TokenLocked,
            FaultKind::SelfTest => Code::SelfTest,
            FaultKind::KeyRevoked => Code::KeyRevoked,
            FaultKind::AdministratorSignature => Code::AdminSignature,
            FaultKind::KeyNotLoaded => Code::KeyNotLoaded,
            FaultKind::KeysDestroyed => Code::KeysDestroyed,
            FaultKind::TooDear => Code::TooDear,
            FaultKind::Stale => Code::Stale,
            FaultKind::AnchorMissing => Code::AnchorMissing,
            FaultKind::AnchorForeign => Code::AnchorForeign,
            FaultKind::AnchorDamaged => Code::AnchorDamaged,
            FaultKind::AnchorLocked => Code::AnchorLocked,
            FaultKind::AnchorDisk => Code::AnchorDisk,
            FaultKind::AnchorDiskFull => Code::AnchorDiskFull,
            FaultKind::AnchorDiskReadOnly => Code::AnchorDiskReadOnly,
            FaultKind::AnchorOlder => Code::AnchorOlder,
            FaultKind::AnchorServerDown => Code::AnchorServerDown,
            FaultKind::AnchorServerUntrusted => Code::AnchorServerUntrusted,
            FaultKind::AnchorServerRefuses => Code::AnchorServerRefuses,
            FaultKind::AnchorServerForbids => Code::AnchorServerForbids,
            FaultKind::AnchorServerVersion => Code::AnchorServerVersion,
            FaultKind::SessionEnded => Code::SessionEnded,
            FaultKind::AnchorServerOlder => Code::AnchorServerOlder,
            FaultKind::AnchorServerFails => Code::AnchorServerFails,
            FaultKind::AnchorServerRestored => Code::AnchorServerRestored,
            FaultKind::Internal => Code::Internal,
            FaultKind::UnknownRequest | FaultKind::Other => Code::Other,
        }
    }
}

fn code(fault: &Fault) -> Code {
    match fault {
        Fault::Host(e) | Fault::NotJoined(e) => FaultKind::from(e).into(),
        Fault::Mount(e) => mount(e),
        Fault::MountOption(_) => Code::Usage,
        Fault::Gateway(e) => gateway(e),
        Fault::Access(e) => access(e),
        Fault::Volume(e) => FaultKind::from(e).into(),
        Fault::NoNbdkit { .. }
        | Fault::NoPlugin { .. }
        | Fault::NbdkitEnded { .. }
        | Fault::NbdkitKilled { .. }
        | Fault::SocketInUse { .. } => Code::NoNbdkit,
        Fault::Control(e) => control(e),
        Fault::System(_) | Fault::Json(_) | Fault::Other(_) | Fault::WorkerKilled { .. } => Code::Other,
        Fault::NoRegularFile { .. } | Fault::TooDeep { .. } | Fault::LiesInItself { .. } => Code::Other,
        Fault::PathOutside { .. } => Code::Usage,
        Fault::IsAMount { .. } => Code::Dir,
        Fault::Unwritten { path: _, failed } => failed.kind.into(),
        Fault::NoSuchStored { .. } | Fault::MissingInMount { .. } => Code::NotFound,
        Fault::Mountpoint { .. }
        | Fault::MountpointInVault { .. }
        | Fault::NotAMount { .. }
        | Fault::MountBusy { .. } => Code::Mountpoint,
        Fault::NotThatDataset { .. }
        | Fault::NotAScrubState { .. }
        | Fault::ScrubStateOfOthers { .. }
        | Fault::OpenStore { .. } => Code::Refused,
        Fault::ReaderGone => Code::Done,
        Fault::DamageLeft { .. } | Fault::HistoryDamaged { .. } => Code::Damaged,
        Fault::Repaired { .. } => Code::Repaired,
        Fault::Undone { .. } => Code::Undone,
        Fault::ScrubStale { .. } | Fault::CheckStale { .. } | Fault::DatasetsStale { .. } => Code::Stale,
        Fault::ScrubUnverified { .. } => Code::Unverified,
        Fault::ScrubUnreadable { .. } | Fault::DatasetExchanged { .. } | Fault::FailingMount { .. } => Code::Store,
        Fault::Unprinted { .. } => Code::Other,
        Fault::LocalPath { path: _, source } => FaultKind::from(source).into(),
        Fault::Moved { .. } | Fault::DaemonKilled { .. } => Code::Other,
        Fault::DeviceNode => Code::Refused,
        Fault::SomeFailed { .. } | Fault::NotAllSeen { .. } => Code::Other,
        Fault::Told(failed) => failed.kind.into(),
        Fault::GarbledAnswer { .. } | Fault::JobIncomplete => Code::Other,
        Fault::OtherDigest { .. } => Code::AnchorForeign,
        Fault::NoSuchUser { .. } => Code::Usage,
        Fault::NotInAMount { .. } => Code::Mountpoint,
        Fault::AboveNotLoaded { .. } | Fault::NotVerified { .. } => Code::KeyNotLoaded,
        Fault::NotRewritten { .. } => Code::Damaged,
        Fault::RetireMounted { .. } => Code::Locked,
        Fault::LeftAtServer { .. } => Code::Other,
        Fault::Umount { .. } => Code::NoFuse,
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
        MountError::Close(e) => FaultKind::from(e).into(),
    }
}

fn gateway(error: &GatewayError) -> Code {
    match error {
        GatewayError::Config { .. } | GatewayError::NotPrivate(_) | GatewayError::Tls { .. } => Code::Configuration,
        GatewayError::NotOwn(_) => Code::Configuration,
        GatewayError::InUse(_) => Code::Locked,
        GatewayError::File { .. } => Code::Configuration,
        GatewayError::Listen { .. } => Code::Listen,
        GatewayError::System { .. } => Code::Other,
        GatewayError::Provider { backend: _, detail: _, may_pass } => {
            if *may_pass {
                Code::Store
            } else {
                Code::Configuration
            }
        }
        GatewayError::Buckets { path: _, source } | GatewayError::Unfit { backend: _, source } => {
            FaultKind::from(source).into()
        }
    }
}

fn access(error: &AccessError) -> Code {
    match error {
        AccessError::Name(_) | AccessError::NotDeclared(_) | AccessError::Value { .. } => Code::Usage,
        AccessError::Key { .. } | AccessError::Argument(_) => Code::Usage,
        AccessError::Rule { .. } => Code::Configuration,
        AccessError::NotFound { .. } => Code::NotFound,
        AccessError::Unpublished | AccessError::InUse { .. } | AccessError::NotPrivate(_) => Code::Refused,
        AccessError::Document { .. } | AccessError::Damaged { .. } | AccessError::Chain { .. } => Code::Damaged,
        AccessError::NotEmpty(_) | AccessError::Missing(_) => Code::Dir,
        AccessError::Locked(_) => Code::Locked,
        AccessError::Database { .. } | AccessError::File { .. } => Code::Other,
        // These are the host's.
        AccessError::MasterKey(_) | AccessError::NoRandom(_) => Code::Other,
    }
}

fn control(error: &ControlError) -> Code {
    match error {
        ControlError::NotMounted(_) | ControlError::Strangers(_) => Code::Mountpoint,
        ControlError::LeadsAway { .. } => Code::Refused,
        ControlError::Io { op: _, source } if source.raw_os_error() == Some(libc::ENOTCONN) => Code::Mountpoint,
        ControlError::NotPermitted => Code::Refused,
        ControlError::FreezeLost => Code::SessionEnded,
        ControlError::AlreadyFrozen
        | ControlError::DatasetsChange
        | ControlError::NotFrozen
        | ControlError::TooLong
        | ControlError::Io { .. } => Code::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Context;
    use lamassu_keys::KeyError;
    use lamassu_vault::VaultError;

    #[test]
    fn the_code_is_found_under_layers_of_context() {
        let deep = Err::<(), _>(KeyError::WrongKey { kind: lamassu_keys::SlotKind::Raw, tried: 1 })
            .context("a")
            .context("b")
            .unwrap_err();
        assert_eq!(code_of(&deep), Code::WrongKey);
        assert_eq!(code_of(&Fault::Other("no idea").into()), Code::Other);
        assert_eq!(code_of(&crate::fault::Error::from(MountError::Close(VaultError::Locked))), Code::Locked);
    }

    #[test]
    fn hints_are_of_the_cause() {
        let file = |errno| {
            let source = std::io::Error::from_raw_os_error(errno);
            crate::fault::Error::from(FileError::Read { op: "open", path: "v/lamassu.vault".into(), source })
        };
        assert!(hint(&file(libc::EIO)).is_some_and(|h| h.contains("key restore")));
        assert_eq!(hint(&file(libc::EACCES)), None);
        assert_eq!(hint(&FileError::Missing { path: "zone".into() }.into()), None);
        let locked = lamassu_host::Error::Locked { dir: "v".into(), mountpoint: None };
        assert!(hint(&locked.into()).is_some_and(|h| h.contains("mount --read-only")));
        let gone = || std::io::Error::from_raw_os_error(libc::ENOTCONN);
        let dead = crate::fault::Error::from(ControlError::Io { op: "open mount point", source: gone() });
        assert_eq!((code_of(&dead), hint(&dead)), (Code::Mountpoint, Some(DEAD_MOUNT)));
        let dead = HostError::NotADirectory { dir: "m".into(), source: gone() };
        assert_eq!(hint(&dead.into()), Some(DEAD_MOUNT));
        let said = Fault::Mountpoint { path: "m".into(), source: gone() };
        assert!(said.to_string().contains("lamassu umount m") && hint(&said.into()).is_none());
        // Of a vault there is no talk yet.
        let fault = ServerFault::Unreachable { detail: "refused".into() };
        let down = HostError::Vault(VaultError::Anchor(AnchorError::Server { server: "s".into(), fault }));
        let down = crate::fault::Error::from(Fault::NotJoined(down));
        assert_eq!((code_of(&down), hint(&down)), (Code::AnchorServerDown, Some(NOT_JOINED)));
    }

    /// Scripts rely on docs/cli.md: its table has each code, and no others.
    #[test]
    fn the_documentation_has_the_same_numbers() {
        let page = include_str!("../../../docs/cli.md");
        let section = page.split("## Exit codes").nth(1).expect("the section");
        let documented: Vec<u8> =
            section.lines().filter_map(|line| line.strip_prefix("| ")?.split(' ').next()?.parse().ok()).collect();
        assert_eq!(documented, Code::ALL.iter().map(|code| code.number()).collect::<Vec<_>>());
    }
}
