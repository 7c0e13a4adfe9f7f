//! Integrity events of real mounts: counted, logged, given to a command, in no case a name or key that is secret.

use crate::mounts::{bench, daemon_of, is_mounted, wait_for};
use crate::support::{Bench, flip, noise};
use rustix::fs::{XattrFlags, getxattr, listxattr, setxattr};
use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Plain names begin with this; it is in no event.
pub const SECRET: &str = "plainname";

pub fn can_mount() -> bool {
    let can = Path::new("/dev/fuse").exists();
    if !can {
        eprintln!("SKIPPED: takes /dev/fuse");
    }
    can
}

/// A command that appends a line for each of its starts to `seen`, and its input on that line.
pub fn collector(b: &Bench) -> String {
    let seen = b.path("seen");
    format!(
        r#"{{ printf '%s\t%s\t' "$LAMASSU_EVENT_KIND" "$LAMASSU_MOUNTPOINT"; cat; env | tr '\n' ' ' >> {0}.env; echo; }} >> {0}"#,
        seen.display()
    )
}

fn mount(b: &Bench, command: &str, env: &[(&str, &Path)]) {
    let mut mount = b.command(["mount", "--cache", "none", "--on-integrity-failure", command, "v", "m"]);
    crate::support::Ran::from(mount.envs(env.iter().copied()).output().unwrap()).ok();
}

/// What the command was given: for each start the kinds, and the events.
fn starts(b: &Bench) -> Vec<(String, Vec<Value>)> {
    let text = fs::read_to_string(b.path("seen")).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let start = |line: &str| {
        let mut parts = line.splitn(3, '\t');
        let (kinds, mountpoint) = (parts.next().unwrap().to_owned(), parts.next().unwrap());
        assert_eq!(Path::new(mountpoint), b.path("m").canonicalize().unwrap_or_else(|_| b.path("m")));
        match serde_json::from_str(parts.next().unwrap()).unwrap() {
            Value::Array(events) => (kinds, events),
            event => (kinds, vec![event]),
        }
    };
    whole.lines().map(start).collect()
}

pub fn events(b: &Bench) -> Vec<Value> {
    starts(b).into_iter().flat_map(|(_, events)| events).collect()
}

fn count(b: &Bench, kind: &str) -> u64 {
    let info = b.run("info --json m").ok().json();
    let found = info["mount"]["integrity"]["found"].as_array().unwrap().clone();
    found.iter().filter(|found| found["kind"] == kind).map(|found| found["count"].as_u64().unwrap()).sum()
}

fn fails(path: &Path) {
    assert_eq!(fs::read(path).unwrap_err().raw_os_error(), Some(libc::EIO), "{}", path.display());
}

/// A file with one damaged block.
fn damaged_file(b: &Bench, name: &str) {
    b.file(name, &noise(100_000, name.as_bytes()[0].into()));
    b.run(&format!("cp v {name} vault:")).ok();
    flip(&b.stored("v", name), 3 * 4096);
}

/// With an anchor, and without: there is damage that an anchor calls by another name.
const BOTH: [bool; 2] = [true, false];

fn bench_with(is_anchored: bool) -> Bench {
    bench(if is_anchored { "" } else { "--anchor none" })
}

