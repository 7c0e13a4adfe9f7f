//! The leases of vaults, and the vaults whose anchors are kept here.

use super::{LEASES, Misplaced, NUMBERS, RESTORED, RUNS_BEFORE, State};
use crate::Result;
use crate::audit::{Event, Why};
use crate::writing::{WriteTable, Writing};
use lamassu_format::header::VaultId;
use lamassu_lease::server::{Change, Durable};
use lamassu_lease::{GrantNo, Object, SessionId};
use redb::ReadableTable;
use std::collections::BTreeSet;

pub(super) const RUNS: u8 = 0;
const SESSION: u8 = 1;
const EXCLUSIVE: u8 = 2;
const ABANDONED: u8 = 3;
/// The vault's anchor is kept here.
pub(super) const KEPT: u8 = 4;
/// The vault's anchor is about to be kept here; the value is as that of [`KEPT`].
const ON_ITS_WAY: u8 = 5;
/// The vault's anchor was kept here and is retired, or about to be; the value is what that of [`KEPT`] was.
pub(super) const RETIRED: u8 = 6;

/// The value of the row that notes that an anchor is kept here: the vault around it, if it is a dataset's.
pub(super) fn kept_row(around: Option<&VaultId>) -> &[u8] {
    around.map_or(&[], |around| &around.0)
}

/// The term that sessions were told, in ms, among the server's numbers.
const TERM: &str = "term";

/// Between the words in the row of a session. No host's name contains it.
const NEXT: &str = "\0";

/// The last word in the row of a session that is out.
const OUT: &str = "out";

/// How a session uses its vault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// To read.
    Reads,
    /// Exclusively, to write.
    Writes,
    /// By turns with other sessions.
    ByTurns,
}

impl Use {
    const ALL: [(Use, &'static str); 3] = [(Use::Reads, "reads"), (Use::Writes, "writes"), (Use::ByTurns, "turns")];

    fn word(self) -> &'static str {
        Use::ALL.into_iter().find(|(one, _)| *one == self).map_or("", |(_, word)| word)
    }

    fn of(word: &str) -> Option<Use> {
        Use::ALL.into_iter().find(|(_, one)| *one == word).map(|(one, _)| one)
    }
}

/// A session that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lasting {
    /// its number
    pub session: SessionId,
    /// its host
    pub host: String,
    /// How it uses the vault. A session to write may not have its lease yet.
    pub used: Use,
    /// While it lasted, its host had no right to the vault. It has ended with that, although its host may not know.
    pub is_out: bool,
}

impl Lasting {
    fn row(&self) -> Vec<u8> {
        let mut words = vec![&*self.host, self.used.word()];
        words.extend(self.is_out.then_some(OUT));
        words.join(NEXT).into_bytes()
    }

    /// `None`: this is no such row.
    fn of(session: u64, row: &[u8]) -> Option<Lasting> {
        let mut words = std::str::from_utf8(row).ok()?.split(NEXT);
        let (host, used) = (words.next()?.to_owned(), Use::of(words.next()?)?);
        let is_out = match words.next() {
            None => false,
            Some(OUT) => true,
            Some(_) => return None,
        };
        Some(Lasting { session: SessionId(session), host, used, is_out })
    }
}

