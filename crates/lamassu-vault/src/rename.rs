//! Renames. The name is sealed anew under the new parent's key. Companions arrive before their entry and leave after
//! it. A directory may replace an empty one.

use crate::anchored::{Anchored, Blocked, End, Moving, Unsettled};
use crate::error::{io, no_outcome};
use crate::record::remove_companion;
use crate::stored::rename_no_replace;
use crate::symlink;
use crate::{Ino, Kind, RenameMode, Result, Vault, VaultError};
use lamassu_anchor::ObjectId;
use lamassu_anchor::row::Inodes;
use lamassu_anchor::table::Standing;
use lamassu_store::backend::Stat;
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::time::Instant;

/// What the store shows after a move that it has reported as failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Made,
    NotMade,
    /// It cannot be told.
    Unknown,
}

/// What became of a move, for the call that asked for it.
enum Moved {
    Made,
    /// A barrier must come first; nothing was done.
    Blocked,
    /// Nothing is left of it.
    Undone(VaultError),
    /// The anchor does not have it; but its commit was in doubt, so a crash could bring it back.
    Doubtful(VaultError),
    /// It has no outcome. With the move that takes it back, if that is durable.
    Open(VaultError, Moving, Option<Moving>),
}

/// So many attempts make their barriers while other calls go on.
const UNLOCKED_TRIES: usize = 3;
/// And the others so many each while the tree is locked.
const LOCKED_BARRIERS: usize = 2;

impl Vault {
    /// rename(2) and renameat2(2).
    ///
    /// # Errors
    /// [`VaultError::NotFound`], [`VaultError::Exists`] with `NoReplace`, [`VaultError::NotEmpty`],
    /// [`VaultError::IsDirectory`], [`VaultError::NotDirectory`], [`VaultError::Invalid`] for a directory moved below
    /// itself, [`VaultError::Unsupported`] for an exchange the store cannot do.
    pub fn rename(&self, parent: Ino, name: &OsStr, to_parent: Ino, to_name: &OsStr, mode: RenameMode) -> Result<()> {
        self.with_room(|| self.rename_once((parent, name), (to_parent, to_name), mode))
    }

    fn rename_once(&self, from: (Ino, &OsStr), to: (Ino, &OsStr), mode: RenameMode) -> Result<()> {
        let _pass = self.change()?;
        self.settle_moves();
        self.until_not_blocked("rename", |tried| self.try_rename(from, to, mode, tried))
    }

    fn try_rename(
        &self,
        from: (Ino, &OsStr),
        to: (Ino, &OsStr),
        mode: RenameMode,
        tried: usize,
    ) -> Result<ControlFlow<(), Blocked>> {
        let _tree = self.tree.write();
        if self.anchored.as_ref().is_some_and(|anchored| anchored.has_unsettled()) {
            return Err(no_outcome());
        }
        let from = self.end(from.0, from.1)?;
        let to = self.end(to.0, to.1)?;
        if from.st.is_none() || (mode == RenameMode::Exchange && to.st.is_none()) {
            return Err(VaultError::NotFound);
        }
        if mode == RenameMode::NoReplace && to.st.is_some() {
            return Err(VaultError::Exists);
        }
        self.refuse_loops(&from, &to, mode)?;
        let is_one_inode = from.st.zip(to.st).is_some_and(|(a, b)| a.is_same(&b));
        let is_one_object = from.is_recorded() && from.object == to.object;
        if is_one_inode && !is_one_object && from.is_recorded() && to.is_recorded() {
            // The store shows one entry for two.
            return Err(self.outdated("entry", to.dir.ino, &to.stored.name));
        }
        if is_one_inode || is_one_object {
            // The same name, or two names of one file: POSIX says that nothing happens.
            return Ok(ControlFlow::Break(()));
        }
        for end in [&from, &to] {
            if let Some(st) = end.st.filter(|_| end.is_dir()) {
                self.must_be_its_own_dir(&end.dir, &end.stored.name, &st, end.object)?;
            }
        }
        if self.is_going(&to.dir, &to.stored.name) || (to.is_dir() && self.has_going_in(to.object)) {
            return Ok(ControlFlow::Continue(Blocked::Going));
        }
        if to.is_in_the_way {
            self.move_to_lost(&to.dir, &to.stored.name)?;
        }
        // Under the lock: whoever looks at these places waits for the outcome.
        let back = (mode == RenameMode::Exchange).then_some((&to, &from));
        for (end, place) in [(&from, &to)].into_iter().chain(back) {
            if let Some(st) = &end.st {
                self.note_moved(place.place(), end.object, st);
            }
        }
        match mode {
            RenameMode::Exchange => self.exchange(from, to, tried),
            RenameMode::Replace | RenameMode::NoReplace => self.replace(from, to, tried),
        }
    }

