//! Makes a server's directory, and serves it until a signal comes.

use crate::accept::{Connection, Door, KnownKeys, Limits};
use crate::admin::SOCKET;
use crate::administered::Administered;
use crate::anchor_store::{RESERVE, remove_left};
use crate::answering;
use crate::arrivals::Arrivals;
use crate::audit::Event;
use crate::authority::{Authority, is_to_be_renewed, is_valid};
use crate::bounds::Bounds;
use crate::config::{self, Config};
use crate::counts::Counts;
use crate::dir::{check_dir, make_dir};
use crate::files::{self, Shares};
use crate::guard::Guard;
use crate::keys::Master;
use crate::keys::evaluate::{self, Evaluations};
use crate::metrics::Metrics;
use crate::monitoring::{self, Observed};
use crate::numbers::Numbers;
use crate::origin::{Origin, Waits};
use crate::pauses::Pauses;
use crate::policy::{self, Policies};
use crate::refused::Lost;
use crate::reserve::Reserve;
use crate::service::Service;
use crate::state::State;
use crate::threads::{THREADS_MAX, Threads};
use crate::vault::{Common, TICK};
use crate::vaults::Vaults;
use crate::webhook::{self, Webhook};
use crate::{Result, ServerError};
use lamassu_lease::{Terms, TermsError};
use lamassu_rpc::tls;
use parking_lot::Mutex;
use rustls::ServerConfig;
use sd_notify::NotifyState;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;

/// How long calls may go on after a signal.
const GRACE: Duration = Duration::from_secs(5);
/// Streams of one connection at once.
const STREAMS_MAX: u32 = 64;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;
/// How often the server looks whether its certificate is to be renewed.
const RENEWAL_EVERY: Duration = Duration::from_secs(5);
/// Time before a renewal is tried again.
const RENEWAL_AGAIN_AFTER: Duration = Duration::from_secs(60);
/// How often the server looks whether space is kept for the state.
const RESERVE_EVERY: Duration = Duration::from_secs(5);
/// Makes the directory of a new server.
///
/// # Errors
/// [`ServerError::NotEmpty`], [`ServerError::File`].
pub fn init(dir: &Path) -> Result<()> {
    let made = make_dir(dir)?;
    fill(dir).inspect_err(|_| made.take_back(dir))
}

fn fill(dir: &Path) -> Result<()> {
    let path = dir.join(config::FILE);
    fs::write(&path, config::COMMENTED).map_err(ServerError::file("write", &path))?;
    let path = dir.join(policy::FILE);
    fs::write(&path, policy::COMMENTED).map_err(ServerError::file("write", &path))?;
    State::make(dir)?;
    webhook::make_secret(dir)?;
    // Last: a directory without it is not a server's.
    Authority::make(dir)?;
    fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(ServerError::file("sync", dir))
}

/// Serves until a signal comes, or a change cannot be made durable.
///
/// # Errors
/// [`ServerError`].
pub fn run(dir: &Path) -> Result<()> {
    check_dir(dir)?;
    let mut config = Config::read(dir)?;
    let shares = files::raise_limit(config.connections_max);
    config.connections_max = shares.connections;
    let runtime = tokio::runtime::Builder::new_multi_thread().max_blocking_threads(THREADS_MAX).enable_all().build();
    runtime.map_err(ServerError::file("start threads for", dir))?.block_on(serve(dir, config, shares))
}

/// An address of this server. It has its file from now on, and answers when it listens.
struct Bound<'a> {
    address: &'a str,
    socket: TcpSocket,
}

impl Bound<'_> {
    async fn to(address: &str) -> Result<Bound<'_>> {
        let failed = |source| ServerError::Listen { address: address.to_owned(), source };
        let mut last = io::ErrorKind::AddrNotAvailable.into();
        for resolved in tokio::net::lookup_host(address).await.map_err(failed)? {
            let bound = || {
                let socket = if resolved.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
                socket.set_reuseaddr(true)?;
                socket.bind(resolved).map(|()| socket)
            };
            match bound() {
                Ok(socket) => return Ok(Bound { address, socket }),
                Err(error) => last = error,
            }
        }
        Err(failed(last))
    }

    fn listen(self) -> Result<TcpListener> {
        let listening = self.socket.listen(BACKLOG);
        listening.map_err(|source| ServerError::Listen { address: self.address.to_owned(), source })
    }
}

/// The signals that a server waits for.
struct Signals {
    stop: Signal,
    quit: Signal,
    reload: Signal,
}

