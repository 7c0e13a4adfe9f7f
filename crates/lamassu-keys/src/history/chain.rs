//! Entries and their chain (§4a): bytes in, bytes out.

use super::event::{self, Event};
use crate::KeyError;
use lamassu_crypto::{Secret, wrap};
use lamassu_format::header::{HistoryHead, HistoryMark};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Read;

/// Length field, nonce, tag.
const HEAD_LEN: usize = 4 + 24 + 16;
/// Contents are padded to a multiple of this, so that their lengths do not reveal what happened.
const UNIT: usize = 256;
/// Longest content.
const CONTENT_MAX: usize = 64 << 10;
/// Longest entry.
pub(super) const ENTRY_MAX: usize = HEAD_LEN + CONTENT_MAX;

/// Something that was done to the vault's keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryEntry {
    /// from 1
    #[serde(skip)]
    pub sequence: u64,
    /// seconds since 1970
    pub time: u64,
    /// the event: [`super::Kind::name`], or a word of a later version
    pub event: String,
    /// the user, on `host`
    pub uid: u32,
    /// the user's name, if known
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// the machine
    pub host: String,
    /// the slot concerned
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
    /// `inner` or `outer`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<String>,
    /// the epoch concerned
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u32>,
    /// further details
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub details: BTreeMap<String, String>,
}

/// Why a history does not verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It, or one before it, was changed, removed, inserted or moved.
    #[error(
        "entry {sequence} does not verify: it was changed, or entries before it were removed, inserted or reordered"
    )]
    Broken {
        /// the first that does not open
        sequence: u64,
    },
    /// Entries that the header has counted are missing.
    #[error("the history was cut off: the header has seen {seen} entries, {found} are there")]
    CutOff {
        /// how many the header has counted
        seen: u64,
        /// how many exist
        found: u64,
    },
    /// The chain is another one than the header's.
    #[error("entry {sequence} is not the one that the header has seen")]
    OtherHead {
        /// the header's last entry
        sequence: u64,
    },
}

/// The result of reading a history.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// the entries that verify, in order
    pub entries: Vec<HistoryEntry>,
    /// why the chain ends there, or lacks entries
    pub fault: Option<Fault>,
    /// bytes after the last entry, of an interrupted append
    pub torn_bytes: u64,
}

/// The end of a chain, to which the next entry is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) mark: HistoryMark,
}

impl Link {
    pub(super) const START: Link = Link { mark: HistoryMark { count: 0, head: HistoryHead([0; 32]) } };

    fn aad(&self, id: &[u8; 16]) -> Vec<u8> {
        let sequence = self.mark.count + 1;
        [&b"lamassu v1 history"[..], id, &sequence.to_le_bytes(), &self.mark.head.0].concat()
    }

    fn then(&self, entry: &[u8]) -> Link {
        Link { mark: HistoryMark { count: self.mark.count + 1, head: HistoryHead(wrap::sha256(entry)) } }
    }

    /// The bytes of the next entry, and the chain's end after it.
    pub(super) fn seal(
        &self,
        key: &Secret<32>,
        id: &[u8; 16],
        entry: &HistoryEntry,
    ) -> Result<(Vec<u8>, Link), KeyError> {
        let json = |entry: &HistoryEntry| serde_json::to_vec(entry).expect("strings and integers always serialise");
        let mut content = json(entry);
        if content.len() > CONTENT_MAX {
            content = json(&HistoryEntry { details: BTreeMap::new(), ..entry.clone() });
        }
        self.seal_content(key, id, content)
    }

    fn seal_content(&self, key: &Secret<32>, id: &[u8; 16], mut content: Vec<u8>) -> Result<(Vec<u8>, Link), KeyError> {
        content.resize(content.len().next_multiple_of(UNIT), b' ');
        let (nonce, sealed) = wrap::seal(key, &self.aad(id), &content)?;
        let len = u32::try_from(content.len()).expect("at most 64 KiB");
        let bytes = [&len.to_le_bytes()[..], &nonce, &sealed].concat();
        let next = self.then(&bytes);
        Ok((bytes, next))
    }

