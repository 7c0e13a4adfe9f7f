//! Runs the proxy from its start to a signal.

use super::ProviderConfig;
use super::admission::{Admission, Most, Told, now};
use super::published::{Customer, Memory};
use crate::door::Tls;
use crate::objects::{Modes, Objects, random_name};
use crate::run::{Attending, attend};
use crate::s3::Users;
use crate::secrets::open_at_once;
use crate::served::{Served, of_buckets, sweeps};
use crate::{GatewayError, Result, s3, watch};
use data_encoding::HEXLOWER;
use lamassu_access::kem;
use lamassu_crypto::{Secret, secret::without_trace};
use lamassu_plain::PlainFs;
use parking_lot::RwLock;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::{self, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// File name in the proxy's state directory: 32 bytes.
const KEY_FILE: &str = "proxy.key";
/// File names of the locks in the directories of state and store; there is one proxy for each.
const STATE_LOCK: &str = "proxy.lock";
const STORE_LOCK: &str = "store.lock";
/// Only the proxy's user can use objects and folders.
const MODES: Modes = Modes { file: 0o600, dir: 0o700 };
/// How often publications are read.
const READ_EVERY: Duration = Duration::from_secs(1);
/// How long the start waits for publications. A tenant without publications is refused until they are read.
const FIRST_WITHIN: Duration = Duration::from_secs(5);

/// Reads all files that a configuration names, and the available publications of tenants.
///
/// # Errors
/// [`GatewayError`].
pub fn check(config: &ProviderConfig) -> Result<()> {
    config.front().read_tls()?;
    for dir in [&config.store, &config.state] {
        if dir.exists() {
            check_private(dir)?;
        }
    }
    if config.state.join(KEY_FILE).exists() {
        drop(read_key(&config.state)?);
        drop(Memory::open(&config.state)?);
    }
    Ok(())
}

/// The proxy's public key, for `lamassu policy init`; makes the key if there is none.
///
/// # Errors
/// [`GatewayError::File`], [`GatewayError::NotPrivate`].
pub fn public_key(config: &ProviderConfig) -> Result<String> {
    make_private(&config.state)?;
    Ok(HEXLOWER.encode(&kem::public(&read_key(&config.state)?)))
}

/// Serves until SIGTERM or SIGINT. `ready` is called with the address.
///
/// # Errors
/// [`GatewayError`].
pub fn serve(config: &ProviderConfig, ready: Box<dyn FnOnce(SocketAddr) + Send>) -> Result<()> {
    make_private(&config.state)?;
    make_private(&config.store)?;
    // Another one's objects that are being written would be taken for leftovers.
    let _held = (hold(&config.state, STATE_LOCK)?, hold(&config.store, STORE_LOCK)?);
    let (private, memory) = (read_key(&config.state)?, Memory::open(&config.state)?);
    let (front, tls) = (config.front(), config.front().read_tls()?);
    let path = &config.store;
    let fs =
        PlainFs::open(path).map_err(|source| GatewayError::Buckets { path: path.display().to_string(), source })?;
    let objects = Objects::open(Arc::new(fs), "/", MODES, front.listing_max());
    let objects = Arc::new(objects.map_err(|error| of_buckets("/", error))?);
    let tenants = config.tenants().map_err(|detail| GatewayError::Config { path: path.clone(), detail })?;
    for tenant in &tenants {
        make_private(&path.join(&tenant.bucket))?;
    }
    let customers: Vec<_> = tenants.into_iter().map(|tenant| Arc::new(Customer::new(tenant))).collect();
    let admission = Admission {
        private,
        customers: customers.iter().map(|one| (one.config.bucket.clone(), one.clone())).collect::<HashMap<_, _>>(),
        most: Most { credential_seconds: config.credential_seconds_max, status_seconds: config.status_seconds_max },
        told: Told::default(),
    };
    let stopping = Arc::new(AtomicBool::new(false));
    read_all(customers, move |customer| customer.read(&memory, now()), (READ_EVERY, FIRST_WITHIN), &stopping)?;
    // An older version holds no lock, but may have the address.
    let (listens, told) = mpsc::channel();
    let sweeping = sweeps(Served::Files(objects.clone()), &stopping, move || told.recv().is_ok())?;
    let ready = move |address| {
        let _ = listens.send(());
        ready(address);
    };
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.max_blocking_threads(crate::queue::THREADS).enable_all().build();
    let runtime = runtime.map_err(|source| GatewayError::System { op: "start threads", source })?;
    let tls: Tls = Arc::new(RwLock::new(tls));
    let reloaded = tls.clone();
    let attending = Attending {
        service: s3::service(&front, objects.clone(), Users::Admitted),
        front,
        admit: Some(Arc::new(admission)),
        tls,
        health: Arc::new(move || objects.check().map_err(|error| error.to_string())),
        ready: Box::new(ready),
        reload: Arc::new({
            let config = config.clone();
            move || reload(&config, &reloaded)
        }),
    };
    // Only a signal ends the proxy: there is no mount.
    let (_ends, ended) = watch::channel(false);
    let served = runtime.block_on(attend(attending, ended));
    runtime.shutdown_timeout(Duration::from_secs(60));
    stopping.store(true, Ordering::Relaxed);
    sweeping.thread().unpark();
    let _ = sweeping.join();
    served
}

/// Reads publications periodically, each tenant's on a thread of its own: an unresponsive share blocks only its own
/// thread, also at the end. Returns when each tenant was read once, or after `first`.
fn read_all<T: Send + Sync + 'static>(
    all: Vec<Arc<T>>,
    read: impl Fn(&T) + Send + Sync + 'static,
    (every, first): (Duration, Duration),
    stopping: &Arc<AtomicBool>,
) -> Result<()> {
    let (read, count, (tell, told)) = (Arc::new(read), all.len(), mpsc::channel());
    for one in all {
        let (read, stopping, tell) = (read.clone(), stopping.clone(), tell.clone());
        let reading = move || {
            while !stopping.load(Ordering::Relaxed) {
                read(&one);
                // The receiver is gone after the start.
                let _ = tell.send(());
                std::thread::park_timeout(every);
            }
        };
        let thread = std::thread::Builder::new().name("lamassu-published".into()).spawn(reading);
        thread.map_err(|source| GatewayError::System { op: "start a thread", source })?;
    }
    let until = Instant::now() + first;
    // A second reading of one tenant may be counted for a tenant that does not answer.
    let _ = (0..count).try_for_each(|_| told.recv_timeout(until.saturating_duration_since(Instant::now())));
    Ok(())
}

