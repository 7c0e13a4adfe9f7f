//! Who is let in: by TLS, over a local socket and over TCP; and tenants, who are kept apart by users of the host.

use crate::lab::{Door, Lab, Served, has, run};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

#[test]
fn clients_without_the_right_key_are_refused() {
    if !has(&["nbdkit", "nbdinfo", "psktool"]) {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "v", "a", "1M"]);
    let psk = lab.text_path("keys.psk");
    run("psktool", &["-u", "alice", "-p", &psk]);
    let other = lab.text_path("other.psk");
    run("psktool", &["-u", "alice", "-p", &other]);
    let refused = |uri: &str| !Command::new("nbdinfo").arg(uri).output().unwrap().status.success();
    let words = ["--tls-psk", &psk, "v"];
    for start in [Lab::export, Lab::listen] {
        let served = start(&lab, &words);
        let with = |user: &str, file: &str| served.tls_uri("a", user, &format!("tls-psk-file={file}"));
        assert_eq!(run("nbdinfo", &["--size", &with("alice", &psk)]).trim(), "1048576");
        assert!(refused(&with("alice", &other)));
        assert!(refused(&with("bob", &psk)));
        assert!(refused(&served.uri("a")), "without TLS");
        served.stop();
    }
}

#[test]
fn clients_without_the_right_certificate_are_refused() {
    if !has(&["nbdkit", "certtool"]) {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "v", "a", "1M"]);
    // Certificates: of an authority, the server, a client that it signed, and one that another authority signed.
    std::fs::create_dir(lab.path("pki")).unwrap();
    run("sh", &["-c", &format!("cd {}/pki && {CERTIFICATES}", lab.path("").display())]);
    let with = |served: &Served, dir: &str| {
        let how = format!("tls-certificates={}", lab.path("pki").join(dir).display());
        connect(&served.tls_uri("a", "", &how).replace("//@", "//"))
    };
    let words = ["--tls-certificates", "pki", "v"];
    for start in [Lab::export, Lab::listen] {
        let served = start(&lab, &words);
        let good = with(&served, "client");
        assert!(good.status.success(), "{}", String::from_utf8_lossy(&good.stderr));
        assert!(!with(&served, "guest").status.success(), "one that has no certificate");
        assert!(!with(&served, "stranger").status.success());
        assert!(!connect(&served.uri("a")).status.success(), "without TLS");
        served.stop();
    }
    // Then it is the server alone who shows who it is: to clients that know its authority.
    let served = lab.listen(&["--tls-any-client", "--tls-certificates", "pki", "v"]);
    assert!(with(&served, "guest").status.success());
    assert!(!with(&served, "misled").status.success());
    served.stop();
    // Without the authority nobody could be verified.
    std::fs::remove_file(lab.path("pki/ca-cert.pem")).unwrap();
    let words = lab.export_words(&["--listen", "127.0.0.1:0", "--tls-certificates", "pki", "v"]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let said = lab.code(1, &words).1;
    assert!(said.contains("--tls-certificates: pki/ca-cert.pem"), "{said}");
}

/// Connects by TLS, and writes.
fn connect(uri: &str) -> Output {
    let script = "import nbd, sys\nh = nbd.NBD(); h.set_uri_allow_local_file(True); h.connect_uri(sys.argv[1])\n\
                  assert h.get_tls_negotiated(); h.pwrite(b'x' * 512, 0)\n";
    Command::new("/usr/bin/python3").args(["-c", script, uri]).output().unwrap()
}

/// Makes what `--tls-certificates` takes, and a directory for each of several clients: two with certificates, one with
/// none, and one who trusts another authority.
const CERTIFICATES: &str = "set -e
authority() { printf 'cn = test\\nca\\ncert_signing_key\\n' > ca.info
  certtool --generate-privkey --outfile $1-key.pem
  certtool --generate-self-signed --load-privkey $1-key.pem --template ca.info --outfile $1-cert.pem; }
signed() { printf \"cn = localhost\\ndns_name = localhost\\nsigning_key\\nencryption_key\\n$4\\n\" > $3.info
  certtool --generate-privkey --outfile $2/$3-key.pem
  certtool --generate-certificate --load-ca-certificate $1-cert.pem --load-ca-privkey $1-key.pem \\
    --load-privkey $2/$3-key.pem --template $3.info --outfile $2/$3-cert.pem; }