    fn end(&self, parent: Ino, name: &OsStr) -> Result<End> {
        let dir = self.dir_of_names(parent)?;
        let stored = self.stored(&dir, name)?;
        let shown = self.shown(&dir, &stored.name)?;
        let (st, object) = match self.found_as(&dir, &stored.name, shown)? {
            Some((st, object)) => (Some(st), object),
            None => (None, ObjectId::default()),
        };
        let is_in_the_way = shown.is_some() && st.is_none();
        let rest = st.and_then(|st| symlink::rest_of(&self.ctx.ring, &*dir.handle, &stored.name, &st));
        Ok(End { dir, stored, st, object, is_in_the_way, rest })
    }

    /// A directory must not go below itself, at either end.
    fn refuse_loops(&self, from: &End, to: &End, mode: RenameMode) -> Result<()> {
        let nodes = self.nodes.lock();
        for (moved, into) in [(from, to), (to, from)] {
            let Some(st) = moved.st.filter(|_| moved.is_dir()) else { continue };
            let chain = nodes.ancestry(into.dir.ino).ok_or(VaultError::Stale)?;
            let is_it = |ino: Ino| match moved.object == ObjectId::default() {
                true => nodes.id(ino).is_some_and(|id| id.is_of(&st)),
                false => nodes.object(ino) == moved.object,
            };
            let below_itself = chain.iter().copied().any(is_it);
            if below_itself {
                // A target above the source is not empty; in an exchange that would be a loop, too.
                let replaced = std::ptr::eq(moved, to) && mode != RenameMode::Exchange;
                return Err(if replaced { VaultError::NotEmpty } else { VaultError::Invalid });
            }
        }
        Ok(())
    }

    /// Makes what the destination needs before the entry arrives.
    fn prepare_arrival(&self, from: &End, to: &End) -> Result<()> {
        if let Some(rest) = &from.rest
            && from.dir.ino != to.dir.ino
        {
            symlink::copy_rest(rest, &*from.dir.handle, &*to.dir.handle)?;
        }
        Ok(())
    }

    /// The rest of a long link goes after the link has gone to another directory.
    fn finish_departure(&self, from: &End, to: &End) {
        if let Some(rest) = &from.rest
            && from.dir.ino != to.dir.ino
            && !from.is_left_behind()
        {
            remove_companion(&*from.dir.handle, rest);
        }
    }

    fn exchange(&self, from: End, to: End, tried: usize) -> Result<ControlFlow<(), Blocked>> {
        self.prepare_arrival(&from, &to)?;
        self.prepare_arrival(&to, &from)?;
        if from.rest.is_some() || to.rest.is_some() {
            self.sync_beside(&to)?;
            self.sync_beside(&from)?;
        }
        let Some(asked) = self.ask(&from, &to, true, tried)? else {
            return Ok(ControlFlow::Continue(Blocked::Barrier));
        };
        let (a, b) = (&from.stored.name, &to.stored.name);
        let done = from.dir.handle.rename(a, &*to.dir.handle, b, RenameMode::Exchange).map_err(exchange_error);
        match self.answer(&from, &to, true, asked, done) {
            Moved::Made => self.has_exchanged(&from, &to),
            Moved::Blocked => return Ok(ControlFlow::Continue(Blocked::Barrier)),
            Moved::Undone(error) | Moved::Doubtful(error) => return Err(error),
            Moved::Open(error, moving, back) => {
                self.keep_open(Unsettled { from, to, is_exchange: true, moving, back, kept: None });
                return Err(error);
            }
        }
        Ok(ControlFlow::Break(()))
    }

    /// What follows an exchange in the store.
    fn has_exchanged(&self, from: &End, to: &End) {
        self.finish_departure(from, to);
        self.finish_departure(to, from);
        let mut nodes = self.nodes.lock();
        for (end, other) in [(from, to), (to, from)] {
            if let Some(id) = end.id() {
                self.unsynced.add(id);
                nodes.moved(end.object, id, end.place(), other.place());
            }
        }
    }