/// Reloads the certificate.
fn reload(config: &ProviderConfig, tls: &Tls) {
    match config.front().read_tls() {
        Ok(read) => {
            *tls.write() = read;
            tracing::info!("the certificate was read again");
        }
        Err(error) => tracing::error!(%error, "the certificate is not taken: the one before stays in force"),
    }
}

/// Makes a directory with mode 0700, or checks an existing one.
fn make_private(dir: &Path) -> Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(GatewayError::file("make", dir)(error)),
        _ => check_private(dir),
    }
}

/// Locks a directory by a file in it, until the result is dropped.
fn hold(dir: &Path, name: &str) -> Result<fs::File> {
    let path = dir.join(name);
    let failed = |op| GatewayError::file(op, &path);
    let file = fs::File::options().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.map_err(failed("open"))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(GatewayError::InUse(dir.into())),
        Err(TryLockError::Error(error)) => Err(failed("lock")(error)),
    }
}

fn check_private(dir: &Path) -> Result<()> {
    let st = fs::metadata(dir).map_err(GatewayError::file("look at", dir))?;
    let is_own = st.uid() == rustix::process::geteuid().as_raw();
    if st.is_dir() && st.mode() & 0o077 == 0 && is_own { Ok(()) } else { Err(GatewayError::NotOwn(dir.into())) }
}

/// The proxy's private key; a new one, if there is none.
fn read_key(state: &Path) -> Result<Secret<32>> {
    let path = state.join(KEY_FILE);
    let failed = |op| GatewayError::file(op, &path);
    let file = match open_at_once(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            make_key(state, &path)?;
            open_at_once(&path)
        }
        opened => opened,
    };
    let file = file.map_err(failed("open"))?;
    let st = file.metadata().map_err(failed("look at"))?;
    if !st.is_file() || st.mode() & 0o077 != 0 || st.uid() != rustix::process::geteuid().as_raw() {
        return Err(GatewayError::NotPrivate(path));
    }
    let mut bytes = Zeroizing::new(Vec::with_capacity(64));
    file.take(33).read_to_end(&mut bytes).map_err(failed("read"))?;
    let wrong = || GatewayError::Config { path: path.clone(), detail: "the proxy's key has 32 bytes".into() };
    Secret::from_slice(&bytes).ok_or_else(wrong)
}

