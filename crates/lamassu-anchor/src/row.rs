//! Rows of objects, entries, intents and the vault, and their encodings.
//!
//! A row has one encoding. Decoding is strict: any other bytes are damage.

mod encoding;

use crate::{Digest, ObjectId, ObjectKind, Revision, Token, TokenKey, Window, Windows};
use lamassu_format::header::VaultId;
use lamassu_format::{Domain, FileId, PageNo, Profile, Suite};

/// What is recorded of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Permission bits (07777).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of entries that name it.
    pub links: u64,
    /// Its content.
    pub content: Content,
    /// The digest of all its sealed attributes.
    pub attributes: Sealed,
}

/// The content of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A regular file's row.
    File(FileRow),
    /// A directory.
    Dir {
        /// its directory record
        record: Sealed,
        /// the directory that it lies in, itself for the root
        parent: ObjectId,
        /// its name there
        name: Token,
    },
    /// A symbolic link: the target as it is stored.
    Link(Sealed),
    /// A character device: its device number.
    Char(u64),
    /// A block device: its device number.
    Block(u64),
    /// A named pipe has none.
    Fifo,
    /// A socket has none.
    Socket,
}

/// The digest of a part that one step of the store replaces as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sealed {
    /// There is nothing.
    #[default]
    Nothing,
    /// The digest.
    Is(Digest),
    /// It is being replaced: both digests are current until the step is known to be durable.
    Becomes {
        /// the digest before; [`Digest::NONE`]: nothing
        old: Digest,
        /// the digest after; [`Digest::NONE`]: nothing
        new: Digest,
    },
}

impl Sealed {
    /// The digests that are current.
    pub fn digests(self) -> [Option<Digest>; 2] {
        match self {
            Sealed::Nothing => [None; 2],
            Sealed::Is(digest) => [Some(digest), None],
            Sealed::Becomes { old, new } => [Some(old), Some(new)],
        }
    }

    /// Whether what the store shows is current; [`Digest::NONE`]: it shows nothing.
    pub fn is_current(self, seen: Digest) -> bool {
        match self {
            Sealed::Nothing => seen.is_none(),
            Sealed::Is(digest) => seen == digest,
            Sealed::Becomes { old, new } => seen == old || seen == new,
        }
    }
}

/// The committed content of a file, and the sessions that may have changed it since.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileRow {
    /// Merkle root over its pages.
    pub root: Digest,
    /// Bytes.
    pub size: u64,
    /// The protection of its blocks. Page 0 of a clean file with pages says the same.
    pub profile: Profile,
    /// Digest of a second page 0 with the same content, for a file of one page.
    pub twin: Option<Digest>,
    /// Merkle root over its blocks as stored; `None`: unknown.
    pub blocks: Option<Digest>,
    /// Set while the file is open.
    pub open: Option<Open>,
}

/// Sessions that may have changed a file since its root was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// The id that their pages carry.
    pub file: FileId,
    /// The sessions: at least one.
    pub windows: Windows,
    /// A shrink since.
    pub cut: Option<Cut>,
}

/// A session has made a file shorter since its root was committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// The session, and the highest sequence that it had used before.
    pub after: Window,
    /// The first page that was removed.
    pub from: PageNo,
}

impl Open {
    /// The window of a session.
    pub fn window(&self, session: u32) -> Option<Window> {
        self.windows.iter().copied().find(|window| window.session == session)
    }
}

/// An entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryRow {
    /// The kind of the object.
    pub kind: ObjectKind,
    /// The object.
    pub object: ObjectId,
}

/// A place in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryPlace {
    /// The directory.
    pub dir: ObjectId,
    /// The name in it.
    pub name: Token,
}

/// A change of names that is in the anchor, and perhaps not yet durable in the store. Recovery resolves all intents
/// together: an object is at one of the places that they name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Intent {
    /// An entry is removed.
    Remove {
        /// its place
        at: EntryPlace,
        /// the entry
        was: EntryRow,
    },
    /// An entry moves to another place, which may replace a target; or two entries exchange their places.
    Move {
        /// the place before
        from: EntryPlace,
        /// the place after
        to: EntryPlace,
        /// the stored name there: a token does not reveal it, and the store may have nothing under it
        to_name: Box<[u8]>,
        /// what happens to the target
        over: Over,
        /// for recovery, if rows do not tell
        inodes: Inodes,
    },
}

/// Inode numbers in the store of the moved objects, as the writer saw them. A hint: another store, or the same one
/// mounted again, may have other numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inodes {
    /// of the entry
    pub source: u64,
    /// of the target; 0: there is none
    pub target: u64,
}

