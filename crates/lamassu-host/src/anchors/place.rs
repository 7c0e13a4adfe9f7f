//! Which file is the anchor of a vault: the one that the user chose, the one that is remembered, or the one in this
//! host's directory of anchors.
//!
//! A dataset that is copied with the vault around it keeps its id. The copy's anchor is therefore named by both ids,
//! and is found if the command is about that vault. On its own, the copy is taken for the original.
//!
//! A place other than the usual, or the server that keeps it, is remembered in a file of one line beside the usual
//! place. A place in the vault itself is refused here; `disk` checks other places that the store's owner controls.

use super::Anchors;
use crate::places::sync_dir_of;
use crate::{Error, Result};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::header::VaultId;
use lamassu_keys::header_file;
use lamassu_keys::providers::server::address_of;
use lamassu_vault::VaultError;
use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Permissions of the directory of anchors.
const DIR_MODE: u32 = 0o700;

/// The user's choice of an anchor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// No choice: the remembered place, or the usual one.
    #[default]
    Remembered,
    /// In this file.
    File(PathBuf),
    /// At this server, `HOST:PORT` as [`server_named`] gives it; this host has a copy in the usual place.
    Server(String),
    /// Work without it: an anchored vault is read unverified, and a new one gets no anchor.
    Unverified,
}

/// What stands for [`Choice::Unverified`] where a person says it.
const UNVERIFIED: &str = "none";

impl Choice {
    /// As a person writes it. A path counts from the working directory of now: a daemon works in another one.
    pub fn from_argument(text: OsString) -> Choice {
        match text.to_str().map(|text| (text, text.strip_prefix(SERVER))) {
            Some((UNVERIFIED, _)) => Choice::Unverified,
            Some((_, Some(server))) => Choice::Server(server_named(server)),
            _ => Choice::File(std::path::absolute(&text).unwrap_or_else(|_| text.into())),
        }
    }

    /// The same the other way round; `None`: nothing was said.
    pub fn to_argument(&self) -> Option<OsString> {
        match self {
            Choice::Remembered => None,
            Choice::File(file) => Some(file.into()),
            Choice::Server(server) => Some(format!("{SERVER}{server}").into()),
            Choice::Unverified => Some(UNVERIFIED.into()),
        }
    }
}

/// Whether a server does not answer at all.
fn is_away(error: &Error) -> bool {
    let Error::Vault(VaultError::Anchor(error)) = error.innermost() else { return false };
    matches!(error, AnchorError::Server { fault: ServerFault::Unreachable { .. }, .. })
}

impl Anchors {
    /// The directory of anchors; `None`: this user has none.
    pub fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// The usual place of a vault's anchor.
    pub fn usual(&self, vault: &VaultId) -> Option<PathBuf> {
        self.dir.as_ref().map(|dir| dir.join(format!("{vault}.anchor")))
    }

    fn note_of(&self, vault: &VaultId) -> Option<PathBuf> {
        self.dir.as_ref().map(|dir| dir.join(format!("{vault}.place")))
    }

    /// The place of the anchor of a dataset that was copied with the vault `root`: the copy has the original's id.
    pub(super) fn of_copied(&self, root: &VaultId, dataset: &VaultId) -> Option<PathBuf> {
        self.dir.as_ref().map(|dir| dir.join(format!("{root}-{dataset}.anchor")))
    }

    /// The anchor of a dataset that was copied with the vault that this command is about. A note of the dataset's place
    /// is about the original.
    pub(super) fn copied(&self, dataset: &VaultId) -> Option<PathBuf> {
        let root = self.shared.chosen_for.get().filter(|root| *root != dataset)?;
        self.of_copied(root, dataset).filter(|file| file.symlink_metadata().is_ok())
    }

    /// Whether a chosen file is that of this vault.
    pub(super) fn is_chosen_for(&self, vault: &VaultId) -> bool {
        self.shared.chosen_for.get_or_init(|| *vault) == vault
    }

