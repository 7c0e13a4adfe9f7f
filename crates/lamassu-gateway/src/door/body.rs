//! Request bodies, which may not stall and may not have huge chunks, and answer bodies, which are counted.

use super::pace::{Pace, Patience};
use crate::document::{Coming, Document};
use crate::log::RequestLog;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

/// The largest chunk of a body that is signed chunk by chunk: the protocol holds each until it is verified.
const CHUNK_MAX: u64 = 8 << 20;
/// The longest line that precedes a chunk.
const LINE_MAX: usize = 1024;
/// The most digits of a chunk's length. The protocol reads this many and skips further ones, so it would misread a
/// longer length.
const DIGITS_MAX: usize = 8;

/// The body of a request.
pub struct Incoming {
    inner: hyper::body::Incoming,
    entry: RequestLog,
    pace: Pace,
    chunks: Option<Chunks>,
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
        Incoming { inner, entry, pace, chunks, document, coming: Coming::Content }
    }
}

impl Body for Incoming {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = &mut *self;
        let mut coming = std::mem::replace(&mut this.coming, Coming::Content);
        let document = this.document.clone();
        let polled = coming.poll(&document, cx, |cx| this.poll_checked(cx));
        this.coming = coming;
        if let Poll::Ready(Some(Err(error))) = &polled {
            self.entry.is_cut(error.kind());
        }
        polled
    }

    /// A body in chunks is at its end only when the end was looked at.
    fn is_end_stream(&self) -> bool {
        self.coming.is_end().unwrap_or_else(|| self.chunks.is_none() && self.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Incoming {
    fn poll_checked(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self;
        let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(cx) else {
            return this.pace.poll_wait(cx).map(|()| Some(Err(io::ErrorKind::TimedOut.into())));
        };
        let Some(frame) = frame.transpose().map_err(io::Error::other)? else {
            // Whatever the reader makes of a body that ends between two chunks: it is cut off.
            let is_cut = this.chunks.take().is_some_and(|chunks| !chunks.is_over);
            return Poll::Ready(is_cut.then(|| Err(wrong("the last chunk did not come"))));
        };
        let data = frame.data_ref().map_or(&[][..], |data| data);
        this.pace.moved(data.len());
        this.entry.received(data.len());
        this.chunks.as_mut().map_or(Ok(()), |chunks| chunks.pass(data))?;
        Poll::Ready(Some(Ok(frame)))
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
    /// The last chunk was received: trailers follow.
    is_over: bool,
}

impl Chunks {
    fn pass(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() && !self.is_over {
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
                return Err(wrong("the line before a chunk is too long"));
            }
            if self.line.ends_with(b"\n") {
                let length = length_of(&self.line).ok_or_else(|| wrong("a chunk has no length"))?;
                if length > CHUNK_MAX {
                    return Err(wrong("a chunk has more than 8 MiB"));
                }
                (self.data, self.is_over) = (length + 2, length == 0);
                self.line.clear();
            }
        }
        Ok(())
    }
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

/// The body of an answer. Its request counts as under way until the body is sent or the client is gone.
pub struct Outgoing {
    inner: s3s::Body,
    entry: RequestLog,
}

impl Outgoing {
    /// Counts bytes for the request's log line.
    pub fn new(inner: s3s::Body, entry: RequestLog) -> Outgoing {
        Outgoing { inner, entry }
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = <s3s::Body as Body>::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(data) = frame.data_ref()
        {
            self.entry.sent(data.len());
        }
        polled
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
        over.pass(b"0;chunk-signature=ab\r\nx-amz-checksum-crc32:AAAA\r\n").expect("trailers are not looked at");
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