impl Signals {
    fn new() -> Result<Signals> {
        let on = |kind| signal(kind).map_err(ServerError::file("wait for signals in", Path::new(".")));
        let (stop, quit) = (on(SignalKind::terminate())?, on(SignalKind::interrupt())?);
        Ok(Signals { stop, quit, reload: on(SignalKind::hangup())? })
    }

    /// Waits for one that ends the server.
    async fn end(&mut self) {
        tokio::select! {
            _ = self.stop.recv() => {}
            _ = self.quit.recv() => {}
        }
    }
}

/// Makes a certificate, and the configuration of TLS with it.
type MakeTls = Box<dyn Fn() -> Result<Arc<ServerConfig>> + Send + Sync>;

/// The server's certificate, which is renewed while it serves.
struct Certificate {
    make: MakeTls,
    current: watch::Sender<Arc<ServerConfig>>,
    /// when the current one was made, by the clock of the machine
    made: Mutex<SystemTime>,
    /// when the newest renewal failed, if it did
    failed: Mutex<Option<Instant>>,
}

impl Certificate {
    fn new(authority: &Arc<Authority>, state: &Arc<State>) -> Result<Certificate> {
        let (authority, keys) = (authority.clone(), Arc::new(KnownKeys(state.clone())));
        Certificate::by(Box::new(move || {
            let (chain, key) = authority.server()?;
            Ok(Arc::new(tls::server(chain, key, keys.clone())?))
        }))
    }

    fn by(make: MakeTls) -> Result<Certificate> {
        let (made, current) = (Mutex::new(SystemTime::now()), watch::Sender::new(make()?));
        Ok(Certificate { make, current, made, failed: Mutex::default() })
    }