    /// Opens the bytes of the next entry; `None`: they are not the next entry.
    fn open(&self, key: &Secret<32>, id: &[u8; 16], bytes: &[u8]) -> Option<(HistoryEntry, Link)> {
        let (head, _) = bytes.split_at_checked(HEAD_LEN)?;
        let nonce = head[4..28].try_into().expect("24 bytes");
        let content = wrap::open(key, nonce, &self.aad(id), &bytes[28..]).ok()?;
        let mut entry: HistoryEntry = serde_json::from_slice(content.expose()).ok()?;
        entry.sequence = self.mark.count + 1;
        Some((entry, self.then(bytes)))
    }
}

impl HistoryEntry {
    /// The entry for an event, now and on this machine.
    pub(super) fn of(event: &Event) -> HistoryEntry {
        let Event { kind, slot, epoch, uid, details } = event;
        HistoryEntry {
            sequence: 0,
            time: crate::unix_now(),
            event: kind.name().into(),
            uid: *uid,
            user: event::user_name(*uid),
            host: event::host_name(),
            slot: *slot,
            tier: epoch.map(|(tier, _)| tier.name().into()),
            epoch: epoch.map(|(_, number)| number),
            details: details.iter().map(|(k, v)| ((*k).into(), v.clone())).collect(),
        }
    }
}

/// What follows the last entry that verifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// nothing
    Clean,
    /// an interrupted append: that many bytes, which never were an entry
    Torn(u64),
    /// something that is not an entry of this chain
    Broken,
}

/// Reads a chain. `input` yields its bytes in order; entries are passed to `each`.
pub(super) fn walk(
    mut input: impl Read,
    key: &Secret<32>,
    id: &[u8; 16],
    mut each: impl FnMut(HistoryEntry, Link),
) -> std::io::Result<(Link, u64, End)> {
    let (mut link, mut good) = (Link::START, 0u64);
    let mut bytes = Vec::with_capacity(4096);
    loop {
        bytes.clear();
        input.by_ref().take(4).read_to_end(&mut bytes)?;
        if bytes.is_empty() {
            return Ok((link, good, End::Clean));
        }
        let len = bytes.first_chunk().map_or(0, |len| u32::from_le_bytes(*len) as usize);
        let plausible = len > 0 && len <= CONTENT_MAX && len.is_multiple_of(UNIT);
        let rest = if plausible { HEAD_LEN - 4 + len } else { ENTRY_MAX };
        input.by_ref().take(rest as u64).read_to_end(&mut bytes)?;
        // The length is not sealed: an entry is valid only if it is as long as it says.
        let whole = plausible && bytes.len() == HEAD_LEN + len;
        let opened = if whole { link.open(key, id, &bytes) } else { None };
        if let Some((entry, next)) = opened {
            each(entry, next);
            (link, good) = (next, good + bytes.len() as u64);
            continue;
        }
        // A power cut leaves part of one entry, or zeros in its place, and nothing after it.
        let mut more = [0u8];
        let is_last = input.read(&mut more)? == 0;
        let torn = is_last && (plausible || bytes.len() < 4 || bytes[..4] == [0; 4]);
        return Ok((link, good, if torn { End::Torn(bytes.len() as u64) } else { End::Broken }));
    }
}

/// The digest of an entry, counted from 1, computed without the key; `None`: the chain is shorter. Only the key
/// verifies the entries before it, to which it is bound.
pub(super) fn head_at(mut input: impl Read, count: u64) -> std::io::Result<Option<HistoryHead>> {
    let mut bytes = Vec::with_capacity(4096);
    for sequence in 1..=count {
        bytes.clear();
        input.by_ref().take(4).read_to_end(&mut bytes)?;
        let len = bytes.first_chunk().map_or(0, |len| u32::from_le_bytes(*len) as usize);
        if len == 0 || len > CONTENT_MAX || !len.is_multiple_of(UNIT) {
            return Ok(None);
        }
        input.by_ref().take((HEAD_LEN - 4 + len) as u64).read_to_end(&mut bytes)?;
        if bytes.len() != HEAD_LEN + len {
            return Ok(None);
        }
        if sequence == count {
            return Ok(Some(HistoryHead(wrap::sha256(&bytes))));
        }
    }
    Ok(None)
}

