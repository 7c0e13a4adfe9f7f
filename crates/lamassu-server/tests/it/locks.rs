//! Locks of programs, flock(2) and fcntl(2), hold among all hosts that have a vault mounted.

use crate::common::*;
use crate::shared::{mount, shared, until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// fcntl(2) with a lock of `len` bytes (0: to the end).
fn fcntl(file: &File, command: i32, mode: i32, (start, len): (i64, i64)) -> io::Result<libc::flock> {
    let mut lock = libc::flock {
        l_type: mode as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: len,
        l_pid: 0,
    };
    // SAFETY: the pointer is valid for the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(lock),
    }
}

fn lock(file: &File, mode: i32, range: (i64, i64)) -> Option<i32> {
    fcntl(file, libc::F_SETLK, mode, range).err().and_then(|error| error.raw_os_error())
}

fn is_locked(file: &File) -> bool {
    match file.try_lock() {
        Ok(()) => {
            file.unlock().unwrap();
            false
        }
        Err(TryLockError::WouldBlock) => true,
        Err(TryLockError::Error(error)) => panic!("{error}"),
    }
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// Not by kill(1): a new process closes the files that it inherits, and each close waits for the daemon.
fn signal(host: Host<'_>, signal: Signal) {
    kill_process(Pid::from_raw(host.daemon() as i32).unwrap(), signal).unwrap();
}

/// Ends the mounts. A process that another test has just begun may still have files of them.
fn gone_and_whole(lab: &Lab, hosts: &[Host<'_>]) {
    hosts.iter().for_each(|host| until("unmounted", || host.umount().code == 0));
    lab.wait_until_free();
    hosts[0].run("check store/v").ok();
}

/// A process that locks a file by flock(2), says so, and keeps it.
fn locking(path: &Path) -> Child {
    let script =
        "import fcntl,sys; f=open(sys.argv[1],'r+'); fcntl.flock(f,2); print('locked',flush=True); sys.stdin.read()";
    let mut python = Command::new("python3");
    python.args(["-c", script]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
    python.spawn().unwrap()
}

fn says_locked(child: &mut Child) {
    let mut word = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut word).unwrap();
    assert_eq!(&word, b"locked");
}

#[test]
fn a_lock_on_one_host_is_in_the_way_on_all() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b, c] = hosts.map(|host| open(&host.file("data")));
    // flock(2).
    a.lock().unwrap();
    assert!(is_locked(&b) && is_locked(&c));
    a.unlock().unwrap();
    b.lock_shared().unwrap();
    c.try_lock_shared().unwrap();
    assert!(is_locked(&a));
    b.unlock().unwrap();
    drop(c);
    until("the last close releases it", || !is_locked(&a));
    // fcntl(2), by ranges; the two kinds do not conflict.
    a.lock().unwrap();
    assert_eq!(lock(&b, libc::F_WRLCK, (100, 50)), None);
    assert_eq!(lock(&a, libc::F_RDLCK, (149, 1)), Some(libc::EAGAIN));
    assert_eq!(lock(&a, libc::F_WRLCK, (150, 0)), None);
    let held = fcntl(&a, libc::F_GETLK, libc::F_RDLCK, (0, 0)).unwrap();
    assert_eq!((i32::from(held.l_type), held.l_start, held.l_len, held.l_pid), (libc::F_WRLCK, 100, 50, 0));
    let held = fcntl(&b, libc::F_GETLK, libc::F_RDLCK, (120, 0)).unwrap();
    assert_eq!((i32::from(held.l_type), held.l_start, held.l_len), (libc::F_WRLCK, 150, 0));
    let free = fcntl(&a, libc::F_GETLK, libc::F_WRLCK, (0, 100)).unwrap();
    assert_eq!(i32::from(free.l_type), libc::F_UNLCK);
    // A hole in the middle.
    assert_eq!(lock(&b, libc::F_UNLCK, (110, 10)), None);
    assert_eq!(lock(&a, libc::F_WRLCK, (110, 10)), None);
    assert_eq!(lock(&a, libc::F_WRLCK, (109, 1)), Some(libc::EAGAIN));
    // One close of the file, by any descriptor, releases what the process has there.
    drop(open(&hosts[1].file("data")));
    assert_eq!(lock(&a, libc::F_WRLCK, (0, 0)), None);
    // The file has another name by now, and is the same.
    fs::rename(hosts[1].file("data"), hosts[1].file("renamed")).unwrap();
    let c = open(&hosts[2].file("renamed"));
    assert_eq!(lock(&c, libc::F_RDLCK, (5, 5)), Some(libc::EAGAIN));
    drop((a, b, c));
    gone_and_whole(&lab, &hosts);
}

