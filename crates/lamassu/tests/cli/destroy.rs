//! Assured delete: `lamassu key destroy` of one vault, and what a kill leaves of it. `destroy_elsewhere` is about keys
//! at servers and in tokens, `receipts` about what a receipt knows, `old_headers` about what is left in the store.

use crate::support::{Bench, Ran};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// A vault with a file, an audit key and its public half.
pub fn vault(b: &Bench) -> String {
    b.run("init v").ok();
    b.file("x", b"content");
    b.run("cp v x vault:").ok();
    b.key("audit");
    b.run("receipt key --audit-key raw:file:audit").ok().text().trim().into()
}

/// Destroys, with a receipt `r`; the vault is to be named.
pub const DESTROY: &str = "key destroy --yes --receipt r --audit-key raw:file:audit";

/// The receipt `r`, verified.
pub fn receipt(b: &Bench, public: &str) -> Value {
    b.run(&format!("receipt verify --json --audit-key {public} r")).ok().json()
}

/// Every secret string of a header: what its slots and its keychain wrap.
pub fn wrapped(header: &Path) -> Vec<String> {
    let header: Value = serde_json::from_slice(&std::fs::read(header).unwrap()).unwrap();
    let text = |v: &Value| v.as_str().unwrap().to_string();
    let slots = header["slots"].as_array().unwrap();
    slots.iter().map(|s| text(&s["wrapped"])).chain([text(&header["keychain"]["sealed"])]).collect()
}

/// How many pieces of 32 digits of those strings stand in some bytes.
pub fn found(strings: &[String], bytes: &[u8]) -> usize {
    let pieces: std::collections::HashSet<&[u8]> = strings.iter().flat_map(|s| s.as_bytes().chunks_exact(32)).collect();
    let mut seen = std::collections::HashSet::new();
    for window in bytes.windows(32) {
        // Noise is seldom hex digits.
        if window[0].is_ascii_hexdigit() && window[31].is_ascii_hexdigit() && pieces.contains(window) {
            seen.insert(window);
        }
    }
    seen.len()
}

