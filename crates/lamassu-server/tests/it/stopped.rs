//! A host of a shared vault that stands still for longer than a term: what it reads when it goes on is no finding.

use crate::common::*;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::os::unix::fs::FileExt;
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
