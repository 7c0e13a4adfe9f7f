//! Keys from a KMIP server: PyKMIP, and servers of our own that misbehave.
#![cfg(feature = "kmip")]
use crate::https_server;
#[path = "support/pykmip.rs"]
mod pykmip;

use https_server::Ca;
use lamassu_keys::{Ask, KeySource, KeyState, Material, Purpose, ServerFault, SourceError};
use pykmip::PyKmip;
use rustls::{ServerConnection, StreamOwned};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;

const ASK: Ask<'static> = Ask { subject: "test", purpose: Purpose::Unlock, stdin: false };

fn load(uri: &str) -> Result<[u8; 32], SourceError> {
    match uri.parse::<KeySource>().unwrap().load(&ASK)?.material {
        Material::Key { key, .. } => Ok(*key.expose()),
        other => panic!("{other:?}"),
    }
}

fn generate(uri: &str) -> Result<String, SourceError> {
    uri.parse::<KeySource>().unwrap().generate().map(|made| made.ids.join(" and "))
}

#[track_caller]
fn fault<T: std::fmt::Debug>(result: Result<T, SourceError>) -> ServerFault {
    match result.unwrap_err() {
        SourceError::Server { place, fault } => {
            assert!(place.starts_with("kmip://") && !place.contains('#'), "{place}");
            fault
        }
        other => panic!("{other}"),
    }
}

#[test]
fn keys_are_made_found_and_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut kms = PyKmip::start(dir.path());
    let by_name = kms.uri("?name=vault%20seven");
    assert!(matches!(fault(load(&by_name)), ServerFault::NoObject));
    let id = generate(&by_name).unwrap();
    let key = load(&by_name).unwrap();
    assert_eq!(load(&kms.uri(&id)).unwrap(), key);
    assert!(matches!(fault(generate(&by_name)), ServerFault::NameTaken));
    assert!(matches!(fault(generate(&kms.uri(&id))), ServerFault::IdGiven));
    // Another, without a name, is another; and it is all there after a restart.
    let other = generate(&kms.uri("")).unwrap();
    assert_ne!(load(&kms.uri(&other)).unwrap(), key);
    assert!(matches!(fault(load(&kms.uri(""))), ServerFault::Unnamed));
    kms.restart();
    assert_eq!(load(&by_name).unwrap(), key);

    // Another client is not permitted, and does not see names.
    let theirs = fault(load(&kms.uri_as(&id, "other.pem")));
    assert!(matches!(theirs, ServerFault::NotPermitted { .. }), "{theirs}");
    assert!(matches!(fault(load(&kms.uri_as("?name=vault%20seven", "other.pem"))), ServerFault::NoObject));
    assert!(matches!(fault(load(&kms.uri("no-such-id"))), ServerFault::NoObject));

    // Not what a key is.
    let made = kms.admin("create early 256 + create short 128 + activate _ + secret secret + activate _");
    let [early, _, secret] = made.as_slice() else { panic!("{made:?}") };
    let state = fault(load(&kms.uri(early)));
    assert!(matches!(state, ServerFault::KeyState(KeyState::PreActive)), "{state}");
    assert!(matches!(fault(load(&kms.uri("?name=short"))), ServerFault::KeyLength { found: 16 }));
    assert!(matches!(fault(load(&kms.uri(secret))), ServerFault::NotAKey { object_type: 7 }));
    kms.admin(&format!("activate {early}"));
    load(&kms.uri("?name=early")).unwrap();
    kms.admin("create early 256");
    assert!(matches!(fault(load(&kms.uri("?name=early"))), ServerFault::ManyObjects));
    assert!(matches!(fault(generate(&kms.uri("?name=early"))), ServerFault::NameTaken));

    // The end of a key's life. PyKMIP forgets what is destroyed.
    kms.admin(&format!("revoke {id} + compromise {other}"));
    assert!(matches!(fault(load(&by_name)), ServerFault::KeyState(KeyState::Deactivated)));
    assert!(matches!(fault(load(&kms.uri(&other))), ServerFault::KeyState(KeyState::Compromised)));
    kms.admin(&format!("destroy {id}"));
    assert!(matches!(fault(load(&by_name)), ServerFault::NoObject));
}

