//! Profiles of files and directories of a served vault: shown, and changed while it is used.

use crate::control::protocol::{ChosenProfile, ProfileStarted, ShownProfile};
use crate::job::{Held, Job, Task};
use crate::serve::Served;
use crate::{Error, Result};
use lamassu_format::profile::{Choice, KeyKind, Protection};
use lamassu_format::{Cipher, Hash, Suite};
use lamassu_vault::forest::{Number, volume_of};
use lamassu_vault::{KnownProfile, VaultError};
use std::path::Path;

impl ChosenProfile {
    /// As it travels.
    pub fn of(choice: Choice) -> ChosenProfile {
        ChosenProfile {
            protect: choice.protection.map(|one| one.name().to_owned()),
            block_keys: choice.key.map(|one| one.name().to_owned()),
            cipher: choice.cipher.map(|one| one.name().to_owned()),
            hash: choice.hash.map(|one| one.name().to_owned()),
        }
    }

    /// What was chosen.
    pub(crate) fn read(&self) -> Result<Choice> {
        fn named<T>(word: Option<&String>, of: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
            word.map(|word| of(word).ok_or(Error::GarbledRequest)).transpose()
        }
        Ok(Choice {
            protection: named(self.protect.as_ref(), Protection::from_name)?,
            key: named(self.block_keys.as_ref(), KeyKind::from_name)?,
            cipher: named(self.cipher.as_ref(), Cipher::from_name)?,
            hash: named(self.hash.as_ref(), Hash::from_name)?,
        })
    }
}

impl Held {
    fn profile(&self) -> Result<KnownProfile> {
        match self.vault.profile(self.local()) {
            Err(VaultError::Invalid) => Err(Error::Usage("only files and directories have profiles")),
            other => Ok(other?),
        }
    }
}

impl ShownProfile {
    /// That of a file, or of what is made in a directory, in a vault of a suite.
    pub fn of(known: KnownProfile, suite: Suite) -> ShownProfile {
        let KnownProfile { profile, is_changing } = known;
        let (method, is_plain) = (profile.method(), profile.protection().is_plain());
        ShownProfile {
            protect: profile.protection().name().into(),
            block_keys: (!is_plain).then(|| profile.key().name().into()),
            cipher: (!is_plain).then(|| method.cipher(suite).name().into()),
            hash: method.hash(suite).name().into(),
            changing: is_changing,
        }
    }
}

impl Served {
    /// The profile at a plain path below the root of a volume.
    ///
    /// # Errors
    /// Those of resolving and opening it.
    pub fn profile(&self, volume: Number, path: &Path) -> Result<ShownProfile> {
        let held = Held::at(self.forest(), volume, path)?;
        Ok(ShownProfile::of(held.profile()?, held.vault.ring().suite()))
    }

    /// Begins to change the profile at a plain path below the root of a volume, unless the same is under way there.
    ///
    /// # Errors
    /// [`Error::Profile`]; [`Error::JobUnderWay`]; those of resolving it.
    pub fn set_profile(&self, volume: Number, path: &Path, choice: Choice, below: bool) -> Result<ProfileStarted> {
        self.may_begin_job()?;
        let held = Held::at(self.forest(), volume, path)?;
        let suite = held.vault.ring().suite();
        let named = choice.over(held.profile()?.profile, suite)?.named(suite).to_string();
        let volume = volume_of(held.ino);
        let task = Task::Profile { ino: held.ino, choice, below };
        let mut jobs = self.jobs();
        if let Some(job) = jobs.under_way(volume, task)? {
            return Ok(ProfileStarted { job, profile: named });
        }
        let pass_over = |job: &Job, stored: &Path| {
            job.pass_over(&format!("{} is a dataset", stored.display()));
            Ok(())
        };
        let work = move |job: &Job| Ok(held.vault.set_profile(held.local(), choice, below, job)?);
        let started = Job::start(task, Box::new(pass_over), work)?;
        Ok(ProfileStarted { job: jobs.add(volume, started), profile: named })
    }
}
