//! What is seen of a vault after a store has changed it.

use super::{B, FILES, Lab, long};
use crate::common::anchored::listed;
use crate::common::{RO, Short};
use lamassu_vault::{Kind, Vault, VaultError, check};
use std::collections::{BTreeMap, BTreeSet};

/// What an application sees.
#[derive(Debug, Default, PartialEq)]
pub struct Seen {
    /// Blocks that read as errors, by path.
    bad: BTreeMap<String, BTreeSet<usize>>,
    /// Paths that give an error, or are not there.
    lost: BTreeSet<String>,
    gone: BTreeSet<String>,
    /// Files that are as they once were; or as another one is.
    older: BTreeSet<String>,
    foreign: BTreeSet<String>,
    /// Links.
    bad_links: BTreeSet<String>,
}

impl Seen {
    pub fn of(lab: &Lab, vault: &Vault) -> Seen {
        let mut seen = Seen::default();
        for path in lab.made.contents.keys() {
            let entry = match vault.find(path) {
                Ok(entry) => entry,
                Err(VaultError::NotFound) => {
                    seen.gone.insert(path.clone());
                    continue;
                }
                Err(VaultError::Damaged { .. } | VaultError::Outdated { .. }) => {
                    seen.lost.insert(path.clone());
                    continue;
                }
                Err(other) => panic!("{path}: {other}"),
            };
            assert_eq!(entry.attr.kind, Kind::File);
            seen.read(lab, vault, path, entry.attr.ino, entry.attr.size);
        }
        for letter in ["l", "m"] {
            let path = format!("link-{letter}");
            match vault.find(&path).and_then(|entry| vault.readlink(entry.attr.ino)) {
                Ok(target) => assert_eq!(target, letter.repeat(3000).into_bytes()),
                Err(VaultError::Damaged { .. } | VaultError::Outdated { .. }) => drop(seen.bad_links.insert(path)),
                Err(other) => panic!("{path}: {other}"),
            }
        }
        seen.listed(vault);
        seen
    }

    /// What is listed is what is there, but for names that do not open.
    fn listed(&mut self, vault: &Vault) {
        let (listed, is_incomplete) = listed(vault, "");
        let is_there = |path: &str| !self.gone.contains(path) && !self.lost.contains(path);
        for path in FILES.iter().filter(|p| !p.contains('/') && is_there(p)) {
            assert!(listed.iter().any(|l| l == path), "{path} is not listed");
        }
        for path in [long("l"), long("m")] {
            if !listed.contains(&path) && !self.gone.contains(&path) {
                self.lost.insert(path);
            }
        }
        assert!(!is_incomplete || !self.lost.is_empty(), "the listing lacks something, and everything is found");
    }

    fn read(&mut self, lab: &Lab, vault: &Vault, path: &str, ino: u64, size: u64) {
        let [old, now] = &lab.made.contents[path];
        let block = |content: &[u8], b: usize| -> Vec<u8> {
            content.get(b * B..content.len().min((b + 1) * B)).unwrap_or_default().to_vec()
        };
        let handle = vault.open_file(ino, RO).unwrap();
        let mut blocks = Vec::new();
        for b in 0..now.len().max(size as usize).div_ceil(B) {
            let mut buf = vec![0; B];
            match vault.read(handle, (b * B) as u64, &mut buf) {
                Ok(got) => {
                    buf.truncate(got);
                    blocks.push(Some(buf));
                }
                Err(VaultError::Store(lamassu_store::StoreError::Damaged(_))) => {
                    self.bad.entry(path.to_owned()).or_default().insert(b);
                    blocks.push(None);
                }
                Err(other) => panic!("{path}, block {b}: {other}"),
            }
        }
        vault.release(handle).unwrap();
        // With its last page the exact size is lost: what lies past the one shown counts as unreadable with the block
        // before it.
        for (b, got) in blocks.iter_mut().enumerate().skip((size as usize).div_ceil(B)) {
            if self.bad.get(path).is_some_and(|bad| bad.contains(&(b - 1))) {
                *got = None;
                self.bad.get_mut(path).unwrap().insert(b);
            }
        }
        let is = |content: &[u8]| {
            content.len().div_ceil(B) <= blocks.len()
                && blocks.iter().enumerate().all(|(b, got)| got.as_ref().is_none_or(|got| *got == block(content, b)))
        };
        if is(now) {
            return;
        }
        if is(old) {
            self.older.insert(path.to_owned());
            return;
        }
        let theirs = |(other, contents): (&String, &[Vec<u8>; 2])| other != path && is(&contents[1]);
        if lab.made.contents.iter().any(theirs) {
            self.foreign.insert(path.to_owned());
            return;
        }
        let strange = |(b, got): &(usize, &Option<Vec<u8>>)| got.as_ref().is_some_and(|got| *got != block(now, *b));
        let strange: Vec<_> =
            blocks.iter().enumerate().filter(strange).map(|(b, got)| (b, got.as_ref().map(Vec::len))).collect();
        assert!(size == 0, "{path} of {size} bytes reads as what was never written there: (block, bytes) {strange:?}");
        self.gone.insert(path.to_owned());
    }

