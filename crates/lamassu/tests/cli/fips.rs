//! `--fips`: what is refused with it, and that what is made with it is used with and without.

use crate::support::Bench;

#[test]
fn only_what_is_built_of_approved_primitives_is_made_and_opened() {
    let b = Bench::new();
    for suite in ["paper", "blake3", "chacha"] {
        b.run(&format!("--fips init --small-files random --suite {suite} v")).code(28).says("--fips").says("use aes");
        b.run(&format!("--fips zone create --suite {suite} z")).code(28).says("use aes");
    }
    b.run("--fips init v").code(28).says("SP 800-38D");
    b.secret("words", b"a passphrase");
    b.run("--fips init --small-files random -k passphrase:file:words v").code(28).says("Argon2id");
    assert!(!b.path("v").exists() && !b.path("z").exists());

    b.run("--fips init --small-files random v").ok();
    b.file("x", &crate::support::noise(50_000, 3));
    b.run("--fips cp v x vault:").ok();
    b.run("--fips key add -n passphrase:file:words v").code(28);
    b.run("key add -n passphrase:file:words --argon2-ms 1 v").ok();
    b.run("--fips ls -k passphrase:file:words v").code(28).says("Argon2id");
    b.run("ls -k passphrase:file:words v").ok();
    assert_eq!(b.run("--fips cat v x").ok().out, std::fs::read(b.path("x")).unwrap());
    b.dir("m");
    b.run("--fips mount v m").ok();
    assert!(b.path("m/x").exists());
    b.unmount("m");

    b.run("init --suite chacha --small-files random other").ok();
    b.run("--fips ls other").code(28).says("ChaCha20");
    b.run("init plain").ok();
    b.run("--fips mount plain m").code(28).says("SP 800-38D");
    b.run("ls plain").ok();
}

/// A hash that is not approved is refused by file, too: where it is chosen, inherited, read, or looked through.
#[test]
fn files_are_hashed_by_approved_hashes_alone() {
    let b = Bench::new();
    let content = crate::support::noise(300_000, 3);
    b.file("x", &content);
    b.run("init --small-files random v").ok();
    b.run("--fips cp v x vault:").ok();
    b.run("--fips profile set --hash blake3 v x").code(28).says("--fips").says("sha-256");
    b.run("--fips profile set --hash blake3 v /").code(28).says("BLAKE3");
    b.run("--fips profile set --cipher aes-128 v x").ok();
    assert_eq!(b.run("--fips cat v x").ok().out, content);
    b.run("--fips check v").ok();

    b.run("cp v x vault:/y").ok();
    b.run("profile set --hash blake3 v / y").ok();
    assert_eq!(b.run("cat v y").ok().out, content);
    b.run("--fips cat v y").code(28).says("BLAKE3");
    b.run("--fips cp v x vault:/z").code(28).says("BLAKE3");
    let stored = b.stored("v", "y");
    b.run(&format!("--fips cat --orphan v {}", stored.display())).code(28).says("BLAKE3");
    assert_eq!(b.run("--fips cat v x").ok().out, content);
    b.dir("m");
    b.run("--fips mount v m").ok();
    assert_eq!(std::fs::read(b.path("m/x")).unwrap(), content);
    let errno = |done: std::io::Result<Vec<u8>>| done.unwrap_err().raw_os_error();
    assert_eq!(errno(std::fs::read(b.path("m/y"))), Some(libc::EPERM));
    assert_eq!(errno(std::fs::write(b.path("m/new"), b"new").map(|()| vec![])), Some(libc::EPERM));
    assert!(!b.path("m/new").exists() && b.path("m/y").exists());
    b.unmount("m");
    b.run("check v").ok();
    // Away from it without, and all is well with.
    b.run("profile set -R --hash sha-256 v /").ok();
    assert_eq!(b.run("--fips cat v y").ok().out, content);
    b.run("--fips check v").ok();
}

