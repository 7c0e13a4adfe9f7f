//! `lamassu profile`: chosen, inherited, changed, shown; and what the other commands tell of it.

use crate::support::Bench;
use std::fs;

const B: usize = 4096;

/// Blocks that are no ciphertext.
fn text(blocks: usize) -> Vec<u8> {
    b"plain to see, ".iter().copied().cycle().take(blocks * B).collect()
}

fn shown(b: &Bench, path: &str) -> (String, String) {
    let told = b.run(&format!("profile show --json v {path}")).ok().json();
    let row = &told["profiles"][0];
    let word = |name: &str| row[name].as_str().unwrap_or("-").to_owned();
    assert_eq!(row["changing"], false, "{path}");
    (word("protect"), word("block_keys"))
}

fn words(protect: &str, keys: &str) -> (String, String) {
    (protect.into(), keys.into())
}

#[test]
fn files_are_protected_as_their_directory_says() {
    let b = Bench::new();
    b.run("init v").ok();
    fs::create_dir(b.path("mirror")).unwrap();
    b.file("mirror/a", &text(20));
    b.run("cp -r v mirror vault:/mirror").ok();
    assert_eq!(shown(&b, "mirror/a"), words("both", "convergent"));
    assert_eq!(b.run("leak --json v").ok().json()["plain_blocks"], 0);

    // From now on; then what is there, too.
    b.run("profile set --protect integrity v mirror").ok();
    assert_eq!((shown(&b, "mirror"), shown(&b, "mirror/a")), (words("integrity", "-"), words("both", "convergent")));
    b.run("cp v mirror/a vault:/mirror/b").ok();
    assert_eq!(shown(&b, "mirror/b"), words("integrity", "-"));
    assert_eq!(b.run("leak --json v").ok().json()["plain_blocks"], 20);
    b.run("profile set -R --protect integrity v mirror").ok();
    assert_eq!(shown(&b, "mirror/a"), words("integrity", "-"));
    assert_eq!(b.run("leak --json v").ok().json()["plain_blocks"], 40);
    for file in ["a", "b"] {
        assert!(b.run(&format!("cat v mirror/{file}")).ok().out == text(20));
        let told = b.run(&format!("inspect --json v mirror/{file}")).ok().json();
        assert_eq!(told["profile"], "integrity");
        assert_eq!((&told["pages"][0]["profile"], &told["pages"][0]["changing"]), (&"integrity".into(), &false.into()));
    }
    assert_eq!(b.run("inspect --json v mirror").ok().json()["record"]["profile"], "integrity");
    assert!(b.run("inspect v mirror/a").ok().text().contains("profile       integrity\n"));

    // A part that is not named stays as it is.
    b.run("profile set --protect both --block-keys random v mirror/a").ok();
    b.run("profile set --protect encrypt v mirror/a").ok();
    assert_eq!(shown(&b, "mirror/a"), words("encrypt", "random"));
    b.run("check v").ok();
    b.run("scrub v").ok();
    let table = b.run("profile show v mirror mirror/a").ok().text();
    assert!(table.contains("encrypt    random      aes-256   sha-256  /mirror/a"), "{table}");
    // The root of all.
    b.run("profile set --block-keys random v /").ok();
    b.run("cp v mirror/a vault:/new").ok();
    assert_eq!((shown(&b, "new"), shown(&b, "")), (words("both", "random"), words("both", "random")));
    // A rotation keeps them.
    b.run("key rotate --outer v").ok();
    b.run("rekey --full v").ok();
    assert_eq!((shown(&b, "mirror"), shown(&b, "mirror/a")), (words("integrity", "-"), words("encrypt", "random")));
    b.run("check v").ok();
    // And so does a clone.
    b.run("clone v w").ok();
    assert!(b.run("cat w mirror/a").ok().out == text(20));
}

#[test]
fn what_makes_no_sense_is_a_usage_error() {
    let b = Bench::new();
    b.run("init v").ok();
    b.run("init --suite chacha c").ok();
    b.run("init --suite paper p").ok();
    b.run("init --names plain n").ok();
    b.file("a", b"a file");
    for vault in ["v", "c", "p", "n"] {
        b.run(&format!("cp {vault} a vault:/a")).ok();
    }
    for refused in [
        "v a",
        "--protect nothing v a",
        "--protect integrity --block-keys random v a",
        "--protect encrypt c a",
        "--block-keys random p a",
        "--protect both v",
    ] {
        b.run(&format!("profile set {refused}")).code(2);
    }
    b.run("profile set --protect both v missing").code(3);
    b.run("profile set --protect integrity n /").code(28);
    b.run("profile set --protect integrity n a").ok();
    b.dir("mnt");
    b.run("mount v mnt").ok();
    b.run("profile set --protect integrity v a").code(11);
    b.unmount("mnt");
}

#[test]
fn an_estimate_knows_profiles() {
    let b = Bench::new();
    fs::create_dir(b.path("d")).unwrap();
    b.file("d/a", &text(10));
    b.file("d/b", &text(10));
    let distinct = |options: &str| {
        let told = b.run(&format!("dedup-estimate --json -b 4K {options} d")).ok().json();
        told["sizes"][0]["vault"]["distinct_blocks"].as_u64().unwrap()
    };
    let all = distinct("");
    assert!(all < 20);
    assert_eq!(distinct("--block-keys random"), 2 * all);
    assert_eq!(distinct("--domain file --protect integrity"), all);
    b.run("dedup-estimate --protect none --block-keys random d").code(2);
}
