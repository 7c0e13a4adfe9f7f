//! `lamassu key destroy`: assured delete of a vault by its keys.
//!
//! Nothing is destroyed before everything that can be refused was: the key opens an administrator's slot, each key to
//! be destroyed elsewhere opens a slot too, and the receipt was written, as far as things are. So the receipt is a file
//! and no output: what is printed only afterwards may be lost. A run that is cut off is finished by the next.

use crate::cmd::receipt;
use crate::fault::{Context, Fault, Result};
use crate::keys::{self, KeyArg, SourceText};
use crate::output::{self, Ui};
use crate::{mounts, open, served, signals};
use lamassu_format::header::{Destroyed, Header, VaultHeader};
use lamassu_format::name;
use lamassu_host::Error as HostError;
use lamassu_host::WriterLock;
use lamassu_host::destroy::survey;
use lamassu_host::lock::lock_out_writers_below;
use lamassu_keys::destroy::{self, Destruction};
use lamassu_keys::history::EventKind;
use lamassu_keys::receipt::{AtServer, AuditKey, Receipt, ReceiptError};
use lamassu_keys::{Ask, Event, FileError, KeyError, KeySource, Purpose, Unlocked, header_file};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  lamassu key destroy --receipt seven.receipt --audit-key raw:file:audit.key /srv/store/seven
  lamassu key destroy -k 'kmip://kms/?name=seven#cert=me.pem' --with-server --yes /srv/store/seven
Earlier copies of the header still open the vault with the keys of their slots. The receipt lists
those on record.";

/// What is typed to go on.
const WORD: &str = "destroy";

/// How keys are destroyed.
#[derive(clap::Args, Clone, Debug)]
pub struct How {
    /// Write a signed receipt to FILE, before anything is destroyed, and again when all is done. FILE must not exist,
    /// unless an interrupted run made it
    #[arg(long, value_name = "FILE", requires = "audit_key")]
    receipt: Option<PathBuf>,
    /// Sign the receipt with this key: 32 bytes, kept apart from the vault. `lamassu receipt key` prints its public
    /// half
    #[arg(long, value_name = "SOURCE", requires = "receipt")]
    audit_key: Option<SourceText>,
    /// Destroy the key that --key (or SOURCE) names, too, at its KMIP server or in its token. Other vaults may have
    /// slots for that key: this cannot be detected
    #[arg(long, value_name = "SOURCE", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    with_server: Vec<SourceText>,
    /// Do not ask for confirmation
    #[arg(short, long)]
    yes: bool,
}

/// Options of `key destroy`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = super::help(EXAMPLES))]
pub struct Destroy {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    how: How,
    /// The vault; must not be mounted
    dir: PathBuf,
    /// whose keys alone may go
    #[arg(skip)]
    id: Option<String>,
}

impl How {
    /// Whether anything of it was said.
    pub fn is_given(&self) -> bool {
        self.receipt.is_some() || self.audit_key.is_some() || self.yes || !self.with_server.is_empty()
    }

    /// Where a receipt goes, and what signs it.
    fn paper(&self) -> Result<Option<Paper<'_>>> {
        let both = self.receipt.as_deref().zip(self.audit_key.as_ref());
        both.map(|(file, key)| Ok(Paper { file, audit: receipt::load(key)? })).transpose()
    }
}

/// What a receipt is made with.
struct Paper<'a> {
    file: &'a Path,
    audit: AuditKey,
}

impl Destroy {
    /// For a vault that is a dataset, of this id: `dataset destroy --shred-key`.
    pub fn of(key: &KeyArg, how: &How, dir: PathBuf, id: String) -> Destroy {
        Destroy { key: key.clone(), how: how.clone(), dir, id: Some(id) }
    }
}

pub fn run(ui: &Ui, args: &Destroy) -> Result<()> {
    let at = served::at(&args.dir)?.map(|at| at.path().to_path_buf());
    if let Some(mountpoint) = at.or_else(|| mounts::any_of_vault(&args.dir).map(|m| m.mountpoint.clone())) {
        return Err(Fault::RetireMounted { mountpoint }.into());
    }
    // Any user who may mount FUSE can say so of any vault. A process that has it open for writing is kept out by the
    // lock.
    if let Some(claimed) = mounts::claimed_of_vault(&args.dir) {
        ui.warn(format_args!(
            "the mount on {:?}, of user {}, says that it is of this vault, and is passed over: it is neither root's, nor yours, nor that of the vault's owner",
            claimed.mountpoint,
            claimed.user().unwrap_or_default()
        ));
    }
    let path = args.dir.join(name::HEADER);
    if !args.dir.join(name::HEADER_REPLACING).exists() && path.symlink_metadata().is_err() {
        return Err(lamassu_host::Error::NotAVault { dir: args.dir.clone() }.into());
    }
    let servers = servers(args)?;
    let paper = args.how.paper()?;
    // No process has it open from before it is looked at until it is done.
    let _lock = open::lock_out_writers(ui, &args.dir)?;
    let destruction = Destruction::begin(&path, &ui.policy.witness())?;
    if args.id.as_ref().is_some_and(|id| *id != destruction.header().id().to_string()) {
        return Err(Fault::NotThatDataset { dir: args.dir.clone() }.into());
    }
    let mut run =
        Run { ui, args, paper, servers, asked: Vec::new(), proven: Vec::new(), gone: Vec::new(), receipt: None };
    match destruction.begun() {
        None => run.begin(destruction),
        Some(destroyed) => run.go_on(destruction, destroyed),
    }
}