#[test]
fn datasets_and_what_a_daemon_is_given_are_approved_too() {
    let b = Bench::new();
    let odd = "--suite chacha --domain family";
    b.file("x", b"content");
    b.secret("words", b"a passphrase");
    b.run("init --small-files random v").ok();
    b.run("--fips dataset create v good").ok();
    b.run(&format!("--fips dataset create {odd} v odd")).code(28).says("ChaCha20");
    b.run(&format!("dataset create {odd} v odd")).ok();
    for dataset in ["good", "odd"] {
        b.run(&format!("cp v x vault:{dataset}/")).ok();
    }
    b.run("--fips cat v good/x").ok();
    b.run("--fips cat v odd/x").code(28).says("ChaCha20");
    b.run("--fips cp v vault:odd/x y").code(28);
    let checked = b.run("--fips check --json v").code(51).json();
    assert_eq!((&checked["locked"], &checked["files"]), (&serde_json::json!(["odd"]), &2.into()), "{checked}");

    b.run("dataset create -n passphrase:file:words --argon2-ms 1 v phrase").ok();
    b.dir("m");
    b.run("--fips mount v m").ok();
    assert_eq!(std::fs::read(b.path("m/good/x")).unwrap(), b"content");
    assert_eq!(std::fs::read(b.path("m/odd/x")).unwrap_err().raw_os_error(), Some(libc::EPERM));
    // Whoever asks the daemon may have been started without.
    for asked in [
        "key add --argon2-ms 1 -n passphrase:file:words m",
        "key change --argon2-ms 1 --slot 1 -n passphrase:file:words m",
        "dataset create --argon2-ms 1 -n passphrase:file:words m/more",
        "key load -k passphrase:file:words m/phrase",
    ] {
        b.run(asked).code(28).says("Argon2id");
    }
    b.run(&format!("dataset create {odd} m/more")).code(28).says("ChaCha20");
    b.unmount("m");

    // A vault of small files under computed nonces, and a dataset of it by the directory in the store.
    b.run("init --suite chacha --small-files random other").ok();
    b.run("dataset create --suite aes --domain family other inner").ok();
    let inner = b.stored("other", "inner");
    b.run(&format!("--fips ls {}", inner.display())).code(28).says("ChaCha20");
    b.run(&format!("ls {}", inner.display())).ok();
    b.run("init convergent").ok();
    b.run("--fips dataset create convergent inner").code(28).says("SP 800-38D");
}

/// What a FIPS module that is built in computes is what the program's own code computes, in files and in headers.
#[test]
fn the_module_is_named_and_its_vaults_are_everybodys() {
    let b = Bench::new();
    let told = b.run("--fips selftest").ok().text();
    let rows = b.run("--fips selftest --json").ok().json();
    let tested = |primitive: &str| {
        let mut rows = rows.as_array().unwrap().iter();
        rows.any(|row| row["kernel"] == "aws-lc-fips" && row["primitive"] == primitive && row["passed"] == true)
    };
    let built_in = told.contains("FIPS module: AWS-LC");
    assert!(built_in || told.contains("FIPS module: none in this build"), "{told}");
    for primitive in ["FIPS mode", "DRBG", "HKDF-SHA-256", "XAES-256-GCM", "suite aes"] {
        assert_eq!(tested(primitive), built_in, "{primitive}");
    }
    b.run("-v --fips selftest").ok().says("FIPS module");
    let content = crate::support::noise(300_000, 4);
    b.file("x", &content);
    b.dir("m");
    for (first, then) in [("--fips", ""), ("", "--fips")] {
        b.run(&format!("{first} init --small-files random v{first}")).ok();
        b.run(&format!("{first} cp v{first} x vault:")).ok();
        assert_eq!(b.run(&format!("{then} cat v{first} x")).ok().out, content);
        b.run(&format!("{then} mount v{first} m")).ok();
        std::fs::write(b.path("m/x"), &content[..77_777]).unwrap();
        b.unmount("m");
        assert_eq!(b.run(&format!("{first} cat v{first} x")).ok().out, content[..77_777]);
        b.run(&format!("{first} check v{first}")).ok();
    }
}
