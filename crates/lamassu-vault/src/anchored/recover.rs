//! Recovery when a vault is opened for writing (N3), before any of it is served.
//!
//! Moves are resolved together. The store has carried out the first n of them, in order; `history` finds n. The rest
//! are made again, in order, so that another crash in between leaves a state of the same form. Objects left under the
//! name of a removal are removed; other leftovers are unrecorded. The intents are removed after a barrier has covered
//! all of it.
//!
//! What cannot be done is logged, and its intents stay for the next time. Until then an object that is not where it is
//! recorded is missing, and an error when it is used. What lies in the places of the moves stays there, since it may be
//! such an object ([`Anchored::must_stay`]).

use super::Anchored;
use super::history::{History, Move};
use super::locate::{Item, Located};
use crate::error::{io, is_not_found, is_unsupported};
use crate::record::remove_companion;
use crate::stored::{is_entry_empty, rename_no_replace};
use crate::symlink;
use crate::{RenameMode, Result, Vault, VaultError};
use lamassu_anchor::row::{Content, Intent, Over};
use lamassu_anchor::{AnchorError, EntryPlace, EntryRow, ObjectId, Token};
use lamassu_format::name::{Stored, classify, companion_name};
use lamassu_store::BackendDir;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl Vault {
    /// Completes the moves and removals of an earlier writer, and notes which files it left open.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn recover_names(&self) -> Result<()> {
        let Some(anchored) = &self.anchored else { return Ok(()) };
        let (intents, open) = (anchored.anchor.intents()?, anchored.anchor.open_objects()?);
        let is_interrupted = !intents.is_empty() || !open.is_empty() || !self.book.interrupted().is_empty();
        let is_after_crash = is_interrupted || anchored.anchor.vault().is_in_use;
        anchored.after_crash.store(is_after_crash, Ordering::Relaxed);
        anchored.note_open(open);
        if intents.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.put_right(anchored, &intents) {
            tracing::error!(%error, "some renames that a crash interrupted could not be completed");
            let moves = intents.values().filter_map(|intent| match intent {
                Intent::Move { from, to, .. } => Some([*from, *to]),
                Intent::Remove { .. } => None,
            });
            anchored.leave_places(moves.flatten());
            return Ok(());
        }
        anchored.anchor.carried_out(intents.keys().copied());
        if let Err(error) = self.sync_store().and_then(|()| anchored.commit()) {
            // The intents end with the first commit after a barrier.
            tracing::warn!(%error, "renames that a crash interrupted were completed, and that is not recorded yet");
        }
        Ok(())
    }

    fn put_right(&self, anchored: &Anchored, intents: &BTreeMap<u64, Intent>) -> Result<()> {
        let history = History::of(intents);
        let recorded = recorded_in(anchored, &history)?;
        let (kept, mut located) = self.how_many_were_kept(anchored, &history, &recorded);
        let mut work = Work { vault: self, places: HashMap::new() };
        for place in &history.places {
            work.places.extend(Spot::of(&mut located, place).map(|spot| (*place, spot)));
        }
        // What could not be looked at would count as absent, and another number of moves as the right one.
        located.failure()?;
        for undone in history.moves.iter().skip(kept) {
            work.redo(undone)?;
        }
        let removed: BTreeSet<EntryPlace> =
            history.removed_places().filter(|place| !recorded.contains_key(place)).collect();
        work.clear(&removed)?;
        let unrecorded: Vec<_> = history.places.iter().filter(|place| !recorded.contains_key(place)).collect();
        work.clear_rest(&unrecorded)
    }

    /// The moves that the store has not made, and that are not recovered yet.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn moves_left(&self) -> Result<MovesLeft> {
        let Some(anchored) = &self.anchored else { return Ok(MovesLeft::default()) };
        let history = History::of(&anchored.anchor.intents()?);
        let recorded = recorded_in(anchored, &history)?;
        let (kept, mut located) = self.how_many_were_kept(anchored, &history, &recorded);
        // What could not be looked at would make another number the right one: then nothing says that one is made.
        let kept = if located.failure().is_ok() { kept } else { 0 };
        let places = history.moves.iter().skip(kept).flat_map(|left| [left.from, left.to]);
        let mut left = MovesLeft { places: places.map(|place| (place, None)).collect(), absent: HashSet::new() };
        for (place, entry) in &recorded {
            let lies_at = history.recorded_at(*place, kept);
            if let Some(there) = lies_at.and_then(|at| left.places.get_mut(&at)) {
                *there = Some(*entry);
            }
            if left.places.contains_key(place) && lies_at.is_none_or(|at| located.item(at).is_none()) {
                left.absent.insert(*place);
            }
        }
        Ok(left)
    }
}

