//! Requests and answers, as JSON. A request with a member that the server does not know is refused with the kind
//! `unknown-request`: both sides are normally one program.
//!
//! A secret travels as a [`Parcel`], sealed under a key of the server's that serves once: a transport may read requests
//! into memory that is not wiped.

use super::counters::Counted;
use crate::{Error, FaultKind};
use lamassu_keys::Tier;
use lamassu_vault::Rekeyed;
pub use lamassu_vault::event::Counts as IntegrityCounts;
use serde::{Deserialize, Serialize};
use std::os::unix::fs::MetadataExt;

/// The longest request and the longest answer, bytes: what every transport carries.
pub const MESSAGE_LEN_MAX: usize = (1 << 14) - 16;

/// The caller of a request, as the transport knows it. A transport lets through root, the user who started the server,
/// and delegates whom that user named.
#[derive(Clone, Debug)]
pub struct Caller {
    /// user
    pub uid: u32,
    /// group
    pub gid: u32,
    /// all groups, with that one
    pub groups: Vec<u32>,
    /// root, or the user who started the server; a delegate may ask less
    pub is_owner: bool,
}

/// What a server can be asked. `expires` is in Unix seconds; a slot that is `use_only` opens the vault and changes
/// nothing.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Which vault it serves: a [`Status`].
    Status {},
    /// Everything that was written, in all vaults there, into the store.
    Sync {},
    /// A key for one parcel: a [`Channel`].
    Channel {},
    /// One slot more; its id.
    AddSlot {
        /// what shall open it
        secret: Parcel,
        /// for people
        label: String,
        /// whether it may change nothing
        use_only: bool,
        /// when people are told to renew it
        expires: Option<u64>,
    },
    /// One slot in the place of another: a [`Changed`].
    ChangeSlot {
        /// what shall open it
        secret: Parcel,
        /// the other one
        slot: u32,
        /// `None`: as the other one's
        label: Option<String>,
        /// whether it may change nothing; `false`: as the other one
        use_only: bool,
        /// when people are told to renew it
        expires: Option<u64>,
    },
    /// One slot less; what to tell of it.
    RemoveSlot {
        /// its id
        slot: u32,
    },
    /// The epochs of its keychain: [`Epochs`].
    Epochs {},
    /// A new epoch, or those by which a zone is ahead: the [`Epochs`] then.
    Rotate {
        /// of which key
        tier: Tier,
        /// whether a key that is shared with a zone may become the vault's own
        leave_zone: bool,
        /// the zone whose epochs are taken over
        zone: Option<ZoneParcel>,
    },
    /// To begin re-keying, unless the same is under way: the number of the job.
    RekeyStart {
        /// data too, not metadata alone
        full: bool,
        /// read and written of files; `None`: no limit
        bytes_per_second: Option<u64>,
    },
    /// To begin to change the profile at a path, unless the same is under way: a [`ProfileStarted`].
    ProfileStart {
        /// plain, below the directory that is called; in hex
        path: String,
        /// what is chosen
        choice: ChosenProfile,
        /// of a directory: also what is in it already
        below: bool,
    },
    /// The profile at a path: a [`ShownProfile`].
    Profile {
        /// plain, below the directory that is called; in hex
        path: String,
    },
    /// How far a job is: a [`Progress`].
    JobStatus {
        /// its number
        job: u64,
    },
    /// To end it.
    JobCancel {
        /// its number
        job: u64,
    },
    /// A dataset in the directory that is called; its id.
    CreateDataset {
        /// in hex
        name: String,
        /// what it shall be
        spec: DatasetSpec,
        /// a key of its own
        secret: Option<Parcel>,
    },
    /// The datasets below the directory that is called: [`Datasets`].
    ListDatasets {
        /// those behind this path alone
        after: Option<String>,
    },
    /// Other properties for the dataset whose root is called; what to tell of a slot that this removes.
    SetDataset {
        /// those that are `None` stay
        properties: Properties,
        /// whether the keys of the vault it lies in open it; `None`: as now
        inherit: Option<bool>,
    },
    /// One dataset less, with all that is in it.
    DestroyDataset {
        /// also while files in it are open
        force: bool,
    },
    /// To close the vault whose root is called, and those in it, and let their keys go. Whether it was open.
    Unload {},
    /// To open it again.
    Load {
        /// `None`: with the keys of the vault it lies in
        secret: Option<Parcel>,
        /// the one slot to try
        slot: Option<u32>,
    },
}

/// A dataset to be made; what is left out is as in the vault it lies in.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatasetSpec {
    /// whether the keys of the vault it lies in open it
    pub inherit: bool,
    /// of the slot for a key of its own
    pub label: String,
    /// deduplication domain
    pub domain: Option<String>,
    /// ciphers and hashes
    pub suite: Option<String>,
    /// bytes
    pub block_size: Option<u32>,
    /// `none`, `lz4`, `zstd:LEVEL`
    pub compress: Option<String>,
    /// what lengths are rounded up to, bytes
    pub compress_round: Option<u32>,
    /// `encrypted` or `plain`
    pub names: Option<String>,
    /// what can be changed later
    pub properties: Properties,
    /// permission bits of its root
    pub mode: u32,
}

/// Properties that can be changed; `inherit`: what the vault it lies in says.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Properties {
    /// `full`, `metadata` or `inherit`
    pub integrity: Option<String>,
    /// `mount`, `none` or `inherit`
    pub cache: Option<String>,
    /// `none`, `lz4`, `zstd:LEVEL`; not of a new dataset
    pub compress: Option<String>,
}

