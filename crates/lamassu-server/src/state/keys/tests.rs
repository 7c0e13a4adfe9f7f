use super::*;
use crate::state::Pending;
use lamassu_keys::unix_now;
use std::collections::BTreeSet;
use std::sync::Arc;

#[test]
fn a_key_is_given_to_who_was_granted_it_until_it_is_gone() {
    let dir = tempfile::tempdir().expect("a directory");
    let state = State::make(dir.path()).expect("opens");
    let pending = Pending { host: "one".into(), until: unix_now() + 100, vaults: BTreeSet::new() };
    state.put_token(b"t", &pending, 0).expect("writes");
    state.use_token(b"t", 0, b"k").expect("writes").expect("is good");
    let host = Caller { name: "one".into(), key: Arc::from(&b"k"[..]) };
    state.put_zone("what holds the master key").expect("writes");
    let made = |state: &State, name: &str, wrapped: &str| {
        state.make_key(&host, name, 1, (wrapped, "digest".into(), Use::Given))
    };
    assert_eq!(made(&state, "a", "x").expect("reads"), Err(KeyRefusal::Unknown));
    for (name, wrapped) in [("a", "wrapped a"), ("b", "wrapped b")] {
        state.grant_key("one", name, true).expect("writes");
        assert_eq!(made(&state, name, wrapped).expect("writes"), Ok(()));
        assert_eq!(made(&state, name, wrapped).expect("reads"), Err(KeyRefusal::Exists));
    }
    // Another of that name, whose key is another.
    let other = Caller { key: Arc::from(&b"l"[..]), ..host.clone() };
    let given = |to| state.give_key(to, "a", |wrapped| (wrapped == "wrapped a").then(|| Secret::new(&mut [7; 32])));
    assert_eq!(given(&other).expect("reads").expect_err("is not granted"), KeyRefusal::Unknown);
    assert_eq!(given(&host).expect("writes").expect("is granted").expose(), &[7; 32]);
    let gone = GoneKey {
        key: "a".into(),
        made: 1,
        made_by: "one".into(),
        digest: "digest".into(),
        deleted: 2,
        granted: Vec::new(),
        given: Vec::new(),
        backups: Vec::new(),
        log_begins: None,
        restored: Vec::new(),
    };
    let looked = state.audit(0, usize::MAX).expect("reads").entries.len() as u64;
    let deleted = |looked| {
        let mut seen = None;
        let deleted = state.delete_key("a", looked, |kept, since| {
            assert_eq!(kept.wrapped(), "wrapped a");
            seen = Some(since.len());
            gone.clone()
        });
        deleted.map(|()| seen)
    };
    assert!(matches!(deleted(looked), Err(ServerError::KeyInUse { .. })));
    state.retire_key("a", true).expect("writes");
    assert_eq!(given(&host).expect("reads").expect_err("is retired"), KeyRefusal::Retired);
    state.note(Event::BackupBegun).expect("writes");
    assert_eq!(deleted(looked).expect("writes"), Some(2), "its retirement, and what came since");
    let keys = state.keys().expect("reads");
    assert!(matches!(&keys["a"], Key::Deleted(found) if *found == gone));
    assert_eq!(keys["b"].kept().map(KeptKey::wrapped), Some("wrapped b"));
    assert_eq!(made(&state, "a", "x").expect("reads"), Err(KeyRefusal::Deleted));
    state.rewrap("what holds another", |name, wrapped| Some(format!("{name} {wrapped} anew"))).expect("writes");
    drop(state);
    let state = State::open(dir.path()).expect("opens");
    assert_eq!(state.keys().expect("reads")["b"].kept().map(KeptKey::wrapped), Some("b wrapped b anew"));
    state.verify().expect("its checksums fit");
    assert!(state.rewrap("none", |_, _| None).is_err());
    assert_eq!(state.zone().expect("reads").as_deref(), Some("what holds another"));
}