mkdir client stranger guest misled
authority ca; authority other
signed ca . server tls_www_server
signed ca client client tls_www_client
signed other stranger client tls_www_client
cp ca-cert.pem client; cp ca-cert.pem stranger; cp ca-cert.pem guest; cp other-cert.pem misled/ca-cert.pem";

/// A tenant: a user of this host with a key, a vault and an export of its own.
struct Tenant<'a> {
    lab: &'a Lab,
    user: u32,
    name: &'static str,
}

impl Tenant<'_> {
    fn path(&self, name: &str) -> String {
        self.lab.text_path(&format!("{}/{name}", self.name))
    }

    /// The program, as this tenant.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.lab.command(words);
        command.uid(self.user).gid(self.user).env("LAMASSU_KEY", format!("raw:file:{}", self.path("key")));
        command.env("XDG_STATE_HOME", self.path("state")).env("XDG_CONFIG_HOME", self.path("config"));
        command
    }

    fn ok(&self, words: &[&str]) {
        let out = self.command(words).output().unwrap();
        assert!(out.status.success(), "{words:?}: {}", String::from_utf8_lossy(&out.stderr));
    }

    fn code(&self, words: &[&str]) -> i32 {
        self.command(words).output().unwrap().status.code().unwrap()
    }

    fn export(&self) -> Served {
        let (vault, socket) = (self.path("vault"), self.path("socket"));
        let words = self.lab.export_words(&["--socket", &socket, &vault]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.lab.started(self.command(&words), Door::Local(socket.into()))
    }

    /// Connects as this tenant, and writes `byte`, or only reads it.
    fn client(&self, uri: &str, byte: u8, writes: bool) -> bool {
        let script = "import nbd, sys\nh = nbd.NBD(); h.connect_uri(sys.argv[1]); b = bytes([int(sys.argv[2])]) * 4096\n\
                      if sys.argv[3] == 'true': h.pwrite(b, 0); h.flush()\nassert h.pread(4096, 0) == b\n";
        let mut python = Command::new("/usr/bin/python3");
        python.args(["-c", script, uri, &byte.to_string(), &writes.to_string()]);
        python.uid(self.user).gid(self.user).output().unwrap().status.success()
    }
}

#[test]
fn tenants_have_processes_users_and_keys_of_their_own() {
    if !has(&["nbdkit"]) {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("NOTE: only root can be two other users: NOT tested");
        return;
    }
    let lab = Lab::new();
    std::fs::set_permissions(lab.path(""), PermissionsExt::from_mode(0o755)).unwrap();
    let tenants = [("ann", 61001, 1), ("ben", 61002, 2)].map(|(name, user, seed)| {
        let tenant = Tenant { lab: &lab, user, name };
        std::fs::create_dir(lab.path(name)).unwrap();
        std::fs::write(tenant.path("key"), crate::lab::noise(32, seed)).unwrap();
        std::fs::set_permissions(tenant.path("key"), PermissionsExt::from_mode(0o600)).unwrap();
        for path in [lab.text_path(name), tenant.path("key")] {
            chown(path, Some(user), Some(user)).unwrap();
        }
        tenant.ok(&["init", &tenant.path("vault")]);
        tenant.ok(&["volume", "create", &tenant.path("vault"), "a", "1M"]);
        tenant
    });
    let served = tenants.each_ref().map(Tenant::export);
    for (n, (own, export)) in tenants.iter().zip(&served).enumerate() {
        assert!(own.client(&export.uri("a"), n as u8 + 7, true), "{}", own.name);
    }
    for (own, other, export) in [(&tenants[0], &tenants[1], &served[1]), (&tenants[1], &tenants[0], &served[0])] {
        assert!(!own.client(&export.uri("a"), 0, false), "the other's socket");
        let (vault, key) = (other.path("vault"), format!("raw:file:{}", other.path("key")));
        assert_eq!(own.code(&["volume", "list", "-k", &key, &own.path("vault")]), 9, "the other's key");
        assert_eq!(own.code(&["volume", "list", &vault]), 23, "the other's vault");
    }
    for (n, (own, export)) in tenants.iter().zip(&served).enumerate() {
        assert!(own.client(&export.uri("a"), n as u8 + 7, false), "{}", own.name);
    }
    served.into_iter().for_each(Served::stop);
    // Whoever gets at the other's store has ciphertext: his key does not open it.
    run("chmod", &["-R", "a+rX", &tenants[0].path("vault")]);
    assert_eq!(tenants[1].code(&["volume", "list", &tenants[0].path("vault")]), 12);
}
