//! Runs a gateway from its start to a signal.

use crate::door::{Admit, Door, Tls};
use crate::front::Front;
use crate::memory;
use crate::metrics::{self, Health, Metrics};
use crate::served::{Served, sweeps};
use crate::{Config, Credentials, GatewayError, Result, s3};
use lamassu_vault::{FileSystem, Forest};
use parking_lot::RwLock;
use s3s::service::S3Service;
use sd_notify::NotifyState;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, watch};

/// Reads all files that a configuration names. Checks whether a gateway could run with it, as far as possible without
/// the vault.
///
/// # Errors
/// [`GatewayError`].
pub fn check(config: &Config) -> Result<()> {
    let credentials = Credentials::read(config, None)?;
    if let Some(name) = credentials.tenant_of_nobody(config) {
        let detail = format!("[tenants.{name}]: {} has no user of this tenant", config.credentials().display());
        return Err(GatewayError::Config { path: config.path().into(), detail });
    }
    config.settings()?;
    config.front().read_tls().map(drop)
}

/// What a gateway needs besides its configuration.
pub struct Serving {
    /// whether the gateway must maintain the vault, which is not mounted
    pub maintains: bool,
    /// called with the address once clients can connect
    pub ready: Box<dyn FnOnce(SocketAddr) + Send>,
}

/// Serves the buckets of a vault until SIGTERM or SIGINT, or until `ended` signals that the mount of the same process
/// has ended. The caller closes the vault.
///
/// # Errors
/// [`GatewayError`].
pub fn serve(config: &Config, forest: &Arc<Forest>, serving: Serving, ended: watch::Receiver<bool>) -> Result<()> {
    let credentials = Credentials::read(config, None)?;
    let (front, tls) = (config.front(), config.front().read_tls()?);
    let served = Served::open(config, forest)?;
    let stopping = Arc::new(AtomicBool::new(false));
    let threads = Threads::start(forest, &served, serving.maintains && !config.read_only, &stopping, config.read_only)?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.max_blocking_threads(crate::queue::THREADS).enable_all().build();
    let runtime = runtime.map_err(|source| GatewayError::System { op: "start threads", source })?;
    let current = Arc::new(RwLock::new(Arc::new(credentials)));
    let tls: Tls = Arc::new(RwLock::new(tls));
    let (service, health) = (served.service(&front, current.clone()), served.clone());
    let attending = Attending {
        front,
        service,
        admit: None,
        tls: tls.clone(),
        health: Arc::new(move || health.health()),
        ready: serving.ready,
        reload: Arc::new({
            let config = config.clone();
            move || reload(&config, &served, &current, &tls)
        }),
    };
    let ended = runtime.block_on(attend(attending, ended));
    // Blocking calls under way must end before the vault is closed.
    runtime.shutdown_timeout(Duration::from_secs(60));
    stopping.store(true, Ordering::Relaxed);
    threads.join(forest);
    ended
}

/// The parts of a running gateway.
pub(crate) struct Attending {
    /// where clients connect
    pub front: Front,
    /// answers requests
    pub service: S3Service,
    /// admits requests, if the service does not
    pub admit: Option<Arc<dyn Admit>>,
    /// the certificate in force
    pub tls: Tls,
    /// check for monitoring
    pub health: Health,
    /// called once, with the address
    pub ready: Box<dyn FnOnce(SocketAddr) + Send>,
    /// called after SIGHUP; it may block
    pub reload: Arc<dyn Fn() + Send + Sync>,
}

