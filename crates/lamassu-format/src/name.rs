//! Names as they stand in the store (§6, §7), and which names a file may have. No cipher: sealing is `lamassu-crypto`'s.

use crate::header::NameMode;
use data_encoding::BASE64URL_NOPAD;

/// Every name that begins so belongs to the format.
pub const RESERVED_PREFIX: &str = "lamassu.";
/// The vault header, in the root.
pub const HEADER: &str = "lamassu.vault";
/// The next vault header, before it is renamed over [`HEADER`].
pub const HEADER_NEW: &str = "lamassu.vault.new";
/// The writer's lock, in the root.
pub const LOCK: &str = "lamassu.lock";
/// Directory record, in every directory of a vault with encrypted names.
pub const DIR_RECORD: &str = "lamassu.dir";
/// Directories being created or removed, in the root.
pub const STAGING: &str = "lamassu.staging";
/// Where `check --repair` moves what it cannot mend, in the root.
pub const LOST: &str = "lamassu.lost";
/// Before b64 of the hash: an entry with a long name.
pub const LONG_PREFIX: &str = "lamassu.long.";
/// Before b64 of the hash: the companion that holds a long name.
pub const COMPANION_PREFIX: &str = "lamassu.name.";
/// Before b64 of the id: the rest of a long symbolic link target.
pub const LINK_PREFIX: &str = "lamassu.link.";
/// Before b64 of the sealed name: an extended attribute of the backing entry.
pub const XATTR_PREFIX: &str = "user.lamassu.";

/// Longest name of a file, in bytes.
pub const NAME_LEN_MAX: usize = 255;
/// Bytes that AES-SIV adds to a name.
pub const SIV_LEN: usize = 16;

/// What a name found in the store stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// [`HEADER`], [`HEADER_NEW`], [`LOCK`], [`STAGING`] or [`LOST`]: the format's own, never shown. Only the root has them by right.
    Root,
    /// [`DIR_RECORD`].
    DirRecord,
    /// An entry whose sealed name is this.
    Sealed(Vec<u8>),
    /// An entry whose sealed name hashes to this; the name is in the companion.
    Long([u8; 32]),
    /// The companion of a long entry, by the same hash.
    Companion([u8; 32]),
    /// The rest of a long symbolic link target, by the id in its head.
    LinkRest([u8; 16]),
    /// An entry of a vault with plain names: its name is the stored one.
    Plain,
    /// Neither the format's nor a name it could have written: reported by `check`, never shown.
    Foreign,
}

/// What `name`, found in a directory of a vault with names kept as `mode`, stands for. Says nothing on whether it opens.
pub fn classify(mode: NameMode, name: &[u8]) -> Stored {
    match name.strip_prefix(RESERVED_PREFIX.as_bytes()) {
        Some(_) => classify_reserved(mode, name),
        None => match mode {
            NameMode::Plain => Stored::Plain,
            NameMode::Encrypted => match decode(name) {
                Some(sealed) if is_sealed_len(sealed.len()) => Stored::Sealed(sealed),
                Some(_) | None => Stored::Foreign,
            },
        },
    }
}

fn classify_reserved(mode: NameMode, name: &[u8]) -> Stored {
    if [HEADER, HEADER_NEW, LOCK, STAGING, LOST].iter().any(|own| own.as_bytes() == name) {
        return Stored::Root;
    }
    if let Some(id) = parse_suffix(name, LINK_PREFIX) {
        return Stored::LinkRest(id);
    }
    match mode {
        NameMode::Plain => Stored::Foreign,
        NameMode::Encrypted if name == DIR_RECORD.as_bytes() => Stored::DirRecord,
        NameMode::Encrypted => match (parse_suffix(name, LONG_PREFIX), parse_suffix(name, COMPANION_PREFIX)) {
            (Some(hash), _) => Stored::Long(hash),
            (None, Some(hash)) => Stored::Companion(hash),
            (None, None) => Stored::Foreign,
        },
    }
}

