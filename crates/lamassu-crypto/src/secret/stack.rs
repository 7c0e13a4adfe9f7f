//! What is left on the stack: registers that were spilled, values that were moved, frames that have returned.
//!
//! Ciphers expand keys into locals and keep them in vector registers, which compilers spill as they like. None of that is wiped by whoever wrote
//! the cipher. So the work is done in a frame of its own, and what lay below it is overwritten afterwards.

use std::hint::black_box;

/// How far below the caller's frame is overwritten. The kernels with sixteen lanes take most, about 5 KiB.
const DEPTH: usize = 12 << 10;

/// Does some work with keys and overwrites what it leaves on the stack. What it returns is the caller's, as is what it captures.
pub fn without_trace<T>(work: impl FnOnce() -> T) -> T {
    let done = apart(work);
    wipe();
    done
}

/// Nothing of the work may lie in the caller's own frame.
#[inline(never)]
fn apart<T>(work: impl FnOnce() -> T) -> T {
    work()
}

/// Its frame lies where that of [`apart`] did.
#[inline(never)]
fn wipe() {
    let mut below = [0u8; DEPTH];
    // The compiler must believe that somebody looks at the zeros.
    black_box(&mut below);
}
