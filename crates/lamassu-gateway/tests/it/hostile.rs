//! A provider that answers what it likes: a small server of S3 of the test's own, behind a real gateway. What it cheats
//! with is chosen by a request to it, so that one gateway goes through all of it.

use crate::lab::{Lab, noise};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Objects, each with its sealed properties, and what is cheated with.
#[derive(Default)]
struct Cloud {
    objects: BTreeMap<String, (Vec<u8>, String)>,
    cheat: String,
    tokens: u64,
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
    let mut entries: Vec<(String, String)> = cloud
        .objects
        .iter()
        .filter(|(name, _)| name.starts_with(&prefix))
        .map(|(name, (content, _))| (name.clone(), tag(content)))
        .collect();
    let (mut next, mut date, mut more) = (None, "2026-01-02T03:04:05.000Z", String::new());
    match cheat.as_str() {
        "slashes" => entries.push((prefix.clone() + &"/".repeat(1_000_000), "t".into())),
        "circle" => next = Some("again".to_owned()),
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
    if let Some(cheat) = asked.path.strip_prefix("/cheat/") {
        cloud.lock().expect("no panic").cheat = cheat.into();
        return answer(to, "200 OK", "", b"", false);
    }
    // What is slow must not hold what others ask for.
    let mut now = {
        let mut cloud = cloud.lock().expect("no panic");
        cloud.tokens += 1;
        Cloud { objects: cloud.objects.clone(), cheat: cloud.cheat.clone(), tokens: cloud.tokens }
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
            cloud.lock().expect("no panic").objects.insert(name.into(), (asked.body.clone(), properties));
            answer(to, "200 OK", &format!("etag: \"{}\"\r\n", tag(&asked.body)), b"", false)
        }
        ("POST", "uploads are lost") => {
            let document = "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>";
            answer(to, "200 OK", "", document.as_bytes(), false)
        }
        ("DELETE", _) => {
            cloud.lock().expect("no panic").objects.remove(name);
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
provider = os.environ['PROVIDER_URL']
def cheat(name): urllib.request.urlopen(provider + '/cheat/' + urllib.parse.quote(name)).read()
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

/// The gateway stays up, takes no more memory than for its own work, and answers with errors that are not its client's.
#[test]
fn a_provider_answers_what_it_likes() {
    if !crate::boto::is_there() {
        return;
    }
    let (port, mut lab) = (hostile(), Lab::without_gateway(""));
    lab.write("provider.toml", "access_key = \"PROVIDER\"\nsecret_key = \"provider-secret-provider\"\n");
    lab.configure(&format!(
        "backend = \"s3://cloud/tenant\"\nprovider.endpoint = \"http://127.0.0.1:{port}\"\n\
         provider.credentials = \"provider.toml\"\nprovider.retries = 1\nprovider.timeout_seconds = 1\n"
    ));
    lab.start();
    lab.data("noise", 3 << 20);
    let head = format!("import os\nos.environ['PROVIDER_URL'] = 'http://127.0.0.1:{port}'\n");
    let import = "import urllib.parse\nfrom botocore.exceptions import ClientError\n";
    lab.python(&(head + import + CASES));
    let status = fs::read_to_string(format!("/proc/{}/status", lab.pid())).expect("it runs");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    let peak: u64 = peak.and_then(|peak| peak.parse().ok()).expect("a size");
    eprintln!("at most {} MiB", peak >> 10);
    assert!(peak < 192 << 10, "{peak} kB");
    assert_eq!(lab.stop("TERM"), Some(0));
    let log = lab.log();
    assert!(log.contains("it lists in a circle") && !log.contains("panicked"), "{log}");
}
