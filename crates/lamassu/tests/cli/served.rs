//! What a mounted vault's daemon is asked.

use crate::mounts::daemon_of;
use crate::support::Bench;
use lamassu_fuse::control::{self, Asked, ControlError};
use serde_json::Value;
use std::fs;
use std::process::Command;

fn asked(b: &Bench) -> Asked {
    Asked::open(&b.path("m")).unwrap()
}

fn ask(b: &Bench, request: &[u8]) -> Value {
    serde_json::from_slice(&control::call(&asked(b), request).unwrap()).unwrap()
}

#[test]
fn a_mount_says_what_it_serves() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    let not_yet = Asked::open(&b.path("m"));
    assert!(matches!(not_yet, Err(ControlError::NotMounted(_))), "{not_yet:?}");
    b.run("mount v m").ok();
    let told = ask(&b, br#"{"request":"status"}"#);
    let info = b.run("info --json v").ok();
    assert_eq!(told["done"]["vault"], info.json()["id"]);
    assert_eq!(told["done"]["pid"], daemon_of(&b));
    assert_eq!(told["done"]["read_only"], false);
    let mut of_mount = b.run("info --json m").ok().json();
    let mount = of_mount.as_object_mut().unwrap().remove("mount").unwrap();
    assert_eq!(of_mount, info.json(), "the mount point stands for the vault");
    assert_eq!((&mount["pid"], &mount["read_only"]), (&told["done"]["pid"], &Value::Bool(false)));

    assert_eq!(ask(&b, br#"{"request":"sync"}"#), serde_json::json!({"done": null}));

    // What it does not know it says so of, and goes on.
    let long = vec![b'x'; control::CALL_LEN_MAX];
    for bad in [&b"{}"[..], b"", b"\xff", br#"{"request":"fly"}"#, br#"{"request":"status","more":1}"#, &long] {
        let told = ask(&b, bad);
        assert_eq!(told["failed"]["kind"], "unknown-request", "{told}");
        assert!(told["failed"]["message"].as_str().unwrap().contains("does not know"), "{told}");
    }
    assert!(matches!(control::call(&asked(&b), &[0; control::CALL_LEN_MAX + 1]), Err(ControlError::TooLong)));
    let mut again = ask(&b, br#"{"request":"status"}"#);
    let counted = |told: &Value, name: &str| {
        let operations = told["done"]["operations"].as_array().unwrap();
        operations.iter().find(|one| one["operation"] == name).cloned().unwrap_or_default()
    };
    assert_eq!(counted(&told, "sync"), Value::Null, "nothing is listed that was never done");
    let (sync, unknown) = (counted(&again, "sync"), counted(&again, "unknown-request"));
    assert_eq!((sync["count"].as_u64(), sync["failed"].as_u64()), (Some(1), Some(0)));
    assert_eq!((unknown["count"].as_u64(), unknown["failed"].as_u64()), (Some(6), Some(6)));
    // The first one here, and that of `info m`.
    assert_eq!(counted(&again, "status")["count"].as_u64(), Some(2));
    assert!(sync["total_us"].is_u64());
    again["done"]["operations"] = told["done"]["operations"].clone();
    assert_eq!(again, told, "nothing else has changed");
    b.unmount("m");
}

/// Requests of the kernel are counted, with their errors and the time they took.
#[test]
fn info_of_a_mount_counts_its_requests() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    for n in 0..5 {
        fs::create_dir(b.path(&format!("m/{n}"))).unwrap();
    }
    fs::create_dir(b.path("m/0/0")).unwrap();
    assert!(fs::remove_dir(b.path("m/0")).is_err(), "it is not empty");
    let counted = |name: &str| {
        let info = b.run("info --json m").ok().json();
        let operations = info["mount"]["operations"].as_array().unwrap().clone();
        operations.into_iter().find(|one| one["operation"] == name).unwrap()
    };
    let of = |one: &Value| (one["count"].as_u64().unwrap(), one["failed"].as_u64().unwrap());
    assert_eq!(of(&counted("fuse-mkdir")), (6, 0));
    assert!(counted("fuse-mkdir")["total_us"].as_u64().unwrap() > 0);
    assert_eq!(of(&counted("fuse-rmdir")), (1, 1));
    assert_eq!(counted("fuse-lookup")["failed"], 0, "that a name is free is no error");
    assert!(rustix::fs::getxattr(b.path("m"), "user.none", &mut [0; 8]).is_err());
    assert_eq!(counted("fuse-getxattr")["failed"], 0, "that there is no such attribute is no error");
    let shown = b.run("info m").ok().text();
    assert!(shown.lines().any(|line| line.starts_with("fuse-mkdir") && line.contains(" 6 ")), "{shown}");
    b.unmount("m");
}

#[test]
fn others_are_not_heard() {
    let b = Bench::new();
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can be somebody else");
        return;
    }
    b.run("init v").ok();
    b.dir("m");
    b.run("mount --allow-other v m").ok();
    std::fs::set_permissions(b.path("m"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(b.path("."), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let ran = |uid: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", uid, "--clear-groups", env!("CARGO_BIN_EXE_lamassu"), "info"]).arg(b.path("m"));
        let out = command.output().unwrap();
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (heard, said) = ran("65534");
    assert!(!heard && said.contains("only root and the user who mounted"), "{said}");
    assert!(ran("0").0);
    b.unmount("m");
}

/// A delegate sends rubbish for every channel that it can name, while root changes keys.
#[test]
fn a_delegate_closes_nobodys_channel() {
    use rustix::fs::{Gid, Uid};
    use std::sync::atomic::{AtomicBool, Ordering};
    const DELEGATE: u32 = 65534;
    let b = Bench::new();
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can be somebody else");
        return;
    }
    b.run("init v").ok();
    b.dir("m");
    b.run(&format!("mount --allow-other --delegate {DELEGATE} v m")).ok();
    for dir in ["m", "."] {
        std::fs::set_permissions(b.path(dir), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    std::os::unix::fs::chown(b.dir("m/own"), Some(DELEGATE), Some(DELEGATE)).unwrap();
    let (place, stop) = (b.path("m/own"), AtomicBool::new(false));
    let burn = || {
        let (uid, gid) = (Uid::from_raw(DELEGATE), Gid::from_raw(DELEGATE));
        rustix::thread::set_thread_groups(&[]).unwrap();
        rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        let dir = Asked::open(&place).unwrap();
        let cost = r#"{"memory_kib":64,"passes":1,"lanes":1}"#;
        let mut kinds = std::collections::HashSet::new();
        while !stop.load(Ordering::Relaxed) {
            for channel in 1..30 {
                // A number, as it once was, and as it is.
                for number in [channel.to_string(), format!("\"{channel:032x}\"")] {
                    let parcel = format!(r#"{{"channel":{number},"kind":"raw","nonce":"","sealed":"","cost":{cost}}}"#);
                    let request = format!(r#"{{"request":"load","secret":{parcel},"slot":null}}"#);
                    let told: Value =
                        serde_json::from_slice(&control::call(&dir, request.as_bytes()).unwrap()).unwrap();
                    kinds.insert(told["failed"]["kind"].as_str().unwrap().to_string());
                }
            }
        }
        kinds
    };
    let kinds = std::thread::scope(|scope| {
        let burning = scope.spawn(burn);
        let added: Vec<_> = (0..6)
            .map(|i| {
                let key = b.key(&format!("new{i}"));
                b.run(&format!("key add -n {key} m"))
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        let kinds = burning.join().unwrap();
        added.into_iter().for_each(|ran| drop(ran.ok()));
        kinds
    });
    assert!(kinds.contains("refused"), "refused before it is unpacked: {kinds:?}");
    b.unmount("m");
}