/// What lies in the store under these names is damaged: a block, a page, a link, an attribute, a record, a name. As
/// which kinds that is found, and where.
fn damaged(b: &Bench, is_anchored: bool) -> Vec<(&'static str, String)> {
    let of = |kind, anchored| if is_anchored { anchored } else { kind };
    let plain = |name: &str| b.path("m").join(format!("{SECRET}-{name}"));
    b.run("mount v m").ok();
    fs::write(plain("block"), noise(100_000, 1)).unwrap();
    fs::write(plain("page"), noise(100_000, 2)).unwrap();
    fs::write(plain("attribute"), b"").unwrap();
    let flags = XattrFlags::empty();
    let has_attributes = setxattr(plain("attribute"), "user.plainname", b"plainvalue", flags).is_ok();
    std::os::unix::fs::symlink(format!("{SECRET}-target"), plain("link")).unwrap();
    fs::create_dir(plain("record")).unwrap();
    fs::write(plain("record").join(SECRET), b"").unwrap();
    fs::create_dir(plain("dir")).unwrap();
    fs::write(plain("dir").join(format!("{SECRET}-name")), b"").unwrap();
    b.unmount("m");
    let stored = |name: &str| b.stored("v", &format!("{SECRET}-{name}"));
    let shown = |path: &Path| path.strip_prefix(b.path("v")).unwrap().display().to_string();
    let mut all = vec![("block-hash", shown(&stored("block"))), ("page-seal", shown(&stored("page")))];
    flip(&stored("block"), 3 * 4096);
    flip(&stored("page"), 100);
    let link = stored("link");
    let target = fs::read_link(&link).unwrap().into_os_string().into_string().unwrap();
    fs::remove_file(&link).unwrap();
    let other = if target.starts_with('A') { "B" } else { "A" };
    std::os::unix::fs::symlink(format!("{other}{}", &target[1..]), &link).unwrap();
    all.push((of("symlink", "stale"), shown(&link)));
    let record = stored("record");
    let text = fs::read_link(record.join("lamassu.dir")).unwrap().into_os_string().into_string().unwrap();
    fs::remove_file(record.join("lamassu.dir")).unwrap();
    let other = if text.starts_with('A') { "B" } else { "A" };
    std::os::unix::fs::symlink(format!("{other}{}", &text[1..]), record.join("lamassu.dir")).unwrap();
    all.push((of("directory-record", "stale"), format!("{}/lamassu.dir", shown(&record))));
    let name = stored(&format!("dir/{SECRET}-name"));
    let moved = stored("dir").parent().unwrap().join(name.file_name().unwrap());
    fs::rename(&name, &moved).unwrap();
    all.push((of("name", "unrecorded"), shown(&moved)));
    if has_attributes {
        let (of, kind) = (stored("attribute"), of("xattr", "stale"));
        let mut names = [0; 4096];
        let len = listxattr(&of, &mut names[..]).unwrap();
        let attr = names[..len].split(|b| *b == 0).find(|name| name.starts_with(b"user.lamassu")).unwrap().to_vec();
        let mut value = [0; 4096];
        let len = getxattr(&of, &attr[..], &mut value[..]).unwrap();
        value[len - 1] ^= 1;
        setxattr(&of, &attr[..], &value[..len], flags).unwrap();
        all.push((kind, shown(&of)));
    }
    all
}

/// Meets all that [`damaged`] has damaged.
fn meet(b: &Bench) {
    let plain = |name: &str| b.path("m").join(format!("{SECRET}-{name}"));
    fails(&plain("block"));
    fails(&plain("page"));
    fs::read_link(plain("link")).unwrap_err();
    let _ = fs::read_dir(plain("record")).map(|entries| entries.for_each(drop));
    fs::read_dir(b.path("m")).unwrap().for_each(drop);
    let _ = getxattr(plain("attribute"), "user.plainname", &mut [0; 64][..]);
}

pub fn has_no_secret(text: &str) {
    assert!(!text.contains(SECRET) && !text.contains("plainvalue"), "{text}");
}

#[test]
fn a_command_is_told_of_everything_that_is_damaged() {
    if !can_mount() {
        return;
    }
    BOTH.iter().for_each(|is_anchored| a_command_is_told(*is_anchored));
}

fn a_command_is_told(is_anchored: bool) {
    let b = bench_with(is_anchored);
    let damaged = damaged(&b, is_anchored);
    mount(&b, &collector(&b), &[]);
    meet(&b);
    let has = |(kind, path): &(&str, String)| events(&b).iter().any(|e| e["kind"] == *kind && e["path"] == **path);
    wait_for("every event", || damaged.iter().all(has));
    let info = b.run("info m").ok().text();
    for (kind, _) in &damaged {
        assert!(count(&b, kind) >= 1 && info.contains(kind), "{kind}: {info}");
    }
    b.unmount("m");
    for event in events(&b) {
        assert!(event["is_damage"] == true && event["time"].as_u64().unwrap() > 1_700_000_000, "{event}");
        assert_eq!(event["vault"].as_str().unwrap().len(), 32);
    }
    let block = events(&b).into_iter().find(|e| e["kind"] == "block-hash").unwrap();
    assert_eq!((&block["range"]["block"], &block["found_by"]), (&2.into(), &"read".into()), "{block}");
    has_no_secret(&fs::read_to_string(b.path("seen")).unwrap());
    // What the command has of its surroundings.
    let env = fs::read_to_string(b.path("seen.env")).unwrap();
    assert!(!env.contains("LAMASSU_KEY") && !env.contains("LAMASSU_ALERT"), "{env}");
    // The same words.
    let report = b.run("check --json v").code(26).json();
    let kinds: HashSet<_> =
        report["problems"].as_array().unwrap().iter().map(|p| p["kind"].as_str().unwrap()).collect();
    for (kind, _) in &damaged {
        assert!(kinds.contains(kind), "{kind}: {kinds:?}");
    }
}