/// Interrupted moves: recorded by the anchor, and not made by the store.
#[derive(Default)]
pub(crate) struct MovesLeft {
    /// Their places, and objects recorded elsewhere that are still there.
    pub places: HashMap<EntryPlace, Option<EntryRow>>,
    /// Those of the places whose recorded object is nowhere.
    pub absent: HashSet<EntryPlace>,
}

/// The anchor's entries in the named places.
fn recorded_in(anchored: &Anchored, history: &History) -> Result<BTreeMap<EntryPlace, EntryRow>> {
    let mut recorded = BTreeMap::new();
    for place in &history.places {
        recorded.extend(anchored.anchor.entry(place)?.map(|entry| (*place, entry)));
    }
    Ok(recorded)
}

/// A place in the store: its directory, and the stored name, if known.
struct Spot {
    dir: Arc<dyn BackendDir>,
    name: Option<OsString>,
}

impl Spot {
    fn of(located: &mut Located<'_>, place: &EntryPlace) -> Option<Spot> {
        let name = located.item(*place).map(|item| item.name);
        Some(Spot { dir: located.dir(place.dir)?, name })
    }

    /// The entry that is there now.
    fn item(&self) -> Result<Option<Item>> {
        let Some(name) = &self.name else { return Ok(None) };
        match self.dir.stat_entry(name) {
            Err(e) if is_not_found(&e) => Ok(None),
            st => Ok(Some(Item::now(self.dir.clone(), name.clone(), st.map_err(io("stat"))?))),
        }
    }
}

/// The work on the store. Located directories stay open, wherever they move.
struct Work<'a> {
    vault: &'a Vault,
    places: HashMap<EntryPlace, Spot>,
}

