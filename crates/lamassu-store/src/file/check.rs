//! Verifying a whole file.

use super::read::View;
use super::state::{Core, Entry, State};
use super::types::{Damage, DamageKind, FileCheck, StoreError};
use lamassu_crypto::Verify;

/// Bytes verified at once.
const CHUNK_LEN: u64 = 4 << 20;

impl Core {
    /// Verifies every page and block, and with `repair` completes interrupted commits.
    pub fn check(&self, st: &mut State, repair: bool, progress: &mut dyn FnMut(u64)) -> Result<FileCheck, StoreError> {
        let geo = *self.geo();
        let mut found = FileCheck { size: st.size, unsealed_empty: st.unsealed_empty, ..FileCheck::default() };
        // What was cut off in the middle cannot always be ended where pages are damaged. That is told with the damage, and hinders nothing else.
        let damage = |done| match done {
            Err(error @ StoreError::Damaged(_)) => Ok(Some(error)),
            done => done.map(|()| None),
        };
        let mut hindered = None;
        if repair && st.lost_from.is_none() && !matches!(self.page(st, 0)?, Entry::Bad(_)) {
            hindered = damage(self.prepare_write(st))?;
        }
        let mut next = 0;
        while let Some(g) = self.next_page(st, next)? {
            self.note_unwritten(st, next, g);
            next = g + 1;
            if st.lost_from.is_some_and(|from| g * geo.page_span() >= from) {
                break; // nothing is there, however far the size goes: one damage for all of it
            }
            match self.page(st, g)? {
                Entry::Absent => {}
                Entry::Bad(kind) => {
                    let kind = *kind;
                    next = self.end_of_bad(st, g)?;
                    found.damage.push(Damage { pages: next - g, ..self.damage(kind, g, None) });
                }
                Entry::Good(held) => {
                    found.last_session = found.last_session.max(held.page.session);
                    found.pages += 1;
                    self.check_blocks(st, g, &mut found, progress)?;
                }
            }
            progress(lamassu_format::PAGE_LEN as u64);
        }
        self.note_unwritten(st, next, geo.last_page(st.disk_size) + 1);
        if let Some(from) = st.lost_from {
            found.damage.push(self.damage(super::types::DamageKind::Truncated, geo.last_page(from), None));
        }
        found.recovered = st.recovered;
        if !st.unsealed_empty && st.lost_from.is_none() {
            found.excess = st.len.saturating_sub(self.implied_len(st)?);
        }
        if repair && !self.ctx.read_only && st.lost_from.is_none() && self.needs_settle(st) {
            hindered = hindered.or(damage(self.settle_now(st))?);
        }
        found.unsettled =
            !self.is_settled(st) || (self.ctx.read_only && (st.recovered > 0 || st.interrupted || st.cut));
        found.undone = std::mem::take(&mut st.undone).into_iter().collect();
        match hindered {
            Some(error) if found.damage.is_empty() => Err(error),
            _ => Ok(found),
        }
    }

    /// Notes the pages that an interrupted session may have written, of a run that is absent. The first of the run was looked at, and noted, already.
    fn note_unwritten(&self, st: &mut State, from: u64, until: u64) {
        let span = self.geo().page_span();
        let first = from.max(st.floor.div_ceil(span));
        let until = until.min(st.inherited_size.min(st.disk_size).div_ceil(span));
        if first >= until || !self.is_unwritten(st, first) {
            return;
        }
        st.undone.retain(|d| d.kind != DamageKind::Unwritten || d.block.is_some() || !(first..until).contains(&d.page));
        self.note_undone(st, Damage { pages: until - first, ..self.damage(DamageKind::Unwritten, first, None) });
    }

    fn check_blocks(
        &self,
        st: &mut State,
        g: u64,
        found: &mut FileCheck,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), StoreError> {
        let geo = *self.geo();
        let first = geo.first_block(g);
        let end = (first + geo.blocks_per_page()).min(geo.blocks(st.disk_size));
        let step = (CHUNK_LEN / geo.block_size()).max(1);
        let mut block = first;
        while block < end {
            let count = step.min(end - block);
            let mut bytes = vec![0u8; (count * geo.block_size()) as usize];
            let damage = &mut found.damage;
            let mut bad = |b: u64, kind| {
                damage.push(self.damage(kind, g, Some(b)));
                Ok(())
            };
            self.read_blocks(&View::of(st), block, &mut bytes, Verify::Full, &mut bad)?;
            found.blocks += count;
            progress(count * geo.block_size());
            block += count;
        }
        Ok(())
    }
}
