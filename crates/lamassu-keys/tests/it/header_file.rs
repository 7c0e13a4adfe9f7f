//! Header files on disk: replaced whole, one change at a time, and nothing the store puts in the way hangs or misleads.
use lamassu_crypto::SecretBytes;
use lamassu_format::Suite;
use lamassu_format::header::{Header, HeaderError, VaultHeader, ZoneFile};
use lamassu_keys::header_file::{self, FileError, Update};
use lamassu_keys::{Argon2Params, Material, NewSlot, NewZone, SlotKind, Unlocked, create_zone, unlock};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

fn raw(byte: u8) -> Material {
    Material::new(SlotKind::Raw, SecretBytes::new(vec![byte; 32])).unwrap()
}

fn slot(material: &Material) -> NewSlot<'_> {
    NewSlot { material, cost: Argon2Params::new(64, 1, 2).unwrap(), label: "", created: 0 }
}

fn zone() -> (ZoneFile, Unlocked) {
    let new = NewZone { suite: Suite::Aes, block_size: 4096, compression: None, outer: true, created: 0 };
    create_zone(&new, &slot(&raw(1))).unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn created_read_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("z");
    let (mut header, keys) = zone();
    assert!(matches!(header_file::read::<ZoneFile>(&path), Err(FileError::Missing { .. })));
    assert!(matches!(
        Update::begin(&path, &lamassu_keys::nobody()).unwrap().replace(&header),
        Err(FileError::Missing { .. })
    ));
    Update::begin(&path, &lamassu_keys::nobody()).unwrap().create(&header).unwrap();
    assert_eq!(header_file::read::<ZoneFile>(&path).unwrap(), header);
    assert_eq!(mode(&path), 0o600);

    let first = fs::read(&path).unwrap();
    assert!(matches!(
        Update::begin(&path, &lamassu_keys::nobody()).unwrap().create(&zone().0),
        Err(FileError::Exists { .. })
    ));
    assert_eq!(fs::read(&path).unwrap(), first, "never overwritten");

    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    keys.add_slot(&mut header, &slot(&raw(2))).unwrap();
    Update::begin(&path, &lamassu_keys::nobody()).unwrap().replace(&header).unwrap();
    assert_eq!(header_file::read::<ZoneFile>(&path).unwrap(), header);
    assert_eq!(mode(&path), 0o644, "permissions are kept");
    assert_eq!(names(dir.path()), ["z"], "nothing else is left");
}

/// Where locks do not reach other hosts, one that was stopped may find that another has used its file meanwhile. That
/// is the header now.
#[test]
fn an_update_whose_file_has_become_the_header_changes_nothing() {
    for ends_by in ["drop", "replace"] {
        let dir = tempfile::tempdir().unwrap();
        let (path, new) = (dir.path().join("z"), dir.path().join("z.new"));
        let (header, keys) = zone();
        Update::begin(&path, &lamassu_keys::nobody()).unwrap().create(&header).unwrap();
        let stopped = Update::begin(&path, &lamassu_keys::nobody()).unwrap();
        let mut of_other = header.clone();
        keys.add_slot(&mut of_other, &slot(&raw(2))).unwrap();
        fs::write(&new, of_other.to_json().unwrap()).unwrap();
        fs::rename(&new, &path).unwrap();
        match ends_by {
            "drop" => drop(stopped),
            _ => assert!(matches!(stopped.replace(&header), Err(FileError::Busy { .. }))),
        }
        assert_eq!(header_file::read::<ZoneFile>(&path).unwrap(), of_other, "{ends_by}");
    }
}

