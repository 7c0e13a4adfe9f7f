//! The features of the processor, less those that `LAMASSU_CPU` masks (Z14).
//!
//! `LAMASSU_CPU` is read once. It is a comma-separated list: `portable` (no feature at all), or `-NAME` for each
//! feature to leave out: `-aes`, `-vaes`, `-sha`, `-avx2` (and with it VAES), `-avx512`. Unknown words are ignored: a
//! misspelt name must not stop a mount. The mask covers the kernels of this crate; BLAKE3, ChaCha20 and the AEAD of
//! metadata choose for themselves. `library` uses the crates' own calls in place of every kernel of ours.

use std::sync::OnceLock;

/// The value of `LAMASSU_CPU`; empty if it is not set.
fn asked() -> &'static str {
    static ASKED: OnceLock<String> = OnceLock::new();
    ASKED.get_or_init(|| std::env::var("LAMASSU_CPU").unwrap_or_default())
}

/// Whether it asks for the library's calls, one block after another.
pub(super) fn library_is_asked_for() -> bool {
    names_library(asked())
}

fn names_library(mask: &str) -> bool {
    mask.split(',').any(|word| word.trim() == "library")
}

/// Processor features that kernels ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Cpu {
    /// AES-NI with SSE4.1 and SSSE3.
    pub(super) aes: bool,
    /// VAES over 256 bits, with AVX2.
    pub(super) vaes: bool,
    /// The SHA extensions, with SSE4.1 and SSSE3.
    pub(super) sha: bool,
    /// AVX2.
    pub(super) avx2: bool,
    /// AVX-512 F, BW and VL.
    pub(super) avx512: bool,
}

impl Cpu {
    /// The features that may be used, determined once.
    pub(super) fn allowed() -> Cpu {
        static ALLOWED: OnceLock<Cpu> = OnceLock::new();
        *ALLOWED.get_or_init(|| Cpu::detected().masked(asked()))
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn detected() -> Cpu {
        let base = is_x86_feature_detected!("sse4.1") && is_x86_feature_detected!("ssse3");
        let aes = base && is_x86_feature_detected!("aes");
        let avx2 = is_x86_feature_detected!("avx2");
        Cpu {
            aes,
            vaes: aes && avx2 && is_x86_feature_detected!("vaes"),
            sha: base && is_x86_feature_detected!("sha"),
            avx2,
            avx512: avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl"),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn detected() -> Cpu {
        Cpu::default()
    }

    fn masked(mut self, mask: &str) -> Cpu {
        for word in mask.split(',').map(str::trim) {
            match word {
                "portable" => self = Cpu::default(),
                "-aes" => (self.aes, self.vaes) = (false, false),
                "-vaes" => self.vaes = false,
                "-sha" => self.sha = false,
                "-avx2" => (self.avx2, self.vaes) = (false, false),
                "-avx512" => self.avx512 = false,
                _ => {}
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_take_away_and_never_add() {
        let all = Cpu { aes: true, vaes: true, sha: true, avx2: true, avx512: true };
        assert_eq!(all.masked("portable"), Cpu::default());
        assert_eq!(all.masked(""), all);
        assert_eq!(all.masked("-vaes, -sha"), Cpu { vaes: false, sha: false, ..all });
        assert_eq!(all.masked("-aes"), Cpu { aes: false, vaes: false, ..all }, "VAES needs AES");
        assert_eq!(all.masked("-avx2"), Cpu { avx2: false, vaes: false, ..all }, "VAES needs AVX2");
        assert_eq!(all.masked("-avx512,nonsense,aes"), Cpu { avx512: false, ..all });
        assert_eq!(Cpu::default().masked("aes,+aes"), Cpu::default());
        assert_eq!(all.masked("library"), all);
        assert!(names_library("-aes, library") && !names_library("portable,-library") && !names_library(""));
    }
}
