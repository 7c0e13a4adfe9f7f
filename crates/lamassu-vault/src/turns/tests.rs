mod share;

use super::share::SHARE;
use super::told::KEPT_MAX;
use super::*;
use std::collections::HashSet;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::thread::spawn;

/// A thread for requests that waited; ended with the turns.
fn runner(turns: &Arc<Turns>) -> std::thread::JoinHandle<()> {
    let turns = turns.clone();
    spawn(move || turns.run_waiting())
}

/// A request for a page of a file.
fn page(turns: &Arc<Turns>, ino: Ino, is_written: bool) -> Option<Use> {
    turns.enter(Need::read_pages(ino, &(0..4096)).written(is_written))
}

/// The kernel has no page.
fn end(turns: &Turns) {
    turns.end(|ino, _| panic!("{ino} has pages"));
}

#[test]
fn requests_wait_for_a_turn_that_is_enough_for_them() {
    let turns = Turns::new();
    let runner = runner(&turns);
    let (done, all_done) = mpsc::channel();
    let send = |what: &'static str| {
        let done = done.clone();
        move |_: Use| done.send(what).unwrap()
    };
    turns.run(Need::LOOK, send("look"));
    assert_eq!(turns.wanted(), Some(Mode::Look));
    turns.begin(Mode::Look);
    assert_eq!(all_done.recv().unwrap(), "look");
    assert_eq!(turns.wait_for_end(Duration::ZERO), None);
    turns.run(Need::CHANGE, send("change"));
    assert_eq!(turns.wait_for_end(Duration::MAX / 4), Some(End::TooLittle));
    turns.stop_requests();
    end(&turns);
    assert_eq!(turns.wanted(), Some(Mode::Change));
    let number = turns.begin(Mode::Change);
    assert_eq!(all_done.recv().unwrap(), "change");
    turns.recall(number - 1);
    assert_eq!(turns.wait_for_end(Duration::ZERO), None, "the turn before was recalled");
    turns.recall(number);
    turns.run(Need::LOOK, send("late"));
    assert_eq!(turns.wait_for_end(Duration::ZERO), Some(End::Recalled));
    turns.stop_requests();
    end(&turns);
    assert!(all_done.try_recv().is_err(), "what comes behind a recall waits for the next turn");
    turns.fail_waiting();
    assert_eq!(all_done.recv().unwrap(), "late");
    let stopper = spawn({
        let turns = turns.clone();
        move || turns.stop()
    });
    assert_eq!(turns.wanted(), None);
    turns.over();
    stopper.join().unwrap();
    runner.join().unwrap();
    turns.run(Need::CHANGE, send("over"));
    assert_eq!(all_done.recv().unwrap(), "over");
}

/// What the kernel asks for while a turn ends is answered in it, and what it then holds is named again.
#[test]
fn a_turn_ends_when_no_page_of_it_is_left() {
    const FILE: Ino = 7;
    let turns = Turns::new();
    let runner = runner(&turns);
    let number = turns.begin(Mode::Change);
    drop(page(&turns, FILE, true).expect("a turn to change"));
    turns.recall(number);
    assert!(turns.enter(Need::LOOK).is_none());
    turns.stop_requests();
    let dropped = Mutex::new(vec![]);
    turns.end(|ino, part| {
        assert_eq!(part, 0..u64::MAX);
        let mut dropped = dropped.lock();
        if dropped.is_empty() {
            drop(turns.enter(Need::WRITE_PAGES).expect("pages are written back"));
            drop(turns.enter(Need::resize(FILE)).expect("no page is written back before"));
            drop(page(&turns, FILE + 1, false).expect("pages are read"));
        }
        dropped.push(ino);
    });
    assert_eq!(*dropped.lock(), [FILE, FILE + 1]);
    for need in [Need::read_pages(FILE, &(0..4096)), Need::WRITE_PAGES, Need::resize(FILE)] {
        assert!(turns.enter(need).is_none());
    }
    // Nothing waits for ever.
    let (done, is_done) = mpsc::channel();
    turns.read_pages(FILE, &(0..4096), || false, move |_| done.send(()).unwrap());
    turns.over();
    is_done.recv().unwrap();
    runner.join().unwrap();
}

