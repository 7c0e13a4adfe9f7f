//! What goes wrong, and the exit code of each.

use lamassu_anchor::AnchorError;
use lamassu_keys::{KeyError, SourceError};
use std::io;
use std::path::PathBuf;

/// What goes wrong with a server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Its directory has no server's state.
    #[error("{} is no directory of a server: `lamassu-server init DIR` makes one", dir.display())]
    NoServer {
        /// which
        dir: PathBuf,
    },
    /// Something is there already.
    #[error("{} is not empty: a server, or a backup of one, needs a directory of its own", dir.display())]
    NotEmpty {
        /// which
        dir: PathBuf,
    },
    /// Others may look into it.
    #[error("others own {}, or may look into it, and it holds the server's key: `chmod 700` it", dir.display())]
    NotPrivate {
        /// which
        dir: PathBuf,
    },
    /// Another process serves it.
    #[error("another server runs on {}", dir.display())]
    Running {
        /// which
        dir: PathBuf,
    },
    /// The configuration makes no sense.
    #[error("{}: {detail}", path.display())]
    Config {
        /// its file
        path: PathBuf,
        /// what is wrong
        detail: String,
    },
    /// A name that no host can have.
    #[error(
        "{name:?} is no name of a host: 1 to 63 letters, digits, dots and hyphens, beginning with a letter or digit"
    )]
    HostName {
        /// the name
        name: String,
    },
    /// A host of this name is there.
    #[error("there is a host {name}; revoke it first, or give the new one another name")]
    HostExists {
        /// the name
        name: String,
    },
    /// No host of this name.
    #[error("there is no host {name}; `lamassu-server host list DIR` lists those there are")]
    NoHost {
        /// the name
        name: String,
    },
    /// No vault of this id.
    #[error("no anchor of vault {id} is kept here")]
    NoVault {
        /// the id, hex
        id: String,
    },
    /// No alert of this number.
    #[error("there is no alert {number}: `lamassu-server alerts list DIR` lists those there are")]
    NoAlert {
        /// the number
        number: u64,
    },
    /// A name that no key can have.
    #[error(
        "{name:?} is no name of a key: 1 to 63 letters, digits, dots, hyphens and underscores, beginning with a letter or digit"
    )]
    KeyName {
        /// the name
        name: String,
    },
    /// No key of this name.
    #[error("there is no key {name}; `lamassu-server keys list DIR` lists those there are")]
    NoKey {
        /// the name
        name: String,
    },
    /// What is kept of it does not open, or is another key.
    #[error("key {name} does not open as it was wrapped; put a backup back")]
    KeyDamaged {
        /// the name
        name: String,
    },
    /// It is gone.
    #[error("key {name} was deleted; nothing brings it back")]
    KeyDeleted {
        /// the name
        name: String,
    },
    /// It is given to hosts.
    #[error("key {name} is given to hosts; `lamassu-server keys retire` it first, and see whether anybody misses it")]
    KeyInUse {
        /// the name
        name: String,
    },
    /// A key source gives nothing.
    #[error("{role}: {source}")]
    Source {
        /// what the key is for
        role: &'static str,
        /// why
        source: SourceError,
    },
    /// No master key is configured, and there are keys.
    #[error("keys are kept here, and server.toml has no `master_key` that they are wrapped under")]
    NoMasterKey,
    /// There is nothing that a master key could open.
    #[error("no keys are kept here: `master_key` in server.toml makes a server that is started keep some")]
    NoKeys,
    /// The master key opens nothing.
    #[error("the master key: {0}")]
    MasterKey(KeyError),
    /// That is for a server that runs.
    #[error("no server runs on this directory: `lamassu-server run` it first")]
    NotRunning,
    /// A vault is in use.
    #[error("vault {vault} is in use by {by}; `umount` it there, or revoke that host")]
    InUse {
        /// the id, hex
        vault: String,
        /// by whom
        by: String,
    },
    /// What an administrator's client said makes no sense.
    #[error("the request makes no sense: {detail}")]
    Garbled {
        /// why
        detail: String,
    },
    /// It told the client what is wrong.
    #[error("{message}")]
    Told {
        /// what it said
        message: String,
        /// with which code
        code: u8,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// where
        address: String,
        /// the system's error
        source: io::Error,
    },
    /// A file of it.
    #[error("{op} {}: {source}", path.display())]
    File {
        /// what was tried
        op: &'static str,
        /// which
        path: PathBuf,
        /// the system's error
        source: io::Error,
    },
    /// Its database.
    #[error("the state in {}: {source}", path.display())]
    Database {
        /// which
        path: PathBuf,
        /// what redb says
        source: Box<redb::Error>,
    },
    /// What keeps its state, in place of a database.
    #[error("{name}: {detail}")]
    Etcd {
        /// where
        name: String,
        /// what it says
        detail: String,
    },
    /// Another replica leads by now, or may.
    #[error("this replica does not lead, and changes nothing in {name}")]
    NotLeading {
        /// where
        name: String,
    },
    /// There is no state.
    #[error("{name} has no state of a server: `lamassu-server to-etcd DIR` moves that of a directory there")]
    NothingInEtcd {
        /// where
        name: String,
    },
    /// The state is of other servers.
    #[error(
        "{name} has the state of a server of another authority: give this one another `prefix`, or the directory of a \
         replica of that one"
    )]
    OtherInEtcd {
        /// where
        name: String,
    },
    /// There is a state already.
    #[error("{name} has a state of a server already: give this one another `prefix`")]
    FullEtcd {
        /// where
        name: String,
    },
    /// The directory has a state of its own, beside that in etcd.
    #[error(
        "server.toml names {name}, and {} has a state of its own: `lamassu-server to-etcd` moves it there, or take \
         [etcd] out of server.toml",
        dir.display()
    )]
    NotMoved {
        /// where
        name: String,
        /// the directory
        dir: PathBuf,
    },
    /// The state of this directory is in etcd, and no replica serves here.
    #[error("the state is in {name}, and no server runs on this directory that leads: {leader}")]
    Elsewhere {
        /// where
        name: String,
        /// what is known of who leads
        leader: String,
    },
    /// A row of its database does not parse.
    #[error("the state in {} is damaged: {what}; put a backup back", path.display())]
    Damaged {
        /// which
        path: PathBuf,
        /// which row
        what: &'static str,
    },
    /// The chain of the audit log is broken.
    #[error("the audit log was changed: entry {number} does not go on from the one before")]
    Chain {
        /// which
        number: u64,
    },
    /// It has no such head.
    #[error(
        "the audit log has no entry with the head {head}: it was written anew since that was noted, or no longer has it"
    )]
    NoHead {
        /// hex
        head: String,
    },
    /// The stream of a backup.
    #[error("the backup was cut off: {source}; see the server's log")]
    Backup {
        /// the system's error
        source: io::Error,
    },
    /// The policy forbids what was asked about.
    #[error("the policy forbids {count} of these: see above")]
    Forbidden {
        /// how many
        count: usize,
    },
    /// Something is wrong with what a server keeps.
    #[error("{count} things are wrong: see above; docs/server.md tells what to do")]
    Wrong {
        /// how many
        count: usize,
    },
    /// An anchor's rows make no sense.
    #[error("the anchor {}: {detail}", path.display())]
    BadAnchor {
        /// its file
        path: PathBuf,
        /// why
        detail: String,
    },
    /// An anchor.
    #[error(transparent)]
    Anchor(#[from] AnchorError),
    /// A certificate or TLS.
    #[error(transparent)]
    Tls(#[from] lamassu_rpc::tls::TlsError),
    /// A certificate.
    #[error("a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// The system has no random numbers.
    #[error("the system gives no random numbers")]
    NoRandom,
    /// Serving has failed.
    #[error("serving: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// With a [`ServerError`].
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
            | ServerError::BadAnchor { .. }
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
