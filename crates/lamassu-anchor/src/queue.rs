//! The queue: changes of rows that are in force in memory and not yet durable.
//!
//! * A key has one queued value, the last. Changes in flight are in a second layer until the commit has returned, so
//!   that a failed commit loses nothing.
//! * An entry that is being *made* has a number. It may be committed only after a barrier of the store that began after
//!   the number was given (N4). So a commit takes entries up to an [`EntryMark`], and leaves later ones with all other
//!   changes of the same object. It leaves entries of a directory with that of the directory: otherwise a durable
//!   entry would be of a directory that nothing durable leads to. The completion of an intent has a number too: the
//!   intent stays until a barrier has covered the step.
//! * All other changes may be committed at any time.

use crate::row::{EntryPlace, EntryRow, Intent, Row};
use crate::table::{Change, Space};
use crate::{AnchorError, Digest, Digests, ObjectId, ObjectKind, RecordNo, Token, VaultRow};
use lamassu_format::Profile;
use std::collections::{BTreeMap, HashMap, HashSet};

mod piece;

pub(crate) use piece::{PIECE_MAX, Wanted};

/// Intents that end in one commit, at most.
const ENDED_MAX: usize = 16_384;

/// The last entry that a barrier of the store has covered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EntryMark(pub(crate) u64);

impl EntryMark {
    /// Covers no entry.
    pub const NOTHING: EntryMark = EntryMark(0);
}

/// The number of an entry that the store has not made yet: no mark reaches it.
const UNDER_WAY: u64 = u64::MAX;

/// A queued entry.
#[derive(Clone, Copy, Debug)]
struct QueuedEntry {
    value: Option<EntryRow>,
    /// The object that it names, or named before its removal.
    object: ObjectId,
    /// The number of its making; 0: a removal, or an entry that the store had before; [`UNDER_WAY`].
    number: u64,
    /// The intent of its removal.
    intent: Option<u64>,
}

/// One layer of queued changes.
#[derive(Default)]
pub(crate) struct Layer {
    pub vault: Option<VaultRow>,
    pub objects: HashMap<ObjectId, Option<Row>>,
    pub held: BTreeMap<(ObjectId, RecordNo), Option<Digests>>,
    intents: BTreeMap<u64, QueuedIntent>,
    entries: BTreeMap<EntryPlace, QueuedEntry>,
    /// Objects changed in the store after their entries were made: a barrier for names does not cover such a change.
    changed: HashSet<ObjectId>,
}

/// A queued intent, or its completion.
#[derive(Clone, Debug)]
enum QueuedIntent {
    Noted(Intent),
    CarriedOut {
        /// The number given at the completion.
        number: u64,
    },
}

