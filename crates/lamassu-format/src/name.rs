//! Names in the store (§6, §7), and names that a file may have. `lamassu-crypto` seals names.

use crate::header::NameMode;
use data_encoding::BASE64URL_NOPAD;

/// The prefix of every name that belongs to the format.
pub const RESERVED_PREFIX: &str = "lamassu.";
/// The vault header, in the root. A directory of the tree that has one is a dataset's root. No application can make
/// this name at any depth: plain names with the prefix are refused, and sealed ones have no dot.
pub const HEADER: &str = "lamassu.vault";
/// The next vault header, before it is renamed over [`HEADER`].
pub const HEADER_NEW: &str = "lamassu.vault.new";
/// A vault header that a restored one replaced, in the root.
pub const HEADER_REPLACED: &str = "lamassu.vault.replaced";
/// The same, while it is being written; and any old header until it is overwritten. With a dot and a number after this
/// name: one that an interrupted run has left, where a store does not show whether it is the header in place.
pub const HEADER_REPLACING: &str = "lamassu.vault.replacing";
/// The history of the vault's keys, in the root.
pub const HISTORY: &str = "lamassu.history";
/// A history that did not verify, set aside when the next one was begun, in the root. Further ones have a dot and a
/// number after this name.
pub const HISTORY_BROKEN: &str = "lamassu.history.broken";
/// A history that begins with the next header, until that header is in place, in the root.
pub const HISTORY_NEW: &str = "lamassu.history.new";
/// The writer's lock, in the root.
pub const LOCK: &str = "lamassu.lock";
/// The names that only the root may have.
const ROOT_NAMES: [&str; 14] = [
    HEADER,
    HEADER_NEW,
    HEADER_REPLACED,
    HEADER_REPLACING,
    HISTORY,
    HISTORY_BROKEN,
    HISTORY_NEW,
    LOCK,
    ROOT_RECORD,
    ROOT_RECORD_NEW,
    SESSIONS,
    STAGING,
    LOST,
    TREE,
];
/// Directory record, in every directory of a vault with encrypted names.
pub const DIR_RECORD: &str = "lamassu.dir";
/// The record of the root's permissions (§6b), in the root.
pub const ROOT_RECORD: &str = "lamassu.root";
/// Its successor, before it is renamed over it.
pub const ROOT_RECORD_NEW: &str = "lamassu.root.new";
/// The directory of the record of sessions (§6a), in the root.
pub const SESSIONS: &str = "lamassu.sessions";
/// The record of sessions, in that directory.
pub const SESSIONS_RECORD: &str = "record";
/// Its successor, before it is renamed over it.
pub const SESSIONS_NEW: &str = "record.new";
/// Directories being created or removed, in the root.
pub const STAGING: &str = "lamassu.staging";
/// Where `check --repair` moves what it cannot repair, in the root.
pub const LOST: &str = "lamassu.lost";
/// Tree records of the files of an anchored vault, in the root: a cache.
pub const TREE: &str = "lamassu.tree";
/// The prefix of an entry with a long name; b64 of the hash follows.
pub const LONG_PREFIX: &str = "lamassu.long.";
/// The prefix of the companion that holds a long name; b64 of the hash follows.
pub const COMPANION_PREFIX: &str = "lamassu.name.";
/// The prefix of the rest of a long symbolic link target; b64 of the id follows.
pub const LINK_PREFIX: &str = "lamassu.link.";
/// The prefix of an extended attribute of a backing entry; b64 of the sealed name follows.
pub const XATTR_PREFIX: &str = "user.lamassu.";

/// Longest name of a file, in bytes.
pub const NAME_LEN_MAX: usize = 255;
/// Bytes that AES-SIV adds to a name.
pub const SIV_LEN: usize = 16;

/// What a name in the store means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// A name that only the root of a vault may have, such as [`HEADER`] and [`STAGING`]. It is never shown.
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
    /// An entry of a vault with plain names. Its name is the stored one.
    Plain,
    /// Neither a name of the format nor one that a vault could have written. `check` reports it, and it is never shown.
    Foreign,
}

