//! What people met who tried the program with its documentation alone.

use crate::mounts::is_mounted;
use crate::support::Bench;
use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Command;

#[test]
fn removing_the_lock_file_admits_no_second_writer() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.dir("n");
    // As copies do that leave out empty directories.
    fs::remove_dir(b.path("v/lamassu.staging")).unwrap();
    b.run("mount v m").ok();
    fs::write(b.path("m/f"), b"first").unwrap();
    fs::remove_file(b.path("v/lamassu.lock")).unwrap();
    // All but the first meet a lock file that a refused one has made, and that nobody holds.
    for line in ["mount v n", "cp v key vault:key", "check --repair v", "mount v n"] {
        b.run(line).code(11).says("mounted on");
    }
    assert!(!is_mounted(&b.path("n")));
    b.run("mount --read-only --anchor none v n").ok();
    b.unmount("n");
    fs::write(b.path("m/f"), b"still the only one").unwrap();
    b.unmount("m");
    b.run("check v").ok();
    b.run("mount v n").ok();
    assert_eq!(fs::read(b.path("n/f")).unwrap(), b"still the only one");
    b.unmount("n");
}

#[test]
fn a_limit_of_file_sizes_is_an_error_and_not_the_daemons_end() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    // In blocks of 512 bytes or of 1 KiB, as the shell likes.
    let line = format!("ulimit -f 8192; exec {} mount v m", env!("CARGO_BIN_EXE_lamassu"));
    let mut limited = Command::new("sh");
    limited.args(["-c", &line]).current_dir(b.path(""));
    let key = format!("raw:file:{}", b.path("key").display());
    crate::support::Ran::from(limited.env("LAMASSU_KEY", key).env("XDG_STATE_HOME", b.path("state")).output().unwrap())
        .ok();
    let write = |name: &str, len: usize| {
        let file = fs::File::create(b.path(name)).unwrap();
        file.write_all_at(&vec![7; len], 0).and_then(|()| file.sync_all())
    };
    write("m/small", 1 << 20).unwrap();
    let refused = write("m/large", 20 << 20).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EFBIG));
    write("m/after", 1 << 20).unwrap();
    assert_eq!(fs::read(b.path("m/small")).unwrap(), vec![7; 1 << 20]);
    fs::remove_file(b.path("m/large")).unwrap();
    b.unmount("m");
    b.run("check v").ok();
}

/// Mounted, it would answer every call with `EIO`.
#[test]
fn a_vault_whose_roots_record_does_not_open_is_not_mounted() {
    let b = Bench::new();
    b.run("init --anchor none v").ok();
    b.run("init --names plain plain").ok();
    b.dir("m");
    let record = b.path("v/lamassu.dir");
    let text = fs::read_link(&record).unwrap();
    for damaged in [None, Some("AAAA")] {
        fs::remove_file(&record).unwrap();
        if let Some(text) = damaged {
            std::os::unix::fs::symlink(text, &record).unwrap();
        }
        for line in ["mount v m", "mount --read-only v m"] {
            b.run(line).code(26).says("lamassu.dir");
            assert!(!is_mounted(&b.path("m")));
        }
        b.run("check v").code(26);
        b.run("check --repair v").code(26);
        let _ = fs::remove_file(&record);
        std::os::unix::fs::symlink(&text, &record).unwrap();
    }
    for vault in ["v", "plain"] {
        b.run(&format!("mount {vault} m")).ok();
        b.unmount("m");
    }
}
