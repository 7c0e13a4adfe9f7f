//! What a process still holds of a vault's keys after it has closed the vault: its whole memory is searched, as a core
//! dump of it would be.
//!
//! A child process opens a vault, works with it and closes it; this one, which made the vault and so knows every key,
//! reads the child's memory through /proc while the vault is open (the search finds keys) and after it was closed (it
//! finds none).
#![allow(clippy::unwrap_used)] // helpers outside of #[test] functions; a panic is a failed test

#[path = "it/common/mod.rs"]
mod common;

use common::{Short, me, n, options};
use lamassu_crypto::{Engine, Salts, SecretBytes, wrap};
use lamassu_format::header::{Header, NameMode, VaultHeader};
use lamassu_format::{Geometry, Suite, name};
use lamassu_keys::history::EventKind;
use lamassu_keys::{
    Argon2Params, Ask, Epoch, Event, KeySource, Material, NewSlot, NewVault, Purpose, SlotKind, Update, Zone,
    create_vault, header_file, unlock,
};
use lamassu_store::backend::LocalBackend;
use lamassu_vault::{SetXattr, Vault};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

const DIR: &str = "LAMASSU_TEST_MEMORY_DIR";
/// Whether the child works with the vault, or opens its header alone.
const WORK: &str = "LAMASSU_TEST_MEMORY_WORK";
const SUITES: [Suite; 4] = [Suite::Aes, Suite::Paper, Suite::Blake3, Suite::Chacha];

/// What is searched for: 16 bytes in a row.
struct Needle {
    what: String,
    bytes: [u8; 16],
}

#[derive(Default)]
struct Needles(Vec<Needle>);

impl Needles {
    fn add(&mut self, what: &str, bytes: &[u8]) {
        for (i, part) in bytes.chunks_exact(16).enumerate() {
            self.0.push(Needle { what: format!("{what} [{}..]", 16 * i), bytes: part.try_into().unwrap() });
        }
    }

    /// A key of AES-256, and each round key of its schedule: whatever order a library keeps them in.
    fn add_aes(&mut self, what: &str, key: &[u8; 32]) {
        self.add(&format!("{what}, round key"), &schedule(key));
    }

    fn add_epoch(&mut self, suite: Suite, name: &str, epoch: &Epoch) {
        let key = epoch.key().expose();
        self.add_aes(name, key);
        self.add(&format!("{name} in hex"), hex(key).as_bytes());
        let derived =
            |purpose: &str| wrap::hkdf::<64>(key, b"", format!("lamassu v1 {} {purpose}", suite.name()).as_bytes());
        for purpose in
            ["page seal", "record seal", "page select", "record select", "page convergent", "block hash", "block key"]
        {
            let (first, _) = derived(purpose).expose().split_first_chunk::<32>().map(|(a, b)| (*a, b.len())).unwrap();
            self.add_aes(&format!("{name}: {purpose}"), &first);
        }
        self.add(&format!("{name}: xattr name"), derived("xattr name").expose());
    }

