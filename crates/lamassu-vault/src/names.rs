//! Names in one directory (`docs/format.md` §6): plain to stored and back, directory records, companions of long names.

use crate::error::io;
use crate::event::IntegrityKind;
use crate::record::{DIRECTORY, RecordFault, read_text, write_text};
use crate::{Result, VaultError};
use lamassu_crypto::secret::Secret;
use lamassu_crypto::{KeyRing, name::NameKey};
use lamassu_format::Profile;
use lamassu_format::header::NameMode;
use lamassu_format::name::{self, NameError, Stored};
use lamassu_format::record::{DIR_RECORD_LEN_MAX, DirRecord, RecordError};
use lamassu_store::BackendDir;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// How the names of one directory are kept.
pub(crate) enum Names {
    /// Stored as they are, with at most `name_max` bytes.
    Plain { name_max: usize },
    /// Sealed.
    Sealed { key: NameKey, name_max: usize, profile: Profile },
}

/// A stored name, and its companion if it needs one.
#[derive(Debug, Clone)]
pub(crate) struct StoredName {
    pub name: OsString,
    pub companion: Option<Companion>,
}

/// The companion of a long name.
#[derive(Debug, Clone)]
pub(crate) struct Companion {
    pub name: OsString,
    text: String,
}

/// Why the name of an entry does not open.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NameFault {
    #[error("it is not a name that Lamassu writes")]
    Foreign,
    #[error("it does not open under the directory's key: altered, or moved here from another directory")]
    Unauthentic,
    #[error("it opens to a name no file can have")]
    Impossible,
    #[error("it is long and stored as a short one, or short and stored as a long one")]
    WrongForm,
    #[error("its companion is missing, or is no text that Lamassu writes")]
    NoCompanion,
    /// The store failed, which says nothing about the name.
    #[error("its companion cannot be read: {0}")]
    Unreadable(stdio::Error),
    #[error("its companion belongs to another name")]
    WrongCompanion,
}

impl NameFault {
    fn of_companion(error: stdio::Error) -> NameFault {
        match error.raw_os_error() {
            // Nothing, a directory, or another entry that is neither link nor file.
            Some(libc::ENOENT | libc::EISDIR | libc::EINVAL | libc::ENXIO) => NameFault::NoCompanion,
            // Longer than any companion.
            None if error.kind() == stdio::ErrorKind::InvalidData => NameFault::NoCompanion,
            _ => NameFault::Unreadable(error),
        }
    }
}

impl From<&NameFault> for IntegrityKind {
    fn from(fault: &NameFault) -> IntegrityKind {
        match fault {
            NameFault::NoCompanion | NameFault::Unreadable(_) | NameFault::WrongCompanion => IntegrityKind::Companion,
            NameFault::Foreign | NameFault::Unauthentic | NameFault::Impossible | NameFault::WrongForm => {
                IntegrityKind::Name
            }
        }
    }
}

impl Names {
    /// Whether an application may use `name` here.
    fn check(&self, name: &[u8]) -> Result<()> {
        let (mode, max) = match self {
            Names::Plain { name_max } => (NameMode::Plain, *name_max),
            Names::Sealed { name_max, .. } => (NameMode::Encrypted, *name_max),
        };
        name::check_name(mode, name, max).map_err(|e| match e {
            NameError::TooLong { .. } => VaultError::NameTooLong,
            NameError::Empty | NameError::Dot | NameError::Character | NameError::Reserved => VaultError::InvalidName,
        })
    }

    /// The id of the directory, where it has one.
    pub fn dir_id(&self) -> Option<[u8; 16]> {
        match self {
            Names::Plain { .. } => None,
            Names::Sealed { key, .. } => Some(*key.id()),
        }
    }

    /// The profile for new entries of the directory, from its record; the default if it has none.
    pub fn profile(&self) -> Profile {
        match self {
            Names::Plain { .. } => Profile::DEFAULT,
            Names::Sealed { profile, .. } => *profile,
        }
    }

    /// The stored form of a plain name.
    pub fn seal(&self, plain: &OsStr) -> Result<StoredName> {
        let bytes = plain.as_bytes();
        self.check(bytes)?;
        match self {
            Names::Plain { .. } => Ok(StoredName { name: plain.to_owned(), companion: None }),
            Names::Sealed { key, name_max, .. } => {
                let sealed = key.seal(bytes);
                if let Some(name) = name::entry_name(&sealed, *name_max) {
                    return Ok(StoredName { name: name.into(), companion: None });
                }
                let hash = NameKey::hash(&sealed);
                let companion = Companion { name: name::companion_name(&hash).into(), text: name::encode(&sealed) };
                Ok(StoredName { name: name::long_name(&hash).into(), companion: Some(companion) })
            }
        }
    }

