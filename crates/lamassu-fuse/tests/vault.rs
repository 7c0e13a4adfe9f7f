//! Real vaults, mounted: the whole suite over four kinds of vault, one for each cache mode and one that compresses,
//! and what only a vault can show. Three of the kinds have an anchor, and so has every vault below whose store is not
//! changed under it.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

#[macro_use]
mod suite;

use lamassu_anchor::Anchor;
use lamassu_anchor::table::MemoryTable;
use lamassu_crypto::compress::version_of;
use lamassu_crypto::{KeyRing, Secret};
use lamassu_format::header::{KeyArea, NameMode, SealedKeychain, VaultHeader, VaultParams, ZoneId};
use lamassu_format::{Codec, Compression, Domain, Geometry, Suite};
use lamassu_fuse::control::Root;
use lamassu_fuse::{CacheMode, MountOptions, Mounted};
use lamassu_store::Backend;
use lamassu_store::backend::LocalBackend;
use lamassu_vault::anchor::{NewTrees, RebuildProgress, rebuild};
use lamassu_vault::forest::{Number, Opener, Opening, ROOT_MEMBER, State};
use lamassu_vault::{Durability, Forest, Freshness, Integrity, Options, Overheard, Vault, VaultError};
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use suite::support::{errno, pattern};

#[derive(Clone, Copy)]
struct Recipe {
    suite: Suite,
    names: NameMode,
    block_size: u32,
    cache: CacheMode,
    codec: Option<Codec>,
    is_anchored: bool,
}

const DEFAULT: Recipe = Recipe {
    suite: Suite::Aes,
    names: NameMode::Encrypted,
    block_size: 4096,
    cache: CacheMode::WriteBack,
    codec: None,
    is_anchored: true,
};

/// What an unanchored vault believes of its store.
const UNANCHORED: Recipe = Recipe { is_anchored: false, ..DEFAULT };

impl Recipe {
    fn header(&self) -> VaultHeader {
        let params = VaultParams {
            zone: ZoneId([1; 16]),
            suite: self.suite,
            geometry: Geometry::new(self.block_size, 8).unwrap(),
            names: self.names,
            name_max: 255,
            convergent_small_files: true,
            domain: Domain::Zone,
            created: 0,
        };
        let keychain = SealedKeychain { nonce: [0; 24], sealed: Vec::new(), oblivious: false };
        let mut header = VaultHeader::new(
            params,
            KeyArea {
                id: [1; 16],
                next_slot: 2,
                slots: Vec::new(),
                keychain,
                history: None,
                admin: None,
                mac: [0; 32],
            },
        );
        header.set_compression(self.compression());
        header
    }

    fn compression(&self) -> Option<Compression> {
        let (codec, round) = (self.codec?, Compression::default_round(self.block_size));
        Some(Compression::new(codec, version_of(codec), round, (self.suite, self.block_size)).unwrap())
    }

    fn ring(&self) -> KeyRing {
        KeyRing::new(self.suite, &[Secret::new(&mut [1; 32])], &[Secret::new(&mut [2; 32])])
    }
}

/// A vault in a directory of its own, mounted on another. Can be unmounted and mounted again.
struct Fixture {
    recipe: Recipe,
    mounted: Option<Mounted>,
    store: tempfile::TempDir,
    /// That of its anchor.
    table: Option<Arc<MemoryTable>>,
    point: tempfile::TempDir,
}

/// An anchor of a vault that is empty leaves nothing out.
struct Nobody;

impl RebuildProgress for Nobody {
    fn advance(&self, _: u64, _: u64) {}
    fn damaged(&self, stored: &Path, error: &VaultError) {
        panic!("{}: {error}", stored.display());
    }
}

