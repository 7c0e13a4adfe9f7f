//! Calls that no program of ours makes.

use super::{Lab, PATIENCE};
use hyper_util::rt::TokioIo;
use lamassu_anchor::AnchorError;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Change, DiskTable, Readers};
use lamassu_rpc::identity::Identity;
use lamassu_rpc::proto::anchors_client::AnchorsClient;
use lamassu_rpc::proto::sessions_client::SessionsClient;
use lamassu_rpc::proto::{self, down, up::Said};
use lamassu_rpc::protocol::Speaks;
use lamassu_rpc::tls;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status, Streaming};

/// A connection of a host that says which versions of the protocol it speaks.
pub type Calls = InterceptedService<Channel, Speaks>;

/// A connection as a host, for calls of its own.
pub fn channel(lab: &Lab, name: &str) -> Calls {
    channel_by(lab, name, lab.port)
}

/// The same by another port.
pub fn channel_by(lab: &Lab, name: &str, port: u16) -> Calls {
    InterceptedService::new(channel_of(identified(lab, name), port), Speaks)
}

/// One that does not say which versions of the protocol it speaks.
pub fn silent_channel(lab: &Lab, name: &str) -> Channel {
    channel_of(identified(lab, name), lab.port)
}

/// TLS of a host.
fn identified(lab: &Lab, name: &str) -> ClientConfig {
    let dir = lab.path(&format!("state-{name}/lamassu/servers/127.0.0.1:{}", lab.port));
    tls::client(&Identity::read(&dir).unwrap().expect("it has joined")).unwrap()
}

/// Accepts each server, whatever the time.
#[derive(Debug)]
struct Anyone;

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// The certificate that the server shows a host on a new connection. It is not verified: the clock of this process may
/// be another than the server's.
pub fn shown(lab: &Lab, name: &str) -> Vec<u8> {
    let mut config = identified(lab, name);
    config.dangerous().set_certificate_verifier(Arc::new(Anyone));
    let connector = TlsConnector::from(Arc::new(config));
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let stream = TcpStream::connect(("127.0.0.1", lab.port)).await.unwrap();
        let stream = connector.connect(tls::server_name(), stream).await.unwrap();
        stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    })
}

/// A connection by this TLS, to a port of this machine.
pub fn channel_of(config: ClientConfig, port: u16) -> Channel {
    let connector = TlsConnector::from(Arc::new(config));
    let connect = tower::service_fn(move |_: Uri| {
        let connector = connector.clone();
        async move {
            let stream = TcpStream::connect(("127.0.0.1", port)).await?;
            let stream = connector.connect(tls::server_name(), stream).await?;
            std::io::Result::Ok(TokioIo::new(stream))
        }
    });
    Endpoint::from_static("http://server.lamassu").connect_with_connector_lazy(connect)
}

pub fn id_of(vault: &str) -> Vec<u8> {
    data_encoding::HEXLOWER.decode(vault.replace('-', "").as_bytes()).unwrap()
}

pub fn up(said: Said) -> proto::Up {
    proto::Up { said: Some(said) }
}

/// All rows of a table in a file, and its head.
pub fn rows(file: &Path) -> (Option<Head>, Vec<Change>) {
    let table = DiskTable::open_read_only(file, Readers::BesideWriter).unwrap();
    let mut all = Vec::new();
    let visited = table.visit_all(|space, key, value| {
        all.push(Change { space, key: key.to_vec(), value: Some(value.to_vec()) });
        Ok::<(), AnchorError>(())
    });
    visited.unwrap();
    (Head::of(&table).unwrap(), all)
}

/// The first message of a session of a vault: by turns, or exclusively until it ends.
pub fn begin(vault: &[u8], turns: bool) -> proto::Begin {
    proto::Begin { vault: vault.to_vec(), mode: 1, replaces: 0, turns }
}

/// Makes a commit. Returns the head.
pub async fn commit(calls: &Calls, commit: &proto::CommitRequest) -> Result<Vec<u8>, Code> {
    let done = AnchorsClient::new(calls.clone()).commit(commit.clone()).await;
    done.map(|state| state.into_inner().head).map_err(|status| status.code())
}

