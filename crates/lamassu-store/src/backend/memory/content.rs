//! The bytes of a file in memory: a map of 4096-byte pages, absent ones being holes. Copies share pages until one of
//! them is written.

use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// Bytes of a page: the unit of sharing, of holes, and of what a crash tears.
pub const PAGE_BYTES: u64 = 4096;

/// Largest offset of a file, as in Linux.
pub(in crate::backend) const LEN_MAX: u64 = i64::MAX as u64;

/// One page.
pub(in crate::backend) type Page = [u8; PAGE_BYTES as usize];

/// What a file holds. Invariant: no page begins at or past `len`, and bytes past `len` in the last page are zero.
#[derive(Clone, Default)]
pub(in crate::backend) struct Content {
    len: u64,
    pages: Arc<BTreeMap<u64, Arc<Page>>>,
}

/// A range within one page.
#[derive(Clone, Copy)]
pub(in crate::backend) struct Part {
    pub page: u64,
    pub from: usize,
    pub to: usize,
}

impl Part {
    pub(in crate::backend) fn is_whole(&self) -> bool {
        self.from == 0 && self.to == PAGE_BYTES as usize
    }
    pub(in crate::backend) fn len(&self) -> usize {
        self.to - self.from
    }
    /// Offset in the file just after the range.
    pub(in crate::backend) fn end(&self) -> u64 {
        self.page * PAGE_BYTES + self.to as u64
    }
}

/// Splits a range of a file at page borders. The end must not pass [`LEN_MAX`].
pub(in crate::backend) fn parts(offset: u64, len: u64) -> impl Iterator<Item = Part> {
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let page = at / PAGE_BYTES;
        let next = end.min((page + 1) * PAGE_BYTES);
        let part = Part { page, from: (at - page * PAGE_BYTES) as usize, to: (next - page * PAGE_BYTES) as usize };
        at = next;
        Some(part)
    })
}

/// A page after `data` was written into `part` of it.
pub(in crate::backend) fn written(old: Option<Arc<Page>>, part: Part, data: &[u8]) -> Arc<Page> {
    if let Ok(whole) = <&Page>::try_from(data) {
        return Arc::new(*whole);
    }
    let mut page = old.unwrap_or_else(|| Arc::new([0; PAGE_BYTES as usize]));
    Arc::make_mut(&mut page)[part.from..part.to].copy_from_slice(data);
    page
}

/// A page after `part` of it was freed: gone if that was all of it.
pub(in crate::backend) fn zeroed(old: Option<Arc<Page>>, part: Part) -> Option<Arc<Page>> {
    if part.is_whole() {
        return None;
    }
    let mut page = old?;
    Arc::make_mut(&mut page)[part.from..part.to].fill(0);
    Some(page)
}

impl Content {
    pub(in crate::backend) fn len(&self) -> u64 {
        self.len
    }

    pub(in crate::backend) fn page_count(&self) -> u64 {
        self.pages.len() as u64
    }

    pub(in crate::backend) fn page(&self, number: u64) -> Option<&Arc<Page>> {
        self.pages.get(&number)
    }

    /// Pages present from `first` on.
    pub(in crate::backend) fn pages_from(&self, first: u64) -> impl Iterator<Item = (u64, &Arc<Page>)> {
        self.pages.range(first..).map(|(n, p)| (*n, p))
    }

    /// Numbers of the pages present that a range touches.
    pub(in crate::backend) fn pages_in(&self, offset: u64, len: u64) -> Vec<u64> {
        let end = offset.saturating_add(len).div_ceil(PAGE_BYTES);
        self.pages.range(offset / PAGE_BYTES..end.max(offset / PAGE_BYTES)).map(|(n, _)| *n).collect()
    }

    /// Puts a page, or a hole, as it is. The caller keeps the invariant, with [`Content::force_len`].
    pub(in crate::backend) fn put_page(&mut self, number: u64, page: Option<Arc<Page>>) {
        let pages = Arc::make_mut(&mut self.pages);
        match page {
            Some(page) => pages.insert(number, page),
            None => pages.remove(&number),
        };
    }

    pub(in crate::backend) fn read(&self, offset: u64, buf: &mut [u8]) -> usize {
        if offset >= self.len {
            return 0;
        }
        let len = (self.len - offset).min(buf.len() as u64) as usize;
        let mut done = 0;
        for part in parts(offset, len as u64) {
            let to = &mut buf[done..done + part.len()];
            match self.pages.get(&part.page) {
                Some(page) => to.copy_from_slice(&page[part.from..part.to]),
                None => to.fill(0),
            }
            done += part.len();
        }
        len
    }

