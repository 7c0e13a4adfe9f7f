//! What an operator does: configuration, reload, certificates, metrics, logs, the end.

use crate::boto;
use crate::lab::{Lab, free_port, has, run, text, until};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

#[test]
fn a_configuration_is_checked() {
    let lab = Lab::without_gateway("");
    let check = || lab.gateway().arg("--check-config").output().expect("it runs");
    let out = check();
    assert!(out.status.success() && text(&out).contains("is good"), "{}", text(&out));
    for (lines, said) in [
        ("colour = 1\n", "line 4"),
        ("tls_certificate = \"/none\"\ntls_key = \"/none\"\n", "/none"),
        ("credentials = \"/none\"\n", "/none"),
        ("[tenants.alcie]\nrequests_at_once = 1\n", "[tenants.alcie]"),
    ] {
        lab.configure(lines);
        let out = check();
        assert!(out.status.code() == Some(13) && text(&out).contains(said), "{lines}: {}", text(&out));
    }
    lab.configure("");
    let credentials = lab.path("credentials.toml");
    fs::set_permissions(&credentials, PermissionsExt::from_mode(0o644)).expect("chmod");
    let out = check();
    assert!(out.status.code() == Some(13) && text(&out).contains("0600"), "{}", text(&out));
    assert!(!text(&out).contains("-secret"));
    // What it prints is good.
    let print = |args: &[&str]| run(lab.lamassu().args(["gateway", "config"]).args(args));
    lab.write("gateway.toml", &print(&[]));
    lab.write("credentials.toml", &print(&["--credentials"]));
    assert!(check().status.success(), "{}", text(&check()));
}

#[test]
fn what_keeps_a_gateway_from_starting_has_its_own_code() {
    let lab = Lab::without_gateway("buckets = \"/none\"\n");
    let code = || {
        let out = lab.gateway().output().expect("it runs");
        (out.status.code(), text(&out))
    };
    let (none, said) = code();
    assert!(none == Some(3) && said.contains("/none"), "{said}");
    // What others may change decides nothing, and what is no file is not waited for.
    for (file, mode) in [("gateway.toml", 0o666), ("gateway.toml", 0o620), ("credentials.toml", 0o640)] {
        lab.configure("");
        fs::set_permissions(lab.path(file), fs::Permissions::from_mode(mode)).expect("sets");
        let (wrong, said) = code();
        assert!(wrong == Some(13) && said.contains(file) && said.contains("user"), "{file} {mode:o}: {said}");
        fs::set_permissions(lab.path(file), fs::Permissions::from_mode(0o600)).expect("sets");
    }
    run(Command::new("mkfifo").args(["-m", "600"]).arg(lab.path("pipe")));
    lab.configure("credentials = \"pipe\"\n");
    let (wrong, said) = code();
    assert!(wrong == Some(13) && said.contains("pipe"), "{said}");
    lab.write("provider.toml", "access_key = \"K\"\nsecret_key = \"secret\"\n");
    let provider =
        "backend = \"s3://b/p\"\n[provider]\nendpoint = \"https://127.0.0.1:1\"\ncredentials = \"provider.toml\"\n";
    for what in [lab.path("pipe"), "/dev/zero".into(), lab.path("")] {
        let what = what.display();
        for lines in
            [format!("tls_certificate = \"{what}\"\ntls_key = \"{what}\"\n"), format!("{provider}ca = \"{what}\"\n")]
        {
            lab.configure(&lines);
            let (wrong, said) = code();
            assert!(wrong == Some(13) && said.contains("no file"), "{lines}: {said}");
        }
    }
    lab.configure("");
    fs::copy(lab.path("vault.key"), lab.path("kept")).expect("copies");
    fs::remove_file(lab.path("vault.key")).expect("removes");
    run(lab.lamassu().args(["key", "generate"]).arg(lab.path("vault.key")));
    assert_eq!(code().0, Some(12));
    fs::copy(lab.path("kept"), lab.path("vault.key")).expect("copies");
    let taken = std::net::TcpListener::bind(("127.0.0.1", lab.port)).expect("listens");
    assert_eq!(code().0, Some(14));
    drop(taken);
    let lab = lab.started();
    let out = lab.gateway().output().expect("it runs");
    assert_eq!(out.status.code(), Some(11), "{}", text(&out));
}

