//! Advice about the store below a vault: whether a block size fits its units of deduplication.

use crate::text;
use lamassu_host::store_kind::{Medium, StoreKind};

/// A warning about `block_size` on this store, if there is reason for one.
pub fn advice(store: &StoreKind, block_size: u32) -> Option<String> {
    let block_size = u64::from(block_size);
    match (store.dedup_block, store.medium) {
        (Some(unit), _) if !block_size.is_multiple_of(unit) => Some(format!(
            "{} deduplicates units of {}, and {} blocks do not fill them: little will deduplicate; use --block-size {}",
            store.name,
            text::bytes(unit),
            text::bytes(block_size),
            text::bytes(unit).replace(" KiB", "K").replace(" MiB", "M"),
        )),
        // A ZFS record is copied on write, whole; others overwrite in place, at best 4096 bytes at a time.
        (unit, Medium::Disk | Medium::Remote) if block_size > 4096 && unit.is_none_or(|unit| unit == 4096) => {
            Some(format!(
                "a crash can tear a block of {} while it is overwritten; such a block reads as an error afterwards: see docs/threat-model.md, Crashes",
                text::bytes(block_size),
            ))
        }
        (_, Medium::Memory) => Some(format!("{} is lost when the machine stops", store.name)),
        (_, Medium::Remote | Medium::Disk) => None,
    }
}

/// A remark that is no warning.
pub fn remark(store: &StoreKind) -> Option<String> {
    (store.medium == Medium::Remote).then(|| {
        format!("cannot see what lies behind {}: the block size should be the unit its server deduplicates", store.name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_host::store_kind::classify;

    #[test]
    fn zfs_wants_its_record_size() {
        let zfs = classify(0x2fc1_2fc1, 131_072);
        assert!(advice(&zfs, 4096).unwrap().contains("--block-size 128K"));
        assert_eq!(advice(&zfs, 131_072), None);
        assert_eq!(advice(&zfs, 1 << 20), None);
        assert_eq!(advice(&classify(0x2fc1_2fc1, 16384), 16384), None);
    }

    #[test]
    fn stores_of_4_kib_deduplicate_any_block_size_and_tear_large_blocks() {
        for magic in [0x9123_683e, 0x5846_5342] {
            assert_eq!(advice(&classify(magic, 4096), 4096), None);
            assert!(advice(&classify(magic, 4096), 131_072).unwrap().contains("tear"));
        }
    }

    #[test]
    fn others_are_told_apart() {
        assert!(remark(&classify(0x6969, 1 << 20)).unwrap().contains("nfs"));
        assert!(advice(&classify(0x0102_1994, 4096), 4096).unwrap().contains("lost"));
    }
}
