//! Assured delete: `lamassu key destroy`, its receipt, what is left in the store, and what it does at servers and in
//! tokens.

use crate::support::{Bench, Ran};
use crate::tokens::Hsm;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// A vault with a file, an audit key and its public half.
fn vault(b: &Bench) -> String {
    b.run("init v").ok();
    b.file("x", b"content");
    b.run("cp v x vault:").ok();
    b.key("audit");
    b.run("receipt key --audit-key raw:file:audit").ok().text().trim().into()
}

const DESTROY: &str = "key destroy --yes --receipt r --audit-key raw:file:audit";

fn receipt(b: &Bench, public: &str) -> Value {
    b.run(&format!("receipt verify --json --audit-key {public} r")).ok().json()
}

/// Every secret string of a header: what its slots and its keychain wrap.
fn wrapped(header: &Path) -> Vec<String> {
    let header: Value = serde_json::from_slice(&std::fs::read(header).unwrap()).unwrap();
    let text = |v: &Value| v.as_str().unwrap().to_string();
    let slots = header["slots"].as_array().unwrap();
    slots.iter().map(|s| text(&s["wrapped"])).chain([text(&header["keychain"]["sealed"])]).collect()
}

/// How many pieces of 32 digits of those strings stand in some bytes.
fn found(strings: &[String], bytes: &[u8]) -> usize {
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
    assert_eq!((&r["slots"][1]["label"], &r["slots"][1]["use_only"]), (&"second".into(), &true.into()));
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

/// Killed before each of its system calls that change anything: the vault is whole then, or the next run finishes.
#[test]
fn a_kill_at_any_step_leaves_it_whole_or_to_be_finished() {
    killed_at_each_step(&format!("{DESTROY} v"));
}

/// The same where no receipt remembers what was begun.
#[test]
fn a_kill_without_a_receipt_too() {
    killed_at_each_step("key destroy --yes v");
}

/// Runs a line that is killed at the nth of some system call.
fn killed_at(b: &Bench, line: &str, call: &str, n: usize) -> Ran {
    let plain = b.command(line.split_whitespace());
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qqq", "-o", "/dev/null", "-e", &format!("trace={call}")]);
    strace.args(["-e", &format!("inject={call}:signal=KILL:when={n}")]).arg(plain.get_program()).args(plain.get_args());
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

/// The raw image of a store: nothing that ever wrapped the keys stands in it any more, not in free blocks either.
fn scanned(mkfs: &[&str], megabytes: u64) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not run: mounting an image takes root");
        return;
    }
    let b = Bench::new();
    let image = b.path("image");
    std::fs::File::create(&image).unwrap().set_len(megabytes << 20).unwrap();
    let must = |program: &str, args: &[&str]| {
        let out = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
        assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    };
    let (image_arg, store) = (image.display().to_string(), b.dir("store").display().to_string());
    must(mkfs[0], &[&mkfs[1..], &[image_arg.as_str()]].concat());
    must("mount", &["-o", "loop", &image_arg, &store]);
    let mut strings = Vec::new();
    let note = |strings: &mut Vec<String>| {
        must("sync", &["-f", &store]);
        strings.extend(wrapped(&b.path("store/v/lamassu.vault")));
    };
    // A header that was replaced many times, with the means that leave files beside it.
    b.run("init store/v").ok();
    note(&mut strings);
    let second = b.key("second");
    b.run(&format!("key add -n {second} store/v")).ok();
    note(&mut strings);
    b.run(&format!("key change -k {second} -n {second} store/v")).ok();
    note(&mut strings);
    b.run("key backup -k raw:file:key store/v copy").ok();
    b.run("key restore copy store/v").ok();
    assert!(b.path("store/v/lamassu.vault.replaced").exists());
    b.run("key rotate --outer store/v").ok();
    note(&mut strings);
    assert!(found(&strings, &std::fs::read(&image).unwrap()) > 4, "the scan finds what is there");
    b.run("key destroy --yes store/v").ok();
    must("umount", &[&store]);
    assert_eq!(found(&strings, &std::fs::read(&image).unwrap()), 0, "{mkfs:?}");
}

