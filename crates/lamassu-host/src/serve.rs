//! A [`Served`] for each vault that a process has open, with the datasets in it: slots, epochs and re-keying. It keeps
//! the file keys, so slots can be changed without the old key. Each change of a header takes the header's lock, reads
//! the header again, and is recorded in the history with the user who asked for it.

use crate::control::counters::{Counted, Counters, FrontEnd};
use crate::control::parcel::Channels;
use crate::control::protocol::{Caller, Changed, Epochs, Parcel, Status, ZoneParcel, pid_namespace};
use crate::job::{self, Asked, Job, Jobs, Task};
use crate::keeper::{Keeper, TurnOpening};
use crate::open::{Opened, Unsealed};
use crate::rotation::{epochs, rotate};
use crate::slots::{self, Replacement, check_label, reseal_parent_slot};
use crate::turns;
use crate::{Error, Place, Policy, Result, walks};
use lamassu_format::header::{Header, VaultHeader, ZoneFile};
use lamassu_format::name;
use lamassu_keys::{Event, KeyError, NewSlot, Role, Terms, Tier, Unlocked, Update, header_file, unix_now};
use lamassu_vault::forest::{Number, ROOT_MEMBER, root_of};
use lamassu_vault::turns::Need;
use lamassu_vault::{Forest, Options, VaultError};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

impl Unsealed {
    /// Opens the tree, and later each dataset in it when it is entered.
    ///
    /// # Errors
    /// As [`Unsealed::open`].
    pub fn open_forest(mut self, options: Options) -> Result<Arc<Served>> {
        let opened = self.open_to_serve(options.clone(), false)?;
        let dir = self.found.dir.canonicalize().unwrap_or_else(|_| self.found.dir.clone());
        let keeper = Keeper::new(Place::of(&dir)?, options, true, None, self.policy.clone());
        Served::new(self, opened, keeper)
    }
}

/// The open vaults of this process, with the keys that opened them.
pub struct Served {
    forest: Arc<Forest>,
    keeper: Arc<Keeper>,
    read_only: bool,
    channels: Channels,
    counters: Arc<Counters>,
    front_end: OnceLock<Arc<dyn FrontEnd>>,
    jobs: Mutex<Jobs>,
    /// Read before the process loses access to /proc.
    pid_namespace: Option<u64>,
}

impl Served {
    /// Serves `vault` and the datasets in it, with the keys that opened it. `keeper` belongs to the same directory.
    pub fn new(unsealed: Unsealed, opened: Opened, keeper: Arc<Keeper>) -> Result<Arc<Served>> {
        let Unsealed { found, keys, policy: _ } = unsealed;
        keeper.require_store(&*opened.backend)?;
        let (id, read_only) = (found.header.id(), opened.read_only);
        let opening = keeper.opening(ROOT_MEMBER, None, found.header, keys)?;
        let forest = Forest::new(opened.vault, opened.backend, id, opening.cached, keeper.clone())?;
        keeper.serve(&forest);
        let counters = keeper.counters().clone();
        Ok(Arc::new(Served {
            forest,
            keeper,
            read_only,
            channels: Channels::default(),
            counters,
            front_end: OnceLock::new(),
            jobs: Mutex::default(),
            pid_namespace: pid_namespace(),
        }))
    }

    /// Starts driving this host's turns; the vault was opened in the first one. Called before mounting: the mount must
    /// stop the turns ([`lamassu_vault::turns::Turns::stop`]).
    ///
    /// # Errors
    /// [`Error::NotAtServer`]; the error of a thread that cannot be started.
    pub fn take_turns(&self, opening: TurnOpening) -> Result<()> {
        self.keeper.forget_anchor(ROOT_MEMBER);
        turns::start(&self.forest, opening, &self.keeper)
    }

    /// Whether the vault is used by turns.
    pub(crate) fn hosts_take_turns(&self) -> bool {
        self.forest.hosts_take_turns()
    }

    /// The file system of all these vaults.
    pub fn forest(&self) -> &Arc<Forest> {
        &self.forest
    }

    /// The keys of these vaults.
    pub fn keeper(&self) -> &Arc<Keeper> {
        &self.keeper
    }

    /// The policy under which vaults are opened.
    pub(crate) fn policy(&self) -> &Policy {
        self.keeper.policy()
    }

    /// Sets the front-end whose counters a status shows, in addition to this crate's; once.
    pub fn counts_of(&self, front_end: Arc<dyn FrontEnd>) {
        // A process has one front-end: a second call has no effect.
        let _ = self.front_end.set(front_end);
    }

