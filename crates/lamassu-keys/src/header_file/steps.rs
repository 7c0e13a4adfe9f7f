//! The order of writes when a header is replaced, which must be safe against a crash at any point, separate from the
//! code that carries them out.
//!
//! Invariant: after a crash at any moment, the header's name leads to the complete old header or the complete new one.
//! The data is durable before the name can lead to it, and the name is durable before the change is reported.
//!
//! If the old header must be erased, some name leads to it until it is overwritten: it durably gets a second name
//! before it loses the first.

/// The steps of replacing a file. `Update` carries them out on a file system; a model in the tests crashes between any
/// two of them.
pub(super) trait Steps {
    type Error;
    /// Empties the new file: a program that died may have left something in it.
    fn truncate(&mut self) -> Result<(), Self::Error>;
    /// Fills the new file.
    fn write(&mut self, bytes: &[u8]) -> Result<(), Self::Error>;
    /// Makes the new file's content durable.
    fn sync(&mut self) -> Result<(), Self::Error>;
    /// Gives the old file a second name.
    fn keep(&mut self) -> Result<(), Self::Error>;
    /// Renames the new file over the old one.
    fn rename(&mut self) -> Result<(), Self::Error>;
    /// Makes the name durable.
    fn sync_dir(&mut self) -> Result<(), Self::Error>;
}

/// Replaces the file by `bytes`.
pub(super) fn replace<S: Steps>(steps: &mut S, bytes: &[u8]) -> Result<(), S::Error> {
    steps.truncate()?;
    steps.write(bytes)?;
    steps.sync()?;
    steps.rename()?;
    steps.sync_dir()
}

/// Replaces the file by `bytes`; the old one stays under its second name.
pub(super) fn replace_keeping<S: Steps>(steps: &mut S, bytes: &[u8]) -> Result<(), S::Error> {
    steps.truncate()?;
    steps.write(bytes)?;
    steps.sync()?;
    steps.keep()?;
    steps.sync_dir()?;
    steps.rename()?;
    steps.sync_dir()
}

/// The steps of erasing a file.
pub(super) trait Erasing {
    type Error;
    /// Overwrites it with noise.
    fn overwrite(&mut self) -> Result<(), Self::Error>;
    /// Makes the content durable.
    fn sync(&mut self) -> Result<(), Self::Error>;
    /// Frees its blocks.
    fn punch(&mut self) -> Result<(), Self::Error>;
    /// Removes its name.
    fn remove(&mut self) -> Result<(), Self::Error>;
    /// Makes the removal durable.
    fn sync_dir(&mut self) -> Result<(), Self::Error>;
}

