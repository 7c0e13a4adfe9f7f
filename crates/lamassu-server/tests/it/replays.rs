//! What was sent before is sent again: in the same session, a later one, or none; by its host, or another; by the
//! protocol, or as bytes on the wire. It is refused, or has no effect. The rows at the server show that.

use crate::common::raw::*;
use crate::common::*;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{self, Change, Space};
use lamassu_rpc::convert::Batch;
use lamassu_rpc::identity::HostKey;
use lamassu_rpc::proto::anchors_client::AnchorsClient;
use lamassu_rpc::proto::hosts_client::HostsClient;
use lamassu_rpc::proto::{self, up::Said};
use lamassu_rpc::protocol::Speaks;
use lamassu_rpc::tls;
use lamassu_rpc::token::Token;
use std::error::Error;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::task::block_in_place;
use tonic::Code;
use tonic::service::interceptor::InterceptedService;

/// Two hosts that may use a vault.
struct Two {
    lab: Lab,
    id: String,
    vault: Vec<u8>,
}

impl Two {
    fn new() -> Two {
        let lab = Lab::new();
        let id = lab.vault(lab.joined("a"));
        lab.grant(lab.joined("b"), &id);
        Two { vault: id_of(&id), id, lab }
    }

    fn anchor(&self) -> PathBuf {
        self.lab.path(&format!("server/anchors/{}.anchor", self.id.replace('-', "")))
    }

    fn rows(&self) -> (Option<Head>, Vec<Change>) {
        block_in_place(|| rows(&self.anchor()))
    }
}

/// A commit of one row, in the turn that was granted.
pub(crate) fn one_row((of, granted): (&proto::Of, &proto::Granted), base: &[u8], value: u8) -> proto::CommitRequest {
    let change = Change { space: Space::Held, key: vec![7; 16], value: Some(vec![value; 512]) };
    let (base, changes, grant) = (base.to_vec(), table::pack([&change]), granted.grant.unwrap().number);
    proto::CommitRequest { of: Some(of.clone()), base, changes, grant }
}

