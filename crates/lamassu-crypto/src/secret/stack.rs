//! Wipes what ciphers leave on the stack: spilled registers, moved values, frames of functions that have returned.
//!
//! Ciphers expand keys into locals and keep them in vector registers, which compilers spill as they like, and they do
//! not wipe them. So the work runs in a frame of its own, and the stack below the caller is overwritten afterwards.

use std::hint::black_box;

/// How far below the caller's frame is overwritten. The kernels with sixteen lanes use the most, about 5 KiB.
const DEPTH: usize = 12 << 10;

/// Does work with keys, and overwrites what it leaves on the stack. The caller is responsible for the result and the
/// captured values.
pub fn without_trace<T>(work: impl FnOnce() -> T) -> T {
    let done = apart(work);
    wipe();
    done
}

/// Not inlined: nothing of the work may be in the caller's own frame.
#[inline(never)]
fn apart<T>(work: impl FnOnce() -> T) -> T {
    work()
}

/// Not inlined: its frame covers that of [`apart`].
#[inline(never)]
fn wipe() {
    let mut below = [0u8; DEPTH];
    // The compiler must not drop the zeros as unused.
    black_box(&mut below);
}
