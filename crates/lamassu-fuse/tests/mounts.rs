//! Mounts as such: options, unmounting, freezing. Over `PlainFs`.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use lamassu_fuse::control::{ControlError, Root};
use lamassu_fuse::{CacheMode, MountError, MountOptions, Mounted, Mountpoint};
use lamassu_plain::PlainFs;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

struct Fixture {
    mounted: Mounted,
    store: PathBuf,
    point: PathBuf,
    _dirs: [tempfile::TempDir; 2],
}

/// `None`, with a line that says why, where nothing can be mounted.
fn fixture(options: &MountOptions) -> Option<Fixture> {
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: there is no /dev/fuse on this machine");
        return None;
    }
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [store, point] = [dirs[0].path().to_path_buf(), dirs[1].path().to_path_buf()];
    rustix::process::umask(rustix::fs::Mode::empty());
    let fs = Arc::new(PlainFs::open(&store).unwrap());
    let mounted = lamassu_fuse::mount(fs, &point, options).unwrap();
    Some(Fixture { mounted, store, point, _dirs: dirs })
}

fn finish(f: Fixture) {
    let begun = Instant::now();
    // A child that another test starts has this test's files open between fork and exec.
    while let Err(error) = f.mounted.unmounter().unmount(false) {
        assert!(matches!(error, MountError::Busy(_)) && begun.elapsed() < Duration::from_secs(20), "{error}");
        std::thread::sleep(Duration::from_millis(10));
    }
    f.mounted.wait().unwrap();
}

fn mountinfo(point: &Path) -> Option<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().find(|l| l.split(' ').nth(4) == point.to_str()).map(str::to_owned)
}

#[test]
fn the_mount_shows_its_name_and_options() {
    let mut options = MountOptions { fsname: "/srv/my vault".into(), ..MountOptions::default() };
    options.apply("ro,noexec,noatime").unwrap();
    let Some(f) = fixture(&options) else { return };
    let line = mountinfo(&f.point).unwrap();
    for word in
        ["fuse.lamassu", "/srv/my\\040vault", "ro", "noexec", "nosuid", "nodev", "noatime", "default_permissions"]
    {
        assert!(line.contains(word), "{word} in {line}");
    }
    let refused = fs::write(f.point.join("x"), b"").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    let point = f.point.clone();
    finish(f);
    assert_eq!(mountinfo(&point), None);
}

#[test]
fn read_ahead_is_raised() {
    let Some(f) = fixture(&MountOptions { read_ahead_kib: 1536, ..MountOptions::default() }) else { return };
    let line = mountinfo(&f.point).unwrap();
    let device = line.split(' ').nth(2).unwrap();
    let path = format!("/sys/class/bdi/{device}/read_ahead_kb");
    if File::options().write(true).open(&path).is_ok() {
        assert_eq!(fs::read_to_string(path).unwrap().trim(), "1536");
    }
    finish(f);
}

#[test]
fn the_kernel_may_gather_random_writes() {
    let Some(f) = fixture(&MountOptions::default()) else { return };
    let line = mountinfo(&f.point).unwrap();
    let limits = format!("/sys/class/bdi/{}", line.split(' ').nth(2).unwrap());
    if File::options().write(true).open(format!("{limits}/max_ratio_fine")).is_err() {
        eprintln!("SKIPPED: limits of dirty pages cannot be set here, or not finely");
        return finish(f);
    }
    let number = |name: &str| fs::read_to_string(format!("{limits}/{name}")).unwrap().trim().parse::<u64>().unwrap();
    let file = File::options().write(true).create(true).truncate(true).open(f.point.join("f")).unwrap();
    let write = |block: &[u8], n: u64| {
        file.write_all_at(block, n * (2 << 20)).unwrap();
        file.sync_data().unwrap();
    };
    assert!((2_000..=10_000).contains(&number("max_ratio_fine")), "{}", number("max_ratio_fine"));
    (0..64).for_each(|n| write(&[1; 4096], n));
    assert_eq!((number("min_ratio"), number("max_ratio_fine")), (10, 100_000));
    (0..4).for_each(|n| write(&vec![2; 1 << 20], n));
    assert_eq!((number("min_ratio"), number("max_ratio_fine")), (0, 10_000));
    drop(file);
    finish(f);
}

