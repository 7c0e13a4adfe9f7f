//! Providers: two servers of S3 that have nothing in common, started by the tests. moto is in Python and has objects in
//! memory; s3s-fs is in Rust and has them as files. It is built with the tests (`examples/s3s-fs.rs`).

use crate::lab::{Lab, PATIENCE, beside, free_port, has, run};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Moto,
    S3sFs,
}

/// The kinds that a test is run at: one alone, or both where `LAMASSU_PROVIDERS` is `all`, as in `make torture`.
pub fn kinds(briefly: Kind) -> impl Iterator<Item = Kind> {
    let all = std::env::var_os("LAMASSU_PROVIDERS").is_some_and(|kinds| kinds == "all");
    [Kind::Moto, Kind::S3sFs].into_iter().filter(move |kind| (all || *kind == briefly) && kind.is_there())
}

impl Kind {
    pub fn is_there(self) -> bool {
        (self == Kind::S3sFs || has("moto_server")) && crate::boto::is_there()
    }
}

pub struct Provider {
    pub kind: Kind,
    pub port: u16,
    /// the files of s3s-fs
    pub files: PathBuf,
    child: Option<Child>,
}

const SECRET: &str = "provider-secret-provider";

impl Provider {
    fn new(kind: Kind, dir: PathBuf) -> Provider {
        fs::create_dir_all(dir.join("cloud")).expect("a directory, which s3s-fs has for a bucket");
        let mut provider = Provider { kind, port: free_port(), files: dir, child: None };
        provider.start();
        provider
    }

    pub fn start(&mut self) {
        let port = self.port.to_string();
        let mut command = match self.kind {
            Kind::Moto => {
                let mut command = Command::new("moto_server");
                command.args(["-H", "127.0.0.1", "-p", &port]);
                command
            }
            Kind::S3sFs => {
                let mut command = Command::new(beside("examples/s3s-fs"));
                command.args([&port, "PROVIDER", SECRET]).arg(&self.files);
                command
            }
        };
        let log = File::options().create(true).append(true).open(self.files.with_extension("log")).expect("a log");
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
        self.child = Some(command.spawn().expect("it starts"));
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(begun.elapsed() < PATIENCE, "the provider does not start");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What lies between a gateway and a provider: it cuts connections after so many bytes, the first few of them, and then
/// takes none for a moment.
pub fn cutting(provider: u16, cuts: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("a port").port();
    let left = Arc::new(AtomicUsize::new(cuts));
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let Ok(server) = TcpStream::connect(("127.0.0.1", provider)) else { continue };
            let number = left.load(Ordering::Relaxed);
            let room = if number > 0 { (number % 5) * 1_300_000 + 3000 } else { usize::MAX };
            let both = [(client.try_clone(), server.try_clone()), (server.try_clone(), client.try_clone())];
            for (from, to) in both {
                let (Ok(mut from), Ok(mut to), left) = (from, to, left.clone()) else { continue };
                std::thread::spawn(move || {
                    let mut passed = 0;
                    let mut buf = vec![0; 64 << 10];
                    while passed < room
                        && let Ok(len @ 1..) = from.read(&mut buf)
                        && to.write_all(&buf[..len]).is_ok()
                    {
                        passed += len;
                    }
                    if passed >= room {
                        let _ = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
                    }
                    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                });
            }
        }
    });
    port
}

/// What lies between a gateway and a provider: it tells of the first request that begins with `head` and has `part` in
/// its first line, and holds it until `go` is dropped.
pub fn holding(provider: u16, head: &'static str, part: &'static str) -> (u16, Receiver<()>, Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("a port").port();
    let ((tell, told), (go, gone)) = (channel(), channel::<()>());
    let gone = Arc::new(Mutex::new(Some(gone)));
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let Ok(server) = TcpStream::connect(("127.0.0.1", provider)) else { continue };
            let (Ok(mut back), Ok(mut answers)) = (client.try_clone(), server.try_clone()) else { continue };
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut answers, &mut back);
                let _ = back.shutdown(Shutdown::Both);
            });
            let (mut from, mut to, gone, tell) = (client, server, gone.clone(), tell.clone());
            std::thread::spawn(move || {
                let mut buf = vec![0; 64 << 10];
                while let Ok(len @ 1..) = from.read(&mut buf) {
                    let line = buf[..len].split(|b| *b == b'\n').next().unwrap_or_default();
                    let line = String::from_utf8_lossy(line);
                    if line.starts_with(head)
                        && line.contains(part)
                        && let Some(gone) = gone.lock().expect("no panic").take()
                    {
                        let _ = tell.send(());
                        let _ = gone.recv();
                    }
                    if to.write_all(&buf[..len]).is_err() {
                        break;
                    }
                }
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    });
    (port, told, go)
}

impl Lab {
    /// A gateway in front of a provider.
    pub fn remote(kind: Kind, lines: &str) -> Lab {
        Lab::remote_without_gateway(kind, lines).started()
    }

    pub fn remote_without_gateway(kind: Kind, lines: &str) -> Lab {
        let mut lab = Lab::without_gateway("");
        let provider = Provider::new(kind, lab.path("cloud"));
        lab.write("provider.toml", &format!("access_key = \"PROVIDER\"\nsecret_key = \"{SECRET}\"\n"));
        let head = format!(
            "backend = \"s3://cloud/tenant\"\nprovider.endpoint = \"{}\"\nprovider.credentials = \"provider.toml\"\n",
            provider.url()
        );
        lab.configure(&(head + lines));
        lab.provider = Some(provider);
        if kind == Kind::Moto {
            lab.at_provider("s3.create_bucket(Bucket='cloud')");
        }
        lab
    }

    pub fn cloud(&mut self) -> &mut Provider {
        self.provider.as_mut().expect("a provider")
    }

    /// Runs lines of Python that have `s3`, a client of the provider itself; what they print.
    #[track_caller]
    pub fn at_provider(&self, lines: &str) -> String {
        const HEAD: &str = "import boto3, os, sys, pathlib\nfrom botocore.client import Config\n\
            s3 = boto3.client('s3', endpoint_url=os.environ['PROVIDER_URL'], region_name='us-east-1',\n    \
            aws_access_key_id='PROVIDER', aws_secret_access_key=os.environ['PROVIDER_SECRET'],\n    \
            config=Config(signature_version='s3v4', read_timeout=5, retries={'max_attempts': 3}, s3={'addressing_style': 'path'}))\n\
            def names():\n    pages = s3.get_paginator('list_objects_v2').paginate(Bucket='cloud')\n    \
            return [item['Key'] for page in pages for item in page.get('Contents', [])]\n\
            def objects():\n    return [name for name in names() if 'lamassu.' not in name]\n\
            def body(name):\n    return s3.get_object(Bucket='cloud', Key=name)['Body'].read()\n";
        let url = self.provider.as_ref().expect("a provider").url();
        let mut python = self.client("/usr/bin/python3");
        python.env("PROVIDER_URL", url).env("PROVIDER_SECRET", SECRET);
        run(python.arg("-c").arg(HEAD.to_owned() + lines))
    }
}
