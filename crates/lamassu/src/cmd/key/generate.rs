//! `lamassu key generate`: a fresh wrapping key in each form a source can have.

use crate::fault::Result;
use crate::output::{self, Ui};
use clap::ValueEnum;
use lamassu_crypto::{Secret, SecretBytes};
use lamassu_host::Error as HostError;
use lamassu_keys::{KeySource, SlotKind, header_file, recovery};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  lamassu key generate /root/vault.key
  lamassu key generate --kind hex office.hex
  lamassu key generate --kind recovery -            24 words for paper, on the terminal
  lamassu key generate 'kmip://kms.example/?name=vault#cert=/etc/me.pem'
      an AES-256 key at a KMIP server
  lamassu key generate server://keeper.example/vault
      a key at a Lamassu server
  lamassu key generate - | systemd-creds encrypt --name=vault - /etc/credstore.encrypted/vault";

/// Options of `key generate`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Generate {
    /// Format of the key file; all hold 256 random bits except `passphrase`: ten words with 110 bits
    #[arg(long, value_enum, default_value_t = KeyKind::Raw)]
    kind: KeyKind,
    /// File to create, readable only by its owner; must not exist. `-` is standard output; kmip:… and server:… make the
    /// key at a KMIP server or a Lamassu server, which keeps it
    file: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum KeyKind {
    Raw,
    Hex,
    Passphrase,
    Recovery,
}

pub fn run(ui: &Ui, args: &Generate) -> Result<()> {
    if let Some(source) = args.file.to_str().filter(|text| is_at_server(text)) {
        if args.kind != KeyKind::Raw {
            return Err(HostError::Usage("a key server makes keys of one kind; leave --kind out").into());
        }
        return at_server(ui, &source.parse()?);
    }
    let to_stdout = args.file == Path::new("-");
    if to_stdout && args.kind == KeyKind::Raw && std::io::stdout().is_terminal() {
        return Err(HostError::Usage(
            "32 raw bytes are of no use on a terminal: redirect standard output, or use --kind",
        )
        .into());
    }
    let text = text(args.kind)?;
    if to_stdout {
        return output::print_bytes(text.expose());
    }
    header_file::write_new(&args.file, text.expose())?;
    ui.note(format_args!("made a key; use it as {}:file:{}", slot_kind(args.kind).name(), args.file.display()));
    Ok(())
}

fn is_at_server(text: &str) -> bool {
    ["kmip:", "server:"].iter().any(|scheme| text.starts_with(scheme))
}

/// A fresh key where a source is.
pub fn at_server(ui: &Ui, source: &KeySource) -> Result<()> {
    let made = source.generate()?;
    match made.ids.as_slice() {
        [id] => ui.note(format_args!("made a key, active, with the identifier {id} for {source}")),
        ids => ui.note(format_args!("made keys, active, with the identifiers {} for {source}", ids.join(" and "))),
    }
    Ok(())
}

fn slot_kind(kind: KeyKind) -> SlotKind {
    match kind {
        KeyKind::Raw => SlotKind::Raw,
        KeyKind::Hex => SlotKind::Hex,
        KeyKind::Passphrase => SlotKind::Passphrase,
        KeyKind::Recovery => SlotKind::Recovery,
    }
}

fn text(kind: KeyKind) -> Result<SecretBytes> {
    let key = Secret::<32>::random()?;
    Ok(match kind {
        KeyKind::Raw => SecretBytes::new(key.expose().to_vec()),
        KeyKind::Hex => SecretBytes::filled_by(65, |line| {
            data_encoding::HEXLOWER.encode_mut(key.expose(), &mut line[..64]);
            line[64] = b'\n';
        }),
        KeyKind::Passphrase => recovery::passphrase_of(&key),
        KeyKind::Recovery => recovery::sheet(&key),
    })
}
