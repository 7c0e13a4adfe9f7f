//! stat, and changes of what it shows. Everything is the backing entry's, except the size, which is the plain size. In
//! an anchored vault kind, mode, owner, links and device are the row's.
//!
//! [`Vault::statfs`] is what `df` shows of a mount: a forest asks the vault at its root.

use crate::anchored::{Fresh, over_row};
use crate::attr_value::Holder;
use crate::digests::{StoredAttrs, digest_of_attributes};
use crate::dirs::Dir;
use crate::error::io;
use crate::event::IntegrityEvent;
use crate::inode::CachedSize;
use crate::target::{Asks, SET_ID, Target};
use crate::wanted::Wanted;
use crate::{Attr, HandleId, Ino, Kind, Result, SetAttr, SetTime, StatFs, Vault, VaultError};
use lamassu_anchor::Row;
use lamassu_anchor::row::Sealed;
use lamassu_format::PAGE_LEN;
use lamassu_format::header::NameMode;
use lamassu_format::name::NAME_LEN_MAX;
use lamassu_store::backend::Stat;
use lamassu_store::{BackendEntry, BackendFile, File, StoreError};
use std::cell::{Cell, RefCell};
use std::ffi::OsStr;
use std::sync::Arc;

/// The least `st_blocks` of a file with unwritten buffers: with 0, tar and cp would take the file for one hole.
const DIRTY_BLOCKS_MIN: u64 = 8;

impl Attr {
    /// The store's stat of an entry, except its number, size and block size.
    pub(crate) fn new(ino: Ino, st: &Stat, size: u64, block_size: u32) -> Attr {
        Attr {
            ino,
            kind: st.kind,
            mode: st.mode,
            nlink: st.nlink,
            uid: st.uid,
            gid: st.gid,
            rdev: st.rdev,
            size,
            blocks: st.blocks,
            block_size,
            atime: st.atime,
            mtime: st.mtime,
            ctime: st.ctime,
        }
    }
}

impl Vault {
    fn attr(&self, ino: Ino, st: &Stat, size: u64) -> Attr {
        Attr::new(ino, st, size, self.ctx.geometry.block_size() as u32)
    }

    fn attr_of_open(&self, ino: Ino, file: &File, st: &Stat) -> Result<Attr> {
        let mut attr = self.attr(ino, st, file.size());
        if let Some(mtime) = file.mtime() {
            attr.mtime = mtime;
            attr.ctime = attr.ctime.max(mtime);
        }
        if file.is_dirty() && attr.size > 0 {
            attr.blocks = attr.blocks.max(DIRTY_BLOCKS_MIN);
        }
        Ok(over_row(attr, self.row_of(attr.ino)?))
    }

    /// Attributes of node `ino`, which is the entry `stored` and whose stat is `st`.
    ///
    /// # Errors
    /// In an anchored vault [`VaultError::Anchor`], and the reason why the size of a closed file is unknown.
    pub(crate) fn attr_of_entry(&self, ino: Ino, dir: &Dir, stored: &OsStr, st: &Stat) -> Result<Attr> {
        if let Some(open) = self.files.get(ino) {
            return self.attr_of_open(ino, &open.file(), st);
        }
        // In this order: a size that is no longer remembered is in the row.
        let remembered = self.remembered_size(ino);
        let row = self.row_of(ino)?;
        let size = match st.kind {
            Kind::File => match remembered.or_else(|| row.as_ref().and_then(Row::size)) {
                Some(size) => size,
                None => self.size_of_closed(ino, dir, stored, st)?,
            },
            Kind::Symlink => self.link_size(ino, dir, stored, st)?,
            Kind::Dir | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => st.len,
        };
        let attr = over_row(self.attr(ino, st, size), row);
        if attr.kind == Kind::Dir {
            let Attr { mode, uid, gid, .. } = attr;
            self.nodes.lock().note_shown(ino, Stat { mode, uid, gid, ..*st });
        }
        Ok(attr)
    }

