//! What the tests of encrypted files share: a context, a seeded generator, a file in a store.
#![allow(dead_code)]

pub mod anchor;
pub mod crash;

use lamassu_crypto::compress::version_of;
use lamassu_crypto::oblivious::{Evaluate, KeyServerFault, Oblivious};
use lamassu_crypto::oprf::{Element, Evaluation, ServerKey};
use lamassu_crypto::{Engine, KeyRing, Secret};
use lamassu_format::{Codec, Compression, Domain, Geometry, PageNo, Profile, Suite};
use lamassu_store::backend::fault::FaultBackend;
use lamassu_store::backend::{Backend, BackendFile};
use lamassu_store::file::{AnchoredFiles, Durability, FileContext, Integrity, Rekey, Sessions};
use lamassu_store::{File, StoreError};
use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// SplitMix64.
pub struct Rng(pub u64);
impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e3779b97f4a7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
        z ^ (z >> 31)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

pub struct Setup {
    pub suite: Suite,
    pub block_size: u32,
    pub reserved: u16,
    pub integrity: Integrity,
    pub durability: Durability,
    pub read_only: bool,
    /// Whether files whose hash is not approved are refused.
    pub approved_only: bool,
    pub convergent: bool,
    pub domain: Domain,
    /// What blocks are compressed by.
    pub codec: Option<Codec>,
    /// Epochs of K_in and K_out whose keys are loaded.
    pub epochs: u8,
    /// Whether an anchor remembers the file.
    pub anchored: bool,
    /// Whether an fsync does not wait for the anchor, which is committed to at some time later. The file's entry is not
    /// durable before.
    pub at_intervals: bool,
    /// The server that the newest K_in takes tokens from, if it is oblivious.
    pub server: Option<&'static Server>,
    /// The profiles that the file gets in random workloads, one after another.
    pub profiles: &'static [Profile],
}

/// A server of oblivious keys in this process, which fails whenever it is told to, and at every `fails`th call.
#[derive(Default)]
pub struct Server {
    pub is_down: AtomicBool,
    is_mended: AtomicBool,
    pub fails: u32,
    pub calls: AtomicU32,
}

impl Server {
    /// One that fails at every `fails`th call, or never, as long as the tests run.
    pub fn failing(fails: u32) -> &'static Server {
        Box::leak(Box::new(Server { fails, ..Server::default() }))
    }

    /// It does not fail, as long as what is returned lives.
    pub fn mend(&'static self) -> Mended {
        self.is_mended.store(true, Ordering::Relaxed);
        Mended(self)
    }
}

pub struct Mended(&'static Server);

impl Drop for Mended {
    fn drop(&mut self) {
        self.0.is_mended.store(false, Ordering::Relaxed);
    }
}

impl Evaluate for &'static Server {
    fn place(&self) -> String {
        "server://test/zone".into()
    }

    fn evaluate(&self, blinded: &[Element]) -> Result<Evaluation, KeyServerFault> {
        let nth = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        if self.is_down.load(Ordering::Relaxed)
            || self.fails > 0 && nth.is_multiple_of(self.fails) && !self.is_mended.load(Ordering::Relaxed)
        {
            return Err(KeyServerFault::Unreachable { detail: "it is down".into() });
        }
        let key = ServerKey::derive(&Secret::new(&mut [3; 32]), b"test");
        Ok(key.evaluate(blinded).expect("evaluates"))
    }
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            suite: Suite::Aes,
            block_size: 4096,
            reserved: 62,
            integrity: Integrity::Full,
            durability: Durability::Ordered,
            read_only: false,
            approved_only: false,
            convergent: true,
            domain: Domain::Zone,
            codec: codec_of_mode(),
            epochs: 1,
            anchored: false,
            at_intervals: false,
            server: None,
            profiles: &[],
        }
    }
}

/// `LAMASSU_TEST_COMPRESS`, `lz4` or `zstd`: every test compresses that does not say otherwise.
pub fn codec_of_mode() -> Option<Codec> {
    match std::env::var("LAMASSU_TEST_COMPRESS").as_deref() {
        Ok("lz4") => Some(Codec::Lz4),
        Ok("zstd") => Some(Codec::Zstd(1)),
        Ok(other) => panic!("LAMASSU_TEST_COMPRESS is {other:?}, not lz4 or zstd"),
        Err(_) => None,
    }
}

impl Setup {
    pub fn compression(&self) -> Option<Compression> {
        let codec = self.codec.filter(|_| self.suite.marks_compressed());
        codec.map(|codec| compression(codec, self.suite, self.block_size))
    }

    /// Bytes to write: where blocks are compressed, some that do not.
    pub fn content(&self, len: usize, rng: &mut Rng) -> Vec<u8> {
        // Of workloads nothing else changes.
        let mut apart = Rng(rng.0);
        let bytes = fill(len, rng);
        match self.codec {
            Some(_) if apart.below(3) == 0 => (0..len).map(|_| apart.next() as u8 | 1).collect(),
            _ => bytes,
        }
    }

    pub fn context(&self) -> Arc<FileContext> {
        self.context_with(None)
    }

