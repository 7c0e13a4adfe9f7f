//! Key sources as options, and unlocking headers with them.
//!
//! The text of a source is never repeated in a message, and clap does not parse it: it may be a passphrase typed in the
//! wrong place.

use crate::fault::{Context, Result};
use crate::opening::OpeningArg;
use crate::output::Ui;
use crate::{policy, text};
use lamassu_format::header::{Header, VaultHeader};
use lamassu_host::Error as HostError;
use lamassu_keys::{
    Argon2Params, Ask, KeyError, KeySource, Material, Purpose, SlotKind, SourceError, Unlocked, cost, unix_now,
};
use std::io::{self, IsTerminal};
use std::path::Path;
use std::time::Duration;

/// The default source.
const DEFAULT: &str = "passphrase:prompt";
/// How often a person may type a passphrase.
const ATTEMPTS_MAX: u32 = 3;

/// Explains SOURCE; at the end of the long help of every command that takes one.
pub const HELP: &str = "\
Key sources (SOURCE):
  passphrase:prompt      asked for on the terminal; if there is none, the first line of standard
                         input (the default)
  passphrase:file:PATH   the file's content; one trailing line end is dropped
  passphrase:env:NAME    the value of an environment variable
  raw:file:PATH          exactly 32 bytes: `lamassu key generate PATH` makes them
  hex:file:PATH          exactly 64 hex digits; one trailing line end is dropped
  recovery:prompt        the 24 words of a recovery key; recovery:file:PATH reads them
  recovery-shares:prompt shares of a recovery key, 30 words each, one after another;
                         recovery-shares:file:PATH reads all of them from one file
  FORMAT:stdin           any of these formats: standard input, to its end
  FORMAT:fd:N            the same from an inherited file descriptor
  FORMAT:credential:NAME the same from a systemd credential, in $CREDENTIALS_DIRECTORY
  FORMAT:https://HOST/PATH[#ca=FILE&cert=FILE&key=FILE&timeout=SECONDS]
                         passphrase, raw or hex: the answer of a web server
  kmip://HOST/ID, kmip://HOST/?name=NAME[#ca=FILE&cert=FILE&key=FILE&timeout=SECONDS]
                         an AES-256 key of a KMIP server; `lamassu key generate kmip:…` makes one
  server://HOST[:PORT]/ID
                         a key of a Lamassu server that this host has joined; `lamassu key generate
                         server:…` makes one, if `lamassu-server keys grant` permits
  pkcs11:token=T;object=K?module-path=FILE&pin-source=file:FILE
                         a key that stays inside a token and unwraps the slot there (RFC 7512)
Passphrases go through Argon2id. A key is never an argument: other users see those.";

/// A SOURCE as typed. It has no `Display`, and its `Debug` hides it.
#[derive(Clone)]
pub struct SourceText(String);

impl std::fmt::Debug for SourceText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SourceText")
    }
}

impl From<&str> for SourceText {
    fn from(text: &str) -> Self {
        SourceText(text.into())
    }
}

impl SourceText {
    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text, checked to be a source, for an argument of another process.
    pub fn checked(&self, option: &'static str) -> Result<&str> {
        self.parse(option)?;
        Ok(&self.0)
    }

    /// The source.
    pub fn parse(&self, option: &'static str) -> Result<KeySource> {
        self.0.parse().context(option)
    }
}

/// `--key` of a vault, or of a zone if a command takes either. The environment is read here and not by clap: which
/// variable counts depends on the kind of header, and `key=` of `-o` takes precedence over it.
#[derive(clap::Args, Clone, Debug)]
pub struct KeyArg {
    /// Key source that opens the vault [default: passphrase:prompt] [env: LAMASSU_KEY]
    #[arg(short = 'k', long, value_name = "SOURCE")]
    key: Option<SourceText>,
    /// Try only this slot, by its number in `lamassu info`. Otherwise the slot that last opened on this machine is
    /// tried first, then the others
    #[arg(long, value_name = "N")]
    key_slot: Option<u32>,
    /// Whether standard input is read as data, so that no prompt may read it.
    #[arg(skip)]
    stdin_is_data: bool,
    #[command(flatten)]
    _opening: OpeningArg,
}

impl KeyArg {
    /// A source that was given by another option, or none.
    pub fn of(key: Option<SourceText>) -> KeyArg {
        KeyArg { key, key_slot: None, stdin_is_data: false, _opening: OpeningArg }
    }

    /// The source given, or that of LAMASSU_KEY, or a prompt.
    pub fn source(&self) -> Result<KeySource> {
        self.source_for::<VaultHeader>()
    }

    /// The same for a header of this kind: LAMASSU_KEY is for vaults, LAMASSU_ZONE_KEY for zones.
    pub fn source_for<H: Header>(&self) -> Result<KeySource> {
        let variable = if H::IS_VAULT { "LAMASSU_KEY" } else { "LAMASSU_ZONE_KEY" };
        let source = match (&self.key, std::env::var_os(variable)) {
            (Some(key), _) => key.parse("--key")?,
            (None, Some(text)) => SourceText(text.to_string_lossy().into_owned()).parse(variable)?,
            (None, None) => source_or_prompt(None, "--key")?,
        };
        Ok(if self.stdin_is_data { source.leaving_stdin() } else { source })
    }

