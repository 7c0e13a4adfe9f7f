//! Requests as the kernel sends them: decoded by the library that the mount uses, carried out by the real adapter over
//! a vault in memory, and answered. We are the kernel, at the other end of a socket.
//!
//! Nothing may panic, also where a panic would be caught; and after each request that is one (long enough for its
//! header, and as long as that says) the session must answer the next.
//!
//! An input is a row of requests: opcode (255: the packet follows as it is), node, what is odd about the header, length
//! of the rest (u16), the rest. Handles in it count what this session has opened, from 1; others are taken as they are.

use crate::bytes::Bytes;
use crate::tree::Lab;
use lamassu_fuse::{MountOptions, Served, serve};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

const HEADER_LEN: usize = 40;
const OPCODE_OPEN: u32 = 14;
const OPCODE_STATFS: u32 = 17;
const OPCODE_INIT: u32 = 26;
const OPCODE_OPENDIR: u32 = 27;
const OPCODE_CREATE: u32 = 35;
const OPCODE_DESTROY: u32 = 38;
const REQUESTS_MAX: usize = 64;
/// Number of the request that shows whether the session lives; no other has it.
const PROBE: u64 = u64::MAX - 1;
/// The longest packet a socket takes, as a rule, is a bit longer.
const PACKET_MAX: usize = 128 << 10;
/// How often to look whether the session has ended; how long an answer may take.
const POLL: Duration = Duration::from_millis(2);
const PATIENCE: Duration = Duration::from_secs(10);

/// A row of requests.
///
/// # Panics
/// On a finding.
pub fn request(input: &[u8]) {
    run(input);
}

/// What has come back.
#[derive(Default)]
struct Answers {
    /// The error numbers, in order.
    errors: Vec<i32>,
    /// The handles.
    handles: Vec<u64>,
}

impl Answers {
    fn note(&mut self, answer: &[u8], opcode: u32) {
        let word = |at: usize| answer.get(at..at + 8).map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes")));
        let error = answer.get(4..8).map_or(0, |e| i32::from_le_bytes(e.try_into().expect("four bytes")));
        self.errors.push(error);
        let handle = match opcode {
            OPCODE_OPEN | OPCODE_OPENDIR => word(16),
            // Behind what is said of the entry.
            OPCODE_CREATE => word(16 + 128),
            _ => None,
        };
        self.handles.extend(handle);
    }

    /// Puts handles where a request has them.
    fn fill_in(&self, opcode: u32, rest: &mut [u8]) {
        let places: &[usize] = match opcode {
            3 | 4 => &[8],
            15 | 16 | 18 | 20 | 25 | 28..=33 | 39 | 40 | 43 | 44 | 46 => &[0],
            47 | 53 => &[0, 24],
            _ => &[],
        };
        for at in places {
            let Some(field) = rest.get_mut(*at..at + 8) else { continue };
            let number = u64::from_le_bytes((&*field).try_into().expect("eight bytes"));
            let known = usize::try_from(number).ok().and_then(|n| self.handles.get(n.wrapping_sub(1)));
            if let Some(handle) = known {
                field.copy_from_slice(&handle.to_le_bytes());
            }
        }
    }
}

fn run(input: &[u8]) -> Answers {
    let panics = panics();
    let before = panics.load(Ordering::SeqCst);
    let (kernel, device) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a socket pair");
    put(&kernel, &packet(OPCODE_INIT, 1, 1, 0, &init()));
    set_socket_timeout(&kernel, Timeout::Recv, Some(POLL)).expect("a time limit");
    let served = serve(Arc::new(Lab::new().vault()), device, &MountOptions::default()).expect("a session");
    let (mut bytes, mut answers) = (Bytes::new(input), Answers::default());
    for number in 0..REQUESTS_MAX {
        if bytes.is_empty() {
            break;
        }
        let packet = next(&mut bytes, number as u64 + 2, &answers);
        if !exchange(&kernel, &served, &packet, &mut answers) {
            break;
        }
    }
    drop(kernel);
    served.wait();
    assert_eq!(panics.load(Ordering::SeqCst), before, "something panicked: see above");
    answers
}

/// How many panics there have been, caught ones too.
fn panics() -> &'static AtomicUsize {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            COUNT.fetch_add(1, Ordering::SeqCst);
            others(info);
        }));
    });
    &COUNT
}

