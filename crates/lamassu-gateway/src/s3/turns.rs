//! Tests: copies, the ends of uploads, deletions of many keys, listings and what makes directories take turns, as
//! contents of clients do.

use super::Gateway;
use super::access::Session;
use super::body::Sink;
use super::given::Conditions;
use super::store::{Completing, Copying, PartCopying, PartOf, Putting, Store};
use super::write::remove_in_turns;
use crate::credentials::{Rules, User};
use crate::limits::{Limits, Tenant};
use crate::objects::attrs::{Attrs, Given};
use crate::objects::list::Query;
use crate::objects::{Completed, Guard, Modes, Objects, PIECE, Upload};
use crate::queue::{Queue, Queues};
use crate::work;
use lamassu_vault::Owner;
use s3s::crypto::{Checksum as _, Md5};
use s3s::{S3Result, s3_error};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::task::JoinHandle;

const OWNER: Owner = Owner { uid: 0, gid: 0, umask: 0 };
/// Pieces of an object. Each is moved in one turn, and read in another.
const PIECES: usize = 3;
/// Passed only by what is broken.
const PATIENCE: Duration = Duration::from_secs(60);
/// Requests of the tenant that has many.
const FLOOD: usize = 8;

#[derive(Clone, Copy, Debug)]
enum WorkKind {
    Copy,
    PartCopy,
    Complete,
    Delete,
    DeepDelete,
    List,
    BeginUpload,
}

const ALL: [WorkKind; 7] = [
    WorkKind::Copy,
    WorkKind::PartCopy,
    WorkKind::Complete,
    WorkKind::Delete,
    WorkKind::DeepDelete,
    WorkKind::List,
    WorkKind::BeginUpload,
];

/// The call of a request.
type Call = Box<dyn FnOnce(&Arc<Objects>) -> S3Result<()> + Send>;

/// A gateway over a directory with an object, and queues with one place each.
struct Stage {
    _dir: tempfile::TempDir,
    store: Arc<Objects>,
    queues: Arc<Queues>,
    many: Arc<Tenant>,
    few: Arc<Tenant>,
}

/// Permits everything, so many times.
struct All(AtomicUsize);

impl Rules for All {
    fn allow(&self, _: lamassu_access::Action, _: &str) -> bool {
        true
    }
    fn are_there(&self) -> bool {
        true
    }
    fn in_force(&self) -> S3Result<()> {
        let left = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        left.map(drop).map_err(|_| s3_error!(AccessDenied, "revoked"))
    }
}

fn content() -> Vec<u8> {
    (0..PIECES * PIECE).map(|at| (at / 5) as u8).collect()
}

fn tag() -> String {
    let mut md5 = Md5::new();
    md5.update(&content());
    data_encoding::HEXLOWER.encode(md5.finalize().as_ref())
}

fn tenant(name: &str) -> Arc<Tenant> {
    Arc::new(Tenant::new(name, Limits::default()))
}

impl Stage {
    /// For so many copies at once.
    fn new(copies: usize) -> Stage {
        let dir = tempfile::tempdir().expect("a directory");
        let fs = Arc::new(lamassu_plain::PlainFs::open(dir.path()).expect("opens"));
        let modes = Modes { file: 0o600, dir: 0o700 };
        let store = Arc::new(Objects::open(fs, "/", modes, 1 << 20).expect("opens"));
        Store::make_bucket(&*store, "b", OWNER).expect("makes");
        let length = (PIECES * PIECE) as u64;
        let putting =
            Putting { bucket: "b".into(), key: "source".into(), length, owner: OWNER, guard: Guard::default() };
        let staged = Store::stage(&store, &putting, Attrs::default()).expect("begins");
        staged.add(0, &content()).expect("writes");
        store.place(&putting, staged, Attrs { etag: tag(), ..Attrs::default() }).expect("places");
        let queues = Arc::new(Queues { pieces: Queue::new(1), syncs: Queue::new(1), copies: Queue::new(copies) });
        Stage { _dir: dir, store, queues, many: tenant("many"), few: tenant("few") }
    }

    fn session(&self, tenant: &Arc<Tenant>) -> Session {
        self.session_for(tenant, usize::MAX)
    }

    /// Of a user whose credential is revoked after it was asked for so many times.
    fn session_for(&self, tenant: &Arc<Tenant>, times: usize) -> Session {
        let key = ("KEY".to_owned(), "secret".into());
        let user = User::of_credential("u".into(), tenant.clone(), key, Box::new(All(AtomicUsize::new(times))));
        Session::in_queues(Arc::new(user), &self.queues)
    }

    fn upload(&self, key: &str) -> String {
        let upload = Upload {
            key: key.into(),
            given: Given::default(),
            begun: 0,
            user: "u".into(),
            algorithm: Some("SHA256".into()),
            is_full: true,
        };
        Store::begin_upload(&*self.store, "b", &upload, OWNER).expect("begins")
    }

