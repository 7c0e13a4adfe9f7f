//! How much a server does: commits of rows, and leases, for as long as is said. `scripts/bench server` runs it.
//!
//! `load SERVERS ADDRESS SECONDS BATCH VAULT…`: as the host that has joined in SERVERS, a session in each vault. First
//! each commits batches of BATCH rows, one after the other; then each takes its vault to look at, and gives it back.
//! Prints one JSON document.

use hyper_util::rt::TokioIo;
use lamassu_anchor::Digest;
use lamassu_anchor::head::Head;
use lamassu_anchor::row::{Content, FileRow, Row, Sealed};
use lamassu_anchor::table::{Change, Space, pack};
use lamassu_rpc::identity::Identity;
use lamassu_rpc::proto::anchors_client::AnchorsClient;
use lamassu_rpc::proto::sessions_client::SessionsClient;
use lamassu_rpc::proto::{self, Up, down, up::Said};
use lamassu_rpc::protocol::Speaks;
use lamassu_rpc::tls;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{self, Sender};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint, Uri};

/// Calls, each of which says which versions of the protocol this host speaks.
type Wire = InterceptedService<Channel, Speaks>;
type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The number of the first file: objects before it are the vault's own.
const FIRST_FILE: u64 = 1_000;

/// The row of a small file, about 120 bytes.
fn row(number: u64) -> Vec<u8> {
    let digest = |of: u8| {
        let mut digest = [of; 32];
        digest[..8].copy_from_slice(&number.to_be_bytes());
        Digest(digest)
    };
    let file = FileRow { root: digest(1), size: number, twin: Some(digest(2)), ..FileRow::default() };
    let attributes = Sealed::Is(digest(3));
    Row { mode: 0o644, uid: 1000, gid: 1000, links: 1, content: Content::File(file), attributes }.encode()
}

fn up(said: Said) -> Up {
    Up { said: Some(said) }
}

fn channel(servers: &Path, address: &str) -> Result<Wire> {
    let identity = Identity::read(&Identity::dir_of(servers, address))?.ok_or("this host has not joined")?;
    let connector = TlsConnector::from(Arc::new(tls::client(&identity)?));
    let address = address.to_owned();
    let connect = tower::service_fn(move |_: Uri| {
        let (connector, address) = (connector.clone(), address.clone());
        async move {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            std::io::Result::Ok(TokioIo::new(connector.connect(tls::server_name(), stream).await?))
        }
    });
    let channel = Endpoint::from_static("http://server.lamassu").connect_with_connector_lazy(connect);
    Ok(InterceptedService::new(channel, Speaks))
}

/// A session with its vault.
struct Session {
    vault: Vec<u8>,
    number: u64,
    head: Head,
    /// The number of its last grant.
    grant: u64,
    say: Sender<Up>,
    told: Streaming<proto::Down>,
}

impl Session {
    async fn begin(channel: Wire, vault: Vec<u8>) -> Result<Session> {
        let (say, said) = mpsc::channel(16);
        let begin =
            proto::Begin { vault: vault.clone(), mode: proto::Mode::Exclusive.into(), replaces: 0, turns: true };
        say.send(up(Said::Begin(begin))).await?;
        let mut told = SessionsClient::new(channel).attend(ReceiverStream::new(said)).await?.into_inner();
        let Some(down::Said::Begun(begun)) = told.message().await?.and_then(|down| down.said) else {
            return Err("no session".into());
        };
        Ok(Session { vault, number: begun.session, head: head_of(&begun.head)?, grant: 0, say, told })
    }

    async fn acquire(&mut self, mode: proto::Mode) -> Result<proto::Grant> {
        self.say.send(up(Said::Acquire(proto::Acquire { request: 1, object: 0, mode: mode.into() }))).await?;
        loop {
            match self.told.message().await?.and_then(|down| down.said) {
                Some(down::Said::Granted(granted)) => {
                    self.head = head_of(&granted.head)?;
                    self.grant = granted.grant.map(|grant| grant.number).unwrap_or_default();
                    return granted.grant.ok_or_else(|| "no grant".into());
                }
                Some(_) => {}
                None => return Err("the session has ended".into()),
            }
        }
    }

    async fn release(&mut self, grant: proto::Grant) -> Result<()> {
        Ok(self.say.send(up(Said::Release(proto::Release { grant: Some(grant), keeps: None }))).await?)
    }

    /// Commits rows until then, and beats as often as it should. Returns how many rows.
    async fn commit(&mut self, channel: Wire, batch: u64, until: Instant) -> Result<u64> {
        let (mut anchors, mut rows, mut beaten) = (AnchorsClient::new(channel), 0, Instant::now());
        while Instant::now() < until {
            let change = |n: u64| Change {
                space: Space::Objects,
                key: (FIRST_FILE + n % 100_000).to_be_bytes().to_vec(),
                value: Some(row(n)),
            };
            let changes: Vec<_> = (rows..rows + batch).map(change).collect();
            let of = Some(proto::Of { vault: self.vault.clone(), session: self.number });
            let (base, changes, grant) = (self.head.0.to_vec(), pack(&changes), self.grant);
            let request = proto::CommitRequest { of, base, changes, grant };
            self.head = head_of(&anchors.commit(request).await?.into_inner().head)?;
            rows += batch;
            if beaten.elapsed() > Duration::from_secs(1) {
                beaten = Instant::now();
                self.say.send(up(Said::Heartbeat(proto::Heartbeat { beat: rows }))).await?;
            }
        }
        Ok(rows)
    }

    /// Takes the vault and gives it back until then. Returns how often.
    async fn take_turns(&mut self, until: Instant) -> Result<u64> {
        let mut turns = 0;
        while Instant::now() < until {
            let grant = self.acquire(proto::Mode::Shared).await?;
            self.release(grant).await?;
            turns += 1;
        }
        Ok(turns)
    }
}

fn head_of(bytes: &[u8]) -> Result<Head> {
    Ok(Head(bytes.try_into()?))
}

#[tokio::main]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let [_, servers, address, seconds, batch, vaults @ ..] = &args[..] else {
        return Err("load SERVERS ADDRESS SECONDS BATCH VAULT…".into());
    };
    let (seconds, batch): (u64, u64) = (seconds.parse()?, batch.parse()?);
    let time = Duration::from_secs(seconds);
    let mut sessions = Vec::new();
    for vault in vaults {
        let vault = data_encoding::HEXLOWER.decode(vault.replace('-', "").as_bytes())?;
        let channel = channel(Path::new(servers), address)?;
        sessions.push((Session::begin(channel.clone(), vault).await?, channel));
    }
    let (mut commits, until) = (JoinSet::new(), Instant::now() + time);
    for (mut session, channel) in sessions {
        commits.spawn(async move {
            let grant = session.acquire(proto::Mode::Exclusive).await?;
            let rows = session.commit(channel, batch, until).await?;
            session.release(grant).await?;
            Result::Ok((session, rows))
        });
    }
    let (mut rows, mut turns) = (0, 0);
    let mut looking = Vec::new();
    for done in commits.join_all().await {
        let (session, committed) = done?;
        rows += committed;
        looking.push(session);
    }
    let (mut looks, until) = (JoinSet::new(), Instant::now() + time);
    for mut session in looking {
        looks.spawn(async move { session.take_turns(until).await });
    }
    for done in looks.join_all().await {
        turns += done?;
    }
    println!("{}", serde_json::json!({"rows_per_s": rows / seconds, "grants_per_s": turns / seconds}));
    Ok(())
}
