//! Datasets of a served vault: made, listed, changed, destroyed, unloaded and loaded. A command that opens a vault
//! itself uses the same code in its own process.

mod load;

use crate::compression::{self, Chosen};
use crate::control::protocol::{Caller, DatasetSpec, Datasets, Listed, MESSAGE_LEN_MAX, Parcel, Properties, Unseen};
use crate::error::At;
use crate::serve::Served;
use crate::{Error, Result, hex, turns};
use lamassu_format::header::{Caching, Header, NameMode, VaultHeader, Verified};
use lamassu_format::{Domain, Geometry, Suite, name};
use lamassu_keys::dataset::inherits;
use lamassu_keys::history::EventKind;
use lamassu_keys::{Argon2Params, Event, Material, NewDataset, NewSlot, Update, create_dataset, unix_now};
use lamassu_vault::forest::{Number, ROOT_MEMBER, State, local, member_of, root_of};
use lamassu_vault::turns::Need;
use lamassu_vault::{EntryRef, FileSystem, Forest, Ino, Owner, Vault, VaultError};
use serde::Serialize;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Key material for a dataset of its own, and the cost of a passphrase.
pub type Own = (Material, Argon2Params);

/// The root of a dataset.
type Root = EntryRef<Arc<Forest>>;

/// Bytes of an answer for a list; the client asks for the rest.
const LIST_LEN_MAX: usize = 12 << 10;
/// Bytes of an answer for places that could not be read. They are counted, and as many as fit are listed.
const UNSEEN_LEN_MAX: usize = 3 << 10;
/// Characters of each.
const UNSEEN_CHARS_MAX: usize = 150;
// The rest of a message is for the surrounding members.
const _: () = assert!(LIST_LEN_MAX + UNSEEN_LEN_MAX + 512 <= MESSAGE_LEN_MAX);

impl Datasets {
    fn not_seen(&mut self, shown: &Path, error: &dyn std::error::Error) {
        let cut = |text: String| text.chars().take(UNSEEN_CHARS_MAX).collect();
        self.unseen_count += 1;
        self.unseen.push(Unseen { path: cut(shown.display().to_string()), text: cut(error.to_string()) });
    }

    /// The datasets after `after`, as many as fit into an answer. A single one that does not fit is an error of the
    /// sender.
    fn page(self, after: Option<&str>) -> Result<Datasets> {
        let mut out = Datasets { unseen_count: self.unseen_count, ..Datasets::default() };
        let mut len = 0;
        for unseen in self.unseen {
            len += json_len(&unseen)? + 1;
            if len > UNSEEN_LEN_MAX {
                break;
            }
            out.unseen.push(unseen);
        }
        let mut len = 0;
        for listed in self.datasets.into_iter().filter(|l| after.is_none_or(|after| l.path.as_str() > after)) {
            len += json_len(&listed)? + 1;
            if len > LIST_LEN_MAX && !out.datasets.is_empty() {
                out.more = true;
                break;
            }
            out.datasets.push(listed);
        }
        Ok(out)
    }
}

/// The length as JSON.
fn json_len(value: &impl Serialize) -> Result<usize> {
    serde_json::to_vec(value).map(|bytes| bytes.len()).map_err(|source| Error::Unanswerable { source })
}

impl Served {
    /// Refuses callers other than root, the user who mounted, and the directory's owner.
    ///
    /// With turns it may take one: the caller has none.
    fn may_work_in(&self, caller: &Caller, dir: Ino) -> Result<()> {
        if caller.is_owner {
            return Ok(());
        }
        let _turn = turns::hold_shown(self.forest(), dir, Need::LOOK);
        if self.forest().getattr(dir, None)?.uid == caller.uid { Ok(()) } else { Err(Error::NotPermitted) }
    }

