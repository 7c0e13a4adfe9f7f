//! Access control: `s3s` verifies signatures, rights are checked here. Every request passes [`Doorkeeper::check`],
//! which knows the operation, the bucket and the key before a body is read. What else a request names is checked where
//! it is known: the source of a copy, keys in a document, folders of a listing.

use super::sums;
use crate::credentials::{Credentials, Right, User};
use crate::document::{Document, Expected, Said, Size};
use crate::limits::{Connection, Exceeded, Held, Turn};
use crate::log::RequestLog;
use crate::queue::{LARGE_MIN, Permit, Queue, Queues};
use crate::work::Work;
use http::{HeaderMap, Method, header};
use lamassu_access::Action;
use parking_lot::RwLock;
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::{S3Auth, SecretKey};
use s3s::path::S3Path;
use s3s::{S3Error, S3Request, S3Result, s3_error};
use std::sync::Arc;

/// The credentials in force.
pub type Current = Arc<RwLock<Arc<Credentials>>>;

tokio::task_local! {
    /// The credential holder of the request under way.
    pub static ADMITTED: Arc<User>;
}

/// The source of users.
#[derive(Clone)]
pub enum Users {
    /// users with access keys of this gateway
    Known(Current),
    /// the holder of the request's credential: [`ADMITTED`]
    Admitted,
}

impl Users {
    fn of(&self, access_key: &str) -> Option<Arc<User>> {
        match self {
            Users::Known(current) => current.read().user(access_key).cloned(),
            Users::Admitted => ADMITTED.try_with(Clone::clone).ok().filter(|user| user.holds(access_key)),
        }
    }

    /// The user whose secret has verified a request. The access key may have got another one since.
    fn signer(&self, verified: &s3s::auth::Credentials) -> Option<Arc<User>> {
        self.of(&verified.access_key).filter(|user| user.has_secret(&verified.secret_key))
    }
}

/// The version of every object: there are no versions.
pub const NULL_VERSION: &str = "null";
/// Access lists that describe the only behaviour there is.
const OWN_ACLS: [&str; 3] = ["private", "bucket-owner-full-control", "bucket-owner-read"];
/// All objects have one storage class; the other name is an old one that clients still use.
const CLASSES: [&str; 2] = ["STANDARD", "REDUCED_REDUNDANCY"];

/// What a request says of its body's digest.
const CONTENT_SHA256: &str = "x-amz-content-sha256";

/// Operations whose bodies are contents of objects; those of others are documents.
const STREAMED: [&str; 2] = ["PutObject", "UploadPart"];

/// A request with a known user. The request counts while this, or work that it has begun, lives.
#[derive(Clone)]
pub struct Session {
    /// the user
    pub user: Arc<User>,
    turn: Arc<Turn>,
    /// Where work waits for its turn.
    queues: Option<Arc<Queues>>,
}

/// Checks each request before its body is read.
#[derive(Clone)]
pub struct Doorkeeper {
    /// the users that are admitted
    pub users: Users,
    /// where work waits for its turn; `None`: what takes time is elsewhere
    pub queues: Option<Arc<Queues>>,
    /// where documents wait to be parsed
    pub documents: Arc<Queue>,
}

#[async_trait::async_trait]
impl S3Auth for Doorkeeper {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        match self.users.of(access_key) {
            Some(user) => Ok(user.secret()),
            None => Err(s3_error!(InvalidAccessKeyId, "this gateway does not know the access key")),
        }
    }
}

/// The right that an operation needs, by its name. An unknown one counts as a change.
fn right_of(operation: &str) -> Right {
    match operation {
        "CreateBucket" | "DeleteBucket" => Right::Make,
        _ if ["Get", "Head", "List"].iter().any(|verb| operation.starts_with(verb)) => Right::Read,
        _ => Right::Write,
    }
}

/// What an operation does with the key in its path.
fn action_of(operation: &str) -> Action {
    match operation {
        "ListParts" | "AbortMultipartUpload" => Action::Write,
        "DeleteObject" => Action::Delete,
        _ if right_of(operation) == Right::Read => Action::Read,
        _ => Action::Write,
    }
}

