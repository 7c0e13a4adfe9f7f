//! The row that an anchor would have of a file as the store shows it: for an anchor that is made, or for accepting a
//! file.

use super::fresh::StorePages;
use super::primitives::Core;
use super::state::{PageState, State};
use super::types::{DamageKind, StoreError};
use crate::integrity::{Leaves, RootOf};
use lamassu_format::tree::Shape;
use lamassu_format::{Digest, PageNo, Profile};

/// The result for one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Surveyed {
    /// Merkle root over its pages.
    pub root: Digest,
    /// Bytes.
    pub size: u64,
    /// How its blocks are protected.
    pub profile: Profile,
}

impl Core {
    /// Opens every page, completes what an interruption left, and gives root and size. No block is read.
    pub fn survey(&self, st: &mut State, shape: Shape) -> Result<Surveyed, StoreError> {
        let geo = *self.geo();
        if !self.ctx.read_only && st.space.len() > 0 {
            self.prepare_change(st)?;
        }
        if st.inherited.is_truncated() {
            let from = st.inherited.lost_from().unwrap_or_default();
            return Err(self.damaged(DamageKind::Truncated, geo.last_page(from), None));
        }
        let mut next = PageNo::ZERO;
        while let Some(page) = self.next_page(st, next)? {
            if let PageState::Bad(kind) = self.page(st, page)? {
                let kind = *kind;
                return Err(self.damaged(kind, page, None));
            }
            next = page.next();
        }
        if !self.ctx.read_only && self.needs_settle(st) {
            self.settle_now(st)?;
        }
        let is_left = st.inherited.recovered() > 0 || st.inherited.is_interrupted() || st.shrink.is_cut();
        if !self.is_settled(st) || (self.ctx.read_only && is_left) {
            return Err(StoreError::ReadOnly);
        }
        let (root, size) = (self.root_of(st.sizes.logical(), shape)?, st.sizes.logical());
        Ok(Surveyed { root, size, profile: st.identity.profile() })
    }

    fn root_of(&self, size: u64, shape: Shape) -> Result<Digest, StoreError> {
        let geo = self.geo();
        let shown = StorePages { backing: &*self.backing, geometry: geo };
        let (last, mut root, mut next) = (geo.last_page(size), RootOf::new(shape), Some(PageNo::ZERO));
        let mut is_any = false;
        while let Some(from) = next {
            let found = shown.next_present(from).map_err(StoreError::io("seek data", geo.page_offset(from)))?;
            let Some(page) = found.filter(|page| *page <= last) else { break };
            let digest = shown.leaf(page).map_err(StoreError::io("read a page", geo.page_offset(page)))?;
            if !digest.is_none() {
                root.add(page, digest);
                is_any = true;
            }
            next = Some(page.next());
        }
        Ok(if is_any { root.finish(last.0 + 1) } else { Digest::NONE })
    }
}