/// A session whose messages are written here, one by one. It sends heartbeats by itself.
pub struct Attended {
    says: mpsc::Sender<proto::Up>,
    hears: Streaming<proto::Down>,
    beats: AbortHandle,
    pub of: proto::Of,
    requests: u64,
}

impl Attended {
    pub async fn begin(calls: &Calls, begin: proto::Begin) -> Result<Attended, Status> {
        Attended::with(calls, begin.vault.clone(), up(Said::Begin(begin))).await
    }

    /// An existing session, by a new connection.
    pub async fn resume(calls: &Calls, of: &proto::Of, held: Vec<proto::Grant>) -> Result<Attended, Status> {
        let resume = proto::Resume { of: Some(of.clone()), number: 1, held, ..Default::default() };
        Attended::with(calls, of.vault.clone(), up(Said::Resume(resume))).await
    }

    async fn with(calls: &Calls, vault: Vec<u8>, first: proto::Up) -> Result<Attended, Status> {
        let (says, said) = mpsc::channel(64);
        says.send(first).await.unwrap();
        let mut hears = SessionsClient::new(calls.clone()).attend(ReceiverStream::new(said)).await?.into_inner();
        let first = hears.message().await?.expect("it says what has begun").said;
        let Some(down::Said::Begun(begun)) = first else { panic!("{first:?}") };
        let beating = says.clone();
        let beats = tokio::spawn(async move {
            for beat in 0.. {
                tokio::time::sleep(Duration::from_millis(begun.heartbeat)).await;
                if beating.send(up(Said::Heartbeat(proto::Heartbeat { beat }))).await.is_err() {
                    break;
                }
            }
        });
        let of = proto::Of { vault, session: begun.session };
        Ok(Attended { says, hears, beats: beats.abort_handle(), of, requests: 0 })
    }

    pub async fn say(&self, said: Said) {
        self.says.send(up(said)).await.unwrap();
    }

    /// What the server says next, except that it has heard a heartbeat. `None`: the session has ended, or its
    /// connection.
    pub async fn hear(&mut self) -> Option<down::Said> {
        let hears = async {
            loop {
                match self.hears.message().await {
                    Ok(Some(proto::Down { said: Some(down::Said::Alive(_)), .. })) => {}
                    Ok(Some(proto::Down { said: Some(down::Said::Ended(_)), .. }) | None) | Err(_) => return None,
                    Ok(Some(down)) => return down.said,
                }
            }
        };
        tokio::time::timeout(PATIENCE, hears).await.expect("the server says nothing")
    }

    pub async fn ask(&mut self) {
        self.requests += 1;
        self.say(Said::Acquire(proto::Acquire { request: self.requests, object: 0, mode: 1 })).await;
    }

    /// Waits for the grant that was asked for.
    pub async fn granted(&mut self) -> proto::Granted {
        loop {
            match self.hear().await {
                Some(down::Said::Granted(granted)) => return granted,
                Some(down::Said::Recall(_)) => {}
                other => panic!("no grant: {other:?}"),
            }
        }
    }

    pub async fn acquire(&mut self) -> proto::Granted {
        self.ask().await;
        self.granted().await
    }

    pub async fn release(&self, granted: &proto::Granted) {
        self.say(Said::Release(proto::Release { grant: granted.grant, keeps: None })).await;
    }

    /// Returns when the server has heard all that was said.
    pub async fn is_heard(&mut self) {
        let last = proto::Heartbeat { beat: u64::MAX };
        self.say(Said::Heartbeat(last)).await;
        let hears =
            async { while self.hears.message().await.unwrap().unwrap().said != Some(down::Said::Alive(last)) {} };
        tokio::time::timeout(PATIENCE, hears).await.expect("the server does not answer");
    }

    /// From now on it sends nothing.
    pub fn fall_silent(&self) {
        self.beats.abort();
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        self.beats.abort();
    }
}
