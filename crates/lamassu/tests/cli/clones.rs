//! `clone` and `snapshot`: content, sharing of blocks, keys, and what is refused.

use crate::mounts::strangers_mount;
use crate::support::{Bench, noise};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// A vault with one of everything, filled through a mount.
fn filled(b: &Bench, vault: &str) {
    b.run(&format!("init {vault}")).ok();
    let mnt = b.dir("mnt");
    b.run(&format!("mount {vault} mnt")).ok();
    fs::create_dir(mnt.join("sub")).unwrap();
    fs::write(mnt.join("sub/large"), noise(1 << 20, 7)).unwrap();
    fs::write(mnt.join("small"), b"a few bytes").unwrap();
    fs::write(mnt.join("empty"), b"").unwrap();
    fs::hard_link(mnt.join("sub/large"), mnt.join("again")).unwrap();
    std::os::unix::fs::symlink("sub/large", mnt.join("link")).unwrap();
    let sparse = fs::File::create(mnt.join("sparse")).unwrap();
    sparse.set_len(64 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"in the middle", 32 << 20).unwrap();
    drop(sparse);
    fs::set_permissions(mnt.join("small"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::create_dir(mnt.join("sub").join("n".repeat(250))).unwrap();
    assert!(Command::new("mkfifo").arg(mnt.join("fifo")).status().unwrap().success());
    assert!(
        Command::new("setfattr")
            .args(["-n", "user.colour", "-v", "blue"])
            .arg(mnt.join("small"))
            .status()
            .unwrap()
            .success()
    );
    assert!(
        Command::new("touch").args(["-d", "2001-02-03 04:05:06.789"]).arg(mnt.join("sub")).status().unwrap().success()
    );
    b.unmount("mnt");
}

/// What `ls -R --json` says, less the inode numbers, and the digests of all files.
fn content(b: &Bench, vault: &str) -> (String, Vec<Vec<u8>>) {
    let listed = b.run(&format!("ls -R -l {vault}")).ok().text();
    let cat = |name: &str| b.run(&format!("cat {vault} {name}")).ok().out;
    (listed, ["sub/large", "small", "sparse", "again"].map(cat).to_vec())
}

#[test]
fn a_clone_has_all_there_is_and_goes_its_own_way() {
    let b = Bench::new();
    filled(&b, "v");
    b.run("clone --trust-store v w").ok().says("made clone");
    assert_eq!(content(&b, "v"), content(&b, "w"));
    b.run("check w").ok();
    let id = |vault: &str| b.run(&format!("info --json {vault}")).ok().json();
    let (v, w) = (id("v"), id("w"));
    assert_ne!(v["id"], w["id"]);
    assert_eq!(v["zone"], w["zone"], "the same K_in");
    assert_eq!(w["slots"].as_array().unwrap().len(), 1);

    // Backing entries: links stay links, holes stay holes, times are kept.
    let (large, again) = (b.stored("w", "sub/large"), b.stored("w", "again"));
    assert_eq!(large.metadata().unwrap().ino(), again.metadata().unwrap().ino());
    let blocks = |vault: &str| b.stored(vault, "sparse").metadata().unwrap().blocks();
    assert!(blocks("w") <= blocks("v") + 16, "{} {}", blocks("w"), blocks("v"));
    let meta = |vault: &str, name: &str| b.stored(vault, name).symlink_metadata().unwrap();
    for name in ["sub", "sub/large", "small", "link", "fifo", "empty"] {
        let (of_v, of_w) = (meta("v", name), meta("w", name));
        assert_eq!(
            (of_v.mtime(), of_v.mtime_nsec(), of_v.mode()),
            (of_w.mtime(), of_w.mtime_nsec(), of_w.mode()),
            "{name}"
        );
        assert_ne!(of_v.ino(), of_w.ino());
    }
    assert!(meta("w", "fifo").file_type().is_fifo());
    assert!(!b.path("w/lamassu.vault.new").exists());

    // Written here is not there.
    b.file("new", b"news");
    b.run("cp w new vault:/small").ok();
    assert_eq!(b.run("cat w small").ok().out, b"news");
    assert_eq!(b.run("cat v small").ok().out, b"a few bytes");
}

#[test]
fn new_keys_are_the_clone_s_alone() {
    let b = Bench::new();
    filled(&b, "v");
    let made =
        b.run("clone --new-key --trust-store --json --snapshot s v w").ok().says("keys the original never has").json();
    let epochs = |n: usize| (made["copies"][n]["inner_epoch"].clone(), made["copies"][n]["outer_epoch"].clone());
    assert_eq!((epochs(0), epochs(1)), ((1.into(), 1.into()), (2.into(), 2.into())));
    assert_eq!(made["copies"][1]["zone"], made["copies"][1]["id"], "it has left its zone");
    assert_eq!(content(&b, "v"), content(&b, "w"));
    assert_eq!(content(&b, "v"), content(&b, "s"));

    // The same bytes written to both are not the same in the store any more.
    let bytes = noise(8192, 3);
    b.file("f", &bytes);
    for vault in ["v", "w"] {
        b.run(&format!("cp {vault} f vault:/f")).ok();
        b.run(&format!("check {vault}")).ok();
    }
    let block = |vault: &str| fs::read(b.stored(vault, "f")).unwrap()[4096..8192].to_vec();
    assert_ne!(block("v"), block("w"));
    // The original's keys open nothing of it: with its header in place the new file is not to be read.
    fs::copy(b.path("v/lamassu.vault"), b.path("w/lamassu.vault")).unwrap();
    // The anchor refuses the older header, so this is read without it.
    b.run("cat w small").code(30);
    b.run("cat --anchor none w small").ok();
    b.run("cat --anchor none w f").code(26);
}

#[test]
fn a_snapshot_is_not_written() {
    let b = Bench::new();
    filled(&b, "v");
    b.run("snapshot --trust-store v s").ok().says("made snapshot");
    assert_eq!(b.run("info --json s").ok().json()["read_only"], true);
    assert_eq!(content(&b, "v"), content(&b, "s"));
    b.file("f", b"f");
    b.run("cp s f vault:/f").code(28).says("snapshot");
    b.run("check --repair s").code(28);
    b.run("key rotate --outer s").code(28).says("snapshot");
    b.run("check s").ok();
    b.dir("mnt");
    b.run("mount s mnt").ok().says("read-only");
    assert_eq!(fs::read(b.path("mnt/small")).unwrap(), b"a few bytes");
    assert_eq!(fs::write(b.path("mnt/x"), b"x").unwrap_err().raw_os_error(), Some(libc::EROFS));
    b.run("clone s w").ok();
    b.unmount("mnt");
    b.run("cp w f vault:/f").ok();
    // The mark is under the MAC.
    let header = fs::read_to_string(b.path("s/lamassu.vault")).unwrap();
    let line = header.lines().find(|l| l.contains("read_only")).unwrap().to_owned() + "\n";
    fs::write(b.path("s/lamassu.vault"), header.replace(&line, "")).unwrap();
    b.run("cp s f vault:/f").code(23);
}

#[test]
fn a_mounted_vault_is_frozen_while_it_is_copied() {
    let b = Bench::new();
    b.run("init v").ok();
    let mnt = b.dir("mnt");
    b.run("mount v mnt").ok();
    fs::write(mnt.join("f"), noise(300_000, 1)).unwrap();
    b.run("clone v w").ok();
    fs::write(mnt.join("after"), b"after").unwrap(); // would hang if it were frozen still
    b.run("check w").ok();
    assert_eq!(b.run("cat w f").ok().out, noise(300_000, 1));
    assert_eq!(b.run("ls w").ok().text().trim(), "f");
    b.run("clone v mnt/w").code(6).says("lies in");
    b.unmount("mnt");
}

#[test]
fn what_is_refused() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("there");
    b.run("clone v there").code(6).says("exists already");
    b.run("clone v v/w").code(6).says("lies in");
    b.run("clone v nowhere/w").code(6);
    b.run("clone there w").code(6).says("is not a vault");
    b.key("other");
    b.run(&format!("clone -k raw:file:{} v w", b.path("other").display())).code(12);
    assert!(!b.path("w").exists());
}

/// The program is killed while it copies: what it leaves is no vault, and does not keep the original from being used.
#[test]
fn a_copy_cut_off_is_no_vault() {
    let b = Bench::new();
    b.run("init v").ok();
    let mnt = b.dir("mnt");
    b.run("mount v mnt").ok();
    for i in 0..400 {
        fs::write(mnt.join(format!("f{i}")), noise(20_000, i)).unwrap();
    }
    b.unmount("mnt");
    let (mut caught, patience) = (0, Instant::now() + Duration::from_secs(300));
    for round in 0.. {
        // On a busy machine a copy may be done before this test is told that it has begun.
        if round >= 12 && (caught > 0 || Instant::now() > patience) {
            break;
        }
        let copy = format!("w{round}");
        let mut child = b.command(["-q", "clone", "v", &copy]).spawn().unwrap();
        while !b.path(&copy).exists() && child.try_wait().unwrap().is_none() {}
        std::thread::sleep(Duration::from_millis(round % 12));
        let _ = child.kill();
        child.wait().unwrap();
        if b.path(&copy).exists() && !b.path(&copy).join("lamassu.vault").exists() {
            caught += 1;
            b.run(&format!("check {copy}")).code(6).says("is not a vault");
        } else if b.path(&copy).exists() {
            b.run(&format!("check {copy}")).ok();
        }
        b.run(&format!("clone v {copy}x")).ok();
    }
    assert!(caught > 0, "the kill never came in time");
}

/// A file system in a file, unmounted at the end.
pub struct Image(std::path::PathBuf);

impl Image {
    /// None where this machine cannot.
    fn xfs(b: &Bench) -> Option<Image> {
        Image::made(b, "xfs", &["-q", "-m", "reflink=1"])
    }

    /// Mounted at the name of its kind.
    pub fn made(b: &Bench, kind: &str, options: &[&str]) -> Option<Image> {
        let (image, dir) = (b.path(&format!("{kind}.img")), b.dir(kind));
        fs::File::create(&image).unwrap().set_len(400 << 20).unwrap();
        let ran = |command: &mut Command| command.output().is_ok_and(|o| o.status.success());
        let made = ran(Command::new(format!("mkfs.{kind}")).args(options).arg(&image))
            && ran(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&dir));
        if !made {
            eprintln!("SKIPPED: no {kind} in a loop image here");
        }
        made.then_some(Image(dir))
    }

    fn used(&self) -> u64 {
        let st = rustix::fs::statvfs(&self.0).unwrap();
        (st.f_blocks - st.f_bfree) * st.f_frsize
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).output();
    }
}