#[test]
fn nothing_opens_the_vault_and_the_receipt_says_what_still_would() {
    let b = Bench::new();
    let public = vault(&b);
    let second = b.key("second");
    b.run(&format!("key add --use-only -n {second} --label second v")).ok();
    b.run("key backup -k raw:file:key v copy").ok();
    b.run("snapshot v monday").ok();
    let old = wrapped(&b.path("v/lamassu.vault"));
    std::fs::copy(b.path("v/lamassu.vault"), b.path("v/by-hand")).unwrap();
    std::fs::copy(b.path("v/lamassu.vault"), b.path("v/lamassu.vault.mine")).unwrap();

    // What is refused leaves the vault whole.
    b.run("key destroy v").code(2).says("--yes");
    b.run(&format!("key destroy --yes -k {second} v")).code(28).says("use-only");
    b.run("key destroy --yes -k raw:file:audit v").code(12);
    b.run("key destroy --yes --receipt r v").code(2);
    b.run("key destroy --yes --with-server v").code(2).says("kmip");
    b.run(&format!("{DESTROY} nowhere")).code(6);
    b.file("r.new", b"somebody's own");
    b.file("r", b"somebody's");
    b.run(&format!("{DESTROY} v")).code(24).says("exists already");
    std::fs::remove_file(b.path("r")).unwrap();
    b.run("ls v").ok();

    b.run(&format!("{DESTROY} v")).ok().says("are destroyed").says("by-hand").says("snapshot");
    b.dir("m");
    for line in [
        "ls v",
        "cat v x",
        "info v",
        "key list v",
        "key epochs v",
        "key rotate --outer v",
        "key add -n raw:file:second v",
        "key backup v c2",
        "history v",
        "check v",
        "leak v",
        "rekey --full v",
        "key renew v",
        "key admin show v",
        "mount v m",
        "clone v w",
        "inspect v x",
        "path v x",
        "cp v x vault:",
        "key destroy --yes v",
    ] {
        b.run(line).code(52).says("its keys were destroyed on 20").says("receipt ");
    }
    for file in std::fs::read_dir(b.path("v")).unwrap() {
        let path = file.unwrap().path();
        if path.is_file() && !path.ends_with("by-hand") {
            assert_eq!(found(&old, &std::fs::read(&path).unwrap()), 0, "{path:?}");
        }
    }
    assert!(!b.path("v/lamassu.vault.mine").exists());

    assert_eq!(std::fs::read(b.path("r.new")).unwrap(), b"somebody's own");
    let r = receipt(&b, &public);
    let header: Value = serde_json::from_slice(&std::fs::read(b.path("v/lamassu.vault")).unwrap()).unwrap();
    assert_eq!((&r["complete"], &r["id"]), (&true.into(), &header["destroyed"]["receipt"]));
    assert_eq!((&r["vault"], &r["time"]), (&header["id"], &header["destroyed"]["time"]));
    assert!(r["path"].as_str().unwrap().ends_with("/v") && r["stored_bytes"].as_u64().unwrap() >= 4096);
    let epochs: Vec<_> =
        r["epochs"].as_array().unwrap().iter().map(|e| (e["key"].clone(), e["epoch"].clone())).collect();
    assert_eq!(epochs, [("inner".into(), 1.into()), ("outer".into(), 1.into())]);
    assert_eq!((&r["slots"][1]["label"], &r["slots"][1]["kind"]), (&"second".into(), &"raw".into()));
    let backup = &r["backups"][0];
    assert!(backup["file"].as_str().unwrap().ends_with("/copy") && backup["slots"] == "1, 2", "{backup}");
    assert!(backup["now"].as_str().unwrap().contains("opens the vault"), "{backup}");
    assert_eq!((&r["clones"][0]["kind"], &r["copies_beside"][0]), (&"snapshot".into(), &"by-hand".into()));
    let erased: Vec<_> = r["erased"].as_array().unwrap().iter().map(|e| e["file"].as_str().unwrap()).collect();
    assert_eq!(erased, ["lamassu.vault.mine", "lamassu.vault.replacing"]);
    assert!(r["history"]["verified"] == true && r["cannot_know"].as_array().unwrap().len() >= 4);
    let shown = b.run(&format!("receipt verify --audit-key {public} r")).ok().text();
    assert!(shown.contains("/copy") && shown.contains("slot 2: raw") && shown.contains("snapshot"), "{shown}");

    // The receipt told the truth: the recorded copy opens it again.
    b.run("key restore copy v").ok().says("destroyed");
    assert_eq!(b.run("cat v x").ok().out, b"content");
    b.run("history v").ok();
    b.run("ls monday").ok();

    // Another's signature, or another word, is found.
    b.run(&format!("receipt verify --audit-key {} r", "ab".repeat(32))).code(26).says("signed by");
    let text = std::fs::read_to_string(b.path("r")).unwrap();
    b.file("r", text.replace("\"complete\": true", "\"complete\": false").as_bytes());
    b.run(&format!("receipt verify --audit-key {public} r")).code(26).says("does not verify");
}

/// What is printed when all is done may be lost: there is no receipt but in a file, which is there before.
#[test]
fn a_receipt_is_a_file() {
    let b = Bench::new();
    vault(&b);
    b.run("dataset create v d").ok();
    for line in ["key destroy --yes", "dataset destroy --shred-key --yes"] {
        b.run(&format!("{line} --audit-key raw:file:audit v")).code(2).says("--receipt");
    }
    assert_eq!(b.run("ls v").ok().text(), "d\nx\n");
}