/// Some of the datasets.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Datasets {
    /// in the order of their paths
    pub datasets: Vec<Listed>,
    /// whether there are others behind them
    pub more: bool,
    /// directories that could not be looked into: the first of these
    pub unseen: Vec<Unseen>,
    /// all of them
    pub unseen_count: usize,
}

/// A directory in which datasets may lie.
#[derive(Debug, Serialize, Deserialize)]
pub struct Unseen {
    /// below the directory asked for
    pub path: String,
    /// why
    pub text: String,
}

/// A dataset.
#[derive(Debug, Serialize, Deserialize)]
pub struct Listed {
    /// below the directory asked for
    pub path: String,
    /// in hex
    pub id: String,
    /// `loaded`, `available` (opened when it is entered), `locked` or `unloaded`
    pub state: String,
    /// `inherited`, `own` or `both`
    pub keys: String,
    /// deduplication domain
    pub domain: String,
    /// ciphers and hashes
    pub suite: String,
    /// bytes
    pub block_size: u32,
    /// `lz4`, `zstd:LEVEL`; null: blocks are not compressed
    pub compress: Option<String>,
    /// `encrypted` or `plain`
    pub names: String,
    /// null: inherited
    pub integrity: Option<String>,
    /// null: inherited
    pub cache: Option<String>,
}

/// How it went.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer<T> {
    /// Well.
    Done(T),
    /// Not well.
    Failed(Failed),
}

/// Why something did not go well.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failed {
    /// for programs
    pub kind: FaultKind,
    /// for people
    pub message: String,
}

impl From<&Error> for Failed {
    fn from(error: &Error) -> Failed {
        Failed { kind: error.into(), message: error.message() }
    }
}

/// What a server serves.
#[derive(Debug, Serialize, Deserialize)]
pub struct Status {
    /// of the program
    pub version: String,
    /// process id
    pub pid: u32,
    /// of which PID namespace, as [`pid_namespace`] says; `None`: unknown
    pub pid_namespace: Option<u64>,
    /// the vault's id, in hex
    pub vault: String,
    /// its directory
    pub dir: String,
    /// whether it writes nothing
    pub read_only: bool,
    /// in it, and in what lies in it
    pub open_files: usize,
    /// what the whole server did since it started, by operation; those that were never done are left out
    pub operations: Vec<Counted>,
    /// what the whole server found not to be as it was written, since it started
    pub integrity: IntegrityCounts,
}

/// The PID namespace of this process: process ids mean something in their own one alone. `None`: there is no /proc.
pub fn pid_namespace() -> Option<u64> {
    std::fs::metadata("/proc/self/ns/pid").ok().map(|of| of.ino())
}

/// A key that seals one parcel.
#[derive(Serialize, Deserialize)]
pub struct Channel<'a> {
    /// to be named in the parcel: 16 random bytes, in hex
    pub number: &'a str,
    /// in hex
    pub key: &'a str,
}

/// What opens or shall open a slot, sealed.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parcel {
    /// number of the one whose key seals it
    pub channel: String,
    /// of the slot
    pub kind: String,
    /// in hex
    pub nonce: String,
    /// in hex
    pub sealed: String,
    /// what a guess at a passphrase shall cost
    pub cost: Cost,
}

/// Cost of Argon2id.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// memory, KiB
    pub memory_kib: u32,
    /// times that memory is gone through
    pub passes: u32,
    /// threads that may do so at once
    pub lanes: u32,
}

/// A zone file, and what opens it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZoneParcel {
    /// its text
    pub file: String,
    /// what opens it
    pub secret: Parcel,
}

/// A slot was changed.
#[derive(Debug, Serialize, Deserialize)]
pub struct Changed {
    /// of the new one
    pub id: u32,
    /// what to tell of the old one
    pub removed: String,
}

/// What a keychain holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Epochs {
    /// of K_in, the oldest first
    pub inner: Vec<Epoch>,
    /// of K_out
    pub outer: Vec<Epoch>,
}

/// An epoch of a key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Epoch {
    /// its number
    pub epoch: u32,
    /// Unix seconds
    pub created: u64,
}

/// What is chosen of a profile, by the names of the command line; what is left out stays.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChosenProfile {
    /// what blocks are protected from
    pub protect: Option<String>,
    /// which keys they have
    pub block_keys: Option<String>,
    /// how they are encrypted
    pub cipher: Option<String>,
    /// how they are hashed
    pub hash: Option<String>,
}

/// A change of a profile was begun.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProfileStarted {
    /// its number
    pub job: u64,
    /// the new profile, for people
    pub profile: String,
}

/// How a file, or what is made in a directory, is protected.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShownProfile {
    /// what blocks are protected from
    pub protect: String,
    /// null: blocks that are stored plain have no keys
    pub block_keys: Option<String>,
    /// null: they are not encrypted
    pub cipher: Option<String>,
    /// how they are hashed
    pub hash: String,
    /// whether a change was begun and not ended
    pub changing: bool,
}

/// A job under way, or at its end.
#[derive(Debug, Serialize, Deserialize)]
pub struct Progress {
    /// bytes of the store that lie ahead in all
    pub total: u64,
    /// of these
    pub done: u64,
    /// what could not be rewritten: the first of these
    pub failures: Vec<String>,
    /// what stays as it is, and why: the first of these
    pub passed_over: Vec<String>,
    /// `None`: it goes on
    pub ended: Option<Ended>,
}

/// How a job ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// With this done.
    Done(Rekeyed),
    /// By an error.
    Failed(Failed),
}
