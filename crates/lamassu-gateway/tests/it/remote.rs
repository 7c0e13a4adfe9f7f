//! A gateway in front of a provider's S3: what clients see, and what the provider does.

use crate::boto;
use crate::clients;
use crate::lab::{Lab, PATIENCE, has, noise, run, text, until};
use crate::providers::{self, Kind, kinds};
use std::fs;
use std::process::Command;

fn checked(names: &[&str], kinds: impl IntoIterator<Item = Kind>) {
    for kind in kinds.into_iter().filter(|kind| kind.is_there()) {
        let lab = Lab::remote(kind, "");
        for name in names {
            boto::check(&lab, name);
        }
    }
}

#[test]
fn objects_are_what_was_put() {
    checked(&["objects"], kinds(Kind::Moto));
    // s3s-fs has no objects `a` and `a/b` at once.
    checked(&["remote_keys"], [Kind::Moto]);
}

#[test]
#[ignore = "make torture runs it: the same as in front of a vault's files"]
fn lists_are_those_of_a_model() {
    checked(&["lists_briefly", "markers"], [Kind::S3sFs]);
    checked(&["markers"], [Kind::Moto]);
}

/// Kept listings are shared. A reader displaces another user's, and asks for what is behind a group that has all keys.
#[test]
fn a_token_that_is_made_up_cuts_no_other_listing_short() {
    for kind in kinds(Kind::S3sFs) {
        Lab::remote(kind, "").python(
            "from botocore.exceptions import ClientError\n\
             reader = client(aws_access_key_id='READER', aws_secret_access_key='reader-secret-reader')\n\
             B = 'alice-b'\ns3.create_bucket(Bucket=B)\n\
             for key in ['k1', 'k2', 'k3']: s3.put_object(Bucket=B, Key=key, Body=b'x')\n\
             got = s3.list_objects_v2(Bucket=B, MaxKeys=1)\n\
             found = [item['Key'] for item in got['Contents']]\n\
             for n in range(64): reader.list_objects_v2(Bucket=B, Prefix=f'other-{n}')\n\
             try:\n    reader.list_objects_v2(Bucket=B, ContinuationToken='Zw')\n    code = 'none'\n\
             except ClientError as error: code = error.response['Error']['Code']\n\
             while got['IsTruncated']:\n    \
                 got = s3.list_objects_v2(Bucket=B, MaxKeys=1, ContinuationToken=got['NextContinuationToken'])\n    \
                 found += [item['Key'] for item in got.get('Contents', [])]\n\
             assert (found, code) == (['k1', 'k2', 'k3'], 'InvalidArgument'), (found, code)",
        );
    }
}

#[test]
fn objects_are_made_of_parts() {
    checked(&["parts::multipart", "parts::large_parts"], kinds(Kind::S3sFs));
}

#[test]
fn copies_and_conditional_writes() {
    checked(&["copies"], kinds(Kind::Moto));
}

#[test]
fn checksums_and_rights() {
    checked(&["checksums", "presigned", "tenants", "unsupported"], [Kind::S3sFs]);
}

/// By moto alone: s3s-fs takes no names as long as the sealed ones of their trees.
fn by(program: &str, run: fn(&Lab)) {
    if Kind::Moto.is_there() && has(program) {
        run(&Lab::remote(Kind::Moto, ""));
    }
}

#[test]
fn aws_cli() {
    by("aws", clients::by_aws_cli);
}

#[test]
#[ignore = "make torture runs it: the same as in front of a vault's files"]
fn rclone() {
    by("rclone", clients::by_rclone);
}

#[test]
#[ignore = "make torture runs it: the same as in front of a vault's files"]
fn s3cmd() {
    by("s3cmd", clients::by_s3cmd);
}

#[test]
#[ignore = "make torture runs it: the same as in front of a vault's files"]
fn restic() {
    by("restic", clients::by_restic);
}