    /// Whether a caller may make entries in a directory, as the kernel would decide.
    fn may_add(&self, caller: &Caller, dir: Ino) -> Result<()> {
        let vault = self.forest().vault(member_of(dir)).ok_or(VaultError::KeyNotLoaded)?;
        let may = || vault.may_add(local(dir), caller.uid, &|group| caller.groups.contains(&group));
        if caller.is_owner || may()? { Ok(()) } else { Err(Error::NotWritable) }
    }

    /// Opens a parcel, if there is one. A delegate may not bring keys.
    pub(crate) fn brought(&self, caller: &Caller, parcel: Option<&Parcel>) -> Result<Option<Own>> {
        match parcel {
            Some(_) if !caller.is_owner => Err(Error::NotPermitted),
            Some(parcel) => self.channels().unpack(self.policy(), caller.uid, parcel).map(Some),
            None => Ok(None),
        }
    }

    /// The member of which a directory is the root.
    ///
    /// # Errors
    /// [`Error::NotADataset`].
    pub fn member(&self, dir: Ino) -> Result<Number> {
        match self.forest().is_root(dir) {
            true => Ok(member_of(dir)),
            false => Err(Error::NotADataset),
        }
    }

    /// Makes a dataset. A delegate may make one that inherits, in its own directories.
    pub fn create_dataset(
        &self,
        caller: &Caller,
        dir: Ino,
        name: &OsStr,
        spec: &DatasetSpec,
        own: Option<&Own>,
    ) -> Result<String> {
        self.may_work_in(caller, dir)?;
        if !caller.is_owner && own.is_some() {
            return Err(Error::NotPermitted);
        }
        self.refuse_frozen()?;
        let above = member_of(dir);
        {
            let _turn = turns::hold(self.forest(), dir, Need::LOOK);
            self.forest().at(dir)?;
            self.may_add(caller, dir)?;
        }
        self.has_datasets(above)?;
        let turn = turns::hold(self.forest(), dir, Need::CHANGE);
        // Another turn than before: what was allowed then may not be allowed now. The owner of a dataset's root is as
        // last shown: the turn of the vault around it may not be taken in this one.
        if !caller.is_owner && self.forest().permissions(dir)?.uid != caller.uid {
            return Err(Error::NotPermitted);
        }
        self.may_add(caller, dir)?;
        let (mut header, keys) = self.new_header(above, spec, own)?;
        let (id, base) = (header.id(), self.keeper().place(above)?);
        let owner = Owner { uid: caller.uid, gid: caller.gid, umask: 0 };
        let made = self.forest().make_dataset(dir, name, spec.mode, owner, |backend, stored| {
            let ring = keys.key_ring(header.suite())?;
            Vault::make_tree(backend, &header, &ring)?;
            let place = base.below(stored)?;
            let parent = self.forest().member(above)?.id;
            let made = |trees| self.policy().anchors.make_below(&parent, &mut header, &keys, trees, &place);
            let anchor = self.keeper().trees(above).map(made).transpose()?;
            let update = Update::begin(&place.file(name::HEADER), &self.policy().witness())?;
            let event = Event::new(EventKind::Created).by(caller.uid).slot(keys.slot());
            let event = event.detail("suite", header.suite().name()).detail("domain", header.domain().name());
            update.create_recorded(&mut header, &keys, &[event])?;
            anchor.map_or(Ok(()), |anchor| anchor.keep_below(&parent))
        });
        let member = made.at(Path::new(name))?;
        let event = Event::new(EventKind::DatasetCreated).by(caller.uid).detail("dataset", id.to_string());
        self.note(above, event.detail("name", Path::new(name).display()));
        // The key is here now, so the dataset is opened at once, or in its first turn. One that inherits is opened when
        // it is entered.
        let keys = match (spec.inherit, self.hosts_take_turns()) {
            (true, _) => None,
            (false, false) => Some(keys),
            (false, true) => {
                self.keeper().bring(member, keys);
                None
            }
        };
        drop(turn);
        self.forest().changed_beside_kernel(dir, name);
        if let Some(keys) = keys {
            let opening = || self.keeper().opening(member, Some(above), header, keys);
            let opened = self.forest().load(member, opening);
            opened.map_err(|source: Error| Error::MadeNotOpen { source: Box::new(source) })?;
        }
        Ok(id.to_string())
    }

