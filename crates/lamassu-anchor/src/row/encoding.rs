//! The bytes of rows, entries and intents in a table.

use super::{
    Announced, Content, Cut, EntryPlace, EntryRow, FileRow, Inodes, Intent, Open, Over, Row, Sealed, VaultRow,
};
use crate::codec::{Reader, put};
use crate::types::WINDOWS_MAX;
use crate::{AnchorError, ObjectId, ObjectKind, Part, Revision, Token, TokenKey, Window, Windows};
use lamassu_format::header::VaultId;
use lamassu_format::{Domain, FileId, PageNo, Profile, SessionTag, Suite};

/// Version of all encodings, in the vault's row.
const VERSION: u8 = 1;
/// Longest stored name, bytes.
const NAME_LEN_MAX: usize = 255;

mod flag {
    pub const KIND: u8 = 7;
    pub const TWIN: u8 = 1 << 3;
    pub const OPEN: u8 = 1 << 4;
    pub const CUT: u8 = 1 << 5;
    pub const BLOCKS: u8 = 1 << 6;
    pub const PROFILE: u8 = 1 << 7;
}

impl Row {
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

impl EntryRow {
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
    pub fn decode(bytes: &[u8]) -> Result<EntryRow, AnchorError> {
        let mut from = Reader(bytes);
        let read = entry(&mut from).and_then(|read| from.end().map(|()| read));
        read.ok_or(AnchorError::Damaged { part: Part::Entry })
    }
}

fn entry(from: &mut Reader<'_>) -> Option<EntryRow> {
    let [kind] = from.bytes()?;
    Some(EntryRow { kind: ObjectKind::of_number(kind)?, object: ObjectId(from.number()?) })
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
        out.extend(self.vault.0);
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
        vault: VaultId(vault),
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
