//! What a mounted vault's daemon is asked.

use crate::mounts::daemon_of;
use crate::support::Bench;
use lamassu_fuse::control::{self, ControlError};
use serde_json::Value;
use std::process::Command;

fn ask(b: &Bench, request: &[u8]) -> Value {
    serde_json::from_slice(&control::call(&b.path("m"), request).unwrap()).unwrap()
}

#[test]
fn a_mount_says_what_it_serves() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    let not_yet = control::call(&b.path("m"), b"{}");
    assert!(matches!(not_yet, Err(ControlError::NotMounted(_))), "{not_yet:?}");
    b.run("mount v m").ok();
    let told = ask(&b, br#"{"request":"status"}"#);
    let info = b.run("info --json v").ok();
    assert_eq!(told["done"]["vault"], info.json()["id"]);
    assert_eq!(told["done"]["pid"], daemon_of(&b));
    assert_eq!(told["done"]["read_only"], false);
    assert_eq!(b.run("info --json m").ok().out, info.out, "the mount point stands for the vault");

    assert_eq!(ask(&b, br#"{"request":"sync"}"#), serde_json::json!({"done": null}));

    // What it does not know it says so of, and goes on.
    let long = vec![b'x'; control::CALL_LEN_MAX];
    for bad in [&b"{}"[..], b"", b"\xff", br#"{"request":"fly"}"#, br#"{"request":"status","more":1}"#, &long] {
        let told = ask(&b, bad);
        assert_eq!(told["failed"]["code"], 1, "{told}");
        assert!(told["failed"]["message"].as_str().unwrap().contains("does not know"), "{told}");
    }
    assert!(matches!(control::call(&b.path("m"), &[0; control::CALL_LEN_MAX + 1]), Err(ControlError::TooLong)));
    assert_eq!(ask(&b, br#"{"request":"status"}"#), told);
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
