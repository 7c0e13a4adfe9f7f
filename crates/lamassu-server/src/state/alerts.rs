//! Open alerts: those that no administrator has closed, which of them are new, and which the webhook has not accepted
//! yet.

use super::{NUMBERS, State};
use crate::alerts::{ALERTS_MAX, Acknowledged, Alert, Finding, HOSTS_MAX, NOT_KEPT, Which};
use crate::audit::Event;
use crate::writing::{AnyTable, WriteTable, Writing};
use crate::{Result, ServerError};
use lamassu_crypto::wrap::sha256_of;
use lamassu_format::header::VaultId;
use redb::{ReadableTable, ReadableTableMetadata, TableDefinition};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;

/// By number: an [`Alert`], JSON.
const ALERTS: TableDefinition<'static, u64, &'static [u8]> = TableDefinition::new("alerts");
/// By vault and [`place`]: the number of the alert.
const PLACES: super::Bytes = TableDefinition::new("places of alerts");
/// Numbers of alerts that are not acknowledged.
const NEW: TableDefinition<'static, u64, ()> = TableDefinition::new("new alerts");
/// Numbers of alerts that are to be posted.
const UNPOSTED: TableDefinition<'static, u64, ()> = TableDefinition::new("unposted alerts");
/// The same, by outermost vault and number: so all vaults have their turn.
const QUEUES: super::Bytes = TableDefinition::new("unposted alerts by vault");
/// By outermost vault: how many alerts it and its datasets have, u64 little-endian.
const COUNTS: super::Bytes = TableDefinition::new("alerts by vault");
/// The last number given to an alert, among the server's numbers.
pub(super) const LAST: &str = "last alert";

/// Alerts of one report that are written to the log. All of them are in the state.
const SAID_MAX: usize = 10;
/// Alerts that are read at a time.
pub const ALERTS_AT_ONCE: usize = 500;

type RedbResult<T> = std::result::Result<T, redb::Error>;

/// The tables.
pub(super) const TABLES: [&dyn AnyTable; 6] = [&ALERTS, &PLACES, &NEW, &UNPOSTED, &QUEUES, &COUNTS];

fn damaged() -> redb::Error {
    redb::Error::Corrupted("an alert".into())
}

/// The key of an alert: the vault, the kind, the place, and whether it is damage.
fn place(vault: &VaultId, finding: &Finding) -> Vec<u8> {
    let Finding { kind, path, is_damage, .. } = finding;
    let digest = sha256_of(&[kind.as_bytes(), &[0, u8::from(*is_damage)], path.as_bytes()]);
    [&vault.0[..], &digest].concat()
}

/// Where an alert waits to be posted.
fn in_queue(outermost: &VaultId, number: u64) -> Vec<u8> {
    [&outermost.0[..], &number.to_be_bytes()].concat()
}

/// Counts of alerts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AlertCounts {
    /// all
    pub open: u64,
    /// those that are not acknowledged
    pub new: u64,
    /// those that are to be posted
    pub unposted: u64,
}

/// The tables of alerts, in a transaction.
struct Alerts<'t> {
    alerts: WriteTable<'t, u64, &'static [u8]>,
    places: WriteTable<'t, &'static [u8], &'static [u8]>,
    new: WriteTable<'t, u64, ()>,
    unposted: WriteTable<'t, u64, ()>,
    queues: WriteTable<'t, &'static [u8], &'static [u8]>,
    counts: WriteTable<'t, &'static [u8], &'static [u8]>,
    numbers: WriteTable<'t, &'static str, u64>,
}

