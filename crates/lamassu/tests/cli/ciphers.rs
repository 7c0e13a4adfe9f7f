//! Whatever ciphers, the bytes are the same: every kernel by `LAMASSU_CPU`, and a device by `LAMASSU_ENGINE`.

use crate::mounts::is_mounted;
use crate::support::{Bench, Ran, noise};
use lamassu_format::Suite;
use std::fs;

/// From nothing at all to everything that there is. What a processor lacks anyway is left out once more, and that is no error.
const CPUS: [&str; 8] = ["portable", "library", "-aes,-sha", "-avx512", "-avx512,-sha", "-sha", "-vaes", ""];
const BLOCK: usize = 4096;

/// More blocks than the widest kernel has lanes, some of them equal, and a tail.
fn content() -> Vec<u8> {
    let mut content = noise(37 * BLOCK + 123, 5);
    content.copy_within(0..3 * BLOCK, 20 * BLOCK);
    content
}

/// The ciphertext of blocks in a backing file: what is in whole blocks, but for the pages of metadata, which are under random nonces.
fn ciphertext(b: &Bench, vault: &str, name: &str) -> Vec<Vec<u8>> {
    let stored = fs::read(b.stored(vault, name)).unwrap();
    stored.chunks(BLOCK).map(<[u8]>::to_vec).collect()
}

/// How many blocks stand at the same place with the same bytes, of how many.
fn alike(a: &[Vec<u8>], b: &[Vec<u8>]) -> (usize, usize) {
    assert_eq!(a.len(), b.len());
    (a.iter().zip(b).filter(|(a, b)| a == b).count(), a.len())
}

#[test]
fn a_vault_is_the_same_whatever_the_processor_has() {
    for suite in Suite::ALL.map(Suite::name) {
        let b = Bench::new();
        b.run(&format!("init --suite {suite} v")).ok();
        b.file("plain", &content());
        let run = |cpu: &str, line: &str| -> Ran {
            b.command(line.split_whitespace()).env("LAMASSU_CPU", cpu).output().unwrap().into()
        };
        for (n, cpu) in CPUS.iter().enumerate() {
            run(cpu, &format!("cp v plain vault:by-{n}")).ok();
        }
        let first = ciphertext(&b, "v", "by-0");
        for (n, cpu) in CPUS.iter().enumerate() {
            let (equal, of) = alike(&first, &ciphertext(&b, "v", &format!("by-{n}")));
            assert!(equal >= 37 && of <= 37 + 3, "{suite} {cpu}: {equal} of {of} blocks are equal");
            for reader in CPUS {
                // As each of them wrote, and with every block verified.
                assert_eq!(
                    run(reader, &format!("cat v by-{n}")).ok().out,
                    content(),
                    "{suite}: {cpu}, read by {reader}"
                );
            }
        }
        run("portable", "check v").ok();
    }
}

#[test]
fn a_device_writes_the_same_bytes() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    let mount = |engine: Option<&str>| -> Ran {
        let mut command = b.command(["mount", "v", "m"]);
        command.envs(engine.map(|engine| ("LAMASSU_ENGINE", engine)));
        command.output().unwrap().into()
    };
    let engines = [None, Some("device-sync"), Some("device")];
    let name = |engine: Option<&str>| engine.unwrap_or("threads").to_owned();
    for engine in engines {
        mount(engine).ok();
        fs::write(b.path("m").join(name(engine)), content()).unwrap();
        b.unmount("m");
    }
    let first = ciphertext(&b, "v", "threads");
    for engine in engines {
        let (equal, of) = alike(&first, &ciphertext(&b, "v", &name(engine)));
        assert!(equal >= 37 && of <= 37 + 3, "{engine:?}: {equal} of {of} blocks are equal");
        assert_eq!(b.run(&format!("cat v {}", name(engine))).ok().out, content());
        mount(engine).ok();
        for written in engines {
            assert!(fs::read(b.path("m").join(name(written))).unwrap() == content(), "{written:?}, read by {engine:?}");
        }
        b.unmount("m");
    }
    for wrong in ["", "gpu", "library", "device,device"] {
        mount(Some(wrong)).code(2).says("LAMASSU_ENGINE must be");
        assert!(!is_mounted(&b.path("m")));
    }
    b.run("check v").ok();
}
