//! Symbolic links: their target cannot be changed in place, so each is replaced by a new one, with the same owner and
//! times. Those with several names are replaced in all of them together; a crash between two names leaves two links
//! with one target. So does a name that came while the walk went on, in a vault without an anchor: another round
//! replaces the link there. Until then the rest of a long target stays in each directory where a name still leads to
//! the old link.

use super::RekeyRun;
use crate::dirs::Dir;
use crate::error::{io, is_not_found};
use crate::event::IntegrityKind;
use crate::inode::StoreId;
use crate::stored::replace;
use crate::symlink::{self, StoredTarget};
use crate::{Ino, Kind, Result, Vault, VaultError};
use lamassu_anchor::{Digest, ObjectId, SealedPart};
use lamassu_store::BackendDir;
use lamassu_store::backend::{SetTime, Stat};
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

/// A link that is made and not yet put into place. Holds a reference to its node.
pub(super) struct StagedLink {
    pub ino: Ino,
    /// Of the old one, as it was then.
    st: Stat,
    temp: OsString,
    target: StoredTarget,
    /// Of the target that it replaces.
    old: Digest,
}

/// A new link for all names of an old one.
struct NewLink {
    /// Of the old one, when the new one was made.
    st: Stat,
    object: ObjectId,
    /// Its name in the staging directory.
    temp: OsString,
    target: StoredTarget,
    /// Of the target that it replaces.
    old: Digest,
}

/// Links with several names, as the walk finds them. Holds a reference to each parent.
#[derive(Default)]
pub(super) struct LinkGroups {
    names: HashMap<StoreId, HashSet<(Ino, OsString)>>,
}

impl LinkGroups {
    /// False: it was known, since the directory is visited again.
    pub fn add(&mut self, vault: &Vault, id: StoreId, parent: Ino, name: &OsStr) -> bool {
        let is_new = self.names.entry(id).or_default().insert((parent, name.to_owned()));
        if is_new {
            vault.nodes.lock().add_reference(parent);
        }
        is_new
    }

    /// Takes all names; returns the references.
    pub fn take(&mut self) -> Vec<Ino> {
        self.names.drain().flat_map(|(_, names)| names).map(|(parent, _)| parent).collect()
    }
}

