//! The anchor of one vault. Reads see what was queued last; commits make it durable.
//!
//! | module | what it does |
//! |---|---|
//! | this one | opening, reading, commits |
//! | `names` | entries: made, removed, moved (N1 to N4) |
//! | `nameless` | objects without an entry |
//! | `files` | files: opened for changes, committed (A1 to A8) |
//! | `vault` | the vault's header and history |
//! | `accept` | a person's decisions |
//! | `replace` | records, targets and attributes, which are replaced as a whole |
//! | `state` | what is in force and not yet durable |
//! | `together` | group commit of some objects |
//!
//! Wrong orders cannot be expressed. A call whose effect must be durable before a step of the store returns only when
//! it is. A name cannot be made again before the store has carried out its removal. A commit of a file cannot lower a
//! sequence.
//!
//! Locks, in this order: `committing`, `state`, then the locks of the table ([`crate::table`]). `asking` is held alone,
//! or under the first. A commit holds `state` only to take the changes and to put them back, not while the table is
//! written.
//!
//! Changes that a commit has taken out of the queue are in flight ([`State::fly`]) until the commit ends. Then they are
//! in the table, or back in the queue. So every row is always in one of the three.

mod accept;
mod files;
mod nameless;
mod names;
mod replace;
mod state;
mod together;
mod vault;

pub use accept::Decided;
pub use files::{FileCommit, Opening};
pub use names::{Made, Removal, Renamed};
pub use replace::{Replacing, SealedPart, Seen};
pub use vault::HeaderBasis;

use crate::queue::{
    EntryMark, Layer, Scope, VAULT_KEY, Wanted, behind_object, decode_digests, entry_key, number_of, object_key,
};
use crate::row::{EntryPlace, EntryRow, Intent, Row, VaultRow};
use crate::table::{Doubt, Space, Standing, Table};
use crate::{AnchorError, Digests, ObjectId, ObjectKind, Part, RecordNo, Token, TokenKey};
use lamassu_format::Profile;
use lamassu_format::header::VaultId;
use parking_lot::{Mutex, MutexGuard};
use state::{QueuedHeld, State, change_held};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, Weak};

type Result<T> = std::result::Result<T, AnchorError>;

/// An open anchor. Methods may be called from many threads.
pub struct Anchor {
    table: Arc<dyn Table>,
    tokens: TokenKey,
    degree: usize,
    state: Mutex<State>,
    /// Held during a commit: commits take effect in order (A8).
    committing: Mutex<()>,
    /// Commits of some objects that wait for `committing`.
    asking: together::List,
    /// The last member: it is dropped after the table.
    open: Arc<()>,
}

/// Shows the vault's id, and no content.
impl fmt::Debug for Anchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Anchor").field("vault", &state.vault.vault).field("queued", &state.queued.len()).finish()
    }
}

impl Anchor {
    /// Makes the anchor of a new vault in an empty table, with the root alone.
    ///
    /// # Errors
    /// [`AnchorError::Foreign`] if the table has a vault; those of the table.
    pub fn create(table: Arc<dyn Table>, vault: VaultRow, root: Row) -> Result<Anchor> {
        if table.get(Space::Vault, VAULT_KEY)?.is_some() {
            return Err(AnchorError::Foreign);
        }
        let mut layer = Layer::of_vault(vault.clone());
        layer.objects.insert(ObjectId::ROOT, Some(root));
        table.commit(&layer.changes())?;
        Ok(Anchor::of(table, vault))
    }

    /// Opens the anchor of a vault.
    ///
    /// # Errors
    /// [`AnchorError::Empty`], [`AnchorError::Foreign`], [`AnchorError::Version`], [`AnchorError::Damaged`]; those of
    /// the table.
    pub fn open(table: Arc<dyn Table>, vault: &VaultId) -> Result<Anchor> {
        let bytes = table.get(Space::Vault, VAULT_KEY)?.ok_or(AnchorError::Empty)?;
        let row = VaultRow::decode(&bytes)?;
        if row.vault != *vault {
            return Err(AnchorError::Foreign);
        }
        Ok(Anchor::of(table, row))
    }

    fn of(table: Arc<dyn Table>, vault: VaultRow) -> Anchor {
        let (tokens, degree) = (vault.tokens.clone(), 1 << vault.degree_log2);
        let state = State {
            durable_next: vault.next_object,
            vault,
            queued: Layer::default(),
            flying: None,
            made: 0,
            nameless: HashMap::new(),
            replacing: None,
            due: BTreeMap::new(),
            handed_out: BTreeMap::new(),
            going: HashSet::new(),
            replaced: replace::Replaced::default(),
        };
        Anchor {
            table,
            tokens,
            degree,
            state: Mutex::new(state),
            committing: Mutex::new(()),
            asking: Mutex::default(),
            open: Arc::default(),
        }
    }

