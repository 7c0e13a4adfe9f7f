//! What strangers and tenants try: slowness, size, numbers, signatures that are stripped.

use crate::boto;
use crate::lab::{Lab, PATIENCE, until};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

fn connect(lab: &Lab) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", lab.port)).expect("connects");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// What comes until the gateway closes the connection, which it has to do by itself.
fn rest(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "it is not closed"),
    }
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn who_says_nothing_is_not_waited_for() {
    let lab = Lab::new("idle_seconds = 1\n");
    let silent = connect(&lab);
    let mut slow = connect(&lab);
    slow.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nx-a").expect("writes");
    assert!(!rest(slow).contains(" 200 "));
    assert!(!rest(silent).contains(" 200 "));
    if !boto::is_there() {
        return;
    }
    lab.python("s3.create_bucket(Bucket='alice-slow')");
    let path = lab.presigned("PUT", "/alice-slow/k");
    let mut stalls = connect(&lab);
    let head = format!("PUT {path} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\ncontent-length: 1000\r\n\r\n", lab.port);
    stalls.write_all(head.as_bytes()).expect("writes");
    stalls.write_all(b"ten bytes.").expect("writes");
    let answer = rest(stalls);
    assert!(answer.contains("RequestTimeout"), "{answer}");
    // Cut off in the middle.
    let mut cut = connect(&lab);
    cut.write_all(head.as_bytes()).expect("writes");
    cut.write_all(&[b'x'; 500]).expect("writes");
    drop(cut);
    until("it is logged", || lab.log().matches("operation=\"PutObject\"").count() >= 2);
    lab.python(
        "assert 'Contents' not in s3.list_objects_v2(Bucket='alice-slow')\ns3.delete_bucket(Bucket='alice-slow')",
    );
}

#[test]
fn requests_that_are_refused_keep_no_connection() {
    let lab = Lab::new("idle_seconds = 2\n");
    let mut stream = connect(&lab);
    let begun = Instant::now();
    let mut answers = 0;
    loop {
        stream.write_all(b"GET /b/k HTTP/1.1\r\nhost: x\r\n\r\n").expect("writes");
        let mut some = [0; 4096];
        let len = stream.read(&mut some).expect("an answer");
        let answer = String::from_utf8_lossy(&some[..len]).to_ascii_lowercase();
        assert!(answer.starts_with("http/1.1 403"), "{answer}");
        answers += 1;
        if answer.contains("connection: close") {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "it is never closed");
        std::thread::sleep(Duration::from_millis(300));
    }
    assert!(answers > 1, "the first was closed already");
    assert_eq!(rest(stream), "");
}

#[test]
fn who_asks_first_and_is_answered_at_once_comes_back_by_another_connection() {
    if !boto::is_there() {
        return;
    }
    let lab = Lab::new("");
    lab.python("s3.create_bucket(Bucket='alice-ask')");
    let path = lab.presigned("PUT", "/alice-ask/empty");
    let ask = |path: &str, length: u32| {
        let head = format!("PUT {path} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\nexpect: 100-continue\r\n", lab.port);
        let mut stream = connect(&lab);
        stream.write_all(format!("{head}content-length: {length}\r\n\r\n").as_bytes()).expect("writes");
        rest(stream).to_ascii_lowercase()
    };
    let answer = ask(&path, 0);
    assert!(answer.starts_with("http/1.1 200") && answer.contains("connection: close"), "{answer}");
    let answer = ask("/alice-ask/unsigned", 10);
    assert!(answer.starts_with("http/1.1 403") && answer.contains("connection: close"), "{answer}");
}

