//! Requests and answers. Members that a program of another version does not know are refused, and said so: both sides are normally one program.

use serde::{Deserialize, Serialize};

/// What a daemon can be asked.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Which vault it serves: a [`Status`].
    Status {},
}

/// How it went.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer<T> {
    /// Well.
    Done(T),
    /// Not well.
    Failed {
        /// the exit code for it
        code: u8,
        /// for people
        message: String,
    },
}

/// What a daemon serves.
#[derive(Debug, Serialize, Deserialize)]
pub struct Status {
    /// of the program
    pub version: String,
    /// process id
    pub pid: u32,
    /// the vault's id, in hex
    pub vault: String,
    /// its directory
    pub dir: String,
    /// whether it writes nothing
    pub read_only: bool,
}