    /// If it cannot be known: a guess, or in an anchored vault an error.
    fn size_of_closed(&self, ino: Ino, dir: &Dir, stored: &OsStr, st: &Stat) -> Result<u64> {
        if st.len == 0 && self.anchored.is_none() {
            return Ok(0);
        }
        if let Some(size) = self.nodes.lock().cached_size(ino, st) {
            return Ok(size);
        }
        match self.peek_size(ino, dir, stored, st) {
            Ok(size) => {
                self.nodes.lock().set_cached_size(ino, CachedSize::new(st, size));
                Ok(size)
            }
            Err(e) if self.anchored.is_some() => Err(e),
            Err(e) => {
                if let VaultError::Store(StoreError::Damaged(damage)) = &e {
                    self.tell(IntegrityEvent::of_file(&self.tag(ino), damage));
                }
                let path = self.path_in(dir.ino, stored);
                let text = "its size is not known; a guess from its length is shown";
                tracing::warn!(file = %path.display(), error = %e, "{text}");
                Ok(self.size_guess(st.len))
            }
        }
    }

    fn peek_size(&self, ino: Ino, dir: &Dir, stored: &OsStr, st: &Stat) -> Result<u64> {
        let opened = dir.handle.open_same(stored, st, false).map_err(io("open"))?;
        self.size_in(ino, opened.ok_or(VaultError::Stale)?, st)
    }

    /// The size that a backing file records. `st`: its stat.
    fn size_in(&self, ino: Ino, backing: Arc<dyn BackendFile>, st: &Stat) -> Result<u64> {
        // The caller gets the error. What an interruption left is reported when the file is opened.
        let object = self.nodes.lock().object(ino);
        Ok(File::recorded_size(self.ctx_silent.clone(), backing, st.len, "", object)?)
    }

    /// Remembers the size of a closed file that was opened for this. A failure is logged when the size is asked for.
    pub(crate) fn remember_size(&self, ino: Ino, st: &Stat, backing: Arc<dyn BackendFile>) {
        if let Ok(size) = self.size_in(ino, backing, st) {
            self.nodes.lock().set_cached_size(ino, CachedSize::new(st, size));
        }
    }

    /// The largest plain size that a backing length allows.
    fn size_guess(&self, len: u64) -> u64 {
        let g = self.ctx.geometry;
        let (whole, rest) = (len / g.segment_len(), len % g.segment_len());
        let data = whole * (g.segment_len() - g.block_size()) + rest.saturating_sub(g.block_size());
        if data == 0 && len >= PAGE_LEN as u64 { 1 } else { data }
    }

    /// stat.
    ///
    /// # Errors
    /// [`VaultError::Stale`] for an unknown inode; those of the store. For a removed inode that is not open, the last
    /// state is returned.
    pub fn getattr(&self, ino: Ino, handle: Option<HandleId>) -> Result<Attr> {
        self.read_current(|| self.attr_of(ino, handle))
    }

    fn attr_of(&self, ino: Ino, handle: Option<HandleId>) -> Result<Attr> {
        if let Some(handle) = handle
            && let Ok((open, _)) = self.file_of(handle)
        {
            let st = open.file().stat().map_err(io("stat"))?;
            return self.attr_of_open(open.ino, &open.file(), &st);
        }
        let _tree = self.tree.read();
        self.getattr_locked(ino)
    }

    pub(crate) fn getattr_locked(&self, ino: Ino) -> Result<Attr> {
        let (target, st) = match self.target(ino) {
            // The removed directory may still be open, or referred to by a handle that opened nothing (`O_PATH`).
            Err(VaultError::Stale) => return self.attr_of_removed(ino).ok_or(VaultError::Stale),
            found => found?,
        };
        match target {
            Target::Open(open) => self.attr_of_open(ino, &open.file(), &st),
            Target::Entry { dir, name, .. } => self.attr_of_entry(ino, &dir, &name, &st),
            Target::Root(..) | Target::Dir(_) => Ok(self.attr(ino, &st, st.len)),
        }
    }

