//! Mounts a directory as it is: `passthrough DIR MOUNTPOINT [-o OPTIONS]…`, in the foreground until it is unmounted.
//!
//! For benchmarks and tests alone. It encrypts nothing and verifies nothing, so it is no part of the program that users
//! get.

mod plain;

use lamassu_fuse::{MountOptions, mount};
use plain::PlainFs;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

const USAGE: &str = "passthrough DIR MOUNTPOINT [-o OPTIONS]…";
/// The type that mount(8) shows. Such a mount must not be taken for a vault.
const SUBTYPE: &str = "lamassu-passthrough";

fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, point, rest @ ..] = args.as_slice() else { return Err(USAGE.into()) };
    let mut options = MountOptions { fsname: dir.clone(), subtype: SUBTYPE.into(), ..MountOptions::default() };
    for pair in rest.chunks(2) {
        let [flag, words] = pair else { return Err(USAGE.into()) };
        if flag != "-o" {
            return Err(format!("unknown argument {flag}: {USAGE}").into());
        }
        options.apply(words)?;
    }
    let fs = Arc::new(PlainFs::open(Path::new(dir))?);
    mount(fs, Path::new(point), &options)?.wait()?;
    Ok(())
}
