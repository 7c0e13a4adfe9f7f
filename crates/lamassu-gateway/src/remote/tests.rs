//! Tests with a provider in this process, which can be made to stand still.

use super::*;
use crate::limits::{Limits, Tenant};
use crate::log::lines::Lines;
use crate::objects::attrs::{Attrs, Given};
use crate::objects::list::Query;
use crate::objects::{Guard, Swept, Upload};
use crate::work;
use lamassu_crypto::{KeyRing, Secret};
use lamassu_format::header::{KeyArea, NameMode, SealedKeychain, VaultHeader, VaultParams, ZoneId};
use lamassu_format::name::HEADER as HEADER_FILE;
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_store::Backend;
use lamassu_store::backend::MemoryBackend;
use lamassu_vault::{Durability, Freshness, Integrity, Options, Vault};
use percent_encoding::percent_decode_str;
use rusty_s3::{Bucket, Credentials, UrlStyle};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};
use ureq::Agent;

const SUITE: Suite = Suite::Aes;

#[test]
fn results_are_in_the_order_of_their_items_and_an_error_ends_the_work() {
    let items: Vec<usize> = (0..1000).collect();
    assert_eq!(at_once(&items, |item| Ok(*item)).expect("no error"), items);
    assert!(at_once::<usize, usize>(&[], |_| Err(RemoteError::GivenUp)).expect("no items").is_empty());
    let asked = AtomicUsize::new(0);
    let failed: Result<Vec<usize>> = at_once(&items, |_| {
        asked.fetch_add(1, Ordering::Relaxed);
        Err(RemoteError::GivenUp)
    });
    assert!(matches!(failed, Err(RemoteError::GivenUp)));
    assert!(asked.into_inner() <= AT_ONCE, "no more than was begun");
}

#[derive(Clone, Default)]
struct Stored {
    body: Vec<u8>,
    properties: String,
    etag: String,
}

/// A request: its method, its path and query, its headers by names in small letters, its body.
struct Asked {
    method: String,
    name: String,
    query: HashMap<String, String>,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

/// Tells of the first request of this method and name, and holds it.
type Stall = (&'static str, String, Sender<()>, Receiver<()>);

/// Status, headers, body.
type Answer = (u16, String, Vec<u8>);

/// What a provider answers in place of what is right; `None`: it answers that.
type Cheat = Arc<dyn Fn(&Asked) -> Option<Answer> + Send + Sync>;

/// A provider with one bucket.
#[derive(Default)]
struct Cloud {
    objects: Mutex<BTreeMap<String, Stored>>,
    stall: Mutex<Option<Stall>>,
    cheat: Mutex<Option<Cheat>>,
    puts: AtomicUsize,
}

impl Cloud {
    fn start() -> (Arc<Cloud>, Arc<Remote>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let cloud = Arc::new(Cloud::default());
        let serving = cloud.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(std::result::Result::ok) {
                let cloud = serving.clone();
                std::thread::spawn(move || cloud.serve(stream));
            }
        });
        let agent = Agent::config_builder().http_status_as_error(false).proxy(None).build();
        let bucket = Bucket::new(url.parse().expect("a URL"), UrlStyle::Path, "cloud", "us-east-1").expect("a bucket");
        let settings = Settings {
            bucket,
            prefix: String::new(),
            credentials: Credentials::new("key", "secret"),
            retries: 0,
            agent: Agent::new_with_config(agent),
        };
        let remote = Arc::new(Remote::open(files(), &settings, 1 << 20).expect("opens"));
        remote.make_bucket("b").expect("makes");
        (cloud, remote)
    }

    /// Holds the next request of this method and name. What it tells by, and what releases it.
    fn stall(&self, method: &'static str, name: &str) -> (Receiver<()>, Sender<()>) {
        let ((stand, stands), (go_on, goes_on)) = (channel(), channel());
        *self.stall.lock() = Some((method, name.into(), stand, goes_on));
        (stands, go_on)
    }