#[test]
fn an_image_of_ext4_holds_no_wrapped_key_afterwards() {
    scanned(&["mkfs.ext4", "-q"], 64);
}

#[test]
fn an_image_of_xfs_holds_no_wrapped_key_afterwards() {
    scanned(&["mkfs.xfs", "-q"], 320);
}

#[cfg(feature = "kmip")]
#[test]
fn the_wrapping_key_at_a_kmip_server_goes_too_if_asked() {
    let b = Bench::new();
    let mut kms = crate::pykmip::PyKmip::start(&b.dir("kms"));
    let (key, other) = (kms.uri("?name=vault"), kms.uri("?name=other"));
    let zone = kms.uri("?zone=7");
    for source in [&key, &other, &zone] {
        b.run(&format!("key generate {source}")).ok();
    }
    b.key("audit");
    let public: String = b.run("receipt key --audit-key raw:file:audit").ok().text().trim().into();
    b.run(&format!("init -k {key} --zone {zone} v")).ok();
    b.run(&format!("init -k {key} beside")).ok();

    // Never a zone's keys; never a key that is not this vault's; nothing at all while the server is down.
    b.run(&format!("{DESTROY} -k {key} --with-server={zone} v")).code(28).says("zone");
    b.run(&format!("{DESTROY} -k {key} --with-server={other} v")).code(12);
    kms.stop();
    b.run(&format!("{DESTROY} -k {key} --with-server v")).code(40);
    kms.restart();
    b.run(&format!("ls -k {key} v")).ok();
    assert!(!b.path("r").exists());

    b.run(&format!("{DESTROY} -k {key} --with-server v")).ok().says("revoked").says("destroyed");
    b.run(&format!("ls -k {key} v")).code(52);
    // It cannot be told who else used it: this one did.
    b.run(&format!("ls -k {key} beside")).code(43);
    let r = receipt(&b, &public);
    assert_eq!(r["servers"][0]["destroyed"], true);
    assert!(r["servers"][0]["answers"][1].as_str().unwrap().starts_with("destroyed"), "{r}");
    assert!(!r["servers"][0]["source"].as_str().unwrap().is_empty());
    let inner = &r["epochs"][0];
    assert_eq!((&inner["key"], &inner["zone_shares"]), (&"inner".into(), &true.into()));
    assert!(r["cannot_know"].to_string().contains("Members of zone"), "{r}");
    b.run(&format!("init -k {other} --zone {zone} w")).ok();
    // Without being asked the server's key stays.
    b.run(&format!("key destroy --yes -k {other} w")).ok();
    b.run(&format!("init -k {other} w2")).ok();
}