impl State {
    /// The durable leases of a vault, and its sessions.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn leases(&self, vault: &VaultId) -> Result<(Durable, Vec<Lasting>)> {
        let rows = self.read(|read| {
            let table = read.open_table(LEASES)?;
            let mut rows = Vec::new();
            for row in table.range(&vault.0[..]..)? {
                let (key, value) = row?;
                if !key.value().starts_with(&vault.0) {
                    break;
                }
                rows.push((key.value()[16..].to_vec(), value.value().to_vec()));
            }
            Ok(rows)
        })?;
        // Numbers of sessions begin above all that the server of which this is a backup has given.
        let before = self.read(|read| Ok(read.open_table(NUMBERS)?.get(RUNS_BEFORE)?.map(|row| row.value())))?;
        let (mut durable, mut sessions) =
            (Durable { runs: before.unwrap_or_default(), ..Durable::default() }, Vec::new());
        for (key, value) in rows {
            let damaged = || self.damaged("a lease");
            let (kind, number) = key.split_first().ok_or_else(damaged)?;
            let number = u64::from_be_bytes(number.try_into().map_err(|_| damaged())?);
            let word = |at: usize| {
                let bytes = value.get(at * 8..at * 8 + 8).and_then(|bytes| bytes.try_into().ok());
                bytes.map(u64::from_le_bytes).ok_or_else(damaged)
            };
            match *kind {
                RUNS => durable.runs = word(0)?,
                SESSION => {
                    durable.sessions.insert(SessionId(number));
                    sessions.push(Lasting::of(number, &value).ok_or_else(damaged)?);
                }
                EXCLUSIVE => {
                    durable.exclusive.insert(Object(number), (SessionId(word(0)?), GrantNo(word(1)?)));
                }
                ABANDONED => drop(durable.abandoned.insert(Object(number))),
                KEPT | ON_ITS_WAY | RETIRED => {}
                _ => return Err(damaged()),
            }
        }
        Ok((durable, sessions))
    }

    /// The sessions of a vault that are out.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn turned_out(&self, vault: &VaultId) -> Result<BTreeSet<SessionId>> {
        Ok(self.leases(vault)?.1.into_iter().filter(|one| one.is_out).map(|one| one.session).collect())
    }

    /// Marks the sessions of a host in the vaults that it may not use. In the step that takes the right away: whether
    /// it is given back before a vault looks says nothing.
    pub(super) fn turn_out(
        write: &Writing<'_>,
        host: &str,
        may_use: impl Fn(&VaultId) -> bool,
    ) -> std::result::Result<(), redb::Error> {
        let mut leases = write.open_table(LEASES)?;
        let mut out = Vec::new();
        for row in leases.iter()? {
            let (key, value) = row?;
            let Some((vault, SESSION, session)) = parse_key(key.value()) else { continue };
            let its = Lasting::of(session, value.value()).filter(|one| one.host == host && !one.is_out);
            out.extend(its.filter(|_| !may_use(&vault)).map(|one| (vault, Lasting { is_out: true, ..one })));
        }
        for (vault, one) in out {
            leases.insert(&lease_key(&vault, SESSION, one.session.0)[..], &one.row()[..])?;
        }
        Ok(())
    }

    /// The term that sessions count on from now on, ms: the configured one, or a longer one that sessions were told of
    /// which have not ended.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn begin_term(&self, configured: u64) -> Result<u64> {
        let has_sessions = !self.of_kind(SESSION)?.is_empty();
        self.write(|write, _| {
            let mut numbers = write.open_table(NUMBERS)?;
            let before = numbers.get(TERM)?.map(|row| row.value());
            let term = before.filter(|_| has_sessions).map_or(configured, |before| before.max(configured));
            if before != Some(term) {
                numbers.insert(TERM, term)?;
            }
            Ok(term)
        })
    }

    /// The vaults whose anchors are kept here.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn kept(&self) -> Result<Vec<VaultId>> {
        Ok(self.of_kind(KEPT)?.into_iter().map(|(vault, _)| vault).collect())
    }

    /// Notes that the anchor of a vault is about to be kept here, so that its place in another vault is known if the
    /// server ends before [`State::note_kept`]. Sessions of an anchor that was here before have nothing to do with it.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn will_keep(&self, vault: &VaultId, around: Option<&VaultId>) -> Result<()> {
        self.write(|write, events| {
            let mut leases = write.open_table(LEASES)?;
            end_sessions(&mut leases, vault, Why::Silent, events)?;
            leases.insert(&lease_key(vault, ON_ITS_WAY, 0)[..], kept_row(around))?;
            Ok(())
        })
    }

    /// Notes that a host has put the anchor of a vault here; `around`: the vault that it lies in, if it is a dataset.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn note_kept(&self, host: &str, vault: &VaultId, around: Option<&VaultId>) -> Result<()> {
        self.write(|write, events| {
            let mut table = write.open_table(LEASES)?;
            table.insert(&lease_key(vault, KEPT, 0)[..], kept_row(around))?;
            table.remove(&lease_key(vault, ON_ITS_WAY, 0)[..])?;
            table.remove(&lease_key(vault, RETIRED, 0)[..])?;
            drop(table);
            let around = around.map(VaultId::to_string);
            events.push(Event::AnchorPut { host: host.into(), vault: vault.to_string(), lies_in: around });
            Ok(())
        })?;
        // Nobody else changes the place of this vault meanwhile: its slot is locked.
        self.places.write().set(vault, around.copied());
        Ok(())
    }

    /// Whether the anchor of a vault is kept here.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn keeps(&self, vault: &VaultId) -> Result<bool> {
        let key = lease_key(vault, KEPT, 0);
        self.read(|read| Ok(read.open_table(LEASES)?.get(&key[..])?.is_some()))
    }

    /// Notes that an anchor was found here that the state did not know of. It lies where it was about to lie.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn note_found(&self, vault: &VaultId) -> Result<()> {
        self.keep_in_place(vault, |_| Event::AnchorFound { vault: vault.to_string() })
    }

    /// The same of an anchor that a host has put here again: when it came, it was not certain that it had.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn note_kept_after_all(&self, host: &str, vault: &VaultId) -> Result<()> {
        self.keep_in_place(vault, |lies_in| Event::AnchorPut { host: host.into(), vault: vault.to_string(), lies_in })
    }

    /// Notes that the anchor of a vault is kept here, where it was about to be or has been, unless others have taken
    /// places meanwhile with which it cannot lie there.
    fn keep_in_place(&self, vault: &VaultId, event: impl FnOnce(Option<String>) -> Event) -> Result<()> {
        let around = self.write(|write, events| {
            let mut table = write.open_table(LEASES)?;
            let around = take_place(&mut table, vault, &[ON_ITS_WAY, RETIRED])?;
            let around = around.and_then(|around| around.try_into().ok()).map(VaultId);
            // It is here in any case, so it may be one too many.
            let may_lie =
                |around: &VaultId| !matches!(self.check_place(vault, around), Err(Misplaced::Circle | Misplaced::Deep));
            let around = around.filter(may_lie);
            table.insert(&lease_key(vault, KEPT, 0)[..], kept_row(around.as_ref()))?;
            events.push(event(around.map(|around| around.to_string())));
            Ok(around)
        })?;
        self.places.write().set(vault, around);
        Ok(())
    }

    /// Whether the anchor of a dataset was about to be kept here, in this vault, and was not noted since.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn is_on_its_way(&self, dataset: &VaultId, around: &VaultId) -> Result<bool> {
        let key = lease_key(dataset, ON_ITS_WAY, 0);
        self.read(|read| Ok(read.open_table(LEASES)?.get(&key[..])?.is_some_and(|row| row.value() == around.0)))
    }

    /// Notes that the anchor of a vault is about to be retired, so it does not count as missing afterwards. If the
    /// retirement fails, the next start finds the anchor.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn will_put_away(&self, vault: &VaultId) -> Result<()> {
        self.write(|write, _| {
            let mut table = write.open_table(LEASES)?;
            if let Some(around) = take_place(&mut table, vault, &[KEPT])? {
                table.insert(&lease_key(vault, RETIRED, 0)[..], &around[..])?;
            }
            Ok(())
        })?;
        self.places.write().set(vault, None);
        Ok(())
    }

    /// Notes that the anchor of a vault is no longer kept here: its sessions have ended, and no host has to report its
    /// state. The vault around it stays known.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn note_not_kept(&self, vault: &VaultId, event: Event) -> Result<()> {
        self.write(|write, events| {
            let mut leases = write.open_table(LEASES)?;
            let around = take_place(&mut leases, vault, &[KEPT, ON_ITS_WAY, RETIRED])?;
            leases.insert(&lease_key(vault, RETIRED, 0)[..], &around.unwrap_or_default()[..])?;
            let why = if matches!(event, Event::AnchorTaken { .. }) { Why::Left } else { Why::Silent };
            end_sessions(&mut leases, vault, why, events)?;
            write.open_table(RESTORED)?.remove(&vault.0[..])?;
            events.push(event);
            Ok(())
        })?;
        self.restored.write().remove(vault);
        Ok(())
    }

    /// Brings to its end what a server has left that ended between a change of an anchor and its note. `here`: the
    /// vaults whose anchors are here. An anchor that was about to be kept has not come. One that was about to be
    /// retired is, and has no sessions.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn note_gone(&self, here: &[VaultId]) -> Result<()> {
        let of_kind =
            |kind| -> Result<BTreeSet<_>> { Ok(self.of_kind(kind)?.into_iter().map(|(vault, _)| vault).collect()) };
        let (on_their_way, mut retired) = (of_kind(ON_ITS_WAY)?, of_kind(RETIRED)?);
        let (attended, restored) = (self.attended()?, self.restored());
        retired.retain(|vault| attended.contains(vault) || restored.contains(vault));
        let mut gone: Vec<_> = on_their_way.union(&retired).copied().collect();
        gone.retain(|vault| !here.contains(vault));
        if gone.is_empty() {
            return Ok(());
        }
        self.write(|write, events| {
            let (mut leases, mut restored) = (write.open_table(LEASES)?, write.open_table(RESTORED)?);
            for vault in &gone {
                let has = |kind| leases.get(&lease_key(vault, kind, 0)[..]).map(|row| row.is_some());
                // A server that was started on it has had it, whether it could note that or not.
                let was_here = has(RUNS)? || has(RETIRED)?;
                let around = take_place(&mut leases, vault, &[RETIRED, ON_ITS_WAY])?;
                if was_here {
                    leases.insert(&lease_key(vault, RETIRED, 0)[..], &around.unwrap_or_default()[..])?;
                }
                end_sessions(&mut leases, vault, Why::Silent, events)?;
                restored.remove(&vault.0[..])?;
            }
            Ok(())
        })?;
        self.restored.write().retain(|vault, _| !gone.contains(vault));
        Ok(())
    }

    /// Whether the anchor of a vault is or was kept here.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub(super) fn knows(&self, vault: &VaultId) -> Result<bool> {
        self.read(|read| {
            let table = read.open_table(LEASES)?;
            for kind in [KEPT, RETIRED, RUNS] {
                if table.get(&lease_key(vault, kind, 0)[..])?.is_some() {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }

    /// The vaults whose anchors are or were kept here and opened, and how many starts of the server have used each.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn vaults(&self) -> Result<Vec<(VaultId, u64)>> {
        let parsed = |(vault, runs): (VaultId, Vec<u8>)| {
            let runs = runs.try_into().map_err(|_| self.damaged("a lease"))?;
            Ok((vault, u64::from_le_bytes(runs)))
        };
        self.of_kind(RUNS)?.into_iter().map(parsed).collect()
    }

    /// The vaults that have sessions which have not ended.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn attended(&self) -> Result<BTreeSet<VaultId>> {
        Ok(self.of_kind(SESSION)?.into_iter().map(|(vault, _)| vault).collect())
    }

    /// The rows of this kind: the vault, and the value.
    pub(super) fn of_kind(&self, kind: u8) -> Result<Vec<(VaultId, Vec<u8>)>> {
        let parsed = |(key, value): (Vec<u8>, Vec<u8>)| {
            let vault = *key.first_chunk().ok_or_else(|| self.damaged("a lease"))?;
            Ok((VaultId(vault), value))
        };
        let rows = self.rows(LEASES)?.into_iter();
        rows.filter(|(key, _)| key.get(16) == Some(&kind)).map(parsed).collect()
    }

    /// Makes changes of a vault's leases durable, together. `host_of` names the host of a session and how it uses the
    /// vault; `why` says why a session ends, and which host has what it claims, if another one has.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn change_leases(
        &self,
        vault: &VaultId,
        changes: &[Change],
        host_of: impl Fn(SessionId) -> (String, Use),
        why: impl Fn(SessionId) -> (Why, Option<String>),
    ) -> Result<()> {
        if changes.is_empty() {
            return Ok(());
        }
        let id = vault.to_string();
        self.write(|write, events| {
            let mut table = write.open_table(LEASES)?;
            for change in changes {
                match *change {
                    Change::Began(session) => {
                        let ((host, used), vault) = (host_of(session), id.clone());
                        let writes = used != Use::Reads;
                        events.push(Event::SessionBegan { host, vault, session: session.0, writes });
                    }
                    Change::Ended(session) => {
                        let (host, vault) = (host_of(session).0, id.clone());
                        let (why, against) = why(session);
                        events.push(Event::SessionEnded { host, vault, session: session.0, why, against });
                    }
                    _ => {}
                }
                let (kind, number, value) = match *change {
                    Change::Run(runs) => (RUNS, 0, Some(runs.to_le_bytes().to_vec())),
                    Change::Began(session) => {
                        let (host, used) = host_of(session);
                        (SESSION, session.0, Some(Lasting { session, host, used, is_out: false }.row()))
                    }
                    Change::Ended(session) => (SESSION, session.0, None),
                    Change::Exclusive(object, session, grant) => {
                        (EXCLUSIVE, object.0, Some([session.0.to_le_bytes(), grant.0.to_le_bytes()].concat()))
                    }
                    Change::Released(object) => (EXCLUSIVE, object.0, None),
                    Change::Abandoned(object) => (ABANDONED, object.0, Some(Vec::new())),
                    Change::TakenOver(object) => (ABANDONED, object.0, None),
                };
                let key = lease_key(vault, kind, number);
                match value {
                    Some(value) => drop(table.insert(&key[..], &value[..])?),
                    None => drop(table.remove(&key[..])?),
                }
            }
            Ok(())
        })
    }
}