    /// The calls of a request, with what is needed before.
    fn request(&self, kind: WorkKind, at: usize) -> Call {
        let key = format!("{kind:?}-{at}");
        let from = ("b".to_owned(), "source".to_owned());
        let conditions =
            || Conditions { matches: None, none_matches: None, modified_since: None, unmodified_since: None };
        let part = |upload| PartOf { bucket: "b".into(), key: key.clone(), upload, number: 1 };
        match kind {
            WorkKind::Copy => {
                let copying = Copying {
                    from,
                    bucket: "b".into(),
                    key,
                    owner: OWNER,
                    guard: Guard::default(),
                    conditions: conditions(),
                    new: Given::default(),
                    is_new: false,
                    has_new_tags: false,
                    asked: Some("SHA256".into()),
                };
                Box::new(move |store| Store::copy(store, &copying).map(drop))
            }
            WorkKind::PartCopy => {
                let part = part(self.upload(&key));
                let copying = PartCopying { from, part, conditions: conditions(), range: None };
                Box::new(move |store| Store::copy_part(store, &copying).map(drop))
            }
            WorkKind::Complete => {
                let part = part(self.upload(&key));
                let (_, staged) = Store::stage_part(&self.store, &part, 0, Attrs::default()).expect("begins");
                staged.add(0, &content()).expect("writes");
                let attrs = Attrs { etag: tag(), ..Attrs::default() };
                Store::place_part(&self.store, &part, staged, attrs).expect("places");
                let parts = vec![Completed { number: 1, etag: tag(), checksums: Default::default() }];
                let (bucket, upload, guard) = (part.bucket, part.upload, Guard::default());
                let completing = Completing {
                    bucket,
                    key,
                    upload,
                    parts,
                    owner: OWNER,
                    guard,
                    said: Default::default(),
                    size: None,
                };
                Box::new(move |store| Store::complete(store, &completing).map(drop))
            }
            WorkKind::Delete => {
                let keys: Vec<_> = (0..100).map(|at| (format!("{key}/{at}"), Guard::default())).collect();
                Box::new(move |store| remove_in_turns(&**store, "b", &keys).into_iter().collect())
            }
            WorkKind::DeepDelete => {
                let keys = [(self.deep(&key), Guard::default())];
                Box::new(move |store| remove_in_turns(&**store, "b", &keys).into_iter().collect())
            }
            WorkKind::List => {
                self.deep(&key);
                let query = Query { prefix: key + "/", max: 10, ..Query::default() };
                Box::new(move |store| {
                    let listed = || Store::list(&**store, "b", &query, &|_| true);
                    work::in_turn(listed).map(|rows| assert_eq!(rows.keys.len(), 1))
                })
            }
            WorkKind::BeginUpload => {
                let key = format!("{key}/a/b/c/d/e/f");
                let upload =
                    Upload { key, given: Given::default(), begun: 0, user: "u".into(), algorithm: None, is_full: true };
                Box::new(move |store| Store::begin_upload(&**store, "b", &upload, OWNER).map(drop))
            }
        }
    }

    /// An object with some levels below this key.
    fn deep(&self, key: &str) -> String {
        let key = format!("{key}/a/b/c/d/e/f");
        let putting =
            Putting { bucket: "b".into(), key: key.clone(), length: 0, owner: OWNER, guard: Guard::default() };
        let staged = Store::stage(&self.store, &putting, Attrs::default()).expect("begins");
        self.store.place(&putting, staged, Attrs { etag: tag(), ..Attrs::default() }).expect("places");
        key
    }

    /// Begins requests of the tenant that has many, and counts those that end.
    fn flood(&self, kind: WorkKind, count: usize, ended: &Arc<AtomicUsize>) -> Vec<JoinHandle<()>> {
        let begin = |at| {
            let (session, request, ended) = (self.session(&self.many), self.request(kind, at), ended.clone());
            let gateway = Gateway { store: self.store.clone(), region: String::new() };
            tokio::spawn(async move {
                let done = gateway.copying(&session, request).await;
                ended.fetch_add(1, Ordering::SeqCst);
                done.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            })
        };
        (0..count).map(begin).collect()
    }
}

/// Until so many of a tenant's wait, or one has ended without.
async fn until_waiting(queue: &Queue, tenant: &Arc<Tenant>, count: usize, ended: &AtomicUsize) {
    let begun = std::time::Instant::now();
    while queue.waiting_of(tenant) < count && ended.load(Ordering::SeqCst) == 0 {
        assert!(begun.elapsed() < PATIENCE, "{} wait, and not {count}", queue.waiting_of(tenant));
        tokio::task::yield_now().await;
    }
    assert_eq!(ended.load(Ordering::SeqCst), 0, "it took no place");
}

