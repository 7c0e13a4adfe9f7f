//! Names in a directory (§6), and AES-SIV, which also seals attribute names (§7).

use crate::secret::{Secret, without_trace};
use crate::{Unauthentic, wrap};
use aes_siv::KeyInit;
use aes_siv::siv::Aes256Siv;

/// Key of the names of one directory.
pub struct NameKey {
    key: Secret<64>,
    id: [u8; 16],
}

impl NameKey {
    /// From a directory record.
    pub fn new(secret: &Secret<32>, id: [u8; 16]) -> Self {
        NameKey { key: wrap::hkdf(secret.expose(), b"", b"lamassu v1 name"), id }
    }

    /// The directory's id.
    pub fn id(&self) -> &[u8; 16] {
        &self.id
    }

    /// AES-SIV of a name: 16 bytes longer than the name.
    pub fn seal(&self, name: &[u8]) -> Vec<u8> {
        siv_seal(&self.key, &self.id, name)
    }

    /// And back.
    ///
    /// # Errors
    /// [`Unauthentic`] for a name of another directory, a changed or a short one.
    pub fn open(&self, sealed: &[u8]) -> Result<Vec<u8>, Unauthentic> {
        siv_open(&self.key, &self.id, sealed)
    }

    /// SHA-256 of a sealed name, for long names.
    pub fn hash(sealed: &[u8]) -> [u8; 32] {
        wrap::sha256(sealed)
    }
}

/// Secret and id of a directory that has no record: they follow from those of the directory above it and from its name
/// (§6c). So a path alone tells all keys that it takes to open it.
pub fn derived_directory(above: &Secret<32>, id: &[u8; 16], name: &[u8]) -> (Secret<32>, [u8; 16]) {
    let info = [b"lamassu v1 directory ", id.as_slice(), name].concat();
    let derived: Secret<48> = wrap::hkdf(above.expose(), b"", &info);
    let (secret, child) = derived.expose().split_at(32);
    let secret = Secret::filled_by(|bytes: &mut [u8; 32]| bytes.copy_from_slice(secret));
    let mut id = [0; 16];
    id.copy_from_slice(child);
    (secret, id)
}

/// AES-SIV (RFC 5297) with one associated-data string: SIV ‖ ciphertext.
pub(crate) fn siv_seal(key: &Secret<64>, aad: &[u8], content: &[u8]) -> Vec<u8> {
    let sealed = without_trace(|| Aes256Siv::new(key.expose().into()).encrypt([aad], content));
    sealed.expect("one associated-data string is within RFC 5297")
}

/// And back.
pub(crate) fn siv_open(key: &Secret<64>, aad: &[u8], sealed: &[u8]) -> Result<Vec<u8>, Unauthentic> {
    without_trace(|| Aes256Siv::new(key.expose().into()).decrypt([aad], sealed)).map_err(|_| Unauthentic)
}

#[cfg(test)]
mod tests {
    use super::*;
    use data_encoding::HEXLOWER;

    /// RFC 5297, appendix A.1, has AES-128 keys only. This is the AES-256 vector of Miscreant's `aes_siv.tjson`,
    /// "Deterministic Authenticated Encryption Example".
    #[test]
    fn siv_vector_with_a_512_bit_key() {
        let key = HEXLOWER
            .decode(b"fffefdfcfbfaf9f8f7f6f5f4f3f2f1f06f6e6d6c6b6a69686766656463626160f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff000102030405060708090a0b0c0d0e0f")
            .unwrap();
        let ad = HEXLOWER.decode(b"101112131415161718191a1b1c1d1e1f2021222324252627").unwrap();
        let content = HEXLOWER.decode(b"112233445566778899aabbccddee").unwrap();
        let key = Secret::from_slice(&key).unwrap();
        let sealed = siv_seal(&key, &ad, &content);
        assert_eq!(HEXLOWER.encode(&sealed), "f125274c598065cfc26b0e71575029088b035217e380cac8919ee800c126");
        assert_eq!(siv_open(&key, &ad, &sealed).unwrap(), content);
    }

    #[test]
    fn directories_without_a_record_are_told_apart_by_their_paths() {
        let (secret, id) = (Secret::new(&mut [3; 32]), [1; 16]);
        let (one, one_id) = derived_directory(&secret, &id, b"a");
        let (again, again_id) = derived_directory(&secret, &id, b"a");
        assert_eq!((one.expose(), one_id), (again.expose(), again_id));
        let (other, other_id) = derived_directory(&secret, &[2; 16], b"a");
        let (below, below_id) = derived_directory(&one, &one_id, b"a");
        for (key, key_id) in [(&other, other_id), (&below, below_id)] {
            assert!(key.expose() != one.expose() && key_id != one_id);
        }
    }

    #[test]
    fn names_open_in_their_directory_alone() {
        let secret = Secret::new(&mut [3; 32]);
        let here = NameKey::new(&secret, [1; 16]);
        let there = NameKey::new(&secret, [2; 16]);
        let sealed = here.seal(b"report.txt");
        assert_eq!(sealed.len(), 26);
        assert_eq!(sealed, here.seal(b"report.txt"), "names are deterministic");
        assert_eq!(here.open(&sealed).unwrap(), b"report.txt");
        assert_eq!(there.open(&sealed), Err(Unauthentic));
        for len in 0..sealed.len() {
            assert_eq!(here.open(&sealed[..len]), Err(Unauthentic));
        }
        for i in 0..sealed.len() {
            let mut bad = sealed.clone();
            bad[i] ^= 0x80;
            assert_eq!(here.open(&bad), Err(Unauthentic));
        }
    }
}
