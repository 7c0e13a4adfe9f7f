//! Directories, symbolic links and special files (`docs/format.md` §5 to §7).

use super::{Shown, Subject};
use crate::fault::Result;
use crate::text;
use lamassu_crypto::outer::{HEAD_LEN, RecordKind};
use lamassu_format::header::NameMode;
use lamassu_format::name::{self, Stored, classify};
use lamassu_format::record::DirRecord;
use lamassu_store::backend::open_regular;
use rustix::fs::CWD;
use serde::Serialize;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// Longest text of a record that is kept as a file, as lamassu-vault has it.
const TEXT_MAX: usize = 8191;

/// A directory, decoded.
#[derive(Serialize)]
pub struct Directory {
    names: &'static str,
    record: Option<Record>,
    entries: usize,
    long_names: usize,
    companions: usize,
    link_rests: usize,
    foreign: Vec<String>,
}

/// A sealed record, decoded.
#[derive(Serialize)]
pub struct Record {
    /// `good`, or what is wrong with it
    state: String,
    sealed_bytes: usize,
    /// of a directory
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// of what is made in that directory
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<String>,
}

/// A symbolic link, decoded.
#[derive(Serialize)]
pub struct Symlink {
    long: bool,
    record: Record,
    target_bytes: Option<usize>,
}

/// Nothing is sealed but names and attributes.
#[derive(Serialize)]
pub struct Special {}

pub fn directory(subject: &Subject<'_>) -> Result<Directory> {
    let header = &subject.unsealed.found.header;
    let path = &subject.on_disk;
    let record = match header.names() {
        NameMode::Plain => None,
        NameMode::Encrypted => Some(directory_record(subject, &path.join(name::DIR_RECORD))?),
    };
    let mut found = Directory {
        names: header.names().name(),
        record,
        entries: 0,
        long_names: 0,
        companions: 0,
        link_rests: 0,
        foreign: Vec::new(),
    };
    for entry in std::fs::read_dir(path).map_err(subject.failed("list", path))? {
        let stored = entry.map_err(subject.failed("list", path))?.file_name();
        match classify(header.names(), stored.as_bytes()) {
            Stored::Root | Stored::DirRecord => {}
            Stored::Sealed(_) | Stored::Plain => found.entries += 1,
            Stored::Long(_) => {
                found.entries += 1;
                found.long_names += 1;
            }
            Stored::Companion(_) => found.companions += 1,
            Stored::LinkRest(_) => found.link_rests += 1,
            Stored::Foreign => found.foreign.push(stored.to_string_lossy().into_owned()),
        }
    }
    found.foreign.sort();
    Ok(found)
}

fn directory_record(subject: &Subject<'_>, path: &Path) -> Result<Record> {
    let text = match read_text(path) {
        Ok(text) => text,
        Err(error) => {
            return Ok(Record { state: format!("unreadable: {error}"), sealed_bytes: 0, id: None, profile: None });
        }
    };
    let (record, content) = open(subject, &[RecordKind::Directory], &text)?;
    let parsed = content.as_deref().map(DirRecord::parse);
    let named = |dir: &DirRecord<'_>| dir.profile.named(subject.unsealed.found.header.suite()).to_string();
    Ok(match parsed {
        Some(Ok(dir)) => Record { id: Some(text::hex(&dir.id)), profile: Some(named(&dir)), ..record },
        Some(Err(error)) => Record { state: error.to_string(), ..record },
        None => record,
    })
}

/// A symbolic link's target, or a file's content where the store has no links (§6). Whatever else stands there is
/// neither waited for nor read to its end.
fn read_text(path: &Path) -> io::Result<Vec<u8>> {
    match std::fs::read_link(path) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
        target => return target.map(|t| t.into_os_string().into_vec()),
    }
    let file = open_regular(CWD, path)?;
    let mut text = Vec::new();
    file.take(TEXT_MAX as u64 + 1).read_to_end(&mut text)?;
    match text.len() <= TEXT_MAX {
        true => Ok(text),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "longer than any record")),
    }
}

/// Opens b64 of a sealed record of one of `kinds`. The content may hold secrets: callers show its shape alone.
fn open(subject: &Subject<'_>, kinds: &[RecordKind], text: &[u8]) -> Result<(Record, Option<Vec<u8>>)> {
    let Some(sealed) = name::decode(text) else {
        return Ok((Record { state: "not base64url".into(), sealed_bytes: 0, id: None, profile: None }, None));
    };
    let ring = subject.unsealed.keys.key_ring(subject.unsealed.found.header.suite())?;
    let sealed_bytes = sealed.len();
    let mut state = String::new();
    for kind in kinds {
        match ring.open_record(*kind, &[], &sealed) {
            Ok(content) => {
                return Ok((Record { state: "good".into(), sealed_bytes, id: None, profile: None }, Some(content)));
            }
            Err(error) => state = error.to_string(),
        }
    }
    Ok((Record { state, sealed_bytes, id: None, profile: None }, None))
}

pub fn symlink(subject: &Subject<'_>) -> Result<Symlink> {
    let path = &subject.on_disk;
    let target = std::fs::read_link(path).map_err(subject.failed("read the link", path))?.into_os_string();
    let bytes = target.as_bytes();
    let (long, text) = match bytes.strip_prefix(b".") {
        Some(rest) => (true, rest),
        None => (false, bytes),
    };
    let kind = if long { RecordKind::SymlinkHead } else { RecordKind::Symlink };
    let (record, content) = open(subject, &[kind], text)?;
    // §7: a head is a 16-byte id, the total length as u16, and the first bytes.
    let target_bytes = match (long, content) {
        (false, Some(content)) => Some(content.len()),
        (true, Some(content)) => content.get(16..18).map(|l| usize::from(u16::from_le_bytes([l[0], l[1]]))),
        (_, None) => None,
    };
    Ok(Symlink { long, record, target_bytes })
}

pub fn special() -> Special {
    Special {}
}

impl Record {
    fn text(&self) -> String {
        let mut id = self.id.as_ref().map_or(String::new(), |id| format!(", id {id}"));
        if let Some(profile) = &self.profile {
            id.push_str(&format!(", profile {profile}"));
        }
        let content = self.sealed_bytes.saturating_sub(HEAD_LEN);
        format!("record        {}, {content} bytes sealed{id}\n", self.state)
    }
}

impl Shown for Directory {
    fn text(&self) -> String {
        let record = self.record.as_ref().map_or(String::new(), Record::text);
        let mut out = format!(
            "names         {}\n{record}entries       {}, {} of them with long names\ncompanions    {} of names, {} of links\n",
            self.names, self.entries, self.long_names, self.companions, self.link_rests
        );
        for name in &self.foreign {
            out.push_str(&format!("foreign       {}\n", text::printable(name)));
        }
        out
    }
}

impl Shown for Symlink {
    fn text(&self) -> String {
        let form = if self.long { "long: head here, rest in a companion" } else { "short" };
        let target = self.target_bytes.map_or("unknown".into(), |n| format!("{n} bytes"));
        format!("form          {form}\n{}target        {target}\n", self.record.text())
    }
}

impl Shown for Special {
    fn text(&self) -> String {
        "sealed        only its name and attributes\n".into()
    }
}