impl Fixture {
    /// `None`, with a line that says why, where nothing can be mounted.
    fn new(recipe: Recipe) -> Option<Fixture> {
        if !Path::new("/dev/fuse").exists() {
            eprintln!("SKIPPED: there is no /dev/fuse on this machine");
            return None;
        }
        let (store, point) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let backend = LocalBackend::open(store.path()).unwrap();
        Vault::make_tree(&backend, &recipe.header(), &recipe.ring()).unwrap();
        let mut fixture = Fixture { recipe, mounted: None, store, table: None, point };
        if recipe.is_anchored {
            let (vault, table) = (fixture.vault(false), Arc::new(MemoryTable::default()));
            let (_, made) = rebuild(&vault, &recipe.header(), table.clone(), NewTrees::default(), &Nobody).unwrap();
            assert_eq!(made.objects, 1);
            vault.close().unwrap();
            fixture.table = Some(table);
        }
        fixture.mount(false);
        // An anchored vault whose root has no record is for who mounts it alone. `init` makes one.
        std::fs::set_permissions(fixture.point.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        Some(fixture)
    }

    fn mount(&mut self, read_only: bool) {
        self.mount_with(read_only, "");
    }

    fn options(&self, read_only: bool) -> Options {
        let anchor =
            |table: &Arc<MemoryTable>| Arc::new(Anchor::open(table.clone(), &self.recipe.header().id()).unwrap());
        Options {
            integrity: Integrity::Full,
            durability: Durability::Ordered,
            read_only,
            approved_only: false,
            threads: 2,
            device: None,
            anchor: self.table.as_ref().map(anchor),
            freshness: Freshness::default(),
            events: Default::default(),
            upkeep: Default::default(),
            by_turns: false,
        }
    }

    fn try_vault(&self, read_only: bool) -> lamassu_vault::Result<Vault> {
        let backend: Arc<dyn Backend> = Arc::new(LocalBackend::open(self.store.path()).unwrap());
        Vault::open(backend, &self.recipe.header(), self.recipe.ring(), self.options(read_only))
    }

    fn vault(&self, read_only: bool) -> Vault {
        self.try_vault(read_only).unwrap()
    }

    /// With further words of `-o`.
    fn mount_with(&mut self, read_only: bool, words: &str) {
        let vault = Arc::new(self.vault(read_only));
        let allow_other = rustix::process::geteuid().is_root();
        let mut options = MountOptions { cache: self.recipe.cache, allow_other, read_only, ..MountOptions::default() };
        options.apply(words).unwrap();
        self.mounted = Some(lamassu_fuse::mount(vault, self.point.path(), &options).unwrap());
    }

    fn unmount(&mut self) {
        let mounted = self.mounted.take().unwrap();
        // A test beside this one that is just starting a process holds our open files for a moment.
        let free = || mounted.unmounter().unmount(false).is_ok();
        let done = (0..1200).any(|_| {
            free() || {
                std::thread::sleep(std::time::Duration::from_millis(50));
                false
            }
        });
        assert!(done, "busy for a minute");
        mounted.wait().unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.point.path().join(name)
    }

    /// The backing file of the only regular file there is whose length is at least `len`.
    fn backing(&self, len: u64) -> PathBuf {
        let mut found = fs::read_dir(self.store.path()).unwrap().map(|e| e.unwrap().path()).filter(|p| {
            let meta = fs::symlink_metadata(p).unwrap();
            meta.is_file() && meta.len() >= len
        });
        let path = found.next().unwrap();
        assert_eq!(found.next(), None);
        path
    }
}

/// A store that makes a program set-uid root, moves file capabilities from one program to another, and puts a device in
/// the place of a file.
#[test]
fn what_the_store_says_of_privilege_counts_only_where_it_is_asked_for() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let Some(mut f) = Fixture::new(UNANCHORED) else { return };
    fs::set_permissions(f.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    for (program, name) in [("/usr/bin/id", "id"), ("/bin/cat", "donor"), ("/bin/cat", "plain"), ("/bin/cat", "device")]
    {
        fs::copy(program, f.path(name)).unwrap();
    }
    // `struct vfs_cap_data`, revision 2, effective: CAP_NET_RAW.
    let rights = [0x0200_0001u32, 1 << 13, 0, 0, 0].map(u32::to_le_bytes).concat();
    let attribute = "security.capability";
    rustix::fs::setxattr(f.path("donor"), attribute, &rights, rustix::fs::XattrFlags::empty()).unwrap();
    f.unmount();
    let vault = f.vault(true);
    let [id, donor, plain, device] = ["id", "donor", "plain", "device"]
        .map(|name| f.store.path().join(vault.stored_path(std::ffi::OsStr::new(name)).unwrap()));
    drop(vault);
    fs::set_permissions(id, fs::Permissions::from_mode(0o4755)).unwrap();
    let mut names = [0; 4096];
    let len = rustix::fs::listxattr(&donor, &mut names[..]).unwrap();
    for name in names[..len].split(|b| *b == 0).filter(|name| name.starts_with(b"user.lamassu.")) {
        let mut value = [0; 4096];
        let len = rustix::fs::getxattr(&donor, name, &mut value[..]).unwrap();
        rustix::fs::setxattr(&plain, name, &value[..len], rustix::fs::XattrFlags::empty()).unwrap();
    }
    fs::remove_file(&device).unwrap();
    let null = rustix::fs::makedev(1, 3);
    let (kind, mode) = (rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::from_raw_mode(0o666));
    rustix::fs::mknodat(rustix::fs::CWD, &device, kind, mode, null).unwrap();
    for (words, trusted) in [("", false), ("allow_suid,allow_dev", true), ("allow_suid,nosuid,allow_dev,nodev", false)]
    {
        f.mount_with(false, words);
        let run = |program: &str, argument: &str| {
            let mut command = std::process::Command::new("setpriv");
            command.args(["--reuid=1000", "--regid=1000", "--clear-groups"]).arg(f.path(program)).arg(argument);
            String::from_utf8(command.output().unwrap().stdout).unwrap()
        };
        assert_eq!(run("id", "-u").trim(), if trusted { "0" } else { "1000" }, "{words}");
        let status = run("plain", "/proc/self/status");
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
        assert_eq!(u64::from_str_radix(effective, 16).unwrap(), if trusted { 1 << 13 } else { 0 }, "{words}");
        let opened = fs::File::open(f.path("device")).map(drop);
        assert_eq!(opened.err().and_then(|e| e.raw_os_error()), (!trusted).then_some(libc::EACCES), "{words}");
        f.unmount();
    }
}

/// A name of `trusted.` may say as much as its value.
#[test]
fn names_of_trusted_attributes_are_for_root_alone() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let Some(mut f) = Fixture::new(DEFAULT) else { return };
    fs::set_permissions(f.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(f.path("f"), b"content").unwrap();
    for name in ["trusted.secret", "user.note"] {
        rustix::fs::setxattr(f.path("f"), name, b"value", rustix::fs::XattrFlags::empty()).unwrap();
    }
    let path = f.path("f");
    let listed = || {
        let mut names = [0; 4096];
        let len = rustix::fs::listxattr(&path, &mut names[..]).unwrap();
        let mut names: Vec<_> =
            names[..len].split(|b| *b == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect();
        names.sort();
        names
    };
    assert_eq!(listed(), [b"trusted.secret".to_vec(), b"user.note".to_vec()]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: the system call, unlike the function of libc, concerns the calling thread alone, and no memory.
            let rc = unsafe { libc::syscall(libc::SYS_setresuid, 1000, 1000, 1000) };
            assert_eq!(rc, 0);
            assert_eq!(listed(), [b"user.note".to_vec()]);
        });
    });
    f.unmount();
}