#[test]
fn of_a_thousand_damaged_files_none_is_lost_and_the_log_is_short() {
    const FILES: usize = 1000;
    if !can_mount() {
        return;
    }
    let b = bench("");
    let from = b.dir("from");
    (0..FILES).for_each(|i| fs::write(from.join(format!("{i}")), noise(300, i as u64)).unwrap());
    b.run("cp -r v from vault:d").ok();
    let stored = b.stored("v", "d");
    let files = fs::read_dir(&stored).unwrap().map(|e| e.unwrap()).filter(|e| e.file_type().unwrap().is_file());
    assert_eq!(files.map(|e| flip(&e.path(), 100)).count(), FILES);
    let socket = UnixDatagram::bind(b.path("syslog")).unwrap();
    socket.set_nonblocking(true).unwrap();
    mount(&b, &collector(&b), &[("LAMASSU_SYSLOG", &b.path("syslog"))]);
    let (started, mut lines) = (Instant::now(), Vec::new());
    let mut hear = || {
        let mut buf = [0; 8192];
        while let Ok(n) = socket.recv(&mut buf) {
            lines.push(String::from_utf8_lossy(&buf[..n]).into_owned());
        }
    };
    for i in 0..FILES {
        fails(&b.path("m/d").join(format!("{i}")));
        hear();
    }
    assert_eq!(count(&b, "page-seal"), FILES as u64);
    let paths = || events(&b).iter().map(|e| e["path"].as_str().unwrap().to_owned()).collect::<HashSet<_>>().len();
    wait_for("every event", || paths() == FILES);
    wait_for("a summary", || {
        hear();
        b.run("info --json m").ok().json()["mount"]["integrity"]["not_logged"].as_u64().unwrap() > 0
    });
    let all_took = started.elapsed().as_secs() as usize + 2;
    assert!(starts(&b).len() <= all_took, "{} starts in {all_took} s", starts(&b).len());
    b.unmount("m");
    hear();
    let events: Vec<_> = lines.iter().filter(|line| line.contains("page-seal") && !line.contains("EIO")).collect();
    // Those of the last files may be written after these were read.
    assert!(events.len() <= 20 * all_took, "{} lines in {all_took} s", events.len());
    assert!(lines.iter().any(|line| line.contains("suppressed=")), "{lines:?}");
}

#[test]
fn a_command_that_hangs_keeps_nobody_waiting() {
    if !can_mount() {
        return;
    }
    let b = bench("");
    ["f", "g"].iter().for_each(|name| damaged_file(&b, name));
    mount(&b, &format!("echo $$ >> {}; sleep 1000", b.path("pids").display()), &[]);
    fails(&b.path("m/f"));
    wait_for("a start", || b.path("pids").exists());
    let started = Instant::now();
    fails(&b.path("m/g"));
    let daemon = daemon_of(&b);
    b.unmount("m");
    // It is killed after ten.
    assert!(started.elapsed() < Duration::from_secs(9), "nothing has waited for the command's end");
    wait_for("the end of the mount", || !Path::new(&format!("/proc/{daemon}")).exists());
    // What was told last is run too, and killed too.
    let pids = || fs::read_to_string(b.path("pids")).unwrap().lines().map(str::to_owned).collect::<Vec<_>>();
    wait_for("the second start", || pids().len() == 2);
    wait_for("the end of commands", || pids().iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
    assert!(!is_mounted(&b.path("m")));
}

#[test]
fn a_command_that_fails_is_counted_and_an_option_of_fstab_names_it() {
    if !can_mount() {
        return;
    }
    let b = bench("");
    damaged_file(&b, "f");
    let log = b.path("log");
    let words = r"on_integrity_failure=test a \, b; exit 3";
    let ran = b.command(["mount", "--log-file", log.to_str().unwrap(), "-o", words, "v", "m"]).output().unwrap();
    crate::support::Ran::from(ran).ok();
    fails(&b.path("m/f"));
    let failures = || b.run("info --json m").ok().json()["mount"]["integrity"]["failed_alerts"].as_u64().unwrap();
    wait_for("the failure", || failures() > 0);
    b.unmount("m");
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("exit status: 3"), "{log}");
}