#[test]
fn who_waits_for_a_lock_gets_it_when_it_is_free_or_is_interrupted() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b, _] = hosts;
    let (path, held) = (b.file("data"), open(&a.file("data")));
    held.lock().unwrap();
    let (mut first, mut second) = (locking(&path), locking(&path));
    thread::sleep(Duration::from_millis(500));
    assert!(first.try_wait().unwrap().is_none() && second.try_wait().unwrap().is_none());
    // A process that waits can be killed.
    let begun = Instant::now();
    first.kill().unwrap();
    assert!(!first.wait().unwrap().success());
    assert!(begun.elapsed() < PATIENCE);
    held.unlock().unwrap();
    says_locked(&mut second);
    assert!(is_locked(&held));
    // A process that is killed has no lock.
    second.kill().unwrap();
    second.wait().unwrap();
    until("the lock of a killed process is released", || !is_locked(&held));
    // A signal with a handler: the call fails with EINTR.
    held.lock().unwrap();
    let script = "import fcntl,signal,sys\n\
        def late(*_): raise TimeoutError\n\
        signal.signal(signal.SIGALRM, late); signal.alarm(1); f=open(sys.argv[1],'r+')\n\
        try: fcntl.lockf(f, fcntl.LOCK_EX) if sys.argv[2]=='range' else fcntl.flock(f, fcntl.LOCK_EX)\n\
        except TimeoutError: print('late')\n";
    let ranges = open(&a.file("data"));
    assert_eq!(lock(&ranges, libc::F_WRLCK, (0, 0)), None);
    for kind in ["range", "whole"] {
        let out = Command::new("python3").args(["-c", script]).arg(&path).arg(kind).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&out.stdout), "late\n", "{out:?}");
    }
    drop((held, ranges));
    let free = open(&path);
    until("nothing is left of those who waited", || !is_locked(&free) && lock(&free, libc::F_WRLCK, (0, 0)).is_none());
    drop(free);
    gone_and_whole(&lab, &hosts);
}

/// By the calls themselves: Python repeats those that a signal has interrupted.
#[test]
fn signals_interrupt_neither_an_unlock_nor_a_lock_that_is_not_waited_for() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let path = hosts[0].file("data");
    drop(open(&path));
    let script = "import ctypes,errno,fcntl,os,signal,struct,sys\n\
        c=ctypes.CDLL(None,use_errno=True); fd=os.open(sys.argv[1],os.O_RDWR); seen=[0]\n\
        def tick(*_): seen[0]+=1\n\
        signal.signal(signal.SIGALRM,tick); signal.setitimer(signal.ITIMER_REAL,0.0003,0.0003)\n\
        def lock(kind): return ctypes.create_string_buffer(struct.pack('hhqqi4x',kind,0,0,0,0))\n\
        wrong=[]\n\
        for n in range(600):\n\
        \x20   for call in (lambda: c.flock(fd,6), lambda: c.flock(fd,8), lambda: c.fcntl(fd,6,lock(1)), lambda: c.fcntl(fd,6,lock(2))):\n\
        \x20       if call()!=0: wrong.append(errno.errorcode[ctypes.get_errno()])\n\
        signal.setitimer(signal.ITIMER_REAL,0); print(wrong, seen[0]>100)\n";
    let out = Command::new("python3").args(["-c", script]).arg(&path).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout), "[] True\n", "{out:?}");
    gone_and_whole(&lab, &hosts);
}

#[test]
fn two_that_would_wait_for_each_other_are_told() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b] = [hosts[0], hosts[1]].map(|host| open(&host.file("data")));
    assert_eq!((lock(&a, libc::F_WRLCK, (0, 1)), lock(&b, libc::F_WRLCK, (1, 1))), (None, None));
    thread::scope(|scope| {
        let waits = scope.spawn(|| fcntl(&a, libc::F_SETLKW, libc::F_WRLCK, (1, 1)).map(drop));
        let end = Instant::now() + PATIENCE;
        let error = loop {
            // Until the other one waits, this would wait, too: it asks without.
            assert!(Instant::now() < end);
            thread::sleep(Duration::from_millis(200));
            if !waits.is_finished()
                && let Err(error) = fcntl(&b, libc::F_SETLKW, libc::F_WRLCK, (0, 1))
            {
                break error;
            }
        };
        assert_eq!(error.raw_os_error(), Some(libc::EDEADLK));
        assert_eq!(lock(&b, libc::F_UNLCK, (1, 1)), None);
        waits.join().unwrap().unwrap();
    });
    drop((a, b));
    gone_and_whole(&lab, &hosts);
}

