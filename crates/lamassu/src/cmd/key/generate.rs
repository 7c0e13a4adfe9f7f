//! `lamassu key generate`: a fresh wrapping key in each form a source can have.

use crate::fault::Fault;
use crate::output::{self, Ui};
use anyhow::Result;
use clap::ValueEnum;
use lamassu_crypto::{Secret, SecretBytes};
use lamassu_keys::{SlotKind, header_file, recovery};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  lamassu key generate /root/vault.key
  lamassu key generate --kind hex office.hex
  lamassu key generate --kind recovery -            24 words for paper, on the terminal
  lamassu key generate - | systemd-creds encrypt --name=vault - /etc/credstore.encrypted/vault";

/// Options of `key generate`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Generate {
    /// How the key is written; all hold 256 random bits but `passphrase`, which is ten words with 110
    #[arg(long, value_enum, default_value_t = Kind::Raw)]
    kind: Kind,
    /// The file to make, readable by its owner alone; must not exist. `-` is standard output
    file: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Kind {
    Raw,
    Hex,
    Passphrase,
    Recovery,
}

pub fn run(ui: &Ui, args: &Generate) -> Result<()> {
    let to_stdout = args.file == Path::new("-");
    if to_stdout && args.kind == Kind::Raw && std::io::stdout().is_terminal() {
        return Err(
            Fault::Usage("32 raw bytes on a terminal help nobody: redirect standard output, or use --kind").into()
        );
    }
    let text = text(args.kind)?;
    if to_stdout {
        return output::print_bytes(text.expose());
    }
    header_file::write_new(&args.file, text.expose())?;
    ui.note(format_args!("made a key; use it as {}:file:{}", slot_kind(args.kind).name(), args.file.display()));
    Ok(())
}

fn slot_kind(kind: Kind) -> SlotKind {
    match kind {
        Kind::Raw => SlotKind::Raw,
        Kind::Hex => SlotKind::Hex,
        Kind::Passphrase => SlotKind::Passphrase,
        Kind::Recovery => SlotKind::Recovery,
    }
}

fn text(kind: Kind) -> Result<SecretBytes> {
    let key = Secret::<32>::random()?;
    Ok(match kind {
        Kind::Raw => SecretBytes::new(key.expose().to_vec()),
        Kind::Hex => SecretBytes::filled_by(65, |line| {
            data_encoding::HEXLOWER.encode_mut(key.expose(), &mut line[..64]);
            line[64] = b'\n';
        }),
        Kind::Passphrase => recovery::passphrase_of(&key),
        Kind::Recovery => recovery::sheet(&key),
    })
}