/// A fake journal, and a fake syslog.
#[test]
fn events_reach_the_journal_with_their_fields_or_else_syslog() {
    if !can_mount() {
        return;
    }
    BOTH.iter().for_each(|is_anchored| events_are_logged(*is_anchored));
}

fn events_are_logged(is_anchored: bool) {
    let b = bench_with(is_anchored);
    let damaged = damaged(&b, is_anchored);
    for (name, variable) in [("journal", "LAMASSU_JOURNAL"), ("syslog", "LAMASSU_SYSLOG")] {
        let socket = UnixDatagram::bind(b.path(name)).unwrap();
        let is_told = |heard: &[String], (kind, path): &(&str, String)| {
            heard.iter().any(|text| match name {
                "journal" => {
                    let fields: HashSet<_> = text.lines().collect();
                    let own = [format!("LAMASSU_KIND={kind}"), format!("LAMASSU_STORED={path}")];
                    own.iter().all(|field| fields.contains(field.as_str())) && fields.contains("PRIORITY=3")
                }
                _ => text.starts_with("<27>lamassu[") && text.contains(kind) && text.contains(path),
            })
        };
        // A socket holds ten messages, and a log that falls behind for more than these loses some: this thread's
        // fault, on a busy machine. Another mount tells all anew.
        for last in (1..=12).map(|attempt| attempt == 12) {
            let own = socket.try_clone().unwrap();
            let listener = std::thread::spawn(move || {
                let (mut heard, mut buf) = (Vec::new(), [0; 8192]);
                while let Ok(n @ 1..) = own.recv(&mut buf) {
                    heard.push(String::from_utf8(buf[..n].to_vec()).unwrap());
                }
                heard
            });
            crate::support::Ran::from(b.command(["mount", "v", "m"]).env(variable, b.path(name)).output().unwrap())
                .ok();
            meet(&b);
            b.unmount("m");
            UnixDatagram::unbound().unwrap().send_to(&[], b.path(name)).unwrap();
            let heard = listener.join().unwrap();
            heard.iter().filter(|text| !text.contains("mounted dir=")).for_each(|text| has_no_secret(text));
            let untold: Vec<_> = damaged.iter().filter(|one| !is_told(&heard, one)).collect();
            if untold.is_empty() {
                break;
            }
            assert!(!last, "{name}: {untold:?}: {heard:#?}");
        }
    }
}

/// The broker is the daemon's own: no key, no open file of the vault, no name, and it ends with the daemon.
#[test]
fn the_broker_has_nothing_and_ends_with_the_daemon() {
    if !can_mount() {
        return;
    }
    let b = bench("");
    mount(&b, "true", &[]);
    let daemon = daemon_of(&b);
    let is_broker = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        line.ends_with(b"__integrity-broker\0") && status.contains(&format!("PPid:\t{daemon}\n"))
    };
    let pids = fs::read_dir("/proc").unwrap().filter_map(|e| e.unwrap().file_name().to_str()?.parse::<i32>().ok());
    let broker = pids.into_iter().find(is_broker).unwrap();
    let env = String::from_utf8(fs::read(format!("/proc/{broker}/environ")).unwrap()).unwrap();
    assert!(!env.contains("LAMASSU_KEY"), "{env}");
    let status = fs::read_to_string(format!("/proc/{broker}/status")).unwrap();
    assert!(status.contains("VmLck:\t       0 kB"), "no locked memory, so no key: {status}");
    let open: Vec<_> = fs::read_dir(format!("/proc/{broker}/fd"))
        .unwrap()
        .map(|fd| fs::read_link(fd.unwrap().path()).unwrap())
        .collect();
    for link in &open {
        let shown = link.display().to_string();
        assert!(shown == "/dev/null" || shown.starts_with("socket:"), "{open:?}");
    }
    crate::mounts::kill(daemon, "-KILL");
    wait_for("the end of the broker", || {
        let stat = fs::read_to_string(format!("/proc/{broker}/stat")).unwrap_or_default();
        stat.is_empty() || stat.contains(") Z ")
    });
    let _ = Command::new("umount").arg("-l").arg(b.path("m")).output();
}

