//! Changing the profile of an existing file (I14).
//!
//! | step | what is durable after it |
//! |---|---|
//! | [`Core::begin_profile`] | page 0 has the new profile, and `changing`: pages and blocks of other profiles are allowed, and tried |
//! | [`Rekey::Profile`], step by step | every block is stored in the form of the new profile, and every page has that profile |
//! | [`Core::end_profile`] | page 0 is without `changing`: from then on a page of another profile is an older one, and damage |
//!
//! Everything that is written from the first step on is sealed under the new profile. If the change is interrupted at
//! any moment, the file is whole, and the same change, or another, continues with the rest. Content, size and
//! modification time never change.
//!
//! [`Rekey::Profile`]: super::rekey::Rekey::Profile

use super::File;
use super::primitives::{Core, PageId};
use super::rekey::RekeyStep;
use super::state::{Held, PageState, State};
use super::types::StoreError;
use lamassu_format::{PAGE_LEN, PageNo, Profile};

impl File {
    /// How the blocks of the file are protected, and whether that is being changed.
    pub fn profile(&self) -> (Profile, bool) {
        let st = self.state.read();
        (st.identity.profile(), st.identity.is_changing())
    }

    /// Gives a file that has no page its profile: that of its directory. An object of the anchor has it in its row.
    ///
    /// # Errors
    /// [`StoreError::NotApproved`].
    pub fn inherit(&self, profile: Profile) -> Result<(), StoreError> {
        if self.core.fresh.is_some() || self.profile() == (profile, false) {
            return Ok(());
        }
        let st = &mut *self.exclusive();
        if st.identity.is_unsealed_empty() && st.buffer.is_empty() {
            self.core.ctx.check_approved(profile)?;
            st.identity.set_profile(profile, false);
        }
        Ok(())
    }

    /// Begins to give the file another profile, durably. `true`: [`File::rekey`] with [`Rekey::Profile`] must then
    /// process the file from page 0 on, and [`File::end_profile`] ends the change if there was no damage. If it is
    /// interrupted, the file is whole, and the change can be begun again.
    ///
    /// # Errors
    /// As [`File::rekey`].
    pub fn begin_profile(&self, profile: Profile) -> Result<bool, StoreError> {
        self.core.ctx.check_allowed(profile)?;
        self.core.begin_profile(&mut self.exclusive(), profile)
    }

    /// Ends a change of profile; `false`: some pages still have another one.
    ///
    /// # Errors
    /// As [`File::rekey`].
    pub fn end_profile(&self) -> Result<bool, StoreError> {
        self.core.end_profile(&mut self.exclusive())
    }
}

impl Core {
    /// Begins to change the profile; `false`: nothing is left to be done.
    pub fn begin_profile(&self, st: &mut State, profile: Profile) -> Result<bool, StoreError> {
        self.prepare_change(st)?;
        let before = (st.identity.profile(), st.identity.is_changing());
        if before == (profile, false) {
            return Ok(false);
        }
        self.commit(st)?; // buffered blocks may be sealed already
        if !matches!(self.page(st, PageNo::ZERO)?, PageState::Good(_)) {
            // A file without a page: it has no blocks, and gets its page with the profile.
            st.identity.set_profile(profile, false);
            st.identity.want_page();
            self.commit(st)?;
            return Ok(false);
        }
        // I14: `changing` is durable in page 0 before anything of the new profile is written.
        st.identity.set_profile(profile, true);
        let done = self.write_page_zero_durably(st);
        if done.is_err() {
            // Page 0 may have the new profile on disk already. Nothing else has it then, and nothing will.
            st.identity.set_profile(before.0, before.1);
        }
        done.map(|()| true)
    }

    /// Ends the change if every page has the new profile. The whole file must have been processed without damage.
    pub fn end_profile(&self, st: &mut State) -> Result<bool, StoreError> {
        if !st.identity.is_changing() {
            return Ok(true);
        }
        self.prepare_change(st)?;
        self.commit(st)?;
        let (mut next, profile) = (PageNo(1), st.identity.profile());
        while let Some(g) = self.next_page(st, next)? {
            match self.page(st, g)? {
                PageState::Bad(_) => return Ok(false),
                PageState::Good(held) if !is_changed(held, profile) => return Ok(false),
                PageState::Good(_) | PageState::Absent => next = g.next(),
            }
            st.evict(self.geo());
        }
        self.settle_now(st)?; // I14: the other pages and all blocks are durable before page 0 relies on them
        st.identity.set_profile(profile, false);
        let done = self.write_page_zero_durably(st);
        if done.is_err() {
            st.identity.set_profile(profile, true);
        }
        done.map(|()| true)
    }

    /// Writes those pages of `whole` again that still have another profile or `changing`, although none of their blocks
    /// is in another form (I14).
    pub fn note_changed(&self, st: &mut State, whole: &[PageNo], step: &mut RekeyStep) -> Result<(), StoreError> {
        let profile = st.identity.profile();
        let is_open = |st: &State, g: &PageNo| st.pages.good(*g).is_some_and(Held::is_open);
        let mut left = Vec::new();
        for &g in whole.iter().filter(|g| **g > PageNo::ZERO) {
            if let PageState::Good(held) = self.page(st, g)?
                && !is_changed(held, profile)
            {
                left.push(g);
            }
        }
        if left.is_empty() {
            return Ok(());
        }
        if left.iter().any(|g| is_open(st, g)) {
            self.settle_now(st)?;
        }
        self.keeping_mtime(st, |core, st| {
            core.open_pages(st, left.iter().copied(), None)?;
            for g in left {
                let Some((mut page, lost)) = core.page_as_covered(st, g)? else { continue };
                (page.profile, page.changing) = (profile, false);
                core.write_page(st, g, page, lost, st.sizes.fields(), PageId::AsFits)?;
                step.resealed += 1;
                step.written += PAGE_LEN as u64;
            }
            Ok(())
        })
    }

    fn write_page_zero_durably(&self, st: &mut State) -> Result<(), StoreError> {
        self.keeping_mtime(st, |core, st| {
            core.open_pages(st, [PageNo::ZERO], None)?;
            core.settle_page(st, PageNo::ZERO)?;
            core.barrier(st)
        })
    }
}

/// Whether a page and the blocks under it have a profile.
fn is_changed(held: &Held, profile: Profile) -> bool {
    held.page().profile == profile && !held.page().changing
}
