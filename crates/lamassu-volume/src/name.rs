//! Names of volumes and snapshots: names of files in the vault and of exports, safe in paths, URIs and command lines.

use crate::VolumeError;
use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;

/// Most bytes of a volume's name, and of a snapshot's.
const PART_MAX: usize = 100;
/// The separator between the two.
const AT: char = '@';
/// Prefix of files that are being written. No volume has it.
const STAGED: &str = ".new-";

/// A volume, `VOLUME`, or a snapshot of one, `VOLUME@SNAPSHOT`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    volume: String,
    snapshot: Option<String>,
}

impl Name {
    /// The volume, or the one that this is a snapshot of.
    pub fn volume(&self) -> &str {
        &self.volume
    }

    /// Whether it is a snapshot.
    pub fn is_snapshot(&self) -> bool {
        self.snapshot.is_some()
    }

    /// A snapshot of this volume.
    ///
    /// # Errors
    /// [`VolumeError::BadName`], [`VolumeError::IsSnapshot`].
    pub fn at(&self, snapshot: &str) -> Result<Name, VolumeError> {
        match self.is_snapshot() {
            true => Err(VolumeError::IsSnapshot(self.clone())),
            false => Ok(Name { volume: self.volume.clone(), snapshot: Some(part(snapshot)?) }),
        }
    }

    /// The name of its file.
    pub(crate) fn file(&self) -> OsString {
        self.to_string().into()
    }

    /// The name of its file while it is written.
    pub(crate) fn staged(&self) -> OsString {
        format!("{STAGED}{self}").into()
    }

    /// Whether a file name is that of a file being written.
    pub(crate) fn is_staged(file: &str) -> bool {
        file.starts_with(STAGED)
    }
}

fn part(text: &str) -> Result<String, VolumeError> {
    let is_good = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
    let begins_well = text.bytes().next().is_some_and(|c| c.is_ascii_alphanumeric());
    match begins_well && text.len() <= PART_MAX && text.bytes().all(is_good) {
        true => Ok(text.to_owned()),
        false => Err(VolumeError::BadName(text.chars().take(PART_MAX).collect())),
    }
}

impl FromStr for Name {
    type Err = VolumeError;

    fn from_str(text: &str) -> Result<Name, VolumeError> {
        match text.split_once(AT) {
            Some((volume, snapshot)) => Ok(Name { volume: part(volume)?, snapshot: Some(part(snapshot)?) }),
            None => Ok(Name { volume: part(text)?, snapshot: None }),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.snapshot {
            Some(snapshot) => write!(f, "{}{AT}{snapshot}", self.volume),
            None => f.write_str(&self.volume),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_shown() {
        for good in ["a", "vm-1.root", "0", "a_b@2026-11-27", "A@B"] {
            assert_eq!(good.parse::<Name>().unwrap().to_string(), good);
        }
        let snapshot: Name = "a@b".parse().unwrap();
        assert!(snapshot.is_snapshot() && snapshot.at("c").is_err());
        assert_eq!("a".parse::<Name>().unwrap().at("b").unwrap(), snapshot);
    }

    #[test]
    fn what_no_path_export_or_option_should_be_is_refused() {
        for bad in ["", ".", "..", ".new-a", "-a", "a/b", "a b", "a@", "@a", "a@b@c", "ä", "a\n", "a,b", "a=b"] {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
        assert!("a".repeat(PART_MAX).parse::<Name>().is_ok());
        assert!("a".repeat(PART_MAX + 1).parse::<Name>().is_err());
    }
}
