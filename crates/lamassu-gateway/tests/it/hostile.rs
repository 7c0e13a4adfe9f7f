//! A provider that answers what it likes: a small server of S3 of the test's own, behind a real gateway. What it cheats
//! with is chosen by a request to it, so that one gateway goes through all of it.

use crate::lab::{Lab, noise, until};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Objects, each with its sealed properties, and what is cheated with.
#[derive(Default)]
struct Cloud {
    objects: Arc<BTreeMap<String, (Vec<u8>, String)>>,
    cheat: String,
    tokens: u64,
    /// what the gateway has asked for, a line each
    asked: Vec<String>,
}

/// The place of uploads in parts.
const UPLOADS: &str = "tenant/lamassu.uploads/";

impl Cloud {
    /// What a test asks for, besides the cheats; `None`: the request is not the test's.
    fn told(&mut self, path: &str) -> Option<String> {
        let (what, more) = path.strip_prefix("/told/")?.split_once('/')?;
        let objects = Arc::make_mut(&mut self.objects);
        let is_record = |name: &str| name.starts_with(UPLOADS) && name.ends_with("/upload");
        match what {
            "cheat" => self.cheat = more.into(),
            // So many parts of each upload.
            "parts" => {
                objects.retain(|name, _| !name.starts_with(UPLOADS) || is_record(name));
                let dirs: Vec<String> =
                    objects.keys().filter_map(|name| Some(name.strip_suffix("upload")?.into())).collect();
                let parts = 1..=more.parse::<u32>().expect("a number");
                let names = dirs.iter().flat_map(|dir| parts.clone().map(move |number| format!("{dir}{number:05}")));
                objects.extend(names.map(|name| (name, (vec![0], String::new()))));
            }
            "ended" => objects.retain(|name, _| !is_record(name)),
            "asked" => return Some(self.asked.join("\n")),
            "names" => return Some(objects.keys().map(String::as_str).collect::<Vec<_>>().join("\n")),
            _ => panic!("{path}"),
        }
        self.asked.clear();
        Some(String::new())
    }

    /// Names with tags, and groups, behind `after`; and whether there are more than `most`.
    fn listed(&self, prefix: &str, is_grouped: bool, after: &str, most: usize) -> Listed {
        let mut listed = Listed::default();
        let mut from = Included(prefix.to_owned());
        while let Some((name, (content, _))) = self.objects.range::<String, _>((from, Unbounded)).next()
            && name.starts_with(prefix)
        {
            let slash = name[prefix.len()..].find('/').filter(|_| is_grouped);
            let shown = slash.map_or(&**name, |at| &name[..=prefix.len() + at]);
            // Behind all names of a group.
            from = Excluded(if slash.is_some() { format!("{shown}\u{7f}") } else { name.clone() });
            match () {
                () if shown <= after => {}
                () if listed.names.len() + listed.groups.len() == most => {
                    listed.is_cut = true;
                    break;
                }
                () if slash.is_some() => listed.groups.push(shown.into()),
                () => listed.names.push((shown.into(), tag(content))),
            }
        }
        listed
    }
}

#[derive(Default)]
struct Listed {
    names: Vec<(String, String)>,
    groups: Vec<String>,
    is_cut: bool,
}

struct Request {
    method: String,
    path: String,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

fn unescaped(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let escaped = (*first == b'%').then(|| std::str::from_utf8(tail.get(..2)?).ok()).flatten();
        match escaped.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => (bytes.push(byte), rest = &tail[2..]).1,
            None => (bytes.push(*first), rest = tail).1,
        }
    }
    String::from_utf8(bytes).expect("names are text")
}

fn request(from: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = String::new();
    from.read_line(&mut line).ok().filter(|len| *len > 0)?;
    let mut words = line.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        from.read_line(&mut line).ok().filter(|len| *len > 0)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let len = headers.get("content-length").and_then(|len| len.parse().ok()).unwrap_or(0);
    let mut body = vec![0; len];
    from.read_exact(&mut body).ok()?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let query = pairs.map(|(name, value)| (unescaped(name), unescaped(value))).collect();
    Some(Request { method, path: unescaped(path), query, headers, body })
}

type Answer = std::io::Result<()>;

