//! Vaults that were restored from a backup. The server's rows may be older than what hosts have seen. Each vault is
//! unavailable until every host that may use it has reported its state.

use super::keys::{self, CopiedKeys};
use super::leases::{KEPT, RETIRED, kept_row, lease_key};
use super::places::{LiesIn, with_those_around};
use super::{HOSTS, Host, LEASES, NUMBERS, RESTORED, RUNS_BEFORE, State, alerts};
use crate::audit::{self, ChainEnd, Event};
use crate::writing::Writing;
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_format::header::VaultId;
use redb::ReadableTable;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// More starts than a server can have had since the backup was made, so that no number of a session is used twice.
/// However often a vault is opened in one start, that counts once.
const RUNS_MISSED: u64 = 1 << 16;

/// What a backup has of the state, except for alerts and the audit log.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Copied {
    /// all hosts
    pub hosts: BTreeMap<String, Host>,
    /// by vault, hex: how many starts of the server have used it
    pub runs: BTreeMap<String, u64>,
    /// by dataset, hex: the vault that it lies in
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lies_in: BTreeMap<String, String>,
    /// the same of datasets whose anchors are retired
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lay_in: BTreeMap<String, String>,
    /// an upper bound of the number of starts on any vault before this server was made as a backup
    pub runs_before: u64,
    /// the last number of an alert
    pub last_alert: u64,
    /// all keys, wrapped
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) keys: Option<CopiedKeys>,
}

/// Vaults that were restored, and the hosts of each that have not reported yet.
pub(super) type Restored = BTreeMap<VaultId, BTreeSet<String>>;

fn damaged() -> redb::Error {
    redb::Error::Corrupted("a vault that was put back".into())
}

fn parse_id(id: &String) -> Result<VaultId> {
    let bytes = HEXLOWER.decode(id.as_bytes()).ok().and_then(|id| id.try_into().ok());
    let garbled = || ServerError::Garbled { detail: "a backup has a vault that does not parse".into() };
    bytes.map(VaultId).ok_or_else(garbled)
}

fn parse_around(of: &BTreeMap<String, String>) -> Result<LiesIn> {
    of.iter().map(|(dataset, around)| Ok((parse_id(dataset)?, parse_id(around)?))).collect()
}

impl Copied {
    /// The vaults whose anchors were here and are not in the backup, each with the vault around it.
    fn retired(&self, vaults: &[VaultId], lies_in: &LiesIn) -> Result<Vec<(VaultId, Option<VaultId>)>> {
        let lay_in = parse_around(&self.lay_in)?;
        let was_here: BTreeSet<_> = self.runs.keys().map(parse_id).collect::<Result<_>>()?;
        let all = was_here.iter().chain(lay_in.keys()).copied().collect::<BTreeSet<_>>().into_iter();
        let around = |vault: VaultId| (vault, lay_in.get(&vault).or_else(|| lies_in.get(&vault)).copied());
        Ok(all.filter(|vault| !vaults.contains(vault)).map(around).collect())
    }
}

impl State {
    /// A host was granted a vault. If that is being restored, or a dataset in it, the host must report too: it may have
    /// used it before the server was lost.
    pub(super) fn wait_also_for(
        &self,
        write: &Writing<'_>,
        vault: &str,
        host: &str,
    ) -> std::result::Result<(), redb::Error> {
        let id = HEXLOWER.decode(vault.as_bytes()).ok().and_then(|id| id.try_into().ok());
        let granted = VaultId(id.ok_or_else(damaged)?);
        let mut table = write.open_table(RESTORED)?;
        // Not by the copy in memory: who holds that may wait for this transaction.
        let mut rows = Vec::new();
        for row in table.iter()? {
            let (vault, hosts) = row?;
            let vault = vault.value().try_into().map(VaultId).map_err(|_| damaged())?;
            rows.push((vault, hosts.value().to_vec()));
        }
        for (vault, row) in rows.into_iter().filter(|(vault, _)| self.is_within(vault, &granted)) {
            let mut waits_for: BTreeSet<String> = serde_json::from_slice(&row).map_err(|_| damaged())?;
            waits_for.insert(host.into());
            table.insert(&vault.0[..], &serde_json::to_vec(&waits_for).unwrap_or_default()[..])?;
        }
        Ok(())
    }

    pub(super) fn read_restored(&self) -> Result<Restored> {
        let parsed = |(vault, hosts): (Vec<u8>, Vec<u8>)| {
            let damaged = || self.damaged("a vault that was put back");
            let vault = vault.try_into().map(VaultId).map_err(|_| damaged())?;
            Ok((vault, serde_json::from_slice(&hosts).map_err(|_| damaged())?))
        };
        self.rows(RESTORED)?.into_iter().map(parsed).collect()
    }

    /// Brings the copy in memory up to date.
    pub(super) fn look_at_restored(&self) -> Result<()> {
        let mut restored = self.restored.write();
        if !restored.is_empty() {
            *restored = self.read_restored()?;
        }
        Ok(())
    }

    /// The hosts that must report before a restored vault can be used: those that may use it and have not reported.
    /// `None`: the vault is not being restored.
    pub fn waits_for(&self, vault: &VaultId) -> Option<BTreeSet<String>> {
        let restored = self.restored.read();
        let may_use = self.who_may_use(vault);
        restored.get(vault).map(|waits_for| waits_for.intersection(&may_use).cloned().collect())
    }