/// The same where another has filled the file, and has not renamed it yet.
#[test]
fn an_update_given_up_leaves_what_another_host_has_written() {
    let dir = tempfile::tempdir().unwrap();
    let (path, new) = (dir.path().join("z"), dir.path().join("z.new"));
    let (header, _) = zone();
    Update::begin(&path, &lamassu_keys::nobody()).unwrap().create(&header).unwrap();
    fs::write(&new, header.to_json().unwrap()).unwrap();
    drop(Update::begin(&path, &lamassu_keys::nobody()).unwrap());
    assert_eq!(fs::read(&new).unwrap(), header.to_json().unwrap());
    // What a dead program left goes with the next change.
    Update::begin(&path, &lamassu_keys::nobody()).unwrap().replace(&header).unwrap();
    assert_eq!(names(dir.path()), ["z"]);
}

#[test]
fn an_update_given_up_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("z");
    let (mut header, _) = zone();
    Update::begin(&path, &lamassu_keys::nobody()).unwrap().create(&header).unwrap();
    let before = fs::read(&path).unwrap();
    drop(Update::begin(&path, &lamassu_keys::nobody()).unwrap());
    header.keys_mut().slots.clear();
    assert!(matches!(
        Update::begin(&path, &lamassu_keys::nobody()).unwrap().replace(&header),
        Err(FileError::Header { .. })
    ));
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(names(dir.path()), ["z"]);
}

#[test]
fn what_a_dead_program_left_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("z");
    fs::write(dir.path().join("z.new"), vec![b'x'; 100_000]).unwrap();
    let (header, _) = zone();
    Update::begin(&path, &lamassu_keys::nobody()).unwrap().create(&header).unwrap();
    assert_eq!(fs::read(&path).unwrap(), header.to_json().unwrap());
    assert_eq!(names(dir.path()), ["z"]);
}

#[test]
fn one_change_at_a_time_and_none_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("z");
    let (header, _) = zone();
    Update::begin(&path, &lamassu_keys::nobody()).unwrap().create(&header).unwrap();

    let held = Update::begin(&path, &lamassu_keys::nobody()).unwrap();
    assert!(matches!(Update::begin(&path, &lamassu_keys::nobody()), Err(FileError::Busy { .. })));
    drop(held);

    let adder = |first: u8| {
        for byte in first..first + 5 {
            let update = loop {
                match Update::begin(&path, &lamassu_keys::nobody()) {
                    Ok(update) => break update,
                    Err(FileError::Busy { .. }) => std::thread::yield_now(),
                    Err(e) => panic!("{e}"),
                }
            };
            let mut header: ZoneFile = update.read().unwrap();
            let keys = unlock(&header, &raw(1)).unwrap();
            keys.add_slot(&mut header, &slot(&raw(byte))).unwrap();
            update.replace(&header).unwrap();
        }
    };
    std::thread::scope(|s| {
        for first in [10, 20, 30, 40] {
            s.spawn(move || adder(first));
        }
    });
    let header: ZoneFile = header_file::read(&path).unwrap();
    assert_eq!(header.keys().slots.len(), 21);
    for byte in [1, 10, 14, 20, 24, 30, 34, 40, 44] {
        unlock(&header, &raw(byte)).unwrap();
    }
}

#[test]
fn odd_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("dir")).unwrap();
    assert!(matches!(header_file::read::<VaultHeader>(&at("dir")), Err(FileError::NotAFile { .. })));
    rustix::fs::mkfifoat(rustix::fs::CWD, at("fifo"), rustix::fs::Mode::RUSR).unwrap();
    assert!(matches!(header_file::read::<VaultHeader>(&at("fifo")), Err(FileError::NotAFile { .. })));
    fs::write(at("huge"), vec![b' '; (1 << 20) + 1]).unwrap();
    let e = header_file::read::<VaultHeader>(&at("huge")).unwrap_err();
    assert!(matches!(e, FileError::Header { source: HeaderError::TooLarge { .. }, .. }));
    // A link in place of `.new` must not lead the writer to another file.
    fs::write(at("victim"), "precious").unwrap();
    symlink(at("victim"), at("z.new")).unwrap();
    assert!(matches!(Update::begin(&at("z"), &lamassu_keys::nobody()), Err(FileError::Write { .. })));
    assert_eq!(fs::read(at("victim")).unwrap(), b"precious");
}