    fn serve(&self, stream: TcpStream) {
        let mut answers = stream.try_clone().expect("a socket");
        let mut stream = BufReader::new(stream);
        while let Some(asked) = read(&mut stream) {
            let stall = self.stall.lock().take_if(|(method, name, ..)| *method == asked.method && *name == asked.name);
            if let Some((_, _, stand, goes_on)) = stall {
                stand.send(()).expect("it is waited for");
                let _ = goes_on.recv();
            }
            let cheat = self.cheat.lock().clone();
            let answer = cheat.and_then(|cheat| cheat(&asked));
            let (status, headers, body) = answer.unwrap_or_else(|| self.answer(&asked));
            let length = match asked.method.as_str() {
                // That of what GET would answer, which is among the headers.
                "HEAD" => String::new(),
                _ => format!("content-length: {}\r\n", body.len()),
            };
            let head = format!("HTTP/1.1 {status} x\r\n{headers}{length}\r\n");
            if answers.write_all(&[head.as_bytes(), &body].concat()).is_err() {
                return;
            }
        }
    }

    fn answer(&self, asked: &Asked) -> Answer {
        let mut objects = self.objects.lock();
        let etag = || format!("etag-{}", self.puts.fetch_add(1, Ordering::Relaxed));
        let missing = || (404, String::new(), b"<Error><Code>NoSuchKey</Code></Error>".to_vec());
        match asked.method.as_str() {
            _ if asked.name.is_empty() && asked.method == "HEAD" => (200, String::new(), Vec::new()),
            "GET" if asked.name.is_empty() => (200, String::new(), listing(&objects, &asked.query).into_bytes()),
            "HEAD" => objects.get(&asked.name).map_or((404, String::new(), Vec::new()), |stored| {
                (200, format!("{}content-length: {}\r\n", shown(stored), stored.body.len()), Vec::new())
            }),
            // Small objects come whole. Of an empty one there is no range.
            "GET" => match objects.get(&asked.name) {
                None => missing(),
                Some(stored) if stored.body.is_empty() => (416, String::new(), Vec::new()),
                Some(stored) => (200, shown(stored), stored.body.clone()),
            },
            "PUT" => {
                let properties = asked.headers.get("x-amz-meta-lamassu").cloned().unwrap_or_default();
                let from = asked.headers.get("x-amz-copy-source").and_then(|from| from.strip_prefix("/cloud/"));
                let body = match from.map(|from| objects.get(from)) {
                    None => asked.body.clone(),
                    Some(None) => return missing(),
                    Some(Some(source)) => source.body.clone(),
                };
                let etag = etag();
                let document = format!("<CopyObjectResult><ETag>{etag}</ETag></CopyObjectResult>").into_bytes();
                let stored = Stored { body, properties, etag };
                let headers = shown(&stored);
                objects.insert(asked.name.clone(), stored);
                (200, headers, if from.is_some() { document } else { Vec::new() })
            }
            _ => {
                objects.remove(&asked.name);
                (204, String::new(), Vec::new())
            }
        }
    }

    fn has(&self, name: &str) -> bool {
        self.objects.lock().contains_key(name)
    }
}

fn shown(stored: &Stored) -> String {
    format!("etag: \"{}\"\r\nx-amz-meta-lamassu: {}\r\n", stored.etag, stored.properties)
}

fn listing(objects: &BTreeMap<String, Stored>, query: &HashMap<String, String>) -> String {
    let (prefix, mut prefixes) = (query.get("prefix").map_or("", String::as_str), BTreeSet::new());
    let mut text = "<ListBucketResult><IsTruncated>false</IsTruncated>".to_owned();
    for (name, stored) in objects {
        let Some(rest) = name.strip_prefix(prefix) else { continue };
        match rest.split_once('/').filter(|_| query.contains_key("delimiter")) {
            Some((dir, _)) => _ = prefixes.insert(format!("{prefix}{dir}/")),
            None => {
                let _ = write!(text, "<Contents><Key>{name}</Key><ETag>{}</ETag></Contents>", stored.etag);
            }
        }
    }
    prefixes.into_iter().for_each(|prefix| text += &group(&prefix));
    text + "</ListBucketResult>"
}

/// A name in a listing that stands for all below it.
fn group(prefix: &str) -> String {
    format!("<CommonPrefixes><Prefix>{prefix}</Prefix></CommonPrefixes>")
}

