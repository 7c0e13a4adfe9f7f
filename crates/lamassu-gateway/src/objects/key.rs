//! Keys of objects as paths: the parts between slashes are names of directories, the last one of a file. A key that is
//! not a valid path is refused, never changed into another.

use std::ffi::OsStr;

/// Longest key, bytes, as in S3.
pub const KEY_MAX: usize = 1024;
/// Longest name between two slashes, bytes, as on Linux.
pub const NAME_MAX: usize = 255;
/// Prefix of the gateway's own names, for uploads in progress. Keys may not contain them, listings do not show them.
pub const RESERVED: &str = ".lamassu-";

/// A key that is a valid path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    text: String,
    /// The key ends with a slash: the object is the directory itself, and has no content.
    is_dir: bool,
}

/// Why a key is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyFault {
    /// Empty, or longer than [`KEY_MAX`].
    #[error("a key has 1 to 1024 bytes")]
    Length,
    /// `a//b`, `/a`.
    #[error("a key must not begin with a slash or contain two slashes in a row: its parts are names of directories")]
    EmptyName,
    /// `a/../b`, `./a`.
    #[error("no part of a key is \".\" or \"..\"")]
    Dots,
    /// Longer than [`NAME_MAX`].
    #[error("a part of a key, between two slashes, must not have more than 255 bytes")]
    NameTooLong,
    /// A zero byte, or another character that no XML document can have: a listing could not name the object.
    #[error("a key must not contain a character that XML does not allow, such as most control characters")]
    NotInXml,
    /// [`RESERVED`].
    #[error("no part of a key begins with \".lamassu-\": those are the gateway's own files")]
    Reserved,
}

impl Key {
    /// Parses a key.
    ///
    /// # Errors
    /// [`KeyFault`].
    pub fn parse(text: &str) -> Result<Key, KeyFault> {
        if text.is_empty() || text.len() > KEY_MAX {
            return Err(KeyFault::Length);
        }
        let is_dir = text.ends_with('/');
        let path = text.strip_suffix('/').unwrap_or(text);
        path.split('/').try_for_each(check_name)?;
        Ok(Key { text: text.into(), is_dir })
    }

    /// As given.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether the object is a directory.
    pub fn is_dir(&self) -> bool {
        self.is_dir
    }

    /// Without the slash at its end: the path in a mount.
    pub fn path(&self) -> &str {
        self.text.strip_suffix('/').unwrap_or(&self.text)
    }

    /// Names of the directories above it, starting below the bucket; for a directory, without its own.
    pub fn parents(&self) -> impl DoubleEndedIterator<Item = &OsStr> {
        let above = self.path().rsplit_once('/').map(|(above, _)| above);
        above.into_iter().flat_map(|above| above.split('/')).map(OsStr::new)
    }

    /// The last name.
    pub fn name(&self) -> &OsStr {
        OsStr::new(self.path().rsplit('/').next().unwrap_or_default())
    }
}

fn check_name(name: &str) -> Result<(), KeyFault> {
    match name {
        "" => Err(KeyFault::EmptyName),
        "." | ".." => Err(KeyFault::Dots),
        _ if name.len() > NAME_MAX => Err(KeyFault::NameTooLong),
        _ if !is_in_xml(name) => Err(KeyFault::NotInXml),
        _ if name.starts_with(RESERVED) => Err(KeyFault::Reserved),
        _ => Ok(()),
    }
}

/// Whether an XML document can have this text (XML 1.0, section 2.2).
pub fn is_in_xml(text: &str) -> bool {
    let is_char = |c| matches!(c, '\t' | '\n' | '\r' | ' '..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..);
    text.chars().all(is_char)
}

/// The name if it can be part of a key: readable text that a listing can name, and not the gateway's own.
pub fn shown(name: &OsStr) -> Option<&str> {
    name.to_str().filter(|name| check_name(name).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_paths() {
        let key = Key::parse("a/b c/d.txt").expect("a key");
        assert_eq!(key.parents().collect::<Vec<_>>(), ["a", "b c"]);
        assert_eq!((key.name(), key.is_dir()), (OsStr::new("d.txt"), false));
        let dir = Key::parse("a/b/").expect("a directory");
        assert_eq!(dir.parents().collect::<Vec<_>>(), ["a"]);
        assert_eq!((dir.name(), dir.is_dir(), dir.as_str()), (OsStr::new("b"), true, "a/b/"));
        assert_eq!(Key::parse("x").expect("a key").parents().count(), 0);
    }

    #[test]
    fn what_no_path_can_be_is_refused() {
        for (text, fault) in [
            ("", KeyFault::Length),
            ("/", KeyFault::EmptyName),
            ("/a", KeyFault::EmptyName),
            ("a//b", KeyFault::EmptyName),
            ("a//", KeyFault::EmptyName),
            ("a/../b", KeyFault::Dots),
            ("..", KeyFault::Dots),
            ("./a", KeyFault::Dots),
            ("a\0b", KeyFault::NotInXml),
            ("a/b\u{1}", KeyFault::NotInXml),
            ("\u{fffe}", KeyFault::NotInXml),
            (".lamassu-put-1", KeyFault::Reserved),
            ("a/.lamassu-upload-1/00001", KeyFault::Reserved),
        ] {
            assert_eq!(Key::parse(text), Err(fault), "{text:?}");
        }
        let (name, path) = ("n".repeat(255), "d/".repeat(511) + "ab");
        assert!(Key::parse(&name).is_ok() && Key::parse(&path).is_ok());
        assert_eq!(Key::parse(&(name + "n")), Err(KeyFault::NameTooLong));
        assert_eq!(Key::parse(&(path + "c")), Err(KeyFault::Length));
        assert_eq!(Key::parse("...").map(|key| key.is_dir()), Ok(false));
        assert!(Key::parse("a\tb\n\u{7f}\u{85}\u{fffd}\u{10ffff}").is_ok());
        assert_eq!(shown(OsStr::new("a\u{1b}[1m")), None);
    }
}