/// What is sealed is format v1: downloaded by an ordinary client, it opens with the key and the header, which lies
/// there too; and the provider sees no name and no content, and that blocks are equal.
#[test]
fn the_provider_has_ciphertext_in_format_v1() {
    for kind in kinds(Kind::S3sFs) {
        let lab = Lab::remote(kind, "");
        lab.data("noise", 3 << 20);
        lab.python(
            "data = open(os.path.expanduser('~/noise'), 'rb').read()\n\
             s3.create_bucket(Bucket='alice-secret')\n\
             meta = dict(Metadata={'colour': 'ultramarine'}, ContentType='text/ultramarine')\n\
             s3.put_object(Bucket='alice-secret', Key='folder/whole', Body=data, **meta)\n\
             s3.put_object(Bucket='alice-secret', Key='folder/again', Body=data)\n\
             s3.put_object(Bucket='alice-secret', Key='diminutive', Body=b'a plain text that shows')\n\
             for n in range(3): s3.put_object(Bucket='alice-secret', Key=f'folder/{n}', Body=b'')",
        );
        let out = lab.at_provider(
            "import hashlib\n\
             data = open(os.path.expanduser('~/noise'), 'rb').read()\n\
             # Words so long that ciphertext does not have them by chance.\n\
             shown = [b'alice-secret', b'folder', b'whole', b'again', b'diminutive', b'a plain text', b'ultramarine', data[:64]]\n\
             large = {}\n\
             for name in names():\n    \
                 got = s3.get_object(Bucket='cloud', Key=name)\n    \
                 stored = got['Body'].read()\n    \
                 seen = name.encode() + repr(got).encode() + stored\n    \
                 assert name.startswith('tenant/') and not [word for word in shown if word in seen], name\n    \
                 if len(stored) > len(data): large[name] = stored\n    \
                 pathlib.Path.home().joinpath('down-' + name.split('/')[-1]).write_bytes(stored)\n\
             blocks = [{hashlib.sha256(s[at:at + 4096]).digest() for at in range(0, len(s), 4096)} for s in large.values()]\n\
             print(len(blocks), len(blocks[0]), len(blocks[0] & blocks[1]))\n\
             print(*[name.split('/')[-1] for name in large])",
        );
        let mut lines = out.lines();
        // 768 blocks of data and 7 pages.
        assert_eq!(lines.next(), Some("2 775 768"));
        for name in lines.next().expect("names").split(' ') {
            let mut cat = lab.lamassu();
            cat.args(["cat", "--key"]).arg(format!("raw:file:{}", lab.path("vault.key").display()));
            cat.arg("--header").arg(lab.path("down-lamassu.vault")).arg(lab.path(&format!("down-{name}")));
            let out = cat.output().expect("it runs");
            assert!(out.stdout == noise(3 << 20), "{kind:?}: {}", String::from_utf8_lossy(&out.stderr));
        }
    }
}

