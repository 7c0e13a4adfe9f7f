//! Deduplication domains: what `init` takes, and what each lets the store see, through real mounts.

use crate::support::{Bench, noise};
use std::collections::HashSet;
use std::fs;

const B: usize = 4096;

/// The data blocks of a vault's file as they are in the store. (With the default reserve a page stands before every
/// 116.)
fn blocks(b: &Bench, vault: &str, name: &str) -> Vec<Vec<u8>> {
    let stored = fs::read(b.stored(vault, name)).unwrap();
    stored.chunks(B).enumerate().filter(|(n, _)| n % 117 != 0).map(|(_, block)| block.to_vec()).collect()
}

#[test]
fn init_takes_what_fits_together() {
    let b = Bench::new();
    let zone_key = b.key("zone.key");
    b.run(&format!("zone create -k {zone_key} z.zone")).ok();
    for refused in [
        "--domain folder",
        "--domain file --suite paper",
        "--domain none --suite paper",
        "--domain none --small-files convergent",
        &format!("--domain family --zone z.zone --zone-key {zone_key}"),
        &format!("--domain file --zone z.zone --zone-key {zone_key}"),
    ] {
        b.run(&format!("init {refused} refused")).code(2);
        assert!(!b.path("refused").exists(), "{refused}");
    }
    for (n, (options, domain, small_files)) in [
        ("", "zone", "convergent"),
        ("--domain zone", "zone", "convergent"),
        ("--domain family --suite paper", "family", "convergent"),
        ("--domain file", "file", "random"),
        ("--domain none --suite chacha --small-files random", "none", "random"),
    ]
    .into_iter()
    .enumerate()
    {
        let made = b.run(&format!("init --json {options} v{n}")).ok().json();
        let info = b.run(&format!("info --json v{n}")).ok().json();
        for shown in [&made, &info] {
            assert_eq!((&shown["domain"], &shown["small_files"]), (&domain.into(), &small_files.into()), "{options}");
            assert_eq!(shown["private_zone"], true, "{options}");
        }
        assert!(b.run(&format!("info v{n}")).ok().text().contains(&format!("domain        {domain}\n")));
        // Left out where it is the widest: such headers are what they always were.
        let header = fs::read_to_string(b.path(&format!("v{n}/lamassu.vault"))).unwrap();
        assert_eq!(header.contains("\"domain\""), domain != "zone", "{options}");
    }
    // The member is under the MAC, and nobody narrows or widens it later.
    let path = b.path("v3/lamassu.vault");
    let header = fs::read_to_string(&path).unwrap();
    fs::write(&path, header.replace("\"domain\": \"file\"", "\"domain\": \"none\"")).unwrap();
    b.run("ls v3").code(23);
}

/// Two equal files and one that is written over, copied, renamed and cloned: readable everywhere, and equal where the
/// domain says so.
#[test]
fn what_the_store_sees() {
    for domain in ["zone", "family", "file", "none"] {
        let b = Bench::new();
        let salted = ["file", "none"].contains(&domain);
        b.run(&format!("init --anchor none --names plain --domain {domain} v")).ok();
        let mnt = b.dir("mnt");
        b.run("mount v mnt").ok();
        let bytes = noise(B, 1).repeat(40);
        fs::write(mnt.join("a"), &bytes).unwrap();
        fs::write(mnt.join("b"), &bytes).unwrap();
        fs::write(mnt.join("small"), b"equal").unwrap();
        fs::write(mnt.join("same"), b"equal").unwrap();
        // copy_file_range(2), which shares the blocks where it may.
        fs::copy(mnt.join("a"), mnt.join("copy")).unwrap();
        assert!(fs::read(mnt.join("copy")).unwrap() == bytes, "{domain}");
        fs::rename(mnt.join("b"), mnt.join("renamed")).unwrap();
        b.unmount("mnt");

        let (a, other, copy) = (blocks(&b, "v", "a"), blocks(&b, "v", "renamed"), blocks(&b, "v", "copy"));
        assert_eq!(
            (a.len(), a.iter().collect::<HashSet<_>>().len()),
            (40, if domain == "none" { 40 } else { 1 }),
            "{domain}"
        );
        assert_eq!(a == other, !salted, "{domain}: equal files");
        assert_eq!(a == copy, !salted, "{domain}: a copy by the mount");
        let small = |name: &str| fs::read(b.stored("v", name)).unwrap();
        assert_eq!(small("small") == small("same"), !salted, "{domain}: equal small files");

        // Whatever the backing file is called, and whoever has copied it: it says itself what it is.
        fs::rename(b.path("v/renamed"), b.path("v/moved in the store")).unwrap();
        fs::copy(b.path("v/a"), b.path("v/restored")).unwrap();
        assert!(b.command(["cat", "v", "moved in the store"]).output().unwrap().stdout == bytes, "{domain}");
        assert!(b.run("cat v restored").ok().out == bytes, "{domain}");
        b.run("check v").ok();

        // A clone is of the same family: it reads all, and goes on in the same domain.
        b.run("clone v w").ok();
        assert_eq!(b.run("info --json w").ok().json()["domain"], domain);
        assert!(b.run("cat w a").ok().out == bytes && blocks(&b, "w", "a") == a, "{domain}");
        b.file("plain", &bytes);
        b.run("cp w plain vault:/new").ok();
        assert_eq!(blocks(&b, "w", "new") == a, !salted, "{domain}: the same content in a clone's new file");

        // Everything under new keys, and the old ones gone: the salt stays.
        b.run("key rotate --inner v").ok();
        b.run("rekey --full v").ok();
        b.run("key retire --inner 1 v").ok();
        b.run("check v").ok();
        assert!(b.run("cat v copy").ok().out == bytes && blocks(&b, "v", "copy") != copy, "{domain}");
    }
}

/// A file that is read at random has windows of it verified ahead, and one that is written in place at the same place
/// has its old blocks again.
#[test]
fn random_access_in_the_narrowest_domain() {
    use std::os::unix::fs::FileExt;
    let b = Bench::new();
    b.run("init --domain none --suite blake3 v").ok();
    let mnt = b.dir("mnt");
    b.run("mount v mnt").ok();
    let bytes = noise(300 * B, 5);
    fs::write(mnt.join("f"), &bytes).unwrap();
    b.unmount("mnt");
    let before = blocks(&b, "v", "f");
    b.run("mount v mnt").ok();
    let file = fs::File::open(mnt.join("f")).unwrap();
    for i in 0..200 {
        let at = i * 7919 % (300 * B - 100);
        let mut back = [0; 100];
        file.read_exact_at(&mut back, at as u64).unwrap();
        assert!(back == bytes[at..at + 100], "{at}");
    }
    drop(file);
    let file = fs::File::options().write(true).open(mnt.join("f")).unwrap();
    file.write_all_at(&[9; 3 * B], 10 * B as u64).unwrap();
    file.sync_all().unwrap();
    file.write_all_at(&bytes[10 * B..13 * B], 10 * B as u64).unwrap();
    drop(file);
    b.unmount("mnt");
    assert!(blocks(&b, "v", "f") == before, "the same content in the same place is the same in the store");
    assert!(b.run("cat v f").ok().out == bytes);
}
