//! The ciphers and hashes of data blocks, over many blocks at once.
//!
//! A [`Kernel`] says which implementation of each primitive runs; [`Kernel::best`] is the fastest that this processor
//! and `LAMASSU_CPU` allow. All kernels give equal bytes, which the tests of this module show. Every kernel runs in
//! constant time.

mod aes;
mod blake3;
mod cpu;
mod library;
mod portable;
mod sha256;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::Provider;
#[cfg(feature = "fips")]
use crate::module;
use cpu::Cpu;
use lamassu_format::BlockKey;
use std::fmt;

pub(crate) use aes::RoundKeys;
pub use aes::{AES_128, AES_256};

/// Blocks that go through the kernels together: as many as the widest kernel has lanes.
pub(crate) const GROUP: usize = 16;

/// How AES runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum AesKernel {
    Portable,
    Library,
    AesNi,
    Vaes256,
    /// Sixteen lanes of CBC over 512 bits; fewer lanes, and all else, over 256.
    Vaes512,
    #[cfg(feature = "fips")]
    Module,
}

/// How SHA-256 runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ShaKernel {
    Portable,
    Library,
    Avx2,
    ShaNi,
    Avx512,
    #[cfg(feature = "fips")]
    Module,
}

/// Which implementation of each primitive runs. A value exists only for what this processor has.
// Invariant, on which every `unsafe` of this module rests: the variants in a Kernel are within `Cpu::detected`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    aes: AesKernel,
    sha: ShaKernel,
    /// Whether SHA-NI hashes the messages that are too few for AVX-512.
    sha_ni: bool,
}

impl Kernel {
    /// The fastest that this processor and `LAMASSU_CPU` allow; the FIPS module if it is installed.
    pub fn best() -> Kernel {
        match Provider::current() {
            Provider::Own if cpu::library_is_asked_for() => Kernel::library(),
            Provider::Own => Kernel::of(Cpu::allowed()),
            #[cfg(feature = "fips")]
            Provider::Module => Kernel::MODULE,
        }
    }

    /// The FIPS module, one block after another.
    #[cfg(feature = "fips")]
    const MODULE: Kernel = Kernel { aes: AesKernel::Module, sha: ShaKernel::Module, sha_ni: false };

    /// Which provider this kernel belongs to: it computes the MACs and the AEAD that go with it.
    pub(crate) fn provider(&self) -> Provider {
        match self.aes {
            #[cfg(feature = "fips")]
            AesKernel::Module => Provider::Module,
            _ => Provider::Own,
        }
    }

    /// Plain Rust, no processor feature.
    pub fn portable() -> Kernel {
        Kernel { aes: AesKernel::Portable, sha: ShaKernel::Portable, sha_ni: false }
    }

    /// The RustCrypto crates, one block after another.
    pub fn library() -> Kernel {
        Kernel { aes: AesKernel::Library, sha: ShaKernel::Library, sha_ni: false }
    }

    /// Every kernel that this processor has, slowest first, whatever `LAMASSU_CPU` says.
    pub fn available() -> Vec<Kernel> {
        let Cpu { aes, vaes, sha, avx2, avx512 } = Cpu::detected();
        let mut kernels = vec![Kernel::portable(), Kernel::library()];
        for (vaes, sha, avx2, avx512) in [
            (false, false, false, false),
            (false, false, avx2, false),
            (false, sha, false, false),
            (vaes, sha, false, false),
            (vaes, false, false, avx512),
            (vaes, sha, avx2, avx512),
        ] {
            let kernel = Kernel::of(Cpu { aes, vaes, sha, avx2, avx512 });
            if !kernels.contains(&kernel) {
                kernels.push(kernel);
            }
        }
        #[cfg(feature = "fips")]
        kernels.push(Kernel::MODULE);
        kernels
    }