/// A provider that changes, cuts, or exchanges objects is found out; one that puts an older state back is not.
#[test]
fn a_provider_that_cheats_is_found_out() {
    const CHEATS: &str = r#"
gateway = boto3.client('s3', endpoint_url=os.environ['GATEWAY_URL'], region_name='us-east-1',
    config=Config(retries={'max_attempts': 0}, s3={'addressing_style': 'path'}))
def put(name, data, meta): s3.put_object(Bucket='cloud', Key=name, Body=data, Metadata=meta)
def get(name):
    got = s3.get_object(Bucket='cloud', Key=name)
    return got['Body'].read(), got['Metadata']
def read(key):
    try: return gateway.get_object(Bucket='alice-b', Key=key)['Body'].read()
    except Exception as error: return type(error).__name__
gateway.create_bucket(Bucket='alice-b')
gateway.put_object(Bucket='alice-b', Key='a', Body=b'1' * 500000)
[one] = objects()
older = get(one)
gateway.put_object(Bucket='alice-b', Key='a', Body=b'2' * 500000)
gateway.put_object(Bucket='alice-b', Key='b', Body=b'b' * 500000)
[other] = [name for name in objects() if name != one]
(data, meta), (other_data, other_meta) = get(one), get(other)
for what, cheat in [
    ('a byte', (data[:9000] + bytes([data[9000] ^ 1]) + data[9001:], meta)),
    ('a page', (data[:100] + bytes([data[100] ^ 1]) + data[101:], meta)),
    ('cut', (data[:-8192], meta)),
    ('another object', (other_data, other_meta)),
    ('content of another', (other_data, meta)),
    ('older content', (older[0], meta)),
    ('blocks of an older state', (data[:4096] + older[0][4096:], meta)),
    ('no properties', (data, {})),
    ('nothing', (b'', meta)),
]:
    put(one, *cheat)
    found = read('a')
    assert isinstance(found, str), what
    assert read('b') == b'b' * 500000
    put(one, data, meta)
    assert read('a') == b'2' * 500000, what
put(one, *older)
assert read('a') == b'1' * 500000, 'not found out, as the threat model says'
s3.delete_object(Bucket='cloud', Key=one)
assert read('a') == 'NoSuchKey'
"#;
    for kind in kinds(Kind::Moto) {
        Lab::remote(kind, "").at_provider(CHEATS);
    }
}

/// Up and down: in parts, at once.
const THERE_AND_BACK: &str = "s3.create_bucket(Bucket='alice-b')\n\
    noise = os.path.expanduser('~/noise')\n\
    s3.upload_file(noise, 'alice-b', 'large')\n\
    s3.put_object(Bucket='alice-b', Key='at-once', Body=open(noise, 'rb'))\n\
    for key in ['large', 'at-once']:\n    \
        assert s3.get_object(Bucket='alice-b', Key=key)['Body'].read() == open(noise, 'rb').read()";

/// Connections that are cut in the middle of requests and of answers: clients notice nothing.
#[test]
#[ignore = "takes half a minute; make torture runs it"]
fn connections_that_are_cut_are_made_again() {
    let kind = Kind::S3sFs;
    if !kind.is_there() {
        return;
    }
    let mut lab = Lab::remote_without_gateway(kind, "provider.retries = 12\n");
    let provider = lab.cloud().port;
    let between = providers::cutting(provider, 20);
    let configured = fs::read_to_string(lab.path("gateway.toml")).expect("its configuration");
    lab.write("gateway.toml", &configured.replace(&provider.to_string(), &between.to_string()));
    lab.start();
    lab.data("noise", 30 << 20);
    lab.python(THERE_AND_BACK);
    assert!(lab.log().contains("repeated"), "{}", lab.log());
}

/// Copies, changes of tags and removals of buckets beside puts: an object is always one of those that were put. moto
/// does not compare the tag of a copy's source.
#[test]
fn copies_beside_puts_are_of_one_state() {
    if !Kind::Moto.is_there() {
        return;
    }
    let lab = Lab::remote(Kind::Moto, "");
    lab.python(
        "import random\nfrom concurrent.futures import ThreadPoolExecutor\nfrom botocore.exceptions import ClientError\n\
         pool, B = ThreadPoolExecutor(16), 'alice-b'\nbodies = [bytes([n]) * 200000 for n in range(4)]\n\
         def does(call, **given):\n    \
             try: return call(**given)\n    \
             except ClientError as error: return error.response['Error']['Code']\n\
         s3.create_bucket(Bucket=B)\n\
         for n in range(6):\n    \
             s3.put_object(Bucket=B, Key='from', Body=bodies[0])\n    \
             calls = [(s3.put_object, dict(Key='from', Body=body)) for body in bodies]\n    \
             calls += [(s3.put_object_tagging, dict(Key='from', Tagging={'TagSet': [{'Key': 'n', 'Value': str(t)}]})) for t in range(4)]\n    \
             calls += [(s3.copy_object, dict(Key='to', CopySource=B + '/from'))] * 4\n    \
             random.shuffle(calls)\n    \
             for done in [pool.submit(does, call, Bucket=B, **given) for call, given in calls]: done.result()\n    \
             for key in ['from', 'to']: assert s3.get_object(Bucket=B, Key=key)['Body'].read() in bodies, (n, key)\n\
         for n in range(6):\n    \
             bucket = f'alice-{n}'\n    s3.create_bucket(Bucket=bucket)\n    \
             put = pool.submit(does, s3.put_object, Bucket=bucket, Key='k', Body=bytes(6 << 20))\n    \
             time.sleep(random.random() / 4)\n    \
             gone, put = does(s3.delete_bucket, Bucket=bucket), put.result()\n    \
             assert isinstance(gone, str) != isinstance(put, str), (gone, put)\n",
    );
}