fn answer(to: &mut TcpStream, status: &str, headers: &str, body: &[u8], is_head: bool) -> Answer {
    write!(to, "HTTP/1.1 {status}\r\ncontent-length: {}\r\n{headers}\r\n", body.len())?;
    to.write_all(if is_head { &[] } else { body })
}

fn fault(to: &mut TcpStream, status: &str, code: &str) -> Answer {
    let document = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>m</Message></Error>");
    answer(to, status, "", document.as_bytes(), false)
}

fn tag(content: &[u8]) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    content.iter().for_each(|byte| hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:032x}")
}

/// More than a gateway may take into memory, as long as it takes it.
fn flood(to: &mut TcpStream, headers: &str, piece: &[u8]) -> Answer {
    write!(to, "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n{headers}\r\n")?;
    for _ in 0..(1 << 30) / piece.len() {
        write!(to, "{:x}\r\n", piece.len())?;
        to.write_all(piece)?;
        to.write_all(b"\r\n")?;
    }
    Ok(())
}

fn list(cloud: &mut Cloud, asked: &Request, to: &mut TcpStream) -> Answer {
    let (prefix, cheat) = (asked.query.get("prefix").cloned().unwrap_or_default(), cloud.cheat.clone());
    let asks = |name: &str| asked.query.get(name).map(String::as_str);
    let is_true = |token: &&str| token.starts_with("tenant/");
    let after = asks("continuation-token").filter(is_true).unwrap_or_default();
    let most = asks("max-keys").and_then(|most| most.parse().ok()).unwrap_or(1000);
    let Listed { names: mut entries, groups, is_cut } =
        cloud.listed(&prefix, asks("delimiter") == Some("/"), after, most);
    let last = entries.last().map(|(name, _)| name).max(groups.last()).filter(|_| is_cut).cloned();
    let (mut next, mut date, mut more) = (last, "2026-01-02T03:04:05.000Z", String::new());
    match cheat.as_str() {
        "slashes" => entries.push((prefix.clone() + &"/".repeat(1_000_000), "t".into())),
        "circle" => next = Some("again".to_owned()),
        "one bucket's uploads"
            if cloud
                .objects
                .keys()
                .find_map(|name| name.strip_prefix(UPLOADS)?.split_once('/'))
                .is_some_and(|(first, _)| prefix.starts_with(&format!("{UPLOADS}{first}/"))) =>
        {
            next = Some("again".to_owned());
        }
        "endless" => {
            cloud.tokens += 1;
            next = Some(format!("token{}", cloud.tokens));
        }
        "more" => more = "<IsTruncated>true</IsTruncated>".into(),
        "dates" => date = "yesterday",
        "years" => date = "9999-12-31T23:59:59-23:59",
        "foreign" => {
            for name in ["", "/", "other/name", "tenant", "tenant/", "../x", "\u{fc}", "tenant/a/b/c", "lamassu.vault"]
            {
                entries.push((name.into(), "t".into()));
            }
            entries.extend((0..100).map(|n| (format!("{prefix}AAAA{n}"), "t".into())));
        }
        "twice" => entries.extend(entries.clone()),
        "unsorted" => entries.reverse(),
        "tags" => entries.iter_mut().for_each(|(_, tag)| *tag = "&quot;&amp;&#10;".repeat(100)),
        "nested" => more = "<a>".repeat(500_000),
        "entities" => more = "<Contents><Key>&lol;</Key></Contents>".into(),
        "fault" => return fault(to, "200 OK", "InternalError"),
        "missing" => return fault(to, "404 Not Found", "NoSuchKey"),
        "html" => return answer(to, "200 OK", "", b"<html><body>hello</body></html>", false),
        "binary" => return answer(to, "200 OK", "", &noise(100_000), false),
        "flood" => return flood(to, "", &b"<ListBucketResult>".repeat(4096)),
        "nothing" => {
            std::thread::sleep(Duration::from_secs(4));
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        _ => {}
    }
    let mut document = format!("<?xml version=\"1.0\"?><ListBucketResult><Name>cloud</Name>{more}");
    for (name, tag) in entries {
        let _ = write!(document, "<Contents><Key>{name}</Key><ETag>&quot;{tag}&quot;</ETag>");
        let _ = write!(document, "<LastModified>{date}</LastModified></Contents>");
    }
    for group in groups {
        let _ = write!(document, "<CommonPrefixes><Prefix>{group}</Prefix></CommonPrefixes>");
    }
    if let Some(token) = next {
        let _ = write!(document, "<NextContinuationToken>{token}</NextContinuationToken>");
    }
    document += "</ListBucketResult>";
    answer(to, "200 OK", "", document.as_bytes(), false)
}

fn get(cloud: &Cloud, name: &str, asked: &Request, to: &mut TcpStream) -> Answer {
    let is_head = asked.method == "HEAD";
    let Some((content, properties)) = cloud.objects.get(name) else {
        return if is_head {
            answer(to, "404 Not Found", "", b"", true)
        } else {
            fault(to, "404 Not Found", "NoSuchKey")
        };
    };
    // Those of the gateway's own are as they should be.
    let cheat = if name.contains("lamassu.") { "" } else { cloud.cheat.as_str() };
    let (size, mut etag) = (content.len(), tag(content));
    let range = asked.headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let (first, last) = range.map_or((0, size - 1), |(first, last)| {
        (first.parse::<usize>().expect("a number"), last.parse::<usize>().expect("a number").min(size - 1))
    });
    let is_later = first > 0;
    let (mut total, mut status, mut told) = (size.to_string(), "206 Partial Content", first);
    let mut body = content[first..=last].to_vec();
    match cheat {
        "longer" => body.extend_from_slice(&[7; 5000]),
        "shorter" => drop(body.split_off(body.len() / 2)),
        "empty" => body.clear(),
        "zeros" if is_later => body.fill(0),
        "shifted" if is_later => (body, told) = (content[first - 4096..=last - 4096].to_vec(), first - 4096),
        "shifted, and not told" if is_later => body = content[first - 4096..=last - 4096].to_vec(),
        "whole" => (status, body) = ("200 OK", content.clone()),
        "another tag" if is_later => etag = tag(b"another"),
        "no tag" => etag.clear(),
        "long tag" => etag = etag.repeat(100),
        "balancer" if !is_head => return answer(to, "404 Not Found", "", b"<html>404 Not Found</html>", false),
        "grows" if is_later => total = (size + 4096).to_string(),
        "huge" => total = (1_u64 << 62).to_string(),
        "beyond" => total = u128::MAX.to_string(),
        "gone later" if is_later => return fault(to, "404 Not Found", "NoSuchKey"),
        "changed later" if is_later => return fault(to, "412 Precondition Failed", "PreconditionFailed"),
        "cut" => {
            write!(to, "HTTP/1.1 206 Partial Content\r\ncontent-length: {}\r\n", body.len() + 1)?;
            write!(to, "content-range: bytes {first}-{last}/{size}\r\netag: \"{etag}\"\r\n\r\n")?;
            to.write_all(&body)?;
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        "flood" if !is_head => {
            let headers = format!("content-range: bytes {first}-{last}/{size}\r\netag: \"{etag}\"\r\n");
            return flood(to, &headers, &[7; 65536]);
        }
        "no properties" => return answer(to, status, &format!("etag: \"{etag}\"\r\n"), &body, is_head),
        _ => {}
    }
    let mut headers = format!("etag: \"{etag}\"\r\nlast-modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n");
    let _ = write!(headers, "x-amz-meta-lamassu: {properties}\r\n");
    if status.starts_with("206") {
        let _ = write!(headers, "content-range: bytes {told}-{last}/{total}\r\n");
    }
    answer(to, if range.is_none() { "200 OK" } else { status }, &headers, &body, is_head)
}

fn serve(cloud: &Mutex<Cloud>, to: &mut TcpStream, asked: &Request) -> Answer {
    if let Some(told) = cloud.lock().expect("no panic").told(&asked.path) {
        return answer(to, "200 OK", "", told.as_bytes(), false);
    }
    // What is slow must not hold what others ask for.
    let mut now = {
        let mut cloud = cloud.lock().expect("no panic");
        cloud.tokens += 1;
        let of = |name: &str| asked.query.get(name).map_or("-", String::as_str);
        cloud.asked.push(format!("{} {} {} {}", asked.method, asked.path, of("prefix"), of("delimiter")));
        let (objects, cheat, asked) = (cloud.objects.clone(), cloud.cheat.clone(), Vec::new());
        Cloud { objects, cheat, tokens: cloud.tokens, asked }
    };
    let Some(name) = asked.path.strip_prefix("/cloud/").filter(|name| !name.is_empty()) else {
        return match asked.method.as_str() {
            "HEAD" if now.cheat == "no bucket" => answer(to, "404 Not Found", "", b"", true),
            "HEAD" => answer(to, "200 OK", "", b"", true),
            _ => list(&mut now, asked, to),
        };
    };
    match (asked.method.as_str(), now.cheat.as_str()) {
        ("HEAD", "no bucket") => answer(to, "404 Not Found", "", b"", true),
        ("GET" | "HEAD", _) => get(&now, name, asked, to),
        ("PUT", "puts fail") => fault(to, "404 Not Found", "NoSuchKey"),
        ("PUT", "puts are refused") => fault(to, "412 Precondition Failed", "PreconditionFailed"),
        ("PUT", "puts conflict") => fault(to, "409 Conflict", "ConditionalRequestConflict"),
        ("DELETE", "balancer") => answer(to, "404 Not Found", "", b"<html>404 Not Found</html>", false),
        ("PUT", "uploads are lost") => fault(to, "404 Not Found", "NoSuchUpload"),
        ("PUT", _) => {
            let properties = asked.headers.get("x-amz-meta-lamassu").cloned().unwrap_or_default();
            let objects = &mut cloud.lock().expect("no panic").objects;
            Arc::make_mut(objects).insert(name.into(), (asked.body.clone(), properties));
            answer(to, "200 OK", &format!("etag: \"{}\"\r\n", tag(&asked.body)), b"", false)
        }
        ("POST", "uploads are lost") => {
            let document = "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>";
            answer(to, "200 OK", "", document.as_bytes(), false)
        }
        ("DELETE", _) => {
            Arc::make_mut(&mut cloud.lock().expect("no panic").objects).remove(name);
            answer(to, "204 No Content", "", b"", true)
        }
        _ => fault(to, "501 Not Implemented", "NotImplemented"),
    }
}

/// The server's port.
fn hostile() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("a port").port();
    let cloud = Arc::new(Mutex::new(Cloud::default()));
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let cloud = cloud.clone();
            std::thread::spawn(move || {
                let Ok(mut to) = stream.try_clone() else { return };
                let mut from = BufReader::new(stream);
                while let Some(asked) = request(&mut from)
                    && serve(&cloud, &mut to, &asked).is_ok()
                {}
                let _ = to.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    port
}

const CASES: &str = r#"
def cheat(name): tell('cheat/' + name)
def does(call, **given):
    try: return call(Bucket='alice-b', **given)
    except ClientError as error: return error.response['Error']['Code']
    except Exception as error: return type(error).__name__
def listed():
    got = does(s3.list_objects_v2)
    return got if isinstance(got, str) else [(item['Key'], item['Size']) for item in got.get('Contents', [])]
def read(key, **given):
    got = does(s3.get_object, Key=key, **given)
    try: return got if isinstance(got, str) else got['Body'].read()
    except Exception as error: return type(error).__name__
impatient = boto3.client('s3', endpoint_url=URL, config=Config(
    signature_version='s3v4', read_timeout=2, retries={'max_attempts': 0}, s3={'addressing_style': 'path'}))
s3.create_bucket(Bucket='alice-b')
noise = open(os.path.expanduser('~/noise'), 'rb').read()
s3.put_object(Bucket='alice-b', Key='small', Body=noise[:5000])
s3.put_object(Bucket='alice-b', Key='dir/large', Body=noise)
good = [('dir/large', len(noise)), ('small', 5000)]
assert listed() == good, listed()
for name, means in {
    'slashes': good, 'dates': good, 'years': good, 'foreign': good, 'twice': good, 'unsorted': good, 'tags': good,
    'circle': 'InternalError', 'html': 'InternalError', 'binary': 'InternalError', 'entities': 'InternalError',
    'more': 'InternalError', 'nested': 'InternalError', 'flood': 'InternalError', 'missing': 'InternalError',
    'fault': 'SlowDown', 'nothing': 'ServiceUnavailable',
}.items():
    cheat(name)
    assert listed() == means, (name, listed())
cheat('endless')
try: assert not impatient.list_objects_v2(Bucket='alice-b')
except Exception as error: assert 'Timeout' in type(error).__name__, error
cheat('')
assert listed() == good
broken = ['longer', 'shorter', 'empty', 'cut', 'no tag', 'long tag', 'balancer', 'huge', 'beyond', 'flood', 'no properties']
later = ['zeros', 'shifted', 'shifted, and not told', 'whole', 'another tag', 'grows', 'gone later', 'changed later']
for name in broken + later:
    cheat(name)
    small, large = read('small'), read('dir/large')
    part = read('dir/large', Range='bytes=2000000-2000100')
    assert isinstance(small, str) if name in broken else small == noise[:5000], (name, small)
    assert isinstance(large, str) and isinstance(part, str), (name, large[:99], part)
    for code in [small, large, part]:
        assert isinstance(code, bytes) or code not in ['NoSuchKey', 'PreconditionFailed', 'ReadTimeoutError'], (name, code)
    cheat('')
    assert read('dir/large') == noise and read('small') == noise[:5000], name
cheat('balancer')
assert does(s3.delete_object, Key='small') == 'InternalError'
def none():
    try: return s3.list_objects_v2(Bucket='alice-none')
    except ClientError as error: return error.response['Error']['Code']
assert none() == 'NoSuchBucket'
cheat('no bucket')
assert none() == 'InternalError'
for name, means in [('puts fail', 'InternalError'), ('puts are refused', 'ServiceUnavailable'), ('puts conflict', 'SlowDown')]:
    cheat(name)
    assert does(s3.put_object, Key='new', Body=b'x') == means, name
    assert does(s3.create_multipart_upload, Key='new') == means, name
cheat('uploads are lost')
got = does(s3.put_object, Key='new', Body=bytes(20 << 20))
assert got == 'ServiceUnavailable', got
cheat('puts are refused')
def absent(request, **_): request.headers['if-none-match'] = '*'
s3.meta.events.register('before-sign.s3.PutObject', absent)
assert does(s3.put_object, Key='new', Body=b'x') == 'PreconditionFailed'
cheat('puts conflict')
assert does(s3.put_object, Key='new', Body=b'x') == 'SlowDown'
cheat('')
assert listed() == good
assert does(s3.head_object, Key='none') == '404' and read('none') == 'NoSuchKey'
"#;

/// A gateway in front of such a provider, and lines of Python to tell that one something.
fn behind_hostile(lines: &str) -> (Lab, String) {
    let (port, mut lab) = (hostile(), Lab::without_gateway(""));
    lab.write("provider.toml", "access_key = \"PROVIDER\"\nsecret_key = \"provider-secret-provider\"\n");
    lab.configure(&format!(
        "backend = \"s3://cloud/tenant\"\nprovider.endpoint = \"http://127.0.0.1:{port}\"\n\
         provider.credentials = \"provider.toml\"\n{lines}"
    ));
    lab.start();
    let tell = format!(
        "import urllib.parse\nfrom botocore.exceptions import ClientError\n\
         patient = boto3.client('s3', endpoint_url=URL, config=Config(\n    \
             read_timeout=300, retries={{'max_attempts': 0}}, s3={{'addressing_style': 'path'}}))\n\
         def tell(what):\n    url = 'http://127.0.0.1:{port}/told/' + urllib.parse.quote(what)\n    \
         return urllib.request.urlopen(url).read().decode()\n"
    );
    (lab, tell)
}

/// The gateway stays up, takes no more memory than for its own work, and answers with errors that are not its client's.
#[test]
fn a_provider_answers_what_it_likes() {
    if !crate::boto::is_there() {
        return;
    }
    let (mut lab, tell) = behind_hostile("provider.retries = 1\nprovider.timeout_seconds = 1\n");
    lab.data("noise", 3 << 20);
    lab.python(&(tell + CASES));
    let status = fs::read_to_string(format!("/proc/{}/status", lab.pid())).expect("it runs");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    let peak: u64 = peak.and_then(|peak| peak.parse().ok()).expect("a size");
    eprintln!("at most {} MiB", peak >> 10);
    assert!(peak < 192 << 10, "{peak} kB");
    assert_eq!(lab.stop("TERM"), Some(0));
    let log = lab.log();
    assert!(log.contains("it lists in a circle") && !log.contains("panicked"), "{log}");
    // A line for each of the two listings that had such names, however many those were.
    assert_eq!(log.matches("objects that are none of the vault's").count(), 2, "{log}");
}

/// Starts a gateway again, and waits until it has searched for what an earlier one has left.
fn swept(lab: &mut Lab) {
    const SEARCHED: &str = "had left of objects is removed";
    assert_eq!(lab.stop("TERM"), Some(0));
    let before = lab.log().matches(SEARCHED).count();
    lab.start();
    until("it has searched", || lab.log().matches(SEARCHED).count() > before);
}

/// Three hundred thousand parts: whoever lists uploads, or looks for those that have ended, asks for none of them.
#[test]
fn uploads_are_found_without_the_names_of_their_parts() {
    const ASKED: &str = "asked = tell('asked/').split('\\n')\nlists = [line for line in asked if line.startswith('GET /cloud ') or line.startswith('GET /cloud/ ')]\n\
        assert lists and all(line.endswith(' /') for line in lists), lists\n\
        assert not [line for line in asked if line.split()[1].split('/')[-1].isdigit()] and len(asked) < 700, len(asked)\n";
    if !crate::boto::is_there() {
        return;
    }
    let (mut lab, tell) = behind_hostile("");
    lab.python(&format!(
        "{tell}s3.create_bucket(Bucket='alice-b')\n\
         ids = {{s3.create_multipart_upload(Bucket='alice-b', Key=f'k{{n % 7}}')['UploadId'] for n in range(300)}}\n\
         tell('parts/1000')\nfound, got, more = [], {{'IsTruncated': True}}, {{}}\n\
         while got['IsTruncated']:\n    \
             got = patient.list_multipart_uploads(Bucket='alice-b', MaxUploads=200, **more)\n    \
             found += [up['UploadId'] for up in got['Uploads']]\n    \
             more = dict(KeyMarker=got.get('NextKeyMarker', ''), UploadIdMarker=got.get('NextUploadIdMarker', ''))\n\
         assert set(found) == ids and len(found) == 300, len(found)\n{ASKED}tell('cheat/')"
    ));
    swept(&mut lab);
    lab.python(&format!("{tell}{ASKED}assert tell('names/').count('/00001') == 300"));
    // With its uploads, the bucket can be removed: they end, and nothing of them is left.
    lab.python(&format!(
        "{tell}tell('parts/2')\npatient.delete_bucket(Bucket='alice-b')\n\
         assert 'lamassu.uploads' not in tell('names/'), tell('names/')"
    ));
}

#[test]
fn a_bucket_whose_uploads_cannot_be_listed_keeps_no_other_from_being_swept() {
    if !crate::boto::is_there() {
        return;
    }
    let (mut lab, tell) = behind_hostile("");
    lab.python(&format!(
        "{tell}for n in range(3):\n    s3.create_bucket(Bucket=f'alice-{{n}}')\n    \
         for _ in range(2): s3.create_multipart_upload(Bucket=f'alice-{{n}}', Key='k')\n\
         tell('parts/3')\ntell('ended/')\nassert tell('names/').count('/0000') == 18\n\
         s3.create_multipart_upload(Bucket='alice-1', Key='stays')\ntell(\"cheat/one bucket's uploads\")"
    ));
    swept(&mut lab);
    let left = lab.python(&format!("{tell}print(tell('names/').count('/0000'), tell('names/').count('/upload'))"));
    // Those of its first upload were removed before the listing was known to be wrong.
    assert_eq!(left.trim(), "3 1");
    for said in ["uploads of buckets were not searched", "but not where it was not searched"] {
        assert!(lab.log().contains(said), "{said}: {}", lab.log());
    }
    lab.python(&format!("{tell}tell('cheat/')"));
    swept(&mut lab);
    assert_eq!(lab.python(&format!("{tell}print(tell('names/').count('/0000'))")).trim(), "0");
}
