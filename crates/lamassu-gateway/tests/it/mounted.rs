//! The same data through S3 and through a mount, at the same time.

use crate::boto;
use crate::lab::{Lab, noise, run};
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A mount that is taken away also where a test fails.
struct Mount(Lab);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("timeout").args(["-s", "KILL", "20", "umount", "-l"]).arg(self.0.path("mnt")).output();
    }
}

fn mounted() -> Option<Mount> {
    if !Path::new("/dev/fuse").exists() || !boto::is_there() {
        eprintln!("NOTE: there is no /dev/fuse here: the mount of a gateway was NOT tested");
        return None;
    }
    let lab = Lab::without_gateway("");
    fs::create_dir(lab.path("mnt")).expect("a mount point");
    lab.configure(&format!("mountpoint = \"{}\"\n", lab.path("mnt").display()));
    Some(Mount(lab.started()))
}

#[test]
fn objects_are_files_and_files_are_objects() {
    let Some(mut mount) = mounted() else { return };
    let lab = &mount.0;
    let bucket = lab.path("mnt/alice-m");
    lab.python("s3.create_bucket(Bucket='alice-m')\ns3.put_object(Bucket='alice-m', Key='dir/a', Body=b'by S3')");
    assert_eq!(fs::read_to_string(bucket.join("dir/a")).expect("reads"), "by S3");
    let st = bucket.join("dir/a").metadata().expect("a file");
    assert_eq!((st.permissions().mode() & 0o777, st.uid()), (0o640, rustix::process::geteuid().as_raw()));
    // What the kernel has looked up, and has found absent, follows.
    assert!(!bucket.join("dir/b").exists());
    let names = |dir: &Path| {
        let names = fs::read_dir(dir).expect("lists").map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().expect("a text")).collect();
        names.sort();
        names
    };
    assert_eq!(names(&bucket.join("dir")), ["a"]);
    lab.python(
        "s3.put_object(Bucket='alice-m', Key='dir/b', Body=b'b')\n\
         s3.put_object(Bucket='alice-m', Key='dir/a', Body=b'by S3, again')",
    );
    assert_eq!(names(&bucket.join("dir")), ["a", "b"]);
    assert_eq!(fs::read_to_string(bucket.join("dir/a")).expect("reads"), "by S3, again");
    // Written in the mount: content, tag and time are other ones; what was given stays.
    lab.python("s3.put_object(Bucket='alice-m', Key='c', Body=b'1234', Metadata={'k': 'v'}, ContentType='text/x')");
    let tag = lab.python("print(s3.head_object(Bucket='alice-m', Key='c')['ETag'])");
    fs::write(bucket.join("c"), "by a program").expect("writes");
    let told = lab.python(
        "got = s3.get_object(Bucket='alice-m', Key='c')\n\
         assert got['Body'].read() == b'by a program' and got['Metadata'] == {'k': 'v'} and got['ContentType'] == 'text/x'\n\
         print(got['ETag'])",
    );
    assert!(told != tag && told.contains('-'), "{told} {tag}");
    fs::create_dir_all(bucket.join("made/here")).expect("directories");
    fs::write(bucket.join("made/here/file"), vec![7; 100_000]).expect("writes");
    symlink("/etc/passwd", bucket.join("link")).expect("a link");
    symlink("made", bucket.join("linked")).expect("a link");
    lab.python(
        "keys = [item['Key'] for item in s3.list_objects_v2(Bucket='alice-m')['Contents']]\n\
         assert keys == ['c', 'dir/a', 'dir/b', 'made/here/file'], keys\n\
         assert s3.get_object(Bucket='alice-m', Key='made/here/file')['Body'].read() == bytes([7]) * 100000\n\
         s3.copy_object(Bucket='alice-m', Key='copied', CopySource='alice-m/made/here/file')\n\
         import hashlib\n\
         assert s3.head_object(Bucket='alice-m', Key='copied')['ETag'].strip('\"') == hashlib.md5(bytes([7]) * 100000).hexdigest()\n\
         for key in ['link', 'linked/here/file']:\n    \
             try: s3.get_object(Bucket='alice-m', Key=key)\n    \
             except s3.exceptions.NoSuchKey: continue\n    \
             assert False, key\n\
         s3.delete_object(Bucket='alice-m', Key='copied')\ns3.delete_object(Bucket='alice-m', Key='dir/b')",
    );
    assert!(!bucket.join("copied").exists() && !bucket.join("dir/b").exists() && bucket.join("dir/a").exists());
    fs::rename(bucket.join("dir"), bucket.join("moved")).expect("renames");
    lab.python("assert s3.get_object(Bucket='alice-m', Key='moved/a')['Body'].read() == b'by S3, again'");
    // What is read while it is replaced is one or the other.
    let open = fs::File::open(bucket.join("moved/a")).expect("opens");
    lab.python("s3.put_object(Bucket='alice-m', Key='moved/a', Body=b'third')");
    assert_eq!(std::io::read_to_string(open).expect("reads"), "by S3, again");
    // A dataset is a bucket.
    let dataset = lab.path("mnt/alice-set");
    run(lab.lamassu().args(["dataset", "create", "--inherit"]).arg(&dataset));
    lab.python(
        "s3.put_object(Bucket='alice-set', Key='in/a', Body=b'of its own keys')\n\
         s3.copy_object(Bucket='alice-m', Key='from-set', CopySource='alice-set/in/a')\n\
         assert s3.get_object(Bucket='alice-m', Key='from-set')['Body'].read() == b'of its own keys'",
    );
    assert_eq!(fs::read_to_string(dataset.join("in/a")).expect("reads"), "of its own keys");
    assert_eq!(mount.0.stop("TERM"), Some(0), "{}", mount.0.log());
    assert!(!mount.0.path("mnt/alice-m").exists(), "the mount is gone");
}

#[test]
fn a_copy_has_the_digests_of_what_was_copied() {
    let Some(mount) = mounted() else { return };
    let lab = &mount.0;
    lab.python("s3.create_bucket(Bucket='alice-w')");
    let path = lab.path("mnt/alice-w/file");
    fs::write(&path, noise(4 << 20)).expect("writes");
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = fs::File::options().write(true).open(&path).expect("opens");
            for at in (0..1024_u64).cycle() {
                if is_done.load(Ordering::Relaxed) {
                    break;
                }
                file.write_all_at(&at.to_le_bytes(), at * 4096).expect("writes");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let copied = std::panic::catch_unwind(AssertUnwindSafe(|| {
            lab.python(
                "import base64, hashlib\n\
                 for n in range(10):\n    \
                     copy = dict(Bucket='alice-w', Key='copy')\n    \
                     s3.copy_object(**copy, CopySource='alice-w/file', ChecksumAlgorithm='SHA256')\n    \
                     got = s3.get_object(**copy, ChecksumMode='ENABLED')\n    body = got['Body'].read()\n    \
                     assert got['ETag'].strip('\"') == hashlib.md5(body).hexdigest(), n\n    \
                     assert got['ChecksumSHA256'] == base64.b64encode(hashlib.sha256(body).digest()).decode(), n",
            )
        }));
        is_done.store(true, Ordering::Relaxed);
        copied.expect("the digests are right");
    });
}

#[test]
fn the_gateway_ends_with_its_mount() {
    let Some(mut mount) = mounted() else { return };
    run(mount.0.lamassu().arg("umount").arg(mount.0.path("mnt")));
    assert_eq!(mount.0.ended(), Some(0), "{}", mount.0.log());
}
