use super::*;
use lamassu_anchor::row::{Content, FileRow, Open, Row, Sealed};
use lamassu_anchor::table::{Change, DiskTable, Space, Table};
use lamassu_anchor::{Anchor, Digest, ObjectId, Revision, TokenKey, Window, Windows};
use lamassu_format::header::VaultId;
use lamassu_format::{FileId, SessionTag};
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

const VAULT: &str = "5f0c3a527b1e4c8d9a510d2f6b7c8e90";

fn subject(host: &str) -> Subject {
    let (vault, around) = (VAULT.into(), Vec::new());
    Subject { host: host.into(), vault, around, suite: Suite::Aes, domain: Domain::Zone }
}

fn of(text: &str) -> Policy {
    parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// All profiles of a suite.
fn profiles(suite: Suite) -> impl Iterator<Item = Profile> {
    (0..=u8::MAX).filter_map(Profile::of_number).filter(move |profile| profile.check(suite).is_ok())
}

/// Those that a rule forbids to a host, and what of each.
fn forbidden(rule: &str, subject: &Subject) -> Vec<String> {
    let policy = of(&format!("[[rule]]\nname = \"r\"\n{rule}"));
    let what = |profile| policy.reasons(subject, profile).next().map(|one| format!("{}", one.what));
    let mut all: Vec<_> = profiles(subject.suite).filter_map(what).collect();
    all.sort();
    all.dedup();
    all
}

#[test]
fn a_rule_forbids_what_it_says_and_what_lacks_what_it_requires() {
    let a = subject("a");
    for (rule, what) in [
        ("forbid.protections = [\"none\"]", vec!["protection none"]),
        ("require.protections = [\"both\"]", vec!["protection encrypt", "protection integrity", "protection none"]),
        ("forbid.ciphers = [\"aes-128\"]", vec!["cipher aes-128"]),
        ("forbid.ciphers = [\"chacha20\"]", vec![]),
        ("forbid.hashes = [\"blake3\"]", vec!["hash blake3"]),
        ("require.hashes = [\"blake3\"]", vec!["hash sha-256"]),
        ("forbid.keys = [\"convergent\"]", vec!["block keys convergent"]),
        (
            "require.keys = [\"random\"]",
            vec![
                "block keys convergent",
                "protection integrity, which has not block keys",
                "protection none, which has not block keys",
            ],
        ),
        (
            "require.ciphers = [\"aes-256\"]",
            vec![
                "cipher aes-128",
                "protection integrity, which has not a cipher",
                "protection none, which has not a cipher",
            ],
        ),
        ("forbid.suites = [\"aes\"]", vec!["suite aes"]),
        ("require.suites = [\"chacha\", \"blake3\"]", vec!["suite aes"]),
        ("require.suites = [\"aes\"]", vec![]),
        ("require.domains = [\"file\", \"none\"]", vec!["domain zone"]),
        ("forbid.domains = [\"none\"]", vec![]),
    ] {
        assert_eq!(forbidden(rule, &a), what, "{rule}");
    }
    let chacha = Subject { suite: Suite::Chacha, ..a };
    assert_eq!(forbidden("forbid.ciphers = [\"chacha20\"]", &chacha), ["cipher chacha20"]);
    // The suite's own hash is the other one there.
    assert_eq!(forbidden("forbid.hashes = [\"sha-256\"]", &chacha), ["hash sha-256"]);
}

#[test]
fn a_rule_is_about_hosts_and_vaults_and_none_takes_back_what_another_says() {
    let text = r#"
        [groups]
        laptops = ["lt-*", "anna"]
        [vaults]
        finance = ["5F0C3A52-7b1e-4c8d-9a51-0d2f6b7c8e90"]
        others = ["00*"]
        [[rule]]
        name = "encrypt"
        hosts = ["@laptops", "!lt-0*"]
        vaults = ["@finance"]
        forbid.protections = ["none"]
        [[rule]]
        name = "also"
        hosts = ["lt-1"]
        require.protections = ["both", "none"]
        [[rule]]
        name = "elsewhere"
        vaults = ["@others"]
        forbid.suites = ["aes"]
    "#;
    let policy = of(text);
    let none = Profile::of_number(3).expect("none");
    let rules = |host: &str, profile| -> Vec<String> {
        policy.reasons(&subject(host), profile).map(|one| one.rule.to_string()).collect()
    };
    assert_eq!(rules("anna", none), ["encrypt"]);
    assert_eq!(rules("lt-1", none), ["encrypt"]);
    assert_eq!((rules("lt-0", none), rules("node1", none)), (vec![], vec![]));
    let encrypt = Profile::of_number(2).expect("encrypt");
    assert_eq!((rules("lt-1", encrypt), rules("anna", encrypt)), (vec!["also".into()], vec![]));
    let other = Subject { vault: "00".repeat(16), ..subject("node1") };
    assert_eq!(policy.forbids_vault(&other).map(|one| one.rule.to_string()), Some("elsewhere".into()));
    assert!(policy.forbids_vault(&subject("node1")).is_none() && policy.len() == 3);
    // What a host is told is that.
    let limits = policy.limits(&subject("anna"));
    assert!(limits.forbids(none).is_some() && limits.forbids(Profile::DEFAULT).is_none());
    assert!(policy.limits(&subject("node1")).is_empty() && of("").limits(&subject("a")).is_empty());
}

/// Else who may use a vault would make a dataset in it, to do there what the rule forbids.
#[test]
fn a_rule_for_a_vault_holds_in_the_datasets_in_it_and_so_do_its_exceptions() {
    let dataset = Subject { vault: "1".repeat(32), around: vec!["2".repeat(32), VAULT.into()], ..subject("a") };
    let beside = Subject { around: vec!["2".repeat(32)], ..dataset.clone() };
    let is_about = |vaults: &str, subject: &Subject| {
        let policy = of(&format!("[[rule]]\nname = \"r\"\nvaults = [{vaults}]\nforbid.suites = [\"aes\"]"));
        assert_eq!(policy.limits(subject).is_empty(), policy.forbids_vault(subject).is_none());
        policy.forbids_vault(subject).is_some()
    };
    let (own, all_but) = (format!("{:?}", "1".repeat(32)), format!("\"*\", \"!{VAULT}\""));
    for (vaults, holds) in [
        (format!("{VAULT:?}"), [true, true, false]),
        ("\"5f0c*\"".into(), [true, true, false]),
        ("\"22*\"".into(), [false, true, true]),
        (own.clone(), [false, true, true]),
        (all_but, [false, false, true]),
        (format!("{VAULT:?}, \"!{}\"", "1".repeat(32)), [true, false, false]),
    ] {
        let seen = [&subject("a"), &dataset, &beside].map(|subject| is_about(&vaults, subject));
        assert_eq!(seen, holds, "{vaults}");
    }
}

#[test]
fn patterns_match_names() {
    for (pattern, name, is_so) in [
        ("a", "a", true),
        ("a", "ab", false),
        ("*", "", true),
        ("*", "anything", true),
        ("a*", "a", true),
        ("a*c", "abc", true),
        ("a*c", "ac", true),
        ("a*c", "a", false),
        ("a*c", "acb", false),
        ("aa*aa", "aaa", false),
        ("*b*", "abc", true),
        ("*b*b*", "abc", false),
        ("a**c", "abc", true),
    ] {
        assert_eq!(matches(pattern, name), is_so, "{pattern} {name}");
    }
}

#[test]
fn the_commented_file_has_no_rule_and_is_good_without_its_signs() {
    assert!(of(COMMENTED).is_empty());
    let lines =
        COMMENTED.lines().map(|line| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line));
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    let policy = of(&text);
    assert_eq!(policy.len(), 1);
    let none = Profile::of_number(3).expect("none");
    let forbids = |host: &str| policy.limits(&subject(host)).forbids(none).is_some();
    assert!(forbids("lt-7") && forbids("node1") && !forbids("anna") && !forbids("node2"));
}

