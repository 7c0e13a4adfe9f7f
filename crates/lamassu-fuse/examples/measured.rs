//! Mounts a vault whose ciphers are measured: `measured HOW INTEGRITY KEY DIR MOUNTPOINT [-o OPTIONS]…`, in the
//! foreground until it is unmounted. For `scripts/bench` alone.
//!
//! HOW is `device-sync` or `device`, a loop-back device in the place of the cipher threads, which is awaited for each
//! block or gets whole batches; or `stages`: one cipher thread, and the seconds of each stage on standard error at the
//! end. INTEGRITY is `full` or `metadata`. KEY is a file of 32 bytes, the secret of a slot of kind `raw`.

use lamassu_crypto::SecretBytes;
use lamassu_crypto::engine::device::Device;
use lamassu_crypto::engine::loop_back::{DEPTH, LoopBack};
use lamassu_crypto::stages;
use lamassu_format::header::VaultHeader;
use lamassu_format::name;
use lamassu_fuse::{MountOptions, mount};
use lamassu_keys::{Material, SlotKind, header_file, unlock};
use lamassu_store::backend::LocalBackend;
use lamassu_vault::{Durability, Freshness, Integrity, Options, Vault};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

const USAGE: &str = "measured device-sync|device|stages full|metadata KEY DIR MOUNTPOINT [-o OPTIONS]…";

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [how, integrity, key, dir, point, rest @ ..] = args.as_slice() else { return Err(USAGE.into()) };
    let device: Option<Arc<dyn Device>> = match how.as_str() {
        "device-sync" => Some(Arc::new(LoopBack::one_at_a_time())),
        "device" => Some(Arc::new(LoopBack::new(1, DEPTH))),
        "stages" => None,
        _ => return Err(USAGE.into()),
    };
    let integrity = match integrity.as_str() {
        "full" => Integrity::Full,
        "metadata" => Integrity::Metadata,
        _ => return Err(USAGE.into()),
    };
    let mut mount_options = MountOptions { fsname: dir.clone(), ..MountOptions::default() };
    for pair in rest.chunks(2) {
        match pair {
            [flag, words] if flag == "-o" => mount_options.apply(words)?,
            _ => return Err(USAGE.into()),
        }
    }
    if device.is_none() {
        stages::measure();
    }
    let header: VaultHeader = header_file::read(&Path::new(dir).join(name::HEADER))?;
    let material = Material::new(SlotKind::Raw, SecretBytes::new(std::fs::read(key)?))?;
    let ring = unlock(&header, &material)?.key_ring(header.suite())?;
    let options = Options {
        integrity,
        durability: Durability::Ordered,
        read_only: false,
        approved_only: false,
        threads: 1,
        device,
        anchor: None,
        freshness: Freshness::default(),
        events: Default::default(),
        upkeep: Default::default(),
        by_turns: false,
    };
    let vault = Vault::open(Arc::new(LocalBackend::open(Path::new(dir))?), &header, ring, options)?;
    mount(Arc::new(vault), Path::new(point), &mount_options)?.wait()?;
    if let Some(times) = stages::times() {
        eprintln!("seconds by stage: {times}");
    }
    Ok(())
}
