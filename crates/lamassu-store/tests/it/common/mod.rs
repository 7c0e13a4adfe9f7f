//! What the tests of encrypted files share: a context, a seeded generator, a file in a store.
#![allow(dead_code)]

pub mod anchor;
pub mod crash;

use lamassu_crypto::{Engine, KeyRing, Secret};
use lamassu_format::{Domain, Geometry, PageNo, Profile, Suite};
use lamassu_store::backend::fault::FaultBackend;
use lamassu_store::backend::{Backend, BackendFile};
use lamassu_store::file::{AnchoredFiles, Durability, FileContext, Integrity, Rekey, Sessions};
use lamassu_store::{File, StoreError};
use std::ffi::OsStr;
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
    /// Epochs of K_in and K_out whose keys are loaded.
    pub epochs: u8,
    /// Whether an anchor remembers the file.
    pub anchored: bool,
    /// Whether an fsync does not wait for the anchor, which is committed to at some time later. The file's entry is not
    /// durable before.
    pub at_intervals: bool,
    /// The profiles that the file gets in random workloads, one after another.
    pub profiles: &'static [Profile],
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
            epochs: 1,
            anchored: false,
            at_intervals: false,
            profiles: &[],
        }
    }
}

impl Setup {
    pub fn context(&self) -> Arc<FileContext> {
        self.context_with(None)
    }

    pub fn context_with(&self, anchored: Option<Arc<AnchoredFiles>>) -> Arc<FileContext> {
        let ring = KeyRing::of_epochs(self.suite, &epochs(1..=self.epochs, 1), &epochs(1..=self.epochs, 2));
        Arc::new(FileContext {
            ring,
            geometry: Geometry::new(self.block_size, self.reserved).expect("good geometry"),
            engine: Arc::new(Engine::new(1)),
            integrity: self.integrity,
            durability: self.durability,
            domain: self.domain,
            convergent_small_files: self.convergent && !self.domain.is_salted(),
            read_only: self.read_only,
            approved_only: self.approved_only,
            sessions: Arc::new(Sessions::all_interrupted()),
            anchored,
            report: Arc::new(|_, _| {}),
        })
    }
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
