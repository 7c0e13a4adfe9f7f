//! Compression: what `init` takes, what lies in the store, and how a vault gets another codec.

use crate::support::{Bench, noise};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bytes that the store has allocated for a file.
fn allocated(path: &Path) -> u64 {
    path.metadata().unwrap().blocks() * 512
}

/// Text that compresses well, and no two blocks of it are equal.
fn text(len: usize) -> Vec<u8> {
    let words = ["lamassu ", "gate ", "stone ", "wings ", "bull\n", "king ", "palace ", "guard "];
    let picks = noise(len, 11);
    picks.iter().flat_map(|pick| words[usize::from(pick & 7)].bytes()).take(len).collect()
}

#[test]
fn init_takes_what_fits_together() {
    let b = Bench::new();
    for refused in [
        "--compress gzip",
        "--compress zstd:20",
        "--compress lz4:1",
        "--compress zstd --suite paper",
        "--compress zstd --compress-round 4K",
        "--compress zstd -b 64K --compress-round 48K",
        "--compress zstd -b 64K --compress-round 64K",
        "--compress none --compress-round 1K",
        "--compress-round 1K",
    ] {
        b.run(&format!("init {refused} refused")).code(2);
        assert!(!b.path("refused").exists(), "{refused}");
    }
    for (n, (options, codec, level, round)) in [
        ("--compress lz4", "lz4", None, 512),
        ("--compress zstd -b 64K", "zstd", Some(3), 4096),
        ("--compress zstd:19 -b 64K --compress-round 16K --suite chacha", "zstd", Some(19), 16384),
    ]
    .into_iter()
    .enumerate()
    {
        let made = b.run(&format!("init --json {options} v{n}")).ok().json();
        let info = b.run(&format!("info --json v{n}")).ok().json();
        for shown in [&made["compression"], &info["compression"]] {
            assert_eq!((&shown["codec"], &shown["round"]), (&codec.into(), &round.into()), "{options}");
            assert_eq!(shown["level"].as_u64(), level, "{options}");
            assert_eq!(shown["version"], shown["version_here"], "{options}");
        }
        assert!(b.run(&format!("info v{n}")).ok().text().contains(&format!("compression   {codec} ")));
    }
    b.run("init --json v").ok();
    assert!(b.run("info --json v").ok().json()["compression"].is_null());
    // It is under the MAC, and what cannot be is refused.
    let path = b.path("v1/lamassu.vault");
    let header = fs::read_to_string(&path).unwrap();
    fs::write(&path, header.replace("\"level\": 3", "\"level\": 4")).unwrap();
    b.run("ls v1").code(23);
    fs::write(&path, header.replace("\"level\": 3", "\"level\": 99")).unwrap();
    b.run("ls v1").code(23);
}

/// A zone says it to its vaults, and a vault to its datasets.
#[test]
fn it_is_inherited() {
    let b = Bench::new();
    let zone_key = b.key("zone.key");
    b.run(&format!("zone create -k {zone_key} -b 64K --compress zstd:5 --compress-round 8K z.zone")).ok();
    let shown = b.run("zone show --json z.zone").ok().json();
    assert_eq!((&shown["compression"]["level"], &shown["compression"]["round"]), (&5.into(), &8192.into()));
    let of = |dir: &str| b.run(&format!("info --json {dir}")).ok().json()["compression"].clone();
    let zone = format!("--zone z.zone --zone-key {zone_key}");
    b.run(&format!("init {zone} a")).ok();
    assert_eq!(of("a"), shown["compression"]);
    b.run(&format!("init {zone} -b 4K b")).ok();
    assert_eq!((&of("b")["level"], &of("b")["round"]), (&5.into(), &512.into()), "what fits its blocks");
    b.run(&format!("init {zone} --compress none c")).ok();
    assert!(of("c").is_null());
    b.run("dataset create a same").ok();
    b.run("dataset create --compress lz4 --domain family a other").ok();
    b.run("dataset create --compress none a without").ok();
    let listed = b.run("dataset list --json a").ok().json();
    let codecs: Vec<_> = listed["datasets"].as_array().unwrap().iter().map(|l| l["compress"].clone()).collect();
    assert_eq!(codecs, ["lz4".into(), "zstd:5".into(), serde_json::Value::Null]);
}

