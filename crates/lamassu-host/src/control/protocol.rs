//! Requests and answers, as JSON. A request with an unknown member is refused with the kind `unknown-request`: both
//! sides are normally the same program.
//!
//! A secret is sent as a [`Parcel`], sealed under a key of the server that is used once: a transport may read requests
//! into memory that is not wiped.

use super::counters::{Counted, Operation};
use crate::{Error, FaultKind};
use lamassu_keys::Tier;
use lamassu_vault::Rekeyed;
pub use lamassu_vault::event::Counts as IntegrityCounts;
use serde::{Deserialize, Serialize};
use std::os::unix::fs::MetadataExt;

/// The longest request and the longest answer, in bytes. Every transport must carry that.
pub const MESSAGE_LEN_MAX: usize = (1 << 14) - 16;

/// The caller of a request, as the transport knows it. A transport admits root, the user who started the server, and
/// delegates whom that user named.
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

/// A request to a server. `expires` is in seconds since 1970. A slot with `use_only` opens the vault, but changes no
/// slots and no keys.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Describes the served vault: a [`Status`].
    Status {},
    /// Writes everything to the store, in all vaults there.
    Sync {},
    /// Makes a key for one parcel: a [`Channel`].
    Channel {},
    /// Adds a slot; its id.
    AddSlot {
        /// the new slot's key material
        secret: Parcel,
        /// label
        label: String,
        /// whether it may change nothing
        use_only: bool,
        /// when users are warned to renew it
        expires: Option<u64>,
    },
    /// Replaces a slot: a [`Changed`].
    ChangeSlot {
        /// the new slot's key material
        secret: Parcel,
        /// the slot to replace
        slot: u32,
        /// `None`: the old one's
        label: Option<String>,
        /// whether it may change nothing; `false`: as the old one
        use_only: bool,
        /// when users are warned to renew it
        expires: Option<u64>,
    },
    /// Removes a slot; a description of it.
    RemoveSlot {
        /// its id
        slot: u32,
    },
    /// Lists the epochs of the keychain: [`Epochs`].
    Epochs {},
    /// Starts an epoch, or takes over those by which a zone is ahead: the resulting [`Epochs`].
    Rotate {
        /// which key
        tier: Tier,
        /// whether a key that is shared with a zone may become the vault's own
        leave_zone: bool,
        /// the zone whose epochs are taken over
        zone: Option<ZoneParcel>,
    },
    /// Begins to re-key, unless the same job is under way: the job's number.
    RekeyStart {
        /// also data, not only metadata
        full: bool,
        /// read and written of files; `None`: no limit
        bytes_per_second: Option<u64>,
    },
    /// Begins to change the profile at a path, unless the same job is under way: a [`ProfileStarted`].
    ProfileStart {
        /// plain, below the directory of the call; in hex
        path: String,
        /// the chosen parts
        choice: ChosenProfile,
        /// for a directory: also for what is in it already
        below: bool,
    },
    /// The profile at a path: a [`ShownProfile`].
    Profile {
        /// plain, below the directory of the call; in hex
        path: String,
    },
    /// The progress of a job: a [`Progress`].
    JobStatus {
        /// its number
        job: u64,
    },
    /// Cancels a job.
    JobCancel {
        /// its number
        job: u64,
    },
    /// Makes a dataset in the directory of the call; its id.
    CreateDataset {
        /// in hex
        name: String,
        /// its properties
        spec: Box<DatasetSpec>,
        /// a key of its own
        secret: Option<Parcel>,
    },
    /// Lists the datasets below the directory of the call: [`Datasets`].
    ListDatasets {
        /// only those after this path
        after: Option<String>,
    },
    /// Changes properties of the dataset whose root is called; a description of a slot that this removes.
    SetDataset {
        /// `None` leaves a property unchanged
        properties: Properties,
        /// whether the keys of the vault around it open it; `None`: unchanged
        inherit: Option<bool>,
    },
    /// Removes a dataset with all its content.
    DestroyDataset {
        /// also while files in it are open
        force: bool,
    },
    /// Closes the vault whose root is called, and those in it, and drops their keys; whether it was open.
    Unload {},
    /// Opens it again.
    Load {
        /// `None`: with the keys of the vault around it
        secret: Option<Parcel>,
        /// the one slot to try
        slot: Option<u32>,
    },
}

impl From<&Request> for Operation {
    fn from(request: &Request) -> Operation {
        match request {
            Request::Status {} => Operation::Status,
            Request::Sync {} => Operation::Sync,
            Request::Channel {} => Operation::Channel,
            Request::AddSlot { .. } => Operation::AddSlot,
            Request::ChangeSlot { .. } => Operation::ChangeSlot,
            Request::RemoveSlot { .. } => Operation::RemoveSlot,
            Request::Epochs {} => Operation::Epochs,
            Request::Rotate { .. } => Operation::Rotate,
            Request::RekeyStart { .. } => Operation::RekeyStart,
            Request::ProfileStart { .. } => Operation::ProfileStart,
            Request::Profile { .. } => Operation::Profile,
            Request::JobStatus { .. } => Operation::JobStatus,
            Request::JobCancel { .. } => Operation::JobCancel,
            Request::CreateDataset { .. } => Operation::CreateDataset,
            Request::ListDatasets { .. } => Operation::ListDatasets,
            Request::SetDataset { .. } => Operation::SetDataset,
            Request::DestroyDataset { .. } => Operation::DestroyDataset,
            Request::Unload {} => Operation::Unload,
            Request::Load { .. } => Operation::Load,
        }
    }
}

