//! What a store plants in `lamassu.tree/`, where it knows the names: things that are no files, and too much. Tree
//! records are a cache, so everything reads and is written as before; nothing is waited for, no link is followed, and
//! nothing outside the vault is touched.

use crate::support::{Bench, flip, noise};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// Three pages of blocks: with a degree of 2 the tree over them has records of two levels.
const LEN: usize = 1_200_000;
const TERABYTE: u64 = 1 << 40;
/// A test that hangs fails.
const HANGS_AFTER: Duration = Duration::from_secs(300);

struct Lab {
    b: Bench,
    /// Files of tree records, which are all of `f`.
    records: Vec<PathBuf>,
    /// Where `f` lies.
    stored: PathBuf,
    /// A directory beside the vault, with a file; nothing in it may change.
    outside: PathBuf,
    content: Vec<u8>,
    writes: u64,
}

impl Lab {
    fn new() -> Option<Lab> {
        if !Path::new("/dev/fuse").exists() {
            eprintln!("SKIPPED: takes /dev/fuse");
            return None;
        }
        let b = Bench::new();
        b.run("init --tree-degree 2 --tree-leaves blocks v").ok();
        b.dir("m");
        let content = noise(LEN, 7);
        b.run("mount v m").ok();
        fs::write(b.path("m/f"), &content).unwrap();
        b.unmount("m");
        let outside = b.dir("outside");
        b.file("outside/file", b"of nobody here");
        let stored = b.stored("v", "f");
        let mut lab = Lab { b, records: Vec::new(), stored, outside, content, writes: 0 };
        lab.records = files_below(&lab.tree());
        assert_eq!(lab.records.len(), 2, "of pages and of blocks: {:?}", lab.records);
        Some(lab)
    }

    fn tree(&self) -> PathBuf {
        self.b.path("v/lamassu.tree")
    }

    fn outside_now(&self) -> (Vec<PathBuf>, Vec<u8>, i64, u64) {
        let file = self.outside.join("file");
        let st = file.metadata().unwrap();
        (files_below(&self.outside), fs::read(&file).unwrap(), st.mtime_nsec() + st.mtime(), st.size())
    }

    /// All that is done with a vault: read, changed, checked and scrubbed, and what is stale is found.
    fn works(&mut self, what: &str) {
        eprintln!("{what}"); // what fails is the last of these
        let outside = self.outside_now();
        let b = &self.b;
        assert!(b.run("cat v f").ok().out == self.content, "{what}");
        let told = b.run("scrub --json v").ok().json();
        assert_eq!(told["findings"].as_array().unwrap().len(), 0, "{what}: {told}");
        b.run("check v").ok();
        b.run("mount v m").ok();
        assert!(fs::read(b.path("m/f")).unwrap() == self.content, "{what}");
        // In the middle page: its record, and those above it, are written anew.
        self.writes += 1;
        let new = noise(9000, 100 + self.writes);
        let at = LEN / 2;
        let file = fs::File::options().write(true).open(b.path("m/f")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &new, at as u64).unwrap();
        file.sync_all().unwrap();
        drop(file);
        self.content[at..at + new.len()].copy_from_slice(&new);
        assert!(fs::read(b.path("m/f")).unwrap() == self.content, "{what}");
        b.unmount("m");
        assert!(b.run("cat v f").ok().out == self.content, "{what}");
        b.run("check v").ok();
        b.run("scrub v").ok();
        // Now records are needed, to tell which page it is: as far as they are lost, more of the file is named.
        flip(&self.stored, 100);
        let told = b.run("scrub --json v").code(30).json();
        let found = told["findings"].as_array().unwrap();
        let name = self.stored.file_name().unwrap().to_str().unwrap();
        assert!(!found.is_empty() && found.iter().all(|f| f["kind"] == "stale" && f["path"] == name), "{what}: {told}");
        assert_ne!(b.run("check v").code, 0, "{what}");
        flip(&self.stored, 100);
        b.run("check v").ok();
        assert_eq!(self.outside_now(), outside, "{what}");
    }

