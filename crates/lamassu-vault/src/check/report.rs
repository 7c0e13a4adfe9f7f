//! What a check reports: stable words and numbers, for programs and for people.

use super::kind;

/// Progress of a check, in files and backing bytes.
pub trait Progress: Send + Sync {
    /// The total, once it is known.
    fn total(&self, files: u64, bytes: u64);
    /// More done.
    fn advance(&self, files: u64, bytes: u64);
    /// A line for people (a problem found), as it is found.
    fn problem(&self, problem: &Problem);
}
/// One problem.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct Problem {
    /// Plain path, where known.
    pub path: Option<String>,
    /// Path in the store.
    pub stored: String,
    /// Kind, as a stable word: those of [`super::kind`], and for the content of files those of
    /// [`lamassu_store::file::DamageKind::word`].
    pub kind: String,
    /// Segment, page, block where it concerns a file's content.
    pub segment: Option<u64>,
    /// Page.
    pub page: Option<u64>,
    /// How many pages from that one on, where it is more than one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages: Option<u64>,
    /// Block.
    pub block: Option<u64>,
    /// How many blocks from that one on, where it is more than one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u64>,
    /// Where the problem begins in the file's content, in bytes. The range covers the whole page or block, also past
    /// the end of a short file. `None` if the file lost its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// How many bytes of the content are concerned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// Whether `--repair` repaired it, or moved it to `lamassu.lost`.
    pub repaired: bool,
    /// The range can be read, but not as it was written last: a write of an interrupted session is missing. Or the file
    /// is of a session that the record does not know.
    pub undone: bool,
    /// Nothing is lost or unreadable: what an interrupted change left behind, or files that are no part of the tree.
    pub harmless: bool,
    /// A sentence for people.
    pub text: String,
}
/// The result.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct Report {
    /// Counted.
    pub files: u64,
    /// Counted.
    pub directories: u64,
    /// Counted.
    pub symlinks: u64,
    /// Counted.
    pub other: u64,
    /// Counted.
    pub xattrs: u64,
    /// Counted.
    pub pages: u64,
    /// Counted.
    pub blocks: u64,
    /// Blocks of interrupted commits found in a good state (completed if repairing).
    pub recovered: u64,
    /// Empty files whose page was never written.
    pub unsealed_empty: u64,
    /// The highest number of a session that a page carries.
    #[serde(skip)]
    pub last_session: u32,
    /// Sessions that were not closed, first and last of each range. Their pending state counts until a repair of the
    /// whole vault has completed it.
    pub open_sessions: Vec<(u32, u32)>,
    /// Some file could not be settled.
    #[serde(skip)]
    pub unsettled: bool,
    /// Datasets that were found, and not entered.
    #[serde(skip)]
    pub datasets: Vec<crate::Dataset>,
    /// Datasets whose keys are not available: checked as far as possible without keys.
    pub locked: Vec<String>,
    /// All problems, except those that `problems_left_out` counts.
    pub problems: Vec<Problem>,
    /// Problems that were reported and counted, but not kept: a store can cause any number of them.
    pub problems_left_out: u64,
    #[serde(skip)]
    tally: Tally,
}

/// About how many bytes the kept problems may take.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// How many problems of each kind there are, including those that are not kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Damaged, and not repaired.
    pub damaged: u64,
    /// How many of these are not the newest, as the anchor knows.
    pub stale: u64,
    /// Readable, but not as it was written last.
    pub undone: u64,
    /// Mended.
    pub repaired: u64,
    /// Nothing is lost.
    pub harmless: u64,
    /// Of the kind `io`.
    io: u64,
    /// Of the kind `forbidden`.
    forbidden: u64,
    kept_bytes: usize,
}

impl Problem {
    fn bytes(&self) -> usize {
        let texts = self.stored.len() + self.kind.len() + self.text.len() + self.path.as_ref().map_or(0, String::len);
        texts + size_of::<Problem>()
    }
}

