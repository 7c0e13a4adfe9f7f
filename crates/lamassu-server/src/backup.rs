//! A backup is a new server directory, made from one whose server may be running. Each vault in it is as of one moment.
//!
//! A backup is a stream of *parts*: a frame that names the part ([`Part`], JSON), then the frames of its content. A
//! frame is its length (u32, little-endian) and that many bytes. A frame of length 0 ends a part. One of length 2³² - 1
//! ends a part whose content is to be discarded.

use crate::administered::Administered;
use crate::alerts::Alert;
use crate::anchor_store::{self, file_of};
use crate::audit::{ChainEnd, Event, Excerpt};
use crate::authority;
use crate::config;
use crate::policy;
use crate::state::{Copied, State};
use crate::{Result, ServerError, dir, webhook};
use lamassu_anchor::export::{self, ExportError};
use lamassu_anchor::table::{self, DiskTable, Table};
use lamassu_anchor::{Anchor, AnchorError};
use lamassu_format::header::VaultId;
use lamassu_rpc::ROWS_MAX;
use lamassu_rpc::convert::Batch;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use zeroize::Zeroizing;

/// Longest frame.
const FRAME_MAX: u32 = 16 << 20;
/// In place of a length: the part is to be discarded.
const WORTHLESS: u32 = u32::MAX;
/// Files that are copied as they are. The authority's key comes last: without it no server runs on the directory.
const FILES: [&str; 5] = [config::FILE, policy::FILE, webhook::SECRET, authority::CERTIFICATE, authority::KEY];
/// May be absent: a server that runs on the backup makes a new one.
const MAY_LACK: &str = webhook::SECRET;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "part")]
enum Part {
    /// A file; its bytes.
    File { name: String },
    /// The rows of an anchor, packed.
    Anchor { vault: String },
    /// [`Alert`]s, JSON, some in each frame.
    Alerts,
    /// The audit log: [`Excerpt`]s, JSON.
    Audit,
    /// [`Copied`], JSON.
    State,
    /// The end of the stream: [`Lacks`], JSON.
    End,
}

/// What could not be read.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Lacks {
    /// vault in hex, and the reason
    anchors: Vec<(String, String)>,
}

/// What a backup contains.
#[derive(Clone, Debug, Default)]
pub struct Made {
    /// how many anchors
    pub anchors: usize,
    /// how many hosts
    pub hosts: usize,
    /// what it lacks, and why
    pub lacks: Vec<String>,
}

/// Sends a backup of a server.
///
/// # Errors
/// [`ServerError`]; what was received by then is no backup.
pub fn send(of: &Administered, to: &mut dyn Write) -> Result<()> {
    let blocks = of.blocks_hosts();
    of.state.verify()?;
    drop(blocks);
    // Noted before the key leaves, so that a stream that is cut off is recorded too.
    of.state.note(Event::BackupBegun)?;
    let to = &mut Sender(to);
    for name in FILES {
        let path = of.dir.join(name);
        let content = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && name == MAY_LACK => continue,
            content => Zeroizing::new(content.map_err(ServerError::file("read", &path))?),
        };
        to.whole(&Part::File { name: name.into() }, &content)?;
    }
    // Before the anchors: a host whose grant ends meanwhile may commit between the copy of the anchor and that end, so
    // it has to report like those that keep their grants.
    let before = of.state.copied()?;
    let mut lacks = Lacks::default();
    of.visit_tables(|id, table| {
        let vault = id.to_string();
        to.json(&Part::Anchor { vault: vault.clone() })?;
        match table.map_err(Stopped::Table).and_then(|table| send_rows(&*table, to)) {
            Ok(()) => to.end(),
            Err(Stopped::Stream(error)) => Err(error),
            Err(Stopped::Table(error)) => {
                to.length(WORTHLESS)?;
                lacks.anchors.push((vault, error.to_string()));
                Ok(())
            }
        }
    })?;
    to.json(&Part::Alerts)?;
    of.state.read_alerts(|alerts| to.json(&alerts))?;
    to.end()?;
    to.json(&Part::Audit)?;
    of.state.read_audit(|_, excerpt| to.json(excerpt))?;
    to.end()?;
    let mut copied = of.state.copied()?;
    copied.hosts = before.hosts;
    // A dataset that was put away meanwhile may be in the backup, with the rights to the vault that it lay in.
    for (dataset, around) in before.lies_in {
        copied.lies_in.entry(dataset).or_insert(around);
    }
    to.whole(&Part::State, &json(&copied)?)?;
    to.whole(&Part::End, &json(&lacks)?)?;
    to.0.flush().map_err(broken)
}