impl RekeyRun<'_> {
    /// Makes the link anew, in the batch, if it is under an older key.
    pub(super) fn stage_link(&mut self, ino: Ino) -> Result<()> {
        let vault = self.vault;
        let (dir, name, st) = {
            let _tree = vault.tree.read();
            vault.place(ino)?
        };
        let Some((target, old)) = self.fresh_target(&dir, &name)? else { return Ok(()) };
        let temp = self.make_link(&target, &st)?;
        vault.nodes.lock().add_reference(ino);
        self.batch.add_link(StagedLink { ino, st, temp, target, old });
        Ok(())
    }

    /// The target sealed anew, and the digest of the old one; `None` if it is under the newest key already.
    fn fresh_target(&self, dir: &Dir, name: &OsStr) -> Result<Option<(StoredTarget, Digest)>> {
        let (vault, ring) = (self.vault, &self.vault.ctx.ring);
        let link = vault.stored_link(vault.object_at(dir, name)?, dir, name)?;
        if symlink::is_newest(ring, &*dir.handle, &link.text) {
            return Ok(None);
        }
        let plain = symlink::open_shown(ring, &link).map_err(|_| {
            let stored = vault.path_in(dir.ino, name).display().to_string();
            let text = "the target of a symbolic link does not open, and is not re-keyed";
            vault.tell(IntegrityKind::LinkTarget.at(&*stored, text));
            VaultError::Damaged { what: "link target", stored }
        })?;
        Ok(Some((symlink::seal(ring, &plain)?, link.digest())))
    }

    /// Makes the new link in the staging directory. It differs from the old one only in its target.
    fn make_link(&mut self, target: &StoredTarget, st: &Stat) -> Result<OsString> {
        let _pass = self.vault.change()?;
        let (staged, temp) = self.batch.place(self.vault)?;
        staged.make_symlink(&temp, target.text()).map_err(io("create a link"))?;
        let held = staged.hold(&temp).map_err(io("hold"))?;
        let made = held.stat().map_err(io("stat"))?;
        if (made.uid, made.gid) != (st.uid, st.gid) {
            held.set_owner(Some(st.uid), Some(st.gid)).map_err(io("set the owner"))?;
        }
        let times = held.set_times(SetTime::At(st.atime), SetTime::At(st.mtime));
        times.map_err(io("set times"))?;
        Ok(temp)
    }

    /// Gives a new link what was set of the old one since it was made, durably. The caller holds the tree lock, so
    /// nothing is set until the new one has its place.
    fn make_like_now(&self, staged: &dyn BackendDir, temp: &OsStr, (then, now): (&Stat, &Stat)) -> Result<()> {
        let shown = |st: &Stat| (st.uid, st.gid, st.mtime);
        if (shown(then), then.atime) == (shown(now), now.atime) {
            return Ok(());
        }
        let held = staged.hold(temp).map_err(io("hold"))?;
        held.set_owner(Some(now.uid), Some(now.gid)).map_err(io("set the owner"))?;
        held.set_times(SetTime::At(now.atime), SetTime::At(now.mtime)).map_err(io("set times"))?;
        // To read the old one may have changed that time.
        if shown(then) == shown(now) { Ok(()) } else { self.vault.sync_store() }
    }

    pub(super) fn place_link(&mut self, staged: &dyn BackendDir, link: StagedLink) -> Result<()> {
        let vault = self.vault;
        let _pass = vault.change()?;
        let _tree = vault.tree.write();
        let (dir, name, st) = vault.place(link.ino)?;
        // Where hosts share the vault, it may have got another number from the store.
        if st.nlink > 1 || !(link.st.is_same(&st) || vault.is_shared_by_hosts()) {
            return Ok(()); // it got another name meanwhile, which is noted
        }
        self.make_like_now(staged, &link.temp, (&link.st, &st))?;
        let object = vault.object_at(&dir, &name)?;
        let digests = (link.old, link.target.digest());
        let step = || self.put(&dir, &name, &link.target, |dir, name| replace(staged, &link.temp, dir, name));
        let stored = || vault.path_in(dir.ino, &name).display().to_string();
        let (new, old) = vault.replacing(object, SealedPart::Content, digests, &stored, step)?;
        self.exchanged(StoreId::from(&st), &new);
        if let Some(rest) = old {
            remove_rest(&dir, &rest);
        }
        self.walk.done.links += 1;
        Ok(())
    }

    /// Puts a new link in the place of an old one; its stat, and the name of the old one's rest.
    fn put(
        &self,
        dir: &Arc<Dir>,
        name: &OsStr,
        target: &StoredTarget,
        replace: impl FnOnce(&dyn BackendDir, &OsStr) -> Result<()>,
    ) -> Result<(Stat, Option<OsString>)> {
        let before = dir.handle.stat_entry(name).map_err(io("stat"))?;
        let dir_before = dir.handle.stat().map_err(io("stat a directory"))?;
        let old = symlink::rest_of(&self.vault.ctx.ring, &*dir.handle, name, &before);
        target.create_rest(&*dir.handle).map_err(io("create a companion"))?;
        replace(&*dir.handle, name)?;
        let new = dir.handle.stat_entry(name).map_err(io("stat"))?;
        let _ = dir.handle.set_times(SetTime::Keep, SetTime::At(dir_before.mtime));
        Ok((new, old))
    }

    /// The new link takes over the node of the old one.
    fn exchanged(&self, old: StoreId, new: &Stat) {
        self.vault.nodes.lock().exchanged(old, StoreId::from(new));
        self.vault.unsynced.add(StoreId::from(new));
    }

    /// Links with several names, after the walk has found them all. What an interruption leaves, stays in the list.
    pub(super) fn relink_groups(&mut self) -> Result<()> {
        let all: Vec<StoreId> = self.walk.groups.names.keys().copied().collect();
        for id in all {
            if self.is_cancelled() {
                return Ok(());
            }
            let Some(names) = self.walk.groups.names.get(&id) else { continue };
            let names: Vec<_> = names.iter().cloned().collect();
            let relinked = self.relink(id, &names);
            let at = names.first().map_or(crate::ROOT, |(parent, _)| *parent);
            self.note(at, relinked)?;
            let known = self.walk.groups.names.remove(&id).into_iter().flatten();
            known.for_each(|(parent, _)| self.vault.forget(parent, 1));
            self.progress.advance(0);
        }
        Ok(())
    }

    /// Whether a link has other names. If its replacement was cut off, they lead to another inode.
    pub(super) fn has_other_names(&self, ino: Ino, st: &Stat) -> Result<bool> {
        Ok(st.nlink > 1 || self.vault.row_of(ino)?.is_some_and(|row| row.links > 1))
    }

    fn relink(&mut self, id: StoreId, names: &[(Ino, OsString)]) -> Result<()> {
        let vault = self.vault;
        let (object, count) = {
            let _tree = vault.tree.read();
            let places = self.places_of(id, names)?;
            let Some((dir, name, _)) = places.first() else { return Ok(()) }; // all were moved, which is noted, or removed
            let object = vault.object_at(dir, name)?;
            (object, self.recorded_of(object, &places)?)
        };
        match vault.row_of_object(object)? {
            Some(row) if row.links > count => self.with_all_names(object, |run, all| {
                let id = run.unite(object, all)?.unwrap_or(id);
                run.renew(id, all)
            }),
            Some(_) | None => self.renew(id, names),
        }
    }

    /// Makes a link anew, under all its names.
    fn renew(&mut self, id: StoreId, names: &[(Ino, OsString)]) -> Result<()> {
        let vault = self.vault;
        let found = {
            let _tree = vault.tree.read();
            let places = self.places_of(id, names)?;
            match places.first() {
                Some((dir, name, st)) => {
                    let object = vault.object_at(dir, name)?;
                    // The new link gets its owner.
                    vault.must_be_its_own(object, st)?;
                    self.fresh_target(dir, name)?.map(|fresh| (fresh, object, *st))
                }
                None => None,
            }
        };
        let Some(((target, old), object, st)) = found else { return Ok(()) };
        let temp = self.make_link(&target, &st)?;
        let new = NewLink { st, object, temp, target, old };
        if self.exchange_all(&new, names, false)? {
            return Ok(());
        }
        // It got another name, perhaps on another host.
        if vault.anchored.is_none() {
            return Ok(());
        }
        // And it may get one while its names are gathered.
        for must_be_all in [false, false, true] {
            let mut is_done = false;
            self.with_all_names(object, |run, all| {
                is_done = run.exchange_all(&new, all, must_be_all)?;
                Ok(())
            })?;
            if is_done {
                break;
            }
        }
        Ok(())
    }

    /// Calls `work` with all names of an object, by whichever inodes. A node has one inode, so this does not go by
    /// nodes.
    fn with_all_names(
        &mut self,
        object: ObjectId,
        work: impl FnOnce(&mut Self, &[(Ino, OsString)]) -> Result<()>,
    ) -> Result<()> {
        let vault = self.vault;
        let Some(anchored) = &vault.anchored else { return Ok(()) };
        let mut held = Vec::new();
        let done = vault.names_shown(anchored, object, &mut held).and_then(|names| work(self, &names));
        held.into_iter().for_each(|ino| vault.forget(ino, 1));
        done
    }

    /// If the replacement of a link was cut off, its names lead to several inodes: gives all of them that under the
    /// newest key. A row has two states, so a third must not be made before. Returns the inode that all names have;
    /// `None`: there is no such name.
    fn unite(&mut self, object: ObjectId, names: &[(Ino, OsString)]) -> Result<Option<StoreId>> {
        let (vault, ring) = (self.vault, &self.vault.ctx.ring);
        let (staged, spare) = self.batch.place(vault)?;
        let _pass = vault.change()?;
        let tree = vault.tree.write();
        let mut places = Vec::new();
        for (dir, name, st) in self.places_by(names, |st| st.kind == Kind::Symlink)? {
            if vault.object_if_recorded(&dir, &name)? == Some(object) {
                // A copy of another user's would get all names.
                if let refused @ Err(_) = vault.must_be_its_own(object, &st) {
                    self.note(dir.ino, refused)?;
                    continue;
                }
                let link = vault.stored_link(object, &dir, &name)?;
                places.push((symlink::is_newest(ring, &*dir.handle, &link.text), link.digest(), dir, name, st));
            }
        }
        let Some((_, digest, kept, kept_name, kept_st)) = places.iter().max_by_key(|place| place.0) else {
            return Ok(None);
        };
        let id = StoreId::from(kept_st);
        let rest = symlink::rest_of(ring, &*kept.handle, kept_name, kept_st);
        let mut olds = Vec::new();
        for (_, _, dir, name, st) in places.iter().filter(|(.., st)| !st.is_same(kept_st)) {
            if let Some(rest) = rest.as_ref().filter(|_| dir.ino != kept.ino) {
                symlink::copy_rest(rest, &*kept.handle, &*dir.handle)?;
            }
            olds.extend(symlink::rest_of(ring, &*dir.handle, name, st).map(|rest| (dir, rest, st)));
            let held = kept.handle.hold(kept_name).map_err(io("hold"))?;
            held.link(&*staged, &spare).map_err(io("link"))?;
            replace(&*staged, &spare, &*dir.handle, name)?;
            vault.unsynced.add(id);
            vault.nodes.lock().united(object, (kept_st, st), dir.ino, name);
        }
        drop(tree);
        vault.sync_store()?;
        vault.is_newest(object, SealedPart::Content, *digest)?;
        let _tree = vault.tree.write();
        olds.iter().for_each(|(dir, rest, old)| remove_unneeded_rest(dir, rest, old));
        Ok(Some(id))
    }

    /// Puts a new link in the place of the old one under all names. False: these are not all, and nothing was changed.
    fn exchange_all(&mut self, new: &NewLink, names: &[(Ino, OsString)], must_be_all: bool) -> Result<bool> {
        let vault = self.vault;
        let (staged, spare) = self.batch.place(vault)?;
        let _pass = vault.change()?;
        vault.sync_store()?;
        let _tree = vault.tree.write();
        let id = StoreId::from(&new.st);
        let places = self.places_of(id, names)?;
        let old_link = places.first().map(|(.., st)| *st);
        let stored = || {
            places.first().map(|(dir, name, _)| vault.path_in(dir.ino, name).display().to_string()).unwrap_or_default()
        };
        match vault.row_of_object(new.object)? {
            // A name that kept the old link would be called stale.
            Some(row) if row.links != self.recorded_of(new.object, &places)? => {
                return match must_be_all {
                    true => Err(vault.outdated_as(IntegrityKind::Missing, "entry", stored())),
                    false => Ok(false),
                };
            }
            None if old_link.is_some_and(|st| (places.len() as u64) < st.nlink) && self.walk.has_moves() => {
                self.walk.falls_short();
            }
            Some(_) | None => {}
        }
        old_link.map_or(Ok(()), |st| self.make_like_now(&*staged, &new.temp, (&new.st, &st)))?;
        let digests = (new.old, new.target.digest());
        // All names at once: each shows the old target or the new one.
        let step = || self.put_all(id, &places, &new.target, (&*staged, &new.temp, &spare));
        let olds = vault.replacing(new.object, SealedPart::Content, digests, &stored, step)?;
        let made = staged.stat_entry(&new.temp).map_err(io("stat"))?;
        staged.unlink(&new.temp).map_err(io("unlink"))?;
        if let Some(old_link) = old_link {
            self.exchanged(id, &made);
            olds.iter().for_each(|(dir, rest)| remove_unneeded_rest(dir, rest, &old_link));
            self.walk.done.links += 1;
        }
        Ok(true)
    }

    /// Those of the names that lead to a link. The caller holds the tree lock.
    fn places_of(&self, id: StoreId, names: &[(Ino, OsString)]) -> Result<Vec<(Arc<Dir>, OsString, Stat)>> {
        self.places_by(names, |st| id.is_of(st))
    }

    fn places_by(
        &self,
        names: &[(Ino, OsString)],
        is_wanted: impl Fn(&Stat) -> bool,
    ) -> Result<Vec<(Arc<Dir>, OsString, Stat)>> {
        let mut places = Vec::new();
        for (parent, name) in names {
            let dir = match self.vault.dir(*parent) {
                Err(VaultError::Stale) => continue,
                other => other?,
            };
            match dir.handle.stat_entry(name) {
                Ok(st) if is_wanted(&st) => places.push((dir, name.clone(), st)),
                Ok(_) => {}
                Err(e) if is_not_found(&e) => {}
                Err(e) => return Err(io("stat")(e)),
            }
        }
        Ok(places)
    }

    /// How many of the places the anchor has for an object. A removed name stays in the store for a moment.
    fn recorded_of(&self, object: ObjectId, places: &[(Arc<Dir>, OsString, Stat)]) -> Result<u64> {
        let mut count = 0;
        for (dir, name, _) in places {
            count += u64::from(self.vault.object_if_recorded(dir, name)? == Some(object));
        }
        Ok(count)
    }

    /// Puts a new link, staged under a name, in all places of an old one. Returns the rests of the old one, by their
    /// directories.
    fn put_all(
        &self,
        old: StoreId,
        places: &[(Arc<Dir>, OsString, Stat)],
        target: &StoredTarget,
        (staged, temp, spare): (&dyn BackendDir, &OsStr, &OsStr),
    ) -> Result<Vec<(Arc<Dir>, OsString)>> {
        let mut olds = Vec::new();
        for (dir, name, _) in places {
            // Not if another link is there by now: that link needs its rest.
            if !old.is_of(&dir.handle.stat_entry(name).map_err(io("stat"))?) {
                continue;
            }
            let (_, rest) = self.put(dir, name, target, |to, name| {
                let held = staged.hold(temp).map_err(io("hold"))?;
                held.link(staged, spare).map_err(io("link"))?;
                replace(staged, spare, to, name)
            })?;
            olds.extend(rest.map(|rest| (dir.clone(), rest)));
        }
        Ok(olds)
    }
}

/// Removes the rest of an old link's target, unless another name in the directory still leads to that link. The caller
/// holds the tree lock.
fn remove_unneeded_rest(dir: &Dir, rest: &OsStr, old: &Stat) {
    if !symlink::is_named_in(&*dir.handle, old) {
        remove_rest(dir, rest);
    }
}

/// Removes the rest of an old link's target.
fn remove_rest(dir: &Dir, rest: &OsStr) {
    let before = dir.handle.stat();
    crate::record::remove_companion(&*dir.handle, rest);
    if let Ok(before) = before {
        let _ = dir.handle.set_times(SetTime::Keep, SetTime::At(before.mtime));
    }
}
