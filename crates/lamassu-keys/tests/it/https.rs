//! Keys from a web server over real TLS: what works, and every way in which it does not.
#![cfg(feature = "https")]
use crate::https_server;

use https_server::{Ca, Identity, Server, answer};
use lamassu_keys::{Ask, KeySource, Material, Purpose, ServerFault, SourceError};
use std::path::PathBuf;

const ASK: Ask<'static> = Ask { subject: "test", purpose: Purpose::Unlock, stdin: false };

fn answers(path: &str) -> Vec<u8> {
    let ok = |body: &[u8]| answer("200 OK", "", body);
    match path {
        "/hex?zone=7" => ok("0f".repeat(32).as_bytes()),
        "/hex-line" => ok(("0f".repeat(32) + "\n").as_bytes()),
        "/raw" => ok(&[10; 32]),
        "/words" => ok(b"correct horse\n"),
        "/empty" => ok(b""),
        "/chunked" => {
            let half = "0f".repeat(16);
            let body = format!("20\r\n{half}\r\n20\r\n{half}\r\n0\r\n\r\n");
            format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{body}").into_bytes()
        }
        "/long" => ok(&[b'x'; 5000]),
        "/endless" => [b"HTTP/1.1 200 OK\r\n\r\n".to_vec(), vec![b'x'; 1 << 20]].concat(),
        "/cut" => b"HTTP/1.1 200 OK\r\nContent-Length: 64\r\n\r\n0f0f0f".to_vec(),
        "/moved" => answer("302 Found", "Location: /raw\r\n", b""),
        "/401" => answer("401 Unauthorized", "", b"who are you"),
        "/403" => answer("403 Forbidden", "", b"no"),
        "/410" => answer("410 Gone", "", b""),
        "/500" => answer("500 Internal Server Error", "", b"oh"),
        "/206" => answer("206 Partial Content", "", &[10; 32]),
        "/garbage" => b"SSH-2.0-OpenSSH_9.2\r\n\r\n".to_vec(),
        "/headers" => answer("200 OK", &format!("X: {}\r\n", "y".repeat(100_000)), b""),
        _ => answer("404 Not Found", "", b"nothing here"),
    }
}

/// A server with a CA of its own, and a place for files.
struct Lab {
    dir: tempfile::TempDir,
    ca: Ca,
    port: u16,
    server: Server,
}

impl Lab {
    fn new() -> Lab {
        Lab::of(|ca| ca.server("localhost"), None)
    }

