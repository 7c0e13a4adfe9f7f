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
