//! Mounts a directory as it is: `passthrough DIR MOUNTPOINT [-o OPTIONS]`, in the foreground until it is unmounted.

use lamassu_fuse::plain::PlainFs;
use lamassu_fuse::{MountOptions, mount};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut options = MountOptions { fsname: "passthrough".into(), ..MountOptions::default() };
    let [dir, point, rest @ ..] = args.as_slice() else { return Err("passthrough DIR MOUNTPOINT [-o OPTIONS]".into()) };
    if let [flag, words] = rest {
        if flag != "-o" {
            return Err(format!("unknown argument {flag}").into());
        }
        options.apply(words)?;
    }
    let fs = Arc::new(PlainFs::open(Path::new(dir))?);
    mount(fs, Path::new(point), &options)?.wait()?;
    Ok(())
}