    /// Which of them stand in a process's memory, and where.
    fn found_in(&self, pid: u32) -> Vec<String> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
        let mut begins = vec![false; 1 << 16];
        let start = |b: &[u8]| usize::from(u16::from_le_bytes([b[0], b[1]]));
        self.0.iter().for_each(|needle| begins[start(&needle.bytes)] = true);
        let mut found = Vec::new();
        let mut bytes = 0;
        for line in maps.lines().filter(|line| !line.contains("[vvar") && !line.contains("[vsyscall")) {
            let (range, rest) = line.split_once(' ').unwrap();
            let (from, to) = range.split_once('-').unwrap();
            let parse = |text| u64::from_str_radix(text, 16).unwrap();
            let (from, to) = (parse(from), parse(to));
            // Nothing was written into what is mapped from a file for reading alone: most of it is the program.
            let is_of_a_file = rest.contains(" /");
            if !rest.starts_with('r') || (is_of_a_file && !rest.starts_with("rw")) {
                continue;
            }
            let mut content = vec![0; usize::try_from(to - from).unwrap()];
            // Guard pages, and pages behind the end of a mapped file.
            let Ok(read) = memory.read_at(&mut content, from) else { continue };
            content.truncate(read);
            bytes += read;
            for (at, window) in content.windows(16).enumerate().filter(|(_, w)| begins[start(w)]) {
                for needle in self.0.iter().filter(|needle| needle.bytes == window) {
                    found.push(format!("{} at {:x} in {rest}", needle.what, from + at as u64));
                }
            }
        }
        assert!(bytes > 1 << 20, "the memory was read");
        found
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// FIPS 197 §5.2: the 15 round keys of AES-256.
fn schedule(key: &[u8; 32]) -> Vec<u8> {
    let mut words: Vec<[u8; 4]> = key.chunks_exact(4).map(|w| w.try_into().unwrap()).collect();
    let mut rcon = 1u8;
    for i in 8..60 {
        let mut t = words[i - 1];
        if i % 8 == 0 {
            t.rotate_left(1);
            t = t.map(sub);
            t[0] ^= rcon;
            rcon <<= 1;
        } else if i % 8 == 4 {
            t = t.map(sub);
        }
        words.push(std::array::from_fn(|j| words[i - 8][j] ^ t[j]));
    }
    words.concat()
}

/// The S-box: the inverse in GF(2⁸), then an affine map.
fn sub(x: u8) -> u8 {
    let mul = |mut a: u8, mut b: u8| {
        let mut product = 0;
        while b > 0 {
            product ^= if b & 1 == 1 { a } else { 0 };
            a = (a << 1) ^ if a >> 7 == 1 { 0x1b } else { 0 };
            b >>= 1;
        }
        product
    };
    let inverse = (0..=255u8).find(|y| mul(x, *y) == 1).unwrap_or(0);
    (0..5).fold(0x63, |sum, i| sum ^ inverse.rotate_left(i))
}

#[test]
fn the_schedule_is_that_of_fips_197() {
    let key: [u8; 32] = std::array::from_fn(|i| i as u8);
    let words = schedule(&key);
    // Appendix A.3 has another key; this is C.3's, whose last round key the standard prints.
    assert_eq!(hex(&words[32..48]), "a573c29fa176c498a97fce93a572c09c");
    assert_eq!(hex(&words[224..240]), "24fc79ccbf0979e9371ac23c6d68de36");
}

/// The vault, and everything secret about it.
fn vault(dir: &Path, suite: Suite) -> Needles {
    // One that does not stand in the program itself.
    let passphrase = hex(lamassu_crypto::Secret::<32>::random().unwrap().expose());
    let material = Material::new(SlotKind::Passphrase, SecretBytes::new(passphrase.clone().into())).unwrap();
    let slot = NewSlot { material: &material, cost: Argon2Params::new(64, 1, 1).unwrap(), label: "", created: 1 };
    let geometry = Geometry::new(4096, 8).unwrap();
    let names = NameMode::Encrypted;
    let new = NewVault {
        domain: lamassu_format::Domain::Zone,
        suite,
        geometry,
        names,
        name_max: 255,
        convergent_small_files: true,
        compression: None,
        zone: Zone::Private,
        created: 1,
    };
    let (mut header, keys) = create_vault(&new, &slot).unwrap();
    Vault::make_tree(&LocalBackend::open(dir).unwrap(), &header, &keys.key_ring(suite).unwrap()).unwrap();
    let update = Update::begin(&dir.join(name::HEADER), &lamassu_keys::nobody()).unwrap();
    update.create_recorded(&mut header, &keys, &[Event::new(EventKind::Created)]).unwrap();
    std::fs::write(dir.with_extension("passphrase"), &passphrase).unwrap();

    let slot = &header.keys().slots[0];
    let cost = Argon2Params::new(64, 1, 1).unwrap();
    let stretched = wrap::argon2id(passphrase.as_bytes(), &slot.salt, cost).unwrap();
    let wrapping = wrap::hkdf(stretched.expose(), &slot.salt, b"lamassu v1 slot");
    let aad = [&b"lamassu v1 slot"[..], &header.id().0, &slot.id.to_le_bytes()].concat();
    let content = wrap::open(&wrapping, &slot.nonce, &aad, &slot.wrapped).unwrap();
    let (file_key, seed) = content.expose().split_first_chunk::<32>().unwrap();

    let mut needles = Needles::default();
    needles.add("passphrase", passphrase.as_bytes());
    needles.add("stretched passphrase", stretched.expose());
    needles.add_aes("wrapping key", wrapping.expose());
    needles.add_aes("file key", file_key);
    needles.add("administrator's seed", seed);
    for purpose in ["keychain", "history", "header"] {
        let info = format!("lamassu v1 {purpose}");
        needles.add_aes(&format!("{purpose} key"), wrap::hkdf(file_key, b"", info.as_bytes()).expose());
    }
    needles.add_epoch(suite, "K_in", &keys.keychain().inner()[0]);
    needles.add_epoch(suite, "K_out", &keys.keychain().outer()[0]);
    let mut blocks = large();
    let mut block_keys = vec![[0; 32]; blocks.len() / 4096];
    let ring = keys.key_ring(suite).unwrap();
    Engine::new(1).seal(&ring.inner(), Salts::EMPTY, &mut blocks, 4096, &mut block_keys).unwrap();
    block_keys.iter().enumerate().for_each(|(n, key)| needles.add(&format!("block key {n}"), key));
    needles
}

/// What the child's large file holds: as many different blocks.
fn large() -> Vec<u8> {
    (0..3u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// What the child does. Not inlined: what it leaves on the stack must lie where later calls could leave it too.
#[inline(never)]
fn open_work_and_close(dir: &Path, work: bool, say: &mut dyn FnMut(&str)) {
    let source: KeySource = format!("passphrase:file:{}", dir.with_extension("passphrase").display()).parse().unwrap();
    let material = source.load(&Ask { subject: "test", purpose: Purpose::Unlock, stdin: false }).unwrap().material;
    let header: VaultHeader = header_file::read(&dir.join(name::HEADER)).unwrap();
    let keys = unlock(&header, &material).unwrap();
    let ring = keys.key_ring(header.suite()).unwrap();
    if !work {
        say("open");
        drop((ring, keys, material));
        say("closed");
        return;
    }
    let backend = Arc::new(LocalBackend::open(dir).unwrap());
    let vault = Vault::open(backend, &header, ring, lamassu_vault::Options { threads: 2, ..options(false) }).unwrap();
    let data = large();
    vault.dir("d");
    vault.put("d/large", &data);
    vault.put("d/small", b"small");
    vault.symlink(vault.ino("d"), n("link"), &[b'x'; 300], me()).unwrap();
    vault.set_xattr(vault.ino("d/small"), n("user.colour"), b"red", SetXattr::Any).unwrap();
    assert_eq!(vault.get("d/large"), data);
    assert_eq!(vault.list("d"), ["large", "link", "small"]);
    vault.clean();
    // An open file has its pages in memory, with the keys of its blocks.
    let held = vault.open_file(vault.ino("d/large"), common::RO).unwrap();
    assert_eq!(vault.read(held, 0, &mut [0; 4096]).unwrap(), 4096);
    keys.history(dir, &header).unwrap().note(Event::new(EventKind::Loaded)).unwrap();
    say("open");
    vault.close().unwrap();
    drop((vault, keys, material));
    say("closed");
}

/// Started by the test below, in a process of its own.
#[test]
#[ignore = "the child of the other test"]
fn child() {
    let dir = std::env::var_os(DIR).expect("started by the other test");
    let mut line = String::new();
    open_work_and_close(Path::new(&dir), std::env::var_os(WORK).is_some(), &mut |word| {
        println!("\n{word}");
        line.clear();
        std::io::stdin().read_line(&mut line).unwrap();
    });
}

struct Watched {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Watched {
    fn start(dir: &Path, work: bool) -> Watched {
        let mut command = Command::new(std::env::current_exe().unwrap());
        if work {
            command.env(WORK, "1");
        }
        let mut child = command
            .args(["--ignored", "--exact", "child", "--nocapture"])
            .env(DIR, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Watched { child, stdin, stdout }
    }

    fn until(&mut self, word: &str) {
        let mut line = String::new();
        while line.trim() != word {
            line.clear();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "the child ended before it said {word:?}");
        }
    }

    fn go_on(&mut self) {
        self.stdin.write_all(b"\n").unwrap();
    }
}

/// What is left in a process that had a vault of each suite open.
fn left_after(work: bool) -> Vec<String> {
    let mut left = Vec::new();
    for suite in SUITES {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("vault");
        std::fs::create_dir(&dir).unwrap();
        let needles = vault(&dir, suite);
        let mut watched = Watched::start(&dir, work);
        watched.until("open");
        // The search finds what is there: each key that an open vault has to hold.
        let found = needles.found_in(watched.child.id());
        let mut there = vec![
            "passphrase [0",
            "file key",
            "administrator's seed",
            "K_in, round key [0",
            "K_out, round key [16",
            "K_out: page select",
            "K_out: xattr name [48",
        ];
        there.extend(work.then_some("block key 0"));
        // An expanded key, deep in its schedule.
        there.extend((suite != Suite::Chacha).then_some("K_out: page seal, round key [112"));
        for what in there {
            assert!(found.iter().any(|f| f.starts_with(what)), "{}: {what} is not found: {found:#?}", suite.name());
        }
        watched.go_on();
        watched.until("closed");
        left.extend(needles.found_in(watched.child.id()).into_iter().map(|f| format!("{}: {f}", suite.name())));
        watched.go_on();
        assert!(watched.child.wait().unwrap().success());
    }
    left
}

#[test]
fn nothing_of_a_key_is_left_when_a_vault_was_closed() {
    let left = left_after(true);
    assert!(left.is_empty(), "{} left:\n{}", left.len(), left.join("\n"));
}

/// Nothing that was done afterwards has overwritten by chance what opening left.
#[test]
fn nothing_of_a_key_is_left_when_a_header_was_opened_and_dropped() {
    let left = left_after(false);
    assert!(left.is_empty(), "{} left:\n{}", left.len(), left.join("\n"));
}
