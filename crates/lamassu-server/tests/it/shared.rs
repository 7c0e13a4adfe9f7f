//! Several hosts use one vault at once (`mount --shared`), as one file system.

use crate::common::*;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// For what has to happen, on the slowest machine.
const SOON: Duration = Duration::from_secs(120);

/// A vault that all three have mounted.
pub(crate) fn shared(lab: &Lab) -> [Host<'_>; 3] {
    let hosts = ["a", "b", "c"].map(|name| lab.joined(name));
    let id = lab.vault(hosts[0]);
    hosts[1..].iter().for_each(|host| lab.grant(*host, &id));
    hosts.iter().for_each(|host| mount(*host));
    hosts
}

pub(crate) fn mount(host: Host<'_>) {
    host.run(&format!("mount --shared --anchor {} store/v m-{}", host.lab.url(), host.name)).ok();
}

/// Everything in a directory but what is in directories, by name.
pub(crate) fn listed(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// After a test: what the hosts have left is whole.
pub(crate) fn unmounted_and_checked(lab: &Lab, hosts: &[Host<'_>]) {
    hosts.iter().for_each(|host| drop(host.umount().ok()));
    lab.wait_until_free();
    hosts[0].run("check store/v").ok();
}

#[test]
fn hosts_use_a_vault_as_one_file_system() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    for round in 0..20 {
        let [writes, reads] = if round % 2 == 0 { [a, b] } else { [b, c] };
        fs::write(writes.file("count"), round.to_string()).unwrap();
        assert_eq!(fs::read_to_string(reads.file("count")).unwrap(), round.to_string());
    }
    // A file that is open goes on under the name that another host gives it.
    let mut open = File::options().read(true).write(true).create_new(true).open(a.file("one")).unwrap();
    open.write_all(b"one").unwrap();
    fs::create_dir(b.file("d")).unwrap();
    fs::rename(b.file("one"), b.file("d/two")).unwrap();
    open.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "one");
    open.write_all(b", two").unwrap();
    assert_eq!(fs::read_to_string(c.file("d/two")).unwrap(), "one, two");
    let number = open.metadata().unwrap().ino();
    assert_eq!(number, fs::metadata(a.file("d/two")).unwrap().ino());
    // So does a directory.
    let inside = a.file("d");
    let dir = File::open(&inside).unwrap();
    fs::rename(c.file("d"), c.file("e")).unwrap();
    let through = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&dir)));
    assert_eq!(listed(&through), ["two"]);
    fs::create_dir(through.join("three")).unwrap();
    assert_eq!(listed(&b.file("e")), ["three", "two"]);
    assert!(fs::metadata(&inside).is_err());
    // Two directories that another host moves at once, one below what lies in the other.
    for dir in ["d1", "d2", "d2/d3", "x"] {
        fs::create_dir(a.file(dir)).unwrap();
    }
    fs::write(a.file("d1/f"), "moved").unwrap();
    let (mut moved, held) = (File::open(a.file("d1/f")).unwrap(), File::open(a.file("d2/d3")).unwrap());
    fs::rename(b.file("d2"), b.file("x/d2")).unwrap();
    fs::rename(b.file("d1"), b.file("x/d2/d3/d1")).unwrap();
    let mut text = String::new();
    moved.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), listed(&a.file("x/d2/d3"))), ("moved", vec!["d1".to_string()]));
    drop((moved, held));
    // Attributes, links, sizes; what is removed is gone everywhere.
    fs::set_permissions(b.file("e"), fs::Permissions::from_mode(0o711)).unwrap();
    assert_eq!(fs::metadata(a.file("e")).unwrap().mode() & 0o777, 0o711);
    symlink("somewhere", c.file("link")).unwrap();
    assert_eq!(fs::read_link(a.file("link")).unwrap(), Path::new("somewhere"));
    fs::hard_link(a.file("e/two"), a.file("again")).unwrap();
    fs::remove_file(b.file("e/two")).unwrap();
    open.write_all(b", three").unwrap();
    assert_eq!(fs::read_to_string(c.file("again")).unwrap(), "one, two, three");
    File::options().write(true).open(c.file("again")).unwrap().set_len(3).unwrap();
    assert_eq!(fs::metadata(b.file("again")).unwrap().len(), 3);
    fs::remove_file(c.file("again")).unwrap();
    assert!(!a.file("again").exists() && fs::read_to_string(b.file("again")).is_err());
    // The name by which a host knows a file goes, on that host, and another host has given it a second one.
    let mut other = File::options().write(true).create_new(true).open(a.file("first")).unwrap();
    fs::hard_link(b.file("first"), b.file("second")).unwrap();
    fs::remove_file(a.file("first")).unwrap();
    assert_eq!(listed(&c.file("")).iter().filter(|name| name.contains("cond")).count(), 1);
    other.write_all(b"text").unwrap();
    assert_eq!(fs::read_to_string(b.file("second")).unwrap(), "text");
    // The same, and the handle is used in the turn in which the name goes.
    fs::hard_link(b.file("second"), b.file("third")).unwrap();
    assert_eq!(fs::read_to_string(a.file("second")).unwrap(), "text");
    fs::hard_link(b.file("third"), b.file("fourth")).unwrap();
    for name in ["second", "third"] {
        fs::remove_file(a.file(name)).unwrap();
    }
    other.write_all(b", and more").unwrap();
    assert_eq!(fs::read_to_string(c.file("fourth")).unwrap(), "text, and more");
    let gone = open.read(&mut [0; 4]).unwrap_err();
    assert_eq!(
        gone.raw_os_error(),
        Some(rustix::io::Errno::STALE.raw_os_error()),
        "it had no name any more when the turn ended"
    );
    drop((open, other, dir));
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// What is appended, by processes of all hosts at once, is all there, each piece whole and in its process's order.
#[test]
fn what_hosts_append_at_once_is_all_there() {
    const EACH: usize = 40;
    let lab = Lab::new();
    let hosts = shared(&lab);
    fs::write(hosts[0].file("log"), "").unwrap();
    std::thread::scope(|scope| {
        for host in hosts {
            scope.spawn(move || {
                let mut log = File::options().append(true).open(host.file("log")).unwrap();
                (0..EACH).for_each(|at| log.write_all(format!("{} {at}\n", host.name).as_bytes()).unwrap());
            });
        }
    });
    let log = fs::read_to_string(hosts[1].file("log")).unwrap();
    let mut seen: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (host, at) in log.lines().map(|line| line.split_once(' ').unwrap()) {
        seen.entry(host).or_default().push(at.parse().unwrap());
    }
    assert_eq!(seen.len(), hosts.len());
    assert!(seen.values().all(|all| all.iter().copied().eq(0..EACH)), "{seen:?}");
    unmounted_and_checked(&lab, &hosts);
}

