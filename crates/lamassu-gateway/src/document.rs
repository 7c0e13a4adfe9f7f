//! Documents of requests: keys to delete, parts of an upload, tags. The protocol parses one wherever its request is
//! polled, and the larger ones take a processor for milliseconds. So a document waits, once it has come whole, for its
//! tenant's turn; then its request is polled once, on a thread that may be busy, which parses it.
//!
//! What parsing costs, in time and memory, depends on the number of elements. It is bounded before.

use crate::limits::Tenant;
use crate::queue::{Permit, Queue};
use bytes::{Bytes, BytesMut};
use data_encoding::HEXLOWER;
use http_body::Frame;
use parking_lot::Mutex;
use s3s::crypto::{Checksum as _, Sha256};
use s3s::{S3Error, S3ErrorCode, S3Result, s3_error};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

/// The largest document of all.
pub const DOCUMENT_MAX: usize = 4 << 20;

/// How large a document of an operation may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// bytes
    pub bytes: usize,
    /// tags: beginnings and ends of elements
    tags: usize,
    /// how an element of the list begins, and how many there may be
    items: (&'static [u8], usize),
}

impl Size {
    /// Of the documents of an operation.
    pub fn of(operation: &str) -> Size {
        match operation {
            // Up to six elements for each key.
            "DeleteObjects" => Size { bytes: DOCUMENT_MAX, tags: 16_000, items: (b"<Object", 1000) },
            // A number, an entity tag and checksums for each part.
            "CompleteMultipartUpload" => Size { bytes: DOCUMENT_MAX, tags: 160_000, items: (b"<Part", 10_000) },
            _ => Size { bytes: 64 << 10, tags: 1000, items: (b"<Tag", 100) },
        }
    }

    fn check(self, document: &[u8]) -> S3Result<()> {
        let (begin, most) = self.items;
        let is_item = |at: &usize| !document.get(at + begin.len()).is_some_and(u8::is_ascii_alphanumeric);
        if memchr::memchr_iter(b'<', document).count() > self.tags
            || memchr::memmem::find_iter(document, begin).filter(is_item).count() > most
        {
            return Err(s3_error!(
                MalformedXML,
                "a document of this operation has at most {most} elements in its list"
            ));
        }
        Ok(())
    }
}

/// Compares a document with digests that its request says.
pub type Said = Box<dyn Fn(&[u8]) -> S3Result<()> + Send + Sync>;

/// Whose document comes, and what it has to be.
pub struct Expected {
    /// how large it may be
    pub size: Size,
    /// the digest that was signed, hexadecimal; `None`: the content is not signed
    pub sha256: Option<String>,
    /// compares it with what else the request says of it
    pub said: Said,
    /// whose request it is
    pub tenant: Arc<Tenant>,
    /// where its turn comes
    pub queue: Arc<Queue>,
}

impl Expected {
    /// Checks a document.
    ///
    /// # Errors
    /// For the client.
    pub fn check(&self, document: &[u8]) -> S3Result<()> {
        self.size.check(document)?;
        (self.said)(document)?;
        let Some(signed) = &self.sha256 else { return Ok(()) };
        let mut sha256 = Sha256::new();
        sha256.update(document);
        match HEXLOWER.encode(sha256.finalize().as_ref()) == *signed {
            true => Ok(()),
            false => Err(not_as_signed()),
        }
    }
}

/// A body has another digest than its request says.
pub fn not_as_signed() -> S3Error {
    let mut error = s3_error!(BadDigest, "the content is not what was signed");
    error.set_code(S3ErrorCode::Custom("XAmzContentSHA256Mismatch".into()));
    error.set_status_code(http::StatusCode::BAD_REQUEST);
    error
}

/// What a request's poller, its body and its access check know of its document. Clones share it.
#[derive(Clone, Default)]
pub struct Document(Arc<Mutex<Shared>>);

#[derive(Default)]
struct Shared {
    expected: Option<Expected>,
    /// the tenant's turn, once it has come
    turn: Option<Permit>,
    refused: Option<S3Error>,
}

impl Document {
    /// The body is a document, and not the content of an object. Called before any of it is read.
    pub fn expect(&self, expected: Expected) {
        self.0.lock().expected = Some(expected);
    }