fn read(stream: &mut BufReader<TcpStream>) -> Option<Asked> {
    let mut line = || {
        let mut line = String::new();
        stream.read_line(&mut line).ok().filter(|len| *len > 0).map(|_| line.trim_end().to_owned())
    };
    let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let first = line()?;
    let mut words = first.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let name = decoded(path.strip_prefix("/cloud")?.trim_start_matches('/'));
    let query = query.split('&').filter_map(|pair| pair.split_once('='));
    let query = query.map(|(name, value)| (decoded(name), decoded(value))).collect();
    let mut headers = HashMap::new();
    loop {
        let line = line()?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some(Asked { method, name, query, headers, body })
}

/// What seals objects.
fn files() -> Detached {
    let params = VaultParams {
        zone: ZoneId([1; 16]),
        suite: SUITE,
        geometry: Geometry::new(4096, 8).expect("a geometry"),
        names: NameMode::Encrypted,
        name_max: 255,
        convergent_small_files: true,
        domain: Domain::Zone,
        created: 0,
    };
    let keychain = SealedKeychain { nonce: [0; 24], sealed: Vec::new(), oblivious: false };
    let (slots, mac) = (Vec::new(), [0; 32]);
    let area = KeyArea { id: [1; 16], next_slot: 2, slots, keychain, history: None, admin: None, mac };
    let header = VaultHeader::new(params, area);
    let ring = || KeyRing::new(SUITE, &[Secret::new(&mut [1; 32])], &[Secret::new(&mut [2; 32])]);
    let backend: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    Vault::make_tree(&*backend, &header, &ring()).expect("makes");
    let file = backend.root().create_file(OsStr::new(HEADER_FILE)).expect("makes");
    file.write_at(0, b"{}").expect("writes");
    let options = Options {
        integrity: Integrity::Full,
        durability: Durability::Ordered,
        read_only: false,
        approved_only: false,
        threads: 1,
        device: None,
        anchor: None,
        freshness: Freshness::default(),
        events: Default::default(),
        upkeep: Default::default(),
        by_turns: false,
    };
    let vault = Vault::open(backend, &header, ring(), options).expect("opens");
    Detached::of(Arc::new(vault)).expect("its names are encrypted")
}

fn put(remote: &Arc<Remote>, key: &str, content: &[u8]) {
    let storing = remote.stage("b", key, content.len() as u64, &Guard::None, Attrs::default()).expect("begins");
    storing.write(content).expect("writes");
    storing.place(&Guard::None, &Attrs::default()).expect("places");
}

/// Does something for a client that hangs up while the provider is asked about this name; `meanwhile`, others come. How
/// it ends.
fn without_a_client(
    (cloud, remote): &(Arc<Cloud>, Arc<Remote>),
    name: &str,
    late: impl FnOnce(&Arc<Remote>) -> Result<()> + Send + 'static,
    meanwhile: impl FnOnce(),
) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let _entered = runtime.enter();
    let tenant = Arc::new(Tenant::new("t", Limits::default()));
    let turn = Arc::new(tenant.begin("u").expect("the first request"));
    let (stands, go_on) = cloud.stall("HEAD", name);
    let (doing, (tell, ends)) = (remote.clone(), channel());
    let work = work::spawn(turn, None, move || tell.send(late(&doing)).expect("it is waited for"));
    stands.recv().expect("it asks the provider");
    drop(work);
    meanwhile();
    drop(go_on);
    ends.recv().expect("it ends")
}

fn name_of(remote: &Remote, key: &str) -> String {
    remote.name(&remote.place("b", key).expect("a place"))
}

#[test]
fn a_copy_without_a_client_replaces_nothing_that_came_later() {
    let both = Cloud::start();
    let remote = &both.1;
    put(remote, "from", b"first");
    let copy = |remote: &Arc<Remote>| {
        let change =
            |shown: &crate::objects::attrs::Shown, _: &Properties| Ok::<_, RemoteError>(Some(shown.attrs.clone()));
        remote.copy(("b", "from"), ("b", "to"), &Guard::None, false, change).map(drop)
    };
    let stalled = name_of(remote, "from");
    let ended = without_a_client(&both, &stalled, copy, || {
        copy(remote).expect("the same request again");
        put(remote, "to", b"another");
    });
    assert!(matches!(ended, Err(RemoteError::GivenUp)), "{ended:?}");
    assert_eq!(remote.find("b", "to").expect("is there").size, 7);
}

#[test]
fn tags_without_a_client_are_not_set() {
    let both = Cloud::start();
    let remote = &both.1;
    put(remote, "k", b"first");
    let set = |remote: &Arc<Remote>| remote.set_tags("b", "k", [("tag".to_owned(), String::new())].into());
    let stalled = name_of(remote, "k");
    let ended = without_a_client(&both, &stalled, set, || put(remote, "k", b"another"));
    assert!(matches!(ended, Err(RemoteError::GivenUp)), "{ended:?}");
    assert!(remote.find("b", "k").expect("is there").attrs.given.tags.is_empty());
    set(remote).expect("a client waits for it");
    assert_eq!(remote.find("b", "k").expect("is there").attrs.given.tags.len(), 1);
}

