//! The time of the data path by stage: those of Figure 9 of the Lamassu paper.
//!
//! Only builds with the feature `measure` count the time. In others [`timed`] only does the work.

/// What a thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Encrypting blocks.
    Encrypt,
    /// Decrypting blocks.
    Decrypt,
    /// Hashing blocks and deriving their keys (the paper's GetCEKey), to seal and to verify them.
    Key,
    /// Waiting for the store below.
    Store,
    /// Compressing and decompressing blocks.
    Compress,
}

/// Does `work`, and counts its time to a stage. Stages are not nested.
#[cfg(not(feature = "measure"))]
#[inline]
pub fn timed<T>(_: Stage, work: impl FnOnce() -> T) -> T {
    work()
}

#[cfg(feature = "measure")]
pub use measured::{Times, measure, timed, times};

#[cfg(feature = "measure")]
mod measured {
    use super::Stage;
    use std::fmt;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
    use std::time::{Duration, Instant};

    static ON: AtomicBool = AtomicBool::new(false);
    static NANOS: [AtomicU64; 5] = [const { AtomicU64::new(0) }; 5];

    /// Begins to measure, in every thread of this process.
    pub fn measure() {
        ON.store(true, Relaxed);
    }

    /// Does `work`, and counts its time to a stage. Stages are not nested.
    pub fn timed<T>(stage: Stage, work: impl FnOnce() -> T) -> T {
        if !ON.load(Relaxed) {
            return work();
        }
        let begun = Instant::now();
        let done = work();
        NANOS[stage as usize].fetch_add(begun.elapsed().as_nanos() as u64, Relaxed);
        done
    }

    /// The times of all threads together, in [`Stage`]'s order; `None` unless [`measure`] was called.
    pub fn times() -> Option<Times> {
        ON.load(Relaxed).then(|| Times(NANOS.each_ref().map(|nanos| Duration::from_nanos(nanos.load(Relaxed)))))
    }

    /// The result of [`times`]; shown as `encrypt=S decrypt=S key=S store=S compress=S`, in seconds.
    pub struct Times(pub [Duration; 5]);

    impl fmt::Display for Times {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let [encrypt, decrypt, key, store, compress] = self.0.map(|time| time.as_secs_f64());
            write!(f, "encrypt={encrypt:.6} decrypt={decrypt:.6} key={key:.6} store={store:.6} compress={compress:.6}")
        }
    }
}
