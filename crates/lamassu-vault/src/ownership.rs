//! Whose an inode of the store is. Whoever owns a directory of the store can put any inode of theirs, and any of others
//! that they may move, under a name there. So a change asks the anchor's row whether what the store shows may be the
//! entry's own, and a node goes to another inode only by [`Vault::may_go`].

use crate::digests::{digest_of_dataset, digest_of_text};
use crate::dirs::Dir;
use crate::error::{errno, io, is_not_found};
use crate::event::IntegrityEvent;
use crate::handles::OpenFile;
use crate::inode::{Go, Leads, Link, Met, Names, NodeTable};
use crate::names::DirFault;
use crate::stored::lending;
use crate::target::{Asks, Target, hold};
use crate::walk::header_id;
use crate::{Ino, Kind, Result, Vault, VaultError};
use lamassu_anchor::{AnchorError, Digest, ObjectId, Row, SealedPart};
use lamassu_format::header::NameMode;
use lamassu_store::backend::Stat;
use lamassu_store::{BackendFile, File, FirstPage, StoreError};
use std::ffi::OsStr;

/// Permissions by which a directory of root's is told from another where it is moved or removed. A crash within seconds
/// of root's `chmod` leaves such a difference, too.
const MOVED: u32 = 0o777;
/// Names of a file that are looked for when a change needs all of them.
const NAMES_MAX: u64 = 256;
const NOT_ALL_NAMES: &str = "change a file that not all of its names are known to lead to";

impl Vault {
    /// Looks in the table, and asks whether a node may go to another inode if that matters.
    pub(crate) fn told_apart<T>(
        &self,
        object: ObjectId,
        st: &Stat,
        look: impl Fn(&mut NodeTable, Option<Go>) -> std::result::Result<T, Met>,
    ) -> Result<std::result::Result<T, Met>> {
        let first = look(&mut self.nodes.lock(), None);
        let Err(Met::MayGo(ino)) = first else { return Ok(first) };
        let go = self.may_go(ino, object, st)?;
        Ok(look(&mut self.nodes.lock(), Some(go)))
    }

    /// Whether the node of an object may go to another inode, which the store shows under a name of the object.
    ///
    /// It stays while a name that is known leads to its own inode: no name may lead the calls of another one to another
    /// user's inode. Both are the object's nevertheless: a re-keying may have been cut off between two names, and a
    /// store like sshfs numbers the names of one file differently. (Where a takeover was cut off, rule R9 of
    /// `docs/sharing.md`, one of the two may be damaged, so it goes.) Otherwise the inode must have the owner; if the
    /// file is open, that inode as well: the one that is looked at may be the right one. A turn that only looks changes
    /// nothing, and cannot tell whether the store keeps owners, so it does not ask for them.
    ///
    /// # Errors
    /// Those of the store and of the anchor.
    pub(crate) fn may_go(&self, ino: Ino, object: ObjectId, st: &Stat) -> Result<Go> {
        let row = match self.row_if_asked(object) {
            Err(VaultError::Anchor(AnchorError::Unknown { .. })) => return Ok(Go::No),
            row => row?,
        };
        let Some(row) = row else { return Ok(Go::To) };
        let is_left_open = || self.is_left_open_by_another_host(ino);
        if row.links > 1 && self.has_its_inode_under_a_name(ino, st, row.uid)? && !is_left_open()? {
            return Ok(Go::Stay);
        }
        self.may_leave(ino, &row, st)
    }

    /// Whether a node whose inode lies under none of its known names may go to another one, which lies under one.
    ///
    /// # Errors
    /// As [`Vault::may_go`].
    pub(crate) fn may_go_there(&self, ino: Ino, object: ObjectId, st: &Stat) -> Result<bool> {
        match self.row_if_asked(object) {
            Err(VaultError::Anchor(AnchorError::Unknown { .. })) => Ok(false),
            row => row?.map_or(Ok(true), |row| Ok(self.may_leave(ino, &row, st)? == Go::To)),
        }
    }

