//! What may be seen (`docs/freshness.md`, F1 and F2): the states that a vault had, which of them were acknowledged, and
//! whether what is shown now is made of them.
//!
//! Objects are told apart by what leads to them, and not by their inodes, which a store gives as it likes: what is seen
//! in a place must be what *one* of the objects that may lie there was.

use super::walk::{BLOCK, Body, Fact, Names, Seen};
use lamassu_vault::{Ino, Kind, ROOT};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// An object of one state.
#[derive(Clone, PartialEq)]
struct Thing {
    kind: Kind,
    mode: u32,
    owner: (u32, u32),
    rdev: u64,
    attributes: super::walk::Attributes,
    content: Arc<Vec<u8>>,
    /// Of a directory.
    names: BTreeMap<String, Ino>,
}

/// All that can be reached in one state, by its inode, which an honest store keeps.
#[derive(Clone, Default)]
pub struct State(BTreeMap<Ino, Arc<Thing>>);

impl State {
    /// # Panics
    /// If something could not be looked at: the store was honest.
    pub fn of(root: &Seen, before: Option<&State>) -> State {
        let mut state = State::default();
        state.take("", root, ROOT, &mut |seen| seen.ino);
        // Most things are as they were: one copy of them does.
        if let Some(State(before)) = before {
            for (ino, thing) in &mut state.0 {
                match before.get(ino) {
                    Some(same) if same == thing => *thing = same.clone(),
                    _ => {}
                }
            }
        }
        state
    }

    /// The same of a store that may show several objects as one inode: each entry has a number of its own.
    pub fn apart(root: &Seen) -> State {
        let (mut state, mut last) = (State::default(), ROOT);
        state.take("", root, ROOT, &mut |_| {
            last += 1;
            last
        });
        state
    }

    fn take(&mut self, path: &str, seen: &Seen, ino: Ino, number: &mut dyn FnMut(&Seen) -> Ino) {
        let attributes = shown(path, &seen.attributes).clone();
        let mut names = BTreeMap::new();
        let content = match &seen.body {
            Body::File { blocks, .. } => blocks.iter().flat_map(|block| shown(path, block).clone()).collect(),
            Body::Link(target) => shown(path, target).clone(),
            Body::Special => Vec::new(),
            Body::Dir(dir) => {
                shown(path, &dir.listing);
                for (name, found) in &dir.found {
                    if let Some(found) = shown(path, found) {
                        let ino = number(found);
                        names.insert(name.clone(), ino);
                        self.take(&format!("{path}/{name}"), found, ino, number);
                    }
                }
                Vec::new()
            }
        };
        let Seen { kind, mode, owner, rdev, .. } = *seen;
        let thing = Thing { kind, mode, owner, rdev, attributes, content: Arc::new(content), names };
        self.0.insert(ino, Arc::new(thing));
    }

    /// All paths but that of the root.
    pub fn paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        self.paths_in(ROOT, "", &mut paths);
        paths
    }

    fn paths_in(&self, dir: Ino, at: &str, paths: &mut Vec<String>) {
        for (name, ino) in self.0.get(&dir).into_iter().flat_map(|dir| &dir.names) {
            paths.push(format!("{at}{name}"));
            self.paths_in(*ino, &format!("{at}{name}/"), paths);
        }
    }

    /// The object in a place.
    fn entry(&self, dir: Ino, name: &str) -> Option<Ino> {
        self.0.get(&dir)?.names.get(name).copied()
    }

    /// Whether one object is the other or lies below it.
    fn is_way_to(&self, from: Ino, to: Ino) -> bool {
        let below = |thing: &Arc<Thing>| thing.names.values().any(|next| self.is_way_to(*next, to));
        from == to || self.0.get(&from).is_some_and(below)
    }
}

fn shown<'a, T>(path: &str, fact: &'a Fact<T>) -> &'a T {
    fact.as_ref().unwrap_or_else(|error| panic!("an honest store, {path:?}: {error}"))
}

/// What a step that has returned promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ack {
    Nothing,
    Everything,
    /// fsync of a file: all of it, its names, and the way to it.
    File(Ino),
    /// fsync of a directory: what is in it by which name, and its own attributes.
    Dir(Ino),
}

