//! Storing of an object: sealed as it arrives, sent in parts. The provider makes the object from the parts in one step.
//! An object that fits one part is stored by one request.
//!
//! In memory are the first part (the first page is sealed last), the part that is being filled, and the parts that are
//! being sent.

use super::Remote;
use super::client::Unless;
use super::error::{RemoteError, Result};
use super::properties::Properties;
use crate::limits::Turn;
use crate::locks::Shared;
use crate::objects::attrs::Attrs;
use crate::objects::{Guard, Refusal};
use crate::work;
use lamassu_vault::detached::{Identity, PART_LEN_MIN, Part, Sealing};
use parking_lot::Mutex;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Parts that are sent at once.
const SENT_AT_ONCE: usize = 2;
/// Most parts that an object is planned to have; providers take 10,000.
const PARTS_PLANNED: u64 = 9_000;

/// An object that is being stored.
pub struct Upload {
    remote: Arc<Remote>,
    place: String,
    /// the object's bucket, which must exist when the object is placed
    bucket: Option<String>,
    size: u64,
    turn: Option<Arc<Turn>>,
    state: Mutex<Option<State>>,
}

struct State {
    sealing: Sealing,
    attrs: Attrs,
    /// Set once the object is known to need several parts.
    parts: Option<Sent>,
}

/// The parts sent to the provider.
struct Sent {
    id: String,
    properties: Properties,
    sealed: String,
    etags: Vec<(u64, String)>,
    sending: Vec<JoinHandle<Result<(u64, String)>>>,
}

impl Remote {
    /// Begins to store `size` bytes at a place; `bucket` is set for an object. If the object needs several parts, it
    /// keeps these `attrs`.
    ///
    /// # Errors
    /// [`RemoteError::ReadOnly`], [`RemoteError::MuchMetadata`]; those of the vault.
    pub(super) fn begin(
        self: &Arc<Self>,
        place: String,
        bucket: Option<&str>,
        size: u64,
        attrs: Attrs,
    ) -> Result<Upload> {
        self.writable()?;
        // Too much metadata is reported before anything is received.
        self.seal(&place, &Properties::new(&attrs, size, Identity::Head([0; 40])))?;
        let part_len = PART_LEN_MIN.max((size / PARTS_PLANNED).next_multiple_of(1 << 20));
        let sealing = self.files.seal(part_len, &place)?;
        let state = Mutex::new(Some(State { sealing, attrs, parts: None }));
        let bucket = bucket.map(String::from);
        Ok(Upload { remote: self.clone(), place, bucket, size, turn: work::current(), state })
    }
}

impl Sent {
    /// Waits for the part that was begun first.
    fn wait(&mut self) -> Result<()> {
        let sent = self.sending.remove(0).join();
        let sent = sent.unwrap_or_else(|_| Err(RemoteError::Answer("a thread that sent a part has panicked".into())));
        self.etags.push(sent?);
        Ok(())
    }
}

impl Upload {
    /// Appends data.
    ///
    /// # Errors
    /// [`RemoteError::Length`]: more data than announced; those of vault and provider.
    pub fn write(&self, data: &[u8]) -> Result<()> {
        let mut state = self.state.lock();
        let Some(state) = &mut *state else { return Err(RemoteError::Length) };
        if state.sealing.written() + data.len() as u64 > self.size {
            return Err(RemoteError::Length);
        }
        let parts = state.sealing.write(data)?;
        parts.into_iter().try_for_each(|part| self.send(state, part))
    }

    fn send(&self, state: &mut State, part: Part) -> Result<()> {
        let sent = match &mut state.parts {
            Some(sent) => sent,
            none => {
                let properties = Properties::new(&state.attrs, self.size, state.sealing.id()?);
                none.insert(self.begin_parts(properties)?)
            }
        };
        self.send_part(sent, part)
    }

    fn begin_parts(&self, properties: Properties) -> Result<Sent> {
        let sealed = self.remote.seal(&self.place, &properties)?;
        let id = self.remote.client.begin(&self.remote.name(&self.place), &sealed)?;
        Ok(Sent { id, properties, sealed, etags: Vec::new(), sending: Vec::new() })
    }

    fn send_part(&self, sent: &mut Sent, part: Part) -> Result<()> {
        while sent.sending.len() >= SENT_AT_ONCE {
            sent.wait()?;
        }
        let (remote, name, id, turn) =
            (self.remote.clone(), self.remote.name(&self.place), sent.id.clone(), self.turn.clone());
        let send = move || {
            let _turn = turn;
            let number = u16::try_from(part.number + 1);
            let number = number.map_err(|_| RemoteError::Answer("more parts than a provider takes".into()))?;
            Ok((part.number, remote.client.part(&name, &id, number, &part.bytes)?))
        };
        let thread = std::thread::Builder::new().name("lamassu-part".into()).spawn(send);
        sent.sending.push(thread.map_err(|error| RemoteError::Busy(format!("no thread: {error}")))?);
        Ok(())
    }

    /// Completes the object. An object that needed several parts keeps the attributes it began with; any other gets
    /// these. Returns the attributes it has.
    ///
    /// # Errors
    /// [`Refusal::Precondition`], [`RemoteError::Length`]: nothing has changed; those of vault and provider.
    pub fn place(&self, guard: &Guard, attrs: &Attrs) -> Result<Attrs> {
        let (properties, etag) = self.placed(guard, attrs)?;
        Ok(properties.attrs(&etag))
    }