    /// Vaults that are being restored.
    pub fn restored(&self) -> Vec<VaultId> {
        self.restored.read().keys().copied().collect()
    }

    /// A host has reported its state of a restored vault. False: its report was not awaited.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn reconciled(&self, vault: &VaultId, host: &str, was_newer: bool) -> Result<bool> {
        let mut restored = self.restored.write();
        // Read in the transaction: a concurrent grant may have added a host.
        let left = self.write(|write, events| {
            let mut table = write.open_table(RESTORED)?;
            let Some(row) = table.get(&vault.0[..])?.map(|row| row.value().to_vec()) else { return Ok(None) };
            let mut left: BTreeSet<String> = serde_json::from_slice(&row).map_err(|_| damaged())?;
            if !left.remove(host) {
                return Ok(None);
            }
            table.insert(&vault.0[..], &serde_json::to_vec(&left).unwrap_or_default()[..])?;
            events.push(Event::Reconciled { host: host.into(), vault: vault.to_string(), was_newer });
            Ok(Some(left))
        })?;
        Ok(left.map(|left| restored.insert(*vault, left)).is_some())
    }

    /// The hosts that have not reported yet. Empty: the vault can be used.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn reopen(&self, vault: &VaultId) -> Result<BTreeSet<String>> {
        if !self.restored.read().contains_key(vault) {
            return Ok(BTreeSet::new());
        }
        // No grant can add a host between this look and the removal of the row.
        let _alone = self.changing.lock();
        let waits_for = self.waits_for(vault).unwrap_or_default();
        if waits_for.is_empty() {
            self.write(|write, events| {
                write.open_table(RESTORED)?.remove(&vault.0[..])?;
                events.push(Event::Reopened { vault: vault.to_string() });
                Ok(())
            })?;
            self.restored.write().remove(vault);
        }
        Ok(waits_for)
    }

    /// What a backup has of the state, except for the audit log.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn copied(&self) -> Result<Copied> {
        let runs = self.vaults()?.into_iter().map(|(vault, runs)| (vault.to_string(), runs)).collect();
        let number = |name| self.read(|read| Ok(read.open_table(NUMBERS)?.get(name)?.map(|row| row.value())));
        let (last, before) = (number(alerts::LAST)?, number(RUNS_BEFORE)?);
        let (hosts, keys) = (self.read_hosts()?, self.copied_keys()?);
        let (last_alert, runs_before) = (last.unwrap_or_default(), before.unwrap_or_default());
        let text = |(dataset, around): (VaultId, VaultId)| (dataset.to_string(), around.to_string());
        let lies_in = self.read_lies_in()?.into_iter().map(text).collect();
        let lay_in = self.read_lay_in()?.into_iter().map(text).collect();
        Ok(Copied { hosts, runs, lies_in, lay_in, runs_before, last_alert, keys })
    }

    /// Makes this the state of a backup, whose sessions are not those of the original server. Each vault is unavailable
    /// until the hosts that may use it have reported.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn fill(&self, copied: &Copied, vaults: &[VaultId]) -> Result<()> {
        let lies_in = parse_around(&copied.lies_in)?;
        let retired = copied.retired(vaults, &lies_in)?;
        self.write(|write, events| {
            let (mut hosts, mut leases, mut restored) =
                (write.open_table(HOSTS)?, write.open_table(LEASES)?, write.open_table(RESTORED)?);
            for (name, host) in &copied.hosts {
                hosts.insert(&**name, &serde_json::to_vec(host).unwrap_or_default()[..])?;
            }
            // Numbers of all vaults, also of those that were never here: their anchors may have come since the backup.
            // A backup on which no server ran has no starts, but those before it count.
            let most = copied.runs.values().copied().fold(copied.runs_before, u64::max).saturating_add(RUNS_MISSED);
            let mut numbers = write.open_table(NUMBERS)?;
            numbers.insert(RUNS_BEFORE, most)?;
            numbers.insert(alerts::LAST, copied.last_alert)?;
            for vault in vaults {
                leases.insert(&lease_key(vault, KEPT, 0)[..], kept_row(lies_in.get(vault)))?;
                let any: Vec<_> = with_those_around(&lies_in, vault).collect();
                let may_know = copied.hosts.iter().filter(|(_, host)| host.may_use(&any));
                let may_know: BTreeSet<_> = may_know.map(|(name, _)| name).collect();
                restored.insert(&vault.0[..], &serde_json::to_vec(&may_know).unwrap_or_default()[..])?;
            }
            for (vault, around) in &retired {
                leases.insert(&lease_key(vault, RETIRED, 0)[..], kept_row(around.as_ref()))?;
            }
            copied.keys.iter().try_for_each(|copied| keys::fill(write, copied))?;
            events.push(Event::MadeFromBackup);
            Ok(())
        })
    }

    /// Puts the entries of another audit log here. No entries may follow them.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn put_audit(&self, excerpt: &audit::Excerpt, place: ChainEnd) -> Result<()> {
        self.write(|write, _| {
            if let Some(begins) = excerpt.begins {
                audit::put_removed(&mut write.open_table(audit::REMOVED)?, begins)?;
            }
            audit::put_entries(write, place.number + 1, &excerpt.entries)
        })
    }
}