/// Pages of a file that may be written are not read in a turn that only looks: nobody would hear of it when they are
/// changed.
#[test]
fn a_turn_that_looks_hands_out_no_page_that_may_be_changed() {
    let turns = Turns::new();
    turns.begin(Mode::Look);
    assert!(page(&turns, 1, true).is_none());
    drop(page(&turns, 1, false).expect("a page to look at"));
}

/// A request for pages waits. Before its turn begins, a program opens the file for writing.
#[test]
fn whether_a_file_may_be_written_is_asked_when_its_pages_are_read() {
    let turns = Turns::new();
    let runner = runner(&turns);
    let is_written = Arc::new(AtomicBool::new(false));
    let (asked, (done, all_done)) = (is_written.clone(), mpsc::channel());
    turns.read_pages(1, &(0..4096), move || asked.load(Ordering::SeqCst), move |_| done.send(()).unwrap());
    assert_eq!(turns.wanted(), Some(Mode::Look));
    is_written.store(true, Ordering::SeqCst);
    turns.begin(Mode::Look);
    assert_eq!(turns.wait_for_end(Duration::from_secs(60)), Some(End::TooLittle));
    turns.stop_requests();
    end(&turns);
    assert!(all_done.try_recv().is_err());
    turns.begin(Mode::Change);
    all_done.recv().unwrap();
    turns.over();
    runner.join().unwrap();
}

/// Pages that the kernel has not asked for are put there only while it may keep them, so in no turn that only looks:
/// the file may be open for writing by then.
#[test]
fn pages_are_put_into_the_cache_only_where_the_kernel_may_keep_them() {
    let turns = Turns::new();
    turns.begin(Mode::Look);
    turns.keep();
    assert!(turns.enter(Need::put_pages(1)).is_none());
    turns.stop_requests();
    end(&turns);
    let number = turns.begin(Mode::Change);
    assert!(turns.enter(Need::put_pages(1)).is_none());
    turns.keep();
    drop(turns.enter(Need::put_pages(1)).unwrap());
    turns.recall(number);
    assert!(turns.enter(Need::put_pages(1)).is_none());
}

/// The pages that a kernel has locked, by file and number, each until a request has read it.
#[derive(Default)]
struct Locked {
    pages: Mutex<HashSet<(Ino, u64)>>,
    changed: Condvar,
}

impl Locked {
    const LEN: u64 = 4096;
    /// The pages of a file.
    const PAGES: u64 = 400;

    fn unlock(&self, page: (Ino, u64)) {
        self.pages.lock().remove(&page);
        self.changed.notify_all();
    }

    /// Dropping goes from page to page, and waits for each that is locked.
    fn drop_part(&self, ino: Ino, part: &Range<u64>) {
        for page in part.start / Self::LEN..Self::PAGES.min(part.end / Self::LEN) {
            self.changed.wait_while(&mut self.pages.lock(), |pages| pages.contains(&(ino, page)));
        }
    }
}

/// Programs read on and on, each before another one is done: there is always a request for pages under way.
#[test]
fn who_reads_pages_on_and_on_holds_no_turn_up() {
    const FILES: u64 = 3;
    let turns = Turns::new();
    let runners = [runner(&turns), runner(&turns), runner(&turns)];
    let (locked, is_over) = (Arc::new(Locked::default()), Arc::new(AtomicBool::new(false)));
    turns.begin(Mode::Change);
    // Each has pages of its own, in files of all.
    let readers: Vec<_> = (0..8)
        .map(|number| {
            let (turns, locked, is_over) = (turns.clone(), locked.clone(), is_over.clone());
            spawn(move || {
                for round in 0.. {
                    if is_over.load(Ordering::SeqCst) {
                        return;
                    }
                    // Some read one file, and some all of them.
                    let ino = if number < FILES { number } else { round % FILES };
                    let page = (ino, (number + 8 * round) % Locked::PAGES);
                    let (done, is_done) = mpsc::channel();
                    locked.pages.lock().insert(page);
                    let at = page.1 * Locked::LEN;
                    let unlocks = locked.clone();
                    turns.read_pages(
                        ino,
                        &(at..at + Locked::LEN),
                        || false,
                        move |turn| {
                            std::thread::sleep(Duration::from_millis(3));
                            unlocks.unlock(page);
                            drop(turn);
                            let _ = done.send(());
                        },
                    );
                    let _ = is_done.recv();
                }
            })
        })
        .collect();
    let (ended, has_ended) = mpsc::channel();
    let ends = {
        let (turns, locked) = (turns.clone(), locked.clone());
        spawn(move || {
            turns.stop_requests();
            turns.end(|ino, part| locked.drop_part(ino, &part));
            ended.send(()).unwrap();
        })
    };
    has_ended.recv_timeout(Duration::from_secs(120)).expect("the turn ends");
    ends.join().unwrap();
    assert!(!locked.pages.lock().is_empty(), "they wait for the next turn");
    is_over.store(true, Ordering::SeqCst);
    turns.begin(Mode::Look);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert!(locked.pages.lock().is_empty());
    turns.over();
    runners.into_iter().for_each(|runner| runner.join().unwrap());
}