/// Whatever is to be logged: what clients send is not.
#[test]
fn documents_of_clients_are_in_no_log() {
    if !boto::is_there() {
        return;
    }
    let mut lab = Lab::without_gateway("");
    let mut gateway = lab.gateway();
    gateway.env("LAMASSU_LOG", "trace");
    lab.start_as(gateway);
    lab.python("s3.create_bucket(Bucket='alice-log')");
    let path = lab.presigned("POST", "/alice-log?delete");
    let body = "<Delete><Object><Key>a-name-of-mine</Key></Object>";
    let (port, length) = (lab.port, body.len());
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
    );
    assert!(lab.ask(&[head.as_bytes(), body.as_bytes()].concat()).contains("MalformedXML"));
    until("the request is logged", || lab.log().contains("DeleteObjects"));
    let shown = |text: &str| lab.log().contains(text);
    // As a list of numbers, too: the first letters.
    assert!(!shown("a-name-of-mine") && !shown("97, 45, 110, 97"), "{}", lab.log());
}

/// An object whose properties the store has damaged is listed beside the others. It can be replaced and removed.
#[test]
fn one_damaged_object_is_in_no_others_way() {
    if !boto::is_there() {
        return;
    }
    let lab = Lab::new("");
    let store = format!("STORE = {:?}\n", lab.path("store").display().to_string());
    let done = lab.python(&(store
        + "from botocore.exceptions import ClientError\n\
           paths = lambda: {os.path.join(at, name) for at, _, names in os.walk(STORE) for name in names}\n\
           files = lambda: {path for path in paths() if not os.path.islink(path)}\n\
           s3.create_bucket(Bucket='alice-d')\n\
           def put_damaged(key):\n    \
               before = {file: os.stat(file).st_ino for file in files()}\n    \
               s3.put_object(Bucket='alice-d', Key=key, Body=b'z' * 5000, Metadata={'a': 'b'})\n    \
               new = [f for f in files() if before.get(f) != os.stat(f).st_ino]\n    \
               flipped = 0\n    \
               for file in new:\n        \
                   for name in os.listxattr(file):\n            \
                       value = os.getxattr(file, name)\n            \
                       os.setxattr(file, name, value[:-1] + bytes([value[-1] ^ 1]))\n            \
                       flipped += 1\n    \
               assert flipped\n\
           listed = lambda: [o['Key'] for o in s3.list_objects_v2(Bucket='alice-d').get('Contents', [])]\n\
           s3.put_object(Bucket='alice-d', Key='other', Body=b'other')\n\
           put_damaged('bad')\n\
           put_damaged('worse')\n\
           assert listed() == ['bad', 'other', 'worse'], listed()\n\
           conditional = client()\n\
           add = lambda params, **_: params['headers'].update({'If-Match': '\"ab\"'})\n\
           conditional.meta.events.register('before-call.s3.PutObject', add)\n\
           for call in [lambda: s3.get_object(Bucket='alice-d', Key='bad'),\n             \
                        lambda: conditional.put_object(Bucket='alice-d', Key='bad', Body=b'')]:\n    \
               try: call()\n    \
               except ClientError as error: assert error.response['ResponseMetadata']['HTTPStatusCode'] == 500, error\n    \
               else: assert False\n\
           s3.delete_object(Bucket='alice-d', Key='bad')\n\
           s3.put_object(Bucket='alice-d', Key='worse', Body=b'new')\n\
           assert listed() == ['other', 'worse'], listed()\n\
           assert s3.get_object(Bucket='alice-d', Key='worse')['Body'].read() == b'new'\n\
           print('done')"));
    assert_eq!(done.trim(), "done");
}