    /// Marks in a vault's header that it has datasets. This is not undone if making the first one fails.
    fn has_datasets(&self, member: Number) -> Result<()> {
        {
            let _turn = turns::hold(self.forest(), root_of(member), Need::LOOK);
            if self.forest().vault(member).ok_or(VaultError::KeyNotLoaded)?.has_datasets() {
                return Ok(());
            }
        }
        self.change_without_event(member, |keys, header| Ok(keys.allow_datasets(header)?))?;
        // With turns, the next one opens the vault by the new header.
        if let Some(vault) = self.forest().vault(member) {
            vault.allow_datasets();
        }
        Ok(())
    }

    fn new_header(
        &self,
        above: Number,
        spec: &DatasetSpec,
        own: Option<&Own>,
    ) -> Result<(VaultHeader, lamassu_keys::Unlocked)> {
        let vault = self.forest().vault(above).ok_or(VaultError::KeyNotLoaded)?;
        // Read again: another process may have changed the header.
        let parent = self.forest().header(above)?;
        let (parent, keys) = parent.verified(|parent| {
            let kept = self.keeper().kept();
            Ok::<_, Error>(kept.get(&above).ok_or(VaultError::KeyNotLoaded)?.keys.reopen(parent)?)
        })?;
        let created = unix_now();
        let slot = own.map(|(material, cost)| NewSlot { material, cost: *cost, label: &spec.label, created });
        let suite = match &spec.suite {
            Some(name) => Suite::from_name(name).ok_or(Error::GarbledRequest)?,
            None => parent.suite(),
        };
        let domain = match &spec.domain {
            Some(name) => Domain::from_name(name).ok_or(Error::GarbledRequest)?,
            None => parent.domain(),
        };
        self.policy().check_suite(suite)?;
        if !domain.is_for(suite) {
            return Err(Error::Usage(
                "the domains file and none need another suite than paper, whose keys, as published, depend on a \
                 block's content alone",
            ));
        }
        let integrity = known(spec.properties.integrity.as_deref(), Verified::from_name)?.flatten();
        if integrity == Some(Verified::Metadata) && suite.is_malleable() {
            return Err(Error::SuiteNeedsFull { suite: suite.name() });
        }
        let block_size = spec.block_size.unwrap_or(parent.geometry().block_size() as u32);
        let chosen = spec.compress.as_deref().map(str::parse).transpose().map_err(|_| Error::GarbledRequest)?;
        let new = NewDataset {
            suite,
            geometry: Geometry::new(block_size, parent.geometry().reserved() as u16)
                .ok_or(Error::Member { option: "--block-size", rule: "a power of two from 4K to 1M" })?,
            names: match &spec.names {
                Some(name) => NameMode::from_name(name).ok_or(Error::GarbledRequest)?,
                None => parent.names(),
            },
            domain,
            compression: compression::of_new(chosen, spec.compress_round, parent.compression(), (suite, block_size))?,
            integrity,
            cache: known(spec.properties.cache.as_deref(), Caching::from_name)?.flatten(),
            inherit: spec.inherit,
            slot,
            created,
        };
        let made = create_dataset(&parent, &keys, vault.ring(), &new)?;
        self.policy().check_small_files(made.0.convergent_small_files())?;
        Ok(made)
    }

    /// Adds an event to the history of a member's vault. A failure does not undo what was done.
    fn note(&self, member: Number, event: Event) {
        let noted = || {
            let (header, place) = (self.forest().header(member)?, self.keeper().place(member)?);
            let (_, mut history) = header.verified(|header| {
                let kept = self.keeper().kept();
                let keys = &kept.get(&member).ok_or(VaultError::KeyNotLoaded)?.keys;
                Ok::<_, Error>(keys.history(&place.path(), header)?)
            })?;
            // Another host may write it by now.
            let is_lost = self.forest().vault(member).is_none_or(|vault| crate::walks::is_lost(&vault));
            if is_lost {
                return Err(Error::NoFurtherTurn);
            }
            history.note(event)?;
            Ok::<_, Error>(())
        };
        let id = self.forest().member(member).map(|member| member.id);
        if let Err(error) = id.map_err(Error::from).and_then(|id| self.keeper().alone_with(id, noted)) {
            tracing::warn!(%error, "the history does not record what was done to a dataset");
        }
    }

