//! Keys inside a token: SoftHSM2, set up by its own tools (`scripts/setup` installs softhsm2 and opensc).

use crate::support::{Bench, Ran};
use std::path::PathBuf;
use std::process::Command;

const PIN: &str = "271828";

/// A directory of tokens.
pub struct Hsm {
    pub b: Bench,
    module: &'static str,
}

impl Hsm {
    pub fn new() -> Hsm {
        let b = Bench::new();
        b.dir("tokens");
        let tokens = b.path("tokens");
        b.file("softhsm2.conf", format!("directories.tokendir = {}\nlog.level = ERROR\n", tokens.display()).as_bytes());
        b.secret("pin", format!("{PIN}\n").as_bytes());
        let module = ["/usr/lib/softhsm/libsofthsm2.so", "/usr/lib/x86_64-linux-gnu/softhsm/libsofthsm2.so"]
            .into_iter()
            .find(|path| PathBuf::from(path).exists())
            .expect("libsofthsm2.so: run scripts/setup");
        Hsm { b, module }
    }

    /// A program with these tokens.
    fn tool(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(args).env("SOFTHSM2_CONF", self.b.path("softhsm2.conf"));
        command
    }

    #[track_caller]
    fn must(&self, program: &str, args: &[&str]) {
        let out = self.tool(program, args).output().unwrap_or_else(|e| panic!("{program}: {e}: run scripts/setup"));
        assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    }

    pub fn token(&self, label: &str) {
        self.must("softhsm2-util", &["--init-token", "--free", "--label", label, "--so-pin", "31415926", "--pin", PIN]);
    }

    pub fn key(&self, token: &str, label: &str, id: &str, how: &[&str]) {
        let base =
            ["--module", self.module, "--token-label", token, "--login", "--pin", PIN, "--label", label, "--id", id];
        self.must("pkcs11-tool", &[&base[..], how].concat());
    }

    pub fn rsa(&self, token: &str, label: &str, id: &str) {
        self.key(token, label, id, &["--keypairgen", "--key-type", "rsa:2048"]);
    }

    pub fn delete(&self, token: &str, class: &str, id: &str) {
        let base = ["--module", self.module, "--token-label", token, "--login", "--pin", PIN];
        self.must("pkcs11-tool", &[&base[..], &["--delete-object", "--type", class, "--id", id]].concat());
    }

    /// Ids of the token's objects of a class, sorted.
    pub fn objects(&self, token: &str, class: &str) -> Vec<String> {
        let base =
            ["--module", self.module, "--token-label", token, "--login", "--pin", PIN, "--list-objects", "--type"];
        let out = self.tool("pkcs11-tool", &[&base[..], &[class]].concat()).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let mut ids: Vec<_> =
            text.lines().filter_map(|l| Some(l.trim().strip_prefix("ID:")?.trim().to_string())).collect();
        ids.sort();
        ids
    }

    pub fn uri(&self, path: &str) -> String {
        format!("pkcs11:{path}?module-path={}&pin-source=file:{}", self.module, self.b.path("pin").display())
    }

    pub fn run(&self, line: &str) -> Ran {
        self.b
            .command(line.split_whitespace())
            .env("SOFTHSM2_CONF", self.b.path("softhsm2.conf"))
            .output()
            .unwrap()
            .into()
    }
}

#[test]
fn a_vault_is_opened_by_keys_that_stay_in_the_token() {
    let h = Hsm::new();
    h.token("office");
    h.rsa("office", "wrap", "01");
    h.key("office", "sym", "02", &["--keygen", "--key-type", "aes:32"]);
    let (rsa, aes) = (h.uri("token=office;object=wrap"), h.uri("token=office;object=sym"));
    h.run(&format!("init -k {rsa} v")).ok();
    h.b.file("x", b"content");
    h.run(&format!("cp -k {rsa} v x vault:")).ok();
    h.run(&format!("key add -k {rsa} -n {aes} -l symmetric v")).ok();
    for source in [&rsa, &aes, &h.uri("id=%01"), &h.uri("token=office;object=sym;type=secret-key")] {
        assert_eq!(h.run(&format!("cat -k {source} v x")).ok().out, b"content");
    }
    let header: serde_json::Value =
        serde_json::from_slice(&std::fs::read(h.b.path("v/lamassu.vault")).unwrap()).unwrap();
    assert_eq!(header["slots"][0]["kind"], "pkcs11");
    // SoftHSM 2.6 knows OAEP with SHA-1 alone.
    assert!(header["slots"][0]["token"]["mechanism"].as_str().unwrap().starts_with("rsa-oaep-"));
    assert_eq!(header["slots"][1]["token"]["mechanism"], "aes-gcm");
    assert_eq!(h.run("key list --json v").ok().json()["slots"][1]["kind"], "pkcs11");

    // A file key beside the token; another key of the same token opens nothing; the token alone is no raw key.
    h.rsa("office", "other", "03");
    h.run(&format!("ls -k {} v", h.uri("object=other"))).code(12);
    h.run("ls v").code(12).says("pkcs11");
    h.run(&format!("key add -k {rsa} -n raw:file:key v")).ok();
    h.run("ls v").ok();
    h.run(&format!("key change -k {aes} -n {} v", h.uri("object=other"))).ok();
    h.run(&format!("ls -k {aes} v")).code(12);
    h.run(&format!("ls -k {} v", h.uri("object=other"))).ok();

    // Mounted: the child that serves uses the token, and the mount needs it no more.
    h.b.dir("m");
    h.run(&format!("mount -k {rsa} v m")).ok();
    assert_eq!(std::fs::read(h.b.path("m/x")).unwrap(), b"content");
    h.b.unmount("m");
}

