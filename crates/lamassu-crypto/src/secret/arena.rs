//! Pages for secrets. Many secrets share a page.
//!
//! `RLIMIT_MEMLOCK` may be 64 KiB for an ordinary user, and the kernel locks whole pages. So small secrets share pages
//! by size class, and a locked page is kept for the next secret. Every page is excluded from core dumps. A page that
//! cannot be locked is used nevertheless, and [`memory_is_locked`] then tells: a mount without locked memory is a
//! warning, not a failure. A child process inherits the pages, and not their locks (mlock(2)): so it locks them again,
//! before fork(2) returns.
//!
//! Invariant: free bytes are zero. A [`Piece`] wipes itself before it is returned.

use parking_lot::Mutex;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::alloc::{Layout, handle_alloc_error};
use std::ptr::{self, NonNull};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// Smallest piece, log₂ of bytes.
const CLASS_MIN_LOG2: u32 = 5;
/// Largest piece that shares its pages, log₂ of bytes. Larger ones get pages of their own.
const CLASS_MAX_LOG2: u32 = 11;
const CLASSES: usize = (CLASS_MAX_LOG2 - CLASS_MIN_LOG2 + 1) as usize;
/// Bytes that a size class grows by: one page where pages are 4096 bytes.
const REGION: usize = 4096;

static UNLOCKED: AtomicBool = AtomicBool::new(false);
static FORKS: Once = Once::new();
static ARENA: Mutex<Arena> = Mutex::new(Arena { free: [const { Vec::new() }; CLASSES], regions: Vec::new() });

/// Whether all secret memory made so far is locked. Once false, it stays false: raise `ulimit -l` (RLIMIT_MEMLOCK) and
/// start again.
pub fn memory_is_locked() -> bool {
    !UNLOCKED.load(Ordering::Relaxed)
}

struct Arena {
    /// Zeroed pieces by size class.
    free: [Vec<NonNull<u8>>; CLASSES],
    regions: Vec<Region>,
}

#[derive(Clone, Copy)]
struct Region {
    start: NonNull<u8>,
    len: usize,
}

impl Region {
    fn lock(self) {
        // SAFETY: whole pages of a mapping that the arena owns, whose content stays.
        if unsafe { mm::mlock(self.start.as_ptr().cast(), self.len) }.is_err() {
            UNLOCKED.store(true, Ordering::Relaxed);
        }
    }
}

/// In a child process, after fork(2). Another thread of the parent may have held the arena: then it stays as it is, and
/// is known to be unlocked.
extern "C" fn lock_again() {
    match ARENA.try_lock() {
        Some(arena) => arena.regions.iter().for_each(|region| region.lock()),
        None => UNLOCKED.store(true, Ordering::Relaxed),
    }
}

// SAFETY: the pointers are to memory that the arena owns, on no thread's stack; the mutex orders access.
unsafe impl Send for Arena {}

impl Arena {
    fn map(&mut self, len: usize) -> NonNull<u8> {
        FORKS.call_once(|| {
            // SAFETY: the handler allocates nothing, and waits for nothing.
            if unsafe { libc::pthread_atfork(None, None, Some(lock_again)) } != 0 {
                UNLOCKED.store(true, Ordering::Relaxed);
            }
        });
        // SAFETY: a new private anonymous mapping at a place of the kernel's choice touches no memory in use.
        let mapped =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        let Some(start) = mapped.ok().and_then(|p| NonNull::new(p.cast::<u8>())) else {
            handle_alloc_error(Layout::from_size_align(len, 4096).unwrap_or(Layout::new::<[u8; REGION]>()));
        };
        // SAFETY: the mapping is ours, whole pages, and neither call changes its content.
        unsafe {
            // On an old kernel without DONTDUMP, RLIMIT_CORE and PR_SET_DUMPABLE (`harden_process`) do this.
            let _ = mm::madvise(start.as_ptr().cast(), len, Advice::LinuxDontDump);
        }
        let region = Region { start, len };
        region.lock();
        self.regions.push(region);
        start
    }

    fn take(&mut self, class: usize) -> NonNull<u8> {
        if let Some(piece) = self.free[class].pop() {
            return piece;
        }
        let region = self.map(REGION);
        let size = class_size(class);
        for at in (size..REGION).step_by(size) {
            // SAFETY: at < REGION, within the mapping just made.
            self.free[class].push(unsafe { region.add(at) });
        }
        region
    }

