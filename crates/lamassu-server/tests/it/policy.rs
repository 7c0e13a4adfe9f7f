//! The policy of a server: what honest hosts do by it, and what becomes of one that lies.

use crate::common::raw::id_of;
use crate::common::*;
use lamassu_anchor::row::{Content, FileRow};
use lamassu_anchor::table::{Change, Space, Table};
use lamassu_anchor::{Anchor, AnchorError, Row, ServerFault, VaultRow};
use lamassu_format::header::VaultId;
use lamassu_format::{Digest, Profile, Suite};
use lamassu_lease::Mode;
use lamassu_rpc::host::{Connection, Turn, Turns};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub(crate) const NO_PLAIN: &str = "[[rule]]\nname = \"no plain\"\nforbid.protections = [\"none\", \"integrity\"]\n";
const EPERM: Option<i32> = Some(rustix::io::Errno::PERM.raw_os_error());

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

/// Has the server read another policy; returns when it has, or has refused it.
pub fn reload(lab: &Lab, text: &str, is_good: bool) {
    fs::write(lab.path("server/policy.toml"), text).unwrap();
    let word = if is_good { "yes" } else { "no" };
    let reads = || {
        let text = lab.asked("/metrics").1;
        let line = format!("lamassu_server_policy_reads_total{{taken=\"{word}\"}} ");
        text.lines().find_map(|l| l.strip_prefix(&*line)?.parse::<u64>().ok()).unwrap_or_default()
    };
    let before = reads();
    kill(lab.server.as_ref().unwrap().id(), "-HUP");
    until("the policy is read", || reads() > before);
}

fn mount_shared(host: Host<'_>) -> Ran {
    host.run(&format!("mount --shared --anchor {} store/v m-{}", host.lab.url(), host.name))
}

/// Two hosts that have a vault mounted.
fn shared(lab: &Lab) -> ([Host<'_>; 2], String) {
    let hosts = ["a", "b"].map(|name| lab.joined(name));
    let id = lab.vault(hosts[0]);
    lab.grant(hosts[1], &id);
    hosts.iter().for_each(|host| drop(mount_shared(*host).ok()));
    (hosts, id)
}

fn unmounted_and_checked(lab: &Lab, hosts: &[Host<'_>]) {
    hosts.iter().for_each(|host| drop(host.umount().ok()));
    lab.wait_until_free();
    hosts[0].run("check store/v").ok();
}

/// What `profile show` says of a path in the mount of a host.
fn shown(host: Host<'_>, path: &str) -> String {
    let out = host.run(&format!("profile show m-{} {path}", host.name)).ok().out;
    out.lines().nth(1).unwrap().split_whitespace().next().unwrap().to_owned()
}

fn set(host: Host<'_>, what: &str, path: &str) -> Ran {
    host.run(&format!("profile set {what} m-{} {path}", host.name))
}

#[test]
fn a_profile_that_one_host_sets_is_what_another_makes_files_by() {
    let lab = Lab::new();
    let ([a, b], _) = shared(&lab);
    fs::create_dir(a.file("d")).unwrap();
    fs::create_dir(a.file("d/below")).unwrap();
    let content = vec![b'x'; 300_000];
    for n in 0..10 {
        fs::write(a.file(&format!("d/below/{n}")), &content).unwrap();
    }
    fs::hard_link(a.file("d/below/0"), a.file("d/again")).unwrap();
    set(a, "--protect integrity", "d").ok();
    assert_eq!(shown(b, "d"), "integrity");
    fs::write(b.file("d/new"), &content).unwrap();
    assert_eq!((shown(a, "d/new"), shown(a, "d/below/0")), ("integrity".into(), "both".into()));
    // All that is there is changed, turn by turn, while another host uses the vault.
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writes = scope.spawn(|| {
            let mut count = 0;
            while !is_over.load(Ordering::Relaxed) || count < 3 {
                fs::write(b.file("count"), count.to_string()).unwrap();
                File::options().append(true).open(b.file("d/below/7")).unwrap().write_all(b"y").unwrap();
                count += 1;
            }
            count
        });
        set(a, "-R --protect integrity", "d").ok();
        is_over.store(true, Ordering::Relaxed);
        let count = writes.join().unwrap();
        assert_eq!(fs::read(a.file("d/below/7")).unwrap().len(), content.len() + count);
    });
    for path in ["d/below", "d/below/0", "d/below/7", "d/below/9", "d/again", "d/new"] {
        assert_eq!(shown(b, path), "integrity", "{path}");
    }
    // Back again by the other host, of one file and of all.
    set(b, "--protect both --block-keys random", "d/below/0").ok();
    assert_eq!((shown(a, "d/again"), shown(a, "d/below/1")), ("both".into(), "integrity".into()));
    assert_eq!(fs::read(a.file("d/again")).unwrap(), content);
    set(b, "-R --protect both", "/").ok();
    assert_eq!(shown(a, "d/below/9"), "both");
    assert_eq!(fs::read(a.file("d/below/9")).unwrap(), content);
    unmounted_and_checked(&lab, &[a, b]);
}

