//! The text of the policy in force, and of the one before it. They are rows of the state, since sessions are, too:
//! whichever server goes on with those knows what their hosts were told last.

use super::State;
use crate::Result;
use crate::audit::Event;
use crate::writing::AnyTable;
use redb::{ReadableTable, TableDefinition};

/// [`APPLIED`], [`BEFORE`] and [`REPLACED`].
const POLICY: TableDefinition<'static, &'static str, &'static [u8]> = TableDefinition::new("policy");
/// The text in force.
const APPLIED: &str = "applied";
/// The text in force before.
const BEFORE: &str = "before";
/// When that was replaced, seconds since 1970, u64 little-endian.
const REPLACED: &str = "replaced";

/// The table.
pub(super) const TABLES: [&dyn AnyTable; 1] = [&POLICY];

/// The policy that came into force last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// its text
    pub text: String,
    /// The text before, and when it was replaced, seconds since 1970. `None`: it was the first one here.
    pub before: Option<(String, u64)>,
}

impl State {
    /// The policy that came into force last; `None`: there was none here.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    ///
    /// [`ServerError::Damaged`]: crate::ServerError::Damaged
    /// [`ServerError::Database`]: crate::ServerError::Database
    pub fn policy_taken(&self) -> Result<Option<Taken>> {
        let [text, before, replaced] = self.read(|read| {
            let table = read.open_table(POLICY)?;
            let row = |name| Ok::<_, redb::Error>(table.get(name)?.map(|row| row.value().to_vec()));
            Ok([row(APPLIED)?, row(BEFORE)?, row(REPLACED)?])
        })?;
        let damaged = || self.damaged("a policy");
        let parsed = |text: Vec<u8>| String::from_utf8(text).map_err(|_| damaged());
        let Some(text) = text.map(parsed).transpose()? else { return Ok(None) };
        let before = match (before.map(parsed).transpose()?, replaced) {
            (None, None) => None,
            (Some(before), Some(replaced)) => {
                Some((before, u64::from_le_bytes(replaced.try_into().map_err(|_| damaged())?)))
            }
            _ => return Err(damaged()),
        };
        Ok(Some(Taken { text, before }))
    }

    /// A policy comes into force at `now`.
    ///
    /// # Errors
    /// [`ServerError::Database`](crate::ServerError::Database).
    pub fn take_policy(&self, text: &str, now: u64, event: Option<Event>) -> Result<()> {
        self.write(|write, events| {
            let mut table = write.open_table(POLICY)?;
            let before = table.get(APPLIED)?.map(|row| row.value().to_vec());
            if let Some(before) = before {
                table.insert(BEFORE, &before[..])?;
                table.insert(REPLACED, &now.to_le_bytes()[..])?;
            }
            table.insert(APPLIED, text.as_bytes())?;
            events.extend(event);
            Ok(())
        })
    }
}
