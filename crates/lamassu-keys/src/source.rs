//! Key source URIs: `FORMAT:LOCATION`, e.g. `passphrase:file:/root/key`.
//!
//! The format says what the bytes are, the location where they come from; one [`KeyProvider`] per location. New
//! locations are a row in [`crate::providers::LOCATIONS`]. A token is written as RFC 7512 does, `pkcs11:…`, a key at a
//! KMIP server `kmip://…`, and one at a Lamassu server `server://…`: what those give is always 32 bytes. A text that is
//! no source is never repeated in an error: it may be a passphrase typed in the wrong place.

use crate::fault::{Cause, KeyState, ServerFault, TokenFault};
use crate::providers::{LOCATIONS, Location, form};
use crate::{recovery, shares};
use data_encoding::HEXLOWER_PERMISSIVE;
use lamassu_crypto::oblivious::KeyServerFault;
use lamassu_crypto::{Secret, SecretBytes, wrap};
use lamassu_format::header::{SlotKind, TokenSealed, TokenSignature, ZoneId};
use std::path::PathBuf;
use std::sync::Arc;

/// Longest passphrase, in bytes.
pub const PASSPHRASE_MAX: usize = 4096;

/// Where a secret comes from and what its bytes are. Cheap to clone; holds no secret.
#[derive(Clone)]
pub struct KeySource {
    kind: SlotKind,
    location: &'static Location,
    argument: Option<String>,
    provider: Arc<dyn KeyProvider>,
    leaves_stdin: bool,
}

/// Gets the bytes of one location.
pub trait KeyProvider: Send + Sync {
    /// The bytes, without the line end a text file ends in where `kind` is a text. Bounded in size, and in time but for
    /// a person who types.
    ///
    /// # Errors
    /// [`SourceError`], without any of the bytes.
    fn fetch(&self, kind: SlotKind, ask: &Ask<'_>) -> Result<Fetched, SourceError>;

    /// Takes away what this process was given to get the key with, where it is the key, or leads to it: it is not
    /// needed again.
    fn forget(&self) {}

    /// Makes a key there; `None` where keys are made elsewhere.
    ///
    /// # Errors
    /// [`SourceError`].
    fn generate(&self) -> Option<Result<Generated, SourceError>> {
        None
    }

    /// Whether its key can be destroyed there, by [`KeyProvider::destroy`]; nothing is asked of the place.
    ///
    /// # Errors
    /// [`SourceError::NotDestroyed`]; [`SourceError::ZoneShared`].
    fn can_destroy(&self) -> Result<(), SourceError> {
        Err(SourceError::NotDestroyed)
    }

    /// Destroys the key where it is kept, and tells what the place answered.
    ///
    /// # Errors
    /// As [`KeyProvider::can_destroy`]; those of the place.
    fn destroy(&self, ask: &Ask<'_>) -> Result<Vec<String>, SourceError> {
        let _ = ask;
        Err(SourceError::NotDestroyed)
    }

    /// The keys of the isolation zone that it names; `None` where it names none.
    ///
    /// # Errors
    /// [`SourceError`].
    fn zone(&self) -> Option<Result<ZoneKeys, SourceError>> {
        None
    }
}

/// K_in and K_out of an isolation zone that a key server keeps (`docs/format.md` §4).
pub struct ZoneKeys {
    inner: Secret<32>,
    outer: Secret<32>,
}

impl std::fmt::Debug for ZoneKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ZoneKeys")
    }
}

impl ZoneKeys {
    /// From keys that were fetched.
    pub fn new(inner: Secret<32>, outer: Secret<32>) -> Self {
        ZoneKeys { inner, outer }
    }

    /// K_in.
    pub fn inner(&self) -> &Secret<32> {
        &self.inner
    }

    /// K_out.
    pub fn outer(&self) -> &Secret<32> {
        &self.outer
    }

    /// The zone's id: the same for everyone who gets these keys.
    pub fn id(&self) -> ZoneId {
        let derived = wrap::hkdf::<32>(self.inner.expose(), b"", b"lamassu v1 kmip zone id");
        let (id, _) = derived.expose().split_first_chunk().expect("16 of 32 bytes");
        ZoneId(*id)
    }

