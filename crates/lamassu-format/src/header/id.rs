//! The id of a vault, as a type of its own, so that it cannot be mixed up with other sixteen bytes.

use data_encoding::HEXLOWER;
use std::fmt;

/// The random id of a vault or dataset. It is shown in lower-case hex.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VaultId(pub [u8; 16]);

impl VaultId {
    /// The id that is shown as `hex`: 32 lower-case digits.
    pub fn of_hex(hex: impl AsRef<[u8]>) -> Option<VaultId> {
        HEXLOWER.decode(hex.as_ref()).ok()?.try_into().ok().map(VaultId)
    }
}

impl fmt::Display for VaultId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&HEXLOWER.encode(&self.0))
    }
}

impl fmt::Debug for VaultId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_as_it_is_shown() {
        let id = VaultId(std::array::from_fn(|i| 0xa0 + i as u8));
        assert_eq!(id.to_string(), "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf");
        assert_eq!(format!("{id:?}"), id.to_string());
        assert_eq!(VaultId::of_hex(id.to_string()), Some(id));
        for other in ["", "a0", "A0A1A2A3A4A5A6A7A8A9AAABACADAEAF", "a0a1a2a3a4a5a6a7a8a9aaabacadaeafb0"] {
            assert_eq!(VaultId::of_hex(other), None, "{other:?}");
        }
    }
}