    /// The same, but returns the properties and the provider's tag.
    pub(super) fn placed(&self, guard: &Guard, attrs: &Attrs) -> Result<(Arc<Properties>, String)> {
        let Some(State { sealing, parts: mut sent, .. }) = self.state.lock().take() else {
            return Err(RemoteError::Length);
        };
        let placed = match sealing.written() == self.size {
            true => self.place_sealed(guard, attrs, sealing, &mut sent),
            false => Err(RemoteError::Length),
        };
        match placed {
            Ok((properties, etag)) => {
                let properties = Arc::new(properties);
                self.remote.known.lock().put(self.place.clone(), (etag.clone(), properties.clone()));
                Ok((properties, etag))
            }
            Err(error) => {
                sent.into_iter().for_each(|sent| give_up(&self.remote, &self.place, sent));
                Err(error)
            }
        }
    }

    fn place_sealed(
        &self,
        guard: &Guard,
        attrs: &Attrs,
        sealing: Sealing,
        sent: &mut Option<Sent>,
    ) -> Result<(Properties, String)> {
        let (mut rest, identity) = sealing.finish()?;
        let properties = || Properties::new(attrs, self.size, identity);
        match (sent, rest.len()) {
            (None, 1) => self.place_whole(guard, &rest.remove(0), properties()),
            (sent, _) => {
                let sent = match sent {
                    Some(sent) => sent,
                    none => none.insert(self.begin_parts(properties())?),
                };
                let etag = self.place_parts(guard, sent, rest)?;
                Ok((sent.properties.clone(), etag))
            }
        }
    }

    fn keep_bucket(&self) -> Result<Option<Shared<'_, String>>> {
        self.bucket.as_ref().map(|bucket| self.remote.keep_bucket(bucket)).transpose()
    }

    fn place_whole(&self, guard: &Guard, part: &Part, properties: Properties) -> Result<(Properties, String)> {
        let (remote, name) = (&self.remote, self.remote.name(&self.place));
        let sealed = remote.seal(&self.place, &properties)?;
        let _kept = self.keep_bucket()?;
        let _alone = remote.alone_with(&self.place);
        work::wanted(RemoteError::GivenUp)?;
        let unless = remote.unless(&self.place, guard)?;
        let etag = remote.client.put(&name, &part.bytes, &sealed, &unless).map_err(|error| changed(guard, error))?;
        Ok((properties, etag))
    }

    fn place_parts(&self, guard: &Guard, sent: &mut Sent, rest: Vec<Part>) -> Result<String> {
        rest.into_iter().try_for_each(|part| self.send_part(sent, part))?;
        while !sent.sending.is_empty() {
            sent.wait()?;
        }
        sent.etags.sort_unstable();
        let (remote, name) = (&self.remote, self.remote.name(&self.place));
        let _kept = self.keep_bucket()?;
        let _alone = remote.alone_with(&self.place);
        work::wanted(RemoteError::GivenUp)?;
        let unless = remote.unless(&self.place, guard)?;
        let etags: Vec<String> = sent.etags.iter().map(|(_, etag)| etag.clone()).collect();
        let made = remote.client.complete(&name, &sent.id, &etags, &sent.sealed, &unless);
        made.map_err(|error| changed(guard, error))
    }
}

/// Aborts an upload at the provider. If that fails, the provider shows an unfinished upload; providers have rules that
/// remove those.
fn give_up(remote: &Remote, place: &str, sent: Sent) {
    for thread in sent.sending {
        let _ = thread.join();
    }
    if let Err(error) = remote.client.abort(&remote.name(place), &sent.id) {
        tracing::warn!(%error, "an upload to the provider was given up, and could not be removed there");
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(State { parts: Some(sent), .. }) = self.state.get_mut().take() else { return };
        // A disconnected client may cause this drop, on a thread that must not block.
        let (remote, place) = (self.remote.clone(), std::mem::take(&mut self.place));
        work::beside_async(self.turn.take(), move || give_up(&remote, &place, sent));
    }
}

impl Remote {
    /// The condition for the provider that corresponds to a guard at present.
    pub(super) fn unless(&self, place: &str, guard: &Guard) -> Result<Unless> {
        let found = match guard {
            Guard::None => return Ok(Unless::Nothing),
            Guard::Absent | Guard::Present | Guard::Tag(_) | Guard::OtherTag(_) => match self.found(place) {
                Ok((found, properties)) => Some((properties.attrs(&found.etag), found.etag)),
                Err(RemoteError::Missing(_)) => None,
                Err(error) => return Err(error),
            },
        };
        guard.check(found.as_ref().map(|(attrs, _)| attrs))?;
        Ok(found.map_or(Unless::Present, |(_, etag)| Unless::Other(etag)))
    }
}

/// The client's error for a condition that failed at the provider, after the client's own condition had held.
fn changed(guard: &Guard, error: RemoteError) -> RemoteError {
    match (guard, error) {
        (Guard::Absent | Guard::Tag(_), RemoteError::Changed(_)) => Refusal::Precondition.into(),
        (Guard::Present | Guard::OtherTag(_), RemoteError::Changed(text)) => RemoteError::Busy(text),
        (Guard::None | Guard::Absent | Guard::Present | Guard::Tag(_) | Guard::OtherTag(_), error) => error,
    }
}