/// The changes that a commit takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scope<'a> {
    /// All but those of these objects, which no queued entry may name; of completed intents at most [`ENDED_MAX`].
    AllBut(&'a HashSet<ObjectId>),
    /// Those of these objects: their rows and held records, the entries that name them, and the directories on the way.
    Objects(&'a HashSet<ObjectId>),
}

impl Layer {
    /// A layer with only a change of the vault's row.
    pub fn of_vault(vault: VaultRow) -> Layer {
        Layer { vault: Some(vault), ..Layer::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.is_of_vault_alone() && self.vault.is_none()
    }

    /// Whether nothing but the vault's row changes.
    pub fn is_of_vault_alone(&self) -> bool {
        self.objects.is_empty() && self.entries.is_empty() && self.held.is_empty() && self.intents.is_empty()
    }

    /// The number of keys that change, without the vault's.
    pub fn len(&self) -> usize {
        self.objects.len() + self.entries.len() + self.held.len() + self.intents.len()
    }

    /// The queued value of an entry: `None` if none is queued.
    pub fn entry(&self, place: &EntryPlace) -> Option<Option<EntryRow>> {
        self.entries.get(place).map(|queued| queued.value)
    }

    /// Queued entries of a directory.
    pub fn entries_of(&self, dir: ObjectId) -> impl Iterator<Item = (Token, Option<EntryRow>)> + '_ {
        self.queued_in(dir).map(|(place, queued)| (place.name, queued.value))
    }

    fn queued_in(&self, dir: ObjectId) -> impl Iterator<Item = (&EntryPlace, &QueuedEntry)> {
        let (first, last) = (EntryPlace { dir, name: Token([0; 16]) }, EntryPlace { dir, name: Token([0xff; 16]) });
        self.entries.range(first..=last)
    }

    /// Queued tree records of a file.
    pub fn held_of(&self, object: ObjectId) -> impl Iterator<Item = (RecordNo, &Option<Digests>)> {
        let (first, last) = ((object, RecordNo(0)), (object, RecordNo(u64::MAX)));
        self.held.range(first..=last).map(|((_, record), digests)| (*record, digests))
    }

    /// Queues an entry that was made in the store before `number` was given.
    pub fn make_entry(&mut self, place: EntryPlace, entry: EntryRow, number: u64) {
        self.entries.insert(place, QueuedEntry { value: Some(entry), object: entry.object, number, intent: None });
    }

    /// Queues an entry that the store is about to move there. No barrier covers it until [`Layer::has_arrived`].
    pub fn await_entry(&mut self, place: EntryPlace, entry: EntryRow) {
        self.make_entry(place, entry, UNDER_WAY);
    }

    /// The store had moved such an entry before `number` was given.
    pub fn has_arrived(&mut self, place: &EntryPlace, number: u64) {
        let queued = self.entries.get_mut(place).filter(|queued| queued.number == UNDER_WAY);
        queued.into_iter().for_each(|queued| queued.number = number);
    }

    /// Queues an entry that the store had elsewhere before.
    pub fn move_entry(&mut self, place: EntryPlace, entry: EntryRow) {
        self.make_entry(place, entry, 0);
    }

    /// Holds back the entries of an object until a barrier that begins after `number` was given: the store's step was
    /// for the object itself.
    pub fn hold_back(&mut self, object: ObjectId, number: u64) {
        let names = self.entries.values_mut().filter(|queued| queued.object == object && queued.value.is_some());
        names.for_each(|queued| queued.number = queued.number.max(number));
        self.changed.insert(object);
    }

    /// Objects that it changes, or names of them, or entries of them.
    pub fn about(&self) -> impl Iterator<Item = ObjectId> + '_ {
        let held = self.held.keys().map(|(object, _)| *object);
        let entries = self.entries.iter().flat_map(|(place, queued)| [place.dir, queued.object]);
        self.objects.keys().copied().chain(held).chain(entries)
    }

    /// Whether an object was held back, and no commit has taken it since.
    pub fn is_changed(&self, object: ObjectId) -> bool {
        self.changed.contains(&object)
    }

    /// Queues the removal of an entry by an intent.
    pub fn remove_entry(&mut self, place: EntryPlace, was: EntryRow, intent: u64) {
        let queued = QueuedEntry { value: None, object: was.object, number: 0, intent: Some(intent) };
        self.entries.insert(place, queued);
    }

    /// Queues the removal of an entry that the store does not have.
    pub fn drop_entry(&mut self, place: EntryPlace, object: ObjectId) {
        self.entries.insert(place, QueuedEntry { value: None, object, number: 0, intent: None });
    }

    /// Drops an entry that was never durable.
    pub fn forget_entry(&mut self, place: &EntryPlace) {
        self.entries.remove(place);
    }

    /// Queues an intent.
    pub fn intend(&mut self, number: u64, intent: Intent) {
        self.intents.insert(number, QueuedIntent::Noted(intent));
    }

    /// Queues the completion of an intent.
    pub fn carried_out(&mut self, intent: u64, number: u64) {
        self.intents.insert(intent, QueuedIntent::CarriedOut { number });
    }

    /// Whether the completion of an intent is queued.
    pub fn is_carried_out(&self, intent: u64) -> bool {
        matches!(self.intents.get(&intent), Some(QueuedIntent::CarriedOut { .. }))
    }

    /// The intents in this layer.
    pub fn intents(&self) -> impl Iterator<Item = (u64, Intent)> + '_ {
        self.intents.iter().filter_map(|(number, queued)| match queued {
            QueuedIntent::Noted(intent) => Some((*number, intent.clone())),
            QueuedIntent::CarriedOut { .. } => None,
        })
    }

    /// Whether one of these objects, or a directory on the way to it, has an entry that no barrier up to `mark` covers.
    pub fn is_any_late(&self, objects: &HashSet<ObjectId>, mark: EntryMark) -> bool {
        !self.held_back(mark, Some(objects)).is_disjoint(objects)
    }

    /// Whether the store has not made an entry of one of these objects yet, or of a directory on the way to them.
    pub fn awaits_any_of(&self, objects: &HashSet<ObjectId>) -> bool {
        !self.held_back(EntryMark(UNDER_WAY - 1), None).is_disjoint(objects)
    }

    /// Whether the store has carried out changes of names that no barrier up to `mark` covers.
    pub fn has_uncovered_steps(&self, mark: EntryMark) -> bool {
        let is_uncovered =
            |queued: &QueuedIntent| matches!(queued, QueuedIntent::CarriedOut { number } if *number > mark.0);
        self.intents.values().any(is_uncovered)
    }

    /// Objects of a directory's queued entries, each with whether it loses that entry.
    pub fn objects_in(&self, dir: ObjectId) -> impl Iterator<Item = (ObjectId, bool)> {
        self.queued_in(dir).map(|(_, queued)| (queued.object, queued.value.is_none()))
    }

    /// Places of the queued entries that name one of these objects.
    pub fn places_of(&self, objects: &HashSet<ObjectId>) -> impl Iterator<Item = EntryPlace> {
        let is_of_them = |queued: &QueuedEntry| queued.value.is_some() && objects.contains(&queued.object);
        self.entries.iter().filter(move |(_, queued)| is_of_them(queued)).map(|(place, _)| *place)
    }

    /// Files with queued rows, no queued entry, and a profile for which `is_such` is true.
    pub fn files_of(&self, is_such: impl Fn(Profile) -> bool) -> HashSet<ObjectId> {
        let named: HashSet<_> = self.entries.values().map(|queued| queued.object).collect();
        let is_meant = |(object, row): (&ObjectId, &Option<Row>)| {
            let profile = row.as_ref().and_then(Row::file)?.profile;
            (!named.contains(object) && is_such(profile)).then_some(*object)
        };
        self.objects.iter().filter_map(is_meant).collect()
    }

    /// Whether a queued entry in another directory than `dir` names one of these objects, which is not `dir` itself.
    pub fn are_named_beside(&self, objects: &HashSet<ObjectId>, dir: ObjectId) -> bool {
        let is_beside = |(place, queued): (&EntryPlace, &QueuedEntry)| {
            let is_asked = queued.object != dir && objects.contains(&queued.object);
            is_asked && place.dir != dir && queued.value.is_some()
        };
        self.entries.iter().any(is_beside)
    }

    /// Takes out what a commit may make durable, as a layer of its own. Also returns the objects whose rows stay
    /// queued, because they count entries that no barrier covers yet.
    pub fn take(&mut self, scope: Scope<'_>, mark: EntryMark) -> (Layer, Vec<ObjectId>) {
        let wanted = match scope {
            Scope::AllBut(_) => None,
            Scope::Objects(objects) => Some(self.with_ways_to(objects.iter().copied())),
        };
        let late = self.held_back(mark, wanted.as_ref());
        let is_excluded = |object: &ObjectId| matches!(scope, Scope::AllBut(but) if but.contains(object));
        let is_wanted =
            |object: &ObjectId| !is_excluded(object) && wanted.as_ref().is_none_or(|wanted| wanted.contains(object));
        let is_taken = |object: &ObjectId| !late.contains(object) && is_wanted(object);
        let left_behind = late.iter().filter(|object| is_wanted(object) && self.objects.contains_key(object));
        let left_behind = left_behind.copied().collect();
        let objects = self.objects.extract_if(|object, _| is_taken(object)).collect();
        let held = self.held.extract_if(.., |(object, _), _| is_taken(object)).collect();
        let changed = self.changed.extract_if(is_taken).collect();
        let entries: BTreeMap<_, _> = self.entries.extract_if(.., |_, queued| is_taken(&queued.object)).collect();
        // An intent is committed together with its entry.
        let left: HashSet<u64> = self.entries.values().filter_map(|queued| queued.intent).collect();
        // A barrier for some objects does not cover steps elsewhere (N5).
        let mut ended_left = if wanted.is_none() { ENDED_MAX } else { 0 };
        let intents = self.intents.extract_if(.., |intent, queued| match queued {
            QueuedIntent::Noted(_) => !left.contains(intent),
            QueuedIntent::CarriedOut { .. } => {
                let is_taken = ended_left > 0 && piece::has_ended(queued, mark);
                ended_left -= usize::from(is_taken);
                is_taken
            }
        });
        let intents = intents.collect();
        (Layer { vault: self.vault.take(), objects, held, intents, entries, changed }, left_behind)
    }

    /// Whether a commit of everything has left completed intents that it may take.
    pub fn has_ended(&self, mark: EntryMark) -> bool {
        self.intents.values().any(|queued| piece::has_ended(queued, mark))
    }

    /// Copies the queued changes of an object into a commit, except names that were made or removed: for those the
    /// commit keeps the durable values. The names stay queued, with the row that counts them.
    pub fn copy_without_names(&mut self, object: ObjectId, durable: &Row, commit: &mut Layer) {
        let Some(Some(row)) = self.objects.get(&object) else { return };
        let row = Row { links: durable.links, ..row.clone() };
        if row != *durable {
            commit.objects.insert(object, Some(row));
        }
        commit.held.extend(self.held.extract_if(.., |(of, _), _| *of == object));
    }

    /// Objects that a commit may not take yet: their rows count entries that no barrier covers, or entries of
    /// directories among them. So an entry is durable only with its directory, and whoever commits an object has made
    /// everything on the way to it durable, or is told. A removed directory waits for the objects of the entries that
    /// were removed from it: while one of these is there, its removal cannot be carried out. `wanted`: the only objects
    /// that the commit takes; `None`: it takes all.
    fn held_back(&self, mark: EntryMark, wanted: Option<&HashSet<ObjectId>>) -> HashSet<ObjectId> {
        let (mut late, mut dirs) = (HashSet::new(), Vec::new());
        let mut note = |queued: &QueuedEntry, dirs: &mut Vec<ObjectId>| {
            let is_dir = queued.value.is_some_and(|entry| entry.kind == ObjectKind::Dir);
            if late.insert(queued.object) && is_dir {
                dirs.push(queued.object);
            }
        };
        self.entries.values().filter(|queued| queued.number > mark.0).for_each(|queued| note(queued, &mut dirs));
        while let Some(dir) = dirs.pop() {
            let in_it = self.queued_in(dir).filter(|(_, queued)| queued.value.is_some());
            in_it.for_each(|(_, queued)| note(queued, &mut dirs));
        }
        if !late.is_empty() || wanted.is_some() {
            self.hold_back_removed_dirs(&mut late, wanted);
        }
        late
    }

    fn hold_back_removed_dirs(&self, late: &mut HashSet<ObjectId>, wanted: Option<&HashSet<ObjectId>>) {
        let is_gone = |dir: &ObjectId| matches!(self.objects.get(dir), Some(None));
        let is_left = |object: &ObjectId| wanted.is_some_and(|wanted| !wanted.contains(object));
        let mut removed_from: HashMap<ObjectId, Vec<ObjectId>> = HashMap::new();
        for (place, queued) in self.entries.iter().filter(|(_, queued)| queued.value.is_none()) {
            if is_gone(&place.dir) {
                removed_from.entry(queued.object).or_default().push(place.dir);
                late.extend(Some(place.dir).filter(|_| is_left(&queued.object)));
            }
        }
        let mut left: Vec<_> = late.iter().copied().collect();
        while let Some(object) = left.pop() {
            left.extend(removed_from.get(&object).into_iter().flatten().filter(|dir| late.insert(**dir)));
        }
    }

    /// These objects, and the directories of queued entries on the way to them.
    fn with_ways_to(&self, objects: impl IntoIterator<Item = ObjectId>) -> HashSet<ObjectId> {
        let mut parents: HashMap<ObjectId, Vec<ObjectId>> = HashMap::new();
        for (place, queued) in self.entries.iter().filter(|(_, queued)| queued.value.is_some()) {
            parents.entry(queued.object).or_default().push(place.dir);
        }
        let mut wanted: HashSet<_> = objects.into_iter().collect();
        let mut left: Vec<_> = wanted.iter().copied().collect();
        while let Some(object) = left.pop() {
            left.extend(parents.get(&object).into_iter().flatten().filter(|dir| wanted.insert(**dir)));
        }
        wanted
    }

    /// Puts back what a commit could not make durable, below newer changes.
    pub fn put_back(&mut self, failed: Layer) {
        self.vault = self.vault.take().or(failed.vault);
        for (object, row) in failed.objects {
            self.objects.entry(object).or_insert(row);
        }
        for (key, digests) in failed.held {
            self.held.entry(key).or_insert(digests);
        }
        for (number, intent) in failed.intents {
            self.intents.entry(number).or_insert(intent);
        }
        for (place, queued) in failed.entries {
            self.entries.entry(place).or_insert(queued);
        }
        self.changed.extend(failed.changed);
    }

    /// The changes of keys.
    pub fn changes(&self) -> Vec<Change> {
        let mut changes = Vec::with_capacity(self.len() + self.objects.len() + 1);
        let mut put = |space, key: Vec<u8>, value: Option<Vec<u8>>| changes.push(Change { space, key, value });
        if let Some(vault) = &self.vault {
            put(Space::Vault, VAULT_KEY.to_vec(), Some(vault.encode()));
        }
        for (object, row) in &self.objects {
            let is_open = row.as_ref().and_then(Row::file).is_some_and(|file| file.open.is_some());
            put(Space::Open, object_key(*object), is_open.then(Vec::new));
            put(Space::Objects, object_key(*object), row.as_ref().map(Row::encode));
        }
        for (place, queued) in &self.entries {
            put(Space::Entries, entry_key(place), queued.value.map(|entry| entry.encode()));
        }
        for ((object, record), digests) in &self.held {
            put(Space::Held, held_key(*object, *record), digests.as_deref().map(encode_digests));
        }
        for (number, queued) in &self.intents {
            let value = if let QueuedIntent::Noted(intent) = queued { Some(intent.encode()) } else { None };
            put(Space::Intents, number.to_be_bytes().to_vec(), value);
        }
        changes
    }
}

