//! Request bodies, which may not stall and may not have huge chunks, and answer bodies, which are counted.

use super::pace::{Pace, Patience};
use crate::document::{Coming, Document};
use crate::limits::{Held, Turn};
use crate::log::RequestLog;
use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use std::collections::HashSet;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// The largest chunk of a body that is signed chunk by chunk: the protocol holds each until it is verified.
const CHUNK_MAX: u64 = 8 << 20;
/// Bytes that are handed on together of a body that is signed chunk by chunk. The protocol keeps each frame until its
/// chunk is verified, and a client can send frames of one byte.
const TOGETHER: usize = 64 << 10;
/// The longest line that precedes a chunk.
const LINE_MAX: usize = 1024;
/// The most trailers: a checksum of each kind, and their signature.
const TRAILERS_MAX: usize = 16;
/// The most digits of a chunk's length. The protocol reads this many and skips further ones, so it would misread a
/// longer length.
const DIGITS_MAX: usize = 8;

/// The body of a request.
pub struct Incoming {
    inner: hyper::body::Incoming,
    entry: RequestLog,
    pace: Pace,
    chunks: Option<Chunks>,
    gathered: Option<Gathered>,
    document: Document,
    coming: Coming,
}

impl Incoming {
    /// `is_chunked`: the body is signed chunk by chunk.
    pub fn new(
        inner: hyper::body::Incoming,
        entry: RequestLog,
        document: Document,
        patience: Patience,
        is_chunked: bool,
    ) -> Incoming {
        let (pace, chunks) = (Pace::new(patience), is_chunked.then(Chunks::default));
        let gathered = is_chunked.then(Gathered::default);
        Incoming { inner, entry, pace, chunks, gathered, document, coming: Coming::Content }
    }
}

