//! Slots of a mounted vault, changed by its daemon: no old key is asked for, since the daemon holds the file key. Root and the user who mounted may.

use super::{Add, Change, Remove, check_label};
use crate::fault::Fault;
use crate::keys;
use crate::output::{self, Ui};
use crate::served;
use crate::served::protocol::{Changed, Request};
use anyhow::Result;
use lamassu_crypto::Secret;
use lamassu_keys::{Material, Purpose, SlotKind, cost, recovery};
use std::path::Path;

pub fn add(ui: &Ui, mountpoint: &Path, args: &Add) -> Result<()> {
    check_label(&args.label)?;
    if args.recovery {
        return add_recovery(ui, mountpoint, args);
    }
    let source = keys::source_or_prompt(args.new.new_key.as_ref(), "--new-key")?;
    let material = keys::load(ui, &source, &mountpoint.display().to_string(), Purpose::Create)?;
    let cost = args.new.cost.measure(ui, &material);
    let secret = served::pack(mountpoint, &material, cost)?;
    let id: u32 = served::ask(mountpoint, &Request::AddSlot { secret, label: args.label.clone() })?;
    ui.note(format_args!("added slot {id}"));
    Ok(())
}

fn add_recovery(ui: &Ui, mountpoint: &Path, args: &Add) -> Result<()> {
    let label = if args.label.is_empty() { "recovery key" } else { args.label.as_str() };
    let key = Secret::random()?;
    let sheet = recovery::sheet(&key);
    let material = Material::Key { kind: SlotKind::Recovery, key };
    let secret = served::pack(mountpoint, &material, cost::FALLBACK)?;
    let id: u32 = served::ask(mountpoint, &Request::AddSlot { secret, label: label.into() })?;
    super::say_words(ui, id);
    output::print_bytes(sheet.expose())
}

pub fn change(ui: &Ui, mountpoint: &Path, args: &Change) -> Result<()> {
    args.label.as_deref().map_or(Ok(()), check_label)?;
    let slot = args.slot.ok_or(Fault::Usage(
        "no old key is asked for on a mount point, so say which slot to replace: --slot N (`lamassu key list` shows them)",
    ))?;
    let source = keys::source_or_prompt(args.new.new_key.as_ref(), "--new-key")?;
    let material = keys::load(ui, &source, &mountpoint.display().to_string(), Purpose::Create)?;
    let cost = args.new.cost.measure(ui, &material);
    let secret = served::pack(mountpoint, &material, cost)?;
    let done: Changed = served::ask(mountpoint, &Request::ChangeSlot { secret, slot, label: args.label.clone() })?;
    ui.note(format_args!("slot {} takes the place of slot {slot}", done.id));
    ui.note(done.removed);
    Ok(())
}

pub fn remove(ui: &Ui, mountpoint: &Path, args: &Remove) -> Result<()> {
    let removed: String = served::ask(mountpoint, &Request::RemoveSlot { slot: args.slot })?;
    ui.note(removed);
    Ok(())
}
