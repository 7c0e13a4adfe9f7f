//! `stdin` and `fd:N`: a key from an inherited descriptor, read to its end.
//!
//! Guarantees: no buffer that would keep the key is used, and standard input is read as a key only once: a second read
//! would be empty.

use super::Location;
use super::bytes::{KEY_MAX, read_key};
use crate::source::{Ask, Fetched, KeyProvider, SourceError};
use lamassu_format::header::SlotKind;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) const STDIN: Location = Location {
    name: "stdin",
    is_scheme: false,
    usage: "stdin",
    kinds: super::READABLE,
    interactive: false,
    provider: |argument| match argument {
        None => Some(Arc::new(Stdin)),
        Some(_) => None,
    },
};

pub(super) const FD: Location = Location {
    name: "fd",
    is_scheme: false,
    usage: "fd:N",
    kinds: super::READABLE,
    interactive: false,
    provider: |argument| argument.and_then(number).map(|fd| Arc::new(Fd { fd }) as _),
};

/// A descriptor as shells write it: digits alone.
fn number(text: &str) -> Option<RawFd> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

struct Stdin;

impl KeyProvider for Stdin {
    fn fetch(&self, kind: SlotKind, _ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        static TAKEN: AtomicBool = AtomicBool::new(false);
        let fail = |source| SourceError::Stdin { source };
        if io::stdin().is_terminal() {
            return Err(SourceError::StdinTerminal);
        }
        if TAKEN.swap(true, Ordering::Relaxed) {
            return Err(SourceError::StdinTaken);
        }
        // Not through `Stdin`: its buffer would keep the key.
        let mut input = File::from(io::stdin().as_fd().try_clone_to_owned().map_err(fail)?);
        let bytes = read_key(&mut input, kind).map_err(fail)?.ok_or_else(|| too_long(0))?;
        Ok(Fetched::bytes(bytes))
    }
}

struct Fd {
    fd: RawFd,
}

impl KeyProvider for Fd {
    fn fetch(&self, kind: SlotKind, _ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        let fd = self.fd;
        let fail = |source| SourceError::Descriptor { fd, source };
        let mut input = duplicate(fd).map_err(fail)?;
        let bytes = read_key(&mut input, kind).map_err(fail)?.ok_or_else(|| too_long(fd))?;
        Ok(Fetched::bytes(bytes))
    }

    fn forget(&self) {
        close(self.fd);
    }
}

/// Closes an inherited descriptor, except a standard one.
#[allow(unsafe_code)]
fn close(fd: RawFd) {
    // Refused if this process has opened it itself.
    if fd > 2 && duplicate(fd).is_ok() {
        // SAFETY: nothing in this process owns a descriptor that was inherited under a number, and no other code uses
        // it between that look and this.
        unsafe { rustix::io::close(fd) };
    }
}

/// Duplicates the descriptor `fd`. Opening `/dev/fd/N` instead would check the file's permissions again, which fails
/// for another user's pipe.
///
/// A descriptor that this process opened itself counts as not open: those have close-on-exec set, which an inherited
/// one cannot have.
#[allow(unsafe_code)]
fn duplicate(fd: RawFd) -> io::Result<File> {
    // SAFETY: the borrow ends with this call, which only reads the descriptor table: EBADF is the answer for a number
    // that is not open. What is then read is shared with the owner of `fd` as with any inherited descriptor, and no
    // memory is.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    if rustix::io::fcntl_getfd(borrowed)?.contains(rustix::io::FdFlags::CLOEXEC) {
        return Err(rustix::io::Errno::BADF.into());
    }
    Ok(File::from(rustix::io::fcntl_dupfd_cloexec(borrowed, 3)?))
}

fn too_long(fd: RawFd) -> SourceError {
    SourceError::FileTooLong { path: PathBuf::from(format!("/dev/fd/{fd}")), max: KEY_MAX }
}

#[cfg(test)]
mod tests {
    use super::super::bytes::exposed;
    use super::*;

    #[test]
    fn descriptors_are_digits() {
        assert_eq!(number("3"), Some(3));
        assert_eq!(number("2147483647"), Some(i32::MAX));
        for bad in ["", "-1", "+3", " 3", "3x", "2147483648", "99999999999999999999"] {
            assert_eq!(number(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_descriptor_is_read_to_its_end_and_stays_open() {
        use std::io::Write;
        use std::os::fd::AsRawFd;
        let ask = Ask { subject: "x", purpose: crate::Purpose::Unlock, stdin: false };
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"words\n").unwrap();
        drop(writer);
        let ours = Fd { fd: reader.as_raw_fd() };
        assert!(matches!(ours.fetch(SlotKind::Raw, &ask), Err(SourceError::Descriptor { .. })), "not inherited");
        rustix::io::fcntl_setfd(&reader, rustix::io::FdFlags::empty()).unwrap();
        let fd = Fd { fd: reader.as_raw_fd() };
        assert_eq!(exposed(fd.fetch(SlotKind::Passphrase, &ask).unwrap()), b"words");
        assert_eq!(exposed(fd.fetch(SlotKind::Passphrase, &ask).unwrap()), b"", "still open, and at its end");
        let ours = std::os::fd::IntoRawFd::into_raw_fd(reader);
        Fd { fd: ours }.forget();
        assert!(matches!(Fd { fd: ours }.fetch(SlotKind::Raw, &ask), Err(SourceError::Descriptor { .. })), "closed");
        Fd { fd: 0 }.forget();
        let none = Fd { fd: 1_000_000 };
        assert!(matches!(none.fetch(SlotKind::Raw, &ask), Err(SourceError::Descriptor { fd: 1_000_000, .. })));
    }
}
