//! What of datasets stays in memory: contents that are not to be cached, keys that were unloaded.

use crate::datasets::{dataset_dir, mounted, read, write};
use crate::support::{Bench, noise};
use std::fs;

use std::path::Path;
use std::process::Command;

/// Bytes of a file in the page cache.
fn resident(b: &Bench, path: &str) -> u64 {
    let out = Command::new("fincore").args(["-bno", "RES"]).arg(b.path(path)).output().unwrap();
    String::from_utf8(out.stdout).unwrap().trim().parse().unwrap()
}

#[test]
fn what_is_not_to_be_cached_is_not_in_datasets_that_inherit_it_either() {
    if Command::new("fincore").arg("--version").output().is_err() {
        eprintln!("SKIPPED: takes fincore(1)");
        return;
    }
    let b = mounted("", "");
    for path in ["m/a", "m/a/inner"] {
        b.run(&format!("dataset create {path}")).ok();
    }
    b.run("dataset create --cache mount m/a/asks").ok();
    let files = ["m/f", "m/a/f", "m/a/inner/f", "m/a/asks/f"];
    let cached = || {
        files.map(|path| {
            read(&b, path);
            resident(&b, path) > 0
        })
    };
    files.iter().for_each(|path| write(&b, path, &noise(50_000, 1)));
    assert_eq!(cached(), [true; 4]);
    b.run("dataset set m/a cache=none").ok();
    assert_eq!(files.map(|path| resident(&b, path) > 0), [true, false, false, true], "dropped at once");
    assert_eq!(cached(), [true, false, false, true]);
    b.run("dataset set m/a cache=inherit").ok();
    assert_eq!(cached(), [true; 4]);
    b.run("dataset set m cache=none").ok();
    assert_eq!(cached(), [false, false, false, true]);
    b.unmount("m");
}

/// A file mapped for reading.
struct Map(*mut libc::c_void, usize);

impl Map {
    fn of(path: &Path) -> Map {
        use std::os::fd::AsRawFd;
        let file = fs::File::open(path).unwrap();
        let len = file.metadata().unwrap().len() as usize;
        let fd = file.as_raw_fd();
        // SAFETY: a fresh map at an address of the kernel's choice.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
        assert_ne!(map, libc::MAP_FAILED);
        // SAFETY: the map that was just made. No reading ahead by the kernel.
        assert_eq!(unsafe { libc::madvise(map, len, libc::MADV_RANDOM) }, 0);
        Map(map, len)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the map is that long, it is only read, and the file keeps its length.
        unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), self.1) }
    }

    /// How many pages of the file are in the page cache.
    fn resident(&self) -> usize {
        let mut pages = vec![0_u8; self.1.div_ceil(4096)];
        // SAFETY: `pages` has a byte for each page of the map.
        assert_eq!(unsafe { libc::mincore(self.0, self.1, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|page| **page & 1 != 0).count()
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: it was mapped, and `bytes` borrows this.
        unsafe { libc::munmap(self.0, self.1) };
    }
}

#[test]
fn nothing_of_an_uncached_file_stays_in_memory() {
    for cache in ["writeback", "through"] {
        let b = mounted("", &format!("--cache {cache}"));
        b.run("dataset create m/a").ok();
        let content = noise(1 << 20, 7);
        write(&b, "m/a/f", &content);
        let path = b.path("m/a/f");
        // Looked at where opening does not empty the cache. When a file was closed, the daemon is told some time after.
        let left = |_| {
            b.run("dataset set m/a cache=none").ok();
            let map = Map::of(&path);
            for n in [3, 99, 41, 7, 120, 64, 77, 12, 33, 50] {
                assert_eq!(map.bytes()[n * 4096], content[n * 4096]);
            }
            // What the daemon reads ahead would have come by then.
            std::thread::sleep(std::time::Duration::from_millis(500));
            assert_eq!(map.resident(), 10, "{cache}: what was touched, and no more");
            drop(map);
            std::thread::sleep(std::time::Duration::from_millis(200));
            b.run("dataset set m/a cache=mount").ok();
            Map::of(&path).resident()
        };
        assert!((0..40).map(left).any(|left| left == 0), "{cache}: pages of what is closed are left");
        assert!(read(&b, "m/a/f") == content);
        b.unmount("m");
    }
}

/// Whether bytes stand anywhere in the memory of a process.
pub fn is_in_memory(pid: i32, wanted: &[u8]) -> bool {
    use std::os::unix::fs::FileExt;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    maps.lines().filter(|line| line.split(' ').nth(1).is_some_and(|perms| perms.starts_with('r'))).any(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let at = |hex: &str| u64::from_str_radix(hex, 16).unwrap();
        let mut bytes = vec![0; (at(end) - at(start)) as usize];
        let read = memory.read_at(&mut bytes, at(start)).unwrap_or(0);
        memchr::memmem::find(&bytes[..read], wanted).is_some()
    })
}

