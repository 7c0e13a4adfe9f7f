//! The golden vaults of `testdata/vaults`: every version of the program opens them, with every key, and finds the same
//! tree.

use crate::support::Bench;
use std::path::{Path, PathBuf};
use std::process::Command;

pub fn testdata() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/vaults")
}

pub fn unpack(name: &str, to: &Path) {
    let mut tar = Command::new("tar");
    tar.args(["--xattrs", "--xattrs-include=user.*", "--no-same-owner", "-xzf"]);
    let done = tar.arg(testdata().join(format!("{name}.tar.gz"))).arg("-C").arg(to).status().unwrap();
    assert!(done.success(), "{name}.tar.gz");
}

/// Every regular file and link under `dir`: path, and content or target.
fn tree(dir: &Path, below: &Path, found: &mut Vec<(PathBuf, Vec<u8>)>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), below.join(entry.file_name()));
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            tree(&path, &name, found);
        } else if kind.is_symlink() {
            use std::os::unix::ffi::OsStringExt;
            found.push((name, std::fs::read_link(&path).unwrap().into_os_string().into_vec()));
        } else if kind.is_file() {
            found.push((name, std::fs::read(&path).unwrap()));
        }
    }
}

fn sorted_tree(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    tree(dir, Path::new(""), &mut found);
    found.sort();
    found
}

#[test]
fn golden_vaults_open_for_ever_after() {
    let bench = Bench::new();
    let dir = bench.dir("golden");
    unpack("plain", &dir);
    let want = sorted_tree(&dir.join("plain"));
    assert!(want.len() > 10, "the plain tree has {} files", want.len());
    let of_domains = ["aes-file", "aes-none", "blake3-none", "chacha-file"];
    let compressed = ["aes-lz4", "blake3-zstd"];
    for suite in ["aes", "paper", "blake3", "chacha"].iter().chain(&of_domains).chain(&compressed) {
        let at = bench.dir(&format!("golden-{suite}"));
        unpack(suite, &at);
        let vault = at.join("vault");
        for key in ["raw", "hex", "passphrase"] {
            let source = format!("{key}:file:{}", testdata().join(format!("key.{key}")).display());
            let vault = vault.display().to_string();
            bench.run(&format!("check --key {source} {vault}")).ok();
            if key == "raw" {
                let out = bench.path(&format!("out-{suite}"));
                bench.run(&format!("cp -r --key {source} {vault} vault:/ {}", out.display())).ok();
                assert_eq!(sorted_tree(&out), want, "{suite}");
            }
        }
    }
}