    fn unmap(&mut self, start: NonNull<u8>) {
        if let Some(i) = self.regions.iter().position(|r| r.start == start) {
            let Region { start, len } = self.regions.swap_remove(i);
            // SAFETY: `map` made exactly this mapping, it has left the list, and its one piece is being dropped. munmap
            // also unlocks it.
            let unmapped = unsafe { mm::munmap(start.as_ptr().cast(), len) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

fn class_size(class: usize) -> usize {
    1 << (class as u32 + CLASS_MIN_LOG2)
}

/// Class of a size, or `None` if it takes pages of its own.
fn class_of(size: usize) -> Option<usize> {
    let log2 = size.next_power_of_two().trailing_zeros().max(CLASS_MIN_LOG2);
    (log2 <= CLASS_MAX_LOG2).then(|| (log2 - CLASS_MIN_LOG2) as usize)
}

/// A piece of secret memory, zero when new, wiped when dropped.
pub(super) struct Piece {
    start: NonNull<u8>,
    /// Bytes that may be used, at least what was asked for.
    len: usize,
}

// SAFETY: a Piece owns its bytes as a Box<[u8]> does.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

impl Piece {
    /// At least `size` zero bytes at a multiple of `align` (a power of two, at most 4096).
    pub(super) fn new(size: usize, align: usize) -> Piece {
        assert!(align <= REGION);
        // A piece of a class is at a multiple of its size, so a size of at least `align` is aligned.
        match class_of(size.max(align)) {
            Some(class) => Piece { start: ARENA.lock().take(class), len: class_size(class) },
            None => {
                let page = rustix::param::page_size();
                let len = size.max(1).next_multiple_of(page);
                Piece { start: ARENA.lock().map(len), len }
            }
        }
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the piece's bytes are mapped, initialised (zero from mmap or the wipe) and borrowed with self. Only
        // byte secrets call this. A typed value, which may contain padding, is reached through `as_ptr` alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: our bytes, of which the call reads none (a typed value may have left padding).
        unsafe { libc::explicit_bzero(self.start.as_ptr().cast(), self.len) };
        let mut arena = ARENA.lock();
        match class_of(self.len) {
            Some(class) => arena.free[class].push(self.start),
            None => arena.unmap(self.start),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_fit_and_large_sizes_have_none() {
        for size in 0..=2048 {
            let class = class_of(size).unwrap();
            assert!(class_size(class) >= size.max(32) && class_size(class) <= size.max(32) * 2);
        }
        assert_eq!(class_of(2049), None);
    }

    #[test]
    fn pieces_are_zero_aligned_and_apart() {
        let mut pieces: Vec<Piece> = (0..300).map(|i| Piece::new(1 + i % 2500, 64)).collect();
        for (i, s) in pieces.iter_mut().enumerate() {
            assert_eq!(s.as_ptr() as usize % 64, 0);
            assert!(s.bytes().iter().all(|&b| b == 0), "piece {i} was not zero");
            s.bytes_mut().fill(i as u8 | 1);
        }
        for (i, s) in pieces.iter().enumerate() {
            assert!(s.bytes().iter().all(|&b| b == i as u8 | 1), "piece {i} overlaps another");
        }
        drop(pieces);
        assert!(Piece::new(100, 1).bytes().iter().all(|&b| b == 0), "a freed piece came back unwiped");
    }

    /// Whether the mapping at an address is locked in this process: `None` if there is none.
    fn is_locked(at: usize) -> Option<bool> {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let bound = |text| usize::from_str_radix(text, 16);
            !range.is_some_and(
                |(from, to)| matches!((bound(from), bound(to)), (Ok(from), Ok(to)) if (from..to).contains(&at)),
            )
        });
        lines.next()?;
        let flags = lines.find(|line| line.starts_with("VmFlags:"))?;
        Some(flags.split(' ').any(|flag| flag == "lo"))
    }

    #[test]
    fn a_child_process_has_its_secrets_locked() {
        let piece = Piece::new(100, 1);
        let at = piece.as_ptr() as usize;
        assert_eq!(is_locked(at), Some(true));
        // Another thread of this test's process may have the arena as it forks. That is known then.
        let codes = (0..20).map(|_| {
            // SAFETY: the child reads a file and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let code = match (is_locked(at), memory_is_locked()) {
                    (Some(true), _) => 0,
                    (_, false) => 1,
                    (_, true) => 2,
                };
                // SAFETY: ends the child, and runs nothing of the test's.
                unsafe { libc::_exit(code) }
            }
            let mut status = 0;
            // SAFETY: waits for the child made above.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            libc::WEXITSTATUS(status)
        });
        let codes: Vec<_> = codes.collect();
        assert!(codes.contains(&0) && !codes.contains(&2), "{codes:?}");
    }

    #[test]
    fn many_small_secrets_share_pages() {
        let before = ARENA.lock().regions.len();
        let pieces: Vec<Piece> = (0..1000).map(|_| Piece::new(32, 1)).collect();
        // 128 pieces a page. Other tests run at the same time, so the bound is loose.
        assert!(ARENA.lock().regions.len() - before <= 100);
        drop(pieces);
    }
}