impl Report {
    /// Counts a problem, a run by its blocks, and keeps it if there is room.
    pub fn add(&mut self, problem: Problem) {
        let tally = &mut self.tally;
        let is_left = !(problem.repaired || problem.undone || problem.harmless);
        if is_left && [kind::STALE, kind::OTHER_KIND, kind::MISSING, kind::UNRECORDED].contains(&&*problem.kind) {
            tally.stale += problem.blocks.unwrap_or(1);
        }
        let count = match (problem.repaired, problem.undone, problem.harmless) {
            (true, _, _) => &mut tally.repaired,
            (false, true, _) => &mut tally.undone,
            (false, false, true) => &mut tally.harmless,
            (false, false, false) => &mut tally.damaged,
        };
        *count += problem.blocks.unwrap_or(1);
        tally.io += u64::from(problem.kind == kind::IO);
        tally.forbidden += u64::from(problem.kind == kind::FORBIDDEN);
        match tally.kept_bytes.saturating_add(problem.bytes()) {
            bytes if bytes <= KEPT_BYTES_MAX => {
                tally.kept_bytes = bytes;
                self.problems.push(problem);
            }
            _ => self.problems_left_out += 1,
        }
    }

    /// Adds the counts of another report, and its problems as `placed` changes them.
    pub fn add_problems_of(&mut self, other: &Report, placed: impl Fn(&Problem) -> Problem) {
        let (before, counted) = (self.tally, other.tally);
        other.problems.iter().for_each(|problem| self.add(placed(problem)));
        self.problems_left_out += other.problems_left_out;
        self.tally = Tally {
            damaged: before.damaged + counted.damaged,
            stale: before.stale + counted.stale,
            undone: before.undone + counted.undone,
            repaired: before.repaired + counted.repaired,
            harmless: before.harmless + counted.harmless,
            io: before.io + counted.io,
            forbidden: before.forbidden + counted.forbidden,
            kept_bytes: self.tally.kept_bytes,
        };
    }

    /// How many problems there are of each kind.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Whether something is damaged and was not repaired.
    pub fn is_damaged(&self) -> bool {
        self.tally.damaged > 0
    }

    /// Whether something is stale, and nothing is damaged otherwise.
    pub fn is_stale(&self) -> bool {
        self.tally.stale > 0 && self.tally.stale == self.tally.damaged
    }

    /// Whether something can be read, but not as it was written last.
    pub fn is_undone(&self) -> bool {
        self.tally.undone > 0
    }

    /// Whether nothing remains unsettled that an interruption left.
    pub(super) fn is_all_at_rest(&self) -> bool {
        !self.unsettled && self.tally.io == 0
    }

    /// Whether a policy forbids to complete something.
    pub fn is_forbidden(&self) -> bool {
        self.tally.forbidden > 0
    }

    /// Whether something was repaired.
    pub fn is_repaired(&self) -> bool {
        self.tally.repaired > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A store has as many problems as it likes, and with long paths.
    #[test]
    fn what_is_kept_of_problems_is_bounded_and_all_are_counted() {
        let problem = |harmless| Problem { stored: "d/".repeat(2000), harmless, ..Problem::default() };
        let mut report = Report::default();
        (0..30_000).for_each(|_| report.add(problem(true)));
        report.add(Problem { kind: kind::IO.into(), ..problem(false) });
        assert!(report.is_damaged() && !report.is_all_at_rest(), "although it is not kept");
        let kept: usize = report.problems.iter().map(Problem::bytes).sum();
        assert!(kept <= KEPT_BYTES_MAX && kept > KEPT_BYTES_MAX / 2, "{kept}");
        assert_eq!(report.problems.len() as u64 + report.problems_left_out, 30_001);
        let mut all = Report::default();
        for _ in 0..2 {
            all.add_problems_of(&report, Problem::clone);
        }
        assert_eq!((all.tally().harmless, all.tally().damaged), (60_000, 2));
        assert_eq!(all.problems.len() as u64 + all.problems_left_out, 60_002);
        assert_eq!(all.problems.len(), report.problems.len());
    }
}
