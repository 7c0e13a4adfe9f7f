//! A host of a shared vault that stands still for longer than a term: what it reads when it goes on is no finding.

use crate::common::*;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::net::TcpStream;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Child;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 8;

/// Reads are under way when the host's daemon is stopped. Meanwhile another host has the vault, and changes what is
/// read. Its store is honest, so nothing is reported.
#[test]
fn a_host_that_was_stopped_reports_nothing_of_what_others_wrote_meanwhile() {
    const ROUNDS: u64 = 3;
    let lab = Lab::new();
    let [a, b] = ["a", "b"].map(|name| lab.joined(name));
    let id = lab.vault(a);
    lab.grant(b, &id);
    for host in [a, b] {
        host.run(&format!("mount --shared --anchor {} store/v m-{}", lab.url(), host.name)).ok();
    }
    let write = |host: Host<'_>, seed: u8| {
        let file = File::options().write(true).create(true).truncate(false).open(host.file("f"))?;
        for block in 0..BLOCKS {
            file.write_all_at(&[seed ^ block as u8; BLOCK], block * BLOCK as u64)?;
        }
        file.sync_all()
    };
    write(a, 1).unwrap();
    let daemon = Pid::from_raw(a.daemon() as i32).unwrap();
    let (is_over, reads) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for reader in 0..3 {
            let (is_over, reads) = (&is_over, &reads);
            scope.spawn(move || {
                // For writing, too: such a file is read past the page cache.
                let file = File::options().read(true).write(true).open(a.file("f")).unwrap();
                for number in reader.. {
                    match file.read_exact_at(&mut [0; BLOCK], number % BLOCKS * BLOCK as u64) {
                        Ok(()) => _ = reads.fetch_add(1, Ordering::Relaxed),
                        Err(_) => std::thread::sleep(Duration::from_millis(10)),
                    }
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        }
        let go_on = || {
            let before = reads.load(Ordering::Relaxed);
            wait_for("the readers go on", || reads.load(Ordering::Relaxed) > before + 100);
        };
        for round in 0..ROUNDS {
            go_on();
            kill_process(daemon, Signal::STOP).unwrap();
            let done = write(b, 16 * (round as u8 + 2));
            kill_process(daemon, Signal::CONT).unwrap();
            done.unwrap();
            go_on();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    // Reports are sent within moments; this one comes behind them.
    [a, b].iter().for_each(|host| drop(host.umount().ok()));
    let alerts = lab.serve(&["alerts", "list", "--json"]).ok().out;
    assert_eq!(alerts.trim(), "", "{alerts}");
}

struct Gateway(Mutex<Child>);

impl Drop for Gateway {
    fn drop(&mut self) {
        let child = self.0.get_mut().unwrap();
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// A gateway that was stopped for longer than a term, while another host has taken the vault, ends by itself: a service
/// manager starts it again.
#[test]
fn a_gateway_ends_with_its_session() {
    let lab = Lab::new();
    let [a, b] = ["a", "b"].map(|name| lab.joined(name));
    let id = lab.vault(a);
    lab.grant(b, &id);
    let port = free_port();
    let config = format!(
        "vault = \"{0}/store/v\"\nkey = \"raw:file:{0}/key\"\nlisten = \"127.0.0.1:{port}\"\n",
        lab.dir.path().display()
    );
    std::fs::write(lab.path("gateway.toml"), config).unwrap();
    let credentials = "[[user]]\nname = \"u\"\naccess_key = \"USER\"\nsecret_key = \"secret-secret-secret\"\n";
    std::fs::write(lab.path("credentials.toml"), credentials).unwrap();
    std::fs::set_permissions(lab.path("credentials.toml"), PermissionsExt::from_mode(0o600)).unwrap();
    let log = || File::options().create(true).append(true).open(lab.path("gateway.log")).unwrap();
    let said = || std::fs::read_to_string(lab.path("gateway.log")).unwrap();
    let mut command = a.command();
    command.args(["-v", "gateway", "s3", "--config", "gateway.toml"]).stdout(log()).stderr(log());
    let gateway = Gateway(Mutex::new(command.spawn().unwrap()));
    let ended = || gateway.0.lock().unwrap().try_wait().unwrap();
    wait_for("the gateway serves", || {
        assert_eq!(ended(), None, "{}", said());
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    let pid = Pid::from_child(&gateway.0.lock().unwrap());
    kill_process(pid, Signal::STOP).unwrap();
    wait_for("the other host has the vault", || {
        let ran = b.run(&format!("mount --anchor {} store/v m-b", lab.url()));
        ran.code == 0
    });
    kill_process(pid, Signal::CONT).unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(100);
    let status = loop {
        match ended() {
            Some(status) => break Some(status),
            None if std::time::Instant::now() > deadline => break None,
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    drop(gateway);
    b.umount().ok();
    assert_eq!(status.and_then(|status| status.code()), Some(69), "{}", said());
    assert!(said().contains("the gateway ends"), "{}", said());
}