const LEN: usize = 8192;

/// The first bytes of a file, in memory.
pub(crate) struct Map(*mut u8, usize);

impl Map {
    pub(crate) fn of(file: &File, access: ProtFlags) -> Map {
        Map::long(file, access, LEN)
    }

    fn long(file: &File, access: ProtFlags, len: usize) -> Map {
        // SAFETY: a new map, of a file that has this length as long as the test runs.
        Map(unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }.unwrap().cast(), len)
    }

    fn load(&self, at: usize) -> u8 {
        assert!(at < self.1);
        // SAFETY: within the map, which is there until the drop.
        unsafe { self.0.add(at).read_volatile() }
    }

    pub(crate) fn store(&self, at: usize, value: u8) {
        assert!(at < self.1);
        // SAFETY: as above; it is written through one that may be.
        unsafe { self.0.add(at).write_volatile(value) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: nothing refers into it any more.
        unsafe { munmap(self.0.cast(), self.1) }.unwrap();
    }
}

/// A page that one host maps shows what another has stored through a map of its own; stores of both stay.
#[test]
fn mapped_pages_go_from_host_to_host() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    fs::write(a.file("map"), vec![0; LEN]).unwrap();
    let open = |host: Host<'_>| File::options().read(true).write(true).open(host.file("map")).unwrap();
    let files = [open(a), open(b)];
    let maps = files.each_ref().map(|file| Map::of(file, ProtFlags::READ | ProtFlags::WRITE));
    for round in 0..10 {
        let value = round as u8 + 1;
        maps[0].store(round, value);
        assert_eq!(maps[1].load(round), value);
        maps[1].store(LEN / 2 + round, value);
        assert_eq!(maps[0].load(LEN / 2 + round), value);
        let mut bytes = [0; LEN];
        File::open(c.file("map")).unwrap().read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes[round], value);
    }
    // One that was mapped to be looked at, in a turn that looks, may be stored to later.
    let read = File::open(c.file("map")).unwrap();
    let looks = Map::of(&read, ProtFlags::READ);
    assert_eq!(looks.load(0), 1);
    fs::read(b.file("map")).unwrap();
    maps[0].store(0, 77);
    assert_eq!(looks.load(0), 77);
    drop((maps, files, looks, read));
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// Contents, size and mode are those that another host has given a file, by name and through handles that stay open.
#[test]
fn what_others_write_append_and_cut_off_is_seen_at_once() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    fs::write(a.file("f"), "").unwrap();
    let handles = [a, b, c].map(|host| File::open(host.file("f")).unwrap());
    let mut text = Vec::new();
    for round in 0..40_usize {
        let writes = [a, b, c][round % 3];
        let file = File::options().write(true).open(writes.file("f")).unwrap();
        match round % 4 {
            0 => text = vec![round as u8; 40_000 + 4096 * round],
            1 => text.extend([round as u8; 5000]),
            2 => text.truncate(text.len() / 2),
            _ => text[1000..2000].fill(round as u8),
        }
        file.set_len(text.len() as u64).unwrap();
        file.write_all_at(&text, 0).unwrap();
        let mode = 0o600 | (round as u32 % 0o70);
        file.set_permissions(fs::Permissions::from_mode(mode)).unwrap();
        drop(file);
        for (host, handle) in [a, b, c].iter().zip(&handles) {
            // Twice: nothing that the first call has brought along may stay.
            for _ in 0..2 {
                for found in [fs::metadata(host.file("f")).unwrap(), handle.metadata().unwrap()] {
                    assert_eq!((found.len(), found.mode() & 0o777), (text.len() as u64, mode), "{} {round}", host.name);
                }
                let mut read = vec![0; text.len() + 10];
                let len = handle.read_at(&mut read, 0).unwrap();
                assert!(read[..len] == text, "{} {round}: {len} bytes", host.name);
                assert!(fs::read(host.file("f")).unwrap() == text, "{} {round}", host.name);
            }
        }
    }
    drop(handles);
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// How often the kernel has asked a mount for names, and for what is in files.
fn asked(host: Host<'_>) -> [u64; 2] {
    let info: serde_json::Value =
        serde_json::from_str(&host.run(&format!("info --json m-{}", host.name)).ok().out).unwrap();
    let operations = info["mount"]["operations"].as_array().unwrap();
    ["fuse-lookup", "fuse-read"].map(|name| {
        operations.iter().find(|known| known["operation"] == name).map_or(0, |known| known["count"].as_u64().unwrap())
    })
}

