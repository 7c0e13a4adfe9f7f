//! Profiles of files and directories of a served vault: shown, and changed while it is used.

use crate::control::protocol::{ChosenProfile, ProfileStarted, ShownProfile};
use crate::job::{Held, Job, Task};
use crate::serve::Served;
use crate::{Error, Result, turns, walks};
use lamassu_format::profile::{Choice, KeyKind, Protection};
use lamassu_format::{Cipher, Hash, Suite};
use lamassu_vault::forest::{Number, local, member_of};
use lamassu_vault::turns::Need;
use lamassu_vault::{KnownProfile, Rekeyed, VaultError};
use std::path::Path;

/// The work of a job.
type Work = Box<dyn FnOnce(&Job) -> Result<Rekeyed> + Send>;

impl ChosenProfile {
    /// The form in requests.
    pub fn of(choice: Choice) -> ChosenProfile {
        ChosenProfile {
            protect: choice.protection.map(|one| one.name().to_owned()),
            block_keys: choice.key.map(|one| one.name().to_owned()),
            cipher: choice.cipher.map(|one| one.name().to_owned()),
            hash: choice.hash.map(|one| one.name().to_owned()),
        }
    }

    /// Parses the choice.
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
    /// The profile of a file, or of new files in a directory, in a vault of a suite.
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
    /// The profile at a plain path below the root of a member.
    ///
    /// # Errors
    /// Those of resolving and opening it.
    pub fn profile(&self, member: Number, path: &Path) -> Result<ShownProfile> {
        let _turns = turns::hold_along(self.forest(), member, path, Need::LOOK)?;
        let held = Held::at(self.forest(), member, path)?;
        Ok(ShownProfile::of(held.profile()?, held.vault.ring().suite()))
    }

    /// Begins to change the profile at a plain path below the root of a member, unless the same is under way there.
    ///
    /// # Errors
    /// [`Error::Profile`]; [`Error::JobUnderWay`]; that of a server's policy; those of resolving the path.
    pub fn set_profile(&self, member: Number, path: &Path, choice: Choice, below: bool) -> Result<ProfileStarted> {
        self.may_begin_job()?;
        let turns = turns::hold_along(self.forest(), member, path, Need::LOOK)?;
        let held = Held::at(self.forest(), member, path)?;
        let suite = held.vault.ring().suite();
        let named = choice.over(held.profile()?.profile, suite)?.named(suite).to_string();
        held.vault.may_have(held.local(), choice)?;
        let member = member_of(held.ino);
        let task = Task::Profile { ino: held.ino, choice, below };
        let mut jobs = self.jobs();
        if let Some(job) = jobs.under_way(member, task)? {
            return Ok(ProfileStarted { job, profile: named });
        }
        let pass_over = |job: &Job, stored: &Path| {
            job.pass_over(&format!("{} is a dataset", stored.display()));
            Ok(())
        };
        let work: Work = match self.hosts_take_turns() {
            false => Box::new(move |job| Ok(held.vault.set_profile(held.local(), choice, below, job)?)),
            // A vault that is open for a turn is not kept: the reference names what is to be changed.
            true => {
                let entry = held.into_entry();
                Box::new(move |job| {
                    walks::in_turns((entry.fs(), member), None, job, |vault, walk| {
                        Ok(vault.set_profile_in_turn(local(entry.ino()), choice, below, walk)?)
                    })
                })
            }
        };
        drop(turns);
        let started = Job::start(task, Box::new(pass_over), work)?;
        Ok(ProfileStarted { job: jobs.add(member, started), profile: named })
    }
}
