//! Group commit: commits of some objects that are asked for while another is under way become one.
//!
//! Each caller adds itself to a list and waits for the lock `committing`. The first to get the lock commits for the
//! whole list. A group has the effect of its commits in sequence, in one transaction: a crash leaves all or none of it.

use super::state::State;
use super::{Anchor, Result};
use crate::ObjectId;
use crate::queue::{EntryMark, Layer, PIECE_MAX, Scope, Wanted};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

/// A waiting commit.
pub(super) struct Asking {
    objects: HashSet<ObjectId>,
    covered: EntryMark,
    /// Whether to commit even if an entry of the objects was made after the mark.
    even_if_late: bool,
    /// Whether it was done; empty: not tried yet, or failed.
    answer: OnceLock<bool>,
}

/// The waiting commits.
pub(super) type List = Mutex<Vec<Arc<Asking>>>;

impl Anchor {
    /// Makes the queued changes of these objects, and of the directories on the way to them, durable: for fsync. Of new
    /// entries it takes those up to `covered`, a mark that was taken before a barrier of the store.
    ///
    /// # Errors
    /// As for [`Anchor::commit`].
    pub fn commit_objects(&self, objects: &HashSet<ObjectId>, covered: EntryMark) -> Result<()> {
        self.commit_together(objects, covered, true).map(drop)
    }

    /// The same, unless one of them, or a directory on the way, has an entry made after that mark: then it returns
    /// false, and commits nothing. No earlier commit can have taken an entry of such a directory, so none is missed.
    /// For an fsync whose barriers were for these objects alone.
    ///
    /// # Errors
    /// As for [`Anchor::commit`].
    pub fn commit_unless_late(&self, objects: &HashSet<ObjectId>, covered: EntryMark) -> Result<bool> {
        self.commit_together(objects, covered, false)
    }

    fn commit_together(&self, objects: &HashSet<ObjectId>, covered: EntryMark, even_if_late: bool) -> Result<bool> {
        let own = Arc::new(Asking { objects: objects.clone(), covered, even_if_late, answer: OnceLock::new() });
        self.asking.lock().push(own.clone());
        let _in_order = self.committing.lock();
        if let Some(answer) = own.answer.get() {
            return Ok(*answer);
        }
        let others = std::mem::take(&mut *self.asking.lock());
        self.settle_doubt()?;
        // If the commit of a group has failed, each member tries alone, to get its own error.
        let mut group = vec![own.clone()];
        group.extend(others.into_iter().filter(|asking| !Arc::ptr_eq(asking, &own)));
        if even_if_late || !self.is_late(&own) {
            self.commit_pieces(Wanted::Only(objects), covered)?;
        }
        loop {
            let (flying, done) = self.fly_asked(&group)?;
            // Those that are left wait for `committing` themselves.
            self.asking.lock().extend(group.split_off(done.len()));
            match self.land(flying) {
                Ok(()) => {
                    for (asking, is_done) in group.iter().zip(done) {
                        // Only this thread answers.
                        let _ = asking.answer.set(is_done);
                    }
                    return Ok(own.answer.get() == Some(&true));
                }
                // Maybe another member's.
                Err(_) if group.len() > 1 && self.state.lock().flying.is_none() => group.truncate(1),
                Err(error) => return Err(error),
            }
        }
    }

    /// Puts in flight what the members of a group ask for, as many as one commit can take, but at least the first.
    /// Returns which were taken, in order; false: a newer entry is in the way.
    fn fly_asked(&self, group: &[Arc<Asking>]) -> Result<(Option<Arc<Layer>>, Vec<bool>)> {
        let state = &mut *self.state.lock();
        let (mut layer, mut done) = (Layer::default(), Vec::new());
        for asking in group {
            let most = if done.is_empty() { usize::MAX } else { PIECE_MAX.saturating_sub(layer.weight()) };
            match self.take_asked(state, asking, &mut layer, most) {
                Ok(Some(is_done)) => done.push(is_done),
                Ok(None) => break,
                Err(error) => {
                    state.queued.put_back(std::mem::take(&mut layer));
                    return Err(error);
                }
            }
        }
        Ok(((!layer.is_empty()).then(|| state.fly(layer)), done))
    }

    fn is_late(&self, asking: &Asking) -> bool {
        let state = self.state.lock();
        state.queued.is_any_late(&asking.objects, asking.covered)
    }

