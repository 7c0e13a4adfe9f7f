//! The history of a vault's keys (§4a): what was done to them, when, where and by whom.
//!
//! `lamassu.history` in the vault's root is append-only, sealed under a key derived from the file key, and chained:
//! each entry is bound to its number and to the bytes of the one before. The header's mark tells how far it went at the
//! last change of the header, so a changed, removed, inserted or reordered entry is found, and a missing end as far as
//! the mark goes. Not found is what was cut off behind the mark, nor an old header put back with an old history: that
//! takes an anchor elsewhere.
//!
//! Guarantees: an entry is durable before the header that counts it is written, so a crash between the two leaves an
//! entry more, which is valid. A history that does not verify, or cannot be read, never keeps anyone from changing
//! keys: it is set aside, and the next one begins with saying so.

mod chain;
mod event;
mod file;

pub use chain::{Entry, Fault, Report};
#[cfg(feature = "testing")]
pub(crate) use chain::{chain_of, read_chain};
pub use event::{Event, EventKind};
pub(crate) use event::{host_name, user_name};
pub use file::{History, HistoryError, reaches};

use crate::header_file::Update;
use crate::{KeyError, Unlocked};
use lamassu_format::header::{Header, HistoryMark};
use lamassu_format::name;
use std::path::Path;

impl Unlocked {
    /// The history of the vault in `dir`, whose keys these are, and which goes as far at least as `header` says, which
    /// is verified first, and as the last header that these keys saw. There is no other way to a history.
    ///
    /// # Errors
    /// [`KeyError::OtherHeader`], [`KeyError::HeaderAltered`], [`KeyError::SignatureInvalid`],
    /// [`KeyError::OtherAdministrator`].
    pub fn history<H: Header>(&self, dir: &Path, header: &H) -> Result<History, KeyError> {
        self.owns(header)?;
        Ok(History::new(dir.join(name::HISTORY), self.id(), self.history_key(), self.mark(header)))
    }
}

impl Update {
    /// Replaces the header after writing down what was done to it: `events` are appended to the vault's history and
    /// durable before the header, which leaves with a new mark and MAC, is. A zone has no history; its events go to the
    /// log alone.
    ///
    /// # Errors
    /// Those of [`Update::replace`]; [`KeyError::History`] where the history cannot be written, and
    /// [`KeyError::HeaderAltered`], [`KeyError::OtherHeader`], [`KeyError::NotAdministrator`]: nothing was replaced
    /// then.
    pub fn record<H: Header + Clone>(self, header: &mut H, keys: &Unlocked, events: &[Event]) -> Result<(), KeyError> {
        self.write_down(header, keys, events)?;
        let path = self.path().to_path_buf();
        self.replace(header)?;
        events.iter().for_each(|event| event.announce(&path));
        Ok(())
    }

    /// The same where there is no header yet.
    ///
    /// # Errors
    /// Those of [`Update::create`], and as [`Update::record`].
    pub fn create_recorded<H: Header + Clone>(
        self,
        header: &mut H,
        keys: &Unlocked,
        events: &[Event],
    ) -> Result<(), KeyError> {
        self.write_down(header, keys, events)?;
        let path = self.path().to_path_buf();
        self.create(header)?;
        events.iter().for_each(|event| event.announce(&path));
        Ok(())
    }

    pub(crate) fn write_down<H: Header + Clone>(
        &self,
        header: &mut H,
        keys: &Unlocked,
        events: &[Event],
    ) -> Result<(), KeyError> {
        if !H::IS_VAULT || events.is_empty() {
            return Ok(());
        }
        // Before anything is written: a caller that may not change the header leaves no entry.
        keys.may_change(header)?;
        let dir = self.path().parent().unwrap_or(Path::new("."));
        let mark: HistoryMark = keys.history(dir, header)?.append(events)?;
        self.history_goes_to(mark);
        keys.set_mark(header, mark)
    }
}