#[test]
fn a_zone_of_two_keys() {
    let dir = tempfile::tempdir().unwrap();
    let kms = PyKmip::start(dir.path());
    let zone = |uri: &str| uri.parse::<KeySource>().unwrap().zone_keys();
    let (seven, eight) = (kms.uri("?zone=7"), kms.uri("?zone=floor%20eight"));
    assert!(matches!(fault(zone(&seven)), ServerFault::NoObject));
    let made = generate(&seven).unwrap();
    assert_eq!(made.split(" and ").count(), 2, "{made}");
    generate(&eight).unwrap();
    assert!(matches!(fault(generate(&seven)), ServerFault::NameTaken));
    let (a, b, other) = (zone(&seven).unwrap(), zone(&seven).unwrap(), zone(&eight).unwrap());
    assert_eq!((a.inner().expose(), a.outer().expose(), a.id()), (b.inner().expose(), b.outer().expose(), b.id()));
    assert_ne!(a.inner().expose(), a.outer().expose());
    assert_ne!((a.inner().expose(), a.id()), (other.inner().expose(), other.id()));
    // As a key it is neither of the two.
    let secret = load(&seven).unwrap();
    assert!(&secret != a.inner().expose() && &secret != a.outer().expose());
    assert_eq!(load(&seven).unwrap(), secret);
    // The keys are ordinary ones with names; a name alone is no zone.
    assert_eq!(&load(&kms.uri("?name=lamassu%2F7%2Finner")).unwrap(), a.inner().expose());
    assert!(matches!(zone(&kms.uri("?name=x")), Err(SourceError::NotAZone)));
    assert!(matches!(zone("raw:stdin"), Err(SourceError::NotAZone)));

    // What was made by half is finished; what is there stays.
    let (inner, outer) = made.split_once(" and ").unwrap();
    kms.admin(&format!("compromise {outer}"));
    assert!(matches!(fault(zone(&seven)), ServerFault::KeyState(KeyState::Compromised)));
    assert!(matches!(fault(load(&seven)), ServerFault::KeyState(KeyState::Compromised)));
    kms.admin(&format!("destroy {outer}"));
    assert!(matches!(fault(zone(&seven)), ServerFault::NoObject));
    assert_ne!(generate(&seven).unwrap(), outer);
    let mended = zone(&seven).unwrap();
    assert_eq!(mended.inner().expose(), a.inner().expose());
    assert_ne!(mended.outer().expose(), a.outer().expose());
    assert_ne!(inner, outer);
}

#[test]
fn certificates_of_both_sides() {
    let dir = tempfile::tempdir().unwrap();
    let kms = PyKmip::start(dir.path());
    let id = generate(&kms.uri("")).unwrap();
    let strangers = Ca::new();
    std::fs::write(dir.path().join("stranger.pem"), strangers.client().both()).unwrap();
    std::fs::write(dir.path().join("strangers-ca.pem"), strangers.pem()).unwrap();
    std::fs::write(dir.path().join("purpose.pem"), kms.ca.server("client").both()).unwrap();
    let refused = fault(load(&kms.uri_as(&id, "stranger.pem")));
    assert!(matches!(refused, ServerFault::Unwelcome { .. }), "{refused:?}");
    // PyKMIP takes it for TLS, and looks at what it may be used for later.
    let refused = fault(load(&kms.uri_as(&id, "purpose.pem")));
    assert!(matches!(refused, ServerFault::NotPermitted { .. } | ServerFault::Unwelcome { .. }), "{refused:?}");
    let nobody = format!("kmip://localhost:{}/{id}#ca={}", kms.port, dir.path().join("ca.pem").display());
    let refused = fault(load(&nobody));
    assert!(matches!(refused, ServerFault::Unwelcome { .. }), "{refused:?}");
    let untrusted = kms.uri(&id).replace("/ca.pem", "/strangers-ca.pem");
    assert!(matches!(fault(load(&untrusted)), ServerFault::Untrusted { .. }));
    let system = format!("kmip://localhost:{}/{id}", kms.port);
    assert!(matches!(fault(load(&system)), ServerFault::Untrusted { .. }));
    // Another name than the certificate's.
    let other_name = kms.uri(&id).replace("localhost", "127.0.0.1");
    assert!(matches!(fault(load(&other_name)), ServerFault::Untrusted { .. }));
    for broken in ["nosuch.pem", "ca.pem"] {
        let e = load(&kms.uri_as(&id, broken)).unwrap_err();
        assert!(matches!(e, SourceError::Auxiliary { .. }), "{e}");
    }
    load(&kms.uri(&id)).unwrap();
}