/// Minor version 41, all capabilities but the second half of their flags.
fn init() -> Vec<u8> {
    let fields = [7u32, 41, 128 << 10, !(1 << 30), 0];
    [fields.map(u32::to_le_bytes).concat(), vec![0; 44]].concat()
}

fn packet(opcode: u32, node: u64, number: u64, odd: u8, rest: &[u8]) -> Vec<u8> {
    let len = match odd & 0x0e {
        0x02 => 8,
        0x04 => HEADER_LEN + rest.len() + 1,
        0x06 => HEADER_LEN + rest.len() / 2,
        0x08 => u32::MAX as usize,
        _ => HEADER_LEN + rest.len(),
    };
    let user = if odd & 1 == 0 { 0u32 } else { 1000 };
    let mut packet = Vec::with_capacity(HEADER_LEN + rest.len());
    packet.extend_from_slice(&(len as u32).to_le_bytes());
    packet.extend_from_slice(&opcode.to_le_bytes());
    packet.extend_from_slice(&number.to_le_bytes());
    packet.extend_from_slice(&node.to_le_bytes());
    [user, user, 1, 0].iter().for_each(|field| packet.extend_from_slice(&field.to_le_bytes()));
    packet.extend_from_slice(rest);
    packet
}

fn next(bytes: &mut Bytes<'_>, number: u64, answers: &Answers) -> Vec<u8> {
    let (opcode, node, odd) = (bytes.u8(), bytes.u8(), bytes.u8());
    let len = usize::from(bytes.u16());
    let mut rest = bytes.take(len).to_vec();
    answers.fill_in(opcode.into(), &mut rest);
    match opcode {
        255 => rest,
        _ if node == 255 => packet(opcode.into(), u64::MAX, number, odd, &rest),
        _ => packet(opcode.into(), node.into(), number, odd, &rest),
    }
}

/// Sends one, then asks something harmless and waits for the answer to that. False: the session has ended, as it may.
fn exchange(kernel: &OwnedFd, served: &Served, packet: &[u8], answers: &mut Answers) -> bool {
    let word = |at: usize| packet.get(at..at + 4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]));
    let well_formed =
        packet.len() >= HEADER_LEN && word(0).is_some_and(|len| (HEADER_LEN..=packet.len()).contains(&(len as usize)));
    let may_end = !well_formed || word(4) == Some(OPCODE_DESTROY);
    let alive = put(kernel, packet)
        && put(kernel, &self::packet(OPCODE_STATFS, 1, PROBE, 0, &[]))
        && answered(kernel, served, word(4).unwrap_or(0), answers);
    assert!(alive || may_end, "the session ended, at {packet:02x?}");
    alive
}

/// Waits for the answer to the last question.
fn answered(kernel: &OwnedFd, served: &Served, opcode: u32, answers: &mut Answers) -> bool {
    let mut answer = vec![0; 2 * PACKET_MAX];
    let asked = Instant::now();
    loop {
        match recv(kernel, &mut answer[..], RecvFlags::empty()) {
            Ok((0, _)) | Err(Errno::CONNRESET) => return false,
            Ok((len, _)) if len >= 16 && answer[8..16] == PROBE.to_le_bytes() => return true,
            Ok((len, _)) => answers.note(&answer[..len], opcode),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if served.has_ended() => return false,
            Err(Errno::AGAIN) => assert!(asked.elapsed() < PATIENCE, "no answer for {PATIENCE:?}"),
            Err(error) => panic!("the socket: {error}"),
        }
    }
}

/// False: nobody reads any more. A packet of no bytes at all would be the end.
fn put(kernel: &OwnedFd, packet: &[u8]) -> bool {
    packet.is_empty() || send(kernel, &packet[..packet.len().min(PACKET_MAX)], SendFlags::NOSIGNAL).is_ok()
}

#[cfg(test)]
mod tests {
    /// What the seeds take for granted: which numbers inodes and handles get.
    #[test]
    fn the_seeds_reach_what_they_are_about() {
        let seeds = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/request");
        // Finds and opens a file and a directory, and reads both.
        let answers = super::run(&std::fs::read(seeds.join("000")).unwrap());
        assert_eq!(answers.errors, [0; 7], "INIT, two lookups, two opens, two reads");
    }
}
