//! Which hosts may use the vault now. Whoever has the vault's lock looks at that first. So an administrator who takes a
//! right away waits for no vault, however long one is at work, and nothing is done for the host from then on.

use super::{Inner, Standing, Vault};
use crate::caller::Caller;
use crate::refused::{Answer, Lost, Refused};

use parking_lot::MutexGuard;

impl Vault {
    /// The vault, for a host's request. A vault in doubt answers nothing: it is reopened on what is durable, and only
    /// the reopened one may commit. Nor does one that was given up: the durable leases of its id may be another
    /// anchor's by now.
    ///
    /// # Errors
    /// [`Refused::NotNow`], [`Refused::Ended`], [`Refused::Lost`].
    pub(super) fn usable(&self) -> Answer<MutexGuard<'_, Inner>> {
        let mut inner = self.inner.lock();
        match inner.standing() {
            Standing::Good => {}
            Standing::InDoubt | Standing::Closed => return Err(Refused::NotNow),
            Standing::GivenUp => return Err(Refused::Ended),
        }
        self.look_at_rights(&mut inner)?;
        Ok(inner)
    }

    /// The same for a host that may use the vault now: its grant may have ended since the call was admitted.
    ///
    /// # Errors
    /// Those, and [`Refused::Unknown`].
    pub(super) fn usable_by(&self, caller: &Caller) -> Answer<MutexGuard<'_, Inner>> {
        let inner = self.usable()?;
        // Also by its key: another host may have its name by now.
        match self.state.may_use(&caller.key, &self.id) {
            true => Ok(inner),
            false => Err(Refused::Unknown),
        }
    }

    /// Ignores the sessions of hosts that may no longer use the vault, or could not in between, from now on. Their
    /// leases are granted to others when the hosts have certainly stopped.
    ///
    /// # Errors
    /// [`Lost`].
    pub(super) fn look_at_rights(&self, inner: &mut Inner) -> std::result::Result<(), Lost> {
        // The state, which signals changes, lives as long as its vaults.
        if !inner.rights.has_changed().unwrap_or(true) {
            return Ok(());
        }
        // First: what changes meanwhile is looked at again.
        inner.rights.mark_unchanged();
        let marked = self.state.turned_out(&self.id).map_err(Lost)?;
        // One that has begun while the right was taken away may not be marked.
        let is_in = |session, host: &str| !marked.contains(session) && self.state.host_may_use(host, &self.id);
        let out = inner.sessions.iter().filter(|(session, one)| !one.is_out && !is_in(session, &one.host));
        let out: Vec<_> = out.map(|(session, _)| *session).collect();
        for session in out {
            let now = inner.now();
            let step = inner.leases.turn_out(session, now);
            if let Some(attending) = inner.sessions.get_mut(&session) {
                attending.is_out = true;
            }
            self.carry_out(inner, step, None)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::leases::Use;
    use crate::vault::REPLIES_MAX;
    use crate::vault::tests::{ID, begin, begin_to, common, ends, joined_as, open, report, row, table};
    use lamassu_anchor::head::Head;
    use lamassu_lease::{Call, Reply, SessionId};
    use tokio::sync::mpsc::channel;

    /// A grant that ends while the call waits ends no session of a vault that is not open then.
    #[test]
    fn who_has_lost_its_grant_resumes_no_session() {
        let dir = tempfile::tempdir().unwrap();
        let (common, caller) = common(dir.path());
        let vault = open(table(), &common);
        let (line, _told) = begin(&vault, &caller);
        let resumes = |number| vault.resumes(&caller, line.session, report(number, &[]), channel(REPLIES_MAX).0);
        assert!(resumes(1).is_ok());
        common.state.grant("one", &ID.to_string(), false).unwrap();
        assert!(matches!(resumes(2), Err(Refused::Unknown)));
        common.state.grant("one", &ID.to_string(), true).unwrap();
        assert!(matches!(resumes(3), Err(Refused::Ended)), "what was taken away has ended");
        assert_eq!(ends(&common), ["revoked"]);
    }

    /// A grant that ends while the call waits for its turn.
    #[test]
    fn who_has_lost_its_grant_commits_nothing_and_gets_no_rows() {
        let dir = tempfile::tempdir().unwrap();
        let (common, caller) = common(dir.path());
        let vault = open(table(), &common);
        let (line, grant, mut told) = begin_to(&vault, &caller, Use::Writes, SessionId(u64::MAX));
        let commit = || vault.commit(&caller, (line.session, grant.number), Head([3; 32]), &[row(1)]);
        let (rows, head) = (|| vault.rows(&caller, line.session, None), vault.head());
        assert!(rows().is_ok());
        let may = |may| common.state.grant("one", &ID.to_string(), may).unwrap();
        may(false);
        assert!(matches!(commit(), Err(Refused::Unknown)) && matches!(rows(), Err(Refused::Unknown)));
        let may_be = |inner: &Inner| inner.may_change(line.session, &caller.name);
        assert!(matches!(vault.give_up(may_be, || panic!("it is put away")), Err(Refused::Ended)));
        assert_eq!(told.try_recv().map(|(reply, _)| reply), Ok(Reply::Ended));
        // Not with another grant either: its host was told that the session has ended.
        may(true);
        assert!(matches!(commit(), Err(Refused::Ended)) && matches!(rows(), Err(Refused::Ended)));
        assert_eq!(vault.head(), head);
        assert!(vault.inner.lock().leases.is_alive(line.session), "others get its lease when it has stopped");
    }

    /// No look comes too late for that, whether the vault was at work or not even open.
    #[test]
    fn who_has_lost_its_right_and_got_it_back_before_anybody_looked_has_lost_its_sessions() {
        for is_open in [true, false] {
            for is_revoked in [true, false] {
                let dir = tempfile::tempdir().unwrap();
                let (common, caller) = common(dir.path());
                let before = open(table(), &common);
                let (line, _told) = begin(&before, &caller);
                let again = if is_revoked {
                    common.state.revoke("one").unwrap();
                    joined_as("one", b"another key", &common.state)
                } else {
                    for may in [false, true] {
                        common.state.grant("one", &ID.to_string(), may).unwrap();
                    }
                    caller
                };
                let vault = if is_open { before } else { open(table(), &common) };
                let (next, _told) = begin(&vault, &again);
                let (replies, mut told) = channel(REPLIES_MAX);
                let resumed = vault.resumes(&again, line.session, report(1, &[]), replies);
                // One that was not open does not know what the session has, and waits until it has certainly ended.
                let has_ended = match is_open {
                    true => matches!(resumed, Err(Refused::Ended)),
                    false => told.try_recv().is_ok_and(|(reply, _)| reply == Reply::Ended),
                };
                assert!(has_ended, "{is_open} {is_revoked}");
                assert!(vault.call(next, Call::Heartbeat { beat: 1 }).is_ok(), "{is_open} {is_revoked}");
            }
        }
    }

    /// Whoever took the right away found no session to end.
    #[test]
    fn a_host_that_loses_its_right_while_a_vault_is_not_open_is_out_when_it_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (common, caller) = common(dir.path());
        let (line, _grant, _told) = begin_to(&open(table(), &common), &caller, Use::Writes, SessionId(u64::MAX));
        common.state.grant("one", &ID.to_string(), false).unwrap();
        let vault = open(table(), &common);
        assert!(vault.tick().is_ok() && vault.inner.lock().sessions[&line.session].is_out);
    }
}
