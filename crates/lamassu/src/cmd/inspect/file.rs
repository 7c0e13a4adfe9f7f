//! A regular file: geometry, then every page (`docs/format.md` §8, §9).
//!
//! Pages are read one by one straight from the store, and one that does not open does not keep the others from being
//! shown.

use super::{Shown, Subject};
use crate::fault::Result;
use crate::text;
use lamassu_crypto::ring::OpenError;
use lamassu_format::page::Page;
use lamassu_format::{BlockNo, Geometry, PAGE_LEN, PageNo, Suite};
use lamassu_store::backend::{next_data, open_regular};
use rustix::fs::CWD;
use serde::Serialize;
use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// A file, decoded.
#[derive(Serialize)]
pub struct Inspected {
    suite: &'static str,
    block_size: u64,
    reserved_slots: usize,
    blocks_per_page: u64,
    segment_bytes: u64,
    stored_bytes: u64,
    /// What the last page present, or page 0 where it rules, says.
    size: Option<u64>,
    file_id: Option<String>,
    convergent: bool,
    /// how its blocks are protected, as page 0 says
    profile: Option<String>,
    pages: Vec<InspectedPage>,
}

/// A page, decoded.
#[derive(Serialize)]
struct InspectedPage {
    page: u64,
    /// More than one where a hole of the store takes the place of several.
    #[serde(skip_serializing_if = "is_one")]
    pages: u64,
    segment: u64,
    offset: u64,
    /// `good`, `absent`, `no-key`, `broken`, `bad-format`
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    #[serde(flatten)]
    content: Option<Content>,
}

#[derive(Serialize)]
struct Content {
    epoch: u32,
    size: u64,
    file_id: String,
    /// The session that wrote it, and how often it had; 0: a convergent page
    session: u32,
    sequence: u32,
    sparse: bool,
    cut: bool,
    /// how blocks are protected that it names, and whether some may still be as another profile has them
    profile: String,
    changing: bool,
    used: usize,
    tail_bytes: usize,
    pending: Vec<u64>,
    replaced: Vec<u64>,
    holes: Vec<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    slots: Vec<ShownSlot>,
}

#[derive(Serialize)]
struct ShownSlot {
    block: u64,
    offset: u64,
    /// `data`, `hole`, and `+pending`, `+replaced`
    state: String,
}

pub fn inspect(subject: &Subject<'_>) -> Result<Inspected> {
    let path = &subject.on_disk;
    let header = &subject.unsealed.found.header;
    let geometry = header.geometry();
    let file =
        open_regular(CWD, path).map_err(|source| crate::fault::Fault::NoSuchStored { path: path.clone(), source })?;
    let len = file.metadata().map_err(subject.failed("stat", path))?.len();
    let reader = Reader {
        subject,
        file: &file,
        len,
        geometry,
        suite: header.suite(),
        ring: subject.unsealed.keys.key_ring(header.suite())?,
    };
    let mut pages = Vec::new();
    let mut g = PageNo::ZERO;
    while geometry.page_offset(g).0 < len {
        let mut page = reader.page(g)?;
        if page.state == "absent" {
            page.pages = reader.end_of_hole(g)? - g;
        }
        g = g + page.pages;
        pages.push(page);
    }
    let size = size_of(&pages);
    let first = pages.first().and_then(|p| p.content.as_ref());
    Ok(Inspected {
        suite: header.suite().name(),
        block_size: geometry.block_size(),
        reserved_slots: geometry.reserved(),
        blocks_per_page: geometry.blocks_per_page(),
        segment_bytes: geometry.segment_len(),
        stored_bytes: len,
        size: if len == 0 { Some(0) } else { size },
        file_id: first.map(|c| c.file_id.clone()),
        profile: first.map(|c| c.profile.clone()),
        convergent: first.is_some_and(|c| c.session == 0 && c.file_id.bytes().all(|b| b == b'0')),
        pages,
    })
}

