//! The damage matrix: everything a store can do to each part of a vault, and what comes of it. `docs/damage.md` holds
//! the table; it must equal what is found here. `LAMASSU_WRITE_DOCS=1 cargo test -p lamassu-vault --test it matrix`
//! writes it.
//!
//! In every case: no panic; no byte is read that was not written there, unless the cell says whose it is; whatever the
//! cell does not name reads as before; `check` names what reads do; after `check --repair` everything the tree shows
//! can be removed.

use crate::common;
use crate::matrix_lab;

use matrix_lab::{Lab, Seen};
use std::fmt::Write as _;

/// What a store does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Flip,
    Zero,
    Truncate,
    Extend,
    SwapBlocks,
    SwapSegments,
    SwapFiles,
    Replay,
    Delete,
}
use Action::*;

const ACTIONS: [(Action, &str); 9] = [
    (Flip, "a bit flipped"),
    (Zero, "zeros written"),
    (Truncate, "cut in the middle"),
    (Extend, "bytes added"),
    (SwapBlocks, "exchanged within its file"),
    (SwapSegments, "two segments exchanged"),
    (SwapFiles, "exchanged with another's"),
    (Replay, "an older state put back"),
    (Delete, "deleted"),
];

/// Where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Header,
    Record,
    Companion,
    LinkRest,
    Page,
    Block,
    Inline,
    End,
}
use Place::*;

const PLACES: [(Place, &str); 8] = [
    (Header, "vault header"),
    (Record, "directory record"),
    (Companion, "companion of a long name"),
    (LinkRest, "companion of a long link"),
    (Page, "metadata page"),
    (Block, "data block"),
    (Inline, "file of one page"),
    (End, "last page, with the tail"),
];

/// Sectors of `big`: 62 blocks a page, one page a segment.
const SEGMENT: u64 = 63;

/// Does it; false where there is nothing to do it to.
fn damage(lab: &Lab, place: Place, action: Action) -> bool {
    match place {
        Header => header(lab, action),
        Record => text(lab, action, &lab.record("dir"), &lab.record("other")),
        Companion => text(lab, action, &lab.companion(&lab.long_path()), &lab.companion(&lab.other_long_path())),
        LinkRest => text(lab, action, &lab.link_rest(0), &lab.link_rest(1)),
        Page => sector(lab, action, SEGMENT, 2 * SEGMENT),
        Block => sector(lab, action, SEGMENT + 6, SEGMENT + 9),
        Inline => inline(lab, action),
        End => end(lab, action),
    }
}

fn header(lab: &Lab, action: Action) -> bool {
    let name = std::path::Path::new(lamassu_format::name::HEADER).to_owned();
    match action {
        // In the label of a slot, so that it is a header still.
        Flip => {
            let mut text = lab.text(&name);
            let at = text.windows(3).position(|w| w == b"one").unwrap();
            text[at] ^= 1;
            lab.put_header(text);
        }
        Replay => lab.put_header(lab.older_header()),
        SwapFiles => lab.put_header(Lab::strange_header()),
        _ => return text(lab, action, &name, &name),
    }
    true
}

/// A short text: a record, a companion, a header.
fn text(lab: &Lab, action: Action, at: &std::path::Path, other: &std::path::Path) -> bool {
    let text = lab.text(at);
    let half = text.len() / 2;
    let changed = match action {
        Flip => [&text[..half], &[text[half] ^ 1], &text[half + 1..]].concat(),
        Zero => vec![0; text.len()],
        Truncate => text[..half].to_vec(),
        Extend => [&text[..], b"AAAA"].concat(),
        SwapFiles => {
            let theirs = lab.text(other);
            lab.put_text(other, &text);
            theirs
        }
        Replay => lab.older_text(at),
        Delete => {
            lab.delete(at);
            return true;
        }
        SwapBlocks | SwapSegments => return false,
    };
    lab.put_text(at, &changed);
    true
}

/// A sector of `big`, and another one.
fn sector(lab: &Lab, action: Action, at: u64, other: u64) -> bool {
    let big = lab.stored("big");
    match action {
        Flip => lab.flip(&big, at * 4096 + 2000),
        Zero => lab.write(&big, at, &[0; 4096]),
        Truncate => lab.cut(&big, at * 4096 + 2048),
        Extend => lab.insert(&big, at, &[0x55; 4096]),
        SwapBlocks => lab.swap((&big, at), (&big, other), 1),
        SwapSegments if at == SEGMENT => lab.swap((&big, 0), (&big, SEGMENT), SEGMENT),
        SwapSegments => return false,
        SwapFiles => lab.swap((&big, at), (&lab.stored("twin"), at), 1),
        Replay => lab.write(&big, at, &lab.older_sectors(&big, at, 1)),
        Delete => lab.punch(&big, at),
    }
    true
}