    pub(crate) fn channels(&self) -> &Channels {
        &self.channels
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether the vaults are read-only.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The status of a member.
    ///
    /// # Errors
    /// Those of a missing member.
    pub fn status(&self, member: Number) -> Result<Status> {
        // Where a dataset is that is not in use says the vault around it.
        let _turn = match self.keeper.dir(member) {
            Err(VaultError::KeyNotLoaded) => turns::hold_shown_soon(&self.forest, root_of(member), Need::LOOK),
            _ => None,
        };
        Ok(Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            pid_namespace: self.pid_namespace,
            vault: self.forest.member(member)?.id.to_string(),
            dir: self.keeper.dir(member)?.to_string_lossy().into_owned(),
            read_only: self.read_only,
            open_files: self.forest.open_files(member),
            operations: self.operations(),
            integrity: self.keeper.events().counts(),
        })
    }

    fn operations(&self) -> Vec<Counted> {
        let front_end = self.front_end.get().map(|f| f.counted());
        self.counters.counted().into_iter().chain(front_end.into_iter().flatten()).collect()
    }

    /// Writes everything to the store, in all open vaults. What fails stays in memory, and is tried again, except for
    /// what damage makes impossible.
    pub(crate) fn sync(&self) -> Result<()> {
        Ok(self.forest.sync_all()?)
    }

    /// Changes the header of a member, and passes the resulting keys to the open vault.
    pub fn change<T>(
        &self,
        caller: &Caller,
        member: Number,
        change: impl FnOnce(&mut Unlocked, &mut VaultHeader) -> Result<(T, Event)>,
    ) -> Result<T> {
        self.changed(member, |keys, header| {
            change(keys, header).map(|(done, event)| (done, vec![event.by(caller.uid)]))
        })
    }

    /// The same for a change that is not recorded in the history.
    pub fn change_without_event<T>(
        &self,
        member: Number,
        change: impl FnOnce(&mut Unlocked, &mut VaultHeader) -> Result<T>,
    ) -> Result<T> {
        self.changed(member, |keys, header| Ok((change(keys, header)?, Vec::new())))
    }

    fn changed<T>(
        &self,
        member: Number,
        change: impl FnOnce(&mut Unlocked, &mut VaultHeader) -> Result<(T, Vec<Event>)>,
    ) -> Result<T> {
        if self.read_only {
            return Err(Error::ReadOnlyMount);
        }
        // Before the locks below, which the beginning of a turn takes, too. Other hosts see the change in their next
        // turn.
        self.refuse_frozen()?;
        let _turn = turns::hold(&self.forest, root_of(member), Need::CHANGE);
        let _unfrozen = self.forest.unfrozen().map_err(|_| Error::Frozen)?;
        let id = self.forest.member(member)?.id;
        self.keeper.alone_with(id, || self.changed_alone(member, change))
    }

    fn changed_alone<T>(
        &self,
        member: Number,
        change: impl FnOnce(&mut Unlocked, &mut VaultHeader) -> Result<(T, Vec<Event>)>,
    ) -> Result<T> {
        let vault = self.forest.vault(member).ok_or_else(|| turns::why_away(&self.forest, member, Error::NoTurn))?;
        let place = self.keeper.place(member)?;
        let mut all = self.keeper.kept();
        let keys = &mut all.get_mut(&member).ok_or(VaultError::KeyNotLoaded)?.keys;
        let update = Update::begin(&place.file(name::HEADER), &self.policy().witness())?;
        let mut header: VaultHeader = update.read()?;
        let mut now = keys.reopen(&header)?;
        let (done, events) = change(&mut now, &mut header)?;
        self.keeper.can_use(&now, keys)?;
        update.record(&mut header, &now, &events)?;
        now.saw(&header);
        now.update_ring(vault.ring());
        *keys = now;
        Ok(done)
    }

    pub(crate) fn add_slot(
        &self,
        caller: &Caller,
        member: Number,
        secret: &Parcel,
        label: &str,
        terms: Terms,
    ) -> Result<u32> {
        check_label(label)?;
        let (material, cost) = self.channels.unpack(self.policy(), caller.uid, secret)?;
        let new = NewSlot { material: &material, cost, label, created: unix_now() };
        self.change(caller, member, |keys, header| slots::add(keys, header, &new, terms))
    }

    pub(crate) fn change_slot(
        &self,
        caller: &Caller,
        member: Number,
        secret: &Parcel,
        slot: u32,
        label: Option<String>,
        (role, expires): (Option<Role>, Option<u64>),
    ) -> Result<Changed> {
        label.as_deref().map_or(Ok(()), check_label)?;
        let (material, cost) = self.channels.unpack(self.policy(), caller.uid, secret)?;
        let new = Replacement { material: &material, cost, label: label.as_deref(), role, expires };
        self.change(caller, member, |keys, header| {
            let (id, removed, event) = slots::replace(keys, header, slot, &new)?;
            Ok((Changed { id, removed: removed.to_string() }, event))
        })
    }

