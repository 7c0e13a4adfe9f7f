//! Memory after a large reading. The C library returns memory by itself only from the end of a heap, and has a heap for
//! each of many threads: without this, every thread that once read a large directory keeps room for another.

/// Gives back what no allocation uses. Takes some milliseconds, and holds up allocations meanwhile.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: releases pages that no allocation uses; safe to call from any thread at any time (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}
