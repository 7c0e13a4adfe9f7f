//! Requests and answers. Members that a program of another version does not know are refused, and said so: both sides are normally one program.
//!
//! A secret travels as a [`Parcel`], sealed under a key of the daemon's that serves once: the library below reads requests into memory that nobody wipes.

use lamassu_keys::Tier;
use lamassu_vault::Rekeyed;
use serde::{Deserialize, Serialize};

/// How the answer to a request begins that the daemon does not know.
pub const UNKNOWN: &str = "the daemon of this mount does not know the request";

/// What a daemon can be asked.
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
    AddSlot { secret: Parcel, label: String, use_only: bool, expires: Option<u64> },
    /// One slot in the place of another: a [`Changed`].
    ChangeSlot { secret: Parcel, slot: u32, label: Option<String>, use_only: bool, expires: Option<u64> },
    /// One slot less; what to tell of it.
    RemoveSlot { slot: u32 },
    /// The epochs of its keychain: [`Epochs`].
    Epochs {},
    /// A new epoch, or those by which a zone is ahead: the [`Epochs`] then.
    Rotate { tier: Tier, leave_zone: bool, zone: Option<ZoneParcel> },
    /// To begin re-keying, unless the same is under way.
    RekeyStart { full: bool, bytes_per_second: Option<u64> },
    /// How far that is: a [`Progress`].
    RekeyStatus {},
    /// To end it.
    RekeyCancel {},
    /// A dataset in the directory that is called; its id.
    CreateDataset {
        /// in hex
        name: String,
        spec: DatasetSpec,
        secret: Option<Parcel>,
    },
    /// The datasets below the directory that is called, behind a path: [`Datasets`].
    ListDatasets { after: Option<String> },
    /// Other properties for the dataset whose root is called; what to tell of a slot that this removes.
    SetDataset { properties: Properties, inherit: Option<bool> },
    /// One dataset less, with all that is in it.
    DestroyDataset { force: bool },
    /// To close the vault whose root is called, and those in it, and let their keys go. Whether it was open.
    Unload {},
    /// To open it again.
    Load { secret: Option<Parcel>, slot: Option<u32> },
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
    pub suite: Option<String>,
    pub block_size: Option<u32>,
    pub names: Option<String>,
    pub properties: Properties,
    /// permission bits of its root
    pub mode: u32,
}

/// Properties that can be changed; `inherit`: what the vault it lies in says.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Properties {
    pub integrity: Option<String>,
    pub cache: Option<String>,
}

/// Some of the datasets.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Datasets {
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
    pub id: String,
    /// `loaded`, `available` (opened when it is entered), `locked` or `unloaded`
    pub state: String,
    /// `inherited`, `own` or `both`
    pub keys: String,
    pub domain: String,
    pub suite: String,
    pub block_size: u32,
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
    /// the exit code for it
    pub code: u8,
    /// for people
    pub message: String,
}

/// What a daemon serves.
#[derive(Debug, Serialize, Deserialize)]
pub struct Status {
    /// of the program
    pub version: String,
    /// process id
    pub pid: u32,
    /// the vault's id, in hex
    pub vault: String,
    /// its directory
    pub dir: String,
    /// whether it writes nothing
    pub read_only: bool,
    /// in it, and in what lies in it
    pub open_files: usize,
}

/// A key that seals one parcel.
#[derive(Serialize, Deserialize)]
pub struct Channel<'a> {
    pub number: u64,
    /// in hex
    pub key: &'a str,
}

/// What opens or shall open a slot, sealed.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parcel {
    pub channel: u64,
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
    pub memory_kib: u32,
    pub passes: u32,
    pub lanes: u32,
}

/// A zone file, and what opens it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZoneParcel {
    pub file: String,
    pub secret: Parcel,
}

/// A slot was changed.
#[derive(Debug, Serialize, Deserialize)]
pub struct Changed {
    pub id: u32,
    /// what to tell of the old one
    pub removed: String,
}

/// What a keychain holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Epochs {
    pub inner: Vec<Epoch>,
    pub outer: Vec<Epoch>,
}

/// An epoch of a key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Epoch {
    pub epoch: u32,
    /// Unix seconds
    pub created: u64,
}

/// A re-keying under way, or at its end.
#[derive(Debug, Serialize, Deserialize)]
pub struct Progress {
    /// bytes of the store that lie ahead in all
    pub total: u64,
    pub done: u64,
    /// what could not be re-keyed: the first of these
    pub failures: Vec<String>,
    pub ended: Option<Ended>,
}

/// How a re-keying ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    Done(Rekeyed),
    Failed(Failed),
}
