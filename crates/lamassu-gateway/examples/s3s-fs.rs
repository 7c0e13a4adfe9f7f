//! A server of S3 for tests, in front of which a gateway is tried: the file system of the crate `s3s-fs`. Its own
//! program takes minutes to build by itself; here it shares what the gateway is built of.
//!
//!     s3s-fs PORT ACCESS-KEY SECRET-KEY ROOT

use hyper::server::conn::http1::Builder;
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use std::error::Error;
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [port, access_key, secret_key, root] = &arguments[..] else {
        return Err("usage: s3s-fs PORT ACCESS-KEY SECRET-KEY ROOT".into());
    };
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).init();
    let root = FileSystem::new(root).map_err(|error| format!("{root}: {error:?}"))?;
    let mut service = S3ServiceBuilder::new(root);
    service.set_auth(SimpleAuth::from_single(access_key, secret_key.as_str()));
    let service = service.build();
    let listener = TcpListener::bind(("127.0.0.1", port.parse()?)).await?;
    loop {
        let (socket, _) = listener.accept().await?;
        let service = service.clone();
        tokio::spawn(async move {
            // A client that hangs up is no error of the server.
            let _ = Builder::new().serve_connection(TokioIo::new(socket), service).await;
        });
    }
}
