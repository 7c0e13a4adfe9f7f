//! A server that speaks other versions of the protocol than the hosts: the real program `lamassu` says so, and ends
//! with 77.
#![allow(clippy::result_large_err, reason = "tonic's")]

use crate::common::raw::*;
use crate::common::*;
use lamassu_rpc::proto::hosts_server::{Hosts, HostsServer};
use lamassu_rpc::proto::sessions_client::SessionsClient;
use lamassu_rpc::proto::sessions_server::{Sessions, SessionsServer};
use lamassu_rpc::proto::{self, down};
use lamassu_rpc::protocol::{self, SPOKEN, Versions};
use lamassu_rpc::tls;
use lamassu_server::accept::{Door, KnownKeys, Limits};
use lamassu_server::authority::Authority;
use lamassu_server::metrics::Metrics;
use lamassu_server::state::State;
use std::pin::Pin;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status, Streaming};

/// The versions that the other server speaks.
const OTHERS: &str = "7-9";

/// The services of a server of later versions. It has the identity of the lab's server.
#[derive(Clone)]
struct Other;

#[tonic::async_trait]
impl Hosts for Other {
    async fn join(&self, _: Request<proto::PublicKey>) -> Result<Response<proto::Joined>, Status> {
        Err(Status::internal("the version was to be refused first"))
    }
}

#[tonic::async_trait]
impl Sessions for Other {
    type AttendStream = Pin<Box<dyn Stream<Item = Result<proto::Down, Status>> + Send>>;

    /// Takes a version that no host has named.
    async fn attend(&self, _: Request<Streaming<proto::Up>>) -> Result<Response<Self::AttendStream>, Status> {
        let (session, term, heartbeat, min_hold) = (1, 5000, 1000, 0);
        let begun = proto::Begun { session, term, heartbeat, min_hold, head: vec![0; 32], protocol: 9 };
        let down = proto::Down { said: Some(down::Said::Begun(begun)), policy: None };
        Ok(Response::new(Box::pin(tokio_stream::iter([Ok(down)]))))
    }
}

/// What the other server answers to a call.
type Answers = fn(Request<()>) -> Result<Request<()>, Status>;

/// Refuses each call with the words of the real server, which [`the_words_of_a_refusal`] compares.
fn refuses(call: Request<()>) -> Result<Request<()>, Status> {
    let theirs = protocol::of(call.metadata()).expect("a host says which versions it speaks");
    let mut refusal = Status::unimplemented(words(OTHERS, &theirs.to_string()));
    refusal.metadata_mut().insert(protocol::KEY, OTHERS.parse().unwrap());
    Err(refusal)
}

fn words(server: &str, host: &str) -> String {
    format!("the server speaks the versions {server} of the protocol, and this host speaks {host}")
}

/// Serves in place of the lab's server, which is stopped, until this is dropped.
fn serve(lab: &Lab, answers: Answers) -> Runtime {
    let runtime = Runtime::new().unwrap();
    let state = Arc::new(State::open(&lab.path("server")).unwrap());
    let (chain, key) = Authority::read(&lab.path("server")).unwrap().server().unwrap();
    let config = tls::server(chain, key, Arc::new(KnownKeys(state.clone()))).unwrap();
    let limits = Limits { connections: Arc::new(Semaphore::new(64)), handshakes: 64 };
    let door = Door::new(watch::Sender::new(Arc::new(config)).subscribe(), state, limits, Metrics::default());
    let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", lab.port))).unwrap();
    let (accepted, connections) = mpsc::channel(8);
    runtime.spawn(door.accept(listener, accepted));
    let server = Server::builder()
        .add_service(HostsServer::with_interceptor(Other, answers))
        .add_service(SessionsServer::with_interceptor(Other, answers));
    runtime.spawn(server.serve_with_incoming(ReceiverStream::new(connections)));
    runtime
}

#[test]
fn commands_and_mounts_name_the_versions_of_both_and_go_on_when_there_is_a_common_one() {
    let mut lab = Lab::new();
    let id = lab.vault(lab.joined("a"));
    let token = lab.serve(&["enrol", "--vault", &id, "@b"]).ok().out;
    lab.stop("-TERM");
    let other = serve(&lab, refuses);
    let both = words(OTHERS, &SPOKEN.to_string());
    let (a, b) = (lab.host("a"), lab.host("b"));
    b.with_input(&["host", "join"], &token).code(77).says(&both).says("update the older");
    let url = lab.url();
    for line in [
        format!("mount --shared --anchor {url} store/v m-a"),
        format!("mount --anchor {url} store/v m-a"),
        format!("ls --anchor {url} store/v"),
        "anchor move store/v back.anchor".into(),
    ] {
        a.run(&line).code(77).says(&both);
    }
    drop(other);
    // One that takes a version which this host does not speak.
    let other = serve(&lab, Ok);
    a.mount().code(77).says(&format!("took version 9, and this host speaks the versions {SPOKEN}"));
    drop(other);
    // Nothing came of any of that: the token is unused, and the vault where it was.
    lab.start();
    let (a, b) = (lab.host("a"), lab.host("b"));
    b.with_input(&["host", "join"], &token).ok();
    a.mount().ok();
    a.write("f", "one").unwrap();
    a.umount().ok();
    b.run(&format!("cat --anchor {} store/v f", lab.url())).ok();
}

/// Says with each call that it speaks the other versions.
fn says_others(mut call: Request<()>) -> Result<Request<()>, Status> {
    call.metadata_mut().insert(protocol::KEY, OTHERS.parse().unwrap());
    Ok(call)
}

/// The real server, and a host of later versions.
#[test]
fn the_words_of_a_refusal() {
    let lab = Lab::new();
    lab.joined("a");
    Runtime::new().unwrap().block_on(async {
        let calls = InterceptedService::new(silent_channel(&lab, "a"), says_others as Answers);
        let (_says, said) = mpsc::channel(1);
        let refused = SessionsClient::new(calls).attend(ReceiverStream::new(said)).await.unwrap_err();
        assert_eq!((refused.code(), protocol::of(refused.metadata())), (Code::Unimplemented, Some(SPOKEN)));
        assert_eq!(refused.message(), words(&SPOKEN.to_string(), OTHERS));
        assert_eq!(SPOKEN.common(OTHERS.parse::<Versions>().unwrap()), None);
    });
}
