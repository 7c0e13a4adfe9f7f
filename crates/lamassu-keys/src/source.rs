//! Key source URIs: `FORMAT:LOCATION`, e.g. `passphrase:file:/root/key`.
//!
//! The format says what the bytes are, the location where they come from; one [`KeyProvider`] per location. New locations are a row in
//! [`crate::providers::LOCATIONS`]. A text that is no source is never repeated in an error: it may be a passphrase typed in the wrong place.

use crate::providers::{LOCATIONS, Location};
use data_encoding::HEXLOWER_PERMISSIVE;
use lamassu_crypto::{Secret, SecretBytes};
use lamassu_format::header::SlotKind;
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
}

/// Gets the bytes of one location.
pub trait KeyProvider: Send + Sync {
    /// The bytes, without the line end a text file ends in where `kind` is a text. Bounded in size, and in time but for a person who types.
    ///
    /// # Errors
    /// [`SourceError`], without any of the bytes.
    fn fetch(&self, kind: SlotKind, ask: &Ask<'_>) -> Result<Fetched, SourceError>;
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

/// Bytes from a provider.
pub struct Fetched {
    /// the bytes
    pub bytes: SecretBytes,
    /// what the user should be told
    pub warnings: Vec<Warning>,
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
        /// [`SlotKind::Raw`] or [`SlotKind::Hex`]: how it was written down
        kind: SlotKind,
        /// 32 bytes
        key: Secret<32>,
    },
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
    /// [`SourceError::EmptyPassphrase`], [`SourceError::PassphraseNotUtf8`], [`SourceError::PassphraseTooLong`], [`SourceError::RawLength`], [`SourceError::Hex`].
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
        }
    }

    /// How the source's bytes became this secret.
    pub fn kind(&self) -> SlotKind {
        match self {
            Material::Passphrase(_) => SlotKind::Passphrase,
            Material::Key { kind, .. } => *kind,
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
    #[error("write {kind}:{usage}", kind = .kind.name())]
    Argument {
        /// the format
        kind: SlotKind,
        /// how the location is written
        usage: &'static str,
    },
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
    /// There is nobody to ask: use a file, or let standard input be read.
    #[error("cannot ask for a passphrase on the terminal: {source}; use another key source, e.g. passphrase:file:PATH")]
    Terminal {
        /// why
        source: std::io::Error,
    },
    /// Standard input failed or ended before the passphrase.
    #[error("cannot read the passphrase from standard input: {source}")]
    Stdin {
        /// why
        source: std::io::Error,
    },
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

    /// Gets the secret.
    ///
    /// # Errors
    /// [`SourceError`].
    pub fn load(&self, ask: &Ask<'_>) -> Result<Loaded, SourceError> {
        let Fetched { bytes, warnings } = self.provider.fetch(self.kind, ask)?;
        Ok(Loaded { material: Material::new(self.kind, bytes)?, warnings })
    }
}

impl std::str::FromStr for KeySource {
    type Err = SourceError;

    fn from_str(uri: &str) -> Result<Self, SourceError> {
        let (kind, rest) = uri.split_once(':').ok_or(SourceError::Syntax)?;
        let kind = SlotKind::from_name(kind).ok_or(SourceError::Syntax)?;
        let (name, argument) = match rest.split_once(':') {
            Some((name, argument)) => (name, Some(argument)),
            None => (rest, None),
        };
        let location = LOCATIONS.iter().find(|l| l.name == name).ok_or(SourceError::Syntax)?;
        if !location.kinds.contains(&kind) {
            return Err(SourceError::Combination { kind, location: location.name });
        }
        let provider = (location.provider)(argument).ok_or(SourceError::Argument { kind, usage: location.usage })?;
        Ok(KeySource { kind, location, argument: argument.map(String::from), provider })
    }
}

impl std::fmt::Display for KeySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.kind.name(), self.location.name)?;
        match &self.argument {
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
