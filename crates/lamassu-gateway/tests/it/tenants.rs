//! Tenants beside one another: connections, bytes, and what is logged of one that reaches for another's.

use crate::boto;
use crate::lab::{Lab, free_port, until};
use std::io::{Read, Write};
use std::net::TcpStream;

/// Lines of Python: opens connections that ask for `PATH` again and again, until one is refused. They have `ADDRESS`.
pub const CONNECTIONS: &str = r#"
import http.client
def asked(connection):
    connection.request('GET', PATH)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers
def opened():
    connection = http.client.HTTPConnection(ADDRESS, timeout=120)
    return connection, asked(connection)
held = []
for _ in range(1200):
    connection, (status, said, headers) = opened()
    if status != 200: break
    held.append(connection)
    assert len(held) <= MOST, len(held)
assert len(held) == MOST, (len(held), status, said)
assert status == 503 and '<Code>SlowDown</Code>' in said, (status, said)
assert headers['retry-after'] == '1' and headers['connection'] == 'close', headers
assert headers['content-type'] == 'application/xml', headers
assert connection.sock is None, 'it is closed'
# Those that are there go on, and one that ends gives room to another.
assert [asked(one)[0] for one in held] == [200] * MOST
held.pop().close()
for _ in range(1200):
    connection, (status, _, _) = opened()
    if status == 200: break
    time.sleep(0.05)
assert status == 200, status
held.append(connection)
"#;

#[test]
fn connections_of_one_tenant_are_bounded() {
    if !boto::is_there() {
        return;
    }
    let metrics = free_port();
    let lab = Lab::new(&format!("metrics = \"127.0.0.1:{metrics}\"\n[tenants.alice]\nconnections_at_once = 3\n"));
    lab.python("s3.create_bucket(Bucket='alice-c')\ns3.put_object(Bucket='alice-c', Key='k', Body=b'content')");
    let head = format!("PATH, ADDRESS, MOST = {:?}, '127.0.0.1:{}', 3\n", lab.presigned("GET", "/alice-c/k"), lab.port);
    // Another tenant has its own, and may use a connection that was the first one's.
    let others = "bob = client(aws_access_key_id='BOB', aws_secret_access_key='bob-secret-bob-secret')\n\
        bob.create_bucket(Bucket='bob-c')\nbob.put_object(Bucket='bob-c', Key='k', Body=b'of bob')\n\
        ALICE, PATH = PATH, bob.generate_presigned_url('get_object', Params={'Bucket': 'bob-c', 'Key': 'k'}).split(ADDRESS)[1]\n\
        assert asked(held[0])[:2] == (200, 'of bob')\nPATH = ALICE\n\
        connection, (status, _, _) = opened()\nassert status == 200, status\n\
        assert asked(held[0])[0] == 503 and held[0].sock is None\n";
    lab.python(&(head + CONNECTIONS + others));
    let mut stream = TcpStream::connect(("127.0.0.1", metrics)).expect("connects");
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").expect("writes");
    let mut told = String::new();
    stream.read_to_string(&mut told).expect("reads");
    assert!(told.contains("lamassu_gateway_limited_total{limit=\"connections_at_once\"}"), "{told}");
}

/// By the clock of whoever measures, no more bytes pass than the rate allows, and one second's worth at the start.
/// However slow a machine is, that holds.
#[test]
fn bytes_of_one_tenant_are_bounded() {
    if !boto::is_there() {
        return;
    }
    let lab = Lab::new("[tenants.alice]\nmib_per_second = 2\n");
    lab.python(
        "from concurrent.futures import ThreadPoolExecutor\n\
         MIB, RATE = 1 << 20, 2 << 20\n\
         s3.create_bucket(Bucket='alice-m')\n\
         passed, begun = 0, time.monotonic()\n\
         def put(n): s3.put_object(Bucket='alice-m', Key=str(n), Body=bytes(MIB))\n\
         def get(n): return len(s3.get_object(Bucket='alice-m', Key=str(n))['Body'].read())\n\
         with ThreadPoolExecutor(4) as threads:\n    \
             for half in range(2):\n        \
                 list(threads.map(put, range(4)))\n        \
                 assert list(threads.map(get, range(4))) == [MIB] * 4\n        \
                 passed += 8 * MIB\n        \
                 took = time.monotonic() - begun\n        \
                 assert passed <= RATE * (1 + took), (passed, took)",
    );
}

