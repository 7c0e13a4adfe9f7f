//! Between the kernel's types and the vault's.

use fuser::{FileAttr, FileType, INodeNo, OpenFlags, RenameFlags, TimeOrNow};
use lamassu_vault::{Access, Attr, Fallocate, Kind, RenameMode, SetTime, Time};
use std::ops::Range;
use std::time::{Duration, SystemTime};

/// The smallest page of the kernel, bytes.
const PAGE: u64 = 4096;

/// The bytes of all pages that a range touches.
pub(super) fn pages_around(range: &Range<u64>) -> Range<u64> {
    range.start - range.start % PAGE..range.end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}

pub(super) fn file_attr(a: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(a.ino),
        size: a.size,
        blocks: a.blocks,
        atime: system_time(a.atime),
        mtime: system_time(a.mtime),
        ctime: system_time(a.ctime),
        crtime: SystemTime::UNIX_EPOCH,
        kind: file_type(a.kind),
        perm: (a.mode & 0o7777) as u16,
        nlink: u32::try_from(a.nlink).unwrap_or(u32::MAX),
        uid: a.uid,
        gid: a.gid,
        // The kernel's 32-bit encoding is the low half of the C library's.
        rdev: a.rdev as u32,
        blksize: a.block_size,
        flags: 0,
    }
}

/// The entry that means "no such name, and you may cache that".
pub(super) fn negative_entry() -> FileAttr {
    let t = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: t,
        mtime: t,
        ctime: t,
        crtime: t,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    }
}

/// The answer for a file that has neither a name nor a handle. The kernel uses nothing of it.
pub(super) fn removed_attr(ino: INodeNo) -> FileAttr {
    FileAttr { ino, ..negative_entry() }
}

pub(super) fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Dir => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
        Kind::CharDevice => FileType::CharDevice,
        Kind::BlockDevice => FileType::BlockDevice,
    }
}

/// The kind in a mknod(2) mode; `None` for what mknod cannot make.
pub(super) fn node_kind(mode: u32) -> Option<Kind> {
    match mode & libc::S_IFMT {
        0 | libc::S_IFREG => Some(Kind::File),
        libc::S_IFIFO => Some(Kind::Fifo),
        libc::S_IFSOCK => Some(Kind::Socket),
        libc::S_IFCHR => Some(Kind::CharDevice),
        libc::S_IFBLK => Some(Kind::BlockDevice),
        _ => None,
    }
}

fn system_time(t: Time) -> SystemTime {
    let nanos = Duration::from_nanos(u64::from(t.nanos.min(999_999_999)));
    let whole = if t.seconds >= 0 {
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(t.seconds.unsigned_abs()))
    } else {
        SystemTime::UNIX_EPOCH.checked_sub(Duration::from_secs(t.seconds.unsigned_abs()))
    };
    whole.and_then(|w| w.checked_add(nanos)).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// The request's seconds and nanoseconds, recovered from the form that `fuser` gives them. Nanoseconds count forward,
/// before 1970 too. Every value of 64 bits is accepted.
pub(super) fn set_time(t: Option<TimeOrNow>) -> Option<SetTime> {
    t.map(|t| match t {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(t) => SetTime::At(match t.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(d) => Time { seconds: i64::try_from(d.as_secs()).unwrap_or(i64::MAX), nanos: d.subsec_nanos() },
            Err(e) => before_epoch(e.duration()),
        }),
    })
}

/// The time at this distance before 1970.
fn before_epoch(distance: Duration) -> Time {
    let seconds = 0i64.saturating_sub_unsigned(distance.as_secs());
    match distance.subsec_nanos() {
        0 => Time { seconds, nanos: 0 },
        nanos => Time { seconds: seconds.saturating_sub(1), nanos: 1_000_000_000 - nanos },
    }
}

/// How to open for these flags. With the write-back cache the kernel reads through write-only handles (to fill partial
/// pages), so a handle for writing is also one for reading. `O_APPEND` is ignored: the kernel knows the size and sends
/// offsets.
pub(super) fn access(flags: OpenFlags, write_back: bool) -> Access {
    let (read, write) = match flags.0 & libc::O_ACCMODE {
        libc::O_WRONLY => (write_back, true),
        libc::O_RDWR => (true, true),
        _ => (true, false),
    };
    Access { read, write, truncate: flags.0 & libc::O_TRUNC != 0 }
}

