//! A gateway that is killed: each object is whole or absent, and what was answered is there.

use crate::lab::{Lab, noise, run, until};
use std::collections::HashMap;
use std::sync::Mutex;

/// Puts objects over and over until the gateway is gone: which were answered, by key, the last ones' content.
const PUTS: &str = r#"
import sys, boto3
from botocore.client import Config
import os
s3 = boto3.client("s3", endpoint_url=os.environ["GATEWAY_URL"], region_name="us-east-1",
                  config=Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"}))
who = sys.argv[1]
for n in range(10000):
    body = (f"{who}-{n % 4}-{n}|" * 200000)[: 1 + (n * 79999) % 1500000]
    print("begin", n % 4, n, len(body), flush=True)
    try:
        s3.put_object(Bucket="alice-crash", Key=f"d/{who}/{n % 4}", Body=body.encode())
    except Exception:
        break
    print("done", n % 4, n, len(body), flush=True)
"#;

#[test]
fn objects_are_whole_or_absent_when_the_gateway_is_killed() {
    if !crate::boto::is_there() {
        return;
    }
    let mut lab = Lab::new("");
    run(lab.client("/usr/bin/python3").arg("-c").arg(
        "import boto3, os; boto3.client('s3', endpoint_url=os.environ['GATEWAY_URL']).create_bucket(Bucket='alice-crash')",
    ));
    for round in 0..3 {
        let said = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for who in ["x", "y"] {
                let (said, lab, who) = (&said, &lab, format!("{who}{round}"));
                scope.spawn(move || {
                    let out = lab.client("/usr/bin/python3").args(["-c", PUTS, &who]).output().expect("it runs");
                    let lines = String::from_utf8_lossy(&out.stdout).into_owned();
                    said.lock().expect("no panic").push((who, lines));
                });
            }
            // Somewhere in the middle of what is being put.
            until("something is put", || lab.log().matches("PutObject").count() > 30 * (round + 1));
            lab.signal("KILL");
        });
        lab.stop("KILL");
        lab.start();
        for (who, lines) in said.into_inner().expect("no panic") {
            check(&lab, &who, &lines);
        }
    }
    // Nothing of the gateway's own is left behind.
    until("what was left is removed", || lab.log().matches("is removed").count() == 4);
    lab.stop("TERM");
    assert_eq!(left(&lab), "");
    let key = format!("raw:file:{}", lab.path("vault.key").display());
    run(lab.lamassu().args(["check", "--key", &key]).arg(lab.path("store")));
}

/// Names of the gateway's own that the vault has, which is closed.
fn left(lab: &Lab) -> String {
    let key = format!("raw:file:{}", lab.path("vault.key").display());
    let listed = run(lab.lamassu().args(["ls", "-R", "--key", &key]).arg(lab.path("store")));
    let is_left = |line: &&str| line.contains(".lamassu-") && !line.contains(".lamassu-gateway");
    listed.lines().filter(is_left).collect()
}

fn check(lab: &Lab, who: &str, lines: &str) {
    let mut begun: HashMap<&str, Vec<(u64, usize)>> = HashMap::new();
    let mut done: HashMap<&str, u64> = HashMap::new();
    for line in lines.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let n = words[2].parse().expect("a number");
        match words[0] {
            "begin" => begun.entry(words[1]).or_default().push((n, words[3].parse().expect("a number"))),
            _ => drop(done.insert(words[1], n)),
        }
    }
    assert!(!done.is_empty(), "{who} has put nothing: {lines}");
    for (slot, tries) in begun {
        let file = lab.path("got");
        let _ = std::fs::remove_file(&file);
        let code = format!(
            "import boto3, os, sys\ns3 = boto3.client('s3', endpoint_url=os.environ['GATEWAY_URL'])\n\
             s3.download_file('alice-crash', 'd/{who}/{slot}', sys.argv[1])"
        );
        let got = lab.client("/usr/bin/python3").args(["-c", &code]).arg(&file).output().expect("it runs");
        let Ok(found) = std::fs::read(&file) else {
            assert!(!done.contains_key(slot), "{who}/{slot} was answered, and is gone: {got:?}");
            continue;
        };
        let of = |n: u64, len: usize| format!("{who}-{slot}-{n}|").into_bytes().into_iter().cycle().take(len).collect();
        let is_one = tries.iter().filter(|(n, _)| *n >= done.get(slot).copied().unwrap_or(0));
        let whole = is_one.map(|(n, len)| (*n, of(*n, *len))).find(|(_, body): &(u64, Vec<u8>)| *body == found);
        assert!(whole.is_some(), "{who}/{slot} has {} bytes of nothing that was put last", found.len());
    }
}

