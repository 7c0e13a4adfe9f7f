//! Profiles of files and directories: what is inherited, what is kept, how they are changed while the vault is used,
//! and that a store cannot choose one.
use crate::common;

use common::anchored::*;
use common::*;
use lamassu_format::name::DIR_RECORD;
use lamassu_format::profile::{Choice, KeyKind, ProfileError, Protection};
use lamassu_format::{Method, Profile, Suite};
use lamassu_store::backend::{BackendFile, CrashBackend, CrashSim, MemoryBackend, RenameMode as StoreRename};
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::*;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn of(protection: Protection, key: KeyKind) -> Profile {
    Profile::new(protection, key).unwrap()
}

fn plain() -> Profile {
    of(Protection::Integrity, KeyKind::Convergent)
}

fn random() -> Profile {
    of(Protection::Both, KeyKind::Random)
}

fn of_method(method: Method) -> Profile {
    Profile::DEFAULT.by(method).unwrap()
}

/// AES-128, and the hash that the suite does not have.
fn other_method(protection: Protection, key: KeyKind) -> Profile {
    of(protection, key).by(Method::new(true, true)).unwrap()
}

/// Ends after so many questions.
struct Told(AtomicU64);

impl RekeyProgress for Told {
    fn passed_over(&self, stored: &str, why: &ProfileError) {
        panic!("{stored}: {why}");
    }
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {}
    fn failed(&self, stored: &str, error: &VaultError) {
        panic!("{stored}: {error}");
    }
    fn dataset(&self, stored: &Path) -> Result<()> {
        panic!("{stored:?}: these vaults have none")
    }
    fn is_cancelled(&self) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(1))) == Ok(0)
    }
}

fn all_of(v: &Vault, profile: Profile) -> Choice {
    Choice::of_all(profile, v.ring().suite())
}

fn set(v: &Vault, path: &str, profile: Profile, below: bool) -> Rekeyed {
    let done = v.set_profile(v.ino(path), all_of(v, profile), below, &Told(u64::MAX.into())).unwrap();
    assert!(done.complete && done.failed == 0, "{path}: {done:?}");
    done
}

fn profile(v: &Vault, path: &str) -> Profile {
    let KnownProfile { profile, is_changing } = v.profile(v.ino(path)).unwrap();
    assert!(!is_changing, "{path}");
    profile
}

const BLOCK: usize = 4096;

/// Content whose blocks are no ciphertext.
fn text(blocks: usize) -> Vec<u8> {
    b"plain to see, ".iter().copied().cycle().take(blocks * BLOCK).collect()
}

/// Whether the first block of a file is stored as it is.
fn is_plain(backend: &Arc<dyn Backend>, v: &Vault, path: &str) -> bool {
    let stored = v.stored_path(n(path)).unwrap();
    let mut dir = backend.root();
    let mut parts: Vec<_> = stored.iter().collect();
    let name = parts.pop().unwrap();
    for part in parts {
        dir = dir.open_dir(part).unwrap();
    }
    let mut block = vec![0; BLOCK];
    dir.open_file(name, false).unwrap().read_at(BLOCK as u64, &mut block).unwrap();
    block == text(1)
}

#[test]
fn what_is_made_inherits_the_profile_of_its_directory() {
    let recipe = Recipe::default();
    let (_dir, backend) = local();
    let v = recipe.make(&backend);
    v.dir("d");
    v.put("d/before", &text(9));
    set(&v, "d", plain(), false);
    v.put("d/after", &text(9));
    v.dir("d/below");
    v.put("d/below/file", &text(9));
    v.put("beside", &text(9));
    v.dir("m");
    let method = other_method(Protection::Encrypt, KeyKind::Convergent);
    set(&v, "m", method, false);
    v.put("m/file", &text(9));
    v.dir("m/below");
    v.rename(v.ino("d"), n("after"), v.ino(""), n("moved"), RenameMode::Replace).unwrap();
    let expected = [
        ("", Profile::DEFAULT),
        ("d", plain()),
        ("d/before", Profile::DEFAULT),
        ("d/below", plain()),
        ("d/below/file", plain()),
        ("beside", Profile::DEFAULT),
        ("moved", plain()),
        ("m/file", method),
        ("m/below", method),
    ];
    v.sync_all().unwrap();
    for (path, expected) in expected {
        assert_eq!(profile(&v, path), expected, "{path}");
    }
    v.close().unwrap();
    let v = recipe.open(&backend).unwrap();
    for (path, expected) in expected {
        assert_eq!(profile(&v, path), expected, "{path}, opened again");
        if v.find(path).unwrap().attr.kind == Kind::File {
            assert_eq!(is_plain(&backend, &v, path), expected == plain(), "{path}");
            assert!(v.get(path) == text(9));
        }
    }
    v.clean();
}