/// Written, written over, read in another mount: the store keeps fewer bytes, and equal blocks are equal.
#[test]
fn the_store_keeps_less() {
    for (suite, codec) in [("aes", "lz4"), ("blake3", "zstd"), ("chacha", "zstd:1")] {
        let b = Bench::new();
        b.run(&format!("init --names plain -b 64K --suite {suite} --compress {codec} v")).ok();
        let m = b.dir("m");
        b.run("mount v m").ok();
        let (words, random) = (text(3 << 20), noise(3 << 20, 5));
        for (name, bytes) in [("words", &words), ("twin", &words), ("random", &random), ("over", &random)] {
            fs::write(m.join(name), bytes).unwrap();
        }
        b.unmount("m");
        b.run("mount v m").ok();
        fs::write(m.join("over"), &words).unwrap();
        let mut patched = words.clone();
        patched[100_000..100_300].copy_from_slice(&random[..300]);
        use std::os::unix::fs::FileExt;
        let over = fs::File::options().write(true).open(m.join("over")).unwrap();
        over.write_all_at(&random[..300], 100_000).unwrap();
        over.sync_all().unwrap();
        drop(over);
        assert!(allocated(&b.path("v/over")) < 2 << 20, "{suite} {codec}: before the unmount");
        b.unmount("m");
        b.run("check v").ok();
        let stored = |name: &str| b.path("v").join(name);
        assert!(allocated(&stored("words")) < 2 << 20, "{suite} {codec}: {}", allocated(&stored("words")));
        // The zeros of what was written over are freed, too.
        assert!(allocated(&stored("over")) < 2 << 20, "{suite} {codec}: {}", allocated(&stored("over")));
        assert!(allocated(&stored("random")) >= 3 << 20);
        let (one, other) = (fs::read(stored("words")).unwrap(), fs::read(stored("twin")).unwrap());
        assert_eq!(one.len(), other.len());
        assert!(one[65536..] == other[65536..], "{suite} {codec}: equal blocks are equal");
        b.run("mount -o ro v m").ok();
        for (name, bytes) in [("words", &words), ("twin", &words), ("random", &random), ("over", &patched)] {
            assert!(fs::read(m.join(name)).unwrap() == *bytes, "{suite} {codec}: {name}");
        }
        b.unmount("m");
        let leak = b.run("leak --json v").ok().json();
        assert!(leak["lengths"].as_object().unwrap().len() > 1, "{leak}");
        assert_eq!(leak["plain_blocks"], 0);
    }
}

