//! Messages about locks of programs.

use super::{Garbled, Result, from_mode, to_mode};
use crate::proto;
use lamassu_lease::locks::{Conflict, Lock, LockAnswer, LockKey, LockKind, Range};
use lamassu_lease::{Object, RequestNo};

pub(super) fn from_range(key: &LockKey, range: Range) -> proto::LockedRange {
    proto::LockedRange {
        object: key.file.0,
        whole: key.kind == LockKind::Whole,
        owner: key.owner,
        first: range.first(),
        last: range.last(),
    }
}

pub(super) fn to_range(range: Option<&proto::LockedRange>) -> Result<(LockKey, Range)> {
    let said = range.ok_or(Garbled("a lock has no range"))?;
    let kind = if said.whole { LockKind::Whole } else { LockKind::Range };
    let range = Range::new(said.first, said.last).ok_or(Garbled("a locked range ends before it begins"))?;
    match kind {
        LockKind::Whole if range != Range::ALL => Err(Garbled("a lock of a whole file has a range")),
        LockKind::Whole | LockKind::Range => {
            Ok((LockKey { file: Object(said.object), kind, owner: said.owner }, range))
        }
    }
}

pub(super) fn from_lock(lock: &Lock) -> proto::Lock {
    proto::Lock { range: Some(from_range(&lock.key, lock.range)), mode: from_mode(lock.mode), pid: lock.pid }
}

pub(super) fn to_lock(lock: &proto::Lock) -> Result<Lock> {
    let (key, range) = to_range(lock.range.as_ref())?;
    Ok(Lock { key, range, mode: to_mode(lock.mode)?, pid: lock.pid })
}

pub(super) fn from_request(request: RequestNo, lock: &Lock, waits: bool) -> proto::LockRequest {
    proto::LockRequest { request: request.0, lock: Some(from_lock(lock)), waits }
}

pub(super) fn to_asked(asked: &proto::LockRequest) -> Result<Lock> {
    to_lock(asked.lock.as_ref().ok_or(Garbled("a request names no lock"))?)
}

/// An answer. The file and the owner of a lock that is in the way are not told.
pub(super) fn from_answer(request: RequestNo, answer: LockAnswer) -> proto::LockAnswer {
    use proto::lock_answer::Answer;
    let answer = match answer {
        LockAnswer::Done => Answer::Done(proto::Nothing {}),
        LockAnswer::Conflict(Conflict { range, mode, pid }) => {
            let range = proto::LockedRange { first: range.first(), last: range.last(), ..Default::default() };
            Answer::Conflict(proto::Lock { range: Some(range), mode: from_mode(mode), pid })
        }
        LockAnswer::Deadlock => Answer::Deadlock(proto::Nothing {}),
        LockAnswer::TooMany => Answer::TooMany(proto::Nothing {}),
        LockAnswer::Cancelled => Answer::Cancelled(proto::Nothing {}),
    };
    proto::LockAnswer { request: request.0, answer: Some(answer) }
}

pub(super) fn to_answer(answered: proto::LockAnswer) -> Result<LockAnswer> {
    use proto::lock_answer::Answer;
    Ok(match answered.answer.ok_or(Garbled("a lock is not answered"))? {
        Answer::Done(_) => LockAnswer::Done,
        Answer::Conflict(proto::Lock { range, mode, pid }) => {
            let said = range.ok_or(Garbled("a lock has no range"))?;
            let range = Range::new(said.first, said.last).ok_or(Garbled("a locked range ends before it begins"))?;
            LockAnswer::Conflict(Conflict { range, mode: to_mode(mode)?, pid })
        }
        Answer::Deadlock(_) => LockAnswer::Deadlock,
        Answer::TooMany(_) => LockAnswer::TooMany,
        Answer::Cancelled(_) => LockAnswer::Cancelled,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::SESSION_MESSAGE_MAX;
    use lamassu_lease::locks::REPORTED_MAX;
    use lamassu_lease::{Call, Mode, Reply};
    use prost::Message;

    pub fn some() -> Vec<Lock> {
        let lock = |kind, range, mode| {
            let key = LockKey { file: Object(u64::MAX), kind, owner: u64::MAX };
            Lock { key, range, mode, pid: u32::MAX }
        };
        let range = Range::new(3, 1 << 40).expect("a range");
        vec![lock(LockKind::Range, range, Mode::Shared), lock(LockKind::Whole, Range::ALL, Mode::Exclusive)]
    }

    pub fn calls() -> Vec<Call> {
        let request = RequestNo(8);
        let of = |lock: Lock| {
            let (key, range) = (lock.key, lock.range);
            let asked = [true, false].map(|waits| Call::Lock { request, lock, waits });
            asked.into_iter().chain([Call::Unlock { request, key, range }, Call::TestLock { request, lock }])
        };
        some().into_iter().flat_map(of).chain([Call::CancelLock { request }]).collect()
    }

    pub fn replies() -> Vec<Reply> {
        let range = Range::new(1, u64::MAX).expect("a range");
        let conflict = LockAnswer::Conflict(Conflict { range, mode: Mode::Exclusive, pid: 7 });
        let (done, dead, many) = (LockAnswer::Done, LockAnswer::Deadlock, LockAnswer::TooMany);
        let all = [done, conflict, dead, many, LockAnswer::Cancelled];
        all.map(|answer| Reply::Lock { request: RequestNo(8), answer }).to_vec()
    }

    #[test]
    fn all_locks_of_a_session_go_in_one_report() {
        let longest = Lock { range: Range::new(u64::MAX - 1, u64::MAX).expect("a range"), ..some()[0] };
        let of = proto::Of { vault: vec![1; 16], session: u64::MAX };
        let report = |count| {
            let (held, kept, taken_over) = (Vec::new(), Vec::new(), Vec::new());
            Call::Resume { number: u64::MAX, held, kept, taken_over, locks: vec![longest; count] }
        };
        let said = super::super::from_call(&report(REPORTED_MAX), of.clone());
        assert!(said.encoded_len() < SESSION_MESSAGE_MAX);
        assert_eq!(super::super::to_call(said), Ok(report(REPORTED_MAX)));
        assert!(super::super::to_call(super::super::from_call(&report(REPORTED_MAX + 1), of)).is_err());
    }

    #[test]
    fn locks_that_make_no_sense_are_refused() {
        let good = from_lock(&some()[1]);
        assert!(to_lock(&good).is_ok());
        let range = || good.range.expect("a range");
        for range in [
            None,
            Some(proto::LockedRange { first: 1, ..range() }),
            Some(proto::LockedRange { first: 2, last: 1, whole: false, ..range() }),
        ] {
            assert!(to_lock(&proto::Lock { range, ..good }).is_err());
        }
        assert!(to_lock(&proto::Lock { mode: 9, ..good }).is_err());
        assert!(to_asked(&proto::LockRequest::default()).is_err());
        assert!(to_answer(proto::LockAnswer::default()).is_err());
    }
}