/// The provider takes its time for the removal of a tenant's bucket. The name of another's bucket was chosen so that
/// both have the same place in a table of 256, by the hash that everybody can compute.
#[test]
fn a_removal_that_takes_long_is_in_no_other_buckets_way() {
    use std::hash::{DefaultHasher, Hash, Hasher};
    if !Kind::Moto.is_there() {
        return;
    }
    let place = |name: &str| {
        let mut hash = DefaultHasher::new();
        name.hash(&mut hash);
        hash.finish() % 256
    };
    let of_bob = (0..).map(|n| format!("bob-{n}")).find(|name| place(name) == place("alice-b")).expect("many");
    let mut lab = Lab::remote_without_gateway(Kind::Moto, "");
    let provider = lab.cloud().port;
    let (between, held, go) = providers::holding(provider, "DELETE ", "lamassu.bucket");
    let configured = fs::read_to_string(lab.path("gateway.toml")).expect("its configuration");
    lab.write("gateway.toml", &configured.replace(&provider.to_string(), &between.to_string()));
    lab.start();
    let bob = format!(
        "bob = client(aws_access_key_id='BOB', aws_secret_access_key='bob-secret-bob-secret')\nbucket = '{of_bob}'\n"
    );
    lab.python(&format!("{bob}s3.create_bucket(Bucket='alice-b')\nbob.create_bucket(Bucket=bucket)"));
    let lines = "import boto3, os\nfrom botocore.client import Config\n\
        s3 = boto3.client('s3', endpoint_url=os.environ['GATEWAY_URL'], config=Config(retries={'max_attempts': 0}))\n\
        s3.delete_bucket(Bucket='alice-b')";
    let mut removing = lab.client("/usr/bin/python3").arg("-c").arg(lines).spawn().expect("it starts");
    held.recv_timeout(PATIENCE).expect("the removal comes to the provider");
    lab.python(&format!(
        "{bob}bob.put_object(Bucket=bucket, Key='k', Body=b'x')\nid = bob.create_multipart_upload(Bucket=bucket, Key='k')"
    ));
    drop(go);
    assert!(removing.wait().expect("a child").success());
    let gone = "try: s3.head_bucket(Bucket='alice-b')\nexcept Exception as error: print(error)";
    assert!(lab.python(gone).contains("404"));
}