    pub(crate) fn rotate(
        &self,
        caller: &Caller,
        member: Number,
        tier: Tier,
        leave_zone: bool,
        zone: Option<ZoneParcel>,
    ) -> Result<Epochs> {
        let zone = match zone {
            Some(ZoneParcel { file, secret }) => {
                let (material, _) = self.channels.unpack(self.policy(), caller.uid, &secret)?;
                let file = ZoneFile::parse(file.as_bytes()).map_err(KeyError::from)?;
                let keys = self.policy().try_slots(&file, &material, None)?;
                Some((file, keys))
            }
            None => None,
        };
        self.change(caller, member, |keys, header| {
            let event = rotate(keys, header, tier, leave_zone, zone.as_ref())?;
            Ok((epochs(keys.keychain()), event))
        })
    }

    pub(crate) fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A job, by its number.
    ///
    /// # Errors
    /// [`Error::NoJob`].
    pub fn job(&self, number: u64) -> Result<Arc<Job>> {
        self.jobs().get(number)
    }

    /// Refuses what would only wait for the thaw: in turns, changes do.
    pub(crate) fn refuse_frozen(&self) -> Result<()> {
        if self.forest.is_frozen() || self.forest.is_freezing() { Err(Error::Frozen) } else { Ok(()) }
    }

    /// Checks that a job may write.
    pub(crate) fn may_begin_job(&self) -> Result<()> {
        match () {
            () if self.read_only => Err(Error::ReadOnlyMount),
            () if self.forest.is_frozen() => Err(Error::Frozen),
            () => Ok(()),
        }
    }

    /// Begins to re-key a member, unless the same job is under way. `full`: also data; `bytes_per_second`: limit for
    /// files. Returns the job's number.
    ///
    /// # Errors
    /// [`Error::JobUnderWay`]; those of the member.
    pub fn rekey(&self, member: Number, (full, bytes_per_second): (bool, Option<u64>), uid: u32) -> Result<u64> {
        self.may_begin_job()?;
        let task = Task::Rekey { full, bytes_per_second };
        let mut jobs = self.jobs();
        if let Some(number) = jobs.under_way(member, task)? {
            return Ok(number);
        }
        // The dataset's present directory: it may have been moved. No keys are kept here: they go with the vault.
        let (keeper, forest) = (self.keeper.clone(), self.forest.clone());
        let reseal = move |_: &Job, stored: &Path| {
            let above = keeper.vault(member)?;
            // The vault around it is held already.
            let turn = turns::hold_stored(&forest, (member, &above), stored, Need::CHANGE)?;
            if turn.is_none() && forest.hosts_take_turns() {
                let why = "this dataset is not loaded here: `lamassu key load` it, and run `rekey` again";
                return Err(VaultError::Refused(why).into());
            }
            let place = keeper.place(member)?.below(stored)?;
            let id = header_file::read::<VaultHeader>(&place.file(name::HEADER))?.id();
            let reseal = || reseal_parent_slot((&place, id), above.ring(), uid, &keeper.policy().witness());
            keeper.alone_with(id, reseal)
        };
        let asked = Asked { full, bytes_per_second, uid };
        let keeper = self.keeper.clone();
        let history = move || -> Result<_> {
            let place = keeper.place(member)?;
            let header: VaultHeader = header_file::read(&place.file(name::HEADER))?;
            let kept = keeper.kept();
            let keys = &kept.get(&member).ok_or(VaultError::KeyNotLoaded)?.keys;
            Ok((keys.history(&place.path(), &header)?, place))
        };
        let started = match self.hosts_take_turns() {
            true => {
                let forest = self.forest.clone();
                let work = move |job: &Job| walks::rekey_in_turns(job, (&forest, member), history, asked);
                Job::start(task, Box::new(reseal), work)?
            }
            false => {
                let vault = self.forest.vault(member).ok_or(VaultError::KeyNotLoaded)?;
                let history = history()?;
                let work = move |job: &Job| job::rekey(job, &vault, history, asked);
                Job::start(task, Box::new(reseal), work)?
            }
        };
        Ok(jobs.add(member, started))
    }

    /// Ends the jobs in a member and in those below it, which are about to be closed.
    pub fn end_jobs(&self, member: Number) {
        self.jobs().of(|number| self.forest.is_below(number, member)).for_each(|job| job.cancel());
    }
}
