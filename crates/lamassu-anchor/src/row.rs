//! What the anchor knows: rows of objects, entries, intents, and the row of the vault; and their bytes.
//!
//! A row has one encoding. Reading is strict: what no writer writes is damage.

use crate::codec::{Reader, put};
use crate::types::WINDOWS_MAX;
use crate::{AnchorError, Digest, ObjectId, ObjectKind, Part, Revision, Token, TokenKey, Window, Windows};
use lamassu_format::{Domain, FileId, PageNo, Profile, SessionTag, Suite};

/// Version of all of it, in the row of the vault.
const VERSION: u8 = 1;
/// Longest stored name, bytes.
const NAME_LEN_MAX: usize = 255;

/// What is known of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Permission bits (07777).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// How many entries name it.
    pub links: u64,
    /// Its content.
    pub content: Content,
    /// All its sealed attributes.
    pub attributes: Sealed,
}

/// The content of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Of a regular file.
    File(FileRow),
    /// Of a directory.
    Dir {
        /// its directory record
        record: Sealed,
        /// the directory that it lies in, itself for the root
        parent: ObjectId,
        /// its name there
        name: Token,
    },
    /// Of a symbolic link: the target as it is stored.
    Link(Sealed),
    /// The device number of a device.
    Char(u64),
    /// As before.
    Block(u64),
    /// A named pipe has none.
    Fifo,
    /// A socket has none.
    Socket,
}

/// A digest of something that is replaced whole, by one step of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sealed {
    /// There is nothing.
    #[default]
    Nothing,
    /// It is this.
    Is(Digest),
    /// It is being replaced: both are current until the step is known to be durable.
    Becomes {
        /// what it was; [`Digest::NONE`]: nothing
        old: Digest,
        /// what it will be; [`Digest::NONE`]: nothing
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

/// The content of a file, as acknowledged, and who may have changed it since.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileRow {
    /// Merkle root over its pages.
    pub root: Digest,
    /// Bytes.
    pub size: u64,
    /// How its blocks are protected. Of a clean file with pages its page 0 says the same.
    pub profile: Profile,
    /// Digest of a second page 0 with the same content, of a file of one page.
    pub twin: Option<Digest>,
    /// Merkle root over its blocks as they lie in the store; `None`: not known.
    pub blocks: Option<Digest>,
    /// Set while the file is open.
    pub open: Option<Open>,
}

/// That sessions may have changed a file since its root was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// The id that their pages carry.
    pub file: FileId,
    /// The sessions: at least one.
    pub windows: Windows,
    /// A shrink since.
    pub cut: Option<Cut>,
}

/// That a session made a file shorter since its root was committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// The session and the highest sequence that it had given before.
    pub after: Window,
    /// The first page that went.
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
    /// What the entry is.
    pub kind: ObjectKind,
    /// Which object it names.
    pub object: ObjectId,
}

/// A place of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryPlace {
    /// The directory.
    pub dir: ObjectId,
    /// The name in it.
    pub name: Token,
}

/// A change of names that the anchor has, and the store perhaps not yet, or not durably. Recovery puts the places of
/// all intents right together: what is recorded there lies in one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Intent {
    /// An entry goes.
    Remove {
        /// where it was
        at: EntryPlace,
        /// which one it was
        was: Entry,
    },
    /// An entry moves to another place, over what is there; or two change places.
    Move {
        /// from where
        from: EntryPlace,
        /// to where
        to: EntryPlace,
        /// The stored name there: a token does not give it, and nothing may lie there that shows it.
        to_name: Box<[u8]>,
        /// What becomes of what lies there.
        over: Over,
        /// For recovery, where rows do not tell.
        inodes: Inodes,
    },
}

/// The store's inode numbers of what moves, as the writer saw them. A hint: another store, or the same one mounted
/// anew, may have others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inodes {
    /// Of the entry.
    pub source: u64,
    /// Of what lies where it moves to; 0: nothing does.
    pub target: u64,
}

/// What becomes of what lies where an entry moves to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// Nothing lies there.
    Nothing,
    /// It is replaced.
    Replaced,
    /// It goes to where the entry came from.
    Exchanged,
}

impl Over {
    const ALL: [Over; 3] = [Over::Nothing, Over::Replaced, Over::Exchanged];
}

/// How far the sessions of a vault go. Each is announced here, durably, before the store's record of sessions has it:
/// so a record that goes further than `last` says that the anchor is an older one, and one that does not go as far as
/// `recorded` is itself an older one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Announced {
    /// The last one that the store's record is known to have.
    pub recorded: u32,
    /// The last one that was announced; the same, but for a moment, and after an interruption in that.
    pub last: u32,
}

impl Announced {
    /// All up to this one are in the store's record.
    pub fn up_to(session: u32) -> Announced {
        Announced { recorded: session, last: session }
    }
}

/// What is known of the vault as a whole.
#[derive(Clone, Debug)]
pub struct VaultRow {
    /// Its id.
    pub vault: [u8; 16],
    /// How many commits there were.
    pub revision: Revision,
    /// The next object's number.
    pub next_object: ObjectId,
    /// The next intent's number.
    pub next_intent: u64,
    /// The sessions that began.
    pub sessions: Announced,
    /// Its suite, as its header says too.
    pub suite: Suite,
    /// Its deduplication domain, as its header says too.
    pub domain: Domain,
    /// log2 of the trees' degree.
    pub degree_log2: u8,
    /// Whether files have a root over their blocks, too, so that all of it can be verified without a key.
    pub blocks: bool,
    /// A writer changes the store, or was interrupted and what it left was not gone over since: entries that are not
    /// recorded may be its own.
    pub is_in_use: bool,
    /// The key of tokens.
    pub tokens: TokenKey,
    /// Its header.
    pub header: Sealed,
    /// How many entries its history has at least, and the digest of the last of them.
    pub history: (u64, Digest),
    /// The record of its root's permissions.
    pub root_permissions: Sealed,
}

impl VaultRow {
    /// Of a vault of the default suite and domain with nothing but its root, and trees of the usual degree over pages
    /// alone. Its header, its history and its root's permissions are not known yet.
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
            root_permissions: Sealed::Nothing,
        }
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
    /// What it is.
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

    /// The file that it is.
    pub fn file(&self) -> Option<&FileRow> {
        if let Content::File(file) = &self.content { Some(file) } else { None }
    }

    /// The size of a file, where that is not for its pages to say: it is not open, and it has a page that the anchor
    /// has seen, or never had one.
    pub fn size(&self) -> Option<u64> {
        let file = self.file()?;
        let may_lack_its_page = file.root.is_none() && file.twin.is_some();
        (file.open.is_none() && !may_lack_its_page).then_some(file.size)
    }

    pub(crate) fn file_mut(&mut self) -> Option<&mut FileRow> {
        if let Content::File(file) = &mut self.content { Some(file) } else { None }
    }

    /// Its bytes.
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

    /// From its bytes.
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
    // Each bit has a meaning, of files alone but for the kind.
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

/// The default is not written.
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
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.kind.number()];
        put(&mut out, self.object.0);
        out
    }

    /// From its bytes.
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
    /// Its bytes.
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

    /// From its bytes.
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
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let flags = u8::from(self.blocks) | u8::from(self.is_in_use) << 1;
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
        put_sealed(&mut out, self.header);
        put_sealed(&mut out, self.root_permissions);
        out
    }

    /// From its bytes.
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
        root_permissions,
    };
    (is_degree && flags <= 3 && sessions.recorded <= sessions.last && next_object > ObjectId::ROOT).then_some(row)
}

#[cfg(test)]
mod tests;
