//! A store that means ill, at random (`docs/freshness.md`, F1): a vault lives, its store keeps all that it ever saw,
//! and at any moment, with a crash or without, it shows an arbitrary mixture of that: files, directories, links,
//! records, attributes, pages and blocks of earlier times, each for itself, moved, exchanged, copied, cut and removed.
//! The vault is opened over that, for reading and for writing, and all of it is looked at. What is shown without an
//! error is something that was acknowledged last, or that was in flight.
//!
//! The teeth: without an anchor, and with rules left out of what the anchor says, the same store is believed.
//! `LAMASSU_MODEL_SCALE` multiplies the work (`make torture`), `LAMASSU_MODEL_SEED` begins elsewhere.
use crate::common;

mod oracle;
mod plan;
mod store;
mod walk;

use common::anchored::Watched;
use common::{Quiet, Recipe};
use lamassu_anchor::row::{Content, Sealed};
use lamassu_anchor::table::{Change, MemoryTable, Space, Table};
use lamassu_anchor::{Digest, Row};
use lamassu_format::Codec;
use lamassu_store::backend::{CrashBackend, CrashSim, MemoryBackend};
use lamassu_vault::Vault;
use oracle::{Ack, History, Lie, Moment, State, View};
use plan::{Lived, Place, live};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use store::{Dice, mix};
use walk::{Seen, Tally, do_again, walk};

/// What is left out of the rules, to show that the adversary finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// All of them: there is no anchor.
    Anchor,
    /// A4: an fsync returns before the anchor has what it acknowledges.
    Commit,
    /// J3: pages in flight are judged without their sequences.
    Sequences,
    /// S2: what was replaced stays current.
    End,
}

/// What came of it.
#[derive(Debug, Default)]
struct Done {
    /// Mixtures that were shown.
    states: u64,
    /// Vaults that could not be opened over one.
    unopened: u64,
    /// Mixtures over which a writer found nothing amiss, and which were mixed once more behind it.
    twice: u64,
    /// Mixtures of which a check found nothing, although something was refused.
    silent: u64,
    tally: Tally,
    /// Mixtures that were believed.
    lies: BTreeMap<Lie, u64>,
    /// The first of them.
    first: Option<String>,
}

impl Done {
    fn note(&mut self, found: Found, told: impl FnOnce(String) -> String) {
        if let Err((lie, what)) = found {
            *self.lies.entry(lie).or_default() += 1;
            self.first.get_or_insert_with(|| told(format!("{lie:?}: {what}")));
        }
    }
}

/// A life over a store that records, and all that its store saw.
struct Life {
    recipe: Recipe,
    lived: Lived,
    sim: CrashSim,
    /// By how many records there were: what an earlier life's store saw comes first.
    seen: Vec<(usize, Arc<MemoryBackend>)>,
    /// By how many records there were: each commit.
    anchors: Vec<(usize, MemoryTable)>,
    is_anchored: bool,
}

impl Life {
    fn new(recipe: Recipe, is_anchored: bool, dice: &mut Dice) -> Life {
        Life::over(&MemoryBackend::new(), MemoryTable::default(), Vec::new(), recipe, is_anchored, dice)
    }

    fn over(
        base: &MemoryBackend,
        table: MemoryTable,
        mut seen: Vec<(usize, Arc<MemoryBackend>)>,
        recipe: Recipe,
        is_anchored: bool,
        dice: &mut Dice,
    ) -> Life {
        let crash = Arc::new(CrashBackend::over(base, recipe.block_size.into()));
        let watched = Watched::of(table.clone(), &crash);
        watched.states.lock().push((0, table));
        let table: Option<Arc<dyn Table>> = if is_anchored { Some(watched.clone()) } else { None };
        let place = Place { recipe, backend: crash.clone(), table, has_blocks: dice.roll(2) == 0 };
        let mut moment = || Moment { record: crash.position(), commit: watched.states.lock().len() };
        let steps = 16 + dice.roll(24);
        let lived = live(&place, dice, steps, &mut moment);
        let (sim, anchors) = (CrashSim::new(crash.log()), watched.states.lock().clone());
        seen.iter_mut().for_each(|(at, _)| *at = 0);
        seen.extend(sim.prefixes().map(|(at, store)| (at, Arc::new(store))));
        Life { recipe, lived, sim, seen, anchors, is_anchored }
    }

    /// A life behind a crash of this one, over an honest store.
    fn next(&self, dice: &mut Dice) -> Life {
        let at = self.moment(dice);
        let left = self.honest(at, dice);
        let seen = self.seen_until(at.record).to_vec();
        Life::over(&left, self.table(at), seen, self.recipe, self.is_anchored, dice)
    }