    #[cfg(target_arch = "x86_64")]
    fn of(cpu: Cpu) -> Kernel {
        let aes = match cpu {
            Cpu { vaes: true, avx512: true, .. } => AesKernel::Vaes512,
            Cpu { vaes: true, .. } => AesKernel::Vaes256,
            Cpu { aes: true, .. } => AesKernel::AesNi,
            _ => AesKernel::Portable,
        };
        let sha = match cpu {
            Cpu { avx512: true, .. } => ShaKernel::Avx512,
            Cpu { sha: true, .. } => ShaKernel::ShaNi,
            Cpu { avx2: true, .. } => ShaKernel::Avx2,
            _ => ShaKernel::Portable,
        };
        Kernel { aes, sha, sha_ni: cpu.sha }
    }

    /// On other processors the crates use the instructions there are, one stream at a time.
    #[cfg(not(target_arch = "x86_64"))]
    fn of(_: Cpu) -> Kernel {
        Kernel::library()
    }

    /// SHA-256 of each message. As many outputs as messages. Messages of equal length are fastest.
    pub fn sha256(&self, messages: &[&[u8]], out: &mut [[u8; 32]]) {
        assert_eq!(messages.len(), out.len());
        #[cfg(target_arch = "x86_64")]
        if messages.windows(2).any(|m| m[0].len() != m[1].len()) {
            return self.sha256_uneven(messages, out);
        }
        self.sha256_even(messages, out);
    }

    /// Messages of various lengths, the longest together: lanes are as fast as the longest of them.
    #[cfg(target_arch = "x86_64")]
    fn sha256_uneven(&self, messages: &[&[u8]], out: &mut [[u8; 32]]) {
        const TOGETHER: usize = x86::sha_avx512::LANES;
        for (messages, out) in messages.chunks(TOGETHER).zip(out.chunks_mut(TOGETHER)) {
            let mut order: [usize; TOGETHER] = std::array::from_fn(|at| at);
            let order = &mut order[..messages.len()];
            order.sort_unstable_by_key(|at| std::cmp::Reverse(messages[*at].len()));
            let (mut sorted, mut digests) = ([&[][..]; TOGETHER], [[0; 32]; TOGETHER]);
            sorted.iter_mut().zip(&*order).for_each(|(message, at)| *message = messages[*at]);
            self.sha256_sorted(&sorted[..messages.len()], &mut digests[..messages.len()]);
            order.iter().zip(digests).for_each(|(at, digest)| out[*at] = digest);
        }
    }

    /// At most sixteen messages, the longest first.
    #[cfg(target_arch = "x86_64")]
    fn sha256_sorted(&self, messages: &[&[u8]], out: &mut [[u8; 32]]) {
        use x86::{sha_avx2, sha_avx512 as wide, sha_avx512vl as narrow};
        let (wide_min, narrow_min) = if self.sha_ni { AVX512_LANES_MIN_BESIDE_SHA_NI } else { AVX512_LANES_MIN };
        // As many lanes as there are, and as many as would be full if all were as long as the longest.
        let fills = |messages: &[&[u8]], lanes: usize| {
            messages.iter().map(|m| m.len()).sum::<usize>() >= lanes * messages.first().map_or(0, |m| m.len())
        };
        if self.sha == ShaKernel::Avx512 && messages.len() > narrow::LANES && fills(messages, wide_min) {
            let lanes: [&[u8]; wide::LANES] = std::array::from_fn(|l| messages[l.min(messages.len() - 1)]);
            // SAFETY: the variant exists only where AVX-512 F, BW and VL were detected.
            return out.copy_from_slice(&unsafe { wide::sha256(&lanes) }[..messages.len()]);
        }
        for (messages, out) in messages.chunks(narrow::LANES).zip(out.chunks_mut(narrow::LANES)) {
            let lanes: [&[u8]; narrow::LANES] = std::array::from_fn(|l| messages[l.min(messages.len() - 1)]);
            match self.sha {
                ShaKernel::Avx512 if fills(messages, narrow_min) => {
                    // SAFETY: as above, and AVX2.
                    out.copy_from_slice(&unsafe { narrow::sha256(&lanes) }[..messages.len()]);
                }
                ShaKernel::Avx2 if fills(messages, AVX2_LANES_MIN) => {
                    // SAFETY: the variant exists only where AVX2 was detected.
                    out.copy_from_slice(&unsafe { sha_avx2::sha256(&lanes) }[..messages.len()]);
                }
                _ => {
                    let mut left = out;
                    for run in messages.chunk_by(|a, b| a.len() == b.len()) {
                        let (now, later) = left.split_at_mut(run.len());
                        self.sha256_even(run, now);
                        left = later;
                    }
                }
            }
        }
    }

