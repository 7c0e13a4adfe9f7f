//! Stored attributes: their names, and what their values are bound to.

use crate::Result;
use lamassu_crypto::KeyRing;
use lamassu_crypto::outer::RecordKind;
use lamassu_crypto::ring::OpenError;
use lamassu_format::name::parse_xattr_name;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// What a value is bound to in addition to the name of its attribute (`docs/adr/0009-what-attributes-are-bound-to.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Any file: a file has no id that lasts as long as the file.
    File,
    /// A directory, by the id in its record. Any directory with plain names, which has no id.
    Dir(Option<[u8; 16]>),
}

/// The context of a value's seal: its stored name; for a directory followed by a slash, which no name contains, and the
/// id.
fn context(stored: &OsStr, holder: Holder) -> Vec<u8> {
    let mut context = stored.as_bytes().to_vec();
    if let Holder::Dir(id) = holder {
        context.push(b'/');
        context.extend(id.into_iter().flatten());
    }
    context
}

/// Opens the value of a stored attribute.
pub(crate) fn open_value(
    ring: &KeyRing,
    stored: &OsStr,
    holder: Holder,
    value: &[u8],
) -> std::result::Result<Vec<u8>, OpenError> {
    ring.open_record(RecordKind::Xattr, &context(stored, holder), value)
}

/// Which epoch sealed the value of a stored attribute.
pub(crate) fn value_epoch(ring: &KeyRing, stored: &OsStr, holder: Holder, value: &[u8]) -> Option<u32> {
    ring.record_epoch(RecordKind::Xattr, &context(stored, holder), value)
}

/// Seals a value under the newest epoch.
pub(crate) fn seal_value(ring: &KeyRing, stored: &OsStr, holder: Holder, value: &[u8]) -> Result<Vec<u8>> {
    Ok(ring.outer().seal_record(RecordKind::Xattr, &context(stored, holder), value)?)
}

/// The plain name of a stored attribute: `None` if it is not one of the format's. A name with a zero byte, which would
/// be two names in a listing, counts as one that was never sealed.
pub(crate) fn open_name(ring: &KeyRing, stored: &OsStr) -> Option<std::result::Result<Vec<u8>, OpenError>> {
    let raw = stored.as_bytes();
    if !raw.starts_with(lamassu_format::name::XATTR_PREFIX.as_bytes()) {
        return None;
    }
    let opened = parse_xattr_name(raw).ok_or(OpenError::Truncated).and_then(|sealed| ring.open_xattr_name(&sealed));
    Some(opened.and_then(|name| if name.contains(&0) { Err(OpenError::Unauthentic) } else { Ok(name) }))
}