/// The sources of `--with-server`, none of which is a zone's.
fn servers(args: &Destroy) -> Result<Vec<KeySource>> {
    let source = |text: &SourceText| if text.is_empty() { args.key.source() } else { text.parse("--with-server") };
    let mut sources = Vec::new();
    for source in args.how.with_server.iter().map(source) {
        let source = source?;
        source.can_destroy().with_context(|| format!("--with-server: {source}"))?;
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    Ok(sources)
}

struct Run<'a> {
    ui: &'a Ui,
    args: &'a Destroy,
    paper: Option<Paper<'a>>,
    servers: Vec<KeySource>,
    /// what was asked of them, by this run and earlier ones
    asked: Vec<AtServer>,
    /// sources whose key opened a slot of this vault in this run
    proven: Vec<String>,
    /// sources whose key is not there or not shown, where nothing tells that this vault's key was destroyed
    gone: Vec<String>,
    /// where one is made
    receipt: Option<Receipt>,
}

impl Run<'_> {
    fn begin(&mut self, destruction: Destruction) -> Result<()> {
        // Until it is done: a daemon that has a dataset open could give it a slot, and go on writing.
        let _below = self.lock_out_writers_below()?;
        let header = destruction.header().clone();
        let source = self.args.key.source()?;
        let unlocked = keys::unlock(self.ui, &header, self.args.key.with(&source), &self.args.dir)?;
        unlocked.may_change(&header)?;
        for source in &self.servers {
            self.prove(source, Some(&header))?;
            self.proven.push(source.to_string());
            self.asked.push(AtServer { source: source.to_string(), destroyed: false, answers: Vec::new() });
        }
        // A draft is made in any case: it is what a person is shown. Without an audit key it is not kept.
        let throwaway;
        let audit = match &self.paper {
            Some(paper) => &paper.audit,
            None => {
                let key = lamassu_crypto::Secret::random()?;
                throwaway = AuditKey::of(&lamassu_keys::Material::Key { kind: lamassu_keys::SlotKind::Raw, key })?;
                &throwaway
            }
        };
        let bare = destroy::draft(&self.args.dir, &header, &unlocked, audit)?;
        let mut found = survey(&self.args.dir, &header, &unlocked)?;
        let draft = loop {
            let (bytes, left) = found;
            let mut draft = bare.clone();
            draft.stored_bytes = Some(bytes);
            if header.has_datasets() || !left.is_empty() {
                draft.leave(left);
            }
            if !self.confirm(&draft)? {
                break draft;
            }
            // `key add` takes no writer's lock, and a person may take long.
            found = survey(&self.args.dir, &header, &unlocked)?;
            if found.1 == draft.datasets {
                break draft;
            }
            self.ui.warn("meanwhile the datasets have changed that open without it");
        };
        signals::check()?;
        // From here on it is finished, also after Ctrl-C.
        signals::flag_only();
        let destroyed = draft.mark().map_err(KeyError::from)?;
        if let Some(Paper { file, audit }) = &self.paper {
            // A run that was cut off before anything was destroyed may have left a draft.
            let is_draft = receipt::read(file, &audit.public()).is_ok_and(|r| !r.complete && r.vault == draft.vault);
            if file.symlink_metadata().is_ok() && !is_draft {
                return Err(FileError::Exists { path: file.into() }.into());
            }
            self.receipt = Some(draft);
            self.put_down()?;
        }
        let done = self.commit(destruction, &unlocked, destroyed);
        match done {
            Ok(destruction) => self.finish(destruction),
            Err(error) => {
                // The vault is whole: a receipt that says otherwise is none.
                let whole = header_file::read::<VaultHeader>(&self.args.dir.join(name::HEADER));
                if let (Some(paper), Ok(header)) = (&self.paper, whole)
                    && header.destroyed().is_none()
                {
                    let _ = std::fs::remove_file(paper.file);
                }
                Err(error)
            }
        }
    }

    /// Keeps writers away from the datasets in it. Each may be open by its own directory in the store.
    fn lock_out_writers_below(&self) -> Result<Vec<WriterLock>> {
        let failed = |source| HostError::NotADirectory { dir: self.args.dir.clone(), source };
        let dir = self.args.dir.canonicalize().map_err(failed)?;
        if let Some(mount) = mounts::any_of_dataset_in(&dir) {
            return Err(Fault::RetireMounted { mountpoint: mount.mountpoint.clone() }.into());
        }
        open::once_closed(self.ui, &dir, || Ok(lock_out_writers_below(&self.ui.policy, &dir)?))
    }

    fn commit(&self, destruction: Destruction, keys: &Unlocked, destroyed: Destroyed) -> Result<Destruction> {
        let id = crate::text::hex(&destroyed.receipt);
        let event = Event::new(EventKind::KeyDestroyed).slot(keys.slot()).detail("receipt", id);
        Ok(destruction.commit(keys, destroyed, &event)?)
    }

    /// Another run got past the point of no return.
    fn go_on(&mut self, destruction: Destruction, destroyed: Destroyed) -> Result<()> {
        // No key is asked for here, and what is left will be erased: a forged header must not lead to
        // that.
        self.ui.policy.check_signed(destruction.header()).with_context(|| self.args.dir.display().to_string())?;
        let earlier = match &self.paper {
            Some(Paper { file, audit }) if file.symlink_metadata().is_ok() => {
                Some(receipt::read(file, &audit.public())?)
            }
            Some(_) | None => None,
        };
        if let Some(earlier) = &earlier
            && earlier.mark().map_err(KeyError::from)? != destroyed
        {
            return Err(KeyError::from(ReceiptError::Other)).context("--receipt");
        }
        let is_done = destruction.is_cleared()? && earlier.as_ref().is_none_or(|r| r.complete);
        if is_done {
            return Err(KeyError::Destroyed(destroyed)).with_context(|| self.args.dir.display().to_string());
        }
        self.asked = earlier.iter().flat_map(|r| r.servers.clone()).collect();
        self.take_up(&destruction)?;
        self.ui.note("an earlier run was cut off; this one finishes it");
        signals::flag_only();
        if let Some(paper) = &self.paper {
            let bare = || Receipt::bare(&self.args.dir, destruction.header(), destroyed, &paper.audit);
            self.receipt = Some(earlier.unwrap_or_else(bare));
        }
        self.finish(destruction)
    }

    /// Proves that a key to be destroyed elsewhere exists and opens a slot of this vault. Without a header it fails.
    fn prove(&self, source: &KeySource, header: Option<&VaultHeader>) -> Result<()> {
        let subject = self.args.dir.display().to_string();
        let material = keys::load(self.ui, source, &subject, Purpose::Unlock)?;
        let header = header.ok_or(KeyError::NothingToProve)?;
        keys::try_slots(self.ui, header, &material, None).with_context(|| format!("--with-server: {source}"))?;
        Ok(())
    }

    /// Keeps in `servers` the keys that are still to be destroyed elsewhere. A key that an earlier run has proven (its
    /// receipt says so) is not proven again: it may be revoked or gone by now.
    fn take_up(&mut self, destruction: &Destruction) -> Result<()> {
        for source in std::mem::take(&mut self.servers) {
            let name = source.to_string();
            if let Some(asked) = self.asked.iter().find(|s| s.source == name) {
                if !asked.destroyed {
                    self.servers.push(source);
                }
                continue;
            }
            let error = match self.prove(&source, destruction.opens()?.as_ref()) {
                Ok(()) => {
                    self.proven.push(name.clone());
                    None
                }
                Err(error) => match error.fault() {
                    Fault::Host(HostError::Key(KeyError::Source(e)))
                        if e.is_destroyed() || e.is_not_shown() || e.is_revoked() =>
                    {
                        Some((!e.is_revoked(), error.to_string()))
                    }
                    _ => return Err(error),
                },
            };
            let mut answers = Vec::new();
            match error {
                None => self.servers.push(source),
                Some((is_gone, error)) => {
                    answers.push(format!(
                        "{error}; the run that was cut off may have done that, but nothing tells that it was this vault's key"
                    ));
                    self.ui.warn(format_args!("{name}: {}", answers[0]));
                    self.gone.extend(is_gone.then(|| name.clone()));
                }
            }
            self.asked.push(AtServer { source: name, destroyed: false, answers });
        }
        Ok(())
    }

    /// Writes the receipt, as far as things are.
    fn put_down(&mut self) -> Result<()> {
        let (Some(receipt), Some(Paper { file, audit })) = (&mut self.receipt, &self.paper) else { return Ok(()) };
        receipt.set_servers(self.asked.clone());
        receipt.sign(audit);
        Ok(header_file::write_over(file, &receipt.to_json())?)
    }

    /// Says what stays readable, and asks. Whether a person was asked.
    fn confirm(&self, draft: &Receipt) -> Result<bool> {
        for backup in &draft.backups {
            self.ui
                .warn(format_args!("a copy of the header on record still opens it: {} ({})", backup.file, backup.now));
        }
        for clone in &draft.clones {
            self.ui.warn(format_args!("a {} of it has the same keys: {}", clone.kind, clone.id));
        }
        for dataset in &draft.datasets {
            let shares = if dataset.zone_shares { ", and has its inner key" } else { "" };
            self.ui.warn(format_args!(
                "a dataset in it opens without it{shares}: {:?}; destroy its keys first (`lamassu dataset destroy --shred-key`, or `key destroy` of its directory), if they are to go too",
                dataset.stored
            ));
        }
        if draft.epochs.iter().any(|e| e.zone_shares && e.key == lamassu_keys::Tier::Outer) {
            self.ui
                .warn("its outer key is its zone's too: holders of the zone's keys go on reading it; re-key it first");
        }
        if self.args.how.yes {
            return Ok(false);
        }
        if !std::io::stdin().is_terminal() {
            return Err(
                HostError::Usage("there is no terminal to ask on: --yes destroys the keys without asking").into()
            );
        }
        let slots = draft.slots.len();
        output::say(format_args!(
            "The keys of {} (vault {}, {slots} slots) will be destroyed; what it holds can then not be read by anyone.",
            draft.path, draft.vault
        ));
        output::say(format_args!("Type {WORD} to go on:"));
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).map_err(|source| HostError::Local {
            op: "read",
            path: "standard input".into(),
            source,
        })?;
        if line.trim() == WORD { Ok(true) } else { Err(HostError::Interrupted.into()) }
    }

    /// Everything after the point of no return. Servers come first: the old header still shows whose keys they were.
    fn finish(&mut self, destruction: Destruction) -> Result<()> {
        self.destroy_elsewhere()?;
        let mark = destruction.begun();
        let cleared = destruction.clear()?;
        for copy in &cleared.copies {
            self.ui.warn(format_args!(
                "{copy:?} in the vault's directory is a copy of the header, and opens it; it was left alone"
            ));
        }
        for foreign in &cleared.foreign {
            self.ui.warn(format_args!(
                "{foreign:?} in the vault's directory is no header of it, a half-erased one, or one that cannot be read, and other names lead to the same file; it was left alone"
            ));
        }
        for unasked in self.asked.iter_mut().filter(|s| s.answers.is_empty()) {
            unasked.answers.push("not asked: the run that finished this was not told to destroy it".into());
        }
        let left = self.asked.iter().filter(|s| !s.destroyed && !self.gone.contains(&s.source));
        let left: Vec<String> = left.map(|s| s.source.clone()).collect();
        if let Some(receipt) = &mut self.receipt {
            receipt.erased.extend(cleared.erased);
            receipt.copies_beside = cleared.copies;
            receipt.complete = true;
        }
        self.put_down()?;
        let id = mark.map(|m| crate::text::hex(&m.receipt)).unwrap_or_default();
        self.ui.note(format_args!("the keys of {} are destroyed (receipt {id})", self.args.dir.display()));
        if left.is_empty() { Ok(()) } else { Err(Fault::LeftAtServer { sources: left.join(", ") }.into()) }
    }

    /// What was answered is written down at once: behind this step the keys cannot be asked for again.
    fn destroy_elsewhere(&mut self) -> Result<()> {
        let subject = crate::text::printable(&self.args.dir.display().to_string());
        let ask = Ask { subject: &subject, purpose: Purpose::Unlock, stdin: true };
        for source in std::mem::take(&mut self.servers) {
            let name = source.to_string();
            let (destroyed, answers) = match source.destroy(&ask) {
                Ok(answers) => (true, answers),
                // Each was proven to be this vault's key, by this run or by the one whose receipt names it.
                Err(error) if error.is_destroyed() => (true, vec![format!("{error}: it was destroyed before")]),
                // A moment ago this client was shown it.
                Err(error) if error.is_not_shown() && self.proven.contains(&name) => {
                    (true, vec![format!("{error}: it was there when this run began")])
                }
                Err(error) if error.is_not_shown() => {
                    self.gone.push(name.clone());
                    (false, vec![format!("{error}: not there, or not shown; nothing tells that it was destroyed")])
                }
                Err(error) => (false, vec![error.to_string()]),
            };
            answers.iter().for_each(|answer| self.ui.note(format_args!("{source}: {answer}")));
            if let Some(asked) = self.asked.iter_mut().find(|s| s.source == name) {
                (asked.destroyed, asked.answers) = (destroyed, answers);
            }
            self.put_down()?;
        }
        Ok(())
    }
}