    fn attr_of_removed(&self, ino: Ino) -> Option<Attr> {
        let st = self.nodes.lock().last_stat(ino)?;
        let size = if st.kind == Kind::File { self.size_guess(st.len) } else { st.len };
        Some(self.attr(ino, &st, size))
    }

    /// chmod, chown, truncate, utimens in one, in this order: size, owner, mode, times.
    ///
    /// # Errors
    /// [`VaultError::Unsupported`] for the mode of a symbolic link; [`VaultError::IsDirectory`] or
    /// [`VaultError::Invalid`] for the size of an entry that is not a file; those of the store.
    pub fn setattr(&self, ino: Ino, handle: Option<HandleId>, set: &SetAttr) -> Result<Attr> {
        // Changed once: where the rest is repeated, somebody may have written since.
        let size = Cell::new(set.size);
        let once = || self.with_room(|| self.setattr_once(ino, handle, set, &size));
        let done = self.with_names(ino, once, once);
        if set.size.is_some() {
            self.room.gained();
        }
        done
    }

    fn setattr_once(
        &self,
        ino: Ino,
        handle: Option<HandleId>,
        set: &SetAttr,
        size: &Cell<Option<u64>>,
    ) -> Result<Attr> {
        let _pass = self.change_recorded()?;
        if let Some(new) = size.get() {
            self.set_size(ino, handle, new, set)?;
            size.take();
        }
        let _tree = self.tree.read();
        let (target, st) = self.target_to_change(ino, set.by)?;
        if set.uid.is_some() || set.gid.is_some() {
            self.set_owner(ino, &target, st.kind, (set.uid, set.gid))?;
        }
        if let Some(mode) = set.mode {
            if st.kind == Kind::Symlink {
                return Err(VaultError::Unsupported);
            }
            self.set_mode(ino, &target, mode & 0o7777)?;
        }
        if set.atime.is_some() || set.mtime.is_some() {
            let keep = SetTime::Keep;
            target.set_times(set.atime.unwrap_or(keep), set.mtime.unwrap_or(keep))?;
        }
        self.getattr_locked(ino)
    }

    /// Refuses what would be refused after the size was changed: else a program that is shortened would keep its set-id
    /// bits, which are cleared in the same call. The file is open: a takeover that was cut off is complete.
    fn may_set(&self, ino: Ino, set: &SetAttr) -> Result<()> {
        if (SetAttr { size: None, by: None, ..*set }) == SetAttr::default() {
            return Ok(());
        }
        let _tree = self.tree.read();
        let (target, _) = self.target_to_change(ino, set.by)?;
        if set.uid.is_some() || set.gid.is_some() {
            self.may_set_owner(ino, &target)?;
        }
        set.mode.map_or(Ok(()), |mode| self.may_set_mode(ino, &target, mode & 0o7777))
    }

    /// chmod of a target, reported to the anchor.
    pub(crate) fn set_mode(&self, ino: Ino, target: &Target, mode: u32) -> Result<()> {
        self.may_set_mode(ino, target, mode)?;
        let kind = self.nodes.lock().kind(ino).unwrap_or(Kind::File);
        let step = || target.set_mode(self.mode_in_store(kind, mode)).map_err(io("set the mode"));
        self.change_mode(ino, step, |row| row.mode = mode)
    }

    fn may_set_mode(&self, ino: Ino, target: &Target, mode: u32) -> Result<()> {
        self.refuse_stale_root(target)?;
        self.must_be_under_its_names(ino, target, Asks::to_set(mode))?;
        if mode & libc::S_ISGID == 0 { Ok(()) } else { self.must_have_its_group(ino, target) }
    }

    /// The mode that an entry gets in the store. Where hosts share a vault, the set-id bits of a file are in its row
    /// alone, from where mounts show them. In the store they would be what another user gains who gets an inode of
    /// theirs under the name of a file of root's.
    pub(crate) fn mode_in_store(&self, kind: Kind, mode: u32) -> u32 {
        if self.is_shared_by_hosts() && kind != Kind::Dir { mode & !SET_ID } else { mode }
    }

