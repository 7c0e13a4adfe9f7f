//! Why a key server or a token gave no key. Compiled whatever providers the build has, so that those who map errors need not know.

use std::io;
use std::path::PathBuf;

/// A cause from a library, as it says it.
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
    /// Something else than a key.
    #[error("its answer is longer than {max} bytes: not a key")]
    TooLong {
        /// most bytes
        max: usize,
    },
    /// It does not speak TLS or HTTP as it should.
    #[error("it does not speak as a key server does: {source}")]
    Protocol {
        /// what was wrong
        source: Cause,
    },
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
    /// The user's: the token wants a PIN, and there is nobody to ask.
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