/// Erases a file. Its blocks are freed, and its name is removed, only after they hold noise.
pub(super) fn erase<S: Erasing>(steps: &mut S) -> Result<(), S::Error> {
    steps.overwrite()?;
    steps.sync()?;
    steps.punch()?;
    steps.remove()?;
    steps.sync_dir()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Argon2Params, Material, NewSlot, NewZone, create_zone, unlock};
    use lamassu_crypto::SecretBytes;
    use lamassu_format::Suite;
    use lamassu_format::header::{Header, SlotKind, ZoneFile};

    /// A file system as POSIX allows it to be after a power cut. Content that was not synced may be there, be missing,
    /// be cut short or be zeros; so may any rename that no sync of the directory covers, whether or not the content
    /// under the new name is there.
    struct Disk {
        /// Contents the new file can have after a crash; the last is what the program sees.
        new: Vec<Vec<u8>>,
        /// What the name can lead to: the old content, or the new file.
        names: Vec<Name>,
        /// Whether a second name leads to the old content.
        kept: Vec<bool>,
        old: Vec<u8>,
        steps: usize,
        /// Power fails before this step.
        dies_before: usize,
    }

    #[derive(Clone, Copy, PartialEq)]
    enum Name {
        Old,
        New,
    }

    #[derive(Debug)]
    struct PowerCut;

    impl Disk {
        fn new(old: &[u8], dies_before: usize) -> Disk {
            // The new file may hold what an earlier crash left.
            Disk {
                new: vec![b"rubbish".to_vec()],
                names: vec![Name::Old],
                kept: vec![false],
                old: old.to_vec(),
                steps: 0,
                dies_before,
            }
        }

        /// Whether the old content can lie somewhere without a name, where it cannot be overwritten.
        fn can_lose_the_old(&self) -> bool {
            self.names.contains(&Name::New) && self.kept.contains(&false)
        }

        fn step(&mut self) -> Result<(), PowerCut> {
            self.steps += 1;
            if self.steps > self.dies_before { Err(PowerCut) } else { Ok(()) }
        }

        /// Every content the header's name can have after the crash.
        fn after(&self) -> Vec<&[u8]> {
            let mut found: Vec<&[u8]> = Vec::new();
            for name in &self.names {
                match name {
                    Name::Old => found.push(&self.old),
                    Name::New => found.extend(self.new.iter().map(Vec::as_slice)),
                }
            }
            found
        }
    }

    impl Steps for Disk {
        type Error = PowerCut;

        fn truncate(&mut self) -> Result<(), PowerCut> {
            self.step()?;
            self.new.push(Vec::new());
            Ok(())
        }

        fn write(&mut self, bytes: &[u8]) -> Result<(), PowerCut> {
            // A write cut short by the crash itself, at each byte's end, comes before it is done.
            let start = self.new.last().cloned().unwrap_or_default();
            for len in 0..bytes.len() {
                self.new.push([&start[..], &bytes[..len]].concat());
            }
            self.new.push(vec![0; start.len() + bytes.len()]);
            self.step()?;
            self.new.push([&start[..], bytes].concat());
            Ok(())
        }

        fn sync(&mut self) -> Result<(), PowerCut> {
            self.step()?;
            self.new.drain(..self.new.len() - 1);
            Ok(())
        }

        fn keep(&mut self) -> Result<(), PowerCut> {
            self.kept.push(true);
            self.step()
        }

        fn rename(&mut self) -> Result<(), PowerCut> {
            // It may be durable before it returns.
            self.names.push(Name::New);
            self.step()
        }

        fn sync_dir(&mut self) -> Result<(), PowerCut> {
            self.step()?;
            self.names.drain(..self.names.len() - 1);
            self.kept.drain(..self.kept.len() - 1);
            Ok(())
        }
    }

    fn raw(byte: u8) -> Material {
        Material::new(SlotKind::Raw, SecretBytes::new(vec![byte; 32])).unwrap()
    }

    fn slot(material: &Material) -> NewSlot<'_> {
        NewSlot { material, cost: Argon2Params::new(64, 1, 2).unwrap(), label: "", created: 0 }
    }

    /// A header that key 1 opens, and the same after a change to key 2.
    fn headers() -> (Vec<u8>, Vec<u8>) {
        let new = NewZone { suite: Suite::Aes, block_size: 4096, compression: None, outer: true, created: 0 };
        let (mut header, keys) = create_zone(&new, &slot(&raw(1))).unwrap();
        let old = header.to_json().unwrap();
        let _removed = keys.change_slot(&mut header, 1, &slot(&raw(2))).unwrap();
        (old, header.to_json().unwrap())
    }

    /// Whether a content is a header that exactly one of the two keys opens; which.
    fn opened_by(bytes: &[u8]) -> Option<u8> {
        let header = ZoneFile::parse(bytes).ok()?;
        let opens: Vec<u8> = [1, 2].into_iter().filter(|key| unlock(&header, &raw(*key)).is_ok()).collect();
        match opens[..] {
            [key] => Some(key),
            _ => None,
        }
    }

    #[test]
    fn a_crash_at_any_write_leaves_the_old_key_or_the_new_one() {
        let (old, new) = headers();
        for dies_before in 0..=5 {
            let mut disk = Disk::new(&old, dies_before);
            let done = replace(&mut disk, &new);
            assert_eq!(done.is_ok(), dies_before == 5);
            let found: Vec<_> = disk.after().into_iter().map(|bytes| opened_by(bytes).unwrap()).collect();
            match done {
                Ok(()) => assert_eq!(found, [2], "a change that was reported is there"),
                Err(PowerCut) => assert!(found.contains(&1) || found == [2], "{dies_before}: {found:?}"),
            }
        }
    }

    /// The model is not too kind: without either sync it finds a header that does not open, or a change that was
    /// reported and is lost.
    #[test]
    fn the_model_finds_a_missing_sync() {
        let (old, new) = headers();
        let mut disk = Disk::new(&old, 9);
        disk.truncate().and_then(|()| disk.write(&new)).and_then(|()| disk.rename()).unwrap();
        disk.sync_dir().unwrap();
        assert!(disk.after().into_iter().any(|bytes| opened_by(bytes).is_none()));

        let mut disk = Disk::new(&old, 9);
        disk.truncate()
            .and_then(|()| disk.write(&new))
            .and_then(|()| disk.sync())
            .and_then(|()| disk.rename())
            .unwrap();
        assert!(disk.after().into_iter().any(|bytes| opened_by(bytes) == Some(1)));
    }

    #[test]
    fn what_is_kept_has_a_name_at_every_moment() {
        let (old, new) = headers();
        for dies_before in 0..=7 {
            let mut disk = Disk::new(&old, dies_before);
            let done = replace_keeping(&mut disk, &new);
            assert_eq!(done.is_ok(), dies_before == 7);
            assert!(disk.after().into_iter().all(|bytes| opened_by(bytes).is_some()), "{dies_before}");
            assert!(!disk.can_lose_the_old(), "{dies_before}");
        }
        // The model is not too kind.
        let mut disk = Disk::new(&old, 9);
        disk.truncate().and_then(|()| disk.write(&new)).and_then(|()| disk.sync()).unwrap();
        disk.keep().and_then(|()| disk.rename()).unwrap();
        assert!(disk.can_lose_the_old());
    }

    /// A file that is erased: whether its blocks can still hold keys, and whether they can have been given up.
    struct Block {
        holds_keys: Vec<bool>,
        given_up: Vec<bool>,
        steps: usize,
        dies_before: usize,
    }

    impl Block {
        fn new(dies_before: usize) -> Block {
            Block { holds_keys: vec![true], given_up: vec![false], steps: 0, dies_before }
        }

        fn step(&mut self) -> Result<(), PowerCut> {
            self.steps += 1;
            if self.steps > self.dies_before { Err(PowerCut) } else { Ok(()) }
        }

        fn can_lose_keys(&self) -> bool {
            self.holds_keys.contains(&true) && self.given_up.contains(&true)
        }
    }

    impl Erasing for Block {
        type Error = PowerCut;

        fn overwrite(&mut self) -> Result<(), PowerCut> {
            self.holds_keys.push(false);
            self.step()
        }

        fn sync(&mut self) -> Result<(), PowerCut> {
            self.step()?;
            self.holds_keys.drain(..self.holds_keys.len() - 1);
            Ok(())
        }

        fn punch(&mut self) -> Result<(), PowerCut> {
            self.given_up.push(true);
            self.step()
        }

        fn remove(&mut self) -> Result<(), PowerCut> {
            self.given_up.push(true);
            self.step()
        }

        fn sync_dir(&mut self) -> Result<(), PowerCut> {
            self.step()
        }
    }

    #[test]
    fn nothing_is_given_up_before_it_is_overwritten() {
        for dies_before in 0..=5 {
            let mut block = Block::new(dies_before);
            assert_eq!(erase(&mut block).is_ok(), dies_before == 5);
            assert!(!block.can_lose_keys(), "{dies_before}");
        }
        let mut block = Block::new(9);
        block.overwrite().and_then(|()| block.remove()).unwrap();
        assert!(block.can_lose_keys(), "the model finds a missing sync");
    }
}
