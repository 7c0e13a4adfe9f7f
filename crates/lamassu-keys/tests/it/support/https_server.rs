//! A TLS server on 127.0.0.1 that answers each GET as its path says, with certificates made for it.
#![allow(dead_code)] // shared by tests that need different parts

use rcgen::{BasicConstraints, Certificate, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A certificate authority.
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    cert: Certificate,
}

/// A certificate and its key, as PEM.
pub struct Identity {
    pub cert: String,
    pub key: String,
    der: (rustls::pki_types::CertificateDer<'static>, Vec<u8>),
}

impl Identity {
    /// Both in one file.
    pub fn both(&self) -> String {
        format!("{}{}", self.cert, self.key)
    }
}

impl Ca {
    pub fn new() -> Ca {
        static COUNT: AtomicU64 = AtomicU64::new(1);
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        let name = format!("test CA {}", COUNT.fetch_add(1, Ordering::Relaxed));
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let cert = params.self_signed(&key).unwrap();
        Ca { issuer: Issuer::new(params, key), cert }
    }

    pub fn pem(&self) -> String {
        self.cert.pem()
    }

    pub fn server(&self, name: &str) -> Identity {
        self.issue(name, ExtendedKeyUsagePurpose::ServerAuth, |_| {})
    }

    pub fn client(&self) -> Identity {
        self.issue("client.example", ExtendedKeyUsagePurpose::ClientAuth, |_| {})
    }

    /// A client that a server tells from others by its common name.
    pub fn client_called(&self, name: &str) -> Identity {
        self.issue(name, ExtendedKeyUsagePurpose::ClientAuth, |params| {
            params.distinguished_name.push(rcgen::DnType::CommonName, name);
        })
    }

    /// A server's certificate that has run out.
    pub fn expired(&self, name: &str) -> Identity {
        self.issue(name, ExtendedKeyUsagePurpose::ServerAuth, |params| {
            params.not_before = rcgen::date_time_ymd(2001, 1, 1);
            params.not_after = rcgen::date_time_ymd(2002, 1, 1);
        })
    }

    fn issue(
        &self,
        name: &str,
        usage: ExtendedKeyUsagePurpose,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Identity {
        let mut params = CertificateParams::new(vec![name.to_string()]).unwrap();
        params.extended_key_usages = vec![usage];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        Identity { cert: cert.pem(), key: key.serialize_pem(), der: (cert.der().clone(), key.serialize_der()) }
    }
}

/// What a path answers: the whole of it, status line included.
pub type Answers = fn(path: &str) -> Vec<u8>;

pub fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let mut all = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{headers}\r\n", body.len()).into_bytes();
    all.extend_from_slice(body);
    all
}

/// The server; its threads end with the test's process.
pub struct Server {
    pub port: u16,
    /// the head of every request it saw
    pub seen: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub fn start(identity: &Identity, clients: Option<&Ca>, answers: Answers) -> Server {
        let config = Arc::new(config(identity, clients));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        std::thread::spawn(move || {
            for tcp in listener.incoming().flatten() {
                let (config, log) = (config.clone(), log.clone());
                // A client that turns away is no failure of the server's.
                std::thread::spawn(move || serve(tcp, config, &log, answers));
            }
        });
        Server { port, seen }
    }
}

/// A server's side of TLS.
pub fn config(identity: &Identity, clients: Option<&Ca>) -> ServerConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions().unwrap();
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let mut roots = RootCertStore::empty();
            roots.add(ca.cert.der().clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
            builder.with_client_cert_verifier(verifier)
        }
    };
    let (cert, key) = &identity.der;
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.clone()));
    builder.with_single_cert(vec![cert.clone()], key).unwrap()
}

fn serve(tcp: TcpStream, config: Arc<ServerConfig>, log: &Mutex<Vec<String>>, answers: Answers) -> std::io::Result<()> {
    let mut tls = StreamOwned::new(ServerConnection::new(config).map_err(std::io::Error::other)?, tcp);
    let mut head = String::new();
    {
        let mut reader = BufReader::new(&mut tls);
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
        }
    }
    let path = head.split(' ').nth(1).unwrap_or_default().to_string();
    log.lock().unwrap().push(head);
    if path == "/silent" {
        std::thread::sleep(std::time::Duration::from_secs(60));
    }
    tls.write_all(&answers(&path))?;
    tls.conn.send_close_notify();
    tls.flush()
}
