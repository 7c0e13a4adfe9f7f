//! The errors of a Lamassu server that is asked for a key or an evaluation.

use crate::oprf::OprfError;
use std::time::Duration;

/// Why a Lamassu server gave no key, made none, or evaluated nothing with one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyServerFault {
    /// The server or the network is down, or the name is wrong.
    #[error("it cannot be reached: {detail}")]
    Unreachable {
        /// why
        detail: String,
    },
    /// It is not the server that this host has joined.
    #[error("it is not the server that this host has joined: {detail}; nothing was sent")]
    Untrusted {
        /// what is wrong
        detail: String,
    },
    /// It serves only hosts that have joined it.
    #[error(
        "this host has not joined it: `lamassu-server enrol` there prints a token, `lamassu host join` here takes it"
    )]
    NotJoined,
    /// No key has this name, or this host was not granted it: the server does not say which.
    #[error("it has no key of that name, or this host was not granted it: `lamassu-server keys grant` there")]
    Unknown,
    /// A key of this name exists: it was to be made, or it has the other use.
    #[error("it has a key of that name already; nothing was made")]
    Exists,
    /// An administrator has retired the key.
    #[error("the key was retired there")]
    Retired,
    /// The key was deleted.
    #[error("the key was deleted there, for good: name another one")]
    Deleted,
    /// It has no master key.
    #[error("it keeps no keys: no `master_key` is configured there")]
    KeepsNone,
    /// It speaks no version of the protocol that this host speaks.
    #[error("it speaks another version of the protocol: {detail}")]
    Version {
        /// the versions of both
        detail: String,
    },
    /// This host has exceeded its limit.
    #[error("this host asks for more than its limit there allows (`evaluations_per_second`)")]
    Limited {
        /// the time until it may ask again
        again: Duration,
    },
    /// It knows this host, and refuses it.
    #[error("it refuses this host: {detail}")]
    Refused {
        /// what it says
        detail: String,
    },
    /// It failed, or its answer makes no sense.
    #[error("it has failed: {detail}")]
    Failing {
        /// what it says, or what is wrong
        detail: String,
    },
    /// Its answer was not computed with the key of the zone.
    #[error("it does not answer with the key of this zone: {0}")]
    Wrong(#[from] OprfError),
    /// This host has no randomness to blind with.
    #[error("no randomness from the kernel")]
    NoRandom,
}