/// What a mount without datasets asks of who composes it.
struct NoDatasets;

impl Opener for NoDatasets {
    fn open(&self, _: Number, _: (Number, &Vault), _: VaultHeader) -> lamassu_vault::Result<Option<Opening>> {
        Ok(None)
    }
    fn opened(&self, _: Number, _: &Arc<Vault>) {}
    fn unloading(&self, _: Number) {}
}

#[test]
fn a_mount_that_nobody_uses_is_unloaded() {
    let Some(mut f) = Fixture::new(DEFAULT) else { return };
    f.unmount();
    let r = f.recipe;
    let backend: Arc<dyn Backend> = Arc::new(LocalBackend::open(f.store.path()).unwrap());
    let vault = Arc::new(Vault::open(backend.clone(), &r.header(), r.ring(), f.options(false)).unwrap());
    let forest = Forest::new(vault, backend, r.header().id(), true, Arc::new(NoDatasets)).unwrap();
    let mounted = lamassu_fuse::mount(forest.clone(), f.point.path(), &MountOptions::default()).unwrap();
    forest.set_cache(mounted.cache());
    f.mounted = Some(mounted);
    let state = || forest.member(ROOT_MEMBER).unwrap().state;
    fs::write(f.path("file"), b"content").unwrap();
    let open = fs::File::open(f.path("file")).unwrap();
    forest.unload_after(Duration::from_secs(1));
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(state(), State::Loaded, "a file is open");
    drop(open);
    let waited = (0..600).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        state() == State::Unloaded
    });
    assert!(waited, "still loaded after a minute");
    // The kernel has forgotten contents and names, and the mount is still there.
    assert_eq!(errno(fs::read(f.path("file"))), libc::ENOKEY);
    f.unmount();
    f.mount(false);
    assert_eq!(fs::read(f.path("file")).unwrap(), b"content");
}

