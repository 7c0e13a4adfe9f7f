//! Messages from and to leases, rows and heads. What a peer sent is checked here, once.

use crate::proto;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Change, Space};
use lamassu_lease::{Call, Grant, GrantNo, Mode, Object, Reply, RequestNo};

/// A message that makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of the peer makes no sense: {0}")]
pub struct Garbled(pub &'static str);

type Result<T> = std::result::Result<T, Garbled>;

/// Longest key of a row.
const KEY_MAX: usize = 64;
/// Longest value of a row.
const VALUE_MAX: usize = 32 << 10;

/// A vault's id.
///
/// # Errors
/// [`Garbled`].
pub fn vault(bytes: &[u8]) -> Result<[u8; 16]> {
    bytes.try_into().map_err(|_| Garbled("the id of a vault is not 16 bytes"))
}

/// A head.
///
/// # Errors
/// [`Garbled`].
pub fn head(bytes: &[u8]) -> Result<Head> {
    bytes.try_into().map(Head).map_err(|_| Garbled("a head is not 32 bytes"))
}

/// A change for the wire.
pub fn from_change(change: &Change) -> proto::Change {
    let space = Space::ALL.iter().position(|one| *one == change.space).unwrap_or_default();
    proto::Change { space: space as u32, key: change.key.clone(), value: change.value.clone() }
}

/// A change of the wire. The head is nobody's to change but the server's.
///
/// # Errors
/// [`Garbled`].
pub fn to_change(change: proto::Change) -> Result<Change> {
    let space = usize::try_from(change.space).ok().and_then(|at| Space::ALL.get(at).copied());
    let space = space.filter(|space| *space != Space::Head).ok_or(Garbled("a row is of no table"))?;
    if change.key.len() > KEY_MAX || change.value.as_ref().is_some_and(|value| value.len() > VALUE_MAX) {
        return Err(Garbled("a row is too long"));
    }
    Ok(Change { space, key: change.key, value: change.value })
}

/// Changes of the wire.
///
/// # Errors
/// [`Garbled`].
pub fn to_changes(changes: Vec<proto::Change>) -> Result<Vec<Change>> {
    changes.into_iter().map(to_change).collect()
}

/// A mode for the wire.
pub fn from_mode(mode: Mode) -> i32 {
    match mode {
        Mode::Shared => proto::Mode::Shared.into(),
        Mode::Exclusive => proto::Mode::Exclusive.into(),
    }
}

/// A mode of the wire.
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

/// A call of a session, for the wire. A resumption is put together where the vault and the session are known.
pub fn from_call(call: &Call, of: proto::Of) -> proto::Up {
    use proto::up::Said;
    let said = match call {
        Call::Heartbeat { beat } => Said::Heartbeat(proto::Heartbeat { beat: *beat }),
        Call::Resume { held } => {
            Said::Resume(proto::Resume { of: Some(of), held: held.iter().copied().map(from_grant).collect() })
        }
        Call::Acquire { request, object, mode } => {
            Said::Acquire(proto::Acquire { request: request.0, object: object.0, mode: from_mode(*mode) })
        }
        Call::Release { grant, keeps } => {
            Said::Release(proto::Release { grant: Some(from_grant(*grant)), keeps: keeps.map(from_mode) })
        }
        Call::TakenOver { grant } => Said::TakenOver(from_grant(*grant)),
        Call::Leave => Said::Leave(proto::Nothing {}),
    };
    proto::Up { said: Some(said) }
}

/// A call of the wire, of a session that has begun.
///
/// # Errors
/// [`Garbled`].
pub fn to_call(up: proto::Up) -> Result<Call> {
    use proto::up::Said;
    Ok(match up.said.ok_or(Garbled("nothing is said"))? {
        Said::Begin(_) => return Err(Garbled("a session begins once")),
        Said::Resume(resume) => {
            Call::Resume { held: resume.held.into_iter().map(|grant| to_grant(Some(grant))).collect::<Result<_>>()? }
        }
        Said::Heartbeat(beat) => Call::Heartbeat { beat: beat.beat },
        Said::Acquire(acquire) => Call::Acquire {
            request: RequestNo(acquire.request),
            object: Object(acquire.object),
            mode: to_mode(acquire.mode)?,
        },
        Said::Release(release) => {
            Call::Release { grant: to_grant(release.grant)?, keeps: release.keeps.map(to_mode).transpose()? }
        }
        Said::TakenOver(grant) => Call::TakenOver { grant: to_grant(Some(grant))? },
        Said::Leave(_) => Call::Leave,
    })
}

/// A reply for the wire.
pub fn from_reply(reply: &Reply) -> proto::Down {
    use proto::down::Said;
    let said = match reply {
        Reply::Alive { beat } => Said::Alive(proto::Heartbeat { beat: *beat }),
        Reply::Granted { grant, request, takes_over } => Said::Granted(proto::Granted {
            grant: Some(from_grant(*grant)),
            request: request.0,
            takes_over: *takes_over,
        }),
        Reply::Recall { grant, keeps } => {
            Said::Recall(proto::Recall { grant: Some(from_grant(*grant)), keeps: keeps.map(from_mode) })
        }
        Reply::Ended => Said::Ended(proto::Nothing {}),
    };
    proto::Down { said: Some(said) }
}

/// A reply of the wire, of a session that has begun.
///
/// # Errors
/// [`Garbled`].
pub fn to_reply(down: proto::Down) -> Result<Reply> {
    use proto::down::Said;
    Ok(match down.said.ok_or(Garbled("nothing is said"))? {
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
        Said::Ended(_) => Reply::Ended,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANT: Grant = Grant { object: Object(7), mode: Mode::Exclusive, number: GrantNo(9) };

    #[test]
    fn calls_and_replies_come_back() {
        let of = proto::Of { vault: vec![1; 16], session: 3 };
        let calls = [
            Call::Heartbeat { beat: 4 },
            Call::Resume { held: vec![GRANT] },
            Call::Acquire { request: RequestNo(2), object: Object(7), mode: Mode::Shared },
            Call::Release { grant: GRANT, keeps: Some(Mode::Shared) },
            Call::Release { grant: GRANT, keeps: None },
            Call::TakenOver { grant: GRANT },
            Call::Leave,
        ];
        for call in calls {
            assert_eq!(to_call(from_call(&call, of.clone())), Ok(call));
        }
        let replies = [
            Reply::Alive { beat: 4 },
            Reply::Granted { grant: GRANT, request: RequestNo(2), takes_over: true },
            Reply::Recall { grant: GRANT, keeps: Some(Mode::Shared) },
            Reply::Ended,
        ];
        for reply in replies {
            assert_eq!(to_reply(from_reply(&reply)), Ok(reply));
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let change =
            |space, key: usize, value: usize| proto::Change { space, key: vec![0; key], value: Some(vec![0; value]) };
        let head = Space::ALL.iter().position(|space| *space == Space::Head).unwrap_or_default() as u32;
        for garbled in [change(99, 8, 8), change(1, KEY_MAX + 1, 8), change(1, 8, VALUE_MAX + 1), change(head, 4, 32)] {
            assert!(to_change(garbled).is_err());
        }
        assert!(to_change(change(1, 8, 8)).is_ok());
        assert!(to_call(proto::Up { said: None }).is_err() && to_reply(proto::Down { said: None }).is_err());
        assert!(to_mode(7).is_err() && vault(&[0; 15]).is_err() && super::head(&[0; 31]).is_err());
    }
}