    /// What opens a slot for a holder of both keys, which could read everything anyway.
    #[cfg(feature = "kmip")]
    pub(crate) fn secret(&self) -> Secret<32> {
        let mut both = zeroize::Zeroizing::new([0; 64]);
        both[..32].copy_from_slice(self.inner.expose());
        both[32..].copy_from_slice(self.outer.expose());
        wrap::hkdf(&*both, b"", b"lamassu v1 kmip zone")
    }
}

/// Keys were made where a source is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// what each is called there, besides a name that was asked for; at least one
    pub ids: Vec<String>,
}

/// What a provider needs to know where a person is asked.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// what the key is for, as shown in the prompt, e.g. the path of the vault
    pub subject: &'a str,
    /// what happens with it
    pub purpose: Purpose,
    /// read the passphrase from standard input where that is no terminal, instead of from the terminal
    pub stdin: bool,
}

/// What a key is fetched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To open a slot.
    Unlock,
    /// To make a slot: a person types it twice.
    Create,
}

/// What a provider gave.
pub enum Fetched {
    /// The secret's bytes.
    Bytes {
        /// the bytes
        bytes: SecretBytes,
        /// what the user should be told
        warnings: Vec<Warning>,
    },
    /// A token that keeps its key to itself.
    Token(Box<dyn Token>),
}

impl Fetched {
    /// Bytes, and nothing to tell.
    pub(crate) fn bytes(bytes: SecretBytes) -> Self {
        Fetched::Bytes { bytes, warnings: Vec::new() }
    }
}

/// A key inside a token, ready to be used.
pub trait Token: Send {
    /// Seals a slot's secret.
    ///
    /// # Errors
    /// [`SourceError::Token`].
    fn seal(&self, secret: &Secret<32>) -> Result<TokenSealed, SourceError>;

    /// Unseals it inside the token; `None` where another key sealed it.
    ///
    /// # Errors
    /// [`SourceError::Token`].
    fn unseal(&self, sealed: &TokenSealed) -> Result<Option<Secret<32>>, SourceError>;

    /// Signs a message inside the token, where the key is of a pair; `None`: it may not sign, or its signatures cannot
    /// be verified here.
    ///
    /// # Errors
    /// [`SourceError::Token`].
    fn sign(&self, _message: &[u8]) -> Result<Option<TokenSignature>, SourceError> {
        Ok(None)
    }

    /// Whether a signature is this key's.
    ///
    /// # Errors
    /// [`SourceError::Token`].
    fn has_signed(&self, _message: &[u8], _signature: &TokenSignature) -> Result<bool, SourceError> {
        Ok(false)
    }
}

/// Something the user should know about a source that worked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    /// Every user of this machine can read or replace the key.
    #[error("key file {path:?} is open to every user of this machine (mode {mode:04o}); run `chmod 600` on it")]
    OpenToOthers {
        /// the file
        path: PathBuf,
        /// permission bits
        mode: u32,
    },
}

/// A secret and what to tell about its source.
#[derive(Debug)]
pub struct Loaded {
    /// the secret
    pub material: Material,
    /// what the user should be told
    pub warnings: Vec<Warning>,
}

/// What a source gave, ready to open or make a slot.
pub enum Material {
    /// Goes through Argon2id. Not empty, UTF-8.
    Passphrase(SecretBytes),
    /// Goes into the wrapping key as it is.
    Key {
        /// [`SlotKind::Raw`], [`SlotKind::Hex`], [`SlotKind::Recovery`] or [`SlotKind::RecoveryShares`]: how it was
        /// written down
        kind: SlotKind,
        /// 32 bytes
        key: Secret<32>,
    },
    /// Unseals what slots of kind [`SlotKind::Pkcs11`] hold.
    Token(Box<dyn Token>),
}

impl std::fmt::Debug for Material {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Material").field("kind", &self.kind()).finish_non_exhaustive()
    }
}