/// Killed around the servers' part: the same command finishes it, and the receipt knows of each key, whoever destroyed
/// it.
#[cfg(feature = "kmip")]
#[test]
fn a_kill_beside_a_server_is_finished_too() {
    let b = Bench::new();
    let kms = crate::pykmip::PyKmip::start(&b.dir("kms"));
    b.key("audit");
    let public: String = b.run("receipt key --audit-key raw:file:audit").ok().text().trim().into();
    let is_there = |source: &str| {
        let made = b.run(&format!("zone create -k {source} z"));
        made.code == 0 && std::fs::remove_file(b.path("z")).is_ok()
    };
    let (mut after_one, mut after_both) = (0, 0);
    // The note of a slot's use, the receipt's draft, the header, the receipt after each key, and when all is done; then
    // what is taken away.
    for (call, n) in (1..=6).map(|n| ("rename", n)).chain((1..=2).map(|n| ("unlink", n))).chain([("fallocate", 1)]) {
        let step = format!("{call} {n}");
        let [one, two] = ["one", "two"].map(|name| kms.uri(&format!("?name={call}-{n}-{name}")));
        for source in [&one, &two] {
            b.run(&format!("key generate {source}")).ok();
        }
        b.run(&format!("init -k {one} v")).ok();
        b.run(&format!("key add -k {one} -n {two} v")).ok();
        let line = format!("{DESTROY} -k {one} --with-server --with-server={two} v");
        assert_ne!(killed_at(&b, &line, call, n).code, 0, "step {step}");
        let there = [&one, &two].map(|source| is_there(source));
        after_one += usize::from(there == [false, true]);
        after_both += usize::from(there == [false, false]);
        b.run(&line).ok();
        let r = receipt(&b, &public);
        assert_eq!(r["complete"], true, "step {step}");
        let servers = r["servers"].as_array().unwrap();
        assert_eq!(servers.len(), 2, "step {step}: {r}");
        for (asked, source) in servers.iter().zip([&one, &two]) {
            assert_eq!(asked["destroyed"], true, "step {step}: {r}");
            assert!(source.contains(asked["source"].as_str().unwrap().trim_start_matches("kmip:")), "step {step}: {r}");
            assert!(!is_there(source), "step {step}");
        }
        b.run(&format!("ls -k {one} v")).code(52);
        assert!(!b.path("v/lamassu.vault.replacing").exists(), "step {step}");
        std::fs::remove_file(b.path("r")).unwrap();
        std::fs::remove_dir_all(b.path("v")).unwrap();
    }
    assert!(after_one >= 1 && after_both >= 1, "{after_one} {after_both}");

    // Finished without the option, the receipt tells what was begun; and without a receipt nothing is claimed that
    // cannot be known.
    for with_receipt in [true, false] {
        let key = kms.uri(&format!("?name=last-{with_receipt}"));
        b.run(&format!("init --generate-key -k {key} v")).ok();
        let (line, call, n) = match with_receipt {
            true => (DESTROY, "rename", 4),
            false => ("key destroy --yes", "fallocate", 1),
        };
        let line = format!("{line} -k {key} --with-server v");
        assert_ne!(killed_at(&b, &line, call, n).code, 0);
        assert!(!is_there(&key));
        b.run(&format!("ls -k {key} v")).code(52);
        if with_receipt {
            b.run(&format!("{DESTROY} v")).code(1).says("not the key of");
            assert_eq!(receipt(&b, &public)["servers"][0]["destroyed"], false);
        } else {
            b.run(&line).ok().says("no such key").says("cut off");
        }
        std::fs::remove_dir_all(b.path("v")).unwrap();
    }
}

#[test]
fn the_wrapping_key_in_a_token_goes_too_if_asked() {
    let h = Hsm::new();
    h.token("office");
    h.rsa("office", "wrap", "01");
    h.key("office", "sym", "02", &["--keygen", "--key-type", "aes:32"]);
    let (rsa, aes) = (h.uri("token=office;object=wrap"), h.uri("token=office;object=sym"));
    h.b.key("audit");
    let public: String = h.run("receipt key --audit-key raw:file:audit").ok().text().trim().into();
    h.run(&format!("init -k {rsa} v")).ok();
    h.run(&format!("key add -k {rsa} -n {aes} v")).ok();
    h.run(&format!("{DESTROY} -k {rsa} --with-server --with-server={aes} v")).ok();
    h.run(&format!("ls -k {rsa} v")).code(52);
    for gone in [&rsa, &aes] {
        h.run(&format!("init -k {gone} w")).code(43);
    }
    let r = receipt(&h.b, &public);
    let answers = |i: usize| r["servers"][i]["answers"].to_string();
    assert!(answers(0).contains("private key") && answers(0).contains("public half"), "{r}");
    assert!(answers(1).contains("secret key") && answers(1).contains("left in the token: 0"), "{r}");
}

/// A name may be that of several keys, of which one private key alone can be meant: only its own public half goes with
/// it.
#[test]
fn another_pairs_public_key_stays_in_the_token() {
    let h = Hsm::new();
    h.token("office");
    // Two pairs, the first of which is left without its private half. SoftHSM lists objects in no order of its own.
    for id in ["01", "02", "03", "04"] {
        h.rsa("office", "wrap", id);
    }
    let publics = || h.objects("office", "pubkey");
    for id in ["01", "02", "03"] {
        h.delete("office", "privkey", id);
    }
    let source = h.uri("token=office");
    h.run(&format!("init -k {source} v")).ok();
    assert_eq!(publics(), ["01", "02", "03", "04"]);
    h.run(&format!("key destroy --yes -k {source} --with-server v")).ok().says("destroyed its public half");
    assert_eq!(publics(), ["01", "02", "03"]);
}

