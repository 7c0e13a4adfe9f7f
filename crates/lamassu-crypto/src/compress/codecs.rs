//! The codecs' libraries, and the memory they work in.

use crate::secret::wipe;
use lamassu_format::{Codec, CodecVersion};
use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};
use zstd_safe::{CCtx, CParameter, DCtx};

/// The release of `lz4_flex` that Cargo.toml pins.
const LZ4_VERSION: CodecVersion = CodecVersion(0, 14, 2);

/// From this length on LZ4 uses another table, which finds other matches.
const LZ4_LARGE: usize = u16::MAX as usize;

/// The release of a codec that is linked.
pub fn version_of(codec: Codec) -> CodecVersion {
    match codec {
        Codec::Lz4 => LZ4_VERSION,
        Codec::Zstd(_) => {
            let number = zstd_sys::ZSTD_VERSION_NUMBER;
            CodecVersion((number / 10_000) as u16, (number / 100 % 100) as u16, (number % 100) as u16)
        }
    }
}

/// Working memory.
#[derive(Default)]
pub(super) struct Codecs {
    /// By length of block. With one table for both, the result would depend on which length came first.
    lz4_small: Option<CompressTable>,
    lz4_large: Option<CompressTable>,
    zstd: Option<(u8, CCtx<'static>)>,
    un_zstd: Option<DCtx<'static>>,
    /// The output of a codec, or its input for decompression.
    scratch: Vec<u8>,
    /// Bytes of it, from the first on, that may hold something of a block. A codec also writes behind its output.
    used: usize,
}

impl Codecs {
    /// Compresses a block; the output is in [`Codecs::made`].
    pub fn lz4(&mut self, block: &[u8]) -> Option<usize> {
        let out = room(&mut self.scratch, get_maximum_output_size(block.len()));
        let table = match block.len() < LZ4_LARGE {
            true => self.lz4_small.get_or_insert_with(CompressTable::small),
            false => self.lz4_large.get_or_insert_with(CompressTable::large),
        };
        self.used = out.len();
        compress_into_with_table(block, out, table).ok()
    }

    /// The same. `None` also if there is no memory for it.
    pub fn zstd(&mut self, level: u8, block: &[u8]) -> Option<usize> {
        // As much as it may need: with less room it would make other decisions.
        let out = room(&mut self.scratch, zstd_safe::compress_bound(block.len()));
        if self.zstd.as_ref().is_none_or(|(of, _)| *of != level) {
            let mut context = CCtx::try_create()?;
            context.set_parameter(CParameter::CompressionLevel(level.into())).ok()?;
            self.zstd = Some((level, context));
        }
        let (_, context) = self.zstd.as_mut()?;
        self.used = out.len();
        context.compress2(out, block).ok()
    }

    /// The first bytes of the output.
    pub fn made(&self, len: usize) -> &[u8] {
        &self.scratch[..len]
    }

    /// Copies a payload out of the place where its block goes.
    pub fn hold(&mut self, payload: &[u8]) {
        room(&mut self.scratch, payload.len()).copy_from_slice(payload);
        self.used = payload.len();
    }

    /// Decompresses the held `len` bytes into a block. Returns the length of the output.
    pub fn un_lz4(&mut self, len: usize, block: &mut [u8]) -> Option<usize> {
        decompress_into(&self.scratch[..len], block).ok()
    }

    /// The same.
    pub fn un_zstd(&mut self, len: usize, block: &mut [u8]) -> Option<usize> {
        let context = self.un_zstd.get_or_insert_with(DCtx::create);
        context.decompress(block, &self.scratch[..len]).ok()
    }

    /// Wipes the output, or what is held.
    pub fn wipe(&mut self) {
        wipe(&mut self.scratch[..self.used]);
        self.used = 0;
    }

    #[cfg(test)]
    pub fn scratch(&self) -> &[u8] {
        &self.scratch
    }
}

fn room(scratch: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if scratch.len() < len {
        wipe(scratch); // growing would leave a copy
        scratch.resize(len, 0);
    }
    &mut scratch[..len]
}
