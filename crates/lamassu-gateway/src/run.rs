//! Runs a gateway from its start to a signal.

use crate::door::{Door, Tls};
use crate::metrics::{self, Health, Metrics};
use crate::objects::{ObjectError, Objects};
use crate::remote::{Remote, RemoteError};
use crate::{Config, Credentials, GatewayError, Result, s3};
use lamassu_vault::detached::Detached;
use lamassu_vault::{FileSystem, Forest, VaultError};
use parking_lot::RwLock;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// Reads all files that a configuration names. Checks whether a gateway could run with it, as far as possible without
/// the vault.
///
/// # Errors
/// [`GatewayError`].
pub fn check(config: &Config) -> Result<()> {
    Credentials::read(config, None)?;
    config.settings()?;
    read_tls(config).map(drop)
}

fn read_tls(config: &Config) -> Result<Option<Arc<ServerConfig>>> {
    let (Some(certificate), Some(key)) = (&config.tls_certificate, &config.tls_key) else { return Ok(None) };
    let wrong = |path: &Path, detail: String| GatewayError::Tls { path: path.into(), detail };
    let chain =
        CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
    let chain = chain.map_err(|error| wrong(certificate, error.to_string()))?;
    let st = std::fs::metadata(key).map_err(GatewayError::file("look at", key))?;
    if st.mode() & 0o077 != 0 {
        return Err(GatewayError::NotPrivate(key.clone()));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| wrong(key, error.to_string()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| wrong(certificate, error.to_string()))?.with_no_client_auth();
    let mut tls = builder.with_single_cert(chain, private).map_err(|error| wrong(certificate, error.to_string()))?;
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(Arc::new(tls)))
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
    let tls = read_tls(config)?;
    let served = Served::open(config, forest)?;
    let stopping = Arc::new(AtomicBool::new(false));
    let threads = Threads::start(forest, &served, serving.maintains && !config.read_only, &stopping, config.read_only)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|source| GatewayError::System { op: "start threads", source })?;
    let started = Started { credentials, tls, served };
    let ended = runtime.block_on(run(config, started, serving, ended));
    // Blocking calls under way must end before the vault is closed.
    runtime.shutdown_timeout(Duration::from_secs(60));
    stopping.store(true, Ordering::Relaxed);
    threads.join(forest);
    ended
}

fn of_buckets(path: &str, error: ObjectError) -> GatewayError {
    let source = match error {
        ObjectError::Vault(source) => source,
        _ => VaultError::Invalid,
    };
    GatewayError::Buckets { path: path.into(), source }
}

/// Where objects are.
#[derive(Clone)]
enum Served {
    /// files of the vault
    Files(Arc<Objects>),
    /// ciphertext objects at a provider
    Remote(Arc<Remote>),
}

impl Served {
    fn open(config: &Config, forest: &Arc<Forest>) -> Result<Served> {
        let (Some(backend), Some(settings)) = (&config.backend, config.settings()?) else {
            let objects = Objects::open(forest.clone(), &config.buckets, config.modes()?, config.listing_max());
            return Ok(Served::Files(Arc::new(objects.map_err(|error| of_buckets(&config.buckets, error))?)));
        };
        let unfit = |source| GatewayError::Unfit { backend: backend.clone(), source };
        let files = forest.at(lamassu_vault::ROOT).and_then(Detached::of).map_err(unfit)?;
        let remote = Remote::open(files, &settings, config.listing_max());
        let failed = |error: RemoteError| GatewayError::Provider {
            backend: backend.clone(),
            may_pass: error.may_pass(),
            detail: error.to_string(),
        };
        Ok(Served::Remote(Arc::new(remote.map_err(failed)?)))
    }

    fn health(&self) -> std::result::Result<(), String> {
        match self {
            Served::Files(objects) => objects.check().map_err(|error| error.to_string()),
            Served::Remote(remote) => remote.check().map_err(|error| error.to_string()),
        }
    }

    fn sweep(&self, stopping: &AtomicBool) {
        let swept = match self {
            Served::Files(objects) => objects.sweep(stopping).map_err(|error| error.to_string()),
            Served::Remote(remote) => remote.sweep().map_err(|error| error.to_string()),
        };
        match swept {
            Ok(removed) => tracing::info!(removed, "what an earlier end had left of objects is removed"),
            Err(error) => tracing::warn!(%error, "the buckets were not searched for what an earlier end has left"),
        }
    }
}

struct Started {
    credentials: Credentials,
    tls: Option<Arc<ServerConfig>>,
    served: Served,
}

async fn run(config: &Config, started: Started, serving: Serving, mut ended: watch::Receiver<bool>) -> Result<()> {
    let (mut term, mut int, mut hup) =
        (on(SignalKind::terminate())?, on(SignalKind::interrupt())?, on(SignalKind::hangup())?);
    let Started { credentials, tls, served } = started;
    let current = Arc::new(RwLock::new(Arc::new(credentials)));
    let (tls, metrics): (Tls, Metrics) = (Arc::new(RwLock::new(tls)), Metrics::default());
    let service = match &served {
        Served::Files(objects) => s3::service(config, objects.clone(), current.clone()),
        Served::Remote(remote) => s3::remote_service(config, remote.clone(), current.clone()),
    };
    let door = Door::new(config, service, tls.clone(), metrics.clone());
    let listener = listen(&config.listen).await?;
    let address = listener.local_addr().map_err(|source| GatewayError::System { op: "listen", source })?;
    if let Some(asked) = &config.metrics {
        let health: Health = Arc::new(move || served.health());
        tokio::spawn(metrics::serve(listen(asked).await?, metrics, health));
    }
    let (stop, stopping) = watch::channel(false);
    let serving_all = tokio::spawn(door.serve(listener, stopping, Duration::from_secs(config.stop_seconds)));
    (serving.ready)(address);
    tracing::info!(%address, "serving");
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    loop {
        tokio::select! {
            _ = term.recv() => break,
            _ = int.recv() => break,
            Ok(_) = ended.wait_for(|ended| *ended) => break,
            _ = hup.recv() => reload(config, &current, &tls),
        }
    }
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    stop.send_replace(true);
    let _ = serving_all.await;
    tracing::info!("stopped");
    Ok(())
}

/// Reloads credentials and certificate. If they are invalid, the previous ones stay in force.
fn reload(config: &Config, current: &s3::Current, tls: &Tls) {
    let before = current.read().clone();
    match (Credentials::read(config, Some(&before)), read_tls(config)) {
        (Ok(credentials), Ok(read)) => {
            *current.write() = Arc::new(credentials);
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
            let (served, stopping) = (served.clone(), stopping.clone());
            spawn("lamassu-sweep", Box::new(move || served.sweep(&stopping)))?;
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
