//! What becomes unreadable when a vault's keys are destroyed, and what does not.

use crate::lock::raise_descriptor_limit;
use crate::{Place, Result};
use lamassu_crypto::KeyRing;
use lamassu_format::header::{Header, SlotKind, VaultHeader};
use lamassu_format::name;
use lamassu_keys::dataset::inherits;
use lamassu_keys::receipt::LeftDataset;
use lamassu_keys::{Unlocked, header_file, unlock_by_parent};
use std::path::Path;

/// The effect on a region when the vault's keys are destroyed.
enum Fate {
    /// It can still be opened: by its own slots, by another vault that its parent slot is for, or by what it inherits
    /// from.
    Opens,
    /// Its keys are lost too; so are those of datasets in it that inherit.
    Goes(KeyRing),
    /// It has no slot any more.
    Gone,
}

/// The effect on what a header opens, by its slots, in a region with this effect.
fn fate_of(found: &VaultHeader, above: &Fate) -> Fate {
    if found.keys().slots.iter().any(|slot| slot.kind != SlotKind::Parent) {
        return Fate::Opens;
    }
    match above {
        _ if !inherits(found) => Fate::Gone,
        Fate::Opens => Fate::Opens,
        // It may have been moved here from another vault, whose keys still open it.
        Fate::Goes(ring) => {
            let keys = unlock_by_parent(found, ring).and_then(|keys| keys.key_ring(found.suite()));
            keys.map_or(Fate::Opens, Fate::Goes)
        }
        Fate::Gone => Fate::Gone,
    }
}

/// The effect on a dataset, by its header, and by those that a program which was killed has left beside it.
fn fate(found: &VaultHeader, left: &[VaultHeader], above: &Fate) -> Fate {
    left.iter().fold(fate_of(found, above), |fate, left| match (fate, fate_of(left, above)) {
        (Fate::Opens, _) | (_, Fate::Opens) => Fate::Opens,
        (Fate::Goes(ring), _) | (Fate::Gone, Fate::Goes(ring)) => Fate::Goes(ring),
        (Fate::Gone, Fate::Gone) => Fate::Gone,
    })
}

/// The header of a dataset, whatever the length of its path, and those that are left beside it.
fn headers_of(dir: &Path, stored: &Path) -> Option<(VaultHeader, Vec<VaultHeader>)> {
    let place = Place::of(dir).and_then(|above| above.below(stored)).ok()?;
    let read = |name: &str| header_file::read::<VaultHeader>(&place.file(name)).ok();
    let left = [name::HEADER_NEW, name::HEADER_REPLACED, name::HEADER_REPLACING];
    let set_aside = name::set_aside().map_while(|name| read(&name));
    Some((read(name::HEADER)?, left.into_iter().filter_map(read).chain(set_aside).collect()))
}

/// The number of bytes that become unreadable with a vault's keys, and the datasets in it that do not.
///
/// # Errors
/// Those of the store.
pub fn survey(dir: &Path, header: &VaultHeader, keys: &Unlocked) -> Result<(u64, Vec<LeftDataset>)> {
    raise_descriptor_limit();
    let regions = lamassu_vault::regions(dir)?;
    let (mut bytes, mut left) = (0, Vec::new());
    let mut fates = vec![Fate::Goes(keys.key_ring(header.suite())?)];
    for (i, region) in regions.iter().enumerate() {
        if i == 0 {
            bytes += region.bytes;
            continue;
        }
        let found = headers_of(dir, &region.stored);
        let of = found.as_ref().map(|(header, _)| header);
        // A region that cannot be read is taken for one that opens.
        let fate = found.as_ref().map_or(Fate::Opens, |(header, left)| fate(header, left, &fates[region.above]));
        if matches!(fate, Fate::Opens) {
            left.push(LeftDataset {
                stored: region.stored.display().to_string(),
                id: of.map(|found| found.id().to_string()),
                zone_shares: of.is_none_or(|found| found.zone() == header.zone()),
            });
        } else {
            bytes += region.bytes;
        }
        fates.push(fate);
    }
    Ok((bytes, left))
}
