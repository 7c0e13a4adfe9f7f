//! `lamassu key backup|restore`: copies of a header, which a vault cannot be read without.
//!
//! A restore puts nothing in place that has not been proven: the backup opens with the key, its MAC verifies, its keys
//! open the vault's root directory, and no epoch is lost that the header in place is known to have.

use crate::fault::{Context, Fault, Result};
use crate::keys::{self, KeyArg, SourceText};
use crate::open;
use crate::output::Ui;
use lamassu_format::header::{Header, VaultHeader, ZoneFile};
use lamassu_format::name;
use lamassu_host::Error as HostError;
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, FileError, KeyError, Material, Purpose, Unlocked, Update, header_file};
use lamassu_vault::{ROOT, Vault, VaultError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const BACKUP_EXAMPLES: &str = "\
Examples:
  lamassu key backup /srv/store/vault /mnt/usb/vault.header
  lamassu key backup -k raw:file:/root/k /srv/store/vault vault.header      and verify it
Whoever has the copy and a key of one of its slots can open the vault, also after the slot was removed.";

const RESTORE_EXAMPLES: &str = "\
Examples:
  lamassu key restore /mnt/usb/vault.header /srv/store/vault
Slots removed since the backup was made come back, and slots added since are gone.";

/// Options of `key backup`.
#[derive(clap::Args, Debug)]
#[command(after_help = BACKUP_EXAMPLES)]
pub struct Backup {
    /// Verify the header with this key before it is copied
    #[arg(short, long, value_name = "SOURCE")]
    key: Option<SourceText>,
    /// The vault, or a zone file
    pub(super) dir: PathBuf,
    /// The file to make, readable by its owner alone; must not exist
    file: PathBuf,
}

/// Options of `key restore`.
#[derive(clap::Args, Debug)]
#[command(after_help = RESTORE_EXAMPLES, after_long_help = help())]
pub struct Restore {
    #[command(flatten)]
    key: KeyArg,
    /// Replace a header of another vault, or one with newer keys, too
    #[arg(long)]
    force: bool,
    /// What `key backup` made, or any copy of the header
    file: PathBuf,
    /// The vault, or the zone file to be put back; for that LAMASSU_ZONE_KEY stands in for --key
    dir: PathBuf,
}

fn help() -> String {
    super::help(RESTORE_EXAMPLES)
}

/// Copies a header that parses and, where a key is given, is authentic.
pub fn backup<H: Header>(file: &Path, ui: &Ui, args: &Backup) -> Result<()> {
    let bytes = header_file::read_bytes(file)?;
    let header = H::parse(&bytes).map_err(|source| FileError::Header { path: file.into(), source })?;
    let unlocked = match &args.key {
        Some(source) => Some(keys::unlock(ui, &header, &source.parse("--key")?, &args.dir)?),
        None => {
            ui.detail("the header was parsed, not verified: give --key for that");
            None
        }
    };
    header_file::write_new(&args.file, &bytes)?;
    match unlocked {
        Some(keys) if H::IS_VAULT => put_on_record(ui, args, &keys, &header, &bytes),
        Some(_) => {}
        None if H::IS_VAULT => ui.note("without --key the copy is not on record in the vault's history"),
        None => {}
    }
    ui.note(format_args!(
        "copied the header with {} key slots to {}; keep it apart from the vault, and make a new one after every change of slots",
        header.keys().slots.len(),
        args.file.display()
    ));
    Ok(())
}

/// Whoever destroys the keys one day wants to know which copies are left. A store that cannot be written to makes the
/// copy no worse.
fn put_on_record<H: Header>(ui: &Ui, args: &Backup, keys: &Unlocked, header: &H, bytes: &[u8]) {
    let file = std::path::absolute(&args.file).unwrap_or_else(|_| args.file.clone());
    let digest = crate::text::hex(&lamassu_crypto::wrap::sha256(bytes));
    let event =
        Event::new(EventKind::BackedUp).slot(keys.slot()).detail("file", file.display()).detail("sha256", digest);
    let slots = header.keys().slots.iter().map(|s| s.id.to_string()).collect::<Vec<_>>().join(", ");
    let event = event.detail("slots", slots);
    if let Err(error) = keys.history(&args.dir, header).and_then(|mut history| history.note(event)) {
        ui.warn(format_args!("the copy is not on record: {error}"));
    }
}

/// Which kind of header the backup is decides what DIR is.
pub fn restore(ui: &Ui, args: &Restore) -> Result<()> {
    match header_file::read::<VaultHeader>(&args.file) {
        Ok(header) => restore_vault(ui, args, &header),
        Err(FileError::Header { source: lamassu_format::header::HeaderError::WrongFormat { .. }, path: _ }) => {
            let header: ZoneFile = header_file::read(&args.file)?;
            // A zone file is the user's own: it may be a link to where it lies.
            let place = std::fs::canonicalize(&args.dir).unwrap_or_else(|_| args.dir.clone());
            put(ui, args, &place, &header, |_| Ok(()), |_, _, _| Ok(()))
        }
        Err(error) => Err(error.into()),
    }
}

fn restore_vault(ui: &Ui, args: &Restore, header: &VaultHeader) -> Result<()> {
    let backend = Arc::new(open::backend(&args.dir)?);
    let belongs = |keys: &Unlocked| {
        let ring = keys.key_ring(header.suite())?;
        // The root directory's record is read when it is opened.
        let opened = Vault::open(backend, header, ring, open::options(true));
        match opened.and_then(|vault| vault.open_dir(ROOT)) {
            Ok(_) => Ok(()),
            Err(VaultError::Damaged { .. } | VaultError::NotFound) if args.force => {
                ui.warn("the root directory does not open with this header's keys");
                Ok(())
            }
            Err(VaultError::Damaged { .. } | VaultError::NotFound) => {
                Err(Fault::OtherVault { file: args.file.clone(), dir: args.dir.clone() }.into())
            }
            Err(error) => Err(error).with_context(|| format!("cannot open the vault in {}", args.dir.display())),
        }
    };
    // That there may be datasets is never taken back (§4c): without it their directories would be taken for damaged
    // ones of the vault's own.
    let carry = |keys: &Unlocked, header: &mut VaultHeader, now: Option<&VaultHeader>| {
        carry_anchored(ui, args, keys, header, now)?;
        if header.has_datasets() {
            return Ok(());
        }
        let has_some = match now {
            // Whoever forces a restore may be mending an earlier one that could not say so.
            Some(now) if now.has_datasets() || !args.force => now.has_datasets(),
            Some(_) | None => lamassu_vault::has_dataset(&args.dir)?,
        };
        if !has_some {
            return Ok(());
        }
        match keys.allow_datasets(header) {
            Ok(_) => ui.note("the copy is from before the first dataset; the restored header says that there are some"),
            // A use-only slot cannot sign.
            Err(KeyError::NotAdministrator { slot: _ }) if args.force => {
                ui.warn("the copy is from before the first dataset: datasets are not found, and `check --repair` would move what they hold to lamassu.lost, until `key restore --force` is run with an administrator's slot");
            }
            Err(error) => {
                return Err(error).context(
                    "the copy is from before the first dataset, and has to be signed anew to say that there are some",
                );
            }
        }
        Ok(())
    };
    put(ui, args, &args.dir.join(name::HEADER), header, belongs, carry)
}

/// Nor is that something outside the store knows the newest state: without it older ones would pass for the newest.
fn carry_anchored(
    ui: &Ui,
    args: &Restore,
    keys: &Unlocked,
    header: &mut VaultHeader,
    now: Option<&VaultHeader>,
) -> Result<()> {
    let known = ui.policy.anchors.file_of(&header.id())?;
    let is_anchored = now.is_some_and(VaultHeader::is_anchored) || known.is_some_and(|file| file.exists());
    match header.is_anchored() || !is_anchored {
        true => Ok(()),
        false => match keys.set_anchored(header) {
            Ok(_) => Ok(()),
            Err(KeyError::NotAdministrator { slot: _ }) if args.force => {
                ui.warn("the copy is from before the vault was anchored, and cannot be signed anew to say that it is: run `lamassu anchor accept` with an administrator's slot");
                Ok(())
            }
            Err(error) => {
                Err(error).context("the copy is from before the vault was anchored, and has to be signed anew")
            }
        },
    }
}

fn put<H: Header + Clone>(
    ui: &Ui,
    args: &Restore,
    place: &Path,
    header: &H,
    belongs: impl FnOnce(&Unlocked) -> Result<()>,
    carry: impl FnOnce(&Unlocked, &mut H, Option<&H>) -> Result<()>,
) -> Result<()> {
    let source = args.key.source_for::<H>()?;
    if is_working_copy(&args.file, place) {
        return Err(HostError::Usage(
            "FILE is a working copy that the restore would overwrite: copy it, and restore the copy",
        )
        .into());
    }
    // What an administrator puts back is what is to be: not made of what is there.
    let update = Update::begin(place, &ui.policy.witness())?.decided();
    let material = keys::load(ui, &source, &args.file.display().to_string(), Purpose::Unlock)?;
    let unlocked =
        keys::try_slots(ui, header, &material, args.key.slot()).with_context(|| format!("{}", args.file.display()))?;
    keys::check_pinned(ui, header).with_context(|| format!("{}", args.file.display()))?;
    belongs(&unlocked)?;
    let mut now = None;
    match update.read::<H>() {
        Ok(found) => {
            // What the header in place says is believed where the key opens it.
            let is_authentic = compare(ui, args, &found, header, &unlocked, &material)?;
            now = is_authentic.then_some(found);
        }
        // What cannot be read is what a restore is for.
        Err(FileError::Missing { .. } | FileError::Header { .. }) => {}
        // Nor may a block that the store cannot read any more keep the good copy out.
        Err(error @ FileError::Read { .. }) => {
            ui.warn(format_args!("{error}; keys the header in place may have gained since the backup are not known"));
        }
        Err(
            error @ (FileError::Exists { .. }
            | FileError::NotAFile { .. }
            | FileError::Busy { .. }
            | FileError::Witness { .. }
            | FileError::Write { .. }),
        ) => {
            return Err(error.into());
        }
    }
    let mut header = header.clone();
    carry(&unlocked, &mut header, now.as_ref())?;
    let replaced = keep_replaced(place)?;
    let event = Event::new(EventKind::Restored).detail("from", args.file.display());
    let there = place.symlink_metadata().is_ok();
    match unlocked.may_change(&header) {
        Ok(()) if there => update.record(&mut header, &unlocked, &[event])?,
        Ok(()) => update.create_recorded(&mut header, &unlocked, &[event])?,
        // A use-only slot cannot sign, and need not: the backup is put back as it was signed.
        Err(KeyError::NotAdministrator { slot }) => {
            if there {
                update.replace(&header)?
            } else {
                update.create(&header)?
            }
            let event = event.detail("with_use_only_slot", slot);
            if let Err(error) = unlocked.history(&args.dir, &header).and_then(|mut history| history.note(event)) {
                ui.warn(format_args!("the history does not record the restore: {error}"));
            }
        }
        Err(error) => return Err(error.into()),
    }
    ui.note(format_args!("restored the header of {}", args.dir.display()));
    if let Some(kept) = replaced {
        ui.note(format_args!("what was there is kept as {}; remove it when all is well", kept.display()));
    }
    Ok(())
}

/// The header in place and the one to be restored, where both can be read. Returns whether the former is that vault's,
/// and opens.
fn compare<H: Header>(
    ui: &Ui,
    args: &Restore,
    now: &H,
    then: &H,
    restored: &Unlocked,
    material: &Material,
) -> Result<bool> {
    if now.keys().id != then.keys().id {
        if args.force {
            return Ok(false);
        }
        return Err(Fault::OtherId { file: args.file.clone(), dir: args.dir.clone() }.into());
    }
    let present = keys::try_slots(ui, now, material, None);
    let opens = present.is_ok();
    match present {
        Ok(present) if !args.force && has_more(&present, restored) => {
            return Err(Fault::NewerKeys { file: args.file.clone(), dir: args.dir.clone() }.into());
        }
        // Slots that were removed would come back, and that is an administrator's to decide while the header in place
        // is whole.
        Ok(present) => present.may_change(now)?,
        Err(error) => ui.warn(format_args!(
            "the header in place does not open with this key ({error}), so keys it may have gained since the backup are not known"
        )),
    }
    let ids = |header: &H| header.keys().slots.iter().map(|s| s.id).collect::<Vec<_>>();
    let (now, then) = (ids(now), ids(then));
    let listed = |ids: Vec<u32>| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let back: Vec<u32> = then.iter().filter(|id| !now.contains(id)).copied().collect();
    let gone: Vec<u32> = now.iter().filter(|id| !then.contains(id)).copied().collect();
    if !back.is_empty() {
        ui.warn(format_args!("slots removed since the backup open the vault again: {}", listed(back)));
    }
    if !gone.is_empty() {
        ui.warn(format_args!("slots added since the backup are gone: {}", listed(gone)));
    }
    Ok(opens)
}

/// Whether `present` has a key that `restored` lacks: data written under it could not be read again. Two rotations of
/// one backup give epochs of the same number and other keys, so keys are compared, not numbers.
fn has_more(present: &Unlocked, restored: &Unlocked) -> bool {
    let same = |a: &lamassu_keys::Epoch, b: &lamassu_keys::Epoch| {
        lamassu_crypto::wrap::equal(a.key().expose(), b.key().expose())
    };
    let lacks =
        |had: &[lamassu_keys::Epoch], has: &[lamassu_keys::Epoch]| had.iter().any(|e| !has.iter().any(|r| same(e, r)));
    let (p, r) = (present.keychain(), restored.keychain());
    lacks(p.inner(), r.inner()) || lacks(p.outer(), r.outer())
}

fn beside(place: &Path, suffix: &str) -> PathBuf {
    let mut name = place.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Whether `file` has the name under which the new header is made, or one of those under which the old is kept, where
/// an earlier one is overwritten.
fn is_working_copy(file: &Path, place: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |path: &Path| path.metadata().map(|m| (m.dev(), m.ino())).ok();
    let suffixes = [".new", ".replacing", ".replaced"];
    suffixes.iter().any(|suffix| id(file).is_some() && id(file) == id(&beside(place, suffix)))
}

/// A second name for what is about to be replaced, damaged or not. No link is followed: the store below may put one in
/// the way.
fn keep_replaced(place: &Path) -> Result<Option<PathBuf>> {
    if place.symlink_metadata().is_err() {
        return Ok(None);
    }
    let (making, kept) = (beside(place, ".replacing"), beside(place, ".replaced"));
    // A run that was cut off has left it: another name of what is in place, or a header that was replaced, or
    // destroyed.
    header_file::erase::replaced(&making)?;
    let failed = |source| FileError::Write { op: "copy", path: place.to_path_buf(), source };
    // A copy, where the store has no links: the damaged one may be all there is of some slot. What cannot be read is
    // not copied.
    match std::fs::hard_link(place, &making).or_else(|_| copy_anew(place, &making)) {
        Err(e) if e.raw_os_error() == Some(libc::EIO) => return Ok(None),
        done => done.map_err(failed)?,
    }
    header_file::erase::replaced(&kept)?;
    std::fs::rename(&making, &kept).map_err(failed)?;
    Ok(Some(kept))
}

fn copy_anew(from: &Path, to: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut from = std::fs::File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(from)?;
    let mut to = std::fs::File::options().write(true).create_new(true).mode(0o600).open(to)?;
    std::io::copy(&mut from, &mut to)?;
    to.sync_all()
}