    /// Renews it. If that fails, the server goes on with the present one for as long as that is valid.
    fn renew(&self) -> Result<()> {
        let now = SystemTime::now();
        match (self.make)() {
            Ok(next) => {
                self.current.send_replace(next);
                (*self.made.lock(), *self.failed.lock()) = (now, None);
                Ok(())
            }
            Err(error) if is_valid(*self.made.lock(), now) => {
                tracing::error!(%error, "the server's certificate is not renewed: the one before goes on");
                *self.failed.lock() = Some(Instant::now());
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn renew_in_time(&self) -> Result<()> {
        let made = *self.made.lock();
        let has_just_failed = self.failed.lock().is_some_and(|at| at.elapsed() < RENEWAL_AGAIN_AFTER);
        if is_to_be_renewed(made, SystemTime::now()) && !has_just_failed { self.renew() } else { Ok(()) }
    }
}

/// The terms of leases: those of the configuration, but with the longest term that a session may still have.
fn terms_of(dir: &Path, config: &Config, state: &State) -> Result<Terms> {
    let wrong = |error: TermsError| ServerError::Config { path: dir.join(config::FILE), detail: error.to_string() };
    let terms = config.terms().map_err(wrong)?;
    let term = state.begin_term(terms.term().0)?;
    if term == terms.term().0 {
        return Ok(terms);
    }
    tracing::warn!(seconds = term / 1000, "there are sessions that began with this longer term, which still counts");
    Terms::new(term, terms.heartbeat().0, terms.min_hold().0).map_err(wrong)
}

/// The parts of a server that others share while it serves.
struct Parts<'a> {
    dir: &'a Path,
    config: Config,
    authority: Arc<Authority>,
    certificate: Certificate,
    origin: Origin,
    master: Option<Arc<Master>>,
    metrics: Metrics,
    policies: Arc<Policies>,
    pauses: Arc<Pauses>,
    vaults: Arc<Vaults>,
    evaluations: Arc<Evaluations>,
    /// a permit for each connection that is free
    free: Arc<Semaphore>,
}

impl<'a> Parts<'a> {
    /// The parts, with no vault opened yet.
    fn of(
        dir: &'a Path,
        config: Config,
        (authority, origin): (Arc<Authority>, Origin),
        shares: Shares,
    ) -> Result<Parts<'a>> {
        let Origin { state, anchors, .. } = &origin;
        // Before the first call is answered: it may take a while, and may ask a person.
        let master = Master::of(&config, state)?.map(Arc::new);
        let terms = terms_of(dir, &config, state)?;
        let metrics = Metrics::default();
        let policies = Arc::new(Policies::start(dir, terms, (state.clone(), metrics.clone()))?);
        let pauses = Arc::<Pauses>::default();
        let common = Common {
            state: state.clone(),
            metrics: metrics.clone(),
            policies: policies.clone(),
            pauses: pauses.clone(),
            bounds: Bounds::new(shares.vaults_of_host),
            numbers: Numbers::default(),
            arrivals: Arrivals::default(),
        };
        let vaults = Arc::new(Vaults::new(anchors.clone(), terms, common, shares.vaults));
        let certificate = Certificate::new(&authority, state)?;
        let (evaluations, free) =
            (Arc::new(Evaluations::new(&config)), Arc::new(Semaphore::new(config.connections_max)));
        Ok(Parts {
            dir,
            config,
            authority,
            certificate,
            origin,
            master,
            metrics,
            policies,
            pauses,
            vaults,
            evaluations,
            free,
        })
    }

    /// Notes that the server has started, and answers administrators and posts alerts from now on.
    fn administer(&self) -> Result<()> {
        let Origin { state, anchors, office, .. } = &self.origin;
        let administered = Administered {
            dir: self.dir.into(),
            state: state.clone(),
            anchors: anchors.clone(),
            office: office.clone(),
            authority: self.authority.clone(),
            config: self.config.clone(),
            vaults: Some(self.vaults.clone()),
            policies: Some(self.policies.clone()),
            master: self.master.clone(),
        };
        webhook::make_secret_unless_there(self.dir)?;
        let (digest, metrics) = (self.authority.digest(), self.metrics.clone());
        let webhook = Webhook::of(self.dir, &self.config, &digest, state.clone(), metrics)?;
        state.note(Event::Started { version: env!("CARGO_PKG_VERSION").into() })?;
        answering::start(self.dir, administered, self.origin.reserve.as_ref())?;
        webhook.map_or(Ok(()), |webhook| webhook.start(self.dir))
    }

    /// What monitoring reads.
    fn observed(&self) -> Observed {
        Observed {
            metrics: self.metrics.clone(),
            state: self.origin.state.clone(),
            vaults: self.vaults.clone(),
            policies: self.policies.clone(),
            connections: (self.config.connections_max, self.free.clone()),
        }
    }

    /// The calls of hosts.
    fn service(&self, failed: mpsc::UnboundedSender<String>, stopping: watch::Receiver<bool>) -> Service {
        Service {
            state: self.origin.state.clone(),
            vaults: self.vaults.clone(),
            failed,
            stopping,
            office: self.origin.office.clone(),
            rows: Counts::default(),
            puts: Counts::default(),
            all_puts: Counts::default(),
            master: self.master.clone(),
            evaluations: self.evaluations.clone(),
            metrics: self.metrics.clone(),
            threads: Threads::default(),
        }
    }

    /// Accepts connections of hosts from now on.
    fn accept(&self, listener: TcpListener) -> ReceiverStream<std::io::Result<Connection>> {
        let limits = Limits { connections: self.free.clone(), handshakes: self.config.handshakes_max };
        let (accepted, connections) = mpsc::channel(64);
        let (state, metrics) = (self.origin.state.clone(), self.metrics.clone());
        let door = Door::new(self.certificate.current.subscribe(), state, limits, metrics);
        tokio::spawn(door.accept(listener, accepted));
        ReceiverStream::new(connections)
    }

    /// Waits until the server is to end; reloads the policy and renews the certificate meanwhile. Returns why it cannot
    /// go on; `None`: a signal has come.
    async fn wait(
        &self,
        signals: &mut Signals,
        failure: &mut Failure,
        serving: &mut Serving,
    ) -> Result<Option<String>> {
        let mut renewals = tokio::time::interval(RENEWAL_EVERY);
        loop {
            tokio::select! {
                _ = signals.stop.recv() => return Ok(None),
                _ = signals.quit.recv() => return Ok(None),
                _ = signals.reload.recv() => {
                    tell_reloading();
                    let policies = self.policies.clone();
                    // It waits for the disk. Reloads run one after the other, in the order of the signals.
                    let read = tokio::task::spawn_blocking(move || policies.reload()).await;
                    if let Ok(Err(error)) = read {
                        tracing::error!(%error, "the policy is not taken: the one before stays in force");
                    }
                    self.certificate.renew()?;
                    let _ = sd_notify::notify(&[NotifyState::Ready]);
                }
                _ = renewals.tick() => self.certificate.renew_in_time()?,
                error = failure.recv() => return Ok(error),
                done = &mut *serving => {
                    done.map_err(|_| ServerError::Garbled { detail: "a thread of the server has ended".into() })??;
                    return Ok(None);
                }
            };
        }
    }
}

/// Tells the service manager that files are read again, until it is told that the server is ready.
fn tell_reloading() {
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        let _ = sd_notify::notify(&[NotifyState::Reloading, now]);
    }
}