/// A dataset with slots of its own needs no key of the vault: nobody is told that it went with it.
#[test]
fn datasets_that_stay_readable_are_named_and_not_counted() {
    let b = Bench::new();
    let public = vault(&b);
    let own = b.key("own");
    b.file("big", &crate::support::noise(300_000, 1));
    b.run("dataset create v inherits").ok();
    b.run("cp v big vault:/inherits/").ok();
    b.run(&format!("dataset create --new-key {own} v p")).ok();
    b.run(&format!("dataset create --new-key {own} --domain family v q")).ok();
    let stored = |name: &str| b.run(&format!("path v {name}")).ok().text().trim().to_string();
    let (p, q) = (stored("p"), stored("q"));
    b.run(&format!("cp -k {own} v/{p} big vault:")).ok();
    // One that inherits from a dataset that stays, stays with it.
    b.run(&format!("dataset create -k {own} v/{p} within")).ok();

    b.run(&format!("{DESTROY} v")).ok().says("a dataset in it opens without it, and has its inner key").says(&p);
    assert_eq!(b.run(&format!("ls -k {own} v/{p}")).ok().text().trim(), "big\nwithin");
    let r = receipt(&b, &public);
    let named = |stored: &str| r["datasets"].as_array().unwrap().iter().find(|d| d["stored"] == stored).cloned();
    assert_eq!(named(&p).unwrap()["zone_shares"], true);
    assert_eq!(named(&q).unwrap()["zone_shares"], false);
    assert_eq!(r["datasets"].as_array().unwrap().len(), 3, "{r}");
    let bytes = r["stored_bytes"].as_u64().unwrap();
    assert!((300_000..600_000).contains(&bytes), "that of inherits, and not of p: {bytes}");
    assert_eq!((&r["epochs"][0]["key"], &r["epochs"][0]["zone_shares"]), (&"inner".into(), &true.into()));
    assert!(r["cannot_know"].to_string().contains("K_in lives on in datasets"), "{r}");
    assert!(b.run(&format!("receipt verify --audit-key {public} r")).ok().text().contains(&p));

    // A clone of the vault took the dataset's header along, and the dataset's history does not know.
    std::fs::remove_file(b.path("r")).unwrap();
    b.run(&format!("{DESTROY} -k {own} v/{q}")).ok();
    let r = receipt(&b, &public);
    assert!(r["cannot_know"].to_string().contains("the vault that this dataset lies in"), "{r}");
    assert_eq!(r["datasets"], Value::Null);
}

/// A dataset that was moved here in the store inherits from the vault it comes from, and from this one nothing.
#[test]
fn a_dataset_of_another_vault_is_not_counted() {
    let b = Bench::new();
    let public = vault(&b);
    b.run("dataset create v own").ok();
    b.run("init w").ok();
    b.run("dataset create w d").ok();
    b.run("dataset create w d/e").ok();
    b.file("big", &crate::support::noise(300_000, 1));
    b.run("cp w big vault:/d/").ok();
    b.run("cp w big vault:/d/e/").ok();
    let place = b.stored("w", "d");
    std::fs::rename(&place, b.path("v/moved")).unwrap();

    b.run(&format!("{DESTROY} v")).ok().says("a dataset in it opens without it").says("moved");
    let r = receipt(&b, &public);
    let listed: Vec<_> = r["datasets"].as_array().unwrap().iter().map(|d| d["stored"].as_str().unwrap()).collect();
    assert!(listed.len() == 2 && listed[0] == "moved" && listed[1].starts_with("moved/"), "{r}");
    let bytes = r["stored_bytes"].as_u64().unwrap();
    assert!(bytes < 100_000, "{bytes}");
    // As the receipt says.
    std::fs::rename(b.path("v/moved"), &place).unwrap();
    assert_eq!(b.run("cat w d/e/big").ok().out.len(), 300_000);
}