/// What no XML document can have would make an answer unreadable for every client.
#[test]
fn what_an_answer_cannot_say_is_refused() {
    if !boto::is_there() {
        return;
    }
    let lab = Lab::new("");
    lab.python(
        "from botocore.exceptions import ClientError\n\
         s3.create_bucket(Bucket='alice-x')\n\
         s3.put_object(Bucket='alice-x', Key='tab\\tand\\nline', Body=b'')\n\
         tags = lambda value: s3.put_object_tagging(Bucket='alice-x', Key='tab\\tand\\nline', Tagging={'TagSet': [{'Key': 'a', 'Value': value}]})\n\
         tags('b\\t')\n\
         for call, code in [(lambda: s3.put_object(Bucket='alice-x', Key='a\\x01b', Body=b''), 'InvalidArgument'),\n                            \
                            (lambda: s3.put_object(Bucket='alice-x', Key='\\ufffe', Body=b''), 'InvalidArgument'),\n                            \
                            (lambda: s3.put_object(Bucket='alice-x', Key='t', Body=b'', Tagging='a=%01'), 'InvalidTag')]:\n    \
             try: call()\n    \
             except ClientError as error: assert error.response['Error']['Code'] == code, error\n    \
             else: assert False\n\
         assert [o['Key'] for o in s3.list_objects_v2(Bucket='alice-x')['Contents']] == ['tab\\tand\\nline']",
    );
}