#[test]
fn what_is_too_large_is_refused() {
    let lab = Lab::new("object_gib_max = 1\n");
    let large = format!("GET / HTTP/1.1\r\nhost: x\r\nx-large: {}\r\n\r\n", "y".repeat(200_000));
    assert!(lab.ask(large.as_bytes()).contains(" 431 "));
    let many: String = (0..200).map(|n| format!("x-{n}: y\r\n")).collect();
    assert!(lab.ask(format!("GET / HTTP/1.1\r\nhost: x\r\n{many}\r\n").as_bytes()).contains(" 431 "));
    if !boto::is_there() {
        return;
    }
    lab.python("s3.create_bucket(Bucket='alice-big')\ns3.put_object(Bucket='alice-big', Key='k', Body=b'kept')");
    let ask = |method: &str, path: &str, body: &[u8], length: usize| {
        let path = lab.presigned(method, path);
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n",
            lab.port
        );
        lab.ask(&[head.as_bytes(), body].concat())
    };
    assert!(ask("PUT", "/alice-big/k", b"", (1 << 30) + 1).contains("EntityTooLarge"));
    // Documents: of more than 4 MiB, and one whose entities would be of gigabytes.
    let document = format!("<Delete>{}</Delete>", "<Object><Key>k</Key></Object>".repeat(200_000));
    // None of it needs to come.
    for body in [document.as_bytes(), b""] {
        let answer = ask("POST", "/alice-big?delete", body, document.len());
        assert!(answer.contains(" 400 ") && answer.contains("MaxMessageLengthExceeded"), "{answer}");
    }
    // Keys that no object has would come back, each of them several times as long.
    let long = format!("<Delete><Object><Key>{}</Key></Object></Delete>", "'".repeat(1025));
    let answer = ask("POST", "/alice-big?delete", long.as_bytes(), long.len());
    assert!(answer.contains(" 400 ") && answer.contains("KeyTooLongError") && answer.len() < 2000, "{answer}");
    // Many small elements cost much to parse, and take much memory.
    for document in ["<Object/>".repeat(1001), "<x/>".repeat(20_000)] {
        let document = format!("<Delete>{document}</Delete>");
        let answer = ask("POST", "/alice-big?delete", document.as_bytes(), document.len());
        assert!(answer.contains(" 400 ") && answer.contains("MalformedXML") && answer.contains("1000"), "{answer}");
    }
    let path = lab.presigned("POST", "/alice-big?delete");
    let head = format!("POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\nconnection: close\r\n", lab.port);
    let answer = lab.ask((head + "transfer-encoding: chunked\r\n\r\n").as_bytes());
    assert!(answer.contains(" 411 ") && answer.contains("MissingContentLength"), "{answer}");
    let bomb = "<!DOCTYPE d [<!ENTITY a \"aaaaaaaaaa\"><!ENTITY b \"&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;\">\
        <!ENTITY c \"&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;\">]><Delete><Object><Key>&c;</Key></Object></Delete>";
    let answer = ask("POST", "/alice-big?delete", bomb.as_bytes(), bomb.len());
    assert!(!answer.contains("aaaaaaaaaa"), "{answer}");
    // What a body is said to be encoded as is kept, not decoded.
    lab.python(
        "import gzip\nbody = gzip.compress(bytes(10 << 20))\n\
         s3.put_object(Bucket='alice-big', Key='z', Body=body, ContentEncoding='gzip')\n\
         head = s3.head_object(Bucket='alice-big', Key='z')\n\
         assert head['ContentLength'] == len(body) and head['ContentEncoding'] == 'gzip'\n\
         assert s3.get_object(Bucket='alice-big', Key='k')['Body'].read() == b'kept'",
    );
}

#[test]
fn connections_of_one_address_are_bounded() {
    let lab = Lab::new("connections_of_address_max = 3\n");
    // The start of the gateway was seen by a connection, too.
    let mut held: Vec<TcpStream> = Vec::new();
    let answers = |stream: &mut TcpStream| {
        let asked = stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n");
        let mut byte = [0];
        asked.is_ok() && matches!(stream.read(&mut byte), Ok(1))
    };
    until("three are served", || {
        let mut stream = connect(&lab);
        if answers(&mut stream) {
            held.push(stream);
        }
        held.len() == 3
    });
    assert!(!answers(&mut connect(&lab)));
    held.pop();
    until("another one is served", || answers(&mut connect(&lab)));
}

#[test]
fn who_has_not_signed_is_refused() {
    let lab = Lab::new("");
    for request in [
        "GET / HTTP/1.1\r\nhost: x\r\n",
        "GET /alice-x/k HTTP/1.1\r\nhost: x\r\n",
        "PUT /alice-x/k HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n",
        "DELETE /alice-x HTTP/1.1\r\nhost: x\r\n",
        "POST /alice-x?delete HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n",
        "POST /alice-x HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\ncontent-length: 0\r\n",
        "GET /alice-x/k?AWSAccessKeyId=ALICE&Expires=9999999999&Signature=x HTTP/1.1\r\nhost: x\r\n",
        "GET /alice-x/k HTTP/1.1\r\nhost: x\r\nauthorization: AWS ALICE:x\r\ndate: Fri, 01 Jan 2027 00:00:00 GMT\r\n",
        "GET /alice-x/k HTTP/1.1\r\nhost: x\r\nauthorization: AWS4-HMAC-SHA256 nonsense\r\n",
        "POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-www-form-urlencoded\r\ncontent-length: 0\r\n",
        "GET /%ff HTTP/1.1\r\nhost: x\r\n",
    ] {
        let answer = lab.ask(format!("{request}connection: close\r\n\r\n").as_bytes());
        assert!(answer.starts_with("HTTP/1.1 4") || answer.starts_with("HTTP/1.1 501"), "{request}: {answer}");
    }
    assert!(!lab.log().contains("panick"));
}