    /// A reference that lives as long as this anchor. When it is gone, the table is closed.
    pub fn while_open(&self) -> Weak<()> {
        Arc::downgrade(&self.open)
    }

    /// Whether the right to use the table can end while it is open ([`Table::may_end`]).
    pub fn may_end(&self) -> bool {
        self.table.may_end()
    }

    /// The table that has its rows. Changes that are not committed yet are missing there.
    pub fn table(&self) -> &dyn Table {
        &*self.table
    }

    /// Whether reads are valid now ([`Table::standing`]).
    pub fn standing(&self) -> Standing {
        self.table.standing()
    }

    /// Waits until reads are valid ([`Table::wait_until_good`]).
    ///
    /// # Errors
    /// [`AnchorError::Server`].
    pub fn wait_until_good(&self) -> Result<()> {
        self.table.wait_until_good()
    }

    /// From now on, what is read may be cached ([`Table::has_caches`]).
    pub fn has_caches(&self) {
        self.table.has_caches();
    }

    /// Why reads are not valid now ([`Table::doubt`]).
    pub fn doubt(&self) -> Option<Doubt> {
        self.table.doubt()
    }

    /// Caches were dropped ([`Table::caches_are_dropped`]).
    pub fn caches_are_dropped(&self, doubt: Doubt) {
        self.table.caches_are_dropped(doubt);
    }

    /// Returns when reads are no longer valid, and now and then before that ([`Table::wait_while_good`]).
    pub fn wait_while_good(&self) {
        self.table.wait_while_good();
    }

    /// Whether files of this profile may be made and written ([`Table::check_profile`]).
    ///
    /// # Errors
    /// [`AnchorError::Server`].
    pub fn check_profile(&self, profile: Profile) -> Result<()> {
        self.table.check_profile(profile)
    }

    /// The token of a name in the store.
    pub fn token(&self, dir: ObjectId, stored: &[u8]) -> Token {
        self.tokens.token(dir, stored)
    }

    /// The number of children of a tree record.
    pub fn degree(&self) -> usize {
        self.degree
    }

    /// Whether files have a root over their blocks as well.
    pub fn has_blocks(&self) -> bool {
        self.state.lock().vault.blocks
    }

    /// The row of the vault.
    pub fn vault(&self) -> VaultRow {
        self.state.lock().vault.clone()
    }

    /// Changes the row of the vault; durable with the next commit.
    pub fn change_vault(&self, change: impl FnOnce(&mut VaultRow)) {
        let state = &mut *self.state.lock();
        change(&mut state.vault);
        state.queued.vault = Some(state.vault.clone());
    }

    /// The row of an object.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`], [`AnchorError::Damaged`]; those of the table.
    pub fn row(&self, object: ObjectId) -> Result<Row> {
        self.known(&self.state.lock(), object)
    }

    /// Changes an object's row; durable with the next commit that includes it.
    ///
    /// # Errors
    /// As for [`Anchor::row`].
    pub fn change(&self, object: ObjectId, change: impl FnOnce(&mut Row)) -> Result<()> {
        let state = &mut *self.state.lock();
        let mut row = self.known(state, object)?;
        change(&mut row);
        state.queue_row(object, row);
        Ok(())
    }

    fn known(&self, state: &State, object: ObjectId) -> Result<Row> {
        let layers = state.layers();
        let queued = layers.into_iter().flatten().find_map(|layer| layer.objects.get(&object));
        let row = match queued {
            Some(row) => row.clone(),
            None => self.durable_row(object)?,
        };
        row.or_else(|| state.row_without_entry(object)).ok_or(AnchorError::Unknown { object })
    }

    fn durable_row(&self, object: ObjectId) -> Result<Option<Row>> {
        self.table.get(Space::Objects, &object_key(object))?.map(|bytes| Row::decode(&bytes)).transpose()
    }

    /// The entry at a name of a directory.
    ///
    /// # Errors
    /// [`AnchorError::Damaged`]; those of the table.
    pub fn entry(&self, place: &EntryPlace) -> Result<Option<EntryRow>> {
        self.entry_in(&self.state.lock(), place)
    }

    fn entry_in(&self, state: &State, place: &EntryPlace) -> Result<Option<EntryRow>> {
        let layers = state.layers();
        let queued = layers.into_iter().flatten().find_map(|layer| layer.entry(place));
        queued.map_or_else(|| self.durable_entry(place), Ok)
    }

