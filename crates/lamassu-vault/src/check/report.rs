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
#[derive(Debug, Clone, serde::Serialize)]
pub struct Problem {
    /// Plain path, where known.
    pub path: Option<String>,
    /// Path in the store.
    pub stored: String,
    /// Kind, as a stable word: `block-hash`, `page-seal`, `name`, `directory-record`, `symlink`, `xattr`, `orphan-companion`, …
    pub kind: String,
    /// Segment, page, block where it concerns a file's content.
    pub segment: Option<u64>,
    /// Page.
    pub page: Option<u64>,
    /// Block.
    pub block: Option<u64>,
    /// Whether `--repair` mended it.
    pub repaired: bool,
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
    /// Everything wrong.
    pub problems: Vec<Problem>,
}