#[test]
fn locks_outlive_the_server_and_broken_connections() {
    let mut lab = Lab::new();
    {
        let [a, b, _] = shared(&lab);
        let (held, other) = (open(&a.file("data")), open(&b.file("data")));
        held.lock().unwrap();
        assert!(is_locked(&other));
        assert_eq!(lock(&held, libc::F_WRLCK, (7, 7)), None);
        std::mem::forget((held, other));
    }
    for signal in ["-KILL", "-TERM"] {
        lab.stop(signal);
        lab.start();
        let [a, b] = ["a", "b"].map(|name| lab.host(name));
        let (again, other) = (open(&a.file("data")), open(&b.file("data")));
        assert!(is_locked(&other), "after {signal}");
        assert_eq!(lock(&other, libc::F_RDLCK, (13, 1)), Some(libc::EAGAIN));
        assert_eq!(lock(&other, libc::F_RDLCK, (14, 1)), None);
        assert!(is_locked(&again), "another open file of the host that has it");
        // A close would release what this process has locked by ranges.
        std::mem::forget((again, other));
    }
}

/// What no program expects to wait for ends soon, and the rest after two terms; a new connection says what came of it.
#[test]
fn requests_end_although_the_server_does_not_answer() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let path = hosts[0].file("data");
    let held = open(&path);
    // A server that is away for longer than a term may cost a new file that nobody has synced.
    held.sync_all().unwrap();
    held.lock().unwrap();
    let mut waits = locking(&path);
    thread::sleep(Duration::from_millis(500));
    let server = Pid::from_raw(lab.server.as_ref().unwrap().id() as i32).unwrap();
    kill_process(server, Signal::STOP).unwrap();
    waits.kill().unwrap();
    until("an interrupted wait ends", || waits.try_wait().unwrap().is_some());
    let in_time = |what: &str, request: fn(&File) -> Result<(), TryLockError>| {
        let file = held.try_clone().unwrap();
        let request = thread::spawn(move || request(&file));
        until(what, || request.is_finished());
        request.join().unwrap()
    };
    in_time("an unlock ends", |file| file.unlock().map_err(TryLockError::Error)).unwrap();
    let unanswered = in_time("a lock that is not waited for ends", File::try_lock);
    assert!(matches!(unanswered, Err(TryLockError::Error(error)) if error.raw_os_error() == Some(libc::EIO)));
    kill_process(server, Signal::CONT).unwrap();
    let other = open(&hosts[1].file("data"));
    until("the server knows that nobody has a lock", || other.try_lock().is_ok());
    assert!(is_locked(&held));
    drop((held, other));
    gone_and_whole(&lab, &hosts);
}

/// The fencing of locks: a host that stood still has lost them, and its programs cannot use the file as if they had
/// them.
#[test]
fn a_host_that_stood_still_has_lost_its_locks_and_its_programs_are_told() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b, _] = hosts;
    let (mut held, other) = (open(&a.file("data")), open(&b.file("data")));
    held.write_all(b"before").unwrap();
    held.sync_all().unwrap();
    held.lock().unwrap();
    let unlocked = open(&a.file("data"));
    signal(a, Signal::STOP);
    // By now another host has the lock, and writes under it.
    other.lock().unwrap();
    other.write_all_at(b"others", 0).unwrap();
    signal(a, Signal::CONT);
    let error = |done: io::Result<()>| done.unwrap_err().raw_os_error();
    until("the host works again", || unlocked.read_at(&mut [0; 6], 0).is_ok());
    assert_eq!(error(held.write_all_at(b"stale!", 0)), Some(libc::EIO));
    let mut text = String::new();
    held.seek(SeekFrom::Start(0)).unwrap();
    assert_eq!(error(held.read_to_string(&mut text).map(drop)), Some(libc::EIO));
    assert_eq!(error(held.set_len(0)), Some(libc::EIO));
    assert_eq!(error(held.sync_all()), Some(libc::EIO));
    assert!(matches!(held.try_lock(), Err(TryLockError::Error(error)) if error.raw_os_error() == Some(libc::EIO)));
    assert_eq!(fs::read(a.file("data")).unwrap(), b"others");
    // Once it has unlocked, it begins again.
    held.unlock().unwrap();
    assert!(is_locked(&held));
    other.unlock().unwrap();
    held.lock().unwrap();
    // The first sync may report what the session lost, once.
    let _ = held.sync_all();
    held.write_all_at(b"after!", 0).unwrap();
    assert_eq!(fs::read(b.file("data")).unwrap(), b"after!");
    drop((held, other, unlocked));
    gone_and_whole(&lab, &hosts);
}