/// The provider answers with the whole of a small object, whatever range is asked for. One record is empty.
#[test]
fn what_an_upload_has_left_is_removed_whatever_other_records_are() {
    let (cloud, remote) = Cloud::start();
    let upload = Upload {
        key: "k".into(),
        given: Given::default(),
        begun: 0,
        user: "u".into(),
        algorithm: None,
        is_full: false,
    };
    let [live, damaged, ended] = [(); 3].map(|()| remote.begin_upload("b", &upload).expect("begins"));
    let sealed = remote.files.top().seal(b"b");
    let name = |id: &str, rest: &str| format!("lamassu.uploads/{sealed}/{id}/{rest}");
    for id in [&live, &damaged, &ended] {
        cloud.objects.lock().insert(name(id, "00001"), Stored { etag: "part".into(), ..Stored::default() });
    }
    cloud.objects.lock().remove(&name(&ended, "upload")).expect("is there");
    cloud.objects.lock().get_mut(&name(&damaged, "upload")).expect("is there").body.clear();
    let swept = remote.sweep(&AtomicBool::new(false)).expect("searches");
    assert_eq!(swept, Swept { removed: 1, left_out: 1 });
    assert_eq!([&live, &damaged, &ended].map(|id| cloud.has(&name(id, "00001"))), [true, true, false]);
    assert!(remote.find_upload("b", "k", &live).is_ok());
}

/// It was made again and removed meanwhile.
#[test]
fn a_bucket_is_not_made_without_a_client() {
    let (cloud, remote) = Cloud::start();
    let marker = remote.marker("new");
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let _entered = runtime.enter();
    let tenant = Arc::new(Tenant::new("t", Limits::default()));
    let turn = Arc::new(tenant.begin("u").expect("the first request"));
    let held = remote.alone_with(&marker);
    let (making, (tell, ends)) = (remote.clone(), channel());
    let work = work::spawn(turn, None, move || tell.send(making.make_bucket("new")).expect("it is waited for"));
    while remote.keys.users_of(&marker) < 2 {
        std::thread::yield_now();
    }
    drop((work, held));
    let ended = ends.recv().expect("it ends");
    assert!(matches!(ended, Err(RemoteError::GivenUp)) && !cloud.has(&marker), "{ended:?}");
    remote.make_bucket("new").expect("a client waits for it");
    assert!(cloud.has(&marker));
}

fn refused(code: &str, message: &str) -> Answer {
    let status = if code == "NoSuchKey" { 404 } else { 400 };
    (status, String::new(), format!("<Error><Code>{code}</Code><Message>{message}</Message></Error>").into_bytes())
}

/// A provider that lists these buckets of uploads, and in the first one many more uploads than are looked at together.
/// It says nothing good of them and of the other buckets, at length; but the first upload has ended. `asked` gets each
/// request for a record, and for parts.
fn lists_many(remote: &Remote, buckets: &[String], asked: impl Fn(bool) + Send + Sync + 'static) -> Cheat {
    let page = |groups: Vec<String>| {
        let groups: String = groups.iter().map(|name| group(&format!("{name}/"))).collect();
        (200, String::new(), format!("<ListBucketResult>{groups}</ListBucketResult>").into_bytes())
    };
    let uploads = "lamassu.uploads/";
    let dir = format!("{uploads}{}/", remote.files.top().seal(b"b"));
    let all = page(buckets.iter().map(|bucket| format!("{uploads}{bucket}")).collect());
    let ids = page((0..MANY).map(|id| format!("{dir}{id:032x}")).collect());
    let ended = format!("{dir}{:032x}/", 0);
    Arc::new(move |request| {
        let prefix = request.query.get("prefix").map(String::as_str);
        Some(match (request.name.as_str(), prefix) {
            ("", Some(prefix)) if prefix == uploads => all.clone(),
            ("", Some(prefix)) if prefix == dir => ids.clone(),
            ("", Some(prefix)) if prefix == ended => {
                asked(false);
                page(Vec::new())
            }
            (name, None) if name.starts_with(&dir) => {
                asked(true);
                refused(if name.starts_with(&ended) { "NoSuchKey" } else { "Made up" }, &"text".repeat(10_000))
            }
            _ => refused("Made up", &"text".repeat(10_000)),
        })
    })
}