/// Size authority (§9), as far as the pages that open tell; `lamassu check` knows the whole rule.
fn size_of(pages: &[InspectedPage]) -> Option<u64> {
    let first = pages.first()?;
    if first.state == "absent" && pages.len() == 1 {
        return Some(0);
    }
    let first = first.content.as_ref()?;
    let last = pages.iter().rev().find(|p| p.state != "absent")?.content.as_ref()?;
    Some(if first.cut { first.size } else { last.size.max(if pages.len() > 1 { first.size } else { 0 }) })
}

struct Reader<'a> {
    subject: &'a Subject<'a>,
    file: &'a File,
    len: u64,
    geometry: Geometry,
    suite: Suite,
    ring: lamassu_crypto::KeyRing,
}

fn is_one(n: &u64) -> bool {
    *n == 1
}

impl Reader<'_> {
    /// The first page after the absent page `g` that is not wholly in the same hole of the store; the end of the file
    /// ends one.
    fn end_of_hole(&self, g: PageNo) -> Result<PageNo> {
        let geo = &self.geometry;
        let (data, _) = next_data(self.file, geo.page_offset(g).0, self.len)
            .map_err(self.subject.failed("seek in", &self.subject.on_disk))?;
        let before = data / geo.segment_len() * geo.pages_per_segment();
        let end = if data >= self.len { before + geo.pages_per_segment() } else { before };
        let mut hole = g.next().until(PageNo(end)).rev();
        Ok(hole.find(|g| geo.page_offset(*g).0 < self.len).map_or(g.next(), PageNo::next))
    }

    fn page(&self, g: PageNo) -> Result<InspectedPage> {
        let geo = &self.geometry;
        let offset = geo.page_offset(g).0;
        let mut bytes = Box::new([0u8; PAGE_LEN]);
        let there = usize::try_from((self.len - offset).min(PAGE_LEN as u64)).unwrap_or(PAGE_LEN);
        self.file
            .read_exact_at(&mut bytes[..there], offset)
            .map_err(self.subject.failed("read", &self.subject.on_disk))?;
        let shown = |state, why: Option<String>, content| InspectedPage {
            page: g.0,
            pages: 1,
            segment: geo.segment_of(g),
            offset,
            state,
            why,
            content,
        };
        if bytes.iter().all(|&b| b == 0) {
            return Ok(shown("absent", None, None));
        }
        Ok(match self.ring.open_page(&geo.page_aad(self.suite, g), &mut bytes) {
            Err(error @ OpenError::NoKey) => shown("no-key", Some(error.to_string()), None),
            Err(error @ (OpenError::Unauthentic | OpenError::Truncated)) => {
                shown("broken", Some(error.to_string()), None)
            }
            Ok(epoch) => match Page::parse(&bytes, geo, g) {
                Err(error) => shown("bad-format", Some(error.to_string()), None),
                Ok(page) => shown("good", None, Some(self.content(g, &page, epoch))),
            },
        })
    }

    fn content(&self, g: PageNo, page: &Page, epoch: u32) -> Content {
        let first = self.geometry.first_block(g);
        let blocks = |bits: u128| (0..128u64).filter(|i| bits >> i & 1 == 1).map(|i| first.0 + i).collect();
        let holes = (0..page.keys.len()).filter(|i| page.keys.is_hole(*i)).map(|i| first.0 + i as u64).collect();
        let slots = if self.subject.slots { self.slots(first, page) } else { Vec::new() };
        Content {
            epoch,
            size: page.size,
            file_id: text::hex(&page.file_id.0),
            session: page.session,
            sequence: page.sequence,
            sparse: page.sparse,
            cut: page.cut,
            profile: page.profile.named(self.suite).to_string(),
            changing: page.changing,
            used: page.keys.len(),
            tail_bytes: page.tail.len(),
            pending: blocks(page.pending),
            replaced: blocks(page.replaced),
            holes,
            slots,
        }
    }

    fn slots(&self, first: BlockNo, page: &Page) -> Vec<ShownSlot> {
        let of = |i: usize| {
            let block = first + i as u64;
            let mut state = String::from(if page.keys.is_hole(i) { "hole" } else { "data" });
            if page.pending >> i & 1 == 1 {
                state.push_str("+pending");
            }
            if page.replaced >> i & 1 == 1 {
                state.push_str("+replaced");
            }
            ShownSlot { block: block.0, offset: self.geometry.block_offset(block).0, state }
        };
        (0..page.keys.len()).map(of).collect()
    }
}

