//! leak, dedup-estimate and selftest: what they say is so.

use crate::support::{Bench, noise};
use std::fs;
use std::os::unix::fs::FileExt;

#[test]
fn leak_sees_what_the_store_shows() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("data/inner");
    let blocks = noise(10 * 4096, 1);
    b.file("data/a", &blocks);
    b.file("data/b", &[&blocks[..], &blocks[..4096]].concat());
    b.file("data/inner/small", b"equal");
    b.file("data/inner/other", b"equal");
    std::os::unix::fs::symlink("a", b.path("data/link")).unwrap();
    b.run("cp -r v data vault:/").ok();
    // Without a key, and from a copy: nothing but the store is read.
    let copied = std::process::Command::new("cp").args(["-a", "v", "w"]).current_dir(b.path("")).status().unwrap();
    assert!(copied.success());
    let leak = b.command(["leak", "--json", "w"]).env_remove("LAMASSU_KEY").output().unwrap();
    let leak = crate::support::Ran::from(leak).ok().json();
    assert_eq!(leak["entries"]["files"], 4);
    assert_eq!(leak["entries"]["directories"], 2);
    assert_eq!(leak["entries"]["symbolic_links"], 1);
    assert_eq!(leak["tree"]["depth_max"], 2);
    let equal = &leak["equal_blocks"];
    assert_eq!((&equal["count"], &equal["distinct"]), (&21.into(), &10.into()));
    assert_eq!((&equal["repeated"], &equal["most"]), (&10.into(), &3.into()));
    let pages = &leak["equal_pages"];
    assert_eq!((&pages["count"], &pages["distinct"], &pages["most"]), (&4.into(), &3.into(), &2.into()));
    assert_eq!(leak["names"]["plain"], false);
    assert_eq!(leak["unreadable"], 0);
    assert!(leak["times"]["oldest"].as_i64() <= leak["times"]["newest"].as_i64());
    assert!(b.run("leak v").ok().text().contains("21 data blocks, 10 different"));
    b.run("leak data").code(6);
}

/// A hole takes no longer for being large, and counts as its blocks do one by one.
#[test]
fn leak_takes_a_hole_in_one_step() {
    let b = Bench::new();
    b.run("init v").ok();
    b.file("a", &noise(10 * 4096, 3));
    b.run("cp v a vault:").ok();
    let path = b.stored("v", "a");
    let stored = std::fs::File::options().write(true).open(&path).unwrap();
    let leak = || b.run("leak --json v").ok().json();
    let hole = |leak: &serde_json::Value| leak["sizes"]["hole_bytes"].as_u64().unwrap();
    let before = leak();
    let len = stored.metadata().unwrap().len();
    assert_eq!(len % 4096, 0, "the hole begins where a block does");
    stored.set_len(len + 3 * 4096 + 100).unwrap();
    assert_eq!(hole(&leak()), hole(&before) + 3 * 4096 + 100);
    stored.set_len(1 << 40).unwrap();
    let large = leak();
    // The first block of a segment is for pages, and no hole.
    let inspected = b.run("inspect --json --slots v a").ok().json();
    let pages = &inspected["pages"];
    let segment = pages[1]["offset"].as_u64().unwrap();
    let segments = (1_u64 << 40).div_ceil(segment);
    assert_eq!(hole(&large), hole(&before) + (1 << 40) - len - (segments - 1) * 4096);
    assert_eq!((&large["equal_blocks"], &large["equal_pages"]), (&before["equal_blocks"], &before["equal_pages"]));
    assert_eq!((&large["sizes"]["bytes"], &large["unreadable"]), (&(1_u64 << 40).into(), &0.into()));
}

/// What is predicted is what a vault then has: blocks and pages, all and different ones.
#[test]
fn an_estimate_is_what_the_vault_turns_out_to_be() {
    let b = Bench::new();
    b.dir("data/d");
    let blocks = noise(300 * 4096, 2);
    for (name, bytes) in [
        ("twice", [&blocks[..], &blocks[..]].concat()),
        ("long", [&blocks[..200 * 4096], &[7; 4096 * 50], b"tail"].concat()),
        ("full-page", blocks[..116 * 4096].to_vec()),
        ("tail-in-block", [&blocks[..100 * 4096], &blocks[..4000]].concat()),
        ("d/small", blocks[..1000].to_vec()),
        ("d/same", blocks[..1000].to_vec()),
        ("d/empty", Vec::new()),
    ] {
        b.file(&format!("data/{name}"), &bytes);
    }
    let sparse = std::fs::File::create(b.path("data/sparse")).unwrap();
    sparse.write_all_at(&blocks[..8192], 1 << 20).unwrap();
    sparse.set_len(2 << 20).unwrap();
    let mut saved = Vec::new();
    for (size, domain) in [("4K", "zone"), ("16K", "family"), ("4K", "file"), ("16K", "file"), ("4K", "none")] {
        let estimate = b.run(&format!("dedup-estimate --json -b {size} --domain {domain} --memory 1 data")).ok().json();
        assert_eq!((&estimate["files"], &estimate["domain"]), (&8.into(), &domain.into()));
        let vault = &estimate["sizes"][0]["vault"];
        let dir = format!("v{size}-{domain}");
        b.run(&format!("init -b {size} --domain {domain} {dir}")).ok();
        b.run(&format!("cp -r {dir} data vault:/")).ok();
        let leak = b.run(&format!("leak --json {dir}")).ok().json();
        assert!(b.run(&format!("leak {dir}")).ok().text().contains(&format!("{domain}: ")));
        assert_eq!(vault["blocks"], leak["equal_blocks"]["count"], "{size}");
        assert_eq!(vault["distinct_blocks"], leak["equal_blocks"]["distinct"], "{size}");
        let block = estimate["sizes"][0]["block_size"].as_u64().unwrap();
        let pages = leak["equal_pages"]["count"].as_u64().unwrap();
        assert_eq!(vault["page_bytes"].as_u64().unwrap(), pages * 4096, "{size}");
        assert_eq!(vault["bytes"].as_u64().unwrap(), vault["blocks"].as_u64().unwrap() * block + pages * 4096);
        let distinct = leak["equal_pages"]["distinct"].as_u64().unwrap() * 4096
            + leak["equal_blocks"]["distinct"].as_u64().unwrap() * block;
        assert_eq!(vault["deduplicated_bytes"].as_u64().unwrap(), distinct, "{size}");
        saved.push(vault["saved"].as_f64().unwrap());
    }
    assert!(saved[0] > saved[2] && saved[2] > saved[4] && saved[4] == 0.0, "{saved:?}");
    b.run("dedup-estimate nosuch").code(1);
    // What lies below several of the paths is stored once.
    let files = |paths: &str| b.run(&format!("dedup-estimate --json -b 4K {paths}")).ok().json()["files"].clone();
    assert_eq!(files("data data data/d"), files("data"));
    b.run("dedup-estimate -b 5000 data").code(2);
    assert!(b.run("dedup-estimate data").ok().text().contains("128 KiB"));
}

