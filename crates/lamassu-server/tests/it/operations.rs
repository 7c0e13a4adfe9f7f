//! What operators do: the audit log, backups, what is put back, checks.

use crate::common::*;
use redb::{Database, ReadableTable, TableDefinition};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

/// The entries of the audit log, each an event and the whole of it.
fn audit(lab: &Lab) -> Vec<(String, Value)> {
    let out = lab.serve(&["audit", "--json"]).ok().says("verified").out;
    let entry = |line: &str| {
        let entry: Value = serde_json::from_str(line).unwrap();
        (entry["event"].as_str().unwrap().to_owned(), entry)
    };
    out.lines().map(entry).collect()
}

fn events(lab: &Lab) -> Vec<String> {
    audit(lab).into_iter().map(|(event, _)| event).collect()
}

/// Changes an entry of the audit log of a server that does not run.
fn forge(lab: &Lab, number: u64, from: &str, to: &str) {
    const ENTRIES: TableDefinition<'static, u64, &'static [u8]> = TableDefinition::new("audit");
    let database = Database::open(lab.path("server/state.redb")).unwrap();
    let write = database.begin_write().unwrap();
    {
        let mut entries = write.open_table(ENTRIES).unwrap();
        let row = entries.get(number).unwrap().unwrap().value().to_vec();
        let at = row.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        let forged = [&row[..at], to.as_bytes(), &row[at + from.len()..]].concat();
        entries.insert(number, &forged[..]).unwrap();
    }
    write.commit().unwrap();
}

/// Makes a backup beside the server's directory.
fn back_up(lab: &Lab) -> Ran {
    lab.serve(&["backup", &format!("@{}", lab.path("backup").display())])
}

/// Runs the server's program on a directory; nobody reads what it prints.
fn unread(args: &[&str], dir: &Path) -> Ran {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let (words, rest) = args.split_at(args.iter().take_while(|arg| !arg.starts_with('@')).count());
    let mut command = Command::new(server_program());
    command.args(words).arg(dir).args(rest.iter().map(|arg| arg.trim_start_matches('@')));
    command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap().into()
}

#[test]
fn output_that_nobody_reads_is_an_error_and_no_panic() {
    let lab = Lab::new();
    let dir = lab.path("server");
    for args in [
        &["status"][..],
        &["status", "--json"],
        &["enrol", "@a"],
        &["check"],
        &["policy", "show", "--json"],
        &["run", "--check-config"],
    ] {
        unread(args, &dir).code(5).says("standard output");
    }
    unread(&["init"], &lab.path("another")).code(5).says("standard output");
}