    /// Why the document was refused, if it was: the protocol makes an internal error of it.
    pub fn refused(&self) -> Option<S3Error> {
        self.0.lock().refused.take()
    }

    /// Answers a request. The poll in which its document is parsed is on a thread that may be busy.
    pub async fn answered<T>(&self, call: impl Future<Output = T>) -> T {
        let mut call = pin!(call);
        std::future::poll_fn(|cx| {
            let turn = self.0.lock().turn.take();
            match turn {
                None => call.as_mut().poll(cx),
                Some(turn) => {
                    let polled = tokio::task::block_in_place(|| call.as_mut().poll(cx));
                    drop(turn);
                    polled
                }
            }
        })
        .await
    }
}

type Turn = Pin<Box<dyn Future<Output = Permit> + Send>>;

/// The body of a request as far as it has come.
pub enum Coming {
    /// Nothing is known of it yet, or it is the content of an object.
    Content,
    Document(Expected, BytesMut),
    Waiting(Expected, Bytes, Turn),
    Whole(Expected, Bytes),
    End,
}

impl Coming {
    /// The next of a body, of which `receive` gets frames.
    pub fn poll(
        &mut self,
        document: &Document,
        cx: &mut Context<'_>,
        mut receive: impl FnMut(&mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Coming::Content = self {
            match document.0.lock().expected.take() {
                Some(expected) => *self = Coming::Document(expected, BytesMut::new()),
                None => return receive(cx),
            }
        }
        loop {
            match std::mem::replace(self, Coming::End) {
                Coming::Document(expected, mut sofar) => {
                    let received = receive(cx);
                    let frame = match received {
                        Poll::Pending => {
                            *self = Coming::Document(expected, sofar);
                            return Poll::Pending;
                        }
                        Poll::Ready(frame) => frame.transpose()?,
                    };
                    *self = match frame {
                        Some(frame) => {
                            sofar.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
                            // Its length was checked, and is part of the protocol: more does not come.
                            if sofar.len() > expected.size.bytes {
                                return Poll::Ready(Some(Err(io::ErrorKind::FileTooLarge.into())));
                            }
                            Coming::Document(expected, sofar)
                        }
                        None if sofar.is_empty() => Coming::Whole(expected, Bytes::new()),
                        None => {
                            let (tenant, queue, len) = (expected.tenant.clone(), expected.queue.clone(), sofar.len());
                            let turn = async move {
                                tenant.pass(len).await;
                                queue.place(&tenant).await
                            };
                            Coming::Waiting(expected, sofar.freeze(), Box::pin(turn))
                        }
                    };
                }
                Coming::Waiting(expected, whole, mut turn) => {
                    let Poll::Ready(place) = turn.as_mut().poll(cx) else {
                        *self = Coming::Waiting(expected, whole, turn);
                        return Poll::Pending;
                    };
                    document.0.lock().turn = Some(place);
                    *self = Coming::Whole(expected, whole);
                    // The next poll is by `Document::answered`, which sees the turn.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Coming::Whole(expected, whole) => {
                    if let Err(refused) = expected.check(&whole) {
                        document.0.lock().refused = Some(refused);
                        return Poll::Ready(Some(Err(io::ErrorKind::InvalidData.into())));
                    }
                    return Poll::Ready((!whole.is_empty()).then(|| Ok(Frame::data(whole))));
                }
                Coming::Content | Coming::End => return Poll::Ready(None),
            }
        }
    }

    /// Whether nothing of it is left.
    pub fn is_end(&self) -> Option<bool> {
        match self {
            Coming::Content => None,
            Coming::End => Some(true),
            Coming::Document(..) | Coming::Waiting(..) | Coming::Whole(..) => Some(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn lists_are_as_long_as_the_protocol_permits() {
        let part = "<Part><PartNumber>10000</PartNumber><ETag>&quot;d41d8cd98f00b204e9800998ecf8427e&quot;</ETag>\
                    <ChecksumSHA256>47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=</ChecksumSHA256></Part>";
        let object = "<Object><Key>a/b</Key><VersionId>null</VersionId><ETag>x</ETag><Size>1</Size></Object>";
        for (operation, item, most) in [("CompleteMultipartUpload", part, 10_000), ("DeleteObjects", object, 1000)] {
            let size = Size::of(operation);
            let document =
                |item: &str, count| format!("<List xmlns=\"x\"><Quiet>true</Quiet>{}</List>", item.repeat(count));
            let is_taken = |text: String| size.check(text.as_bytes()).is_ok();
            assert!(document(item, most).len() <= size.bytes && is_taken(document(item, most)), "{operation}");
            assert!(!is_taken(document(item, most + 1)), "{operation}");
            let empty = format!("{}/>", std::str::from_utf8(size.items.0).expect("a name"));
            assert!(is_taken(document(&empty, most)) && !is_taken(document(&empty, most + 1)), "{operation}");
            assert!(!is_taken(document("<x/>", size.bytes / 4)), "{operation}");
        }
        assert!(Size::of("PutObjectTagging").bytes < 100_000);
    }

    /// A request with a document: what is parsed of it, or how it was refused.
    async fn request(document: &Document, pieces: &'static [&'static [u8]]) -> Result<Vec<u8>, String> {
        let mut coming = Coming::Content;
        let mut pieces = pieces.iter();
        let mut parsed = Vec::new();
        let call = std::future::poll_fn(|cx| {
            loop {
                let receive =
                    |_: &mut Context<'_>| Poll::Ready(pieces.next().map(|piece| Ok(Frame::data((*piece).into()))));
                match coming.poll(document, cx, receive) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Some(Ok(frame))) => parsed.extend_from_slice(frame.data_ref().expect("data")),
                    Poll::Ready(Some(Err(_))) => {
                        let refused = document.refused().expect("it says why");
                        return Poll::Ready(Err(refused.code().as_str().to_owned()));
                    }
                    Poll::Ready(None) => return Poll::Ready(Ok(std::mem::take(&mut parsed))),
                }
            }
        });
        document.answered(call).await
    }

    fn expected(queue: &Arc<Queue>, sha256: Option<&str>) -> Document {
        let document = Document::default();
        let (tenant, size) = (Arc::new(Tenant::new("acme", Limits::default())), Size::of("DeleteObjects"));
        document.expect(Expected {
            size,
            sha256: sha256.map(String::from),
            said: Box::new(|_| Ok(())),
            tenant,
            queue: queue.clone(),
        });
        document
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_document_is_parsed_in_its_tenants_turn() {
        let queue = Queue::new(1);
        let place = queue.place(&Arc::new(Tenant::new("other", Limits::default()))).await;
        let (document, is_parsed) = (expected(&queue, None), Arc::new(AtomicBool::new(false)));
        let parsing = tokio::spawn({
            let is_parsed = is_parsed.clone();
            async move {
                let parsed = request(&document, &[b"<Del", b"ete/>"]).await;
                is_parsed.store(true, Ordering::SeqCst);
                parsed
            }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!is_parsed.load(Ordering::SeqCst), "it is another tenant's turn");
        drop(place);
        assert_eq!(parsing.await.expect("no panic").expect("parsed"), b"<Delete/>");
        // The place was given back.
        let _again = queue.place(&Arc::new(Tenant::new("other", Limits::default()))).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_was_not_signed_is_not_parsed() {
        let queue = Queue::new(1);
        let mut sha256 = Sha256::new();
        sha256.update(b"<a/>");
        let signed = HEXLOWER.encode(sha256.finalize().as_ref());
        assert_eq!(request(&expected(&queue, Some(&signed)), &[b"<a", b"/>"]).await, Ok(b"<a/>".to_vec()));
        for other in [&[b"<b/>" as &[u8]][..], &[]] {
            let refused = request(&expected(&queue, Some(&signed)), other).await;
            assert_eq!(refused, Err("XAmzContentSHA256Mismatch".into()));
        }
    }

    #[tokio::test]
    async fn contents_of_objects_pass() {
        let passed = request(&Document::default(), &[b"a", b"b"]).await;
        assert_eq!(passed, Ok(b"ab".to_vec()));
    }
}
