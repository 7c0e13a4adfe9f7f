//! Rows of objects, entries, intents and the vault, and their encodings.
//!
//! A row has one encoding. Decoding is strict: any other bytes are damage.

use crate::codec::{Reader, put};
use crate::types::WINDOWS_MAX;
use crate::{AnchorError, Digest, ObjectId, ObjectKind, Part, Revision, Token, TokenKey, Window, Windows};
use lamassu_format::{Domain, FileId, PageNo, Profile, SessionTag, Suite};

/// Version of all encodings, in the vault's row.
const VERSION: u8 = 1;
/// Longest stored name, bytes.
const NAME_LEN_MAX: usize = 255;

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
pub struct Entry {
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
        was: Entry,
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
    pub vault: [u8; 16],
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
    pub fn new(vault: [u8; 16], tokens: TokenKey) -> VaultRow {
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

mod flag {
    pub const KIND: u8 = 7;
    pub const TWIN: u8 = 1 << 3;
    pub const OPEN: u8 = 1 << 4;
    pub const CUT: u8 = 1 << 5;
    pub const BLOCKS: u8 = 1 << 6;
    pub const PROFILE: u8 = 1 << 7;
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

    /// Encodes the row.
    pub fn encode(&self) -> Vec<u8> {
        let flags = self.file().map_or(0, |file| {
            let cut = file.open.as_ref().is_some_and(|open| open.cut.is_some());
            let set = [
                (file.twin.is_some(), flag::TWIN),
                (file.open.is_some(), flag::OPEN),
                (cut, flag::CUT),
                (file.blocks.is_some(), flag::BLOCKS),
                (!file.profile.is_default(), flag::PROFILE),
            ];
            set.into_iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum()
        });
        let mut out = vec![self.kind().number() | flags];
        for number in [self.mode.into(), self.uid.into(), self.gid.into(), self.links] {
            put(&mut out, number);
        }
        put_sealed(&mut out, self.attributes);
        match &self.content {
            Content::File(file) => put_file(&mut out, file),
            Content::Dir { record, parent, name } => {
                put_sealed(&mut out, *record);
                put(&mut out, parent.0);
                out.extend(name.0);
            }
            Content::Link(target) => put_sealed(&mut out, *target),
            Content::Char(device) | Content::Block(device) => put(&mut out, *device),
            Content::Fifo | Content::Socket => {}
        }
        out
    }

    /// Decodes a row.
    ///
    /// # Errors
    /// [`AnchorError::Damaged`].
    pub fn decode(bytes: &[u8]) -> Result<Row, AnchorError> {
        decode_row(bytes).ok_or(AnchorError::Damaged { part: Part::Row })
    }
}

fn decode_row(bytes: &[u8]) -> Option<Row> {
    let (&first, rest) = bytes.split_first()?;
    let kind = ObjectKind::of_number(first & flag::KIND)?;
    let has_lone_cut = first & flag::CUT != 0 && first & flag::OPEN == 0;
    // Each bit has a meaning; all but the kind are for files only.
    if has_lone_cut || (kind != ObjectKind::File && first != kind.number()) {
        return None;
    }
    let mut from = Reader(rest);
    let mode = from.number32().filter(|mode| *mode <= 0o7777)?;
    let (uid, gid, links) = (from.number32()?, from.number32()?, from.number()?);
    let attributes = sealed(&mut from)?;
    let content = match kind {
        ObjectKind::File => Content::File(file(&mut from, first)?),
        ObjectKind::Dir => {
            Content::Dir { record: sealed(&mut from)?, parent: ObjectId(from.number()?), name: Token(from.bytes()?) }
        }
        ObjectKind::Link => Content::Link(sealed(&mut from)?),
        ObjectKind::Char => Content::Char(from.number()?),
        ObjectKind::Block => Content::Block(from.number()?),
        ObjectKind::Fifo => Content::Fifo,
        ObjectKind::Socket => Content::Socket,
    };
    from.end()?;
    Some(Row { mode, uid, gid, links, content, attributes })
}

fn put_file(out: &mut Vec<u8>, file: &FileRow) {
    put(out, file.size);
    out.extend(file.root.0);
    if !file.profile.is_default() {
        out.push(file.profile.number());
    }
    out.extend(file.twin.iter().flat_map(|twin| twin.0));
    out.extend(file.blocks.iter().flat_map(|blocks| blocks.0));
    if let Some(open) = &file.open {
        out.extend(open.file.0);
        put(out, open.windows.len() as u64);
        for window in &open.windows {
            put_window(out, *window);
        }
        if let Some(cut) = open.cut {
            put_window(out, cut.after);
            put(out, cut.from.0);
        }
    }
}

fn put_window(out: &mut Vec<u8>, window: Window) {
    put(out, window.session.into());
    out.extend(window.tag.0);
    put(out, window.covered.into());
}

fn window(from: &mut Reader<'_>) -> Option<Window> {
    Some(Window { session: from.number32()?, tag: SessionTag(from.bytes()?), covered: from.number32()? })
}

fn file(from: &mut Reader<'_>, flags: u8) -> Option<FileRow> {
    let size = from.number()?;
    let root = from.digest()?;
    let profile = if flags & flag::PROFILE != 0 { profile(from)? } else { Profile::DEFAULT };
    let twin = if flags & flag::TWIN != 0 { Some(from.digest()?) } else { None };
    let blocks = if flags & flag::BLOCKS != 0 { Some(from.digest()?) } else { None };
    let open = if flags & flag::OPEN != 0 { Some(open(from, flags & flag::CUT != 0)?) } else { None };
    Some(FileRow { root, size, profile, twin, blocks, open })
}

/// The default is not encoded.
fn profile(from: &mut Reader<'_>) -> Option<Profile> {
    let [number] = from.bytes()?;
    Profile::of_number(number).filter(|profile| !profile.is_default())
}

fn open(from: &mut Reader<'_>, has_cut: bool) -> Option<Open> {
    let file = FileId(from.bytes()?);
    let count = from.number().filter(|count| (1..=WINDOWS_MAX as u64).contains(count))?;
    let mut windows = Windows::new();
    for _ in 0..count {
        let window = window(from)?;
        let before = windows.last().map_or(0, |last| last.session);
        if window.session <= before {
            return None;
        }
        windows.push(window);
    }
    let cut = match has_cut {
        true => Some(Cut { after: window(from)?, from: PageNo(from.number()?) }),
        false => None,
    };
    (!file.is_none()).then_some(Open { file, windows, cut })
}

fn put_sealed(out: &mut Vec<u8>, sealed: Sealed) {
    match sealed {
        Sealed::Nothing => out.push(0),
        Sealed::Is(digest) => {
            out.push(1);
            out.extend(digest.0);
        }
        Sealed::Becomes { old, new } => {
            out.push(2);
            out.extend(old.0);
            out.extend(new.0);
        }
    }
}

fn sealed(from: &mut Reader<'_>) -> Option<Sealed> {
    match from.bytes()? {
        [0] => Some(Sealed::Nothing),
        [1] => from.digest().filter(|digest| !digest.is_none()).map(Sealed::Is),
        [2] => Some(Sealed::Becomes { old: from.digest()?, new: from.digest()? })
            .filter(|sealed| !matches!(sealed, Sealed::Becomes { old, new } if old == new)),
        [_] => None,
    }
}

impl Entry {
    /// Encodes the entry.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.kind.number()];
        put(&mut out, self.object.0);
        out
    }

    /// Decodes an entry.
    ///
    /// # Errors
    /// [`AnchorError::Damaged`].
    pub fn decode(bytes: &[u8]) -> Result<Entry, AnchorError> {
        let mut from = Reader(bytes);
        let read = entry(&mut from).and_then(|read| from.end().map(|()| read));
        read.ok_or(AnchorError::Damaged { part: Part::Entry })
    }
}

fn entry(from: &mut Reader<'_>) -> Option<Entry> {
    let [kind] = from.bytes()?;
    Some(Entry { kind: ObjectKind::of_number(kind)?, object: ObjectId(from.number()?) })
}

impl Intent {
    /// Encodes the intent.
    pub fn encode(&self) -> Vec<u8> {
        let put_place = |out: &mut Vec<u8>, place: &EntryPlace| {
            put(out, place.dir.0);
            out.extend(place.name.0);
        };
        let (kind, places) = match self {
            Intent::Remove { at, .. } => (0, vec![at]),
            Intent::Move { from, to, over, .. } => (1 + *over as u8, vec![from, to]),
        };
        let mut out = vec![kind];
        places.into_iter().for_each(|place| put_place(&mut out, place));
        if let Intent::Remove { was, .. } = self {
            out.extend(was.encode());
        }
        if let Intent::Move { to_name, inodes, .. } = self {
            put(&mut out, to_name.len() as u64);
            out.extend(to_name);
            put(&mut out, inodes.source);
            put(&mut out, inodes.target);
        }
        out
    }

