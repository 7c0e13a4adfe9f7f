//! The files that this process may have open, and what has which share of them. A server without a descriptor opens no
//! anchor, and answers neither an administrator nor monitoring. So hosts have a part of them, and never the rest.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Beside connections of hosts and anchors that are open: the state, administrators, monitoring, and anchors that are
/// being received ([`PUTS_MAX`]).
const OTHER_FILES: u64 = 512;
/// Handshakes under way, of all addresses.
pub const HANDSHAKES_MAX: usize = 512;
/// Anchors that are being received at once, of all hosts. Each takes two files.
pub const PUTS_MAX: usize = 128;
/// Vaults that are open without sessions.
const UNUSED: u64 = 1000;
/// Vaults in which one host has sessions, at most.
const OF_HOST_MAX: usize = 512;
/// And this part of all that may be open.
const OF_HOST_PART: usize = 4;

/// What may be open at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// connections of hosts
    pub connections: usize,
    /// vaults
    pub vaults: usize,
    /// vaults in which one host has sessions
    pub vaults_of_host: usize,
}

impl Shares {
    /// The shares of a process that may open so many files. `connections`: as many as are configured.
    pub fn of(files: u64, connections: usize) -> Shares {
        let other = (OTHER_FILES + HANDSHAKES_MAX as u64).min(files / 4);
        let hosts = files - other;
        let count = |files: u64| usize::try_from(files).unwrap_or(usize::MAX);
        let connections = connections.min(count(hosts / 2));
        let vaults = count((hosts - connections as u64) / 2);
        let vaults_of_host = (vaults / OF_HOST_PART).clamp(1, OF_HOST_MAX);
        Shares { connections, vaults, vaults_of_host }
    }
}

/// Raises the limit of open files as far as this process may: what a shell sets is less than the connections that
/// `connections_max` allows.
pub fn raise_limit(connections: usize) -> Shares {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let shares = Shares::of(files, connections);
    if files < connections as u64 + 2 * UNUSED + OTHER_FILES + HANDSHAKES_MAX as u64 {
        tracing::warn!(
            files,
            connections_max = connections,
            connections = shares.connections,
            vaults = shares.vaults,
            "this process may open so few files that it has no more connections and open vaults: raise LimitNOFILE"
        );
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_leave_others_some_files_however_few_there_are() {
        for files in [64, 256, 1024, 4096, 16_384, 1 << 20, u64::MAX] {
            for connections in [1, 100, 4096, 1 << 20] {
                let shares = Shares::of(files, connections);
                let hosts = shares.connections as u64 + 2 * shares.vaults as u64;
                assert!(hosts <= files - (files / 4).min(1024), "{files} {connections} {shares:?}");
                assert!(shares.connections >= 1 && shares.vaults >= 1 && shares.vaults_of_host >= 1);
                assert!(shares.vaults_of_host <= (shares.vaults / 4).max(1), "{files} {connections} {shares:?}");
            }
        }
        assert_eq!(Shares::of(16_384, 4096), Shares { connections: 4096, vaults: 5632, vaults_of_host: 512 });
        assert_eq!(Shares::of(4096, 4096), Shares { connections: 1536, vaults: 768, vaults_of_host: 192 });
    }
}
