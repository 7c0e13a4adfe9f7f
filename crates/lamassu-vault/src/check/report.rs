//! What a check reports: stable words and numbers, for programs and for people.

/// Progress of a check, in files and backing bytes.
pub trait Progress: Send + Sync {
    /// How much lies ahead, when known.
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
    /// Kind, as a stable word: those of [`super::kind`], and for the content of files those of [`lamassu_store::file::DamageKind::word`].
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
    /// Where in the file's content that begins, in bytes. All that a page or block can hold is meant, also past the end of a short file; none where a file
    /// lost its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// How many bytes of the content it concerns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// Whether `--repair` mended it, or moved it to `lamassu.lost`.
    pub repaired: bool,
    /// The range reads, and not as it was written last: a write of an interrupted session is not there. Or a file is of a session that nobody knows.
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
    /// Some file could not be brought to rest.
    #[serde(skip)]
    pub unsettled: bool,
    /// Datasets met, which were not gone into.
    #[serde(skip)]
    pub datasets: Vec<crate::Dataset>,
    /// Datasets whose keys are not at hand: looked at as far as that takes none.
    pub locked: Vec<String>,
    /// Everything wrong.
    pub problems: Vec<Problem>,
}

impl Report {
    /// Whether something is damaged that was not mended.
    pub fn is_damaged(&self) -> bool {
        self.problems.iter().any(|p| !p.repaired && !p.harmless && !p.undone)
    }

    /// Whether something reads, and not as it was written last.
    pub fn is_undone(&self) -> bool {
        self.problems.iter().any(|p| p.undone)
    }

    /// Whether nothing was met that an interruption has left and that is still as it was left.
    pub(super) fn is_all_at_rest(&self) -> bool {
        !self.unsettled && self.problems.iter().all(|p| p.kind != super::kind::IO)
    }

    /// Whether something was mended.
    pub fn is_repaired(&self) -> bool {
        self.problems.iter().any(|p| p.repaired)
    }
}