fn parse_suffix<const N: usize>(name: &[u8], prefix: &str) -> Option<[u8; N]> {
    decode(name.strip_prefix(prefix.as_bytes())?)?.try_into().ok()
}

fn is_sealed_len(len: usize) -> bool {
    (SIV_LEN + 1..=SIV_LEN + NAME_LEN_MAX).contains(&len)
}

/// b64 of the format page: base64url without padding.
pub fn encode(bytes: &[u8]) -> String {
    BASE64URL_NOPAD.encode(bytes)
}

/// The bytes of a b64 text; `None` for padding, foreign characters and non-zero trailing bits, so that every byte string has one text only.
pub fn decode(text: &[u8]) -> Option<Vec<u8>> {
    BASE64URL_NOPAD.decode(text).ok()
}

/// Characters of the b64 text of `len` bytes.
pub const fn encoded_len(len: usize) -> usize {
    (len * 4).div_ceil(3)
}

/// The stored name of an entry whose sealed name is `sealed`, or `None` if that is longer than `name_max`: then it goes by [`long_name`].
pub fn entry_name(sealed: &[u8], name_max: usize) -> Option<String> {
    (encoded_len(sealed.len()) <= name_max).then(|| encode(sealed))
}

/// The stored name of an entry with a long name; `hash` is SHA-256 of the sealed name.
pub fn long_name(hash: &[u8; 32]) -> String {
    format!("{LONG_PREFIX}{}", encode(hash))
}

/// The companion of an entry with a long name.
pub fn companion_name(hash: &[u8; 32]) -> String {
    format!("{COMPANION_PREFIX}{}", encode(hash))
}

/// The entry that holds the rest of a long symbolic link target.
pub fn link_rest_name(id: &[u8; 16]) -> String {
    format!("{LINK_PREFIX}{}", encode(id))
}

/// The stored name of an extended attribute whose sealed name is `sealed`.
pub fn xattr_name(sealed: &[u8]) -> String {
    format!("{XATTR_PREFIX}{}", encode(sealed))
}

/// The sealed name of a stored extended attribute, or `None` if it is not one of the format's.
pub fn parse_xattr_name(name: &[u8]) -> Option<Vec<u8>> {
    decode(name.strip_prefix(XATTR_PREFIX.as_bytes())?).filter(|sealed| is_sealed_len(sealed.len()))
}

/// Why no file can have a name.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
pub enum NameError {
    /// No bytes at all.
    #[error("the name is empty")]
    Empty,
    /// Longer than the format or, for plain names, the store takes.
    #[error("the name is {len} bytes long; at most {max} are possible here")]
    TooLong {
        /// bytes of the name
        len: usize,
        /// most bytes possible
        max: usize,
    },
    /// `.` or `..`.
    #[error("the name is \".\" or \"..\"")]
    Dot,
    /// A slash or NUL.
    #[error("the name contains a slash or a zero byte")]
    Character,
    /// Plain names only: begins with `lamassu.`.
    #[error("names that begin with \"lamassu.\" belong to the format")]
    Reserved,
}

/// Checks a name an application asks for, or one that a sealed name opened to. `name_max` is that of the header and bounds plain names only.
///
/// # Errors
/// [`NameError`].
pub fn check_name(mode: NameMode, name: &[u8], name_max: usize) -> Result<(), NameError> {
    let max = match mode {
        NameMode::Encrypted => NAME_LEN_MAX,
        NameMode::Plain => NAME_LEN_MAX.min(name_max),
    };
    if name.is_empty() {
        return Err(NameError::Empty);
    }
    if name.len() > max {
        return Err(NameError::TooLong { len: name.len(), max });
    }
    if name == b"." || name == b".." {
        return Err(NameError::Dot);
    }
    if name.contains(&b'/') || name.contains(&0) {
        return Err(NameError::Character);
    }
    if mode == NameMode::Plain && name.starts_with(RESERVED_PREFIX.as_bytes()) {
        return Err(NameError::Reserved);
    }
    Ok(())
}