fn extents(path: &Path) -> String {
    let out = Command::new("filefrag").arg("-v").arg(path).output().unwrap();
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[test]
fn blocks_are_shared_where_the_store_can() {
    let b = Bench::new();
    let Some(xfs) = Image::xfs(&b) else { return };
    b.run("init xfs/v").ok();
    b.file("f", &noise(40 << 20, 5));
    b.run("cp xfs/v f vault:/f").ok();
    let before = xfs.used();
    let made = b.run("clone --json xfs/v xfs/w").ok().json();
    assert_eq!(
        (made["copies"][0]["shared_files"].as_u64(), made["copies"][0]["copied_bytes"].as_u64()),
        (Some(2), Some(0)),
        "the file and its tree"
    );
    assert!(xfs.used() < before + (2 << 20), "{before} {}", xfs.used());
    let stored = b.stored("xfs/w", "f");
    assert!(extents(&stored).contains("shared"), "{}", extents(&stored));
    assert_eq!(b.run("cat xfs/w f").ok().out, noise(40 << 20, 5));
    // To another store it is copied.
    let made = b.run("clone --json xfs/v w").ok().says("cannot share").json();
    assert_eq!(made["copies"][0]["shared_files"], 0);
    assert_eq!(b.run("cat w f").ok().out, noise(40 << 20, 5));
}

/// `cp` on a mount: the store shares the blocks, and content is that of an ordinary copy.
#[test]
fn a_copy_inside_a_mount_shares_its_blocks() {
    let b = Bench::new();
    let Some(xfs) = Image::xfs(&b) else { return };
    b.run("init -s chacha xfs/v").ok();
    let mnt = b.dir("mnt");
    b.run("mount xfs/v mnt").ok();
    let bytes = noise((30 << 20) + 321, 6);
    fs::write(mnt.join("f"), &bytes).unwrap();
    let sparse = fs::File::create(mnt.join("sparse")).unwrap();
    sparse.set_len(20 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &bytes[..5 << 20], 3 << 20).unwrap();
    drop(sparse);
    assert!(Command::new("sync").arg("-f").arg(&mnt).status().unwrap().success());
    let before = xfs.used();
    for name in ["f", "sparse"] {
        let copied = Command::new("cp").arg(mnt.join(name)).arg(mnt.join(format!("{name}.copy"))).status().unwrap();
        assert!(copied.success());
        assert!(fs::read(mnt.join(name)).unwrap() == fs::read(mnt.join(format!("{name}.copy"))).unwrap());
    }
    // One goes on without the other.
    std::os::unix::fs::FileExt::write_all_at(
        &fs::File::options().write(true).open(mnt.join("f")).unwrap(),
        b"new",
        9999,
    )
    .unwrap();
    assert!(fs::read(mnt.join("f.copy")).unwrap() == bytes);
    b.unmount("mnt");
    // `cp` reads and writes what has holes, 5 MiB here; of 30 MiB nothing was written.
    assert!(xfs.used() < before + (12 << 20), "{before} {}", xfs.used());
    let of_copy = extents(&b.stored("xfs/v", "f.copy"));
    assert!(of_copy.contains("shared"), "{of_copy}");
    b.run("check xfs/v").ok();
    assert!(b.run("cat xfs/v f.copy").ok().out == bytes);
}

/// The daemon is killed while copies are made: each copy is whole as far as it goes, and the vault is clean.
#[test]
fn a_killed_mount_leaves_copies_old_or_new() {
    let b = Bench::new();
    b.run("init v").ok();
    let mnt = b.dir("mnt");
    let bytes = noise(8 << 20, 9);
    for round in 0..4u64 {
        let mut daemon = b.command(["mount", "-f", "v", "mnt"]).spawn().unwrap();
        while !fs::read_to_string("/proc/self/mountinfo").unwrap().contains(mnt.to_str().unwrap()) {
            assert!(daemon.try_wait().unwrap().is_none());
        }
        fs::write(mnt.join("f"), &bytes).unwrap();
        let mut cp = Command::new("sh")
            .args(["-c", "for i in 1 2 3 4 5 6; do cp f copy$i || exit; done"])
            .current_dir(&mnt)
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(40 * round));
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        let _ = cp.wait();
        assert!(Command::new("umount").arg("-l").arg(&mnt).status().unwrap().success());
        // Either of a kill's leftovers is mended, and what had not arrived is told; nothing is damaged.
        let ran = b.run("check --repair v");
        assert!([0, 27, 29].contains(&ran.code), "{}", ran.code);
        for line in b.run("ls v").ok().text().lines().filter(|l| l.starts_with("copy")) {
            let copy = b.run(&format!("cat v {line}")).ok().out;
            let is_version = |(n, block): (usize, &[u8])| {
                block == &bytes[n * 4096..n * 4096 + block.len()] || block.iter().all(|x| *x == 0)
            };
            assert!(copy.chunks(4096).enumerate().all(is_version), "{line}");
        }
    }
}

