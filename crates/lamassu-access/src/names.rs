//! Object keys at the provider. Each part of a plain key is sealed by itself, so a prefix of parts remains a prefix.
//! The cipher is AES-SIV with the folder as associated data: a name has one sealed form in a folder, and another one in
//! another folder.

use crate::{AccessError, Result};
use data_encoding::BASE64URL_NOPAD;
use lamassu_crypto::name::NameKey;
use lamassu_crypto::{Secret, wrap};

/// Longest plain part, in bytes: sealed and encoded, it has at most 255.
const PART_MAX: usize = 175;
/// Longest sealed key, in bytes, as in S3.
const KEY_MAX: usize = 1024;

/// Seals and opens object keys.
pub struct Names {
    secret: Secret<32>,
}

impl Names {
    /// Derives the sealing key from a tenant's root key.
    pub fn of(root: &Secret<32>) -> Names {
        Names { secret: wrap::hkdf(root.expose(), b"", b"lamassu v1 access names") }
    }

    fn key_in(&self, folder: &str) -> NameKey {
        let hash = wrap::sha256(folder.as_bytes());
        let mut id = [0; 16];
        id.copy_from_slice(&hash[..16]);
        NameKey::new(&self.secret, id)
    }

    /// Seals a plain key, or a prefix that ends with a slash.
    ///
    /// # Errors
    /// [`AccessError::Key`].
    pub fn seal(&self, plain: &str) -> Result<String> {
        let wrong = |what| AccessError::Key { key: plain.into(), what };
        let parts = parts_of(plain).map_err(wrong)?;
        let mut sealed = String::new();
        for part in parts {
            if part.len() > PART_MAX {
                return Err(wrong("a part between slashes has more than 175 bytes"));
            }
            let name = BASE64URL_NOPAD.encode(&self.key_in(&sealed).seal(part.as_bytes()));
            if !sealed.is_empty() {
                sealed.push('/');
            }
            sealed.push_str(&name);
        }
        if sealed.len() > KEY_MAX {
            return Err(wrong("sealed it has more than 1024 bytes"));
        }
        if plain.ends_with('/') {
            sealed.push('/');
        }
        Ok(sealed)
    }

    /// Opens a sealed key.
    ///
    /// # Errors
    /// [`AccessError::Key`], also for a key that this tenant did not seal.
    pub fn open(&self, sealed: &str) -> Result<String> {
        let wrong = |what| AccessError::Key { key: sealed.into(), what };
        let (mut plain, mut folder) = (String::new(), String::new());
        for part in parts_of(sealed).map_err(wrong)? {
            let foreign = || wrong("it was not sealed by this tenant");
            let bytes = BASE64URL_NOPAD.decode(part.as_bytes()).map_err(|_| foreign())?;
            let name = self.key_in(&folder).open(&bytes).map_err(|_| foreign())?;
            let name = String::from_utf8(name).map_err(|_| foreign())?;
            if !folder.is_empty() {
                folder.push('/');
                plain.push('/');
            }
            folder.push_str(part);
            plain.push_str(&name);
        }
        if sealed.ends_with('/') {
            plain.push('/');
        }
        Ok(plain)
    }
}

/// The parts of a key. A trailing slash adds no part.
pub(crate) fn parts_of(key: &str) -> std::result::Result<Vec<&str>, &'static str> {
    let path = key.strip_suffix('/').unwrap_or(key);
    if path.is_empty() {
        return Err("it is empty");
    }
    let parts: Vec<&str> = path.split('/').collect();
    match parts.iter().any(|part| part.is_empty() || *part == "." || *part == ".." || part.contains('\0')) {
        true => Err("it begins with a slash, has two in a row, or has the part \".\" or \"..\""),
        false => Ok(parts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_open_again_and_prefixes_stay_prefixes() {
        let names = Names::of(&Secret::new(&mut [3; 32]));
        let key = names.seal("reports/2026/q1.pdf").expect("a key");
        assert_eq!(names.open(&key).expect("opens"), "reports/2026/q1.pdf");
        let folder = names.seal("reports/2026/").expect("a prefix");
        assert!(key.starts_with(&folder) && folder.ends_with('/'));
        assert_eq!(names.open(&folder).expect("opens"), "reports/2026/");
        // The same name in another folder, and twice in one key.
        let (here, there) = (names.seal("a/a").expect("a key"), names.seal("b/a").expect("a key"));
        let part = |key: &str, at: usize| key.split('/').nth(at).expect("a part").to_owned();
        assert_ne!(part(&here, 1), part(&there, 1));
        assert_ne!(part(&here, 0), part(&here, 1));
        assert!(Names::of(&Secret::new(&mut [4; 32])).open(&key).is_err());
        for wrong in ["", "/", "/a", "a//b", "a/../b", ".", "a\0"] {
            assert!(names.seal(wrong).is_err(), "{wrong:?}");
        }
        assert!(names.seal(&"x".repeat(175)).is_ok() && names.seal(&"x".repeat(176)).is_err());
        assert!(names.seal(&"x".repeat(175)).expect("a key").len() <= 255);
        assert!(names.seal(&vec!["x".repeat(170); 5].join("/")).is_err());
    }
}
