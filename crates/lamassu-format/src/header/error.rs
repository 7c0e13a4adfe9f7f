//! Why a header is refused.

/// Why bytes are not a vault header or zone file. The file is in the clear and not authenticated, so texts from it are
/// escaped.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// More than [`super::HEADER_MAX`] bytes: not a header.
    #[error("larger than {max} bytes: not a Lamassu header")]
    TooLarge {
        /// the limit
        max: usize,
    },
    /// Not JSON, or not with exactly the members of §4: damaged, cut short, or not a header at all.
    #[error("not a valid header: {0}")]
    Json(JsonFault),
    /// Another kind of file, for example a zone file instead of a vault header.
    #[error("this is a {found:?} file, not a {expected:?} file")]
    WrongFormat {
        /// what is wanted
        expected: &'static str,
        /// its own `format`
        found: String,
    },
    /// Written by a later Lamassu.
    #[error("format version {found} is not supported (this program knows version {known}); use a newer lamassu", known = crate::VERSION)]
    Version {
        /// the version in the file
        found: u64,
    },
    /// Written by a later Lamassu, with something this one must not ignore.
    #[error("feature {name:?} is not supported; use a newer lamassu")]
    Feature {
        /// the first unknown feature
        name: String,
    },
    /// A member outside its bounds: damaged or hostile.
    #[error("member {member:?} must be {rule}")]
    Member {
        /// which member
        member: &'static str,
        /// what it must be
        rule: &'static str,
    },
    /// Slots whose total work exceeds what any writer makes: hostile.
    #[error(
        "its slots ask for {asked} GiB of memory to be filled by Argon2id (memory times passes, of all together), and {max} GiB is the most: no program of \
         ours makes such slots, so somebody who can write there did; no key was tried",
        max = super::Argon2Params::WORK_MAX >> 20
    )]
    Argon2Work {
        /// GiB of memory times passes, of all slots together
        asked: u64,
    },
    /// Two slots with one id: damaged or hostile.
    #[error("two key slots have the id {id}")]
    DuplicateSlot {
        /// the id
        id: u32,
    },
}

impl HeaderError {
    /// Whether a newer program may be able to read this file.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, HeaderError::Version { .. } | HeaderError::Feature { .. })
    }
}

/// Where and why JSON was refused. The text may quote the file, so it is escaped when shown. It is no `source`, which a
/// chain of errors would print unescaped.
#[derive(Debug)]
pub struct JsonFault(serde_json::Error);

impl From<serde_json::Error> for JsonFault {
    fn from(e: serde_json::Error) -> Self {
        JsonFault(e)
    }
}

impl std::fmt::Display for JsonFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SHOWN_CHARS_MAX: usize = 300;
        let text = self.0.to_string();
        for c in text.chars().take(SHOWN_CHARS_MAX) {
            if c.is_ascii_graphic() || c == ' ' { write!(f, "{c}")? } else { write!(f, "{}", c.escape_default())? }
        }
        Ok(())
    }
}
