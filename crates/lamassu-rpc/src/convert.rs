//! Messages from and to leases, rows and heads. What a peer sent is validated here, and only here.

use crate::{ROWS_MAX, proto};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{self, Change, Space};
use lamassu_crypto::oprf::{BATCH_MAX, Element};
use lamassu_format::header::VaultId;
use lamassu_lease::locks::REPORTED_MAX;
use lamassu_lease::{Call, Grant, GrantNo, Mode, Object, Reply, RequestNo};

mod locks;

/// An invalid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of the peer is invalid: {0}")]
pub struct Garbled(pub &'static str);

type Result<T> = std::result::Result<T, Garbled>;

/// Longest key of a row.
const KEY_MAX: usize = 64;
/// Longest value of a row.
const VALUE_MAX: usize = 32 << 10;
/// Leases of a session: there are leases of whole vaults only. More would take many times the memory that they have in
/// a message, while it waits for the vault.
const LEASES_MAX: usize = 1;
/// Bytes of a message of rows. One more row may follow.
const BATCH_LEN: usize = 256 << 10;

/// A vault's id.
///
/// # Errors
/// [`Garbled`].
pub fn vault(bytes: &[u8]) -> Result<VaultId> {
    bytes.try_into().map(VaultId).map_err(|_| Garbled("the id of a vault is not 16 bytes"))
}

/// A head.
///
/// # Errors
/// [`Garbled`].
pub fn head(bytes: &[u8]) -> Result<Head> {
    bytes.try_into().map(Head).map_err(|_| Garbled("a head is not 32 bytes"))
}

/// Elements to evaluate. Whether each is in the group is checked at its evaluation.
///
/// # Errors
/// [`Garbled`].
pub fn elements(packed: &[u8]) -> Result<&[Element]> {
    match packed.as_chunks() {
        (elements, []) if (1..=BATCH_MAX).contains(&elements.len()) => Ok(elements),
        _ => Err(Garbled("elements do not parse, or are too many")),
    }
}

/// Parses changes, at most `count_max` in a message. Changes of the head are refused: only the server makes them.
///
/// # Errors
/// [`Garbled`].
pub fn to_changes(packed: &[u8], count_max: usize) -> Result<Vec<Change>> {
    let changes = table::unpack(packed, count_max).ok_or(Garbled("rows do not parse, or are too many"))?;
    let is_good = |change: &Change| {
        let is_short =
            change.key.len() <= KEY_MAX && change.value.as_ref().is_none_or(|value| value.len() <= VALUE_MAX);
        change.space != Space::Head && is_short
    };
    match changes.iter().all(is_good) {
        true => Ok(changes),
        false => Err(Garbled("a row is too long, or of no table of a vault")),
    }
}

/// Parses rows.
///
/// # Errors
/// [`Garbled`].
pub fn to_rows(packed: &[u8]) -> Result<Vec<Change>> {
    let rows = to_changes(packed, ROWS_MAX)?;
    match rows.iter().all(|row| row.value.is_some()) {
        true => Ok(rows),
        false => Err(Garbled("a row has no value")),
    }
}

/// Packs rows into messages.
#[derive(Debug, Default)]
pub struct Batch {
    packed: Vec<u8>,
    count: usize,
    all: u64,
}

impl Batch {
    /// Adds a row. Returns a message when there are enough rows.
    pub fn push(&mut self, space: Space, key: &[u8], value: &[u8]) -> Option<Vec<u8>> {
        let row = Change { space, key: key.to_vec(), value: Some(value.to_vec()) };
        self.packed.extend(table::pack([&row]));
        (self.count, self.all) = (self.count + 1, self.all + 1);
        let is_full = self.count == ROWS_MAX || self.packed.len() >= BATCH_LEN;
        is_full.then(|| {
            self.count = 0;
            std::mem::take(&mut self.packed)
        })
    }

    /// The number of all rows so far, which the last message has.
    pub fn all(&self) -> u64 {
        self.all
    }

    /// The remaining rows.
    pub fn rest(self) -> Vec<u8> {
        self.packed
    }
}

/// Counts the rows of a table that arrive. A stream can end well although its sender has stopped in the middle: so the
/// last message has the number of all rows.
#[derive(Default)]
pub struct Counted {
    rows: u64,
    all: Option<u64>,
}

impl Counted {
    /// A message with `rows` has arrived.
    ///
    /// # Errors
    /// [`Garbled`]: the last one has come before.
    pub fn take(&mut self, rows: usize, all: u64) -> Result<()> {
        if self.all.is_some() {
            return Err(Garbled("rows after the last ones"));
        }
        self.rows += rows as u64;
        self.all = Some(all).filter(|all| *all != 0);
        Ok(())
    }

    /// The stream has ended.
    ///
    /// # Errors
    /// [`Garbled`]: not all rows have arrived.
    pub fn finish(&self) -> Result<()> {
        if self.all == Some(self.rows) { Ok(()) } else { Err(Garbled("the rows end in the middle")) }
    }
}

/// A mode, as a message.
pub fn from_mode(mode: Mode) -> i32 {
    match mode {
        Mode::Shared => proto::Mode::Shared.into(),
        Mode::Exclusive => proto::Mode::Exclusive.into(),
    }
}

/// A mode, from a message.
///
/// # Errors
/// [`Garbled`].
pub fn to_mode(mode: i32) -> Result<Mode> {
    match proto::Mode::try_from(mode) {
        Ok(proto::Mode::Shared) => Ok(Mode::Shared),
        Ok(proto::Mode::Exclusive) => Ok(Mode::Exclusive),
        Err(_) => Err(Garbled("a mode of a lease is unknown")),
    }
}

fn from_grant(grant: Grant) -> proto::Grant {
    proto::Grant { object: grant.object.0, mode: from_mode(grant.mode), number: grant.number.0 }
}

fn to_grant(grant: Option<proto::Grant>) -> Result<Grant> {
    let grant = grant.ok_or(Garbled("a lease is not named"))?;
    Ok(Grant { object: Object(grant.object), mode: to_mode(grant.mode)?, number: GrantNo(grant.number) })
}

fn to_grants(grants: Vec<proto::Grant>) -> Result<Vec<Grant>> {
    grants.into_iter().map(|grant| to_grant(Some(grant))).collect()
}

/// A call of a session, as a message. For a resumption, vault and session are filled in.
pub fn from_call(call: &Call, of: proto::Of) -> proto::Up {
    use proto::up::Said;
    let said = match call {
        Call::Heartbeat { beat } => Said::Heartbeat(proto::Heartbeat { beat: *beat }),
        Call::Resume { number, held, kept, taken_over, locks } => Said::Resume(proto::Resume {
            of: Some(of),
            number: *number,
            held: held.iter().copied().map(from_grant).collect(),
            kept: kept.iter().map(|object| object.0).collect(),
            taken_over: taken_over.iter().copied().map(from_grant).collect(),
            locks: locks.iter().map(locks::from_lock).collect(),
        }),
        Call::Acquire { request, object, mode } => {
            Said::Acquire(proto::Acquire { request: request.0, object: object.0, mode: from_mode(*mode) })
        }
        Call::Release { grant, keeps } => {
            Said::Release(proto::Release { grant: Some(from_grant(*grant)), keeps: keeps.map(from_mode) })
        }
        Call::Keep { grant, kept } => Said::Keep(proto::Keep { grant: Some(from_grant(*grant)), kept: *kept }),
        Call::TakenOver { grant } => Said::TakenOver(from_grant(*grant)),
        Call::Lock { request, lock, waits } => Said::Lock(locks::from_request(*request, lock, *waits)),
        Call::Unlock { request, key, range } => {
            let range = Some(locks::from_range(key, *range));
            Said::Unlock(proto::UnlockRequest { request: request.0, range })
        }
        Call::TestLock { request, lock } => Said::TestLock(locks::from_request(*request, lock, false)),
        Call::CancelLock { request } => Said::CancelLock(proto::CancelLock { request: request.0 }),
        Call::Leave => Said::Leave(proto::Nothing {}),
    };
    proto::Up { said: Some(said) }
}

/// A call of a session that has begun, from a message.
///
/// # Errors
/// [`Garbled`].
pub fn to_call(up: proto::Up) -> Result<Call> {
    use proto::up::Said;
    Ok(match up.said.ok_or(Garbled("it is empty"))? {
        Said::Begin(_) => return Err(Garbled("a session begins once")),
        Said::Resume(resume) if resume.locks.len() > REPORTED_MAX => {
            return Err(Garbled("there are more locks than a session can have"));
        }
        Said::Resume(resume) if resume.held.len().max(resume.kept.len()).max(resume.taken_over.len()) > LEASES_MAX => {
            return Err(Garbled("there are more leases than a session can have"));
        }
        Said::Resume(resume) => Call::Resume {
            number: resume.number,
            held: to_grants(resume.held)?,
            kept: resume.kept.into_iter().map(Object).collect(),
            taken_over: to_grants(resume.taken_over)?,
            locks: resume.locks.iter().map(locks::to_lock).collect::<Result<_>>()?,
        },
        Said::Heartbeat(beat) => Call::Heartbeat { beat: beat.beat },
        Said::Acquire(acquire) => Call::Acquire {
            request: RequestNo(acquire.request),
            object: Object(acquire.object),
            mode: to_mode(acquire.mode)?,
        },
        Said::Release(release) => {
            Call::Release { grant: to_grant(release.grant)?, keeps: release.keeps.map(to_mode).transpose()? }
        }
        Said::Keep(keep) => Call::Keep { grant: to_grant(keep.grant)?, kept: keep.kept },
        Said::TakenOver(grant) => Call::TakenOver { grant: to_grant(Some(grant))? },
        Said::Lock(asked) => {
            Call::Lock { request: RequestNo(asked.request), lock: locks::to_asked(&asked)?, waits: asked.waits }
        }
        Said::Unlock(asked) => {
            let (key, range) = locks::to_range(asked.range.as_ref())?;
            Call::Unlock { request: RequestNo(asked.request), key, range }
        }
        Said::TestLock(asked) => Call::TestLock { request: RequestNo(asked.request), lock: locks::to_asked(&asked)? },
        Said::CancelLock(cancel) => Call::CancelLock { request: RequestNo(cancel.request) },
        Said::Leave(_) => Call::Leave,
    })
}

/// A reply, as a message. A grant carries the head of the vault's table.
pub fn from_reply(reply: &Reply, head: Head) -> proto::Down {
    use proto::down::Said;
    let said = match reply {
        Reply::Alive { beat } => Said::Alive(proto::Heartbeat { beat: *beat }),
        Reply::Granted { grant, request, takes_over } => Said::Granted(proto::Granted {
            grant: Some(from_grant(*grant)),
            request: request.0,
            takes_over: *takes_over,
            head: head.0.to_vec(),
        }),
        Reply::Recall { grant, keeps } => {
            Said::Recall(proto::Recall { grant: Some(from_grant(*grant)), keeps: keeps.map(from_mode) })
        }
        Reply::Lock { request, answer } => Said::Lock(locks::from_answer(*request, *answer)),
        Reply::Ended => Said::Ended(proto::Nothing {}),
    };
    proto::Down { said: Some(said), policy: None }
}

/// The head of the vault's table in a grant.
///
/// # Errors
/// [`Garbled`].
pub fn head_of_grant(down: &proto::Down) -> Result<Option<Head>> {
    match &down.said {
        // A server of an earlier version sends none.
        Some(proto::down::Said::Granted(granted)) if !granted.head.is_empty() => head(&granted.head).map(Some),
        _ => Ok(None),
    }
}

/// A reply to a session that has begun, from a message.
///
/// # Errors
/// [`Garbled`].
pub fn to_reply(down: proto::Down) -> Result<Reply> {
    use proto::down::Said;
    Ok(match down.said.ok_or(Garbled("it is empty"))? {
        Said::Begun(_) => return Err(Garbled("a session begins once")),
        Said::Alive(beat) => Reply::Alive { beat: beat.beat },
        Said::Granted(granted) => Reply::Granted {
            grant: to_grant(granted.grant)?,
            request: RequestNo(granted.request),
            takes_over: granted.takes_over,
        },
        Said::Recall(recall) => {
            Reply::Recall { grant: to_grant(recall.grant)?, keeps: recall.keeps.map(to_mode).transpose()? }
        }
        Said::Lock(answered) => {
            Reply::Lock { request: RequestNo(answered.request), answer: locks::to_answer(answered)? }
        }
        Said::Ended(_) => Reply::Ended,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: Head = Head([3; 32]);
    const GRANT: Grant = Grant { object: Object(7), mode: Mode::Exclusive, number: GrantNo(9) };

    #[test]
    fn calls_and_replies_come_back() {
        let of = proto::Of { vault: vec![1; 16], session: 3 };
        let calls = [
            Call::Heartbeat { beat: 4 },
            Call::Resume {
                number: 8,
                held: vec![GRANT],
                kept: vec![Object(7)],
                taken_over: vec![Grant { number: GrantNo(6), ..GRANT }],
                locks: locks::tests::some(),
            },
            Call::Acquire { request: RequestNo(2), object: Object(7), mode: Mode::Shared },
            Call::Release { grant: GRANT, keeps: Some(Mode::Shared) },
            Call::Release { grant: GRANT, keeps: None },
            Call::Keep { grant: GRANT, kept: true },
            Call::Keep { grant: GRANT, kept: false },
            Call::TakenOver { grant: GRANT },
            Call::Leave,
        ];
        let calls = calls.into_iter().chain(locks::tests::calls());
        for call in calls {
            assert_eq!(to_call(from_call(&call, of.clone())), Ok(call));
        }
        let replies = [
            Reply::Alive { beat: 4 },
            Reply::Granted { grant: GRANT, request: RequestNo(2), takes_over: true },
            Reply::Recall { grant: GRANT, keeps: Some(Mode::Shared) },
            Reply::Ended,
        ];
        let replies = replies.into_iter().chain(locks::tests::replies());
        for reply in replies {
            let down = from_reply(&reply, HEAD);
            let is_granted = matches!(reply, Reply::Granted { .. });
            assert_eq!(head_of_grant(&down), Ok(is_granted.then_some(HEAD)));
            assert_eq!(to_reply(down), Ok(reply));
        }
    }

    /// A message may have very many of them, each of a few bytes.
    #[test]
    fn a_report_has_no_more_than_a_session_can_have() {
        let report = |held: usize, kept: usize, taken_over: usize, locks: usize| {
            let grants = |count| vec![from_grant(GRANT); count];
            let (held, taken_over, kept) = (grants(held), grants(taken_over), vec![7; kept]);
            let locks = vec![locks::from_lock(&locks::tests::some()[0]); locks];
            let of = Some(proto::Of { vault: vec![1; 16], session: 3 });
            let said = proto::up::Said::Resume(proto::Resume { of, number: 8, held, kept, taken_over, locks });
            to_call(proto::Up { said: Some(said) })
        };
        assert!(report(1, 1, 1, REPORTED_MAX).is_ok() && report(0, 0, 0, 0).is_ok());
        for (held, kept, taken_over, locks) in [(2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 0), (1, 1, 1, REPORTED_MAX + 1)] {
            assert!(report(held, kept, taken_over, locks).is_err());
        }
    }

    /// Fields that this version does not know: a number, and bytes.
    const UNKNOWN: [u8; 9] = [0xc0, 0x3e, 5, 0xca, 0x3e, 3, b'n', b'e', b'w'];

    /// A message with one field, itself a message: both with unknown fields.
    fn of_a_newer_program(message: &[u8]) -> Vec<u8> {
        let [field, len, inner @ ..] = message else { panic!("{message:?}") };
        assert_eq!(usize::from(*len), inner.len());
        let len = *len + UNKNOWN.len() as u8;
        [&[*field, len], inner, &UNKNOWN, &UNKNOWN].concat()
    }

    /// A newer program may say more: what is not known here is ignored.
    #[test]
    fn fields_that_are_not_known_are_ignored() {
        use prost::Message;
        let of = proto::Of { vault: vec![1; 16], session: 3 };
        for call in [Call::Heartbeat { beat: 4 }, Call::Release { grant: GRANT, keeps: None }, Call::Leave] {
            let newer = of_a_newer_program(&from_call(&call, of.clone()).encode_to_vec());
            assert_eq!(to_call(proto::Up::decode(&newer[..]).expect("a message")), Ok(call));
        }
        let granted = Reply::Granted { grant: GRANT, request: RequestNo(2), takes_over: true };
        for reply in [Reply::Alive { beat: 4 }, granted, Reply::Recall { grant: GRANT, keeps: None }, Reply::Ended] {
            let newer = of_a_newer_program(&from_reply(&reply, HEAD).encode_to_vec());
            assert_eq!(to_reply(proto::Down::decode(&newer[..]).expect("a message")), Ok(reply));
        }
        // A reply of a kind that is not known is none: only a newer version of the protocol may have it.
        assert!(to_reply(proto::Down::decode(&UNKNOWN[..]).expect("a message")).is_err());
    }

    #[test]
    fn rows_go_in_messages_of_a_bounded_length() {
        let (mut batch, mut messages) = (Batch::default(), Vec::new());
        let count = 3 * ROWS_MAX as u64 + 7;
        for n in 0..count {
            messages.extend(batch.push(Space::Objects, &n.to_be_bytes(), &[7; 100]));
        }
        let batch_all = batch.all();
        messages.push(batch.rest());
        let rows: Vec<_> = messages.iter().flat_map(|message| to_rows(message).expect("rows")).collect();
        assert!(messages.len() == 4 && rows.len() as u64 == count);
        assert!(rows.iter().zip(0_u64..).all(|(row, n)| row.key == n.to_be_bytes()));
        // The receiver notices that some are missing, also where the stream ends well.
        let counted = |messages: &[Vec<u8>], last: u64| {
            let (mut counted, mut left) = (Counted::default(), messages.len());
            for message in messages {
                left -= 1;
                let all = if left == 0 { last } else { 0 };
                counted.take(to_rows(message).expect("rows").len(), all).ok()?;
            }
            counted.finish().ok()
        };
        assert!(batch_all == count && counted(&messages, count).is_some());
        assert!(counted(&messages[..3], 0).is_none() && counted(&messages, 0).is_none() && counted(&[], 0).is_none());
        assert!(counted(&messages[..3], count).is_none() && counted(&messages, count + 1).is_none());
        let mut after_the_last = Counted::default();
        assert!(after_the_last.take(1, 1).is_ok() && after_the_last.take(0, 0).is_err());
        let mut batch = Batch::default();
        let large = (0..100).find_map(|_| batch.push(Space::Held, &[1], &[0; VALUE_MAX])).expect("a message");
        assert!(large.len() < 2 * BATCH_LEN);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let row = |space, key: usize, value: usize| {
            let change = Change { space, key: vec![0; key], value: Some(vec![0; value]) };
            to_changes(&table::pack([&change]), 1)
        };
        let good = row(Space::Objects, KEY_MAX, VALUE_MAX);
        assert!(good.is_ok_and(|changes| changes.len() == 1));
        for (space, key, value) in
            [(Space::Objects, KEY_MAX + 1, 8), (Space::Objects, 8, VALUE_MAX + 1), (Space::Head, 4, 32)]
        {
            assert!(row(space, key, value).is_err());
        }
        let removal = Change { space: Space::Objects, key: vec![1], value: None };
        assert!(to_changes(&table::pack([&removal]), 1).is_ok() && to_rows(&table::pack([&removal])).is_err());
        assert!(to_changes(&table::pack([&removal, &removal]), 1).is_err(), "more than there may be");
        assert!(to_call(proto::Up { said: None }).is_err() && to_reply(proto::Down::default()).is_err());
        assert!(to_mode(7).is_err() && vault(&[0; 15]).is_err() && super::head(&[0; 31]).is_err());
    }
}
