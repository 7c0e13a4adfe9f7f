//! The clients that there are for NBD: what they write is what they read, on all ways that the protocol has.

use crate::lab::{Lab, has, noise, python, run};
use std::collections::HashSet;
use std::fs;

const MIB: usize = 1 << 20;

#[test]
fn images_go_in_and_out_the_same_and_stay_sparse() {
    if !has(&["nbdkit", "nbdinfo", "nbdcopy", "qemu-img"]) {
        return;
    }
    let lab = Lab::new();
    for block in ["512", "4096"] {
        let name = format!("b{block}");
        lab.ok(&["volume", "create", "--block-size", block, "v", &name, "32M"]);
    }
    let mut image = vec![0; 32 * MIB];
    image[MIB..3 * MIB].copy_from_slice(&noise(2 * MIB, 1));
    image[20 * MIB + 512..20 * MIB + 1536].copy_from_slice(&noise(1024, 2));
    let source = lab.file("image", &image);
    let served = lab.export(&["v"]);
    for (name, block) in [("b512", 512), ("b4096", 4096)] {
        let uri = served.uri(name);
        let info = run("nbdinfo", &["--json", &uri]);
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        let export = &info["exports"][0];
        for can in
            ["can_flush", "can_fua", "can_trim", "can_zero", "can_fast_zero", "can_multi_conn", "can_cache", "can_df"]
        {
            assert_eq!(export[can], true, "{can}");
        }
        assert_eq!((&export["is_read_only"], &export["is_rotational"]), (&false.into(), &false.into()));
        assert_eq!((&export["block_size_minimum"], &export["export-size"]), (&block.into(), &(32 * MIB).into()));
        run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &source, &uri]);
        let back = lab.text_path("back");
        run("nbdcopy", &[&uri, &back]);
        assert_eq!(fs::read(&back).unwrap(), image, "{name}");
        // What was never written, or written as zeros, is a hole for clients.
        let map = run("nbdinfo", &["--map", "--json", &uri]);
        let map: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
        let data: u64 = map.iter().filter(|run| run["type"] == 0).map(|run| run["length"].as_u64().unwrap()).sum();
        assert!((2 * MIB as u64 + 1024..3 * MIB as u64).contains(&data), "{map:?}");
        assert_eq!(map.iter().map(|run| run["length"].as_u64().unwrap()).sum::<u64>(), 32 * MIB as u64);
        run("nbdcopy", &[&source, &uri]);
        let compared = run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &source, &uri]);
        assert!(compared.contains("identical"), "{compared}");
    }
    served.stop();
    // A volume is the same bytes as a file of the vault.
    lab.ok(&["cp", "v", "vault:.lamassu-volumes/b512", "as-file"]);
    assert_eq!(fs::read(lab.path("as-file")).unwrap(), image);
    lab.ok(&["check", "v"]);
}

#[test]
fn qemu_s_requests_do_what_they_say() {
    if !has(&["nbdkit", "qemu-io"]) {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "v", "a", "16M"]);
    let served = lab.export(&["v"]);
    let uri = served.uri("a");
    let io = |commands: &[&str]| {
        let mut args = vec!["-f", "raw", "-d", "unmap"];
        commands.iter().for_each(|command| args.extend(["-c", command]));
        args.push(&uri);
        let said = run("qemu-io", &args);
        assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    };
    io(&["write -P 1 0 1M", "write -f -P 2 512 512", "write -P 3 1000k 5000k", "flush"]);
    io(&["read -P 1 0 512", "read -P 2 512 512", "read -P 1 1k 998k", "read -P 3 1000k 5000k"]);
    // Trimmed and zeroed ranges, with edges inside of blocks, read as zeros; what lies beside them stays.
    io(&["discard 1000k 3000k", "write -z 4500k 500k", "write -z -u 5200k 300k", "write -z -f 5837312 512"]);
    io(&[
        "read -P 0 1000k 3000k",
        "read -P 3 4000k 500k",
        "read -P 0 4500k 500k",
        "read -P 3 5000k 200k",
        "read -P 0 5200k 300k",
        "read -P 3 5500k 200k",
        "read -P 0 5837312 512",
        "read -P 3 5837824 512",
        "read -P 0 8M 8M",
    ]);
    served.stop();
    let served = lab.export(&["--read-only", "v"]);
    let out = std::process::Command::new("qemu-io")
        .args(["-f", "raw", "-c", "write 0 512", &served.uri("a")])
        .output()
        .unwrap();
    assert!(!out.status.success() || String::from_utf8_lossy(&out.stdout).contains("fail"), "{out:?}");
    served.stop();
}

/// Random requests from four connections at once, each on every fourth MiB, against a model; with flushes, and with
/// reads by another connection than wrote.
#[test]
fn several_connections_are_one_device() {
    if !has(&["nbdkit"]) {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "v", "a", "16M"]);
    let served = lab.export(&["v"]);
    python(CONNECTIONS, &[&served.uri("a")]);
    // The export ends while a client is connected, and has asked for nothing.
    let script = "import nbd, sys, time\nh = nbd.NBD(); h.connect_uri(sys.argv[1]); print('ready', flush=True); time.sleep(600)\n";
    let uri = served.uri("a");
    let mut idle = std::process::Command::new("/usr/bin/python3")
        .args(["-c", script, &uri])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = [0; 5];
    std::io::Read::read_exact(idle.stdout.as_mut().unwrap(), &mut line).unwrap();
    served.stop();
    let _ = idle.kill();
    let _ = idle.wait();
    lab.ok(&["check", "v"]);
}

