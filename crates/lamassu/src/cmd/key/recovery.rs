//! `lamassu key add --recovery`: a key on paper, whole or in shares.
//!
//! The slot comes first: words that open nothing would be worse than a slot that no key opens. Where the words
//! cannot be shown, the slot goes again.

use super::Add;
use crate::fault::{Fault, Result};
use crate::keys;
use crate::output::{self, Ui};
use lamassu_format::header::Header;
use lamassu_host::slots::SlotChange;
use lamassu_keys::shares::Scheme;
use lamassu_keys::{KeySource, NewSlot, Unlocked, cost, recovery, unix_now};
use std::path::Path;

pub fn add<H: Header + Clone>(file: &Path, ui: &Ui, args: &Add, old: &KeySource) -> Result<()> {
    let change = SlotChange::<H>::begin(&ui.policy, file)?;
    let unlocked = keys::unlock(ui, change.header(), args.key.with(old), &args.dir)?;
    unlocked.may_change(change.header())?;
    let id = change.header().keys().id;
    let (material, paper) = recovery::generate(args.shares.map(|scheme| (scheme, &id)))?;
    let label = label(args);
    let slot = NewSlot { material: &material, cost: cost::FALLBACK, label: &label, created: unix_now() };
    let id = change.add(&unlocked, &slot, args.terms.terms())?;
    say(ui, id, args.shares);
    print(paper.expose(), id, || take_back::<H>(ui, file, &unlocked, id))
}

pub(super) fn label(args: &Add) -> String {
    match (args.label.as_str(), args.shares) {
        ("", None) => "recovery key".into(),
        ("", Some(scheme)) => format!("recovery key, {} of {} shares", scheme.need(), scheme.of()),
        (label, _) => label.into(),
    }
}

pub(super) fn say(ui: &Ui, id: u32, shares: Option<Scheme>) {
    match shares {
        None => {
            ui.note(format_args!(
                "added slot {id}. Write these words down, in order, and keep them apart from the vault: they are not shown again."
            ));
            ui.note("`--key recovery:prompt` asks for them.");
        }
        Some(scheme) => {
            ui.note(format_args!(
                "added slot {id}. Write each share down for another person: they are not shown again. Any {} of them open the vault, fewer tell nothing.",
                scheme.need()
            ));
            ui.note("`--key recovery-shares:prompt` asks for them.");
        }
    }
}

/// Prints the words of slot `id`. If that fails they were not seen: the slot would open nothing and count as a key
/// that is there, so it is removed again.
pub(super) fn print(words: &[u8], id: u32, take_back: impl FnOnce() -> Result<()>) -> Result<()> {
    let Err(error) = output::print_bytes(words) else { return Ok(()) };
    let undone = match take_back() {
        Ok(()) => {
            format!("so slot {id} was removed again; have standard output go to a terminal or a file, and try again")
        }
        Err(e) => format!("and slot {id}, which nothing opens, is still there ({e}): `lamassu key remove DIR {id}`"),
    };
    Err(Fault::Unprinted { reason: error.to_string(), undone }.into())
}

fn take_back<H: Header + Clone>(ui: &Ui, file: &Path, unlocked: &Unlocked, id: u32) -> Result<()> {
    Ok(SlotChange::<H>::begin(&ui.policy, file)?.remove_unshown(unlocked, id)?)
}