/// A dataset to make; omitted values are those of the vault around it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatasetSpec {
    /// whether the keys of the vault around it open it
    pub inherit: bool,
    /// label of the slot for a key of its own
    pub label: String,
    /// deduplication domain
    pub domain: Option<String>,
    /// ciphers and hashes
    pub suite: Option<String>,
    /// bytes
    pub block_size: Option<u32>,
    /// `none`, `lz4`, `zstd:LEVEL`
    pub compress: Option<String>,
    /// lengths are rounded up to a multiple of this, bytes
    pub compress_round: Option<u32>,
    /// `encrypted` or `plain`
    pub names: Option<String>,
    /// properties that can be changed later
    pub properties: Properties,
    /// permission bits of its root
    pub mode: u32,
}

/// Properties that can be changed; `inherit` takes the value of the vault around it.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Properties {
    /// `full`, `metadata` or `inherit`
    pub integrity: Option<String>,
    /// `mount`, `none` or `inherit`
    pub cache: Option<String>,
    /// `none`, `lz4`, `zstd:LEVEL`; not for a new dataset
    pub compress: Option<String>,
    /// what lengths are rounded up to, bytes; not of a new dataset
    pub compress_round: Option<u32>,
}

/// A page of a list of datasets.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Datasets {
    /// in the order of their paths
    pub datasets: Vec<Listed>,
    /// whether there are more
    pub more: bool,
    /// directories that could not be read: the first of them
    pub unseen: Vec<Unseen>,
    /// their total number
    pub unseen_count: usize,
}

/// A directory that could not be read.
#[derive(Debug, Serialize, Deserialize)]
pub struct Unseen {
    /// below the directory of the request
    pub path: String,
    /// the reason
    pub text: String,
}

/// A dataset.
#[derive(Debug, Serialize, Deserialize)]
pub struct Listed {
    /// below the directory of the request
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

/// The result of a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer<T> {
    /// Done.
    Done(T),
    /// Failed.
    Failed(Failed),
}

/// Why a request failed.
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

/// A served vault.
#[derive(Debug, Serialize, Deserialize)]
pub struct Status {
    /// of the program
    pub version: String,
    /// process id
    pub pid: u32,
    /// the PID namespace of the process, as [`pid_namespace`] says; `None`: unknown
    pub pid_namespace: Option<u64>,
    /// the vault's id, in hex
    pub vault: String,
    /// its directory
    pub dir: String,
    /// whether it writes nothing
    pub read_only: bool,
    /// number of open files, including those in datasets
    pub open_files: usize,
    /// what the whole server did since its start, by operation; only operations that occurred
    pub operations: Vec<Counted>,
    /// integrity events of the whole server since its start
    pub integrity: IntegrityCounts,
}

/// The PID namespace of this process: process ids are valid only in their own namespace. `None`: there is no /proc.
pub fn pid_namespace() -> Option<u64> {
    std::fs::metadata("/proc/self/ns/pid").ok().map(|of| of.ino())
}

/// A key that seals one parcel.
#[derive(Serialize, Deserialize)]
pub struct Channel<'a> {
    /// its number, for the parcel: 16 random bytes, in hex
    pub number: &'a str,
    /// in hex
    pub key: &'a str,
}

/// Key material for a slot, sealed.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parcel {
    /// number of the channel whose key seals it
    pub channel: String,
    /// kind of the slot
    pub kind: String,
    /// in hex
    pub nonce: String,
    /// in hex
    pub sealed: String,
    /// cost of a passphrase
    pub cost: Cost,
}

/// Cost of Argon2id.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// memory, KiB
    pub memory_kib: u32,
    /// passes over the memory
    pub passes: u32,
    /// threads
    pub lanes: u32,
}

/// A zone file, and its key material.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZoneParcel {
    /// its text
    pub file: String,
    /// key material that opens it
    pub secret: Parcel,
}

/// The result of changing a slot.
#[derive(Debug, Serialize, Deserialize)]
pub struct Changed {
    /// id of the new slot
    pub id: u32,
    /// description of the old slot
    pub removed: String,
}

/// The epochs of a keychain.
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
    /// seconds since 1970
    pub created: u64,
}

/// Chosen parts of a profile, by the names of the command line; omitted parts are unchanged.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChosenProfile {
    /// protection of blocks
    pub protect: Option<String>,
    /// kind of block keys
    pub block_keys: Option<String>,
    /// cipher
    pub cipher: Option<String>,
    /// hash
    pub hash: Option<String>,
}

/// A change of a profile that was begun.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProfileStarted {
    /// its number
    pub job: u64,
    /// the new profile, as text
    pub profile: String,
}

/// The profile of a file, or of new files in a directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShownProfile {
    /// protection of blocks
    pub protect: String,
    /// null: blocks that are stored plain have no keys
    pub block_keys: Option<String>,
    /// null: they are not encrypted
    pub cipher: Option<String>,
    /// hash
    pub hash: String,
    /// whether a change is under way
    pub changing: bool,
}

/// The progress of a job.
#[derive(Debug, Serialize, Deserialize)]
pub struct Progress {
    /// bytes of the store to process in all
    pub total: u64,
    /// bytes processed so far
    pub done: u64,
    /// what could not be rewritten: the first of these
    pub failures: Vec<String>,
    /// what was left unchanged, and why: the first of these
    pub passed_over: Vec<String>,
    /// `None`: it is still running
    pub ended: Option<Ended>,
}

/// How a job ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// It finished, with this result.
    Done(Rekeyed),
    /// It failed.
    Failed(Failed),
}