/// A server that reads one request for each answer it gives, and gives these, whole or byte by byte; at last it says
/// nothing more.
fn server(dir: &std::path::Path, answers: Vec<Vec<u8>>) -> String {
    let ca = Ca::new();
    std::fs::write(dir.join("ca.pem"), ca.pem()).unwrap();
    let config = Arc::new(https_server::config(&ca.server("localhost"), None));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for tcp in listener.incoming().flatten() {
            let mut tls = StreamOwned::new(ServerConnection::new(config.clone()).unwrap(), tcp);
            // A client that turns away is no failure of the server's.
            let _ = answers.iter().try_for_each(|answer| {
                let mut head = [0; 8];
                tls.read_exact(&mut head)?;
                let len = u32::from_be_bytes(head[4..].try_into().unwrap());
                tls.read_exact(&mut vec![0; len as usize])?;
                tls.write_all(answer)?;
                tls.flush()
            });
            std::thread::spawn(move || {
                let _ = tls.read(&mut [0; 1]);
                std::thread::sleep(std::time::Duration::from_secs(20));
            });
        }
    });
    format!("kmip://localhost:{port}/7#ca={}&timeout=1", dir.join("ca.pem").display())
}

fn item(tag: u32, kind: u8, value: &[u8]) -> Vec<u8> {
    let len = u32::try_from(value.len()).unwrap();
    let mut out = (tag << 8 | u32::from(kind)).to_be_bytes().to_vec();
    out.extend(len.to_be_bytes());
    out.extend(value);
    out.resize(out.len().next_multiple_of(8), 0);
    out
}

fn structure(tag: u32, items: &[Vec<u8>]) -> Vec<u8> {
    item(tag, 1, &items.concat())
}

/// Success of an operation, with a payload.
fn answer(operation: u32, payload: &[Vec<u8>]) -> Vec<u8> {
    let number = |tag, n: u32| item(tag, 5, &n.to_be_bytes());
    let batch = [number(0x42005c, operation), number(0x42007f, 0), structure(0x42007c, payload)];
    structure(0x42007b, &[structure(0x42000f, &batch)])
}

fn state(number: u32) -> Vec<u8> {
    let attribute = [item(0x42000a, 7, b"State"), item(0x42000b, 5, &number.to_be_bytes())];
    answer(11, &[item(0x420094, 7, b"7"), structure(0x420008, &attribute)])
}

fn key(bytes: &[u8]) -> Vec<u8> {
    let block = [item(0x420042, 5, &1_u32.to_be_bytes()), structure(0x420045, &[item(0x420043, 8, bytes)])];
    let payload = [item(0x420057, 5, &2_u32.to_be_bytes()), structure(0x42008f, &[structure(0x420040, &block)])];
    answer(10, &payload)
}

#[test]
fn a_server_that_answers_nonsense() {
    let dir = tempfile::tempdir().unwrap();
    let ask = |answers: Vec<Vec<u8>>| load(&server(dir.path(), answers));
    assert_eq!(ask(vec![state(2), key(&[9; 32])]).unwrap(), [9; 32]);
    assert!(matches!(fault(ask(vec![state(5)])), ServerFault::KeyState(KeyState::Destroyed)));
    let unknown = fault(ask(vec![state(99)]));
    assert!(matches!(unknown, ServerFault::KeyState(KeyState::Unknown(99))), "{unknown}");
    assert!(matches!(fault(ask(vec![state(2), key(&[9; 33])])), ServerFault::KeyLength { found: 33 }));
    let nonsense = [
        // HTTP; an answer to another question; four gigabytes announced; one of 64 KiB and a byte; a structure longer
        // than what holds it; nothing in it
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        key(&[9; 32]),
        [&0x42007b01_u32.to_be_bytes()[..], &[0xff; 4]].concat(),
        item(0x42007b, 1, &vec![0; (64 << 10) + 1]),
        item(0x42007b, 1, &[0x42, 0, 0x0f, 1, 0, 0, 9, 0]),
        item(0x42007b, 1, &[]),
        answer(11, &[]),
    ];
    for bad in nonsense {
        let fault = fault(ask(vec![bad.clone()]));
        let expected =
            matches!(fault, ServerFault::Protocol { .. } | ServerFault::TooLong { .. } | ServerFault::NoState);
        assert!(expected, "{:?}: {fault:?}", &bad[..8]);
    }
    let long = fault(ask(vec![item(0x42007b, 1, &vec![0; (64 << 10) + 1])]));
    assert!(matches!(long, ServerFault::TooLong { max: 65536 }), "{long:?}");
}

