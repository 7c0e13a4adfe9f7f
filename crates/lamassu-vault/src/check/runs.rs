//! Joins damage of one kind in consecutive blocks or pages into one report: the store decides how many blocks a file
//! has.

use lamassu_store::file::{Damage, DamageKind};

/// Damage of one kind in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DamageRun {
    pub first: Damage,
    /// How many blocks, if it is damage of blocks.
    pub blocks: u64,
    /// How many pages.
    pub pages: u64,
}

impl From<Damage> for DamageRun {
    fn from(first: Damage) -> DamageRun {
        DamageRun { first, blocks: 1, pages: first.pages }
    }
}

impl DamageRun {
    /// Extends the run by damage that begins where it ends. False: `next` does not continue it.
    fn takes(&mut self, next: &Damage) -> bool {
        let Damage { kind, segment: _, page, pages, block } = *next;
        if kind != self.first.kind || matches!(kind, DamageKind::Truncated | DamageKind::UnknownSession) {
            return false;
        }
        match (self.first.block, block) {
            (Some(first), Some(block)) if first.0.checked_add(self.blocks) == Some(block.0) => self.blocks += 1,
            (None, None) if self.first.page.0.checked_add(self.pages) == Some(page.0) => {
                self.pages = self.pages.saturating_add(pages);
            }
            _ => return false,
        }
        true
    }
}

/// Hands on each run.
pub(super) fn runs(damage: impl IntoIterator<Item = Damage>, mut each: impl FnMut(DamageRun)) {
    let mut under_way: Option<DamageRun> = None;
    for next in damage {
        if !under_way.as_mut().is_some_and(|run| run.takes(&next)) {
            under_way.replace(DamageRun::from(next)).into_iter().for_each(&mut each);
        }
    }
    under_way.into_iter().for_each(each);
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_format::{BlockNo, PageNo};

    fn at(kind: DamageKind, page: u64, block: Option<u64>) -> Damage {
        Damage { kind, segment: page, page: PageNo(page), pages: 1, block: block.map(BlockNo) }
    }

    #[test]
    fn what_goes_on_is_one_run() {
        use DamageKind::{BlockHash, BlockMissing, PageSeal, Truncated};
        let damage = [
            at(BlockHash, 0, Some(60)),
            at(BlockHash, 0, Some(61)),
            // Of the next page.
            at(BlockHash, 1, Some(62)),
            at(BlockHash, 1, Some(64)),
            at(BlockMissing, 1, Some(65)),
            at(PageSeal, 2, None),
            Damage { pages: 5, ..at(PageSeal, 3, None) },
            at(PageSeal, 8, None),
            at(PageSeal, 10, None),
            at(Truncated, 11, None),
            at(Truncated, 12, None),
        ];
        let mut found = Vec::new();
        runs(damage, |run| found.push((run.first.page.0, run.first.block.map(|block| block.0), run.blocks, run.pages)));
        let blocks = [(0, Some(60), 3, 1), (1, Some(64), 1, 1), (1, Some(65), 1, 1)];
        let pages = [(2, None, 1, 7), (10, None, 1, 1), (11, None, 1, 1), (12, None, 1, 1)];
        assert_eq!(found, [&blocks[..], &pages].concat());
    }
}
