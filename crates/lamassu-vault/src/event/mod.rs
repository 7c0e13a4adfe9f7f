//! Integrity events: one type for everything that is found not to be as it was written, and one path for all of them.
//!
//! Code that finds damage calls [`Events::found`], and writes no log of its own. The event is always counted; written
//! to the log within limits ([`limit`]); and queued for a sink ([`queue`]), which never blocks the finder.
//!
//! An event names objects as the store does. It holds no key, no content, and no plaintext name, except in a vault with
//! plain names (`--names plain`), or if the store itself changed a stored name to one.

mod hub;
mod limit;
mod queue;

pub use hub::{Counts, Events, KindCount};

use crate::{Ino, Vault};
use lamassu_format::{BlockNo, Geometry, PageNo};
use lamassu_store::file::{Damage, DamageKind};
use serde::{Serialize, Serializer};
use std::time::{Duration, SystemTime};

/// Target of the lines in the log. Their number is limited here, so a writer of logs need not limit it.
pub const TARGET: &str = "lamassu::integrity";
/// The target of findings that a command prints itself (`check`, `scrub`): the log decides whether it needs a line,
/// too.
pub const TARGET_PRINTED: &str = "lamassu::integrity::printed";

/// Bytes of a path that an event keeps: the store decides how long paths are.
const PATH_MAX: usize = 4096;

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $word:literal,)*) => {
        /// What an event reports. The words are stable, and the same as those of `check`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum IntegrityKind {
            /// The content of a file.
            Content(DamageKind),
            $($(#[$doc])* $kind,)*
        }

        impl IntegrityKind {
            /// All except those of contents.
            const OF_THE_TREE: &[IntegrityKind] = &[$(IntegrityKind::$kind),*];

            /// The stable word.
            pub const fn word(self) -> &'static str {
                match self {
                    IntegrityKind::Content(kind) => kind.word(),
                    $(IntegrityKind::$kind => $word,)*
                }
            }
        }
    };
}

kinds! {
    /// A directory's record is missing or does not open.
    DirectoryRecord = "directory-record",
    /// An entry's name does not open.
    Name = "name",
    /// The companion of a long name is missing or belongs to another.
    Companion = "companion",
    /// A companion without an entry.
    OrphanCompanion = "orphan-companion",
    /// Something in the store that Lamassu did not write.
    Foreign = "foreign",
    /// The target of a symbolic link does not open.
    LinkTarget = "symlink",
    /// An extended attribute, or an access control list, does not open.
    Attribute = "xattr",
    /// Something in the staging directory.
    Staging = "staging",
    /// A dataset does not open.
    Dataset = "dataset",
    /// A file whose length no file of a vault has.
    Length = "length",
    /// The record of sessions is missing or does not open.
    Sessions = "sessions",
    /// The record of the root's permissions does not open.
    RootPermissions = "root-permissions",
    /// A header does not parse, or is not the one that the keys sealed.
    Header = "header",
    /// A history does not verify: it was cut, or changed.
    History = "history",
    /// The store shows an older or another state than the newest, known from the anchor. For a file's content:
    /// [`DamageKind::Stale`], which has the same word.
    Stale = "stale",
    /// The anchor knows an entry that the store does not show.
    Missing = "missing",
    /// The store shows an entry that the anchor does not know.
    Unrecorded = "unrecorded",
    /// An entry is of another kind than the anchor knows.
    OtherKind = "other-kind",
}

impl IntegrityKind {
    /// The kind of the tree with this word; `None` for kinds of contents, and for failures that are no event.
    pub fn of_word(word: &str) -> Option<IntegrityKind> {
        Self::OF_THE_TREE.iter().copied().find(|kind| kind.word() == word)
    }

    /// Begins an event about something that does not open, or is gone.
    pub fn at(self, path: impl Into<String>, text: impl Into<String>) -> IntegrityEvent {
        IntegrityEvent {
            time: SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs(),
            what: self,
            vault: None,
            path: shortened(path.into()),
            inode: None,
            range: None,
            found_by: FoundBy::Read,
            is_damage: true,
            text: text.into(),
        }
    }
}

