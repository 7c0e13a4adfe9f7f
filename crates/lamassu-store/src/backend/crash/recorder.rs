//! Writes the log, cutting writes and punches into the pieces a crash may keep or lose.

use super::{Op, Record};
use crate::backend::memory::{AttributeOp, Barrier, NamespaceOp, Observer, PAGE_BYTES};
use crate::backend::{Time, errno};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;

pub(super) struct Recorder {
    pub(super) granularity: u64,
    state: Mutex<State>,
}

struct State {
    records: Vec<Record>,
    /// Syncs still to fail, and with what.
    failing: (u64, i32),
    last: Time,
}

impl Recorder {
    pub(super) fn new(granularity: u64) -> Recorder {
        let state = State { records: Vec::new(), failing: (0, 0), last: Time::default() };
        Recorder { granularity, state: Mutex::new(state) }
    }

    pub(super) fn fail_syncs(&self, count: u64, errno: i32) {
        self.state.lock().failing = (count, errno);
    }

    pub(super) fn len(&self) -> usize {
        self.state.lock().records.len()
    }

    pub(super) fn records(&self) -> Arc<[Record]> {
        self.state.lock().records.as_slice().into()
    }

    fn push(&self, time: Time, ops: impl IntoIterator<Item = Op>) {
        let mut state = self.state.lock();
        state.last = time;
        state.records.extend(ops.into_iter().map(|op| Record { op, time }));
    }
}

/// Cuts a range into pieces: offsets and lengths, ascending. The covered beginning of a block is a piece, too.
fn pieces(offset: u64, len: u64, granularity: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let reach = if at.is_multiple_of(granularity) { granularity } else { PAGE_BYTES };
        let next = end.min(at / reach * reach + reach);
        let piece = (at, next - at);
        at = next;
        Some(piece)
    })
}

impl Observer for Recorder {
    fn namespace(&self, op: NamespaceOp, now: Time) {
        self.push(now, [Op::Namespace(op)]);
    }

    fn attribute(&self, ino: u64, op: AttributeOp, now: Time) {
        self.push(now, [Op::Attribute(ino, op)]);
    }

    fn write(&self, ino: u64, offset: u64, data: &[u8], now: Time) {
        let piece = |(at, len): (u64, u64)| {
            let from = (at - offset) as usize;
            Op::Write { ino, offset: at, data: data[from..from + len as usize].into() }
        };
        self.push(now, pieces(offset, data.len() as u64, self.granularity).map(piece));
    }

    fn punch(&self, ino: u64, offset: u64, len: u64, present: Vec<u64>, now: Time) {
        let end = offset + len;
        let mut done = 0;
        let mut ops = Vec::new();
        for page in present {
            let start = page * PAGE_BYTES;
            if start < done {
                continue;
            }
            let block = start / self.granularity * self.granularity;
            let (from, to) = if offset <= block && block + self.granularity <= end {
                (block, block + self.granularity)
            } else {
                (start.max(offset), (start + PAGE_BYTES).min(end))
            };
            ops.push(Op::Punch { ino, offset: from, len: to - from });
            done = to;
        }
        self.push(now, ops);
    }

    fn set_len(&self, ino: u64, len: u64, now: Time) {
        self.push(now, [Op::SetLen { ino, len }]);
    }

    fn barrier(&self, barrier: Barrier) -> io::Result<()> {
        let mut state = self.state.lock();
        let time = state.last;
        let (left, code) = state.failing;
        if left == 0 {
            state.records.push(Record { op: Op::Barrier(barrier), time });
            return Ok(());
        }
        state.failing.0 = left - 1;
        state.records.push(Record { op: Op::FailedBarrier(barrier), time });
        Err(errno(code))
    }
}

#[cfg(test)]
mod tests {
    use super::pieces;

    #[test]
    fn pieces_follow_granularity() {
        let cut = |o, l, g| pieces(o, l, g).collect::<Vec<_>>();
        assert_eq!(cut(0, 4096, 4096), [(0, 4096)]);
        assert_eq!(cut(100, 8000, 4096), [(100, 3996), (4096, 4004)]);
        assert_eq!(cut(0, 16384, 16384), [(0, 16384)]);
        assert_eq!(cut(4096, 4096, 16384), [(4096, 4096)]);
        assert_eq!(cut(12288, 4096 + 16384 + 5, 16384), [(12288, 4096), (16384, 16384), (32768, 5)]);
        assert_eq!(cut(0, 8192, 16384), [(0, 8192)]);
        assert_eq!(cut(4096, 8192, 16384), [(4096, 4096), (8192, 4096)]);
        assert_eq!(cut(7, 0, 4096), []);
    }
}