/// What an interruption left can be completed in no snapshot, and the store would have the choices of the crash for
/// ever.
#[test]
fn a_snapshot_is_made_of_no_interrupted_vault() {
    let b = Bench::new();
    b.run("init v").ok();
    let mnt = b.dir("mnt");
    let mut daemon = b.command(["mount", "-f", "v", "mnt"]).spawn().unwrap();
    while !fs::read_to_string("/proc/self/mountinfo").unwrap().contains(mnt.to_str().unwrap()) {
        assert!(daemon.try_wait().unwrap().is_none());
    }
    fs::write(mnt.join("f"), noise(100_000, 9)).unwrap();
    fs::File::open(mnt.join("f")).unwrap().sync_all().unwrap();
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(Command::new("umount").arg("-l").arg(&mnt).status().unwrap().success());
    for line in ["snapshot v s", "clone --snapshot s v w"] {
        b.run(line).code(28).says("lamassu check --repair").says("snapshot");
        assert!(!b.path("s").exists() && !b.path("w").exists(), "nothing is left of {line}");
    }
    // A clone completes them itself.
    b.run("clone v w").ok();
    for vault in ["v", "w"] {
        let ran = b.run(&format!("check --repair {vault}"));
        assert!([0, 27, 29].contains(&ran.code), "{}", ran.err);
    }
    b.run("snapshot v s").ok();
    b.run("check s").ok();
    // A session that is under way is closed by freezing.
    b.run("mount v mnt").ok();
    fs::write(mnt.join("g"), b"g").unwrap();
    b.run("snapshot v t").ok();
    b.unmount("mnt");
    assert_eq!(b.run("cat t g").ok().text(), "g");
}

