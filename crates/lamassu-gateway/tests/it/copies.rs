//! Copies of objects: the ciphertext is the same, and a store that can share extents shares them.

use crate::boto;
use crate::lab::{Lab, has, run};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the object.
const SIZE: usize = 16 << 20;
const BLOCK: usize = 4096;

/// A file system in an image that is unmounted also where a test fails.
struct Mounted(PathBuf);

impl Mounted {
    /// `None` where this machine has no loop devices to give.
    fn new(at: &Path) -> Option<Mounted> {
        let is_root = rustix::process::geteuid().is_root();
        if !is_root || !has("mkfs.xfs") || !has("filefrag") {
            return None;
        }
        let image = at.with_extension("xfs");
        fs::File::create(&image).and_then(|file| file.set_len(512 << 20)).expect("an image");
        run(Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&image));
        let mounted = Command::new("mount").args(["-o", "loop"]).arg(&image).arg(at).output().expect("it runs");
        if !mounted.status.success() {
            eprintln!("NOTE: there are no loop devices here: shared extents of copies were NOT tested");
        }
        mounted.status.success().then(|| Mounted(at.into()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("timeout").args(["-s", "KILL", "20", "umount", "-l"]).arg(&self.0).output();
    }
}

/// Files of the store, of objects in the bucket.
fn stored(lab: &Lab, keys: [&str; 2]) -> [PathBuf; 2] {
    let source = format!("raw:file:{}", lab.path("vault.key").display());
    keys.map(|key| {
        let mut path = lab.lamassu();
        path.env("LAMASSU_KEY", &source).arg("path").arg(lab.path("store")).arg(format!("alice-copies/{key}"));
        lab.path("store").join(run(&mut path).trim())
    })
}

/// Puts an object and copies it.
fn copy(lab: &Lab) {
    lab.data("noise", SIZE);
    lab.python(
        "body = open(os.path.expanduser('~/noise'), 'rb').read()\n\
         s3.create_bucket(Bucket='alice-copies')\n\
         s3.put_object(Bucket='alice-copies', Key='source', Body=body)\n\
         s3.copy_object(Bucket='alice-copies', Key='copy', CopySource='alice-copies/source')\n\
         assert s3.get_object(Bucket='alice-copies', Key='copy')['Body'].read() == body",
    );
}

#[test]
fn blocks_of_a_copy_are_those_of_its_source() {
    if !boto::is_there() {
        return;
    }
    let mut lab = Lab::new("");
    copy(&lab);
    assert_eq!(lab.stop("TERM"), Some(0));
    let [source, copy] = stored(&lab, ["source", "copy"]).map(|path| fs::read(path).expect("reads"));
    assert!(source != copy, "each has metadata of its own");
    let blocks = |file: &[u8]| file.chunks(BLOCK).map(<[u8]>::to_vec).collect::<HashSet<_>>();
    let (source, copy) = (blocks(&source), blocks(&copy));
    assert!(source.intersection(&copy).count() >= SIZE / BLOCK, "{}", source.intersection(&copy).count());
}

/// Equal ciphertext could have been encrypted again; an extent that both have was not written again.
#[test]
fn extents_of_a_copy_are_shared() {
    if !boto::is_there() {
        return;
    }
    let mut mounted = None;
    let mut lab = Lab::with_store("", |store| mounted = Mounted::new(store));
    if mounted.is_none() {
        return;
    }
    lab.start();
    copy(&lab);
    assert_eq!(lab.stop("TERM"), Some(0));
    let [source, copy] = stored(&lab, ["source", "copy"]).map(|path| {
        // N: FIRST.. LAST: PHYSICAL.. PHYSICAL: LENGTH: [EXPECTED:] FLAGS
        let said = run(Command::new("filefrag").args(["-v", "-b4096"]).arg(path));
        let shared = said.lines().filter(|line| line.contains("shared")).map(|line| {
            let place = line.split(':').nth(2).expect("a place").split("..");
            let [first, last] = place.map(|at| at.trim().parse::<u64>().expect("a block")).collect::<Vec<_>>()[..]
            else {
                panic!("{line}")
            };
            first..=last
        });
        shared.flatten().collect::<HashSet<_>>()
    });
    assert!(source.intersection(&copy).count() >= SIZE / BLOCK, "{} {}", source.len(), copy.len());
    drop(mounted);
}