#[test]
fn nonsense_is_refused_with_its_line() {
    let rule = |rest: &str| format!("[[rule]]\nname = \"r\"\n{rest}");
    for (text, line, said) in [
        ("x".into(), 1, ""),
        ("colour = 1".into(), 1, "unknown"),
        ("[[rule]]\nforbid.keys = [\"random\"]".into(), 1, "name"),
        (rule(""), 2, "neither"),
        (rule("forbid.protection = [\"none\"]"), 3, "unknown"),
        (rule("forbid.protections = \"none\""), 3, "sequence"),
        (rule("forbid.protections = [\"nothing\"]"), 3, "both, encrypt, integrity, none"),
        (rule("forbid.protections = []"), 3, "empty"),
        (rule("require.keys = [1]"), 3, "string"),
        (rule("\nrequire.ciphers = [\"aes256\"]"), 4, "aes-256"),
        (rule("forbid.keys = [\"random\"]\nrequire.keys = [\"random\"]"), 3, "forbidden and required"),
        (rule("forbid.keys = [\"random\", \"convergent\"]"), 3, "nothing would be left"),
        (rule("forbid.keys = [\"random\"]\nhosts = []"), 4, "leave it out"),
        (rule("forbid.keys = [\"random\"]\nhosts = [\"node 1\"]"), 4, "no name of a host"),
        (rule("forbid.keys = [\"random\"]\nhosts = [\"@nobody\"]"), 4, "[groups]"),
        (rule("forbid.keys = [\"random\"]\nvaults = [\"finance\"]"), 4, "no name of a vault"),
        (rule("forbid.keys = [\"random\"]\nvaults = [\"abcd\"]"), 4, "digits"),
        (rule("forbid.keys = [\"random\"]\nvaults = [\"!@x\"]"), 4, "[vaults]"),
        (rule("forbid.keys = [\"random\"]\nhost = [\"a\"]"), 4, "unknown"),
        (format!("{}\n{}", rule("forbid.keys = [\"random\"]"), rule("forbid.keys = [\"random\"]")), 5, "two rules"),
        ("[[rule]]\nname = \"a\\nb\"\nforbid.keys = [\"random\"]".into(), 2, "printable"),
        ("[[rule]]\nname = \"\"\nforbid.keys = [\"random\"]".into(), 2, "printable"),
        ("[groups]\na = []".into(), 2, "nothing in it"),
        ("[groups]\n\"@a\" = [\"b\"]".into(), 2, "begin with"),
        ("[groups]\na = [\"@b\"]".into(), 2, "no name of a host"),
        ("[vaults]\na = [\"xyz\"]".into(), 2, "no name of a vault"),
    ] {
        let error = parse(&text).expect_err(&text);
        assert!(error.starts_with(&format!("line {line}")) && error.contains(said), "{text}: {error}");
    }
}