    /// Decodes an intent.
    ///
    /// # Errors
    /// [`AnchorError::Damaged`].
    pub fn decode(bytes: &[u8]) -> Result<Intent, AnchorError> {
        let mut from = Reader(bytes);
        let read = intent(&mut from).and_then(|read| from.end().map(|()| read));
        read.ok_or(AnchorError::Damaged { part: Part::Intent })
    }
}

fn intent(from: &mut Reader<'_>) -> Option<Intent> {
    let place = |from: &mut Reader<'_>| Some(EntryPlace { dir: ObjectId(from.number()?), name: Token(from.bytes()?) });
    match from.bytes()? {
        [0] => Some(Intent::Remove { at: place(from)?, was: entry(from)? }),
        [kind @ 1..=3] => Some(Intent::Move {
            from: place(from)?,
            to: place(from)?,
            to_name: from.text(NAME_LEN_MAX)?,
            over: Over::ALL[usize::from(kind - 1)],
            inodes: Inodes { source: from.number()?, target: from.number()? },
        }),
        [_] => None,
    }
}

impl VaultRow {
    /// Encodes the row.
    pub fn encode(&self) -> Vec<u8> {
        let begins = u8::from(self.next_history.is_some()) << 2;
        let flags = u8::from(self.blocks) | u8::from(self.is_in_use) << 1 | begins;
        let domain = Domain::ALL.iter().position(|domain| *domain == self.domain).unwrap_or_default();
        let mut out = vec![VERSION, self.degree_log2, flags, self.suite.id(), domain as u8];
        out.extend(self.vault);
        out.extend(self.tokens.bytes());
        let Announced { recorded, last } = self.sessions;
        for number in
            [self.revision.0, self.next_object.0, self.next_intent, recorded.into(), last.into(), self.history.0]
        {
            put(&mut out, number);
        }
        out.extend(self.history.1.0);
        if let Some((count, head)) = self.next_history {
            put(&mut out, count);
            out.extend(head.0);
        }
        put_sealed(&mut out, self.header);
        put_sealed(&mut out, self.root_permissions);
        out
    }

