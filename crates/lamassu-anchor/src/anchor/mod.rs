//! The anchor of one vault: reads see what was queued last; commits make it durable.
//!
//! | module | what it does |
//! |---|---|
//! | this one | opening, reading, commits |
//! | `names` | entries: made, removed, moved (N1 to N4) |
//! | `files` | files: opened for changes, committed (A1 to A8) |
//! | `vault` | the vault's header and history |
//! | `accept` | what a person decides |
//! | `replace` | records, targets, attributes: replaced whole |
//! | `together` | commits of some objects, several in one |
//!
//! Wrong orders cannot be written. What must be durable before a step of the store returns only when it is. A name
//! whose removal the store has not carried out cannot be made again. A commit of a file cannot lower a sequence.
//!
//! Locks, in this order: `committing`, `state`; `asking` alone, or under the first. A commit holds the second only to
//! take and to put back what it commits.
//! What is taken out of the queue flies from the same moment ([`State::fly`]), and it has landed, or is back in the
//! queue, from the moment that it flies no more: a row is always in one of them or in the table.

mod accept;
mod files;
mod names;
mod replace;
mod together;
mod vault;

pub use accept::Decided;
pub use files::{FileCommit, Opening};
pub use names::{Made, Removal, Renamed};
pub use replace::{Replacing, SealedPart, Seen};
pub use vault::HeaderBasis;

use crate::queue::{Layer, Mark, Scope, VAULT_KEY, behind_object, decode_digests, entry_key, number_of, object_key};
use crate::row::{Entry, EntryPlace, Intent, Row, VaultRow};
use crate::table::{Space, Standing, Table};
use crate::{AnchorError, Digests, ObjectId, ObjectKind, Part, RecordNo, Revision, Token, TokenKey};
use lamassu_format::Profile;
use parking_lot::Mutex;
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
    /// Held by who commits: commits take effect in order (A8).
    committing: Mutex<()>,
    /// Who waits for a commit of some objects.
    asking: together::List,
    /// The last member: it goes when the table has gone.
    open: Arc<()>,
}

/// Says which vault it is of, and nothing of what it keeps.
impl fmt::Debug for Anchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Anchor").field("vault", &state.vault.vault).field("queued", &state.queued.len()).finish()
    }
}

struct State {
    vault: VaultRow,
    queued: Layer,
    /// What is being committed.
    flying: Option<Arc<Layer>>,
    /// Entries made so far.
    made: u64,
    /// Objects without an entry that are still in use.
    nameless: HashMap<ObjectId, Nameless>,
    /// What is losing its last entry by the move that is being committed.
    replacing: Option<Replaced>,
    /// Changes of names that are durable here, and that the store is to carry out.
    due: BTreeMap<u64, Intent>,
    /// The same, handed out and not carried out yet.
    handed_out: BTreeMap<u64, Intent>,
    /// Names that a removal has taken away, until the store has carried that out.
    going: HashSet<EntryPlace>,
    /// What the store has replaced, and no barrier has covered yet.
    replaced: replace::Replaced,
}

/// What would be recorded of an object if it had an entry: it may get one again, since a removal that fails in the
/// store is taken back.
struct Nameless {
    row: Row,
    held: BTreeMap<RecordNo, Digests>,
}

/// An object that loses its last entry, until that is durable: it flies as gone, and what changes of it is queued, so
/// that nothing is lost if the commit fails.
struct Replaced {
    object: ObjectId,
    /// Without a link; `None`: nobody uses it any more.
    without: Option<Nameless>,
}

/// Why a layer is not durable, and the layer.
type Failed = Box<(AnchorError, Layer)>;

