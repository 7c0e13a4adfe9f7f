//! A server as a service of systemd: what it tells the manager, the unit, and what SIGHUP renews.

use crate::common::raw::shown;
use crate::common::*;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Where the manager listens.
struct Manager(UnixDatagram);

impl Manager {
    fn new(path: &Path) -> Manager {
        let socket = UnixDatagram::bind(path).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Manager(socket)
    }

    /// What it is told next.
    fn told(&self) -> Vec<String> {
        let mut message = [0; 4096];
        let len = self.0.recv(&mut message).expect("the server tells the manager nothing");
        String::from_utf8_lossy(&message[..len]).lines().map(str::to_owned).collect()
    }
}

#[test]
fn the_manager_is_told_when_the_server_is_ready_and_when_it_stops() {
    let mut lab = Lab::new();
    lab.stop("-TERM");
    let path = lab.path("notify");
    let manager = Manager::new(&path);
    let mut command = Command::new(server_program());
    command.env("NOTIFY_SOCKET", &path);
    lab.start_by(command);
    assert_eq!(manager.told(), ["READY=1", "STATUS=serving"]);
    let a = lab.joined("a");
    lab.vault(a);
    a.mount().ok();
    a.write("f", "one").unwrap();
    let before = shown(&lab, "a");
    assert_eq!(shown(&lab, "a"), before);
    // ExecReload: another certificate for new connections, and those that are open go on.
    kill(lab.server.as_ref().unwrap().id(), "-HUP");
    wait_for("the certificate is not renewed", || shown(&lab, "a") != before);
    let reloading = manager.told();
    assert_eq!(reloading[0], "RELOADING=1");
    let at: u64 = reloading[1].strip_prefix("MONOTONIC_USEC=").unwrap().parse().unwrap();
    assert!(at > 0 && reloading.len() == 2);
    assert_eq!(manager.told(), ["READY=1"]);
    a.write("f", "two").unwrap();
    assert_eq!(a.run("ls store/v").code(63).out, "", "in use: the mount has its session");
    a.umount().ok();
    a.run("ls store/v").ok();
    let audit = lab.serve(&["audit"]).ok().out;
    assert!(!audit.contains("why=silent"), "{audit}");
    // Nothing else was said meanwhile.
    lab.stop("-TERM");
    assert_eq!(manager.told(), ["STOPPING=1"]);
    manager.0.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(manager.0.recv(&mut [0; 64]).is_err());
    // A server that does not start is not ready.
    fs::write(lab.path("server/server.toml"), "listen = 7").unwrap();
    let mut command = Command::new(server_program());
    let failed = command.arg("run").arg(lab.path("server")).env("NOTIFY_SOCKET", &path).output().unwrap();
    assert!(!failed.status.success() && manager.0.recv(&mut [0; 64]).is_err());
}

/// What passes by itself keeps no server from its next start: an administrator's command has the state open meanwhile.
#[test]
fn a_server_whose_state_is_in_use_is_started_again_and_one_that_is_wrong_is_not() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/lamassu-server.service");
    let unit = fs::read_to_string(unit).unwrap();
    let codes = unit.lines().find_map(|line| line.strip_prefix("RestartPreventExitStatus=")).unwrap();
    let codes: Vec<i32> = codes.split(' ').map(|code| code.parse().unwrap()).collect();
    assert!(unit.contains("Restart=on-failure\n"));
    let mut lab = Lab::new();
    let other = lab.serve(&["run"]);
    assert!(!codes.contains(&other.code), "{other:?}");
    other.says("another");
    lab.stop("-TERM");
    fs::write(lab.path("server/policy.toml"), "nonsense").unwrap();
    let wrong = lab.serve(&["run"]);
    assert!(codes.contains(&wrong.code), "{wrong:?}");
}

/// The units, as `make install` installs them, with programs that are there.
#[test]
fn systemd_understands_the_units() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no systemd-analyze");
        return;
    }
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist");
    let dir = tempfile::tempdir().unwrap();
    let unit = fs::read_to_string(dist.join("lamassu-server.service")).unwrap();
    let program = server_program().display().to_string();
    assert!(unit.contains("Type=notify\n") && unit.contains("ExecReload=/bin/kill -HUP $MAINPID\n"));
    let verify = |name: &str, unit: &str| {
        let path = dir.path().join(name);
        fs::write(&path, unit).unwrap();
        let mut command = Command::new("systemd-analyze");
        Ran::from(command.args(["verify", "--man=no", "--recursive-errors=no"]).arg(&path).output().unwrap())
    };
    let unit = unit.replace("/usr/local/bin/lamassu-server", &program);
    let verified = verify("lamassu-server.service", &unit).ok();
    assert!(!verified.err.contains("lamassu-server.service:"), "{verified:?}");
    // It would say so.
    let wrong = verify("wrong.service", &unit.replace("Restart=on-failure", "Restart=sometimes"));
    assert!(wrong.err.contains("sometimes"), "{wrong:?}");
}