    /// The file where the anchor of a vault is looked for; `None`: there is no place.
    ///
    /// # Errors
    /// [`Error::Local`].
    pub fn file_of(&self, vault: &VaultId) -> Result<Option<PathBuf>> {
        // A choice applies to the first vault only.
        let is_chosen_for = self.is_chosen_for(vault);
        if let Choice::File(file) = &self.choice
            && is_chosen_for
        {
            return Ok(Some(file.clone()));
        }
        if let Some(copied) = self.copied(vault) {
            return Ok(Some(copied));
        }
        match self.note_of(vault).map(|note| read_note(&note)).transpose()?.flatten() {
            Some(Noted::File(remembered)) => Ok(Some(remembered)),
            Some(Noted::Server(_)) | None => Ok(self.usual(vault)),
        }
    }

    /// The server that keeps the anchor of a vault, if there is one.
    ///
    /// # Errors
    /// [`Error::Local`].
    pub fn server_of(&self, vault: &VaultId) -> Result<Option<String>> {
        if self.is_chosen_for(vault) {
            match &self.choice {
                Choice::Server(server) => return Ok(Some(server.clone())),
                Choice::File(_) => return Ok(None),
                Choice::Remembered | Choice::Unverified => {}
            }
        }
        if self.copied(vault).is_some() {
            return Ok(None);
        }
        let noted = self.note_of(vault).map(|note| read_note(&note)).transpose()?.flatten();
        Ok(match noted {
            Some(Noted::Server(server)) => Some(server),
            Some(Noted::File(_)) => None,
            None => self.server_of_around(vault)?,
        })
    }

    /// Whether this host remembers that the anchor of a vault is in this file.
    ///
    /// # Errors
    /// [`Error::Local`].
    pub(super) fn is_noted_in(&self, vault: &VaultId, file: &Path) -> Result<bool> {
        let noted = self.note_of(vault).map(|note| read_note(&note)).transpose()?.flatten();
        Ok(matches!(noted, Some(Noted::File(noted)) if noted == file))
    }

    /// The file of the anchor that is to be replaced as a whole, or of a new one if there is none.
    ///
    /// # Errors
    /// [`Error::RememberedAnchorGone`]: it would be replaced without a look at it. [`Error::NoAnchorPlace`],
    /// [`Error::Local`].
    pub(super) fn file_to_replace(&self, vault: &VaultId) -> Result<PathBuf> {
        if !self.is_there(vault)? {
            return self.file_for_new(vault, None);
        }
        let path = self.file_of(vault)?.ok_or(Error::NoAnchorPlace)?;
        let is_chosen = matches!(self.choice, Choice::File(_)) && self.is_chosen_for(vault);
        match path.symlink_metadata() {
            Err(error) if !is_chosen && error.kind() == io::ErrorKind::NotFound => {
                Err(Error::RememberedAnchorGone { path })
            }
            Ok(_) | Err(_) => Ok(path),
        }
    }

    /// Remembers the server that keeps the anchor of a vault. Without a directory of anchors, the user must name it
    /// each time.
    ///
    /// # Errors
    /// [`Error::Local`], [`Error::File`].
    pub(super) fn remember_server(&self, vault: &VaultId, server: &str) -> Result<()> {
        let Some(note) = self.note_of(vault) else { return Ok(()) };
        make_dir_of(&note)?;
        header_file::write_over(&note, format!("{SERVER}{server}\n").as_bytes())?;
        Ok(())
    }

    /// The note of the file to which an anchor is being taken back from its server.
    fn taken_note(&self, vault: &VaultId) -> Option<PathBuf> {
        self.dir.as_ref().map(|dir| dir.join(format!("{vault}.taking")))
    }

    /// Whether an attempt to take the anchor back to this file has begun, and has not ended.
    ///
    /// # Errors
    /// [`Error::Local`].
    pub(super) fn is_taken_to(&self, vault: &VaultId, file: &Path) -> Result<bool> {
        let noted = self.taken_note(vault).map(|note| read_note(&note)).transpose()?.flatten();
        Ok(matches!(noted, Some(Noted::File(noted)) if noted == file))
    }