/// A provider that is restarted while objects are put and read: the client notices nothing.
#[test]
fn a_provider_that_is_restarted_is_waited_for() {
    if !Kind::S3sFs.is_there() {
        return;
    }
    let mut lab = Lab::remote(Kind::S3sFs, "provider.retries = 12\n");
    lab.data("noise", 30 << 20);
    // What s3s-fs knows of uploads in parts goes with its process: those are not begun while it ends.
    lab.python("s3.create_bucket(Bucket='alice-b')\ns3.upload_file(os.path.expanduser('~/noise'), 'alice-b', 'large')");
    let lines = "import boto3, os\nfrom botocore.client import Config\n\
        s3 = boto3.client('s3', endpoint_url=os.environ['GATEWAY_URL'], config=Config(retries={'max_attempts': 0}))\n\
        noise = open(os.path.expanduser('~/noise'), 'rb').read()\n\
        for n in range(12):\n    \
            s3.put_object(Bucket='alice-b', Key=f'k{n}', Body=noise[n << 20:][:4 << 20])\n    \
            assert s3.get_object(Bucket='alice-b', Key=f'k{n}')['Body'].read() == noise[n << 20:][:4 << 20]\n    \
            assert n % 4 or s3.get_object(Bucket='alice-b', Key='large')['Body'].read() == noise";
    let mut client = lab.client("/usr/bin/python3");
    let mut child = client.arg("-c").arg(lines).spawn().expect("it starts");
    let mut restarts = 0;
    let ended = loop {
        if let Some(ended) = child.try_wait().expect("a child") {
            break ended;
        }
        std::thread::sleep(std::time::Duration::from_millis(600));
        if restarts < 4 {
            lab.cloud().kill();
            std::thread::sleep(std::time::Duration::from_millis(200));
            lab.cloud().start();
            restarts += 1;
        }
    };
    assert!(ended.success() && restarts > 0, "{ended:?} after {restarts} restarts");
}

/// An upload that is not whole is no object, and nothing of it stays at the provider but what its own uploads keep.
#[test]
fn what_is_not_whole_is_not_there() {
    for kind in kinds(Kind::S3sFs) {
        let mut lab = Lab::remote(kind, "");
        lab.python("s3.create_bucket(Bucket='alice-b')\ns3.put_object(Bucket='alice-b', Key='k', Body=b'old')");
        // The client hangs up, after parts went to the provider.
        let path = lab.presigned("PUT", "/alice-b/k");
        let cut = format!(
            "import http.client\nconnection = http.client.HTTPConnection(URL.removeprefix('http://'), timeout=60)\n\
             connection.putrequest('PUT', {path:?})\nconnection.putheader('content-length', str(40 << 20))\n\
             connection.endheaders()\nfor n in range(30): connection.send(b'x' * (1 << 20))\ntime.sleep(0.3)\nconnection.close()"
        );
        lab.python(&cut);
        // The gateway is killed in the middle.
        let log = fs::File::create(lab.path("client")).expect("a file");
        let lines = cut.replace("time.sleep(0.3)", "time.sleep(60)");
        let head = format!("import time\nURL = {:?}\n", lab.url());
        let mut client = lab.client("/usr/bin/python3");
        let mut client = client.arg("-c").arg(head + &lines).stderr(log).spawn().expect("it starts");
        std::thread::sleep(std::time::Duration::from_millis(1500));
        lab.stop("KILL");
        let _ = client.kill();
        let _ = client.wait();
        lab.start();
        assert_eq!(lab.python("print(s3.get_object(Bucket='alice-b', Key='k')['Body'].read())").trim(), "b'old'");
        assert_eq!(lab.at_provider("print(len(objects()))").trim(), "1", "{kind:?}");
    }
}

