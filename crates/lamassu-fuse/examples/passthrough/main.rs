//! Mounts a directory as it is: `passthrough DIR MOUNTPOINT [-o OPTIONS]…`, in the foreground until it is unmounted.
//!
//! For benchmarks and tests alone. It encrypts nothing and verifies nothing, so it is no part of the program that users
//! get.

use lamassu_fuse::{MountOptions, mount};
use lamassu_plain::PlainFs;
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit};
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
    // The kernel has applied the caller's by the time a request arrives.
    rustix::process::umask(Mode::empty());
    raise_descriptor_limit();
    let fs = Arc::new(PlainFs::open(Path::new(dir))?);
    mount(fs, Path::new(point), &options)?.wait()?;
    Ok(())
}

/// Up to `fs.nr_open` for root, up to the hard limit for other users.
fn raise_descriptor_limit() {
    let now = rustix::process::getrlimit(Resource::Nofile);
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|s| s.trim().parse::<u64>().ok());
    if let Some(most) = most.filter(|most| now.maximum.is_some_and(|max| *most > max)) {
        let all = Rlimit { current: Some(most), maximum: Some(most) };
        if rustix::process::setrlimit(Resource::Nofile, all).is_ok() {
            return;
        }
    }
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: now.maximum, ..now }) {
        tracing::debug!(%error, "the limit on open files stays as it is");
    }
}