    /// The same for chown; `None` leaves a value. As on every file system, a change of owner clears set-id bits.
    fn set_owner(&self, ino: Ino, target: &Target, kind: Kind, (uid, gid): (Option<u32>, Option<u32>)) -> Result<()> {
        self.may_set_owner(ino, target)?;
        let step = || target.set_owner(uid, gid).map_err(io("set the owner"));
        self.change_mode(ino, step, |row| {
            (row.uid, row.gid) = (uid.unwrap_or(row.uid), gid.unwrap_or(row.gid));
            if kind != Kind::Dir {
                let is_locking = row.mode & libc::S_IXGRP == 0;
                row.mode &= !(libc::S_ISUID | if is_locking { 0 } else { libc::S_ISGID });
            }
        })
    }

    fn may_set_owner(&self, ino: Ino, target: &Target) -> Result<()> {
        self.refuse_stale_root(target)?;
        self.must_be_under_its_names(ino, target, Asks::Owner)?;
        self.must_have_its_content(ino, target)
    }

    /// Attributes that are not the newest must not be changed: the change would make them the newest.
    fn refuse_stale_root(&self, target: &Target) -> Result<()> {
        if matches!(target, Target::Root(..)) { self.verify_root_permissions() } else { Ok(()) }
    }

    /// `set`: what is set after it.
    fn set_size(&self, ino: Ino, handle: Option<HandleId>, size: u64, set: &SetAttr) -> Result<()> {
        let through = match handle {
            Some(h) => {
                let (open, access) = self.file_of(h)?;
                access.write.then_some(open)
            }
            None => None,
        };
        if let Some(open) = through {
            if size == 0 {
                self.must_be_its_own_to_empty(&open)?;
            }
            self.may_set(ino, set)?;
            let done = open.file().truncate(size);
            open.touched(self.now());
            return Ok(done?);
        }
        match self.nodes.lock().kind(ino) {
            Some(Kind::File) => {}
            Some(Kind::Dir) => return Err(VaultError::IsDirectory),
            Some(_) => return Err(VaultError::Invalid),
            None => return Err(VaultError::Stale),
        }
        let open = self.acquire_to_change(ino, size == 0)?;
        let done = self.may_set(ino, set).and_then(|()| {
            let done = open.file().truncate(size).and_then(|()| open.file().flush());
            open.touched(self.now());
            Ok(done?)
        });
        self.unhold(&open);
        done
    }

    /// statfs: the store's space in the store's units, less the share that pages take, so that all of the free space
    /// can be filled with contents. Names have at most 255 bytes; plain names are as long as the store allows.
    ///
    /// # Errors
    /// Those of the store.
    pub fn statfs(&self) -> Result<StatFs> {
        let mut st = self.backend.stat_fs().map_err(io("statfs"))?;
        let span = self.ctx.geometry.page_span();
        let contents = |blocks: u64| {
            let share = u128::from(blocks) * u128::from(span) / u128::from(span + PAGE_LEN as u64);
            u64::try_from(share).unwrap_or(blocks)
        };
        (st.blocks, st.blocks_free) = (contents(st.blocks), contents(st.blocks_free));
        st.blocks_available = contents(st.blocks_available);
        let longest = match self.name_mode {
            NameMode::Encrypted => NAME_LEN_MAX,
            NameMode::Plain => self.name_max,
        };
        st.name_max = longest as u32;
        Ok(st)
    }

