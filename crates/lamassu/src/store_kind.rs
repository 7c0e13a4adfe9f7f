//! What store lies below a directory, as far as statfs(2) tells, and whether a block size can match what it
//! deduplicates.

use rustix::fs::StatFs;
use serde::Serialize;
use std::path::Path;

/// A store, recognised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoreKind {
    /// `zfs`, `xfs`, …; `unknown`
    #[serde(rename = "type")]
    pub name: &'static str,
    /// the unit it deduplicates, in bytes, where that can be told
    pub dedup_block: Option<u64>,
    #[serde(skip)]
    note: Note,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Note {
    None,
    /// The store behind it cannot be seen.
    Remote,
    /// Gone at the next boot.
    Volatile,
}

/// f_type of statfs(2), linux/magic.h and the file systems' own headers.
const KINDS: &[(u64, &str, Note)] = &[
    (0x2fc1_2fc1, "zfs", Note::None),
    (0x9123_683e, "btrfs", Note::None),
    (0x5846_5342, "xfs", Note::None),
    (0xef53, "ext4", Note::None),
    (0xca45_1a4e, "bcachefs", Note::None),
    (0xf2f5_2010, "f2fs", Note::None),
    (0x0116_1970, "gfs2", Note::None),
    (0x7461_636f, "ocfs2", Note::None),
    (0x6969, "nfs", Note::Remote),
    (0xff53_4d42, "cifs", Note::Remote),
    (0xfe53_4d42, "smb2", Note::Remote),
    (0x00c3_6400, "ceph", Note::Remote),
    (0x6573_5546, "fuse", Note::Remote),
    (0x0102_1997, "9p", Note::Remote),
    (0x794c_7630, "overlay", Note::Remote),
    (0x0102_1994, "tmpfs", Note::Volatile),
    (0x8584_58f6, "ramfs", Note::Volatile),
];

/// Asks the kernel; `None` where it does not answer.
pub fn of(dir: &Path) -> Option<StoreKind> {
    let stat: StatFs = rustix::fs::statfs(dir).ok()?;
    // f_type is sign-extended on some architectures: only its low 32 bits are the magic number.
    Some(classify(stat.f_type as u64 & 0xffff_ffff, u64::try_from(stat.f_bsize).unwrap_or(0)))
}

fn classify(fs_type: u64, fs_block: u64) -> StoreKind {
    let (name, note) = KINDS
        .iter()
        .find(|(magic, ..)| *magic == fs_type)
        .map_or(("unknown", Note::None), |(_, name, note)| (*name, *note));
    let dedup_block = match name {
        // ZFS gives the dataset's record size here; a record is what it deduplicates.
        "zfs" => Some(if fs_block.is_power_of_two() && fs_block >= 4096 { fs_block } else { 128 << 10 }),
        "btrfs" | "xfs" | "bcachefs" | "ocfs2" => Some(4096),
        _ => None,
    };
    StoreKind { name, dedup_block, note }
}

impl StoreKind {
    /// What the user should be told about `block_size` on this store: a warning, or nothing.
    pub fn advice(&self, block_size: u32) -> Option<String> {
        let block_size = u64::from(block_size);
        match (self.dedup_block, self.note) {
            (Some(unit), _) if !block_size.is_multiple_of(unit) => Some(format!(
                "{} deduplicates units of {}, and {} blocks do not fill them: little will deduplicate; use --block-size {}",
                self.name,
                crate::text::bytes(unit),
                crate::text::bytes(block_size),
                crate::text::bytes(unit).replace(" KiB", "K").replace(" MiB", "M"),
            )),
            // A ZFS record is copied on write, whole; others overwrite in place, at best 4096 bytes at a time.
            (unit, Note::None | Note::Remote) if block_size > 4096 && unit.is_none_or(|unit| unit == 4096) => {
                Some(format!(
                    "a crash can tear a block of {} while it is overwritten; such a block reads as an error afterwards: see docs/threat-model.md, Crashes",
                    crate::text::bytes(block_size),
                ))
            }
            (_, Note::Volatile) => Some(format!("{} is lost when the machine stops", self.name)),
            (_, Note::Remote | Note::None) => None,
        }
    }

    /// Whether a server, or another program, keeps what is stored there.
    pub fn is_served(&self) -> bool {
        // An overlay lies over directories of this machine.
        self.note == Note::Remote && self.name != "overlay"
    }

    /// Something worth knowing that is no warning.
    pub fn remark(&self) -> Option<String> {
        (self.note == Note::Remote).then(|| {
            format!(
                "cannot see what lies behind {}: the block size should be the unit its server deduplicates",
                self.name
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zfs_wants_its_record_size() {
        let zfs = classify(0x2fc1_2fc1, 131_072);
        assert!(zfs.advice(4096).unwrap().contains("--block-size 128K"));
        assert_eq!(zfs.advice(131_072), None);
        assert_eq!(zfs.advice(1 << 20), None);
        assert_eq!(classify(0x2fc1_2fc1, 16384).advice(16384), None);
        assert_eq!(classify(0x2fc1_2fc1, 7).dedup_block, Some(131_072));
    }

    #[test]
    fn stores_of_4_kib_deduplicate_any_block_size_and_tear_large_blocks() {
        for magic in [0x9123_683e, 0x5846_5342] {
            assert_eq!(classify(magic, 4096).advice(4096), None);
            assert!(classify(magic, 4096).advice(131_072).unwrap().contains("tear"));
        }
    }

    #[test]
    fn others_are_told_apart() {
        assert!(classify(0x6969, 1 << 20).remark().unwrap().contains("nfs"));
        assert!(classify(0x0102_1994, 4096).advice(4096).unwrap().contains("lost"));
        assert_eq!(classify(1, 1), StoreKind { name: "unknown", dedup_block: None, note: Note::None });
        assert!(of(Path::new("/")).is_some());
    }
}