impl Ack {
    fn is_of_entry(self, state: &State, dir: Ino, name: &str) -> bool {
        match self {
            Ack::Nothing => false,
            Ack::Everything => true,
            Ack::File(file) => state.entry(dir, name).is_some_and(|entry| state.is_way_to(entry, file)),
            Ack::Dir(synced) => synced == dir,
        }
    }

    fn is_of_object(self, object: Ino) -> bool {
        match self {
            Ack::Nothing => false,
            Ack::Everything => true,
            Ack::File(synced) | Ack::Dir(synced) => synced == object,
        }
    }
}

/// A moment in the order of the store's changes and the anchor's commits: how many of both there were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    pub record: usize,
    pub commit: usize,
}

/// The states of one life of a vault.
#[derive(Default)]
pub struct History {
    steps: Vec<(Moment, State, Ack)>,
}

impl History {
    /// A step has returned.
    pub fn push(&mut self, at: Moment, state: State, ack: Ack) {
        self.steps.push((at, state, ack));
    }

    pub fn last(&self) -> Option<&State> {
        self.steps.last().map(|(_, state, _)| state)
    }

    /// The first moment: before it the vault was being made.
    pub fn begin(&self) -> Moment {
        self.steps.first().map_or(Moment { record: 0, commit: 1 }, |(at, ..)| *at)
    }

    /// What may be seen after a crash at a moment: the states since the acknowledged one, and that of the step that was
    /// under way.
    pub fn crashed(&self, at: Moment) -> View<'_> {
        let is_over = |step: &&(Moment, State, Ack)| step.0.record <= at.record && step.0.commit <= at.commit;
        let over = self.steps.iter().take_while(is_over).count();
        View { steps: &self.steps[..(over + 1).min(self.steps.len())], over, is_exact: false }
    }

    /// What may be seen while a process lives, or after it has closed the vault: the newest state.
    pub fn newest(&self) -> View<'_> {
        View { steps: &self.steps, over: self.steps.len(), is_exact: true }
    }
}

/// What may be seen at some moment.
#[derive(Clone, Copy)]
pub struct View<'a> {
    steps: &'a [(Moment, State, Ack)],
    /// How many of the steps have returned.
    over: usize,
    is_exact: bool,
}

/// What was shown, and never was, or is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lie {
    /// Something has a name that it must not have.
    Name,
    /// Nothing has a name, and no error says that something is missing.
    Absence,
    Type,
    Mode,
    Owner,
    Attributes,
    Size,
    Content,
    Target,
}

pub type Verdict = Result<(), (Lie, String)>;

