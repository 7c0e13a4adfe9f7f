//! What a scrub reports while it runs, and what it counts.

use crate::digests::digest_of_text;
use crate::event::IntegrityKind;
use lamassu_anchor::ObjectId;
use lamassu_anchor::row::Row;
use lamassu_format::header::VaultId;
use std::ops::AddAssign;
use std::path::{Path, PathBuf};

/// A digest of an object's row: another one, if the object has changed in the anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowDigest(pub u64);

impl RowDigest {
    pub(crate) fn of(row: &Row) -> RowDigest {
        let digest = digest_of_text(&row.encode()).0;
        RowDigest(digest.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
}

/// Gets reports of a running scrub, and answers its questions.
pub trait ScrubWatch {
    /// Bytes were read.
    fn read(&mut self, bytes: u64);
    /// Something differs from the anchor.
    fn found(&mut self, finding: &ScrubFinding);
    /// A dataset with this id, by the anchor, lies there. It has an anchor of its own.
    fn dataset(&mut self, stored: &Path, id: VaultId);
    /// All of a file matches its row in the anchor. Not called for files with findings, or not fully verified: a scrub
    /// that continues verifies them again.
    fn verified(&mut self, object: ObjectId, row: RowDigest);
    /// Whether an earlier scrub, which this one continues, has verified a file, by the row that it has now.
    fn is_verified(&self, object: ObjectId, row: RowDigest) -> bool;
    /// Whether to end now. Asked before each entry, and in a file before each page or block.
    fn is_stopped(&self) -> bool;
}

/// Something that differs from the anchor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubFinding {
    /// The kind; `None`: it could not be read.
    pub kind: Option<IntegrityKind>,
    /// Path in the store. An entry that is missing has no name here: its token stands for it.
    pub path: PathBuf,
    /// A description for people.
    pub what: String,
}

/// What a scrub has verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Entries that match the anchor, including directories.
    pub entries: u64,
    /// Files that were verified.
    pub files: u64,
    /// Files that an earlier scrub, which this one continues, has verified.
    pub skipped: u64,
    /// Pages that match the anchor.
    pub pages: u64,
    /// Blocks that match the anchor.
    pub blocks: u64,
    /// Files without a root over their blocks: their pages alone were verified.
    pub files_without_blocks: u64,
    /// Those of them that have content, in an anchor that keeps such roots: they are open, were left so by a crash,
    /// or had a damaged block when they were last closed.
    pub files_with_unverified_blocks: u64,
    /// Blocks that cannot be verified, since the tree records of their files are lost.
    pub unverified_blocks: u64,
    /// Files that are open, or were left so by a crash.
    pub open_files: u64,
    /// Pages of open files that the root does not cover.
    pub open_pages: u64,
    /// Entries and moves that a writer has not finished, or had not when it was interrupted.
    pub unfinished: u64,
    /// Directories among them that a writer was moving: nothing below them was verified.
    pub unverified_dirs: u64,
    /// Histories that could not be read, and were not compared.
    pub unread_histories: u64,
    /// Datasets that were found; they have anchors of their own.
    pub datasets: u64,
    /// What could not be read.
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
        self.files_with_unverified_blocks += other.files_with_unverified_blocks;
        self.unverified_blocks += other.unverified_blocks;
        self.open_files += other.open_files;
        self.open_pages += other.open_pages;
        self.unfinished += other.unfinished;
        self.unverified_dirs += other.unverified_dirs;
        self.unread_histories += other.unread_histories;
        self.datasets += other.datasets;
        self.failures += other.failures;
        self.findings += other.findings;
    }
}
