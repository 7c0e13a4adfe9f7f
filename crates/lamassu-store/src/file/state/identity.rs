//! Which file this is: its id, its profile, whether it was made here, and whether it has a page yet.
//!
//! Invariants:
//! * The id is zero until one is needed: by the first block that is sealed in a salted domain, otherwise by the first
//!   page that is not convergent. From then on it stays until the file is emptied.
//! * The profile is that of page 0, or of the first page that opens; for a file without a page it is the one that the
//!   file was made with. It changes only through [`Identity::set_profile`], and blocks are sealed under no other.
//! * A file that was created or emptied here gets a page with the next commit, although it may hold nothing.
//! * `zero_of` names a session only while page 0 on disk is of that session and without `cut`: pages past the last one
//!   may then be written, once that is durable (I4).
//! * While no barrier has covered a write since the file was made, no earlier content of it is durable.

use super::{Mark, Marks};
use crate::file::types::StoreError;
use lamassu_format::{FileId, Page, Profile};

/// The identity of one open file.
#[derive(Default)]
pub(in crate::file) struct Identity {
    id: FileId,
    profile: Profile,
    /// Pages and blocks may still have the form of another profile.
    changing: bool,
    /// The file must have a page although it may be empty.
    wants_page: bool,
    /// The file was created or emptied here, at this mark.
    made_at: Option<Mark>,
    /// The backing file is empty, or a zeroed page that stands for an empty file.
    unsealed_empty: bool,
    /// The session that wrote page 0 without `cut`, and the mark of the first such write.
    zero_of: Option<(u32, Mark)>,
}

impl Identity {
    /// What readers of a snapshot need.
    pub fn snapshot(&self) -> Identity {
        Identity {
            id: self.id,
            profile: self.profile,
            changing: self.changing,
            unsealed_empty: self.unsealed_empty,
            ..Identity::default()
        }
    }

    /// The file's id; zero: none yet.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// The file's id, made now if there is none. Page 0 must have been read before: a damaged one may have had another
    /// id.
    pub fn ensure_id(&mut self) -> Result<FileId, StoreError> {
        if self.id.is_none() {
            lamassu_crypto::random(&mut self.id.0)?;
        }
        Ok(self.id)
    }

    /// The pages of the file have this id.
    pub fn found_id(&mut self, id: FileId) {
        self.id = id;
    }

    /// Page 0 opened.
    pub fn found_page_zero(&mut self, page: &Page) {
        (self.id, self.profile, self.changing) = (page.file_id, page.profile, page.changing);
    }

    /// A later page opened, and page 0 is unreadable. Page 0 may have `changing`.
    pub fn found_page(&mut self, page: &Page) {
        (self.id, self.profile, self.changing) = (page.file_id, page.profile, true);
    }

    /// How the blocks of the file are protected.
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// Whether pages and blocks may still have the form of another profile.
    pub fn is_changing(&self) -> bool {
        self.changing
    }

    /// From now on blocks are sealed under this profile; `changing`: existing ones may have others.
    pub fn set_profile(&mut self, profile: Profile, changing: bool) {
        (self.profile, self.changing) = (profile, changing);
    }

    /// Whether a page after page 0 may belong to the file, by its profile. A page of another profile is from before a
    /// change of profile.
    pub fn allows(&self, page: &Page) -> bool {
        self.changing || (page.profile == self.profile && !page.changing)
    }

    /// The backing file holds no page.
    pub fn found_unsealed(&mut self) {
        self.unsealed_empty = true;
    }

    /// Page 0 was written as `page`, at this mark.
    pub fn note_page_zero(&mut self, page: &Page, mark: Mark) {
        self.unsealed_empty = false;
        match self.zero_of {
            _ if page.cut || page.session == 0 => self.zero_of = None,
            Some((session, _)) if session == page.session => {}
            _ => self.zero_of = Some((page.session, mark)),
        }
    }

    /// The write of page 0 failed: one with `cut` may be there.
    pub fn note_failed_page_zero(&mut self) {
        self.zero_of = None;
    }

    /// Whether a page 0 of this session, without `cut`, is durable.
    pub fn is_page_zero_of(&self, session: u32, marks: &Marks) -> bool {
        self.zero_of.is_some_and(|(of, mark)| of == session && marks.is_durable(mark))
    }

    /// Whether the backing file is empty, or a zeroed page that stands for an empty file.
    pub fn is_unsealed_empty(&self) -> bool {
        self.unsealed_empty
    }

    /// The backing file was cut to nothing: the id of a page that is gone goes with it.
    pub fn note_cut_to_nothing(&mut self) {
        self.id = FileId::NONE;
        self.changing = false; // the file is empty
        self.unsealed_empty = true;
    }

    /// The file was created or emptied, and all writes so far are those up to `now`.
    pub fn note_made(&mut self, now: Mark) {
        self.made_at = Some(now);
        self.zero_of = None;
    }

    /// Whether nothing of the file can be durable yet: it was made here, and no barrier has covered a write since.
    pub fn is_never_durable(&self, marks: &Marks) -> bool {
        self.made_at.is_some_and(|made| marks.durable() <= made)
    }

    /// The next commit writes page 0, even if nothing else has to be written.
    pub fn want_page(&mut self) {
        self.wants_page = true;
    }

    /// A commit is complete.
    pub fn note_committed(&mut self) {
        self.wants_page = false;
    }

    /// Whether the file must have a page.
    pub fn wants_page(&self) -> bool {
        self.wants_page
    }
}