    /// The source, with the named slot.
    pub fn with<'a>(&self, source: &'a KeySource) -> Opener<'a> {
        Opener { source, slot: self.key_slot }
    }

    /// The named slot.
    pub fn slot(&self) -> Option<u32> {
        self.key_slot
    }

    /// The same, for a command that reads standard input itself.
    pub fn leaving_stdin(self) -> KeyArg {
        KeyArg { stdin_is_data: true, ..self }
    }

    /// Whether a key was named on the command line: LAMASSU_KEY may be meant for other commands.
    pub fn is_typed(&self) -> bool {
        self.key.is_some() || self.key_slot.is_some()
    }

    /// Adds `key=` of `-o`: it counts if `--key` is not given, and before LAMASSU_KEY, which may be meant for another
    /// mount.
    pub fn or(self, other: Option<SourceText>) -> KeyArg {
        KeyArg { key: self.key.or(other), ..self }
    }
}

/// The source of an option, or a prompt.
pub fn source_or_prompt(text: Option<&SourceText>, option: &'static str) -> Result<KeySource> {
    text.unwrap_or(&SourceText(DEFAULT.into())).parse(option)
}

/// Gets the material that opens or makes a slot. The prompt names `subject`.
pub fn load(ui: &Ui, source: &KeySource, subject: &str, purpose: Purpose) -> Result<Material> {
    ui.policy.check_kind(source.kind())?;
    // It goes to the terminal.
    let subject = &text::printable(subject);
    let loaded = match source.load(&Ask { subject, purpose, stdin: true }) {
        Ok(loaded) => loaded,
        // Ctrl-C at the prompt; the thread that waits for signals may run after this one.
        Err(SourceError::Terminal { source } | SourceError::Stdin { source })
            if source.kind() == io::ErrorKind::Interrupted =>
        {
            return Err(HostError::Interrupted.into());
        }
        Err(error) => return Err(error.into()),
    };
    loaded.warnings.iter().for_each(|warning| ui.warn(warning));
    Ok(loaded.material)
}

/// What opens a header: a source, for all slots or for one.
#[derive(Clone, Copy, Debug)]
pub struct Opener<'a> {
    source: &'a KeySource,
    slot: Option<u32>,
}

impl<'a> From<&'a KeySource> for Opener<'a> {
    fn from(source: &'a KeySource) -> Self {
        Opener { source, slot: None }
    }
}

/// Opens a header with a source's material, by its own slots.
pub fn try_slots<H: Header>(ui: &Ui, header: &H, material: &Material, named: Option<u32>) -> Result<Unlocked> {
    Ok(ui.policy.try_slots(header, material, named)?)
}

/// Opens a header. After a wrong passphrase at the prompt, asks again.
pub fn unlock<'a, H: Header>(ui: &Ui, header: &H, opener: impl Into<Opener<'a>>, subject: &Path) -> Result<Unlocked> {
    unlock_and_keep(ui, header, opener, subject).map(|(unlocked, _)| unlocked)
}

/// The same; also returns the material that opened it, to make a slot of.
pub fn unlock_and_keep<'a, H: Header>(
    ui: &Ui,
    header: &H,
    opener: impl Into<Opener<'a>>,
    subject: &Path,
) -> Result<(Unlocked, Material)> {
    ui.policy.check_suite(header.suite())?;
    let Opener { source, slot } = opener.into();
    let attempts = if source.is_interactive() && std::io::stdin().is_terminal() { ATTEMPTS_MAX } else { 1 };
    let mut attempt = 1;
    loop {
        let material = load(ui, source, &subject.display().to_string(), Purpose::Unlock)?;
        ui.detail(format_args!("opening {} with {source}", subject.display()));
        match ui.policy.unlock(header, &material, slot, subject) {
            Ok((unlocked, succession)) => {
                succession.iter().for_each(|succession| policy::tell(ui, succession));
                header
                    .keys()
                    .slot(unlocked.slot())
                    .and_then(|s| text::expiry_warning(s, unix_now()))
                    .iter()
                    .for_each(|w| ui.warn(w));
                return Ok((unlocked, material));
            }
            Err(error) if is_wrong_key(&error) && attempt < attempts => {
                attempt += 1;
                ui.warn("wrong passphrase, try again");
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn is_wrong_key(error: &lamassu_host::Error) -> bool {
    matches!(error.innermost(), lamassu_host::Error::Key(KeyError::WrongKey { .. }))
}

/// Refuses a vault's header that is not signed by the pinned administrator; a pin follows a key that the pinned one
/// has signed. Zones have no administrator.
pub fn check_pinned<H: Header>(ui: &Ui, header: &H) -> Result<()> {
    let succession = ui.policy.pins.check(header)?;
    succession.iter().for_each(|succession| policy::tell(ui, succession));
    Ok(())
}

/// The cost of a guess at a passphrase.
#[derive(clap::Args, Clone, Debug)]
pub struct CostArg {
    /// How long Argon2id may take on this machine to turn the passphrase into a key, in milliseconds. Measured now,
    /// then fixed for this slot
    #[arg(long, value_name = "MS", default_value_t = cost_default_ms(), value_parser = clap::value_parser!(u32).range(1..=60_000))]
    argon2_ms: u32,
}

fn cost_default_ms() -> u32 {
    u32::try_from(cost::TARGET.as_millis()).unwrap_or(1000)
}

impl CostArg {
    /// Measures the cost for passphrases; other material needs none.
    pub fn measure(&self, ui: &Ui, material: &Material) -> Argon2Params {
        if material.kind() != SlotKind::Passphrase {
            return cost::FALLBACK;
        }
        ui.detail("measuring the cost of Argon2id");
        cost::measure(Duration::from_millis(self.argon2_ms.into()))
    }
}