/// Why no more rows are sent.
enum Stopped {
    Stream(ServerError),
    Table(AnchorError),
}

impl From<AnchorError> for Stopped {
    fn from(error: AnchorError) -> Stopped {
        Stopped::Table(error)
    }
}

fn send_rows(table: &dyn Table, to: &mut Sender<'_>) -> std::result::Result<(), Stopped> {
    let mut batch = Batch::default();
    table.visit_whole(|space, key, value| match batch.push(space, key, value) {
        Some(rows) => to.frame(&rows).map_err(Stopped::Stream),
        None => Ok(()),
    })?;
    to.frame(&batch.rest()).map_err(Stopped::Stream)
}

struct Sender<'a>(&'a mut dyn Write);

impl Sender<'_> {
    fn length(&mut self, length: u32) -> Result<()> {
        self.0.write_all(&length.to_le_bytes()).map_err(broken)
    }

    /// An empty frame is not sent: it would end the part.
    fn frame(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let length = u32::try_from(bytes.len()).ok().filter(|length| *length <= FRAME_MAX);
        self.length(length.ok_or_else(|| broken(io::ErrorKind::FileTooLarge.into()))?)?;
        self.0.write_all(bytes).map_err(broken)
    }

    fn json(&mut self, value: &impl Serialize) -> Result<()> {
        self.frame(&json(value)?)
    }

    /// A part with all its content, in as many frames as that takes.
    fn whole(&mut self, part: &Part, content: &[u8]) -> Result<()> {
        self.json(part)?;
        content.chunks(FRAME_MAX as usize).try_for_each(|frame| self.frame(frame))?;
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        self.length(0)
    }
}

fn json(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| broken(error.into()))
}

fn broken(source: io::Error) -> ServerError {
    let source = match source.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::new(io::ErrorKind::UnexpectedEof, "its end is missing"),
        _ => source,
    };
    ServerError::Backup { source }
}

fn garbled(what: &'static str) -> ServerError {
    ServerError::Garbled { detail: format!("the stream of a backup has {what} that does not parse") }
}

/// Makes a server's directory from a stream. It is complete when this returns; after an error there is none.
///
/// # Errors
/// [`ServerError`].
pub fn receive(from: &mut dyn Read, dir: &Path) -> Result<Made> {
    // Locks the directory against another backup.
    let made = dir::make_dir(dir)?;
    let received = Receiver { from, dir }.receive();
    received.inspect_err(|_| made.take_back(dir))
}

struct Receiver<'a> {
    from: &'a mut dyn Read,
    dir: &'a Path,
}