    /// Gives a new entry that is no directory its owner, the lists it inherits, and its mode, in this order: until the
    /// mode is set, no other user can use it, and a set-id bit is never combined with another owner.
    pub(crate) fn own_new(&self, new: New<'_>, wanted: &Wanted) -> Result<Fresh> {
        let st = new.stat().map_err(io("stat"))?;
        let mut changed = false;
        if let Some((uid, gid)) = wanted.owner_change(&st) {
            new.set_owner(uid, gid).map_err(io("set the owner"))?;
            changed = true;
        }
        let (mode, attributes) =
            self.store_inherited(wanted, Holder::File, |attr, value| new.set_xattr(attr, value))?;
        let in_store = mode.map(|mode| self.mode_in_store(st.kind, mode));
        if let Some(mode) = in_store
            && (changed || st.mode != mode)
        {
            new.set_mode(mode).map_err(io("set the mode"))?;
            changed = true;
        }
        let st = if changed { new.stat().map_err(io("stat"))? } else { st };
        Ok(Fresh { attributes, ..Fresh::new(st, mode) })
    }

    /// Gives a new entry the lists it inherits, by `set`. Returns its mode, and the digest of these attributes.
    pub(crate) fn store_inherited(
        &self,
        wanted: &Wanted,
        holder: Holder,
        set: impl Fn(&OsStr, &[u8]) -> std::io::Result<()>,
    ) -> Result<(Option<u32>, Sealed)> {
        let (Some(mode), Some(inherited)) = (wanted.mode, &wanted.inherited) else {
            return Ok((wanted.mode, Sealed::Nothing));
        };
        let attrs = RefCell::new(StoredAttrs::new());
        let mode = inherited.store(self, holder, mode, |attr, value| {
            set(attr, value)?;
            attrs.borrow_mut().insert(attr.to_owned(), value.to_vec());
            Ok(())
        })?;
        let digest = digest_of_attributes(&attrs.into_inner());
        Ok((Some(mode), if digest.is_none() { Sealed::Nothing } else { Sealed::Is(digest) }))
    }

    /// Owner, mode and lists of a new entry of `kind` in `dir`. A setgid parent passes on its group and, to
    /// directories, the setgid bit. The parent's default access control list limits the mode; without one the caller's
    /// umask does.
    pub(crate) fn wanted(&self, dir: &Arc<Dir>, kind: Kind, mode: u32, owner: crate::Owner) -> Result<Wanted> {
        let parent = self.dir_stat(dir)?;
        let inherits = parent.mode & libc::S_ISGID != 0;
        let gid = if inherits { parent.gid } else { owner.gid };
        if kind == Kind::Symlink {
            return Ok(Wanted { uid: owner.uid, gid, mode: None, inherited: None });
        }
        let inherited = self.inherited(dir, kind)?;
        let mut mode = mode & 0o7777;
        mode = inherited.as_ref().map_or(mode & !(owner.umask & 0o777), |i| i.mode(mode));
        if inherits && kind == Kind::Dir {
            mode |= libc::S_ISGID;
        }
        Ok(Wanted { uid: owner.uid, gid, mode: Some(mode), inherited })
    }
}

/// An entry just made: the descriptor that made it, or one that holds it where no other user could exchange it.
#[derive(Clone, Copy)]
pub(crate) enum New<'a> {
    File(&'a dyn BackendFile),
    Entry(&'a dyn BackendEntry),
}

impl New<'_> {
    pub fn stat(self) -> std::io::Result<Stat> {
        match self {
            New::File(file) => file.stat(),
            New::Entry(entry) => entry.stat(),
        }
    }

    fn set_owner(self, uid: Option<u32>, gid: Option<u32>) -> std::io::Result<()> {
        match self {
            New::File(file) => file.set_owner(uid, gid),
            New::Entry(entry) => entry.set_owner(uid, gid),
        }
    }

    fn set_xattr(self, attr: &OsStr, value: &[u8]) -> std::io::Result<()> {
        match self {
            New::File(file) => file.set_xattr(attr, value, 0),
            New::Entry(entry) => entry.set_xattr(attr, value, 0),
        }
    }

    fn set_mode(self, mode: u32) -> std::io::Result<()> {
        match self {
            New::File(file) => file.set_mode(mode),
            New::Entry(entry) => entry.set_mode(mode),
        }
    }
}