#[async_trait::async_trait]
impl S3Access for Doorkeeper {
    async fn check(&self, cx: &mut S3AccessContext<'_>) -> S3Result<()> {
        let operation = cx.s3_op().name().to_owned();
        let (bucket, key) = match cx.s3_path() {
            S3Path::Root => (None, None),
            S3Path::Bucket { bucket } => (Some(bucket.to_string()), None),
            S3Path::Object { bucket, key } => (Some(bucket.to_string()), Some(key.to_string())),
        };
        let user = cx.credentials().and_then(|credentials| self.users.signer(credentials));
        let entry = cx.extensions_mut().get::<RequestLog>().cloned();
        if let Some(entry) = &entry {
            entry.is_of(user.as_ref(), &operation, bucket.as_deref(), key.as_deref());
        }
        let Some(user) = user else {
            return Err(s3_error!(AccessDenied, "a request is signed, with a secret that is in force"));
        };
        let limited = |exceeded| slow_down(exceeded, entry.as_ref());
        if let Some(connection) = cx.extensions_mut().get::<Connection>() {
            connection.belongs_to(&user.tenant).map_err(limited)?;
        }
        refuse_unsupported(cx.headers())?;
        let size = (!STREAMED.contains(&&*operation)).then(|| Size::of(&operation));
        size.map_or(Ok(()), |size| check_document(size, cx.headers()))?;
        let held = cx.extensions_mut().get::<Held>().cloned().unwrap_or_default();
        let session = admitted(user, &operation, (bucket, key), &held, limited).await?;
        if let (Some(size), Some(document)) = (size, cx.extensions_mut().get::<Document>().cloned()) {
            let (tenant, queue) = (session.user.tenant.clone(), self.documents.clone());
            let sha256 = signed_digest(cx.headers());
            let said: Said = match &*operation {
                // Its checksums are those of the object.
                "CompleteMultipartUpload" => sums::said_md5_of_document(cx.headers())?,
                _ => sums::said_of_document(cx.headers())?,
            };
            let expected = Expected { size, sha256, said, tenant, queue };
            if !matches!(*cx.method(), Method::GET | Method::HEAD) && has_no_body(cx.headers()) {
                // The protocol does not read it, and would take the fault upon itself.
                expected.check(&[])?;
            }
            document.expect(expected);
        }
        cx.extensions_mut().insert(Session { queues: self.queues.clone(), ..session });
        Ok(())
    }
}

/// The session of a user's request. The evaluation of rules counts against the limits: it runs after the turn is taken,
/// on a thread that may block.
async fn admitted(
    user: Arc<User>,
    operation: &str,
    (bucket, key): (Option<String>, Option<String>),
    held: &Held,
    limited: impl Fn(Exceeded) -> S3Error,
) -> S3Result<Session> {
    // What is refused counts, too: it takes a line of the log, and whoever asks on and on would write many.
    let turn = Arc::new(user.tenant.begin(&user.name).map_err(limited)?);
    held.hold(&turn);
    let is_allowed = match &bucket {
        Some(bucket) => user.may(right_of(operation), bucket),
        None => operation == "ListBuckets",
    };
    if !is_allowed {
        tell_refused(&user, operation, bucket.as_deref());
        return Err(refused());
    }
    let session = Session { user, turn, queues: None };
    if let (Some(bucket), Some(key)) = (&bucket, &key) {
        session.require(action_of(operation), operation, bucket, key).await?;
    }
    Ok(session)
}

/// The answer to a request that exceeds a limit of its tenant.
fn slow_down(exceeded: Exceeded, entry: Option<&RequestLog>) -> S3Error {
    if let Some(entry) = entry {
        entry.exceeds(exceeded);
    }
    match exceeded {
        Exceeded::Connections => s3_error!(SlowDown, "this tenant has too many connections: use fewer, and try again"),
        Exceeded::Requests | Exceeded::RequestsOfUser | Exceeded::Rate => {
            s3_error!(SlowDown, "this user or its tenant has too many requests: try again")
        }
    }
}

/// Refuses a document that is too large before any of it is read. `s3s` would read as much as it may have, and then
/// blame itself.
fn check_document(size: Size, headers: &HeaderMap) -> S3Result<()> {
    if headers.get(CONTENT_SHA256).is_some_and(|hash| hash.as_bytes().starts_with(b"STREAMING-")) {
        return Err(s3_error!(NotImplemented, "a document is signed as a whole, and not chunk by chunk"));
    }
    match headers.get(header::CONTENT_LENGTH).map(|length| length.to_str().ok()?.parse::<u64>().ok()) {
        Some(Some(length)) if length <= size.bytes as u64 => Ok(()),
        Some(_) => {
            let most = size.bytes >> 10;
            Err(s3_error!(MaxMessageLengthExceeded, "a document of this operation has at most {most} KiB"))
        }
        None if headers.contains_key(header::TRANSFER_ENCODING) => {
            Err(s3_error!(MissingContentLength, "a document has a length"))
        }
        None => Ok(()),
    }
}

