//! Certificates: the authority that a server makes for itself, and the server's own. Hosts have none: they are
//! identified by keys.

use crate::{Result, ServerError};
use lamassu_rpc::tls::{SERVER_NAME, digest, named};
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ED25519,
    PublicKeyData, SanType,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};
use zeroize::Zeroizing;

/// The file of its key.
pub const KEY: &str = "authority.key";
/// The file of its certificate.
pub const CERTIFICATE: &str = "authority.der";
/// Validity of the authority: hosts that have joined trust this one only.
const AUTHORITY_YEARS: u64 = 30;
/// Validity of the server's own certificate. The server makes a new one at each start, and again when
/// [`is_to_be_renewed`] says so.
const SERVER_DAYS: u32 = 30;
/// Tolerance for hosts whose clocks are behind. A certificate's key is as old as the certificate, so it costs nothing.
const SKEW: Duration = DAY;
const DAY: Duration = Duration::from_secs(24 * 3600);

/// The authority of a server.
pub struct Authority {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Makes an authority in a server's directory.
    ///
    /// # Errors
    /// [`ServerError::File`], [`ServerError::Certificate`].
    pub fn make(dir: &Path) -> Result<()> {
        let key = KeyPair::generate_for(&PKCS_ED25519)?;
        let mut params = valid_for(DAY * 365 * AUTHORITY_YEARS as u32);
        params.distinguished_name = named("Lamassu server");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key)?;
        write_new(&dir.join(CERTIFICATE), certificate.der())?;
        // Last: by it a directory is known as a server's.
        write_new(&dir.join(KEY), &Zeroizing::new(key.serialize_der()))
    }

    /// Reads the authority of a server's directory.
    ///
    /// # Errors
    /// [`ServerError::File`], [`ServerError::Damaged`].
    pub fn read(dir: &Path) -> Result<Authority> {
        let damaged = |name: &str, what| ServerError::Damaged { path: dir.join(name), what };
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read(&path).map_err(|error| match error.kind() {
                ErrorKind::NotFound => damaged(name, "it is gone"),
                _ => ServerError::file("read", &path)(error),
            })
        };
        let (key, certificate) = (Zeroizing::new(read(KEY)?), CertificateDer::from(read(CERTIFICATE)?));
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(&key[..]), &PKCS_ED25519);
        let key = key.map_err(|_| damaged(KEY, "it is no key of an authority"))?;
        let public = lamassu_rpc::tls::public_key(&certificate);
        let public = public.ok_or_else(|| damaged(CERTIFICATE, "it is no certificate"))?;
        if *public != *key.subject_public_key_info() {
            return Err(damaged(CERTIFICATE, "the authority's certificate is not that of its key"));
        }
        let issuer = Issuer::from_ca_cert_der(&certificate, key);
        let issuer = issuer.map_err(|_| damaged(CERTIFICATE, "it is no certificate of an authority"))?;
        Ok(Authority { issuer, certificate })
    }

    /// Its certificate.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The digest by which tokens name it.
    pub fn digest(&self) -> [u8; 32] {
        digest(&self.certificate)
    }

    /// A certificate for the server, followed by the authority's, and the server's key.
    ///
    /// # Errors
    /// [`ServerError::Certificate`].
    pub fn server(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
        let key = KeyPair::generate_for(&PKCS_ED25519)?;
        let mut params = valid_for(DAY * SERVER_DAYS);
        params.distinguished_name = named(SERVER_NAME);
        params.subject_alt_names = vec![SanType::DnsName(SERVER_NAME.try_into()?)];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.signed_by(&key, &self.issuer)?;
        let private = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        Ok((vec![certificate.der().clone(), self.certificate.clone()], private))
    }
}

/// Whether a certificate of the server that was made at `made` is to be replaced, by the clock of the machine. That
/// clock may be set: a machine without a battery begins in the past, and learns the time from the network later.
pub fn is_to_be_renewed(made: SystemTime, now: SystemTime) -> bool {
    match now.duration_since(made) {
        Ok(age) => age >= DAY * SERVER_DAYS / 2,
        Err(ahead) => ahead.duration() >= SKEW / 2,
    }
}

/// Whether a certificate of the server that was made at `made` is valid, by the clock of the machine.
pub fn is_valid(made: SystemTime, now: SystemTime) -> bool {
    match now.duration_since(made) {
        Ok(age) => age < DAY * SERVER_DAYS,
        Err(ahead) => ahead.duration() < SKEW,
    }
}

/// Whether this is an Ed25519 public key as hosts make them, a subject public key info (RFC 8410).
pub fn is_ed25519(spki: &[u8]) -> bool {
    const BEFORE_KEY: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
    spki.len() == BEFORE_KEY.len() + 32 && spki.starts_with(&BEFORE_KEY)
}

fn valid_for(time: Duration) -> CertificateParams {
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    (params.not_before, params.not_after) = ((now - SKEW).into(), (now + time).into());
    params
}

/// Writes a new file that only its owner may read; durable when this returns.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(ServerError::file("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_rpc::identity::HostKey;

    #[test]
    fn a_certificate_is_renewed_in_time_whatever_happens_to_the_clock() {
        let made = SystemTime::now();
        for (days, is_due) in [(0, false), (14, false), (15, true), (29, true), (10_000, true)] {
            assert_eq!(is_to_be_renewed(made, made + DAY * days), is_due, "{days} days later");
        }
        assert!(!is_to_be_renewed(made, made - SKEW / 3) && is_to_be_renewed(made, made - SKEW));
        for (now, is_so) in [(made + DAY * 29, true), (made + DAY * 30, false), (made - SKEW, false)] {
            assert_eq!(is_valid(made, now), is_so);
        }
    }

    #[test]
    fn keys_of_hosts_are_taken_and_no_others() {
        let key = HostKey::new().expect("a key").public();
        assert!(is_ed25519(&key));
        assert!(!is_ed25519(&key[1..]) && !is_ed25519(&[&key[..], &[0]].concat()) && !is_ed25519(&[]));
    }
}