#[test]
fn a_busy_mount_is_not_torn_down_unless_lazily() {
    let Some(f) = fixture(&MountOptions::default()) else { return };
    let file = File::options().read(true).write(true).create(true).truncate(true).open(f.point.join("f")).unwrap();
    file.write_all_at(b"one", 0).unwrap();
    assert!(matches!(f.mounted.unmounter().unmount(false), Err(MountError::Busy(_))));
    assert!(f.point.join("f").exists(), "still there");
    f.mounted.unmounter().unmount(true).unwrap();
    assert!(!f.point.join("f").exists(), "out of sight");
    f.mounted.unmounter().unmount(true).unwrap();
    file.write_all_at(b"two", 3).unwrap();
    drop(file);
    f.mounted.wait().unwrap();
    assert_eq!(fs::read(f.store.join("f")).unwrap(), b"onetwo");
}

#[test]
fn wait_returns_when_others_unmount() {
    let Some(f) = fixture(&MountOptions::default()) else { return };
    fs::write(f.point.join("x"), b"kept").unwrap();
    assert!(Command::new("umount").arg(&f.point).status().unwrap().success());
    f.mounted.wait().unwrap();
    assert_eq!(fs::read(f.store.join("x")).unwrap(), b"kept");
}

#[test]
fn dropping_unmounts() {
    let Some(f) = fixture(&MountOptions::default()) else { return };
    let point = f.point.clone();
    drop(f.mounted);
    assert_eq!(mountinfo(&point), None);
}

#[test]
fn a_freeze_holds_changes_and_lets_reads_pass() {
    for cache in [CacheMode::WriteBack, CacheMode::Through, CacheMode::None] {
        // Fewer threads than writers.
        let Some(f) = fixture(&MountOptions { cache, threads: 2, ..MountOptions::default() }) else { return };
        for i in 0..12 {
            fs::create_dir(f.point.join(format!("d{i}"))).unwrap();
            fs::write(f.point.join(format!("d{i}/old")), b"old").unwrap();
        }
        // Only in the page cache when the freeze begins.
        let dirty = File::create(f.point.join("dirty")).unwrap();
        dirty.write_all_at(&[7; 3_000_000], 0).unwrap();

        assert!(!Root::open(&f.point).and_then(|root| root.status()).unwrap().frozen);
        assert!(matches!(Root::open(&f.point).and_then(|root| root.thaw()), Err(ControlError::NotFrozen)));
        Root::open(&f.point).and_then(|root| root.freeze()).unwrap();
        assert!(matches!(Root::open(&f.point).and_then(|root| root.freeze()), Err(ControlError::AlreadyFrozen)));
        assert_eq!(fs::read(f.store.join("dirty")).unwrap(), vec![7; 3_000_000], "{cache:?}: all of it arrived");

        let done = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for i in 0..12 {
                let (point, done) = (&f.point, &done);
                scope.spawn(move || {
                    let dir = point.join(format!("d{i}"));
                    fs::write(dir.join("new"), b"new").unwrap();
                    fs::rename(dir.join("new"), dir.join("newer")).unwrap();
                    done.fetch_add(1, Ordering::SeqCst);
                });
            }
            while Root::open(&f.point).and_then(|root| root.status()).unwrap().waiting < 12 {
                std::thread::yield_now();
            }
            for _ in 0..20 {
                assert_eq!(fs::read(f.store.join("d3/old")).unwrap(), b"old");
                assert_eq!(fs::read(f.point.join("dirty")).unwrap().len(), 3_000_000);
                assert_eq!(fs::read_dir(&f.point).unwrap().count(), 13);
            }
            assert!(!f.store.join("d3/new").exists());
            assert_eq!(done.load(Ordering::SeqCst), 0);
            Root::open(&f.point).and_then(|root| root.thaw()).unwrap();
        });
        drop(dirty);
        for i in 0..12 {
            assert_eq!(fs::read(f.point.join(format!("d{i}/newer"))).unwrap(), b"new");
        }
        assert_eq!(Root::open(&f.point).and_then(|root| root.status()).unwrap().waiting, 0);
        finish(f);
    }
}