#[test]
fn what_one_tenant_tries_with_anothers_is_logged() {
    if !boto::is_there() {
        return;
    }
    let lab = Lab::new("log_keys = true\n");
    lab.python(
        "from botocore.exceptions import ClientError\n\
         s3.create_bucket(Bucket='alice-t')\ns3.put_object(Bucket='alice-t', Key='k', Body=b'of alice')\n\
         bob = client(aws_access_key_id='BOB', aws_secret_access_key='bob-secret-bob-secret')\n\
         bob.create_bucket(Bucket='bob-t')\n\
         for call, more in [(bob.get_object, dict(Bucket='alice-t', Key='k')),\n                   \
                            (bob.put_object, dict(Bucket='alice-t', Key='k', Body=b'of bob')),\n                   \
                            (bob.list_objects_v2, dict(Bucket='alice-t')),\n                   \
                            (bob.copy_object, dict(Bucket='bob-t', Key='k', CopySource='alice-t/k')),\n                   \
                            (bob.delete_objects, dict(Bucket='alice-t', Delete={'Objects': [{'Key': 'k'}]}))]:\n    \
             try: call(**more)\n    \
             except ClientError as error: assert error.response['Error']['Code'] == 'AccessDenied', error\n    \
             else: assert False, call",
    );
    for operation in ["GetObject", "PutObject", "ListObjectsV2", "CopyObject", "DeleteObjects"] {
        let refused = format!(
            "refused: no right to the bucket user=bob tenant=\"bob\" operation=\"{operation}\" bucket=\"alice-t\""
        );
        assert!(lab.log().contains(&refused), "{operation}: {}", lab.log());
        let line = format!("operation=\"{operation}\" user=\"bob\" tenant=\"bob\"");
        until("the access log has it", || lab.log().lines().any(|it| it.contains(&line) && it.contains("status=403")));
    }
    assert!(!lab.log().contains("user=alice"), "alice was refused nothing: {}", lab.log());
}

/// Clients that ask for a listing of 6 MB and take none of it.
const TAKERS: &str = r#"
import socket, threading
HEAD = 'GET ' + PATH + ' HTTP/1.1\r\nhost: ' + URL.split('//')[1] + '\r\n\r\n'
def taker():
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.settimeout(120)
    one.connect(ADDRESS)
    one.sendall(HEAD.encode())
    return one, one.recv(12).decode()
for _ in range(1200):
    takers = [taker() for _ in range(4)]
    if [said for _, said in takers] == ['HTTP/1.1 200'] * 4: break
    # What an earlier try has begun counts until the gateway sees that it was hung up.
    for one, _ in takers: one.close()
    time.sleep(0.05)
assert [said for _, said in takers] == ['HTTP/1.1 200'] * 4, takers
"#;

/// An answer that is a document is in memory until its client takes it. So it counts as a request.
#[test]
fn answers_that_are_not_taken_are_bounded() {
    if !boto::is_there() {
        return;
    }
    let lab = Lab::new("idle_seconds = 20\n[tenants.alice]\nrequests_at_once = 4\nrequests_of_user_at_once = 4\n");
    // Each of these characters takes six bytes in a document.
    lab.python(
        "s3.create_bucket(Bucket='alice-q')\n\
         key = '/'.join(['\"' * 250] * 3) + '/' + '\"' * 200\n\
         from concurrent.futures import ThreadPoolExecutor\n\
         put = lambda at: s3.put_object(Bucket='alice-q', Key=f'{key}{at:04}')\n\
         # Fewer at once than the tenant may have: a request counts until its last thread has ended.\n\
         with ThreadPoolExecutor(2) as threads: list(threads.map(put, range(1000)))",
    );
    let head = format!("PATH, ADDRESS = {:?}, ('127.0.0.1', {})\n", lab.presigned("GET", "/alice-q"), lab.port);
    let others = "_, said = taker()\nassert said == 'HTTP/1.1 503', said\n\
        bob = client(aws_access_key_id='BOB', aws_secret_access_key='bob-secret-bob-secret')\n\
        bob.create_bucket(Bucket='bob-q')\n\
        # Who takes nothing is hung up on, and counts no more.\n\
        for _ in range(1200):\n    \
            _, said = taker()\n    \
            if said == 'HTTP/1.1 200': break\n    \
            time.sleep(0.1)\n\
        assert said == 'HTTP/1.1 200', said\n";
    lab.python(&(head + TAKERS + others));
}

/// A key can have hundreds of levels. Listings and deletions go through them on any thread, and others come between.
#[test]
fn keys_of_many_levels_are_listed_and_removed() {
    if !boto::is_there() {
        return;
    }
    let lab = Lab::new("");
    lab.python(
        "s3.create_bucket(Bucket='alice-l')\nkeys = [f'{at}/' + 'a/' * 510 + 'k' for at in range(2)]\n\
         for key in keys: s3.put_object(Bucket='alice-l', Key=key, Body=b'deep')\n\
         listed = [it['Key'] for it in s3.list_objects_v2(Bucket='alice-l')['Contents']]\n\
         assert listed == keys, listed\n\
         assert s3.get_object(Bucket='alice-l', Key=keys[1])['Body'].read() == b'deep'\n\
         begun = s3.create_multipart_upload(Bucket='alice-l', Key='2/' + 'a/' * 510 + 'k')\n\
         s3.abort_multipart_upload(Bucket='alice-l', Key=begun['Key'], UploadId=begun['UploadId'])\n\
         s3.delete_objects(Bucket='alice-l', Delete={'Objects': [{'Key': key} for key in keys]})\n\
         s3.delete_bucket(Bucket='alice-l')",
    );
}
