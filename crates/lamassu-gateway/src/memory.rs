//! Memory that the C library would keep. By itself it returns memory only from the end of a heap, and has a heap for
//! each of many threads: without this, every thread that once read a large directory, or held a part of an upload,
//! keeps room for another.

/// From this size on an allocation is a mapping of its own, which is returned at once.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_FROM: libc::c_int = 1 << 20;

/// From now on large buffers leave nothing behind. Otherwise the C library raises its threshold for mappings with each
/// buffer that is freed, up to 32 MiB. Threads that run already may keep what they have.
pub fn return_large_buffers() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: sets a number (mallopt(3)).
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM);
    }
}

/// Gives back what no allocation uses. Takes some milliseconds, and holds up allocations meanwhile.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: releases pages that no allocation uses; safe to call from any thread at any time (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}
