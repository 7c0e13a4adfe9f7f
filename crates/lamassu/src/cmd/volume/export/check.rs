//! `volume export --check`: whether an export with these options would start. Nothing is served or written, and nothing
//! is locked but anchors, so it may run while the export that is to be restarted still serves.

use super::Args;
use crate::fault::{Context, Fault, Result};
use crate::keys::KeyArg;
use crate::open;
use crate::output::Ui;
use lamassu_host::FaultKind;
use lamassu_vault::FileSystem;
use lamassu_volume::{Name, Volumes};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

/// What nbdkit reads from the directory of certificates. The first is the authority that clients are verified by.
const CERTIFICATES: [&str; 3] = ["ca-cert.pem", "server-cert.pem", "server-key.pem"];

/// Checks the options, nbdkit with its plugin and filters, the files of TLS, the keys, and the volumes that are named.
pub fn check(ui: &Ui, args: &Args) -> Result<()> {
    args.words(ui)?;
    loads(args)?;
    tls_files(args)?;
    if let Some(dir) = args.socket.as_ref().and_then(|socket| socket.parent()).filter(|dir| *dir != Path::new("")) {
        dir.metadata().with_context(|| dir.display())?;
    }
    for (n, vault) in args.vaults.iter().enumerate() {
        let (_, dir) = Args::named(vault);
        let key = KeyArg::of(args.key.get(n).or(args.key.first()).cloned());
        has_volumes(ui, args, dir, &key)?;
    }
    ui.detail("an export with these options can be started");
    Ok(())
}

/// Whether nbdkit finds and loads plugin and filters.
fn loads(args: &Args) -> Result<()> {
    let mut command = Command::new(&args.nbdkit);
    args.filters.iter().for_each(|filter| _ = command.arg("--filter").arg(filter));
    command.arg("--dump-plugin").arg(args.plugin()?).stdin(Stdio::null()).stderr(Stdio::inherit());
    let said = command.output().map_err(|source| Fault::NoNbdkit { program: args.nbdkit.clone(), source })?;
    match said.status.success() {
        true => Ok(()),
        false => Err(Fault::NbdkitEnded { status: said.status }.into()),
    }
}

/// Whether the files are there that TLS needs: nbdkit names none of them.
pub(super) fn tls_files(args: &Args) -> Result<()> {
    let readable = |option: &str, file: &Path| -> Result<()> {
        File::open(file).map(drop).with_context(|| format!("{option}: {}", file.display()))
    };
    if let Some(dir) = &args.tls_certificates {
        CERTIFICATES.iter().try_for_each(|name| readable("--tls-certificates", &dir.join(name)))?;
    }
    args.tls_psk.iter().try_for_each(|file| readable("--tls-psk", file))
}

/// Whether the key opens a vault, and the named volumes are in it.
fn has_volumes(ui: &Ui, args: &Args, dir: &Path, key: &KeyArg) -> Result<()> {
    let unsealed = open::unlocked(ui, dir, key)?;
    let served = match unsealed.open_forest(open::options(true)) {
        // By the export that there is. An anchor has one user at a time, also for reading.
        Err(error) if matches!(FaultKind::from(&error), FaultKind::Locked | FaultKind::AnchorLocked) => {
            ui.detail(format_args!("{} is open elsewhere: its volumes were not looked for", dir.display()));
            return Ok(());
        }
        served => served?,
    };
    let volumes = Volumes::of(served.forest());
    let find = |name: &String| {
        volumes.info(&name.parse::<Name>()?).map(drop).with_context(|| format!("vault {}", dir.display()))
    };
    let found = args.volumes.iter().try_for_each(find);
    served.forest().close()?;
    found
}
