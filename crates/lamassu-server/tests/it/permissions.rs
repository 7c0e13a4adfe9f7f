//! Users of hosts that share a vault: permissions hold across hosts, also where a kernel knows only an earlier state.

use crate::common::*;
use rustix::fs::{Mode, OFlags, openat};
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(crate) const ANN: u32 = 1234;
const BEN: u32 = 1235;

/// A vault that hosts have mounted for all users. `m-X/free` is a directory as /tmp is. `None`: not as root.
pub(crate) fn shared(lab: &Lab) -> Option<[Host<'_>; 3]> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: takes root");
        return None;
    }
    let hosts = ["a", "b", "c"].map(|name| lab.joined(name));
    let id = lab.vault(hosts[0]);
    hosts[1..].iter().for_each(|host| lab.grant(*host, &id));
    let open = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    for host in hosts {
        host.run(&format!("mount --shared --allow-other --anchor {} store/v m-{}", lab.url(), host.name)).ok();
    }
    open(&lab.path(""), 0o755);
    open(&hosts[0].file(""), 0o755);
    fs::create_dir(hosts[0].file("free")).unwrap();
    open(&hosts[0].file("free"), 0o1777);
    Some(hosts)
}

/// Runs `body` as a user, on a thread of its own.
pub(crate) fn as_user<T: Send>(uid: u32, body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(|| become_user(uid, body)).join().unwrap())
}

fn become_user<T>(uid: u32, body: impl FnOnce() -> T) -> T {
    use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(uid));
    set_thread_groups(&[]).unwrap();
    set_thread_res_gid(gid, gid, gid).unwrap();
    set_thread_res_uid(uid, uid, uid).unwrap();
    body()
}

/// The kernel of one host knows of no such name, and so checks no permission, when it asks to create it: another host
/// has made it meanwhile, for its own user.
#[test]
fn a_private_file_that_another_host_has_just_made_is_not_opened() {
    const ROUNDS: usize = 40;
    let lab = Lab::new();
    let Some([a, b, c]) = shared(&lab) else { return };
    let barrier = Barrier::new(2);
    let (mut of_ann, mut of_root) = (0, 0);
    std::thread::scope(|scope| {
        let ann = scope.spawn(|| {
            become_user(ANN, || {
                let open = |name: String| {
                    barrier.wait();
                    let path = b.file(&name);
                    let opened =
                        File::options().read(true).write(true).create(true).truncate(true).mode(0o600).open(path);
                    opened.map(|file| file.metadata().unwrap().uid()).map_err(|error| error.kind())
                };
                (0..ROUNDS).map(|i| open(format!("free/n{i}"))).collect::<Vec<_>>()
            })
        });
        let made: Vec<_> = (0..ROUNDS)
            .map(|i| {
                barrier.wait();
                let path = a.file(&format!("free/n{i}"));
                let made = File::options().write(true).create_new(true).mode(0o600).open(path);
                made.and_then(|mut file| file.write_all(b"of root")).is_ok()
            })
            .collect();
        for (i, (opened, made)) in ann.join().unwrap().into_iter().zip(made).enumerate() {
            match (made, opened) {
                (true, Err(io::ErrorKind::PermissionDenied)) => of_root += 1,
                (false, Ok(ANN)) => of_ann += 1,
                other => panic!("{i}: {other:?}"),
            }
            if made {
                assert_eq!(fs::read_to_string(c.file(&format!("free/n{i}"))).unwrap(), "of root");
            }
        }
    });
    eprintln!("{of_root} made by root first, {of_ann} by the other user");
}