    /// Takes the changes of one member out of the queue. False: it has a newer entry, and nothing is taken. `None`:
    /// they weigh more than `most`, and nothing is taken.
    fn take_asked(&self, state: &mut State, asking: &Asking, into: &mut Layer, most: usize) -> Result<Option<bool>> {
        let Asking { objects, covered, even_if_late, .. } = asking;
        if !even_if_late && state.queued.is_any_late(objects, *covered) {
            return Ok(Some(false));
        }
        let mut taken = self.take_queued(state, Scope::Objects(objects), *covered)?;
        if taken.weight() > most {
            state.queued.put_back(taken);
            return Ok(None);
        }
        // Changes of earlier members are older.
        taken.put_back(std::mem::take(into));
        *into = taken;
        Ok(Some(true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::anchor::{Made, Removal};
    use crate::row::{Content, EntryPlace, FileRow, Row, Sealed, VaultRow};
    use crate::table::{Change, MemoryTable, Space, Table, Visit};
    use crate::{AnchorError, Digest, Token, TokenKey};
    use lamassu_format::header::VaultId;
    use parking_lot::Condvar;
    use std::collections::HashMap;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread::{self, ScopedJoinHandle};
    use std::time::Duration;

    /// Commits wait until they are let through, and are counted.
    #[derive(Default)]
    struct Slow {
        table: MemoryTable,
        commits: AtomicUsize,
        is_shut: Mutex<bool>,
        changed: Condvar,
        /// So many commits fail.
        fail: AtomicUsize,
        /// The most changes in one commit.
        most: AtomicUsize,
        /// A commit that changes this row fails.
        forbidden: Mutex<Option<Vec<u8>>>,
    }

    impl Slow {
        fn shut(&self, is_shut: bool) {
            *self.is_shut.lock() = is_shut;
            self.changed.notify_all();
        }
    }

    impl Table for Slow {
        fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>> {
            self.table.get(space, key)
        }

        fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<()> {
            self.table.scan(space, prefix, visit)
        }

        fn commit(&self, changes: &[Change]) -> Result<()> {
            self.commits.fetch_add(1, Ordering::Relaxed);
            let mut is_shut = self.is_shut.lock();
            while *is_shut {
                self.changed.wait(&mut is_shut);
            }
            self.most.fetch_max(changes.len(), Ordering::Relaxed);
            let forbidden = self.forbidden.lock();
            let is_forbidden = forbidden
                .as_ref()
                .is_some_and(|key| changes.iter().any(|change| change.space == Space::Objects && change.key == *key));
            let fails =
                self.fail.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
            match fails || is_forbidden {
                true => Err(AnchorError::Broken),
                false => self.table.commit(changes),
            }
        }
    }

    fn row(content: Content) -> Row {
        Row { mode: 0o600, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing }
    }

    fn made(anchor: &Anchor, n: u8) -> ObjectId {
        let place = EntryPlace { dir: ObjectId::ROOT, name: Token([n; 16]) };
        match anchor.make(place, row(Content::File(FileRow::default()))).expect("makes") {
            Made::Queued(object) => object,
            Made::NameIsGoing => unreachable!("nothing was removed"),
        }
    }

    /// An anchor with a table whose commits can be held up, and files that are queued.
    fn lab() -> (Arc<Slow>, Arc<Anchor>, Vec<ObjectId>) {
        let table = Arc::new(Slow::default());
        let root = Content::Dir { record: Sealed::Is(Digest([1; 32])), parent: ObjectId::ROOT, name: Token([0; 16]) };
        let vault = VaultRow::new(VaultId([1; 16]), TokenKey::random().expect("random numbers"));
        let anchor = Arc::new(Anchor::create(table.clone(), vault, row(root)).expect("makes"));
        let files = (0..8).map(|n| made(&anchor, n)).collect();
        (table, anchor, files)
    }

    type Commits<'s> = Vec<ScopedJoinHandle<'s, Result<bool>>>;

    /// Commits of each file alone, of which the first is under way, and the others wait for it.
    fn at_once<'s>(
        scope: &'s thread::Scope<'s, '_>,
        anchor: &'s Anchor,
        table: &Slow,
        files: &[ObjectId],
    ) -> Commits<'s> {
        let mark = anchor.mark();
        let mut commits = Commits::new();
        let before = table.commits.load(Ordering::Relaxed);
        for file in files {
            let objects = HashSet::from([*file]);
            commits.push(scope.spawn(move || anchor.commit_unless_late(&objects, mark)));
            let waiting = commits.len() - 1;
            let is_there = || anchor.asking.lock().len() == waiting && table.commits.load(Ordering::Relaxed) > before;
            while !is_there() {
                thread::sleep(Duration::from_millis(1));
            }
        }
        commits
    }

    #[test]
    fn those_who_wait_for_a_commit_share_the_next() {
        let (table, anchor, files) = lab();
        table.shut(true);
        let before = table.commits.load(Ordering::Relaxed);
        thread::scope(|scope| {
            let commits = at_once(scope, &anchor, &table, &files);
            table.shut(false);
            for commit in commits {
                assert!(commit.join().expect("ends").expect("commits"));
            }
        });
        assert_eq!(table.commits.load(Ordering::Relaxed) - before, 2);
        assert_eq!(anchor.queued(), 0);
        let rows = |object: &ObjectId| table.get(Space::Objects, &crate::queue::object_key(*object)).expect("reads");
        assert!(files.iter().all(|file| rows(file).is_some()));
    }

    #[test]
    fn one_that_is_late_is_told_so_and_the_others_go_on() {
        let (table, anchor, files) = lab();
        table.shut(true);
        thread::scope(|scope| {
            let commits = at_once(scope, &anchor, &table, &files);
            let late = EntryPlace { dir: ObjectId::ROOT, name: Token([99; 16]) };
            anchor.link(late, files[3]).expect("links");
            table.shut(false);
            let done: Vec<_> =
                commits.into_iter().map(|commit| commit.join().expect("ends").expect("commits")).collect();
            assert_eq!(done, [true, true, true, false, true, true, true, true]);
        });
        assert!(anchor.queued() > 0, "what is late is still to be committed");
    }

    #[test]
    fn one_that_asks_for_too_much_for_one_commit_does_so_alone() {
        let (table, anchor, files) = lab();
        let much: HashSet<ObjectId> = (0..10_000_u32)
            .map(|n| {
                let mut name = [7; 16];
                name[..4].copy_from_slice(&n.to_be_bytes());
                let place = EntryPlace { dir: ObjectId::ROOT, name: Token(name) };
                match anchor.make(place, row(Content::File(FileRow::default()))).expect("makes") {
                    Made::Queued(object) => object,
                    Made::NameIsGoing => unreachable!("nothing was removed"),
                }
            })
            .collect();
        table.shut(true);
        thread::scope(|scope| {
            let commits = at_once(scope, &anchor, &table, &files);
            let mark = anchor.mark();
            let (anchor, much) = (&anchor, &much);
            let waiting = scope.spawn(move || anchor.commit_unless_late(much, mark));
            while anchor.asking.lock().len() < files.len() {
                thread::sleep(Duration::from_millis(1));
            }
            table.shut(false);
            for commit in commits.into_iter().chain([waiting]) {
                assert!(commit.join().expect("ends").expect("commits"));
            }
        });
        assert_eq!(anchor.queued(), 0);
        let most = table.most.load(Ordering::Relaxed);
        assert!(most < 3 * PIECE_MAX / 100, "{most} changes in one commit");
    }

    #[test]
    fn who_commits_for_others_does_not_get_their_errors() {
        let (table, anchor, files) = lab();
        *table.forbidden.lock() = Some(crate::queue::object_key(files[3]));
        table.shut(true);
        thread::scope(|scope| {
            let commits = at_once(scope, &anchor, &table, &files);
            table.shut(false);
            let done: Vec<_> = commits.into_iter().map(|commit| commit.join().expect("ends").is_ok()).collect();
            assert_eq!(done, [true, true, true, false, true, true, true, true]);
        });
    }

    #[test]
    fn where_the_table_fails_each_is_told_and_nothing_is_lost() {
        let (table, anchor, files) = lab();
        table.shut(true);
        table.fail.store(usize::MAX, Ordering::Relaxed);
        let queued = anchor.queued();
        thread::scope(|scope| {
            let commits = at_once(scope, &anchor, &table, &files);
            table.shut(false);
            for commit in commits {
                assert!(matches!(commit.join().expect("ends"), Err(AnchorError::Broken)));
            }
        });
        assert_eq!(anchor.queued(), queued);
        table.fail.store(0, Ordering::Relaxed);
        anchor.commit(anchor.mark()).expect("commits");
        assert_eq!(anchor.queued(), 0);
    }

    /// Holds a commit of everything up, and lets it fail while an fsync of the root waits for it. `meanwhile`: what is
    /// changed before that fsync. Returns what the fsync asked for.
    fn synced_beside_a_commit_that_fails(
        table: &Slow,
        anchor: &Anchor,
        meanwhile: impl FnOnce(&Anchor),
    ) -> HashSet<ObjectId> {
        let before = table.commits.load(Ordering::Relaxed);
        table.shut(true);
        let asked = thread::scope(|scope| {
            let other = scope.spawn(|| anchor.commit(anchor.mark()));
            while table.commits.load(Ordering::Relaxed) == before {
                thread::sleep(Duration::from_millis(1));
            }
            meanwhile(anchor);
            let mut asked = anchor.queued_in(ObjectId::ROOT);
            asked.insert(ObjectId::ROOT);
            let (mark, objects) = (anchor.mark(), asked.clone());
            let own = scope.spawn(move || anchor.commit_unless_late(&objects, mark));
            while anchor.asking.lock().is_empty() {
                thread::sleep(Duration::from_millis(1));
            }
            table.fail.store(1, Ordering::Relaxed);
            table.shut(false);
            other.join().expect("ends").expect_err("it fails");
            assert!(own.join().expect("ends").expect("commits"));
            asked
        });
        assert_eq!(anchor.queued(), 0);
        asked
    }

    /// What an fsync of a directory covers is durable, also if it was in a commit of another thread that has failed.
    #[test]
    fn what_another_commit_has_not_made_durable_is_still_asked_for() {
        let (table, anchor, files) = lab();
        let asked = synced_beside_a_commit_that_fails(&table, &anchor, |_| {});
        assert!(files.iter().all(|file| asked.contains(file)));
        // A directory leaves with what was removed from it, by whichever commit.
        for is_in_flight in [true, false] {
            let at = EntryPlace { dir: ObjectId::ROOT, name: Token([50; 16]) };
            let content = Content::Dir { record: Sealed::Nothing, parent: at.dir, name: at.name };
            let Made::Queued(dir) = anchor.make(at, row(content)).expect("makes") else { unreachable!("a new name") };
            let inside = EntryPlace { dir, name: Token([51; 16]) };
            anchor.link(inside, files[0]).expect("links");
            anchor.commit(anchor.mark()).expect("commits");
            let remove = |anchor: &Anchor, at| assert!(matches!(anchor.remove(at), Ok(Removal::WhenDue(_))));
            remove(&anchor, inside);
            if is_in_flight {
                remove(&anchor, at);
            }
            let asked = synced_beside_a_commit_that_fails(&table, &anchor, |anchor| {
                if !is_in_flight {
                    remove(anchor, at);
                }
            });
            assert!(asked.contains(&dir) && asked.contains(&files[0]), "{is_in_flight}");
            anchor.carried_out(anchor.due().into_keys());
            anchor.commit(anchor.mark()).expect("commits");
        }
    }

    /// Names of an object are those that are in force, wherever the change is that made them.
    #[test]
    fn names_are_found_whatever_commit_has_them() {
        let (table, anchor, files) = lab();
        let place = |n| EntryPlace { dir: ObjectId::ROOT, name: Token([n; 16]) };
        let names = |anchor: &Anchor| anchor.names_of(files[1]).expect("reads").into_iter().collect::<HashSet<_>>();
        let all_of = |places: &[EntryPlace]| places.iter().copied().collect::<HashSet<_>>();
        assert_eq!(names(&anchor), all_of(&[place(1)]), "it was queued");
        anchor.commit(anchor.mark()).expect("commits");
        anchor.link(place(21), files[1]).expect("links");
        table.shut(true);
        thread::scope(|scope| {
            let before = table.commits.load(Ordering::Relaxed);
            let flying = scope.spawn(|| anchor.commit(anchor.mark()));
            while table.commits.load(Ordering::Relaxed) == before {
                thread::sleep(Duration::from_millis(1));
            }
            anchor.link(place(22), files[1]).expect("links");
            let one = anchor.places_of(&HashSet::from([files[1]])).expect("reads");
            let all = names(&anchor);
            // Neither what was removed, nor a name that another object has by now.
            anchor.remove(place(1)).expect("removes");
            anchor.remove(place(21)).expect("removes");
            anchor.remove(place(22)).expect("removes");
            anchor.link(place(22), files[2]).expect("links");
            let left = names(&anchor);
            table.shut(false);
            flying.join().expect("ends").expect("commits");
            assert_eq!(one, HashMap::from([(files[1], place(1))]), "a committed one");
            assert_eq!(all, all_of(&[place(1), place(21), place(22)]));
            assert_eq!(left, all_of(&[]));
        });
    }
}