    /// A moment at which it may crash.
    fn moment(&self, dice: &mut Dice) -> Moment {
        let begin = self.lived.history.begin();
        let record = begin.record + dice.roll(self.sim.log().records().len() - begin.record + 1);
        let least = self.anchors.partition_point(|(at, _)| *at < record).max(begin.commit);
        let most = self.anchors.partition_point(|(at, _)| *at <= record);
        Moment { record, commit: least + dice.roll(most - least + 1) }
    }

    /// What an honest store may have after a crash.
    fn honest(&self, at: Moment, dice: &mut Dice) -> MemoryBackend {
        match dice.roll(3) {
            0 => self.sim.at(at.record).random_state(dice.roll(1 << 20) as u64),
            1 => self.sim.at(at.record).least_state(),
            _ => self.sim.prefix(at.record),
        }
    }

    fn table(&self, at: Moment) -> MemoryTable {
        self.anchors[at.commit - 1].1.clone()
    }

    fn seen_until(&self, record: usize) -> &[(usize, Arc<MemoryBackend>)] {
        &self.seen[..self.seen.partition_point(|(at, _)| *at <= record)]
    }

    /// What the anchor says, with a rule left out.
    fn table_without(&self, without: Without, at: Moment, dice: &mut Dice) -> MemoryTable {
        match without {
            Without::Nothing | Without::Anchor => self.table(at),
            Without::Commit => {
                let first = self.lived.history.begin().commit;
                let late = at.commit.saturating_sub(1 + dice.roll(4)).max(first.min(at.commit));
                self.table(Moment { commit: late, ..at })
            }
            Without::Sequences => edited(self.table(at), |_, row| {
                let Content::File(file) = &mut row.content else { return };
                file.open.iter_mut().flat_map(|open| &mut open.windows).for_each(|window| window.covered = 0);
            }),
            Without::End => {
                let before = self.table(Moment { commit: 1 + dice.roll(at.commit), ..at });
                edited(self.table(at), |key, row| {
                    let older = before.get(Space::Objects, key).unwrap().map(|row| Row::decode(&row).unwrap());
                    let older = older.map_or(Sealed::Nothing, |row| row.attributes);
                    row.attributes = match (older, row.attributes) {
                        (Sealed::Is(old), Sealed::Is(new)) if old != new => Sealed::Becomes { old, new },
                        (Sealed::Nothing, Sealed::Is(new)) => Sealed::Becomes { old: Digest::NONE, new },
                        (_, now) => now,
                    };
                })
            }
        }
    }
}

/// A table with other rows.
fn edited(table: MemoryTable, edit: impl Fn(&[u8], &mut Row)) -> MemoryTable {
    let mut changes = Vec::new();
    table
        .scan(Space::Objects, &[], &mut |key, row| {
            let mut row = Row::decode(row).unwrap();
            edit(key, &mut row);
            changes.push(Change { space: Space::Objects, key: key.to_vec(), value: Some(row.encode()) });
            ControlFlow::Continue(())
        })
        .unwrap();
    table.commit(&changes).unwrap();
    table
}

/// What is wrong, and where.
type Found<T = ()> = std::result::Result<T, (Lie, String)>;

/// A vault that was looked at.
struct Looked {
    vault: Vault,
    seen: Option<Seen>,
    /// What it showed, where it refused nothing.
    state: Option<State>,
}

/// Looks at all that a vault shows. `None`: it could not be opened.
fn look(place: &Place, read_only: bool, view: View<'_>, done: &mut Done) -> Found<Option<Looked>> {
    let Ok(vault) = place.open(read_only) else {
        done.unopened += 1;
        return Ok(None);
    };
    let refusals = done.tally.refusals;
    let seen = walk(&vault, &mut done.tally);
    let (seen, mut state) = (seen.ok(), None);
    if let Some(seen) = &seen {
        view.judge(seen)?;
        state = (done.tally.refusals == refusals).then(|| State::apart(seen));
    }
    Ok(Some(Looked { vault, seen, state }))
}