/// The key of the vault's row.
pub(crate) const VAULT_KEY: &[u8] = b"vault";

/// Numbers in keys are big-endian, so that keys sort by number.
pub(crate) fn object_key(object: ObjectId) -> Vec<u8> {
    object.0.to_be_bytes().to_vec()
}

pub(crate) fn entry_key(place: &EntryPlace) -> Vec<u8> {
    let mut key = object_key(place.dir);
    key.extend(place.name.0);
    key
}

pub(crate) fn held_key(object: ObjectId, record: RecordNo) -> Vec<u8> {
    let mut key = object_key(object);
    key.extend(record.0.to_be_bytes());
    key
}

/// The number at the start of a key.
pub(crate) fn number_of(key: &[u8]) -> Option<u64> {
    key.first_chunk().map(|bytes| u64::from_be_bytes(*bytes))
}

/// The rest of a key after the object's number.
pub(crate) fn behind_object<const N: usize>(key: &[u8]) -> Option<[u8; N]> {
    key.get(8..)?.try_into().ok()
}

fn encode_digests(digests: &[Digest]) -> Vec<u8> {
    digests.iter().flat_map(|digest| digest.0).collect()
}

pub(crate) fn decode_digests(bytes: &[u8], degree: usize) -> Result<Digests, AnchorError> {
    let (digests, rest) = bytes.as_chunks::<32>();
    match rest.is_empty() && digests.len() == degree {
        true => Ok(digests.iter().map(|bytes| Digest(*bytes)).collect()),
        false => Err(AnchorError::Damaged { part: crate::Part::Held }),
    }
}