impl From<DamageKind> for IntegrityKind {
    fn from(kind: DamageKind) -> Self {
        IntegrityKind::Content(kind)
    }
}

impl Serialize for IntegrityKind {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.word())
    }
}

/// What found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FoundBy {
    /// An application's request.
    Read,
    /// `check`.
    Check,
    /// `scrub`.
    Scrub,
    /// The recovery after an interruption.
    Recovery,
}

impl FoundBy {
    /// A stable word.
    pub const fn word(self) -> &'static str {
        match self {
            FoundBy::Read => "read",
            FoundBy::Check => "check",
            FoundBy::Scrub => "scrub",
            FoundBy::Recovery => "recovery",
        }
    }

    /// Whether it prints its findings, so that a person at its terminal needs no line of the log.
    const fn is_printed(self) -> bool {
        match self {
            FoundBy::Check | FoundBy::Scrub => true,
            FoundBy::Read | FoundBy::Recovery => false,
        }
    }
}

/// Which part of a file an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct EventRange {
    /// segment of the first page
    pub segment: u64,
    /// first page
    pub page: u64,
    /// pages from that one on
    pub pages: u64,
    /// first block, if it is about blocks and not about whole pages
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block: Option<u64>,
    /// blocks from that one on
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u64>,
}

/// Something that is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IntegrityEvent {
    /// seconds since 1970
    pub time: u64,
    /// what it is
    #[serde(rename = "kind")]
    pub what: IntegrityKind,
    /// id of the vault or dataset, in hex
    pub vault: Option<String>,
    /// in the store, below the directory of that vault or dataset; empty: that directory
    pub path: String,
    /// in the mount, where it is known
    pub inode: Option<u64>,
    /// which part of a file
    pub range: Option<EventRange>,
    /// what found it
    pub found_by: FoundBy,
    /// `false`: everything can be read, but not all as it was written last; or something harmless lies in the store
    pub is_damage: bool,
    /// a sentence for people
    pub text: String,
}

impl IntegrityEvent {
    /// About damage of a file's content. `tag` is what the file was opened with (`Vault::tag`).
    pub fn of_file(tag: &str, damage: &Damage) -> IntegrityEvent {
        let (path, inode) = place_of(tag);
        let kind = damage.kind;
        let text = match (kind.is_readable(), damage.block) {
            (true, _) => kind.meaning(),
            (false, _) if kind == DamageKind::Stale => "not the newest state, which the anchor knows",
            (false, Some(_)) => "damaged block",
            (false, None) => "damaged page",
        };
        let found_by = match kind {
            DamageKind::BlockPending | DamageKind::Unwritten | DamageKind::Reverted | DamageKind::Shortened => {
                FoundBy::Recovery
            }
            _ => FoundBy::Read,
        };
        IntegrityEvent {
            inode,
            range: Some(EventRange::of(damage, 1)),
            found_by,
            is_damage: !kind.is_readable(),
            ..IntegrityKind::from(kind).at(path, text)
        }
    }

    /// The same with the inode's number.
    pub fn of_inode(self, inode: u64) -> IntegrityEvent {
        IntegrityEvent { inode: Some(inode), ..self }
    }

    /// The same with another finder.
    pub fn by(self, found_by: FoundBy) -> IntegrityEvent {
        IntegrityEvent { found_by, ..self }
    }

    /// About how many bytes it takes.
    fn bytes(&self) -> usize {
        size_of::<IntegrityEvent>() + self.path.len() + self.text.len() + self.vault.as_ref().map_or(0, String::len)
    }
}

impl EventRange {
    /// The range of a damage that extends over `blocks` blocks.
    pub fn of(damage: &Damage, blocks: u64) -> EventRange {
        EventRange {
            segment: damage.segment,
            page: damage.page.0,
            pages: damage.pages,
            block: damage.block.map(|block| block.0),
            blocks: damage.block.map(|_| blocks),
        }
    }

    /// Whole pages, from the first to the last.
    pub fn of_pages(geometry: &Geometry, first: PageNo, last: PageNo) -> EventRange {
        let (segment, pages) = (geometry.segment_of(first), last.0.saturating_sub(first.0) + 1);
        EventRange { segment, page: first.0, pages, block: None, blocks: None }
    }