/// Has the store of a life show mixtures, and looks at each.
fn attack(life: &Life, without: Without, count: usize, dice: &mut Dice, done: &mut Done) {
    let end = Moment { record: life.sim.log().records().len(), commit: life.anchors.len() };
    for number in 0..count {
        let history = &life.lived.history;
        let (at, view, store) = match life.lived.is_closed && dice.roll(3) == 0 {
            true => (end, history.newest(), life.sim.prefix(end.record)),
            false => {
                let at = life.moment(dice);
                (at, history.crashed(at), life.honest(at, dice))
            }
        };
        let mut seen: Vec<_> = life.seen_until(at.record).iter().map(|(_, store)| store.clone()).collect();
        let how = mix(&store, &seen, dice);
        let table = life.table_without(without, at, dice);
        done.states += 1;
        let found = show(life, (store, table), view, &mut seen, dice, done);
        let steps = &life.lived.steps;
        done.note(found, |lie| format!("mixture {number} at {at:?} of {end:?}: {lie}\n{how:#?}\n{steps:#?}"));
    }
}

/// Opens a vault over what the store shows: for reading, for writing, and, mixed once more, behind that writer.
fn show(
    life: &Life,
    (store, table): (MemoryBackend, MemoryTable),
    view: View<'_>,
    seen: &mut Vec<Arc<MemoryBackend>>,
    dice: &mut Dice,
    done: &mut Done,
) -> Found {
    let place = |store: &Arc<MemoryBackend>, table: &Arc<MemoryTable>| Place {
        recipe: life.recipe,
        backend: store.clone(),
        table: life.is_anchored.then(|| table.clone() as Arc<dyn Table>),
        has_blocks: false,
    };
    let told = |when: &'static str| move |(lie, what): (Lie, String)| (lie, format!("{when}: {what}"));
    let copy = (Arc::new(store.snapshot()), Arc::new(table.clone()));
    if let Some(Looked { vault, state, .. }) =
        look(&place(&copy.0, &copy.1), true, view, done).map_err(told("read-only"))?
    {
        // F4: what was refused is named.
        if life.is_anchored && state.is_none() && dice.roll(4) == 0 {
            let is_silent = vault.check(&[], false, &Quiet).is_ok_and(|report| report.problems.is_empty());
            if is_silent {
                done.silent += 1;
                println!("a check finds nothing, and {:?} is an error", done.tally.last);
            }
        }
        vault.close().unwrap();
    }
    let (store, table) = (Arc::new(store), Arc::new(table));
    let Some(Looked { vault, seen: shown, state }) =
        look(&place(&store, &table), false, view, done).map_err(told("a writer"))?
    else {
        return Ok(());
    };
    // What it cannot do over such a store it says, and what is shown behind it is looked at all the same.
    let _ = match (dice.roll(4), &shown) {
        (0, _) => vault.maintain(),
        (1, _) => vault.sync_all(),
        (_, Some(shown)) => do_again(&vault, shown, dice),
        _ => Ok(()),
    };
    if let Ok(seen) = walk(&vault, &mut done.tally) {
        view.judge(&seen).map_err(told("a writer, later"))?;
    }
    let is_killed = dice.roll(2) == 0;
    let killed = (Arc::new(store.snapshot()), Arc::new(MemoryTable::clone(&table)));
    let is_closed = vault.close().is_ok();
    drop(vault);
    let (store, table) = if is_killed { killed } else { (store, table) };
    seen.push(Arc::new(store.snapshot()));
    let again = mix(&store, seen, dice);
    // A writer that refused nothing has said what it is from then on.
    let mut chosen = History::default();
    let chosen_state = state.filter(|_| is_closed && !is_killed);
    let when = if chosen_state.is_some() { "behind a writer that refused nothing" } else { "behind a writer" };
    let view = match chosen_state {
        Some(state) => {
            done.twice += 1;
            chosen.push(Moment { record: 0, commit: 0 }, state, Ack::Everything);
            chosen.newest()
        }
        None => view,
    };
    let looked = look(&place(&store, &table), false, view, done).map_err(told(when));
    if let Some(Looked { vault, .. }) =
        looked.map_err(|(lie, what)| (lie, format!("{what}, mixed again: {again:#?}")))?
    {
        let _ = vault.close();
    }
    Ok(())
}

/// The store changes below a vault that is open.
fn attack_live(recipe: Recipe, is_anchored: bool, dice: &mut Dice, done: &mut Done) {
    let store = Arc::new(MemoryBackend::new());
    let table: Option<Arc<dyn Table>> = if is_anchored { Some(Arc::new(MemoryTable::default())) } else { None };
    let place = Place { recipe, backend: store.clone(), table, has_blocks: dice.roll(2) == 0 };
    let mut seen = Vec::new();
    let mut moment = || {
        seen.push(Arc::new(store.snapshot()));
        Moment { record: seen.len(), commit: 0 }
    };
    let steps = 14 + dice.roll(16);
    let Lived { vault, is_closed, history, steps } = live(&place, dice, steps, &mut moment);
    for number in 0..if is_closed { 0 } else { 3 } {
        let how = mix(&store, &seen, dice);
        done.states += 1;
        let look = |done: &mut Done| match walk(&vault, &mut done.tally) {
            Ok(seen) => history.newest().judge(&seen).map(|()| Some(seen)),
            Err(_) => Ok(None),
        };
        let looked = look(done).and_then(|seen| {
            if let Some(seen) = &seen {
                let _ = do_again(&vault, seen, dice);
            }
            look(done).map(drop)
        });
        done.note(looked, |lie| format!("open, mixture {number}: {lie}\n{how:#?}\n{steps:#?}"));
    }
    let _ = vault.close();
}

