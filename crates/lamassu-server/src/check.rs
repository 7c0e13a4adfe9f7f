//! Checks that a server's data is consistent: all rows of its state, the chain of its audit log, all anchors.

use crate::administered::Administered;
use crate::audit::ChainEnd;
use crate::keys::{Master, load, source_in};
use crate::policy::Policy;
use crate::{Result, ServerError};
use lamassu_anchor::export::{self, ExportError};
use lamassu_anchor::table::Table;
use lamassu_format::header::VaultId;
use lamassu_keys::Purpose;
use lamassu_keys::receipt::served::digest;

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// what is consistent
    pub good: Vec<String>,
    /// what is wrong
    pub bad: Vec<String>,
}

impl Found {
    fn takes(&mut self, what: &str, found: std::result::Result<String, impl ToString>) {
        match found {
            Ok(found) => self.good.push(format!("{what}: {found}")),
            Err(error) => self.bad.push(format!("{what}: {}", error.to_string())),
        }
    }
}

/// Checks everything. Commits of an anchor wait while its checksums are verified, and all changes of leases while those
/// of the state are. Meanwhile no session counts as silent.
///
/// # Errors
/// If nothing can be checked.
pub fn check(of: &Administered) -> Result<Found> {
    let mut found = Found::default();
    found.takes("hosts and tokens", hosts(of));
    found.takes("leases", leases(of));
    found.takes("policy", Policy::read(&of.dir).map(|(policy, _)| format!("{} rules", policy.len())));
    found.takes("alerts", alerts(of));
    if let Some(checked) = keys(of).transpose() {
        found.takes("keys", checked);
    }
    found.takes("audit log", audit(of));
    for id in of.missing()? {
        found.bad.push(format!("{id}: the anchor was kept here, and is gone"));
    }
    of.visit_tables(|id, table| {
        let verified = table.map_err(ExportError::Anchor).and_then(|table| anchor(of, &*table, &id));
        found.takes(&id.to_string(), verified);
        Ok(())
    })?;
    Ok(found)
}

fn hosts(of: &Administered) -> Result<String> {
    let blocks = of.blocks_hosts();
    of.state.verify()?;
    drop(blocks);
    let (hosts, tokens) = (of.state.copied()?.hosts.len(), of.state.tokens()?);
    Ok(format!("{hosts} hosts, {tokens} tokens"))
}

fn leases(of: &Administered) -> Result<String> {
    let (mut vaults, mut sessions) = (0, 0);
    for (id, _) in of.state.vaults()? {
        vaults += 1;
        sessions += of.state.leases(&id)?.1.len();
    }
    Ok(format!("{sessions} sessions, {vaults} vaults that are or were kept here"))
}

/// Checks that each key opens, and is the one that was made. `None`: none are kept.
fn keys(of: &Administered) -> Result<Option<String>> {
    let keys = of.state.keys()?;
    let count = keys.values().filter(|key| key.kept().is_some()).count();
    let Some(zone) = of.state.zone()? else {
        return if keys.is_empty() { Ok(None) } else { Err(ServerError::NoKeys) };
    };
    let opened = match (&of.master, source_in(&of.config)?) {
        (Some(_), _) => None,
        (None, Some(source)) => Some(Master::open(&zone, &load(&source, Purpose::Unlock)?)?),
        (None, None) if count == 0 => return Ok(Some("none that is not deleted".into())),
        (None, None) => return Err(ServerError::NoMasterKey),
    };
    let master = of.master.as_deref().or(opened.as_ref());
    for (name, kept) in keys.iter().filter_map(|(name, key)| Some((name, key.kept()?))) {
        let key = master.and_then(|master| master.unwrap(name, kept.wrapped()));
        if key.is_none_or(|key| digest(&key) != kept.digest) {
            return Err(ServerError::KeyDamaged { name: name.clone() });
        }
    }
    Ok(Some(format!("{count}, and each opens")))
}

fn alerts(of: &Administered) -> Result<String> {
    let mut count = 0;
    of.state.read_alerts(|alerts| {
        count += alerts.len();
        Ok(())
    })?;
    Ok(format!("{count} open"))
}

fn audit(of: &Administered) -> Result<String> {
    let (mut end, mut count) = (ChainEnd::default(), 0);
    of.state.read_audit(|place, excerpt| {
        let (next, entries) = excerpt.verified(place)?;
        (end, count) = (next, count + entries.len());
        Ok(())
    })?;
    Ok(format!("{count} entries, head {}", end.head_hex()))
}

fn anchor(of: &Administered, table: &dyn Table, id: &VaultId) -> std::result::Result<String, ExportError> {
    let (revision, rows) = export::check(table, id)?;
    let _blocks = of.blocks_hosts();
    table.verify()?;
    Ok(format!("revision {revision}, {rows} rows"))
}
