//! `mount -o remount`: changes the flags of a mount that is there. What the daemon was started with (key, cache, …)
//! stays.

use crate::fault::Fault;
use crate::mounts;
use lamassu_host::Error as HostError;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_remount};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// What a mount has unless an option says otherwise: modes, owners and device nodes are the store's word alone.
const UNSAID: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

/// How long a mount may be busy. The kernel tells a FUSE daemon of closed files later than close(2) returns, and takes
/// removed ones for in use until the daemon has heard of it: so what a script has just closed and removed would stand
/// in the way of `ro`, where on a local file system it does not.
const CLOSING: Duration = Duration::from_secs(3);

/// Whether these options ask for a remount.
pub fn is_wanted(words: &[String]) -> bool {
    words.iter().any(|word| word == "remount")
}

/// Gives the mount the flags among `words`: those that are not named are as in a first mount, `nosuid` and `nodev` on
/// and the others off. Other words are of the first mount, which mount(8) repeats.
pub fn run(mountpoint: &Path, words: &[String], read_only: bool) -> Result<(), Fault> {
    let (path, mount) = mounts::ours_at(mountpoint)?;
    // Not by the path, which may lead to another mount by now.
    let failed = |source| HostError::Local { op: "remount", path: path.clone(), source };
    let root = lamassu_fuse::root_of(&mount).map_err(failed)?;
    let held = format!("/proc/self/fd/{}", root.as_raw_fd());
    let mut flags = flags_of(words);
    flags.set(MountFlags::RDONLY, flags.contains(MountFlags::RDONLY) || read_only);
    let deadline = Instant::now() + CLOSING;
    loop {
        match mount_remount(&held, flags, "") {
            Err(Errno::BUSY) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            done => return Ok(done.map_err(|error| failed(error.into()))?),
        }
    }
}

/// `allow_dev` and `allow_suid` give way to `nodev` and `nosuid`, wherever they stand, as in a first mount.
fn flags_of(words: &[String]) -> MountFlags {
    let (gives_way, others): (Vec<_>, Vec<_>) = words.iter().partition(|word| word.starts_with("allow_"));
    gives_way.into_iter().chain(others).fold(UNSAID, |flags, word| with(flags, word))
}

fn with(mut flags: MountFlags, word: &str) -> MountFlags {
    let (flag, on) = match word {
        "ro" => (MountFlags::RDONLY, true),
        "rw" => (MountFlags::RDONLY, false),
        "nosuid" => (MountFlags::NOSUID, true),
        "suid" | "allow_suid" => (MountFlags::NOSUID, false),
        "nodev" => (MountFlags::NODEV, true),
        "dev" | "allow_dev" => (MountFlags::NODEV, false),
        "noexec" => (MountFlags::NOEXEC, true),
        "exec" => (MountFlags::NOEXEC, false),
        "noatime" => (MountFlags::NOATIME, true),
        "nodiratime" => (MountFlags::NODIRATIME, true),
        "relatime" => (MountFlags::RELATIME, true),
        "sync" => (MountFlags::SYNCHRONOUS, true),
        "async" => (MountFlags::SYNCHRONOUS, false),
        _ => return flags,
    };
    flags.set(flag, on);
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_words_win_and_others_are_passed_over() {
        let words = ["rw", "nosuid", "allow_other", "noexec", "user_id=0", "remount", "exec", "ro"].map(String::from);
        assert!(is_wanted(&words) && !is_wanted(&words[..5]));
        let flags = words.iter().fold(MountFlags::empty(), |flags, word| with(flags, word));
        assert_eq!(flags, MountFlags::NOSUID | MountFlags::RDONLY);
        let words = ["allow_suid", "rw"].map(String::from);
        assert_eq!(flags_of(&words), MountFlags::NODEV);
        let words = ["nosuid", "allow_dev", "allow_suid"].map(String::from);
        assert_eq!(flags_of(&words), MountFlags::NOSUID);
    }
}