/// A host is killed in the middle of a change: the file is whole, and another host brings it to its end.
#[test]
fn a_change_that_was_cut_off_goes_on_on_another_host() {
    let lab = Lab::new();
    let ([a, b], _) = shared(&lab);
    let content: Vec<u8> = (0..40_000_000_u32).map(|at| (at / 4096 % 251) as u8).collect();
    fs::write(a.file("big"), &content).unwrap();
    let file = File::open(a.file("big")).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let mut changing = a.command();
    changing.args(["profile", "set", "--protect", "integrity", "m-a", "big"]);
    let mut changing = changing.stderr(std::process::Stdio::null()).spawn().unwrap();
    until("a change is under way, or over", || {
        let out = b.run("profile show m-b big").ok().out;
        out.contains("being changed") || out.contains("integrity")
    });
    kill(a.daemon(), "-KILL");
    changing.wait().unwrap();
    let _ = std::process::Command::new("umount").arg("-l").arg(a.file("")).output();
    assert!(fs::read(b.file("big")).unwrap() == content);
    set(b, "--protect integrity", "big").ok();
    assert!(!b.run("profile show m-b big").ok().out.contains("being changed"));
    assert_eq!(shown(b, "big"), "integrity");
    assert!(fs::read(b.file("big")).unwrap() == content);
    mount_shared(a).ok();
    assert!(fs::read(a.file("big")).unwrap() == content);
    unmounted_and_checked(&lab, &[a, b]);
}