/// It leads to a file that is somebody else's, whatever its permissions.
#[test]
fn a_hard_link_in_place_of_new_is_not_written_through() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (mut header, keys) = zone();
    fs::write(at("victim"), "precious").unwrap();
    fs::set_permissions(at("victim"), fs::Permissions::from_mode(0o444)).unwrap();
    let link = || fs::hard_link(at("victim"), at("z.new")).unwrap();
    let unharmed = || {
        assert_eq!(fs::read(at("victim")).unwrap(), b"precious");
        assert_eq!(mode(&at("victim")), 0o444);
        assert!(!at("z.new").exists());
    };
    link();
    drop(Update::begin(&at("z"), &lamassu_keys::nobody()).unwrap());
    unharmed();
    link();
    Update::begin(&at("z"), &lamassu_keys::nobody()).unwrap().create(&header).unwrap();
    unharmed();
    keys.add_slot(&mut header, &slot(&raw(2))).unwrap();
    link();
    Update::begin(&at("z"), &lamassu_keys::nobody()).unwrap().replace(&header).unwrap();
    unharmed();
    assert_eq!(header_file::read::<ZoneFile>(&at("z")).unwrap(), header);
    assert_eq!(names(dir.path()), ["victim", "z"]);
}

/// The number of a descriptor says nothing to a person.
#[test]
fn a_header_reached_through_a_descriptor_is_named_by_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().canonicalize().unwrap();
    let opened = fs::File::open(&place).unwrap();
    let through = Path::new("/proc/self/fd").join(opened.as_raw_fd().to_string()).join("lamassu.vault");
    match header_file::read::<VaultHeader>(&through) {
        Err(FileError::Missing { path }) => assert_eq!(path, place.join("lamassu.vault")),
        other => panic!("{other:?}"),
    }
    let refused = Update::begin(&through, &lamassu_keys::nobody()).unwrap().replace(&zone().0).unwrap_err().to_string();
    assert!(refused.contains(&place.display().to_string()), "{refused}");
    assert!(names(&place).is_empty());
}

#[test]
fn a_linked_zone_file_is_replaced_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real"), dir.path().join("link"));
    let (mut header, keys) = zone();
    Update::begin(&real, &lamassu_keys::nobody()).unwrap().create(&header).unwrap();
    symlink(&real, &link).unwrap();
    keys.add_slot(&mut header, &slot(&raw(2))).unwrap();
    Update::begin(&link, &lamassu_keys::nobody()).unwrap().replace(&header).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(header_file::read::<ZoneFile>(&real).unwrap(), header);
}

#[test]
fn a_link_in_place_of_a_vault_s_header_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (vault, elsewhere) = (dir.path().join("lamassu.vault"), dir.path().join("elsewhere"));
    fs::write(&elsewhere, "precious").unwrap();
    fs::write(dir.path().join("elsewhere.new"), "precious, too").unwrap();
    symlink(&elsewhere, &vault).unwrap();
    assert!(matches!(header_file::read::<VaultHeader>(&vault), Err(FileError::NotAFile { .. })));
    let update = Update::begin(&vault, &lamassu_keys::nobody()).unwrap();
    assert!(matches!(update.read::<VaultHeader>(), Err(FileError::NotAFile { .. })));
    assert!(matches!(update.create(&zone().0), Err(FileError::Exists { .. })));
    // Not even the lock file was made, or removed, where the link leads.
    assert_eq!(names(dir.path()), ["elsewhere", "elsewhere.new", "lamassu.vault"]);
    assert_eq!(fs::read(dir.path().join("elsewhere.new")).unwrap(), b"precious, too");
    assert_eq!(fs::read(&elsewhere).unwrap(), b"precious");
}
