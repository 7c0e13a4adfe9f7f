//! State that files of a vault share, and how damage and failures are reported.

use super::anchored::AnchoredFiles;
use super::session::Sessions;
use lamassu_anchor::AnchorError;
use lamassu_crypto::{Engine, KeyRing};
use lamassu_format::{BlockNo, Compression, Domain, Geometry, PageNo, Profile};
use std::sync::Arc;

/// The kind of a damage, or of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DamageKind {
    /// A page's seal is broken.
    PageSeal,
    /// No loaded key matches a page's epoch tag: the key is not loaded, or the page is damaged.
    PageKey,
    /// A page with a good seal that breaks the format.
    PageFormat,
    /// A page of another file.
    PageOfOtherFile,
    /// A page that must exist does not.
    PageMissing,
    /// A block does not hash to its key.
    BlockHash,
    /// A block lies past the end of the backing file.
    BlockMissing,
    /// A block whose write was interrupted, and which none of its candidates opens.
    BlockPending,
    /// The store lost the end of the file.
    Truncated,
    /// A page in a state that only an interrupted session leaves, of a session that was not interrupted: an older page
    /// was put back.
    PageStale,
    /// What the store shows is not the newest, by the anchor: an older state, or another one that the vault's keys once
    /// sealed.
    Stale,
    /// No damage: a write of an interrupted session is missing. The range reads as a hole.
    Unwritten,
    /// No damage: a write of an interrupted session is missing. The range reads as it was before.
    Reverted,
    /// No damage: an interrupted session made the file shorter, and what lay past its end is void.
    Shortened,
    /// No damage: a page of a session that the vault's record of sessions does not know yet. An older record was put
    /// back, or the file is from elsewhere.
    UnknownSession,
}

impl DamageKind {
    /// A stable word for logs and reports.
    pub const fn word(self) -> &'static str {
        match self {
            DamageKind::PageSeal => "page-seal",
            DamageKind::PageKey => "page-key",
            DamageKind::PageFormat => "page-format",
            DamageKind::PageOfOtherFile => "page-of-other-file",
            DamageKind::PageMissing => "page-missing",
            DamageKind::BlockHash => "block-hash",
            DamageKind::BlockMissing => "block-missing",
            DamageKind::BlockPending => "block-pending",
            DamageKind::Truncated => "truncated",
            DamageKind::PageStale => "page-stale",
            DamageKind::Stale => "stale",
            DamageKind::Unwritten => "unwritten",
            DamageKind::Reverted => "reverted",
            DamageKind::Shortened => "shortened",
            DamageKind::UnknownSession => "unknown-session",
        }
    }

    /// What it means for a reader of the range.
    pub const fn meaning(self) -> &'static str {
        match self {
            DamageKind::Unwritten => "a write was interrupted, and its data is not there: the range reads as zeros",
            DamageKind::Reverted => {
                "a write was interrupted, and its data is not there: the range reads as it was before"
            }
            DamageKind::Shortened => {
                "the file was being made shorter when that was interrupted: what was written behind that end is void"
            }
            DamageKind::UnknownSession => {
                "the file was written by a session that the vault's record does not know: an older record was put back, \
                 or the file is from elsewhere"
            }
            DamageKind::PageSeal
            | DamageKind::PageKey
            | DamageKind::PageFormat
            | DamageKind::PageOfOtherFile
            | DamageKind::PageMissing
            | DamageKind::BlockHash
            | DamageKind::BlockMissing
            | DamageKind::BlockPending
            | DamageKind::Truncated
            | DamageKind::PageStale
            | DamageKind::Stale => "that range reads as an error, the rest is readable",
        }
    }

    /// Whether the range can be read: the finding is no damage, but is reported.
    pub const fn is_readable(self) -> bool {
        match self {
            DamageKind::Unwritten | DamageKind::Reverted | DamageKind::Shortened | DamageKind::UnknownSession => true,
            DamageKind::PageSeal
            | DamageKind::PageKey
            | DamageKind::PageFormat
            | DamageKind::PageOfOtherFile
            | DamageKind::PageMissing
            | DamageKind::BlockHash
            | DamageKind::BlockMissing
            | DamageKind::BlockPending
            | DamageKind::Truncated
            | DamageKind::PageStale
            | DamageKind::Stale => false,
        }
    }
}