#[test]
fn everything_below_a_directory_is_changed() {
    let recipe = Recipe { reserved: 8, ..Recipe::default() };
    let (_dir, backend) = local();
    let v = recipe.make(&backend);
    for dir in ["d", "d/e", "d/e/f"] {
        v.dir(dir);
    }
    for (path, blocks) in [("d/small", 0), ("d/one", 3), ("d/e/f/large", 700), ("other", 5)] {
        v.put(path, &text(blocks));
    }
    v.link(v.ino("d/one"), v.ino("d/e"), n("again")).unwrap();
    v.symlink(v.ino("d"), n("link"), b"one", me()).unwrap();
    // It stays open, and is written meanwhile.
    let open = v.open_file(v.ino("d/e/f/large"), RW).unwrap();
    v.write(open, 0, &text(1)).unwrap();
    for (n, wanted) in [
        plain(),
        random(),
        of(Protection::Encrypt, KeyKind::Random),
        Profile::DEFAULT,
        other_method(Protection::Both, KeyKind::Convergent),
        plain().by(Method::new(false, true)).unwrap(),
        Profile::DEFAULT,
    ]
    .into_iter()
    .enumerate()
    {
        let done = set(&v, "d", wanted, true);
        assert!(done.records == 3 && done.pages > 0, "{done:?}");
        for path in ["d", "d/small", "d/one", "d/e", "d/e/f", "d/e/f/large"] {
            assert_eq!(profile(&v, path), wanted, "{path}");
        }
        assert!(profile(&v, "other").is_default() && profile(&v, "").is_default());
        v.write(open, 300 * BLOCK as u64, &text(301)[300 * BLOCK..]).unwrap();
        v.sync_all().unwrap();
        assert_eq!(is_plain(&backend, &v, "d/one"), wanted.protection().is_plain(), "{n}");
        assert!(v.get("d/e/f/large") == text(700) && v.get("d/e/again") == text(3));
        v.clean();
        let again = set(&v, "d", wanted, true);
        assert_eq!((again.records, again.pages, again.blocks), (0, 0, 0), "a second time nothing is left");
    }
    v.release(open).unwrap();
    v.close().unwrap();
}

#[test]
fn what_a_vault_cannot_keep_is_refused() {
    for (recipe, path, wanted) in [
        (Recipe::plain(), "", plain()),
        (Recipe { suite: Suite::Paper, ..Recipe::default() }, "file", random()),
        (Recipe { suite: Suite::Chacha, ..Recipe::default() }, "file", of(Protection::Encrypt, KeyKind::Convergent)),
        (Recipe { suite: Suite::Paper, ..Recipe::default() }, "file", of_method(Method::new(true, false))),
        (Recipe { suite: Suite::Paper, ..Recipe::default() }, "", of_method(Method::new(false, true))),
        (Recipe { suite: Suite::Chacha, ..Recipe::default() }, "file", of_method(Method::new(true, false))),
    ] {
        let v = recipe.make(&memory());
        v.put("file", &text(3));
        let refused = v.set_profile(v.ino(path), all_of(&v, wanted), false, &Told(u64::MAX.into()));
        assert!(matches!(refused, Err(VaultError::Refused(_))), "{refused:?}");
    }
    // Files of a vault with plain names have profiles all the same.
    let (_dir, backend) = local();
    let v = Recipe::plain().make(&backend);
    v.put("file", &text(3));
    set(&v, "file", plain(), false);
    assert!(is_plain(&backend, &v, "file") && v.get("file") == text(3));
    v.symlink(ROOT, n("link"), b"file", me()).unwrap();
    assert!(matches!(v.profile(v.ino("link")), Err(VaultError::Invalid)));
}

/// Broken off after every step, and gone on with by the next process: everything is readable at any time.
#[test]
fn a_change_may_be_broken_off_anywhere() {
    let recipe = Recipe { reserved: 2, ..Recipe::default() };
    let files = [("a", 1), ("d/b", 150), ("d/c", 3)];
    for (steps, wanted) in
        (0..12).flat_map(|steps| [random(), other_method(Protection::Both, KeyKind::Random)].map(|to| (steps, to)))
    {
        let backend: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
        let v = recipe.make(&backend);
        v.dir("d");
        files.iter().for_each(|(path, blocks)| v.put(path, &text(*blocks)));
        let done = v.set_profile(ROOT, all_of(&v, wanted), true, &Told(steps.into())).unwrap();
        assert!(!done.complete, "{steps} steps");
        v.close().unwrap();
        let v = recipe.open(&backend).unwrap();
        files.iter().for_each(|(path, blocks)| assert!(v.get(path) == text(*blocks), "{path}"));
        v.clean();
        set(&v, "", wanted, true);
        assert!(files.iter().all(|(path, _)| profile(&v, path) == wanted));
        v.close().unwrap();
    }
}

/// A crash after every write of a change: files and directories open, and a second attempt ends it.
#[test]
fn a_change_survives_crashes() {
    for wanted in [plain(), of_method(Method::new(true, false)), of_method(Method::new(true, true))] {
        crashes_of_a_change(wanted);
    }
}