    /// A check finds damage where reads do, and only there.
    pub fn agrees_with(&self, found: &check::Report) {
        let errors = !(self.bad.is_empty() && self.lost.is_empty() && self.bad_links.is_empty());
        if errors {
            assert!(found.is_damaged(), "{self:?}, and a check finds nothing");
        }
        for path in self.bad.keys() {
            assert!(found.problems.iter().any(|p| p.path.as_deref() == Some(path)), "{path}: {:#?}", found.problems);
        }
        for p in found.problems.iter().filter(|p| p.block.is_some()) {
            let (path, first) = (p.path.as_ref().unwrap(), p.block.unwrap() as usize);
            let run = first..first + p.blocks.unwrap_or(1) as usize;
            assert!(self.bad.get(path).is_some_and(|bad| run.clone().all(|b| bad.contains(&b))), "{p:?} reads well");
        }
    }

    /// A repair takes nothing away that could be read, but for what has no name.
    pub fn is_kept(&self, after: &Seen) {
        assert!(after.bad.iter().all(|(path, blocks)| self.bad.get(path).is_some_and(|b| blocks.is_subset(b))));
        assert_eq!(after.older, self.older);
        assert_eq!(after.foreign, self.foreign);
        assert!(after.bad_links.is_subset(&self.bad_links));
        let named = |seen: &Seen| seen.lost.union(&seen.gone).cloned().collect::<BTreeSet<_>>();
        assert!(named(after).is_subset(&named(self)));
    }

    /// Whether anything reads as what it is not, or is not there, without an error that says so.
    pub fn is_silent(&self) -> bool {
        !(self.older.is_empty() && self.foreign.is_empty() && self.gone.is_empty())
    }

    /// In the words of the table.
    pub fn told(&self, found: &check::Report) -> String {
        let kinds: BTreeSet<_> =
            found.problems.iter().filter(|p| !p.harmless).map(|p| format!("`{}`", p.kind)).collect();
        let mut parts = Vec::new();
        for blocks in self.bad.values() {
            parts.push(match blocks.len() {
                1 => "1 block".to_owned(),
                many => format!("{many} blocks"),
            });
        }
        parts.dedup();
        let named = [("names below it", &self.lost), ("names not found", &self.gone), ("target", &self.bad_links)];
        for (what, set) in named {
            if !set.is_empty() && !kinds.is_empty() {
                parts.push(match (what, set.iter().all(|p| !p.contains('/'))) {
                    ("names below it" | "names not found", true) => "its name".to_owned(),
                    _ => what.to_owned(),
                });
            }
        }
        let mut text = kinds.iter().cloned().collect::<Vec<_>>().join(", ");
        if !parts.is_empty() {
            text.push_str(&format!(": {}", parts.join(", ")));
        }
        let silent = [("**older content**", &self.older), ("**the other's content**", &self.foreign)];
        for (what, set) in silent {
            if !set.is_empty() {
                text.push_str(if text.is_empty() { "" } else { "; " });
                text.push_str(what);
            }
        }
        match (text.is_empty(), self.gone.is_empty()) {
            (true, false) => "**gone**".into(),
            (true, true) => "no effect".into(),
            (false, _) => text,
        }
    }
}