#[test]
fn a_commit_that_is_sent_again_is_made_once_or_refused() {
    let two = Two::new();
    Runtime::new().unwrap().block_on(async {
        let (a, b) = (channel(&two.lab, "a"), channel(&two.lab, "b"));
        let mut of_a = Attended::begin(&a, begin(&two.vault, true)).await.unwrap();
        let granted = of_a.acquire().await;
        let first = one_row((&of_a.of, &granted), &granted.head, 1);
        let made = commit(&a, &first).await.unwrap();
        let after_first = two.rows();
        assert_eq!(after_first.0.unwrap().0[..], made, "it is durable");
        // Its answer was lost.
        assert_eq!(commit(&a, &first).await.unwrap(), made);
        assert!(two.rows() == after_first);
        // After later commits. The third has the row as the first had it, and another head.
        let second = one_row((&of_a.of, &granted), &made, 2);
        let third = one_row((&of_a.of, &granted), &commit(&a, &second).await.unwrap(), 1);
        let head = commit(&a, &third).await.unwrap();
        let before = two.rows();
        let expect = async |calls: &Calls, all: &[(&proto::CommitRequest, Result<&[u8], Code>)]| {
            for (sent, expected) in all {
                assert_eq!(commit(calls, sent).await.as_deref().map_err(|code| *code), *expected);
            }
            assert!(two.rows() == before, "a commit that was sent again has changed rows");
        };
        let gone = Err(Code::OutOfRange);
        let not_its = Err(Code::Aborted);
        expect(&a, &[(&first, gone), (&second, gone), (&third, Ok(&head))]).await;
        // Another host has recorded it.
        expect(&b, &[(&first, not_its), (&third, not_its)]).await;
        // The vault was passed to another host, whose session is good.
        of_a.release(&granted).await;
        let mut of_b = Attended::begin(&b, begin(&two.vault, true)).await.unwrap();
        let granted_b = of_b.acquire().await;
        assert_eq!(granted_b.head, head);
        let fresh = one_row((&of_a.of, &granted), &head, 3);
        expect(&a, &[(&first, not_its), (&third, not_its), (&fresh, not_its)]).await;
        let by = |of: &proto::Of, granted: &proto::Granted, sent: &proto::CommitRequest| {
            let (of, grant) = (Some(of.clone()), granted.grant.unwrap().number);
            proto::CommitRequest { of, grant, ..sent.clone() }
        };
        let by_b = |sent: &proto::CommitRequest| by(&of_b.of, &granted_b, sent);
        expect(&b, &[(&by_b(&first), gone), (&by_b(&third), Ok(&head)), (&third, not_its)]).await;
        // It has the vault again. Messages of its former turn take nothing from it, and give it nothing.
        of_b.release(&granted_b).await;
        let granted = {
            let again = of_a.acquire().await;
            of_a.release(&granted).await;
            of_a.say(Said::TakenOver(granted.grant.unwrap())).await;
            of_a.is_heard().await;
            again
        };
        // One of them is based on the present head, and would be a change.
        expect(&a, &[(&first, not_its), (&third, not_its), (&fresh, not_its), (&by_b(&third), not_its)]).await;
        let now_again = |sent: &proto::CommitRequest| by(&of_a.of, &granted, sent);
        expect(&a, &[(&now_again(&first), gone), (&now_again(&third), Ok(&head))]).await;
        of_a.release(&granted).await;
        // A later session of the same host.
        of_a.say(Said::Leave(proto::Nothing {})).await;
        assert_eq!(of_a.hear().await, None);
        let mut later = Attended::begin(&a, begin(&two.vault, true)).await.unwrap();
        let granted = later.acquire().await;
        assert!(later.of.session > of_a.of.session && granted.head == head);
        let again = |sent: &proto::CommitRequest| by(&later.of, &granted, sent);
        let (again_first, again_third) = (again(&first), again(&third));
        expect(&a, &[(&fresh, not_its), (&third, not_its), (&again_first, gone), (&again_third, Ok(&head))]).await;
        // It falls silent, and another takes over.
        later.fall_silent();
        of_b.ask().await;
        let taken = of_b.granted().await;
        assert!(taken.takes_over && taken.head == head);
        let fresh = one_row((&later.of, &granted), &head, 4);
        expect(&a, &[(&fresh, not_its), (&again_third, not_its)]).await;
        // Its grant is taken back, and that of the holder, too.
        for (name, calls) in [("a", &a), ("b", &b)] {
            let args = ["host", "grant", "--not", &format!("@{name}"), &format!("@{}", two.id)];
            block_in_place(|| two.lab.serve(&args)).ok();
            let sent = one_row((&of_b.of, &taken), &head, 5);
            expect(calls, &[(&fresh, Err(Code::NotFound)), (&sent, Err(Code::NotFound))]).await;
        }
    });
    two.lab.serve(&["check"]).ok();
}