impl Work<'_> {
    fn item(&self, place: &EntryPlace) -> Result<Option<Item>> {
        self.places.get(place).map_or(Ok(None), Spot::item)
    }

    /// Makes a move again that the store has lost.
    fn redo(&mut self, undone: &Move) -> Result<()> {
        let Some(item) = self.item(&undone.from)? else { return Ok(()) };
        let Some(spot) = self.places.get_mut(&undone.to) else {
            tracing::error!(dir = undone.to.dir.0, "the place where an entry is recorded is not there");
            return Err(VaultError::NotFound);
        };
        let name = spot.name.get_or_insert_with(|| undone.to_name.clone()).clone();
        let (target, there) = (spot.dir.clone(), spot.item()?);
        if let Some(rest) = symlink::rest_of(&self.vault.ctx.ring, &*item.dir, &item.name, &item.st) {
            symlink::copy_rest(&rest, &*item.dir, &*target)?;
        }
        let moved = |mode| item.dir.rename(&item.name, &*target, &name, mode);
        let done = io("put a name right");
        let there = match there {
            None => return rename_no_replace(&*item.dir, &item.name, &*target, &name).map_err(done),
            Some(_) if undone.over == Over::Exchanged => return moved(RenameMode::Exchange).map_err(done),
            Some(there) => there,
        };
        // Only what the move has replaced is lost by it. Something else may be all that is left of a file.
        let is_replaced = undone.over == Over::Replaced && there.st.ino == undone.inodes.target;
        if is_replaced && !there.is_dir() && !item.is_dir() {
            return moved(RenameMode::Replace).map_err(done);
        }
        // As for a rename over an empty directory.
        match moved(RenameMode::Exchange) {
            Ok(()) => self.discard_alone(&Item::now(item.dir, item.name, there.st)),
            Err(error) if is_unsupported(&error) => {
                self.discard_alone(&there)?;
                rename_no_replace(&*item.dir, &item.name, &*target, &name).map_err(done)
            }
            Err(error) => Err(done(error)),
        }
    }

    /// As [`Work::discard`], without the companion: something else has the name next, or may have it.
    fn discard_alone(&self, item: &Item) -> Result<()> {
        if item.is_dir() && is_entry_empty(&*item.dir, &item.name).unwrap_or(false) {
            return self.vault.unstage_dir(&*item.dir, &item.name, &item.st);
        }
        self.vault.move_alone_to_lost(&*item.dir, &item.name, &item.st)
    }

    /// Removes what is recorded nowhere: an empty directory is deleted, everything else goes to `lamassu.lost`.
    fn discard(&self, item: &Item) -> Result<()> {
        if item.is_dir() && is_entry_empty(&*item.dir, &item.name).unwrap_or(false) {
            self.vault.unstage_dir(&*item.dir, &item.name, &item.st)?;
            return Ok(());
        }
        let entry = item.name.to_string_lossy().into_owned();
        self.vault.move_handle_to_lost(&*item.dir, &item.name, &item.st, &entry)
    }

    /// Removes what is left under the names of removals: the content of a directory before the directory. One that is
    /// not empty goes to `lamassu.lost`.
    fn clear(&self, removed: &BTreeSet<EntryPlace>) -> Result<()> {
        let mut dirs = Vec::new();
        for place in removed {
            match self.item(place)? {
                Some(item) if item.is_dir() => dirs.push(item),
                Some(item) => {
                    item.dir.unlink(&item.name).map_err(io("unlink"))?;
                    self.remove_companion_of(&item);
                }
                None => {}
            }
        }
        // Some are inside others, so this repeats as long as one of them is empty.
        loop {
            let before = dirs.len();
            let mut left = Vec::new();
            for item in dirs {
                if !is_entry_empty(&*item.dir, &item.name).map_err(io("list a directory"))? {
                    left.push(item);
                    continue;
                }
                self.vault.unstage_dir(&*item.dir, &item.name, &item.st)?;
                self.remove_companion_of(&item);
            }
            if left.is_empty() || left.len() == before {
                return Ok(());
            }
            dirs = left;
        }
    }

    fn remove_companion_of(&self, item: &Item) {
        if let Some(companion) = companion_of(self.vault, &item.name) {
            remove_companion(&*item.dir, &companion);
        }
    }

    /// Clears places where nothing is recorded.
    fn clear_rest(&self, unrecorded: &[&EntryPlace]) -> Result<()> {
        for place in unrecorded {
            if let Some(item) = self.item(place)? {
                self.discard(&item)?;
            }
        }
        Ok(())
    }
}

/// The companion of a long name.
fn companion_of(vault: &Vault, name: &OsStr) -> Option<OsString> {
    match classify(vault.name_mode, name.as_bytes()) {
        Stored::Long(hash) => Some(companion_name(&hash).into()),
        _ => None,
    }
}

/// For how long one step of [`Vault::maintain`] recovers files: another host may wait for the vault meanwhile.
pub(crate) const RECOVERY_STEP: Duration = Duration::from_millis(200);