/// The fallocate(2) modes there are.
pub(super) fn fallocate(mode: i32) -> Option<Fallocate> {
    const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
    const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;
    const ZERO_KEEP: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
    match mode {
        0 => Some(Fallocate::Reserve),
        KEEP => Some(Fallocate::KeepSize),
        PUNCH => Some(Fallocate::Punch),
        ZERO => Some(Fallocate::Zero { keep_size: false }),
        ZERO_KEEP => Some(Fallocate::Zero { keep_size: true }),
        _ => None,
    }
}

/// The mode without the bits that a change by an ordinary user clears: set-uid; set-gid if the group may execute, or if
/// the user is not in the group (as `setattr_should_drop_sgid` in Linux' fs/attr.c). `None`: none is set.
pub(super) fn without_privileges(attr: &Attr, is_in_group: impl FnOnce(u32) -> bool) -> Option<u32> {
    let mut mode = attr.mode & !libc::S_ISUID;
    if mode & libc::S_ISGID != 0 && (mode & libc::S_IXGRP != 0 || !is_in_group(attr.gid)) {
        mode &= !libc::S_ISGID;
    }
    (attr.kind == Kind::File && mode != attr.mode).then_some(mode)
}

/// The meaning of the flags of renameat2(2); `None`: there is none.
pub(super) fn rename_mode(flags: RenameFlags) -> Option<RenameMode> {
    match flags {
        flags if flags.is_empty() => Some(RenameMode::Replace),
        RenameFlags::RENAME_NOREPLACE => Some(RenameMode::NoReplace),
        RenameFlags::RENAME_EXCHANGE => Some(RenameMode::Exchange),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_survive_both_ways() {
        const LAST: u32 = 999_999_999;
        let ends =
            [(i64::MIN, 0), (i64::MIN, 1), (i64::MIN, LAST), (i64::MIN + 1, 0), (i64::MIN + 1, LAST), (i64::MAX, LAST)];
        let others = [(0, 0), (1, LAST), (-1, 0), (-1, 1), (-2, 800_000_000), (1 << 40, 7), (-(1 << 40), 7)];
        for (seconds, nanos) in ends.into_iter().chain(others) {
            let time = Time { seconds, nanos };
            let kernels = system_time(time);
            assert_eq!(set_time(Some(TimeOrNow::SpecificTime(kernels))), Some(SetTime::At(time)));
            if seconds == -2 {
                assert_eq!(kernels, SystemTime::UNIX_EPOCH - Duration::from_millis(1200));
            }
        }
        // No kernel has so many nanoseconds.
        system_time(Time { seconds: i64::MIN, nanos: u32::MAX });
        system_time(Time { seconds: i64::MAX, nanos: u32::MAX });
    }

    #[test]
    fn write_handles_read_only_where_the_kernel_needs_it() {
        let w = OpenFlags(libc::O_WRONLY | libc::O_APPEND | libc::O_TRUNC);
        assert_eq!(access(w, true), Access { read: true, write: true, truncate: true });
        assert_eq!(access(w, false), Access { read: false, write: true, truncate: true });
        assert_eq!(access(OpenFlags(libc::O_RDONLY), true), Access { read: true, write: false, truncate: false });
    }

    #[test]
    fn privileges_fall_as_on_a_local_file_system() {
        let t = Time::default();
        let file = |mode| Attr {
            ino: 1,
            kind: Kind::File,
            mode,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: 0,
            blocks: 0,
            block_size: 4096,
            atime: t,
            mtime: t,
            ctime: t,
        };
        for (mode, of_the_group, of_others) in [
            (0o6755, Some(0o755), Some(0o755)),
            (0o2745, None, Some(0o745)),
            (0o4700, Some(0o700), Some(0o700)),
            (0o644, None, None),
        ] {
            assert_eq!(without_privileges(&file(mode), |_| true), of_the_group, "{mode:o}");
            assert_eq!(without_privileges(&file(mode), |_| false), of_others, "{mode:o}");
        }
    }
}