/// Receives why the server cannot go on.
type Failure = mpsc::UnboundedReceiver<String>;

/// The task that answers hosts.
type Serving = tokio::task::JoinHandle<std::result::Result<(), tonic::transport::Error>>;

async fn serve(dir: &Path, config: Config, shares: Shares) -> Result<()> {
    let mut signals = Signals::new()?;
    let authority = Arc::new(Authority::read(dir)?);
    let (failed, mut failure) = mpsc::unbounded_channel();
    let opened = tokio::select! {
        opened = open(dir, &config, &authority, failed.clone()) => opened?,
        () = signals.end() => None,
    };
    let Some(origin) = opened else { return Ok(()) };
    let parts = Parts::of(dir, config, (authority, origin), shares)?;
    // Before the anchors, which may take all other files.
    let monitored = match &parts.config.metrics {
        Some(address) => Some(Bound::to(address).await?),
        None => None,
    };
    let bound = Bound::to(&parts.config.listen).await?;
    let known = parts.vaults.open_attended()?;
    // The hosts' address is opened last: once it answers, metrics do, too.
    let monitored = monitored.map(Bound::listen).transpose()?;
    let listener = bound.listen()?;
    let address = listener.local_addr().map_err(ServerError::file("listen for", dir))?;
    parts.administer()?;
    if let Some(listener) = monitored {
        tokio::spawn(monitoring::serve(listener, Arc::new(parts.observed())));
    }
    let (stop_all, stopping) = watch::channel(false);
    let service = parts.service(failed.clone(), stopping);
    // Vaults were opened one by one before that, each as of its moment, and no host could come back.
    parts.pauses.begin();
    tokio::spawn(tick(parts.vaults.clone(), parts.pauses.clone(), failed.clone()));
    tokio::spawn(watch_state(parts.origin.state.unusable.subscribe(), failed));
    tokio::spawn(note_every_minute(parts.origin.state.clone(), parts.evaluations.clone()));
    remove_left(parts.origin.anchors.clone());
    if let Some(reserve) = parts.origin.reserve.clone() {
        tokio::spawn(keep_reserve(reserve));
    }
    let connections = parts.accept(listener);
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let server = Server::builder()
        .max_concurrent_streams(STREAMS_MAX)
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
        .http2_max_header_list_size(16 << 10)
        .layer(Guard::new(parts.origin.state.clone(), parts.origin.office.clone(), parts.metrics.clone()))
        .add_service(service.hosts())
        .add_service(service.sessions())
        .add_service(service.anchors())
        .add_service(service.alerts())
        .add_service(service.keys())
        .serve_with_incoming_shutdown(connections, async {
            let _ = ended.await;
        });
    let mut serving = tokio::spawn(server);
    tracing::info!(%address, vaults = known, "serving");
    let _ = sd_notify::notify(&[NotifyState::Ready, NotifyState::Status("serving")]);
    let why = parts.wait(&mut signals, &mut failure, &mut serving).await?;
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    let _ = fs::remove_file(dir.join(SOCKET));
    if let Some(error) = why {
        // No more replies are sent: what they say may not be durable.
        return Err(ServerError::Told { message: format!("stopped: {error}"), code: 5 });
    }
    let _ = end.send(());
    stop_all.send_replace(true);
    // Sessions stay open: their hosts reconnect to the next server.
    let _ = tokio::time::timeout(GRACE, serving).await;
    note_evaluations(&parts.origin.state, &parts.evaluations, true);
    parts.origin.office.give_up();
    tracing::info!("stopped");
    Ok(())
}

/// Lets the clock of all vaults go on.
async fn tick(vaults: Arc<Vaults>, pauses: Arc<Pauses>, failed: mpsc::UnboundedSender<String>) {
    let mut ticks = tokio::time::interval(TICK);
    let mut ticking: Option<tokio::task::JoinHandle<()>> = None;
    loop {
        ticks.tick().await;
        // Looked at also while a tick waits for a disk, which is no pause.
        pauses.look();
        if ticking.as_ref().is_none_or(tokio::task::JoinHandle::is_finished) {
            let (vaults, failed) = (vaults.clone(), failed.clone());
            ticking = Some(tokio::task::spawn_blocking(move || {
                if let Err(Lost(error)) = vaults.tick() {
                    let _ = failed.send(error.to_string());
                }
            }));
        }
    }
}