/// Uploads on one page.
const MANY: usize = 1000;

/// However many uploads a page has, few errors are in memory at once. However many failures there are, and names of no
/// bucket, the log has a line for each kind.
#[test]
fn a_sweep_goes_through_a_long_page_in_pieces_and_logs_little() {
    let (cloud, remote) = Cloud::start();
    let seal = |name: &str| remote.files.top().seal(name.as_bytes());
    let mut buckets = vec![seal("b")];
    buckets.extend((0..50).map(|n| "x".repeat(n + 1)));
    buckets.extend((0..50).map(|n| seal(&format!("other-{n}"))));
    // Requests for records before the first one for parts, and in all.
    let counts = Arc::new(Mutex::new((None, 0)));
    let counted = counts.clone();
    *cloud.cheat.lock() = Some(lists_many(&remote, &buckets, move |is_record| {
        let (before_parts, records) = &mut *counted.lock();
        match is_record {
            true => *records += 1,
            false => _ = before_parts.get_or_insert(*records),
        }
    }));
    let lines = Lines::default();
    let sweep = || remote.sweep(&AtomicBool::new(false)).expect("searches");
    let swept = lines.while_doing(sweep);
    assert_eq!(swept, Swept { removed: 0, left_out: MANY as u64 - 1 + 50 });
    assert_eq!(*counts.lock(), (Some(multipart::RECORDS_MAX), MANY));
    let lines = lines.0.lock();
    let has = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    assert_eq!((has("count=999 "), has("count=50 "), lines.len()), (1, 1, 2), "{lines:?}");
    assert!(lines.iter().all(|line| line.len() < 1000), "{lines:?}");
}

/// However many names of its own a provider lists, and however many objects it has damaged.
#[test]
fn a_listing_logs_little_of_what_it_leaves_out() {
    const DAMAGED: usize = 50;
    let (cloud, remote) = Cloud::start();
    put(&remote, "good", b"content");
    let good = name_of(&remote, "good");
    for n in 0..DAMAGED {
        put(&remote, &format!("damaged-{n}"), b"content");
    }
    let marker = remote.name(&remote.marker("b"));
    let dir = marker.trim_end_matches(BUCKET);
    {
        let mut objects = cloud.objects.lock();
        let is_damaged = |name: &str| name.starts_with(dir) && name != marker && name != good;
        for (_, stored) in objects.iter_mut().filter(|(name, _)| is_damaged(name)) {
            *stored = Stored { etag: "another".into(), ..Stored::default() };
        }
        objects.extend((0..MANY).map(|n| (format!("{dir}{n}"), Stored::default())));
    }
    let lines = Lines::default();
    let query = Query { max: 1000, ..Query::default() };
    let page = lines.while_doing(|| remote.list("b", &query)).expect("lists");
    assert_eq!(page.items.len(), 1);
    let lines = lines.0.lock();
    let has = |level: &str, count: usize| {
        let is_it = |line: &&String| line.starts_with(level) && line.contains(&format!("count={count} "));
        lines.iter().filter(is_it).count()
    };
    assert_eq!((has("WARN", MANY), has("ERROR", DAMAGED), lines.len()), (1, 1, 2), "{lines:?}");
    assert!(lines.iter().all(|line| line.len() < 1000), "{lines:?}");
}

/// Also in the middle of a page.
#[test]
fn a_sweep_ends_when_the_gateway_stops() {
    const ASKED: usize = 5;
    let (cloud, remote) = Cloud::start();
    let (stopping, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (stop, counted) = (stopping.clone(), asked.clone());
    let buckets = [remote.files.top().seal(b"b")];
    *cloud.cheat.lock() = Some(lists_many(&remote, &buckets, move |_| {
        if counted.fetch_add(1, Ordering::SeqCst) + 1 == ASKED {
            stop.store(true, Ordering::SeqCst);
        }
    }));
    let ended = remote.sweep(&stopping);
    assert!(matches!(ended, Err(RemoteError::GivenUp)), "{ended:?}");
    let asked = asked.load(Ordering::SeqCst);
    assert!(asked <= ASKED + AT_ONCE, "{asked}");
}