    /// Blocks, from the first to the last.
    pub fn of_blocks(geometry: &Geometry, first: BlockNo, last: BlockNo) -> EventRange {
        let blocks = last.0.saturating_sub(first.0) + 1;
        let pages = EventRange::of_pages(geometry, geometry.page_of(first), geometry.page_of(last));
        EventRange { block: Some(first.0), blocks: Some(blocks), ..pages }
    }
}

impl Vault {
    /// Where events of this vault go.
    pub fn events(&self) -> &Events {
        &self.options.events
    }

    /// Reports an event. False: it was dropped ([`Events::found`]).
    pub(crate) fn tell(&self, event: IntegrityEvent) -> bool {
        self.options.events.found(event)
    }

    /// Reports an event about a node.
    pub(crate) fn tell_at(&self, ino: Ino, what: IntegrityKind, text: impl Into<String>) {
        let path = self.nodes.lock().stored_path(ino).unwrap_or_default();
        self.tell(what.at(path.display().to_string(), text).of_inode(ino));
    }
}

/// The two parts of a `Vault::tag`: the path in the store, and the inode.
pub(crate) fn place_of(tag: &str) -> (&str, Option<u64>) {
    let number = |rest: &str| rest.strip_suffix(')')?.parse().ok();
    match tag.rsplit_once("(inode ").and_then(|(path, rest)| Some((path, number(rest)?))) {
        Some((path, inode)) => (path.strip_suffix(' ').unwrap_or(path), Some(inode)),
        None => (tag, None),
    }
}

fn shortened(mut path: String) -> String {
    if path.len() > PATH_MAX {
        path.truncate(path.floor_char_boundary(PATH_MAX));
        path.push('…');
    }
    path
}

/// Takes events. A thread of its own calls it, so it may block.
pub trait IntegritySink: Send + Sync {
    /// Takes some events, the oldest first. `lost`: how many events since the last call had no room in the queue. They
    /// are counted and may be in the log, but are never delivered.
    fn deliver(&self, events: &[IntegrityEvent], lost: u64);

    /// The process is ending: do not wait for anything from now on.
    fn end(&self) {}

    /// How many deliveries failed.
    fn failures(&self) -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_check_and_each_is_one_kinds() {
        use crate::check::kind;
        for word in [kind::RECORD, kind::NAME, kind::SYMLINK, kind::XATTR, kind::SESSIONS, kind::ROOT, kind::DATASET] {
            assert_eq!(IntegrityKind::of_word(word).unwrap().word(), word);
        }
        assert_eq!(IntegrityKind::of_word(kind::IO), None, "a failure of the store is no event");
        let words: std::collections::HashSet<_> = IntegrityKind::OF_THE_TREE.iter().map(|kind| kind.word()).collect();
        assert_eq!(words.len(), IntegrityKind::OF_THE_TREE.len());
        assert_eq!(IntegrityKind::from(DamageKind::Stale).word(), IntegrityKind::Stale.word());
    }

    #[test]
    fn a_tag_is_a_path_and_an_inode() {
        let damage =
            Damage { kind: DamageKind::BlockHash, segment: 1, page: PageNo(2), pages: 1, block: Some(BlockNo(130)) };
        let of = |tag| IntegrityEvent::of_file(tag, &damage);
        assert_eq!((&*of("ab/cd (inode 7)").path, of("ab/cd (inode 7)").inode), ("ab/cd", Some(7)));
        assert_eq!((&*of("(inode 7)").path, of("(inode 7)").inode), ("", Some(7)));
        assert_eq!((&*of("ab (inode x)").path, of("ab (inode x)").inode), ("ab (inode x)", None));
        assert_eq!(of("ab").range.unwrap().block, Some(130));
        assert!(of("ab").is_damage && of(&"é".repeat(9999)).path.len() <= PATH_MAX + 3);
        let undone = IntegrityEvent::of_file("ab", &Damage { kind: DamageKind::Unwritten, ..damage });
        assert_eq!((undone.is_damage, undone.found_by), (false, FoundBy::Recovery));
    }
}