/// As a service of systemd that stays in the foreground.
#[test]
fn a_service_whose_standard_error_is_the_journal_writes_fields() {
    use std::os::unix::fs::MetadataExt;
    if !can_mount() {
        return;
    }
    let b = bench("");
    damaged_file(&b, "f");
    let socket = UnixDatagram::bind(b.path("journal")).unwrap();
    for is_journal in [true, false] {
        let stderr = fs::File::create(b.path("stderr")).unwrap();
        let st = stderr.metadata().unwrap();
        let stream = format!("{}:{}", st.dev(), st.ino() + u64::from(!is_journal));
        let mut mount = b.command(["mount", "--foreground", "v", "m"]);
        let env = [("JOURNAL_STREAM", stream.into()), ("LAMASSU_JOURNAL", b.path("journal").into_os_string())];
        let mut mounted = mount.envs(env).stderr(stderr).spawn().unwrap();
        wait_for("a mount", || is_mounted(&b.path("m")));
        fails(&b.path("m/f"));
        b.unmount("m");
        assert!(mounted.wait().unwrap().success());
        let said = fs::read_to_string(b.path("stderr")).unwrap();
        assert!(said.contains("input/output error") && said.contains("damaged block") != is_journal, "{said}");
        socket.set_nonblocking(true).unwrap();
        let mut buf = [0; 8192];
        let heard = socket.recv(&mut buf).map_or(String::new(), |n| String::from_utf8_lossy(&buf[..n]).into_owned());
        assert_eq!(heard.contains("LAMASSU_KIND=block-hash\n"), is_journal, "{heard}");
    }
}

/// A crash between the anchor's commit of a rename and the store's step: the next mount does the step, and has nothing
/// to tell.
#[test]
fn a_rename_that_is_done_again_is_no_event() {
    if !can_mount() {
        return;
    }
    let b = bench("");
    mount(&b, "true", &[]);
    for name in ["a", "b", "c"] {
        fs::write(b.path("m").join(name), noise(5000, name.as_bytes()[0].into())).unwrap();
        fs::File::open(b.path("m").join(name)).unwrap().sync_all().unwrap();
    }
    fs::File::open(b.path("m")).unwrap().sync_all().unwrap();
    let copied = Command::new("cp").arg("-a").args([b.path("v"), b.path("before")]).status().unwrap();
    assert!(copied.success());
    fs::rename(b.path("m/a"), b.path("m/b")).unwrap();
    fs::rename(b.path("m/c"), b.path("m/a")).unwrap();
    crate::mounts::kill(daemon_of(&b), "-KILL");
    wait_for("the end of the mount", || b.run("umount --lazy m").code == 0 || !is_mounted(&b.path("m")));
    fs::remove_dir_all(b.path("v")).unwrap();
    fs::rename(b.path("before"), b.path("v")).unwrap();
    let command = collector(&b);
    mount(&b, &command, &[]);
    assert_eq!(fs::read(b.path("m/b")).unwrap(), noise(5000, b'a'.into()));
    assert_eq!(fs::read(b.path("m/a")).unwrap(), noise(5000, b'c'.into()));
    let info = b.run("info --json m").ok().json();
    assert_eq!(info["mount"]["integrity"]["found"].as_array().unwrap().len(), 0, "{info}");
    b.unmount("m");
    assert!(starts(&b).is_empty());
    b.run("check v").ok();
    b.run("scrub v").ok();
}

/// A file is truncated, and replaced before that is settled: nothing was interrupted.
#[test]
fn a_truncated_file_that_is_replaced_is_no_event() {
    if !can_mount() {
        return;
    }
    let b = bench("");
    let command = collector(&b);
    mount(&b, &command, &[]);
    for len in [0, 5] {
        fs::write(b.path("m/a"), vec![0; 600_000]).unwrap();
        fs::File::open(b.path("m/a")).unwrap().sync_all().unwrap();
        fs::write(b.path("m/g"), "1").unwrap();
        fs::File::options().write(true).open(b.path("m/a")).unwrap().set_len(len).unwrap();
        fs::rename(b.path("m/g"), b.path("m/a")).unwrap();
        assert_eq!(fs::read(b.path("m/a")).unwrap(), b"1");
    }
    let info = b.run("info --json m").ok().json();
    assert_eq!(info["mount"]["integrity"]["found"].as_array().unwrap().len(), 0, "{info}");
    b.unmount("m");
    assert!(starts(&b).is_empty());
}