/// A server that ends in the middle of its answer may have done what it was asked.
#[test]
fn an_answer_that_was_cut_off_is_told_from_a_request_that_is_invalid() {
    let mut lab = Lab::new();
    lab.stop("-TERM");
    let listener = UnixListener::bind(lab.path("server/admin.sock")).unwrap();
    let answering = std::thread::spawn(move || {
        for answer in ["", "{\"forgotten\":"] {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    for _ in 0..2 {
        lab.serve(&["status"]).code(5).says("ended before it answered");
    }
    answering.join().unwrap();
    fs::remove_file(lab.path("server/admin.sock")).unwrap();
}

#[test]
fn a_server_that_could_not_be_made_leaves_nothing_behind() {
    let lab = Lab::new();
    let disk = lab.path("disk");
    fs::create_dir(&disk).unwrap();
    let mount = |options: &str| {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "none"]).arg(&disk).status().unwrap().success()
    };
    let init = || -> Ran {
        let made = Command::new(server_program()).arg("init").arg(disk.join("server")).output();
        made.unwrap().into()
    };
    // One has no room for the state, one for the authority.
    for size in ["size=16k", "size=48k"] {
        if !mount(size) {
            eprintln!("SKIPPED: no file system can be mounted here");
            return;
        }
        let failed = init();
        let is_left = disk.join("server").exists();
        assert!(mount("remount,size=64m"));
        let again = init();
        assert!(Command::new("umount").arg("-l").arg(&disk).status().unwrap().success());
        failed.code(5);
        assert!(!is_left, "{size}");
        again.ok();
    }
}

/// The server's directory is lost, and the backup takes its place.
fn put_back(lab: &mut Lab) {
    fs::remove_dir_all(lab.path("server")).unwrap();
    fs::rename(lab.path("backup"), lab.path("server")).unwrap();
    lab.start();
}

#[test]
fn the_audit_log_tells_who_had_what_and_shows_that_it_was_changed() {
    let mut lab = Lab::new();
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    let id = lab.vault(a);
    lab.grant(b, &id);
    a.mount().ok();
    a.umount().ok();
    assert_eq!(b.run(&format!("ls --anchor {} store/v", lab.url())).ok().out, "");
    lab.wait_until_free();
    lab.serve(&["host", "grant", "--not", "@b", &format!("@{id}")]).ok();
    lab.serve(&["host", "revoke", "@b"]).ok();
    let entries = audit(&lab);
    let of = |event: &str, host: &str| {
        entries.iter().filter(|(name, entry)| name == event && entry["host"] == host).map(|(_, entry)| entry).collect()
    };
    for (event, host, count) in [
        ("token-made", "a", 1),
        ("joined", "b", 1),
        ("granted", "a", 1),
        ("anchor-put", "a", 1),
        ("grant-ended", "b", 1),
        ("revoked", "b", 1),
        ("revoked", "a", 0),
    ] {
        let found: Vec<&Value> = of(event, host);
        assert_eq!(found.len(), count, "{event} {host}: {entries:?}");
    }
    let (of_a, of_b): (Vec<&Value>, Vec<&Value>) = (of("session-began", "a"), of("session-began", "b"));
    assert_eq!((&of_a[of_a.len() - 1]["writes"], &of_b[0]["writes"]), (&true.into(), &false.into()));
    let ended: Vec<&Value> = of("session-ended", "a");
    assert!(ended.iter().any(|entry| entry["session"] == of_a[of_a.len() - 1]["session"] && entry["why"] == "left"));
    assert!(entries.iter().all(|(_, entry)| entry["time"].as_u64().is_some_and(|time| time > 1_700_000_000)));
    // A head that was noted, here in the log of the system, is found again; another is not.
    let head = entries[2].1["head"].as_str().unwrap();
    assert!(lab.log().contains(head));
    lab.serve(&["audit", "--includes", head]).ok();
    lab.serve(&["audit", "--includes", &"0".repeat(64)]).code(30).says("it was rewritten");
    let shown = lab.serve(&["audit", "--after", "3"]).ok().out;
    assert_eq!(shown.lines().count(), entries.len() - 3);
    assert!(shown.contains("Z  4  ") && shown.contains("  revoked  host=b"), "{shown}");
    lab.serve(&["check"]).ok();
    lab.stop("-TERM");
    assert_eq!(events(&lab).len(), entries.len());
    forge(&lab, 3, "\"a\"", "\"c\"");
    lab.serve(&["audit"]).code(30).says("entry 3");
    lab.serve(&["check"]).code(26).says("entry 3");
    // What it shows is kept for whoever looks into it.
    back_up(&lab).code(26).says("entry 3");
    Ran::from(Command::new(server_program()).arg("audit").arg(lab.path("backup")).output().unwrap())
        .code(30)
        .says("entry 3");
}

/// The server's disk is lost, and a backup put in its place: what the hosts have seen since comes back from them.
#[test]
fn a_server_that_was_put_back_is_told_by_its_hosts_what_it_has_forgotten() {
    let mut lab = Lab::new();
    let (a, b, c) = (lab.joined("a"), lab.joined("b"), lab.joined("c"));
    let id = lab.vault(a);
    [b, c].iter().for_each(|host| lab.grant(*host, &id));
    b.mount().ok();
    b.write("f", "zero").unwrap();
    b.umount().ok();
    a.mount().ok();
    a.write("f", "one").unwrap();
    // While it is in use.
    assert!(back_up(&lab).ok().out.starts_with("3 hosts, 1 anchors"));
    assert_eq!(lab.path("backup").metadata().unwrap().mode() & 0o777, 0o700);
    back_up(&lab).code(6);
    a.write("f", "two").unwrap();
    a.write("g", "new").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    lab.stop("-KILL");
    put_back(&mut lab);
    lab.serve(&["check"]).ok();
    let (a, b, c) = (lab.host("a"), lab.host("b"), lab.host("c"));
    assert!(lab.serve(&["status"]).ok().out.contains("waits for a, b, c"));
    assert_eq!(lab.metric("vaults_waiting"), 1.0);
    // One that has never used the vault has nothing to tell, and has nothing of it afterwards.
    c.run(&format!("mount --shared --anchor {} store/v m-c", lab.url())).code(73);
    c.run("ls store/v").code(60);
    b.mount().code(73).says("may know more of this vault: a");
    b.run("ls store/v").code(73).says("host grant --not");
    // It knows more than the server, and is the last.
    assert_eq!(a.run("cat store/v g").ok().out, "new");
    b.mount().ok();
    assert_eq!(fs::read_to_string(b.file("f")).unwrap(), "two");
    b.write("f", "three").unwrap();
    b.umount().ok();
    assert_eq!(a.run("cat store/v f").ok().out, "three");
    a.run("check store/v").ok();
    let entries = audit(&lab);
    let told = |(event, entry): &&(String, Value)| event == "reconciled" && entry["was-newer"] == true;
    assert_eq!(entries.iter().filter(told).count(), 1);
    let all: Vec<_> = entries.iter().map(|(event, _)| &**event).collect();
    assert!(all.contains(&"made-from-backup") && all.contains(&"reopened"), "{all:?}");
    assert_eq!(lab.metric("vaults_waiting"), 0.0);
    lab.serve(&["check"]).ok();
}

/// Two hosts have come equally far: what one tells is what the other has.
#[test]
fn a_host_that_is_let_in_again_is_as_far_as_the_one_that_has_told() {
    let mut lab = Lab::new();
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    let id = lab.vault(a);
    lab.grant(b, &id);
    back_up(&lab).ok();
    a.mount().ok();
    a.write("f", "since").unwrap();
    a.umount().ok();
    b.run(&format!("ls --anchor {} store/v", lab.url())).ok();
    lab.wait_until_free();
    lab.stop("-TERM");
    put_back(&mut lab);
    let (a, b) = (lab.host("a"), lab.host("b"));
    lab.serve(&["host", "grant", "--not", "@b", &format!("@{id}")]).ok();
    assert_eq!(a.run("cat store/v f").ok().out, "since");
    lab.grant(b, &id);
    assert_eq!(b.run("cat store/v f").ok().out, "since");
}

#[test]
fn a_server_that_has_never_run_can_be_checked_and_backed_up() {
    let lab = Lab::new();
    let on = |args: [&str; 2], to: Option<&str>| {
        let mut command = Command::new(server_program());
        command.args(&args[..1]).arg(lab.path(args[1])).args(to.map(|to| lab.path(to)));
        Ran::from(command.output().unwrap())
    };
    on(["init", "new"], None).ok();
    on(["check", "new"], None).ok();
    on(["backup", "new"], Some("its-backup")).ok();
    on(["check", "its-backup"], None).ok();
    on(["status", "its-backup"], None).ok();
}

/// Of two backups to one place one is made, and is whole; the other says why not.
#[test]
fn a_place_gets_one_backup() {
    let lab = Lab::new();
    for n in 0..5 {
        let to = lab.path(&format!("backup{n}"));
        let backup = || Command::new(server_program()).arg("backup").arg(lab.path("server")).arg(&to).spawn().unwrap();
        let mut both = [backup(), backup()];
        let codes = both.each_mut().map(|one| one.wait().unwrap().code().unwrap());
        assert!(codes.contains(&0) && (codes.contains(&6) || codes == [0, 0]), "{codes:?}");
        Ran::from(Command::new(server_program()).arg("check").arg(&to).output().unwrap()).ok();
    }
}

/// Without the host that knows more, nothing old passes for current either.
#[test]
fn a_host_that_is_gone_is_not_waited_for_and_what_it_alone_knew_is_not_taken_for_current() {
    let mut lab = Lab::new();
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    let id = lab.vault(a);
    lab.grant(b, &id);
    a.mount().ok();
    a.write("f", "one").unwrap();
    a.write("kept", "kept").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    lab.stop("-TERM");
    // Of a server that does not run.
    back_up(&lab).ok();
    lab.start();
    let a = lab.host("a");
    a.mount().ok();
    a.write("f", "two").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    lab.stop("-TERM");
    put_back(&mut lab);
    let (a, b) = (lab.host("a"), lab.host("b"));
    b.mount().code(73);
    lab.serve(&["host", "grant", "--not", "@a", &format!("@{id}")]).ok();
    // A session wrote that this anchor never heard of.
    b.mount().code(65);
    b.run(&format!("anchor accept --anchor {} store/v", lab.url())).ok();
    let cat = |name: &str| b.run(&format!("cat --anchor {} store/v {name}", lab.url()));
    assert_eq!(cat("kept").ok().out, "kept");
    cat("f").code(30);
    lab.grant(a, &id);
    // Nobody is waited for any more, and what this host has seen is newer than what the server says.
    a.run("cat store/v f").code(71);
}

#[test]
fn what_is_damaged_is_named_and_the_rest_is_backed_up() {
    let mut lab = Lab::new();
    let a = lab.joined("a");
    let id = lab.vault(a);
    a.run("init store/w").ok();
    let other = a.id("store/w");
    lab.grant(a, &other);
    a.run(&format!("anchor move store/w {}", lab.url())).ok();
    lab.stop("-TERM");
    let anchor = |id: &str| lab.path(&format!("server/anchors/{}.anchor", id.replace('-', "")));
    let whole = fs::read(anchor(&id)).unwrap();
    fs::write(anchor(&id), [0x5a; 4096]).unwrap();
    let (id_hex, other_hex) = (id.replace('-', ""), other.replace('-', ""));
    let checked = lab.serve(&["check"]).code(26).says(&id_hex);
    assert!(checked.out.contains(&other_hex), "{checked:?}");
    assert!(back_up(&lab).code(26).says(&id_hex).out.starts_with("1 hosts, 1 anchors"));
    assert!(lab.path(&format!("backup/anchors/{other_hex}.anchor")).exists());
    assert!(!lab.path(&format!("backup/anchors/{id_hex}.anchor")).exists());
    fs::remove_dir_all(lab.path("backup")).unwrap();
    fs::remove_file(anchor(&id)).unwrap();
    lab.serve(&["check"]).code(26).says("is gone");
    fs::write(anchor(&id), whole).unwrap();
    fs::set_permissions(anchor(&id), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    lab.serve(&["check"]).ok();
    // No database, and none that fits its key.
    let state = fs::read(lab.path("server/state.redb")).unwrap();
    fs::write(lab.path("server/state.redb"), [0x5a; 9000]).unwrap();
    lab.serve(&["check"]).code(26).says("state.redb");
    fs::write(lab.path("server/state.redb"), &state).unwrap();
    lab.serve(&["check"]).ok();
    // One bit of a time, which any number could be.
    let mut flipped = fs::read(lab.path("server/state.redb")).unwrap();
    // In every page that has it: some of them are free.
    let found = flipped.windows(9).enumerate().filter(|(_, window)| window == b"\"joined\":");
    let found: Vec<_> = found.map(|(at, _)| at + 12).collect();
    found.iter().for_each(|at| flipped[*at] ^= 1);
    fs::write(lab.path("server/state.redb"), flipped).unwrap();
    lab.serve(&["check"]).code(26).says("checksums");
    back_up(&lab).code(26);
    assert!(!lab.path("backup").exists());
    fs::write(lab.path("server/state.redb"), &state).unwrap();
    let lab_of_another = Lab::new();
    fs::copy(lab_of_another.path("server/authority.der"), lab.path("server/authority.der")).unwrap();
    lab.serve(&["check"]).code(26).says("not that of its key");
}