    /// The plain name of an entry, `None` if it is one of the format's own that listings hide.
    pub fn open(&self, dir: &dyn BackendDir, stored: &OsStr) -> std::result::Result<Option<OsString>, NameFault> {
        match self {
            Names::Plain { .. } => match name::classify(NameMode::Plain, stored.as_bytes()) {
                Stored::Plain => Ok(Some(stored.to_owned())),
                _ => Ok(None),
            },
            Names::Sealed { key, name_max, .. } => match name::classify(NameMode::Encrypted, stored.as_bytes()) {
                Stored::Sealed(_) if stored.len() > *name_max => Err(NameFault::WrongForm),
                Stored::Sealed(sealed) => open_sealed(key, &sealed).map(Some),
                Stored::Long(hash) => {
                    let companion = name::companion_name(&hash);
                    let text = read_text(dir, OsStr::new(&companion)).map_err(NameFault::of_companion)?;
                    let sealed = name::decode(&text).ok_or(NameFault::NoCompanion)?;
                    if NameKey::hash(&sealed) != hash {
                        return Err(NameFault::WrongCompanion);
                    }
                    if name::encoded_len(sealed.len()) <= *name_max {
                        return Err(NameFault::WrongForm);
                    }
                    open_sealed(key, &sealed).map(Some)
                }
                Stored::Foreign => Err(NameFault::Foreign),
                Stored::Root | Stored::DirRecord | Stored::Companion(_) | Stored::LinkRest(_) | Stored::Plain => {
                    Ok(None)
                }
            },
        }
    }
}

fn open_sealed(key: &NameKey, sealed: &[u8]) -> std::result::Result<OsString, NameFault> {
    let plain = key.open(sealed).map_err(|_| NameFault::Unauthentic)?;
    name::check_name(NameMode::Encrypted, &plain, name::NAME_LEN_MAX).map_err(|_| NameFault::Impossible)?;
    Ok(OsString::from_vec(plain))
}

impl Companion {
    /// Makes the companion unless it exists. True: it was made now.
    pub fn ensure(&self, dir: &dyn BackendDir) -> Result<bool> {
        match write_text(dir, &self.name, &self.text) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == stdio::ErrorKind::AlreadyExists => {
                if read_text(dir, &self.name).is_ok_and(|t| t == self.text.as_bytes()) {
                    return Ok(false);
                }
                // Damaged: its name determines its content, so it can be made anew.
                dir.unlink(&self.name).map_err(io("replace a companion"))?;
                write_text(dir, &self.name, &self.text).map_err(io("create a companion"))?;
                Ok(true)
            }
            Err(e) => Err(io("create a companion")(e)),
        }
    }
}

/// The record of a new directory.
pub(crate) struct NewRecord {
    /// The directory's id.
    pub id: [u8; 16],
    /// As it is stored.
    pub text: String,
}

/// Makes the record of a new directory, with this profile for new entries.
pub(crate) fn create_record(ring: &KeyRing, dir: &dyn BackendDir, profile: Profile) -> Result<NewRecord> {
    let mut id = [0; 16];
    lamassu_crypto::random(&mut id)?;
    let secret = Secret::<32>::random()?;
    let text = seal_record(ring, &DirRecord { id, secret: secret.expose(), profile })?;
    write_text(dir, OsStr::new(DIRECTORY.name), &text).map_err(io("create a directory record"))?;
    Ok(NewRecord { id, text })
}

/// The text of a record.
///
/// # Errors
/// No randomness.
pub(crate) fn seal_record(ring: &KeyRing, record: &DirRecord<'_>) -> Result<String> {
    let mut content = [0; DIR_RECORD_LEN_MAX];
    let len = record.encode_into(&mut content);
    let content = Secret::new(&mut content);
    DIRECTORY.seal(ring, &[], &content.expose()[..len])
}

/// Opens the text of a directory's record.
pub(crate) fn open_record(ring: &KeyRing, text: &[u8]) -> std::result::Result<(NameKey, Profile), DirFault> {
    DIRECTORY.open(text, ring, &[], |content| {
        let record = DirRecord::parse(content)?;
        if record.profile.check(ring.suite()).is_err() {
            return Err(RecordError::Profile { found: record.profile.number() });
        }
        Ok((NameKey::new(&Secret::new(&mut record.secret.clone()), record.id), record.profile))
    })
}

/// Why the record of a directory does not open.
pub(crate) type DirFault = RecordFault<RecordError>;