impl Material {
    /// Material of the bytes of a source of `kind`.
    ///
    /// # Errors
    /// [`SourceError::EmptyPassphrase`], [`SourceError::PassphraseNotUtf8`], [`SourceError::PassphraseTooLong`],
    /// [`SourceError::RawLength`], [`SourceError::Hex`], [`SourceError::Recovery`], [`SourceError::Shares`],
    /// [`SourceError::Syntax`] for a kind that is no bytes.
    pub fn new(kind: SlotKind, bytes: SecretBytes) -> Result<Self, SourceError> {
        let b = bytes.expose();
        match kind {
            SlotKind::Passphrase if b.is_empty() => Err(SourceError::EmptyPassphrase),
            SlotKind::Passphrase if b.len() > PASSPHRASE_MAX => {
                Err(SourceError::PassphraseTooLong { max: PASSPHRASE_MAX })
            }
            SlotKind::Passphrase if std::str::from_utf8(b).is_err() => Err(SourceError::PassphraseNotUtf8),
            SlotKind::Passphrase => Ok(Material::Passphrase(bytes)),
            SlotKind::Raw => {
                let key = Secret::from_slice(b).ok_or(SourceError::RawLength)?;
                Ok(Material::Key { kind, key })
            }
            SlotKind::Hex => {
                let mut key = zeroize::Zeroizing::new([0u8; 32]);
                if b.len() != 64 || HEXLOWER_PERMISSIVE.decode_mut(b, &mut *key).is_err() {
                    return Err(SourceError::Hex);
                }
                Ok(Material::Key { kind, key: Secret::new(&mut key) })
            }
            SlotKind::Recovery => Ok(Material::Key { kind, key: recovery::parse(b)? }),
            SlotKind::RecoveryShares => Ok(Material::Key { kind, key: shares::join(b)? }),
            SlotKind::Pkcs11 | SlotKind::Parent => Err(SourceError::Syntax),
        }
    }

    /// How the source's bytes became this secret.
    pub fn kind(&self) -> SlotKind {
        match self {
            Material::Passphrase(_) => SlotKind::Passphrase,
            Material::Key { kind, .. } => *kind,
            Material::Token(_) => SlotKind::Pkcs11,
        }
    }
}

