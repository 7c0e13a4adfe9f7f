//! nbdkit killed under load: what was flushed is there, and a file system inside replays its journal.

use crate::lab::{Lab, has, python, run, until};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Writers that tell what is durable as they go; killed in the middle of it, again and again.
#[test]
fn what_was_flushed_or_written_with_fua_survives_a_kill() {
    killed_again_and_again("16M", LOAD, 20);
}

/// The same with so much between two flushes that the vault commits in between, beside writes.
#[test]
fn what_was_flushed_survives_a_kill_beside_commits() {
    killed_again_and_again("128M", LARGE_LOAD, 1000);
}

/// Kills the export of a volume of `size` once `load` has told `lines` lines, and more each time.
fn killed_again_and_again(size: &str, load: &str, lines: usize) {
    if !has(&["nbdkit"]) {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "v", "a", size]);
    for round in 1..=3u8 {
        let served = lab.export(&["v"]);
        let told = lab.path("told");
        let _ = fs::remove_file(&told);
        let mut writer = Command::new("/usr/bin/python3")
            .args(["-c", load, &served.uri("a"), &round.to_string(), told.to_str().unwrap()])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let told_lines = || fs::read_to_string(&told).unwrap_or_default().lines().count();
        until("some of it is durable", || told_lines() > lines * usize::from(round));
        served.kill();
        let _ = writer.wait();
        let served = lab.export(&["v"]);
        python(VERIFY, &[&served.uri("a"), &round.to_string(), told.to_str().unwrap()]);
        served.stop();
    }
    lab.ok(&["check", "v"]);
}

/// Two connections write blocks in turn, one flushes for both, or each write has FUA. A line is a block that is durable
/// and what it holds at least: the number of the write is in it.
const LOAD: &str = "
import nbd, random, struct, sys
uri, round, told = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], 'w')
a, b = nbd.NBD(), nbd.NBD()
a.connect_uri(uri)
b.connect_uri(uri)
rng, n, pending = random.Random(round), 0, []
while True:
    n += 1
    block = rng.randrange(4096)
    data = struct.pack('<BQI', round, n, block) * 315
    data = data[:4095] + b'.'
    fua = rng.randrange(8) == 0
    (a if n % 2 else b).pwrite(data, block * 4096, nbd.CMD_FLAG_FUA if fua else 0)
    pending.append((block, n))
    if fua or n % 16 == 0:
        if not fua:
            b.flush()
        told.write(''.join(f'{block} {n}\\n' for block, n in pending))
        told.flush()
        pending = []
";

/// Writes of 64 blocks, and a flush after 75 MiB of them.
const LARGE_LOAD: &str = "
import nbd, random, struct, sys
uri, round, told = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], 'w')
h = nbd.NBD()
h.connect_uri(uri)
rng, n, pending = random.Random(round), 0, []
while True:
    n += 1
    first = 64 * rng.randrange(512)
    blocks = range(first, first + 64)
    data = b''.join((struct.pack('<BQI', round, n, block) * 315)[:4095] + b'.' for block in blocks)
    h.pwrite(data, first * 4096)
    pending += ((block, n) for block in blocks)
    if n % 300 == 0:
        h.flush()
        told.write(''.join(f'{block} {n}\\n' for block, n in pending))
        told.flush()
        pending = []
";

const VERIFY: &str = "
import nbd, struct, sys
h = nbd.NBD()
h.connect_uri(sys.argv[1])
round, durable = int(sys.argv[2]), {}
for line in open(sys.argv[3]):
    if line.endswith('\\n'):
        block, n = map(int, line.split())
        durable[block] = n
assert len(durable) > 10
for block, n in durable.items():
    data = h.pread(4096, block * 4096)
    found, at_least, place = struct.unpack_from('<BQI', data)
    assert (found, place) == (round, block) and at_least >= n, (block, n, found, at_least, place)
    assert data == (struct.pack('<BQI', round, at_least, block) * 315)[:4095] + b'.', 'torn'
