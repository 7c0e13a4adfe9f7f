//! `lamassu profile`: how the blocks of files are protected, by file and directory.

use crate::fault::{Context, Fault, Result};
use crate::keys::{self, KeyArg};
use crate::output::{self, Ui, shown};
use crate::{open, signals, text};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use lamassu_format::profile::{KeyKind, Protection};
use lamassu_format::{Cipher, Hash, Profile, Suite};
use lamassu_host::Error as HostError;
use lamassu_vault::forest::local;
use lamassu_vault::{FileSystem, Forest, Ino, KnownProfile, RekeyProgress, Vault, VaultError};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SET_EXAMPLES: &str = "\
Examples:
  lamassu profile set --block-keys random /srv/store/vault letters
      what is made in letters from now on has blocks that no other file has
  lamassu profile set -R --protect integrity /srv/store/vault mirror
      also what is there: stored plain, verified on each read
  lamassu profile set --cipher aes-128 --hash blake3 /srv/store/vault video
      what is made in video from now on is encrypted and hashed by others than the suite's
  lamassu profile set --protect both /srv/store/vault mirror/notes.txt
May be stopped at any moment, and run again: it goes on with what is left. docs/profiles.md says what to choose.";

const SHOW_EXAMPLES: &str = "\
Examples:
  lamassu profile show /srv/store/vault letters mirror/notes.txt
  lamassu profile show --json /srv/store/vault mirror | jq -r '.profiles[].protect'";

/// What to do with profiles.
#[derive(clap::Subcommand, Debug)]
pub enum ProfileCommand {
    /// Choose how files are protected: those of a directory from now on, or a file that is there
    Set(SetArgs),
    /// Show how files, or what is made in directories, are protected
    Show(ShowArgs),
}

/// Options of `profile set`.
#[derive(clap::Args, Debug)]
#[command(after_help = SET_EXAMPLES, after_long_help = help(SET_EXAMPLES))]
pub struct SetArgs {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    wanted: Wanted,
    /// Of directories: also all files and directories that are in them already
    #[arg(short = 'R', long)]
    recursive: bool,
    /// The vault; it must not be mounted
    dir: PathBuf,
    /// Plain paths in it
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

/// What is chosen; the rest stays as it is.
#[derive(clap::Args, Debug)]
#[group(required = true, multiple = true)]
struct Wanted {
    /// both: encrypted, and verified on each read; encrypt: reads do not verify; integrity: stored plain, and verified;
    /// none: stored plain, reads do not verify
    #[arg(long, value_name = "WHAT", value_parser = protections())]
    protect: Option<Protection>,
    /// convergent: equal blocks are equal as far as the vault's domain reaches; random: within the file alone
    #[arg(long, value_name = "KIND", value_parser = key_kinds())]
    block_keys: Option<KeyKind>,
    /// How blocks are encrypted: aes-256 or aes-128 where the suite is aes or blake3, chacha20 where it is chacha
    #[arg(long, value_name = "CIPHER", value_parser = ciphers())]
    cipher: Option<Cipher>,
    /// How blocks are hashed; in suite paper by sha-256 alone
    #[arg(long, value_name = "HASH", value_parser = hashes())]
    hash: Option<Hash>,
}

/// Options of `profile show`.
#[derive(clap::Args, Debug)]
#[command(after_help = SHOW_EXAMPLES, after_long_help = help(SHOW_EXAMPLES))]
pub struct ShowArgs {
    #[command(flatten)]
    key: KeyArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault
    dir: PathBuf,
    /// Plain paths in it [default: its root]
    paths: Vec<PathBuf>,
}

fn help(examples: &str) -> String {
    format!("{examples}\n\n{}", keys::HELP)
}

/// A protection by name, for clap.
pub fn protections() -> impl TypedValueParser<Value = Protection> {
    PossibleValuesParser::new(Protection::ALL.map(Protection::name))
        .map(|name| Protection::from_name(&name).expect("clap lets only these names through"))
}

/// A kind of key by name, for clap.
pub fn key_kinds() -> impl TypedValueParser<Value = KeyKind> {
    PossibleValuesParser::new(KeyKind::ALL.map(KeyKind::name))
        .map(|name| KeyKind::from_name(&name).expect("clap lets only these names through"))
}

fn ciphers() -> impl TypedValueParser<Value = Cipher> {
    PossibleValuesParser::new(Cipher::ALL.map(Cipher::name))
        .map(|name| Cipher::from_name(&name).expect("clap lets only these names through"))
}

fn hashes() -> impl TypedValueParser<Value = Hash> {
    PossibleValuesParser::new(Hash::ALL.map(Hash::name))
        .map(|name| Hash::from_name(&name).expect("clap lets only these names through"))
}

pub fn run(ui: &Ui, command: ProfileCommand) -> Result<()> {
    match command {
        ProfileCommand::Set(args) => set(ui, &args),
        ProfileCommand::Show(args) => show(ui, &args),
    }
}

impl Wanted {
    /// A profile with what was chosen, the rest as in another one.
    ///
    /// # Errors
    /// [`Fault::Profile`].
    fn over(&self, before: Profile, suite: Suite) -> Result<Profile, Fault> {
        let protection = self.protect.unwrap_or(before.protection());
        // Plain blocks have no keys and no cipher, so that a file which had others than the default loses them.
        let kept = if protection.is_plain() { KeyKind::Convergent } else { before.key() };
        let mut method = before.method();
        if protection.is_plain() {
            method = method.without_cipher();
        }
        if let Some(cipher) = self.cipher {
            method = method.with_cipher(suite, cipher)?;
        }
        if let Some(hash) = self.hash {
            method = method.with_hash(suite, hash)?;
        }
        let profile = Profile::new(protection, self.block_keys.unwrap_or(kept))?.by(method)?;
        profile.check(suite)?;
        Ok(profile)
    }
}

/// An entry of an open vault, to which a reference is held.
struct Held<'a> {
    forest: &'a Forest,
    vault: Arc<Vault>,
    ino: Ino,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.forest.forget(self.ino, 1);
    }
}