/// What `name` means in a directory of a vault with this name mode. It may still not open.
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
    let is_one_more = is_numbered(name, HISTORY_BROKEN) || is_set_aside(name);
    if is_one_more || ROOT_NAMES.iter().any(|own| own.as_bytes() == name) {
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

/// Whether a name is another one with a dot and a number after it.
fn is_numbered(name: &[u8], of: &str) -> bool {
    let rest = name.strip_prefix(of.as_bytes()).and_then(|rest| rest.strip_prefix(b"."));
    rest.is_some_and(|n| !n.is_empty() && n.len() <= 3 && n.iter().all(u8::is_ascii_digit))
}

/// Whether a name is that of an old header which was set aside ([`HEADER_REPLACING`]).
pub fn is_set_aside(name: &[u8]) -> bool {
    is_numbered(name, HEADER_REPLACING)
}

/// The names under which old headers are set aside, in that order.
pub fn set_aside() -> impl Iterator<Item = String> {
    (1..1000).map(|n| format!("{HEADER_REPLACING}.{n}"))
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

/// The bytes of a b64 text. `None` for padding, foreign characters and non-zero trailing bits, so that every byte
/// string has exactly one text.
pub fn decode(text: &[u8]) -> Option<Vec<u8>> {
    BASE64URL_NOPAD.decode(text).ok()
}

/// Characters of the b64 text of `len` bytes.
pub const fn encoded_len(len: usize) -> usize {
    (len * 4).div_ceil(3)
}

/// The stored name of an entry whose sealed name is `sealed`. `None` if it is longer than `name_max`: then the entry
/// has a [`long_name`].
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

/// Checks a name that an application asks for, or that a sealed name opened to. `name_max` is the header's, and bounds
/// plain names only.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn b64_has_one_text_for_every_byte_string() {
        // RFC 4648 §10, without padding.
        for (bytes, text) in
            [("", ""), ("f", "Zg"), ("fo", "Zm8"), ("foo", "Zm9v"), ("foob", "Zm9vYg"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(encode(bytes.as_bytes()), text);
            assert_eq!(decode(text.as_bytes()).as_deref(), Some(bytes.as_bytes()));
            assert_eq!(encoded_len(bytes.len()), text.len());
        }
        assert_eq!(encode(&[0xfb, 0xff]), "-_8");
        for bad in ["Zg==", "Zg=", "Zh", "Zm9", "Z", "Zm9vY", "+_8", "-/8", "Zm9v\n", " Zm9v", "Zm.v", "Zm9vY\0"] {
            assert_eq!(decode(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn names_of_the_format_are_distinguished() {
        let hash = [7u8; 32];
        let id = [9u8; 16];
        let sealed = vec![5u8; 17];
        let name = |text: &str| classify(NameMode::Encrypted, text.as_bytes());
        for own in ROOT_NAMES {
            assert_eq!(name(own), Stored::Root);
            assert_eq!(classify(NameMode::Plain, own.as_bytes()), Stored::Root);
        }
        assert_eq!(name("lamassu.history.broken.12"), Stored::Root);
        assert!(set_aside().all(|set_aside| name(&set_aside) == Stored::Root));
        for other in
            ["lamassu.history.broken.", "lamassu.history.broken.x", "lamassu.history.1", "lamassu.history.broken.1234"]
        {
            assert_eq!(name(other), Stored::Foreign, "{other}");
        }
        assert_eq!(name(DIR_RECORD), Stored::DirRecord);
        assert_eq!(name(&long_name(&hash)), Stored::Long(hash));
        assert_eq!(name(&companion_name(&hash)), Stored::Companion(hash));
        assert_eq!(name(&link_rest_name(&id)), Stored::LinkRest(id));
        assert_eq!(name(&encode(&sealed)), Stored::Sealed(sealed));
        assert_eq!(long_name(&hash).len(), 56, "fits the least name_max");

        let plain = |text: &str| classify(NameMode::Plain, text.as_bytes());
        assert_eq!(plain("notes.txt"), Stored::Plain);
        assert_eq!(plain("lamassu"), Stored::Plain);
        assert_eq!(plain(&link_rest_name(&id)), Stored::LinkRest(id));
        for text in [DIR_RECORD, &long_name(&hash), &companion_name(&hash), "lamassu.", "lamassu.other"] {
            assert_eq!(plain(text), Stored::Foreign, "{text}");
        }
    }

    #[test]
    fn what_the_format_could_not_have_written_is_foreign() {
        let too_short = encode(&[1; 16]);
        let too_long = encode(&[1; 272]);
        let long_of_31 = format!("{LONG_PREFIX}{}", encode(&[1; 31]));
        let link_of_17 = format!("{LINK_PREFIX}{}", encode(&[1; 17]));
        let loose_bits = format!("{COMPANION_PREFIX}{}B", &encode(&[0; 32])[..42]);
        let texts = ["", ".", "..", "notes.txt", "lost+found", "Zk3=", "lamassu.vault2", "lamassu.", "lamassu.long."];
        for text in
            texts.into_iter().chain([&too_short, &too_long, &long_of_31, &link_of_17, &loose_bits].map(|s| &**s))
        {
            assert_eq!(classify(NameMode::Encrypted, text.as_bytes()), Stored::Foreign, "{text}");
        }
    }

    #[test]
    fn long_names_begin_where_the_store_ends() {
        // 175 bytes of name are 191 sealed and 255 in b64.
        assert_eq!(entry_name(&[0; 191], 255).unwrap().len(), 255);
        assert_eq!(entry_name(&[0; 192], 255), None);
        assert_eq!(entry_name(&[0; 191], 254), None);
    }

    #[test]
    fn xattr_names() {
        let sealed = vec![3u8; 28];
        assert_eq!(parse_xattr_name(xattr_name(&sealed).as_bytes()), Some(sealed));
        for other in ["user.comment", "user.lamassu.", "user.lamassu.Zg", "user.lamassu.###", "lamassu.x"] {
            assert_eq!(parse_xattr_name(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn names_no_file_can_have() {
        let check = |name: &[u8]| check_name(NameMode::Encrypted, name, 64);
        assert_eq!(check(b""), Err(NameError::Empty));
        assert_eq!(check(b"."), Err(NameError::Dot));
        assert_eq!(check(b".."), Err(NameError::Dot));
        assert_eq!(check(b"a/b"), Err(NameError::Character));
        assert_eq!(check(b"a\0"), Err(NameError::Character));
        assert_eq!(check(&[b'a'; 256]), Err(NameError::TooLong { len: 256, max: 255 }));
        assert_eq!(check(&[b'a'; 255]), Ok(()));
        assert_eq!(check(b"lamassu.vault"), Ok(()), "sealed, it collides with nothing");
        assert_eq!(check(b"\xff\xfe\n"), Ok(()));
        let plain = |name: &[u8]| check_name(NameMode::Plain, name, 64);
        assert_eq!(plain(b"lamassu.vault"), Err(NameError::Reserved));
        assert!(!encode(b"any sealed name").contains('.'), "no sealed name is the header's");
        assert_eq!(plain(b"lamassu.anything"), Err(NameError::Reserved));
        assert_eq!(plain(b"lamassu"), Ok(()));
        assert_eq!(plain(&[b'a'; 65]), Err(NameError::TooLong { len: 65, max: 64 }));
    }

    proptest! {
        #[test]
        fn sealed_names_come_back(sealed in prop::collection::vec(any::<u8>(), 17..=271)) {
            let name = encode(&sealed);
            prop_assert_eq!(encoded_len(sealed.len()), name.len());
            prop_assert_eq!(classify(NameMode::Encrypted, name.as_bytes()), Stored::Sealed(sealed));
        }

        /// A name of the format can be made again from what it means: no two stored names mean the same.
        #[test]
        fn classes_are_one_to_one(prefix in 0usize..5, text in "[A-Za-z0-9_.=-]{0,60}") {
            let prefix = ["", "lamassu.", LONG_PREFIX, COMPANION_PREFIX, LINK_PREFIX][prefix];
            let name = format!("{prefix}{text}");
            match classify(NameMode::Encrypted, name.as_bytes()) {
                Stored::Sealed(sealed) => prop_assert_eq!(encode(&sealed), name),
                Stored::Long(hash) => prop_assert_eq!(long_name(&hash), name),
                Stored::Companion(hash) => prop_assert_eq!(companion_name(&hash), name),
                Stored::LinkRest(id) => prop_assert_eq!(link_rest_name(&id), name),
                Stored::Root | Stored::DirRecord | Stored::Foreign => {}
                Stored::Plain => prop_assert!(false),
            }
        }

        #[test]
        fn arbitrary_names_never_panic(name in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = classify(NameMode::Encrypted, &name);
            let _ = classify(NameMode::Plain, &name);
            let _ = parse_xattr_name(&name);
            let _ = check_name(NameMode::Plain, &name, 255);
        }
    }
}
