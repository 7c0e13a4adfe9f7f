//! Keys from standard input, descriptors, credentials and web servers, and the exit codes where they give none.

use crate::https_server::{Ca, Server, answer};
use crate::support::{Bench, Ran};
use std::io::Write;
use std::process::{Command, Stdio};

const HEX: &str = "0f0e0d0c0b0a09080706050403020100000102030405060708090a0b0c0d0e0f";

/// A vault opened by [`HEX`].
fn vault(b: &Bench) {
    b.secret("hex", HEX.as_bytes());
    b.run("init --key hex:file:hex v").ok();
}

#[test]
fn standard_input_gives_one_key() {
    let b = Bench::new();
    vault(&b);
    b.run_with("ls -k hex:stdin v", format!("{HEX}\n").as_bytes()).ok();
    b.run_with("ls -k hex:stdin v", format!("{HEX}\nmore").as_bytes()).code(9);
    b.run_with("ls -k hex:stdin v", b"").code(9);
    b.run_with("key add -k hex:stdin -n raw:stdin v", HEX.as_bytes()).code(9).says("one key");
    b.run_with("cp -k hex:stdin v - vault:x", HEX.as_bytes()).code(2).says("elsewhere");
    b.run_with("cp -k hex:fd:0 v - vault:x", HEX.as_bytes()).code(2);
    b.run_with("key add -k hex:stdin -n raw:file:key v", HEX.as_bytes()).ok();
    b.run("ls v").ok();
    b.run_with("init -k passphrase:stdin --argon2-ms 1 w", b"two\nlines\n").ok();
    b.run_with("ls -k passphrase:stdin w", b"two\nlines").ok();
}

