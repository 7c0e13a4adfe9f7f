//! Who may use a vault: hosts that were granted it, or a vault that it lies in, if it is a dataset. The vault around a
//! dataset is noted with the dataset's anchor.

use super::leases::{KEPT, RETIRED, lease_key};
use super::places::{LiesIn, Misplaced, with_those_around};
use super::{Host, LEASES, State};
use crate::Result;
use data_encoding::HEXLOWER;
use lamassu_format::header::VaultId;
use std::collections::BTreeSet;

impl Host {
    /// Whether it may use one of these vaults.
    pub(super) fn may_use(&self, any: &[VaultId]) -> bool {
        !self.is_revoked && any.iter().any(|vault| self.vaults.contains(&vault.to_string()))
    }
}

impl State {
    /// Whether this key belongs to a host which may use a vault now: it was granted, or one that it lies in.
    pub fn may_use(&self, key: &[u8], vault: &VaultId) -> bool {
        let (key, any) = (HEXLOWER.encode(key), self.with_those_around(vault).collect::<Vec<_>>());
        self.hosts().values().any(|host| host.key == key && host.may_use(&any))
    }

    /// Whether the host of this name may use a vault now.
    pub fn host_may_use(&self, host: &str, vault: &VaultId) -> bool {
        let any: Vec<_> = self.with_those_around(vault).collect();
        self.hosts().get(host).is_some_and(|host| host.may_use(&any))
    }

    /// The hosts that may use a vault now.
    pub fn who_may_use(&self, vault: &VaultId) -> BTreeSet<String> {
        let any: Vec<_> = self.with_those_around(vault).collect();
        let hosts = self.hosts();
        hosts.iter().filter(|(_, host)| host.may_use(&any)).map(|(name, _)| name.clone()).collect()
    }

    pub(super) fn read_lies_in(&self) -> Result<LiesIn> {
        self.read_around(KEPT)
    }

    /// The vault around each dataset whose anchor is retired.
    pub(super) fn read_lay_in(&self) -> Result<LiesIn> {
        self.read_around(RETIRED)
    }

    fn read_around(&self, kind: u8) -> Result<LiesIn> {
        let parsed = |(vault, around): (VaultId, Vec<u8>)| match around.len() {
            0 => None,
            _ => Some(around.try_into().map(|around| (vault, VaultId(around))).map_err(|_| self.damaged("a dataset"))),
        };
        self.of_kind(kind)?.into_iter().filter_map(parsed).collect()
    }

    /// The vault that a dataset lies in; `None`: it is not known as a dataset.
    pub fn around(&self, vault: &VaultId) -> Option<VaultId> {
        self.places.read().around().get(vault).copied()
    }

    /// A vault, and those that it lies in, from the inside out.
    pub fn with_those_around(&self, vault: &VaultId) -> impl Iterator<Item = VaultId> + use<> {
        with_those_around(self.places.read().around(), vault).collect::<Vec<_>>().into_iter()
    }

    /// Whether anything is known of a vault: somebody was granted it, its anchor is or was here, or a dataset lies in
    /// it. Its place in another vault is then not anybody's to say, unless its anchor was retired from that very place.
    pub fn is_spoken_for(&self, vault: &VaultId, around: &VaultId) -> Result<bool> {
        let id = vault.to_string();
        let is_granted = self.hosts().values().any(|host| host.vaults.contains(&id))
            || self.tokens.read().values().any(|pending| pending.vaults.contains(&id));
        let has_inside = self.places.read().has_inside(vault);
        Ok(is_granted || ((has_inside || self.knows(vault)?) && !self.lay_in(vault, around)?))
    }

    /// Whether the anchor of a vault was retired as that of a dataset in `around`.
    fn lay_in(&self, vault: &VaultId, around: &VaultId) -> Result<bool> {
        self.read(|read| {
            let row = read.open_table(LEASES)?.get(&lease_key(vault, RETIRED, 0)[..])?;
            Ok(row.is_some_and(|row| row.value() == around.0))
        })
    }

    /// A vault, and all datasets in it, from the outside in.
    pub fn with_those_inside(&self, vault: &VaultId) -> Vec<VaultId> {
        self.places.read().levels(vault).concat()
    }

    /// The outermost vault around a vault; its own id, if it is no dataset.
    pub fn outermost(&self, vault: &VaultId) -> VaultId {
        self.with_those_around(vault).last().unwrap_or(*vault)
    }

    /// Whether a dataset may lie in a vault.
    ///
    /// # Errors
    /// [`Misplaced`].
    pub fn check_place(&self, dataset: &VaultId, around: &VaultId) -> std::result::Result<(), Misplaced> {
        self.places.read().check(dataset, around)
    }

