//! Why a key server or a token gave no key. Compiled with any set of providers, so that error tables need not depend on
//! them.

use lamassu_crypto::oblivious::KeyServerFault;
use std::io;
use std::path::PathBuf;

/// A library's error.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why a key server gave no key.
#[derive(Debug, thiserror::Error)]
pub enum ServerFault {
    /// It is down, the network is, or the name is wrong.
    #[error("cannot be reached: {source}")]
    Unreachable {
        /// why
        source: io::Error,
    },
    /// It did not answer in time.
    #[error("did not answer within {seconds} s")]
    Timeout {
        /// the limit
        seconds: u64,
    },
    /// It is not the server it says it is, or the CA is the wrong one.
    #[error("its certificate is not trusted: {source}; nothing was sent")]
    Untrusted {
        /// what is wrong with the certificate
        source: Cause,
    },
    /// It wants another client certificate than ours.
    #[error("it does not take our client certificate: {source}")]
    Unwelcome {
        /// its alert
        source: Cause,
    },
    /// It knows us, and does not give us this key.
    #[error("it refuses us this key (status {status})")]
    Denied {
        /// 401, 403 or 407
        status: u16,
    },
    /// It has no such key (any more).
    #[error("it has no such key (status {status})")]
    Missing {
        /// 404 or 410
        status: u16,
    },
    /// It points elsewhere.
    #[error("it points to another address (status {status}), which is not followed; give the key's own address")]
    Redirect {
        /// 3xx
        status: u16,
    },
    /// It failed, or is no key server.
    #[error("it answered with status {status}")]
    Status {
        /// the status
        status: u16,
    },
    /// It knows us, and does not permit an operation (KMIP).
    #[error("it does not permit us to {op}")]
    NotPermitted {
        /// what was asked
        op: &'static str,
    },
    /// It has no such object, or shows it to others only (KMIP).
    #[error("it has no such key, or does not show it to us")]
    NoObject,
    /// The user's, or that of the person who named the keys: a name is not unique (KMIP).
    #[error("it has more than one key of that name; give the key's identifier: kmip://HOST/ID")]
    ManyObjects,
    /// The user's: a key to be made has the name of one that is there (KMIP).
    #[error("it has a key of that name already; nothing was made")]
    NameTaken,
    /// The user's: an address without a key (KMIP).
    #[error("the address names no key: kmip://HOST/ID or kmip://HOST/?name=NAME")]
    Unnamed,
    /// The user's: identifiers are the server's to give (KMIP).
    #[error("the server gives a new key its identifier itself; write kmip://HOST/?name=NAME, or kmip://HOST/")]
    IdGiven,
    /// The key is there, and is not one to be used (KMIP).
    #[error("{0}")]
    KeyState(KeyState),
    /// It has said yes to the key's destruction, and the key is there (KMIP).
    #[error("it says that it has destroyed the key, and, asked afterwards: {0}")]
    NotDestroyed(KeyState),
    /// Some of what it was asked is done, and then something failed (KMIP).
    #[error("{done}; and then: {fault}")]
    Partly {
        /// the completed steps, as text
        done: String,
        /// what failed
        fault: Box<ServerFault>,
    },
    /// The object has no State attribute (KMIP).
    #[error("it reports no state of the object: not a key")]
    NoState,
    /// Another kind of object (KMIP).
    #[error("the object is of type {object_type}, not a symmetric key")]
    NotAKey {
        /// the number of KMIP's Object Type
        object_type: u32,
    },
    /// A key that is wrapped, or in a form of its own (KMIP).
    #[error("the key comes wrapped, or in a form (key format type {format}) that cannot be used")]
    KeyFormat {
        /// the number of KMIP's Key Format Type
        format: u32,
    },
    /// A shorter or longer key (KMIP).
    #[error("the key has {found} bytes; one of 32 (256 bits) is needed")]
    KeyLength {
        /// its bytes
        found: usize,
    },
    /// It failed, for a reason of its own (KMIP).
    #[error("it could not {op}: {reason}")]
    Failed {
        /// what was asked
        op: &'static str,
        /// what it says
        reason: KmipReason,
    },
    /// Something else than a key.
    #[error("its answer is longer than {max} bytes: not a key")]
    TooLong {
        /// most bytes
        max: usize,
    },
    /// A Lamassu server gave no key.
    #[error(transparent)]
    Lamassu(#[from] KeyServerFault),
    /// It does not speak TLS or HTTP as it should.
    #[error("it does not speak as a key server does: {source}")]
    Protocol {
        /// what was wrong
        source: Cause,
    },
}

/// Where a key stands in its life, as its KMIP server says (KMIP 1.2 §3.22).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    /// Made, and not to be used yet.
    PreActive,
    /// To be used.
    Active,
    /// Revoked, or past its end.
    Deactivated,
    /// Revoked, since others may know it.
    Compromised,
    /// Gone.
    Destroyed,
    /// Another number.
    Unknown(u32),
}