/// Why a source is refused or gave no key.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The user's: not of the form FORMAT:LOCATION, or a word that is not known.
    #[error("not a key source; a key source is one of {}", crate::providers::forms())]
    Syntax,
    /// The user's: this format does not come from there.
    #[error("a {kind} key cannot come from {location:?}; a key source is one of {forms}", kind = .kind.name(), forms = crate::providers::forms())]
    Combination {
        /// the format
        kind: SlotKind,
        /// the location
        location: &'static str,
    },
    /// The user's: the location wants an argument, or takes none.
    #[error("write {form}")]
    Argument {
        /// how it is written
        form: String,
    },
    /// The user's: a file, say.
    #[error(
        "a SOURCE makes a key only at a key server (kmip:…, server:…); `lamassu key generate FILE` makes one in a file"
    )]
    NotMade,
    /// The user's: what is destroyed is a key at a server or in a token.
    #[error(
        "only a key at a KMIP server (kmip:…) or in a token (pkcs11:…) is destroyed by its SOURCE; one at a Lamassu server (server:…) by `lamassu-server keys delete` there"
    )]
    NotDestroyed,
    /// The user's: a program that speaks with no Lamassu server.
    #[error("this program cannot get keys from a Lamassu server (server:…)")]
    NoServers,
    /// The user's: another kind of source, where a Lamassu server is meant.
    #[error("name a key at a Lamassu server: server://HOST[:PORT]/ID")]
    NotAServer,
    /// The user's: K_in and K_out of a zone are those of every vault of it.
    #[error(
        "these are the keys of a zone, and other vaults may need them; to destroy them all the same, use the server's own tool"
    )]
    ZoneShared,
    /// The user's: a zone at a key server is meant.
    #[error("this names no isolation zone; write kmip://HOST/?zone=ZONE")]
    NotAZone,
    /// The user's.
    #[error("the passphrase is empty")]
    EmptyPassphrase,
    /// The user's.
    #[error("the passphrase is longer than {max} bytes")]
    PassphraseTooLong {
        /// most bytes
        max: usize,
    },
    /// The user's.
    #[error("the passphrase is not UTF-8; use a raw: source for a binary key")]
    PassphraseNotUtf8,
    /// The user's.
    #[error("a raw key is exactly 32 bytes")]
    RawLength,
    /// The user's.
    #[error("a hex key is exactly 64 hex digits, with at most one line end after them")]
    Hex,
    /// The user's: not as it was written down.
    #[error(transparent)]
    Recovery(#[from] recovery::RecoveryError),
    /// The user's: shares that are not as they were written down, or do not go together.
    #[error(transparent)]
    Shares(#[from] shares::ShareError),
    /// The user's: typed differently the second time.
    #[error("the two passphrases differ; nothing was changed")]
    Mismatch,
    /// The user's: the file holds more than any key.
    #[error("key file {path:?} is longer than {max} bytes: not a key")]
    FileTooLong {
        /// the file
        path: PathBuf,
        /// most bytes
        max: usize,
    },
    /// The user's.
    #[error("environment variable {name} is not set")]
    NoVariable {
        /// its name
        name: String,
    },
    /// The system's, or a mistyped path.
    #[error("cannot read key file {path:?}: {source}")]
    File {
        /// the file
        path: PathBuf,
        /// why
        source: std::io::Error,
    },
    /// There is no terminal to ask on: use a file, or let standard input be read.
    #[error("cannot ask for a passphrase on the terminal: {source}; use another key source, e.g. passphrase:file:PATH")]
    Terminal {
        /// why
        source: std::io::Error,
    },
    /// Standard input failed or ended before the key.
    #[error("cannot read the key from standard input: {source}")]
    Stdin {
        /// why
        source: std::io::Error,
    },
    /// The user's: what is typed there would be shown.
    #[error("standard input is a terminal; use passphrase:prompt, or redirect standard input")]
    StdinTerminal,
    /// The user's: it holds one key.
    #[error("standard input gives one key, to its end; take the other from another source, e.g. FORMAT:fd:3")]
    StdinTaken,
    /// The descriptor is not open, or not for reading.
    #[error("cannot read a key from file descriptor {fd}: {source}")]
    Descriptor {
        /// its number
        fd: i32,
        /// why
        source: std::io::Error,
    },
    /// The user's: not started by systemd, or without credentials.
    #[error("there are no credentials: $CREDENTIALS_DIRECTORY is not set; give the service a LoadCredential=NAME:PATH")]
    NoCredentials,
    /// A file that a source needs besides the key.
    #[error("{role} {path:?}: {source}")]
    Auxiliary {
        /// what it is for
        role: &'static str,
        /// the file
        path: PathBuf,
        /// why
        source: Cause,
    },
    /// A key server gave no key.
    #[error("key server {place}: {fault}")]
    Server {
        /// its address, without a secret part
        place: String,
        /// why
        fault: ServerFault,
    },
    /// A token gave no key.
    #[error("token: {0}")]
    Token(#[from] TokenFault),
    /// The system's.
    #[error(transparent)]
    NoRandom(#[from] lamassu_crypto::NoRandom),
}

impl SourceError {
    /// Whether the place says that the key was destroyed.
    pub fn is_destroyed(&self) -> bool {
        matches!(
            self,
            SourceError::Server {
                fault: ServerFault::KeyState(KeyState::Destroyed) | ServerFault::Lamassu(KeyServerFault::Deleted),
                ..
            }
        )
    }

    /// Whether the place does not show the key: it was destroyed, was never there, or is shown to others.
    pub fn is_not_shown(&self) -> bool {
        matches!(
            self,
            SourceError::Server { fault: ServerFault::NoObject | ServerFault::Lamassu(KeyServerFault::Unknown), .. }
                | SourceError::Token(TokenFault::NoObject { .. })
        )
    }

    /// Whether it is there, and was revoked.
    pub fn is_revoked(&self) -> bool {
        matches!(
            self,
            SourceError::Server {
                fault: ServerFault::KeyState(KeyState::Deactivated | KeyState::Compromised)
                    | ServerFault::Lamassu(KeyServerFault::Retired),
                ..
            }
        )
    }
}

impl KeySource {
    /// How the bytes become a secret.
    pub fn kind(&self) -> SlotKind {
        self.kind
    }

    /// Whether a person is asked, so that asking again makes sense.
    pub fn is_interactive(&self) -> bool {
        self.location.interactive
    }

    /// Takes away what this process was given to get the key with: a passphrase in its environment is overwritten
    /// there, and a descriptor closed. For a process that goes on when it has its key, and not while other threads look
    /// the variable up.
    pub fn forget(&self) {
        self.provider.forget();
    }

    /// Whether it reads standard input, so that nothing else can.
    pub fn takes_stdin(&self) -> bool {
        matches!((self.location.name, self.argument.as_deref()), ("stdin", _) | ("fd", Some("0")))
    }

    /// The same, for a program whose standard input is data: a person is asked on the terminal or not at all.
    pub fn leaving_stdin(self) -> KeySource {
        KeySource { leaves_stdin: true, ..self }
    }

    /// Makes a key there, for `load` to get.
    ///
    /// # Errors
    /// [`SourceError::NotMade`] where keys are made elsewhere, and those of the place.
    pub fn generate(&self) -> Result<Generated, SourceError> {
        self.provider.generate().ok_or(SourceError::NotMade)?
    }

    /// Whether [`KeySource::destroy`] would try.
    ///
    /// # Errors
    /// [`SourceError::NotDestroyed`]; [`SourceError::ZoneShared`].
    pub fn can_destroy(&self) -> Result<(), SourceError> {
        self.provider.can_destroy()
    }

    /// Destroys the key at its server or in its token; returns their answers, one on each line. Other slots, also of
    /// other vaults, may need the key: this cannot be known.
    ///
    /// # Errors
    /// As [`KeySource::can_destroy`], and those of the place.
    pub fn destroy(&self, ask: &Ask<'_>) -> Result<Vec<String>, SourceError> {
        self.provider.destroy(ask)
    }

    /// The keys of the isolation zone that it names.
    ///
    /// # Errors
    /// [`SourceError::NotAZone`], and those of the place.
    pub fn zone_keys(&self) -> Result<ZoneKeys, SourceError> {
        self.provider.zone().ok_or(SourceError::NotAZone)?
    }

    /// Gets the secret.
    ///
    /// # Errors
    /// [`SourceError`].
    pub fn load(&self, ask: &Ask<'_>) -> Result<Loaded, SourceError> {
        let ask = &Ask { stdin: ask.stdin && !self.leaves_stdin, ..*ask };
        Ok(match self.provider.fetch(self.kind, ask)? {
            Fetched::Bytes { bytes, warnings } => Loaded { material: Material::new(self.kind, bytes)?, warnings },
            Fetched::Token(token) => Loaded { material: Material::Token(token), warnings: Vec::new() },
        })
    }
}

impl std::str::FromStr for KeySource {
    type Err = SourceError;

    fn from_str(uri: &str) -> Result<Self, SourceError> {
        let (first, rest) = uri.split_once(':').ok_or(SourceError::Syntax)?;
        let scheme =
            LOCATIONS.iter().find_map(|l| Some((l, *l.kinds.first().filter(|_| l.is_scheme && l.name == first)?)));
        let (kind, location, argument) = match scheme {
            Some((location, kind)) => (kind, location, Some(rest)),
            None => {
                let kind = SlotKind::from_name(first).filter(|k| *k != SlotKind::Parent).ok_or(SourceError::Syntax)?;
                let (name, argument) =
                    rest.split_once(':').map_or((rest, None), |(name, argument)| (name, Some(argument)));
                let location = LOCATIONS.iter().find(|l| l.name == name && !l.is_scheme).ok_or(SourceError::Syntax)?;
                (kind, location, argument)
            }
        };
        if !location.kinds.contains(&kind) {
            return Err(SourceError::Combination { kind, location: location.name });
        }
        let provider = (location.provider)(argument).ok_or(SourceError::Argument { form: form(kind, location) })?;
        Ok(KeySource { kind, location, argument: argument.map(String::from), provider, leaves_stdin: false })
    }
}

impl std::fmt::Display for KeySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.location.is_scheme {
            write!(f, "{}:", self.kind.name())?;
        }
        f.write_str(self.location.name)?;
        match self.argument.as_deref() {
            // A query may be a secret between the server and us.
            Some(argument) if self.location.name == "https" => match argument.split_once('?') {
                Some((address, _)) => write!(f, ":{address}?…"),
                None => write!(f, ":{argument}"),
            },
            Some(argument) => write!(f, ":{argument}"),
            None => Ok(()),
        }
    }
}

impl std::fmt::Debug for KeySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KeySource({self})")
    }
}

impl PartialEq for KeySource {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind && self.location.name == other.location.name && self.argument == other.argument
    }
}
impl Eq for KeySource {}