/// Several lives, and what their stores make of them.
fn try_all(seed: u64, without: Without, done: &mut Done) {
    let is_anchored = without != Without::Anchor;
    let mut dice = Dice(seed);
    // With plain names a crash may exchange two directories in which nothing is recorded: such a vault lives once.
    let is_plain = seed % 4 == 3;
    let recipe = Recipe { reserved: 62, ..if is_plain { Recipe::plain() } else { Recipe::default() } };
    // A quarter of them compresses, in blocks whose ciphertext may end within them.
    let recipe = match seed % 8 {
        2 => Recipe { block_size: 8192, codec: Some(Codec::Lz4), ..recipe },
        7 => Recipe { block_size: 16384, codec: Some(Codec::Zstd(1)), ..recipe },
        _ => recipe,
    };
    let life = Life::new(recipe, is_anchored, &mut dice);
    attack(&life, without, 40, &mut dice, done);
    if !is_plain {
        attack(&life.next(&mut dice), without, 40, &mut dice, done);
    }
    if matches!(without, Without::Nothing | Without::Anchor) {
        (0..3).for_each(|_| attack_live(recipe, is_anchored, &mut dice, done));
    }
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|number| number.parse().ok()).unwrap_or(default)
}

#[test]
fn whatever_the_store_puts_together_is_not_believed() {
    let (first, scale) = (number("LAMASSU_MODEL_SEED", 0), number("LAMASSU_MODEL_SCALE", 1));
    let mut done = Done::default();
    // What was cut off came back (A10).
    let found = (first == 0).then_some(8955);
    for seed in (first..first + 130 * scale).chain(found) {
        try_all(seed, Without::Nothing, &mut done);
        if let Some(lie) = &done.first {
            panic!(
                "seed {seed}: {lie}\nreproduce: LAMASSU_MODEL_SEED={seed} cargo test -p lamassu-vault --test it -- --exact adversary::whatever_the_store_puts_together_is_not_believed"
            );
        }
    }
    let Done { states, unopened, twice, silent, tally, .. } = done;
    println!(
        "adversary: {states} hostile states; {unopened} openings refused, {twice} mixed again, {silent} not named by a check, {tally:?}"
    );
    // Not mended yet: before a file is recovered, a check does not name a first page that nobody synced and that the
    // store has cut in two. A read does.
    assert!(silent <= states / 5_000, "{silent} of {states}");
    // Neither refuses the vault nearly all of it, nor is nearly all of it harmless.
    assert!(states >= 9_500 * scale && twice >= 1_500 * scale, "{states}, {twice}");
    assert!(tally.facts >= 500_000 * scale && tally.refusals >= 60_000 * scale, "{tally:?}");
    assert!(unopened < states, "{unopened} of {states}");
}

/// The teeth: without an anchor every kind of lie is believed, and each rule that is left out lets some through.
#[test]
fn without_a_rule_some_of_it_is_believed() {
    use Lie::{Absence, Attributes, Content, Mode, Name, Owner, Size, Type};
    let cases: [(Without, &[Lie]); 4] = [
        (Without::Anchor, &[Name, Absence, Type, Mode, Owner, Attributes, Size, Content]),
        (Without::Commit, &[Absence, Owner, Attributes, Size]),
        (Without::Sequences, &[Content]),
        (Without::End, &[Attributes]),
    ];
    for (without, least) in cases {
        let mut done = Done::default();
        let missed = |done: &Done| least.iter().filter(|lie| !done.lies.contains_key(lie)).copied().collect::<Vec<_>>();
        for seed in 0..200 {
            try_all(seed, without, &mut done);
            if missed(&done).is_empty() {
                break;
            }
        }
        println!("without {without:?}: of {} mixtures {:?}", done.states, done.lies);
        let missed = missed(&done);
        assert!(missed.is_empty(), "without {without:?} only {:?} was believed, and not {missed:?}", done.lies);
    }
}
