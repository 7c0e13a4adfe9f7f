//! The kernel's table of mounts, /proc/PID/mountinfo (proc_pid_mountinfo(5)). stat(2) would ask the mounts themselves,
//! which may hang.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountLine {
    /// Its number, while it exists.
    pub id: u64,
    /// The number of its file system, as major:minor.
    pub device: String,
    /// Its mount point.
    pub mountpoint: PathBuf,
    /// The mount's options; `ro` or `rw` first.
    pub options: String,
    /// `fuse.lamassu`, `ext4`, …
    pub fs_type: String,
    /// The source, by the name given at the mount.
    pub source: PathBuf,
    /// The file system's options.
    pub super_options: String,
}

impl MountLine {
    /// Whether nothing can be written through it.
    pub fn is_read_only(&self) -> bool {
        self.options.split(',').any(|word| word == "ro")
    }

    /// The user who mounted it, of FUSE.
    pub fn user(&self) -> Option<u32> {
        let mut words = self.super_options.split(',');
        words.find_map(|word| word.strip_prefix("user_id=")).and_then(|id| id.parse().ok())
    }

    /// Whether root mounted it, or the user of this process: mounts of other users may give any name and type.
    pub fn is_trusted(&self) -> bool {
        self.user().is_some_and(|id| id == 0 || id == rustix::process::geteuid().as_raw())
    }

    /// From a line of the table.
    pub fn parse(line: &[u8]) -> Option<MountLine> {
        let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
        let mut fields = line.split(|b| *b == b' ');
        let id = text(fields.next()?).parse().ok()?;
        let device = text(fields.nth(1)?);
        let mountpoint = unescape(fields.nth(1)?);
        let options = text(fields.next()?);
        let mut after_dash = fields.skip_while(|f| *f != b"-").skip(1);
        let fs_type = text(after_dash.next()?);
        let source = unescape(after_dash.next()?);
        let super_options = text(after_dash.next().unwrap_or_default());
        Some(MountLine { id, device, mountpoint, options, fs_type, source, super_options })
    }
}

/// The mounts that this process sees, those made later last.
pub fn mounts() -> Vec<MountLine> {
    read("self").unwrap_or_default()
}

/// The topmost mount at a path without links.
pub fn at(mountpoint: &Path) -> Option<MountLine> {
    mounts().into_iter().rfind(|mount| mount.mountpoint == mountpoint)
}

/// The mounts that another process sees.
///
/// # Errors
/// Those of reading: there is no such process, or this one may not read its mounts.
pub fn mounts_of(process: u32) -> io::Result<Vec<MountLine>> {
    read(&process.to_string())
}

fn read(process: &str) -> io::Result<Vec<MountLine>> {
    let table = std::fs::read(format!("/proc/{process}/mountinfo"))?;
    Ok(table.split(|b| *b == b'\n').filter_map(MountLine::parse).collect())
}

/// The number of the mount in which an open file lies. The kernel tells it without asking the mount.
///
/// # Errors
/// Those of reading /proc.
pub fn mount_id(file: impl AsFd) -> io::Result<Option<u64>> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd()))?;
    Ok(info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok()))
}

/// Space, tab, newline and backslash are written as three octal digits in the table.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| byte == b'\\').and_then(|digits| {
            digits.iter().try_fold(0u32, |value, d| (b'0'..=b'7').contains(d).then(|| value * 8 + u32::from(d - b'0')))
        });
        match octal.and_then(|value| u8::try_from(value).ok()) {
            Some(value) => {
                out.push(value);
                rest = &after[3..];
            }
            None => {
                out.push(byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn lines_of_mountinfo() {
        let line =
            br"100 28 0:50 / /mnt/a\040b ro,nosuid,nodev shared:1 master:2 - fuse.lamassu /srv/x\134y rw,user_id=0";
        let mount = MountLine::parse(line).unwrap();
        assert_eq!((mount.id, mount.device.as_str()), (100, "0:50"));
        assert_eq!(
            (mount.mountpoint.as_path(), mount.source.as_path()),
            (Path::new("/mnt/a b"), Path::new(r"/srv/x\y"))
        );
        assert_eq!((mount.fs_type.as_str(), mount.user()), ("fuse.lamassu", Some(0)));
        assert!(mount.is_read_only() && mount.is_trusted());
        let stranger = String::from_utf8(line.to_vec()).unwrap().replace("user_id=0", "user_id=4294967294");
        assert!(!MountLine::parse(stranger.as_bytes()).unwrap().is_trusted());
        assert!(!MountLine::parse(b"1 2 0:5 / /mnt rw - fuse.lamassu x rw").unwrap().is_trusted());
        assert!(MountLine::parse(b"").is_none() && MountLine::parse(b"1 2 3 4 5 6 7 8").is_none());
    }

    #[test]
    fn paths_are_decoded() {
        assert_eq!(unescape(br"/a\040b\134c\011"), Path::new("/a b\\c\t"));
        assert_eq!(unescape(br"/a\04"), Path::new(r"/a\04"));
        assert_eq!(unescape(br"/a\777\09x"), Path::new(r"/a\777\09x"));
        assert_eq!(unescape("/ü".as_bytes()).as_os_str().as_bytes(), "/ü".as_bytes());
    }

    #[test]
    fn an_open_directory_lies_in_a_mount_of_the_table() {
        let root = std::fs::File::open("/").unwrap();
        let id = mount_id(&root).unwrap().unwrap();
        assert!(mounts().iter().any(|mount| mount.id == id));
    }
}