    pub fn context_with(&self, anchored: Option<Arc<AnchoredFiles>>) -> Arc<FileContext> {
        let oblivious = self.server.map(|server| {
            let public = *ServerKey::derive(&Secret::new(&mut [3; 32]), b"test").public();
            Arc::new(Oblivious::new(public, Arc::new(server)))
        });
        let newest = |number| oblivious.clone().filter(|_| number == u32::from(self.epochs));
        let inner: Vec<_> = epochs(1..=self.epochs, 1).into_iter().map(|(n, key)| (n, key, newest(n))).collect();
        let ring = KeyRing::of_epochs(self.suite, &inner, &epochs(1..=self.epochs, 2));
        Arc::new(FileContext {
            ring,
            geometry: Geometry::new(self.block_size, self.reserved).expect("good geometry"),
            engine: Arc::new(Engine::new(1)),
            integrity: self.integrity,
            durability: self.durability,
            domain: self.domain,
            compression: self.compression(),
            convergent_small_files: self.convergent && !self.domain.is_salted(),
            read_only: self.read_only,
            approved_only: self.approved_only,
            sessions: Arc::new(Sessions::all_interrupted()),
            anchored,
            report: Arc::new(|_, _| true),
        })
    }
}

/// Compression by the codec that is linked, with the default rounding.
pub fn compression(codec: Codec, suite: Suite, block_size: u32) -> Compression {
    let round = Compression::default_round(block_size);
    Compression::new(codec, version_of(codec), round, (suite, block_size)).expect("good compression")
}

/// Every profile that a suite can keep.
pub fn profiles(suite: Suite) -> Vec<Profile> {
    (0..=u8::MAX).filter_map(Profile::of_number).filter(|profile| profile.check(suite).is_ok()).collect()
}

/// Those whose blocks are verified on each read.
pub fn verified_profiles(suite: Suite) -> Vec<Profile> {
    profiles(suite).into_iter().filter(|profile| !profile.protection().is_unverified()).collect()
}

/// Steps of a change of profile, which is broken off after some of them. Whether it is done.
pub fn change_profile(file: &File, profile: Profile, steps_max: usize) -> Result<bool, StoreError> {
    if !file.begin_profile(profile)? {
        return Ok(true);
    }
    let mut from = Some(PageNo::ZERO);
    for _ in 0..steps_max {
        let Some(page) = from else { break };
        let step = file.rekey(Rekey::Profile, page)?;
        assert_eq!(step.damaged, 0);
        from = step.next;
    }
    match from {
        Some(_) => Ok(false),
        None => file.end_profile(),
    }
}

/// Keys of some epochs, newest first; `salt` tells K_in from K_out.
pub fn epochs(numbers: std::ops::RangeInclusive<u8>, salt: u8) -> Vec<(u32, Secret<32>)> {
    let key = |n: u8| Secret::new(&mut [salt.wrapping_add(n.wrapping_sub(1).wrapping_mul(16)); 32]);
    numbers.rev().map(|n| (n.into(), key(n))).collect()
}

pub fn name() -> &'static OsStr {
    OsStr::new("file")
}

/// Makes the test's file in `store`, durably.
pub fn create_in(store: &dyn Backend) -> Arc<dyn BackendFile> {
    let file = store.root().create_file(name()).expect("creates");
    store.sync().expect("syncs");
    file
}

/// Does `work`, and by another thread, from the `nth` change or barrier on that `work` asks of the store, `other`. The
/// store waits for it, no longer than `patience` from when it is awake: it may have to wait for `work`. Says whether it
/// had not to.
pub fn meanwhile(
    store: &FaultBackend,
    nth: u64,
    patience: Duration,
    work: impl FnOnce(),
    other: impl FnOnce() + Send,
) -> bool {
    let ((go, started), (tell, ended)) = (channel(), channel());
    let hook = Mutex::new(Some((go, ended)));
    let had_to_wait = Arc::new(Mutex::new(true));
    let (waits, from) = (had_to_wait.clone(), store.faults().changes() + nth);
    store.faults().rule(move |c| {
        if (c.call.is_change() || c.call.is_sync()) && c.changes >= from {
            let hook = hook.lock().expect("no panic").take();
            if let Some((go, ended)) = hook {
                let _ = go.send(());
                let _ = ended.recv();
                *waits.lock().expect("no panic") = ended.recv_timeout(patience).is_err();
            }
        }
        None
    });
    /// Takes the hook out, whatever happens: the other thread waits for it.
    struct Unhook<'a>(&'a FaultBackend);
    impl Drop for Unhook<'_> {
        fn drop(&mut self) {
            self.0.faults().clear_rules();
        }
    }
    std::thread::scope(|s| {
        let unhook = Unhook(store);
        s.spawn(move || {
            let _ = started.recv(); // an error: `work` asked for fewer changes
            let _ = tell.send(());
            other();
            let _ = tell.send(());
        });
        work();
        drop(unhook);
    });
    !*had_to_wait.lock().expect("no panic")
}

/// The backing file as it is.
pub fn raw(store: &dyn Backend) -> Arc<dyn BackendFile> {
    store.root().open_file(name(), true).expect("opens")
}

/// Flips a bit of the backing file.
pub fn flip(store: &dyn Backend, offset: u64) {
    let (file, mut byte) = (raw(store), [0]);
    assert_eq!(file.read_at(offset, &mut byte).expect("reads"), 1, "there is something to damage");
    file.write_at(offset, &[byte[0] ^ 0x10]).expect("writes");
}

/// One 4096-byte sector of the backing file.
pub fn sector(store: &dyn Backend, n: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    raw(store).read_at(n * 4096, &mut bytes).expect("reads");
    bytes
}

/// Bytes that tell what wrote them.
pub fn fill(len: usize, rng: &mut Rng) -> Vec<u8> {
    let seed = rng.next();
    (0..len).map(|i| (seed >> (i % 7 * 8)) as u8 ^ (i / 512) as u8).map(|b| b | 1).collect()
}