/// Of files of each profile, written through a mount: what the store shows of them, and that an estimate of the same
/// data says so.
#[test]
fn profiles_leak_and_deduplicate_as_they_are_told_to() {
    const BLOCKS: u64 = 20;
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    let lines: Vec<u8> = (0..BLOCKS * 256).flat_map(|line| format!("{line:15}\n").into_bytes()).collect();
    for (dir, chosen) in [("usual", ""), ("random", "--block-keys random"), ("open", "--protect integrity")] {
        b.dir(&format!("m/{dir}"));
        if !chosen.is_empty() {
            b.run(&format!("profile set {chosen} m {dir}")).ok();
        }
        b.file(&format!("m/{dir}/a"), &lines);
        b.file(&format!("m/{dir}/b"), &lines);
        fs::create_dir_all(b.path(&format!("data/{dir}"))).unwrap();
        b.file(&format!("data/{dir}/a"), &lines);
        b.file(&format!("data/{dir}/b"), &lines);
    }
    b.unmount("m");
    let leak = b.run("leak --profiles --json v").ok().json();
    let estimate = b.run("dedup-estimate --profiles --json -b 4K data/usual").ok().json();
    let estimates = &estimate["sizes"][0]["profiles"];
    assert_eq!(estimate["sizes"][0]["vault"], estimates[0]["vault"]);
    let own = [BLOCKS, BLOCKS, 2 * BLOCKS];
    let expected = [("both", "zone", 0), ("integrity", "everywhere", 2 * BLOCKS), ("both", "file", 0)];
    let rows = leak["profiles"].as_array().unwrap();
    assert_eq!((rows.len(), &leak["profile_unknown"]), (3, &0.into()), "{leak}");
    for (row, ((protect, within, plain), (own, estimated))) in
        rows.iter().zip(expected.into_iter().zip(own.into_iter().zip([0, 2, 1])))
    {
        assert_eq!((&row["protect"], &row["equal_within"]), (&protect.into(), &within.into()), "{row}");
        assert_eq!((&row["files"], &row["changing"], &row["plain_blocks"]), (&2.into(), &0.into(), &plain.into()));
        assert!(row["bytes"].as_u64().unwrap() > 2 * BLOCKS * 4096);
        let equal = &row["equal_blocks"];
        assert_eq!((&equal["count"], &equal["distinct"]), (&(2 * BLOCKS).into(), &own.into()), "{row}");
        let of = &estimates[estimated];
        assert_eq!((&of["vault"]["blocks"], &of["vault"]["distinct_blocks"]), (&equal["count"], &equal["distinct"]));
        let to_plain = if plain > 0 { BLOCKS * 4096 } else { 0 };
        assert_eq!((of["protect"][0].as_str(), &of["equal_to_plain_bytes"]), (Some(protect), &to_plain.into()), "{of}");
    }
    assert_eq!((&rows[1]["block_keys"], &rows[2]["block_keys"]), (&serde_json::Value::Null, &"random".into()));
    let told = b.run("leak --profiles v").ok().text();
    assert!(told.contains("40 plain to see") && told.contains("equal to plain data"), "{told}");
    assert!(b.run("dedup-estimate --profiles data").ok().text().contains("integrity, none"));
    // Neither is for nothing: a key that is not asked for, a profile that is chosen.
    b.run("leak -k raw:file:key v").code(2).says("--profiles");
    b.run("dedup-estimate --profiles --protect none data").code(2);
    assert!(b.run("leak --json v").ok().json()["profiles"].is_null());
}

#[test]
fn the_selftest_names_every_primitive() {
    let b = Bench::new();
    let rows = b.run("selftest --json").ok().json();
    let rows = rows.as_array().unwrap();
    assert!(rows.iter().all(|row| row["passed"] == true));
    for name in
        ["SHA-256", "AES-256-CBC", "Argon2id", "Ed25519", "XAES-256-GCM", "suite aes", "suite chacha", "getrandom"]
    {
        assert!(rows.iter().any(|row| row["primitive"] == name), "{name}");
    }
    assert!(b.run("selftest").ok().text().contains("passed"));
}