/// A key whose signature cannot be verified, here for want of its public half: its slot counts where the administrator
/// is known.
#[test]
fn a_slot_without_a_good_signature_takes_an_administrator() {
    let h = Hsm::new();
    h.token("office");
    h.rsa("office", "wrap", "01");
    h.rsa("office", "card", "02");
    let (signs, card) = (h.uri("token=office;object=wrap"), h.uri("token=office;object=card"));
    // Hosts differ in what is pinned.
    let on = |host: &str, line: String| -> Ran {
        let mut command = h.b.command(line.split_whitespace());
        command.env("SOFTHSM2_CONF", h.b.path("softhsm2.conf")).env("XDG_CONFIG_HOME", h.b.path(host));
        command.output().unwrap().into()
    };
    on("a", format!("init -k {card} v")).ok();
    on("a", format!("key add -k {card} -n {signs} v")).ok();
    let header: serde_json::Value =
        serde_json::from_slice(&std::fs::read(h.b.path("v/lamassu.vault")).unwrap()).unwrap();
    let is_signed = |slot: usize| !header["slots"][slot]["token"]["signature"].is_null();
    assert_eq!((is_signed(0), is_signed(1)), (true, true));
    on("b", format!("ls -k {card} v")).ok();
    h.delete("office", "pubkey", "02");
    on("a", format!("ls -k {card} v")).ok();
    on("b", format!("ls -k {signs} v")).ok();
    on("b", format!("ls -k {card} v")).code(50).says("public half");
    let admin = header["admin"]["public"].as_str().unwrap();
    on("b", format!("ls --admin-key {admin} -k {card} v")).ok();
    on("b", format!("ls --admin-key {} -k {card} v", "0".repeat(64))).code(50);
    on("a", format!("zone create -k {signs} z")).ok();
}

#[test]
fn each_fault_of_a_token_is_its_own() {
    let h = Hsm::new();
    h.token("office");
    h.rsa("office", "wrap", "01");
    h.run(&format!("init -k {} v", h.uri("token=office;object=wrap"))).ok();
    let ls = |source: &str| h.run(&format!("ls -k {source} v"));
    ls(&h.uri("token=elsewhere;object=wrap")).code(43).says("no token");
    ls(&h.uri("token=office;object=nothing")).code(43).says("private or secret key");
    ls(&h.uri("token=office;object=wrap;type=secret-key")).code(43);
    ls(&format!("pkcs11:object=wrap?module-path={}", h.b.path("pin").display())).code(9).says("module");
    ls("pkcs11:object=wrap?module-path=/no/such.so").code(9).says("/no/such.so");
    ls(&format!("pkcs11:object=wrap?module-path={}", h.module)).code(9).says("PIN");
    ls(&h.uri("object=wrap").replace("/pin", "/nosuch")).code(9).says("PIN file");
    ls(&format!("pkcs11:object=wrap?module-path={}&pin-value={PIN}", h.module)).code(2);
    h.b.secret("badpin", b"999999\n");
    ls(&h.uri("object=wrap").replace("/pin", "/badpin")).code(42).says("wrong PIN");
    ls(&h.uri("object=wrap")).ok();

    h.key("office", "sign", "05", &["--keypairgen", "--key-type", "EC:prime256v1"]);
    ls(&h.uri("object=sign")).code(9).says("neither RSA nor AES");
    h.rsa("office", "wrap", "06");
    ls(&h.uri("object=wrap")).code(9).says("2 keys");
    ls(&h.uri("object=wrap;id=%01")).ok();
    h.token("office");
    ls(&h.uri("object=wrap;id=%01")).code(9).says("2 tokens");
}

/// SoftHSM never locks a PIN, so the token's own record of its flags is changed to say that it has.
#[test]
fn a_locked_token_says_so() {
    const USER_PIN_LOCKED: u64 = 0x0004_0000;
    let h = Hsm::new();
    h.token("office");
    h.rsa("office", "wrap", "01");
    let source = h.uri("token=office;object=wrap");
    h.run(&format!("init -k {source} v")).ok();
    let token = std::fs::read_dir(h.b.path("tokens")).unwrap().next().unwrap().unwrap().path().join("token.object");
    let mut bytes = std::fs::read(&token).unwrap();
    // CKA_OS_TOKENFLAGS (0x8000534b, of kind 2, a number), then the flags, all big-endian.
    let head = [0x8000_534b_u64.to_be_bytes(), 2_u64.to_be_bytes()].concat();
    let at = bytes.windows(16).position(|w| w == head).expect("the flags") + 16;
    let flags = u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    bytes[at..at + 8].copy_from_slice(&(flags | USER_PIN_LOCKED).to_be_bytes());
    std::fs::write(&token, bytes).unwrap();
    h.run(&format!("ls -k {source} v")).code(45).says("locked");
}