    fn replace(&self, from: End, to: End, tried: usize) -> Result<ControlFlow<(), Blocked>> {
        match (from.is_dir(), to.st) {
            (true, Some(st)) if st.kind != Kind::Dir => return Err(VaultError::NotDirectory),
            (true, Some(_)) => {
                self.require_empty(&to.dir, &to.stored.name, to.object)?;
                // Recovery could not find what such a move has taken out of it.
                if self.anchored.as_ref().is_some_and(|anchored| anchored.has_any_unsettled()) {
                    return Err(no_outcome());
                }
            }
            (false, Some(st)) if st.kind == Kind::Dir => return Err(VaultError::IsDirectory),
            _ => {}
        }
        let companion_made = match &to.stored.companion {
            Some(companion) => companion.ensure(&*to.dir.handle)?,
            None => false,
        };
        let kept = to.st.and_then(|st| self.keep_nameless(&*to.dir.handle, &to.stored.name, &st));
        let moved = self.make_replace(&from, &to, companion_made, tried);
        let error = match moved {
            Moved::Made => {
                self.has_replaced(&from, &to, kept);
                return Ok(ControlFlow::Break(()));
            }
            // The companion stays: where the move is made after all, or recovered, its name needs it.
            Moved::Open(error, moving, back) => {
                self.keep_open(Unsettled { from, to, is_exchange: false, moving, back, kept });
                return Err(error);
            }
            Moved::Doubtful(error) => {
                kept.inspect(|ino| self.nameless.remove(*ino));
                return Err(error);
            }
            Moved::Blocked => None,
            Moved::Undone(error) => Some(error),
        };
        kept.inspect(|ino| self.nameless.remove(*ino));
        // An existing entry needs it, and lacked it.
        let is_needed = to.st.is_some() || matches!(error, Some(VaultError::Exists));
        if let (true, Some(companion)) = (companion_made && !is_needed, &to.stored.companion) {
            remove_companion(&*to.dir.handle, &companion.name);
        }
        error.map_or(Ok(ControlFlow::Continue(Blocked::Barrier)), Err)
    }

    fn make_replace(&self, from: &End, to: &End, companion_made: bool, tried: usize) -> Moved {
        let prepared = self
            .prepare_arrival(from, to)
            .and_then(|()| if companion_made || from.rest.is_some() { self.sync_beside(to) } else { Ok(()) });
        match prepared.map(|()| self.ask(from, to, false, tried)) {
            Err(error) => Moved::Undone(error),
            Ok(Err(error)) => Moved::Doubtful(error),
            Ok(Ok(None)) => Moved::Blocked,
            Ok(Ok(Some(asked))) => self.answer(from, to, false, asked, self.move_entry(from, to)),
        }
    }

    /// What follows a move in the store that was no exchange.
    fn has_replaced(&self, from: &End, to: &End, kept: Option<Ino>) {
        // First: whatever fails below, the entry is there.
        if let Some(id) = from.id() {
            self.unsynced.add(id);
            self.nodes.lock().moved(from.object, id, from.place(), to.place());
        }
        self.finish_departure(from, to);
        if let Some(companion) = &from.stored.companion {
            remove_companion(&*from.dir.handle, &companion.name);
        }
        if let Some(st) = &to.st {
            // If the anchor cannot tell, its row stays until the vault is opened again.
            let is_last = self.is_last(st, to.object).unwrap_or_else(|error| {
                tracing::warn!(%error, "what a rename has replaced is kept in the anchor");
                false
            });
            if let Some(rest) = &to.rest
                && (is_last || !symlink::is_named_in(&*to.dir.handle, st))
            {
                remove_companion(&*to.dir.handle, rest);
            }
            if is_last {
                self.lost_last_name(to.object, st);
            }
            self.entry_gone(&to.dir, &to.stored.name, st, is_last, to.object);
        }
        if let Some(ino) = kept {
            self.forget_nameless(ino); // the kernel may have forgotten it meanwhile
        }
    }

    /// Makes durable what recovery needs, before the anchor learns that an entry is to arrive.
    fn sync_beside(&self, to: &End) -> Result<()> {
        match self.anchored {
            Some(_) => to.dir.handle.sync().map_err(io("sync a directory")),
            None => Ok(()),
        }
    }

    /// Makes the anchor record a move, before the store's step. `None`: a barrier must come first, and nothing was
    /// done.
    fn ask(&self, from: &End, to: &End, is_exchange: bool, tried: usize) -> Result<Option<Moving>> {
        let ask = || self.record_move(from.name(), to.name(), is_exchange, inodes_of(from, to));
        let mut asked = ask()?;
        // Others change names faster than the store syncs. The tree is locked, so these barriers cover them all.
        for _ in 0..if tried < UNLOCKED_TRIES { 0 } else { LOCKED_BARRIERS } {
            if asked.is_none() {
                self.sync_store()?;
                asked = ask()?;
            }
        }
        Ok(asked)
    }

