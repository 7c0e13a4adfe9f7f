//! Object contents: from a client to a file, and back, in pieces of 1 MiB. While one piece is written or sent, the next
//! one is received or read. No thread waits for a client.

use super::access::Session;
use super::fault::lost;
use super::sums::{Summing, Sums};
use crate::objects::PIECE;
use crate::work::Work;
use bytes::{Bytes, BytesMut};
use data_encoding::HEXLOWER;
use futures_util::StreamExt;
use futures_util::stream;
use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::StreamingBlob;
use s3s::{S3Error, S3Result, s3_error};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use tokio::task::{JoinError, JoinSet};

/// Takes the content of an object, from its beginning to its end. Calls block.
pub trait Sink: Send + Sync + 'static {
    /// Adds `data`, which belongs at `at`, the end.
    ///
    /// # Errors
    /// In the form for clients.
    fn add(&self, at: u64, data: &[u8]) -> S3Result<()>;
}

/// A source of an object's content. Calls block.
pub trait Content: Send + Sync + 'static {
    /// Reads; short only at the end.
    ///
    /// # Errors
    /// For the log: the answer has begun.
    fn piece(&self, at: u64, len: usize) -> io::Result<Vec<u8>>;
}

/// Digests of a stream.
pub struct Digests {
    md5: Md5,
    sums: Summing,
    size: u64,
}

/// What was received.
pub struct Received {
    /// bytes
    pub size: u64,
    /// the MD5 of the content, hexadecimal
    pub md5: String,
    /// requested checksums
    pub sums: Sums,
}

impl Digests {
    /// Computes these checksums, and an MD5.
    pub fn new(sums: Summing) -> Digests {
        Digests { md5: Md5::new(), sums, size: 0 }
    }

    /// Adds more content.
    pub fn update(&mut self, data: &[u8]) {
        self.md5.update(data);
        self.sums.update(data);
        self.size += data.len() as u64;
    }

    /// The digests.
    pub fn finish(self) -> Received {
        let md5 = HEXLOWER.encode(self.md5.finalize().as_ref());
        Received { size: self.size, md5, sums: self.sums.finish() }
    }
}

/// The digests so far. While a piece is written, the writing thread holds them.
enum So {
    Far(Box<Digests>),
    Writing(Work<S3Result<Box<Digests>>>),
}

impl So {
    async fn done(self) -> S3Result<Box<Digests>> {
        match self {
            So::Far(digests) => Ok(digests),
            So::Writing(thread) => thread.await.map_err(lost)?,
        }
    }

    async fn write(self, session: &Session, sink: &Arc<impl Sink>, data: Bytes) -> S3Result<So> {
        let (mut digests, sink) = (self.done().await?, sink.clone());
        let writing = session.in_turn(move || {
            sink.add(digests.size, &data)?;
            digests.update(&data);
            Ok(digests)
        });
        Ok(So::Writing(writing.await))
    }
}

/// Writes a body to a sink.
///
/// # Errors
/// Errors of the client: it stops, its signature is wrong, it sends more than `max`; those of the vault.
pub async fn receive(
    session: &Session,
    body: Option<StreamingBlob>,
    sink: &Arc<impl Sink>,
    sums: Summing,
    max: u64,
) -> S3Result<Received> {
    let mut left = max;
    let mut so = So::Far(Box::new(Digests::new(sums)));
    let mut buffer = BytesMut::new();
    let mut body = body.unwrap_or_else(|| StreamingBlob::from(s3s::Body::empty()));
    while let Some(piece) = body.next().await {
        let mut piece = piece.map_err(of_body)?;
        left = left.checked_sub(piece.len() as u64).ok_or_else(|| {
            s3_error!(EntityTooLarge, "larger than was said, or than this gateway takes in one request")
        })?;
        session.user.tenant.pass(piece.len()).await;
        session.user.may_go_on()?;
        // However large the body's chunks are, a piece is never much larger than 1 MiB.
        while !piece.is_empty() {
            let room = PIECE.saturating_sub(buffer.len()).max(1);
            buffer.extend_from_slice(&piece.split_to(room.min(piece.len())));
            if buffer.len() >= PIECE {
                so = so.write(session, sink, buffer.split().freeze()).await?;
            }
        }
    }
    if !buffer.is_empty() {
        so = so.write(session, sink, buffer.freeze()).await?;
    }
    session.user.may_go_on()?;
    Ok(so.done().await?.finish())
}

/// The error of a body, for its client. The library's own errors can only be recognised by their texts.
fn of_body(error: s3s::StdError) -> S3Error {
    let chain = || std::iter::successors(Some(&*error as &(dyn std::error::Error + 'static)), |error| error.source());
    let kinds = chain().filter_map(|error| error.downcast_ref::<io::Error>().map(io::Error::kind));
    let text = error.to_string();
    match () {
        () if kinds.into_iter().any(|kind| kind == io::ErrorKind::TimedOut) || text.contains("timed out") => {
            s3_error!(RequestTimeout, "nothing came for too long")
        }
        () if text.contains("Sha256Mismatch") => crate::document::not_as_signed(),
        () if text.contains("SignatureMismatch") => {
            s3_error!(SignatureDoesNotMatch, "a chunk has a wrong signature")
        }
        () => s3_error!(IncompleteBody, "the body is not whole: {text}"),
    }
}

/// The state of reading the next piece.
struct Reading<C> {
    open: Arc<C>,
    session: Session,
    range: Range<u64>,
    /// Ends with this: it may wait for its turn still.
    next: JoinSet<Result<io::Result<Vec<u8>>, JoinError>>,
}

impl<C: Content> Reading<C> {
    /// Begins to read the next piece.
    fn begin(&mut self) {
        let len = (self.range.end - self.range.start).min(PIECE as u64);
        if len == 0 {
            return;
        }
        let (open, at, session) = (self.open.clone(), self.range.start, self.session.clone());
        self.range.start += len;
        let read = move || {
            let data = open.piece(at, len as usize)?;
            if data.len() as u64 == len { Ok(data) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
        };
        self.next.spawn(async move { session.in_turn(read).await.await });
    }

    async fn piece(mut self) -> Option<(io::Result<Bytes>, Reading<C>)> {
        let read = self.next.join_next().await?;
        let read = read.flatten().map_err(io::Error::other).flatten();
        if let Err(error) = self.session.user.may_go_on() {
            tracing::warn!(user = %self.session.user.name, %error, "an answer is cut off");
            return Some((Err(io::ErrorKind::PermissionDenied.into()), self));
        }
        match read {
            Ok(data) => {
                self.begin();
                self.session.user.tenant.pass(data.len()).await;
                Some((Ok(data.into()), self))
            }
            // The answer has begun, so it can only be cut off: the client sees that it is incomplete.
            Err(error) => {
                tracing::error!(%error, "an object could not be read to its end");
                Some((Err(error), self))
            }
        }
    }
}

/// A range of an open object as a body. The request counts until it is sent.
pub fn send(session: Session, open: impl Content, range: Range<u64>) -> StreamingBlob {
    let mut reading = Reading { open: Arc::new(open), session, range, next: JoinSet::new() };
    reading.begin();
    StreamingBlob::wrap(stream::unfold(reading, Reading::piece))
}

/// The staged file, after all of it was written: no thread uses it any more.
///
/// # Errors
/// `InternalError`: a bug.
pub fn sole<S>(staged: Arc<S>) -> S3Result<S> {
    Arc::try_unwrap(staged).map_err(|_| s3_error!(InternalError, "what was written is in use still"))
}
