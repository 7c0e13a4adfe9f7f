//! Key sources, slots and keychains (`docs/format.md` §3, §4).
//!
//! A [`source::KeySource`] is a URI; a provider turns it into a secret; a slot of a header turns the secret into the file key, and that opens the keychain.
//! Holds no file data, and prints nothing.
pub mod source;
