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
