//! A real KMIP server, PyKMIP, and what its administrator does there; with certificates made for it.
#![allow(dead_code)] // shared by tests that need different parts

use super::https_server::Ca;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The server; it ends with this, or with the process.
pub struct PyKmip {
    pub dir: PathBuf,
    pub port: u16,
    pub ca: Ca,
    server: Option<Child>,
}

fn python(dir: &Path) -> Command {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../lamassu-keys/tests/it/support/pykmip.py");
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-W", "ignore", script]).current_dir(dir);
    command
}

impl PyKmip {
    /// A server without keys, its files in `dir`: ca.pem, server.pem, client.pem, and other.pem of another client.
    pub fn start(dir: &Path) -> PyKmip {
        let imports = Command::new("/usr/bin/python3").args(["-W", "ignore", "-c", "import kmip"]).output();
        assert!(imports.is_ok_and(|o| o.status.success()), "PyKMIP is missing: run scripts/setup");
        let ca = Ca::new();
        // Keys of elliptic curves, as always here: PyKMIP's only suites that rustls knows want one.
        for (name, text) in [
            ("ca.pem", ca.pem()),
            ("server.pem", ca.server("localhost").both()),
            ("client.pem", ca.client_called("client").both()),
            ("other.pem", ca.client_called("other").both()),
        ] {
            std::fs::write(dir.join(name), text).unwrap();
        }
        let mut made = PyKmip { dir: dir.into(), port: 0, ca, server: None };
        made.restart();
        made
    }

    /// Starts it, with the keys it had, where it was.
    pub fn restart(&mut self) {
        self.stop();
        let mut server = python(&self.dir)
            .args(["serve", ".", &self.port.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .process_group_of_its_own()
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        self.port = line.trim().parse().unwrap_or_else(|_| panic!("PyKMIP did not start: {line:?}"));
        self.server = Some(server);
    }

    /// Ends it at once, as a power cut does.
    pub fn stop(&mut self) {
        if let Some(mut server) = self.server.take() {
            // Its processes watch their standard input.
            drop(server.stdin.take());
            server.wait().unwrap();
        }
    }

    /// What an administrator does, in the words of pykmip.py; returns the identifiers of what was made.
    #[track_caller]
    pub fn admin(&self, line: &str) -> Vec<String> {
        let out = python(&self.dir).args(["do", ".", &self.port.to_string()]).args(line.split(' ')).output().unwrap();
        assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap().lines().map(String::from).collect()
    }

    /// An address there, for our usual certificate.
    pub fn uri(&self, path: &str) -> String {
        self.uri_as(path, "client.pem")
    }

    /// The same for another client.
    pub fn uri_as(&self, path: &str, client: &str) -> String {
        let at = |name: &str| self.dir.join(name).display().to_string();
        format!("kmip://localhost:{}/{path}#ca={}&cert={}", self.port, at("ca.pem"), at(client))
    }
}

impl Drop for PyKmip {
    fn drop(&mut self) {
        self.stop();
    }
}

trait OwnGroup {
    fn process_group_of_its_own(&mut self) -> &mut Self;
}

impl OwnGroup for Command {
    fn process_group_of_its_own(&mut self) -> &mut Self {
        std::os::unix::process::CommandExt::process_group(self, 0)
    }
}
