//! Verifying a whole file.

use super::primitives::Core;
use super::read::View;
use super::state::{PageState, State};
use super::types::{Damage, DamageKind, FileCheck, StoreError};
use lamassu_crypto::Verify;
use lamassu_format::{BlockNo, PageNo};

/// Bytes verified at once.
const CHUNK_LEN: u64 = 4 << 20;

impl Core {
    /// Verifies every page and block, and with `repair` completes interrupted commits.
    pub fn check(&self, st: &mut State, repair: bool, progress: &mut dyn FnMut(u64)) -> Result<FileCheck, StoreError> {
        let geo = *self.geo();
        let mut found = FileCheck {
            size: st.sizes.logical(),
            unsealed_empty: st.identity.is_unsealed_empty(),
            ..FileCheck::default()
        };
        // An interrupted shrink cannot always be completed if pages are damaged. That is reported with the damage, and
        // does not stop the check.
        let damage = |done| match done {
            Err(error @ StoreError::Damaged(_)) => Ok(Some(error)),
            done => done.map(|()| None),
        };
        let mut hindered = None;
        if repair && !st.inherited.is_truncated() && !matches!(self.page(st, PageNo::ZERO)?, PageState::Bad(_)) {
            hindered = damage(self.prepare_change(st))?;
        }
        let mut next = PageNo::ZERO;
        while let Some(g) = self.next_page(st, next)? {
            self.note_unwritten(st, next, g);
            next = g.next();
            if st.inherited.lost_from().is_some_and(|from| geo.page_start(g) >= from) {
                break; // nothing follows in the store up to the size: one damage for all of it
            }
            match self.page(st, g)? {
                PageState::Absent => {}
                PageState::Bad(kind) => {
                    let kind = *kind;
                    next = self.end_of_bad(st, g)?;
                    found.damage.push(Damage { pages: next - g, ..self.damage(kind, g, None) });
                }
                PageState::Good(held) => {
                    found.last_session = found.last_session.max(held.page().session);
                    found.pages += 1;
                    self.check_blocks(st, g, &mut found, progress)?;
                }
            }
            progress(lamassu_format::PAGE_LEN as u64);
        }
        self.note_unwritten(st, next, st.last_page(&geo).next());
        if let Some(from) = st.inherited.lost_from() {
            found.damage.push(self.damage(DamageKind::Truncated, geo.last_page(from), None));
        }
        found.recovered = st.inherited.recovered();
        if !st.identity.is_unsealed_empty() && !st.inherited.is_truncated() {
            found.excess = st.space.len().saturating_sub(self.implied_len(st)?);
        }
        if repair && !self.ctx.read_only && !st.inherited.is_truncated() && self.needs_settle(st) {
            hindered = hindered.or(damage(self.settle_now(st))?);
        }
        let left = found.recovered > 0 || st.inherited.is_interrupted() || st.shrink.is_cut();
        found.unsettled = !self.is_settled(st) || (self.ctx.read_only && left);
        found.undone = st.inherited.take_undone().into_iter().collect();
        match hindered {
            Some(error) if found.damage.is_empty() => Err(error),
            _ => Ok(found),
        }
    }

    /// Notes the pages of an absent run that an interrupted session may have written. The first page of the run was
    /// examined and noted already.
    fn note_unwritten(&self, st: &mut State, from: PageNo, until: PageNo) {
        let span = self.geo().page_span();
        let first = from.max(PageNo(st.sizes.floor().div_ceil(span)));
        let until = until.min(PageNo(st.inherited.size().min(st.sizes.stored()).div_ceil(span)));
        if first >= until || !self.is_unwritten(st, first) {
            return;
        }
        let is_other = |d: &Damage| d.kind != DamageKind::Unwritten || d.block.is_some();
        st.inherited.retain_undone(|d| is_other(d) || !(first..until).contains(&d.page));
        self.note_undone(st, Damage { pages: until - first, ..self.damage(DamageKind::Unwritten, first, None) });
    }

    fn check_blocks(
        &self,
        st: &mut State,
        g: PageNo,
        found: &mut FileCheck,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), StoreError> {
        let geo = *self.geo();
        let first = geo.first_block(g);
        let end = (first + geo.blocks_per_page()).min(geo.end_block(st.sizes.stored()));
        let step = (CHUNK_LEN / geo.block_size()).max(1);
        let mut block = first;
        while block < end {
            let count = step.min(end - block);
            let mut bytes = vec![0u8; (count * geo.block_size()) as usize];
            let damage = &mut found.damage;
            let mut bad = |b: BlockNo, kind| {
                damage.push(self.damage(kind, g, Some(b)));
                Ok(())
            };
            self.read_blocks(&View::of(st), block, &mut bytes, Verify::Full, &mut bad)?;
            found.blocks += count;
            progress(count * geo.block_size());
            block = block + count;
        }
        Ok(())
    }
}
