//! The rules for files (`docs/freshness.md`, section 3), played in small against a hostile store.
//!
//! Two files of two pages, one block a page. A writer goes through every order of writes, shrinks, marks, barriers,
//! commits and settling up to a depth, and may end at any step. A write of page 0 in a shrink may fail, done or not. At
//! every step two questions are asked, with the rows and the judge that the program uses:
//!
//! * F3: whatever an honest crash keeps is accepted, and reads as the acknowledged content or one written since;
//! * F1: whatever the store puts together from everything it ever saw, of both files, reads as one of these or is an
//!   error.
//!
//! Each rule is left out in turn: one of the questions must then have a wrong answer.
use crate::model;

use model::{Explored, Left, Lie, explore};

/// Steps of the writer.
const DEPTH: usize = 12;

#[test]
fn the_rules_hold() {
    let Explored { states, lie } = explore(None, DEPTH);
    assert_eq!(lie, None);
    println!("{states} states");
    assert!(states >= 100_000, "{states} states");
}

fn finds(left: Left, expected: fn(&Lie) -> bool) {
    let found = explore(Some(left), DEPTH).lie;
    assert!(found.as_ref().is_some_and(expected), "{left:?}: {found:?}");
}

#[test]
fn without_a_window_a_crash_is_called_stale() {
    finds(Left::Window, |lie| matches!(lie, Lie::FalseAlarm { .. }));
}

#[test]
fn without_held_records_a_changed_pages_neighbours_are_called_stale() {
    finds(Left::Held, |lie| matches!(lie, Lie::FalseAlarm { .. }));
}

#[test]
fn without_a_noted_shrink_the_pages_that_went_are_called_stale() {
    finds(Left::Cut, |lie| matches!(lie, Lie::FalseAlarm { .. }));
}

#[test]
fn a_shrink_that_failed_and_stays_noted_takes_pages_that_were_never_removed() {
    finds(Left::Unmade, |lie| matches!(lie, Lie::FalseAlarm { .. }));
}

#[test]
fn a_shrink_that_was_dropped_and_is_not_noted_again_calls_its_pages_stale() {
    finds(Left::Again, |lie| matches!(lie, Lie::FalseAlarm { .. }));
}

#[test]
fn without_file_ids_files_are_exchanged() {
    finds(Left::FileId, |lie| matches!(lie, Lie::Wrong { .. }));
}

#[test]
fn without_a_barrier_before_the_commit_a_crash_is_called_stale() {
    finds(Left::Barrier, |lie| matches!(lie, Lie::FalseAlarm { .. }));
}

#[test]
fn with_a_mark_after_the_barrier_a_crash_is_called_stale() {
    finds(Left::MarkFirst, |lie| matches!(lie, Lie::FalseAlarm { .. }));
}

#[test]
fn without_covered_pages_the_store_chooses_old_content() {
    finds(Left::Covered, |lie| matches!(lie, Lie::Wrong { .. }));
}

#[test]
fn without_twins_a_settled_small_file_is_called_stale() {
    finds(Left::Twin, |lie| matches!(lie, Lie::FalseAlarm { .. }));
}

#[test]
fn a_file_that_was_changed_since_is_not_clean() {
    finds(Left::NothingAfter, |lie| matches!(lie, Lie::FalseAlarm { .. }));
}

#[test]
fn a_page_written_before_the_barrier_returns_brings_the_choice_back() {
    finds(Left::Between, |lie| matches!(lie, Lie::Wrong { .. }));
}

#[test]
fn a_mark_that_a_shrink_does_not_void_calls_the_pages_that_went_stale() {
    finds(Left::Void, |lie| matches!(lie, Lie::FalseAlarm { .. }));
}

#[test]
fn bits_that_outlive_their_barrier_bring_the_choice_back() {
    finds(Left::Bits, |lie| matches!(lie, Lie::Wrong { .. }));
}

#[test]
fn without_an_order_of_sequences_the_store_brings_back_what_was_acknowledged_over() {
    finds(Left::Sequence, |lie| matches!(lie, Lie::Wrong { .. }));
}