impl Shown for Inspected {
    fn text(&self) -> String {
        let mut out = String::new();
        let size = self.size.map_or("unknown: a page does not open".into(), |s| format!("{s} bytes"));
        let _ = writeln!(out, "size          {size}, in {} bytes of the store", self.stored_bytes);
        let _ = writeln!(
            out,
            "geometry      suite {}, blocks of {}, {} blocks a page ({} transient slots), segments of {} bytes",
            self.suite,
            text::bytes(self.block_size),
            self.blocks_per_page,
            self.reserved_slots,
            self.segment_bytes
        );
        if let Some(id) = &self.file_id {
            let id = if self.convergent { "none: a convergent page" } else { id };
            let _ = writeln!(out, "file id       {id}");
        }
        if let Some(profile) = &self.profile {
            let _ = writeln!(out, "profile       {profile}");
        }
        for page in &self.pages {
            out.push_str(&page.text(self.profile.as_deref()));
        }
        out
    }
}

impl InspectedPage {
    /// `profile`: that of the file.
    fn text(&self, profile: Option<&str>) -> String {
        let mut out = format!("page {:<8} segment {}, offset {}: {}", self.page, self.segment, self.offset, self.state);
        if let Some(why) = &self.why {
            let _ = write!(out, " ({why})");
        }
        if self.pages > 1 {
            let _ = write!(out, ", and the {} pages after it", self.pages - 1);
        }
        let Some(c) = &self.content else { return out + "\n" };
        let _ = write!(out, ", epoch {}", c.epoch);
        if c.session > 0 {
            let _ = write!(out, ", session {} (write {})", c.session, c.sequence);
        }
        let _ = write!(out, ", size {}, {} slots in use", c.size, c.used);
        if c.tail_bytes > 0 {
            let _ = write!(out, ", tail of {} bytes", c.tail_bytes);
        }
        for (flag, set) in [("sparse", c.sparse), ("cut", c.cut), ("changing", c.changing)] {
            if set {
                let _ = write!(out, ", {flag}");
            }
        }
        if profile != Some(&c.profile) {
            let _ = write!(out, ", profile {}", c.profile);
        }
        for (name, blocks) in [("pending", &c.pending), ("replaced", &c.replaced), ("holes", &c.holes)] {
            if !blocks.is_empty() {
                let _ = write!(out, "\n              {name}: blocks {}", ranges(blocks));
            }
        }
        for slot in &c.slots {
            let _ = write!(out, "\n              block {:<10} offset {:<14} {}", slot.block, slot.offset, slot.state);
        }
        out + "\n"
    }
}

/// `0-3, 7`.
fn ranges(ascending: &[u64]) -> String {
    let mut out: Vec<String> = Vec::new();
    let mut rest = ascending;
    while let Some(&first) = rest.first() {
        let run = rest.iter().zip(first..).take_while(|(a, b)| **a == *b).count();
        out.push(if run == 1 { first.to_string() } else { format!("{first}-{}", first + run as u64 - 1) });
        rest = &rest[run..];
    }
    out.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_drawn_together() {
        assert_eq!(ranges(&[0, 1, 2, 3, 7, 9, 10]), "0-3, 7, 9-10");
        assert_eq!(ranges(&[]), "");
    }
}
