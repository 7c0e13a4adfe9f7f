//! Volumes of a vault: a block device's worth of data in a sparse file of it (docs/volumes.md).
//!
//! Volumes lie in one directory of the vault, [`DIRECTORY`], each in a file of its name; a snapshot is a copy by the
//! keys of its blocks in a file `VOLUME@SNAPSHOT`. What a volume is beside its bytes (the size of its blocks) is in one
//! sealed attribute of its file. Calls block; any number of threads may make them.
//!
//! Guarantees: a volume is there whole or not at all, also after a crash; a snapshot is never written; no byte outside
//! a volume's size is read or written.
//!
//! Never: reaches around the vault, has a key, knows a protocol.
//!
//! | module | what |
//! |---|---|
//! | `name` | names of volumes and snapshots |
//! | `held` | entries and open files whose references are given back |
//! | `volumes` | made, listed, resized, copied, destroyed |
//! | `volume` | one that is open: reads, writes, flushes, holes |
//! | `error` | what can go wrong, and what a program does about it |

mod error;
mod held;
mod name;
mod volume;
mod volumes;

pub use error::{Result, VolumeError};
pub use name::Name;
pub use volume::{Extent, Info, Run, Volume, Zeros};
pub use volumes::Volumes;

/// Where in a vault its volumes lie.
pub const DIRECTORY: &str = ".lamassu-volumes";

/// Most bytes of a volume: 1 PiB. What a vault can hold in one file is more.
pub const SIZE_MAX: u64 = 1 << 50;

/// Bytes that a client of a volume reads and writes at once: what its sectors are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub enum BlockSize {
    /// 512: what every guest can boot from.
    B512,
    /// 4096: what the vault writes at once.
    B4096,
}

impl BlockSize {
    /// Bytes.
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