/// One damage, as reported and logged: where in the file, and what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Damage {
    /// The kind of damage.
    pub kind: DamageKind,
    /// Segment number.
    pub segment: u64,
    /// Page number in the file.
    pub page: PageNo,
    /// How many pages from that one on; more than one if a check finds a run of missing pages.
    pub pages: u64,
    /// Block number in the file, if it concerns one block.
    pub block: Option<BlockNo>,
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in segment {}, page {}", self.kind.word(), self.segment, self.page)?;
        if self.pages > 1 {
            write!(f, " and the {} after it", self.pages - 1)?;
        }
        match self.block {
            Some(block) => write!(f, ", block {block}"),
            None => Ok(()),
        }
    }
}

/// Errors of an encrypted file.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The backing file is damaged there; the rest is readable.
    #[error("damaged: {0}")]
    Damaged(Damage),
    /// The store failed.
    #[error("{op} at {offset}: {source}")]
    Io {
        /// The operation that failed.
        op: &'static str,
        /// Offset in the backing file.
        offset: u64,
        /// The store's error.
        source: std::io::Error,
    },
    /// The file or mount is read-only.
    #[error("read-only")]
    ReadOnly,
    /// Past the largest size of the geometry.
    #[error("file too large")]
    TooLarge,
    /// The hash of the file's profile is not approved, and this process may use only approved primitives.
    #[error("approved primitives alone are allowed (--fips): {0}")]
    NotApproved(&'static str),
    /// No randomness.
    #[error(transparent)]
    NoRandom(#[from] lamassu_crypto::NoRandom),
    /// New blocks cannot be keyed: the server of the zone's oblivious keys gives none. Nothing was written.
    #[error(transparent)]
    NotEvaluated(#[from] lamassu_crypto::oblivious::NotEvaluated),
    /// The anchor failed. A change that it would have to remember is not written to the store.
    #[error(transparent)]
    Anchor(#[from] AnchorError),
}

impl StoreError {
    /// Wraps a failure of the store.
    pub(super) fn io(op: &'static str, offset: impl Into<u64>) -> impl FnOnce(std::io::Error) -> StoreError {
        let offset = offset.into();
        move |source| StoreError::Io { op, offset, source }
    }

    /// Whether the store has no space left, or none for this user.
    pub(super) fn is_out_of_space(&self) -> bool {
        let code = match self {
            StoreError::Io { source, .. } => source.raw_os_error(),
            _ => None,
        };
        matches!(code, Some(libc::ENOSPC | libc::EDQUOT))
    }
}

/// How much is verified on read (L7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Integrity {
    /// Re-hash every block.
    Full,
    /// Pages, and blocks of interrupted commits; refused for malleable suites.
    Metadata,
}

/// A run of bytes without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// Where it ends: at data, or where the search has stopped. Where it began, if there are data.
    pub end: u64,
    /// The bytes that the pages cover which were looked at: a measure of the work.
    pub looked_at: u64,
}

/// What is found where the store has the first page of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstPage {
    /// Nothing.
    Absent,
    /// A page of this file.
    Verified,
    /// Something else, or a page of it that is damaged.
    Unverified(Damage),
}

/// Which barriers are issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// All of them.
    Ordered,
    /// Only those of fsync: safe against a killed process, not against a power cut.
    Relaxed,
}

/// How reports name a file: whatever the caller gave at open (a path, an inode).
pub type FileTag = str;

/// Gets damage when it is found. False: it was not taken, and is reported again when it is found again.
pub type Reporter = Arc<dyn Fn(&FileTag, &Damage) -> bool + Send + Sync>;