    /// Takes the records away, and puts something in the place of each, or of the directory that it lies in, or of that
    /// of all records. The next writer may make new ones.
    fn plant(&mut self, what: &str, make: &dyn Fn(&Path)) {
        let at = [self.records.clone(), vec![self.records[0].parent().unwrap().into()], vec![self.tree()]];
        for (places, level) in at.iter().zip(["in the place of a record", "of its directory", "of all"]) {
            remove(&self.tree());
            for place in places {
                fs::create_dir_all(place.parent().unwrap()).unwrap();
                make(place);
            }
            self.works(&format!("{what} {level}"));
        }
        remove(&self.tree());
    }
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let (mut dirs, mut files) = (vec![dir.to_owned()], Vec::new());
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { dirs.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    files
}

fn remove(path: &Path) {
    match path.symlink_metadata() {
        Ok(st) if st.is_dir() => fs::remove_dir_all(path).unwrap(),
        Ok(_) => fs::remove_file(path).unwrap(),
        Err(_) => {}
    }
}

/// In a thread of its own, so that what hangs is a failure of this test.
fn bounded(test: impl FnOnce() + Send + 'static) {
    let (tell, told) = mpsc::channel();
    let running = std::thread::spawn(move || {
        test();
        let _ = tell.send(());
    });
    if let Err(mpsc::RecvTimeoutError::Timeout) = told.recv_timeout(HANGS_AFTER) {
        panic!("it hangs");
    }
    running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn what_is_no_file_is_not_opened_and_no_link_is_followed() {
    bounded(|| {
        let Some(mut lab) = Lab::new() else { return };
        lab.works("nothing");
        let node = |kind, device| move |at: &Path| mknodat(CWD, at, kind, Mode::RUSR | Mode::WUSR, device).unwrap();
        lab.plant("a fifo", &node(FileType::Fifo, 0));
        lab.plant("a directory", &|at| fs::create_dir(at).unwrap());
        lab.plant("a socket", &|at| drop(UnixListener::bind(at).unwrap()));
        let (file, dir) = (lab.outside.join("file"), lab.outside.clone());
        lab.plant("a link to a file elsewhere", &|at| symlink(&file, at).unwrap());
        lab.plant("a link to a directory elsewhere", &|at| symlink(&dir, at).unwrap());
        lab.plant("a link to where nothing is yet", &|at| symlink(dir.join("new"), at).unwrap());
        lab.plant("a link to itself", &|at| symlink(at.file_name().unwrap(), at).unwrap());
        // /dev/zero never ends, and /dev/full takes nothing.
        let is_root = rustix::process::geteuid().is_root();
        let can_make =
            mknodat(CWD, lab.b.path("zero"), FileType::CharacterDevice, Mode::RUSR, rustix::fs::makedev(1, 5));
        if is_root && can_make.is_ok() {
            lab.plant("/dev/zero", &node(FileType::CharacterDevice, rustix::fs::makedev(1, 5)));
            lab.plant("/dev/full", &node(FileType::CharacterDevice, rustix::fs::makedev(1, 7)));
        } else {
            eprintln!("SKIPPED in part: takes the right to make device nodes");
        }
    });
}

#[test]
fn too_much_is_not_read_and_not_copied() {
    bounded(|| {
        let Some(mut lab) = Lab::new() else { return };
        let is_sparse = |path: &Path| path.symlink_metadata().unwrap().blocks() * 512 < 64 << 20;
        // Longer than any tree: with nothing in it, and with noise in front of the hole.
        for front in [Vec::new(), noise(1 << 20, 3)] {
            for record in &lab.records {
                fs::create_dir_all(record.parent().unwrap()).unwrap();
                fs::write(record, &front).unwrap();
                fs::File::options().write(true).open(record).unwrap().set_len(TERABYTE).unwrap();
            }
            lab.works("a terabyte");
            lab.b.run("clone v w").ok();
            assert!(lab.b.run("cat w f").ok().out == lab.content);
            files_below(&lab.b.path("w")).iter().for_each(|path| assert!(is_sparse(path), "{}", path.display()));
            fs::remove_dir_all(lab.b.path("w")).unwrap();
        }
        // Records of objects that there are not, and what is no record.
        for i in 0..3000u64 {
            let dir = lab.tree().join(format!("{:02x}", i & 0xff));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join(format!("{:016x}", 0x10_0000 + i)), noise(64, i)).unwrap();
            fs::write(dir.join(format!("{i}.foreign")), b"foreign").unwrap();
            fs::create_dir_all(lab.tree().join(format!("foreign.{i}"))).unwrap();
        }
        lab.works("thousands of records of nothing");
        let before = files_below(&lab.tree()).len();
        lab.b.run("check --repair v").ok();
        lab.works("thousands of records of nothing, behind a repair");
        assert!(files_below(&lab.tree()).len() >= before - 6000);
        // The object goes, and with it what has the name of its records.
        lab.b.run("mount v m").ok();
        fs::remove_file(lab.b.path("m/f")).unwrap();
        lab.b.unmount("m");
        lab.b.run("check v").ok();
        lab.b.run("scrub v").ok();
    });
}