impl Vault {
    /// Recovers files that earlier writers left open, by opening them, until a time has passed. Others are recovered
    /// when they are opened, or by [`Vault::maintain`].
    ///
    /// # Errors
    /// [`VaultError::Anchor`]. A file that cannot be recovered is reported, and is an error when it is opened.
    pub(crate) fn recover_for(&self, time: Duration) -> Result<bool> {
        let Some(anchored) = &self.anchored else { return Ok(true) };
        let until = Instant::now() + time;
        while Instant::now() < until {
            let Some(place) = anchored.next_open()? else { return Ok(true) };
            if let Err(error) = self.recover_file(anchored, place) {
                tracing::warn!(dir = place.dir.0, %error, "a file that a crash left open could not be recovered");
            }
        }
        Ok(false)
    }

    fn recover_file(&self, anchored: &Anchored, place: EntryPlace) -> Result<()> {
        let Some(entry) = anchored.anchor.entry(&place)? else { return Ok(()) };
        if anchored.anchor.row(entry.object)?.file().is_none_or(|file| file.open.is_none()) {
            return Ok(());
        }
        let ino = self.reach(anchored, place)?;
        let opened = self.acquire(ino, true).map(|open| self.unhold(&open));
        self.forget(ino, 1);
        opened
    }

    /// The node of the object recorded at a place, with a reference.
    fn reach(&self, anchored: &Anchored, place: EntryPlace) -> Result<crate::Ino> {
        let mut way = vec![place];
        while let Some(last) = way.last().copied().filter(|last| last.dir != ObjectId::ROOT) {
            let row = anchored.anchor.row(last.dir)?;
            let Content::Dir { parent, name, .. } = row.content else {
                return Err(VaultError::NotDirectory);
            };
            way.push(EntryPlace { dir: parent, name });
            if way.len() > crate::inode::DEPTH_MAX {
                return Err(VaultError::Stale);
            }
        }
        let mut ino = crate::ROOT;
        while let Some(place) = way.pop() {
            let next = self.step_to(anchored, ino, place);
            if ino != crate::ROOT {
                self.forget(ino, 1);
            }
            ino = next?;
        }
        Ok(ino)
    }

    fn step_to(&self, anchored: &Anchored, parent: crate::Ino, place: EntryPlace) -> Result<crate::Ino> {
        let found = self.met_in(anchored, parent, place.dir, &|name| name == place.name)?;
        found.into_iter().next().map_or(Err(VaultError::NotFound), |(_, met)| met)
    }

    /// The node of a directory, with a reference unless it is the root.
    fn reach_dir(&self, anchored: &Anchored, dir: ObjectId) -> Result<crate::Ino> {
        if dir == ObjectId::ROOT {
            return Ok(crate::ROOT);
        }
        match anchored.anchor.row(dir)?.content {
            Content::Dir { parent, name, .. } => self.reach(anchored, EntryPlace { dir: parent, name }),
            _ => Err(VaultError::NotDirectory),
        }
    }

    /// The names of an object that the store shows, whichever inodes they lead to, each with its directory. Adds these
    /// to `held`, with a reference each.
    ///
    /// # Errors
    /// Those of the store and the anchor.
    pub(crate) fn names_shown(
        &self,
        anchored: &Anchored,
        object: ObjectId,
        held: &mut Vec<crate::Ino>,
    ) -> Result<Vec<(crate::Ino, OsString)>> {
        let mut shown = Vec::new();
        for (dir, names) in by_directory(anchored.anchor.names_of(object)?) {
            let parent = match self.reach_dir(anchored, dir) {
                Err(error) if is_absent(&error) => continue,
                parent => parent?,
            };
            held.extend(Some(parent).filter(|parent| *parent != crate::ROOT));
            let _tree = self.tree.read();
            let listed = self.dir(parent)?.handle.read_dir().map_err(io("list a directory"))?;
            let listed = listed.into_iter().filter(|entry| names.contains(&anchored.place(dir, &entry.name).name));
            shown.extend(listed.map(|entry| (parent, entry.name)));
        }
        Ok(shown)
    }