/// State that all files of a vault share.
#[derive(Clone)]
pub struct FileContext {
    /// Keys.
    pub ring: KeyRing,
    /// Geometry.
    pub geometry: Geometry,
    /// Cipher engine.
    pub engine: Arc<Engine>,
    /// Integrity mode.
    pub integrity: Integrity,
    /// Durability mode.
    pub durability: Durability,
    /// Deduplication domain.
    pub domain: Domain,
    /// How new blocks are compressed. A stored block has its own codec.
    pub compression: Option<Compression>,
    /// Whether clean one-page files get convergent pages; never if the domain is salted.
    pub convergent_small_files: bool,
    /// Nothing is ever written.
    pub read_only: bool,
    /// Approved primitives alone (FIPS): files whose hash is not approved do not open. A file whose hash is being
    /// changed does: until that is done, the remaining blocks are verified by the earlier hash, so that none is taken
    /// for damage.
    pub approved_only: bool,
    /// Which session writes pages, and which were interrupted.
    pub sessions: Arc<Sessions>,
    /// The anchored files of the vault; `None`: an unanchored vault.
    pub anchored: Option<Arc<AnchoredFiles>>,
    /// Called for every damage that is found.
    pub report: Reporter,
}

#[cfg(any(test, feature = "testing"))]
impl FileContext {
    /// For a single file in programs that measure: with the defaults of a vault, publicly known keys, and damage on
    /// standard error.
    pub fn to_measure(suite: lamassu_format::Suite) -> FileContext {
        let key = |byte| lamassu_crypto::Secret::new(&mut [byte; 32]);
        FileContext {
            ring: KeyRing::new(suite, &[key(1)], &[key(2)]),
            geometry: Geometry::new(4096, 8).expect("the default"),
            engine: Arc::new(Engine::new(2)),
            integrity: Integrity::Full,
            durability: Durability::Ordered,
            convergent_small_files: true,
            domain: Domain::Zone,
            compression: None,
            read_only: false,
            approved_only: false,
            sessions: Arc::new(Sessions::all_interrupted()),
            anchored: None,
            report: Arc::new(|file, damage| {
                eprintln!("{file}: {damage:?}");
                true
            }),
        }
    }
}

impl FileContext {
    pub(super) fn block_len(&self) -> usize {
        self.geometry.block_size() as usize
    }

    /// Refuses a profile whose hash this process may not use.
    ///
    /// # Errors
    /// [`StoreError::NotApproved`].
    pub fn check_approved(&self, profile: Profile) -> Result<(), StoreError> {
        match lamassu_crypto::unapproved_hash(profile.method().hash(self.ring.suite())) {
            Some(why) if self.approved_only => Err(StoreError::NotApproved(why)),
            Some(_) | None => Ok(()),
        }
    }

    /// Refuses a profile that no new or written file may have, also by the policy of the anchor's server. Existing
    /// files may be read.
    ///
    /// # Errors
    /// [`StoreError::NotApproved`]; [`StoreError::Anchor`] with [`lamassu_anchor::ServerFault::Policy`].
    pub fn check_allowed(&self, profile: Profile) -> Result<(), StoreError> {
        self.check_approved(profile)?;
        self.anchored.as_ref().map_or(Ok(()), |files| Ok(files.anchor().check_profile(profile)?))
    }
}

/// Summary of a check of one file.
#[derive(Default, Debug, Clone, PartialEq, Eq)]
pub struct FileCheck {
    /// Logical size.
    pub size: u64,
    /// Pages verified.
    pub pages: u64,
    /// Blocks verified.
    pub blocks: u64,
    /// Blocks of interrupted commits that were found whole.
    pub recovered: u64,
    /// Empty file whose page was never written.
    pub unsealed_empty: bool,
    /// Backing bytes past the length that the metadata implies (a lost append, or a shrink whose space was not given
    /// back yet).
    pub excess: u64,
    /// Everything found damaged.
    pub damage: Vec<Damage>,
    /// Findings that are readable but worth a report ([`DamageKind::is_readable`]): missing writes of an interrupted
    /// session, pages of sessions that the record does not know.
    pub undone: Vec<Damage>,
    /// An interrupted commit or shrink is still incomplete.
    pub unsettled: bool,
    /// The highest number of a session that a page carries.
    pub last_session: u32,
}