    /// Whether a vault is `around`, or lies in it.
    pub fn is_within(&self, vault: &VaultId, around: &VaultId) -> bool {
        self.with_those_around(vault).any(|one| one == *around)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::{Event, Why};
    use crate::state::Pending;
    use crate::state::leases::Use;
    use lamassu_lease::SessionId;
    use lamassu_lease::server::Change;

    const VAULT: VaultId = VaultId([1; 16]);
    const INNER: VaultId = VaultId([2; 16]);
    const INMOST: VaultId = VaultId([3; 16]);
    const KEY: &[u8] = b"key";

    fn state() -> (tempfile::TempDir, State) {
        let dir = tempfile::tempdir().expect("makes a directory");
        let state = State::make(dir.path()).expect("makes");
        let pending = Pending { host: "h".into(), until: u64::MAX, vaults: BTreeSet::new() };
        state.put_token(b"t", &pending, 0).expect("writes");
        state.use_token(b"t", 0, KEY).expect("writes").expect("joins");
        (dir, state)
    }

    /// Also after the state was opened again.
    #[test]
    fn who_may_use_a_vault_may_use_the_datasets_in_it_and_no_others() {
        let (dir, state) = state();
        state.note_kept("h", &VAULT, None).expect("writes");
        state.note_kept("h", &INNER, Some(&VAULT)).expect("writes");
        state.note_kept("h", &INMOST, Some(&INNER)).expect("writes");
        let may = |state: &State| [VAULT, INNER, INMOST].map(|vault| state.may_use(KEY, &vault));
        assert_eq!(may(&state), [false; 3]);
        state.grant("h", &INNER.to_string(), true).expect("grants");
        assert_eq!(may(&state), [false, true, true], "a dataset can be granted alone");
        state.grant("h", &INNER.to_string(), false).expect("ends the grant");
        state.grant("h", &VAULT.to_string(), true).expect("grants");
        assert_eq!(may(&state), [true; 3]);
        assert!(!state.may_use(b"other", &INMOST));
        drop(state);
        let state = State::open(dir.path()).expect("opens");
        assert_eq!(may(&state), [true; 3]);
        state.will_put_away(&INNER).expect("writes");
        assert_eq!(may(&state), [true, false, false], "its anchor is no longer here");
        state.revoke("h").expect("revokes");
        assert_eq!(may(&state), [false; 3]);
    }

    /// Also after the state was opened again, and for a host that joins under its name.
    #[test]
    fn a_right_that_is_given_back_gives_no_session_back() {
        const OTHER: VaultId = VaultId([4; 16]);
        const ALL: [VaultId; 4] = [VAULT, INNER, INMOST, OTHER];
        let (dir, state) = state();
        state.note_kept("h", &INNER, Some(&VAULT)).expect("writes");
        state.note_kept("h", &INMOST, Some(&INNER)).expect("writes");
        let grant = |vault: VaultId, may| state.grant("h", &vault.to_string(), may).expect("writes");
        let begin = |state: &State, number, host: &str| {
            for vault in ALL {
                let began = [Change::Began(SessionId(number))];
                state
                    .change_leases(&vault, &began, |_| (host.to_owned(), Use::ByTurns), |_| (Why::Left, None))
                    .expect("writes");
            }
        };
        let out =
            |state: &State| ALL.map(|vault| state.turned_out(&vault).expect("reads").into_iter().collect::<Vec<_>>());
        let [first, second] = [1, 2].map(SessionId);
        [VAULT, INNER, OTHER].into_iter().for_each(|vault| grant(vault, true));
        begin(&state, 1, "h");
        begin(&state, 9, "i");
        grant(VAULT, false);
        grant(VAULT, true);
        assert_eq!(out(&state), [vec![first], vec![], vec![], vec![]], "the others are granted otherwise");
        grant(INNER, false);
        assert_eq!(out(&state), [vec![first], vec![], vec![], vec![]], "it has the vault around it");
        begin(&state, 2, "h");
        grant(VAULT, false);
        grant(VAULT, true);
        let both = vec![first, second];
        let is_out = [both.clone(), both.clone(), both.clone(), vec![]];
        assert_eq!(out(&state), is_out);
        drop(state);
        let state = State::open(dir.path()).expect("opens");
        assert_eq!(out(&state), is_out);
        state.revoke("h").expect("revokes");
        let pending = Pending { host: "h".into(), until: u64::MAX, vaults: ALL.map(|vault| vault.to_string()).into() };
        state.put_token(b"u", &pending, 0).expect("writes");
        state.use_token(b"u", 0, b"other key").expect("writes").expect("joins");
        begin(&state, 3, "h");
        assert_eq!(out(&state), [(); 4].map(|()| both.clone()));
        let (_, sessions) = state.leases(&OTHER).expect("reads");
        assert!(sessions.iter().all(|one| one.used == Use::ByTurns) && sessions.len() == 4);
    }

    /// Whoever has heard of the id could else put another anchor in the place of what is retired, or keep its owner
    /// from putting it again.
    #[test]
    fn a_vault_that_was_here_is_spoken_for_except_in_its_place() {
        const OTHER: VaultId = VaultId([4; 16]);
        let (dir, state) = state();
        let gone = |id: VaultId| Event::AnchorForgotten { vault: id.to_string() };
        let is_spoken_for = |state: &State| {
            [INNER, INMOST].map(|id| [OTHER, VAULT].map(|around| state.is_spoken_for(&id, &around).expect("reads")))
        };
        assert_eq!(is_spoken_for(&state), [[false; 2]; 2]);
        state.note_kept("h", &INNER, Some(&VAULT)).expect("writes");
        state.note_kept("h", &INMOST, None).expect("writes");
        assert_eq!(is_spoken_for(&state), [[true; 2]; 2]);
        // As when it is opened.
        state
            .change_leases(&INMOST, &[Change::Run(1)], |_| (String::new(), Use::Reads), |_| (Why::Left, None))
            .expect("writes");
        for id in [INNER, INMOST] {
            state.will_put_away(&id).expect("writes");
            state.note_not_kept(&id, gone(id)).expect("writes");
        }
        let retired = [[true, false], [true; 2]];
        assert_eq!(is_spoken_for(&state), retired);
        drop(state);
        let state = State::open(dir.path()).expect("opens");
        assert_eq!(is_spoken_for(&state), retired);
        // One of which an earlier version has left no more than that it was started.
        state
            .change_leases(&OTHER, &[Change::Run(1)], |_| (String::new(), Use::Reads), |_| (Why::Left, None))
            .expect("writes");
        assert!(state.is_spoken_for(&OTHER, &VAULT).expect("reads"));
        let backup = tempfile::tempdir().expect("makes a directory");
        let made = State::make(backup.path()).expect("makes");
        made.fill(&state.copied().expect("copies"), &[]).expect("fills");
        assert_eq!(is_spoken_for(&made), retired);
        // It is put there again, and is kept.
        state.note_kept("h", &INNER, Some(&VAULT)).expect("writes");
        assert_eq!(is_spoken_for(&state)[0], [true; 2]);
    }

    /// The inner ones stay while it is moved away and back.
    #[test]
    fn a_dataset_that_has_datasets_in_it_comes_back_where_it_lay() {
        const OTHER: VaultId = VaultId([4; 16]);
        let (_dir, state) = state();
        state.note_kept("h", &INNER, Some(&VAULT)).expect("writes");
        state.note_kept("h", &INMOST, Some(&INNER)).expect("writes");
        let is_spoken_for = || [OTHER, VAULT].map(|around| state.is_spoken_for(&INNER, &around).expect("reads"));
        assert_eq!(is_spoken_for(), [true; 2]);
        state.will_put_away(&INNER).expect("writes");
        state.note_not_kept(&INNER, Event::AnchorForgotten { vault: INNER.to_string() }).expect("writes");
        assert_eq!(is_spoken_for(), [true, false]);
        state.grant("h", &INNER.to_string(), true).expect("grants");
        assert_eq!(is_spoken_for(), [true; 2], "its rights are other people's");
    }

    #[test]
    fn a_circle_ends() {
        let (_dir, state) = state();
        state.note_kept("h", &VAULT, Some(&INNER)).expect("writes");
        state.note_kept("h", &INNER, Some(&VAULT)).expect("writes");
        assert!(!state.may_use(KEY, &VAULT));
        assert!(state.is_within(&VAULT, &INNER) && state.is_within(&INNER, &VAULT));
        assert!(!state.is_within(&VAULT, &INMOST));
    }

    /// A host that is granted the vault around a dataset may have used the dataset before the server was lost.
    #[test]
    fn who_is_granted_the_vault_around_a_restored_dataset_reports_too() {
        let (_dir, state) = state();
        state.note_kept("h", &INNER, Some(&VAULT)).expect("writes");
        let backup = tempfile::tempdir().expect("makes a directory");
        let made = State::make(backup.path()).expect("makes");
        made.fill(&state.copied().expect("copies"), &[VAULT, INNER]).expect("fills");
        drop(made);
        let restored = State::open(backup.path()).expect("opens");
        assert_eq!(restored.around(&INNER), Some(VAULT));
        assert_eq!(restored.waits_for(&INNER), Some(BTreeSet::new()));
        restored.grant("h", &VAULT.to_string(), true).expect("grants");
        let waits_for = BTreeSet::from(["h".to_owned()]);
        assert_eq!(restored.waits_for(&INNER).as_ref(), Some(&waits_for));
        assert_eq!(restored.waits_for(&VAULT), Some(waits_for));
    }
}
