//! Checks what a start reads, without starting: the directory, the configuration and the policy, the authority, and the
//! files and the key that the configuration names.
//!
//! Never: opens the state, takes a lock, writes, connects to anything, or asks a person. So a server may serve the
//! directory meanwhile, and the next start finds everything as it was. What is only in the state is not checked:
//! whether the master key is the one of the kept keys, for example.

use crate::admin::SOCKET;
use crate::authority::Authority;
use crate::config::Config;
use crate::dir::check_dir;
use crate::keys;
use crate::origin::Origin;
use crate::policy::Policy;
use crate::webhook;
use crate::{Result, ServerError};
use lamassu_keys::{KeySource, Purpose};
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::net;
use std::path::Path;

/// Checks whether a server could start on a directory. Returns what was not read, since that asks a person, a device or
/// another server.
///
/// # Errors
/// [`ServerError`].
pub fn check(dir: &Path) -> Result<Option<KeySource>> {
    check_dir(dir)?;
    let config = Config::read(dir)?;
    Policy::read(dir)?;
    Authority::read(dir)?.server()?;
    Origin::check_place(dir, &config)?;
    #[cfg(feature = "etcd")]
    if let Some(etcd) = &config.etcd {
        etcd.options(dir)?;
    }
    webhook::check(dir, &config)?;
    let socket = dir.join(SOCKET);
    net::SocketAddr::from_pathname(&socket).map_err(ServerError::file("listen on", &socket))?;
    config.metrics.iter().chain([&config.listen]).try_for_each(|address| is_of_this_machine(address))?;
    let Some(source) = keys::source_in(&config)? else { return Ok(None) };
    if !is_at_hand(&source) {
        return Ok(Some(source));
    }
    keys::load(&source, Purpose::Unlock).map(|_| None)
}

/// Checks that this machine has an address, by a port that is free for sure. That of the address may be the running
/// server's.
fn is_of_this_machine(address: &str) -> Result<()> {
    let failed = |source| ServerError::Listen { address: address.to_owned(), source };
    let mut socket = address.parse::<SocketAddr>().map_err(|error| failed(std::io::Error::other(error)))?;
    socket.set_port(0);
    UdpSocket::bind(socket).map(drop).map_err(failed)
}

/// Whether a source gives its key again and again, and asks nobody for it. A key server's like this one is refused
/// before it is asked. A credential, or a variable, may be given to the service alone.
fn is_at_hand(source: &KeySource) -> bool {
    let text = source.to_string();
    match text.split_once(':').and_then(|(_, place)| place.split_once(':')) {
        Some(("file", path)) => std::fs::metadata(path).map_or(true, |st| st.is_file()),
        Some(("credential", _)) => std::env::var_os("CREDENTIALS_DIRECTORY").is_some(),
        Some(("env", name)) => std::env::var_os(name).is_some(),
        _ => text.starts_with("server:"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_a_person_or_a_device_gives_is_not_asked_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let (key, pipe) = (dir.path().join("key"), dir.path().join("pipe"));
        std::fs::write(&key, [7; 32]).expect("writes");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("runs");
        assert!(made.success());
        for (source, is_so) in [
            (format!("raw:file:{}", key.display()), true),
            ("raw:file:/nowhere/a".into(), true),
            (format!("raw:file:{}", pipe.display()), false),
            ("server://file:7433/a".into(), true),
            ("passphrase:env:PATH".into(), true),
            ("passphrase:env:LAMASSU_NOT_SET".into(), false),
            ("passphrase:prompt".into(), false),
            ("raw:stdin".into(), false),
            ("raw:fd:3".into(), false),
            ("kmip://file:5696/a".into(), false),
        ] {
            let parsed: KeySource = source.parse().unwrap_or_else(|error| panic!("{source}: {error}"));
            assert_eq!(is_at_hand(&parsed), is_so, "{source}");
        }
    }
}