    fn durable_entry(&self, place: &EntryPlace) -> Result<Option<EntryRow>> {
        self.table.get(Space::Entries, &entry_key(place))?.map(|bytes| EntryRow::decode(&bytes)).transpose()
    }

    /// All entries of a directory. The caller must prevent changes of the directory: otherwise the entries would be
    /// from different moments.
    ///
    /// # Errors
    /// As for [`Anchor::entry`].
    pub fn entries(&self, dir: ObjectId) -> Result<BTreeMap<Token, EntryRow>> {
        let queued = self.queued_entries(dir);
        let mut entries = BTreeMap::new();
        self.scan(Space::Entries, &object_key(dir), Part::Entry, |key, value| {
            let Some(name) = behind_object(key).map(Token) else { return Ok(None) };
            if !queued.contains_key(&name) {
                entries.insert(name, EntryRow::decode(value)?);
            }
            Ok(Some(ControlFlow::Continue(())))
        })?;
        entries.extend(queued.into_iter().filter_map(|(name, entry)| Some((name, entry?))));
        Ok(entries)
    }

    /// Whether a directory has no entries. The caller must prevent changes of it.
    ///
    /// # Errors
    /// As for [`Anchor::entry`].
    pub fn is_empty(&self, dir: ObjectId) -> Result<bool> {
        let queued = self.queued_entries(dir);
        let mut is_empty = queued.values().all(Option::is_none);
        if is_empty {
            self.scan(Space::Entries, &object_key(dir), Part::Entry, |key, _| {
                let Some(name) = behind_object(key).map(Token) else { return Ok(None) };
                is_empty = queued.contains_key(&name);
                Ok(Some(if is_empty { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }))
            })?;
        }
        Ok(is_empty)
    }

    /// Entries of a directory that are in force and not in the table yet. They must be read *before* the table: then an
    /// entry that is committed meanwhile is found in both, and not in neither. So no reader waits for the flush of a
    /// commit.
    fn queued_entries(&self, dir: ObjectId) -> BTreeMap<Token, Option<EntryRow>> {
        let state = self.state.lock();
        state.layers().into_iter().rev().flatten().flat_map(|layer| layer.entries_of(dir)).collect()
    }

    /// The held tree records of a file, under its committed root. The caller must prevent commits of the file.
    ///
    /// # Errors
    /// [`AnchorError::Damaged`]; those of the table.
    pub fn held(&self, object: ObjectId) -> Result<BTreeMap<RecordNo, Digests>> {
        // Before the table, as for entries.
        let queued = {
            let state = self.state.lock();
            if let Some(nameless) = state.nameless.get(&object) {
                return Ok(nameless.held.clone());
            }
            state.queued_held(object)
        };
        self.held_under(queued, object)
    }

    /// Held records in the table, with the queued changes applied.
    fn held_under(&self, queued: QueuedHeld, object: ObjectId) -> Result<BTreeMap<RecordNo, Digests>> {
        let mut held = BTreeMap::new();
        self.scan(Space::Held, &object_key(object), Part::Held, |key, value| {
            let Some(bytes) = behind_object(key) else { return Ok(None) };
            held.insert(RecordNo(u64::from_be_bytes(bytes)), decode_digests(value, self.degree)?);
            Ok(Some(ControlFlow::Continue(())))
        })?;
        change_held(&mut held, queued);
        Ok(held)
    }

    /// Files that are durably open: after a crash they must be recovered before they are read.
    ///
    /// # Errors
    /// Those of the table.
    pub fn open_objects(&self) -> Result<Vec<ObjectId>> {
        let mut open = Vec::new();
        self.scan(Space::Open, &[], Part::Row, |key, _| {
            let Some(number) = number_of(key) else { return Ok(None) };
            open.push(ObjectId(number));
            Ok(Some(ControlFlow::Continue(())))
        })?;
        Ok(open)
    }

    /// Changes of names that the store may not have carried out, as of the last commit.
    ///
    /// # Errors
    /// [`AnchorError::Damaged`]; those of the table.
    pub fn intents(&self) -> Result<BTreeMap<u64, Intent>> {
        let mut intents = BTreeMap::new();
        self.scan(Space::Intents, &[], Part::Intent, |key, value| {
            let Some(number) = number_of(key) else { return Ok(None) };
            intents.insert(number, Intent::decode(value)?);
            Ok(Some(ControlFlow::Continue(())))
        })?;
        Ok(intents)
    }