fn with(recipe: Recipe, test: &str, body: fn(&Path)) {
    if let Some(dir) = suite::support::child_dir() {
        return body(&dir);
    }
    let Some(mut fixture) = Fixture::new(recipe) else { return };
    let dir = fixture.path("work");
    fs::create_dir(&dir).unwrap();
    suite::support::in_child(test, &dir);
    fixture.unmount();
}

mod write_back_aes {
    suite_tests!(with lists |test, body| super::with(super::DEFAULT, test, body));
}
mod through_chacha_plain_names {
    use super::{CacheMode, DEFAULT, NameMode, Recipe, Suite};
    suite_tests!(with lists |test, body| {
        let recipe = Recipe { suite: Suite::Chacha, names: NameMode::Plain, cache: CacheMode::Through, ..DEFAULT };
        super::with(recipe, test, body);
    });
}
mod compressed_large_blocks {
    use super::{Codec, DEFAULT, Recipe};
    suite_tests!(with lists |test, body| {
        super::with(Recipe { block_size: 32_768, codec: Some(Codec::Zstd(1)), ..DEFAULT }, test, body);
    });
}
mod uncached_blake3_large_blocks {
    use super::{CacheMode, Recipe, Suite, UNANCHORED};
    suite_tests!(with lists |test, body| {
        let recipe = Recipe { suite: Suite::Blake3, block_size: 32_768, cache: CacheMode::None, ..UNANCHORED };
        super::with(recipe, test, body);
    });
}

