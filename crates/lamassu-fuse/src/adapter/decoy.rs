//! Keeps the other processor of two busy, so that the daemon and its caller take turns on one.
//!
//! Linux wakes a thread on an idle processor if there is one. A program that waits for each answer and the thread that answers it therefore wake one another across processors, twice a
//! request, and in a virtual machine such a wake-up goes through the hypervisor: it takes several times as long as a small request itself. While a
//! thread spins there is no idle processor, and each is woken where the other has just gone to sleep.
//!
//! That helps one caller and costs several, and whatever else wants the processor. So it is tried, and kept only while more requests come with it than without.

use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Clone, Copy, Default)]
enum Wish {
    #[default]
    Rest,
    Spin,
    End,
}

/// A thread that does nothing, and keeps a processor busy with that.
#[derive(Default)]
pub(super) struct Decoy {
    spins: AtomicBool,
    wish: Mutex<Wish>,
    changed: Condvar,
}

impl Decoy {
    /// The thread's body, until [`Decoy::end`].
    pub fn run(&self) {
        let mut wish = self.wish.lock();
        loop {
            match *wish {
                Wish::Rest => self.changed.wait(&mut wish),
                Wish::End => return,
                Wish::Spin => {
                    drop(wish);
                    while self.spins.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                    wish = self.wish.lock();
                }
            }
        }
    }

    pub fn set(&self, spins: bool) {
        if self.spins.load(Ordering::Relaxed) != spins {
            self.wish(if spins { Wish::Spin } else { Wish::Rest });
        }
    }

    pub fn end(&self) {
        self.wish(Wish::End);
    }

    fn wish(&self, wanted: Wish) {
        let mut wish = self.wish.lock();
        if !matches!(*wish, Wish::End) {
            *wish = wanted;
            self.spins.store(matches!(wanted, Wish::Spin), Ordering::Relaxed);
            self.changed.notify_all();
        }
    }
}

/// Compares rounds with the decoy with rounds without, again and again: what pays depends on who asks for what, and on what else the processors do.
#[derive(Debug, Default)]
pub(super) struct Trial {
    phase: Phase,
    /// Rounds of the phase that are over.
    rounds: u32,
    /// Requests a second, summed over those that count.
    sum: u64,
    /// Trials in a row that came out as the last one did.
    alike: u32,
    paid: bool,
}

#[derive(Clone, Copy, Debug, Default)]
enum Phase {
    /// Without, to find out how many requests come.
    #[default]
    Without,
    /// With, to be compared with that sum.
    With(u64),
    /// As the last trial came out.
    Settled,
}

/// Rounds of each kind in a trial, and how many of them count, the last ones: the kernel leaves threads where they are for a while.
const TRIAL_ROUNDS: u32 = 10;
const COUNTED_ROUNDS: u32 = 5;
/// Rounds between trials after one that came out other than the one before; with each that comes out the same twice as many, so many times: fewer
/// where it pays, since what is asked for may change, and a few rounds without are the smaller loss.
const REST_ROUNDS: u32 = 40;
const DOUBLED: u32 = 4;
const DOUBLED_PAID: u32 = 2;
/// Of the requests that come without, percent that have to come with it.
const PAYS: u64 = 115;

impl Trial {
    /// Whether the next round is to be one with it, after a round in which so many requests came a second.
    pub fn next(&mut self, rate: u64) -> bool {
        self.rounds += 1;
        if self.rounds > TRIAL_ROUNDS - COUNTED_ROUNDS {
            self.sum += rate;
        }
        match self.phase {
            Phase::Without if self.rounds >= TRIAL_ROUNDS => self.enter(Phase::With(self.sum)),
            Phase::With(without) if self.rounds >= TRIAL_ROUNDS => {
                let paid = self.sum * 100 >= without * PAYS;
                let most = if paid { DOUBLED_PAID } else { DOUBLED };
                self.alike = if paid == self.paid { (self.alike + 1).min(most) } else { 0 };
                self.paid = paid;
                self.enter(Phase::Settled);
            }
            Phase::Settled if self.rounds >= REST_ROUNDS << self.alike => self.enter(Phase::Without),
            Phase::Without | Phase::With(_) | Phase::Settled => {}
        }
        self.is_with()
    }

    /// So few requests came that there is nothing to compare.
    pub fn pause(&mut self) {
        if !matches!(self.phase, Phase::Settled) {
            self.enter(Phase::Without);
        }
    }

    fn enter(&mut self, phase: Phase) {
        (self.phase, self.rounds, self.sum) = (phase, 0, 0);
    }

    fn is_with(&self) -> bool {
        match self.phase {
            Phase::Without => false,
            Phase::With(_) => true,
            Phase::Settled => self.paid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Which of so many rounds are with it, where requests come at those rates without and with.
    fn rounds(count: usize, without: u64, with: u64) -> Vec<bool> {
        let (mut trial, mut now) = (Trial::default(), false);
        std::iter::repeat_with(|| {
            now = trial.next(if now { with } else { without });
            now
        })
        .take(count)
        .collect()
    }

    /// Where runs of rounds with it begin.
    fn begins(rounds: &[bool]) -> Vec<usize> {
        (1..rounds.len()).filter(|n| rounds[*n] && !rounds[n - 1]).collect()
    }

    #[test]
    fn what_pays_is_kept_and_compared_again() {
        let rounds = rounds(4000, 10_000, 20_000);
        assert!(rounds.iter().filter(|with| **with).count() > 3500);
        assert!(begins(&rounds).len() > 15);
    }

    #[test]
    fn what_does_not_pay_is_tried_more_and_more_seldom() {
        for with in [0, 5_000, 10_000, 11_000] {
            let rounds = rounds(4000, 10_000, with);
            assert!(rounds.iter().filter(|with| **with).count() < 100);
            let begins = begins(&rounds);
            assert!(begins.len() > 5 && begins.windows(3).all(|b| b[2] - b[1] >= b[1] - b[0]), "{begins:?}");
        }
    }

    #[test]
    fn what_stops_to_pay_is_given_up() {
        let (mut trial, mut now) = (Trial::default(), false);
        let mut go_on = |count: u32, with: u64| {
            for _ in 0..count {
                now = trial.next(if now { with } else { 10_000 });
            }
            now
        };
        go_on(1000, 20_000);
        let longest = (REST_ROUNDS << DOUBLED_PAID) + 2 * TRIAL_ROUNDS;
        assert!(!go_on(longest, 5_000));
    }

    #[test]
    fn a_trial_does_not_span_a_pause() {
        let mut trial = Trial::default();
        let until_tried = |trial: &mut Trial| (1..).find(|_| trial.next(100)).unwrap();
        assert_eq!(until_tried(&mut trial), TRIAL_ROUNDS);
        trial.pause();
        assert_eq!(until_tried(&mut trial), TRIAL_ROUNDS);
    }

    #[test]
    fn it_spins_only_when_told_to() {
        let decoy = Arc::new(Decoy::default());
        let thread = std::thread::spawn({
            let decoy = decoy.clone();
            move || decoy.run()
        });
        for _ in 0..100 {
            decoy.set(true);
            decoy.set(false);
        }
        decoy.set(true);
        decoy.end();
        decoy.set(true);
        thread.join().unwrap();
        assert!(!decoy.spins.load(Ordering::Relaxed));
    }
}
