//! What a scrub tells while it goes on, and what it counts.

use crate::event::IntegrityKind;
use lamassu_anchor::ObjectId;
use std::ops::AddAssign;
use std::path::{Path, PathBuf};

/// What a scrub tells, and asks, while it goes on.
pub trait ScrubWatch {
    /// Bytes were read.
    fn read(&mut self, bytes: u64);
    /// Something is not as the anchor says.
    fn found(&mut self, finding: &ScrubFinding);
    /// A dataset lies there, which has an anchor of its own: the one with this id, as the anchor knows.
    fn dataset(&mut self, stored: &Path, id: [u8; 16]);
    /// A file is as the anchor says, all of it. What was found, or could not be told, is to be told again by a scrub
    /// that goes on.
    fn verified(&mut self, object: ObjectId);
    /// Whether a file was verified before, by a scrub that goes on here.
    fn is_verified(&self, object: ObjectId) -> bool;
    /// Whether to end now. Asked before each entry, and in a file before each page or block.
    fn is_stopped(&self) -> bool;
}

/// Something that is not as the anchor says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubFinding {
    /// What; `None`: it could not be looked at.
    pub kind: Option<IntegrityKind>,
    /// Path in the store. An entry that is missing has no name here: its token stands for it.
    pub path: PathBuf,
    /// What of it, for people.
    pub what: String,
}

/// What a scrub has verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Entries that are as the anchor says, directories among them.
    pub entries: u64,
    /// Files that were gone through.
    pub files: u64,
    /// Files that an earlier scrub, which this one continues, went through.
    pub skipped: u64,
    /// Pages that are as the anchor says.
    pub pages: u64,
    /// Blocks that are.
    pub blocks: u64,
    /// Files without a root over their blocks: their pages alone were verified.
    pub files_without_blocks: u64,
    /// Blocks that cannot be told, since the tree records of their files are lost.
    pub unverified_blocks: u64,
    /// Files that are open, or were left so by a crash.
    pub open_files: u64,
    /// Pages of those that are not under the root.
    pub open_pages: u64,
    /// Entries and moves that a writer has not finished, or was making when it was interrupted: the anchor does not
    /// know them yet.
    pub unfinished: u64,
    /// Datasets that were met, which have anchors of their own.
    pub datasets: u64,
    /// What could not be looked at.
    pub failures: u64,
    /// Findings.
    pub findings: u64,
}

impl AddAssign for Scrubbed {
    fn add_assign(&mut self, other: Scrubbed) {
        self.entries += other.entries;
        self.files += other.files;
        self.skipped += other.skipped;
        self.pages += other.pages;
        self.blocks += other.blocks;
        self.files_without_blocks += other.files_without_blocks;
        self.unverified_blocks += other.unverified_blocks;
        self.open_files += other.open_files;
        self.open_pages += other.open_pages;
        self.unfinished += other.unfinished;
        self.datasets += other.datasets;
        self.failures += other.failures;
        self.findings += other.findings;
    }
}