/// Ends the server when the state cannot be used any more, whoever finds that out.
async fn watch_state(mut unusable: watch::Receiver<bool>, failed: mpsc::UnboundedSender<String>) {
    if unusable.wait_for(|is_so| *is_so).await.is_ok() {
        let _ = failed.send("the disk of the state has failed, or is full".into());
    }
}

/// Allocates the space that only the state may use, also after it was used.
async fn keep_reserve(reserve: Reserve) {
    let mut times = tokio::time::interval(RESERVE_EVERY);
    let mut is_said = false;
    loop {
        times.tick().await;
        let reserve = reserve.clone();
        let taken = tokio::task::spawn_blocking(move || reserve.take(RESERVE)).await;
        if let Ok(Err(error)) = taken
            && !std::mem::replace(&mut is_said, true)
        {
            tracing::warn!(%error, "no space could be kept for the state: the server stops if others fill its disk");
        }
    }
}

/// Writes the number of evaluations to the audit log again and again.
async fn note_every_minute(state: Arc<State>, evaluations: Arc<Evaluations>) {
    let mut minutes = tokio::time::interval(evaluate::NOTED_EVERY);
    loop {
        minutes.tick().await;
        let (state, evaluations) = (state.clone(), evaluations.clone());
        let _ = tokio::task::spawn_blocking(move || note_evaluations(&state, &evaluations, false)).await;
    }
}

/// Writes evaluations to the audit log that it does not have yet. Those that cannot be written are tried again.
fn note_evaluations(state: &State, evaluations: &Evaluations, all: bool) {
    for (host, key, elements) in evaluations.left_to_note(Instant::now(), all) {
        if let Err(error) = state.note_evaluations(&host, &key, elements, false) {
            tracing::error!(%error, host, key, elements, "evaluations could not be written to the audit log");
            evaluations.not_noted(&host, &key, elements);
        }
    }
}

/// Opens the data. If other replicas can serve it, waits until this one leads. When the future is dropped, the wait
/// ends.
async fn open(
    dir: &Path,
    config: &Config,
    authority: &Arc<Authority>,
    lost: mpsc::UnboundedSender<String>,
) -> Result<Option<Origin>> {
    /// Ends the wait when it is dropped.
    struct Over(Arc<AtomicBool>);
    impl Drop for Over {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let over = Over(Arc::default());
    let (is_over, dir, config, authority) = (over.0.clone(), dir.to_owned(), config.clone(), authority.clone());
    #[cfg(feature = "etcd")]
    if config.etcd.is_some() {
        // A replica may stand by for months, so systemd is told that it is ready.
        let _ = sd_notify::notify(&[NotifyState::Ready, NotifyState::Status("standing by")]);
    }
    let opens = tokio::task::spawn_blocking(move || {
        let waits = Waits::Until { is_over: &|| is_over.load(Ordering::Relaxed), lost };
        Origin::open(&dir, &config, &authority, &waits)
    });
    let opened = opens.await.map_err(|_| ServerError::Garbled { detail: "a thread has ended".into() })?;
    drop(over);
    opened
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_that_is_not_renewed_goes_on_while_it_is_valid() {
        let dir = tempfile::tempdir().expect("a directory");
        init(dir.path()).expect("makes");
        let (authority, state) = (Authority::read(dir.path()).expect("reads"), State::open(dir.path()).expect("opens"));
        let good = Certificate::new(&Arc::new(authority), &Arc::new(state)).expect("makes");
        let (first, fails) = (good.current.borrow().clone(), Arc::new(AtomicBool::new(false)));
        let (made, is_to_fail) = (first.clone(), fails.clone());
        let certificate = Certificate::by(Box::new(move || match is_to_fail.load(Ordering::SeqCst) {
            true => Err(ServerError::NoRandom),
            false => (good.make)(),
        }));
        let certificate = certificate.expect("makes");
        let present = certificate.current.borrow().clone();
        assert!(!Arc::ptr_eq(&present, &made));
        fails.store(true, Ordering::SeqCst);
        let days = |days: u64| Duration::from_secs(days * 24 * 3600);
        for age in [days(0), days(16)] {
            *certificate.made.lock() = SystemTime::now() - age;
            certificate.renew().expect("the present one is valid");
            certificate.renew_in_time().expect("the present one is valid");
            assert!(Arc::ptr_eq(&certificate.current.borrow(), &present));
        }
        *certificate.made.lock() = SystemTime::now() - days(31);
        assert!(certificate.renew().is_err());
        fails.store(false, Ordering::SeqCst);
        *certificate.failed.lock() = None;
        certificate.renew_in_time().expect("renews");
        assert!(!Arc::ptr_eq(&certificate.current.borrow(), &present));
    }
}