/// What happens to the target of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// There is none.
    Nothing,
    /// It is replaced.
    Replaced,
    /// It moves to the source's place.
    Exchanged,
}

impl Over {
    const ALL: [Over; 3] = [Over::Nothing, Over::Replaced, Over::Exchanged];
}

/// The numbers of a vault's sessions. Each session is announced here, durably, before the store's record of sessions
/// has it. So if the record goes beyond `last`, the anchor is too old; if it does not reach `recorded`, the record is
/// too old.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Announced {
    /// The last session that the store's record is known to have.
    pub recorded: u32,
    /// The last session that was announced: the same, except briefly, and after an interruption in that time.
    pub last: u32,
}

impl Announced {
    /// All sessions up to this one are in the store's record.
    pub fn up_to(session: u32) -> Announced {
        Announced { recorded: session, last: session }
    }
}

/// What is recorded of the vault as a whole.
#[derive(Clone, Debug)]
pub struct VaultRow {
    /// Its id.
    pub vault: VaultId,
    /// The number of commits.
    pub revision: Revision,
    /// The next object's number.
    pub next_object: ObjectId,
    /// The next intent's number.
    pub next_intent: u64,
    /// The sessions that have begun.
    pub sessions: Announced,
    /// Its suite; the header says the same.
    pub suite: Suite,
    /// Its deduplication domain; the header says the same.
    pub domain: Domain,
    /// log2 of the trees' degree.
    pub degree_log2: u8,
    /// Whether files also have a root over their blocks, so that all of it can be verified without a key.
    pub blocks: bool,
    /// A writer changes the store, or was interrupted, and its remains were not cleaned up since: entries that are not
    /// recorded may be its own.
    pub is_in_use: bool,
    /// The key of tokens.
    pub tokens: TokenKey,
    /// Its header.
    pub header: Sealed,
    /// A lower bound of the number of entries in its history, and the digest of the last of them.
    pub history: (u64, Digest),
    /// The same of the history that begins with the new header, while the header is being replaced by one with another
    /// history.
    pub next_history: Option<(u64, Digest)>,
    /// The digest of the record of its root's permissions.
    pub root_permissions: Sealed,
}

impl VaultRow {
    /// The row of a vault with the default suite and domain, only a root, and trees of the usual degree over pages.
    /// Header, history and the root's permissions are unset.
    pub fn new(vault: VaultId, tokens: TokenKey) -> VaultRow {
        VaultRow {
            vault,
            revision: Revision(1),
            next_object: ObjectId(ObjectId::ROOT.0 + 1),
            next_intent: 1,
            sessions: Announced::default(),
            suite: Suite::Aes,
            domain: Domain::Zone,
            degree_log2: 4,
            blocks: false,
            is_in_use: false,
            tokens,
            header: Sealed::Nothing,
            history: (0, Digest::NONE),
            next_history: None,
            root_permissions: Sealed::Nothing,
        }
    }
}

impl VaultRow {
    /// What is known of the history that belongs to a current header.
    pub fn history_of(&self, header: Digest) -> (u64, Digest) {
        match (self.header, self.next_history) {
            (Sealed::Becomes { new, .. }, Some(next)) if header == new => next,
            (_, _) => self.history,
        }
    }

    /// The current header with this digest is the one in place.
    pub(crate) fn settle_header(&mut self, is: Digest) {
        self.history = self.history_of(is);
        (self.header, self.next_history) = (Sealed::Is(is), None);
    }
}

impl Row {
    /// The kind of the object.
    pub fn kind(&self) -> ObjectKind {
        match self.content {
            Content::File(_) => ObjectKind::File,
            Content::Dir { .. } => ObjectKind::Dir,
            Content::Link(_) => ObjectKind::Link,
            Content::Char(_) => ObjectKind::Char,
            Content::Block(_) => ObjectKind::Block,
            Content::Fifo => ObjectKind::Fifo,
            Content::Socket => ObjectKind::Socket,
        }
    }

    /// The row's file, if it is one.
    pub fn file(&self) -> Option<&FileRow> {
        if let Content::File(file) = &self.content { Some(file) } else { None }
    }

    /// The size of a file, if its pages need not be read for it: the file is not open, and it has a page that the
    /// anchor knows, or never had a page.
    pub fn size(&self) -> Option<u64> {
        let file = self.file()?;
        let may_lack_its_page = file.root.is_none() && file.twin.is_some();
        (file.open.is_none() && !may_lack_its_page).then_some(file.size)
    }

    pub(crate) fn file_mut(&mut self) -> Option<&mut FileRow> {
        if let Content::File(file) = &mut self.content { Some(file) } else { None }
    }
}

#[cfg(test)]
mod tests;