/// A chain of entries with these contents, each at most [`CONTENT_MAX`] bytes.
#[cfg(feature = "testing")]
pub(crate) fn chain_of(key: &Secret<32>, id: &[u8; 16], contents: &[&[u8]]) -> Result<Vec<u8>, KeyError> {
    let (mut chain, mut link) = (Vec::new(), Link::START);
    for content in contents {
        let (bytes, next) = link.seal_content(key, id, content[..content.len().min(CONTENT_MAX)].to_vec())?;
        chain.extend_from_slice(&bytes);
        link = next;
    }
    Ok(chain)
}

/// The number of entries of a chain that verify, and their length in bytes.
#[cfg(feature = "testing")]
pub(crate) fn read_chain(key: &Secret<32>, id: &[u8; 16], chain: &[u8]) -> (usize, usize) {
    let mut seen = 0;
    let (_, good, _) = walk(chain, key, id, |_, _| seen += 1).expect("memory reads");
    (seen, good as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: [u8; 16] = [3; 16];

    fn key() -> Secret<32> {
        Secret::new(&mut [7; 32])
    }

    fn entry(text: &str) -> HistoryEntry {
        let event = Event::new(super::super::EventKind::Loaded).detail("text", text);
        HistoryEntry { time: 1, host: "h".into(), user: None, ..HistoryEntry::of(&event) }
    }

    fn chain(texts: &[&str]) -> Vec<u8> {
        let (mut bytes, mut link) = (Vec::new(), Link::START);
        for text in texts {
            let (next, after) = link.seal(&key(), &ID, &entry(text)).unwrap();
            bytes.extend_from_slice(&next);
            link = after;
        }
        bytes
    }

    fn walked(bytes: &[u8]) -> (usize, u64, End) {
        let mut seen = 0;
        let (link, good, end) = walk(bytes, &key(), &ID, |_, _| seen += 1).unwrap();
        assert_eq!(link.mark.count, seen as u64);
        (seen, good, end)
    }

    #[test]
    fn an_entry_is_found_without_a_key() {
        let bytes = chain(&["a", "b", "c"]);
        let mut heads = vec![None];
        walk(&bytes[..], &key(), &ID, |_, link| heads.push(Some(link.mark.head))).unwrap();
        heads.push(None);
        let found: Vec<_> = (0..5).map(|count| head_at(&bytes[..], count).unwrap()).collect();
        assert_eq!(found, heads);
        assert_eq!(head_at(&bytes[..bytes.len() - 1], 3).unwrap(), None);
        assert_eq!(head_at(&[0xff; 9][..], 1).unwrap(), None);
    }

    #[test]
    fn what_does_not_fit_leaves_its_details() {
        let long = HistoryEntry { details: [("x".into(), "y".repeat(CONTENT_MAX))].into(), ..entry("") };
        let (bytes, _) = Link::START.seal(&key(), &ID, &long).unwrap();
        assert!(bytes.len() <= ENTRY_MAX);
        assert_eq!(walked(&bytes), (1, bytes.len() as u64, End::Clean));
    }

    #[test]
    fn members_that_a_later_program_adds_are_passed_over() {
        let content = br#"{"time":1,"event":"melted","uid":0,"host":"h","colour":"red"}"#;
        let parsed: HistoryEntry = serde_json::from_slice(content).unwrap();
        assert_eq!(parsed.event, "melted");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic_and_open_nothing(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            prop_assert_eq!(walked(&bytes).0, 0);
        }

        #[test]
        fn what_is_behind_good_entries_is_told_apart(
            texts in prop::collection::vec("[a-z]{0,400}", 0..5), tail in prop::collection::vec(any::<u8>(), 0..600), zeros in 0usize..900,
        ) {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            let good = chain(&texts);
            let all = |tail: &[u8]| walked(&[&good[..], tail].concat());
            prop_assert_eq!(all(&[]), (texts.len(), good.len() as u64, End::Clean));
            let (seen, len, _) = all(&tail);
            prop_assert_eq!((seen, len), (texts.len(), good.len() as u64));
            let end = if zeros == 0 { End::Clean } else { End::Torn(zeros as u64) };
            prop_assert_eq!(all(&vec![0; zeros]).2, end);
        }
    }
}
