//! The policy manager: its database, its publications, its trail.

use lamassu_access::bundle::{BUNDLE_FILE, STATUS_FILE};
use lamassu_access::manager::{Keys, Manager};
use lamassu_access::{AccessError, Action, AttributeKind, Bundle, Claims, Decider, Refusal, Status, Value, kem};
use lamassu_crypto::Secret;
use lamassu_keys::{Ask, KeySource, Material, Purpose};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const RULE: &str = "permit(principal, action, resource in Key::\"reports\") \
    when { principal has dept && principal.dept == \"finance\" };";

struct Lab {
    dir: tempfile::TempDir,
}

fn material(byte: u8) -> Material {
    let file = tempfile::NamedTempFile::new().expect("a file");
    fs::write(file.path(), [byte; 32]).expect("writes");
    let source: KeySource = format!("raw:file:{}", file.path().display()).parse().expect("a source");
    source.load(&Ask { subject: "a test", purpose: Purpose::Unlock, stdin: false }).expect("loads").material
}

fn proxy() -> Secret<32> {
    Secret::new(&mut [8; 32])
}

impl Lab {
    fn new() -> (Lab, Manager) {
        let lab = Lab { dir: tempfile::tempdir().expect("a directory") };
        fs::create_dir(lab.out()).expect("a directory");
        let manager = Manager::init(&lab.policy(), "acme", &kem::public(&proxy()), &material(1), 100).expect("makes");
        manager.set_attribute("dept", AttributeKind::Text, 100).expect("declares");
        (lab, manager)
    }

    fn policy(&self) -> PathBuf {
        self.dir.path().join("policy")
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }
}

fn public(manager: &Manager) -> [u8; 32] {
    hex(manager.public())
}

fn hex(hex: &str) -> [u8; 32] {
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("digits");
    std::array::from_fn(byte)
}

fn published(manager: &Manager, out: &Path) -> (Bundle, Status) {
    let text = |name: &str| fs::read_to_string(out.join(name)).expect("reads");
    (
        Bundle::verify(&public(manager), "acme", &text(BUNDLE_FILE)).expect("verifies"),
        Status::verify(&public(manager), "acme", &text(STATUS_FILE)).expect("verifies"),
    )
}

fn person(dept: &str) -> lamassu_access::Attributes {
    [("dept".to_owned(), Value::Text(dept.into()))].into()
}

