//! The command `volume export`: what it refuses and why, who can connect, several vaults at once.

use crate::lab::{Lab, has, python, run, until};
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

impl Lab {
    /// Runs an export that ends by itself, with this code; what it said.
    #[track_caller]
    fn refused(&self, code: i32, args: &[&str]) -> String {
        let words = self.export_words(args);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.code(code, &words).1
    }
}

#[test]
fn an_export_that_cannot_be_says_why_with_its_code() {
    if !has(&["nbdkit"]) {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "v", "a", "1M"]);
    std::fs::write(lab.path("other"), [7; 32]).unwrap();
    std::fs::write(lab.path("words"), "some words").unwrap();
    std::fs::set_permissions(lab.path("words"), PermissionsExt::from_mode(0o600)).unwrap();
    let socket = ["--socket", "s"];
    let with = |more: &[&'static str]| -> Vec<&'static str> { socket.iter().chain(more).copied().collect() };
    lab.refused(12, &with(&["-k", "raw:file:other", "v"]));
    lab.refused(9, &with(&["-k", "raw:file:none", "v"]));
    let said = lab.refused(2, &with(&["-k", "my secret words", "v"]));
    assert!(!said.contains("secret"), "{said}");
    lab.refused(3, &with(&["--volume", "b", "v"]));
    lab.refused(6, &with(&["."]));
    lab.refused(2, &with(&["--volume", "a", "v", "v2=v"]));
    lab.refused(2, &["v"]);
    lab.refused(20, &with(&["--nbdkit", "no-such-program", "v"]));
    lab.refused(20, &with(&["--filter", "no-such-filter", "v"]));
    for address in ["0.0.0.0:0", "127.0.0.1:0"] {
        assert!(lab.refused(2, &["--listen", address, "v"]).contains("--tls-psk"));
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    lab.refused(20, &["--no-tls", "--listen", &taken.local_addr().unwrap().to_string(), "v"]);
    // The key may come by standard input, of which nbdkit leaves nothing once it serves.
    lab.ok(&["init", "--key", "passphrase:file:words", "w"]);
    let words = ["--socket", "s", "-k", "passphrase:stdin", "w"];
    let mut by_stdin = lab.command(&lab.export_words(&words)).stdin(Stdio::piped()).spawn().unwrap();
    by_stdin.stdin.take().unwrap().write_all(b"some words\n").unwrap();
    until("the export is served", || {
        assert!(by_stdin.try_wait().unwrap().is_none());
        UnixStream::connect(lab.path("s")).is_ok()
    });
    run("kill", &["-TERM", &by_stdin.id().to_string()]);
    assert!(by_stdin.wait().unwrap().success());
    // One writer of a vault: neither a second export, nor a command, nor a mount while it is exported.
    let served = lab.export(&["v"]);
    std::fs::create_dir(lab.path("m")).unwrap();
    // Each waits for a writer that may be about to close the vault, so they wait together.
    std::thread::scope(|s| {
        s.spawn(|| lab.refused(11, &["--socket", "s2", "v"]));
        s.spawn(|| lab.code(11, &["volume", "create", "v", "b", "1M"]));
        s.spawn(|| lab.code(11, &["mount", "v", "m"]));
    });
    served.stop();
    assert!(!lab.path("s").exists());
    lab.ok(&["volume", "create", "v", "b", "1M"]);
}

#[test]
fn several_vaults_are_exported_side_by_side() {
    if !has(&["nbdkit", "nbdinfo"]) {
        return;
    }
    let lab = Lab::new();
    lab.vault("w", "key2");
    for (vault, key, volume) in [("v", "key", "a"), ("v", "key", "b"), ("w", "key2", "a")] {
        lab.ok(&["volume", "create", "-k", &lab.source(key), vault, volume, "1M"]);
    }
    let (one, two) = (lab.source("key"), lab.source("key2"));
    let served = lab.export(&["-k", &one, "-k", &two, "first=v", "w"]);
    assert_eq!(lab.path("s").metadata().unwrap().permissions().mode() & 0o022, 0);
    let list = run("nbdinfo", &["--list", "--json", &served.uri("")]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let names: Vec<_> =
        list["exports"].as_array().unwrap().iter().map(|e| e["export-name"].as_str().unwrap()).collect();
    assert_eq!(names, ["first/a", "first/b", "w/a"]);
    // Each is its own: what is written to one is in no other.
    python(
        "import nbd, sys\n\
         uris = sys.argv[1:]\n\
         for n, uri in enumerate(uris):\n\
         \x20   h = nbd.NBD(); h.connect_uri(uri); h.pwrite(bytes([n + 1]) * 4096, 8192); h.flush(); h.shutdown()\n\
         for n, uri in enumerate(uris):\n\
         \x20   h = nbd.NBD(); h.connect_uri(uri); assert h.pread(4096, 8192) == bytes([n + 1]) * 4096; h.shutdown()\n",
        &[&served.uri("first/a"), &served.uri("first/b"), &served.uri("w/a")],
    );
    for unknown in ["", "a", "first", "first/c", "w/b", "first/a@s", "../v/a"] {
        let out = Command::new("nbdinfo").arg(served.uri(unknown)).output().unwrap();
        assert!(!out.status.success(), "{unknown:?}");
    }
    served.stop();
    // Of one vault the volume's name is enough, and where there is one volume, none.
    let served = lab.export(&["-k", &two, "w"]);
    assert_eq!(run("nbdinfo", &["--size", &served.uri("")]).trim(), "1048576");
    assert_eq!(run("nbdinfo", &["--size", &served.uri("a")]).trim(), "1048576");
    served.stop();
}

/// A volume whose attribute the store has damaged is in nobody else's way.
#[test]
fn a_damaged_volume_hides_no_other_one() {
    if !has(&["nbdkit", "nbdinfo"]) {
        return;
    }
    let lab = Lab::new();
    for name in ["good", "bad", "other"] {
        lab.ok(&["volume", "create", "v", name, "1M"]);
    }
    let stored = lab.ok(&["path", "--absolute", "v", ".lamassu-volumes/bad"]);
    python(
        "import os, sys\n\
         names = [n for n in os.listxattr(sys.argv[1]) if n.startswith('user.')]\n\
         assert names\n\
         for n in names:\n\
         \x20   value = bytearray(os.getxattr(sys.argv[1], n)); value[-1] ^= 1\n\
         \x20   os.setxattr(sys.argv[1], n, bytes(value))\n",
        &[lab.path(stored.trim_end()).to_str().unwrap()],
    );
    let (listed, said) = lab.code(30, &["volume", "list", "v"]);
    assert!(listed.contains("good") && listed.contains("other") && said.contains("bad"), "{listed}{said}");
    let served = lab.export(&["v"]);
    let list = run("nbdinfo", &["--list", "--json", &served.uri("")]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let names: Vec<_> =
        list["exports"].as_array().unwrap().iter().map(|e| e["export-name"].as_str().unwrap()).collect();
    assert_eq!(names, ["good", "other"]);
    served.stop();
    // A client that names none gets the only one of those that are exported.
    let served = lab.export(&["--volume", "good", "v"]);
    assert_eq!(run("nbdinfo", &["--size", &served.uri("")]).trim(), "1048576");
    served.stop();
}