impl Receiver<'_> {
    fn receive(mut self) -> Result<Made> {
        let state = State::make(self.dir)?;
        let anchors = self.dir.join(anchor_store::DIR);
        fs::create_dir(&anchors).map_err(ServerError::file("make", &anchors))?;
        let (mut ids, mut copied, mut authority, mut place) = (Vec::new(), None, None, ChainEnd::default());
        let (mut bad, mut is_changed) = (Vec::new(), None);
        let lacks = loop {
            let part = self.frame()?.ok_or_else(|| garbled("a part"))?;
            match serde_json::from_slice(&part).map_err(|_| garbled("a part"))? {
                Part::File { name } if name == authority::KEY => authority = Some(Zeroizing::new(self.content()?)),
                Part::File { name } if FILES.contains(&&*name) => {
                    authority::write_new(&self.dir.join(name), &self.content()?)?;
                }
                Part::File { .. } => return Err(garbled("a file's name")),
                Part::Anchor { vault } => {
                    let id = VaultId::of_hex(&vault).ok_or_else(|| garbled("a vault's id"))?;
                    match self.anchor(&file_of(&anchors, &id), &id)? {
                        Some(Ok(())) => ids.push(id),
                        Some(Err(why)) => bad.push((vault, why)),
                        None => {}
                    }
                }
                Part::Alerts => {
                    while let Some(alerts) = self.frame()? {
                        let alerts: Vec<Alert> = serde_json::from_slice(&alerts).map_err(|_| garbled("an alert"))?;
                        state.put_alerts(&alerts)?;
                    }
                }
                Part::Audit => {
                    while let Some(excerpt) = self.frame()? {
                        let excerpt: Excerpt = serde_json::from_slice(&excerpt).map_err(|_| garbled("an audit log"))?;
                        place = excerpt.begins.unwrap_or(place);
                        state.put_audit(&excerpt, place)?;
                        // A log that does not verify is kept as it is, and reported.
                        place = excerpt.verified(place).map(|(place, _)| place).unwrap_or_else(|error| {
                            is_changed.get_or_insert(error);
                            excerpt.end(place)
                        });
                    }
                }
                Part::State => copied = Some(self.json::<Copied>()?),
                Part::End => break self.json::<Lacks>()?,
            }
        };
        let (Some(copied), Some(authority)) = (copied, authority) else { return Err(garbled("no state")) };
        state.fill(&copied, &ids)?;
        drop(state);
        authority::write_new(&self.dir.join(authority::KEY), &authority)?;
        let sync = |dir: &Path| fs::File::open(dir).and_then(|dir| dir.sync_all());
        sync(&anchors).and_then(|()| sync(self.dir)).map_err(ServerError::file("sync", self.dir))?;
        let anchors =
            lacks.anchors.into_iter().chain(bad).map(|(vault, why)| format!("the anchor of vault {vault}: {why}"));
        let lacks = anchors.chain(is_changed.map(|error| error.to_string())).collect();
        Ok(Made { anchors: ids.len(), hosts: copied.hosts.len(), lacks })
    }

    /// `None`: the end of a part.
    fn frame(&mut self) -> Result<Option<Vec<u8>>> {
        match self.length()? {
            0 => Ok(None),
            length => self.bytes(length).map(Some),
        }
    }

    fn length(&mut self) -> Result<u32> {
        let mut length = [0; 4];
        self.from.read_exact(&mut length).map_err(broken)?;
        Ok(u32::from_le_bytes(length))
    }

    fn bytes(&mut self, length: u32) -> Result<Vec<u8>> {
        if length > FRAME_MAX {
            return Err(garbled("a frame"));
        }
        let mut bytes = vec![0; length as usize];
        self.from.read_exact(&mut bytes).map_err(broken)?;
        Ok(bytes)
    }

    /// All frames of a short part.
    fn content(&mut self) -> Result<Vec<u8>> {
        let mut content = Vec::new();
        while let Some(frame) = self.frame()? {
            content.extend(frame);
        }
        Ok(content)
    }

    fn json<T: DeserializeOwned>(&mut self) -> Result<T> {
        serde_json::from_slice(&self.content()?).map_err(|_| garbled("a state"))
    }

    /// `None`: the sender could not read it, and names it at the end. An anchor that is none is the reason why.
    fn anchor(&mut self, file: &Path, id: &VaultId) -> Result<Option<std::result::Result<(), String>>> {
        let table = Arc::new(DiskTable::create(file)?);
        let discard = |table| {
            drop(table);
            fs::remove_file(file).map_err(ServerError::file("remove", file))
        };
        loop {
            let rows = match self.length()? {
                0 => break,
                WORTHLESS => return discard(table).map(|()| None),
                length => self.bytes(length)?,
            };
            let rows = table::unpack(&rows, ROWS_MAX).ok_or_else(|| garbled("a row"))?;
            table.commit(&rows)?;
        }
        let opened = Anchor::open(table.clone(), id).map(drop).map_err(ExportError::Anchor);
        match opened.and_then(|()| export::check(&*table, id)) {
            Ok(_) => Ok(Some(Ok(()))),
            // This disk has failed.
            Err(ExportError::Anchor(error @ AnchorError::Io { .. })) => Err(error.into()),
            // What a host has put or committed must not keep all others out of the backup.
            Err(error) => discard(table).map(|()| Some(Err(error.to_string()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::back_up;
    use crate::run;
    use crate::state::Pending;
    use lamassu_anchor::row::{Content, Row, Sealed};
    use lamassu_anchor::table::{Change, Space};
    use lamassu_anchor::{ObjectId, Token, TokenKey, VaultRow};

    /// Makes the anchor of a vault in a server's directory, with one more row.
    fn make_anchor(server: &Path, id: VaultId, more: Change) {
        let dir = server.join(anchor_store::DIR);
        fs::create_dir_all(&dir).expect("makes");
        let table = Arc::new(DiskTable::create(&file_of(&dir, &id)).expect("a table"));
        let content = Content::Dir { record: Sealed::Nothing, parent: ObjectId::ROOT, name: Token([0; 16]) };
        let root = Row { mode: 0o700, uid: 1, gid: 1, links: 1, content, attributes: Sealed::Nothing };
        drop(Anchor::create(table.clone(), VaultRow::new(id, TokenKey::new([2; 32])), root).expect("an anchor"));
        table.commit(&[more]).expect("commits");
    }

    #[test]
    fn an_anchor_that_is_none_is_named_and_keeps_no_other_out_of_a_backup() {
        let dir = tempfile::tempdir().expect("a directory");
        let (server, to) = (dir.path().join("server"), dir.path().join("to"));
        run::init(&server).expect("makes");
        let open = |len| Change { space: Space::Open, key: vec![0; len], value: Some(Vec::new()) };
        for (id, len) in [([1; 16], 8), ([2; 16], 5), ([3; 16], 8)] {
            make_anchor(&server, VaultId(id), open(len));
        }
        let made = back_up(&server, &to).expect("makes");
        assert_eq!((made.anchors, made.lacks.len()), (2, 1));
        assert!(made.lacks[0].contains(&VaultId([2; 16]).to_string()), "{:?}", made.lacks);
        let anchors = to.join(anchor_store::DIR);
        let there = [[1; 16], [2; 16], [3; 16]].map(|id| file_of(&anchors, &VaultId(id)).exists());
        assert_eq!(there, [true, false, true]);
        dir::check_dir(&to).expect("is a server's");
    }

    /// Ends a host's grant when the first rows of an anchor have been taken.
    struct EndsGrant<'a> {
        state: &'a State,
        vault: VaultId,
        taken: Vec<u8>,
    }

    impl Write for EndsGrant<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.taken.extend(bytes);
            let frames = self.taken.windows(8).any(|part| part == b"\"anchor\"");
            if frames && self.state.hosts()["h"].vaults.contains(&self.vault.to_string()) {
                self.state.grant("h", &self.vault.to_string(), false).map_err(io::Error::other)?;
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What it has committed behind the copy of the anchor was acknowledged: the restored vault has to wait for it.
    #[test]
    fn a_host_whose_grant_ends_during_a_backup_is_waited_for_after_a_restore() {
        let dir = tempfile::tempdir().expect("a directory");
        let (server, to) = (dir.path().join("server"), dir.path().join("to"));
        run::init(&server).expect("makes");
        let vault = VaultId([1; 16]);
        make_anchor(&server, vault, Change { space: Space::Open, key: vec![0; 8], value: Some(Vec::new()) });
        let of = Administered::of(&server).expect("opens");
        let pending = Pending { host: "h".into(), until: u64::MAX, vaults: [vault.to_string()].into() };
        of.state.put_token(b"t", &pending, 0).expect("writes");
        of.state.use_token(b"t", 0, b"k").expect("writes").expect("joins");
        let mut stream = EndsGrant { state: &of.state, vault, taken: Vec::new() };
        send(&of, &mut stream).expect("sends");
        let taken = stream.taken;
        assert!(of.state.who_may_use(&vault).is_empty(), "the grant has ended");
        assert_eq!(receive(&mut &taken[..], &to).expect("makes").anchors, 1);
        let restored = State::open(&to).expect("opens");
        assert_eq!(restored.waits_for(&vault), Some(["h".to_owned()].into()));
    }

    #[test]
    fn what_is_longer_than_a_frame_takes_several() {
        let dir = tempfile::tempdir().expect("a directory");
        let content: Vec<u8> = (0..FRAME_MAX + 7).map(|n| (n >> 8) as u8).collect();
        let mut stream = Vec::new();
        Sender(&mut stream).whole(&Part::State, &content).expect("sends");
        let mut receiver = Receiver { from: &mut &stream[..], dir: dir.path() };
        assert!(receiver.frame().expect("a part").is_some());
        assert!(receiver.content().expect("all of it") == content);
    }

    #[test]
    fn a_stream_that_is_cut_or_changed_leaves_nothing_or_a_directory_that_opens() {
        let dir = tempfile::tempdir().expect("a directory");
        let (server, to) = (dir.path().join("server"), dir.path().join("to"));
        run::init(&server).expect("makes");
        let mut stream = Vec::new();
        send(&Administered::of(&server).expect("opens"), &mut stream).expect("sends");
        let received = |stream: &[u8]| {
            let received = receive(&mut &stream[..], &to);
            assert_eq!(to.exists(), received.is_ok(), "{received:?}");
            if received.is_ok() {
                dir::check_dir(&to).expect("is a server's");
                fs::remove_dir_all(&to).expect("removes");
            }
            received.is_ok()
        };
        assert!(received(&stream));
        for cut in (0..stream.len()).step_by(97).chain([stream.len() - 1]) {
            assert!(!received(&stream[..cut]), "cut at {cut}");
        }
        for at in (0..stream.len()).step_by(53) {
            let mut changed = stream.clone();
            changed[at] ^= 0x91;
            received(&changed);
        }
        // One that is there is not touched.
        back_up(&server, &to).expect("makes");
        assert_eq!(receive(&mut &stream[..], &to).expect_err("is not empty").code(), 6);
        dir::check_dir(&to).expect("is a server's");
    }
}