/// Whoever can write to the store can say that keys were destroyed; the administrator has not signed that.
#[test]
fn a_forged_destruction_is_told_from_a_true_one() {
    let b = Bench::new();
    b.run("init v").ok();
    let path = b.path("v/lamassu.vault");
    let mut header: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    header["slots"] = serde_json::json!([]);
    header["destroyed"] = serde_json::json!({"time": 1, "receipt": "ab".repeat(16)});
    std::fs::write(&path, header.to_string()).unwrap();
    b.run("ls v").code(50).says("signature");

    // Nor does it lead to a receipt, or to the end of what might help: the copies beside it.
    b.key("audit");
    b.file("v/lamassu.vault.replaced", b"kept");
    b.run(&format!("{DESTROY} v")).code(50).says("signature");
    b.run("key destroy --yes v").code(50);
    assert!(!b.path("r").exists());
    assert_eq!(std::fs::read(b.path("v/lamassu.vault.replaced")).unwrap(), b"kept");
}

#[test]
fn a_vault_in_use_is_not_destroyed() {
    let b = Bench::new();
    vault(&b);
    b.dir("m");
    for how in ["", "--read-only "] {
        b.run(&format!("mount {how}v m")).ok();
        b.run(&format!("{DESTROY} v")).code(11).says("mounted");
        b.run(&format!("{DESTROY} m")).code(11).says("mounted");
        b.unmount("m");
    }
    assert!(!b.path("r").exists());
    b.run("ls v").ok();
}

/// A dataset can be mounted by its own directory in the store, where its daemon can give it a slot.
#[test]
fn a_vault_whose_dataset_is_in_use_is_not_destroyed() {
    let b = Bench::new();
    vault(&b);
    b.run("dataset create v p").ok();
    let p = b.stored_path("v", "p");
    b.dir("m");
    for how in ["", "--read-only ", "-o fsname=else "] {
        b.run(&format!("mount {how}v/{p} m")).ok();
        b.run(&format!("{DESTROY} v")).code(11).says("mounted");
        b.unmount("m");
    }
    assert!(!b.path("r").exists());
    b.run("ls v").ok();
    b.run(&format!("{DESTROY} v")).ok();
    b.run(&format!("ls v/{p}")).code(52);
}