/// Its first line is data, not a passphrase: nobody is asked there. `setsid` takes the terminal away where the tests
/// have one.
#[test]
fn copying_standard_input_leaves_it_to_the_data() {
    let b = Bench::new();
    b.secret("pass", b"correct horse");
    b.run("init -k passphrase:file:pass --argon2-ms 1 v").ok();
    let cp = |source: &str| -> Ran {
        let mut child = Command::new("setsid")
            .args(["--wait", env!("CARGO_BIN_EXE_lamassu"), "cp", "-k", source, "v", "-", "vault:x"])
            .current_dir(b.path(""))
            .env("XDG_STATE_HOME", b.path("state"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let _ = child.stdin.take().unwrap().write_all(b"correct horse\nsecond line\n");
        child.wait_with_output().unwrap().into()
    };
    cp("passphrase:prompt").code(9).says("terminal").says("passphrase:file:PATH");
    b.run("cat -k passphrase:file:pass v x").code(3);
    cp("passphrase:file:pass").ok();
    assert_eq!(b.run("cat -k passphrase:file:pass v x").ok().text(), "correct horse\nsecond line\n");
}

#[test]
fn a_descriptor_is_inherited() {
    let b = Bench::new();
    vault(&b);
    // The shell opens the descriptors, as those who use this do.
    let sh = |line: &str| -> Ran {
        let script = line.replace("lamassu", env!("CARGO_BIN_EXE_lamassu"));
        Command::new("bash")
            .arg("-c")
            .arg(script)
            .current_dir(b.path(""))
            .env("XDG_STATE_HOME", b.path("state"))
            .output()
            .unwrap()
            .into()
    };
    sh("lamassu ls -k hex:fd:3 v 3<hex").ok();
    sh("lamassu ls -k hex:fd:9 v 9< <(cat hex)").ok();
    sh("lamassu key add -k hex:fd:3 -n raw:fd:4 v 3<hex 4<key").ok();
    b.run("ls v").ok();
    sh("lamassu ls -k hex:fd:3 v 3<&-").code(9).says("descriptor 3");
    sh("lamassu ls -k hex:fd:3 v 3>written").code(9).says("descriptor 3");
    b.run("ls -k hex:fd:three v").code(2);
}

#[test]
fn a_credential_is_where_systemd_puts_it() {
    let b = Bench::new();
    vault(&b);
    b.dir("credentials");
    b.secret("credentials/vault", HEX.as_bytes());
    let run = |line: &str| -> Ran {
        b.command(line.split(' ')).env("CREDENTIALS_DIRECTORY", b.path("credentials")).output().unwrap().into()
    };
    run("ls -k hex:credential:vault v").ok();
    run("ls -k hex:credential:other v").code(9).says("credentials/other");
    run("ls -k hex:credential:../hex v").code(2);
    b.run("ls -k hex:credential:vault v").code(9).says("LoadCredential");
}

#[test]
fn a_mount_takes_its_key_from_a_pipe() {
    let b = Bench::new();
    vault(&b);
    b.dir("m");
    b.run_with("mount -k hex:stdin v m", HEX.as_bytes()).ok();
    std::fs::write(b.path("m/file"), "x").unwrap();
    b.unmount("m");
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(HEX.as_bytes()).unwrap();
    drop(writer);
    let mut cat = b.command(["cat", "-k", "hex:stdin", "v", "file"]);
    let ran: Ran = cat.stdin(Stdio::from(reader)).output().unwrap().into();
    assert_eq!(ran.ok().text(), "x");
}

fn answers(path: &str) -> Vec<u8> {
    match path {
        "/key" => answer("200 OK", "", HEX.as_bytes()),
        "/short" => answer("200 OK", "", b"0f"),
        "/long" => answer("200 OK", "", &[b'0'; 9000]),
        "/moved" => answer("301 Moved Permanently", "Location: https://localhost/key\r\n", b""),
        "/denied" => answer("403 Forbidden", "", b""),
        _ => answer("404 Not Found", "", b""),
    }
}

#[test]
fn a_key_server_and_each_of_its_faults() {
    let b = Bench::new();
    vault(&b);
    b.dir("m");
    let (ca, clients) = (Ca::new(), Ca::new());
    b.file("ca.pem", ca.pem().as_bytes());
    b.file("other.pem", clients.pem().as_bytes());
    let client = clients.client();
    b.secret("client.pem", (client.cert + &client.key).as_bytes());
    let open = Server::start(&ca.server("localhost"), None, answers);
    let closed = Server::start(&ca.server("localhost"), Some(&clients), answers);
    let at = |server: &Server, path: &str, options: &str| {
        b.run(&format!("ls -k hex:https://localhost:{}{path}#ca=ca.pem{options} v", server.port))
    };
    at(&open, "/key", "").ok();
    at(&closed, "/key", "&cert=client.pem").ok();
    at(&open, "/short", "").code(9);
    at(&open, "/long", "").code(44).says("longer");
    at(&open, "/moved", "").code(44).says("another address");
    at(&open, "/denied", "").code(42).says("403");
    at(&open, "/nothing", "").code(43).says("404");
    at(&closed, "/key", "").code(42).says("client certificate");
    at(&open, "/key", "&ca=other.pem").code(41).says("not trusted");
    at(&open, "/key", "&ca=nosuch.pem").code(9).says("CA file");
    at(&open, "/key", "&cert=ca.pem").code(9).says("client key");
    at(&open, "/key", "&insecure=yes").code(2);
    b.run(&format!("ls -k hex:https://joe:hunter2@localhost:{}/key v", open.port)).code(2);
    // Port 1: one that was free a moment ago may be another test's by now.
    b.run("ls -k hex:https://localhost:1/key#timeout=2 v").code(40).says("cannot be reached");

    // A mount too, and at its most talkative without the key or a query.
    b.run(&format!("mount -o key=hex:https://localhost:{}/key#ca={} v m", open.port, b.path("ca.pem").display())).ok();
    b.unmount("m");
    let line = format!("-vv ls -k hex:https://localhost:{}/key#ca=ca.pem v", open.port);
    let said: Ran = b.command(line.split(' ')).env("LAMASSU_LOG", "trace").output().unwrap().into();
    assert!(!said.ok().err.contains(&HEX[..16]));
}

/// The process that serves a mount goes on for weeks, also when its keys are unloaded.
#[test]
fn a_daemon_keeps_neither_the_variable_nor_the_descriptor_of_its_key() {
    let b = Bench::new();
    let secret = "swordfish-of-this-test";
    let with = |line: &str| {
        let ran: crate::support::Ran = b.command(line.split_whitespace()).env("PP", secret).output().unwrap().into();
        ran.ok()
    };
    with("init --argon2-ms 10 -k passphrase:env:PP v");
    b.dir("m");
    with("mount -k passphrase:env:PP v m");
    let environ = |pid: i32| std::fs::read(format!("/proc/{pid}/environ")).unwrap();
    let has = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).any(|window| window == what);
    let found = environ(crate::mounts::daemon_of(&b));
    assert!(has(&found, b"PP=") && !has(&found, secret.as_bytes()));
    b.unmount("m");

    b.run("init w").ok();
    let line = format!("exec 7<key; exec {} mount -k raw:fd:7 w m", env!("CARGO_BIN_EXE_lamassu"));
    let ran = std::process::Command::new("sh")
        .args(["-c", &line])
        .current_dir(b.path(""))
        .env("XDG_STATE_HOME", b.path("state"))
        .output()
        .unwrap();
    crate::support::Ran::from(ran).ok();
    let daemon = crate::mounts::serving(&b.path("w"));
    let open = std::fs::read_dir(format!("/proc/{daemon}/fd")).unwrap().flatten();
    let links: Vec<_> = open.filter_map(|fd| std::fs::read_link(fd.path()).ok()).collect();
    assert!(!links.is_empty() && !links.contains(&b.path("key")), "{links:?}");
    b.unmount("m");
}