#[test]
fn all_that_a_fuzzer_would_change_does_no_harm() {
    // Each byte of the example is left out, doubled, or made another.
    let bytes = COMMENTED.replace("\n#", "\n").into_bytes();
    for at in (0..bytes.len()).step_by(5) {
        for with in [&b""[..], b"\"\"", b"[", b"\xc3\xa9", b"\0"] {
            let text = [&bytes[..at], with, &bytes[at + 1..]].concat();
            let _ = std::str::from_utf8(&text).map(parse);
        }
    }
}

/// A table with two files, one of a profile that is forbidden to everybody.
struct Lab {
    _dir: tempfile::TempDir,
    table: Arc<DiskTable>,
    vault: VaultRow,
    limits: Vec<Arc<Limits>>,
    policy: Policy,
}

const NONE: u8 = 3;
const OLD: u64 = 7;

fn file(profile: u8, root: u8) -> FileRow {
    let profile = Profile::of_number(profile).expect("a profile");
    FileRow { profile, root: Digest([root; 32]), size: 9, ..FileRow::default() }
}

fn row(file: FileRow) -> Row {
    let content = Content::File(file);
    Row { mode: 0o600, uid: 1, gid: 1, links: 1, content, attributes: Sealed::Nothing }
}

fn change(object: u64, row: &Row) -> Change {
    Change { space: Space::Objects, key: object.to_be_bytes().to_vec(), value: Some(row.encode()) }
}

fn opened(session: u32) -> Option<Open> {
    let window = Window { session, tag: SessionTag([1; 6]), covered: 0 };
    Some(Open { file: FileId([1; 16]), windows: Windows::from_iter([window]), cut: None })
}

impl Lab {
    fn new() -> Lab {
        let dir = tempfile::tempdir().expect("a directory");
        let table = Arc::new(DiskTable::create(&dir.path().join("a.anchor")).expect("a table"));
        let vault = VaultRow::new(VaultId([5; 16]), TokenKey::new([2; 32]));
        let record =
            Content::Dir { record: Sealed::Nothing, parent: ObjectId::ROOT, name: lamassu_anchor::Token([0; 16]) };
        let root = Row { mode: 0o700, uid: 1, gid: 1, links: 1, content: record, attributes: Sealed::Nothing };
        drop(Anchor::create(table.clone(), vault.clone(), root).expect("an anchor"));
        table.commit(&[change(OLD, &row(file(NONE, 1))), change(8, &row(file(0, 1)))]).expect("commits");
        let policy = of("[[rule]]\nname = \"no plain\"\nforbid.protections = [\"none\", \"integrity\"]");
        let limits = vec![Arc::new(policy.limits(&Subject::of("a", &vault, [])))];
        Lab { _dir: dir, table, vault, limits, policy }
    }