    /// Decodes a row.
    ///
    /// # Errors
    /// [`AnchorError::Version`], [`AnchorError::Damaged`].
    pub fn decode(bytes: &[u8]) -> Result<VaultRow, AnchorError> {
        match bytes.first() {
            Some(&VERSION) => vault(&bytes[1..]).ok_or(AnchorError::Damaged { part: Part::Vault }),
            Some(&found) => Err(AnchorError::Version { found }),
            None => Err(AnchorError::Damaged { part: Part::Vault }),
        }
    }
}

fn vault(bytes: &[u8]) -> Option<VaultRow> {
    let mut from = Reader(bytes);
    let [degree_log2, flags, suite, domain] = from.bytes()?;
    let suite = Suite::ALL.into_iter().find(|known| known.id() == suite)?;
    let domain = *Domain::ALL.get(usize::from(domain))?;
    let (vault, tokens) = (from.bytes()?, from.bytes()?);
    let revision = Revision(from.number()?);
    let (next_object, next_intent) = (ObjectId(from.number()?), from.number()?);
    let sessions = Announced { recorded: from.number32()?, last: from.number32()? };
    let history = (from.number()?, from.digest()?);
    let next_history = match flags & 4 != 0 {
        true => Some((from.number()?, from.digest()?)),
        false => None,
    };
    let (header, root_permissions) = (sealed(&mut from)?, sealed(&mut from)?);
    from.end()?;
    let tokens = TokenKey::new(tokens);
    let is_degree = (1..=8).contains(&degree_log2);
    let row = VaultRow {
        vault,
        revision,
        next_object,
        next_intent,
        sessions,
        suite,
        domain,
        degree_log2,
        blocks: flags & 1 != 0,
        is_in_use: flags & 2 != 0,
        tokens,
        header,
        history,
        next_history,
        root_permissions,
    };
    let is_replaced = next_history.is_none() || matches!(header, Sealed::Becomes { .. });
    (is_degree && is_replaced && flags <= 7 && sessions.recorded <= sessions.last && next_object > ObjectId::ROOT)
        .then_some(row)
}

#[cfg(test)]
mod tests;
