//! The ids of vaults and zones, as types of their own, so that they cannot be mixed up with one another or with other
//! sixteen bytes.

use data_encoding::HEXLOWER;
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&HEXLOWER.encode(&self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

id! {
    /// The random id of a vault or dataset. It is shown in lower-case hex.
    VaultId
}

id! {
    /// The id of a zone: that of the vault if the zone is private to it. It is shown in lower-case hex.
    ZoneId
}

impl VaultId {
    /// The id that is shown as `hex`: 32 lower-case digits.
    pub fn of_hex(hex: impl AsRef<[u8]>) -> Option<VaultId> {
        HEXLOWER.decode(hex.as_ref()).ok()?.try_into().ok().map(VaultId)
    }

    /// The zone that is private to this vault.
    pub fn private_zone(self) -> ZoneId {
        ZoneId(self.0)
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
