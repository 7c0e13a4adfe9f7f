//! What a request needs of a turn.

use super::Mode;
use crate::Ino;
use std::ops::Range;

/// What a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    pub(super) mode: Mode,
    pub(super) pages: Pages,
    /// See [`Need::LOOK_AT_ROOT`].
    pub(super) is_of_root: bool,
}

/// What a request has to do with the kernel's pages of a file. Dropping these pages waits for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    No,
    /// The daemon puts pages there by itself: the kernel waits for nothing.
    Put(Ino),
    /// The kernel has locked the pages from one offset to another, and waits for their contents.
    Read {
        of: Ino,
        from: u64,
        to: u64,
    },
    /// Changed pages are written.
    Written,
    /// The size of the file changes. Until that is answered, the kernel writes none of its pages.
    Resized(Ino),
}

impl Need {
    /// To read.
    pub const LOOK: Need = Need { mode: Mode::Look, pages: Pages::No, is_of_root: false };
    /// To open the root of the mount, or show its attributes. Carried out without a turn while a freeze waits for one:
    /// the request that gives the freeze up comes through the root.
    pub const LOOK_AT_ROOT: Need = Need { is_of_root: true, ..Need::LOOK };
    /// To change something.
    pub const CHANGE: Need = Need { mode: Mode::Change, ..Need::LOOK };
    /// To write pages of a mapped file.
    pub const WRITE_PAGES: Need = Need { pages: Pages::Written, ..Need::CHANGE };

    /// To change the size of a file.
    pub const fn resize(ino: Ino) -> Need {
        Need { pages: Pages::Resized(ino), ..Need::CHANGE }
    }

    /// To put pages of a file into the kernel's cache that it has not asked for. Nobody may change them: the file is
    /// not open for writing.
    pub const fn put_pages(ino: Ino) -> Need {
        Need { pages: Pages::Put(ino), ..Need::LOOK }
    }

    /// To read pages of a mapped file. `locked`: the bytes whose pages the kernel has locked for this request, whole
    /// pages; empty if that is not certain.
    pub(super) fn read_pages(ino: Ino, locked: &Range<u64>) -> Need {
        Need { pages: Pages::Read { of: ino, from: locked.start, to: locked.end }, ..Need::LOOK }
    }

    /// The same in an exclusive turn, if the file may be written: the kernel does not report the change of a page, and
    /// must be able to write it back in the same turn.
    pub(super) fn written(self, may_be_written: bool) -> Need {
        Need { mode: if may_be_written { Mode::Change } else { Mode::Look }, ..self }
    }

    /// Whether the end of a turn may wait for the kernel, which waits for this request.
    pub(super) fn is_of_pages(self) -> bool {
        matches!(self.pages, Pages::Read { .. } | Pages::Written | Pages::Resized(_))
    }

    /// The file whose pages the kernel will cache.
    pub(super) fn fills(self) -> Option<Ino> {
        match self.pages {
            Pages::Put(ino) | Pages::Read { of: ino, .. } => Some(ino),
            Pages::No | Pages::Written | Pages::Resized(_) => None,
        }
    }

    /// Whether it may change something. Pages that are read may be written later: the kernel writes them back after a
    /// thaw.
    pub(super) fn changes(self) -> bool {
        self.mode == Mode::Change && self.fills().is_none()
    }
}
