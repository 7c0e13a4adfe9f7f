//! `lamassu profile`: chosen, inherited, changed, shown; and what the other commands tell of it.

use crate::mounts::{daemon_of, kill};
use crate::support::Bench;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

const B: usize = 4096;

/// Blocks that are no ciphertext.
fn text(blocks: usize) -> Vec<u8> {
    b"plain to see, ".iter().copied().cycle().take(blocks * B).collect()
}

fn shown(b: &Bench, path: &str) -> (String, String) {
    shown_in(b, "v", path)
}

fn shown_in(b: &Bench, dir: &str, path: &str) -> (String, String) {
    let told = b.run(&format!("profile show --json {dir} {path}")).ok().json();
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

/// What a file of a profile tells of its cipher and its hash.
fn primitives(b: &Bench, vault: &str, path: &str) -> (String, String) {
    let told = b.run(&format!("profile show --json {vault} {path}")).ok().json();
    let word = |name: &str| told["profiles"][0][name].as_str().unwrap_or("-").to_owned();
    (word("cipher"), word("hash"))
}

/// The first block of a file, as the store has it.
fn first_block(b: &Bench, vault: &str, path: &str) -> Vec<u8> {
    fs::read(b.stored(vault, path)).unwrap()[B..2 * B].to_vec()
}

/// Cipher and hash, inherited and changed: who has them shows them, and equal blocks are equal in the store among files
/// that have the same.
#[test]
fn files_have_the_cipher_and_the_hash_of_their_directory() {
    let b = Bench::new();
    b.run("init v").ok();
    fs::create_dir(b.path("d")).unwrap();
    b.file("d/a", &text(20));
    for dir in ["own", "short", "keyed", "both"] {
        b.run(&format!("cp -r v d vault:/{dir}")).ok();
    }
    let all = [
        ("own", "aes-256", "sha-256"),
        ("short", "aes-128", "sha-256"),
        ("keyed", "aes-256", "blake3"),
        ("both", "aes-128", "blake3"),
    ];
    b.run("profile set --cipher aes-128 v short both").ok();
    b.run("profile set --hash blake3 v keyed both").ok();
    b.run("profile set -R --cipher aes-256 --hash sha-256 v own").ok();
    for (dir, cipher, hash) in all {
        b.run(&format!("cp v d/a vault:/{dir}/b")).ok();
        b.run(&format!("cp v d/a vault:/{dir}/c")).ok();
        assert_eq!(
            primitives(&b, "v", &format!("{dir}/a")),
            ("aes-256".into(), "sha-256".into()),
            "{dir}: from now on"
        );
        assert_eq!(primitives(&b, "v", &format!("{dir}/b")), (cipher.into(), hash.into()), "{dir}");
        assert!(first_block(&b, "v", &format!("{dir}/b")) == first_block(&b, "v", &format!("{dir}/c")), "{dir}");
        assert!(b.run(&format!("cat v {dir}/b")).ok().out == text(20), "{dir}");
    }
    for (one, other) in all.iter().flat_map(|(one, ..)| all.map(|(other, ..)| (*one, other))) {
        let [of_one, of_other] = [one, other].map(|dir| first_block(&b, "v", &format!("{dir}/b")));
        assert_eq!(of_one == of_other, one == other, "{one} {other}");
    }
    // Twelve files of seven distinct blocks each: four methods, four times as many in the store.
    let told = b.run("leak --json v").ok().json();
    assert_eq!(
        (&told["equal_blocks"]["count"], &told["equal_blocks"]["distinct"]),
        (&240.into(), &(4 * 7).into()),
        "{told}"
    );
    assert_eq!(told["plain_blocks"], 0);

    // What is there, in one step; the part that is not named stays.
    b.run("profile set -R --cipher aes-128 v keyed").ok();
    assert_eq!(primitives(&b, "v", "keyed/b"), ("aes-128".into(), "blake3".into()));
    assert!(first_block(&b, "v", "keyed/b") == first_block(&b, "v", "both/b"));
    // Plain blocks have no cipher, and keep the hash.
    b.run("profile set --protect integrity v keyed/b").ok();
    assert_eq!(primitives(&b, "v", "keyed/b"), ("-".into(), "blake3".into()));
    assert!(first_block(&b, "v", "keyed/b") == text(1));
    b.run("profile set --protect both --cipher aes-128 v keyed/b").ok();
    assert!(first_block(&b, "v", "keyed/b") == first_block(&b, "v", "both/b"));
    // Shown everywhere.
    let told = b.run("inspect --json v both/b").ok().json();
    assert_eq!(
        (&told["profile"], &told["pages"][0]["profile"]),
        (&"both, convergent, aes-128, blake3".into(), &told["profile"])
    );
    assert_eq!(b.run("inspect --json v both").ok().json()["record"]["profile"], "both, convergent, aes-128, blake3");
    let table = b.run("profile show v both/b own/b").ok().text();
    assert!(table.contains("both       convergent  aes-128   blake3   /both/b"), "{table}");
    assert!(table.contains("both       convergent  aes-256   sha-256  /own/b"), "{table}");
    b.run("key rotate --inner v").ok();
    b.run("rekey --full v").ok();
    assert_eq!(primitives(&b, "v", "both/b"), ("aes-128".into(), "blake3".into()));
    assert!(b.run("cat v both/b").ok().out == text(20));
    b.run("check v").ok();
    b.run("scrub v").ok();
}

/// Every suite takes its own, and what it can keep beside them.
#[test]
fn a_suite_has_the_ciphers_and_hashes_that_it_can_keep() {
    let b = Bench::new();
    b.file("a", &text(3));
    for (suite, ciphers, hashes) in [
        ("aes", &["aes-256", "aes-128"][..], &["sha-256", "blake3"][..]),
        ("blake3", &["aes-256", "aes-128"], &["sha-256", "blake3"]),
        ("chacha", &["chacha20"], &["sha-256", "blake3"]),
        ("paper", &["aes-256"], &["sha-256"]),
    ] {
        b.run(&format!("init --suite {suite} {suite}")).ok();
        b.run(&format!("cp {suite} a vault:/a")).ok();
        for cipher in ["aes-256", "aes-128", "chacha20"] {
            let set = b.run(&format!("profile set --cipher {cipher} {suite} a"));
            match ciphers.contains(&cipher) {
                true => assert_eq!(
                    {
                        set.ok();
                        primitives(&b, suite, "a").0
                    },
                    cipher,
                    "{suite}"
                ),
                false => drop(set.code(2).says(&format!("suite {suite}"))),
            }
        }
        for hash in ["sha-256", "blake3"] {
            let set = b.run(&format!("profile set --hash {hash} {suite} a"));
            match hashes.contains(&hash) {
                true => assert_eq!(
                    {
                        set.ok();
                        primitives(&b, suite, "a").1
                    },
                    hash,
                    "{suite}"
                ),
                false => drop(set.code(2).says("suite paper")),
            }
        }
        assert!(b.run(&format!("cat {suite} a")).ok().out == text(3));
        b.run(&format!("check {suite}")).ok();
    }
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
        "--protect integrity --cipher aes-128 v a",
        "--cipher rot13 v a",
        "--hash md5 v a",
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
    b.run("mount --read-only v mnt").ok();
    b.run("profile set --protect integrity mnt a").code(28).says("read-only");
    assert_eq!(b.run("profile show --json mnt a").ok().json()["profiles"][0]["protect"], "both");
    b.unmount("mnt");
    b.run("mount v mnt").ok();
    b.run("profile set --protect integrity mnt missing").code(3);
    b.run("profile set --protect integrity --block-keys random mnt a").code(2);
    b.run("profile set --protect integrity n mnt").code(3);
    b.unmount("mnt");
}

/// With -R, too, each keeps what is not chosen; and what cannot have it stays as it is.
#[test]
fn a_part_that_is_not_chosen_stays_below() {
    let b = Bench::new();
    b.run("init v").ok();
    fs::create_dir_all(b.path("t/secret")).unwrap();
    fs::create_dir_all(b.path("t/mirror")).unwrap();
    b.file("t/secret/a", &text(20));
    b.file("t/mirror/a", &text(20));
    b.run("cp -r v t vault:/t").ok();
    b.run("profile set -R --block-keys random v t/secret").ok();
    b.run("profile set -R --protect integrity v t/mirror").ok();
    b.run("profile set -R --hash blake3 v /").ok();
    for (path, is) in
        [("t/secret", "random"), ("t/secret/a", "random"), ("t/mirror", "-"), ("t/mirror/a", "-"), ("t", "convergent")]
    {
        assert_eq!((shown(&b, path).1, primitives(&b, "v", path).1), (is.to_owned(), "blake3".to_owned()), "{path}");
    }
    b.run("profile set -R --cipher aes-128 v t").ok().says("stays as it is").says("not encrypted");
    assert_eq!(shown(&b, "t/mirror/a"), words("integrity", "-"));
    assert_eq!(primitives(&b, "v", "t/secret/a"), ("aes-128".into(), "blake3".into()));
    b.run("check v").ok();
    b.run("scrub v").ok();
}

/// Of a file that is not the newest the anchor has the profile.
#[test]
fn the_profile_of_an_older_file_is_not_believed() {
    let b = Bench::new();
    b.run("init v").ok();
    b.file("a", &text(20));
    b.run("cp v a vault:/a").ok();
    let (stored, older) = (b.stored("v", "a"), b.path("older"));
    fs::copy(&stored, &older).unwrap();
    b.run("profile set --protect integrity v a").ok();
    fs::copy(&older, &stored).unwrap();
    b.run("cat v a").code(30);
    assert_eq!(shown(&b, "a"), words("integrity", "-"));
}

/// By the daemon, through the mount or by the vault's directory, also in a dataset, while files are written.
#[test]
fn a_mounted_vault_changes_its_profiles_while_it_is_used() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    for dir in ["d", "d/deep"] {
        b.dir(&format!("m/{dir}"));
        (0..20).for_each(|n| drop(b.file(&format!("m/{dir}/{n}"), &text(20 + n))));
    }
    b.run("dataset create m/d/set").ok();
    b.file("m/d/set/a", &text(20));
    let stop = AtomicBool::new(false);
    let busy = |n: usize| {
        let path = b.path(&format!("m/d/deep/{n}"));
        let content = text(60);
        for round in (0..50).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
            fs::write(&path, &content[..(round + 1) * B]).unwrap();
            assert!(fs::read(&path).unwrap() == content[..(round + 1) * B]);
        }
        fs::write(&path, &content).unwrap();
    };
    std::thread::scope(|s| {
        let busy = &busy;
        let threads = [3, 4].map(|n| s.spawn(move || busy(n)));
        let ran = b.run("profile set -R --protect integrity m d");
        assert!(ran.code == 0 || ran.err.contains("run it again"), "{ran:?}");
        assert!(ran.err.contains("is a dataset"), "{ran:?}");
        b.run("profile set -R --protect integrity --hash blake3 v d/deep").ok().says("integrity, blake3");
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    // Through the mount, by its directory in the store, and in the dataset.
    b.run("profile set --block-keys random m d/set").ok();
    b.run("profile set --cipher aes-128 m/d/set a").ok();
    b.file("m/d/set/b", &text(20));
    b.file("m/d/new", &text(20));
    let protects = |dir: &str, path: &str| {
        let told = b.run(&format!("profile show --json {dir} {path}")).ok().json();
        told["profiles"][0].clone()
    };
    for dir in ["m", "v"] {
        assert_eq!(protects(dir, "d/new")["protect"], "integrity");
        assert_eq!(protects(dir, "d/deep/3")["hash"], "blake3");
        assert_eq!(protects(dir, "d/set/a")["cipher"], "aes-128");
        assert_eq!(protects(dir, "d/set/b")["block_keys"], "random");
    }
    b.run("key unload m/d/set").ok();
    b.run("profile show m d/set/a").code(51);
    b.run("profile set --hash blake3 m d/set/a").code(51);
    b.unmount("m");
    for n in 0..20 {
        let len = if [3, 4].contains(&n) { 60 } else { 20 + n };
        assert!(b.run(&format!("cat v d/deep/{n}")).ok().out == text(len), "{n}");
    }
    b.run("check v").ok();
    b.run("scrub v").ok();
    assert_eq!(b.run("profile show --json v d/deep/3 d/deep").ok().json()["profiles"][0]["changing"], false);
}

/// The daemon is killed in the middle of a change: a later run goes on.
#[test]
fn a_change_by_a_daemon_that_is_killed_goes_on() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    (0..6).for_each(|n| drop(b.file(&format!("m/{n}"), &text(2000))));
    (0..6).for_each(|n| fs::File::open(b.path(&format!("m/{n}"))).unwrap().sync_all().unwrap());
    for protection in ["integrity", "both", "none"] {
        let daemon = daemon_of(&b);
        std::thread::scope(|s| {
            let asked = s.spawn(|| b.run(&format!("profile set -R --protect {protection} m /")));
            std::thread::sleep(std::time::Duration::from_millis(30));
            kill(daemon, "-KILL");
            assert!(asked.join().unwrap().code != 70);
        });
        let _ = std::process::Command::new("umount").arg("-l").arg(b.path("m")).status();
        b.run("mount v m").ok();
        b.run(&format!("profile set -R --protect {protection} m /")).ok();
        (0..6).for_each(|n| assert_eq!(shown_in(&b, "m", &n.to_string()).0, protection));
    }
    b.unmount("m");
    (0..6).for_each(|n| assert!(b.run(&format!("cat v {n}")).ok().out == text(2000)));
    b.run("check --repair v").ok();
    b.run("scrub v").ok();
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