/// A host that has had the vault for a while keeps names, attributes and contents, and asks for none of them again. All
/// of that is gone when another host changes something.
#[test]
fn what_a_kernel_keeps_it_forgets_before_another_host_changes_anything() {
    const NAMES: [&str; 6] = ["d/stays", "d/grows", "d/shrinks", "d/goes", "d/moves", "d/changes"];
    let lab = Lab::new();
    let hosts = shared(&lab);
    for round in 0..9_usize {
        let (keeps, changes) = (hosts[round % 3], hosts[(round + 1 + round / 3 % 2) % 3]);
        let dir = format!("d{round}");
        let (at, changed_at) = (keeps.file(&dir), changes.file(&dir));
        fs::create_dir_all(at.join("d")).unwrap();
        NAMES.iter().for_each(|name| fs::write(at.join(name), vec![1; 5000]).unwrap());
        let look = || {
            for name in NAMES {
                assert_eq!(fs::metadata(at.join(name)).unwrap().len(), 5000);
                assert!(fs::read(at.join(name)).unwrap() == vec![1; 5000], "{name} {round}");
            }
            assert!(!at.join("d/new").exists() && !at.join("e").exists());
        };
        // Until nothing is asked for that was asked for before.
        let end = Instant::now() + SOON;
        loop {
            look();
            let before = asked(keeps);
            look();
            if asked(keeps) == before {
                break;
            }
            assert!(Instant::now() < end, "nothing is kept");
            std::thread::sleep(Duration::from_millis(50));
        }
        let kept = File::open(at.join("d/grows")).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // While the kernel is asked for all of it on and on.
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    for name in NAMES {
                        let _ = (fs::metadata(at.join(name)), fs::read(at.join(name)), fs::metadata(at.join("e")));
                    }
                    let _ = (fs::read_dir(&at), File::open(at.join("d/new")));
                }
            });
            let mut grows = File::options().append(true).open(changed_at.join("d/grows")).unwrap();
            grows.write_all(&[2; 3000]).unwrap();
            let mut tail = [0; 4000];
            assert_eq!(kept.read_at(&mut tail, 5000).unwrap(), 3000, "{round}");
            assert_eq!(kept.metadata().unwrap().len(), 8000, "{round}");
            assert_eq!(fs::metadata(at.join("d/grows")).unwrap().len(), 8000, "{round}");
            File::options().write(true).open(changed_at.join("d/shrinks")).unwrap().set_len(10).unwrap();
            assert_eq!(fs::read(at.join("d/shrinks")).unwrap(), [1; 10], "{round}");
            fs::remove_file(changed_at.join("d/goes")).unwrap();
            assert!(!at.join("d/goes").exists(), "{round}");
            fs::write(changed_at.join("d/new"), "new").unwrap();
            assert_eq!(fs::read_to_string(at.join("d/new")).unwrap(), "new", "{round}");
            fs::rename(changed_at.join("d/moves"), changed_at.join("e")).unwrap();
            assert!(!at.join("d/moves").exists() && fs::read(at.join("e")).unwrap() == [1; 5000], "{round}");
            let written = File::options().write(true).open(changed_at.join("d/changes")).unwrap();
            written.write_all_at(&[3; 100], 2000).unwrap();
            written.set_permissions(fs::Permissions::from_mode(0o640)).unwrap();
            assert_eq!(fs::metadata(at.join("d/changes")).unwrap().mode() & 0o777, 0o640, "{round}");
            assert_eq!(fs::read(at.join("d/changes")).unwrap()[2000..2100], [3; 100], "{round}");
            fs::rename(&changed_at, changes.file("moved")).unwrap();
            assert!(!at.exists() && keeps.file("moved/e").exists(), "{round}");
            fs::rename(keeps.file("moved"), &at).unwrap();
            is_over.store(true, Ordering::Relaxed);
        });
    }
    unmounted_and_checked(&lab, &hosts);
}