/// Whatever ends the process that has frozen it: all of that closes its descriptor.
#[test]
fn a_freeze_can_end_with_who_asked_for_it() {
    let Some(f) = fixture(&MountOptions::default()) else { return };
    let frozen = || Root::open(&f.point).and_then(|root| root.status()).unwrap().frozen;
    let holder = Root::open(&f.point).unwrap();
    holder.freeze_while_open().unwrap();
    assert!(matches!(Root::open(&f.point).and_then(|root| root.freeze()), Err(ControlError::AlreadyFrozen)));
    assert!(frozen(), "others that are closed end nothing");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| fs::write(f.point.join("f"), b"written while frozen").unwrap());
        while Root::open(&f.point).and_then(|root| root.status()).unwrap().waiting == 0 {
            std::thread::yield_now();
        }
        drop(holder);
        writer.join().unwrap();
    });
    assert_eq!(fs::read(f.point.join("f")).unwrap(), b"written while frozen");
    while frozen() {
        std::thread::yield_now();
    }
    // A thaw ends it before, and the next freeze is another one's.
    let holder = Root::open(&f.point).unwrap();
    holder.freeze_while_open().unwrap();
    holder.thaw().unwrap();
    Root::open(&f.point).and_then(|root| root.freeze()).unwrap();
    drop(holder);
    assert!(frozen());
    Root::open(&f.point).and_then(|root| root.thaw()).unwrap();
    finish(f);
}

/// Who has frozen a mount as long as a directory is open learns whether it has lasted, and ends no freeze of others.
#[test]
fn only_ones_own_freeze_is_ended() {
    let Some(f) = fixture(&MountOptions::default()) else { return };
    let open = || Root::open(&f.point).unwrap();
    let not_frozen = |thawed| assert!(matches!(thawed, Err(ControlError::NotFrozen)), "{thawed:?}");
    let frozen = || open().status().unwrap().frozen;
    let holder = open();
    holder.freeze_while_open().unwrap();
    not_frozen(open().thaw_own());
    assert!(matches!(open().thaw_to_unmount(), Err(ControlError::AlreadyFrozen)));
    assert!(frozen(), "it is the holder's");
    holder.thaw_own().unwrap();
    assert!(!frozen());
    not_frozen(holder.thaw_own());
    // Somebody else ends it, and freezes.
    holder.freeze_while_open().unwrap();
    open().thaw().unwrap();
    not_frozen(holder.thaw_own());
    open().freeze().unwrap();
    not_frozen(holder.thaw_own());
    assert!(frozen());
    open().thaw_to_unmount().unwrap();
    assert!(!frozen());
    // One that lasts until a thaw is nobody's.
    holder.freeze().unwrap();
    not_frozen(holder.thaw_own());
    holder.thaw().unwrap();
    drop(holder);
    finish(f);
}

#[test]
fn a_frozen_mount_can_be_unmounted_and_loses_nothing() {
    let Some(f) = fixture(&MountOptions::default()) else { return };
    let file = File::create(f.point.join("f")).unwrap();
    Root::open(&f.point).and_then(|root| root.freeze()).unwrap();
    file.write_all_at(b"written while frozen", 0).unwrap();
    let closer = std::thread::spawn(move || drop(file));
    let unmounter = f.mounted.unmounter();
    while let Err(error) = unmounter.unmount(false) {
        assert!(matches!(error, MountError::Busy(_)), "{error}");
        std::thread::yield_now();
    }
    closer.join().unwrap();
    f.mounted.wait().unwrap();
    assert_eq!(fs::read(f.store.join("f")).unwrap(), b"written while frozen");
}

