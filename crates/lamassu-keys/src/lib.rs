//! Key sources, slots and keychains (`docs/format.md` §3, §4).
//!
//! A [`source::KeySource`] is a URI; its provider turns it into [`source::Material`]; a slot of a header turns that
//! into the file key, and the file key opens the keychain. The result goes to `lamassu-crypto` as a key ring.
//!
//! | module | what it does |
//! |---|---|
//! | [`source`], `providers/` | key source URIs; one provider for each location |
//! | [`fault`] | why a key server or a token gave no key |
//! | [`recovery`], [`shares`] | recovery keys as words; their shares |
//! | [`cost`] | measures the cost of Argon2id |
//! | [`create`], [`dataset`] | headers of vaults, zones and datasets; parent slots |
//! | [`attempt`], [`unlock`](mod@unlock) | trying slots; the keys of an opened header, and changes of it |
//! | [`keychain`], `rotate` | epochs of K_in and K_out; rotation and retirement |
//! | `tier`, `slot`, `words` | the two keys; what a new slot is made of; the words of recovery keys |
//! | [`admin`], [`administrator`] | the administrator's signature; naming and exchanging the administrator |
//! | [`header_file/`](header_file) | header files: read, replaced, erased; the update lock |
//! | [`witness`] | what remembers the newest header outside the store |
//! | [`history/`](history) | the history of a vault's keys |
//! | [`destroy`], [`receipt`] | assured delete; its receipts |
//! | [`date`] | times in readable form |
//! | `error` | the errors |
//! | `testing` | decoders for fuzzers (feature `testing`) |
//!
//! Locks: the update lock of a header's file ([`Update`]) is the outermost. Under it, one after the other, the file
//! lock of the history and the locks of the witness. The keys in use at servers (`providers::server`) and the loaded
//! PKCS #11 modules have locks of their own, which are held with no other.
//!
//! Never: holds file data, writes a key anywhere but sealed, prints (except the prompt of a `prompt` source on the
//! terminal).
#![deny(unsafe_code)]

pub mod admin;
pub mod administrator;
pub mod attempt;
pub mod cost;
pub mod create;
pub mod dataset;
pub mod date;
pub mod destroy;
mod error;
pub mod fault;
pub mod header_file;
pub mod history;
pub mod keychain;
pub mod providers;
pub mod receipt;
pub mod recovery;
mod rotate;
pub mod shares;
mod slot;
pub mod source;
#[cfg(feature = "testing")]
pub mod testing;
mod tier;
pub mod unlock;
pub mod witness;
mod words;

pub use attempt::{Attempt, Slots, unlock};
pub use create::{
    NewClone, NewVault, NewZone, Outer, Zone, clone_vault, copy_zone, create_oblivious_zone, create_vault, create_zone,
};
pub use dataset::{NewDataset, create_dataset, unlock_by_parent};
pub use error::KeyError;
pub use fault::{KeyState, ServerFault, TokenFault};
pub use header_file::{FileError, Update};
pub use history::{Event, History, HistoryError};
pub use keychain::{Epoch, Keychain};
pub use lamassu_format::header::{Argon2Params, Role, SlotKind};
pub use providers::server::ObliviousKey;
pub use slot::{NewSlot, Terms};
pub use source::{Ask, Generated, KeySource, Loaded, Material, Purpose, SourceError, Warning, ZoneKeys};
pub use tier::Tier;
pub use unlock::{Removed, Unlocked};
pub use witness::{Witness, nobody};

/// The time, in seconds since 1970, for the `created` members. A clock before 1970 counts as 1970.
pub fn unix_now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