impl KeyState {
    /// The state of a number of KMIP's.
    pub fn of(number: u32) -> KeyState {
        match number {
            1 => KeyState::PreActive,
            2 => KeyState::Active,
            3 => KeyState::Deactivated,
            4 => KeyState::Compromised,
            5 | 6 => KeyState::Destroyed,
            other => KeyState::Unknown(other),
        }
    }
}

impl std::fmt::Display for KeyState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            KeyState::PreActive => f.write_str("the key is not active yet; have it activated at the server"),
            KeyState::Active => f.write_str("the key is active"),
            KeyState::Deactivated => f.write_str("the key was revoked (it is deactivated)"),
            KeyState::Compromised => f.write_str("the key was revoked as compromised"),
            KeyState::Destroyed => f.write_str("the key was destroyed; nothing brings it back"),
            KeyState::Unknown(number) => write!(f, "the key is in a state ({number}) that this program does not know"),
        }
    }
}

/// What a KMIP server gave as the reason of a failure: a number, and words that are cut and escaped.
#[derive(Clone, PartialEq, Eq)]
pub struct KmipReason {
    number: u32,
    said: String,
}

impl KmipReason {
    /// From the number of KMIP's Result Reason, and its Result Message.
    #[cfg(feature = "kmip")]
    pub(crate) fn new(number: u32, said: &str) -> Self {
        const SAID_MAX: usize = 200;
        KmipReason { number, said: said.escape_debug().take(SAID_MAX).collect() }
    }
}

impl std::fmt::Display for KmipReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (reason {:#x})", if self.said.is_empty() { "it says no more" } else { &self.said }, self.number)
    }
}

impl std::fmt::Debug for KmipReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KmipReason({self})")
    }
}

/// Why a token gave no key.
#[derive(Debug, thiserror::Error)]
pub enum TokenFault {
    /// The user's: no PKCS #11 module to load.
    #[error("name the token's PKCS #11 module: add ?module-path=/usr/lib/…/module.so")]
    NoModule,
    /// The module cannot be loaded or started.
    #[error("cannot use the PKCS #11 module {path:?}: {source}")]
    Module {
        /// the module
        path: PathBuf,
        /// why
        source: Cause,
    },
    /// It is not plugged in, or called otherwise.
    #[error("no token matches; `pkcs11-tool --module MODULE --list-token-slots` lists those there are")]
    NoToken,
    /// The user's: more than one token matches.
    #[error("{count} tokens match; add serial= or token= to the URI")]
    ManyTokens {
        /// how many
        count: usize,
    },
    /// The token has no such key.
    #[error(
        "the token has no {wanted} that matches; `pkcs11-tool --module MODULE --list-objects --login` lists those there are"
    )]
    NoObject {
        /// what was looked for
        wanted: &'static str,
    },
    /// It has said yes to the key's destruction, and keys with its name are there.
    #[error("the token says that it has destroyed the key, and asked afterwards it has {left} of that name")]
    NotDestroyed {
        /// how many
        left: usize,
    },
    /// The user's: more than one key matches.
    #[error("{count} keys of the token match; add id= or object= to the URI")]
    ManyObjects {
        /// how many
        count: usize,
    },
    /// The user's: a key that seals nothing.
    #[error("the key is neither RSA nor AES, or may not be used to encrypt and decrypt")]
    Unsuitable,
    /// The user's.
    #[error("wrong PIN{}", if *.last_try { "; one try is left before the token locks itself" } else { "" })]
    WrongPin {
        /// the token says that the next wrong one locks it
        last_try: bool,
    },
    /// Too many wrong PINs.
    #[error("the PIN is locked after too many wrong tries; unlock it with the token's own tool and its SO PIN")]
    PinLocked,
    /// The user's: the token wants a PIN, and there is no terminal to ask on.
    #[error("the token wants a PIN; add ?pin-source=file:FILE to the URI")]
    NoPin,
    /// It failed.
    #[error("the token failed to {op}: {source}")]
    Failed {
        /// what was tried
        op: &'static str,
        /// its answer
        source: Cause,
    },
}
