use super::*;
use crate::service::seconds;
use crate::state::{FILE, Pending};
use std::sync::Arc;

#[test]
fn what_is_left_of_a_key_is_overwritten_also_when_that_was_cut_off() {
    let dir = tempfile::tempdir().expect("a directory");
    let state = State::make(dir.path()).expect("opens");
    let pending = Pending { host: "one".into(), until: seconds() + 100, vaults: BTreeSet::new() };
    state.put_token(b"t", &pending, 0).expect("writes");
    state.use_token(b"t", 0, b"k").expect("writes").expect("is good");
    let host = Caller { name: "one".into(), key: Arc::from(&b"k"[..]) };
    state.put_zone("what holds the master key").expect("writes");
    let made = |state: &State, name: &str, wrapped: &str| state.make_key(&host, name, 1, (wrapped, "digest".into()));
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
        overwritten: None,
        granted: Vec::new(),
        given: Vec::new(),
        backups: Vec::new(),
    };
    assert!(matches!(state.delete_key(&gone), Err(ServerError::KeyInUse { .. })));
    state.retire_key("a", true).expect("writes");
    assert_eq!(given(&host).expect("reads").expect_err("is retired"), KeyRefusal::Retired);
    assert!(!state.has_dead().expect("reads"));
    state.delete_key(&gone).expect("writes");
    let path = dir.path().join(FILE);
    let has = |text: &str| {
        let bytes = std::fs::read(&path).expect("reads");
        bytes.windows(text.len()).any(|window| window == text.as_bytes())
    };
    // The pages that had it are free, and were not used again.
    assert!(has("wrapped a") && has("wrapped b") && state.has_dead().expect("reads"));
    // The database may have used them again by itself.
    state.overwrite_dead().expect("overwrites");
    assert!(!has("wrapped a") && has("wrapped b") && !state.has_dead().expect("reads"));
    let keys = state.keys().expect("reads");
    assert!(matches!(&keys["a"], Key::Deleted(gone) if gone.overwritten.is_some()));
    assert_eq!(keys["b"].kept().map(KeptKey::wrapped), Some("wrapped b"));
    assert_eq!(made(&state, "a", "x").expect("reads"), Err(KeyRefusal::Deleted));
    // Nothing is left to be done, and nothing that is kept is touched.
    assert_eq!(state.overwrite_dead().expect("overwrites"), 0);
    state.rewrap("what holds another", |name, wrapped| Some(format!("{name} {wrapped} anew"))).expect("writes");
    // The process ends before the file is overwritten: the next one knows.
    drop(state);
    let state = State::open(dir.path()).expect("opens");
    assert!(state.has_dead().expect("reads"));
    state.overwrite_dead().expect("overwrites");
    assert!(!has("what holds the master key") && has("b wrapped b anew") && has("what holds another"));
    state.verify().expect("its checksums fit");
    assert!(state.rewrap("none", |_, _| None).is_err());
    assert_eq!(state.zone().expect("reads").as_deref(), Some("what holds another"));
}

/// Wherever it lies, also across what is read at a time; and nothing else.
#[test]
fn what_is_marked_and_not_in_use_is_overwritten() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("file");
    let mark = "0123456789abcdef0123456789abcdef";
    let text = |wrapped: &str| format!("{mark}{:08x}{wrapped}", wrapped.len());
    let (live, dead) = (text("in use"), text(&"dead".repeat(40)));
    let cut = format!("{mark}{:08x}cut", 9);
    let long = format!("{mark}{:08x}", WRAPPED_MAX + 1);
    let other = dead.replace("0123", "3210");
    let mut file = vec![b'.'; 2 * AT_ONCE + 5000];
    let mut put = |at: usize, text: &str| file[at..at + text.len()].copy_from_slice(text.as_bytes());
    let dead_at =
        [0, 1000, 1000 + dead.len(), AT_ONCE - 300, AT_ONCE - 20, AT_ONCE + 500, 2 * AT_ONCE, 2 * AT_ONCE + 1000];
    dead_at.iter().for_each(|at| put(*at, &dead));
    let kept_at = [(3000, &live), (AT_ONCE + 2000, &live), (5000, &long), (6000, &other)];
    kept_at.iter().for_each(|(at, text)| put(*at, text));
    put(2 * AT_ONCE + 5000 - cut.len(), &cut);
    std::fs::write(&path, &file).expect("writes");
    let overwritten = overwrite(&path, mark, &BTreeSet::from([live.clone()])).expect("overwrites");
    assert_eq!(overwritten, dead_at.len() as u64);
    for at in dead_at {
        file[at..at + dead.len()].fill(b'0');
    }
    assert!(std::fs::read(&path).expect("reads") == file);
    assert_eq!(overwrite(&path, mark, &BTreeSet::from([live])).expect("overwrites"), 0);
}
