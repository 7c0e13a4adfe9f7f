//! Commits whose answer is lost on the way.

use crate::common::*;
use crate::turns::{Hosts, commit, connection, soon, take};
use lamassu_format::header::VaultId;
use lamassu_lease::Mode;
use lamassu_rpc::host::Turns;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// What becomes of what is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Passes,
    /// What the server answers is lost.
    HasNoAnswers,
    /// A new connection is answered by something else than the server.
    IsAnothers,
}

struct Between {
    way: Way,
    open: Vec<TcpStream>,
    /// Connections that something else has answered.
    garbled: usize,
}

impl Between {
    /// Stands between hosts and a server. Returns the port, too.
    fn stand(to: u16) -> (u16, Arc<Mutex<Between>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let between = Arc::new(Mutex::new(Between { way: Way::Passes, open: Vec::new(), garbled: 0 }));
        let of = between.clone();
        std::thread::spawn(move || {
            for mut host in listener.incoming().map_while(Result::ok) {
                let mut all = of.lock().unwrap();
                if all.way == Way::IsAnothers {
                    all.garbled += 1;
                    let _ = host.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
                    continue;
                }
                let server = TcpStream::connect(("127.0.0.1", to)).unwrap();
                all.open.extend([&host, &server].map(|stream| stream.try_clone().unwrap()));
                let (mut asks, mut asked) = (host.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut asks, &mut asked));
                let of = of.clone();
                std::thread::spawn(move || answer(server, host, &of));
            }
        });
        (port, between)
    }

    /// Cuts what is open, and lets what comes go this way.
    fn cut(&mut self, way: Way) {
        self.way = way;
        self.open.drain(..).for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }
}

fn answer(mut from: TcpStream, mut to: TcpStream, between: &Mutex<Between>) {
    let mut some = [0; 4096];
    while let Ok(len @ 1..) = from.read(&mut some) {
        let passes = between.lock().unwrap().way == Way::Passes;
        if passes && to.write_all(&some[..len]).is_err() {
            return;
        }
    }
}

/// The server has made a commit and its answer is lost. What the host hears when it asks again is not about the commit,
/// so it does not take it for refused: all that it commits later would be based on another state.
#[test]
fn a_commit_in_doubt_is_not_given_up_for_what_says_nothing_of_it() {
    // Within a term.
    let lab = Lab::with_term(30);
    let id = lab.vault(lab.joined("a"));
    let hosts = Hosts { vault: VaultId::of_hex(&id).unwrap(), lab };
    let (port, between) = Between::stand(hosts.lab.port);
    let servers = hosts.lab.path("state-a/lamassu/servers");
    let of = |port: u16| servers.join(format!("127.0.0.1:{port}"));
    std::fs::rename(of(hosts.lab.port), of(port)).unwrap();
    let turns = Turns::begin(&connection(hosts.lab.dir.path(), "a", port), hosts.vault, &hosts.copy("a")).unwrap();
    let turn = take(&turns, Mode::Exclusive).get();
    let first = commit(&turn, &hosts.vault).unwrap();
    let made = hosts.lab.metric("commits_total");
    between.lock().unwrap().way = Way::HasNoAnswers;
    let vault = hosts.vault;
    let commits = soon(move || (commit(&turn, &vault), turn));
    wait_for("the commit is made", || hosts.lab.metric("commits_total") > made);
    between.lock().unwrap().cut(Way::IsAnothers);
    wait_for("the host asks again", || between.lock().unwrap().garbled >= 6);
    between.lock().unwrap().cut(Way::Passes);
    let (second, turn) = commits.get();
    assert_eq!(second.unwrap(), first + 1);
    assert_eq!(commit(&turn, &hosts.vault).unwrap(), first + 2);
    turn.pass();
    turns.leave();
    hosts.lab.serve(&["check"]).ok();
}