    pub(in crate::backend) fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let end = offset.checked_add(data.len() as u64).filter(|&e| e <= LEN_MAX).ok_or(Errno::FBIG)?;
        if data.is_empty() {
            return Ok(());
        }
        let pages = Arc::make_mut(&mut self.pages);
        let mut rest = data;
        for part in parts(offset, data.len() as u64) {
            let (now, later) = rest.split_at(part.len());
            rest = later;
            let old = if part.is_whole() { None } else { pages.remove(&part.page) };
            pages.insert(part.page, written(old, part, now));
        }
        self.len = self.len.max(end);
        Ok(())
    }

    /// Makes a range zero; whole pages become holes.
    pub(in crate::backend) fn punch(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.len.next_multiple_of(PAGE_BYTES));
        if offset >= end {
            return;
        }
        let present = self.pages_in(offset, end - offset);
        let pages = Arc::make_mut(&mut self.pages);
        for number in present {
            let start = number * PAGE_BYTES;
            let part = Part {
                page: number,
                from: offset.saturating_sub(start) as usize,
                to: (end - start).min(PAGE_BYTES) as usize,
            };
            if let Some(page) = zeroed(pages.remove(&number), part) {
                pages.insert(number, page);
            }
        }
    }

    pub(in crate::backend) fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.force_len(len);
        }
        self.len = len;
    }

    /// Sets the length and drops whatever lies past it, even where the invariant did not hold before.
    pub(in crate::backend) fn force_len(&mut self, len: u64) {
        self.len = len;
        let last_kept = len.div_ceil(PAGE_BYTES);
        let tail = (len % PAGE_BYTES) as usize;
        let beyond = self.pages.range(last_kept..).next().is_some();
        let cut = tail > 0 && self.pages.get(&(last_kept - 1)).is_some_and(|p| p[tail..].iter().any(|&b| b != 0));
        if !beyond && !cut {
            return;
        }
        let pages = Arc::make_mut(&mut self.pages);
        pages.split_off(&last_kept);
        if let Some(page) = pages.get_mut(&(last_kept.saturating_sub(1))).filter(|_| cut) {
            Arc::make_mut(page)[tail..].fill(0);
        }
    }

    pub(in crate::backend) fn seek_data(&self, offset: u64) -> Option<u64> {
        let (number, _) = self.pages_from(offset / PAGE_BYTES).next()?;
        Some(offset.max(number * PAGE_BYTES)).filter(|&at| at < self.len)
    }

    pub(in crate::backend) fn seek_hole(&self, offset: u64) -> Option<u64> {
        if offset >= self.len {
            return None;
        }
        let mut number = offset / PAGE_BYTES;
        for (present, _) in self.pages_from(number) {
            if present != number {
                break;
            }
            number += 1;
        }
        Some(offset.max(number * PAGE_BYTES).min(self.len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Write(u64, Vec<u8>),
        Punch(u64, u64),
        SetLen(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..20_000u64, proptest::collection::vec(any::<u8>(), 0..9000)).prop_map(|(o, d)| Step::Write(o, d)),
            (0..25_000u64, 0..15_000u64).prop_map(|(o, l)| Step::Punch(o, l)),
            (0..30_000u64).prop_map(Step::SetLen),
        ]
    }

    proptest! {
        #[test]
        fn behaves_as_a_vector_of_bytes(steps in proptest::collection::vec(step(), 1..20)) {
            let mut content = Content::default();
            let mut model: Vec<u8> = Vec::new();
            for step in steps {
                match step {
                    Step::Write(offset, data) => {
                        content.write(offset, &data).unwrap();
                        let end = offset as usize + data.len();
                        if !data.is_empty() {
                            model.resize(model.len().max(end), 0);
                            model[offset as usize..end].copy_from_slice(&data);
                        }
                    }
                    Step::Punch(offset, len) => {
                        content.punch(offset, len);
                        let end = model.len().min((offset + len) as usize);
                        if (offset as usize) < end {
                            model[offset as usize..end].fill(0);
                        }
                    }
                    Step::SetLen(len) => {
                        content.set_len(len);
                        model.resize(len as usize, 0);
                    }
                }
                prop_assert_eq!(content.len(), model.len() as u64);
                let mut all = vec![1; model.len() + 10];
                prop_assert_eq!(content.read(0, &mut all), model.len());
                prop_assert!(all[..model.len()] == model[..]);
            }
            // Holes are zero, and data and holes alternate to the end.
            let mut at = 0;
            while let Some(hole) = content.seek_hole(at) {
                let data = content.seek_data(hole).unwrap_or(content.len());
                prop_assert!(model[hole as usize..data as usize].iter().all(|&b| b == 0));
                prop_assert!(data > at || data == content.len());
                if data == content.len() { break; }
                at = data;
            }
        }
    }
}