    /// Notes such an attempt.
    ///
    /// # Errors
    /// [`Error::Local`], [`Error::File`].
    pub(super) fn note_taken_to(&self, vault: &VaultId, file: &Path) -> Result<()> {
        self.taken_note(vault).map_or(Ok(()), |note| write_note(&note, file))
    }

    /// Forgets it. If that fails, nothing follows from the note: the server keeps the anchor, or the file is used.
    pub(super) fn forget_taken(&self, vault: &VaultId) {
        let _ = self.taken_note(vault).map(|note| forget_note(&note));
    }

    /// Refuses operations on an anchor's file if a server keeps the anchor. A file may be chosen nevertheless where the
    /// server is lost for good: so the server is asked.
    ///
    /// # Errors
    /// [`Error::AnchorAtServer`], [`Error::Local`].
    pub fn refuse_server(&self, vault: &VaultId) -> Result<()> {
        match self.server_of(vault)? {
            Some(server) => Err(Error::AnchorAtServer { server }),
            None if self.copied(vault).is_some() => Ok(()),
            None => self.refuse_if_kept(vault, vault),
        }
    }

    /// The same for a dataset that this host may never have used: the server is asked that is remembered for a vault
    /// around it.
    ///
    /// # Errors
    /// As [`Anchors::refuse_server`].
    pub fn refuse_if_kept(&self, vault: &VaultId, around: &VaultId) -> Result<()> {
        let noted = self.note_of(around).map(|note| read_note(&note)).transpose()?.flatten();
        let Some(Noted::Server(server)) = noted else { return Ok(()) };
        match self.is_kept_by(&server, vault) {
            // Who has no grant is told that there is none. Who may use the vault around it may use what lies in it.
            Ok(false) if vault != around && self.is_kept_by(&server, around).is_ok_and(|is_kept| is_kept) => Ok(()),
            Err(error) if is_away(&error) => {
                tracing::warn!(%server, "this server, which keeps the anchor as far as this host knows, does not answer");
                Ok(())
            }
            Ok(_) | Err(_) => Err(Error::AnchorAtServer { server }),
        }
    }

    /// The place for a new vault's anchor: the chosen one, or beside that of the vault around it, or the usual one.
    ///
    /// # Errors
    /// [`Error::NoAnchorPlace`], [`Error::Local`].
    pub fn file_for_new(&self, vault: &VaultId, above: Option<&VaultId>) -> Result<PathBuf> {
        if let (Choice::File(file), None) = (&self.choice, above)
            && self.is_chosen_for(vault)
        {
            return Ok(file.clone());
        }
        let above = above.map(|above| self.file_of(above)).transpose()?.flatten();
        let beside = above.as_deref().and_then(Path::parent).filter(|dir| Some(*dir) != self.dir());
        match (beside, self.usual(vault)) {
            (Some(dir), _) => Ok(dir.join(format!("{vault}.anchor"))),
            (None, Some(usual)) => Ok(usual),
            (None, None) => Err(Error::NoAnchorPlace),
        }
    }

    /// Remembers the place of a vault's anchor. `false`: there is no directory of anchors, so the user must name it
    /// each time.
    ///
    /// # Errors
    /// [`Error::Local`], [`Error::File`].
    pub fn remember(&self, vault: &VaultId, file: &Path) -> Result<bool> {
        let (Some(note), Some(usual)) = (self.note_of(vault), self.usual(vault)) else { return Ok(false) };
        // The directory of anchors may be reached through a link.
        if file == usual || settled(&usual).is_ok_and(|usual| usual == file) {
            forget_note(&note)?;
            return Ok(true);
        }
        write_note(&note, file)?;
        Ok(true)
    }