#[test]
fn what_is_forbidden_is_refused_early_and_what_is_there_may_be_read_and_brought_to_what_is_not() {
    let lab = Lab::new();
    let ([a, b], id) = shared(&lab);
    fs::create_dir(a.file("plain")).unwrap();
    set(a, "--protect none", "plain").ok();
    fs::write(a.file("plain/old"), "old").unwrap();
    fs::write(a.file("plain/gone"), "gone").unwrap();
    let open = File::options().append(true).open(b.file("plain/old")).unwrap();
    reload(&lab, NO_PLAIN, true);
    // Whoever gets the vault next knows it.
    let refused = |done: std::io::Result<()>| assert_eq!(done.unwrap_err().raw_os_error(), EPERM);
    until("the host knows", || fs::write(a.file("plain/new"), "new").is_err());
    let _ = fs::remove_file(a.file("plain/new"));
    for host in [a, b] {
        refused(fs::write(host.file("plain/new"), "new"));
        refused(fs::write(host.file("plain/old"), "new"));
        refused(File::options().append(true).open(host.file("plain/old")).map(drop));
        refused(File::options().write(true).truncate(true).open(host.file("plain/old")).map(drop));
        assert_eq!(fs::read_to_string(host.file("plain/old")).unwrap(), "old");
        set(host, "--protect none", "/").code(76).says("\"no plain\"");
        fs::write(host.file("encrypted"), "text").unwrap();
    }
    refused((&open).write_all(b"more"));
    drop(open);
    assert!(!a.file("plain/new").exists());
    // Names, modes and links of it are nobody's protection.
    fs::rename(a.file("plain/old"), a.file("moved")).unwrap();
    fs::set_permissions(b.file("moved"), std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    fs::hard_link(b.file("moved"), b.file("linked")).unwrap();
    fs::remove_file(a.file("plain/gone")).unwrap();
    let found = lab.serve(&["policy", "check", &format!("@{id}")]).code(76);
    assert!(found.out.contains("none") && found.out.contains("\"no plain\" for a, b"), "{found:?}");
    // It is brought to another profile, and may be written then.
    set(b, "-R --protect both", "/").ok();
    fs::write(a.file("linked"), "new").unwrap();
    fs::write(a.file("plain/new"), "new").unwrap();
    assert_eq!(fs::read_to_string(b.file("moved")).unwrap(), "new");
    lab.serve(&["policy", "check", &format!("@{id}")]).ok();
    unmounted_and_checked(&lab, &[a, b]);
}

/// What a crash left of files whose profile is forbidden since is no damage, and waits for another profile.
#[test]
fn what_was_under_way_is_not_damaged_by_a_policy() {
    let lab = Lab::new();
    let ([a, b], _) = shared(&lab);
    fs::create_dir(a.file("plain")).unwrap();
    set(a, "--protect none", "plain").ok();
    let content = "content ".repeat(6000);
    // With nobody to give the vault to, the host leaves it to the next pass to settle what it has synced.
    b.umount().ok();
    let mut file = File::create(a.file("plain/x")).unwrap();
    file.write_all(content.as_bytes()).unwrap();
    file.sync_all().unwrap();
    kill(a.daemon(), "-KILL");
    drop(file);
    let _ = Command::new("umount").arg("-l").arg(lab.path("m-a")).status();
    reload(&lab, NO_PLAIN, true);
    let repair = format!("check --repair --anchor {} store/v", lab.url());
    let mut checked = String::new();
    until("the time of the host that has crashed is up", || {
        let ran = b.run(&repair);
        checked = format!("{ran:?}");
        ran.code == 0
    });
    assert!(checked.contains("harmless: /plain/x") && checked.contains("no plain"), "{checked}");
    mount_shared(b).ok();
    assert_eq!(fs::read_to_string(b.file("plain/x")).unwrap(), content);
    set(b, "--protect both", "plain/x").ok();
    assert_eq!(fs::read_to_string(b.file("plain/x")).unwrap(), content);
    unmounted_and_checked(&lab, &[b]);
    assert!(!b.run(&repair).ok().out.contains("harmless"));
}

/// Else who may use a vault would make a dataset in it, to keep there what the rule forbids.
#[test]
fn a_rule_for_a_vault_holds_in_the_datasets_in_it() {
    let lab = Lab::new();
    let ([a, b], id) = shared(&lab);
    a.run("dataset create m-a/ds").ok();
    a.run("dataset create m-a/ds/inner").ok();
    a.write("ds/inner/encrypted", "secret").unwrap();
    let set =
        |host: Host<'_>, path: &str| host.run(&format!("profile set --protect none m-{}/ds/inner {path}", host.name));
    a.write("ds/inner/plain", "before the rule").unwrap();
    set(a, "plain").ok();
    let rule = format!("[[rule]]\nname = \"no plain\"\nvaults = [{id:?}]\nrequire.protections = [\"both\"]\n");
    reload(&lab, &rule, true);
    // What is there is named, and where it is.
    let check = |vault: &str| lab.serve(&["policy", "check", &format!("@{vault}")]);
    let found = check(&id).code(76);
    assert!(found.out.contains(" in dataset ") && found.out.lines().count() == 1, "{found:?}");
    let dataset = found.out.split_whitespace().nth(4).unwrap();
    check(dataset).code(76);
    lab.serve(&["policy", "test", "@a", &format!("@{dataset}"), "@none"]).code(76);
    lab.serve(&["policy", "test", "@a", &format!("@{dataset}"), "@both"]).ok();
    until("the host is told", || set(b, "encrypted").code == 76);
    fs::write(b.file("ds/inner/encrypted"), "again").unwrap();
    let plain = File::options().append(true).open(b.file("ds/inner/plain"));
    assert_eq!(plain.unwrap_err().raw_os_error(), EPERM);
    assert_eq!(fs::read_to_string(b.file("ds/inner/plain")).unwrap(), "before the rule");
    // An exception holds in them, too.
    reload(&lab, &rule.replace(&format!("[{id:?}]"), &format!("[\"*\", \"!{id}\"]")), true);
    check(&id).ok();
    until("the host is told", || set(b, "encrypted").code == 0);
    unmounted_and_checked(&lab, &[a, b]);
}

#[test]
fn a_vault_that_is_forbidden_is_read_and_not_used() {
    let lab = Lab::new();
    let a = lab.joined("a");
    let id = lab.vault(a);
    a.mount().ok();
    a.write("f", "text").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    reload(
        &lab,
        &format!(
            "[vaults]\nours = [\"{id}\"]\n[[rule]]\nname = \"domains of their own\"\nvaults = [\"@ours\"]\nforbid.domains = [\"zone\"]\n"
        ),
        true,
    );
    a.mount().code(76).says("\"domains of their own\"");
    mount_shared(a).code(76).says("domain zone");
    assert!(a.run("cat store/v f").ok().out.contains("text"));
    a.run(&format!("mount --read-only --anchor {} store/v m-a", lab.url())).ok();
    assert_eq!(fs::read_to_string(a.file("f")).unwrap(), "text");
    a.umount().ok();
    // Another one is not what the rule is about, until it is.
    a.run("init --domain family store/w").ok();
    let other = a.id("store/w");
    lab.grant(a, &other);
    reload(&lab, "[[rule]]\nname = \"domains\"\nrequire.domains = [\"file\"]\n", true);
    a.run(&format!("anchor move store/w {}", lab.url())).code(76).says("\"domains\"");
    a.run("ls store/w").ok();
    lab.serve(&["policy", "test", "@a", &format!("@{id}"), "@both"]).code(76);
    reload(&lab, "", true);
    a.run(&format!("anchor move store/w {}", lab.url())).ok();
    a.mount().ok();
    a.umount().ok();
    let refused = lab.metric("policy_refusals_total{at=\"session\"}");
    assert!(refused >= 2.0 && lab.metric("policy_refusals_total{at=\"anchor\"}") >= 1.0);
    let log = lab.serve(&["audit", "--json"]).ok().out;
    let of = |what: &str| log.lines().filter(|line| line.contains("policy-refused") && line.contains(what)).count();
    assert!(of("\"at\":\"session\"") == 1 && of("\"at\":\"anchor\"") == 1, "{log}");
    assert_eq!(log.lines().filter(|line| line.contains("policy-taken")).count(), 3);
}

// --- a host that lies

fn connection(lab: &Path, name: &str, port: u16) -> Connection {
    let servers = lab.join(format!("state-{name}/lamassu/servers"));
    Connection::new(&servers, &format!("127.0.0.1:{port}")).unwrap()
}

pub(crate) struct Liar<'a> {
    lab: &'a Lab,
    vault: [u8; 16],
    pub turns: Arc<Turns>,
}