/// While a person is asked, a dataset gets a slot: it is named, and the person is asked again.
#[test]
fn a_dataset_that_opens_since_the_question_is_asked_about() {
    use std::io::{Read, Write};
    use std::process::Stdio;
    let b = Bench::new();
    let public = vault(&b);
    b.run("dataset create v p").ok();
    let p = b.stored_path("v", "p");
    let second = b.key("second");
    // script(1) has a terminal for it.
    let plain = b.command(["x"]);
    let mut script = Command::new("script");
    script.args(["-qec", &format!("\"$L\" {} v", DESTROY.replace("--yes ", "")), "/dev/null"]);
    script.envs(plain.get_envs().filter_map(|(k, v)| Some((k, v?)))).env("L", plain.get_program());
    script.current_dir(b.path("")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = script.spawn().expect("script");
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut until = |words: &str| {
        let (mut said, mut byte) = (Vec::new(), [0]);
        while !said.ends_with(words.as_bytes()) {
            assert_ne!(output.read(&mut byte).unwrap(), 0, "{}", String::from_utf8_lossy(&said));
            said.push(byte[0]);
        }
        String::from_utf8(said).unwrap()
    };
    let asked = until("Type destroy to go on:");
    assert!(!asked.contains(&p), "{asked}");
    b.run(&format!("key add -n {second} v/{p}")).ok();
    input.write_all(b"destroy\n").unwrap();
    let again = until("Type destroy to go on:");
    assert!(again.contains("have changed") && again.contains(&p), "{again}");
    input.write_all(b"destroy\n").unwrap();
    until("are destroyed");
    assert!(child.wait().unwrap().success());
    assert_eq!(receipt(&b, &public)["datasets"][0]["stored"], p.as_str());
    b.run(&format!("ls -k {second} v/{p}")).ok();
}

/// A destruction of a dataset that was cut off leaves the old header, whose slots open the dataset.
#[test]
fn a_dataset_whose_destruction_is_not_finished_opens() {
    let b = Bench::new();
    let public = vault(&b);
    let own = b.key("own");
    b.run(&format!("dataset create --new-key {own} v p")).ok();
    let p = b.stored_path("v", "p");
    let read = |name: &str| std::fs::read(b.path(&format!("v/{p}/lamassu.vault{name}"))).unwrap_or_default();
    let opens = |header: &[u8]| serde_json::from_slice::<Value>(header).is_ok_and(|h| h["slots"][0].is_object());
    let cut_off = (1..40).any(|n| {
        killed_at(&b, &format!("key destroy --yes -k {own} v/{p}"), "fsync", n);
        !opens(&read(""))
    });
    assert!(cut_off && opens(&read(".replacing")));
    b.run(&format!("{DESTROY} v")).ok().says("opens without it").says(&p);
    assert_eq!(receipt(&b, &public)["datasets"][0]["stored"], p.as_str());
}

/// A restore that was cut off leaves a header that opens, where the next destruction has to find it; and none of its
/// links leads that to the header in place.
#[test]
fn what_a_restore_left_after_a_destruction_is_erased() {
    let b = Bench::new();
    vault(&b);
    b.run("key backup v copy").ok();
    let old = wrapped(&b.path("v/lamassu.vault"));
    b.run("key destroy --yes v").ok();
    let holds_keys = || {
        let files = std::fs::read_dir(b.path("v")).unwrap().map(|file| file.unwrap().path());
        files.filter(|path| path.is_file()).any(|path| found(&old, &std::fs::read(&path).unwrap()) > 0)
    };
    assert!(!holds_keys());
    let (mut left, mut linked) = (0, 0);
    for (call, n) in ["rename", "fsync", "link", "linkat", "unlink"].iter().flat_map(|c| (1..8).map(move |n| (*c, n))) {
        let step = format!("{call} {n}");
        killed_at(&b, "key restore copy v", call, n);
        let is_restored = b.run("ls v").code == 0;
        left += usize::from(!is_restored && holds_keys());
        linked += usize::from(!is_restored && b.path("v/lamassu.vault.replaced").exists());
        let again = b.run("key destroy --yes v");
        assert!([0, 52].contains(&again.code), "{step}: {}", again.err);
        assert!(!holds_keys(), "{step}");
        b.run("ls v").code(52);
    }
    assert!(left > 1 && linked > 1, "{left} {linked}");
}

/// The old header cannot be opened when a destruction that was cut off is run again: that is not the end of it.
#[test]
fn an_error_of_the_store_does_not_pass_for_the_end() {
    let b = Bench::new();
    vault(&b);
    let old = wrapped(&b.path("v/lamassu.vault"));
    let is_cut_off = |n| {
        killed_at(&b, "key destroy --yes v", "fsync", n);
        b.run("ls v").code == 52
    };
    assert!((1..40).any(is_cut_off));
    let left = b.path("v/lamassu.vault.replacing");
    let at = left.display().to_string();
    let again = straced(
        &b,
        "key destroy --yes v",
        &["-o", "/dev/null", "-P", &at, "-P", "v/lamassu.vault.replacing", "-e", "inject=open,openat:error=EIO"],
    );
    assert!(![0, 52].contains(&again.code), "{} {}", again.code, again.err);
    assert!(found(&old, &std::fs::read(&left).unwrap()) > 0);
    b.run("key destroy --yes v").ok();
    b.run("key destroy --yes v").code(52);
}

/// A store that could not make the second name now, but has hard links: the only name of the header is not risked.
#[test]
fn an_old_header_that_cannot_be_kept_is_not_destroyed() {
    let b = Bench::new();
    vault(&b);
    let options = ["-o", "/dev/null", "-e", "trace=link,linkat", "-e", "inject=link,linkat:error=ENOSPC"];
    let failed = straced(&b, "key destroy --yes v", &options).says("No space left");
    assert_ne!(failed.code, 0);
    b.run("ls v").ok();
    b.run("key destroy --yes v").ok();
}

/// Killed before each of its system calls that change anything: the vault is whole then, or the next run finishes.
#[test]
fn a_kill_at_any_step_leaves_it_whole_or_to_be_finished() {
    killed_at_each_step(&format!("{DESTROY} v"));
}

/// The same where no receipt remembers what was begun.
#[test]
#[ignore = "takes half a minute; make torture runs it"]
fn a_kill_without_a_receipt_too() {
    killed_at_each_step("key destroy --yes v");
}

/// Runs a line that is killed at the nth of some system call.
pub fn killed_at(b: &Bench, line: &str, call: &str, n: usize) -> Ran {
    injected_at(b, line, call, n, "signal=KILL")
}

/// Runs a line whose nth system call of some kind goes as strace(1) is told.
pub fn injected_at(b: &Bench, line: &str, call: &str, n: usize, what: &str) -> Ran {
    straced(
        b,
        line,
        &["-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &format!("inject={call}:{what}:when={n}")],
    )
}

/// Runs a line under strace(1) with these options.
pub fn straced(b: &Bench, line: &str, options: &[&str]) -> Ran {
    let plain = b.command(line.split_whitespace());
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qqq"]).args(options).arg(plain.get_program()).args(plain.get_args());
    strace.current_dir(plain.get_current_dir().unwrap()).envs(plain.get_envs().filter_map(|(k, v)| Some((k, v?))));
    strace.output().expect("strace: run scripts/setup").into()
}

fn killed_at_each_step(line: &str) {
    const CALLS: [&str; 14] = [
        "write",
        "pwrite64",
        "fsync",
        "ftruncate",
        "rename",
        "renameat",
        "renameat2",
        "link",
        "linkat",
        "unlink",
        "unlinkat",
        "fallocate",
        "fchmod",
        "fchown",
    ];
    let (mut whole, mut to_finish, mut finished) = (0, 0, 0);
    // strace counts each call on its own.
    let mut points = CALLS.iter().flat_map(|call| (1..100).map(move |n| (*call, n))).peekable();
    while let Some((call, n)) = points.next() {
        let step = format!("{call} {n}");
        let b = Bench::new();
        let public = vault(&b);
        let old = wrapped(&b.path("v/lamassu.vault"));
        b.run("key backup v copy").ok();
        b.run("key restore copy v").ok();
        assert!(b.path("v/lamassu.vault.replaced").exists());
        let done = killed_at(&b, line, call, n).code == 0;
        match b.run("ls v") {
            Ran { code: 0, .. } => {
                whole += 1;
                // What a cut-off run has left of a receipt says that nothing was done, and is not in the way.
                if b.path("r").exists() {
                    assert_eq!(receipt(&b, &public)["complete"], false);
                }
                b.run(line).ok();
            }
            opened => {
                opened.code(52);
                match b.run(line) {
                    Ran { code: 0, .. } => to_finish += 1,
                    again => {
                        again.code(52);
                        finished += 1;
                    }
                }
            }
        }
        if line.contains("--receipt") {
            assert_eq!(receipt(&b, &public)["complete"], true, "step {step}");
            assert_eq!(receipt(&b, &public)["slots"][0]["id"], 1, "step {step}");
        }
        b.run("ls v").code(52);
        for file in std::fs::read_dir(b.path("v")).unwrap() {
            let path = file.unwrap().path();
            if path.is_file() {
                assert_eq!(found(&old, &std::fs::read(&path).unwrap()), 0, "step {step}: {path:?}");
            }
        }
        if done {
            while points.next_if(|(same, _)| *same == call).is_some() {}
        }
    }
    assert!(whole > 5 && to_finish > 5 && finished >= 1, "{whole} {to_finish} {finished}");
}
