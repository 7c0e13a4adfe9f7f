//! Sequential throughput of one encrypted file over a directory of the caller's choice, without a mount.
//! `cargo run --release -p lamassu-store --example throughput -- /dev/shm`

use lamassu_format::Suite;
use lamassu_store::backend::LocalBackend;
use lamassu_store::{Backend, File, FileContext};
use std::sync::Arc;
use std::time::Instant;

const LEN: u64 = 512 << 20;
const STEP: usize = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = std::env::args().nth(1).ok_or("give a directory")?;
    let backend = LocalBackend::open(&dir)?;
    for suite in Suite::ALL {
        let ctx = Arc::new(FileContext::to_measure(suite));
        let name = std::ffi::OsStr::new("lamassu-throughput.tmp");
        let backing = backend.root().create_file(name)?;
        let file = File::create(ctx, backing, "throughput")?;
        let data: Vec<u8> = (0..STEP + 4096).map(|i| ((i * 2654435761usize) >> 13) as u8).collect();
        let mut rates = Vec::new();
        for pass in 0..4 {
            let start = Instant::now();
            let mut buf = vec![0u8; STEP];
            for at in (0..LEN).step_by(STEP) {
                match pass {
                    0 => file.write_at(at, &data[(at >> 20) as usize % 4096..][..STEP])?,
                    1 | 3 => drop(file.read_at(at, &mut buf)?),
                    _ => file.write_at(at, &data[((at >> 20) as usize + 7) % 4096..][..STEP])?,
                }
            }
            if pass % 2 == 0 {
                file.sync()?;
            }
            rates.push(LEN as f64 / start.elapsed().as_secs_f64() / 1e6);
        }
        backend.root().unlink(name)?;
        println!(
            "{:>7}: write {:.0} MB/s, read {:.0}, overwrite {:.0}, read {:.0}",
            suite.name(),
            rates[0],
            rates[1],
            rates[2],
            rates[3]
        );
    }
    Ok(())
}