/// A mapped file is read in a turn that looks; a program opens it for writing, and waits for another turn.
/// The kernel asks for a further page, which it has locked. Dropping the pages waits for that lock.
#[test]
fn pages_that_are_dropped_wait_for_no_other_turn() {
    const FILE: Ino = 7;
    let turns = Turns::new();
    turns.begin(Mode::Look);
    drop(page(&turns, FILE, false).unwrap());
    drop(page(&turns, FILE, true).expect("one more page of a file that was read in this turn"));
    turns.stop_requests();
    let drops = std::cell::Cell::new(0);
    turns.end(|ino, _| {
        drops.set(drops.get() + 1);
        if drops.get() == 1 {
            drop(page(&turns, FILE, true).expect("the same while its pages are dropped"));
            assert!(page(&turns, FILE + 1, true).is_none());
        }
        assert_eq!(ino, FILE);
    });
    assert_eq!(drops.get(), 2);
    turns.begin(Mode::Look);
    assert!(page(&turns, FILE, true).is_none(), "it is open for writing now");
}

/// However soon a turn is recalled, what waited when it began is done in it.
#[test]
fn what_waited_is_done_in_a_turn_that_is_recalled_at_once() {
    const WAITING: usize = 100;
    let turns = Turns::new();
    let (done, all_done) = mpsc::channel();
    for at in 0..WAITING {
        let done = done.clone();
        turns.run(Need::CHANGE, move |_| done.send(at).unwrap());
    }
    let number = turns.begin(Mode::Change);
    turns.recall(number);
    let runners = [runner(&turns), runner(&turns)];
    turns.stop_requests();
    end(&turns);
    assert_eq!(all_done.try_iter().count(), WAITING);
    turns.over();
    for runner in runners {
        runner.join().unwrap();
    }
}

/// In a turn that may change something the kernel keeps what it is told; before its end that is named, when all answers
/// are given. Callers whose requests hold locks of the kernel are served meanwhile, though the turn is recalled.
#[test]
fn what_the_kernel_keeps_is_named_before_the_end() {
    let turns = Turns::new();
    let name = OsStr::new("name");
    assert!(!turns.may_keep(1));
    turns.begin(Mode::Look);
    turns.keep();
    assert!(!turns.is_keeping() && !turns.may_keep(1), "others may have it, too: it could not be dropped");
    turns.stop_requests();
    end(&turns);
    let number = turns.begin(Mode::Change);
    assert_eq!(turns.stop_keeping(), None);
    assert!(!turns.may_keep(1));
    turns.keep();
    let answering = turns.enter(Need::LOOK).unwrap();
    assert!(turns.may_keep(1) && turns.may_keep_name(1, name));
    turns.recall(number);
    assert!(turns.enter(Need::CHANGE).is_none());
    let dropping = spawn({
        let turns = turns.clone();
        move || turns.stop_keeping()
    });
    // It begins with that: a request that came since is not waited for.
    let later = loop {
        if let Some(later) = turns.enter(Need::CHANGE) {
            break later;
        }
        std::thread::yield_now();
    };
    assert!(!turns.may_keep(2) && !dropping.is_finished());
    drop(answering);
    assert_eq!(dropping.join().unwrap().unwrap().inodes, [1]);
    // A name that is moved before the kernel has forgotten it is followed; one that it has forgotten, or never had, is
    // not.
    let expired = Mutex::new(vec![]);
    turns.is_moved([(8, name), (9, name)]);
    turns.expire_names(|dir, _| {
        if expired.lock().is_empty() {
            turns.is_moved([(1, name), (4, name)]);
        }
        expired.lock().push(dir);
    });
    let expired = expired.into_inner();
    assert!(expired.contains(&4) && expired.iter().all(|dir| [1, 4].contains(dir)), "{expired:?}");
    turns.is_moved([(1, name), (4, name)]);
    turns.expire_names(|dir, _| panic!("{dir} was forgotten"));
    drop(turns.enter(Need::CHANGE).unwrap());
    turns.forgotten();
    assert!(turns.enter(Need::CHANGE).is_none(), "what comes now waits for the next turn");
    drop(later);
    turns.stop_requests();
    end(&turns);
    assert_eq!(turns.stop_keeping(), None);
}