    fn judged(&self, changes: &[Change], opened: &[u64]) -> Judged {
        let opened: HashSet<Vec<u8>> = opened.iter().map(|object| object.to_be_bytes().to_vec()).collect();
        judge(&*self.table, &self.vault, changes, &self.limits, &opened).expect("reads")
    }

    /// What becomes of one row: it is taken, it is taken and opens its file, or a rule forbids it.
    fn one(&self, object: u64, file: FileRow, opened: &[u64]) -> &'static str {
        match self.judged(&[change(object, &row(file))], opened) {
            Judged::Good(opens) if opens.is_empty() => "taken",
            Judged::Good(_) => "opened",
            Judged::Forbidden(forbidden) if &*forbidden.rule == "no plain" => "forbidden",
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_is_there_is_not_written_and_may_be_all_else() {
    let lab = Lab::new();
    assert_eq!(lab.one(9, file(0, 1), &[]), "taken");
    assert_eq!(lab.one(9, file(NONE, 1), &[]), "forbidden", "a new file");
    assert_eq!(lab.one(9, file(1, 1), &[]), "forbidden");
    assert_eq!(lab.one(8, file(NONE, 1), &[]), "forbidden", "a file that was of another profile");
    assert_eq!(lab.one(OLD, file(1, 1), &[]), "forbidden", "to another that is forbidden");
    assert_eq!(lab.one(OLD, file(NONE, 1), &[]), "taken", "the same content");
    assert_eq!(lab.one(OLD, file(NONE, 2), &[]), "forbidden", "other content");
    assert_eq!(lab.one(OLD, FileRow { size: 10, ..file(NONE, 1) }, &[]), "forbidden");
    assert_eq!(lab.one(OLD, file(0, 2), &[]), "taken", "brought to an allowed profile");
    // It is opened for that, and gets no other content by it.
    let open = |root| FileRow { open: opened(3), ..file(NONE, root) };
    assert_eq!((lab.one(OLD, open(1), &[]), lab.one(OLD, open(2), &[])), ("opened", "forbidden"));
    lab.table.commit(&[change(OLD, &row(open(1)))]).expect("commits");
    assert_eq!(lab.one(OLD, open(2), &[OLD]), "forbidden");
    assert_eq!(lab.one(OLD, file(NONE, 2), &[OLD]), "forbidden");
    assert_eq!(lab.one(OLD, file(NONE, 1), &[OLD]), "taken", "closed as it was");
    assert_eq!(lab.one(OLD, file(0, 2), &[OLD]), "taken");
    // What an earlier turn left open is recovered.
    assert_eq!(lab.one(OLD, file(NONE, 2), &[]), "taken");
    assert_eq!(lab.one(OLD, FileRow { open: opened(4), ..file(NONE, 1) }, &[]), "taken");
    // Removals, and what is no file.
    let removed = Change { space: Space::Objects, key: OLD.to_be_bytes().to_vec(), value: None };
    let link = Row { content: Content::Link(Sealed::Is(Digest([1; 32]))), ..row(file(0, 1)) };
    assert_eq!(lab.judged(&[removed, change(9, &link)], &[]), Judged::Good(Vec::new()));
}

/// A file of one page is closed with two roots, until it is settled: it goes to either without being opened.
#[test]
fn what_was_written_before_is_settled() {
    let lab = Lab::new();
    let with = |root, twin: Option<u8>| FileRow { twin: twin.map(|twin| Digest([twin; 32])), ..file(NONE, root) };
    assert_eq!(lab.one(OLD, with(1, Some(2)), &[]), "forbidden", "a twin of other content");
    lab.table.commit(&[change(OLD, &row(with(1, Some(2))))]).expect("commits");
    for (root, twin) in [(1, None), (2, None), (2, Some(1)), (1, Some(2))] {
        assert_eq!(lab.one(OLD, with(root, twin), &[]), "taken");
        assert_eq!(lab.one(OLD, FileRow { blocks: Some(Digest([9; 32])), ..with(root, twin) }, &[]), "taken");
        assert_eq!(lab.one(OLD, FileRow { size: 10, ..with(root, twin) }, &[]), "forbidden");
    }
    for (root, twin) in [(3, None), (1, Some(3)), (2, Some(3))] {
        assert_eq!(lab.one(OLD, with(root, twin), &[]), "forbidden");
    }
}

#[test]
fn one_row_that_is_forbidden_is_enough_and_what_a_vault_keeps_for_good_is_kept() {
    let lab = Lab::new();
    let changes = [change(9, &row(file(0, 1))), change(10, &row(file(NONE, 1))), change(11, &row(file(0, 1)))];
    assert!(matches!(lab.judged(&changes, &[]), Judged::Forbidden(_)));
    let vault = |row: VaultRow| Change { space: Space::Vault, key: b"vault".to_vec(), value: Some(row.encode()) };
    let next = VaultRow { revision: Revision(lab.vault.revision.0 + 1), ..lab.vault.clone() };
    let (far, object) = (u64::from(u32::MAX) + 2, lab.vault.next_object.0);
    for row in [next.clone(), VaultRow { next_object: ObjectId(object + 9), next_intent: 9, ..next.clone() }] {
        assert_eq!(lab.judged(&[vault(row)], &[]), Judged::Good(Vec::new()));
    }
    let root = |value| Change { space: Space::Objects, key: ObjectId::ROOT.0.to_be_bytes().to_vec(), value };
    let removed = Change { space: Space::Vault, key: b"vault".to_vec(), value: None };
    let put = |space, len, value: &[u8]| Change { space, key: vec![0; len], value: Some(value.to_vec()) };
    let garbage = Change { space: Space::Objects, key: vec![0; 8], value: Some(vec![0xff; 9]) };
    for nonsense in [
        vault(VaultRow { suite: Suite::Chacha, ..next.clone() }),
        vault(VaultRow { domain: Domain::File, ..next.clone() }),
        vault(VaultRow { vault: VaultId([6; 16]), ..next.clone() }),
        vault(VaultRow { degree_log2: 5, ..next.clone() }),
        // What it counts goes up, by not too much.
        vault(lab.vault.clone()),
        vault(VaultRow { revision: Revision(0), ..next.clone() }),
        vault(VaultRow { revision: Revision(far + lab.vault.revision.0), ..next.clone() }),
        vault(VaultRow { next_object: ObjectId(object - 1), ..next.clone() }),
        vault(VaultRow { next_object: ObjectId(u64::MAX), ..next.clone() }),
        vault(VaultRow { next_intent: 0, ..next.clone() }),
        vault(VaultRow { next_intent: far, ..next.clone() }),
        // A vault has a root, and that is a directory.
        root(None),
        root(Some(row(file(0, 1)).encode())),
        removed,
        garbage,
        Change { key: vec![1], ..vault(next.clone()) },
        put(Space::Objects, 7, &row(file(0, 1)).encode()),
        put(Space::Open, 5, &[]),
        put(Space::Open, 8, &[1]),
        put(Space::Entries, 24, &[0xff]),
        put(Space::Held, 16, &[7]),
        put(Space::Intents, 8, &[]),
        put(Space::Head, 0, &[1; 32]),
    ] {
        assert_eq!(lab.judged(std::slice::from_ref(&nonsense), &[]), Judged::Nonsense, "{nonsense:?}");
    }
    assert_eq!(lab.judged(&[put(Space::Open, 8, &[])], &[]), Judged::Good(Vec::new()));
    // One of several policies that lets it through is enough: a host may not know the newest.
    let both = [lab.limits.clone(), vec![Arc::new(Limits::default())]].concat();
    let judged = judge(&*lab.table, &lab.vault, &changes, &both, &HashSet::new()).expect("reads");
    assert_eq!(judged, Judged::Good(Vec::new()));
}

#[test]
fn files_that_do_not_keep_to_a_policy_are_found() {
    let lab = Lab::new();
    let mut found = Vec::new();
    let subject = Subject::of("a", &lab.vault, []);
    violations(&*lab.table, (&lab.policy, &subject), |object, profile, forbidden| {
        found.push((object.0, profile.number(), forbidden.rule.to_string()));
        ControlFlow::Continue(())
    })
    .expect("reads");
    assert_eq!(found, [(OLD, NONE, "no plain".to_owned())]);
}
