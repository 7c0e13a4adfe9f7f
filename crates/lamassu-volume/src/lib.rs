//! Volumes of a vault: disk images, each in a sparse file of the vault (docs/volumes.md).
//!
//! Volumes lie in one directory of the vault, [`DIRECTORY`], each in a file of its name. A snapshot is a copy, by the
//! keys of its blocks, in a file `VOLUME@SNAPSHOT`. The block size of a volume is in a sealed attribute of its file.
//! Calls block; any number of threads may make them.
//!
//! Guarantees: a volume exists completely or not at all, also after a crash; a snapshot is never written; no byte
//! outside a volume's size is read or written.
//!
//! There are no locks here: the vault orders calls.
//!
//! Never: bypasses the vault, has a key, knows a protocol.
//!
//! | module | what |
//! |---|---|
//! | `name` | names of volumes and snapshots |
//! | `held` | entries and open files, which release their references when dropped |
//! | `volumes` | makes, lists, resizes, copies and destroys volumes |
//! | `volume` | an open volume: reads, writes, flushes, holes |
//! | `error` | errors, and the errno of each |

mod error;
mod held;
mod name;
mod volume;
mod volumes;

pub use error::{Result, VolumeError};
pub use name::Name;
pub use volume::{Extent, Info, Run, Volume, Zeros};
pub use volumes::Volumes;

/// The directory of a vault that holds its volumes.
pub const DIRECTORY: &str = ".lamassu-volumes";

/// Most bytes of a volume: 1 PiB. A vault can hold more in one file.
pub const SIZE_MAX: u64 = 1 << 50;

/// The sector size of a volume: the smallest unit in which a client reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub enum BlockSize {
    /// 512: every guest can boot from it.
    B512,
    /// 4096: the smallest unit in which a vault writes.
    B4096,
}

impl BlockSize {
    /// The sector size, in bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            BlockSize::B512 => 512,
            BlockSize::B4096 => 4096,
        }
    }
}

impl From<BlockSize> for u32 {
    fn from(size: BlockSize) -> u32 {
        size.bytes()
    }
}

impl TryFrom<u32> for BlockSize {
    type Error = &'static str;

    fn try_from(bytes: u32) -> Result<Self, &'static str> {
        match bytes {
            512 => Ok(BlockSize::B512),
            4096 => Ok(BlockSize::B4096),
            _ => Err("the block size of a volume is 512 or 4096"),
        }
    }
}