    /// Visits keys and values, until `visit` breaks; the key is `None` if it is invalid.
    fn scan(
        &self,
        space: Space,
        prefix: &[u8],
        part: Part,
        mut each: impl FnMut(&[u8], &[u8]) -> Result<Option<ControlFlow<()>>>,
    ) -> Result<()> {
        let mut done = Ok(());
        self.table.scan(space, prefix, &mut |key, value| {
            let next = each(key, value).and_then(|next| next.ok_or(AnchorError::Damaged { part }));
            next.unwrap_or_else(|error| {
                done = Err(error);
                ControlFlow::Break(())
            })
        })?;
        done
    }

    /// The current position in the queue: a barrier of the store that begins now covers every entry made so far.
    pub fn mark(&self) -> EntryMark {
        EntryMark(self.state.lock().made)
    }

    /// The first number of an object that no commit has given away: if the session is lost, the next one may give it.
    pub fn first_loose(&self) -> ObjectId {
        self.state.lock().durable_next
    }

    /// The number of changes that are not durable yet.
    pub fn queued(&self) -> usize {
        let state = self.state.lock();
        state.layers().into_iter().flatten().map(Layer::len).sum::<usize>() + state.replaced.len()
    }

    /// Makes the queue durable, in as many transactions as its length needs. Of new entries it takes those up to
    /// `covered`, a mark that was taken before a barrier of the store.
    ///
    /// # Errors
    /// Those of the table; what no transaction has made durable stays queued. If a rule of the server's policy forbids
    /// some of it, only that stays queued: one file does not block others.
    pub fn commit(&self, covered: EntryMark) -> Result<()> {
        let _in_order = self.in_order()?;
        self.state.lock().settle_replaced(self, covered)?;
        self.commit_allowed(covered)
    }

    /// The caller holds `committing`.
    fn commit_allowed(&self, covered: EntryMark) -> Result<()> {
        let refused = match self.commit_all_but(&HashSet::new(), covered) {
            Err(error) if error.is_of_policy() => error,
            done => return done,
        };
        let forbidden = self.state.lock().queued.files_of(|profile| self.table.check_profile(profile).is_err());
        if !forbidden.is_empty() {
            self.commit_all_but(&forbidden, covered)?;
        }
        Err(refused)
    }

    /// The caller holds `committing`. Ends although others queue more meanwhile: their entries are above `covered`.
    fn commit_all_but(&self, but: &HashSet<ObjectId>, covered: EntryMark) -> Result<()> {
        loop {
            self.commit_pieces(Wanted::AllBut(but), covered)?;
            self.commit_taken(Scope::AllBut(but), covered)?;
            if !self.state.lock().queued.has_ended(covered) {
                return Ok(());
            }
        }
    }

    /// Commits until what is left of this fits into one commit. The caller holds `committing`.
    fn commit_pieces(&self, wanted: Wanted<'_>, covered: EntryMark) -> Result<()> {
        loop {
            let flying = {
                let state = &mut *self.state.lock();
                let Some(piece) = state.queued.piece(wanted, covered) else { return Ok(()) };
                self.fly_queued(state, Scope::Objects(&piece), covered)?
            };
            self.land(flying)?;
        }
    }

    /// Whether a row of an object is not durable yet.
    pub fn has_queued(&self, object: ObjectId) -> bool {
        self.state.lock().layers().into_iter().flatten().any(|layer| layer.objects.contains_key(&object))
    }

    /// Objects of which a change, one of a name, or one of an entry is queued. After a failed commit that is what would
    /// be lost.
    pub fn queued_about(&self) -> HashSet<ObjectId> {
        let state = self.state.lock();
        let layers = std::iter::once(&state.queued).chain(state.flying.as_deref());
        layers.flat_map(Layer::about).collect()
    }

    /// Objects of a directory's entries that are not durable yet, and of those in directories that are removed with
    /// them. What is in flight counts: its commit may fail, and then whoever asked for these has to commit it.
    pub fn queued_in(&self, dir: ObjectId) -> HashSet<ObjectId> {
        self.state.lock().objects_in(dir)
    }

    /// Whether a queued entry in another directory than `dir` names one of these objects, which is not `dir` itself.
    /// (An entry that is in flight returns to the queue only if a barrier has covered it.)
    pub fn are_named_beside(&self, objects: &HashSet<ObjectId>, dir: ObjectId) -> bool {
        self.state.lock().queued.are_named_beside(objects, dir)
    }

    /// Places of objects, by one scan of all entries: for each object one that is in force, and that is committed if
    /// one is.
    ///
    /// # Errors
    /// [`AnchorError::Damaged`]; those of the table.
    pub fn places_of(&self, objects: &HashSet<ObjectId>) -> Result<HashMap<ObjectId, EntryPlace>> {
        Ok(self.all_places_of(objects)?.into_iter().collect())
    }