impl Anchor {
    /// Makes the anchor of a new vault in an empty table: the root alone.
    ///
    /// # Errors
    /// [`AnchorError::Foreign`] where the table has a vault; those of the table.
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
    pub fn open(table: Arc<dyn Table>, vault: &[u8; 16]) -> Result<Anchor> {
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

    /// What is there as long as this is open, its end included: when it is gone, the table is let go.
    pub fn while_open(&self) -> Weak<()> {
        Arc::downgrade(&self.open)
    }

    /// Whether the right to it can end while it is open ([`Table::may_end`]).
    pub fn may_end(&self) -> bool {
        self.table.may_end()
    }

    /// Whether what it says may be believed now ([`Table::standing`]).
    pub fn standing(&self) -> Standing {
        self.table.standing()
    }

    /// Waits until it may ([`Table::wait_until_good`]).
    ///
    /// # Errors
    /// [`AnchorError::Server`].
    pub fn wait_until_good(&self) -> Result<()> {
        self.table.wait_until_good()
    }

    /// What it says is cached from now on ([`Table::has_caches`]).
    pub fn has_caches(&self) {
        self.table.has_caches();
    }

    /// What was cached by what it said is dropped ([`Table::caches_are_dropped`]).
    pub fn caches_are_dropped(&self) {
        self.table.caches_are_dropped();
    }

    /// Returns when it may no longer, and now and then before ([`Table::wait_while_good`]).
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

    /// The token of a stored name.
    pub fn token(&self, dir: ObjectId, stored: &[u8]) -> Token {
        self.tokens.token(dir, stored)
    }

    /// Children of a tree record.
    pub fn degree(&self) -> usize {
        self.degree
    }

    /// Whether files have a root over their blocks, too.
    pub fn has_blocks(&self) -> bool {
        self.state.lock().vault.blocks
    }

    /// What is known of the vault.
    pub fn vault(&self) -> VaultRow {
        self.state.lock().vault.clone()
    }

    /// Changes what is known of the vault; durable with the next commit.
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

    /// Changes an object's row; durable with the next commit that takes it.
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

    /// What a name of a directory leads to.
    ///
    /// # Errors
    /// [`AnchorError::Damaged`]; those of the table.
    pub fn entry(&self, place: &EntryPlace) -> Result<Option<Entry>> {
        self.entry_in(&self.state.lock(), place)
    }

    fn entry_in(&self, state: &State, place: &EntryPlace) -> Result<Option<Entry>> {
        let layers = state.layers();
        let queued = layers.into_iter().flatten().find_map(|layer| layer.entry(place));
        queued.map_or_else(|| self.durable_entry(place), Ok)
    }

    fn durable_entry(&self, place: &EntryPlace) -> Result<Option<Entry>> {
        self.table.get(Space::Entries, &entry_key(place))?.map(|bytes| Entry::decode(&bytes)).transpose()
    }

    /// All entries of a directory. The caller keeps that directory from changes: what it gets would have been there at
    /// different moments otherwise.
    ///
    /// # Errors
    /// As for [`Anchor::entry`].
    pub fn entries(&self, dir: ObjectId) -> Result<BTreeMap<Token, Entry>> {
        let queued = self.queued_entries(dir);
        let mut entries = BTreeMap::new();
        self.scan(Space::Entries, &object_key(dir), Part::Entry, |key, value| {
            let Some(name) = behind_object(key).map(Token) else { return Ok(None) };
            if !queued.contains_key(&name) {
                entries.insert(name, Entry::decode(value)?);
            }
            Ok(Some(ControlFlow::Continue(())))
        })?;
        entries.extend(queued.into_iter().filter_map(|(name, entry)| Some((name, entry?))));
        Ok(entries)
    }

    /// Whether a directory has no entries. The caller keeps it from changes.
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

    /// Entries of a directory that are in force and not in the table yet. Looked at *before* the table: what a commit
    /// puts there meanwhile is found twice, not in neither, and no reader waits for a commit's flush.
    fn queued_entries(&self, dir: ObjectId) -> BTreeMap<Token, Option<Entry>> {
        let state = self.state.lock();
        state.layers().into_iter().rev().flatten().flat_map(|layer| layer.entries_of(dir)).collect()
    }

    /// The tree records of a file that are held, under its committed root. The caller keeps the file from commits.
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

    /// Held records, as they are in the table and as it is queued that they change.
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

    /// Files that are durably open: after a crash those to recover, before anything of them is served.
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

    /// Changes of names that the store may lack, as of the last commit.
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

    /// Visits keys and values, until that breaks; `None` is a key that no writer writes.
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

    /// Where the queue is: a barrier of the store that begins now covers every entry made so far.
    pub fn mark(&self) -> Mark {
        Mark(self.state.lock().made)
    }

    /// How many changes are queued.
    pub fn queued(&self) -> usize {
        let state = self.state.lock();
        state.queued.len() + state.replaced.len()
    }

    /// Makes durable what is queued; of entries that were made, those up to a mark that was taken before a barrier of
    /// the store.
    ///
    /// # Errors
    /// Those of the table; everything stays queued. Where a rule of the server's policy forbids a part of it, that part
    /// alone does: one file is in no other's way.
    pub fn commit(&self, covered: Mark) -> Result<()> {
        let _in_order = self.committing.lock();
        self.state.lock().settle_replaced(self, covered)?;
        let refused = match self.commit_taken(Scope::All, covered) {
            Err(error) if error.is_of_policy() => error,
            done => return done,
        };
        let forbidden = self.state.lock().queued.files_of(|profile| self.table.check_profile(profile).is_err());
        if !forbidden.is_empty() {
            self.commit_taken(Scope::AllBut(&forbidden), covered)?;
        }
        Err(refused)
    }

    /// Whether a row of an object is queued.
    pub fn has_queued(&self, object: ObjectId) -> bool {
        self.state.lock().queued.objects.contains_key(&object)
    }

    /// Objects of queued changes of a directory's entries, and of those in directories that are removed with them.
    pub fn queued_in(&self, dir: ObjectId) -> HashSet<ObjectId> {
        self.state.lock().queued.objects_in(dir)
    }

    /// How many queued entries name an object.
    pub fn queued_names(&self, object: ObjectId) -> usize {
        self.state.lock().queued.names_of(object)
    }

    /// Where objects lie, by one scan of all entries: of each one place that is committed, and not gone since.
    ///
    /// # Errors
    /// [`AnchorError::Damaged`]; those of the table.
    pub fn places_of(&self, objects: &HashSet<ObjectId>) -> Result<HashMap<ObjectId, EntryPlace>> {
        let mut recorded = Vec::new();
        self.scan(Space::Entries, &[], Part::Entry, |key, value| {
            let Some((dir, name)) = number_of(key).zip(behind_object(key)) else { return Ok(None) };
            let entry = Entry::decode(value)?;
            if objects.contains(&entry.object) {
                recorded.push((entry.object, EntryPlace { dir: ObjectId(dir), name: Token(name) }));
            }
            Ok(Some(ControlFlow::Continue(())))
        })?;
        let mut places = HashMap::new();
        for (object, place) in recorded {
            // It may be gone in what is not committed yet.
            if self.entry(&place)?.is_some_and(|entry| entry.object == object) {
                places.insert(object, place);
            }
        }
        Ok(places)
    }

    /// The caller holds `committing`.
    fn commit_taken(&self, scope: Scope<'_>, covered: Mark) -> Result<()> {
        let flying = self.fly_queued(&mut self.state.lock(), scope, covered)?;
        self.land(flying)
    }

    /// Has what is queued fly; `None`: nothing is. Of an object that has names which no barrier covers, all but its
    /// names flies: what is to be known before its pages or attributes change does not wait for them (A1, S1).
    fn fly_queued(&self, state: &mut State, scope: Scope<'_>, covered: Mark) -> Result<Option<Arc<Layer>>> {
        if state.queued.is_empty() {
            return Ok(None);
        }
        let layer = self.take_queued(state, scope, covered)?;
        Ok(Some(state.fly(layer)))
    }

    /// Takes out of the queue what is to fly at once.
    fn take_queued(&self, state: &mut State, scope: Scope<'_>, covered: Mark) -> Result<Layer> {
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

    /// Makes durable what flies; what cannot be is queued again. The caller holds `committing`.
    fn land(&self, flying: Option<Arc<Layer>>) -> Result<()> {
        let Some(flying) = flying else { return Ok(()) };
        let done = self.table.commit(&flying.changes());
        let state = &mut *self.state.lock();
        state.landed(flying, done).map_err(|failed| state.put_back(failed))
    }
}

impl State {
    /// Has a layer fly: it is in force, and about to be durable.
    fn fly(&mut self, mut layer: Layer) -> Arc<Layer> {
        self.vault.revision = Revision(self.vault.revision.0 + 1);
        layer.vault = Some(self.vault.clone());
        let layer = Arc::new(layer);
        self.flying = Some(layer.clone());
        layer
    }

    /// What flew is durable, or is given back.
    fn landed(&mut self, flying: Arc<Layer>, done: Result<()>) -> std::result::Result<(), Failed> {
        self.flying = None;
        // Nobody else keeps one: it is looked at under the lock alone.
        let layer = Arc::into_inner(flying).unwrap_or_default();
        match done {
            Ok(()) => {
                self.due.extend(layer.intents());
                Ok(())
            }
            Err(error) => Err(Box::new((error, layer))),
        }
    }

    fn put_back(&mut self, failed: Failed) -> AnchorError {
        let (error, layer) = *failed;
        self.queued.put_back(layer);
        error
    }

    /// The row of an object that has lost its last entry, and is still in use.
    fn row_without_entry(&self, object: ObjectId) -> Option<Row> {
        let replaced = self.replacing.as_ref().filter(|replaced| replaced.object == object);
        let nameless = self.nameless.get(&object).or_else(|| replaced?.without.as_ref());
        nameless.map(|nameless| nameless.row.clone())
    }

    /// Queued changes, the newest first.
    fn layers(&self) -> [Option<&Layer>; 2] {
        [Some(&self.queued), self.flying.as_deref()]
    }

    /// A row that an object has from now on.
    fn queue_row(&mut self, object: ObjectId, row: Row) {
        match self.nameless.get_mut(&object) {
            Some(nameless) => nameless.row = row,
            None => drop(self.queued.objects.insert(object, Some(row))),
        }
    }

    /// How held records of an object change.
    fn queued_held(&self, object: ObjectId) -> QueuedHeld {
        let held = self.layers().into_iter().rev().flatten().flat_map(|layer| layer.held_of(object));
        held.map(|(record, digests)| (record, digests.clone())).collect()
    }

    /// An object is about to have an entry again: what is held of it is recorded again, and its row is given back to be
    /// queued.
    fn name_again(&mut self, object: ObjectId) -> Option<Row> {
        let Nameless { row, held } = self.nameless.remove(&object)?;
        self.queued.held.extend(held.into_iter().map(|(record, digests)| ((object, record), Some(digests))));
        Some(row)
    }
}

/// Held records of an object that change; `None`: they are held no longer.
type QueuedHeld = BTreeMap<RecordNo, Option<Digests>>;

fn change_held(held: &mut BTreeMap<RecordNo, Digests>, changes: QueuedHeld) {
    for (record, digests) in changes {
        match digests {
            Some(digests) => held.insert(record, digests),
            None => held.remove(&record),
        };
    }
}