/// A thread that was left behind, since a program held a directory, ends in a later turn that has cached the name
/// again.
#[test]
fn a_name_of_a_later_turn_is_not_taken_for_one_of_an_earlier() {
    let turns = Turns::new();
    let name = OsStr::new("name");
    let keep = || {
        turns.begin(Mode::Change);
        turns.keep();
        let answering = turns.enter(Need::LOOK).unwrap();
        assert!(turns.may_keep_name(1, name));
        drop(answering);
        assert!(turns.stop_keeping().is_some());
    };
    let end = || {
        turns.forgotten();
        turns.stop_requests();
        end(&turns);
    };
    keep();
    let rounds = std::cell::Cell::new(0);
    turns.expire_names(|_, _| {
        rounds.set(rounds.get() + 1);
        if rounds.get() == 1 {
            end();
            keep();
        }
    });
    assert_eq!(rounds.get(), 2, "the later turn's name is to be dropped, too");
    end();
}

#[test]
fn what_the_kernel_keeps_is_bounded() {
    let turns = Turns::new();
    turns.begin(Mode::Change);
    turns.keep();
    let most = KEPT_MAX as Ino;
    assert!((0..most).all(|ino| turns.may_keep(ino)));
    assert!(!turns.may_keep(most) && turns.may_keep(0));
    assert_eq!(turns.stop_keeping().unwrap().inodes.len(), KEPT_MAX);
}

/// Whoever changed something in its last turn gets an exclusive one at once: a shared one would be of no use to it.
#[test]
fn a_turn_knows_whether_it_changed_something_until_the_next_one() {
    let turns = Turns::new();
    turns.begin(Mode::Change);
    drop(turns.enter(Need::LOOK));
    assert!(!turns.is_changing());
    drop(turns.enter(Need::CHANGE));
    turns.stop_requests();
    end(&turns);
    assert!(turns.is_changing(), "the driver asks between turns");
    turns.begin(Mode::Look);
    assert!(!turns.is_changing());
}

/// A freeze waits for changes under way, and for nothing that goes on while it is frozen.
#[test]
fn reading_pages_of_a_file_that_may_be_written_delays_no_freeze() {
    let turns = Turns::new();
    turns.begin(Mode::Change);
    let reading = page(&turns, 1, true).expect("a turn to change");
    let changing = turns.enter(Need::CHANGE).unwrap();
    let freezing = spawn({
        let turns = turns.clone();
        move || turns.freeze(|| true)
    });
    while !turns.is_frozen() {
        std::thread::yield_now();
    }
    assert!(!freezing.is_finished());
    let more = page(&turns, 2, true).expect("pages are read while it is frozen");
    assert!(turns.enter(Need::CHANGE).is_none());
    drop(changing);
    assert!(freezing.join().unwrap());
    drop((reading, more));
    turns.thaw();
    assert_eq!(turns.state.lock().changers, 0);
}

/// The request that gives a freeze up comes through the root, before or after the freeze began to wait.
#[test]
fn the_root_waits_for_no_turn_that_a_freeze_waits_for() {
    let turns = Turns::new();
    let runner = runner(&turns);
    let (done, all_done) = mpsc::channel();
    turns.run(Need::LOOK, |_| {});
    turns.run(Need::LOOK_AT_ROOT, move |_| done.send(()).unwrap());
    assert!(turns.enter(Need::LOOK_AT_ROOT).is_none() && all_done.try_recv().is_err(), "no freeze waits");
    let freezing = spawn({
        let turns = turns.clone();
        move || turns.freeze(|| true)
    });
    all_done.recv().unwrap();
    let beside = turns.enter(Need::LOOK_AT_ROOT).expect("a freeze waits");
    assert_eq!(turns.state.lock().users, 0, "the end of a turn does not wait for it");
    drop(beside);
    assert!(turns.enter(Need::LOOK).is_none() && turns.is_wanted(Mode::Change));
    turns.thaw();
    assert!(!freezing.join().unwrap());
    assert!(turns.enter(Need::LOOK_AT_ROOT).is_none());
    // The exclusive turn is not wanted any more.
    assert!(turns.is_wanted(Mode::Look) && !turns.is_wanted(Mode::Change));
    turns.will_stop();
    assert!(!turns.is_wanted(Mode::Look));
    turns.over();
    runner.join().unwrap();
}