#[test]
fn one_tenant_has_its_limits_and_another_its_own() {
    if !boto::is_there() {
        return;
    }
    let lab = Lab::new("[tenants.alice]\nrequests_per_second = 20\n");
    lab.python(
        "from botocore.exceptions import ClientError\n\
         bob = client(aws_access_key_id='BOB', aws_secret_access_key='bob-secret-bob-secret')\n\
         bob.create_bucket(Bucket='bob-b')\nslow = 0\nfor n in range(200):\n    \
             try: s3.list_buckets()\n    \
             except ClientError as error:\n        \
                 assert error.response['Error']['Code'] == 'SlowDown', error\n        \
                 slow += 1\n    \
             if n % 20 == 0: bob.head_bucket(Bucket='bob-b')\n\
         assert slow > 0\ntime.sleep(1)\ns3.list_buckets()",
    );
}

/// Sends byte after byte until an answer comes or the connection is closed, which the gateway has to do by itself.
fn drips(mut stream: TcpStream) -> String {
    let begun = std::time::Instant::now();
    stream.set_read_timeout(Some(std::time::Duration::from_millis(100))).expect("a time-out");
    let mut answer = Vec::new();
    loop {
        assert!(begun.elapsed() < PATIENCE, "who drips is waited for");
        // The gateway may have closed it.
        let _ = stream.write_all(b"x");
        let mut bytes = [0; 4096];
        match stream.read(&mut bytes) {
            Ok(0) => break,
            Ok(len) => answer.extend_from_slice(&bytes[..len]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn who_sends_a_byte_now_and_then_is_not_waited_for() {
    let lab = Lab::new("idle_seconds = 1\n");
    let mut head = connect(&lab);
    head.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nx-a: ").expect("writes");
    assert!(!drips(head).contains(" 200 "));
    // The head of a later request on a connection.
    let mut later = connect(&lab);
    later.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nx-a: ").expect("writes");
    assert_eq!(drips(later).matches("HTTP/1.1 ").count(), 1);
    if !boto::is_there() {
        return;
    }
    lab.python("s3.create_bucket(Bucket='alice-drip')\ns3.put_object(Bucket='alice-drip', Key='k', Body=b'kept')");
    for (method, path, said) in
        [("PUT", "/alice-drip/k", "RequestTimeout"), ("POST", "/alice-drip?delete", "HTTP/1.1 400")]
    {
        let signed = lab.presigned(method, path);
        let mut body = connect(&lab);
        let head = format!("{method} {signed} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\ncontent-length: 1000000\r\n", lab.port);
        body.write_all((head + "connection: close\r\n\r\n").as_bytes()).expect("writes");
        let answer = drips(body);
        assert!(answer.contains(said), "{path}: {answer}");
    }
    // Who takes an answer in drops.
    lab.python(&format!(
        "import socket\ns3.put_object(Bucket='alice-drip', Key='large', Body=bytes(64 << 20))\n\
         path = s3.generate_presigned_url('get_object', Params={{'Bucket': 'alice-drip', 'Key': 'large'}}).split(URL)[1]\n\
         slow = socket.socket()\nslow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)\n\
         slow.connect(('127.0.0.1', {}))\n\
         slow.sendall(f'GET {{path}} HTTP/1.1\\r\\nhost: 127.0.0.1:{}\\r\\n\\r\\n'.encode())\n\
         import re\n\
         told = lambda: re.search('operation=\"GetObject\".* sent=([0-9]+)', open(os.path.expanduser('~/log')).read())\n\
         for _ in range(6000):\n    \
             slow.recv(256)\n    \
             if told(): break\n    \
             time.sleep(0.02)\n\
         assert told() and int(told().group(1)) < 64 << 20, told()\n\
         assert s3.get_object(Bucket='alice-drip', Key='k')['Body'].read() == b'kept'",
        lab.port, lab.port
    ));
}