#[test]
fn only_the_root_of_a_mount_is_controlled() {
    let Some(f) = fixture(&MountOptions::default()) else { return };
    fs::create_dir(f.point.join("sub")).unwrap();
    assert!(matches!(
        Root::open(&f.point.join("sub")).and_then(|root| root.status()),
        Err(ControlError::NotMounted(_))
    ));
    assert!(matches!(Root::open(&f.store).and_then(|root| root.status()), Err(ControlError::NotMounted(_))));
    assert!(matches!(Root::open(&f.store).and_then(|root| root.freeze()), Err(ControlError::NotMounted(_))));
    finish(f);
}

/// Between the moment when a mount point is named and the mount, a key is typed. Meanwhile whoever owns the directory
/// above it puts something else in its place.
#[test]
fn what_is_mounted_on_is_the_directory_that_was_named() {
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: there is no /dev/fuse on this machine");
        return;
    }
    let (store, above) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let above = above.path().canonicalize().unwrap();
    let at = |name: &str| above.join(name);
    let mount_on = |point: &Mountpoint, options: &MountOptions| {
        let fs = Arc::new(PlainFs::open(store.path()).unwrap());
        lamassu_fuse::mount_answering(fs, point, options, None)
    };
    let nothing_is_mounted =
        || assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains(above.to_str().unwrap()));
    let link_to_other = || std::os::unix::fs::symlink(at("other"), at("m")).unwrap();
    let other_directory = || fs::create_dir(at("m")).unwrap();
    for plant in [&link_to_other as &dyn Fn(), &other_directory, &|| {}] {
        for name in ["m", "other"] {
            fs::create_dir(at(name)).unwrap();
        }
        let point = Mountpoint::open(&at("m")).unwrap();
        fs::rename(at("m"), at("moved")).unwrap();
        plant();
        let refused = mount_on(&point, &MountOptions::default()).err().unwrap();
        assert!(matches!(refused, MountError::Mountpoint { .. }), "{refused}");
        nothing_is_mounted();
        for name in ["other", "moved"] {
            fs::remove_dir(at(name)).unwrap();
        }
        let _ = fs::remove_file(at("m")).or_else(|_| fs::remove_dir(at("m")));
    }
    // Emptiness counts when it is mounted.
    fs::create_dir(at("m")).unwrap();
    let point = Mountpoint::open(&at("m")).unwrap();
    fs::write(at("m/file"), b"").unwrap();
    assert!(matches!(mount_on(&point, &MountOptions::default()), Err(MountError::NotEmpty(_))));
    nothing_is_mounted();
    // A link that was named is followed, once.
    fs::create_dir(at("other")).unwrap();
    std::os::unix::fs::symlink(at("m"), at("link")).unwrap();
    let point = Mountpoint::open(&at("link")).unwrap();
    fs::remove_file(at("link")).unwrap();
    std::os::unix::fs::symlink(at("other"), at("link")).unwrap();
    let options = MountOptions { nonempty: true, ..MountOptions::default() };
    let named_before = Mountpoint::open(&at("m")).unwrap();
    let mounted = mount_on(&point, &options).unwrap();
    assert_eq!(mounted.mountpoint(), at("m"));
    // Nothing is mounted over what was mounted meanwhile.
    let refused = mount_on(&named_before, &options).err().unwrap();
    assert!(matches!(refused, MountError::Mountpoint { .. }), "{refused}");
    assert!(mountinfo(&at("m")).is_some() && mountinfo(&at("other")).is_none());
    mounted.unmounter().unmount(false).unwrap();
    assert!(mountinfo(&at("m")).is_none());
    mounted.wait().unwrap();
}