/// Nor of one with such a dataset.
#[test]
fn a_snapshot_is_made_of_no_interrupted_dataset() {
    let b = Bench::new();
    b.run("init v").ok();
    b.run("dataset create v a").ok();
    let mnt = b.dir("mnt");
    let mut daemon = b.command(["mount", "-f", "v", "mnt"]).spawn().unwrap();
    while !fs::read_to_string("/proc/self/mountinfo").unwrap().contains(mnt.to_str().unwrap()) {
        assert!(daemon.try_wait().unwrap().is_none());
    }
    fs::write(mnt.join("a/f"), noise(100_000, 9)).unwrap();
    fs::File::open(mnt.join("a/f")).unwrap().sync_all().unwrap();
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(Command::new("umount").arg("-l").arg(&mnt).status().unwrap().success());
    // The vault around it is at rest.
    let stored = b.stored("v", "a");
    b.run("snapshot v s").code(28).says("lamassu check --repair").says(stored.file_name().unwrap().to_str().unwrap());
    assert!(!b.path("s").exists());
    let ran = b.run("check --repair v");
    assert!([0, 27, 29].contains(&ran.code), "{}", ran.err);
    b.run("snapshot v s").ok();
    b.run("check s").ok();
}

/// Paths in the store are longer than those in the vault, and than the system takes.
#[test]
fn a_deep_vault_with_datasets_is_copied() {
    let b = Bench::new();
    b.run("init v").ok();
    b.run("dataset create v a").ok();
    let mnt = b.dir("m");
    b.run("mount v m").ok();
    let below: std::path::PathBuf = (0..30).map(|i| format!("{i:0>110}")).collect();
    fs::create_dir_all(mnt.join("a").join(&below)).unwrap();
    fs::write(mnt.join("a").join(&below).join("f"), b"deep").unwrap();
    b.run(&format!("dataset create m/a/{}/d", below.display())).ok();
    fs::write(mnt.join("a").join(&below).join("d/f"), b"deeper").unwrap();
    b.unmount("m");
    let stored = b.run(&format!("path v a/{}/f", below.display())).ok().text();
    assert!(stored.len() > 4096, "{}", stored.len());

    b.run("snapshot v s").ok();
    b.run("clone v w").ok();
    for copy in ["s", "w"] {
        assert_eq!(b.run(&format!("cat {copy} a/{}/f", below.display())).ok().out, b"deep");
        assert_eq!(b.run(&format!("cat {copy} a/{}/d/f", below.display())).ok().out, b"deeper");
    }
    // Whoever has the dataset open keeps it from being copied, how deep it may lie: its lock is below what the path can
    // name.
    let lock =
        lock_of(&b.path("v"), Path::new(b.run(&format!("path v a/{}/d", below.display())).ok().text().trim_end()));
    b.run("clone v x").code(11);
    drop(lock);
    b.run("clone v x").ok();
    // What goes with its keys is known of it, too.
    b.key("audit");
    b.run("key destroy --yes --receipt r --audit-key raw:file:audit v").ok();
    let receipt: serde_json::Value = serde_json::from_slice(&fs::read(b.path("r")).unwrap()).unwrap();
    assert!(receipt["datasets"].as_array().is_none_or(Vec::is_empty), "{receipt}");
}

