//! A session with a KMIP server: one TLS connection, with one request and answer after another (KMIP 1.2, which servers
//! of later versions also support).
//!
//! Guarantees: everything together ends at the deadline, even if the server sends a byte now and then; no answer longer
//! than [`ANSWER_MAX`] is read; an answer is wiped after it was read. No key is sent. Text of the server is not
//! trusted: what is shown of it is cut and escaped.
//!
//! The answer passes through the TLS library's buffers, which are not wiped.

use super::address::Address;
use super::ttlv::{HEAD_LEN, Item, Malformed, Writer, tag};
use crate::fault::{KmipReason, ServerFault};
use crate::providers::tls;
use crate::source::SourceError;
use rustls::{AlertDescription, ClientConnection, StreamOwned};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// Longest answer, in bytes. A key's is a few hundred.
pub(super) const ANSWER_MAX: usize = 64 << 10;
/// Version 1.2.
const VERSION: (i32, i32) = (1, 2);

/// Operations (§9.1.3.2.27).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Create = 1,
    Locate = 8,
    Get = 10,
    GetAttributes = 11,
    AddAttribute = 13,
    Activate = 18,
    Revoke = 19,
    Destroy = 20,
}

impl Operation {
    /// In words, after "cannot".
    fn words(self) -> &'static str {
        match self {
            Operation::Create => "create a key",
            Operation::Locate => "look for the key",
            Operation::Get => "get the key",
            Operation::GetAttributes => "ask about the key",
            Operation::AddAttribute => "add an attribute to the key",
            Operation::Activate => "activate the key",
            Operation::Revoke => "revoke the key",
            Operation::Destroy => "destroy the key",
        }
    }
}

/// A connection to a server whose certificate is trusted.
pub(super) struct Session {
    tls: StreamOwned<ClientConnection, Timed>,
    timeout: Duration,
    has_identity: bool,
}

impl Session {
    /// Connects, and shakes hands.
    pub(super) fn open(address: &Address) -> Result<Session, SourceError> {
        let failed = |fault| SourceError::Server { place: address.shown.clone(), fault };
        let options = &address.options;
        let config = Arc::new(options.config()?);
        let until = Instant::now() + options.timeout;
        let tcp = connect(address, until).map_err(|e| failed(io_fault(e, options.timeout)))?;
        let connection = ClientConnection::new(config, address.server_name.clone());
        let connection = connection.map_err(|e| failed(tls::fault(e)))?;
        let tls = StreamOwned::new(connection, Timed { tcp, until });
        let mut session = Session { tls, timeout: options.timeout, has_identity: options.client.is_some() };
        while session.tls.conn.is_handshaking() {
            session.tls.conn.complete_io(&mut session.tls.sock).map_err(|e| failed(session.fault(e)))?;
        }
        Ok(session)
    }

    /// Makes one request. `payload` writes its payload.
    pub(super) fn call(
        &mut self,
        operation: Operation,
        payload: impl FnOnce(&mut Writer),
    ) -> Result<Answer, ServerFault> {
        let bytes = self.exchange(&request(operation, payload)).map_err(|e| self.fault(e))?;
        let Some(bytes) = bytes else { return Err(ServerFault::TooLong { max: ANSWER_MAX }) };
        Ok(Answer { operation, bytes })
    }

    /// Sends a message and reads one; `None`: the answer is too long.
    fn exchange(&mut self, request: &[u8]) -> io::Result<Option<Zeroizing<Vec<u8>>>> {
        self.tls.write_all(request)?;
        self.tls.flush()?;
        let mut head = [0; HEAD_LEN];
        self.tls.read_exact(&mut head)?;
        let [t0, t1, t2, _, l0, l1, l2, l3] = head;
        if u32::from_be_bytes([0, t0, t1, t2]) != tag::RESPONSE_MESSAGE {
            let malformed = Malformed::Lacks { tag: tag::RESPONSE_MESSAGE };
            return Err(io::Error::new(io::ErrorKind::InvalidData, malformed));
        }
        let len = u32::from_be_bytes([l0, l1, l2, l3]);
        let Some(len) = usize::try_from(len).ok().filter(|len| *len <= ANSWER_MAX) else { return Ok(None) };
        let mut bytes = Zeroizing::new(vec![0; HEAD_LEN + len]);
        bytes[..HEAD_LEN].copy_from_slice(&head);
        self.tls.read_exact(&mut bytes[HEAD_LEN..])?;
        Ok(Some(bytes))
    }

    fn fault(&self, error: io::Error) -> ServerFault {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        match inner {
            // Some servers send only this alert if they want a client certificate.
            Some(rustls::Error::AlertReceived(AlertDescription::HandshakeFailure)) if !self.has_identity => {
                ServerFault::Unwelcome { source: Box::new(error) }
            }
            Some(tls) => tls::fault(tls.clone()),
            None => io_fault(error, self.timeout),
        }
    }
}