fn has_no_body(headers: &HeaderMap) -> bool {
    let length = headers.get(header::CONTENT_LENGTH);
    length.is_some_and(|length| length == "0") || (length.is_none() && !headers.contains_key(header::TRANSFER_ENCODING))
}

/// The digest of the body that the request's signature covers.
fn signed_digest(headers: &HeaderMap) -> Option<String> {
    let hash = headers.get(CONTENT_SHA256)?.to_str().ok()?.to_ascii_lowercase();
    (hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit())).then_some(hash)
}

/// Refuses requests for features that are not supported, instead of ignoring them.
fn refuse_unsupported(headers: &HeaderMap) -> S3Result<()> {
    let text = |name: &str| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let is_named = |begin: &str| headers.keys().any(|name| name.as_str().starts_with(begin));
    if is_named("x-amz-server-side-encryption-customer") || is_named("x-amz-copy-source-server-side-encryption") {
        return Err(s3_error!(NotImplemented, "keys of clients: the vault encrypts everything under its own"));
    }
    if text("x-amz-server-side-encryption").is_some_and(|kind| kind != "AES256") {
        return Err(s3_error!(NotImplemented, "of server-side encryption AES256 alone: the vault encrypts everything"));
    }
    if is_named("x-amz-object-lock") || text("x-amz-bucket-object-lock-enabled").is_some_and(|value| value != "false") {
        return Err(s3_error!(NotImplemented, "there is no object lock"));
    }
    if is_named("x-amz-grant") || text("x-amz-acl").is_some_and(|acl| !OWN_ACLS.contains(&&*acl)) {
        return Err(s3_error!(NotImplemented, "access lists: rights are in the gateway's credentials"));
    }
    if is_named("x-amz-website-redirect-location") {
        return Err(s3_error!(NotImplemented, "there are no web sites"));
    }
    if text("x-amz-storage-class").is_some_and(|class| !CLASSES.contains(&&*class)) {
        return Err(s3_error!(InvalidStorageClass, "there is the class STANDARD alone"));
    }
    Ok(())
}

/// The same error whether the bucket exists or not.
pub fn refused() -> s3s::S3Error {
    s3_error!(AccessDenied, "this user may not do that with this bucket")
}

fn tell_refused(user: &User, operation: &str, bucket: Option<&str>) {
    let tenant = user.tenant.name();
    tracing::warn!(user = %user.name, tenant, operation, bucket = bucket.unwrap_or("-"), "refused: no right to the bucket");
}

impl Session {
    /// A session whose work waits in these queues.
    #[cfg(test)]
    pub fn in_queues(user: Arc<User>, queues: &Arc<Queues>) -> Session {
        let turn = user.tenant.begin(&user.name).unwrap_or_else(|exceeded| panic!("{exceeded:?}"));
        Session { user, turn: Arc::new(turn), queues: Some(queues.clone()) }
    }

    /// The session of a request, which keeps the request counted.
    ///
    /// # Errors
    /// `AccessDenied`: the request was not admitted, or is no longer.
    pub fn of<T>(req: &mut S3Request<T>) -> S3Result<Session> {
        let session = req.extensions.remove::<Session>().ok_or_else(refused)?;
        // If the body is a document, it arrived only now, perhaps slowly.
        session.user.may_go_on()?;
        Ok(session)
    }

    /// Runs work of this request on a thread that may block. Long parts of it take the tenant's turns
    /// ([`crate::work::in_turn`]).
    pub fn spawn<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Work<T> {
        crate::work::spawn(self.turn.clone(), self.queues.clone(), work)
    }

    /// The same for work without a known end, such as a copy: it takes the tenant's turns itself
    /// ([`crate::work::in_turn`]), as long as the user's credential is in force.
    pub async fn copying<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Work<T> {
        let place = match &self.queues {
            Some(queues) => Some(queues.copies.place(&self.user.tenant).await),
            None => None,
        };
        let user = self.user.clone();
        let in_force = Box::new(move || user.may_go_on().is_ok());
        crate::work::in_turns(self.turn.clone(), self.queues.clone(), in_force, move || {
            let done = work();
            drop(place);
            done
        })
    }

    /// The same for work that takes a processor: it begins when it is the tenant's turn.
    pub async fn in_turn<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Work<T> {
        let place = match &self.queues {
            Some(queues) => Some(queues.pieces.place(&self.user.tenant).await),
            None => None,
        };
        self.spawn_at(place, work)
    }

    /// The same for work that ends with a sync of so many bytes.
    pub async fn in_turn_to_sync<T: Send + 'static>(
        &self,
        bytes: u64,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Work<T> {
        let place = match &self.queues {
            Some(queues) if bytes >= LARGE_MIN => Some(queues.syncs.place(&self.user.tenant).await),
            Some(_) | None => None,
        };
        self.spawn_at(place, work)
    }

