//! Slots of a mounted vault, changed by its daemon: no old key is asked for, since the daemon holds the file key. Root and the user who mounted may.

use super::{Add, Change, Remove, check_label, recovery as words};
use crate::fault::Fault;
use crate::keys;
use crate::output::Ui;
use crate::served;
use crate::served::protocol::{Changed, Parcel, Request, Status};
use anyhow::Result;
use data_encoding::HEXLOWER;
use lamassu_crypto::Secret;
use lamassu_keys::{Material, Purpose, Role, SlotKind, Terms, cost, recovery};
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
    let id = ask_to_add(mountpoint, secret, args.label.clone(), args)?;
    ui.note(format_args!("added slot {id}"));
    Ok(())
}

fn ask_to_add(mountpoint: &Path, secret: Parcel, label: String, args: &Add) -> Result<u32> {
    let Terms { role, expires } = args.terms.terms(Role::Administrator);
    served::ask(mountpoint, &Request::AddSlot { secret, label, use_only: role == Role::Use, expires })
}

fn add_recovery(ui: &Ui, mountpoint: &Path, args: &Add) -> Result<()> {
    let key = Secret::random()?;
    let (paper, kind) = match args.shares {
        None => (recovery::sheet(&key), SlotKind::Recovery),
        Some(scheme) => {
            let status: Status = served::ask(mountpoint, &Request::Status {})?;
            let id: Option<[u8; 16]> = HEXLOWER.decode(status.vault.as_bytes()).ok().and_then(|id| id.try_into().ok());
            let id = id.ok_or_else(|| Fault::GarbledAnswer { path: mountpoint.into() })?;
            (words::sheets(&key, scheme, &id)?, SlotKind::RecoveryShares)
        }
    };
    let material = Material::Key { kind, key };
    let secret = served::pack(mountpoint, &material, cost::FALLBACK)?;
    let id = ask_to_add(mountpoint, secret, words::label(args), args)?;
    words::say(ui, id, args.shares);
    // Words that nobody has seen open nothing for anybody: the slot goes again.
    words::print(paper.expose(), id, || served::ask::<String>(mountpoint, &Request::RemoveSlot { slot: id }).map(drop))
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
    let Terms { role, expires } = args.terms.terms(Role::Administrator);
    let use_only = role == Role::Use;
    let done: Changed =
        served::ask(mountpoint, &Request::ChangeSlot { secret, slot, label: args.label.clone(), use_only, expires })?;
    ui.note(format_args!("slot {} takes the place of slot {slot}", done.id));
    ui.note(done.removed);
    Ok(())
}

pub fn remove(ui: &Ui, mountpoint: &Path, args: &Remove) -> Result<()> {
    let removed: String = served::ask(mountpoint, &Request::RemoveSlot { slot: args.slot })?;
    ui.note(removed);
    Ok(())
}
