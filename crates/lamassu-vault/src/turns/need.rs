//! What a request needs of a turn.

use super::Mode;
use crate::Ino;

/// What a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    pub(super) mode: Mode,
    /// The request is about pages of a mapped file, which the kernel has locked.
    pub(super) is_of_pages: bool,
    /// The file whose pages the kernel will cache.
    pub(super) fills: Option<Ino>,
    /// See [`Need::LOOK_AT_ROOT`].
    pub(super) is_of_root: bool,
}

impl Need {
    /// To read.
    pub const LOOK: Need = Need { mode: Mode::Look, is_of_pages: false, fills: None, is_of_root: false };
    /// To open the root of the mount, or show its attributes. Carried out without a turn while a freeze waits for one:
    /// the request that gives the freeze up comes through the root.
    pub const LOOK_AT_ROOT: Need = Need { is_of_root: true, ..Need::LOOK };
    /// To change something.
    pub const CHANGE: Need = Need { mode: Mode::Change, ..Need::LOOK };
    /// To write pages of a mapped file.
    pub const WRITE_PAGES: Need = Need { is_of_pages: true, ..Need::CHANGE };

    /// To read pages of a mapped file. If it may be written, the turn must be exclusive: the kernel does not report the
    /// change of a page, and must be able to write it back in the same turn.
    pub const fn read_pages(ino: Ino, may_be_written: bool) -> Need {
        let mode = if may_be_written { Mode::Change } else { Mode::Look };
        Need { mode, is_of_pages: true, fills: Some(ino), is_of_root: false }
    }

    /// Whether it may change something. Pages that are read may be written later: the kernel writes them back after a
    /// thaw.
    pub(super) fn changes(self) -> bool {
        self.mode == Mode::Change && self.fills.is_none()
    }
}