/// A program that reads on and on, or from a map, keeps the vault from nobody.
#[test]
fn who_reads_on_and_on_is_interrupted() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    fs::write(a.file("long"), vec![7; 4 << 20]).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for is_mapped in [false, true] {
            let is_over = &is_over;
            scope.spawn(move || {
                let file = File::open(b.file("long")).unwrap();
                let map = is_mapped.then(|| Map::of(&file, ProtFlags::READ));
                let mut bytes = [0; 4096];
                while !is_over.load(Ordering::Relaxed) {
                    match &map {
                        Some(map) => assert_eq!(map.load(LEN / 2), 7),
                        None => (0..1024).for_each(|at| file.read_exact_at(&mut bytes, 4096 * at).unwrap()),
                    }
                }
            });
        }
        for round in 0..20 {
            a.write("short", &round.to_string()).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(fs::read_to_string(b.file("short")).unwrap(), "19");
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// While a size changes, the kernel writes no page of the file: a turn that ends then does not wait for such a page.
#[test]
fn who_changes_sizes_and_stores_into_a_map_keeps_the_vault_from_nobody() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    fs::write(a.file("map"), vec![0; LEN]).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = File::options().read(true).write(true).open(a.file("map")).unwrap();
            let map = Map::of(&file, ProtFlags::READ | ProtFlags::WRITE);
            for round in 1.. {
                map.store(round % LEN, 1);
                file.set_len((LEN + 4096 * (round % 100)) as u64).unwrap();
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for round in 0..20 {
            b.write("short", &round.to_string()).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(lab.metric("sessions_held_on_total"), 0.0);
    assert_eq!(fs::read_to_string(a.file("short")).unwrap(), "19");
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// Programs read long files, through maps and through the page cache, and find nothing of them there after each turn:
/// some request for pages is always under way. None sees anything older than what another host has written before.
#[test]
fn who_reads_long_files_on_and_on_sees_what_others_write_into_them() {
    const LONG: usize = 8 << 20;
    const PIECE: usize = 1 << 16;
    const FILES: usize = 3;
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    let name = |file: usize| format!("long-{file}");
    (0..FILES).for_each(|file| fs::write(a.file(&name(file)), vec![0; LONG]).unwrap());
    // The last value of each piece, of each file.
    let known: Vec<AtomicU64> = (0..FILES * LONG / PIECE).map(|_| AtomicU64::new(0)).collect();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..16_usize {
            let (is_over, known) = (&is_over, &known);
            scope.spawn(move || {
                let file = File::open(b.file(&name(reader % FILES))).unwrap();
                let map = Map::long(&file, ProtFlags::READ, LONG);
                let (mut seed, mut next, mut bytes) = (reader + 1, 7 * reader, [0; PIECE]);
                while !is_over.load(Ordering::Relaxed) {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    // Half of them go on from piece to piece, so that the kernel reads ahead.
                    next = (next + 1) % (LONG / PIECE);
                    let at = if reader % 4 < 2 { (seed >> 33) % (LONG / PIECE) } else { next };
                    let before = known[reader % FILES * (LONG / PIECE) + at].load(Ordering::SeqCst) as u8;
                    if reader % 2 == 0 {
                        assert!(map.load(at * PIECE + (seed >> 50) % PIECE) >= before, "piece {at}");
                    } else {
                        file.read_exact_at(&mut bytes, (at * PIECE) as u64).unwrap();
                        assert!(bytes.iter().all(|byte| *byte >= before), "piece {at}");
                    }
                }
            });
        }
        let files: Vec<_> =
            (0..FILES).map(|file| File::options().write(true).open(a.file(&name(file))).unwrap()).collect();
        for round in 1..40_u8 {
            // So that the readers have the vault in between.
            std::thread::sleep(Duration::from_millis(20));
            let (file, at) = (usize::from(round) % FILES, usize::from(round) * 5 % 8 * (LONG / PIECE / 8));
            for at in at..at + 4 {
                files[file].write_all_at(&[round; PIECE], (at * PIECE) as u64).unwrap();
                known[file * (LONG / PIECE) + at].store(round.into(), Ordering::SeqCst);
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(lab.metric("sessions_held_on_total"), 0.0);
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// Processes of all hosts read and write one file, a block at a time, each value once. Whoever reads gets what was
/// there at some moment of its call: never a value older than one that was written, or read, before the call began.
#[test]
fn blocks_are_linearizable_and_names_are_one_hosts_each() {
    const BLOCKS: u64 = 3;
    const EACH: u64 = 40;
    let lab = Lab::new();
    let hosts = shared(&lab);
    fs::write(hosts[0].file("blocks"), vec![0; 4096 * BLOCKS as usize]).unwrap();
    // One writer a block at a time: so the order of values is that of the lock.
    let writing: Vec<Mutex<u64>> = (0..BLOCKS).map(|_| Mutex::new(0)).collect();
    let known: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        for (number, host) in hosts.into_iter().enumerate() {
            let (writing, known) = (&writing, &known);
            scope.spawn(move || {
                let file = File::options().read(true).write(true).open(host.file("blocks")).unwrap();
                let other = File::open(host.file("blocks")).unwrap();
                for round in 0..EACH {
                    let block = (round + number as u64) % BLOCKS;
                    let (at, slot) = (4096 * block, block as usize);
                    if (round + number as u64).is_multiple_of(2) {
                        let mut last = writing[slot].lock().unwrap();
                        *last += 1;
                        file.write_all_at(&[&last.to_le_bytes()[..], &[*last as u8; 4088]].concat(), at).unwrap();
                        known[slot].fetch_max(*last, Ordering::SeqCst);
                    } else {
                        let before = known[slot].load(Ordering::SeqCst);
                        let mut bytes = [0; 4096];
                        let from = if round % 4 < 2 { &file } else { &other };
                        from.read_exact_at(&mut bytes, at).unwrap();
                        let value = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                        assert!(value >= before, "{}: block {block} was {before}, and is {value}", host.name);
                        assert!(bytes[8..].iter().all(|byte| *byte == value as u8), "a block in parts");
                        known[slot].fetch_max(value, Ordering::SeqCst);
                    }
                }
                // One of the hosts makes each name, exclusively.
                (0..EACH).filter(|at| File::create_new(host.file(&format!("name-{at}"))).is_ok()).count()
            });
        }
    });
    let names = listed(&hosts[1].file("")).into_iter().filter(|name| name.starts_with("name-")).count();
    assert_eq!(names as u64, EACH);
    unmounted_and_checked(&lab, &hosts);
}

/// A host that has the vault is killed, another is stopped for longer than a term: what was synced is there, the others
/// go on, and so does the one that was stopped, by itself.
#[test]
fn a_host_that_is_killed_or_stopped_is_waited_for_and_the_others_go_on() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    a.write("synced", "of a").unwrap();
    let daemon = Pid::from_raw(a.daemon() as i32).unwrap();
    // Not by a program: as it starts, it closes files of this process, and asks the mount.
    let stop = |signal| kill_process(daemon, signal).unwrap();
    stop(Signal::STOP);
    assert_eq!(fs::read_to_string(b.file("synced")).unwrap(), "of a");
    b.write("synced", "of b").unwrap();
    stop(Signal::CONT);
    // A call in the turn that was lost may fail; behind that its session is a new one.
    until("the host that was stopped goes on", || fs::read_to_string(a.file("synced")).is_ok());
    assert_eq!(fs::read_to_string(a.file("synced")).unwrap(), "of b");
    until("it writes", || a.write("synced", "of a again").is_ok());
    assert_eq!(fs::read_to_string(c.file("synced")).unwrap(), "of a again");
    c.write("late", "of c").unwrap();
    kill(c.daemon(), "-KILL");
    assert_eq!(fs::read_to_string(b.file("late")).unwrap(), "of c");
    let _ = Command::new("umount").arg("-l").arg(c.file("")).output();
    mount(c);
    assert_eq!(fs::read_to_string(c.file("late")).unwrap(), "of c");
    unmounted_and_checked(&lab, &[a, b, c]);
}

#[test]
fn what_a_shared_mount_does_not_do_it_says() {
    let lab = Lab::new();
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    a.run("init store/v").ok();
    a.run("mount --shared store/v m-a").code(28).says("anchor move");
    // Another host does not know where it is.
    b.run("mount --shared store/v m-b").code(60).says("--anchor server://HOST");
    let id = a.id("store/v");
    lab.grant(a, &id);
    lab.grant(b, &id);
    a.run(&format!("anchor move store/v {}", lab.url())).ok();
    a.run("mount --shared --cache=writeback store/v m-a").code(2);
    a.run("mount -o shared,cache=writeback store/v m-a").code(2);
    a.run("mount --shared --freshness=interval store/v m-a").code(2).says("fsync");
    a.run("mount --shared --idle 5 store/v m-a").code(2);
    a.run("mount --shared store/v m-a").ok();
    a.write("f", "text").unwrap();
    // A plain mount, and a command, of another host wait for its end.
    b.mount().code(63).says("host a");
    a.run("key unload m-a").code(28).says("in turn");
    let told = a.run("info m-a").ok().out;
    assert!(told.contains(&id) && told.contains(&lab.url()), "{told}");
    a.umount().ok();
    lab.wait_until_free();
    assert!(a.run("anchor status store/v").ok().out.contains(&lab.url()));
    b.mount().ok();
    assert_eq!(fs::read_to_string(b.file("f")).unwrap(), "text");
    a.run("mount --shared store/v m-a").code(63).says("host b");
    b.umount().ok();
}

/// Hosts that only read have the vault together, and a host that writes has it in between.
#[test]
fn hosts_that_read_have_the_vault_together() {
    let lab = Lab::new();
    let hosts = ["a", "b", "c"].map(|name| lab.joined(name));
    let [a, b, c] = hosts;
    let id = lab.vault(a);
    [b, c].iter().for_each(|host| lab.grant(*host, &id));
    mount(a);
    a.write("f", "one").unwrap();
    for host in [b, c] {
        host.run(&format!("mount --shared --read-only --anchor {} store/v m-{}", lab.url(), host.name)).ok();
    }
    let read = |host: Host<'_>| fs::read_to_string(host.file("f")).unwrap();
    assert_eq!([read(b), read(c)], ["one", "one"]);
    let turns = lab.metric("turns_total");
    for _ in 0..20 {
        assert_eq!([read(b), read(c)], ["one", "one"]);
    }
    assert_eq!(lab.metric("turns_total"), turns, "readers do not take the vault from one another");
    a.write("f", "two").unwrap();
    assert_eq!([read(b), read(c), read(a)], ["two", "two", "two"]);
    assert_eq!(
        fs::write(b.file("f"), "three").unwrap_err().raw_os_error(),
        Some(rustix::io::Errno::ROFS.raw_os_error())
    );
    unmounted_and_checked(&lab, &hosts);
}