    fn spawn_at<T: Send + 'static>(&self, place: Option<Permit>, work: impl FnOnce() -> T + Send + 'static) -> Work<T> {
        // It has its place.
        crate::work::spawn(self.turn.clone(), None, move || {
            let done = work();
            drop(place);
            done
        })
    }

    /// Checks the right to a key, or to a folder.
    ///
    /// # Errors
    /// `AccessDenied`; those of [`User::was_judged`].
    pub async fn require(&self, action: Action, operation: &str, bucket: &str, key: &str) -> S3Result<()> {
        let is_allowed = match self.user.has_rules() {
            false => self.user.may_use(action, bucket, key),
            true => {
                let (user, at, key) = (self.user.clone(), bucket.to_owned(), key.to_owned());
                self.spawn(move || user.may_use(action, &at, &key)).await.map_err(super::fault::lost)?
            }
        };
        if is_allowed {
            return Ok(());
        }
        self.user.was_judged()?;
        tell_refused(&self.user, operation, Some(bucket));
        Err(refused())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credentials::Rules;
    use crate::limits::{Limits, Tenant};
    use crate::objects::list::Query;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn what_is_not_known_to_read_needs_the_right_to_write() {
        for operation in ["GetObject", "HeadBucket", "ListObjectsV2", "ListMultipartUploads", "GetObjectTagging"] {
            assert_eq!(right_of(operation), Right::Read, "{operation}");
        }
        for operation in ["PutObject", "CopyObject", "DeleteObjects", "AbortMultipartUpload", "RestoreObject", ""] {
            assert_eq!(right_of(operation), Right::Write, "{operation}");
        }
        assert_eq!(right_of("DeleteBucket"), Right::Make);
        for (operation, action) in [
            ("GetObjectTagging", Action::Read),
            ("UploadPartCopy", Action::Write),
            ("ListParts", Action::Write),
            ("DeleteObjectTagging", Action::Write),
            ("DeleteObject", Action::Delete),
            ("RestoreObject", Action::Write),
        ] {
            assert_eq!(action_of(operation), action, "{operation}");
        }
    }

    /// Rules that a closure evaluates, and that may end.
    struct Of<F>(F, Arc<AtomicBool>);

    impl<F: Fn(Action, &str) -> bool + Send + Sync> Rules for Of<F> {
        fn allow(&self, action: Action, key: &str) -> bool {
            self.are_there() && (self.0)(action, key)
        }
        fn are_there(&self) -> bool {
            self.1.load(Ordering::Relaxed)
        }
        fn in_force(&self) -> S3Result<()> {
            Ok(())
        }
    }

    fn holder(
        limits: Limits,
        are_there: &Arc<AtomicBool>,
        judge: impl Fn(Action, &str) -> bool + Send + Sync + 'static,
    ) -> Arc<User> {
        let (tenant, key) = (Arc::new(Tenant::new("acme", limits)), ("KEY".to_owned(), "secret".into()));
        Arc::new(User::of_credential("holder".into(), tenant, key, Box::new(Of(judge, are_there.clone()))))
    }

    /// The secret was changed after the signature was verified.
    #[test]
    fn a_request_is_of_the_user_whose_secret_has_signed_it() {
        let user = holder(Limits::default(), &Arc::new(AtomicBool::new(true)), |_, _| true);
        let signed = |secret: &str| s3s::auth::Credentials { access_key: "KEY".into(), secret_key: secret.into() };
        ADMITTED.sync_scope(user, || {
            assert!(Users::Admitted.signer(&signed("secret")).is_some());
            assert!(Users::Admitted.signer(&signed("the one before")).is_none());
        });
    }

    fn unlimited(exceeded: Exceeded) -> S3Error {
        panic!("{exceeded:?}")
    }

    #[test]
    fn documents_are_small_and_have_a_length() {
        let code = |operation: &str, name: header::HeaderName, value: &str| {
            let headers = HeaderMap::from_iter([(name, value.parse().expect("a value"))]);
            check_document(Size::of(operation), &headers).err().map(|error| error.code().as_str().to_owned())
        };
        for operation in ["DeleteObjects", "CompleteMultipartUpload", "PutObjectTagging", "CreateBucket", "unknown"] {
            let Size { bytes, .. } = Size::of(operation);
            assert_eq!(code(operation, header::CONTENT_LENGTH, &bytes.to_string()), None);
            let refused = code(operation, header::CONTENT_LENGTH, &(bytes + 1).to_string());
            assert_eq!(refused.as_deref(), Some("MaxMessageLengthExceeded"), "{operation}");
            let refused = code(operation, header::TRANSFER_ENCODING, "chunked");
            assert_eq!(refused.as_deref(), Some("MissingContentLength"), "{operation}");
            assert!(check_document(Size::of(operation), &HeaderMap::new()).is_ok(), "it may have none");
        }
        let chunked = http::HeaderName::from_static(CONTENT_SHA256);
        assert_eq!(
            code("DeleteObjects", chunked, "STREAMING-UNSIGNED-PAYLOAD-TRAILER").as_deref(),
            Some("NotImplemented")
        );
    }

    /// The rules end during a listing: an incomplete listing would look complete.
    #[tokio::test]
    async fn without_its_rules_a_request_is_to_be_sent_again() {
        let dir = tempfile::tempdir().expect("a directory");
        for folder in ["acme/a", "acme/b"] {
            std::fs::create_dir_all(dir.path().join(folder)).expect("makes");
            std::fs::write(dir.path().join(folder).join("1"), "").expect("writes");
        }
        let modes = crate::objects::Modes { file: 0o600, dir: 0o700 };
        let fs = Arc::new(lamassu_plain::PlainFs::open(dir.path()).expect("opens"));
        let objects = crate::objects::Objects::open(fs, "/", modes, 1 << 20).expect("opens");
        let gateway = super::super::Gateway { store: Arc::new(objects), region: String::new() };
        let are_there = Arc::new(AtomicBool::new(true));
        let (published, ends) = (are_there.clone(), Arc::new(AtomicBool::new(false)));
        let ended = ends.clone();
        let user = holder(Limits::default(), &are_there, move |_, key| {
            let ends = key == "b" && ends.load(Ordering::Relaxed);
            published.fetch_and(!ends, Ordering::Relaxed);
            !ends && key != "x"
        });
        let session = admitted(user, "ListObjectsV2", (Some("acme".into()), None), &Held::default(), unlimited)
            .await
            .expect("permitted");
        let query = || Query { max: 10, ..Query::default() };
        let code = |error: s3s::S3Error| error.code().as_str().to_owned();
        assert_eq!(gateway.page(&session, "acme", query()).await.expect("lists").keys.len(), 2);
        let denied = session.require(Action::Read, "GetObject", "acme", "x").await.expect_err("by the rules");
        assert_eq!(code(denied), "AccessDenied");
        ended.store(true, Ordering::Relaxed);
        let cut = gateway.page(&session, "acme", query()).await.err().expect("it lacks a folder");
        assert_eq!(code(cut), "ServiceUnavailable");
        let refused = session.require(Action::Read, "GetObject", "acme", "a").await.expect_err("by nobody");
        assert_eq!(code(refused), "ServiceUnavailable");
    }

    #[tokio::test]
    async fn rules_are_asked_within_the_limits_and_on_a_thread_that_may_be_busy() {
        let (asked, asks) = std::sync::mpsc::channel();
        let judge = move |action, key: &str| {
            asked.send((action, crate::work::current().is_some())).expect("it is waited for");
            key == "a"
        };
        let (limits, are_there) =
            (Limits { requests_at_once: 1, ..Limits::default() }, Arc::new(AtomicBool::new(true)));
        let user = holder(limits, &are_there, judge);
        let get = |bucket: &str, key: &str| {
            let (user, bucket, key) = (user.clone(), bucket.to_owned(), key.to_owned());
            async move {
                let (place, held) = ((Some(bucket), Some(key)), Held::default());
                admitted(user, "GetObject", place, &held, |it| slow_down(it, None)).await
            }
        };
        let code = |done: S3Result<Session>| done.err().map(|error| error.code().as_str().to_owned());
        assert_eq!(code(get("other", "a").await).as_deref(), Some("AccessDenied"));
        let session = get("acme", "a").await.expect("permitted");
        assert_eq!(asks.try_recv(), Ok((Action::Read, true)));
        assert_eq!(code(get("acme", "a").await).as_deref(), Some("SlowDown"));
        assert!(asks.try_recv().is_err(), "a request above the limits costs no decision");
        drop(session);
        // The thread may end after its answer.
        let denied = loop {
            match code(get("acme", "b").await).as_deref() {
                Some("SlowDown") => tokio::task::yield_now().await,
                other => break other.map(String::from),
            }
        };
        assert_eq!(denied.as_deref(), Some("AccessDenied"));
        assert_eq!(asks.try_recv(), Ok((Action::Read, true)));
    }
}
