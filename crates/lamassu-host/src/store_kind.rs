//! The kind of store below a directory, as far as statfs(2) tells.

use rustix::fs::StatFs;
use serde::Serialize;
use std::path::Path;

/// A recognised store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoreKind {
    /// `zfs`, `xfs`, …; `unknown`
    #[serde(rename = "type")]
    pub name: &'static str,
    /// the unit of its deduplication, in bytes, if known
    pub dedup_block: Option<u64>,
    /// where the store keeps data
    #[serde(skip)]
    pub medium: Medium,
}

/// Where a store keeps data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// On disks of this machine.
    Disk,
    /// Behind a protocol: the store itself cannot be seen.
    Remote,
    /// In memory, until the machine stops.
    Memory,
}

/// f_type of statfs(2), linux/magic.h and the file systems' own headers.
const KINDS: &[(u64, &str, Medium)] = &[
    (0x2fc1_2fc1, "zfs", Medium::Disk),
    (0x9123_683e, "btrfs", Medium::Disk),
    (0x5846_5342, "xfs", Medium::Disk),
    (0xef53, "ext4", Medium::Disk),
    (0xca45_1a4e, "bcachefs", Medium::Disk),
    (0xf2f5_2010, "f2fs", Medium::Disk),
    (0x0116_1970, "gfs2", Medium::Disk),
    (0x7461_636f, "ocfs2", Medium::Disk),
    (0x6969, "nfs", Medium::Remote),
    (0xff53_4d42, "cifs", Medium::Remote),
    (0xfe53_4d42, "smb2", Medium::Remote),
    (0x00c3_6400, "ceph", Medium::Remote),
    (0x6573_5546, "fuse", Medium::Remote),
    (0x0102_1997, "9p", Medium::Remote),
    (0x794c_7630, "overlay", Medium::Remote),
    (0x0102_1994, "tmpfs", Medium::Memory),
    (0x8584_58f6, "ramfs", Medium::Memory),
];

/// Asks the kernel; `None`: no answer.
pub fn of(dir: &Path) -> Option<StoreKind> {
    let stat: StatFs = rustix::fs::statfs(dir).ok()?;
    // f_type is sign-extended on some architectures: only its low 32 bits are the magic number.
    Some(classify(stat.f_type as u64 & 0xffff_ffff, u64::try_from(stat.f_bsize).unwrap_or(0)))
}

/// The store of these two values of statfs(2): the file system's type, and its block size in bytes.
pub fn classify(fs_type: u64, fs_block: u64) -> StoreKind {
    let (name, medium) = KINDS
        .iter()
        .find(|(magic, ..)| *magic == fs_type)
        .map_or(("unknown", Medium::Disk), |(_, name, medium)| (*name, *medium));
    let dedup_block = match name {
        // ZFS gives the dataset's record size here; a record is what it deduplicates.
        "zfs" => Some(if fs_block.is_power_of_two() && fs_block >= 4096 { fs_block } else { 128 << 10 }),
        "btrfs" | "xfs" | "bcachefs" | "ocfs2" => Some(4096),
        _ => None,
    };
    StoreKind { name, dedup_block, medium }
}

impl StoreKind {
    /// Whether a server or another program keeps the data.
    pub fn is_served(&self) -> bool {
        // An overlay is made of directories on this machine.
        self.medium == Medium::Remote && self.name != "overlay"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_of_deduplication_is_that_of_the_store() {
        assert_eq!(classify(0x2fc1_2fc1, 16384).dedup_block, Some(16384));
        assert_eq!(classify(0x2fc1_2fc1, 7).dedup_block, Some(131_072));
        assert_eq!(classify(0x5846_5342, 4096).dedup_block, Some(4096));
        assert_eq!(classify(1, 1), StoreKind { name: "unknown", dedup_block: None, medium: Medium::Disk });
        assert!(of(Path::new("/")).is_some());
    }

    #[test]
    fn an_overlay_is_not_served() {
        assert!(classify(0x6969, 1 << 20).is_served());
        assert!(!classify(0x794c_7630, 4096).is_served() && !classify(0x0102_1994, 4096).is_served());
    }
}