fn crashes_of_a_change(wanted: Profile) {
    let recipe = Recipe { reserved: 8, ..Recipe::default() };
    let store = Arc::new(CrashBackend::new());
    let backend: Arc<dyn Backend> = store.clone();
    let v = recipe.make(&backend);
    v.dir("d");
    let files = [("d/one", 1), ("d/large", 130)];
    files.iter().for_each(|(path, blocks)| v.put(path, &text(*blocks)));
    v.sync_all().unwrap();
    let start = store.position();
    set(&v, "", wanted, true);
    let end = store.position();
    drop(v);
    let sim = CrashSim::new(store.log());
    for at in (start..=end).step_by(3) {
        for least in [false, true] {
            let left: Arc<dyn Backend> = Arc::new(if least { sim.at(at).least_state() } else { sim.prefix(at) });
            let v = recipe.open(&left).unwrap();
            for (path, blocks) in files {
                assert!(v.get(path) == text(blocks), "{path}, after {at} of {end}");
            }
            v.check(&[], true, &Quiet).unwrap();
            set(&v, "", wanted, true);
            assert!(files.iter().all(|(path, _)| profile(&v, path) == wanted), "after {at}");
            v.clean();
            v.close().unwrap();
        }
    }
}

/// An anchored vault goes by what its anchor has: the record of a directory from before is refused, and so is a file.
#[test]
fn a_store_cannot_bring_an_older_profile_back() {
    older_profile_is_refused(of(Protection::None, KeyKind::Convergent));
    older_profile_is_refused(of_method(Method::new(true, false)));
    older_profile_is_refused(of_method(Method::new(false, true)));
}

fn older_profile_is_refused(older: Profile) {
    let (lab, v) = Lab::new(Recipe::default());
    v.dir("d");
    set(&v, "d", older, false);
    v.put("d/file", &text(5));
    v.sync_all().unwrap();
    let (dir, name) = lab.stored(&v, "d/file");
    let record = |dir: &dyn BackendDir| dir.read_link(n(DIR_RECORD)).unwrap();
    let (old_record, old_file) = (record(&*dir), bytes_of(&*dir.open_file(&name, false).unwrap()));
    set(&v, "d", Profile::DEFAULT, true);
    v.put("d/new", &text(5));
    v.close().unwrap();
    let (new_record, new_file) = (record(&*dir), bytes_of(&*dir.open_file(&name, false).unwrap()));
    assert!(old_record != new_record && old_file != new_file);

    dir.open_file(&name, true).unwrap().write_at(0, &old_file).unwrap();
    let v = lab.open();
    let opened = v.open_file(v.ino("d/file"), RO).and_then(|handle| v.read(handle, 0, &mut [0; 10]));
    assert!(opened.is_err(), "{opened:?}");
    assert_eq!(profile(&v, "d/new"), Profile::DEFAULT);
    v.close().unwrap();
    dir.open_file(&name, true).unwrap().write_at(0, &new_file).unwrap();

    let put_record = |text: &std::ffi::OsStr| {
        dir.make_symlink(n("lamassu.x"), text).unwrap();
        dir.rename(n("lamassu.x"), &*dir, n(DIR_RECORD), StoreRename::Replace).unwrap();
    };
    put_record(&old_record);
    let v = lab.open();
    let found = v.find("d");
    assert!(found.is_err() || v.create(found.unwrap().attr.ino, n("newer"), 0o600, RW, me()).is_err());
    v.close().unwrap();
    put_record(&new_record);
    let v = lab.open();
    assert!(v.get("d/file") == text(5) && profile(&v, "d").is_default());
    v.put("d/newer", &text(5));
    assert!(profile(&v, "d/newer").is_default());
    v.close().unwrap();
}

fn bytes_of(file: &dyn BackendFile) -> Vec<u8> {
    let mut bytes = vec![0; file.stat().unwrap().len as usize];
    assert_eq!(file.read_at(0, &mut bytes).unwrap(), bytes.len());
    bytes
}

/// A file that was made and never written has the profile of its directory, whatever the store makes of it.
#[test]
fn an_empty_file_is_not_less_protected() {
    let recipe = Recipe::default();
    let (_dir, backend) = local();
    let v = recipe.make(&backend);
    set(&v, "", random(), false);
    v.put("file", b"");
    v.close().unwrap();
    let stored = recipe.open(&backend).unwrap();
    let name = stored.stored_path(n("file")).unwrap();
    stored.close().unwrap();
    backend.root().open_file(name.as_os_str(), true).unwrap().set_len(0).unwrap();
    let v = recipe.open(&backend).unwrap();
    assert_eq!(profile(&v, "file"), random());
    v.put("file", &text(4));
    assert_eq!(profile(&v, "file"), random());
    v.close().unwrap();
    // In an anchored vault its row says so.
    let (lab, v) = Lab::new(recipe);
    set(&v, "", random(), false);
    v.put("file", b"");
    v.close().unwrap();
    assert_eq!(profile(&lab.open(), "file"), random());
}