#[test]
fn what_an_upload_has_left_is_removed_and_uploads_go_on() {
    if !crate::boto::is_there() {
        return;
    }
    let mut lab = Lab::new("");
    std::fs::write(lab.path("part"), noise(5 << 20)).expect("writes");
    let begin = "import boto3, os\ns3 = boto3.client('s3', endpoint_url=os.environ['GATEWAY_URL'])\n\
        s3.create_bucket(Bucket='alice-up')\nkey = {'Bucket': 'alice-up', 'Key': 'deep/dir/big'}\n\
        up = {**key, 'UploadId': s3.create_multipart_upload(**key)['UploadId']}\n\
        print(up['UploadId'], s3.upload_part(**up, PartNumber=1, Body=open(os.environ['PART'], 'rb'))['ETag'])";
    let part = lab.path("part");
    let said = run(lab.client("/usr/bin/python3").env("PART", &part).args(["-c", begin]));
    lab.stop("KILL");
    lab.start();
    let (id, etag) = said.trim().split_once(' ').expect("two words");
    let end = "import boto3, os, sys\ns3 = boto3.client('s3', endpoint_url=os.environ['GATEWAY_URL'])\n\
        key = {'Bucket': 'alice-up', 'Key': 'deep/dir/big'}\nup = {**key, 'UploadId': sys.argv[1]}\n\
        last = s3.upload_part(**up, PartNumber=2, Body=b'end')['ETag']\n\
        parts = [{'PartNumber': 1, 'ETag': sys.argv[2]}, {'PartNumber': 2, 'ETag': last}]\n\
        s3.complete_multipart_upload(**up, MultipartUpload={'Parts': parts})\n\
        assert s3.get_object(**key)['Body'].read() == open(os.environ['PART'], 'rb').read() + b'end'";
    run(lab.client("/usr/bin/python3").env("PART", &part).args(["-c", end, id, etag]));
}

/// Makes objects of parts, and ends every other upload without, until the gateway is gone.
const UPLOADS: &str = r#"
import boto3, os, sys
from botocore.client import Config
s3 = boto3.client("s3", endpoint_url=os.environ["GATEWAY_URL"], config=Config(retries={"max_attempts": 0}))
part = open(os.environ["PART"], "rb").read()
for n in range(10000):
    try:
        key = {"Bucket": "alice-ends", "Key": f"{sys.argv[1]}{n % 4}"}
        up = {**key, "UploadId": s3.create_multipart_upload(**key)["UploadId"]}
        tags = [s3.upload_part(**up, PartNumber=m + 1, Body=body)["ETag"] for m, body in enumerate([part, b"end"])]
        parts = [{"PartNumber": m + 1, "ETag": tag} for m, tag in enumerate(tags)]
        if n % 2:
            s3.complete_multipart_upload(**up, MultipartUpload={"Parts": parts})
        else:
            s3.abort_multipart_upload(**up)
    except Exception:
        break
"#;

#[test]
fn an_upload_is_there_whole_or_not_at_all_when_the_gateway_is_killed() {
    if !crate::boto::is_there() {
        return;
    }
    let mut lab = Lab::new("");
    let part = lab.data("part", 5 << 20);
    // An end that was answered stays one.
    for (round, end) in
        ["complete_multipart_upload(**up, MultipartUpload={'Parts': [part]})", "abort_multipart_upload(**up)"]
            .into_iter()
            .enumerate()
    {
        let lines = format!(
            "s3.create_bucket(Bucket='alice-end')\nkey = {{'Bucket': 'alice-end', 'Key': 'deep/dir/big'}}\n\
             up = {{**key, 'UploadId': s3.create_multipart_upload(**key)['UploadId']}}\n\
             part = {{'PartNumber': 1, 'ETag': s3.upload_part(**up, PartNumber=1, Body=b'x' * 6000000)['ETag']}}\n\
             s3.{end}"
        );
        lab.python(&lines);
        lab.stop("KILL");
        lab.start();
        until("what was left is removed", || lab.log().matches("is removed").count() == round + 2);
        lab.python(
            "assert 'Uploads' not in s3.list_multipart_uploads(Bucket='alice-end')\n\
             s3.delete_object(Bucket='alice-end', Key='deep/dir/big')\ns3.delete_bucket(Bucket='alice-end')",
        );
    }
    lab.python("s3.create_bucket(Bucket='alice-ends')");
    for round in 0..3 {
        std::thread::scope(|scope| {
            for who in ["x", "y"] {
                let (lab, part) = (&lab, &part);
                scope.spawn(move || run(lab.client("/usr/bin/python3").env("PART", part).args(["-c", UPLOADS, who])));
            }
            // Somewhere in the middle of what is being made.
            let ended = || lab.log().matches("AbortMultipartUpload").count();
            let before = ended();
            until("uploads end", || ended() > before + 2);
            lab.signal("KILL");
        });
        lab.stop("KILL");
        lab.start();
        until("what was left is removed", || lab.log().matches("is removed").count() == round + 4);
    }
    // Clients see everything that there is, and so can remove it.
    lab.python(
        "ends = {'Bucket': 'alice-ends'}\n\
         for up in s3.list_multipart_uploads(**ends).get('Uploads', []):\n    \
             s3.abort_multipart_upload(**ends, Key=up['Key'], UploadId=up['UploadId'])\n\
         for item in s3.list_objects_v2(**ends).get('Contents', []):\n    \
             assert item['Size'] == (5 << 20) + 3\n    s3.delete_object(**ends, Key=item['Key'])",
    );
    lab.stop("TERM");
    assert_eq!(left(&lab), "");
    lab.start();
    lab.python("s3.delete_bucket(Bucket='alice-ends')");
}