    /// Messages of one length.
    fn sha256_even(&self, messages: &[&[u8]], out: &mut [[u8; 32]]) {
        match self.sha {
            ShaKernel::Portable => portable::sha256::sha256(messages, out),
            ShaKernel::Library => library::sha256(messages, out),
            #[cfg(feature = "fips")]
            ShaKernel::Module => messages.iter().zip(out).for_each(|(m, o)| *o = module::sha256(m)),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the variant exists only where SHA, SSE4.1 and SSSE3 were detected.
            ShaKernel::ShaNi => unsafe { x86::sha_ni::sha256(messages, out) },
            #[cfg(target_arch = "x86_64")]
            ShaKernel::Avx512 => self.sha256_avx512(messages, out),
            #[cfg(target_arch = "x86_64")]
            ShaKernel::Avx2 => sha256_avx2(messages, out),
            #[cfg(not(target_arch = "x86_64"))]
            ShaKernel::Avx2 | ShaKernel::ShaNi | ShaKernel::Avx512 => unreachable!("no such kernel is made here"),
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn sha256_avx512(&self, mut messages: &[&[u8]], mut out: &mut [[u8; 32]]) {
        use x86::{sha_avx512 as wide, sha_avx512vl as narrow};
        let (wide_min, narrow_min) = if self.sha_ni { AVX512_LANES_MIN_BESIDE_SHA_NI } else { AVX512_LANES_MIN };
        while !messages.is_empty() {
            let lanes = if messages.len() >= wide_min { wide::LANES } else { narrow::LANES };
            let count = messages.len().min(lanes);
            let (now, later) = messages.split_at(count);
            let (out_now, out_later) = out.split_at_mut(count);
            if count >= narrow_min && now.iter().all(|m| m.len() == now[0].len()) {
                if lanes == wide::LANES {
                    let lanes: [&[u8]; wide::LANES] = std::array::from_fn(|l| now[l.min(count - 1)]);
                    // SAFETY: the variant exists only where AVX-512 F, BW and VL were detected.
                    out_now.copy_from_slice(&unsafe { wide::sha256(&lanes) }[..count]);
                } else {
                    let lanes: [&[u8]; narrow::LANES] = std::array::from_fn(|l| now[l.min(count - 1)]);
                    // SAFETY: as above, and AVX2.
                    out_now.copy_from_slice(&unsafe { narrow::sha256(&lanes) }[..count]);
                }
            } else if self.sha_ni {
                // SAFETY: sha_ni is set only where SHA, SSE4.1 and SSSE3 were detected.
                unsafe { x86::sha_ni::sha256(now, out_now) };
            } else {
                portable::sha256::sha256(now, out_now);
            }
            (messages, out) = (later, out_later);
        }
    }

    /// Keyed BLAKE3 of each message. As many outputs as messages. Messages of equal length are fastest.
    pub(crate) fn keyed_blake3(&self, key: &[u8; 32], messages: &[&[u8]], out: &mut [[u8; 32]]) {
        assert_eq!(messages.len(), out.len());
        match self.sha {
            ShaKernel::Library => library::keyed_blake3(key, messages, out),
            _ => blake3::keyed_hashes(key, messages, out),
        }
    }

    /// Round keys of AES-256.
    pub(crate) fn expand(&self, key: &BlockKey) -> RoundKeys<AES_256> {
        // Once per K_in, so the portable one is fast enough. It runs in constant time.
        portable::aes::expand(key)
    }

    /// AES-256 of each block on its own.
    pub(crate) fn ecb_encrypt(&self, keys: &RoundKeys<AES_256>, blocks: &mut [[u8; 16]]) {
        match self.aes {
            AesKernel::Portable => portable::aes::ecb_encrypt(keys, blocks),
            AesKernel::Library => library::ecb_encrypt(keys, blocks),
            #[cfg(feature = "fips")]
            AesKernel::Module => module::ecb_encrypt(&keys.key(), blocks.as_flattened_mut()),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the variants exist only where AES, SSE4.1 and SSSE3 were detected.
            AesKernel::AesNi | AesKernel::Vaes256 | AesKernel::Vaes512 => unsafe {
                x86::aesni::ecb_encrypt(keys, blocks)
            },
            #[cfg(not(target_arch = "x86_64"))]
            AesKernel::AesNi | AesKernel::Vaes256 | AesKernel::Vaes512 => unreachable!("no such kernel is made here"),
        }
    }

    /// AES-CBC with a zero IV, each lane under its own key: that of [`AES_128`] is the first half of what is given.
    /// Lanes are of one length, whole cipher blocks.
    pub fn cbc_encrypt<const N: usize>(&self, keys: &[BlockKey], lanes: &mut [&mut [u8]]) {
        assert_eq!(keys.len(), lanes.len());
        const { assert!(N == AES_128 || N == AES_256) };
        let len = lanes.first().map_or(0, |l| l.len());
        assert!(lanes.iter().all(|l| l.len() == len) && len.is_multiple_of(16));
        match self.aes {
            AesKernel::Portable => portable::aes::cbc_encrypt::<N>(keys, lanes),
            AesKernel::Library => library::cbc_encrypt::<N>(keys, lanes),
            #[cfg(feature = "fips")]
            AesKernel::Module => {
                keys.iter().zip(lanes).for_each(|(key, lane)| module::cbc_encrypt(aes::key_of::<N>(key), lane))
            }
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the variant exists only where AES, SSE4.1 and SSSE3 were detected.
            AesKernel::AesNi => unsafe { x86::aesni::cbc_encrypt::<N>(keys, lanes) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the variant exists only where VAES and AVX2 were detected too.
            AesKernel::Vaes256 => unsafe { x86::vaes::cbc_encrypt::<N>(keys, lanes) },
            #[cfg(target_arch = "x86_64")]
            AesKernel::Vaes512 => cbc_encrypt_vaes512::<N>(keys, lanes),
            #[cfg(not(target_arch = "x86_64"))]
            AesKernel::AesNi | AesKernel::Vaes256 | AesKernel::Vaes512 => unreachable!("no such kernel is made here"),
        }
    }

    /// AES-CBC with a zero IV. `data` is whole cipher blocks.
    pub fn cbc_decrypt<const N: usize>(&self, key: &BlockKey, data: &mut [u8]) {
        const { assert!(N == AES_128 || N == AES_256) };
        assert!(data.len().is_multiple_of(16));
        match self.aes {
            AesKernel::Portable => portable::aes::cbc_decrypt::<N>(key, data),
            AesKernel::Library => library::cbc_decrypt::<N>(key, data),
            #[cfg(feature = "fips")]
            AesKernel::Module => module::cbc_decrypt(aes::key_of::<N>(key), data),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the variant exists only where AES, SSE4.1 and SSSE3 were detected.
            AesKernel::AesNi => unsafe { x86::aesni::cbc_decrypt::<N>(key, data) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the variant exists only where VAES and AVX2 were detected too.
            AesKernel::Vaes256 | AesKernel::Vaes512 => unsafe { x86::vaes::cbc_decrypt::<N>(key, data) },
            #[cfg(not(target_arch = "x86_64"))]
            AesKernel::AesNi | AesKernel::Vaes256 | AesKernel::Vaes512 => unreachable!("no such kernel is made here"),
        }
    }

    /// AES-CTR, the initial counter block zero, counting big-endian. `data` is less than 2³² cipher blocks.
    pub fn ctr<const N: usize>(&self, key: &BlockKey, data: &mut [u8]) {
        const { assert!(N == AES_128 || N == AES_256) };
        assert!(data.len() as u64 <= 16 << 32, "kernels count in 32 bits");
        match self.aes {
            AesKernel::Portable => portable::aes::ctr::<N>(key, data),
            AesKernel::Library => library::ctr::<N>(key, data),
            #[cfg(feature = "fips")]
            AesKernel::Module => module::ctr(aes::key_of::<N>(key), data),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the variant exists only where AES, SSE4.1 and SSSE3 were detected.
            AesKernel::AesNi => unsafe { x86::aesni::ctr::<N>(key, data) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the variant exists only where VAES and AVX2 were detected too.
            AesKernel::Vaes256 | AesKernel::Vaes512 => unsafe { x86::vaes::ctr::<N>(key, data) },
            #[cfg(not(target_arch = "x86_64"))]
            AesKernel::AesNi | AesKernel::Vaes256 | AesKernel::Vaes512 => unreachable!("no such kernel is made here"),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn cbc_encrypt_vaes512<const N: usize>(mut keys: &[BlockKey], mut lanes: &mut [&mut [u8]]) {
    use x86::vaes512::{LANES, LEN_MIN};
    while lanes.len() >= LANES && lanes[0].len() >= LEN_MIN {
        // SAFETY: the variant exists only where VAES and AVX-512 F were detected.
        unsafe { x86::vaes512::cbc_encrypt::<N>(keys, lanes) };
        (keys, lanes) = (&keys[LANES..], &mut lanes[LANES..]);
    }
    // SAFETY: as above, and AVX2.
    unsafe { x86::vaes::cbc_encrypt::<N>(keys, lanes) };
}

#[cfg(target_arch = "x86_64")]
fn sha256_avx2(messages: &[&[u8]], out: &mut [[u8; 32]]) {
    use x86::sha_avx2::LANES;
    for (now, out_now) in messages.chunks(LANES).zip(out.chunks_mut(LANES)) {
        let count = now.len();
        if count >= AVX2_LANES_MIN && now.iter().all(|m| m.len() == now[0].len()) {
            let lanes: [&[u8]; LANES] = std::array::from_fn(|l| now[l.min(count - 1)]);
            // SAFETY: the variant exists only where AVX2 was detected.
            let digests = unsafe { x86::sha_avx2::sha256(&lanes) };
            out_now.copy_from_slice(&digests[..count]);
        } else {
            portable::sha256::sha256(now, out_now);
        }
    }
}

/// Below this many messages, one after another is faster than eight at a time with idle lanes.
#[cfg(target_arch = "x86_64")]
const AVX2_LANES_MIN: usize = 3;

/// Below the first number of messages, eight at a time and then the rest are faster than sixteen at a time with idle
/// lanes; below the second, one at a time is faster than eight.
#[cfg(target_arch = "x86_64")]
const AVX512_LANES_MIN: (usize, usize) = (9, 2);

/// The same where SHA-NI takes the rest, two at a time. For blocks of 4 KiB eight take 14 µs, sixteen 22, and SHA-NI
/// takes 4.9 for two.
#[cfg(target_arch = "x86_64")]
const AVX512_LANES_MIN_BESIDE_SHA_NI: (usize, usize) = (11, 6);

/// The kernel's name in `lamassu speed`, e.g. `vaes256+avx512`.
impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let aes = match self.aes {
            AesKernel::Portable => "portable",
            AesKernel::Library => "library",
            AesKernel::AesNi => "aesni",
            AesKernel::Vaes256 => "vaes256",
            AesKernel::Vaes512 => "vaes512",
            #[cfg(feature = "fips")]
            AesKernel::Module => "aws-lc-fips",
        };
        let sha = match self.sha {
            ShaKernel::Portable => "portable",
            ShaKernel::Library => "library",
            ShaKernel::Avx2 => "avx2",
            ShaKernel::ShaNi => "shani",
            ShaKernel::Avx512 if self.sha_ni => "avx512/shani",
            ShaKernel::Avx512 => "avx512",
            #[cfg(feature = "fips")]
            ShaKernel::Module => "aws-lc-fips",
        };
        if aes == sha { f.write_str(aes) } else { write!(f, "{aes}+{sha}") }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({self})")
    }
}

#[cfg(test)]
mod tests;