impl<'t> Alerts<'t> {
    fn open(write: &'t Writing<'_>) -> RedbResult<Alerts<'t>> {
        Ok(Alerts {
            alerts: write.open_table(ALERTS)?,
            places: write.open_table(PLACES)?,
            new: write.open_table(NEW)?,
            unposted: write.open_table(UNPOSTED)?,
            queues: write.open_table(QUEUES)?,
            counts: write.open_table(COUNTS)?,
            numbers: write.open_table(NUMBERS)?,
        })
    }

    fn get(&self, number: u64) -> RedbResult<Option<Alert>> {
        let row = self.alerts.get(number)?;
        row.map(|row| serde_json::from_slice(row.value()).map_err(|_| damaged())).transpose()
    }

    fn put(&mut self, alert: &Alert) -> RedbResult<()> {
        let bytes = serde_json::to_vec(alert).map_err(|_| damaged())?;
        self.alerts.insert(alert.number, &bytes[..])?;
        Ok(())
    }

    fn count(&self, vault: &VaultId) -> RedbResult<u64> {
        let row = self.counts.get(&vault.0[..])?;
        row.map_or(Ok(0), |row| row.value().try_into().map(u64::from_le_bytes).map_err(|_| damaged()))
    }

    fn set_count(&mut self, vault: &VaultId, count: u64) -> RedbResult<()> {
        match count {
            0 => drop(self.counts.remove(&vault.0[..])?),
            count => drop(self.counts.insert(&vault.0[..], &count.to_le_bytes()[..])?),
        }
        Ok(())
    }

    /// Adds a new alert.
    fn add(&mut self, vault: &VaultId, alert: &Alert) -> RedbResult<()> {
        self.put(alert)?;
        self.places.insert(&place(vault, &alert.finding)[..], &alert.number.to_le_bytes()[..])?;
        let outermost = outermost_of(alert)?;
        let count = self.count(&outermost)? + 1;
        self.set_count(&outermost, count)
    }

    /// It is to be posted.
    fn queue(&mut self, alert: &Alert) -> RedbResult<()> {
        self.unposted.insert(alert.number, ())?;
        Ok(self.queues.insert(&in_queue(&outermost_of(alert)?, alert.number)[..], &[][..])?)
    }

    /// It is to be posted no more.
    fn dequeue(&mut self, alert: &Alert) -> RedbResult<()> {
        self.unposted.remove(alert.number)?;
        self.queues.remove(&in_queue(&outermost_of(alert)?, alert.number)[..])?;
        Ok(())
    }

    fn remove(&mut self, alert: &Alert) -> RedbResult<()> {
        let vault = id_of(alert)?;
        self.alerts.remove(alert.number)?;
        self.places.remove(&place(&vault, &alert.finding)[..])?;
        self.new.remove(alert.number)?;
        self.dequeue(alert)?;
        let outermost = outermost_of(alert)?;
        let count = self.count(&outermost)?.saturating_sub(1);
        self.set_count(&outermost, count)
    }

    /// Counts a finding, `times` times, in its alert or in a new one if there is room. Returns a new one.
    fn found(
        &mut self,
        (vault, outermost, host): (&VaultId, &VaultId, &str),
        finding: &Finding,
        times: u64,
        now: u64,
    ) -> RedbResult<Found> {
        let key = place(vault, finding);
        let number = self.places.get(&key[..])?.map(|row| row.value().try_into().map(u64::from_le_bytes));
        if let Some(number) = number.transpose().map_err(|_| damaged())? {
            let mut alert = self.get(number)?.ok_or_else(damaged)?;
            alert.count = alert.count.saturating_add(times);
            alert.last = now;
            if alert.hosts.len() < HOSTS_MAX {
                alert.hosts.insert(host.into());
            }
            self.put(&alert)?;
            return Ok(Found::Known);
        }
        if finding.kind != NOT_KEPT && self.count(outermost)? >= ALERTS_MAX {
            return Ok(Found::NoRoom);
        }
        let number = self.numbers.get(LAST)?.map_or(0, |last| last.value()) + 1;
        self.numbers.insert(LAST, number)?;
        let alert = Alert {
            number,
            vault: vault.to_string(),
            outermost: (outermost != vault).then(|| outermost.to_string()),
            count: times,
            first: now,
            last: now,
            hosts: BTreeSet::from([host.to_owned()]),
            finding: finding.clone(),
            posted: false,
            acknowledged: None,
        };
        self.add(vault, &alert)?;
        self.new.insert(number, ())?;
        self.queue(&alert)?;
        Ok(Found::New(Box::new(alert)))
    }

    /// The alerts that are meant, or the first number that none has.
    fn chosen(&self, which: &Which) -> RedbResult<std::result::Result<Vec<Alert>, u64>> {
        match which {
            Which::Numbers(numbers) => {
                let mut chosen = Vec::new();
                for number in numbers {
                    match self.get(*number)? {
                        Some(alert) => chosen.push(alert),
                        None => return Ok(Err(*number)),
                    }
                }
                Ok(Ok(chosen))
            }
            Which::All { vault } => {
                let mut chosen = Vec::new();
                for row in self.alerts.iter()? {
                    let alert: Alert = serde_json::from_slice(row?.1.value()).map_err(|_| damaged())?;
                    if vault.as_ref().is_none_or(|vault| *vault == alert.vault) {
                        chosen.push(alert);
                    }
                }
                Ok(Ok(chosen))
            }
        }
    }
}

enum Found {
    New(Box<Alert>),
    Known,
    NoRoom,
}