";

/// A volume as a block device of this machine: a file of nbdfuse, and a loop device over it.
struct Device {
    mounted: Child,
    device: String,
    mountpoint: String,
}

impl Device {
    /// `None` where this machine has no loop devices to give.
    fn of(lab: &Lab, uri: &str) -> Option<Device> {
        fs::create_dir_all(lab.path("fuse")).unwrap();
        fs::create_dir_all(lab.path("mnt")).unwrap();
        let file = lab.path("fuse/nbd");
        let mounted = Command::new("nbdfuse").arg(lab.path("fuse")).arg(uri).stderr(Stdio::null()).spawn().unwrap();
        until("nbdfuse is mounted", || file.exists());
        let found = Command::new("losetup").args(["--find", "--show"]).arg(&file).output().unwrap();
        let device = String::from_utf8(found.stdout).unwrap().trim().to_owned();
        let device = Device { mounted, device, mountpoint: lab.text_path("mnt") };
        if found.status.success() {
            return Some(device);
        }
        eprintln!("NOTE: there are no loop devices here: a file system in a volume is NOT tested");
        None
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", &self.mountpoint]).output();
        if !self.device.is_empty() {
            let _ = Command::new("losetup").args(["-d", &self.device]).output();
        }
        let fuse = Path::new(&self.mountpoint).with_file_name("fuse");
        let _ = Command::new("fusermount3").arg("-uz").arg(fuse).output();
        let _ = self.mounted.kill();
        let _ = self.mounted.wait();
    }
}

#[test]
fn a_file_system_in_a_volume_replays_its_journal() {
    if !has(&["nbdkit", "nbdfuse", "losetup", "mke2fs", "e2fsck"]) || run("id", &["-u"]).trim() != "0" {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "--block-size", "512", "v", "a", "64M"]);
    let served = lab.export(&["v"]);
    let Some(device) = Device::of(&lab, &served.uri("a")) else { return };
    run("mke2fs", &["-q", "-t", "ext4", &device.device]);
    run("mount", &[&device.device, &device.mountpoint]);
    // Files that are synced one by one, with others beside them; killed in the middle.
    let told = lab.path("told");
    let script = "import os, sys\n\
         n = 0\n\
         while True:\n\
         \x20   n += 1\n\
         \x20   open(f'{sys.argv[1]}/loose{n % 50}', 'w').write(str(n) * 3000)\n\
         \x20   with open(f'{sys.argv[1]}/synced{n}', 'w') as f:\n\
         \x20       f.write(str(n) * 3000)\n\
         \x20       f.flush()\n\
         \x20       os.fsync(f.fileno())\n\
         \x20   with open(sys.argv[2], 'a') as t:\n\
         \x20       t.write(f'{n}\\n')\n";
    let mut load = Command::new("/usr/bin/python3")
        .args(["-c", script, &device.mountpoint, told.to_str().unwrap()])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let synced = || fs::read_to_string(&told).unwrap_or_default().lines().count();
    until("files are synced", || synced() > 20);
    served.kill();
    let _ = load.wait();
    let last = synced();
    drop(device);
    let served = lab.export(&["v"]);
    let device = Device::of(&lab, &served.uri("a")).unwrap();
    // The journal is to be replayed, which the mount does.
    assert!(run("dumpe2fs", &["-h", &device.device]).contains("needs_recovery"));
    run("mount", &[&device.device, &device.mountpoint]);
    for n in 1..=last {
        let content = fs::read_to_string(format!("{}/synced{n}", device.mountpoint)).unwrap();
        assert!(content == n.to_string().repeat(3000), "file {n} of {last}");
    }
    run("umount", &[&device.mountpoint]);
    run("e2fsck", &["-fn", &device.device]);
    drop(device);
    served.stop();
    lab.ok(&["check", "v"]);
}
