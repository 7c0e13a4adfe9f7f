//! Secret memory: never swapped where the kernel allows it, never dumped, wiped when dropped (Z17).
//!
//! Secrets are in pages of their own, apart from the heap (`arena`). Nothing here prints, compares or copies a secret
//! implicitly: `Debug` shows a length, and there is no `Clone` and no `PartialEq`.

mod arena;
mod stack;

use crate::NoRandom;
use arena::Piece;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use zeroize::Zeroize;

pub use arena::memory_is_locked;
pub use stack::without_trace;

/// Overwrites bytes with zeros, at the speed of memset(3): for buffers. `zeroize` writes byte by byte.
pub fn wipe(bytes: &mut [u8]) {
    // SAFETY: the slice is writable for its length. The compiler does not leave out the call, also if nothing reads the
    // bytes afterwards: explicit_bzero(3).
    unsafe { libc::explicit_bzero(bytes.as_mut_ptr().cast(), bytes.len()) }
}

/// N secret bytes.
pub struct Secret<const N: usize> {
    b: Locked<[u8; N]>,
}

impl<const N: usize> Secret<N> {
    /// Secret of given bytes; the caller's array is wiped.
    pub fn new(bytes: &mut [u8; N]) -> Self {
        let b = Locked::fill(|piece| piece.copy_from_slice(bytes));
        bytes.zeroize();
        Secret { b }
    }

    /// Random secret.
    ///
    /// # Errors
    /// [`NoRandom`] when getrandom(2) fails.
    pub fn random() -> Result<Self, NoRandom> {
        let mut failed = None;
        let b = Locked::fill(|piece: &mut [u8; N]| failed = crate::random(piece).err());
        match failed {
            None => Ok(Secret { b }),
            Some(e) => Err(e),
        }
    }

    /// A secret that `write` fills in place, so that no copy stays on the stack. It finds zeros.
    pub fn filled_by(write: impl FnOnce(&mut [u8; N])) -> Self {
        Secret { b: Locked::fill(write) }
    }

    /// Secret of a slice; `None` if it is not N bytes long. The caller wipes the slice.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        (bytes.len() == N).then(|| Self::filled_by(|piece| piece.copy_from_slice(bytes)))
    }

    /// The bytes.
    pub fn expose(&self) -> &[u8; N] {
        &self.b
    }

    /// A second copy. Not `Clone`, so that no derive makes copies unnoticed.
    pub fn duplicate(&self) -> Self {
        Self::filled_by(|piece| piece.copy_from_slice(self.expose()))
    }
}

impl<const N: usize> fmt::Debug for Secret<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret<{N}>")
    }
}

/// A secret of any length.
pub struct SecretBytes {
    piece: Piece,
    len: usize,
}

impl SecretBytes {
    /// Takes the bytes over (and wipes the vector it came in).
    pub fn new(mut bytes: Vec<u8>) -> Self {
        let mut piece = Piece::new(bytes.len(), 1);
        piece.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
        let len = bytes.len();
        bytes.zeroize();
        SecretBytes { piece, len }
    }

    /// A secret of `len` bytes that `write` fills in place. It finds zeros.
    pub fn filled_by(len: usize, write: impl FnOnce(&mut [u8])) -> Self {
        let mut piece = Piece::new(len, 1);
        write(&mut piece.bytes_mut()[..len]);
        SecretBytes { piece, len }
    }

    /// The bytes.
    pub fn expose(&self) -> &[u8] {
        &self.piece.bytes()[..self.len]
    }

    /// The bytes, to be changed in place.
    pub(crate) fn expose_mut(&mut self) -> &mut [u8] {
        &mut self.piece.bytes_mut()[..self.len]
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretBytes")
    }
}

/// A value in secret memory: expanded keys. Dropped, then wiped.
pub(crate) struct Locked<T> {
    piece: Piece,
    owns: PhantomData<T>,
}

impl<T> Locked<T> {
    /// Moves `value` in. The caller must wipe what the move leaves on the stack: prefer [`Locked::fill`] if the type
    /// allows it.
    pub(crate) fn new(value: T) -> Self {
        let piece = Piece::new(size_of::<T>(), align_of::<T>());
        // SAFETY: the piece is at least size_of::<T>() bytes, aligned for T, and ours alone; nothing was in it.
        unsafe { piece.as_ptr().cast::<T>().write(value) };
        Locked { piece, owns: PhantomData }
    }
}

impl<const N: usize> Locked<[u8; N]> {
    fn fill(write: impl FnOnce(&mut [u8; N])) -> Self {
        let mut piece = Piece::new(N, 1);
        write(piece.bytes_mut()[..N].as_mut().try_into().expect("the slice is N long"));
        Locked { piece, owns: PhantomData }
    }
}

impl<T> Deref for Locked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `new` or `fill` put a T there. The piece lives as long as self, and is borrowed mutably only through
        // &mut self.
        unsafe { &*self.piece.as_ptr().cast::<T>() }
    }
}

impl<T> Drop for Locked<T> {
    fn drop(&mut self) {
        // SAFETY: the piece holds a T (see `deref`), and nothing reads it after this. The piece then wipes its own
        // bytes.
        unsafe { self.piece.as_ptr().cast::<T>().drop_in_place() }
    }
}

// SAFETY: a Locked<T> owns its T as a Box<T> does.
unsafe impl<T: Send> Send for Locked<T> {}
// SAFETY: as above; shared access gives &T alone.
unsafe impl<T: Sync> Sync for Locked<T> {}

/// Keeps this process out of core dumps and away from other processes' ptrace: `PR_SET_DUMPABLE` 0 and `RLIMIT_CORE` 0.
///
/// # Errors
/// The kernel's error; the process is then unchanged, or partly hardened.
pub fn harden_process() -> std::io::Result<()> {
    use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_keep_bytes_and_wipe_what_they_came_in() {
        let mut k = [7u8; 32];
        let s = Secret::new(&mut k);
        assert_eq!(k, [0; 32]);
        assert_eq!(s.expose(), &[7; 32]);
        assert_eq!(s.duplicate().expose(), &[7; 32]);
        let v = SecretBytes::new(vec![9; 5000]);
        assert_eq!(v.expose(), &[9; 5000][..]);
        assert!(SecretBytes::new(Vec::new()).expose().is_empty());
        assert!(Secret::<32>::from_slice(&[1; 31]).is_none());
    }

    #[test]
    fn debug_shows_no_byte() {
        let s = Secret::new(&mut [0xab; 32]);
        assert_eq!(format!("{s:?} {:?}", SecretBytes::new(b"hunter2".to_vec())), "Secret<32> SecretBytes");
    }

    #[test]
    fn random_secrets_differ() {
        assert_ne!(Secret::<32>::random().unwrap().expose(), Secret::<32>::random().unwrap().expose());
    }

    #[test]
    fn a_locked_value_is_dropped_once() {
        struct Counts<'a>(&'a std::sync::atomic::AtomicUsize);
        impl Drop for Counts<'_> {
            fn drop(&mut self) {
                self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        }
        let n = std::sync::atomic::AtomicUsize::new(0);
        drop(Locked::new(Counts(&n)));
        assert_eq!(n.load(std::sync::atomic::Ordering::Relaxed), 1);
    }

    #[test]
    fn hardening_turns_core_dumps_off() {
        harden_process().unwrap();
        let limit = rustix::process::getrlimit(rustix::process::Resource::Core);
        assert_eq!(limit.current, Some(0));
        assert_eq!(rustix::process::dumpable_behavior().unwrap(), rustix::process::DumpableBehavior::NotDumpable);
    }
}