fn id_of(alert: &Alert) -> RedbResult<VaultId> {
    VaultId::of_hex(&alert.vault).ok_or_else(damaged)
}

/// The vault by which it is counted.
fn outermost_of(alert: &Alert) -> RedbResult<VaultId> {
    VaultId::of_hex(alert.outermost.as_ref().unwrap_or(&alert.vault)).ok_or_else(damaged)
}

/// The finding of the alert that counts findings without an alert of their own.
fn not_kept(now: u64) -> Finding {
    Finding {
        time: now,
        kind: NOT_KEPT.into(),
        path: String::new(),
        inode: None,
        range: None,
        found_by: "read".into(),
        is_damage: true,
        text: "more was found than there was room for, here or on the host; its log has the rest".into(),
    }
}

impl State {
    /// A host has reported findings in a vault. `lost`: how many more it found, without details. Returns the number of
    /// new alerts.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn take_findings(
        &self,
        (vault, host): (&VaultId, &str),
        findings: &[Finding],
        lost: u64,
        now: u64,
    ) -> Result<usize> {
        // Not the dataset's: who makes datasets could have any number of alerts.
        let outermost = self.outermost(vault);
        let raised = self.write(|write, _| {
            let (mut alerts, mut raised, mut without) = (Alerts::open(write)?, Vec::new(), lost);
            for finding in findings {
                match alerts.found((vault, &outermost, host), finding, 1, now)? {
                    Found::New(alert) => raised.push(*alert),
                    Found::Known => {}
                    Found::NoRoom => without += 1,
                }
            }
            if without > 0
                && let Found::New(alert) = alerts.found((&outermost, &outermost, host), &not_kept(now), without, now)?
            {
                raised.push(*alert);
            }
            Ok(raised)
        })?;
        raised.iter().take(SAID_MAX).for_each(Alert::say);
        if raised.len() > SAID_MAX {
            let more = raised.len() - SAID_MAX;
            tracing::error!(target: "alert", more, vault = %outermost, host, "more alerts: `lamassu-server alerts list`");
        }
        if !raised.is_empty() {
            self.alerted.ring();
        }
        Ok(raised.len())
    }

    /// The alerts after a number, in order, at most `most`.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn alerts(&self, after: u64, most: usize) -> Result<Vec<Alert>> {
        self.read(|read| {
            let mut alerts = Vec::new();
            for row in read.open_table(ALERTS)?.range(after.saturating_add(1)..)?.take(most) {
                alerts.push(serde_json::from_slice(row?.1.value()).map_err(|_| damaged())?);
            }
            Ok(alerts)
        })
    }

    /// Reads all of them, some at a time.
    ///
    /// # Errors
    /// As [`State::alerts`]; those of `each`.
    pub fn read_alerts(&self, mut each: impl FnMut(&[Alert]) -> Result<()>) -> Result<()> {
        let mut after = 0;
        loop {
            let alerts = self.alerts(after, ALERTS_AT_ONCE)?;
            let Some(last) = alerts.last() else { return Ok(()) };
            after = last.number;
            each(&alerts)?;
        }
    }

    /// Counts the alerts.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn alert_counts(&self) -> Result<AlertCounts> {
        self.read(|read| {
            Ok(AlertCounts {
                open: read.open_table(ALERTS)?.len()?,
                new: read.open_table(NEW)?.len()?,
                unposted: read.open_table(UNPOSTED)?.len()?,
            })
        })
    }

    /// Acknowledges alerts, all of them or none. Returns how many.
    ///
    /// # Errors
    /// [`ServerError::NoAlert`], [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn acknowledge(&self, which: &Which, note: &str, now: u64) -> Result<usize> {
        self.change_alerts(which, |alerts, chosen, events| {
            for mut alert in chosen {
                alert.acknowledged = Some(Acknowledged { at: now, note: note.into() });
                alerts.new.remove(alert.number)?;
                alerts.put(&alert)?;
                events.push(Event::AlertAcknowledged { alert: alert.number, note: note.into() });
            }
            Ok(())
        })
    }

    /// Closes alerts, all of them or none. Returns how many. A later finding at the same place makes a new alert.
    ///
    /// # Errors
    /// As [`State::acknowledge`].
    pub fn close(&self, which: &Which) -> Result<usize> {
        self.change_alerts(which, |alerts, chosen, events| {
            for alert in chosen {
                alerts.remove(&alert)?;
                let Alert { number, vault, finding, .. } = alert;
                events.push(Event::AlertClosed { alert: number, vault, kind: finding.kind });
            }
            Ok(())
        })
    }

    fn change_alerts(
        &self,
        which: &Which,
        change: impl FnOnce(&mut Alerts<'_>, Vec<Alert>, &mut Vec<Event>) -> RedbResult<()>,
    ) -> Result<usize> {
        let changed = self.write(|write, events| {
            let mut alerts = Alerts::open(write)?;
            match alerts.chosen(which)? {
                Ok(chosen) => {
                    let count = chosen.len();
                    change(&mut alerts, chosen, events)?;
                    Ok(Ok(count))
                }
                Err(number) => Ok(Err(number)),
            }
        })?;
        changed.map_err(|number| ServerError::NoAlert { number })
    }

    /// Alerts that are to be posted, at most `most`, none of those `but`: of each outermost vault behind `turn` about
    /// as many, the oldest first. Comes with the vault whose turn was last.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn unposted(
        &self,
        turn: Option<VaultId>,
        but: &BTreeSet<u64>,
        most: usize,
    ) -> Result<(Vec<Alert>, Option<VaultId>)> {
        self.read(|read| {
            let (alerts, queues) = (read.open_table(ALERTS)?, read.open_table(QUEUES)?);
            let next_of = |vault: Option<VaultId>, after: u64| {
                let from = vault.map(|vault| in_queue(&vault, after));
                let from = from.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
                let row = queues.range::<&[u8]>((from, Bound::Unbounded))?.next().transpose()?;
                let parsed = |key: &[u8]| Some((*key.first_chunk::<16>()?, *key.last_chunk::<8>()?));
                row.map(|(key, _)| parsed(key.value()).ok_or_else(damaged)).transpose()
            };
            // All vaults that have some, from the turn on; each with the number before its first.
            let (mut vaults, mut last) = (VecDeque::new(), turn);
            for is_round in [false, true] {
                while let Some((vault, _)) = next_of(last, u64::MAX)?.filter(|_| vaults.len() < most) {
                    if is_round && turn.is_none_or(|turn| vault > turn.0) {
                        break;
                    }
                    vaults.push_back((VaultId(vault), 0));
                    last = Some(VaultId(vault));
                }
                last = None;
            }
            let (mut chosen, mut turn) = (Vec::new(), turn);
            while let Some((vault, after)) = vaults.pop_front().filter(|_| chosen.len() < most) {
                let next = next_of(Some(vault), after)?.filter(|(of, _)| *of == vault.0);
                let Some(number) = next.map(|(_, number)| u64::from_be_bytes(number)) else { continue };
                vaults.push_back((vault, number));
                if !but.contains(&number) {
                    let alert = alerts.get(number)?.ok_or_else(damaged)?;
                    chosen.push(serde_json::from_slice(alert.value()).map_err(|_| damaged())?);
                    turn = Some(vault);
                }
            }
            Ok((chosen, turn))
        })
    }

    /// Puts the alerts that are to be posted into queues, where an earlier version has not.
    pub(super) fn fill_queues(&self) -> Result<()> {
        let (all, queued) =
            self.read(|read| Ok((read.open_table(UNPOSTED)?.len()?, read.open_table(QUEUES)?.len()?)))?;
        if all == queued {
            return Ok(());
        }
        self.write(|write, _| {
            let mut alerts = Alerts::open(write)?;
            let numbers: Vec<u64> = alerts.unposted.iter()?.map(|row| Ok(row?.0.value())).collect::<RedbResult<_>>()?;
            for number in numbers {
                let alert = alerts.get(number)?.ok_or_else(damaged)?;
                alerts.queue(&alert)?;
            }
            Ok(())
        })
    }

    /// Notes that these alerts were posted.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn posted(&self, alerts: &[Alert]) -> Result<()> {
        self.write(|write, _| {
            let mut tables = Alerts::open(write)?;
            for alert in alerts {
                tables.dequeue(alert)?;
                // It may have been closed or changed meanwhile.
                if let Some(mut alert) = tables.get(alert.number)? {
                    alert.posted = true;
                    tables.put(&alert)?;
                }
            }
            Ok(())
        })
    }

    /// Puts the alerts of another state into this one, which has none.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn put_alerts(&self, given: &[Alert]) -> Result<()> {
        self.write(|write, _| {
            let mut alerts = Alerts::open(write)?;
            for alert in given {
                alerts.add(&id_of(alert)?, alert)?;
                if alert.acknowledged.is_none() {
                    alerts.new.insert(alert.number, ())?;
                }
                if !alert.posted {
                    alerts.queue(alert)?;
                }
            }
            Ok(())
        })
    }
}