/// What an earlier change left of the header before it: `key destroy` overwrites it, also where the store may lose
/// names, or another name leads to it.
#[test]
fn what_a_killed_change_left_is_overwritten_in_every_store() {
    let b = Bench::new();
    b.run("init below").ok();
    b.dir("m");
    b.run("mount below m").ok();
    // A FUSE file system, and an ordinary one where the leftover has another name.
    for (store, is_linked) in [("m/", false), ("", true)] {
        b.run(&format!("init {store}v")).ok();
        let (header, left) =
            (b.path(&format!("{store}v/lamassu.vault")), b.path(&format!("{store}v/lamassu.vault.replacing")));
        std::fs::copy(&header, &left).unwrap();
        let held = std::fs::File::open(&left).unwrap();
        if is_linked {
            std::fs::hard_link(&left, b.path("linked")).unwrap();
        }
        let old = wrapped(&header);
        b.run(&format!("key destroy --yes {store}v")).ok();
        let mut bytes = vec![0; 1 << 20];
        let len = std::os::unix::fs::FileExt::read_at(&held, &mut bytes, 0).unwrap();
        assert!(len > 0, "{store}");
        assert_eq!(found(&old, &bytes[..len]), 0, "{store}");
    }
    b.unmount("m");
}

/// A header that was replaced is overwritten, or a name still leads to it: also where the program is killed in between.
#[test]
fn no_kill_leaves_an_old_header_whole_without_a_name() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let b = Bench::new();
    b.run("init v").ok();
    b.run("key backup v copy").ok();
    b.run("key restore copy v").ok();
    let (mut seen, mut kept) = (0, 0);
    for line in ["key change -n raw:file:key v", "key restore --force copy v"] {
        for (call, n) in ["rename", "unlink", "fsync", "fallocate"].iter().flat_map(|c| (1..8).map(move |n| (*c, n))) {
            let step = format!("{line}: {call} {n}");
            let before: Vec<_> = ["v/lamassu.vault", "v/lamassu.vault.replaced", "v/lamassu.vault.replacing"]
                .into_iter()
                .filter_map(|name| Some((wrapped_in(&b.path(name))?, std::fs::File::open(b.path(name)).unwrap())))
                .collect();
            killed_at(&b, line, call, n);
            for (strings, file) in before {
                let mut bytes = vec![0; 1 << 20];
                let len = file.read_at(&mut bytes, 0).unwrap();
                let is_whole = found(&strings, &bytes[..len]) > 0;
                assert!(!is_whole || file.metadata().unwrap().nlink() > 0, "{step}");
                seen += usize::from(!is_whole);
            }
            kept += usize::from(b.path("v/lamassu.vault.replacing").exists());
            b.run("ls v").ok();
        }
        // The next change takes away what was left.
        b.run("key change -n raw:file:key v").ok();
        assert!(!b.path("v/lamassu.vault.replacing").exists(), "{line}");
    }
    assert!(seen > 10 && kept > 3, "{seen} {kept}");
    // What is overwritten on the way is no backup to restore from.
    b.run("key restore v/lamassu.vault.replaced v").code(2).says("copy it");
}

/// What a header's slots wrap, where it is one.
fn wrapped_in(header: &Path) -> Option<Vec<String>> {
    let bytes = std::fs::read(header).ok()?;
    serde_json::from_slice::<Value>(&bytes).ok()?;
    Some(wrapped(header))
}

/// Who may not write a header may still be its owner: then it is overwritten all the same, and a destruction comes to
/// its end.
#[test]
fn a_header_that_is_read_only_is_overwritten_too() {
    use std::os::unix::fs::{FileExt, PermissionsExt};
    let b = Bench::new();
    vault(&b);
    let old =
        |b: &Bench| (wrapped(&b.path("v/lamassu.vault")), std::fs::File::open(b.path("v/lamassu.vault")).unwrap());
    let overwritten = |(strings, file): (Vec<String>, std::fs::File)| {
        let mut bytes = vec![0; 1 << 20];
        let len = file.read_at(&mut bytes, 0).unwrap();
        assert_eq!(found(&strings, &bytes[..len]), 0);
    };
    let second = b.key("second");
    for line in [format!("key add -n {second} v"), "key destroy --yes v".into()] {
        std::fs::set_permissions(b.path("v/lamassu.vault"), std::fs::Permissions::from_mode(0o400)).unwrap();
        let before = old(&b);
        as_a_user(&b, &line).ok();
        overwritten(before);
        assert!(!b.path("v/lamassu.vault.replacing").exists());
    }
    b.run("ls v").code(52);
}

