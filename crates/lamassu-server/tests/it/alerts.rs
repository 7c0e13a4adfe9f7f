//! What hosts find not to be as it was written: one list for all of them, and a webhook.

use crate::common::*;
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

fn alerts(lab: &Lab, more: &[&str]) -> Vec<Value> {
    let out = lab.serve(&[&["alerts", "list", "--json"], more].concat()).ok().out;
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A vault that two hosts may use, in which the store has put an older content of `f` back.
fn put_back(lab: &Lab) -> String {
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    let id = lab.vault(a);
    lab.grant(b, &id);
    a.mount().ok();
    a.write("f", "one").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    copy(&lab.path("store"), &lab.path("older"));
    a.mount().ok();
    a.write("f", "two").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    let stored = a.run("path store/v f").ok().out;
    let stored = stored.trim();
    fs::copy(lab.path("older/v").join(stored), lab.path("store/v").join(stored)).unwrap();
    id
}

#[test]
fn what_any_host_finds_is_one_alert_until_it_is_closed() {
    let lab = Lab::new();
    let id = put_back(&lab);
    let (a, b) = (lab.host("a"), lab.host("b"));
    let stored = a.run("path store/v f").ok().out.trim().to_owned();
    assert!(alerts(&lab, &[]).is_empty());
    a.mount().ok();
    assert!(fs::read(a.file("f")).is_err());
    wait_for("a mount reports at once", || alerts(&lab, &[]).len() == 1);
    a.umount().ok();
    lab.wait_until_free();
    b.mount().ok();
    assert!(fs::read(b.file("f")).is_err());
    b.umount().ok();
    lab.wait_until_free();
    let found = alerts(&lab, &[]);
    let [alert] = &found[..] else { panic!("{found:?}") };
    assert_eq!(
        (&alert["kind"], &alert["path"], &alert["is_damage"]),
        (&"stale".into(), &(*stored).into(), &true.into())
    );
    assert_eq!((&alert["vault"], &alert["number"], &alert["found_by"]), (&(*id).into(), &1.into(), &"read".into()));
    assert_eq!(alert["hosts"], Value::from(vec!["a", "b"]));
    assert!(alert["count"].as_u64().unwrap() >= 2 && alert["first"].as_u64() <= alert["last"].as_u64());
    assert_eq!((lab.metric("alerts"), lab.metric("alerts_new")), (1.0, 1.0));
    assert!(lab.metric("findings_total") >= 2.0);
    let shown = lab.serve(&["alerts", "list"]).ok().out;
    assert!(shown.starts_with("1  new  ") && shown.contains("  stale  ") && shown.contains("by a, b"), "{shown}");
    assert!(lab.log().contains(&stored));
    // Known: it stays, and what is found there again is counted by it.
    lab.serve(&["alerts", "acknowledge", "@7"]).code(3).says("no alert 7");
    assert!(lab.serve(&["alerts", "acknowledge", "--note", "disk\u{1b}swapped", "@1"]).ok().out.contains(": 1"));
    assert!(alerts(&lab, &["--new"]).is_empty());
    a.run("check store/v").code(30);
    let found = alerts(&lab, &[]);
    assert!(found.iter().any(|later| later["number"] == 1 && later["acknowledged"]["note"] == "disk\u{fffd}swapped"));
    assert!(found.iter().any(|later| later["count"].as_u64() > alert["count"].as_u64()), "{found:?}");
    assert!(!lab.serve(&["alerts", "list"]).ok().out.contains('\u{1b}'));
    assert_eq!(alerts(&lab, &["--vault", &id]).len(), found.len());
    assert!(alerts(&lab, &["--vault", &"0".repeat(32)]).is_empty());
    // A backup has them.
    lab.serve(&["backup", &format!("@{}", lab.path("backup").display())]).ok();
    let kept = Command::new(server_program()).args(["alerts", "list", "--json"]).arg(lab.path("backup")).output();
    assert_eq!(Ran::from(kept.unwrap()).ok().out.lines().count(), found.len());
    // Closed: it goes, and what is found there again is a new one.
    lab.serve(&["alerts", "close", "--all"]).ok();
    assert_eq!((alerts(&lab, &[]).len(), lab.metric("alerts")), (0, 0.0));
    b.run("cat store/v f").code(30);
    let found = alerts(&lab, &["--new"]);
    assert!(found[0]["number"].as_u64() > Some(1) && found[0]["hosts"] == Value::from(vec!["b"]), "{found:?}");
    let audit = lab.serve(&["audit"]).ok().out;
    assert!(audit.contains("alert-acknowledged  ") && audit.contains("alert-closed  "), "{audit}");
    lab.serve(&["check"]).ok();
}

/// What keeps a vault from being opened is an alert, too: the store shows the header of yesterday.
#[test]
fn a_header_that_was_put_back_is_an_alert() {
    let lab = Lab::new();
    let a = lab.joined("a");
    lab.vault(a);
    fs::copy(lab.path("key"), lab.path("key2")).unwrap();
    fs::write(lab.path("key2"), [8; 32]).unwrap();
    fs::copy(lab.path("store/v/lamassu.vault"), lab.path("older")).unwrap();
    a.run("key add --new-key raw:file:key2 store/v").ok();
    fs::copy(lab.path("older"), lab.path("store/v/lamassu.vault")).unwrap();
    a.run("check store/v").code(30);
    let found = alerts(&lab, &[]);
    let [alert] = &found[..] else { panic!("{found:?}") };
    assert_eq!((&alert["kind"], &alert["path"]), (&"stale".into(), &"".into()));
}

/// A receiver that knows the standard, and nothing of ours: it verifies signatures, refuses two messages, and writes
/// down what it takes.
const RECEIVER: &str = r#"
import base64, hashlib, hmac, http.server, json, ssl, sys
port, secret, cert, key, out, refuses = sys.argv[1:]
secret = base64.b64decode(open(secret).read().strip().removeprefix("whsec_"))
refuses = int(refuses)
class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        global refuses
        body = self.rfile.read(int(self.headers["content-length"]))
        signed = b".".join([self.headers["webhook-id"].encode(), self.headers["webhook-timestamp"].encode(), body])
        expected = "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
        good = hmac.compare_digest(expected, self.headers["webhook-signature"])
        refused = refuses > 0
        refuses -= 1
        with open(out, "a") as log:
            log.write(json.dumps({"good": good, "refused": refused, "id": self.headers["webhook-id"], "body": json.loads(body)}) + "\n")
        self.send_response(503 if refused else 204)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", int(port)), Receiver)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(cert, key)
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"#;

struct Receiver(Child);

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn receiver(lab: &Lab, port: u16, refuses: u32) -> Receiver {
    let paths = ["server/webhook.secret", "receiver.pem", "receiver.key", "received"].map(|name| lab.path(name));
    let mut command = Command::new("python3");
    let command = command.args(["-c", RECEIVER, &port.to_string()]).args(paths).arg(refuses.to_string());
    Receiver(command.stdin(Stdio::null()).spawn().unwrap())
}

fn received(lab: &Lab) -> Vec<Value> {
    let text = fs::read_to_string(lab.path("received")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_webhook_gets_each_alert_signed_until_it_takes_it() {
    let mut lab = Lab::new();
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    fs::write(lab.path("receiver.pem"), made.cert.pem()).unwrap();
    fs::write(lab.path("receiver.key"), made.signing_key.serialize_pem()).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut config = fs::read_to_string(lab.path("server/server.toml")).unwrap();
    config += &format!("webhook = \"https://127.0.0.1:{port}/lamassu\"\nwebhook_ca = {:?}\n", lab.path("receiver.pem"));
    fs::write(lab.path("server/server.toml"), config).unwrap();
    lab.stop("-TERM");
    lab.start();
    let id = put_back(&lab);
    // Nobody listens yet.
    lab.host("a").run("cat store/v f").code(30);
    wait_for("a failed message is not counted", || {
        lab.asked("/metrics").1.contains("webhook_posts_total{taken=\"no\"}")
    });
    assert_eq!(lab.metric("alerts_unposted"), 1.0);
    let listening = receiver(&lab, port, 2);
    wait_for("it is not tried again", || lab.metric("alerts_unposted") == 0.0);
    let got = received(&lab);
    assert_eq!(got.len(), 3, "{got:?}");
    assert!(got.iter().all(|message| message["good"] == true && message["id"] == got[0]["id"]), "{got:?}");
    let body = &got[2]["body"];
    assert_eq!((&body["type"], body["alerts"].as_array().unwrap().len()), (&"lamassu.alerts".into(), 1));
    assert_eq!((&body["alerts"][0]["vault"], &body["alerts"][0]["kind"]), (&(*id).into(), &"stale".into()));
    // What is found again is no new alert.
    lab.host("b").run(&format!("cat --anchor {} store/v f", lab.url())).code(30);
    assert_eq!(alerts(&lab, &[])[0]["count"], 2);
    drop(listening);
    // The server is killed with one to be posted; the next goes on.
    lab.serve(&["alerts", "close", "@1"]).ok();
    lab.host("b").run(&format!("cat --anchor {} store/v f", lab.url())).code(30);
    wait_for("it is forgotten", || lab.metric("alerts_unposted") == 1.0);
    lab.stop("-KILL");
    let _listening = receiver(&lab, port, 0);
    lab.start();
    wait_for("it is forgotten", || received(&lab).len() == 4);
    let got = received(&lab);
    assert_eq!((&got[3]["good"], &got[3]["body"]["alerts"][0]["number"]), (&true.into(), &2.into()), "{got:?}");
    wait_for("it is posted for ever", || lab.metric("alerts_unposted") == 0.0);
}