#[test]
fn from_rules_to_a_decision_and_its_end() {
    let (lab, manager) = Lab::new();
    let out = lab.out();
    manager.set_person("alice", &person("finance"), 100).expect("sets");
    manager.set_rule("finance", RULE, 100).expect("writes");
    assert!(matches!(manager.issue("alice", 600, 100), Err(AccessError::Unpublished)));
    assert!(manager.publish(None, 100).is_err(), "nobody said where to");
    let first = manager.publish(Some(&out), 100).expect("publishes");
    assert!(first.is_new && first.bundle == 100 && first.status == 100);
    let issued = manager.issue("alice", 600, 100).expect("issues");
    let claims = Claims::verify(&public(&manager), "acme", &issued.session_token).expect("verifies");
    assert_eq!(*claims.secret(&proxy()).expect("a secret"), *issued.secret);
    let (bundle, status) = published(&manager, &out);
    assert_eq!(claims.check(&bundle, &status, 100, 600), Ok(()));
    let decider = Decider::of(bundle.clone()).expect("Cedar");
    let key = manager.seal_key("reports/q1").expect("a key");
    assert!(decider.allows(&claims, Action::Read, &key));
    assert!(!decider.allows(&claims, Action::Read, &manager.seal_key("other/q1").expect("a key")));
    assert!(!decider.allows(&claims, Action::Read, "reports/q1"));
    assert_eq!(manager.test("alice", Action::Read, "reports/q1").expect("decides"), (true, true));
    assert_eq!(manager.test("alice", Action::Read, "other").expect("decides"), (false, false));
    // The same again: the rules stay as they are.
    let second = manager.publish(None, 50).expect("publishes");
    assert!(!second.is_new && second.bundle == 100 && second.status == 101, "whatever the clock says");
    // Other attributes revoke.
    assert_eq!(manager.set_person("alice", &person("finance"), 110).expect("sets").len(), 0);
    assert_eq!(manager.set_person("alice", &person("law"), 110).expect("sets"), std::slice::from_ref(&claims.id));
    manager.publish(None, 120).expect("publishes");
    let (bundle, status) = published(&manager, &out);
    assert_eq!(claims.check(&bundle, &status, 120, 600), Err(Refusal::Revoked));
    // A revocation is listed until the credential's own end, and for as long as a proxy's clock may be behind.
    manager.publish(None, 759).expect("publishes");
    assert!(!published(&manager, &out).1.revoked.is_empty());
    manager.publish(None, 760).expect("publishes");
    assert!(published(&manager, &out).1.revoked.is_empty());
    let again = manager.issue("alice", 600, 700).expect("issues");
    assert_eq!(manager.revoke(&again.access_key, 710).expect("revokes"), std::slice::from_ref(&again.access_key));
    assert!(matches!(manager.revoke("alice", 710), Err(AccessError::NotFound { .. })));
    // Whoever's clock is behind takes a credential after its end: until then it is shown as revoked.
    let late = manager.issue("alice", 10, 690).expect("issues");
    assert_eq!(manager.revoke("alice", 759).expect("revokes"), std::slice::from_ref(&late.access_key));
    let later = manager.issue("alice", 10, 690).expect("issues");
    assert!(manager.revoke(&later.access_key, 760).expect("revokes").is_empty());
    // An epoch: none from before is good, and tokens are others.
    let before = manager.issue("alice", 600, 710).expect("issues");
    assert_eq!(manager.rotate(720).expect("rotates"), 720);
    assert!(matches!(manager.issue("alice", 600, 720), Err(AccessError::Unpublished)));
    assert!(manager.publish(None, 720).expect("publishes").is_new);
    let (bundle, status) = published(&manager, &out);
    let before = Claims::verify(&public(&manager), "acme", &before.session_token).expect("verifies");
    assert_eq!(before.check(&bundle, &status, 720, 600), Err(Refusal::Outdated));
    let after = manager.issue("alice", 600, 720).expect("issues");
    let after = Claims::verify(&public(&manager), "acme", &after.session_token).expect("verifies");
    assert!(before.tokens.is_disjoint(&after.tokens));
    // The trail has all of it.
    let trail = manager.audit().expect("verifies");
    assert!(trail.iter().enumerate().all(|(at, (entry, _))| entry.number == at as u64 + 1));
    let said = trail.iter().map(|(entry, _)| serde_json::to_string(entry).expect("JSON")).collect::<String>();
    for event in ["made", "attribute-set", "person-set", "rule-set", "published", "issued", "revoked", "rotated"] {
        assert!(said.contains(&format!("\"event\":\"{event}\"")), "{event}");
    }
    assert!(!said.contains(&*issued.secret));
}

/// A clock that is ahead for some publications, and is then corrected.
#[test]
fn what_was_revoked_stays_so_whatever_the_clock_says_meanwhile() {
    let (lab, manager) = Lab::new();
    let out = lab.out();
    manager.set_person("alice", &person("finance"), 100).expect("sets");
    manager.set_person("bob", &person("finance"), 100).expect("sets");
    manager.set_rule("finance", RULE, 100).expect("writes");
    manager.publish(Some(&out), 100).expect("publishes");
    let ids = ["alice", "bob", "alice"].map(|name| manager.issue(name, 3600, 100).expect("issues").access_key);
    manager.revoke(&ids[0], 100).expect("revokes");
    manager.publish(None, 100).expect("publishes");
    for ahead in [100_000, 4_000_000_000] {
        for publication in 0..20 {
            manager.publish(None, ahead + 15 * publication).expect("publishes");
            assert!(published(&manager, &out).1.revoked.is_empty(), "a proxy refuses it as one of the future");
        }
    }
    // By that clock these have ended long ago.
    manager.remove_person("bob", 4_000_000_500).expect("removes");
    manager.set_person("alice", &person("law"), 4_000_000_500).expect("sets");
    manager.publish(None, 115).expect("publishes");
    assert_eq!(published(&manager, &out).1.revoked, ids.iter().cloned().collect());
}