    fn of(identity: impl FnOnce(&Ca) -> Identity, clients: Option<&Ca>) -> Lab {
        let ca = Ca::new();
        let server = Server::start(&identity(&ca), clients, answers);
        let lab = Lab { dir: tempfile::tempdir().unwrap(), port: server.port, ca, server };
        lab.file("ca.pem", &lab.ca.pem());
        lab
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn uri(&self, kind: &str, path: &str, options: &str) -> String {
        let ca = self.dir.path().join("ca.pem");
        format!("{kind}:https://localhost:{}{path}#ca={}{options}", self.port, ca.display())
    }

    fn get(&self, kind: &str, path: &str) -> Result<Vec<u8>, SourceError> {
        load(&self.uri(kind, path, ""))
    }

    #[track_caller]
    fn fault(&self, kind: &str, path: &str) -> ServerFault {
        fault(self.get(kind, path))
    }
}

fn load(uri: &str) -> Result<Vec<u8>, SourceError> {
    Ok(match uri.parse::<KeySource>().unwrap().load(&ASK)?.material {
        Material::Passphrase(p) => p.expose().to_vec(),
        Material::Key { key, .. } => key.expose().to_vec(),
        Material::Token(_) => panic!("a token"),
    })
}

#[track_caller]
fn fault(result: Result<Vec<u8>, SourceError>) -> ServerFault {
    match result.unwrap_err() {
        SourceError::Server { place, fault } => {
            assert!(place.starts_with("https://localhost:") && !place.contains(['?', '#']), "{place}");
            fault
        }
        other => panic!("{other}"),
    }
}

#[test]
fn every_format_comes_from_a_server() {
    let lab = Lab::new();
    assert_eq!(lab.get("hex", "/hex?zone=7").unwrap(), [15; 32]);
    assert_eq!(lab.get("hex", "/hex-line").unwrap(), [15; 32]);
    assert_eq!(lab.get("hex", "/chunked").unwrap(), [15; 32]);
    assert_eq!(lab.get("raw", "/raw").unwrap(), [10; 32]);
    assert_eq!(lab.get("passphrase", "/words").unwrap(), b"correct horse");
    assert!(matches!(lab.get("passphrase", "/empty"), Err(SourceError::EmptyPassphrase)));
    assert!(matches!(lab.get("raw", "/words"), Err(SourceError::RawLength)));
    // The options are ours alone.
    for head in lab.server.seen.lock().unwrap().iter() {
        assert!(!head.contains("ca.pem") && !head.to_lowercase().contains("cookie"), "{head}");
    }
}

#[test]
fn answers_that_are_no_key() {
    let lab = Lab::new();
    assert!(matches!(lab.fault("raw", "/nothing"), ServerFault::Missing { status: 404 }));
    assert!(matches!(lab.fault("raw", "/410"), ServerFault::Missing { status: 410 }));
    assert!(matches!(lab.fault("raw", "/401"), ServerFault::Denied { status: 401 }));
    assert!(matches!(lab.fault("raw", "/403"), ServerFault::Denied { status: 403 }));
    assert!(matches!(lab.fault("raw", "/moved"), ServerFault::Redirect { status: 302 }));
    assert!(matches!(lab.fault("raw", "/500"), ServerFault::Status { status: 500 }));
    assert!(matches!(lab.fault("raw", "/206"), ServerFault::Status { status: 206 }), "a part is no key");
    let long = lab.fault("raw", "/long");
    assert!(matches!(long, ServerFault::TooLong { .. }), "{long:?}");
    assert!(matches!(lab.fault("raw", "/endless"), ServerFault::TooLong { .. }));
    assert!(matches!(lab.fault("raw", "/garbage"), ServerFault::Protocol { .. }));
    assert!(matches!(lab.fault("raw", "/headers"), ServerFault::Protocol { .. }));
    let cut = lab.fault("hex", "/cut");
    assert!(matches!(cut, ServerFault::Protocol { .. } | ServerFault::Unreachable { .. }), "{cut:?}");
    assert_eq!(lab.server.seen.lock().unwrap().iter().filter(|head| head.contains("/raw")).count(), 0, "not followed");
}

#[test]
fn servers_that_are_not_there() {
    let lab = Lab::new();
    let silent = fault(load(&lab.uri("raw", "/silent", "&timeout=1")));
    assert!(matches!(silent, ServerFault::Timeout { seconds: 1 }), "{silent:?}");
    // A port that nobody listens on (one that was free a moment ago may be another test's by now), and one that accepts
    // and says nothing.
    let down = fault(load("raw:https://localhost:1/"));
    assert!(matches!(down, ServerFault::Unreachable { .. }), "{down:?}");
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mute = fault(load(&format!("raw:https://localhost:{}/#timeout=1", mute.local_addr().unwrap().port())));
    assert!(matches!(mute, ServerFault::Timeout { seconds: 1 }), "{mute:?}");
    let SourceError::Server { fault, .. } = load("raw:https://no-such-host.invalid/#timeout=5").unwrap_err() else {
        panic!()
    };
    assert!(matches!(fault, ServerFault::Unreachable { .. } | ServerFault::Timeout { .. }), "{fault:?}");
}

#[test]
fn certificates_that_are_not_trusted() {
    let lab = Lab::new();
    // Not by the system; not by another CA; not for another name; not after its time.
    let system = fault(load(&format!("raw:https://localhost:{}/raw", lab.port)));
    assert!(matches!(system, ServerFault::Untrusted { .. }), "{system:?}");
    let other = lab.file("other.pem", &Ca::new().pem());
    let other = fault(load(&format!("raw:https://localhost:{}/raw#ca={}", lab.port, other.display())));
    assert!(matches!(other, ServerFault::Untrusted { .. }), "{other:?}");
    let named = Lab::of(|ca| ca.server("keys.example"), None).fault("raw", "/raw");
    assert!(matches!(named, ServerFault::Untrusted { .. }), "{named:?}");
    let expired = Lab::of(|ca| ca.expired("localhost"), None);
    assert!(matches!(expired.fault("raw", "/raw"), ServerFault::Untrusted { .. }));
    assert!(expired.server.seen.lock().unwrap().is_empty(), "nothing was asked");
}

#[test]
fn client_certificates() {
    let clients = Ca::new();
    let lab = Lab::of(|ca| ca.server("localhost"), Some(&clients));
    let (ours, stranger) = (clients.client(), Ca::new().client());
    lab.file("cert.pem", &ours.cert);
    lab.file("key.pem", &ours.key);
    lab.file("both.pem", &format!("{}{}", ours.key, ours.cert));
    lab.file("stranger.pem", &format!("{}{}", stranger.key, stranger.cert));
    lab.file("empty.pem", "");
    let with = |cert: &str, key: &str| {
        let at = |name: &str| lab.dir.path().join(name).display().to_string();
        let key = if key.is_empty() { String::new() } else { format!("&key={}", at(key)) };
        load(&lab.uri("raw", "/raw", &format!("&cert={}{key}", at(cert))))
    };
    assert_eq!(with("cert.pem", "key.pem").unwrap(), [10; 32]);
    assert_eq!(with("both.pem", "").unwrap(), [10; 32]);
    for refused in [with("stranger.pem", ""), lab.get("raw", "/raw")] {
        let refused = fault(refused);
        assert!(matches!(refused, ServerFault::Unwelcome { .. }), "{refused:?}");
    }
    // Files that are none, or do not belong together, are told before anything is sent.
    let seen = lab.server.seen.lock().unwrap().len();
    for (cert, key) in [
        ("nosuch.pem", "key.pem"),
        ("cert.pem", "nosuch.pem"),
        ("empty.pem", ""),
        ("cert.pem", "stranger.pem"),
        ("key.pem", ""),
    ] {
        let e = with(cert, key).unwrap_err();
        assert!(matches!(e, SourceError::Auxiliary { .. }), "{cert} {key}: {e}");
    }
    let e = load(&format!("raw:https://localhost:{}/raw#ca=/dev/null", lab.port)).unwrap_err();
    assert!(matches!(e, SourceError::Auxiliary { role: "CA file", .. }), "{e}");
    assert_eq!(lab.server.seen.lock().unwrap().len(), seen);
}
