//! The history of a vault's keys (§4a): what was done to them, when, where and by whom.
//!
//! `lamassu.history` in the vault's root is append-only, sealed under a key derived from the file key, and chained:
//! each entry is bound to its number and to the bytes of the one before. The header's mark gives its length at the last
//! change of the header. So changed, removed, inserted or reordered entries are detected, and a missing end as far as
//! the mark goes. Entries cut off after the mark are not detected, nor an old header restored together with an old
//! history: that needs an anchor elsewhere.
//!
//! Guarantees: an entry is durable before the header that counts it is written, so a crash between the two leaves one
//! more valid entry. A history that does not verify, or cannot be read, never prevents changes of keys: the next one
//! starts by recording that. Nor is a history that another file key sealed, before `key renew` or after `key restore`.
//! One that starts anew goes on with the copies of the keys that are on record, as far as they can be read (`copies`).
//!
//! Invariant: the header in place always has its history. So one that does not go on from the present one is written
//! under a name of its own (`lamassu.history.new`), takes the place of the present one after the header was replaced,
//! and is read there until then.

mod chain;
mod copies;
mod event;
mod file;

pub use chain::{Fault, HistoryEntry, Report};
#[cfg(feature = "testing")]
pub(crate) use chain::{chain_of, read_chain};
pub use copies::{Copies, Copy};
pub use event::{Event, EventKind};
pub(crate) use event::{host_name, user_name};
pub use file::{History, HistoryError, reaches};

use crate::header_file::{Begun, Update};
use crate::{KeyError, Unlocked};
use file::Appended;
use lamassu_format::header::Header;
use lamassu_format::name;
use std::path::Path;

impl Unlocked {
    /// The history of the vault in `dir`. Its length is at least that in `header`, which is verified first, and that in
    /// the last header that these keys have seen. There is no other way to get a history.
    ///
    /// # Errors
    /// [`KeyError::OtherHeader`], [`KeyError::HeaderAltered`], [`KeyError::SignatureInvalid`],
    /// [`KeyError::OtherAdministrator`].
    pub fn history<H: Header>(&self, dir: &Path, header: &H) -> Result<History, KeyError> {
        self.owns(header)?;
        Ok(History::new(dir.join(name::HISTORY), self.id(), self.history_key(), self.mark(header)))
    }
}

impl Begun for History {
    fn put_in_place(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(History::put_in_place(self)?)
    }
}

impl Update {
    /// Appends `events` to the vault's history, and then replaces the header, with a new mark and MAC. The witness is
    /// taken before that, and the events are durable before the header is replaced. A zone has no history; its events
    /// only go to the log.
    ///
    /// # Errors
    /// Those of [`Update::replace`]; [`KeyError::History`] if the history cannot be written, and
    /// [`KeyError::HeaderAltered`], [`KeyError::OtherHeader`], [`KeyError::NotAdministrator`]: then nothing was
    /// replaced.
    pub fn record<H: Header + Clone>(self, header: &mut H, keys: &Unlocked, events: &[Event]) -> Result<(), KeyError> {
        self.record_after(None, header, keys, events)
    }

    /// The same for a header whose file key was renewed. Its history begins with what the one before it has on record
    /// of copies, and is durable with that before the header is replaced.
    ///
    /// # Errors
    /// As [`Update::record`].
    pub fn record_renewed<H: Header + Clone>(
        self,
        header: &mut H,
        keys: &Unlocked,
        copies: Copies,
        events: &[Event],
    ) -> Result<(), KeyError> {
        self.record_after(Some(copies), header, keys, events)
    }

    fn record_after<H: Header + Clone>(
        mut self,
        copies: Option<Copies>,
        header: &mut H,
        keys: &Unlocked,
        events: &[Event],
    ) -> Result<(), KeyError> {
        self.write_down(copies, header, keys, events)?;
        let path = self.path().to_path_buf();
        self.replace(header)?;
        events.iter().for_each(|event| event.announce(&path));
        Ok(())
    }

    /// The same if there is no header yet.
    ///
    /// # Errors
    /// Those of [`Update::create`], and as [`Update::record`].
    pub fn create_recorded<H: Header + Clone>(
        mut self,
        header: &mut H,
        keys: &Unlocked,
        events: &[Event],
    ) -> Result<(), KeyError> {
        self.write_down(None, header, keys, events)?;
        let path = self.path().to_path_buf();
        self.create(header)?;
        events.iter().for_each(|event| event.announce(&path));
        Ok(())
    }

    pub(crate) fn write_down<H: Header + Clone>(
        &mut self,
        copies: Option<Copies>,
        header: &mut H,
        keys: &Unlocked,
        events: &[Event],
    ) -> Result<(), KeyError> {
        if !H::IS_VAULT || events.is_empty() {
            return Ok(());
        }
        // Checked before anything is written: a caller that may not change the header leaves no entry.
        keys.may_change(header)?;
        self.take_witness(header)?;
        let dir = self.path().parent().unwrap_or(Path::new("."));
        let mut history = keys.history(dir, header)?.taking_over(copies);
        let Appended { mark, begins } = history.append(events)?;
        self.history_goes_to(mark, begins.then(|| Box::new(history) as Box<dyn Begun>));
        keys.set_mark(header, mark)
    }
}