    /// The datasets below a directory of the tree, including those in loaded datasets: those after `after`, as many as
    /// fit into an answer.
    pub fn list_datasets(&self, caller: &Caller, dir: Ino, after: Option<&str>) -> Result<Datasets> {
        self.may_work_in(caller, dir)?;
        let (mut all, eyes) = (Datasets::default(), Eyes::of(caller));
        let mut inside = {
            let _turn = turns::hold(self.forest(), dir, Need::LOOK);
            if self.forest().vault(member_of(dir)).is_none() {
                return Err(VaultError::KeyNotLoaded.into());
            }
            self.list_in(dir, Path::new(""), &eyes, &mut all)?
        };
        // Only one vault is held at a time: another host may have a dataset for long.
        while let Some((root, shown)) = inside.pop() {
            let _turn = turns::hold(self.forest(), root.ino(), Need::LOOK);
            match self.list_in(root.ino(), &shown, &eyes, &mut all) {
                Ok(found) => inside.extend(found),
                // A damaged dataset does not hide the others.
                Err(error) => all.not_seen(&shown, error.root_cause()),
            }
        }
        all.datasets.sort_by(|a, b| a.path.cmp(&b.path));
        all.page(after)
    }

    /// Adds the datasets in one vault, below a directory. Returns the roots of those in which there may be others, and
    /// the paths that are shown of them.
    fn list_in(&self, dir: Ino, base: &Path, eyes: &Eyes, all: &mut Datasets) -> Result<Vec<(Root, PathBuf)>> {
        let (above, mut inside) = (member_of(dir), Vec::new());
        if !self.sees(eyes, dir)? {
            return Ok(inside);
        }
        let Some(vault) = self.forest().vault(above) else { return Ok(inside) };
        let start = self.forest().plain_path_in(dir)?;
        let shown = |plain: &Path| base.join(plain.strip_prefix(&start).unwrap_or(plain));
        let found = vault.datasets(local(dir))?;
        let mut open = HashMap::from([(start.clone(), true)]);
        for (plain, error) in &found.unseen {
            if self.sees_into(eyes, above, plain.parent(), &mut open) {
                all.not_seen(&shown(plain), error);
            }
        }
        for dataset in found.datasets {
            let Some(plain) = dataset.plain else { continue };
            if !self.sees_into(eyes, above, plain.parent(), &mut open) {
                continue;
            }
            let shown = shown(&plain);
            match self.list_one((above, &plain), &shown, all) {
                Ok(root) => inside.extend(root.map(|root| (root, shown))),
                Err(error) => all.not_seen(&shown, error.root_cause()),
            }
        }
        Ok(inside)
    }

    /// Whether the caller may search a directory.
    fn sees(&self, eyes: &Eyes, dir: Ino) -> Result<bool> {
        let Eyes::Of { uid, groups } = eyes else { return Ok(true) };
        let vault = self.forest().vault(member_of(dir)).ok_or(VaultError::KeyNotLoaded)?;
        Ok(vault.may_search(local(dir), *uid, &|group| groups.contains(&group))?)
    }