/// In the daemon, which has asked for it itself.
#[test]
fn nothing_of_a_passphrase_that_was_typed_is_left_in_memory() {
    const TYPED: &str = "qzxv of all that was typed nothing stays kwjy";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can read the daemon's memory");
        return;
    }
    let b = Bench::new();
    b.dir("m");
    b.secret("words", TYPED.as_bytes());
    b.run("init -k passphrase:file:words --argon2-ms 1 v").ok();
    // script(1) has a terminal for it, on which it types what it reads.
    let lamassu = b.command(["mount", "-k", "passphrase:prompt", "v", "m"]);
    let words = [lamassu.get_program()].into_iter().chain(lamassu.get_args());
    let line = words.map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ");
    let mut script = std::process::Command::new("script");
    script.args(["-qec", &line, "/dev/null"]).current_dir(lamassu.get_current_dir().unwrap()).env_clear();
    script.envs(lamassu.get_envs().filter_map(|(name, value)| Some((name, value?))));
    script.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut script = script.spawn().unwrap();
    let mut input = script.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, format!("{TYPED}\n").as_bytes()).unwrap();
    let shown = script.wait_with_output().unwrap();
    drop(input);
    let text = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.status.success() && text.contains("Passphrase for"), "{text}");
    let pid = crate::mounts::daemon_of(&b);
    assert!(is_in_memory(pid, b"/lamassu.vault"), "the search finds what is there");
    for part in [&TYPED[..8], &TYPED[..16], &TYPED[TYPED.len() - 10..]] {
        assert!(!is_in_memory(pid, part.as_bytes()), "{part:?} is left");
    }
    b.unmount("m");
}

#[test]
fn no_key_of_what_is_unloaded_is_left_in_memory() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can read the daemon's memory");
        return;
    }
    let b = mounted("", "");
    let own = b.key("own");
    b.run(&format!("dataset create -n {own} --domain family m/a")).ok();
    write(&b, "m/a/f", &noise(100_000, 6));
    b.run("key rotate --outer m/a").ok();
    b.run("rekey --outer m/a").ok();
    let stored = dataset_dir(&b);
    let header: lamassu_format::header::VaultHeader =
        lamassu_keys::header_file::read(&stored.join("lamassu.vault")).unwrap();
    let key = lamassu_crypto::SecretBytes::new(fs::read(b.path("own")).unwrap());
    let material = lamassu_keys::Material::new(lamassu_keys::SlotKind::Raw, key).unwrap();
    let keys = lamassu_keys::unlock(&header, &material).unwrap();
    let epochs = || {
        [lamassu_keys::Tier::Inner, lamassu_keys::Tier::Outer].into_iter().flat_map(|tier| keys.keychain().epochs(tier))
    };
    let pid = crate::mounts::daemon_of(&b);
    assert!(epochs().any(|e| is_in_memory(pid, e.key().expose())), "the search finds what is there");
    b.run("key unload m/a").ok();
    for epoch in epochs() {
        assert!(!is_in_memory(pid, epoch.key().expose()), "a key is left");
    }
    assert!(!is_in_memory(pid, &fs::read(b.path("own")).unwrap()), "what opened it is left");
    b.unmount("m");
}

#[test]
fn a_property_that_changes_while_files_are_open_hangs_nobody() {
    use std::os::unix::fs::FileExt;
    for cache in ["through", "writeback"] {
        let b = mounted("", &format!("--cache {cache}"));
        b.run("dataset create m/a").ok();
        let path = b.path("m/a/f");
        let opened = || fs::File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let early = opened();
        early.write_all_at(&[1; 5000], 0).unwrap();
        b.run("dataset set m/a cache=none").ok();
        // Through the page cache still; what is opened now is not.
        early.write_all_at(&[2; 100], 10).unwrap();
        early.sync_all().unwrap();
        let late = opened();
        late.write_all_at(&[3; 100], 4000).unwrap();
        b.run("dataset set m/a cache=mount").ok();
        late.write_all_at(&[4; 10], 4096).unwrap();
        late.sync_all().unwrap();
        let mut bytes = [0; 5000];
        early.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!((bytes[9], bytes[10], bytes[4000], bytes[4096], bytes[4999]), (1, 2, 3, 4, 1), "{cache}");
        drop((early, late));
        b.unmount("m");
        b.run("check v").ok();
    }
}

/// The store takes the word out of the header of a dataset that is open; then something changes above it, and what it
/// says of itself counts on.
#[test]
fn the_store_does_not_have_contents_cached_that_are_not_to_be() {
    if Command::new("fincore").arg("--version").output().is_err() {
        eprintln!("SKIPPED: takes fincore(1)");
        return;
    }
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    b.run("dataset create --cache none m/a/b").ok();
    write(&b, "m/a/b/f", &noise(50_000, 1));
    let header = b.stored("v", "a/b").join("lamassu.vault");
    let kept = fs::read_to_string(&header).unwrap();
    let mut changed: serde_json::Value = serde_json::from_str(&kept).unwrap();
    assert_eq!(changed.as_object_mut().unwrap().remove("cache"), Some("none".into()));
    fs::write(&header, serde_json::to_vec(&changed).unwrap()).unwrap();
    b.run("dataset set m/a cache=mount").ok();
    read(&b, "m/a/b/f");
    assert_eq!(resident(&b, "m/a/b/f"), 0);
    fs::write(&header, kept).unwrap();
    b.run("dataset set m/a/b cache=inherit").ok();
    read(&b, "m/a/b/f");
    assert!(resident(&b, "m/a/b/f") > 0, "its owner's word does");
    b.unmount("m");
}