#[test]
fn the_locks_of_a_host_that_was_killed_or_unmounted_are_released() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b, c] = hosts;
    let held = open(&a.file("data"));
    held.lock().unwrap();
    let other = open(&b.file("data"));
    signal(a, Signal::KILL);
    other.lock().unwrap();
    drop(held);
    a.run("umount m-a").ok();
    mount(a);
    let mut child = locking(&c.file("data"));
    other.unlock().unwrap();
    says_locked(&mut child);
    assert!(is_locked(&other));
    child.kill().unwrap();
    child.wait().unwrap();
    c.run("umount m-c").ok();
    other.try_lock().unwrap();
    mount(c);
    drop(other);
    gone_and_whole(&lab, &hosts);
}

/// Each increment reads and writes under a lock. Without locks among hosts most would be lost.
#[test]
fn counters_under_locks_lose_no_increment() {
    const EACH: u32 = 25;
    let lab = Lab::new();
    let hosts = shared(&lab);
    fs::write(hosts[0].file("whole"), "0").unwrap();
    fs::write(hosts[0].file("range"), "0").unwrap();
    let increment = |file: &mut File| {
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut text).unwrap();
        file.write_all_at((text.parse::<u32>().unwrap() + 1).to_string().as_bytes(), 0).unwrap();
    };
    thread::scope(|scope| {
        for host in hosts {
            scope.spawn(move || {
                let mut file = open(&host.file("whole"));
                for _ in 0..EACH {
                    file.lock().unwrap();
                    increment(&mut file);
                    file.unlock().unwrap();
                }
            });
            scope.spawn(move || {
                let mut file = open(&host.file("range"));
                for _ in 0..EACH {
                    fcntl(&file, libc::F_SETLKW, libc::F_WRLCK, (0, 0)).unwrap();
                    increment(&mut file);
                    fcntl(&file, libc::F_SETLK, libc::F_UNLCK, (0, 0)).unwrap();
                }
            });
        }
    });
    for name in ["whole", "range"] {
        assert_eq!(fs::read_to_string(hosts[1].file(name)).unwrap(), (3 * EACH).to_string(), "{name}");
    }
    gone_and_whole(&lab, &hosts);
}

/// SQLite relies on fcntl(2) alone: a database that several hosts write, while the server is killed once.
#[test]
fn a_database_that_several_hosts_write_stays_whole() {
    const EACH: usize = 12;
    let mut lab = Lab::new();
    let paths = {
        let hosts = shared(&lab);
        hosts.map(|host| host.file("base.db"))
    };
    let script = "import sqlite3,sys\n\
        db=sqlite3.connect(sys.argv[1],timeout=120,isolation_level=None)\n\
        db.execute('create table if not exists t(host,n)')\n\
        for n in range(int(sys.argv[3])):\n\
        \x20   db.execute('begin immediate'); m=db.execute('select count(*) from t').fetchone()[0]\n\
        \x20   db.execute('insert into t values(?,?)',(sys.argv[2],m)); db.execute('commit')\n";
    let run = |path: &Path, host: usize| {
        let mut python = Command::new("python3");
        python.args(["-c", script]).arg(path).arg(host.to_string()).arg(EACH.to_string());
        python.stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<Child> = paths.iter().enumerate().map(|(host, path)| run(path, host)).collect();
    thread::sleep(Duration::from_secs(1));
    lab.stop("-KILL");
    lab.start();
    for child in children {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }
    let verify = "import sqlite3,sys; db=sqlite3.connect(sys.argv[1]); print(db.execute('pragma integrity_check').fetchone()[0], \
        sorted(n for n, in db.execute('select n from t'))==list(range(int(sys.argv[2]))))";
    let total = (paths.len() * EACH).to_string();
    let out = Command::new("python3").args(["-c", verify]).arg(&paths[1]).arg(total).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout), "ok True\n", "{out:?}");
}

#[test]
fn a_host_has_a_bounded_number_of_locks() {
    const MAX: i64 = 8192;
    let mut lab = Lab::new();
    {
        let hosts = shared(&lab);
        let held = open(&hosts[0].file("data"));
        let refused = (0..MAX + 1).find_map(|at| Some((at, lock(&held, libc::F_RDLCK, (2 * at, 1))?)));
        assert_eq!(refused, Some((MAX, libc::ENOLCK)));
        std::mem::forget(held);
    }
    // All of them are reported to the next server.
    lab.stop("-KILL");
    lab.start();
    let other = open(&lab.host("b").file("data"));
    assert_eq!(lock(&other, libc::F_WRLCK, (2 * MAX - 2, 1)), Some(libc::EAGAIN));
    assert_eq!(lock(&other, libc::F_WRLCK, (2 * MAX, 1)), None);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        // Beside them the host works on.
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                assert_eq!(lock(&other, libc::F_WRLCK, (2 * MAX, 1)), None);
            }
        });
        for n in 0..20 {
            fs::write(lab.host("c").file("beside"), n.to_string()).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