impl Body for Incoming {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = &mut *self;
        let mut coming = std::mem::replace(&mut this.coming, Coming::Content);
        let document = this.document.clone();
        let polled = coming.poll(&document, cx, |cx| this.poll_gathered(cx));
        this.coming = coming;
        if let Poll::Ready(Some(Err(error))) = &polled {
            self.entry.is_cut(error.kind());
        }
        polled
    }

    /// A body in chunks is at its end only when the end was looked at.
    fn is_end_stream(&self) -> bool {
        let is_all = || self.gathered.as_ref().is_none_or(|gathered| gathered.next.is_none());
        self.coming.is_end().unwrap_or_else(|| self.chunks.is_none() && is_all() && self.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Incoming {
    fn poll_gathered(&mut self, cx: &mut Context<'_>) -> Polled {
        let Some(mut gathered) = self.gathered.take() else { return self.poll_checked(cx) };
        let polled = gathered.poll(|| self.poll_checked(cx));
        self.gathered = Some(gathered);
        polled
    }

    fn poll_checked(&mut self, cx: &mut Context<'_>) -> Polled {
        let this = self;
        let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(cx) else {
            return this.pace.poll_wait(cx).map(|()| Some(Err(io::ErrorKind::TimedOut.into())));
        };
        let Some(frame) = frame.transpose().map_err(io::Error::other)? else {
            // Whatever the reader makes of a body that ends between two chunks: it is cut off.
            let is_cut = this.chunks.take().is_some_and(|chunks| !chunks.is_whole());
            return Poll::Ready(is_cut.then(|| Err(wrong("the last chunk, or the end of a trailer, did not come"))));
        };
        let data = frame.data_ref().map_or(&[][..], |data| data);
        this.pace.moved(data.len());
        this.entry.received(data.len());
        this.chunks.as_mut().map_or(Ok(()), |chunks| chunks.pass(data))?;
        Poll::Ready(Some(Ok(frame)))
    }
}

type Received = Option<io::Result<Frame<Bytes>>>;
type Polled = Poll<Received>;

/// Frames that are handed on together.
#[derive(Default)]
struct Gathered {
    bytes: BytesMut,
    /// What came behind the bytes: the end, an error, or trailers.
    next: Option<Received>,
}

impl Gathered {
    fn poll(&mut self, mut poll: impl FnMut() -> Polled) -> Polled {
        if let Some(next) = self.next.take() {
            return Poll::Ready(next);
        }
        loop {
            let Poll::Ready(received) = poll() else { return Poll::Pending };
            let is_data = matches!(&received, Some(Ok(frame)) if frame.is_data());
            if is_data && let Some(Ok(frame)) = received {
                self.bytes.extend_from_slice(&frame.into_data().unwrap_or_default());
                if self.bytes.len() >= TOGETHER {
                    return self.all();
                }
            } else if self.bytes.is_empty() {
                return Poll::Ready(received);
            } else {
                self.next = Some(received);
                return self.all();
            }
        }
    }

    fn all(&mut self) -> Polled {
        Poll::Ready(Some(Ok(Frame::data(self.bytes.split().freeze()))))
    }
}

fn wrong(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Parses only the lengths of chunks (`LENGTH;chunk-signature=…`, CRLF, data, CRLF); the protocol verifies the
/// signatures.
#[derive(Default)]
struct Chunks {
    /// The line that is being received.
    line: Vec<u8>,
    /// Bytes of data still to come, including the CRLF after them.
    data: u64,
    /// The last chunk was received: trailers follow, with these names so far.
    trailers: Option<HashSet<Vec<u8>>>,
}

impl Chunks {
    fn pass(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.data > 0 {
                let skipped = self.data.min(bytes.len() as u64);
                self.data -= skipped;
                bytes = &bytes[skipped as usize..];
                continue;
            }
            let end = bytes.iter().position(|b| *b == b'\n').map_or(bytes.len(), |at| at + 1);
            self.line.extend_from_slice(&bytes[..end]);
            bytes = &bytes[end..];
            if self.line.len() > LINE_MAX {
                return Err(wrong("the line before a chunk, or a trailer, is too long"));
            }
            if self.line.ends_with(b"\n") {
                self.line()?;
                self.line.clear();
            }
        }
        Ok(())
    }

    /// A whole line: the length of a chunk, or a trailer.
    fn line(&mut self) -> io::Result<()> {
        if let Some(trailers) = &mut self.trailers {
            return pass_trailer(trailers, &self.line);
        }
        let length = length_of(&self.line).ok_or_else(|| wrong("a chunk has no length"))?;
        match length {
            0 => self.trailers = Some(HashSet::new()),
            1..=CHUNK_MAX => self.data = length + 2,
            _ => return Err(wrong("a chunk has more than 8 MiB")),
        }
        Ok(())
    }

    /// Whether the last chunk has come, and no part of a trailer is missing.
    fn is_whole(&self) -> bool {
        self.trailers.is_some() && self.line.is_empty()
    }
}

/// A line behind the last chunk. The protocol would take one of two trailers with the same name.
fn pass_trailer(trailers: &mut HashSet<Vec<u8>>, line: &[u8]) -> io::Result<()> {
    let line = line.trim_ascii_end();
    if line.is_empty() {
        return Ok(());
    }
    let name = line.split(|b| *b == b':').next().filter(|name| name.len() < line.len());
    let name = name.ok_or_else(|| wrong("a trailer has no name"))?.trim_ascii().to_ascii_lowercase();
    if trailers.len() >= TRAILERS_MAX || !trailers.insert(name) {
        return Err(wrong("a trailer is there twice, or there are too many"));
    }
    Ok(())
}

/// The length at the start of a line: 1 to 8 hexadecimal digits, then `;` or CRLF. Anything else is refused, also if
/// the protocol would read a length from it.
fn length_of(line: &[u8]) -> Option<u64> {
    let line = line.strip_suffix(b"\r\n")?;
    let digits = line.split(|b| *b == b';').next()?;
    let is_length = (1..=DIGITS_MAX).contains(&digits.len()) && digits.iter().all(u8::is_ascii_hexdigit);
    let digits = std::str::from_utf8(digits).ok().filter(|_| is_length)?;
    u64::from_str_radix(digits, 16).ok()
}

/// The body of an answer. Its request counts until the client has taken all of it, or is gone: so the limits of
/// requests bound the answers that are in memory.
pub struct Outgoing {
    inner: s3s::Body,
    entry: RequestLog,
    held: Held,
}

impl Outgoing {
    /// Counts bytes for the request's log line. `held` has the request's turn.
    pub fn new(inner: s3s::Body, entry: RequestLog, held: Held) -> Outgoing {
        Outgoing { inner, entry, held }
    }
}

/// A piece of an answer. The connection takes a whole document from the body at once, and then the body is at its end.
/// So the piece has the turn, too, and is dropped when the last of its bytes has gone to the client.
struct Piece {
    data: Bytes,
    _turn: Arc<Turn>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = <s3s::Body as Body>::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        polled.map_ok(|frame| {
            frame.map_data(|data| {
                self.entry.sent(data.len());
                match self.held.turn() {
                    Some(_turn) => Bytes::from_owner(Piece { data, _turn }),
                    None => data,
                }
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_a_byte_are_handed_on_together() {
        let byte = || Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"x")))));
        let mut sent = (0..TOGETHER + 7).map(|_| byte()).collect::<Vec<Polled>>();
        // A pause of the client takes nothing away.
        sent.insert(5, Poll::Pending);
        sent.push(Poll::Ready(Some(Err(io::ErrorKind::TimedOut.into()))));
        let (mut sent, mut gathered) = (sent.into_iter(), Gathered::default());
        let mut next = || gathered.poll(|| sent.next().unwrap_or(Poll::Ready(None)));
        let len = |polled: Polled| match polled {
            Poll::Ready(Some(Ok(frame))) => frame.into_data().map(|data| data.len()).ok(),
            _ => None,
        };
        assert!(next().is_pending());
        assert_eq!((len(next()), len(next())), (Some(TOGETHER), Some(7)));
        assert!(matches!(next(), Poll::Ready(Some(Err(_)))), "the error is behind what came before it");
        assert!(matches!(next(), Poll::Ready(None)));
    }
    use crate::limits::{Limits, Tenant};
    use crate::metrics::Metrics;
    use http_body_util::BodyExt;

    /// The connection takes a whole document from its body, and drops the body: the client has none of it yet.
    #[tokio::test]
    async fn an_answer_counts_until_its_last_byte_is_taken() {
        let limits = Limits { requests_at_once: 1, ..Limits::default() };
        let (tenant, held) = (Arc::new(Tenant::new("t", limits)), Held::default());
        held.hold(&Arc::new(tenant.begin("u").expect("the first")));
        let log = RequestLog::new("1".into(), [127, 0, 0, 1].into(), http::Method::GET, false, Metrics::default());
        let mut body = Outgoing::new(s3s::Body::from("document".to_owned()), log, held);
        let frame = body.frame().await.expect("a frame").expect("no error").into_data().expect("data");
        assert!(body.frame().await.is_none());
        drop(body);
        assert!(&*frame == b"document" && tenant.begin("u").is_err());
        drop(frame);
        assert!(tenant.begin("u").is_ok());
    }

    #[test]
    fn lengths_of_chunks_are_bounded_however_they_come() {
        let body = b"4;chunk-signature=ab\r\n\nda\n\r\n800000;x\r\n".to_vec();
        for size in 1..body.len() {
            let mut chunks = Chunks::default();
            assert!(body.chunks(size).all(|piece| chunks.pass(piece).is_ok()), "{size}");
            assert_eq!(chunks.data, CHUNK_MAX + 2);
        }
        for wrong in ["800001\r\n", "FFFFFFFF\r\n", "x\r\n", "\r\n", "-1\r\n"] {
            assert!(Chunks::default().pass(wrong.as_bytes()).is_err(), "{wrong:?}");
        }
        assert!(Chunks::default().pass(&[b'0'; LINE_MAX + 1]).is_err());
        let mut over = Chunks::default();
        over.pass(b"0;chunk-signature=ab\r\nx-amz-checksum-crc32:AAAA\r\n").expect("a trailer");
        assert!(over.is_whole() && over.pass(b"X-Amz-Checksum-CRC32: BBBB\r\n").is_err());
    }

    /// However the body comes. Amazon's description of signed trailers has an empty line between them.
    #[test]
    fn trailers_are_whole_and_there_once() {
        for (trailers, is_good) in [
            ("\r\n", true),
            ("x-amz-checksum-crc32:AAAA\r\n\r\n", true),
            ("x-amz-checksum-crc32:AAAA\n\r\nx-amz-trailer-signature:ab\r\n\r\n", true),
            ("x-amz-checksum-crc32:AAAA\r\nx-amz-checksum-crc32:AAAA\r\n\r\n", false),
            ("x-amz-checksum-crc32:AAAA\r\nX-AMZ-CHECKSUM-CRC32 : BBBB\r\n\r\n", false),
            ("x-amz-checksum-crc32:AAAA", false),
            ("x-amz-checksum-crc32\r\n", false),
        ] {
            let body = "2\r\nab\r\n0\r\n".to_owned() + trailers;
            for size in 1..body.len() {
                let mut chunks = Chunks::default();
                let passed = body.as_bytes().chunks(size).all(|piece| chunks.pass(piece).is_ok());
                assert_eq!(passed && chunks.is_whole(), is_good, "{trailers:?} {size}");
            }
        }
        let many: String = (0..=TRAILERS_MAX).map(|at| format!("x-{at}:1\r\n")).collect();
        assert!(Chunks::default().pass(format!("0\r\n{many}").as_bytes()).is_err());
    }

    /// The number that `s3s` reads from a line: `nom` takes at most eight digits and drops the ones behind them.
    fn of_the_protocol(line: &[u8]) -> Option<u64> {
        let end = line.iter().position(|b| matches!(b, b';' | b'\r')).unwrap_or(line.len());
        let digits: Vec<u8> = line[..end].iter().copied().take_while(u8::is_ascii_hexdigit).take(8).collect();
        u64::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()
    }

    #[test]
    fn a_length_is_the_same_here_and_in_the_protocol() {
        for (line, length) in
            [("0\r\n", 0), ("a\r\n", 10), ("0000000A;chunk-signature=ab\r\n", 10), ("FfFfFfFf;\r\n", 0xFFFF_FFFF)]
        {
            assert_eq!((length_of(line.as_bytes()), of_the_protocol(line.as_bytes())), (Some(length), Some(length)));
        }
        // Other parsers would read 1, 4 or 10 from these.
        for line in
            ["000000010\r\n", "+4\r\n", " 4\r\n", "4 \r\n", "4x\r\n", "0x4\r\n", "4\n", "a\r", "4_0\r\n", ";4\r\n"]
        {
            assert_eq!(length_of(line.as_bytes()), None, "{line:?}");
        }
        // Every accepted length is the same for the protocol.
        let signs = b"08aF+ ;\rx";
        for number in 0..signs.len().pow(5) {
            let sign = |at: u32| signs[number / signs.len().pow(at) % signs.len()];
            let line = [b"000000".as_slice(), &[0, 1, 2, 3, 4].map(sign), b"\r\n"].concat();
            for line in [&line[..], &line[4..], &line[6..]] {
                assert!(length_of(line).is_none_or(|length| of_the_protocol(line) == Some(length)), "{line:?}");
            }
        }
        let mut chunks = Chunks::default();
        chunks.pass(b"000000010\r\nA\r\nFFFFFFFF\r\n").expect_err("not one of sixteen bytes");
    }
}