/// What a server answers of a key to be destroyed, in order; it answers nothing else.
fn destroy(dir: &std::path::Path, answers: Vec<Vec<u8>>) -> Result<Vec<String>, SourceError> {
    server(dir, answers).parse::<KeySource>().unwrap().destroy(&ASK)
}

/// A yes to Revoke (19) or Destroy (20).
fn yes(operation: u32) -> Vec<u8> {
    answer(operation, &[item(0x420094, 7, b"7")])
}

/// Killed after the server's yes and before that was written down, a run is followed by one that finds the key
/// destroyed: by a server that remembers it, and need not take a second Destroy.
#[test]
fn a_key_that_a_server_remembers_as_destroyed_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    for number in [5, 6] {
        let gone = destroy(dir.path(), vec![state(number)]).unwrap_err();
        assert!(gone.is_destroyed(), "{gone}");
    }
    let said = destroy(dir.path(), vec![state(2), yes(19), yes(20), state(5)]).unwrap();
    assert_eq!(said[..2], ["revoked 7", "destroyed 7"]);
    assert!(said[2].starts_with("asked afterwards: the key was destroyed"), "{said:?}");
}

#[test]
fn what_was_done_before_a_server_fell_silent_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let silent = destroy(dir.path(), vec![state(2), yes(19), yes(20)]).unwrap_err();
    assert!(!silent.is_destroyed() && silent.to_string().contains("revoked 7; destroyed 7; and then: "), "{silent}");
    assert!(
        matches!(fault::<()>(Err(silent)), ServerFault::Partly { fault, .. } if matches!(*fault, ServerFault::Timeout { .. }))
    );
    let half = destroy(dir.path(), vec![state(2), yes(19)]).unwrap_err();
    assert!(half.to_string().contains("revoked 7; and then: "), "{half}");
    // Yes was said, and is not true.
    let untrue = destroy(dir.path(), vec![state(3), yes(20), state(3)]).unwrap_err();
    assert!(untrue.to_string().contains("destroyed 7; and then: it says that it has destroyed the key"), "{untrue}");
    // Nothing was done: the fault itself.
    assert!(matches!(fault(destroy(dir.path(), vec![])), ServerFault::Timeout { .. }));
}

#[test]
fn a_server_that_is_not_there_or_falls_silent() {
    let dir = tempfile::tempdir().unwrap();
    let silent = fault(load(&server(dir.path(), vec![state(2)])));
    assert!(matches!(silent, ServerFault::Timeout { seconds: 1 }), "{silent:?}");
    // Half an answer, then nothing.
    let half = fault(load(&server(dir.path(), vec![state(2)[..20].to_vec()])));
    assert!(matches!(half, ServerFault::Timeout { seconds: 1 }), "{half:?}");
    // One that was free a moment ago may be another test's by now.
    let down = fault(load("kmip://localhost:1/7"));
    assert!(matches!(down, ServerFault::Unreachable { .. }), "{down:?}");
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let mute = fault(load(&format!("kmip://localhost:{}/7#timeout=1", mute.local_addr().unwrap().port())));
    assert!(matches!(mute, ServerFault::Timeout { seconds: 1 }), "{mute:?}");
    let nowhere = fault(load("kmip://no-such-host.invalid/7#timeout=5"));
    assert!(matches!(nowhere, ServerFault::Unreachable { .. } | ServerFault::Timeout { .. }), "{nowhere:?}");
}

/// A byte now and then keeps no one waiting past the deadline: the whole takes longer than that.
#[test]
fn a_server_that_drips() {
    let dir = tempfile::tempdir().unwrap();
    let ca = Ca::new();
    std::fs::write(dir.path().join("ca.pem"), ca.pem()).unwrap();
    let config = Arc::new(https_server::config(&ca.server("localhost"), None));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let uri = format!(
        "kmip://localhost:{}/7#ca={}&timeout=1",
        listener.local_addr().unwrap().port(),
        dir.path().join("ca.pem").display()
    );
    std::thread::spawn(move || {
        let (tcp, _) = listener.accept().unwrap();
        let mut tls = StreamOwned::new(ServerConnection::new(config).unwrap(), tcp);
        for byte in state(2) {
            if tls.write_all(&[byte]).and_then(|()| tls.flush()).is_err() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
    });
    let dripping = fault(load(&uri));
    assert!(matches!(dripping, ServerFault::Timeout { seconds: 1 }), "{dripping:?}");
}
