//! How long a turn goes on although another host wants the vault.

use super::*;
use crate::turns::share::{IDLE, IDLE_KEPT, SHARE, SHARE_MAX};

/// A turn that another host wants goes on while requests follow each other, and until its share of time is over.
#[test]
fn a_wanted_turn_goes_on_while_it_is_used_and_not_longer_than_its_share() {
    let turns = Turns::new();
    let number = turns.begin(Mode::Change);
    let request = turns.enter(Need::LOOK).unwrap();
    let begun = turns.state.lock().begun;
    let goes_on = |number, after| turns.state.lock().goes_on(number, begun + after);
    assert_eq!(goes_on(number, SHARE / 2), Some(IDLE), "a request is under way, however long it takes");
    assert_eq!(goes_on(number, SHARE - IDLE / 2), Some(IDLE / 2), "the share ends first");
    assert_eq!(goes_on(number, SHARE), None, "the share is over");
    assert_eq!(goes_on(number - 1, Duration::ZERO), None, "another turn is meant");
    drop(request);
    turns.state.lock().last_used = begun + SHARE / 2;
    assert_eq!(goes_on(number, SHARE / 2 + IDLE / 4), Some(IDLE - IDLE / 4), "a request has just ended");
    assert_eq!(goes_on(number, SHARE / 2 + IDLE), None, "no program is at work");
    turns.wait_while_used(number);
    assert_eq!(turns.wait_for_end(Duration::ZERO), None, "it ends when it is recalled");
    turns.stop_requests();
    assert_eq!(goes_on(number, Duration::ZERO), None, "it ends already");
}

/// Hosts that work at once have longer turns.
#[test]
fn a_host_that_was_still_at_work_gets_a_longer_turn_for_its_wait() {
    let turns = Turns::new();
    let runner = runner(&turns);
    // The share of the next turn, and whether the kernel may cache from its beginning on.
    let begin_after = |waited: Duration| {
        turns.run(Need::CHANGE, drop);
        let mut state = turns.state.lock();
        state.waiting[0].since -= waited;
        state.share.ended -= waited;
        drop(state);
        let number = turns.begin(Mode::Change);
        let state = turns.state.lock();
        (number, state.share.time, state.keeping == Keeping::Yes)
    };
    let end_turn = |number, is_at_work: bool| {
        let request = turns.enter(Need::CHANGE).filter(|_| is_at_work);
        let late = Instant::now() + SHARE_MAX + IDLE_KEPT;
        assert_eq!(turns.state.lock().goes_on(number, late), None);
        drop(request);
        turns.stop_keeping();
        turns.forgotten();
        turns.stop_requests();
        end(&turns);
    };
    let wait = SHARE * 2;
    let (number, share, keeps) = begin_after(wait);
    assert_eq!((share, keeps), (SHARE, false), "it is the first turn");
    end_turn(number, false);
    let (number, share, keeps) = begin_after(wait);
    assert_eq!((share, keeps), (SHARE, false), "no program was at work");
    end_turn(number, true);
    let (number, share, keeps) = begin_after(wait);
    assert!((2 * wait..SHARE_MAX).contains(&share) && keeps, "{share:?}");
    let begun = turns.state.lock().last_used;
    let goes_on = turns.state.lock().goes_on(number, begun + IDLE);
    assert_eq!(goes_on, Some(IDLE_KEPT - IDLE), "it waits longer for the next request");
    end_turn(number, true);
    let (number, share, keeps) = begin_after(SHARE_MAX);
    assert_eq!((share, keeps), (SHARE_MAX, true));
    end_turn(number, true);
    let (number, share, keeps) = begin_after(Duration::ZERO);
    assert_eq!((share, keeps), (SHARE, false), "the other host had few requests");
    end_turn(number, true);
    turns.over();
    runner.join().unwrap();
}