/// Also after years without publications, and after a clock that was behind for one.
#[test]
fn what_has_ended_is_forgotten_in_the_end() {
    let (lab, manager) = Lab::new();
    let mut now = 1_700_000_000;
    manager.set_person("alice", &person("finance"), now).expect("sets");
    manager.set_rule("finance", RULE, now).expect("writes");
    manager.publish(Some(&lab.out()), now).expect("publishes");
    let issued = manager.issue("alice", 3600, now).expect("issues");
    manager.revoke("alice", now).expect("revokes");
    for publication in 0..10_000 {
        now += match publication {
            100 => 10 * 86400,
            _ => 3600,
        };
        manager.publish(None, if publication == 50 { 5 } else { now }).expect("publishes");
        let is_kept = manager.issued().expect("reads").contains_key(&issued.access_key);
        assert!(is_kept || now > issued.ends + 36 * 3600);
        if !is_kept {
            return;
        }
    }
    panic!("it is kept for ever");
}

#[test]
fn a_new_rule_voids_credentials_that_may_lack_its_tokens() {
    let (lab, manager) = Lab::new();
    manager.set_person("alice", &person("finance"), 100).expect("sets");
    manager.set_rule("all", "permit(principal, action, resource);", 100).expect("writes");
    manager.publish(Some(&lab.out()), 100).expect("publishes");
    let issued = manager.issue("alice", 600, 100).expect("issues");
    let claims = Claims::verify(&public(&manager), "acme", &issued.session_token).expect("verifies");
    assert!(claims.tokens.is_empty(), "no rule asks for any");
    let forbid = RULE.replace("permit", "forbid");
    manager.set_rule("finance", &forbid, 110).expect("writes");
    manager.publish(None, 110).expect("publishes");
    let (bundle, status) = published(&manager, &lab.out());
    assert_eq!(claims.check(&bundle, &status, 110, 600), Err(Refusal::Outdated));
}

#[test]
fn keys_open_by_their_source_and_the_directory_is_private() {
    let (lab, manager) = Lab::new();
    let key = manager.seal_key("a/b").expect("a key");
    drop(manager);
    let mut manager = Manager::open(&lab.policy()).expect("opens");
    assert!(manager.seal_key("a/b").is_err(), "its keys are not loaded");
    assert_eq!(manager.attributes().expect("reads").len(), 1);
    assert!(manager.unlock(&material(2)).is_err());
    manager.unlock(&material(1)).expect("opens");
    assert_eq!(manager.open_key(&key).expect("opens"), "a/b");
    let keys = manager.close().expect("closes");
    assert_eq!(Manager::open_with(&lab.policy(), &keys).expect("opens").seal_key("a/b").expect("a key"), key);
    // What is on the disk has no key in it.
    let stored = fs::read(lab.policy().join("policy.redb")).expect("reads");
    assert!(!stored.windows(32).any(|bytes| bytes == [1; 32]));
    assert!(matches!(Manager::init(&lab.policy(), "acme", &[9; 32], &material(1), 1), Err(AccessError::NotEmpty(_))));
    assert!(matches!(Manager::open(lab.dir.path()), Err(AccessError::Missing(_))));
    fs::set_permissions(lab.policy(), PermissionsExt::from_mode(0o750)).expect("chmod");
    assert!(matches!(Manager::open(&lab.policy()), Err(AccessError::NotPrivate(_))));
}

#[test]
fn what_is_used_stays() {
    let (_lab, manager) = Lab::new();
    manager.set_rule("finance", RULE, 100).expect("writes");
    let by_rule = manager.remove_attribute("dept", 100).expect_err("used").to_string();
    assert!(by_rule.contains("the rule \"finance\""), "{by_rule}");
    assert!(manager.set_attribute("dept", AttributeKind::Set, 100).is_err());
    manager.set_attribute("dept", AttributeKind::Text, 100).expect("as it is");
    manager.remove_rule("finance", 100).expect("removes");
    manager.set_person("alice", &person("law"), 100).expect("sets");
    assert!(manager.remove_attribute("dept", 100).expect_err("used").to_string().contains("alice"));
    manager.remove_person("alice", 100).expect("removes");
    manager.remove_attribute("dept", 100).expect("removes");
    assert!(manager.set_rule("finance", RULE, 100).is_err(), "it goes by no attribute that is declared");
    for wrong in [manager.remove_person("alice", 1).map(drop), manager.remove_rule("finance", 1)] {
        assert!(matches!(wrong, Err(AccessError::NotFound { .. })));
    }
}

/// The directory of a manager as it is, and later again.
struct Backup(PathBuf, Vec<u8>);