/// A request that needs turns of a vault and of a dataset in it gives the vault up, so that its turn can end, and is
/// carried out when there are both.
#[test]
fn a_turn_is_not_kept_for_a_dataset_that_cannot_be_had() {
    let [outer, inner] = [Turns::new(), Turns::new()];
    let runners = [runner(&outer), runner(&inner)];
    let (done, all_done) = mpsc::channel();
    let number = outer.begin(Mode::Change);
    run_in_both(outer.clone(), inner.clone(), Need::CHANGE, Box::new(move |_| done.send(()).unwrap()));
    outer.recall(number);
    outer.stop_requests();
    end(&outer);
    assert!(all_done.try_recv().is_err());
    assert_eq!((outer.state.lock().wanted(), inner.wanted()), (None, Some(Mode::Change)));
    // It waits for the outer one first.
    inner.begin(Mode::Change);
    assert_eq!(outer.wanted(), Some(Mode::Change));
    outer.begin(Mode::Change);
    all_done.recv().unwrap();
    outer.over();
    inner.over();
    runners.into_iter().for_each(|runner| runner.join().unwrap());
}

/// A read of pages whose file was open for writing when it came, and is not any more: nothing tells the turns.
#[test]
fn a_read_that_needs_less_by_now_is_carried_out() {
    let turns = Turns::new();
    let runner = runner(&turns);
    let is_written = Arc::new(AtomicBool::new(true));
    let (limit, (done, is_done)) = (Duration::from_secs(60), mpsc::channel());
    let reads = |done: mpsc::Sender<()>| {
        let asked = is_written.clone();
        let is_written = move || asked.load(Ordering::SeqCst);
        turns.read_pages(1, &(0..4096), is_written, move |turn| {
            drop(turn);
            done.send(()).unwrap();
        });
    };
    turns.begin(Mode::Look);
    reads(done.clone());
    is_written.store(false, Ordering::SeqCst);
    let until = Instant::now() + limit;
    while is_done.try_recv().is_err() {
        assert_eq!(turns.wait_for_end(Duration::from_millis(1)), None);
        assert!(Instant::now() < until, "it is carried out");
    }
    // While the turn ends: it was waiting when the turn began.
    is_written.store(true, Ordering::SeqCst);
    turns.stop_requests();
    turns.end(|_, _| {});
    reads(done);
    turns.begin(Mode::Look);
    let looks = turns.enter(Need::LOOK).unwrap();
    let ends = spawn({
        let turns = turns.clone();
        move || {
            turns.stop_requests();
            turns.end(|_, _| {});
        }
    });
    std::thread::sleep(Duration::from_millis(50));
    is_written.store(false, Ordering::SeqCst);
    drop(looks);
    is_done.recv_timeout(limit).unwrap();
    ends.join().unwrap();
    turns.over();
    runner.join().unwrap();
}

/// Threads that write pages back on and on, until those are dropped.
#[test]
fn who_writes_pages_on_and_on_holds_no_turn_up() {
    let turns = Turns::new();
    turns.begin(Mode::Change);
    drop(page(&turns, 1, true));
    let is_dropped = Arc::new(AtomicBool::new(false));
    let (one, other) = (turns.enter(Need::WRITE_PAGES).unwrap(), turns.clone());
    let dropped = is_dropped.clone();
    let writes = spawn(move || {
        let mut last = one;
        while !dropped.load(Ordering::SeqCst) {
            // The next one begins before the last one ends.
            last = other.enter(Need::WRITE_PAGES).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(last);
    });
    turns.stop_requests();
    let begun = Instant::now();
    // Not before reads are held back.
    turns.end(|_, _| match begun.elapsed() > 2 * SHARE {
        true => is_dropped.store(true, Ordering::SeqCst),
        false => drop(page(&turns, 1, true)),
    });
    writes.join().unwrap();
}
