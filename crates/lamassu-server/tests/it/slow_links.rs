//! A host whose link to the server is slow, and others beside it.

use crate::common::TERM;
use crate::turns::{Hosts, commit, connection, soon, take};
use lamassu_anchor::row::{Content, FileRow, Sealed};
use lamassu_anchor::{Anchor, Digest, EntryPlace, ObjectId, Row, Token};
use lamassu_lease::Mode;
use lamassu_rpc::host::Turns;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Passes connections on to a server. Its answers take their time: `rate` bytes a second in all.
fn slow_link(to: u16, rate: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for host in listener.incoming().map_while(Result::ok) {
            let server = TcpStream::connect(("127.0.0.1", to)).unwrap();
            let (mut asks, mut asked) = (host.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut asks, &mut asked);
                let _ = asked.shutdown(Shutdown::Write);
            });
            std::thread::spawn(move || pass_slowly(server, host, rate));
        }
    });
    port
}

fn pass_slowly(mut from: TcpStream, mut to: TcpStream, rate: usize) {
    const TICKS: usize = 50;
    let mut some = vec![0; rate / TICKS];
    while let Ok(len @ 1..) = from.read(&mut some) {
        if to.write_all(&some[..len]).is_err() {
            return;
        }
        std::thread::sleep(Duration::from_secs_f64(len as f64 / rate as f64));
    }
    let _ = to.shutdown(Shutdown::Both);
}

fn nth_name(n: u64) -> Token {
    let mut name = [0; 16];
    name[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    Token(name)
}

#[test]
fn a_first_copy_that_takes_longer_than_a_turn_may_keep_others_waiting_is_not_begun_again() {
    const FILES: u64 = 40_000;
    let hosts = Hosts::new(&["a", "b"]);
    let a = hosts.turns("a");
    let turn = take(&a, Mode::Exclusive).get();
    let anchor = Anchor::open(turn.table.clone(), &hosts.vault).unwrap();
    for n in 0..FILES {
        let content = Content::File(FileRow::default());
        let row = Row { mode: 0o600, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Is(Digest([7; 32])) };
        anchor.make(EntryPlace { dir: ObjectId::ROOT, name: nth_name(n) }, row).unwrap();
    }
    anchor.commit(anchor.mark()).unwrap();
    drop(anchor);
    turn.pass();
    // All rows take more than three terms through this link; a recalled host has two.
    let link = slow_link(hosts.lab.port, 300_000);
    let servers = hosts.lab.path("state-b/lamassu/servers");
    std::fs::rename(servers.join(format!("127.0.0.1:{}", hosts.lab.port)), servers.join(format!("127.0.0.1:{link}")))
        .unwrap();
    let slow = connection(hosts.lab.dir.path(), "b", link);
    let b = Turns::begin(&slow, hosts.vault, &hosts.copy("b")).unwrap();
    let is_done = Arc::new(AtomicBool::new(false));
    let (others, vault, until) = (a.clone(), hosts.vault, is_done.clone());
    let busy = soon(move || {
        while !until.load(Ordering::SeqCst) {
            let turn = others.take(Mode::Exclusive).unwrap();
            if turn.takes_over {
                turn.taken_over();
            }
            commit(&turn, &vault).unwrap();
            turn.pass();
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let begun = Instant::now();
    let turn = take(&b, Mode::Exclusive).get();
    is_done.store(true, Ordering::SeqCst);
    assert!(begun.elapsed() > Duration::from_secs(2 * TERM), "the link is not slow");
    // The vault is to trust nothing of an earlier turn: the copy was made anew, though not in this session.
    assert!(turn.changed.is_none());
    // A session ended, as the host kept others waiting, and its copy was not lost.
    assert_eq!(hosts.lab.metric("sessions_held_on_total"), 1.0);
    let anchor = Anchor::open(turn.table.clone(), &hosts.vault).unwrap();
    let last = EntryPlace { dir: ObjectId::ROOT, name: nth_name(FILES - 1) };
    assert!(anchor.entry(&last).unwrap().is_some());
    drop(anchor);
    commit(&turn, &hosts.vault).unwrap();
    turn.pass();
    busy.get();
}
