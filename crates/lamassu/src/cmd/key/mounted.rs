//! Slots of a mounted vault, changed by its daemon: no old key is asked for, since the daemon holds the file key. Root
//! and the user who mounted may.

use super::{Add, Change, Remove, recovery as words};
use crate::fault::{Fault, Result};
use crate::keys;
use crate::output::Ui;
use crate::served;
use lamassu_format::header::VaultId;
use lamassu_fuse::control::Asked;
use lamassu_host::Error as HostError;
use lamassu_host::control::protocol::{Changed, Parcel, Request, Status};
use lamassu_host::slots::check_label;
use lamassu_keys::{Purpose, Role, Terms, cost, recovery};

pub fn add(ui: &Ui, at: &Asked, args: &Add) -> Result<()> {
    check_label(&args.label)?;
    if args.recovery {
        return add_recovery(ui, at, args);
    }
    let source = keys::source_or_prompt(args.new.new_key.as_ref(), "--new-key")?;
    let material = keys::load(ui, &source, &at.path().display().to_string(), Purpose::Create)?;
    let cost = args.new.cost.measure(ui, &material);
    let secret = served::pack(at, &material, cost)?;
    let id = ask_to_add(at, secret, args.label.clone(), args)?;
    ui.note(format_args!("added slot {id}"));
    Ok(())
}

fn ask_to_add(at: &Asked, secret: Parcel, label: String, args: &Add) -> Result<u32> {
    let Terms { role, expires } = args.terms.terms();
    served::ask(at, &Request::AddSlot { secret, label, use_only: role == Role::Use, expires })
}

fn vault_id(at: &Asked) -> Result<VaultId> {
    let status: Status = served::ask(at, &Request::Status {})?;
    Ok(VaultId::of_hex(&status.vault).ok_or_else(|| Fault::GarbledAnswer { path: at.path().into() })?)
}

fn add_recovery(ui: &Ui, at: &Asked, args: &Add) -> Result<()> {
    let id = args.shares.map(|_| vault_id(at)).transpose()?;
    let (material, paper) = recovery::generate(args.shares.zip(id.as_ref().map(|id| &id.0)))?;
    let secret = served::pack(at, &material, cost::FALLBACK)?;
    let id = ask_to_add(at, secret, words::label(args), args)?;
    words::say(ui, id, args.shares);
    // Words that were not shown open nothing: the slot goes again.
    words::print(paper.expose(), id, || served::ask::<String>(at, &Request::RemoveSlot { slot: id }).map(drop))
}

pub fn change(ui: &Ui, at: &Asked, args: &Change) -> Result<()> {
    args.label.as_deref().map_or(Ok(()), check_label)?;
    let slot = args.slot.ok_or(HostError::Usage(
        "no old key is asked for on a mount point, so say which slot to replace: --slot N (`lamassu key list` shows them)",
    ))?;
    let source = keys::source_or_prompt(args.new.new_key.as_ref(), "--new-key")?;
    let material = keys::load(ui, &source, &at.path().display().to_string(), Purpose::Create)?;
    let cost = args.new.cost.measure(ui, &material);
    let secret = served::pack(at, &material, cost)?;
    let Terms { role, expires } = args.terms.terms();
    let use_only = role == Role::Use;
    let done: Changed =
        served::ask(at, &Request::ChangeSlot { secret, slot, label: args.label.clone(), use_only, expires })?;
    ui.note(format_args!("slot {} takes the place of slot {slot}", done.id));
    ui.note(done.removed);
    Ok(())
}

pub fn remove(ui: &Ui, at: &Asked, args: &Remove) -> Result<()> {
    let removed: String = served::ask(at, &Request::RemoveSlot { slot: args.slot })?;
    ui.note(removed);
    Ok(())
}