/// A host that has the vault loses it by nothing that was sent before: only its own newest words count.
#[test]
fn a_beginning_or_an_end_that_is_sent_again_is_in_nobodys_way() {
    let two = Two::new();
    Runtime::new().unwrap().block_on(async {
        let (a, b) = (channel(&two.lab, "a"), channel(&two.lab, "b"));
        let refused = async |calls: &Calls, first: &proto::Begin| {
            Attended::begin(calls, first.clone()).await.map(drop).unwrap_err().code()
        };
        let first = begin(&two.vault, false);
        let mut gone = Attended::begin(&a, first.clone()).await.unwrap();
        let old = gone.acquire().await.grant.unwrap();
        assert_eq!(refused(&a, &first).await, Code::FailedPrecondition);
        let replaces = proto::Begin { replaces: gone.of.session, ..first.clone() };
        assert_eq!(refused(&b, &replaces).await, Code::FailedPrecondition, "another host's session");
        let mut of_a = Attended::begin(&a, replaces.clone()).await.unwrap();
        assert_eq!(gone.hear().await, None);
        let granted = of_a.acquire().await;
        assert_eq!(refused(&a, &replaces).await, Code::FailedPrecondition);
        for (calls, of) in [(&a, &gone.of), (&b, &gone.of), (&b, &of_a.of)] {
            let resumed = Attended::resume(calls, of, vec![old]).await.map(drop);
            assert_eq!(resumed.unwrap_err().code(), Code::Aborted);
        }
        let head = commit(&a, &one_row((&of_a.of, &granted), &granted.head, 1)).await.unwrap();
        let before = two.rows();
        // The anchor is taken back once. Then its rows are put, and put again.
        let mut anchors = AnchorsClient::new(a.clone());
        let refused = AnchorsClient::new(b.clone()).give_up(of_a.of.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::Aborted);
        anchors.give_up(of_a.of.clone()).await.unwrap();
        assert_eq!(anchors.give_up(of_a.of.clone()).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(commit(&a, &one_row((&of_a.of, &granted), &head, 2)).await, Err(Code::NotFound));
        assert_eq!(of_a.hear().await, None, "its session ended with the anchor");
        let put = put_of(&two.vault, &before.1);
        let mut send = async |put: &[proto::PutRequest]| {
            let put = anchors.put(tokio_stream::iter(put.to_vec())).await;
            put.map(|state| state.into_inner().head).map_err(|status| status.code())
        };
        // The host stopped in the middle, and its stream ended well all the same.
        let (last, first_ones) = put.split_last().unwrap();
        let without_end = proto::PutRequest { all: 0, ..last.clone() };
        let with_less = proto::PutRequest { rows: Vec::new(), ..last.clone() };
        for last in [without_end, with_less] {
            assert_eq!(send(&[first_ones, &[last]].concat()).await, Err(Code::InvalidArgument));
        }
        let head = send(&put).await.unwrap();
        assert_eq!(send(&put).await.as_ref(), Ok(&head), "its answer was lost");
        let late = one_row((&of_a.of, &granted), &head, 3);
        assert_eq!(commit(&a, &late).await, Err(Code::Aborted), "a session of the anchor before");
        let mut new = Attended::begin(&a, first.clone()).await.unwrap();
        assert!(new.of.session > of_a.of.session);
        let granted = new.acquire().await;
        assert_eq!(granted.head, head);
        commit(&a, &one_row((&new.of, &granted), &head, 4)).await.unwrap();
        let before = two.rows();
        assert_eq!(send(&put).await, Err(Code::AlreadyExists), "rows that are older than those of the server");
        assert_eq!(commit(&a, &late).await, Err(Code::Aborted));
        assert!(two.rows() == before);
    });
    two.lab.serve(&["check"]).ok();
}

/// The rows of an anchor, as a host puts them.
fn put_of(vault: &[u8], rows: &[Change]) -> Vec<proto::PutRequest> {
    let mut batch = Batch::default();
    let mut packed = Vec::new();
    for Change { space, key, value } in rows.iter().filter(|row| row.space != Space::Head) {
        packed.extend(batch.push(*space, key, value.as_ref().unwrap()));
    }
    let all = batch.all();
    packed.push(batch.rest());
    let message = |rows| proto::PutRequest { vault: vault.to_vec(), rows, ..Default::default() };
    let mut messages: Vec<_> = packed.into_iter().map(message).collect();
    messages.last_mut().unwrap().all = all;
    messages
}

#[test]
fn a_token_and_its_request_join_one_host_however_often_they_are_sent() {
    let lab = Lab::new();
    let enrol = |name: &str| lab.serve(&["enrol", &format!("@{name}")]).ok().out.parse::<Token>().unwrap();
    let connection = |token: &Token| {
        let key = HostKey::of(&token.key()).unwrap();
        HostsClient::new(InterceptedService::new(
            channel_of(tls::joining(&key, token.authority).unwrap(), lab.port),
            Speaks,
        ))
    };
    let token = enrol("a");
    let request = || proto::PublicKey { spki: HostKey::new().unwrap().public() };
    let recorded = request();
    Runtime::new().unwrap().block_on(async {
        let (mut one, mut other) = (connection(&token), connection(&token));
        // Both are open before the token is used.
        for open in [&mut one, &mut other] {
            let nonsense = proto::PublicKey { spki: vec![1; 44] };
            assert_eq!(open.join(nonsense).await.unwrap_err().code(), Code::InvalidArgument);
        }
        assert_eq!(one.join(recorded.clone()).await.unwrap().into_inner().host, "a");
        for open in [&mut one, &mut other] {
            for sent in [&recorded, &request()] {
                assert_eq!(open.join(sent.clone()).await.unwrap_err().code(), Code::PermissionDenied);
            }
        }
        // A new connection by the token gets no further than the handshake.
        let refused = connection(&token).join(recorded.clone()).await.unwrap_err();
        assert!(refused.source().is_some_and(|source| source.is::<tonic::transport::Error>()), "{refused}");
        // The request by another token: that is not used up.
        let token = block_in_place(|| enrol("b"));
        let mut third = connection(&token);
        assert_eq!(third.join(recorded.clone()).await.unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(third.join(request()).await.unwrap().into_inner().host, "b");
    });
    let hosts = lab.serve(&["host", "list"]).ok().out;
    assert_eq!(hosts.lines().filter(|line| line.starts_with(['a', 'b'])).count(), 2, "{hosts}");
}

/// A connection to the server whose bytes are recorded: those of the client, and those of the server.
struct Wire {
    port: u16,
    recorded: Arc<[Mutex<Vec<u8>>; 2]>,
}

impl Wire {
    fn new(to: u16) -> Wire {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, recorded) = (listener.local_addr().unwrap().port(), Arc::<[Mutex<Vec<u8>>; 2]>::default());
        let kept = recorded.clone();
        std::thread::spawn(move || {
            let client = listener.accept().unwrap().0;
            let server = TcpStream::connect(("127.0.0.1", to)).unwrap();
            let ways = [(&client, &server), (&server, &client)];
            std::thread::scope(|threads| {
                for (way, (mut from, mut to)) in ways.into_iter().enumerate() {
                    let kept = &kept[way];
                    threads.spawn(move || {
                        let mut some = [0; 4096];
                        while let Ok(len @ 1..) = from.read(&mut some) {
                            kept.lock().unwrap().extend(&some[..len]);
                            if to.write_all(&some[..len]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            });
        });
        Wire { port, recorded }
    }
}

/// Records of TLS, one after the other.
fn records(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut all = Vec::new();
    while let Some(len) = bytes.get(3..5).map(|len| 5 + usize::from(u16::from_be_bytes([len[0], len[1]]))) {
        let (record, rest) = bytes.split_at(len.min(bytes.len()));
        all.push(record);
        bytes = rest;
    }
    all
}

/// Whoever has recorded a whole connection can do nothing with it.
#[test]
fn bytes_that_were_recorded_on_the_wire_are_no_connection() {
    let two = Two::new();
    let wire = Wire::new(two.lab.port);
    let runtime = Runtime::new().unwrap();
    runtime.block_on(async {
        let a = channel_by(&two.lab, "a", wire.port);
        let mut session = Attended::begin(&a, begin(&two.vault, true)).await.unwrap();
        let granted = session.acquire().await;
        commit(&a, &one_row((&session.of, &granted), &granted.head, 1)).await.unwrap();
        session.release(&granted).await;
        // What was released is free for another: the server has heard all of it.
        let b = channel(&two.lab, "b");
        let mut other = Attended::begin(&b, begin(&two.vault, true)).await.unwrap();
        let granted = other.acquire().await;
        other.release(&granted).await;
    });
    let [sent, answered] = [0, 1].map(|way| wire.recorded[way].lock().unwrap().clone());
    let all = records(&sent);
    assert!(all.len() > 5 && answered.len() > 500, "a handshake and three calls");
    let (before, asked) = (rows(&two.anchor()), two.lab.asked("/metrics").1);
    let calls = |text: &str, call: &str| value_in(text, &format!("calls_total{{call=\"{call}\",admitted=\"yes\"}}"));
    assert!(calls(&asked, "Commit") >= 1.0 && calls(&asked, "Attend") >= 2.0);
    let hello = all[0].len();
    // All of it; without the handshake's first word; each record alone.
    let mut again = vec![&sent[..], &sent[hello..]];
    again.extend(&all);
    for bytes in &again {
        let mut stream = TcpStream::connect(("127.0.0.1", two.lab.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        // The server's part of a handshake at most, which it does not go on with.
        assert!(answer.len() < 3000, "{} bytes", answer.len());
    }
    wait_for("replays are not counted as refused connections", || {
        let refused = |text: &str| value_in(text, "connections_refused_total");
        refused(&two.lab.asked("/metrics").1) - refused(&asked) >= again.len() as f64
    });
    let after = two.lab.asked("/metrics").1;
    for call in ["Commit", "Attend"] {
        assert_eq!(calls(&after, call), calls(&asked, call), "a call that was recorded was taken");
    }
    assert!(rows(&two.anchor()) == before);
    // Nor is who has recorded a server one.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.write_all(&answered);
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    let refused = runtime.block_on(async {
        let calls = channel_by(&two.lab, "a", port);
        Attended::begin(&calls, begin(&two.vault, true)).await.map(drop).unwrap_err()
    });
    assert!(refused.source().is_some_and(|source| source.is::<tonic::transport::Error>()), "{refused}");
}