const CONNECTIONS: &str = "
import nbd, random, sys, threading
MIB, uri = 1 << 20, sys.argv[1]
def connected():
    h = nbd.NBD()
    h.connect_uri(uri)
    return h
model = bytearray(16 * MIB)
failed = []
def worker(n):
    try:
        rng, h = random.Random(n), connected()
        for _ in range(150):
            base = (4 * rng.randrange(4) + n) * MIB
            at = 512 * rng.randrange(2000)
            size = min(512 * rng.choice([1, 1, 7, 8, 16, 128, 600]), MIB - at)
            what = rng.randrange(5)
            if what == 0:
                h.trim(size, base + at)
                data = bytes(size)
            elif what == 1:
                h.zero(size, base + at, rng.choice([0, nbd.CMD_FLAG_NO_HOLE, nbd.CMD_FLAG_FUA]))
                data = bytes(size)
            else:
                data = bytes([rng.randrange(1, 256)]) * (size - 1) + b'.'
                h.pwrite(data, base + at, rng.choice([0, 0, 0, nbd.CMD_FLAG_FUA]))
            model[base + at:base + at + size] = data
            if rng.randrange(10) == 0:
                h.flush()
            assert h.pread(size, base + at) == data, (n, base, at, size, what)
        h.shutdown()
    except Exception as error:
        failed.append(error)
threads = [threading.Thread(target=worker, args=(n,)) for n in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not failed, failed
h = connected()
assert h.can_multi_conn()
for at in range(0, 16 * MIB, MIB):
    assert h.pread(MIB, at) == model[at:at + MIB], at
# Past the end nothing is read or written; the connection goes on.
h.set_strict_mode(0)
for wrong in (lambda: h.pread(512, 16 * MIB), lambda: h.pwrite(b'x' * 1024, 16 * MIB - 512)):
    try:
        wrong()
    except nbd.Error:
        continue
    assert False, 'not refused'
assert h.pread(512, 0) == model[:512]
";

#[test]
fn fio_reads_what_it_wrote() {
    if !has(&["nbdkit", "fio"]) {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "--block-size", "4096", "v", "a", "16M"]);
    let served = lab.export(&["v"]);
    let uri = format!("--uri={}", served.uri("a"));
    let out = run(
        "fio",
        &[
            "--name=a",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bsrange=4k-64k",
            "--iodepth=16",
            "--size=16M",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--fsync=32",
            "--output-format=json",
        ],
    );
    assert!(out.contains("\"error\" : 0"), "{out}");
    served.stop();
    lab.ok(&["check", "v"]);
}

/// A guest's image in two versions, as two volumes; a snapshot and a clone: in the store equal blocks are equal.
#[test]
fn snapshots_stay_what_they_were_and_versions_deduplicate() {
    if !has(&["nbdkit", "nbdcopy"]) {
        return;
    }
    let lab = Lab::new();
    let first = noise(8 * MIB, 3);
    let mut second = first.clone();
    second[5 * MIB..6 * MIB].copy_from_slice(&noise(MIB, 4));
    let (one, two) = (lab.file("one", &first), lab.file("two", &second));
    lab.ok(&["volume", "create", "v", "a", "8M"]);
    lab.ok(&["volume", "create", "v", "b", "8M"]);
    let served = lab.export(&["v"]);
    run("nbdcopy", &[&one, &served.uri("a")]);
    run("nbdcopy", &[&two, &served.uri("b")]);
    served.stop();
    lab.ok(&["volume", "snapshot", "v", "a", "s"]);
    let served = lab.export(&["v"]);
    run("nbdcopy", &[&two, &served.uri("a")]);
    served.stop();
    lab.ok(&["volume", "clone", "v", "a@s", "c"]);
    let served = lab.export(&["v"]);
    for (export, content) in [("a", &second), ("a@s", &first), ("b", &second), ("c", &first)] {
        let back = lab.text_path("back");
        run("nbdcopy", &[&served.uri(export), &back]);
        assert!(fs::read(&back).unwrap() == *content, "{export}");
    }
    let said = python(
        "import nbd, sys\nh = nbd.NBD(); h.connect_uri(sys.argv[1]); print(h.is_read_only())\n",
        &[&served.uri("a@s")],
    );
    assert_eq!(said.trim(), "True");
    served.stop();
    lab.ok(&["check", "v"]);
    // Four files of 8 MiB, of which 9 MiB are different; to that each has its pages, sealed at random.
    let blocks: Vec<Vec<u8>> = lab
        .stored_files("v")
        .iter()
        .map(|path| fs::read(path).unwrap_or_else(|e| panic!("{path:?}: {e}")))
        .filter(|bytes| bytes.len() > MIB)
        .flat_map(|bytes| bytes.chunks(4096).map(<[u8]>::to_vec).collect::<Vec<_>>())
        .collect();
    let distinct = blocks.iter().collect::<HashSet<_>>().len();
    assert!(blocks.len() >= 4 * 8 * MIB / 4096, "{}", blocks.len());
    assert!((9 * MIB / 4096..10 * MIB / 4096).contains(&distinct), "{distinct} of {}", blocks.len());
}
