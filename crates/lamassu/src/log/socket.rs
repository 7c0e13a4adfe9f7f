//! The sockets of system logs: datagrams, sent without waiting.

use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

pub struct Socket {
    socket: UnixDatagram,
    place: PathBuf,
}

impl Socket {
    /// Connects, if there is a listener. If not, each message tries again, since a log may be restarted.
    pub fn to(place: PathBuf) -> Option<Socket> {
        let socket = UnixDatagram::unbound().ok()?;
        // A full log must not stop the file system.
        socket.set_nonblocking(true).ok()?;
        let _ = socket.connect(&place);
        Some(Socket { socket, place })
    }

    pub fn is_connected(&self) -> bool {
        self.socket.peer_addr().is_ok()
    }

    /// Sends a message. Returns whether it could be sent.
    pub fn send(&self, message: &[u8]) -> bool {
        let sent = || self.socket.send(message).is_ok();
        sent() || (self.socket.connect(&self.place).is_ok() && sent())
    }
}
