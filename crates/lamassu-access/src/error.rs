//! What goes wrong at the tenant, and with documents that are signed.

use lamassu_crypto::NoRandom;
use lamassu_keys::KeyError;
use std::io;
use std::path::{Path, PathBuf};

/// See the module's head.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The user's: not a name of an attribute.
    #[error(
        "{0:?} is no name of an attribute: letters, digits and underscores, no digit first, no word of Cedar's grammar"
    )]
    Name(String),
    /// The user's: not declared.
    #[error("there is no attribute {0:?}; `lamassu policy attribute set` declares one")]
    NotDeclared(String),
    /// The user's: a value that is not of the attribute's kind.
    #[error("{name} = {value:?}: {what}")]
    Value {
        /// The attribute.
        name: String,
        /// What was given.
        value: String,
        /// What is wrong.
        what: &'static str,
    },
    /// The user's: not Cedar, or not valid for the declared attributes, or outside of what tokens can express.
    #[error("rule {rule:?}: {detail}")]
    Rule {
        /// Its name.
        rule: String,
        /// What is wrong, and where.
        detail: String,
    },
    /// The user's: not a key of an object.
    #[error("{key:?} is no key of an object: {what}")]
    Key {
        /// What was given.
        key: String,
        /// What is wrong.
        what: &'static str,
    },
    /// The user's: no such person, rule or credential.
    #[error("there is no {what} {name:?}")]
    NotFound {
        /// person, rule, credential
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// The user's: a number out of bounds, a malformed key.
    #[error("{0}")]
    Argument(String),
    /// The user's: nothing was published yet.
    #[error("nothing is published yet: `lamassu policy publish` first")]
    Unpublished,
    /// The user's: the attribute is used.
    #[error("the attribute {name:?} is used by {by}")]
    InUse {
        /// The attribute.
        name: String,
        /// A person or a rule.
        by: String,
    },
    /// Somebody's: a document that is not signed by whom it should be, or not what it should be.
    #[error("{what}: {detail}")]
    Document {
        /// Bundle, status, credential.
        what: &'static str,
        /// What is wrong.
        detail: &'static str,
    },
    /// The user's: the directory holds a policy manager already, or something else.
    #[error("{0:?} is not empty: a policy manager is made in a new directory")]
    NotEmpty(PathBuf),
    /// The user's: there is no policy manager.
    #[error("there is no policy manager in {0:?}: `lamassu policy init` makes one")]
    Missing(PathBuf),
    /// Others could read it.
    #[error("{0:?} can be read by others: it must be this user's, mode 0700")]
    NotPrivate(PathBuf),
    /// Another process has it open.
    #[error("{0:?} is in use by another `lamassu policy` command: try again")]
    Locked(PathBuf),
    /// The database is damaged, or was changed by other means.
    #[error("{path:?} is damaged: {what}")]
    Damaged {
        /// The database.
        path: PathBuf,
        /// What.
        what: &'static str,
    },
    /// An entry of the audit trail does not follow from those before it.
    #[error("entry {number} of the audit trail does not follow from those before it: the trail was changed")]
    Chain {
        /// Its number.
        number: u64,
    },
    /// The database failed.
    #[error("{path:?}: {source}")]
    Database {
        /// The database.
        path: PathBuf,
        /// Its error.
        source: Box<redb::Error>,
    },
    /// A file or directory failed.
    #[error("cannot {op} {path:?}: {source}")]
    File {
        /// The operation.
        op: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The key that the manager's keys are wrapped under.
    #[error(transparent)]
    MasterKey(#[from] KeyError),
    /// No randomness.
    #[error(transparent)]
    NoRandom(#[from] NoRandom),
}

/// The result of a call.
pub type Result<T, E = AccessError> = std::result::Result<T, E>;

impl AccessError {
    pub(crate) fn file(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AccessError {
        move |source| AccessError::File { op, path: path.into(), source }
    }
}
