//! The end of the server. nbdkit waits until every client has disconnected or sends a request, which an idle client may
//! never do. So this module stops reading from clients; nbdkit still answers requests under way.

use crate::abi;
use crate::failure::Result;
use rustix::net::{Shutdown, SocketAddrAny, getsockname, shutdown, sockopt};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::time::Duration;

/// How long clients have to disconnect by themselves.
const GRACE: Duration = Duration::from_secs(1);
/// After this many of these periods, a client that does not take its answers is disconnected.
const PATIENCE: u32 = 10;

/// Starts the thread that waits for the signals that end nbdkit. Its own handlers are called before. `commit`: makes
/// what clients wrote durable.
pub fn watch(commit: fn()) -> Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM])?;
    let doors = doors();
    let wait = move || {
        if signals.forever().next().is_some() {
            // A client that is being accepted at this moment is handled in the next round.
            for round in 1u32.. {
                std::thread::sleep(GRACE);
                if round == PATIENCE {
                    // nbdkit may not survive it: see `docs/volumes.md`, "Limits".
                    commit();
                }
                hang_up(&doors, if round < PATIENCE { Shutdown::Read } else { Shutdown::Both });
            }
        }
    };
    std::thread::Builder::new().name("lamassu-end".into()).spawn(wait)?;
    Ok(())
}

/// The descriptors of this process.
fn descriptors() -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// The addresses on which this process listens.
fn doors() -> Vec<SocketAddrAny> {
    let listens = |fd: i32| {
        let fd = abi::borrowed(fd);
        sockopt::socket_acceptconn(fd).ok().filter(|listens| *listens)?;
        getsockname(fd).ok()
    };
    descriptors().into_iter().filter_map(listens).collect()
}

/// Shuts down the connections to these addresses. With [`Shutdown::Read`] nothing more is read from them, and requests
/// under way are still answered.
fn hang_up(doors: &[SocketAddrAny], how: Shutdown) {
    for fd in descriptors().into_iter().map(abi::borrowed) {
        let came_in = |at: SocketAddrAny| doors.iter().any(|door| is_of(&at, door));
        let is_client = matches!(sockopt::socket_acceptconn(fd), Ok(false)) && getsockname(fd).is_ok_and(came_in);
        if is_client {
            // It may have disconnected by itself.
            let _ = shutdown(fd, how);
        }
    }
}

/// Whether a connection's local address belongs to a listening one. Compared by the port, since that may be the
/// wildcard address.
fn is_of(at: &SocketAddrAny, door: &SocketAddrAny) -> bool {
    let port = |address: &SocketAddrAny| match std::net::SocketAddr::try_from(address.clone()) {
        Ok(address) => Some(address.port()),
        Err(_) => None,
    };
    at == door || port(at).is_some_and(|number| port(door) == Some(number))
}