fn io_fault(error: io::Error, timeout: Duration) -> ServerFault {
    match error.kind() {
        io::ErrorKind::TimedOut => ServerFault::Timeout { seconds: timeout.as_secs() },
        io::ErrorKind::InvalidData => ServerFault::Protocol { source: Box::new(error) },
        _ => ServerFault::Unreachable { source: error },
    }
}

/// A connection whose reads and writes end at the deadline. A write to a server that has [closed the
/// connection](tls::turned_away) succeeds: the read that follows gets the reason, or the end.
struct Timed {
    tcp: TcpStream,
    until: Instant,
}

/// The time left until a deadline.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A socket returns "would block" at a timeout.
fn over(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

impl Read for Timed {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.tcp.set_read_timeout(Some(left(self.until)?))?;
        self.tcp.read(buf).map_err(over)
    }
}

impl Write for Timed {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.tcp.set_write_timeout(Some(left(self.until)?))?;
        match self.tcp.write(buf).map_err(over) {
            Err(e) if tls::turned_away(&e) => Ok(buf.len()),
            other => other,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.tcp.flush()
    }
}

/// Connects to the first of the host's addresses that answers.
fn connect(address: &Address, until: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "no such host");
    for to in resolve(address, until)? {
        match TcpStream::connect_timeout(&to, left(until)?) {
            Ok(tcp) => {
                // Each message is a request, written as a whole.
                tcp.set_nodelay(true)?;
                return Ok(tcp);
            }
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// The resolver has no deadline, so it runs on a thread that is abandoned if it takes too long.
fn resolve(address: &Address, until: Instant) -> io::Result<Vec<SocketAddr>> {
    let (sender, receiver) = mpsc::channel();
    let (host, port) = (address.host.clone(), address.port);
    std::thread::Builder::new().name("resolver".into()).spawn(move || {
        // The receiver may be gone.
        let _ = sender.send((host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>));
    })?;
    match receiver.recv_timeout(left(until)?) {
        Ok(found) => found,
        Err(mpsc::RecvTimeoutError::Timeout) => Err(io::ErrorKind::TimedOut.into()),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(io::ErrorKind::NotFound.into()),
    }
}

/// A request of one batch item (§7.2).
fn request(operation: Operation, payload: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut w = Writer::default();
    w.structure(tag::REQUEST_MESSAGE, |w| {
        w.structure(tag::REQUEST_HEADER, |w| {
            w.structure(tag::PROTOCOL_VERSION, |w| {
                w.integer(tag::PROTOCOL_VERSION_MAJOR, VERSION.0);
                w.integer(tag::PROTOCOL_VERSION_MINOR, VERSION.1);
            });
            w.integer(tag::MAXIMUM_RESPONSE_SIZE, i32::try_from(ANSWER_MAX).unwrap_or(i32::MAX));
            w.integer(tag::BATCH_COUNT, 1);
        });
        w.structure(tag::BATCH_ITEM, |w| {
            w.enumeration(tag::OPERATION, operation as u32);
            w.structure(tag::REQUEST_PAYLOAD, payload);
        });
    });
    w.finish()
}

/// The server's answer.
pub(super) struct Answer {
    operation: Operation,
    bytes: Zeroizing<Vec<u8>>,
}

impl Answer {
    /// An answer from elsewhere, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn of(operation: Operation, bytes: Vec<u8>) -> Answer {
        Answer { operation, bytes: Zeroizing::new(bytes) }
    }

    /// The payload of an operation that succeeded.
    pub(super) fn payload(&self) -> Result<Item<'_>, ServerFault> {
        const SUCCESS: u32 = 0;
        let (message, _) = Item::split(&self.bytes)?;
        let item = message.child(tag::BATCH_ITEM)?;
        let number = |item: Item<'_>| item.enumeration();
        if number(item.child(tag::RESULT_STATUS)?)? != SUCCESS {
            let reason = item.find(tag::RESULT_REASON)?.map(number).transpose()?.unwrap_or_default();
            let said = item.find(tag::RESULT_MESSAGE)?.map(|m| m.text()).transpose()?.unwrap_or_default();
            return Err(self.refused(reason, said));
        }
        if number(item.child(tag::OPERATION)?)? != self.operation as u32 {
            return Err(Malformed::Lacks { tag: tag::OPERATION }.into());
        }
        Ok(item.child(tag::RESPONSE_PAYLOAD)?)
    }

    /// The meaning of a Result Reason (§9.1.3.2.29, and its successors in 2.1).
    fn refused(&self, reason: u32, said: &str) -> ServerFault {
        let op = self.operation.words();
        match reason {
            0x01 | 0x37 => ServerFault::NoObject,
            0x03 | 0x0c | 0x16 | 0x17 | 0x39 => ServerFault::NotPermitted { op },
            0x18 | 0x35 => ServerFault::NameTaken,
            0x36 => ServerFault::KeyState(crate::fault::KeyState::Destroyed),
            _ => ServerFault::Failed { op, reason: KmipReason::new(reason, said) },
        }
    }
}

impl From<Malformed> for ServerFault {
    fn from(malformed: Malformed) -> Self {
        ServerFault::Protocol { source: Box::new(malformed) }
    }
}