    /// All places of an object that are in force, by one scan of all entries.
    ///
    /// # Errors
    /// As [`Anchor::places_of`].
    pub fn names_of(&self, object: ObjectId) -> Result<Vec<EntryPlace>> {
        let places = self.all_places_of(&HashSet::from([object]))?;
        Ok(places.into_iter().map(|(_, place)| place).collect())
    }

    fn all_places_of(&self, objects: &HashSet<ObjectId>) -> Result<Vec<(ObjectId, EntryPlace)>> {
        let queued = self.queued_places(objects);
        let mut noted: Vec<_> = queued.iter().copied().collect();
        self.scan(Space::Entries, &[], Part::Entry, |key, value| {
            let Some((dir, name)) = number_of(key).zip(behind_object(key)) else { return Ok(None) };
            let place = EntryPlace { dir: ObjectId(dir), name: Token(name) };
            if objects.contains(&EntryRow::decode(value)?.object) && !queued.contains(&place) {
                noted.push(place);
            }
            Ok(Some(ControlFlow::Continue(())))
        })?;
        let mut places = Vec::new();
        for place in noted {
            // A newer change may have removed it, or put another object there.
            let entry = self.entry(&place)?.filter(|entry| objects.contains(&entry.object));
            places.extend(entry.map(|entry| (entry.object, place)));
        }
        Ok(places)
    }

    /// Places that are in force and not in the table yet, and some that have been. To be read before the table, as
    /// [`Anchor::queued_entries`].
    fn queued_places(&self, objects: &HashSet<ObjectId>) -> HashSet<EntryPlace> {
        let state = self.state.lock();
        state.layers().into_iter().flatten().flat_map(|layer| layer.places_of(objects)).collect()
    }

    /// The right to commit.
    ///
    /// # Errors
    /// As [`Anchor::settle_doubt`].
    fn in_order(&self) -> Result<MutexGuard<'_, ()>> {
        let in_order = self.committing.lock();
        self.settle_doubt()?;
        Ok(in_order)
    }

    /// Repeats a commit that has failed in doubt, so that its changes are durable, or certainly not. The caller holds
    /// `committing`. Until then nothing else can be committed: what was queued since may depend on either.
    ///
    /// # Errors
    /// Those of the table. A refusal by the server's policy is none: the changes are queued again, and whoever commits
    /// them gets it.
    fn settle_doubt(&self) -> Result<()> {
        let in_doubt = self.state.lock().flying.clone();
        match self.land(in_doubt) {
            Err(error) if error.is_of_policy() && self.state.lock().flying.is_none() => Ok(()),
            done => done,
        }
    }

    /// Commits. The caller holds `committing`.
    fn commit_taken(&self, scope: Scope<'_>, covered: EntryMark) -> Result<()> {
        let flying = self.fly_queued(&mut self.state.lock(), scope, covered)?;
        self.land(flying)
    }

    /// Puts the queue in flight; `None`: it is empty. If an object has names that no barrier covers, everything but its
    /// names is taken: what must be recorded before its pages or attributes change does not wait for the names (A1,
    /// S1).
    fn fly_queued(&self, state: &mut State, scope: Scope<'_>, covered: EntryMark) -> Result<Option<Arc<Layer>>> {
        if state.queued.is_empty() {
            return Ok(None);
        }
        let layer = self.take_queued(state, scope, covered)?;
        Ok(Some(state.fly(layer)))
    }

    /// Takes out of the queue what one commit includes.
    fn take_queued(&self, state: &mut State, scope: Scope<'_>, covered: EntryMark) -> Result<Layer> {
        let (mut layer, left_behind) = state.queued.take(scope, covered);
        for object in left_behind {
            match self.durable_row(object) {
                Ok(Some(durable)) if durable.kind() != ObjectKind::Dir => {
                    state.queued.copy_without_names(object, &durable, &mut layer);
                }
                Ok(_) => {}
                Err(error) => {
                    state.queued.put_back(layer);
                    return Err(error);
                }
            }
        }
        Ok(layer)
    }

    /// Makes the changes in flight durable, or queues them again on an error. The caller holds `committing`.
    fn land(&self, flying: Option<Arc<Layer>>) -> Result<()> {
        let Some(flying) = flying else { return Ok(()) };
        let done = self.table.commit(&flying.changes());
        let state = &mut *self.state.lock();
        state.landed(&*self.table, flying, done).map_err(|failed| state.put_back(failed))
    }
}