#[test]
fn access_lists_are_sealed_and_survive_a_remount() {
    let Some(mut f) = Fixture::new(UNANCHORED) else { return };
    let run = |name: &str, args: &[&str], path: &Path| {
        let out = std::process::Command::new(name).args(args).arg(path).output().unwrap();
        String::from_utf8([out.stdout, out.stderr].concat()).unwrap()
    };
    fs::write(f.path("f"), vec![7; 10_000]).unwrap();
    assert_eq!(run("setfacl", &["-m", "u:1234:rw,m::r"], &f.path("f")), "");
    let before = run("getfacl", &["-cnp"], &f.path("f"));
    assert!(before.contains("user:1234:rw-\t#effective:r--"), "{before}");
    let below = run("getfacl", &["-cnp"], &f.backing(8192));
    assert!(!below.contains("1234"), "the store sees none: {below}");
    assert_eq!(fs::metadata(f.backing(8192)).unwrap().mode() & 0o777, 0o644, "but the mode it goes with");
    f.unmount();
    f.mount(false);
    assert_eq!(run("getfacl", &["-cnp"], &f.path("f")), before);
    f.unmount();
    // The mode is the truth of owner, mask and others: what the store makes of it shows.
    fs::set_permissions(f.backing(8192), fs::Permissions::from_mode(0o600)).unwrap();
    f.mount(false);
    let after = run("getfacl", &["-cnp"], &f.path("f"));
    assert!(after.contains("user:1234:rw-\t#effective:---"), "{after}");
    f.unmount();
}

#[test]
fn everything_is_there_after_a_remount() {
    let Some(mut f) = Fixture::new(DEFAULT) else { return };
    fs::create_dir_all(f.path("a/b")).unwrap();
    let data = pattern(3_000_001, 1);
    fs::write(f.path("a/b/file"), &data).unwrap();
    fs::hard_link(f.path("a/b/file"), f.path("again")).unwrap();
    std::os::unix::fs::symlink("a/b", f.path("link")).unwrap();
    rustix::fs::setxattr(f.path("again"), "user.note", b"kept", rustix::fs::XattrFlags::empty()).unwrap();
    let time = fs::metadata(f.path("again")).unwrap().modified().unwrap();
    for read_only in [false, true] {
        f.unmount();
        f.mount(read_only);
        assert!(fs::read(f.path("link/file")).unwrap() == data);
        let meta = fs::metadata(f.path("again")).unwrap();
        assert_eq!((meta.nlink(), meta.len(), meta.modified().unwrap()), (2, 3_000_001, time));
        let mut value = [0; 10];
        assert_eq!(rustix::fs::getxattr(f.path("again"), "user.note", &mut value[..]), Ok(4));
    }
    assert_eq!(errno(fs::write(f.path("again"), b"")), libc::EROFS);
    f.unmount();
}

#[test]
fn nothing_plain_is_in_the_store() {
    let Some(mut f) = Fixture::new(DEFAULT) else { return };
    fs::create_dir(f.path("directory-in-the-clear")).unwrap();
    fs::write(f.path("directory-in-the-clear/name-in-the-clear"), b"content in the clear".repeat(1000)).unwrap();
    f.unmount();
    let out = std::process::Command::new("grep").args(["-rla", "in.the.clear"]).arg(f.store.path()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout), "");
    let out = std::process::Command::new("find").arg(f.store.path()).output().unwrap();
    assert!(!String::from_utf8_lossy(&out.stdout).contains("clear"));
}

#[test]
fn a_flipped_bit_costs_one_block_and_nothing_reads_as_zeros() {
    for cache in [CacheMode::WriteBack, CacheMode::Through, CacheMode::None] {
        let Some(mut f) = Fixture::new(Recipe { cache, ..DEFAULT }) else { return };
        let data = pattern(100 * 4096, 5);
        fs::write(f.path("file"), &data).unwrap();
        f.unmount();
        // Block 40 of the first segment: one page in front.
        let backing = fs::File::options().read(true).write(true).open(f.backing(100 * 4096)).unwrap();
        let mut byte = [0];
        backing.read_exact_at(&mut byte, 41 * 4096 + 17).unwrap();
        backing.write_all_at(&[byte[0] ^ 4], 41 * 4096 + 17).unwrap();
        f.mount(false);
        let file = fs::File::open(f.path("file")).unwrap();
        let mut block = [0; 4096];
        for i in 0..100u64 {
            let read = file.read_exact_at(&mut block, i * 4096);
            if i == 40 {
                assert_eq!(errno(read), libc::EIO, "{cache:?}");
            } else {
                read.unwrap();
                assert!(block == data[i as usize * 4096..][..4096], "{cache:?}: block {i}");
            }
        }
        assert_eq!(errno(fs::read(f.path("file"))), libc::EIO);
        // A map reads through the page cache in every mode; the kernel fills short answers up with zeros there.
        let touch = |block: usize| {
            let script = format!(
                "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print(m[{}])",
                block * 4096 + 9
            );
            let out = std::process::Command::new("python3").args(["-c", &script]).arg(f.path("file")).output().unwrap();
            (String::from_utf8(out.stdout).unwrap().trim().to_owned(), out.status.signal())
        };
        assert_eq!(touch(39), (data[39 * 4096 + 9].to_string(), None), "{cache:?}");
        assert_eq!(touch(40), (String::new(), Some(libc::SIGBUS)), "{cache:?}");
        drop(file);
        f.unmount();
    }
}