/// Makes a key that exists completely or not at all, also after a crash. If another process has made one meanwhile,
/// that one stays.
fn make_key(state: &Path, path: &Path) -> Result<()> {
    let failed = |op| GatewayError::file(op, path);
    let key = Secret::<32>::random().map_err(|error| failed("make")(std::io::Error::other(error)))?;
    let name = random_name().map_err(|error| failed("make")(std::io::Error::other(error.to_string())))?;
    // A name of its own: what a crash has left is in nobody's way, and two processes do not write to one file.
    let new = path.with_extension(format!("{name}.new"));
    let made = fs::File::options().write(true).create_new(true).mode(0o600).open(&new).and_then(|mut file| {
        without_trace(|| file.write_all(key.expose()))?;
        file.sync_all()?;
        give_name(&new, path)
    });
    let removed = match fs::remove_file(&new) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    };
    made.and(removed).map_err(failed("make"))?;
    fs::File::open(state).and_then(|dir| dir.sync_all()).map_err(failed("sync"))
}

/// Gives a file its name, in one step, unless there is one of that name. Only where the file system cannot do so has
/// the file both names for a moment.
fn give_name(new: &Path, path: &Path) -> std::io::Result<()> {
    let given = match renameat_with(CWD, new, CWD, path, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => fs::hard_link(new, path),
        given => given.map_err(Into::into),
    };
    match given {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        given => given,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    /// Whenever the process is killed: a key has one name.
    #[test]
    fn a_name_is_given_in_one_step_and_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let [one, other, path] = ["one", "other", "key"].map(|name| dir.path().join(name));
        fs::write(&one, "one").and_then(|()| fs::write(&other, "other")).expect("writes");
        give_name(&one, &path).expect("gives");
        assert!(!one.exists());
        give_name(&other, &path).expect("there is one");
        assert_eq!((fs::read(&path).expect("is there"), other.exists()), (b"one".to_vec(), true));
    }

    #[test]
    fn a_key_is_there_whole_or_not_at_all() {
        let dir = tempfile::tempdir().expect("a directory");
        // What a process has left that was killed while it made one.
        fs::write(dir.path().join("proxy.0123456789abcdef.new"), "").expect("writes");
        let key = read_key(dir.path()).expect("makes one");
        let path = dir.path().join(KEY_FILE);
        assert_eq!(fs::read(&path).expect("is there"), key.expose());
        assert_eq!(fs::metadata(&path).expect("is there").mode() & 0o7777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 2);
        // Another process has been faster.
        make_key(dir.path(), &path).expect("there is one");
        assert_eq!(read_key(dir.path()).expect("reads").expose(), key.expose());
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 2);
        // Not a new one in the place of one that is damaged: tenants know the key.
        fs::write(&path, "").expect("writes");
        assert!(matches!(read_key(dir.path()), Err(GatewayError::Config { .. })));
        assert_eq!(fs::read(&path).expect("is there"), b"");
    }

    /// Many at once, as `--public-key` beside the first start.
    #[test]
    fn all_who_make_a_key_have_the_same_one() {
        let dir = tempfile::tempdir().expect("a directory");
        let keys = std::thread::scope(|threads| {
            let all: Vec<_> = (0..8).map(|_| threads.spawn(|| read_key(dir.path()).expect("a key"))).collect();
            all.into_iter().map(|one| one.join().expect("no panic")).collect::<Vec<_>>()
        });
        assert!(keys.iter().all(|key| key.expose() == keys[0].expose()));
    }

    #[test]
    fn who_does_not_answer_holds_up_no_other() {
        let (stall, stalled) = mpsc::channel::<()>();
        let (stalled, counts) = (Mutex::new(stalled), Arc::new(Mutex::new([0_u32; 3])));
        let counted = counts.clone();
        let read = move |number: &usize| {
            if *number == 0 {
                let _ = stalled.lock().recv();
            }
            counted.lock()[*number] += 1;
        };
        let stopping = Arc::new(AtomicBool::new(false));
        let times = (Duration::from_millis(1), Duration::from_millis(10));
        read_all((0..3).map(Arc::new).collect(), read, times, &stopping).expect("starts");
        let until = |is_so: &dyn Fn(&[u32; 3]) -> bool| {
            let begun = Instant::now();
            while !is_so(&counts.lock()) {
                assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", counts.lock());
                std::thread::yield_now();
            }
        };
        until(&|counts| counts[1] > 5 && counts[2] > 5);
        assert_eq!(counts.lock()[0], 0);
        drop(stall);
        until(&|counts| counts[0] > 5);
        stopping.store(true, Ordering::Relaxed);
    }
}