impl View<'_> {
    /// Whether all that is shown may be.
    pub fn judge(&self, root: &Seen) -> Verdict {
        self.object("", ROOT, root)
    }

    /// The states from the last one on that was acknowledged of something.
    fn since(&self, is_acknowledged: impl Fn(&State, Ack) -> bool) -> impl Iterator<Item = &State> {
        let last = || self.steps[..self.over].iter().rposition(|(_, state, ack)| is_acknowledged(state, *ack));
        let from = if self.is_exact { self.steps.len() - 1 } else { last().unwrap_or(0) };
        self.steps[from..].iter().map(|(_, state, _)| state)
    }

    /// What may have a name.
    fn entries(&self, dir: Ino, name: &str) -> BTreeSet<Option<Ino>> {
        let states = self.since(|state, ack| ack.is_of_entry(state, dir, name));
        let there = states.filter(|state| state.0.contains_key(&dir));
        there.map(|state| state.entry(dir, name)).collect()
    }

    fn object(&self, path: &str, ino: Ino, seen: &Seen) -> Verdict {
        let states: Vec<&State> = self.since(|_, ack| ack.is_of_object(ino)).collect();
        let was: Vec<&Thing> = states.iter().filter_map(|state| state.0.get(&ino).map(|thing| &**thing)).collect();
        let is = |lie: Lie, good: bool| match good {
            true => Ok(()),
            false => Err((lie, format!("{lie:?} of {path:?} ({:?})", seen.kind))),
        };
        is(Lie::Type, was.iter().any(|was| was.kind == seen.kind && was.rdev == seen.rdev))?;
        // Where the record of its permissions is stale, the root is for the user of this process alone.
        let is_locked = seen.permissions.is_err() && seen.mode == 0o700;
        is(Lie::Mode, is_locked || was.iter().any(|was| was.mode == seen.mode))?;
        is(Lie::Owner, is_locked || was.iter().any(|was| was.owner == seen.owner))?;
        if let Ok(attributes) = &seen.attributes {
            is(Lie::Attributes, was.iter().any(|was| was.attributes == *attributes))?;
        }
        match &seen.body {
            Body::Special => Ok(()),
            Body::Link(target) => {
                let is_target = |target: &Vec<u8>| was.iter().any(|was| *was.content == *target);
                is(Lie::Target, target.as_ref().map_or(true, is_target))
            }
            Body::Dir(names) => self.names(path, ino, names),
            Body::File { size, blocks } => {
                // What was made since is empty at first.
                let is_new = states.first().is_some_and(|state| !state.0.contains_key(&ino));
                let mut versions: Vec<&[u8]> = was.iter().map(|was| &**was.content).collect();
                if is_new {
                    versions.insert(0, &[]);
                }
                let (size, sizes) = (*size as usize, || versions.iter().map(|version| version.len()));
                let good = sizes().min() <= Some(size) && Some(size) <= sizes().max();
                is(Lie::Size, good).map_err(|(lie, what)| (lie, format!("{what}, {size} bytes")))?;
                for (number, block) in blocks.iter().enumerate() {
                    let Ok(block) = block else { continue };
                    let good = is_allowed(&versions, number * BLOCK, block);
                    is(Lie::Content, good).map_err(|(lie, what)| {
                        let sizes: Vec<usize> = versions.iter().map(|version| version.len()).collect();
                        let is_zero = block.iter().all(|byte| *byte == 0);
                        (lie, format!("{what}, block {number} of {size} bytes, zeros {is_zero}; sizes {sizes:?}"))
                    })?;
                }
                Ok(())
            }
        }
    }

    fn names(&self, path: &str, dir: Ino, names: &Names) -> Verdict {
        let all: BTreeSet<&String> = names.listed.keys().chain(names.found.keys()).collect();
        for name in &all {
            let (path, allowed) = (format!("{path}/{name}"), self.entries(dir, name));
            let may_be_absent = allowed.is_empty() || allowed.contains(&None);
            let objects = || allowed.iter().flatten().copied();
            let is_found = matches!(names.found.get(*name), Some(Ok(Some(_))));
            match names.listed.get(*name) {
                Some(_) if objects().next().is_none() => return Err((Lie::Name, format!("{path:?} is listed"))),
                None if names.listing.is_ok() && (!may_be_absent || is_found) => {
                    return Err((Lie::Absence, format!("{path:?} is not listed")));
                }
                _ => {}
            }
            match names.found.get(*name) {
                Some(Ok(None)) if !may_be_absent => return Err((Lie::Absence, format!("{path:?} is not there"))),
                Some(Ok(Some(seen))) => self.one_of(&path, objects(), seen)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether what is seen is what one of these objects was.
    fn one_of(&self, path: &str, objects: impl Iterator<Item = Ino>, seen: &Seen) -> Verdict {
        let mut verdict = Err((Lie::Name, format!("{path:?} is there")));
        for object in objects {
            verdict = self.object(path, object, seen);
            if verdict.is_ok() {
                break;
            }
        }
        verdict
    }
}

/// Whether `block`, at `offset`, is what `version` has there (zeros past its end).
fn is_version(block: &[u8], offset: usize, version: &[u8]) -> bool {
    let there = version.len().saturating_sub(offset).min(block.len());
    let (had, beyond) = block.split_at(there);
    (there == 0 || had == &version[offset..offset + there]) && beyond.iter().all(|byte| *byte == 0)
}

/// Whether a block may be read where the file had these versions since the acknowledged one.
fn is_allowed(versions: &[&[u8]], offset: usize, block: &[u8]) -> bool {
    let is_known = || versions.iter().any(|version| is_version(block, offset, version));
    // A block of a growth that was in flight may not have been written yet.
    let is_fresh = || versions.iter().any(|version| version.len() <= offset) && block.iter().all(|byte| *byte == 0);
    // A shrink goes to the store at once, and what was buffered before it may be lost: then what was there is cut.
    let is_cut = |(i, version): (usize, &&[u8])| {
        let mut later = versions[i..].iter();
        later.any(|later| is_version(block, offset, &version[..version.len().min(later.len())]))
    };
    is_known() || is_fresh() || versions.iter().enumerate().any(is_cut)
}
