//! Options that make no sense, help, completions, speed.

use crate::mounts::kill;
use crate::support::Bench;
use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

#[test]
fn nonsense_is_a_usage_error_and_makes_nothing() {
    let b = Bench::new();
    for line in [
        "",
        "nosuch",
        "init",
        "init --block-size 5000 v",
        "init -b 2M v",
        "init -R 0 v",
        "init -R 63 v",
        "init --suite rot13 v",
        "init --outer shared v",
        "init --zone-key raw:file:key v",
        "init --names both v",
        "init --key nonsense v",
        "init --key raw:prompt v",
        "init --key passphrase:file v",
        "mount v",
        "mount --integrity some v m",
        "key remove v one",
        "cat v",
        "cp v a b",
        "cp v vault:a ./b c",
        "path --reverse --absolute v a",
        "speed --threads 0",
        "speed --block-size 512",
        "speed --block-size 3K",
        "speed --batch 0",
        "fly",
    ] {
        let ran = b.run(line).code(2);
        assert!(ran.out.is_empty(), "{line}: {}", ran.text());
        assert!(!b.path("v").exists(), "{line}");
    }
}

#[test]
fn what_looks_like_a_passphrase_is_not_repeated() {
    let b = Bench::new();
    for line in [
        "init --key hunter2 v",
        "init --key passphrase:hunter2 v",
        "mount -o key=hunter2 . /",
        "zone create -k hunter2 z",
    ] {
        let ran = b.run(line);
        assert!(ran.code != 0 && !ran.err.contains("hunter2"), "{line}: {}", ran.err);
    }
}

#[test]
fn help_explains_and_gives_examples() {
    let b = Bench::new();
    let top = b.run("--help").ok().text();
    for command in [
        "init",
        "zone",
        "mount",
        "umount",
        "key",
        "history",
        "info",
        "check",
        "inspect",
        "ls",
        "cat",
        "cp",
        "path",
        "freeze",
        "thaw",
        "speed",
        "selftest",
        "leak",
        "dedup-estimate",
        "completions",
    ] {
        assert!(top.contains(command), "{command}");
        let help = b.run(&format!("help {command}")).ok().text();
        assert!(matches!(command, "zone" | "key") || help.contains("Example"), "{command}: {help}");
    }
    for command in ["init", "mount", "key add", "zone create", "cat"] {
        assert!(b.run(&format!("{command} --help")).ok().text().contains("passphrase:file:PATH"), "{command}");
    }
    assert!(b.run("--version").ok().text().starts_with("lamassu "));
}

#[test]
fn completions_are_scripts() {
    let b = Bench::new();
    for shell in ["bash", "zsh", "fish"] {
        assert!(b.run(&format!("completions {shell}")).ok().text().contains("lamassu"));
    }
}

#[test]
fn speed_prints_rows() {
    let b = Bench::new();
    let rows = b.run("speed --ms 1 --suite aes --suite chacha --threads 1 --json").ok().json();
    let rows = rows.as_array().unwrap();
    assert!(rows.len() >= 6);
    for row in rows {
        let members: BTreeSet<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(members, ["gb_per_s", "kernel", "op", "suite", "threads"].into());
        assert!(["aes", "chacha"].contains(&row["suite"].as_str().unwrap()));
        assert!(["seal", "open", "open_unverified"].contains(&row["op"].as_str().unwrap()));
        assert!(row["gb_per_s"].is_f64() && row["threads"] == 1);
    }
    assert!(b.run("speed --ms 1 --suite blake3 --threads 1").ok().text().contains("open_unverified"));
    b.run("speed --block-size 512").code(2).says("from 1024 (1K)");
}

#[test]
fn speed_measures_no_kernel_twice() {
    let b = Bench::new();
    let rows = b.run_in("LAMASSU_CPU", Path::new("library"), "speed --ms 1 --suite aes --threads 1 --json").ok().json();
    let kernels: Vec<_> = rows.as_array().unwrap().iter().map(|row| row["kernel"].as_str().unwrap()).collect();
    assert_eq!(kernels, ["library"; 3]);
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let b = Bench::new();
    b.run("init v").ok();
    b.file("big", &vec![7; 3 << 20]);
    b.run("cp v big vault:").ok();
    let mut child = b
        .command(["cat", "v", "big"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let ran: crate::support::Ran = child.wait_with_output().unwrap().into();
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
}

#[test]
fn a_command_that_is_stopped_says_so() {
    let b = Bench::new();
    b.run("init v").ok();
    b.file("big", &vec![7; 3 << 20]);
    b.run("cp v big vault:").ok();
    let mut child = b
        .command(["cat", "v", "big"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // From now on it waits for somebody to read the rest.
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    kill(child.id() as i32, "-INT");
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(15));
    assert!(said.contains("stopped before the work was done"), "{said}");
}