/// In a sticky directory a user removes and replaces only what is the user's own by then, whoever had the name when the
/// kernel looked.
#[test]
fn an_entry_of_a_sticky_directory_that_has_become_another_users_stays() {
    const ROUNDS: usize = 15;
    let lab = Lab::new();
    let Some([a, b, c]) = shared(&lab) else { return };
    let is_done = AtomicBool::new(false);
    let name = "free/x";
    std::thread::scope(|scope| {
        for (host, mine) in [(b, "free/b"), (c, "free/c")] {
            let is_done = &is_done;
            scope.spawn(move || {
                become_user(ANN, || {
                    let mut n = 0;
                    while !is_done.load(Ordering::SeqCst) {
                        n += 1;
                        if n % 2 == 0 {
                            let _ = File::options().write(true).create_new(true).mode(0o600).open(host.file(name));
                        } else {
                            let made = File::create(host.file(mine));
                            let _ = made.and_then(|_| fs::rename(host.file(mine), host.file(name)));
                        }
                        let _ = fs::remove_file(host.file(name));
                        // The name is free for a while.
                        std::thread::sleep(Duration::from_millis(40));
                    }
                });
            });
        }
        let done = as_user(BEN, || {
            let (mut kept, mut lost) = (0, Vec::new());
            while kept + lost.len() < ROUNDS {
                let path = a.file(name);
                // Another user's file is in the way until that user removes it.
                let Ok(mut file) = File::options().write(true).create_new(true).mode(0o600).open(&path) else {
                    continue;
                };
                let number = file.metadata().unwrap().ino();
                file.write_all(b"of ben").and_then(|()| file.sync_all()).unwrap();
                std::thread::sleep(Duration::from_millis(30));
                match fs::metadata(&path) {
                    Ok(there) if (there.uid(), there.ino()) == (BEN, number) => kept += 1,
                    other => lost.push(other.map(|there| there.uid())),
                }
                let _ = fs::remove_file(&path);
            }
            lost
        });
        is_done.store(true, Ordering::SeqCst);
        assert!(done.is_empty(), "{done:?}");
    });
}

/// A descriptor does not make a user the owner for ever: modes, times and lists are the present owner's to set.
#[test]
fn who_is_no_longer_the_owner_changes_no_attributes() {
    let lab = Lab::new();
    let Some([a, b, c]) = shared(&lab) else { return };
    let held = as_user(ANN, || {
        let file = File::options().read(true).write(true).create_new(true).mode(0o755).open(b.file("free/f")).unwrap();
        file.set_permissions(Permissions::from_mode(0o700)).unwrap();
        file
    });
    chown(a.file("free/f"), Some(0), Some(0)).unwrap();
    fs::set_permissions(a.file("free/f"), Permissions::from_mode(0o4755)).unwrap();
    as_user(ANN, || {
        (&held).write_all(b"#!/bin/sh\n").unwrap();
        let refused = |done: io::Result<()>| {
            assert_eq!(done.unwrap_err().raw_os_error(), Some(rustix::io::Errno::PERM.raw_os_error()))
        };
        refused(held.set_permissions(Permissions::from_mode(0o4755)));
        refused(held.set_modified(std::time::UNIX_EPOCH));
        refused(std::os::unix::fs::fchown(&held, None, Some(ANN)));
        // What the file has is read and written as before.
        held.set_len(3).unwrap();
    });
    let now = fs::metadata(c.file("free/f")).unwrap();
    assert_eq!((now.uid(), now.mode() & 0o7777, now.len()), (0, 0o755, 3), "the bits went with the write");
    // The owner of now may, and so may root.
    chown(a.file("free/f"), Some(BEN), Some(BEN)).unwrap();
    as_user(BEN, || fs::set_permissions(b.file("free/f"), Permissions::from_mode(0o711)).unwrap());
    held.set_permissions(Permissions::from_mode(0o4711)).unwrap();
    assert_eq!(fs::metadata(c.file("free/f")).unwrap().mode() & 0o7777, 0o4711);
}

/// Whether a new program keeps its set-gid bit depends on the permissions of its directory. Those of a dataset's root
/// are in the vault around it, which another host may have when the call has the dataset.
#[test]
fn set_gid_programs_are_made_in_the_root_of_a_dataset_without_the_vault_around_it() {
    const ROUNDS: usize = 200;
    let lab = Lab::new();
    let Some([a, b, c]) = shared(&lab) else { return };
    a.run("dataset create m-a/p").ok();
    fs::set_permissions(a.file("p"), Permissions::from_mode(0o777)).unwrap();
    let dir = File::open(a.file("p")).unwrap();
    let is_done = AtomicBool::new(false);
    let made: Vec<_> = std::thread::scope(|scope| {
        for (host, name) in [(b, "f"), (c, "p/f")] {
            let is_done = &is_done;
            scope.spawn(move || {
                while !is_done.load(Ordering::SeqCst) {
                    let _ = fs::write(host.file(name), "busy");
                }
            });
        }
        let make = |round| {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
            let made = openat(&dir, format!("program{round}"), flags, Mode::from_raw_mode(0o2755))?;
            rustix::fs::fstat(&made).map(|st| (st.st_uid, st.st_mode & 0o7777))
        };
        let made = as_user(ANN, || (0..ROUNDS).map(make).collect());
        is_done.store(true, Ordering::SeqCst);
        made
    });
    let other: Vec<_> = made.into_iter().filter(|made| *made != Ok((ANN, 0o2755))).collect();
    assert!(other.is_empty(), "{other:?}");
}
