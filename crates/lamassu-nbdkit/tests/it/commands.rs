//! Volumes made, listed, resized, copied, destroyed: what the commands do and refuse.

use crate::lab::Lab;

#[test]
fn a_volume_from_its_making_to_its_end() {
    let lab = Lab::new();
    assert!(!lab.ok(&["volume", "list", "v"]).contains("vm"));
    lab.ok(&["volume", "create", "v", "vm1", "64M"]);
    lab.ok(&["volume", "create", "--block-size", "4096", "v", "vm2", "1T"]);
    lab.ok(&["volume", "snapshot", "v", "vm1", "first"]);
    lab.ok(&["volume", "clone", "v", "vm1@first", "vm3"]);
    lab.ok(&["volume", "resize", "v", "vm1", "128M"]);
    let list = lab.ok(&["volume", "list", "--json", "v"]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let shown: Vec<_> = list["volumes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| {
            (
                v["name"].as_str().unwrap(),
                v["size"].as_u64().unwrap(),
                v["block_size"].as_u64().unwrap(),
                v["snapshot"].as_bool().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            ("vm1", 128 << 20, 512, false),
            ("vm1@first", 64 << 20, 512, true),
            ("vm2", 1 << 40, 4096, false),
            ("vm3", 64 << 20, 512, false),
        ]
    );
    // Nothing was written yet: no volume takes space to speak of.
    assert!(list["volumes"].as_array().unwrap().iter().all(|v| v["stored_bytes"].as_u64().unwrap() < 1 << 20));
    let table = lab.ok(&["volume", "list", "v"]);
    assert!(table.contains("128 MiB") && table.contains("vm1@first"), "{table}");
    lab.ok(&["volume", "destroy", "v", "vm3"]);
    lab.ok(&["volume", "destroy", "--snapshots", "v", "vm1"]);
    assert_eq!(lab.ok(&["volume", "list", "v"]).lines().count(), 2);
    // What is left is sound, and a volume is a file.
    lab.ok(&["check", "v"]);
    assert!(lab.ok(&["ls", "-l", "v", ".lamassu-volumes"]).contains("vm2"));
}

#[test]
fn what_makes_no_sense_is_refused_and_changes_nothing() {
    let lab = Lab::new();
    lab.ok(&["volume", "create", "v", "a", "1M"]);
    lab.ok(&["volume", "snapshot", "v", "a", "s"]);
    let before = lab.ok(&["volume", "list", "--json", "v"]);
    for (code, words) in [
        (2, &["create", "v", "a/b", "1M"][..]),
        (2, &["create", "v", "b", "1000"]),
        (2, &["create", "v", "b", "0"]),
        (2, &["create", "v", "b", "2P"]),
        (2, &["create", "v", "b", "much"]),
        (2, &["create", "--block-size", "1024", "v", "b", "1M"]),
        (2, &["create", "--block-size", "4096", "v", "b", "512"]),
        (28, &["create", "v", "a", "1M"]),
        (28, &["create", "v", "b@s", "1M"]),
        (3, &["resize", "v", "b", "2M"]),
        (28, &["resize", "v", "a", "512"]),
        (28, &["resize", "v", "a@s", "2M"]),
        (3, &["snapshot", "v", "b", "s"]),
        (28, &["snapshot", "v", "a", "s"]),
        (28, &["snapshot", "v", "a@s", "t"]),
        (2, &["snapshot", "v", "a", "s/t"]),
        (3, &["clone", "v", "a@t", "b"]),
        (28, &["clone", "v", "a@s", "a"]),
        (28, &["destroy", "v", "a"]),
        (3, &["destroy", "v", "b"]),
        (6, &["list", "."]),
    ] {
        let words: Vec<&str> = ["volume"].iter().chain(words).copied().collect();
        lab.code(code, &words);
    }
    assert_eq!(lab.ok(&["volume", "list", "--json", "v"]), before);
    lab.ok(&["volume", "resize", "--shrink", "v", "a", "512"]);
    // A file that is no volume is told of, and not listed.
    let plain = lab.file("plain", b"x");
    lab.ok(&["cp", "v", &plain, "vault:.lamassu-volumes/odd"]);
    let (_, said) = lab.code(0, &["volume", "list", "v"]);
    assert!(said.contains("odd"), "{said}");
}
