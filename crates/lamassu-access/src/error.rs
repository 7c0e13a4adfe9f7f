//! Errors of the policy manager and of signed documents.

use lamassu_crypto::NoRandom;
use lamassu_keys::KeyError;
use std::io;
use std::path::{Path, PathBuf};

/// An error of this crate. Each variant says whose fault it is.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The user's fault: not a valid name of an attribute.
    #[error(
        "{0:?} is no name of an attribute: letters, digits and underscores, no digit first, no word of Cedar's grammar"
    )]
    Name(String),
    /// The user's fault: the attribute is not declared.
    #[error("there is no attribute {0:?}; `lamassu policy attribute set` declares one")]
    NotDeclared(String),
    /// The user's fault: the value does not match the attribute's kind.
    #[error("{name} = {value:?}: {what}")]
    Value {
        /// The attribute's name.
        name: String,
        /// The text that was given.
        value: String,
        /// The reason.
        what: &'static str,
    },
    /// The user's fault: the rule is not Cedar, not valid for the declared attributes, or beyond what tokens can
    /// express.
    #[error("rule {rule:?}: {detail}")]
    Rule {
        /// The rule's name.
        rule: String,
        /// The reason and its place.
        detail: String,
    },
    /// The user's fault: not a valid key of an object.
    #[error("{key:?} is no key of an object: {what}")]
    Key {
        /// The text that was given.
        key: String,
        /// The reason.
        what: &'static str,
    },
    /// The user's fault: no such person, rule or credential.
    #[error("there is no {what} {name:?}")]
    NotFound {
        /// The kind of item: person, rule, credential.
        what: &'static str,
        /// The item's name.
        name: String,
    },
    /// The user's fault: a number out of bounds, or a malformed key.
    #[error("{0}")]
    Argument(String),
    /// The user's fault: nothing has been published yet.
    #[error("nothing is published yet: `lamassu policy publish` first")]
    Unpublished,
    /// The user's fault: the attribute is in use.
    #[error("the attribute {name:?} is used by {by}")]
    InUse {
        /// The attribute's name.
        name: String,
        /// The person or rule that uses it.
        by: String,
    },
    /// The fault of the document's origin: it is malformed, or the expected party did not sign it.
    #[error("{what}: {detail}")]
    Document {
        /// The kind of document: bundle, status, credential.
        what: &'static str,
        /// The reason.
        detail: &'static str,
    },
    /// The user's fault: the directory is not empty.
    #[error("{0:?} is not empty: a policy manager is made in a new directory")]
    NotEmpty(PathBuf),
    /// The user's fault: the directory has no policy manager.
    #[error("there is no policy manager in {0:?}: `lamassu policy init` makes one")]
    Missing(PathBuf),
    /// The user's fault: group or others have access to the directory.
    #[error("{0:?} can be read by others: it must be this user's, mode 0700")]
    NotPrivate(PathBuf),
    /// Another process has the database open.
    #[error("{0:?} is in use by another `lamassu policy` command: try again")]
    Locked(PathBuf),
    /// The database is damaged, or another program changed it.
    #[error("{path:?} is damaged: {what}")]
    Damaged {
        /// The database's path.
        path: PathBuf,
        /// The damage.
        what: &'static str,
    },
    /// An entry of the audit trail does not follow from the entries before it.
    #[error("entry {number} of the audit trail does not follow from those before it: the trail was changed")]
    Chain {
        /// The entry's number.
        number: u64,
    },
    /// The database returned an error.
    #[error("{path:?}: {source}")]
    Database {
        /// The database's path.
        path: PathBuf,
        /// The database's error.
        source: Box<redb::Error>,
    },
    /// An operation on a file or directory failed.
    #[error("cannot {op} {path:?}: {source}")]
    File {
        /// The operation.
        op: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The master key that wraps the manager's keys does not open them.
    #[error(transparent)]
    MasterKey(#[from] KeyError),
    /// The system gave no randomness.
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