/// The writer's lock of a dataset, held.
fn lock_of(vault: &Path, stored: &Path) -> fs::File {
    use rustix::fs::{CWD, Mode, OFlags, openat};
    let mut at = openat(CWD, vault, OFlags::PATH, Mode::empty()).unwrap();
    for name in stored {
        at = openat(&at, name, OFlags::PATH, Mode::empty()).unwrap();
    }
    // Or a daemon that another test starts meanwhile goes on to hold it.
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let lock = openat(&at, "lamassu.lock", flags, Mode::RUSR | Mode::WUSR).unwrap();
    let lock = fs::File::from(lock);
    lock.try_lock().unwrap();
    lock
}

/// Each is locked while the vault is copied, and that takes a descriptor.
#[test]
fn a_vault_with_many_datasets_is_copied_with_few_descriptors() {
    let b = Bench::new();
    b.run("init v").ok();
    b.run("dataset create v a").ok();
    let header = b.stored("v", "a").join("lamassu.vault");
    for i in 0..150 {
        let dir = b.dir(&format!("v/{i}"));
        fs::copy(&header, dir.join("lamassu.vault")).unwrap();
    }
    let line = format!("ulimit -S -n 64; exec {} clone v w", env!("CARGO_BIN_EXE_lamassu"));
    let mut command = Command::new("sh");
    command.args(["-c", &line]).current_dir(b.path(""));
    command.env("LAMASSU_KEY", format!("raw:file:{}", b.path("key").display()));
    command.env("XDG_STATE_HOME", b.path("state"));
    crate::support::Ran::from(command.output().unwrap()).ok();
    assert!(b.path("w/149/lamassu.vault").exists());
}

/// Whoever may mount FUSE gives the mount the name of any directory, and must not keep others from copying what lies
/// there.
#[test]
fn a_strangers_mount_keeps_nobody_from_copying() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: another user takes root");
        return;
    }
    let b = Bench::new();
    b.run("init v").ok();
    b.run("dataset create v a").ok();
    let mnt = b.dir("m");
    let _device = strangers_mount(&b.stored("v", "a").canonicalize().unwrap(), &mnt);
    b.run("clone v w").ok();
    rustix::mount::unmount(&mnt, rustix::mount::UnmountFlags::DETACH).unwrap();
}