#[test]
fn a_frozen_vault_s_store_is_complete() {
    let Some(mut f) = Fixture::new(DEFAULT) else { return };
    let data = pattern(5_000_000, 2);
    let file = fs::File::create(f.path("open")).unwrap();
    file.write_all_at(&data, 0).unwrap();
    Root::open(f.point.path()).and_then(|root| root.freeze()).unwrap();
    // A copy taken now is a vault with everything in it.
    let copy = tempfile::tempdir().unwrap();
    let status = std::process::Command::new("cp").arg("-a").arg(f.store.path().join(".")).arg(copy.path()).status();
    assert!(status.unwrap().success());
    let table = f.table.as_ref().map(|table| Arc::new(MemoryTable::clone(table)));
    std::thread::scope(|scope| {
        let late = scope.spawn(|| fs::write(f.path("late"), b"late").unwrap());
        while Root::open(f.point.path()).and_then(|root| root.status()).unwrap().waiting == 0 {
            std::thread::yield_now();
        }
        assert!(fs::read(f.path("open")).unwrap() == data);
        Root::open(f.point.path()).and_then(|root| root.thaw()).unwrap();
        late.join().unwrap();
    });
    drop(file);
    f.unmount();
    let mut g = Fixture { recipe: f.recipe, mounted: None, store: copy, table, point: tempfile::tempdir().unwrap() };
    g.mount(true);
    assert!(fs::read(g.path("open")).unwrap() == data);
    assert!(!g.path("late").exists());
    g.unmount();
}

#[test]
fn a_second_writer_is_refused_while_mounted() {
    let Some(mut f) = Fixture::new(DEFAULT) else { return };
    assert!(matches!(f.try_vault(false), Err(VaultError::Locked)));
    f.unmount();
    f.vault(false).close().unwrap();
}

/// How many pages of a file are in the page cache.
fn resident(file: &fs::File) -> usize {
    let len = file.metadata().unwrap().len() as usize;
    let mut pages = vec![0_u8; len.div_ceil(4096)];
    // SAFETY: a fresh shared map of the whole file, never touched; `pages` has a byte for each of its pages.
    unsafe {
        use std::os::fd::AsRawFd;
        let map = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(map, libc::MAP_FAILED);
        assert_eq!(libc::mincore(map, len, pages.as_mut_ptr()), 0);
        libc::munmap(map, len);
    }
    pages.iter().filter(|page| **page & 1 != 0).count()
}

/// Reads eight blocks of the third window of 512 KiB.
fn read_at_random(file: &fs::File, data: &[u8]) {
    let mut buffer = [0; 4096];
    for n in [3, 99, 41, 7, 120, 64, 77, 12_u64] {
        let at = (1 << 20) + n * 4096;
        file.read_exact_at(&mut buffer, at).unwrap();
        assert!(buffer[..] == data[at as usize..][..4096]);
    }
}

/// Whether a window's 128 blocks come to be in the page cache within a second.
fn filled(file: &fs::File) -> bool {
    (0..200).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        resident(file) >= 128
    })
}