    /// The same for a directory and all above it, up to the first one in `open`; by its path in a member. A directory
    /// that cannot be checked counts as closed, so that nothing is shown by mistake.
    fn sees_into(&self, eyes: &Eyes, member: Number, plain: Option<&Path>, open: &mut HashMap<PathBuf, bool>) -> bool {
        let Some(plain) = plain else { return false };
        if matches!(eyes, Eyes::All) {
            return true;
        }
        if let Some(known) = open.get(plain) {
            return *known;
        }
        let is_open = self.sees_into(eyes, member, plain.parent(), open)
            && self.forest().resolve_from(member, plain.as_os_str()).is_ok_and(|entry| {
                let entry = EntryRef::new(&**self.forest(), entry);
                self.sees(eyes, entry.ino()).unwrap_or(false)
            });
        open.insert(plain.to_path_buf(), is_open);
        is_open
    }

    /// The root, if the dataset is loaded.
    fn list_one(&self, (above, plain): (Number, &Path), shown: &Path, all: &mut Datasets) -> Result<Option<Root>> {
        let root = EntryRef::new(self.forest().clone(), self.forest().resolve_from(above, plain.as_os_str())?);
        let member = member_of(root.ino());
        all.datasets.push(self.described(member, shown)?);
        let is_loaded = self.forest().member(member)?.state == State::Loaded;
        Ok(is_loaded.then_some(root))
    }

    fn described(&self, member: Number, shown: &Path) -> Result<Listed> {
        let header = match self.hosts_take_turns() {
            true => self.forest().stored_header(member),
            false => self.forest().header(member),
        }?;
        let header = header.described();
        let state = match self.forest().member(member)?.state {
            State::Loaded => "loaded",
            State::Sighted if inherits(header) => "available",
            State::Sighted | State::Locked => "locked",
            State::Unloaded => "unloaded",
        };
        let own = header.keys().slots.iter().any(|s| s.parent.is_none());
        Ok(Listed {
            path: shown.display().to_string(),
            id: header.id().to_string(),
            state: state.into(),
            keys: match (inherits(header), own) {
                (true, true) => "both",
                (true, false) => "inherited",
                (false, _) => "own",
            }
            .into(),
            domain: header.domain().name().into(),
            suite: header.suite().name().into(),
            block_size: header.geometry().block_size() as u32,
            compress: header.compression().map(|c| c.codec().to_string()),
            names: header.names().name().into(),
            integrity: header.integrity().map(|v| v.name().into()),
            cache: header.cache().map(|c| c.name().into()),
        })
    }

    /// Sets properties; `None` leaves a property unchanged, the value `inherit` takes the parent's. Returns a
    /// description of a slot that this removed.
    pub fn set_dataset(
        &self,
        caller: &Caller,
        dir: Ino,
        set: &Properties,
        inherit: Option<bool>,
    ) -> Result<Option<String>> {
        let member = self.member(dir)?;
        // Its keys are needed to change its header: opens it if it was only listed.
        {
            let _turn = turns::hold(self.forest(), dir, Need::LOOK);
            self.forest().at(dir)?;
        }
        let above = self.forest().parent(member);
        let integrity = known(set.integrity.as_deref(), Verified::from_name)?;
        let cache = known(set.cache.as_deref(), Caching::from_name)?;
        if member == ROOT_MEMBER && inherit == Some(true) {
            return Err(Error::NotADataset);
        }
        let chosen = set.compress.as_deref().map(str::parse).transpose().map_err(|_| Error::GarbledRequest)?;
        let parent = above.filter(|_| inherit == Some(true)).map(|above| self.keeper().ring(above)).transpose()?;
        let removed = self.change(caller, member, |keys, header| {
            if integrity == Some(Some(Verified::Metadata)) && header.suite().is_malleable() {
                return Err(Error::SuiteNeedsFull { suite: header.suite().name() });
            }
            let mut event = Event::new(EventKind::DatasetChanged);
            if integrity.is_some() || cache.is_some() {
                let (integrity, cache) = (integrity.unwrap_or(header.integrity()), cache.unwrap_or(header.cache()));
                keys.set_properties(header, integrity, cache)?;
                event = event
                    .detail("integrity", integrity.map_or("inherit", Verified::name))
                    .detail("cache", cache.map_or("inherit", Caching::name));
            }
            if chosen.is_some() || set.compress_round.is_some() {
                let fits = (header.suite(), header.geometry().block_size() as u32);
                let compression = compression::of_new(chosen, set.compress_round, header.compression(), fits)?;
                keys.set_compression(header, compression)?;
                let (codec, round) = compression.map(|c| (c.codec(), c.round())).unzip();
                event = event.detail("compress", Chosen(codec).to_string());
                event = round.into_iter().fold(event, |event, round| event.detail("compress_round", round));
            }
            let mut removed = None;
            match inherit {
                Some(true) if !inherits(header) => {
                    keys.add_parent_slot(header, parent.as_ref().ok_or(VaultError::KeyNotLoaded)?, unix_now())?;
                }
                Some(false) if inherits(header) => {
                    removed = Some(keys.remove_parent_slot(header)?.to_string());
                }
                _ => {}
            }
            let event = inherit.into_iter().fold(event, |event, inherit| event.detail("inherit", inherit));
            Ok((removed, event))
        })?;
        if let Some(cache) = cache {
            self.keeper().set_cache(member, cache);
            for (member, cached) in self.keeper().cached_in(self.forest(), member) {
                self.forest().set_cached(member, cached)?;
            }
        }
        Ok(removed)
    }
}