/// One tenant's flood waits for the place, and then another's three pieces. They are done before any of the flood is:
/// each of it needs four turns or more, and between two pieces of the other tenant there is one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_copies_takes_turns_with_another_tenants_pieces() {
    for kind in ALL {
        let (stage, ended) = (Stage::new(2 * FLOOD), Arc::new(AtomicUsize::new(0)));
        let place = stage.queues.pieces.place(&tenant("first")).await;
        let flood = stage.flood(kind, FLOOD, &ended);
        until_waiting(&stage.queues.pieces, &stage.many, FLOOD, &ended).await;
        let pieces: Vec<_> = (0..PIECES)
            .map(|_| {
                let (session, ended) = (stage.session(&stage.few), ended.clone());
                tokio::spawn(async move { session.in_turn(move || ended.load(Ordering::SeqCst)).await.await })
            })
            .collect();
        until_waiting(&stage.queues.pieces, &stage.few, PIECES, &ended).await;
        drop(place);
        for piece in pieces {
            let before_it = piece.await.expect("no panic").expect("no panic");
            assert_eq!(before_it, 0, "{kind:?}: of the flood, so many were done first");
        }
        for one in flood {
            one.await.expect("it is done");
        }
    }
}

/// What is done to one key of many levels takes a turn, too. A key of few levels waits for nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_many_levels_is_looked_for_in_turn() {
    let stage = Stage::new(FLOOD);
    let gateway = Gateway { store: stage.store.clone(), region: String::new() };
    let place = stage.queues.pieces.place(&tenant("first")).await;
    let remove = |key: String| move |store: &Arc<Objects>| Store::remove(&**store, "b", &key, &Guard::default());
    gateway.blocking(&stage.session(&stage.many), remove("a/b".into())).await.expect("removes");
    let (session, deep) = (stage.session(&stage.many), "d/".repeat(40) + "key");
    let removal = tokio::spawn(async move { gateway.blocking(&session, remove(deep)).await });
    until_waiting(&stage.queues.pieces, &stage.many, 1, &AtomicUsize::new(0)).await;
    drop(place);
    removal.await.expect("no panic").expect("removes");
}

/// Their syncs are as large as those of other objects, and take the same places.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_wait_for_a_place_to_sync() {
    for kind in [WorkKind::Copy, WorkKind::PartCopy, WorkKind::Complete] {
        let (stage, ended) = (Stage::new(2 * FLOOD), Arc::new(AtomicUsize::new(0)));
        let place = stage.queues.syncs.place(&tenant("first")).await;
        let flood = stage.flood(kind, 2, &ended);
        until_waiting(&stage.queues.syncs, &stage.many, 2, &ended).await;
        // A copy that waits for a place of syncs holds no place of pieces.
        let piece = stage.session(&stage.few).in_turn(|| ()).await;
        piece.await.expect("no panic");
        drop(place);
        for one in flood {
            one.await.expect("it is done");
        }
    }
}

/// However far it has come: before each piece and before the sync the credential is asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_ends_when_its_credential_is_revoked() {
    for kind in ALL {
        let stage = Stage::new(2 * FLOOD);
        let gateway = Gateway { store: stage.store.clone(), region: String::new() };
        let (mut times, mut refused) = (0, 0);
        loop {
            let request = stage.request(kind, times);
            match gateway.copying(&stage.session_for(&stage.few, times), request).await {
                Ok(()) => break,
                Err(error) => assert_eq!(error.code().as_str(), "AccessDenied", "{kind:?}: {error}"),
            }
            let key = format!("{kind:?}-{times}");
            let placed = Store::shown(&*stage.store, "b", &key);
            assert!(placed.is_err(), "{kind:?}: it is there after {times} pieces");
            (times, refused) = (times + 1, refused + 1);
        }
        assert!(refused >= PIECES, "{kind:?}: {refused}");
    }
}

/// Copies that wait for their turns leave threads to those whose turn it is. Here are four threads, and more copies.
#[test]
fn copies_do_not_take_all_threads() {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).max_blocking_threads(4).enable_all().build().expect("threads");
    let ends = runtime.block_on(async {
        // One tenant has three of four places.
        let (stage, ended) = (Stage::new(4), Arc::new(AtomicUsize::new(0)));
        let place = stage.queues.pieces.place(&tenant("first")).await;
        let flood = stage.flood(WorkKind::Copy, FLOOD, &ended);
        until_waiting(&stage.queues.pieces, &stage.many, 3, &ended).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        let session = stage.session(&stage.few);
        let piece = tokio::spawn(async move { session.in_turn(|| ()).await.await });
        until_waiting(&stage.queues.pieces, &stage.few, 1, &ended).await;
        drop(place);
        let all = futures_util::future::join_all(flood.into_iter().chain([tokio::spawn(async move {
            piece.await.expect("no panic").expect("no panic");
        })]));
        tokio::time::timeout(PATIENCE, all).await.is_ok()
    });
    if !ends {
        // The threads wait for ever.
        runtime.shutdown_background();
        panic!("a request with a place gets no thread");
    }
}