/// Serves until SIGTERM, SIGINT, or `ended`.
///
/// # Errors
/// [`GatewayError::Listen`], [`GatewayError::System`].
pub(crate) async fn attend(of: Attending, mut ended: watch::Receiver<bool>) -> Result<()> {
    // Answers, and parts of uploads, are large buffers of many threads.
    memory::return_large_buffers();
    let (mut term, mut int, mut hup) =
        (on(SignalKind::terminate())?, on(SignalKind::interrupt())?, on(SignalKind::hangup())?);
    let metrics = Metrics::default();
    let door = Door::new(&of.front, of.service, of.admit, of.tls, metrics.clone());
    let listener = listen(&of.front.listen).await?;
    let address = listener.local_addr().map_err(|source| GatewayError::System { op: "listen", source })?;
    if let Some(asked) = &of.front.metrics {
        tokio::spawn(metrics::serve(listen(asked).await?, metrics, of.health));
    }
    let (stop, stopping) = watch::channel(false);
    let serving_all = tokio::spawn(door.serve(listener, stopping, Duration::from_secs(of.front.stop_seconds)));
    (of.ready)(address);
    tracing::info!(%address, "serving");
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let wanted = Arc::new(Notify::new());
    let reloading = tokio::spawn(reload_when(wanted.clone(), of.reload));
    loop {
        tokio::select! {
            _ = term.recv() => break,
            _ = int.recv() => break,
            Ok(_) = ended.wait_for(|ended| *ended) => break,
            _ = hup.recv() => wanted.notify_one(),
        }
    }
    reloading.abort();
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    stop.send_replace(true);
    let _ = serving_all.await;
    tracing::info!("stopped");
    Ok(())
}

/// Reloads whenever it is wanted, beside the loop that takes signals: a file may lie on a share that does not answer.
async fn reload_when(wanted: Arc<Notify>, reload: Arc<dyn Fn() + Send + Sync>) {
    loop {
        wanted.notified().await;
        if let Ok(now) = NotifyState::monotonic_usec_now() {
            let _ = sd_notify::notify(&[NotifyState::Reloading, now]);
        }
        let reload = reload.clone();
        if let Err(error) = tokio::task::spawn_blocking(move || reload()).await {
            tracing::error!(%error, "reading the files again has failed: those before stay in force");
        }
        let _ = sd_notify::notify(&[NotifyState::Ready]);
    }
}

/// Reloads the credentials (of clients, and for a provider) and the certificate. If they are invalid, the previous ones
/// stay in force.
fn reload(config: &Config, served: &Served, current: &s3::Current, tls: &Tls) {
    if let Err(error) = served.reload(config) {
        tracing::error!(%error, "the provider's credentials are not taken: those before stay in force");
    }
    let before = current.read().clone();
    match (Credentials::read(config, Some(&before)), config.front().read_tls()) {
        (Ok(credentials), Ok(read)) => {
            let credentials = Arc::new(credentials);
            *current.write() = credentials.clone();
            before.end_those_not_in(&credentials);
            *tls.write() = read;
            tracing::info!("credentials and certificate were read again");
        }
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(%error, "credentials and certificate are not taken: those before stay in force");
        }
    }
}

async fn listen(address: &str) -> Result<TcpListener> {
    let listening = TcpListener::bind(address).await;
    listening.map_err(|source| GatewayError::Listen { address: address.into(), source })
}

fn on(kind: SignalKind) -> Result<Signal> {
    signal(kind).map_err(|source| GatewayError::System { op: "wait for signals", source })
}

/// Background threads.
struct Threads(Vec<std::thread::JoinHandle<()>>);

impl Threads {
    fn start(
        forest: &Arc<Forest>,
        served: &Served,
        maintains: bool,
        stopping: &Arc<AtomicBool>,
        read_only: bool,
    ) -> Result<Threads> {
        let mut threads = Vec::new();
        let mut spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.into()).spawn(body);
            threads.push(thread.map_err(|source| GatewayError::System { op: "start a thread", source })?);
            Ok::<_, GatewayError>(())
        };
        if maintains {
            let (forest, stopping) = (forest.clone(), stopping.clone());
            spawn("lamassu-upkeep", Box::new(move || lamassu_vault::keep_up(&*forest, &stopping)))?;
        }
        if !read_only {
            threads.push(sweeps(served.clone(), stopping, || true)?);
        }
        Ok(Threads(threads))
    }

    fn join(self, forest: &Forest) {
        forest.upkeep().want();
        for thread in self.0 {
            let _ = thread.join();
        }
    }
}