/// What the caller of a list may see.
enum Eyes {
    /// Everything: root, or the user who mounted.
    All,
    /// A delegate: what the permissions of directories allow.
    Of { uid: u32, groups: Vec<u32> },
}

impl Eyes {
    fn of(caller: &Caller) -> Eyes {
        match caller.is_owner {
            true => Eyes::All,
            false => Eyes::Of { uid: caller.uid, groups: caller.groups.clone() },
        }
    }
}

/// Parses the value of a property: `None` if it is not named, `Some(None)` if it is to be inherited.
fn known<T>(text: Option<&str>, from_name: impl Fn(&str) -> Option<T>) -> Result<Option<Option<T>>> {
    match text {
        None => Ok(None),
        Some("inherit") => Ok(Some(None)),
        Some(name) => Ok(Some(Some(from_name(name).ok_or(Error::GarbledRequest)?))),
    }
}

/// A name in the form of requests.
pub fn name_to_hex(name: &OsStr) -> String {
    hex(name.as_bytes())
}

/// The reverse.
pub fn name_from_hex(hex: &str) -> Result<OsString> {
    let bytes = data_encoding::HEXLOWER.decode(hex.as_bytes()).map_err(|_| Error::GarbledRequest)?;
    Ok(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::protocol::Answer;

    fn listed(path: String) -> Listed {
        Listed {
            path,
            id: "0".repeat(32),
            state: "available".into(),
            keys: "inherited".into(),
            domain: "private".into(),
            suite: "chacha".into(),
            block_size: 1 << 20,
            compress: Some("zstd:19".into()),
            names: "encrypted".into(),
            integrity: None,
            cache: None,
        }
    }

    #[test]
    fn every_page_of_a_list_fits_an_answer() {
        let paths: Vec<String> = (0..300).map(|i| format!("{i:03}")).collect();
        for name in ["a", "\u{1}", "\u{1f600}"] {
            let shown = name.repeat(4096);
            let (mut seen, mut pages) = (Vec::new(), 0);
            loop {
                let mut all = Datasets::default();
                all.datasets.extend(paths.iter().cloned().map(listed));
                for _ in 0..20 {
                    all.not_seen(Path::new(&shown), &std::io::Error::other(shown.clone()));
                }
                let page = all.page(seen.last().map(String::as_str)).unwrap();
                let answer = serde_json::to_vec(&Answer::Done(&page)).unwrap();
                assert!(answer.len() <= MESSAGE_LEN_MAX, "{}", answer.len());
                assert!(!page.unseen.is_empty() && page.unseen_count == 20);
                seen.extend(page.datasets.into_iter().map(|l| l.path));
                pages += 1;
                if !page.more {
                    break;
                }
            }
            assert!(seen == paths && pages > 1);
        }
    }
}