/// The one page of `small`.
fn inline(lab: &Lab, action: Action) -> bool {
    let small = lab.stored("small");
    match action {
        Flip => lab.flip(&small, 4090),
        Zero => lab.write(&small, 0, &[0; 4096]),
        Truncate => lab.cut(&small, 2048),
        Extend => lab.insert(&small, 1, &[0x55; 4096]),
        SwapFiles => lab.swap((&small, 0), (&lab.stored("little"), 0), 1),
        Replay => lab.write(&small, 0, &lab.older_sectors(&small, 0, 1)),
        Delete => lab.delete(&small),
        SwapBlocks | SwapSegments => return false,
    }
    true
}

/// The last page of `big`, which ends the file, or the file's end.
fn end(lab: &Lab, action: Action) -> bool {
    let big = lab.stored("big");
    let at = 2 * SEGMENT;
    match action {
        Extend => lab.insert(&big, at + 6, &[0x55; 4096]),
        Truncate => lab.cut(&big, (at + 3) * 4096 + 100),
        SwapBlocks => lab.swap((&big, at), (&big, 0), 1),
        SwapSegments => lab.swap((&big, SEGMENT), (&big, at), 6),
        SwapFiles => lab.swap_whole(&big, &lab.stored("twin")),
        Replay => lab.replay_whole(&big),
        Delete => lab.cut(&big, at * 4096),
        Flip | Zero => return sector(lab, action, at, 0),
    }
    true
}

/// A cell of the table.
fn cell(place: Place, action: Action) -> String {
    let lab = Lab::new(false);
    if !damage(&lab, place, action) {
        return "–".into();
    }
    let vault = match lab.open() {
        Ok(vault) => vault,
        Err(why) => return format!("refused: {why}"),
    };
    eprintln!("{place:?}, {action:?}"); // what fails is the last of these
    let seen = Seen::of(&lab, &vault);
    let found = vault.check(&[], false, &common::Quiet).unwrap();
    seen.agrees_with(&found);
    let repaired = vault.check(&[], true, &common::Quiet).unwrap();
    let after = vault.check(&[], false, &common::Quiet).unwrap();
    assert!(after.problems.len() <= repaired.problems.len());
    seen.is_kept(&Seen::of(&lab, &vault));
    let mut text = match place {
        Header => "**older keys open it**".to_owned(),
        _ => seen.told(&found),
    };
    if found.is_damaged() && !after.is_damaged() {
        text.push_str(" ↦");
    }
    lab.remove_everything(&vault);
    text
}

/// The same of a vault with an anchor. Nothing reads as what it is not.
fn anchored_cell(place: Place, action: Action) -> String {
    let lab = Lab::new(true);
    if place == Header || !damage(&lab, place, action) {
        return "–".into();
    }
    let scrubbed = lab.scrubbed();
    let vault = lab.open().unwrap();
    eprintln!("anchored, {place:?}, {action:?}");
    let seen = Seen::of(&lab, &vault);
    assert!(!seen.is_silent(), "{seen:?}");
    let found = vault.check(&[], false, &common::Quiet).unwrap();
    seen.agrees_with(&found);
    vault.check(&[], true, &common::Quiet).unwrap();
    // A repair accepts nothing.
    let after = Seen::of(&lab, &vault);
    assert!(!after.is_silent(), "{after:?}");
    seen.is_kept(&after);
    let mut text = seen.told(&found);
    if found.is_damaged() && !vault.check(&[], false, &common::Quiet).unwrap().is_damaged() {
        text.push_str(" ↦");
    }
    if !scrubbed.is_empty() {
        write!(text, "; scrub {}", common::words(scrubbed)).unwrap();
    }
    text
}

fn table(places: &[(Place, &str)], cell: fn(Place, Action) -> String) -> String {
    let mut out = String::from("| |");
    places.iter().for_each(|(_, name)| write!(out, " {name} |").unwrap());
    out.push_str("\n|---|");
    places.iter().for_each(|_| out.push_str("---|"));
    for (action, name) in ACTIONS {
        write!(out, "\n| **{name}** |").unwrap();
        places.iter().for_each(|(place, _)| write!(out, " {} |", cell(*place, action)).unwrap());
    }
    out.push('\n');
    out
}

#[test]
fn the_documented_matrices_are_what_is_found() {
    // In one test: both are of one page.
    common::is_documented("matrix", &table(&PLACES, cell));
    common::is_documented("anchored matrix", &table(&PLACES[1..], anchored_cell));
}
