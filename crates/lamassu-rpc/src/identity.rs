//! A host's identity at each server that it has joined: its key, and the certificate of the server's authority, in a
//! directory for each server.

use crate::TlsError;
use rcgen::{KeyPair, PKCS_ED25519};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

const KEY: &str = "key.der";
const AUTHORITY: &str = "authority.der";

/// A key pair of a host.
pub struct HostKey(pub(crate) KeyPair);

impl HostKey {
    /// Makes a new key pair.
    ///
    /// # Errors
    /// [`TlsError::Certificate`].
    pub fn new() -> Result<HostKey, TlsError> {
        Ok(HostKey(KeyPair::generate_for(&PKCS_ED25519)?))
    }

    /// Parses an existing one, as PKCS #8.
    ///
    /// # Errors
    /// [`TlsError::Certificate`].
    pub fn of(pkcs8: &[u8]) -> Result<HostKey, TlsError> {
        let der = PrivatePkcs8KeyDer::from(pkcs8);
        Ok(HostKey(KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ED25519)?))
    }

    /// Its public half, as a subject public key info.
    pub fn public(&self) -> Vec<u8> {
        use rcgen::PublicKeyData;
        self.0.subject_public_key_info()
    }

    pub(crate) fn private(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.0.serialize_der()).into()
    }
}

/// The key by which a host identifies itself at one server, and the authority that it trusts.
pub struct Identity {
    /// its key
    pub key: HostKey,
    /// the authority that must have signed the server's certificate
    pub authority: CertificateDer<'static>,
}

impl Identity {
    /// The directory of one server's identity, below `all`.
    pub fn dir_of(all: &Path, address: &str) -> PathBuf {
        all.join(address.replace('/', "_"))
    }

    /// Reads an identity; `None`: this host has not joined that server.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn read(dir: &Path) -> Result<Option<Identity>, TlsError> {
        let read = |name: &str| fs::read(dir.join(name));
        let key = match read(KEY) {
            Ok(bytes) => Zeroizing::new(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(TlsError::File { path: dir.join(KEY), source }),
        };
        let read = |name: &str| read(name).map_err(|source| TlsError::File { path: dir.join(name), source });
        Ok(Some(Identity { key: HostKey::of(&key)?, authority: read(AUTHORITY)?.into() }))
    }

    /// The servers below `all` that this host has joined, by their addresses.
    pub fn servers(all: &Path) -> Vec<String> {
        let entries = fs::read_dir(all).into_iter().flatten().flatten();
        let joined = entries.filter(|entry| entry.path().join(KEY).exists());
        let mut servers: Vec<_> = joined.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        servers.sort();
        servers
    }

    /// Stores this identity beside the present one, which stays in use until [`Stored::put_in_place`].
    ///
    /// # Errors
    /// [`TlsError::File`].
    pub fn store(&self, dir: &Path) -> Result<Stored, TlsError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(|source| TlsError::File { path: dir.to_owned(), source })?;
        let stored = Stored { dir: dir.into() };
        stored.write(AUTHORITY, &self.authority)?;
        stored.write(KEY, &Zeroizing::new(self.key.0.serialize_der()))?;
        Ok(stored)
    }
}

/// An identity that is stored, and not in use yet. It is removed when this is dropped.
#[derive(Debug)]
#[must_use = "it is removed when this is dropped"]
pub struct Stored {
    dir: PathBuf,
}

impl Stored {
    /// Puts it into use. The key comes last: without it there is no identity. Returns whether it replaced another one.
    ///
    /// # Errors
    /// [`TlsError::File`].
    pub fn put_in_place(self) -> Result<bool, TlsError> {
        let is_replaced = self.dir.join(KEY).exists();
        let put = || {
            for name in [AUTHORITY, KEY] {
                fs::rename(self.path_of(name), self.dir.join(name))?;
            }
            fs::File::open(&self.dir)?.sync_all()
        };
        put().map_err(|source| TlsError::File { path: self.dir.join(KEY), source })?;
        Ok(is_replaced)
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.new"))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), TlsError> {
        let new = self.path_of(name);
        let write = || {
            let _ = fs::remove_file(&new);
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().map_err(|source| TlsError::File { path: new.clone(), source })
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        for name in [AUTHORITY, KEY] {
            let _ = fs::remove_file(self.path_of(name));
        }
        // Not with an identity in it.
        let _ = fs::remove_dir(&self.dir);
    }
}