impl Backup {
    /// Of a manager, which goes on.
    fn of(lab: &Lab, manager: Manager) -> (Backup, Keys, Manager) {
        let (file, keys) = (lab.policy().join("policy.redb"), manager.close().expect("closes"));
        let backup = Backup(file.clone(), fs::read(file).expect("reads"));
        let manager = Manager::open_with(&lab.policy(), &keys).expect("opens");
        (backup, keys, manager)
    }

    fn put_back(self, lab: &Lab, manager: Manager, keys: &Keys) -> Manager {
        drop(manager);
        fs::write(self.0, self.1).expect("puts it back");
        Manager::open_with(&lab.policy(), keys).expect("opens")
    }
}

/// A database that was put back from a backup knows nothing of the epochs since.
#[test]
fn an_epoch_is_used_once_whatever_was_put_back() {
    let (lab, manager) = Lab::new();
    let out = lab.out();
    manager.set_person("mallory", &person("finance"), 100).expect("sets");
    manager.set_rule("finance", RULE, 100).expect("writes");
    manager.publish(Some(&out), 100).expect("publishes");
    let (backup, keys, manager) = Backup::of(&lab, manager);
    manager.rotate(200).expect("rotates");
    manager.publish(None, 200).expect("publishes");
    let issued = manager.issue("mallory", 6000, 210).expect("issues");
    manager.revoke("mallory", 220).expect("revokes");
    let manager = backup.put_back(&lab, manager, &keys);
    assert_eq!(manager.rotate(300).expect("rotates"), 300);
    // Nothing that is there tells of what was.
    fs::remove_dir_all(&out).expect("removes");
    fs::create_dir(&out).expect("a directory");
    assert!(!manager.publish(None, 300).expect("publishes").is_behind);
    let claims = Claims::verify(&public(&manager), "acme", &issued.session_token).expect("verifies");
    let (bundle, status) = published(&manager, &out);
    assert!(!status.revoked.contains(&claims.id), "it is forgotten");
    assert_eq!(claims.check(&bundle, &status, 300, 6000), Err(Refusal::Outdated));
}

/// A backup's rules are published again, above what the proxy has taken, and no credential from before is good.
#[test]
fn a_database_that_was_put_back_is_noticed_where_it_publishes() {
    let (lab, manager) = Lab::new();
    let out = lab.out();
    manager.set_person("alice", &person("finance"), 100).expect("sets");
    manager.set_rule("finance", RULE, 100).expect("writes");
    manager.publish(Some(&out), 100).expect("publishes");
    let before = manager.issue("alice", 6000, 100).expect("issues");
    let (backup, keys, manager) = Backup::of(&lab, manager);
    manager.revoke("alice", 200).expect("revokes");
    manager.set_rule("finance", &RULE.replace("finance", "law"), 200).expect("writes");
    // A clock that was ahead.
    let last = manager.publish(None, 5000).expect("publishes");
    assert!(last.is_new && !last.is_behind);
    let manager = backup.put_back(&lab, manager, &keys);
    let done = manager.publish(None, 300).expect("publishes");
    assert!(done.is_new && done.is_behind && done.bundle > last.bundle && done.status > last.status);
    let (bundle, status) = published(&manager, &out);
    assert_eq!((bundle.seq, status.bundle, status.seq), (done.bundle, done.bundle, done.status));
    let claims = Claims::verify(&public(&manager), "acme", &before.session_token).expect("verifies");
    assert_eq!(claims.check(&bundle, &status, 300, 6000), Err(Refusal::Outdated));
    let again = manager.publish(None, 310).expect("publishes");
    assert!(!again.is_new && !again.is_behind);
}

#[test]
fn rules_that_are_not_where_they_were_placed_are_placed_again() {
    let (lab, manager) = Lab::new();
    let out = lab.out();
    manager.set_rule("finance", RULE, 100).expect("writes");
    manager.publish(Some(&out), 100).expect("publishes");
    let path = out.join(BUNDLE_FILE);
    let first = fs::read(&path).expect("reads");
    manager.set_rule("finance", &RULE.replace("finance", "law"), 100).expect("writes");
    assert_eq!(manager.publish(None, 101).expect("publishes").bundle, 101);
    let other: [&dyn Fn(); 4] = [
        &|| fs::remove_file(&path).expect("removes"),
        &|| fs::write(&path, "another").expect("writes"),
        &|| fs::write(&path, vec![b'x'; Bundle::most() + 1]).expect("writes"),
        &|| {
            fs::remove_file(&path).expect("removes");
            std::os::unix::fs::symlink("/dev/zero", &path).expect("links");
        },
    ];
    for change in other {
        change();
        let done = manager.publish(None, 102).expect("publishes");
        assert!(!done.is_new && !done.is_behind && done.bundle == 101);
        assert_eq!(published(&manager, &out).0.seq, done.bundle);
    }
    // Its own from before: the proxy may have taken others of a number since.
    fs::write(&path, first).expect("puts it back");
    let done = manager.publish(None, 103).expect("publishes");
    assert!(done.is_new && !done.is_behind && done.bundle == 103);
    assert_eq!(published(&manager, &out).0.seq, done.bundle);
}