    /// Tells the anchor the outcome of the store's step. A step that was reported as failed may have been made: the
    /// server of a network store has done it, and its answer was lost. So the store is looked at. If it does not show
    /// the outcome, the intent stays until it does, or until the next writer resolves it.
    fn answer(&self, from: &End, to: &End, is_exchange: bool, asked: Moving, done: Result<()>) -> Moved {
        let Err(error) = done else {
            self.has_moved(asked);
            return Moved::Made;
        };
        let entry = || self.path_in(from.dir.ino, &from.stored.name).display().to_string();
        let mut back = None;
        match self.find_out(from, to, is_exchange, asked, &mut back) {
            Ok(Outcome::Made) => {
                tracing::warn!(entry = entry(), %error, "the store reported that a rename failed, and has made it");
                Moved::Made
            }
            Ok(Outcome::NotMade) => Moved::Undone(error),
            Ok(Outcome::Unknown) => {
                let text = "a rename failed, and the store does not show whether it was made: its names cannot be used \
                            until it does. When the vault is opened again, they are put right; what was not recorded \
                            yet goes to lamassu.lost";
                tracing::error!(entry = entry(), %error, "{text}");
                Moved::Open(error, asked, back)
            }
            Err(of_anchor) => {
                let text = "a rename failed in the store, and the anchor could not take it back: its names cannot be \
                            used until it can, or until the vault is opened again";
                tracing::error!(entry = entry(), error = %of_anchor, "{text}");
                Moved::Open(error, asked, back)
            }
        }
    }

    /// Looks whether the store has made a move, and tells the anchor: takes it back if not. `back`: as in
    /// [`Unsettled`].
    ///
    /// # Errors
    /// It was not made, and could not be taken back.
    fn find_out(
        &self,
        from: &End,
        to: &End,
        is_exchange: bool,
        asked: Moving,
        back: &mut Option<Moving>,
    ) -> Result<Outcome> {
        let seen = [from, to].map(|end| self.shown(&end.dir, &end.stored.name));
        match outcome(from, to, is_exchange, &seen) {
            Outcome::Made if back.is_none() => {
                self.has_moved(asked);
                self.clear_exchanged(from, to, is_exchange, &seen);
                Ok(Outcome::Made)
            }
            Outcome::NotMade => {
                // The first half of a rename over a directory may have been made.
                let is_target = |seen: &Stat| to.st.is_some_and(|st| st.is_same(seen));
                let [_, there] = &seen;
                let is_there = matches!(there, Ok(Some(st)) if is_target(st));
                let target = Some(to.object).filter(|_| is_there || is_exchange);
                let asked = (asked, inodes_of(from, to));
                self.take_move_back(from.name(), to.name(), is_exchange, asked, target, back)?;
                Ok(Outcome::NotMade)
            }
            Outcome::Made | Outcome::Unknown => Ok(Outcome::Unknown),
        }
    }

    /// Keeps a move without an outcome until it has one; in a vault without an anchor there is nothing to wait for.
    fn keep_open(&self, unsettled: Unsettled) {
        match &self.anchored {
            Some(anchored) => anchored.note_unsettled(unsettled),
            None => _ = unsettled.kept.inspect(|ino| self.nameless.remove(*ino)),
        }
    }

    /// Looks again at the move that has no outcome, if there is one. The caller holds no lock of the tree, and keeps
    /// freezes away.
    pub(crate) fn settle_moves(&self) {
        self.settle_moves_if(Anchored::has_unsettled);
    }

    /// The same for a call that does not wait for the outcome: not too often.
    pub(crate) fn settle_moves_in_passing(&self) {
        self.settle_moves_if(Anchored::is_to_be_looked_at);
    }

