//! The parameters on nbdkit's command line: `vault=DIR` begins a vault, and the parameters after it belong to that
//! vault.

use crate::failure::{Failure, Result};
use lamassu_host::anchors::Choice;
use lamassu_host::pins::{Given, parse_key};
use lamassu_keys::KeySource;
use lamassu_volume::Name;
use std::ffi::OsString;
use std::path::PathBuf;

/// Shown by `nbdkit lamassu --help`.
pub const HELP: &str = "\
vault=DIR            (required) A vault whose volumes are exported; again for another one. What
                     follows is of that vault.
key=SOURCE           What opens it, as `lamassu --key` takes it [default: $LAMASSU_KEY].
key-slot=N           Try this slot alone.
name=NAME            Exports are NAME/VOLUME [default: of one vault VOLUME, of several the name
                     of the directory].
volume=NAME          Export this volume or snapshot; again for others [default: all].
read-only=true       Write nothing.
anchor=FILE          The vault's anchor, if it is not in the usual place.
admin-key=HEX        The administrator who has to have signed all headers.
admin-zone=FILE      The same, as this zone file pins them.
metrics=FILE         Write counts of each export there, in Prometheus' text format.
pidfile=FILE         Write the process id there when the vaults are open, and remove it at the end.
argon2-any-memory=true, fips=true
                     As the options of `lamassu`.";

/// One vault.
#[derive(Debug)]
pub struct VaultSettings {
    pub dir: PathBuf,
    pub key: Option<KeySource>,
    pub slot: Option<u32>,
    pub name: Option<String>,
    pub volumes: Vec<Name>,
    pub read_only: bool,
    pub anchor: Choice,
}

/// All parameters.
#[derive(Debug, Default)]
pub struct Settings {
    pub vaults: Vec<VaultSettings>,
    pub given: Option<Given>,
    pub any_memory: bool,
    pub fips: bool,
    /// where counts are written
    pub metrics: Option<PathBuf>,
    /// where the process id is written
    pub pidfile: Option<PathBuf>,
    /// the descriptor of [`crate::failure::Report`]
    pub report: Option<i32>,
}

impl Settings {
    /// Takes one `KEY=VALUE`.
    ///
    /// # Errors
    /// [`Failure::Setting`]. A key source is not repeated in it: it may be a passphrase in the wrong place.
    pub fn take(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "vault" => {
                let dir = std::path::absolute(value)?;
                let anchor = Choice::default();
                let (key, slot, name, volumes) = (None, None, None, Vec::new());
                self.vaults.push(VaultSettings { dir, key, slot, name, volumes, read_only: false, anchor });
            }
            "admin-key" => {
                self.given = Some(Given::Key(parse_key(value).map_err(|why| wrong(key, why))?));
            }
            "admin-zone" => self.given = Some(Given::Zone(std::path::absolute(value)?)),
            "argon2-any-memory" => self.any_memory = boolean(key, value)?,
            "fips" => self.fips = boolean(key, value)?,
            "metrics" => self.metrics = Some(std::path::absolute(value)?),
            "pidfile" => self.pidfile = Some(std::path::absolute(value)?),
            "report" => self.report = Some(number(key, value)?),
            _ => self.of_vault(key, value)?,
        }
        Ok(())
    }

    fn of_vault(&mut self, key: &str, value: &str) -> Result<()> {
        let known = ["key", "key-slot", "name", "volume", "read-only", "anchor"];
        if !known.contains(&key) {
            return Err(Failure::Setting("there is no such parameter; `nbdkit lamassu --help` lists them".into()));
        }
        let vault = self.vaults.last_mut().ok_or_else(|| wrong(key, "it stands behind the vault=DIR that it is of"))?;
        match key {
            "key" => vault.key = Some(value.parse().map_err(|error| wrong(key, error))?),
            "key-slot" => vault.slot = Some(number(key, value)?),
            "name" => {
                let name: Name = value.parse()?;
                if name.is_snapshot() {
                    return Err(wrong(key, "no @ is in it"));
                }
                vault.name = Some(name.to_string());
            }
            "volume" => vault.volumes.push(value.parse()?),
            "read-only" => vault.read_only = boolean(key, value)?,
            "anchor" => vault.anchor = Choice::from_argument(OsString::from(value)),
            _ => {}
        }
        Ok(())
    }

    /// Checks that the parameters are complete and consistent: several vaults need names for their exports.
    ///
    /// # Errors
    /// [`Failure::Setting`].
    pub fn complete(&mut self) -> Result<()> {
        if self.vaults.is_empty() {
            return Err(Failure::Setting("vault=DIR is missing: the vault whose volumes are to be exported".into()));
        }
        if self.vaults.len() > 1 {
            for vault in self.vaults.iter_mut().filter(|vault| vault.name.is_none()) {
                let name =
                    vault.dir.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse::<Name>().ok());
                let missing = || Failure::Setting(format!("{:?} needs a name=NAME for its exports", vault.dir));
                vault.name = Some(name.filter(|name| !name.is_snapshot()).ok_or_else(missing)?.to_string());
            }
        }
        let mut names: Vec<_> = self.vaults.iter().map(|vault| &vault.name).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(_) => Err(Failure::Setting("two vaults have one name: give each a name=NAME of its own".into())),
            None => Ok(()),
        }
    }
}

fn wrong(key: &str, why: impl std::fmt::Display) -> Failure {
    Failure::Setting(format!("{key}: {why}"))
}

fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T> {
    value.parse().map_err(|_| wrong(key, "a number is wanted"))
}

fn boolean(key: &str, value: &str) -> Result<bool> {
    match value {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => Err(wrong(key, "true or false is wanted")),
    }
}