/// Another codec, and none: `rekey --full` brings what is stored to it, once.
#[test]
fn another_codec() {
    let b = Bench::new();
    b.run("init --names plain -b 64K v").ok();
    let m = b.dir("m");
    b.run("mount v m").ok();
    let (words, random) = (text(2 << 20), noise(1 << 20, 5));
    fs::write(m.join("words"), &words).unwrap();
    fs::write(m.join("random"), &random).unwrap();
    b.unmount("m");
    let stored = b.path("v/words");
    assert!(allocated(&stored) >= 2 << 20);
    let mut sizes = Vec::new();
    for codec in ["lz4", "zstd:9"] {
        b.run(&format!("dataset set v . compress={codec}")).ok();
        assert!(b.run("info v").ok().text().contains(&format!("compression   {}", &codec[..3])));
        let done = b.run("rekey --full --json v").ok().json();
        assert_eq!(done["blocks"], 32, "of what compresses: {done}");
        b.run("rekey --full v").ok().says("already");
        b.run("check v").ok();
        sizes.push(allocated(&stored));
    }
    assert!(sizes[0] < 3 << 19 && sizes[1] < sizes[0], "{sizes:?}");
    b.run("dataset set v . compress=zstd:30").code(2);
    b.run("dataset set v . compress=lz4 compress=zstd").code(2).says("twice");
    // Larger steps show less of the contents, and save less.
    for refused in ["32K,", "64K", "48K", "256", "none"] {
        b.run(&format!("dataset set v . compress-round={refused}")).code(2);
    }
    b.run("dataset set v . compress-round=32K").ok();
    let info = b.run("info --json v").ok().json();
    assert_eq!((&info["compression"]["level"], &info["compression"]["round"]), (&9.into(), &32768.into()));
    assert_eq!(b.run("rekey --full --json v").ok().json()["blocks"], 32);
    b.run("check v").ok();
    let leak = b.run("leak --json v").ok().json();
    let lengths: Vec<_> = leak["lengths"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(lengths, ["32768", "65536"], "{leak}");
    assert!(allocated(&stored) > sizes[1]);
    b.run("dataset set v . compress=none compress-round=4K").code(2);
    b.run("dataset set v . compress=none").ok();
    b.run("dataset set v . compress-round=4K").code(2);
    b.run("rekey --full v").ok();
    b.run("check v").ok();
    assert!(allocated(&stored) >= 2 << 20);
    b.run("mount v m").ok();
    assert!(fs::read(m.join("words")).unwrap() == words && fs::read(m.join("random")).unwrap() == random);
    b.unmount("m");
}

/// With a tree over blocks a store is verified without a key: ciphertext, and the zeros behind it.
#[test]
fn scrubbed_without_a_key() {
    let b = Bench::new();
    b.run("init --names plain -b 64K --compress lz4 --tree-leaves blocks v").ok();
    let m = b.dir("m");
    b.run("mount v m").ok();
    fs::write(m.join("words"), text(1 << 20)).unwrap();
    b.unmount("m");
    b.run("mount v m").ok();
    fs::write(m.join("words"), text(1 << 20)).unwrap();
    b.unmount("m");
    b.run("scrub v").ok();
    b.run("check v").ok();
    // A byte where the store keeps none.
    crate::support::flip(&b.path("v/words"), 65536 + 65536 - 1);
    assert_ne!(b.run("scrub v").code, 0);
    assert_ne!(b.run("check v").code, 0);
}

#[test]
fn estimates() {
    let b = Bench::new();
    b.dir("plain");
    b.file("plain/words", &text(1 << 20));
    b.file("plain/twin", &text(1 << 20));
    b.file("plain/random", &noise(1 << 20, 3));
    let told = b.run("dedup-estimate --json -b 4K -b 64K --compress lz4 --compress zstd:9 plain").ok().json();
    for size in told["sizes"].as_array().unwrap() {
        let of = |n: usize| &size["compressed"][n];
        assert_eq!((&of(0)["compression"]["codec"], &of(1)["compression"]["level"]), (&"lz4".into(), &9.into()));
        let bytes = |n: usize, what: &str| of(n)["vault"][what].as_u64().unwrap();
        assert_eq!(bytes(0, "bytes"), size["vault"]["bytes"].as_u64().unwrap());
        let without = |n: usize| of(n)["without_zeros_bytes"].as_u64().unwrap();
        assert!(without(1) < without(0) && without(0) < size["vault"]["deduplicated_bytes"].as_u64().unwrap());
        // A page is what a store allocates: in blocks of one page nothing is saved.
        let saves = bytes(0, "deduplicated_bytes") < size["vault"]["deduplicated_bytes"].as_u64().unwrap();
        assert_eq!(saves, size["block_size"] == 65536, "{size}");
    }
    assert!(b.run("dedup-estimate --compress lz4 --compress zstd plain").ok().text().contains("zstd:3"));
    b.run("dedup-estimate --compress gzip plain").code(2);
    for plain in ["none", "integrity"] {
        b.run(&format!("dedup-estimate --compress lz4 --protect {plain} plain")).code(2).says("not compressed");
    }
}