    fn settle_moves_if(&self, is_to_be: impl Fn(&Anchored) -> bool) {
        let Some(anchored) = self.anchored.as_ref().filter(|anchored| is_to_be(anchored)) else { return };
        // While that is in doubt, what the store shows may be another host's.
        if anchored.anchor.standing() != Standing::Good {
            return;
        }
        let _tree = self.tree.write();
        // Another call may just have looked.
        if !is_to_be(anchored) {
            return;
        }
        let begun = Instant::now();
        let Some(mut open) = anchored.take_unsettled() else { return };
        let found = self.find_out(&open.from, &open.to, open.is_exchange, open.moving, &mut open.back);
        let entry = || self.path_in(open.from.dir.ino, &open.from.stored.name).display().to_string();
        match found {
            Ok(Outcome::Made) => {
                tracing::info!(entry = entry(), "the store shows now that it has made a rename");
                match open.is_exchange {
                    true => self.has_exchanged(&open.from, &open.to),
                    false => self.has_replaced(&open.from, &open.to, open.kept),
                }
            }
            Ok(Outcome::NotMade) => {
                tracing::info!(entry = entry(), "a rename that failed was taken back");
                open.kept.inspect(|ino| self.nameless.remove(*ino));
                let End { dir, stored, .. } = &open.to;
                if let (Some(companion), Ok(None)) = (&stored.companion, self.shown(dir, &stored.name)) {
                    remove_companion(&*dir.handle, &companion.name);
                }
            }
            Ok(Outcome::Unknown) => {
                anchored.note_unsettled(open);
                anchored.looked_in_vain(begun.elapsed());
            }
            Err(error) => {
                tracing::debug!(entry = entry(), %error, "a rename that failed could not be taken back yet");
                anchored.note_unsettled(open);
                anchored.looked_in_vain(begun.elapsed());
            }
        }
        anchored.touched(self.now());
    }

    /// As [`Vault::settle_moves_in_passing`], for calls that only read. Nothing is done while the vault is frozen or
    /// closed.
    pub(crate) fn settle_moves_beside(&self) {
        if self.anchored.as_ref().is_some_and(Anchored::is_to_be_looked_at)
            && let Some(_pass) = self.gate.try_enter()
            && !self.closed.load(std::sync::atomic::Ordering::Acquire)
        {
            self.settle_moves_in_passing();
        }
    }

    /// A directory that was replaced may still lie where the other one was: the two were exchanged.
    fn clear_exchanged(&self, from: &End, to: &End, is_exchange: bool, seen: &[Result<Option<Stat>>; 2]) {
        let [Ok(Some(left)), _] = seen else { return };
        let Some(target) = to.st.filter(|target| !is_exchange && to.is_dir() && target.is_same(left)) else { return };
        if let Err(error) = self.unstage_dir(&*from.dir.handle, &from.stored.name, &target) {
            tracing::error!(%error, "a directory that was replaced stays in the store, and is not shown");
        }
    }

    fn move_entry(&self, from: &End, to: &End) -> Result<()> {
        let (source, target) = (&from.dir.handle, &to.dir.handle);
        let (name, to_name) = (&from.stored.name, &to.stored.name);
        match (from.is_dir(), &to.st) {
            (_, None) => rename_no_replace(&**source, name, &**target, to_name).map_err(io("rename")),
            (false, Some(_)) => source.rename(name, &**target, to_name, RenameMode::Replace).map_err(io("rename")),
            // An empty directory still has its record, so the store would not replace it. The two are exchanged, so the
            // target is never missing.
            (true, Some(st)) => match source.rename(name, &**target, to_name, RenameMode::Exchange) {
                Ok(()) => self.unstage_dir(&**source, name, st).inspect_err(|_| {
                    if let Err(error) = source.rename(name, &**target, to_name, RenameMode::Exchange) {
                        let text = "a rename over a directory failed half-way: the two have changed places";
                        tracing::error!(%error, "{text}");
                    }
                }),
                Err(e) if crate::error::is_unsupported(&e) => {
                    self.unstage_dir(&**target, to_name, st)?;
                    rename_no_replace(&**source, name, &**target, to_name).map_err(io("rename"))
                }
                Err(e) => Err(io("rename")(e)),
            },
        }
    }
}

/// By what the store shows at both ends.
fn outcome(from: &End, to: &End, is_exchange: bool, seen: &[Result<Option<Stat>>; 2]) -> Outcome {
    let is = |end: &End, st: &Stat| end.st.is_some_and(|known| known.is_same(st));
    match seen {
        [Ok(left), Ok(Some(arrived))] if is(from, arrived) => match left {
            Some(left) if is_exchange && !is(to, left) => Outcome::Unknown,
            None if is_exchange => Outcome::Unknown,
            Some(_) | None => Outcome::Made,
        },
        // Only another process can have put something else there.
        [Ok(Some(left)), Ok(_)] if is(from, left) => Outcome::NotMade,
        _ => Outcome::Unknown,
    }
}

fn inodes_of(from: &End, to: &End) -> Inodes {
    let of = |end: &End| end.st.map_or(0, |st| st.ino);
    Inodes { source: of(from), target: of(to) }
}

fn exchange_error(e: std::io::Error) -> VaultError {
    match e.raw_os_error() {
        Some(libc::EINVAL | libc::ENOSYS) => VaultError::Unsupported,
        _ => io("exchange")(e),
    }
}
