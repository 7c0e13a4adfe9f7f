//! Calls that no program of ours makes.

use super::Lab;
use hyper_util::rt::TokioIo;
use lamassu_rpc::identity::Identity;
use lamassu_rpc::proto::{self, up::Said};
use lamassu_rpc::protocol::Speaks;
use lamassu_rpc::tls;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint, Uri};

/// A connection as a host, for calls of its own.
pub fn channel(lab: &Lab, name: &str) -> InterceptedService<Channel, Speaks> {
    InterceptedService::new(silent_channel(lab, name), Speaks)
}

/// One that does not say which versions of the protocol it speaks.
pub fn silent_channel(lab: &Lab, name: &str) -> Channel {
    let dir = lab.path(&format!("state-{name}/lamassu/servers/127.0.0.1:{}", lab.port));
    let config = tls::client(&Identity::read(&dir).unwrap().expect("it has joined")).unwrap();
    let (connector, port) = (TlsConnector::from(Arc::new(config)), lab.port);
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