#[test]
fn what_is_wrong_at_the_start_is_told() {
    if !Kind::S3sFs.is_there() {
        return;
    }
    let mut lab = Lab::remote_without_gateway(Kind::S3sFs, "");
    let ends = |lab: &Lab| lab.gateway().output().expect("it runs");
    let configured = fs::read_to_string(lab.path("gateway.toml")).expect("its configuration");
    // No such bucket.
    lab.write("gateway.toml", &configured.replace("s3://cloud/", "s3://nowhere/"));
    let out = ends(&lab);
    assert!(out.status.code() == Some(13) && text(&out).contains("no such bucket"), "{}", text(&out));
    // Other credentials.
    lab.write("gateway.toml", &configured);
    lab.write("provider.toml", "access_key = \"PROVIDER\"\nsecret_key = \"another-secret-of-the-gateway\"\n");
    let out = ends(&lab);
    assert!(out.status.code() == Some(13) && text(&out).contains("refuses the gateway"), "{}", text(&out));
    assert!(!text(&out).contains("another-secret"), "{}", text(&out));
    // Others can read them.
    run(Command::new("chmod").arg("644").arg(lab.path("provider.toml")));
    assert_eq!(ends(&lab).status.code(), Some(13));
    lab.write("provider.toml", "access_key = \"PROVIDER\"\nsecret_key = \"provider-secret-provider\"\n");
    // No TLS there.
    lab.write("gateway.toml", &configured.replace("http://127", "https://127"));
    let out = ends(&lab);
    assert!(out.status.code() == Some(13) && text(&out).contains("no TLS"), "{}", text(&out));
    // Nobody there.
    lab.write("gateway.toml", &(configured.clone() + "provider.retries = 0\n"));
    lab.cloud().kill();
    let out = ends(&lab);
    assert!(out.status.code() == Some(5) && text(&out).contains("does not answer"), "{}", text(&out));
    // Another vault's objects.
    lab.cloud().start();
    lab.write("gateway.toml", &configured);
    lab.start();
    assert_eq!(lab.stop("TERM"), Some(0));
    run(lab
        .lamassu()
        .args(["init", "--key"])
        .arg(format!("raw:file:{}", lab.path("vault.key").display()))
        .arg(lab.path("other")));
    lab.write("gateway.toml", &configured.replace("/store\"", "/other\""));
    let out = ends(&lab);
    assert!(out.status.code() == Some(13) && text(&out).contains("another vault"), "{}", text(&out));
}

/// Memory does not grow with objects: 512 MiB go up and come back, within what docs/gateway.md says of one upload
/// (55 MiB) and one download (15 MiB).
#[test]
#[ignore = "takes a minute and 2 GiB of disk; make torture runs it"]
fn memory_is_bounded() {
    if !Kind::S3sFs.is_there() {
        return;
    }
    let lab = Lab::remote(Kind::S3sFs, "");
    let peak = || {
        let status = fs::read_to_string(format!("/proc/{}/status", lab.pid())).expect("it runs");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        peak.and_then(|peak| peak.parse::<u64>().ok()).expect("a size")
    };
    // A gateway that has done a little of everything.
    lab.python(
        "s3.create_bucket(Bucket='alice-b')\ns3.put_object(Bucket='alice-b', Key='small', Body=b'x')\n\
         s3.get_object(Bucket='alice-b', Key='small')['Body'].read()\ns3.delete_object(Bucket='alice-b', Key='small')\n\
         open(os.path.expanduser('~/large'), 'wb').write(os.urandom(1 << 20) * 512)",
    );
    let before = peak();
    // One request at a time. The end of an upload in parts reads it and puts it once more.
    for (what, lines, mib) in [
        ("put", "s3.upload_file(LARGE, 'alice-b', 'whole', Config=of(2 << 30))", 55),
        ("get", "s3.download_file('alice-b', 'whole', LARGE + '-back', Config=of(2 << 30))", 55 + 15),
        ("parts", "s3.upload_file(LARGE, 'alice-b', 'parts', Config=of(16 << 20))", 55 + 15),
    ] {
        let head = "from boto3.s3.transfer import TransferConfig\n\
            s3 = boto3.client('s3', endpoint_url=URL, config=Config(signature_version='s3v4', read_timeout=300))\nLARGE = os.path.expanduser('~/large')\n\
            of = lambda size: TransferConfig(multipart_threshold=size, multipart_chunksize=16 << 20, use_threads=False)\n";
        lab.python(&format!("{head}{lines}"));
        let more = peak().saturating_sub(before);
        eprintln!("{what}: {} MiB more than {} MiB", more >> 10, before >> 10);
        assert!(more <= mib << 10, "{what}: {more} kB more than {before} kB");
    }
    run(Command::new("cmp").arg(lab.path("large")).arg(lab.path("large-back")));
    until("it still answers", || {
        lab.python("print(len(s3.list_objects_v2(Bucket='alice-b')['Contents']))").trim() == "2"
    });
}
