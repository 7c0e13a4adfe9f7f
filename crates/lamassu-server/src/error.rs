//! The errors of a server, and the exit code of each.

use lamassu_anchor::AnchorError;
use lamassu_keys::{KeyError, SourceError};
use std::io;
use std::path::PathBuf;

/// Errors of a server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The directory has no server's state.
    #[error("{} is not a server's directory: `lamassu-server init DIR` makes one", dir.display())]
    NoServer {
        /// the directory
        dir: PathBuf,
    },
    /// The directory is not empty.
    #[error("{} is not empty: a server, or a backup of one, needs a directory of its own", dir.display())]
    NotEmpty {
        /// the directory
        dir: PathBuf,
    },
    /// Others than the owner may read the directory.
    #[error("{} belongs to another user, or others may read it, and it holds the server's key: `chmod 700` it", dir.display())]
    NotPrivate {
        /// the directory
        dir: PathBuf,
    },
    /// Another process serves the directory.
    #[error("another server runs on {}", dir.display())]
    Running {
        /// the directory
        dir: PathBuf,
    },
    /// The configuration is invalid.
    #[error("{}: {detail}", path.display())]
    Config {
        /// its file
        path: PathBuf,
        /// what is wrong
        detail: String,
    },
    /// The name is not valid for a host.
    #[error(
        "{name:?} is no name of a host: 1 to 63 letters, digits, dots and hyphens, beginning with a letter or digit"
    )]
    HostName {
        /// the name
        name: String,
    },
    /// A host of this name exists.
    #[error("there is a host {name}: `lamassu-server host revoke` it first, or give the new one another name")]
    HostExists {
        /// the name
        name: String,
    },
    /// No host has this name.
    #[error("there is no host {name}; `lamassu-server host list DIR` lists those there are")]
    NoHost {
        /// the name
        name: String,
    },
    /// No vault has this id.
    #[error("no anchor of vault {id} is kept here")]
    NoVault {
        /// the id, hex
        id: String,
    },
    /// No alert has this number.
    #[error("there is no alert {number}: `lamassu-server alerts list DIR` lists those there are")]
    NoAlert {
        /// the number
        number: u64,
    },
    /// The name is not valid for a key.
    #[error(
        "{name:?} is no name of a key: 1 to 63 letters, digits, dots, hyphens and underscores, beginning with a letter or digit"
    )]
    KeyName {
        /// the name
        name: String,
    },
    /// No key has this name.
    #[error("there is no key {name}; `lamassu-server keys list DIR` lists those there are")]
    NoKey {
        /// the name
        name: String,
    },
    /// The stored key does not open, or is another key.
    #[error("key {name} cannot be unwrapped; restore a backup")]
    KeyDamaged {
        /// the name
        name: String,
    },
    /// The key was deleted.
    #[error("key {name} was deleted; nothing brings it back")]
    KeyDeleted {
        /// the name
        name: String,
    },
    /// The key has not been retired.
    #[error(
        "key {name} is in use: retire it first (`lamassu-server keys retire`), and check that no host still needs it"
    )]
    KeyInUse {
        /// the name
        name: String,
    },
    /// A key source failed.
    #[error("{role}: {source}")]
    Source {
        /// what the key is for
        role: &'static str,
        /// the reason
        source: SourceError,
    },
    /// Keys are kept, but no master key is configured.
    #[error("keys are kept here, and server.toml names no `master_key` to unwrap them")]
    NoMasterKey,
    /// No keys are kept, so a master key has nothing to open.
    #[error("no keys are kept here: `master_key` in server.toml makes a server that is started keep some")]
    NoKeys,
    /// The master key does not open the keys.
    #[error("the master key: {0}")]
    MasterKey(KeyError),
    /// The request needs a running server.
    #[error("no server runs on this directory: `lamassu-server run` it first")]
    NotRunning,
    /// A vault is in use.
    #[error("vault {vault} is in use by {by}; `umount` it there, or revoke that host")]
    InUse {
        /// the id, hex
        vault: String,
        /// the hosts
        by: String,
    },
    /// A request of an administrator's client is invalid.
    #[error("the request is invalid: {detail}")]
    Garbled {
        /// the reason
        detail: String,
    },
    /// The server ended, or the connection to it, before its answer was complete.
    #[error("the server ended before it answered: it may have done what was asked. Start it, look, and ask again")]
    Unanswered,
    /// The server reported an error to the client.
    #[error("{message}")]
    Told {
        /// its message
        message: String,
        /// its exit code
        code: u8,
    },
    /// The server cannot listen on the address.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// the address
        address: String,
        /// the system's error
        source: io::Error,
    },
    /// A file operation failed.
    #[error("{op} {}: {source}", path.display())]
    File {
        /// the operation
        op: &'static str,
        /// the file
        path: PathBuf,
        /// the system's error
        source: io::Error,
    },
    /// The database failed.
    #[error("the state in {}: {source}", path.display())]
    Database {
        /// the directory
        path: PathBuf,
        /// redb's error
        source: Box<redb::Error>,
    },
    /// etcd failed.
    #[error("{name}: {detail}")]
    Etcd {
        /// etcd's name
        name: String,
        /// the reason
        detail: String,
    },
    /// Another replica leads, or may lead.
    #[error("this replica does not lead, and changes nothing in {name}")]
    NotLeading {
        /// etcd's name
        name: String,
    },
    /// etcd has no state under this prefix.
    #[error("{name} has no state of a server: `lamassu-server to-etcd DIR` moves that of a directory there")]
    NothingInEtcd {
        /// etcd's name
        name: String,
    },
    /// The state in etcd belongs to servers of another authority.
    #[error(
        "{name} has the state of a server of another authority: give this one another `prefix`, or the directory of a \
         replica of that one"
    )]
    OtherInEtcd {
        /// etcd's name
        name: String,
    },
    /// etcd has a state under this prefix already.
    #[error("{name} has a state of a server already: give this one another `prefix`")]
    FullEtcd {
        /// etcd's name
        name: String,
    },
    /// The directory has a state of its own, in addition to that in etcd.
    #[error(
        "server.toml names {name}, and {} has a state of its own: `lamassu-server to-etcd` moves it there, or take \
         [etcd] out of server.toml",
        dir.display()
    )]
    NotMoved {
        /// etcd's name
        name: String,
        /// the directory
        dir: PathBuf,
    },
    /// The state of this directory is in etcd, and no replica serves here.
    #[error("the state is in {name}, and no leading server runs on this directory: {leader}")]
    Elsewhere {
        /// etcd's name
        name: String,
        /// what is known of the leader
        leader: String,
    },
    /// A row of the database does not parse.
    #[error("the state in {} is damaged: {what}; put a backup back", path.display())]
    Damaged {
        /// the directory
        path: PathBuf,
        /// which row
        what: &'static str,
    },
    /// The chain of the audit log is broken.
    #[error("the audit log was changed: entry {number} does not follow the one before")]
    Chain {
        /// the entry's number
        number: u64,
    },
    /// The audit log has no entry with this head.
    #[error(
        "the audit log has no entry with the head {head}: it was rewritten since that was noted, or no longer has it"
    )]
    NoHead {
        /// the head, hex
        head: String,
    },
    /// The stream of a backup failed.
    #[error("the backup was cut off: {source}; see the server's log")]
    Backup {
        /// the system's error
        source: io::Error,
    },
    /// The policy forbids what was tested.
    #[error("the policy forbids {count} of these: see above")]
    Forbidden {
        /// number of forbidden profiles or files
        count: usize,
    },
    /// The server's data is inconsistent.
    #[error("{count} faults were found: see above; docs/server.md says what to do")]
    Wrong {
        /// number of findings
        count: usize,
    },
    /// An anchor failed.
    #[error(transparent)]
    Anchor(#[from] AnchorError),
    /// A certificate or TLS.
    #[error(transparent)]
    Tls(#[from] lamassu_rpc::TlsError),
    /// A certificate could not be made.
    #[error("a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// The system provides no random numbers.
    #[error("the system gives no random numbers")]
    NoRandom,
    /// Serving has failed.
    #[error("serving: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// A result whose error is a [`ServerError`].
pub type Result<T> = std::result::Result<T, ServerError>;

impl ServerError {
    /// The exit code (`docs/server.md`).
    pub fn code(&self) -> u8 {
        match self {
            ServerError::HostName { .. } | ServerError::KeyName { .. } | ServerError::Garbled { .. } => 2,
            ServerError::NoHost { .. }
            | ServerError::NoVault { .. }
            | ServerError::NoAlert { .. }
            | ServerError::NoKey { .. }
            | ServerError::NoKeys => 3,
            ServerError::File { .. }
            | ServerError::Database { .. }
            | ServerError::Etcd { .. }
            | ServerError::NotLeading { .. }
            | ServerError::Backup { .. }
            | ServerError::Unanswered
            | ServerError::Anchor(AnchorError::Io { .. }) => 5,
            ServerError::NoServer { .. }
            | ServerError::NotEmpty { .. }
            | ServerError::NotPrivate { .. }
            | ServerError::NothingInEtcd { .. }
            | ServerError::OtherInEtcd { .. }
            | ServerError::FullEtcd { .. }
            | ServerError::NotMoved { .. } => 6,
            ServerError::Source { .. } | ServerError::NoMasterKey => 9,
            ServerError::Running { .. }
            | ServerError::NotRunning
            | ServerError::Elsewhere { .. }
            | ServerError::InUse { .. }
            | ServerError::KeyInUse { .. } => 11,
            ServerError::MasterKey(KeyError::WrongKey { .. } | KeyError::NoSlotOfKind { .. }) => 12,
            ServerError::Config { .. } => 13,
            ServerError::Listen { .. } => 14,
            ServerError::Damaged { .. }
            | ServerError::MasterKey(_)
            | ServerError::KeyDamaged { .. }
            | ServerError::Anchor(_)
            | ServerError::Wrong { .. } => 26,
            ServerError::Chain { .. } | ServerError::NoHead { .. } => 30,
            ServerError::HostExists { .. } => 28,
            ServerError::KeyDeleted { .. } => 47,
            ServerError::Forbidden { .. } => 76,
            ServerError::Told { code, .. } => *code,
            ServerError::Tls(_) | ServerError::Certificate(_) | ServerError::NoRandom | ServerError::Serve(_) => 1,
        }
    }

    /// Standard output cannot be written.
    pub fn printing(source: io::Error) -> ServerError {
        ServerError::File { op: "write", path: "standard output".into(), source }
    }

    /// An error of a file.
    pub(crate) fn file(op: &'static str, path: &std::path::Path) -> impl Fn(io::Error) -> ServerError {
        move |source| ServerError::File { op, path: path.to_owned(), source }
    }
}
