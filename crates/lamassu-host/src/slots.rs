//! What changes of slots have in common.

use crate::error::At;
use crate::{Error, Place, Result};
use lamassu_crypto::KeyRing;
use lamassu_format::header::{Header, VaultHeader};
use lamassu_format::name;
use lamassu_keys::dataset::{inherits, parent_epoch};
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, Role, Update, Witness, unlock_by_parent};
use std::sync::Arc;

/// A label that can be kept and printed.
///
/// # Errors
/// [`Error::Member`].
pub fn check_label(label: &str) -> Result<()> {
    let is_shown_as_it_is = !label.chars().any(is_unsafe);
    if is_shown_as_it_is && lamassu_format::header::check_label(label).is_ok() {
        return Ok(());
    }
    let rule = "at most 255 bytes, without control characters and those that set the direction of what follows";
    Err(Error::Member { option: "--label", rule })
}

/// Whether a character does something to a line instead of standing in it: control characters, ends of lines and
/// paragraphs, and those that set the direction of what follows.
pub fn is_unsafe(c: char) -> bool {
    const DIRECTIONS: [std::ops::RangeInclusive<char>; 2] = ['\u{202a}'..='\u{202e}', '\u{2066}'..='\u{2069}'];
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') || DIRECTIONS.iter().any(|range| range.contains(&c))
}

/// What the history says of a slot.
pub fn about<H: Header>(kind: EventKind, id: u32, header: &H) -> Event {
    let event = Event::new(kind).slot(id);
    match header.keys().slot(id) {
        Some(slot) => {
            let event = event.detail("kind", slot.kind.name()).detail("label", &slot.label);
            if slot.role == Role::Use { event.detail("role", "use") } else { event }
        }
        None => event,
    }
}

/// Seals the parent slot of the dataset in `place` under the newest K_out of the vault it lies in, whose loaded keys
/// are `ring`. One that inherits nothing is left alone.
///
/// # Errors
/// Those of the header's file; [`lamassu_keys::KeyError::OtherParent`].
pub fn reseal_parent_slot(place: &Place, ring: &KeyRing, uid: u32, witness: &Arc<dyn Witness>) -> Result<()> {
    let update = Update::begin(&place.file(name::HEADER), witness)?;
    let mut header: VaultHeader = update.read()?;
    if !inherits(&header) || parent_epoch(&header, ring) == Some(ring.newest().1) {
        return Ok(());
    }
    let keys = unlock_by_parent(&header, ring).at(place.dir())?;
    if keys.reseal_parent_slot(&mut header, ring)? {
        let event = Event::new(EventKind::SlotChanged)
            .by(uid)
            .slot(keys.slot())
            .detail("what", "sealed under the newest key of its parent");
        update.record(&mut header, &keys, &[event])?;
    }
    Ok(())
}