/// However often it is tried, rules that cannot be placed are one publication.
#[test]
fn what_cannot_be_placed_uses_up_one_number() {
    let (lab, manager) = Lab::new();
    let (out, path) = (lab.out(), lab.out().join(BUNDLE_FILE));
    manager.set_rule("finance", RULE, 100).expect("writes");
    fs::create_dir(&path).expect("a directory");
    for now in [200, 300, 400] {
        assert!(matches!(manager.publish(Some(&out), now), Err(AccessError::File { .. })));
    }
    fs::remove_dir(&path).expect("removes");
    let done = manager.publish(Some(&out), 500).expect("publishes");
    assert_eq!((done.bundle, done.status, done.is_new), (200, 500, false));
    let trail = manager.audit().expect("verifies");
    let said = trail.iter().map(|(entry, _)| serde_json::to_string(entry).expect("JSON"));
    assert_eq!(said.filter(|one| one.contains("\"event\":\"published\"")).count(), 1);
}

/// Rules that were valid once are replaced or removed one by one, and the error says which.
#[test]
fn rules_that_are_not_valid_any_more_are_named() {
    let (lab, manager) = Lab::new();
    let keys = manager.close().expect("closes");
    let database = redb::Database::open(lab.policy().join("policy.redb")).expect("opens");
    let write = database.begin_write().expect("begins");
    for name in ["a", "b"] {
        let mut rules = write.open_table(redb::TableDefinition::<&str, &[u8]>::new("rules")).expect("is there");
        rules.insert(name, serde_json::to_vec("permit(").expect("JSON").as_slice()).expect("inserts");
    }
    write.commit().expect("commits");
    drop(database);
    let manager = Manager::open_with(&lab.policy(), &keys).expect("opens");
    let said = manager.set_rule("b", RULE, 100).expect_err("a").to_string();
    assert!(said.starts_with("rule \"a\": remove this one first"), "{said}");
    let said = manager.set_rule("b", "forbid(", 100).expect_err("its own fault").to_string();
    assert!(said.starts_with("rule \"b\": ") && !said.contains("remove"), "{said}");
    manager.remove_rule("a", 100).expect("removes");
    manager.set_rule("b", RULE, 100).expect("writes");
    manager.set_rule("a", RULE, 100).expect("writes");
}

/// Each rule is small. What cannot be published together is not taken, so that nothing stops publications later.
#[test]
fn a_rule_is_taken_if_all_can_be_published_with_it() {
    let (lab, manager) = Lab::new();
    let rule = |from: usize, count: usize| {
        let one = |at: usize| format!("permit(principal, action, resource == Key::\"{at}\");\n");
        (from..from + count).map(one).collect::<String>()
    };
    // As if each had been written, which takes long.
    let keys = manager.close().expect("closes");
    let database = redb::Database::open(lab.policy().join("policy.redb")).expect("opens");
    let write = database.begin_write().expect("begins");
    let table = redb::TableDefinition::<&str, &[u8]>::new("rules");
    for at in 0..10 {
        let text = serde_json::to_vec(&rule(at * 1000, if at == 0 { 999 } else { 1000 })).expect("JSON");
        let mut rules = write.open_table(table).expect("is there");
        rules.insert(format!("r{at}").as_str(), text.as_slice()).expect("inserts");
    }
    write.commit().expect("commits");
    drop(database);
    let manager = Manager::open_with(&lab.policy(), &keys).expect("opens");
    let said = manager.set_rule("more", &rule(20_000, 2), 100).expect_err("too many").to_string();
    assert!(said.contains("10000 statements"), "{said}");
    assert_eq!(manager.rules().expect("reads").len(), 10);
    manager.set_rule("last", &rule(20_000, 1), 100).expect("writes");
    assert!(manager.publish(Some(&lab.out()), 100).expect("publishes").is_new);
}