/// Removes the rows of these kinds that say where an anchor lies. Returns the value of the first one that is there.
fn take_place(
    leases: &mut WriteTable<'_, &'static [u8], &'static [u8]>,
    vault: &VaultId,
    kinds: &[u8],
) -> std::result::Result<Option<Vec<u8>>, redb::Error> {
    let mut place = None;
    for kind in kinds {
        let row = leases.remove(&lease_key(vault, *kind, 0)[..])?.map(|row| row.value().to_vec());
        place = place.or(row);
    }
    Ok(place)
}

/// Removes the sessions of a vault, and their leases.
fn end_sessions(
    leases: &mut WriteTable<'_, &'static [u8], &'static [u8]>,
    vault: &VaultId,
    why: Why,
    events: &mut Vec<Event>,
) -> std::result::Result<(), redb::Error> {
    let mut gone = Vec::new();
    for row in leases.range(&lease_key(vault, SESSION, 0)[..]..)? {
        let (key, value) = row?;
        let Some((kind, number)) = key.value().strip_prefix(&vault.0).and_then(<[u8]>::split_first) else { break };
        if ![SESSION, EXCLUSIVE, ABANDONED].contains(kind) {
            continue;
        }
        if let (SESSION, Ok(number)) = (*kind, number.try_into()) {
            let session = u64::from_be_bytes(number);
            let host = Lasting::of(session, value.value()).map(|one| one.host).unwrap_or_default();
            let (vault, against) = (vault.to_string(), None);
            events.push(Event::SessionEnded { host, vault, session, why, against });
        }
        gone.push(key.value().to_vec());
    }
    gone.iter().try_for_each(|key| leases.remove(&key[..]).map(drop))?;
    Ok(())
}

/// The key of a row: the vault, the kind, and the number of the session or object.
pub(super) fn lease_key(vault: &VaultId, kind: u8, number: u64) -> Vec<u8> {
    [&vault.0[..], &[kind], &number.to_be_bytes()].concat()
}

fn parse_key(key: &[u8]) -> Option<(VaultId, u8, u64)> {
    let (vault, of_vault) = key.split_first_chunk()?;
    let (kind, number) = of_vault.split_first()?;
    Some((VaultId(*vault), *kind, u64::from_be_bytes(number.try_into().ok()?)))
}