/// Runs a line as somebody whom modes bind: root's capabilities are dropped.
fn as_a_user(b: &Bench, line: &str) -> Ran {
    let plain = b.command(line.split_whitespace());
    let mut bound = Command::new("setpriv");
    bound.args(["--bounding-set=-all", "--inh-caps=-all"]).arg(plain.get_program()).args(plain.get_args());
    bound.current_dir(plain.get_current_dir().unwrap()).envs(plain.get_envs().filter_map(|(k, v)| Some((k, v?))));
    bound.output().expect("setpriv").into()
}

/// A zone's key goes on being the zone's in the receipt, however young the vault is, whatever was rotated since, and
/// when the vault has left it.
#[test]
fn a_receipt_knows_which_keys_a_zone_has() {
    let b = Bench::new();
    let zone = b.key("zone");
    b.key("audit");
    let public = b.run("receipt key --audit-key raw:file:audit").ok().text();
    let with = format!("--zone office --zone-key {zone}");
    b.run(&format!("zone create -k {zone} office")).ok();
    // Made in the second of the zone, most likely.
    for vault in ["young", "rotated", "left"] {
        b.run(&format!("init {with} --outer shared {vault}")).ok();
    }
    b.run(&format!("init {with} own")).ok();
    b.run("key rotate --outer young").code(28).says("shares its outer key");
    b.run(&format!("zone rotate --outer -k {zone} office")).ok();
    b.run(&format!("key rotate --outer {with} rotated")).ok();
    b.run("key rotate --outer rotated").code(28).says("shares its outer key");
    b.run("key rotate --outer --leave-zone left").ok();
    b.run("key rotate --inner --leave-zone left").ok();
    b.run("key rotate --outer own").ok();
    let shared = |vault: &str| {
        b.run(&format!("key destroy --yes --receipt {vault}.r --audit-key raw:file:audit {vault}")).ok();
        let r = b.run(&format!("receipt verify --json --audit-key {} {vault}.r", public.trim())).ok().json();
        let of = |e: &Value| {
            (e["key"].as_str().unwrap().to_string(), e["epoch"].as_u64().unwrap(), e["zone_shares"] == true)
        };
        let reads = r["cannot_know"].to_string().contains("go on READING");
        let epochs: Vec<_> = r["epochs"].as_array().unwrap().iter().map(of).collect();
        assert_eq!(reads, epochs.iter().any(|(key, _, shared)| key == "outer" && *shared), "{r}");
        epochs
    };
    let e = |key: &str, epoch, shared| (key.to_string(), epoch, shared);
    assert_eq!(shared("young"), [e("inner", 1, true), e("outer", 1, true)]);
    assert_eq!(shared("rotated"), [e("inner", 1, true), e("outer", 1, true), e("outer", 2, true)]);
    let left = [e("inner", 1, true), e("inner", 2, false), e("outer", 1, true), e("outer", 2, false)];
    assert_eq!(shared("left"), left);
    assert_eq!(shared("own"), [e("inner", 1, true), e("outer", 1, false), e("outer", 2, false)]);
}

/// Whoever can write the store links a file of the host where old headers are kept.
#[test]
fn a_file_that_is_linked_where_old_headers_are_kept_is_not_wiped() {
    let b = Bench::new();
    let public = vault(&b);
    let host = b.file("host", &[b'A'; 5000]);
    for name in ["replaced", "replacing"] {
        std::fs::hard_link(&host, b.path(&format!("v/lamassu.vault.{name}"))).unwrap();
    }
    b.run(&format!("{DESTROY} v")).ok().says("\"lamassu.vault.replaced\" in the vault's directory is no header");
    assert_eq!(std::fs::read(&host).unwrap(), [b'A'; 5000]);
    // One with the name in place of the old header, of a run that was cut off.
    b.run("ls v").code(52);
    assert!(receipt(&b, &public)["complete"] == true);
    let left = b.path("v/lamassu.vault.replacing");
    if !left.exists() {
        std::fs::hard_link(&host, left).unwrap();
    }
    b.run("key destroy --yes v").code(52);
    assert_eq!(std::fs::read(&host).unwrap(), [b'A'; 5000]);
}
