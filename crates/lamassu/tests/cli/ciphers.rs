//! Whatever kernel `LAMASSU_CPU` leaves, the bytes are the same.

use crate::support::{Bench, Ran, noise};
use lamassu_format::Suite;
use std::fs;

/// From nothing at all to everything that there is. What a processor lacks anyway is left out once more, and that is no
/// error.
const CPUS: [&str; 8] = ["portable", "library", "-aes,-sha", "-avx512", "-avx512,-sha", "-sha", "-vaes", ""];
const BLOCK: usize = 4096;

/// More blocks than the widest kernel has lanes, some of them equal, and a tail.
fn content() -> Vec<u8> {
    let mut content = noise(37 * BLOCK + 123, 5);
    content.copy_within(0..3 * BLOCK, 20 * BLOCK);
    content
}

/// The ciphertext of blocks in a backing file: what is in whole blocks, but for the pages of metadata, which are under
/// random nonces.
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