impl Liar<'_> {
    pub fn new<'a>(lab: &'a Lab, id: &str) -> Liar<'a> {
        let vault = id_of(id).try_into().unwrap();
        let connection = connection(lab.dir.path(), "evil", lab.port);
        Liar { lab, vault, turns: Turns::begin(&connection, VaultId(vault), &lab.path("copy-evil")).unwrap() }
    }

    pub fn turn(&self) -> Turn {
        self.turns.take(Mode::Exclusive).unwrap()
    }

    /// The only file whose profile is `number`.
    fn file(&self, turn: &Turn, number: u8) -> (Vec<u8>, Row) {
        let mut found = Vec::new();
        turn.table
            .scan(Space::Objects, &[], &mut |key, value| {
                let row = Row::decode(value).unwrap();
                if row.file().is_some_and(|file| file.profile.number() == number) {
                    found.push((key.to_vec(), row));
                }
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
        assert_eq!(found.len(), 1);
        found.remove(0)
    }
}

/// Whether a turn may say that the only file of the usual profile is plain.
pub(crate) fn may_be_plain(liar: &Liar<'_>, turn: &Turn) -> bool {
    let (key, good) = liar.file(turn, 0);
    let plain = Profile::of_number(3).unwrap();
    let done = turn.table.commit(&[row_change(&key, &with_file(&good, |file| file.profile = plain))]);
    assert!(done.is_ok() || forbids(done), "it is neither made nor forbidden");
    turn.table.get(Space::Objects, &key).unwrap() != Some(good.encode())
}

fn row_change(key: &[u8], row: &Row) -> Change {
    Change { space: Space::Objects, key: key.to_vec(), value: Some(row.encode()) }
}

fn with_file(row: &Row, change: impl FnOnce(&mut FileRow)) -> Row {
    let mut row = row.clone();
    if let Content::File(file) = &mut row.content {
        change(file);
    }
    row
}

fn forbids(done: Result<(), AnchorError>) -> bool {
    matches!(done, Err(AnchorError::Server { fault: ServerFault::Policy { rule, .. }, .. }) if rule == "no plain")
}

/// By a key that is genuine and with rights that it has: what it commits is judged by what its rows say.
#[test]
fn a_host_that_lies_is_refused_and_nothing_of_it_is_kept() {
    let lab = Lab::new();
    let (a, evil) = (lab.joined("a"), lab.joined("evil"));
    let id = lab.vault(a);
    lab.grant(evil, &id);
    a.mount().ok();
    fs::create_dir(a.file("plain")).unwrap();
    set(a, "--protect none", "plain").ok();
    a.write("plain/old", "old").unwrap();
    a.write("good", "good").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    reload(&lab, NO_PLAIN, true);
    let liar = Liar::new(&lab, &id);
    {
        let turn = liar.turn();
        let ((old_key, old), (key, good)) = (liar.file(&turn, 3), liar.file(&turn, 0));
        let none = Profile::of_number(3).unwrap();
        let new_key = (1_u64 << 40).to_be_bytes();
        let lie = with_file(&good, |file| file.profile = none);
        // A new file, one that was good, one that was forbidden before and gets other content; among what is good.
        assert!(forbids(turn.table.commit(&[row_change(&new_key, &lie)])));
        assert!(forbids(turn.table.commit(&[row_change(&key, &lie)])));
        let other = with_file(&old, |file| file.root = Digest([9; 32]));
        let mode = Row { mode: 0o600, ..good.clone() };
        assert!(forbids(turn.table.commit(&[row_change(&key, &mode), row_change(&old_key, &other)])));
        // Opened, as if to be brought to another profile, and then written after all.
        let window = lamassu_anchor::Window { session: 99, tag: lamassu_format::SessionTag([1; 6]), covered: 0 };
        let windows = lamassu_anchor::Windows::from_iter([window]);
        let open = lamassu_anchor::row::Open { file: lamassu_format::FileId([1; 16]), windows, cut: None };
        let opened = with_file(&old, |file| file.open = Some(open));
        turn.table.commit(&[row_change(&old_key, &opened)]).unwrap();
        assert!(forbids(turn.table.commit(&[row_change(&old_key, &with_file(&opened, |file| file.size += 1))])));
        turn.table.commit(&[row_change(&old_key, &old)]).unwrap();
        // A vault that says it is another one, and bytes that are no row.
        let row = Anchor::open(turn.table.clone(), &VaultId(liar.vault)).unwrap().vault();
        let other = VaultRow { suite: Suite::Chacha, ..row };
        let lie = Change { space: Space::Vault, key: b"vault".to_vec(), value: Some(other.encode()) };
        assert!(turn.table.commit(&[lie]).is_err());
        let garbage = Change { space: Space::Objects, key: new_key.to_vec(), value: Some(vec![0xff; 40]) };
        assert!(turn.table.commit(&[garbage]).is_err());
        turn.pass();
    }
    // The next turn shows what is kept.
    let turn = liar.turn();
    let (_, good) = liar.file(&turn, 0);
    assert_eq!(good.mode, 0o644);
    assert!(turn.table.get(Space::Objects, &(1_u64 << 40).to_be_bytes()).unwrap().is_none());
    assert!(liar.file(&turn, 3).1.file().unwrap().open.is_none());
    turn.pass();
    liar.turns.leave();
    assert!(liar.lab.metric("policy_refusals_total{at=\"commit\"}") >= 4.0);
    let log = lab.serve(&["audit", "--json"]).ok().out;
    let told = log.lines().filter(|line| line.contains("policy-refused")).collect::<Vec<_>>();
    assert!(told.len() == 1 && told[0].contains("\"host\":\"evil\"") && told[0].contains("no plain"), "{told:?}");
    lab.wait_until_free();
    a.mount().ok();
    assert_eq!(fs::read_to_string(a.file("plain/old")).unwrap(), "old");
    a.write("good", "better").unwrap();
    a.umount().ok();
    a.run("check store/v").ok();
}

// --- reloads

#[test]
fn nonsense_is_refused_and_the_policy_before_stays() {
    let mut lab = Lab::new();
    let a = lab.joined("a");
    let id = lab.vault(a);
    let test = |lab: &Lab| lab.serve(&["policy", "test", "@a", &format!("@{id}"), "@none"]);
    reload(&lab, NO_PLAIN, true);
    assert!(test(&lab).code(76).out.contains("protection none by \"no plain\""));
    reload(&lab, "\n[[rule]]\nname = \"x\"\nforbid.protections = [\"nnone\"]\n", false);
    // The log is written behind that.
    let until = Instant::now() + PATIENCE;
    while !(lab.log().contains("line 4, forbid.protections") && lab.log().contains("stays in force")) {
        assert!(Instant::now() < until, "{}", lab.log());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    test(&lab).code(76);
    lab.serve(&["policy", "show"]).ok().says("1 rules in force").says("a reload would fail");
    lab.serve(&["run", "--check-config"]).code(13).says("line 4");
    lab.serve(&["policy", "test", "--file", "@a", &format!("@{id}"), "@none"]).code(13);
    lab.serve(&["policy", "test", "@a", &format!("@{id}"), "@nnone"]).code(2);
    lab.serve(&["policy", "test", "@a", &format!("@{}", "00".repeat(16))]).code(3);
    // It goes on with that, and does not start with it.
    lab.stop("-TERM");
    lab.serve(&["run"]).code(13).says("policy.toml");
    fs::write(lab.path("server/policy.toml"), "").unwrap();
    lab.serve(&["policy", "show"]).ok().says("no server runs");
    lab.serve(&["run", "--check-config"]).ok();
    lab.start();
    test(&lab).ok();
    assert_eq!(lab.metric("policy_rules"), 0.0);
}

/// Honest hosts lose nothing by a policy that comes while they write: what they had made before is committed, and what
/// comes after is refused when it is made.
#[test]
fn a_policy_that_comes_under_load_costs_honest_hosts_nothing() {
    let lab = Lab::new();
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    let id = lab.vault(a);
    lab.grant(b, &id);
    a.mount().ok();
    fs::create_dir(a.file("plain")).unwrap();
    set(a, "--protect none", "plain").ok();
    let (plain, good) = (a.file("plain"), a.file(""));
    let is_over = AtomicBool::new(false);
    let made = std::thread::scope(|scope| {
        let makes = scope.spawn(|| {
            let mut made = Vec::new();
            for number in 0.. {
                let path = plain.join(number.to_string());
                match File::options().write(true).create_new(true).open(&path) {
                    Ok(mut file) => {
                        // The policy may come between the two.
                        if file.write_all(b"text").is_ok() {
                            made.push(path);
                        }
                    }
                    Err(error) => {
                        assert_eq!(error.raw_os_error(), EPERM);
                        break;
                    }
                }
            }
            made
        });
        let syncs = scope.spawn(|| {
            for count in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                let mut file = File::create(good.join("synced")).unwrap();
                file.write_all(count.to_string().as_bytes()).unwrap();
                file.sync_all().unwrap();
            }
        });
        // Also where something fails here.
        let over = Over(&is_over);
        until("files are made", || plain.join("5").exists());
        reload(&lab, NO_PLAIN, true);
        let made = makes.join().unwrap();
        // Other policies come and go, of which none forbids what is synced.
        for round in 0..5 {
            reload(&lab, &format!("{NO_PLAIN}[[rule]]\nname = \"r{round}\"\nforbid.keys = [\"random\"]\n"), true);
        }
        drop(over);
        syncs.join().unwrap();
        made
    });
    a.umount().ok();
    lab.wait_until_free();
    mount_shared(b).ok();
    for path in &made {
        let name = format!("plain/{}", path.file_name().unwrap().to_str().unwrap());
        assert_eq!(fs::read_to_string(b.file(&name)).unwrap(), "text");
    }
    b.umount().ok();
    lab.wait_until_free();
    a.run("check store/v").ok();
    assert!(!made.is_empty());
}

/// A server that is put back, and one that starts with another policy, go by the one that they have.
#[test]
fn a_policy_is_part_of_a_backup_and_is_read_at_the_start() {
    let mut lab = Lab::new();
    let a = lab.joined("a");
    let id = lab.vault(a);
    reload(&lab, NO_PLAIN, true);
    lab.serve(&["backup", &format!("@{}", lab.path("backup").display())]).ok();
    lab.stop("-TERM");
    fs::remove_dir_all(lab.path("server")).unwrap();
    fs::rename(lab.path("backup"), lab.path("server")).unwrap();
    lab.start();
    lab.serve(&["policy", "test", "@a", &format!("@{id}"), "@none"]).code(76);
    assert_eq!(lab.metric("policy_rules"), 1.0);
}
