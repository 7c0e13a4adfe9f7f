//! An open volume.

use crate::held::Open;
use crate::{BlockSize, Name, Result, VolumeError};
use lamassu_vault::{Fallocate, FileSystem, Time};

/// How much one request for the layout of a volume goes through: data, of which the vault checks each block, and what
/// pages of punched blocks cover. Others wait for it.
const LOOKED_AT_MAX: u64 = 256 << 20;
/// Zeros that are written at once.
static ZEROS: [u8; 128 << 10] = [0; 128 << 10];

/// The properties of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// its name
    pub name: Name,
    /// size, bytes
    pub size: u64,
    /// sector size
    pub block_size: BlockSize,
    /// bytes that its file takes in the store, as the store counts them, including shared ones
    pub stored: u64,
    /// time of the last write; of a snapshot, time of its creation
    pub written: Time,
}

/// How a range is made zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeros {
    /// As holes, which take no space in the store.
    Holes,
    /// As data, so that a later write finds its space in the store.
    Data,
}

/// The kind of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// It takes space in the store.
    Data,
    /// It reads as zeros, and takes none.
    Hole,
}

/// A run of bytes of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// offset of the first byte
    pub offset: u64,
    /// length, bytes; not 0
    pub len: u64,
    /// their kind
    pub extent: Extent,
}

/// An open volume. All openings of one volume of a vault share one file: a read sees all earlier writes of any opening,
/// and a flush covers the writes of all.
pub struct Volume {
    file: Open,
    info: Info,
    read_only: bool,
}

impl Volume {
    pub(crate) fn new(file: Open, info: Info, read_only: bool) -> Volume {
        Volume { file, info, read_only }
    }

    /// Size, bytes.
    pub fn size(&self) -> u64 {
        self.info.size
    }

    /// Sector size.
    pub fn block_size(&self) -> BlockSize {
        self.info.block_size
    }

    /// Whether it cannot be written: it is a snapshot, or was opened for reading.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Best size of reads and writes, bytes: the vault's block, or that of the volume if it is larger.
    pub fn preferred(&self) -> u32 {
        self.file.node().attr().block_size.max(self.info.block_size.bytes())
    }

    fn within(&self, offset: u64, len: u64) -> Result<u64> {
        offset.checked_add(len).filter(|end| *end <= self.info.size).ok_or(VolumeError::Range)
    }

    fn may_write(&self, offset: u64, len: u64) -> Result<()> {
        match self.read_only {
            true => Err(VolumeError::IsSnapshot(self.info.name.clone())),
            false => self.within(offset, len).map(drop),
        }
    }

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// Those of the vault, including damage.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.within(offset, buf.len() as u64)?;
        Ok(self.file.read(offset, buf)?)
    }

    /// Writes `data` at `offset`. With `durable`, this data and everything written to the volume before is in the store
    /// when the call returns.
    ///
    /// # Errors
    /// Those of the vault; a part may be written.
    pub fn write(&self, offset: u64, data: &[u8], durable: bool) -> Result<()> {
        self.may_write(offset, data.len() as u64)?;
        self.file.write(offset, data)?;
        self.flush_if(durable)
    }

    /// Makes durable everything that completed calls wrote to this volume, through any opening.
    ///
    /// # Errors
    /// Those of the store; the next call tries again.
    pub fn flush(&self) -> Result<()> {
        match self.read_only {
            true => Ok(()),
            false => Ok(self.file.sync()?),
        }
    }

    fn flush_if(&self, durable: bool) -> Result<()> {
        if durable { self.flush() } else { Ok(()) }
    }

    /// Releases the space of a range, which reads as zeros from then on.
    ///
    /// # Errors
    /// As [`Volume::write`].
    pub fn trim(&self, offset: u64, len: u64, durable: bool) -> Result<()> {
        self.zero(offset, len, Zeros::Holes, durable)
    }

    /// Makes a range zeros.
    ///
    /// # Errors
    /// As [`Volume::write`].
    pub fn zero(&self, offset: u64, len: u64, zeros: Zeros, durable: bool) -> Result<()> {
        self.may_write(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        match zeros {
            Zeros::Holes => self.file.fs().fallocate(self.file.handle(), Fallocate::Punch, offset, len)?,
            Zeros::Data => {
                let (mut at, end) = (offset, offset + len);
                while at < end {
                    let n = (end - at).min(ZEROS.len() as u64);
                    self.file.write(at, &ZEROS[..n as usize])?;
                    at += n;
                }
            }
        }
        self.flush_if(durable)
    }

    /// Calls `each` for the runs of a range, in order and without gaps, until it answers false or the limit is reached.
    /// The runs may end before the range does, but cover at least its first byte.
    ///
    /// # Errors
    /// Those of the vault, and of `each`.
    pub fn runs<E: From<VolumeError>>(
        &self,
        offset: u64,
        len: u64,
        each: &mut dyn FnMut(Run) -> Result<bool, E>,
    ) -> Result<(), E> {
        let vault = |error| E::from(VolumeError::Vault(error));
        let end = self.within(offset, len).map_err(E::from)?;
        let (mut at, mut looked_at) = (offset, 0);
        while at < end && looked_at < LOOKED_AT_MAX {
            let left = LOOKED_AT_MAX - looked_at;
            let hole = self.file.hole_at(at, end, left).map_err(vault)?;
            let run = match hole.end > at {
                true => Run { offset: at, len: hole.end - at, extent: Extent::Hole },
                false => {
                    let until = self.file.fs().data_until(self.file.handle(), at, end.min(at + left)).map_err(vault)?;
                    Run { offset: at, len: until - at, extent: Extent::Data }
                }
            };
            if run.len > 0 && !each(run)? {
                break;
            }
            at += run.len;
            looked_at += match run.extent {
                // A small one lies in a page that was loaded before.
                Extent::Hole => hole.looked_at.min(run.len),
                Extent::Data => run.len,
            };
        }
        Ok(())
    }
}