impl<'a> Held<'a> {
    fn at(forest: &'a Forest, path: &Path) -> Result<Held<'a>> {
        let ino = forest.resolve(path.as_os_str()).with_context(|| named(path))?.attr.ino;
        Ok(Held { forest, vault: forest.at(ino).with_context(|| named(path))?, ino })
    }

    fn profile(&self, path: &Path) -> Result<KnownProfile> {
        match self.vault.profile(local(self.ino)) {
            Err(VaultError::Invalid) => Err(HostError::Usage("only files and directories have profiles").into()),
            other => other.with_context(|| named(path)),
        }
    }

    fn suite(&self) -> Suite {
        self.vault.ring().suite()
    }
}

fn named(path: &Path) -> String {
    format!("vault:{}", text::printable(&path.to_string_lossy()))
}

/// Says what fails, and whether to go on.
struct Told<'a>(&'a Ui);

impl RekeyProgress for Told<'_> {
    fn total(&self, _: u64) {}

    fn advance(&self, _: u64) {}

    fn failed(&self, stored: &str, error: &VaultError) {
        self.0.warn(format_args!("its profile is not changed: {}: {error}", text::printable(stored)));
    }

    fn dataset(&self, stored: &Path) -> lamassu_vault::Result<()> {
        let stored = text::printable(&stored.to_string_lossy());
        self.0.note(format_args!("{stored} is a dataset, with profiles of its own: it stays as it is"));
        Ok(())
    }

    fn is_cancelled(&self) -> bool {
        signals::interrupted()
    }
}

fn set(ui: &Ui, args: &SetArgs) -> Result<()> {
    let unsealed = open::unlocked(ui, &args.dir, &args.key)?;
    // Before anything is changed: the first error is a usage error.
    let suite = unsealed.found.header.suite();
    args.wanted.over(Profile::DEFAULT, suite)?;
    let served = unsealed.open_forest(open::options(false))?;
    let forest = served.forest();
    signals::flag_only();
    let done = args.paths.iter().try_for_each(|path| set_one(ui, forest, args, path));
    let closed = forest.close();
    done?;
    Ok(closed?)
}

fn set_one(ui: &Ui, forest: &Forest, args: &SetArgs, path: &Path) -> Result<()> {
    let held = Held::at(forest, path)?;
    let profile = args.wanted.over(held.profile(path)?.profile, held.suite())?;
    let done = held.vault.set_profile(local(held.ino), profile, args.recursive, &Told(ui));
    let done = done.with_context(|| named(path))?;
    signals::check()?;
    if done.failed > 0 {
        return Err(Fault::NotChanged { failed: done.failed }.into());
    }
    if !done.complete {
        return Err(Fault::RekeyIncomplete.into());
    }
    ui.note(format_args!("{}: {}", named(path), profile.named(held.suite())));
    ui.detail(format_args!(
        "{} directories, {} pages and {} blocks were written",
        done.records, done.pages, done.blocks
    ));
    Ok(())
}

#[derive(Serialize)]
struct Profiles {
    profiles: Vec<Row>,
}

/// A file, or a directory and what is made in it.
#[derive(Serialize)]
struct Row {
    path: String,
    protect: &'static str,
    /// null: blocks that are stored plain have no keys
    block_keys: Option<&'static str>,
    /// null: they are not encrypted
    cipher: Option<&'static str>,
    hash: &'static str,
    /// whether a change was begun and not ended
    changing: bool,
}

fn show(ui: &Ui, args: &ShowArgs) -> Result<()> {
    let forest = open::forest(ui, &args.dir, &args.key, true)?;
    let root = [PathBuf::new()];
    let paths = if args.paths.is_empty() { &root[..] } else { &args.paths };
    let mut profiles = Vec::new();
    for path in paths {
        let held = Held::at(&forest, path)?;
        let KnownProfile { profile, is_changing } = held.profile(path)?;
        let (suite, method, is_plain) = (held.suite(), profile.method(), profile.protection().is_plain());
        profiles.push(Row {
            path: path.to_string_lossy().into_owned(),
            protect: profile.protection().name(),
            block_keys: (!is_plain).then_some(profile.key().name()),
            cipher: (!is_plain).then_some(method.cipher(suite).name()),
            hash: method.hash(suite).name(),
            changing: is_changing,
        });
    }
    if args.json {
        return output::print_json(&Profiles { profiles });
    }
    let lines = profiles.iter().map(|row| {
        let state = if row.changing { "  (being changed)" } else { "" };
        format!(
            "{:<10} {:<11} {:<9} {:<8} /{}{state}",
            row.protect,
            row.block_keys.unwrap_or("-"),
            row.cipher.unwrap_or("-"),
            row.hash,
            shown(std::ffi::OsStr::new(row.path.trim_start_matches('/')))
        )
    });
    let head = "protect    block keys  cipher    hash     path".to_owned();
    output::print(std::iter::once(head).chain(lines).collect::<Vec<_>>().join("\n"))
}