/// A window of 512 KiB that random reads keep coming to is read whole; the rest of the file, and what is open for
/// writing, is not.
#[test]
fn hot_windows_are_read_ahead() {
    let Some(mut fixture) = Fixture::new(DEFAULT) else { return };
    let path = fixture.point.path().join("f");
    let data = pattern(3 << 20, 5);
    fs::write(&path, &data).unwrap();
    let mut read = |writer: bool| {
        fixture.unmount();
        fixture.mount(false);
        let file = fs::File::open(&path).unwrap();
        let _writer = writer.then(|| fs::File::options().write(true).open(&path).unwrap());
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            read_at_random(&file, &data);
            // Nothing is expected to happen beside a writer, so one look suffices there.
            if writer || filled(&file) || std::time::Instant::now() > deadline {
                break;
            }
            // On a busy machine these reads may have come too slowly to make the window hot.
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
        if writer {
            filled(&file);
        }
        let found = resident(&file);
        assert!(fs::read(&path).unwrap() == data);
        found
    };
    assert_eq!(read(false), 128);
    assert_eq!(read(true), 8);
}

/// After a synchronous write the kernel sends an fsync. After a copy, an allocation and a direct write of a mount with
/// `sync` it sends none.
#[test]
fn copies_and_allocations_are_durable_at_once_where_that_is_asked_for() {
    const LEN: usize = 1 << 20;
    let Some(mut f) = Fixture::new(DEFAULT) else { return };
    fs::write(f.path("from"), pattern(LEN, 1)).unwrap();
    f.unmount();
    for (words, flags) in [("", 0), ("", libc::O_DSYNC), ("", libc::O_SYNC), ("dirsync", 0), ("sync", 0)] {
        let is_synchronous = words == "sync" || flags != 0;
        let counts = Arc::new([const { AtomicUsize::new(0) }; 4]);
        let methods = ["fsync", "copy_range", "fallocate", "write"];
        let counted = counts.clone();
        let told = move |method| {
            if let Some(at) = methods.iter().position(|name| *name == method) {
                counted[at].fetch_add(1, Ordering::SeqCst);
            }
        };
        let fs = Arc::new(Overheard { inner: f.vault(false), told: Box::new(told) });
        let mut options = MountOptions::default();
        options.apply(words).unwrap();
        f.mounted = Some(lamassu_fuse::mount(fs, f.point.path(), &options).unwrap());
        let named = f.path("to");
        let open = |more: i32| {
            let mut options = fs::File::options();
            options.read(true).write(true).create(true).truncate(true).custom_flags(flags | more).open(&named).unwrap()
        };
        let (from, to) = (fs::File::open(f.path("from")).unwrap(), open(0));
        // A page that is not clean is mended by a read, and a copy leaves it to that.
        assert!(fs::read(f.path("from")).unwrap() == pattern(LEN, 1));
        // How often `method` was called meanwhile, and fsync.
        let during = |method: usize, call: &dyn Fn()| {
            let before = [method, 0].map(|at| counts[at].load(Ordering::SeqCst));
            call();
            let [called, syncs] = [method, 0].map(|at| counts[at].load(Ordering::SeqCst));
            assert!(called > before[0], "{} is not called", methods[method]);
            syncs - before[1]
        };
        let syncs = [
            during(1, &|| assert!(rustix::fs::copy_file_range(&from, None, &to, None, LEN).unwrap() > 0)),
            during(2, &|| rustix::fs::fallocate(&to, rustix::fs::FallocateFlags::empty(), 0, 2 << 20).unwrap()),
            during(3, &|| open(libc::O_DIRECT).write_all_at(&[7; 4096], 0).unwrap()),
        ];
        assert_eq!(syncs, [usize::from(is_synchronous); 3], "{words} {flags:o}");
        drop((from, to));
        f.unmount();
    }
}
