//! What a gateway gets from a provider of objects (`docs/format.md` §6c): listings, properties beside objects, objects.

use crate::bytes::Bytes;
use crate::tree::Lab;
use lamassu_gateway::testing;
use lamassu_vault::detached::{Detached, Identity, Source};
use std::io;
use std::sync::{Arc, OnceLock};

const BUCKET: &str = "bucket";
const PAGE: usize = 4096;

fn files() -> &'static Detached {
    static FILES: OnceLock<Detached> = OnceLock::new();
    FILES.get_or_init(|| Lab::new().detached())
}

/// The document of a listing. What lies between bars is a key, which is sealed.
pub fn listing(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let sealed = |(at, word): (usize, &str)| match at % 2 {
        0 => word.to_owned(),
        _ => testing::name_of(files(), BUCKET, word),
    };
    let document: String = text.split('|').enumerate().map(sealed).collect();
    for (name, key) in testing::listing(files(), BUCKET, document.as_bytes()).unwrap_or_default() {
        let Some(key) = key else { continue };
        // A name with a slash at its end is a group of keys.
        let (name, key) = match name.strip_suffix('/') {
            Some(name) => (name, key.strip_suffix('/').expect("a group has one, too")),
            None => (name.as_str(), key.as_str()),
        };
        assert_eq!(testing::name_of(files(), BUCKET, key), name, "a key has one name");
    }
}

/// The properties beside an object: any text, or any content behind a good seal.
pub fn properties(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    let (is_sealed, parts) = (bytes.u8() & 1 == 1, [0, 1, u32::from(bytes.u16()), u32::MAX]);
    let content = bytes.rest();
    if !is_sealed {
        let text = String::from_utf8_lossy(content);
        assert!(files().open_properties("a", &text).is_err(), "nobody else seals");
        return;
    }
    let sealed = files().seal_properties("a", content).expect("there is randomness");
    assert!(files().open_properties("b", &sealed).is_err(), "they are of one place");
    let opened = files().open_properties("a", &sealed).expect("it is good");
    assert_eq!(opened, content);
    for etag in ["ab", "ab-3"] {
        let Some(again) = testing::properties(&opened, etag, &parts) else { return };
        assert_eq!(testing::properties(&again, etag, &parts), Some(again.clone()), "one encoding");
    }
}

/// A sealed object: its bytes, what identifies it, and its content.
struct Sealed {
    bytes: Vec<u8>,
    identity: Identity,
    content: Vec<u8>,
}

/// Objects without content, within a block, in some blocks, and in more than a page describes.
fn objects() -> &'static [Sealed] {
    static OBJECTS: OnceLock<Vec<Sealed>> = OnceLock::new();
    let sealed = |len: usize| {
        let content: Vec<u8> = (0..len).map(|at| (at / 7 % 251) as u8).collect();
        let mut sealing = files().seal(1 << 20, "object").expect("it begins");
        let mut parts = sealing.write(&content).expect("it is sealed");
        let (rest, identity) = sealing.finish().expect("it ends");
        parts.extend(rest);
        assert!(parts.len() == 1, "none of them is large");
        Sealed { bytes: parts.remove(0).bytes, identity, content }
    };
    OBJECTS.get_or_init(|| [0, 100, 10_000, 600_000].into_iter().map(sealed).collect())
}

struct Changed(Vec<u8>);

impl Source for Changed {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let there = usize::try_from(offset).ok().and_then(|at| self.0.get(at..)).unwrap_or_default();
        let len = there.len().min(buf.len());
        buf[..len].copy_from_slice(&there[..len]);
        Ok(len)
    }
}

/// An object that a provider has changed: what is read is what was stored, or an error.
pub fn object(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    let objects = objects();
    let chosen = |bytes: &mut Bytes<'_>| &objects[usize::from(bytes.u8()) % objects.len()];
    let meant = chosen(&mut bytes);
    let mut stored = meant.bytes.clone();
    while !bytes.is_empty() {
        let kind = bytes.u8();
        let at = bytes.u64() as usize % (stored.len() + 1);
        let page = at / PAGE * PAGE;
        match kind % 7 {
            0 if at < stored.len() => stored[at] ^= bytes.u8(),
            1 => stored.truncate(at),
            2 => stored.extend((0..bytes.u16()).map(|byte| byte as u8)),
            3 => stored[page..].iter_mut().take(PAGE).for_each(|byte| *byte = 0),
            4 => {
                let other = &chosen(&mut bytes).bytes;
                let from = bytes.u16() as usize * PAGE % other.len();
                let until = (from + PAGE).min(other.len());
                stored.splice(page..(page + PAGE).min(stored.len()), other[from..until].iter().copied());
            }
            5 => drop(stored.drain(page..(page + PAGE).min(stored.len()))),
            _ => stored = chosen(&mut bytes).bytes.clone(),
        }
    }
    let Ok(open) = files().open(Arc::new(Changed(stored)), &meant.identity, meant.content.len() as u64, "object")
    else {
        return;
    };
    assert_eq!(open.size(), meant.content.len() as u64);
    for at in (0..=meant.content.len()).step_by(100_000) {
        let Ok(read) = open.read(at as u64, 100_000) else { continue };
        assert!(read == meant.content[at..(at + 100_000).min(meant.content.len())], "what was stored");
    }
}