    /// Removes the anchor of a vault that no longer exists.
    ///
    /// # Errors
    /// [`Error::Local`].
    pub fn remove(&self, vault: &VaultId) -> Result<()> {
        let is_copied = self.copied(vault).is_some();
        if let Some(path) = self.file_of(vault)? {
            match std::fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::Local { op: "remove", path, source });
                }
                Ok(()) | Err(_) => {}
            }
        }
        if is_copied { Ok(()) } else { self.forget(vault) }
    }

    /// Forgets the place of a vault's anchor that is gone.
    ///
    /// # Errors
    /// [`Error::Local`].
    pub fn forget(&self, vault: &VaultId) -> Result<()> {
        self.note_of(vault).map_or(Ok(()), |note| forget_note(&note))
    }
}

/// An absolute path without links to a file that need not exist.
///
/// # Errors
/// [`Error::Local`].
pub fn settled(file: &Path) -> Result<PathBuf> {
    let failed = |source| Error::Local { op: "find the directory of", path: file.into(), source };
    let name = file.file_name().ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(parent.canonicalize().map_err(failed)?.join(name))
}

/// Makes the private directory for a file, and those above it.
///
/// # Errors
/// [`Error::Local`].
pub(super) fn make_dir_of(file: &Path) -> Result<()> {
    let Some(dir) = file.parent().filter(|dir| !dir.as_os_str().is_empty()) else { return Ok(()) };
    let made = DirBuilder::new().recursive(true).mode(DIR_MODE).create(dir);
    made.map_err(|source| Error::Local { op: "make", path: dir.into(), source })
}

/// Refuses a file in the vault's own directory, which the store could restore to an older state with everything else.
///
/// # Errors
/// [`Error::AnchorInStore`], [`Error::Local`].
pub fn refuse_within(file: &Path, vault: &Path) -> Result<()> {
    let dir = vault.canonicalize().map_err(|source| Error::NotADirectory { dir: vault.into(), source })?;
    match settled(file)?.starts_with(&dir) {
        true => Err(Error::AnchorInStore { path: file.into(), within: vault.into() }),
        false => Ok(()),
    }
}

/// Prefix of a place that is a server.
pub const SERVER: &str = "server://";

/// The address of the server that a person names `HOST[:PORT]`, as this host has joined it. What has another form is
/// left as it is: the server chose the address by which it was joined.
pub fn server_named(text: &str) -> String {
    address_of(text).unwrap_or_else(|| text.to_owned())
}

/// A remembered place of an anchor.
enum Noted {
    File(PathBuf),
    Server(String),
}

fn read_note(note: &Path) -> Result<Option<Noted>> {
    let failed = |source| Error::Local { op: "read", path: note.into(), source };
    let line = match std::fs::read(note) {
        Ok(bytes) => bytes,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(None),
        Err(source) => return Err(failed(source)),
    };
    let line = line.strip_suffix(b"\n").unwrap_or(&line);
    if let Some(server) = std::str::from_utf8(line).ok().and_then(|line| line.strip_prefix(SERVER)) {
        return Ok(Some(Noted::Server(server.into())));
    }
    let path = PathBuf::from(OsString::from_vec(line.to_vec()));
    // An invalid note must not lead to the usual place, where an older anchor may lie.
    if path.is_absolute() { Ok(Some(Noted::File(path))) } else { Err(failed(io::ErrorKind::InvalidData.into())) }
}

fn write_note(note: &Path, file: &Path) -> Result<()> {
    make_dir_of(note)?;
    let line = [file.as_os_str().as_bytes(), b"\n"].concat();
    header_file::write_over(note, &line)?;
    Ok(())
}

fn forget_note(note: &Path) -> Result<()> {
    match std::fs::remove_file(note) {
        // What it named may be removed next, perhaps on another disk.
        Ok(()) => {
            sync_dir_of(note).map_err(|source| Error::Local { op: "sync the directory of", path: note.into(), source })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(Error::Local { op: "remove", path: note.into(), source }),
    }
}