    /// The nodes of entries of a directory, which is this object. Names that the store does not show are left out.
    fn met_in(
        &self,
        anchored: &Anchored,
        parent: crate::Ino,
        object: ObjectId,
        is_wanted: &dyn Fn(Token) -> bool,
    ) -> Result<Vec<Reached>> {
        let _tree = self.tree.read();
        let _names = self.names_of(parent).read();
        let dir = self.dir(parent)?;
        if dir.object != object {
            return Err(VaultError::Stale);
        }
        let listed = dir.handle.read_dir().map_err(io("list a directory"))?;
        let mut met = Vec::new();
        for entry in &listed {
            let token = anchored.place(object, &entry.name).name;
            if !is_wanted(token) {
                continue;
            }
            let found = match self.shown(&dir, &entry.name) {
                Ok(Some(st)) => self.referenced(&dir, &entry.name, &st).map(|(found, _)| found.ino),
                Ok(None) => continue,
                Err(error) => Err(error),
            };
            met.push((token, found));
        }
        Ok(met)
    }

    /// Lets the node of a file have all names that are there. Each directory is listed once.
    pub(crate) fn meet_all_names(&self, anchored: &Anchored, object: ObjectId) -> Result<()> {
        let met = self.nodes_at(anchored, anchored.anchor.names_of(object)?)?;
        met.into_iter().for_each(|ino| self.forget(ino, 1));
        Ok(())
    }

    /// The nodes of what is recorded at places, each with a reference. What is not there is left out.
    ///
    /// # Errors
    /// Those of the store and the anchor.
    pub(crate) fn nodes_at(
        &self,
        anchored: &Anchored,
        places: impl IntoIterator<Item = EntryPlace>,
    ) -> Result<Vec<crate::Ino>> {
        let mut all = Vec::new();
        for (dir, names) in by_directory(places) {
            match self.met_at(anchored, dir, &|name| names.contains(&name)) {
                Ok(met) => all.extend(met.into_iter().map(|(_, met)| met)),
                Err(error) => all.push(Err(error)),
            }
        }
        all.retain(|met| !met.as_ref().is_err_and(is_absent));
        self.all_or_none(all)
    }

    /// Returns the first error, and then gives all references back.
    fn all_or_none(&self, met: Vec<Result<crate::Ino>>) -> Result<Vec<crate::Ino>> {
        let (mut inos, mut failed) = (Vec::new(), None);
        for met in met {
            match met {
                Ok(ino) => inos.push(ino),
                Err(error) => drop(failed.get_or_insert(error)),
            }
        }
        let Some(error) = failed else { return Ok(inos) };
        inos.into_iter().for_each(|ino| self.forget(ino, 1));
        Err(error)
    }

    /// The nodes of entries of a directory. Names that the store does not show are left out.
    ///
    /// # Errors
    /// Those of the directory: [`is_absent`] if it is gone, or was never reached.
    pub(crate) fn met_at(
        &self,
        anchored: &Anchored,
        dir: ObjectId,
        is_wanted: &dyn Fn(Token) -> bool,
    ) -> Result<Vec<Reached>> {
        let parent = self.reach_dir(anchored, dir)?;
        let met = self.met_in(anchored, parent, dir, is_wanted);
        if parent != crate::ROOT {
            self.forget(parent, 1);
        }
        met
    }
}

/// An entry that was looked for: its node, with a reference.
pub(crate) type Reached = (Token, Result<crate::Ino>);

/// Whether an error says that nothing is there, and not that nobody could look.
pub(crate) fn is_absent(error: &VaultError) -> bool {
    match error {
        VaultError::Stale | VaultError::NotFound | VaultError::NotDirectory => true,
        VaultError::Anchor(error) => matches!(error, AnchorError::Unknown { .. }),
        _ => false,
    }
}

fn by_directory(places: impl IntoIterator<Item = EntryPlace>) -> BTreeMap<ObjectId, HashSet<Token>> {
    let mut names: BTreeMap<ObjectId, HashSet<Token>> = BTreeMap::new();
    for place in places {
        names.entry(place.dir).or_default().insert(place.name);
    }
    names
}