/// A store of some MiB, which an object does not fit into.
#[test]
fn a_full_store_is_told_apart_from_a_broken_one() {
    if !boto::is_there() || !rustix::process::geteuid().is_root() {
        return;
    }
    struct Small(PathBuf);
    impl Drop for Small {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
    let mut small = None;
    let mut lab = Lab::with_store("", |store| {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=16m", "none"]).arg(store).status();
        small = mounted.is_ok_and(|status| status.success()).then(|| Small(store.to_owned()));
    });
    if small.is_none() {
        eprintln!("NOTE: no file system can be mounted here: NOT tested");
        return;
    }
    lab.start();
    lab.python(
        "from botocore.exceptions import ClientError\ns3.create_bucket(Bucket='alice-f')\n\
         try: s3.put_object(Bucket='alice-f', Key='k', Body=os.urandom(24 << 20))\n\
         except ClientError as error:\n    \
             said = error.response['Error']['Code'], error.response['ResponseMetadata']['HTTPStatusCode']\n    \
             assert said == ('StorageFull', 507), said\n\
         else: assert False\n\
         s3.put_object(Bucket='alice-f', Key='k', Body=b'small')",
    );
    lab.stop("TERM");
}

#[test]
fn a_read_only_gateway_changes_nothing() {
    if !boto::is_there() {
        return;
    }
    let mut lab = Lab::new("");
    lab.python("s3.create_bucket(Bucket='alice-o')\ns3.put_object(Bucket='alice-o', Key='k', Body=b'kept')");
    lab.stop("TERM");
    lab.configure("read_only = true\n");
    lab.start();
    lab.python(
        "from botocore.exceptions import ClientError\nkey = {'Bucket': 'alice-o', 'Key': 'k'}\n\
         for call in [lambda: s3.put_object(**key, Body=b''), lambda: s3.delete_object(**key),\n             \
                      lambda: s3.create_multipart_upload(**key), lambda: s3.create_bucket(Bucket='alice-p'),\n             \
                      lambda: s3.put_object_tagging(**key, Tagging={'TagSet': []})]:\n    \
             try: call()\n    \
             except ClientError as error: assert error.response['Error']['Code'] == 'AccessDenied', error\n    \
             else: assert False\n\
         assert s3.get_object(**key)['Body'].read() == b'kept'",
    );
}

#[test]
fn credentials_are_read_again() {
    if !boto::is_there() {
        return;
    }
    let lab = Lab::new("");
    lab.python("s3.create_bucket(Bucket='alice-r')");
    let changed = fs::read_to_string(lab.path("credentials.toml"))
        .expect("reads")
        .replace("alice-secret-alice-secret", "another-secret-another");
    lab.write("credentials.toml", &changed);
    lab.signal("HUP");
    until("they are read", || lab.log().contains("were read again"));
    lab.python(
        "from botocore.exceptions import ClientError\ntry: s3.list_buckets()\n\
         except ClientError as error: assert error.response['Error']['Code'] == 'SignatureDoesNotMatch'\n\
         else: assert False\n\
         client(aws_access_key_id='ALICE', aws_secret_access_key='another-secret-another').head_bucket(Bucket='alice-r')",
    );
    lab.write("credentials.toml", "nonsense");
    lab.signal("HUP");
    until("they are refused", || lab.log().contains("stay in force"));
    lab.python("client(aws_access_key_id='ALICE', aws_secret_access_key='another-secret-another').list_buckets()");
}

#[test]
fn metrics_and_logs_tell_what_happens_and_no_secret() {
    if !boto::is_there() {
        return;
    }
    let metrics = free_port();
    let mut lab = Lab::new(&format!("metrics = \"127.0.0.1:{metrics}\"\n"));
    lab.python(
        "s3.create_bucket(Bucket='alice-l')\n\
         s3.put_object(Bucket='alice-l', Key='private-name', Body=b'12345', Metadata={'meta': 'private-meta'})\n\
         s3.get_object(Bucket='alice-l', Key='private-name')['Body'].read()\n\
         urllib.request.urlopen(s3.generate_presigned_url('get_object', Params={'Bucket': 'alice-l', 'Key': 'private-name'}))",
    );
    let get = |path: &str| {
        let mut stream = TcpStream::connect(("127.0.0.1", metrics)).expect("connects");
        write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").expect("writes");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("reads");
        answer
    };
    assert!(get("/health").contains("200 OK"));
    until("all are counted", || get("/metrics").contains("requests_total{operation=\"GetObject\",status=\"200\"} 2"));
    let told = get("/metrics");
    assert!(told.contains("received_bytes_total 5") && told.contains("# EOF"), "{told}");
    assert!(!told.contains("private") && !told.contains("alice"), "{told}");
    let log = lab.log();
    assert!(
        log.contains("operation=\"PutObject\" user=\"alice\" tenant=\"alice\" bucket=\"alice-l\" key=\"-\" status=200"),
        "{log}"
    );
    for secret in ["private", "-secret", "Signature", "AWS4-HMAC"] {
        assert!(!log.contains(secret), "{secret}: {log}");
    }
    lab.stop("TERM");
    lab.configure("log_keys = true\n");
    lab.start();
    lab.python("s3.head_object(Bucket='alice-l', Key='private-name')");
    until("it is logged", || lab.log().contains("key=\"private-name\""));
}

#[test]
fn what_goes_on_ends_before_the_gateway() {
    if !boto::is_there() {
        return;
    }
    let mut lab = Lab::new("");
    lab.python("s3.create_bucket(Bucket='alice-g')");
    let path = lab.presigned("PUT", "/alice-g/k");
    let mut stream = TcpStream::connect(("127.0.0.1", lab.port)).expect("connects");
    let head = format!("PUT {path} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\ncontent-length: 10\r\n\r\n", lab.port);
    stream.write_all((head + "first").as_bytes()).expect("writes");
    // Another request is answered behind it: the first is under way.
    lab.python("s3.list_buckets()");
    lab.signal("TERM");
    until("nobody is let in any more", || TcpStream::connect(("127.0.0.1", lab.port)).is_err());
    stream.write_all(b"later").expect("writes");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("reads");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(lab.ended(), Some(0));
    lab.start();
    lab.python("assert s3.get_object(Bucket='alice-g', Key='k')['Body'].read() == b'firstlater'");
}

#[test]
fn tls_and_buckets_named_as_hosts() {
    if !boto::is_there() || !has("openssl") {
        return;
    }
    let lab = Lab::without_gateway("");
    run(Command::new("openssl").current_dir(lab.dir.path()).args([
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-keyout",
        "tls.key",
        "-out",
        "tls.crt",
        "-days",
        "2",
        "-subj",
        "/CN=s3.test",
        "-addext",
        "subjectAltName=DNS:s3.test,DNS:*.s3.test",
    ]));
    fs::set_permissions(lab.path("tls.key"), PermissionsExt::from_mode(0o600)).expect("chmod");
    let dir = lab.dir.path().display().to_string();
    lab.configure(&format!(
        "tls_certificate = \"{dir}/tls.crt\"\ntls_key = \"{dir}/tls.key\"\ndomains = [\"s3.test\"]\n"
    ));
    let lab = lab.started();
    assert!(!lab.ask(b"GET / HTTP/1.1\r\nhost: s3.test\r\n\r\n").contains(" 200 "));
    let port = lab.port;
    lab.python(&format!(
        "import socket\nfind = socket.getaddrinfo\n\
         socket.getaddrinfo = lambda host, *more, **named: find('127.0.0.1', *more, **named)\n\
         for style in ['virtual', 'path']:\n    \
             tls = client('https://s3.test:{port}', style=style, verify='{dir}/tls.crt')\n    \
             tls.create_bucket(Bucket='alice-' + style)\n    \
             tls.put_object(Bucket='alice-' + style, Key='a/b', Body=b'x' * 3000000)\n    \
             assert tls.get_object(Bucket='alice-' + style, Key='a/b')['Body'].read() == b'x' * 3000000\n    \
             assert [item['Key'] for item in tls.list_objects_v2(Bucket='alice-' + style)['Contents']] == ['a/b']\n\
         assert len(tls.list_buckets()['Buckets']) == 2\n\
         import hashlib, base64, io\n\
         sent, body = [], os.urandom(3000000)\n\
         tls.meta.events.register('before-send.s3', lambda request, **_: sent.append(request.headers))\n\
         put = tls.put_object(Bucket='alice-path', Key='t', Body=io.BytesIO(body), ChecksumAlgorithm='SHA256')\n\
         kind = sent[-1]['X-Amz-Content-SHA256']\n\
         assert kind in ('STREAMING-UNSIGNED-PAYLOAD-TRAILER', b'STREAMING-UNSIGNED-PAYLOAD-TRAILER'), kind\n\
         assert put['ChecksumSHA256'] == base64.b64encode(hashlib.sha256(body).digest()).decode()\n\
         got = tls.get_object(Bucket='alice-path', Key='t', ChecksumMode='ENABLED')\n\
         assert got['Body'].read() == body and got['ChecksumSHA256'] == put['ChecksumSHA256']"
    ));
}

/// Whatever lies where the certificate was: reading it again changes nothing, and the gateway takes other signals.
#[test]
fn what_is_no_certificate_is_not_waited_for() {
    let mut lab = Lab::without_gateway("");
    let key = rcgen::KeyPair::generate().expect("a key");
    let params = rcgen::CertificateParams::new(vec!["s3.test".to_owned()]).expect("a name");
    lab.write("tls.crt", &params.self_signed(&key).expect("a certificate").pem());
    lab.write("tls.key", &key.serialize_pem());
    let dir = lab.dir.path().display().to_string();
    lab.configure(&format!("tls_certificate = \"{dir}/tls.crt\"\ntls_key = \"{dir}/tls.key\"\n"));
    lab.start();
    fs::remove_file(lab.path("tls.crt")).expect("removes");
    run(Command::new("mkfifo").arg(lab.path("tls.crt")));
    lab.signal("HUP");
    until("it says so", || lab.log().contains("certificate are not taken") && lab.log().contains("no file"));
    assert_eq!(lab.stop("TERM"), Some(0));
}