    fn may_leave(&self, ino: Ino, row: &Row, st: &Stat) -> Result<Go> {
        if self.options.read_only {
            return Ok(Go::To);
        }
        let open = self.files.get(ino).map(|open| open.file().backing().stat()).transpose().map_err(io("stat"))?;
        let is_its_own = st.uid == row.uid && open.is_none_or(|open| open.uid == row.uid);
        Ok(if is_its_own || !self.staging()?.keeps_owners() { Go::To } else { Go::No })
    }

    /// The row that decides where the node of an object may go; `None`: nothing is asked.
    fn row_if_asked(&self, object: ObjectId) -> Result<Option<Row>> {
        if rustix::process::geteuid().is_root() { self.row_of_object(object) } else { Ok(None) }
    }

    /// Whether a known name of a node leads to its inode, which is not that of this stat, and has the owner.
    fn has_its_inode_under_a_name(&self, ino: Ino, st: &Stat, owner: u32) -> Result<bool> {
        let (links, id) = {
            let nodes = self.nodes.lock();
            (nodes.links(ino), nodes.id(ino))
        };
        let Some(id) = id.filter(|id| !id.is_of(st)) else { return Ok(false) };
        let keeps_owners = self.options.read_only || self.staging()?.keeps_owners();
        for link in links {
            if let Some(shown) = self.shown_at(&link)?
                && id.is_of(&shown)
                && (shown.uid == owner || !keeps_owners)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What the store shows under a name of a node.
    ///
    /// # Errors
    /// Those of the store: who cannot look does not know that nothing is there.
    fn shown_at(&self, link: &Link) -> Result<Option<Stat>> {
        let dir = match self.dir(link.parent) {
            Err(VaultError::Stale) => return Ok(None),
            dir => dir?,
        };
        match dir.handle.stat_entry(&link.name) {
            Err(e) if is_not_found(&e) => Ok(None),
            shown => Ok(Some(shown.map_err(io("stat"))?)),
        }
    }

    /// Whether a file may have names under which another inode lies: the anchor has several.
    pub(crate) fn has_several_names(&self, ino: Ino) -> Result<bool> {
        match self.row_of(ino) {
            Ok(row) => Ok(row.is_some_and(|row| row.links > 1)),
            Err(VaultError::Anchor(AnchorError::Unknown { .. })) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Refuses to open an inode with another owner as a file that has several names: in a vault of several hosts it
    /// would be used under all.
    ///
    /// # Errors
    /// `EPERM`; those of the store; [`VaultError::Anchor`].
    pub(crate) fn must_be_its_own_to_open(&self, ino: Ino, place: (&Dir, &OsStr), st: &Stat) -> Result<()> {
        match self.is_shared_by_hosts() && self.has_several_names(ino)? {
            true => self.must_be_its_own_entry(ino, place, st),
            false => Ok(()),
        }
    }

    /// Refuses to re-key an inode with another owner as a file that has several names: what its own inode has, under
    /// the others, would not be the newest any more.
    ///
    /// # Errors
    /// `EPERM`; those of the store; [`VaultError::Anchor`].
    pub(crate) fn must_be_its_own_to_rekey(&self, ino: Ino, target: &Target) -> Result<()> {
        if !self.has_several_names(ino)? {
            return Ok(());
        }
        match target {
            Target::Entry { dir, name, st } => self.must_be_its_own_entry(ino, (dir, name), st),
            Target::Open(open) => self.must_have_its_owner(ino, || open.file().backing().stat().map_err(io("stat"))),
            Target::Root(..) | Target::Dir(_) => Ok(()),
        }
    }

    /// Whether what a change is for has the owner of its row, if that is asked.
    pub(crate) fn has_its_owner(&self, ino: Ino, target: &Target) -> Result<bool> {
        if matches!(target, Target::Root(..) | Target::Dir(_)) {
            return Ok(true);
        }
        let shown = target.stat().map_err(io("stat"))?;
        Ok(self.row_of_shown(self.object_of(ino), &shown)?.is_none_or(|(_, has_owner)| has_owner))
    }

    /// Refuses a change of a file that a name of it does not lead to: the call may have come by that name, and the file
    /// be another user's, who owns the directory of another one. A call by a name has just looked that up. Where a name
    /// was lost, or the node has gone to another inode, a call by a descriptor may have come by that: then the content
    /// must be the file's.
    ///
    /// # Errors
    /// `EPERM`; those of the store; [`VaultError::Anchor`].
    pub(crate) fn must_be_under_its_names(&self, ino: Ino, target: &Target, asks: Asks) -> Result<()> {
        let is_asked = self.is_shared_by_hosts() && rustix::process::geteuid().is_root();
        let Some(anchored) = self.anchored.as_ref().filter(|_| is_asked) else { return Ok(()) };
        if matches!(target, Target::Root(..) | Target::Dir(_)) || !self.staging()?.keeps_owners() {
            return Ok(());
        }
        let (links, object, names) = {
            let nodes = self.nodes.lock();
            if nodes.kind(ino) == Some(Kind::Dir) {
                return Ok(());
            }
            (nodes.links(ino), nodes.object(ino), nodes.names(ino))
        };
        let all_lead_here = names == Names::Known && links.iter().all(|link| link.leads == Leads::Here);
        if asks == Asks::Content && all_lead_here {
            return Ok(());
        }
        let st = target.stat().map_err(io("stat"))?;
        let is_its_inode = self.nodes.lock().id(ino).is_some_and(|id| id.is_of(&st));
        let mut leading = Vec::new();
        for link in links {
            if !(is_its_inode && link.leads == Leads::Here) {
                match self.shown_at(&link)? {
                    Some(shown) if shown.is_same(&st) => self.nodes.lock().note_leads(ino, &link, &st),
                    // Another thread has just removed or moved it.
                    Some(_) if !self.nodes.lock().has_name(ino, link.parent, &link.name) => continue,
                    Some(_) => return Err(is_split(&st)),
                    None => continue,
                }
            }
            leading.push(link);
        }
        let count = match anchored.anchor.row(object) {
            Err(AnchorError::Unknown { .. }) => return Ok(()),
            row => row?.links,
        };
        let must_be_all = match (asks, names) {
            (_, Names::Split) => return Err(is_split(&st)),
            (Asks::Content, _) | (Asks::Owner, Names::Known) => return Ok(()),
            // What nothing but its names tells apart.
            (Asks::Owner, Names::Lost) => st.kind != Kind::File && count > 1,
            (Asks::All, _) => true,
        };
        self.must_have_its_content(ino, target)?;
        if !must_be_all {
            return Ok(());
        }
        let mut recorded = 0;
        for link in &leading {
            let place = anchored.place(self.object_of(link.parent), &link.name);
            recorded += u64::from(anchored.anchor.entry(&place)?.is_some_and(|entry| entry.object == object));
        }
        if recorded == count && count > 0 {
            self.nodes.lock().has_all_names(ino);
            return Ok(());
        }
        Err(errno(NOT_ALL_NAMES, libc::EPERM))
    }

    /// Refuses to set the set-group-ID bit of a file that the store shows with another group than its row has: the user
    /// who asks for it belongs to that one.
    ///
    /// # Errors
    /// `EPERM`; those of the store; [`VaultError::Anchor`].
    pub(crate) fn must_have_its_group(&self, ino: Ino, target: &Target) -> Result<()> {
        if matches!(target, Target::Root(..) | Target::Dir(_)) || self.nodes.lock().kind(ino) == Some(Kind::Dir) {
            return Ok(());
        }
        let shown = target.stat().map_err(io("stat"))?;
        match self.row_of_shown(self.object_of(ino), &shown)? {
            Some((row, _)) if row.gid != shown.gid && self.staging()?.keeps_owners() => Err(unidentified(&shown)),
            Some(_) | None => Ok(()),
        }
    }

    /// Makes a change. If it is refused for a name that is not known, the node meets all names of its file, and it is
    /// made again, by `again`. The caller does not hold the tree lock.
    pub(crate) fn with_names<T>(
        &self,
        ino: Ino,
        first: impl FnOnce() -> Result<T>,
        again: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        match (first(), &self.anchored) {
            (Err(VaultError::Io { op: NOT_ALL_NAMES, source }), Some(anchored)) => {
                let object = self.object_of(ino);
                // One that has lost its last name has none to be found.
                let has_few = anchored.anchor.row(object).is_ok_and(|row| (1..=NAMES_MAX).contains(&row.links));
                // What lies under a name may be no entry at all.
                match has_few && self.meet_all_names(anchored, object).is_ok() {
                    true => again().inspect_err(|error| tracing::warn!(object = object.0, %error, "not changed")),
                    false => Err(VaultError::Io { op: NOT_ALL_NAMES, source }),
                }
            }
            (done, _) => done,
        }
    }

    /// Refuses what has not the content of its row, as far as the first page shows it, in a vault of several hosts:
    /// another user may have put it there. To be asked before it gets another owner, since it would be taken for any
    /// entry of that owner's then.
    ///
    /// # Errors
    /// As [`Vault::must_be_its_own_content`].
    pub(crate) fn must_have_its_content(&self, ino: Ino, target: &Target) -> Result<()> {
        if !self.is_shared_by_hosts() || !rustix::process::geteuid().is_root() || !self.staging()?.keeps_owners() {
            return Ok(());
        }
        let has_it = |backing: &dyn BackendFile, (size, first): (u64, FirstPage)| {
            // Also of another owner, so that root can mend it. What is in it is nobody's.
            let is_empty = size == 0 && !matches!(first, FirstPage::Unverified(_));
            if is_empty { Ok(()) } else { self.must_be_its_own_by(ino, backing, |_| false, || Ok((size, first))) }
        };
        match target {
            Target::Open(open) => {
                let file = open.file();
                has_it(&**file.backing(), (file.size(), file.first_page()?))
            }
            Target::Entry { dir, name, st } if st.kind == Kind::File => {
                let backing = dir.handle.open_same(name, st, false).map_err(io("open"))?.ok_or(VaultError::Stale)?;
                let (ctx, object, tag) = (self.ctx_silent.clone(), self.object_of(ino), self.tag(ino));
                let seen = File::first_page_of(ctx, backing.clone(), st.len, &tag, object);
                let done = seen.map_err(VaultError::from).and_then(|seen| has_it(&*backing, seen));
                done.inspect_err(|error| self.tell_damaged(&tag, error))
            }
            Target::Entry { .. } | Target::Root(..) | Target::Dir(_) => Ok(()),
        }
    }

    /// Reports the damage of a file that was opened silently.
    fn tell_damaged(&self, tag: &str, error: &VaultError) {
        if let VaultError::Store(StoreError::Damaged(damage)) = error {
            self.tell(IntegrityEvent::of_file(tag, damage));
        }
    }

    /// Refuses an open file that may be another one than that of its row: see [`Vault::must_be_its_own`]. No page has
    /// to be read where the owner is right, since a write reads it.
    ///
    /// # Errors
    /// `EPERM`; those of the store; [`VaultError::Anchor`].
    pub(crate) fn must_be_its_own_file(&self, open: &OpenFile) -> Result<()> {
        self.must_be_its_own_if(open, |_| true)
    }

    /// The same where the file is to lose its whole content, which no page has to be read for: it may have other names,
    /// which only others may remove.
    ///
    /// # Errors
    /// As [`Vault::must_be_its_own_file`].
    pub(crate) fn must_be_its_own_to_empty(&self, open: &OpenFile) -> Result<()> {
        self.must_be_its_own_if(open, |shown| shown.nlink <= 1)
    }

    /// `suffices`: whether the right owner does, without a look at the first page.
    fn must_be_its_own_if(&self, open: &OpenFile, suffices: impl Fn(&Stat) -> bool) -> Result<()> {
        self.must_be_its_own_content(open.ino, &open.file(), suffices)
    }

    /// The same for a file that is not in the table of open files yet.
    ///
    /// # Errors
    /// `EPERM`; [`StoreError::Damaged`] for what has the right owner; those of the store; [`VaultError::Anchor`].
    pub(crate) fn must_be_its_own_content(
        &self,
        ino: Ino,
        file: &File,
        suffices: impl Fn(&Stat) -> bool,
    ) -> Result<()> {
        self.must_be_its_own_by(ino, &**file.backing(), suffices, || Ok((file.size(), file.first_page()?)))
    }

    /// The same by the size of a file and its first page, which `look` tells.
    fn must_be_its_own_by(
        &self,
        ino: Ino,
        backing: &dyn BackendFile,
        suffices: impl Fn(&Stat) -> bool,
        look: impl FnOnce() -> Result<(u64, FirstPage)>,
    ) -> Result<()> {
        let object = self.nodes.lock().object(ino);
        let shown = || backing.stat().map_err(io("stat"));
        let (shown, asked) = self.row_of_unchanging(ino, object, shown)?;
        let Some((_, has_owner)) = asked.filter(|(_, has_owner)| !(*has_owner && suffices(&shown))) else {
            return Ok(());
        };
        match (has_owner, look()?) {
            (true, (_, FirstPage::Unverified(damage))) => Err(StoreError::Damaged(damage).into()),
            (true, (_, FirstPage::Absent | FirstPage::Verified)) => Ok(()),
            // The page of an empty file is that of any.
            (false, (1.., FirstPage::Verified)) => Ok(()),
            (false, _) => Err(unidentified(&shown)),
        }
    }

    /// Refuses an entry that may be another one than that of its row. A user who can write to a directory of the store
    /// can put another user's entry in the place of one of their own, and has no right to it: their rights go by the
    /// row. Content tells files apart, and records directories whose names are encrypted. Others are told apart by
    /// their owner alone.
    ///
    /// Asked only where it matters: in a process of root's, over a store that keeps owners. A crash may have left the
    /// owner of before, or the one of after, in a row: such an entry waits until root gives it an owner. So this is no
    /// finding.
    ///
    /// # Errors
    /// `EPERM`.
    pub(crate) fn must_be_its_own(&self, object: ObjectId, shown: &Stat) -> Result<()> {
        match self.row_of_shown(object, shown)? {
            Some((_, false)) => Err(unidentified(shown)),
            Some((_, true)) | None => Ok(()),
        }
    }

    /// The same for an entry of `dir`, whose owner may be changing.
    ///
    /// # Errors
    /// `EPERM`; those of the store.
    pub(crate) fn must_be_its_own_entry(&self, ino: Ino, (dir, name): (&Dir, &OsStr), st: &Stat) -> Result<()> {
        let mut seen = Some(*st);
        self.must_have_its_owner(ino, || match seen.take() {
            Some(st) => Ok(st),
            None => hold(dir, name, st).and_then(|held| held.stat()).map_err(io("stat")),
        })
    }

    /// The same for what `shown` shows.
    ///
    /// # Errors
    /// `EPERM`; those of `shown`.
    pub(crate) fn must_have_its_owner(&self, ino: Ino, shown: impl FnMut() -> Result<Stat>) -> Result<()> {
        match self.row_of_unchanging(ino, self.object_of(ino), shown)? {
            (shown, Some((_, false))) => Err(unidentified(&shown)),
            (_, Some((_, true)) | None) => Ok(()),
        }
    }

    /// The same for a directory whose names are plain. Root has private ones and ones that others may write to, of one
    /// owner: so the store may not show fewer of these permissions of one of root's than its row has.
    ///
    /// # Errors
    /// `EPERM`.
    pub(crate) fn must_be_its_own_plain_dir(&self, object: ObjectId, shown: &Stat, permissions: u32) -> Result<()> {
        self.must_be_its_own(object, shown)?;
        let has_fewer = |row: &Row| shown.uid == 0 && row.mode & !shown.mode & permissions != 0;
        match self.row_of_shown(object, shown)? {
            Some((row, _)) if has_fewer(&row) && self.staging()?.keeps_modes() => Err(unidentified(shown)),
            Some(_) | None => Ok(()),
        }
    }

    /// As [`Vault::row_of_shown`], with what the store shows. While an owner changes, that and the row differ for a
    /// moment.
    fn row_of_unchanging(
        &self,
        ino: Ino,
        object: ObjectId,
        mut shown: impl FnMut() -> Result<Stat>,
    ) -> Result<(Stat, Option<(Row, bool)>)> {
        let st = shown()?;
        match self.row_of_shown(object, &st)? {
            Some((_, false)) => {
                let _unchanging = self.hold_mode(ino);
                let st = shown()?;
                Ok((st, self.row_of_shown(object, &st)?))
            }
            row => Ok((st, row)),
        }
    }

    /// The row of an object, and whether an entry with this stat may be the object's by its owner. `None`: nothing is
    /// asked.
    fn row_of_shown(&self, object: ObjectId, shown: &Stat) -> Result<Option<(Row, bool)>> {
        // A reader changes nothing, and asks the store nothing that it would have to write for.
        let is_asked = !self.options.read_only && rustix::process::geteuid().is_root();
        let Some(anchored) = self.anchored.as_ref().filter(|_| is_asked) else { return Ok(None) };
        let row = match anchored.anchor.row(object) {
            Err(AnchorError::Unknown { .. }) => return Ok(None),
            row => row?,
        };
        let has_owner = row.uid == shown.uid || !self.staging()?.keeps_owners();
        Ok(Some((row, has_owner)))
    }

    /// Refuses a directory that is to be moved or removed and may be another one than that of its row: see
    /// [`Vault::must_be_its_own`].
    ///
    /// # Errors
    /// [`VaultError::Outdated`]; `EPERM`; those of the store.
    pub(crate) fn must_be_its_own_dir(&self, dir: &Dir, stored: &OsStr, st: &Stat, object: ObjectId) -> Result<()> {
        if self.anchored.is_none() || !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let handle = lending(&dir.handle.open_dir(stored).map_err(io("open a directory"))?);
        if !handle.stat().map_err(io("stat"))?.is_same(st) {
            return Err(VaultError::Stale);
        }
        let shown = match header_id(&*handle) {
            Ok(Some(id)) => digest_of_dataset(&id),
            Ok(None) | Err(_) if self.name_mode == NameMode::Plain => {
                return self.must_be_its_own_plain_dir(object, st, MOVED);
            }
            Ok(None) | Err(_) => match self.record_text(&*handle) {
                Err(DirFault::Unreadable(e)) => return Err(io("read a directory record")(e)),
                text => text.ok().flatten().map_or(Digest::NONE, |text| digest_of_text(&text)),
            },
        };
        match self.is_newest(object, SealedPart::Content, shown)? {
            true => Ok(()),
            false => Err(self.outdated_at("directory record", self.path_in(dir.ino, stored).display().to_string())),
        }
    }
}

/// The error of an entry that may be another one than that of its row.
fn unidentified(shown: &Stat) -> VaultError {
    tracing::warn!(
        inode = shown.ino,
        uid = shown.uid,
        "the store shows an entry under another owner than the newest, with more names, or with fewer permissions: it may \
         be another entry, and is not changed; if it is the right one, chown or chmod it as root"
    );
    errno("change an entry that may be another's", libc::EPERM)
}

/// The error of a file that has, or had, a name that leads to another entry.
fn is_split(shown: &Stat) -> VaultError {
    tracing::warn!(
        inode = shown.ino,
        uid = shown.uid,
        "the store shows another entry under another name of the file: it is not changed"
    );
    errno("change a file whose names lead to several entries", libc::EPERM)
}
