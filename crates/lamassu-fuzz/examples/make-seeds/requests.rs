//! Requests of a kernel, for the target `request`: one of each opcode with what it usually says, and with what it
//! hardly ever does.

use crate::Seeds;
use lamassu_fuse::control::{
    LAMASSU_IOC_CALL, LAMASSU_IOC_FREEZE, LAMASSU_IOC_FREEZE_WHILE_OPEN, LAMASSU_IOC_STATUS, LAMASSU_IOC_THAW,
};

const ROOT: u8 = 1;
/// What the two lookups of the prelude find, and the handles of what is opened then. A test of the target holds them
/// to it.
const TOP: u8 = 13;
const DIR: u8 = 7;
const FILE_HANDLE: u64 = 1;
const DIR_HANDLE: u64 = 2;
const LAST_NANO: u32 = 999_999_999;
/// FATTR_ATIME, FATTR_MTIME, FATTR_CTIME.
const ALL_TIMES: u32 = 1 << 4 | 1 << 5 | 1 << 10;

/// Fields of a structure of the protocol, in order.
#[derive(Default)]
struct Body(Vec<u8>);

impl Body {
    fn u32s(mut self, fields: &[u32]) -> Body {
        fields.iter().for_each(|field| self.0.extend_from_slice(&field.to_le_bytes()));
        self
    }

    fn u64s(mut self, fields: &[u64]) -> Body {
        fields.iter().for_each(|field| self.0.extend_from_slice(&field.to_le_bytes()));
        self
    }

    fn name(mut self, name: &str) -> Body {
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(0);
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Body {
        self.0.extend_from_slice(bytes);
        self
    }
}

fn body() -> Body {
    Body::default()
}

fn one(opcode: u8, node: u8, body: Body) -> Vec<u8> {
    odd(opcode, node, 0, body)
}

fn odd(opcode: u8, node: u8, odd: u8, Body(body): Body) -> Vec<u8> {
    [&[opcode, node, odd][..], &(body.len() as u16).to_le_bytes(), &body].concat()
}

/// Finds `top` and `dir`, and opens both.
fn prelude() -> Vec<u8> {
    let open = |flags: u32| body().u32s(&[flags, 0]);
    [one(1, ROOT, body().name("top")), one(1, ROOT, body().name("dir")), one(14, TOP, open(2)), one(27, DIR, open(0))]
        .concat()
}

fn set_times(seconds: u64, nanos: u32) -> Body {
    let whole = body().u32s(&[ALL_TIMES, 0]).u64s(&[FILE_HANDLE, 0, 0, seconds, seconds, seconds]);
    whole.u32s(&[nanos, nanos, nanos, 0, 0, 0, 0, 0])
}

fn change(valid: u32, size: u64, mode: u32, owner: u32) -> Body {
    body().u32s(&[valid, 0]).u64s(&[FILE_HANDLE, size, 0, 0, 0, 0]).u32s(&[0, 0, 0, mode, 0, owner, owner, 0])
}

/// fuse_read_in and fuse_write_in.
fn transfer(handle: u64, offset: u64, len: u32, flags: u32) -> Body {
    body().u64s(&[handle, offset]).u32s(&[len, flags]).u64s(&[0]).u32s(&[2, 0])
}

fn on_inodes() -> Vec<Vec<u8>> {
    let mut all = vec![
        one(3, TOP, body().u32s(&[1, 0]).u64s(&[FILE_HANDLE])),
        one(4, TOP, change(1 << 3, 3, 0, 0)),
        one(4, TOP, change(1 << 3, u64::MAX, 0, 0)),
        odd(4, TOP, 1, change(1 | 1 << 1 | 1 << 2, 0, 0o6755, 1000)),
        one(4, TOP, change(1 << 7 | 1 << 8 | ALL_TIMES, 0, 0, 0)),
        one(2, TOP, body().u64s(&[u64::MAX])),
        one(42, ROOT, body().u32s(&[2, 0]).u64s(&[TOP.into(), 1, DIR.into(), u64::MAX])),
        one(42, ROOT, body().u32s(&[u32::MAX, 0])),
        one(5, TOP, body()),
        one(17, ROOT, body()),
        one(34, TOP, body().u32s(&[7, 0])),
        one(36, ROOT, body().u64s(&[DIR.into()])),
        one(26, ROOT, body().u32s(&[7, 41, 0, 0])),
        one(37, TOP, body().u64s(&[1]).u32s(&[4096, 0])),
        one(38, ROOT, body()),
        one(41, ROOT, body()),
        one(52, TOP, body().u32s(&[0, 0]).u64s(&[1]).u32s(&[0xfff, 0])),
    ];
    let ends = [i64::MIN, i64::MIN + 1, -1, i64::MAX];
    let times = ends.into_iter().flat_map(|seconds| [0, 1, LAST_NANO, u32::MAX].map(|nanos| (seconds as u64, nanos)));
    all.extend(times.map(|(seconds, nanos)| one(4, TOP, set_times(seconds, nanos))));
    all
}

fn on_trees() -> Vec<Vec<u8>> {
    let long = "n".repeat(255);
    vec![
        one(1, DIR, body().name(&long)),
        one(1, DIR, body().name("..")),
        one(1, DIR, body().bytes(b"no end")),
        one(6, DIR, body().name("l1").name(&"t".repeat(4095))),
        one(6, DIR, body().name("l2").name("")),
        one(8, DIR, body().u32s(&[0o010_644, u32::MAX, 0o22, 0]).name("fifo")),
        one(8, DIR, body().u32s(&[0o020_644, 0x103, 0o22, 0]).name("node")),
        one(9, DIR, body().u32s(&[0o7777, 0o22]).name("new")),
        one(10, ROOT, body().name("top")),
        one(11, ROOT, body().name("dir")),
        one(12, ROOT, body().u64s(&[DIR.into()]).name("top").name(&long)),
        one(45, ROOT, body().u64s(&[DIR.into()]).u32s(&[1, 0]).name("top").name("file")),
        one(45, ROOT, body().u64s(&[1]).u32s(&[2, 0]).name("top").name("dir")),
        one(45, ROOT, body().u64s(&[u64::MAX]).u32s(&[u32::MAX, 0]).name("a").name("b")),
        one(13, DIR, body().u64s(&[TOP.into()]).name("hard")),
        one(35, DIR, body().u32s(&[0o102, 0o6644, 0o22, 0]).name("made")),
        one(51, DIR, body().u32s(&[2, 0o600, 0, 0]).name("")),
        one(28, DIR, transfer(DIR_HANDLE, 0, 4096, 0)),
        one(28, DIR, transfer(DIR_HANDLE, u64::MAX, u32::MAX, 0)),
        one(44, DIR, transfer(DIR_HANDLE, 0, 4096, 0)),
        one(44, DIR, transfer(DIR_HANDLE, 1 << 63, 1, 0)),
        one(29, DIR, body().u64s(&[DIR_HANDLE]).u32s(&[0, 0]).u64s(&[0])),
        one(30, DIR, body().u64s(&[DIR_HANDLE]).u32s(&[1, 0])),
    ]
}

fn on_files() -> Vec<Vec<u8>> {
    const NEAR_END: u64 = i64::MAX as u64;
    let write = |offset, len: u32, flags, data: &[u8]| transfer(FILE_HANDLE, offset, len, flags).bytes(data);
    let release = |handle, flags| one(18, TOP, body().u64s(&[handle]).u32s(&[flags, 0]).u64s(&[0]));
    let lock = |opcode| one(opcode, TOP, body().u64s(&[FILE_HANDLE, 1, 0, NEAR_END]).u32s(&[1, 1, 0, 0]));
    let allocate = |offset, len, mode| body().u64s(&[FILE_HANDLE, offset, len]).u32s(&[mode, 0]);
    let seek = |offset, whence| body().u64s(&[FILE_HANDLE, offset]).u32s(&[whence, 0]);
    let copy = |from, to, len| body().u64s(&[FILE_HANDLE, from, TOP.into(), FILE_HANDLE, to, len, 0]);
    vec![
        one(15, TOP, transfer(FILE_HANDLE, 0, 4096, 0)),
        one(15, TOP, transfer(FILE_HANDLE, NEAR_END, u32::MAX, 2)),
        one(15, TOP, transfer(FILE_HANDLE, u64::MAX, 1, 0)),
        one(16, TOP, write(3, 4, 0, b"data")),
        odd(16, TOP, 1, write(NEAR_END, 4, 5, b"data")),
        one(16, TOP, write(0, u32::MAX, 0, b"data")),
        one(25, TOP, body().u64s(&[FILE_HANDLE]).u32s(&[0, 0]).u64s(&[7])),
        one(20, TOP, body().u64s(&[FILE_HANDLE]).u32s(&[1, 0])),
        one(50, TOP, body().u64s(&[0])),
        one(18, TOP, body().u64s(&[FILE_HANDLE]).u32s(&[2, 3]).u64s(&[7])),
        // Opened for reading, closed as if for writing, and once more.
        [one(14, TOP, body().u32s(&[0, 0])), release(3, 2), release(3, 2), release(1, 0), release(1, 2)].concat(),
        lock(31),
        lock(32),
        lock(33),
        one(43, TOP, allocate(0, 100_000, 0)),
        one(43, TOP, allocate(NEAR_END, NEAR_END, 1)),
        one(43, TOP, allocate(1 << 40, NEAR_END, 3)),
        one(43, TOP, allocate(10, NEAR_END, 16)),
        one(46, TOP, seek(0, 3)),
        one(46, TOP, seek(u64::MAX, 4)),
        one(46, TOP, seek(NEAR_END, 3)),
        one(47, TOP, copy(0, 100, 4)),
        one(47, TOP, copy(NEAR_END, NEAR_END, u64::MAX)),
        one(53, TOP, copy(0, NEAR_END, u64::MAX)),
        one(40, TOP, body().u64s(&[FILE_HANDLE, 1]).u32s(&[0, 1])),
        one(48, TOP, body().u64s(&[0, 0, 0]).u32s(&[0, 0])),
        one(49, TOP, body().u64s(&[0]).u32s(&[0, 0])),
    ]
}

fn on_attributes() -> Vec<Vec<u8>> {
    let access_list =
        [&2u32.to_le_bytes()[..], &[1, 0, 6, 0, 255, 255, 255, 255], &[4, 0, 4, 0, 255, 255, 255, 255]].concat();
    let set = |len: u32, flags, name, value: &[u8]| body().u32s(&[len, flags]).name(name).bytes(value);
    let control = |command: u32, in_len, out_len, data: &[u8]| {
        body().u64s(&[DIR_HANDLE]).u32s(&[1 << 4, command]).u64s(&[0]).u32s(&[in_len, out_len]).bytes(data)
    };
    let mut all = vec![
        one(21, TOP, set(5, 0, "user.a", b"value")),
        one(21, TOP, set(u32::MAX, 0, "user.a", b"value")),
        one(21, TOP, set(5, 2, "security.capability", b"value")),
        one(21, DIR, set(20, 0, "system.posix_acl_access", &access_list)),
        one(22, TOP, body().u32s(&[0, 0]).name("user.note")),
        one(22, TOP, body().u32s(&[u32::MAX, 0]).name("user.note")),
        one(23, TOP, body().u32s(&[1, 0])),
        one(24, TOP, body().name("user.note")),
        one(39, TOP, control(0, u32::MAX, u32::MAX, b"")),
    ];
    let commands =
        [LAMASSU_IOC_FREEZE, LAMASSU_IOC_THAW, LAMASSU_IOC_FREEZE_WHILE_OPEN, LAMASSU_IOC_STATUS, LAMASSU_IOC_CALL];
    for command in commands {
        let size = command >> 16 & 0x3fff;
        all.push(one(39, ROOT, control(command, 8, size, &[4, 0, 0, 0, 1, 2, 3, 4])));
        all.push(odd(39, DIR, 1, control(command, 0, 0, b"")));
    }
    // A change waits until the thaw.
    let frozen =
        [one(39, ROOT, control(LAMASSU_IOC_FREEZE, 0, 0, b"")), one(9, DIR, body().u32s(&[0o755, 0]).name("later"))];
    all.push([frozen.concat(), one(39, ROOT, control(LAMASSU_IOC_THAW, 0, 0, b""))].concat());
    all
}

/// Packets that no kernel sends.
fn broken() -> Vec<Vec<u8>> {
    let mut all: Vec<_> = (1..5).map(|how| odd(1, ROOT, how << 1, body().name("top"))).collect();
    all.push(one(255, 0, body().bytes(&[40, 0, 0, 0, 1])));
    all.push(one(0, ROOT, body()));
    all.push(one(254, ROOT, body().bytes(&[0xff; 100])));
    // Every opcode without its arguments.
    all.push((1..=53).filter(|opcode| *opcode != 38).flat_map(|opcode| one(opcode, TOP, body())).collect());
    all
}

pub fn requests(seeds: &mut Seeds) {
    // First what shows, to a test, that the numbers above are right.
    let first =
        vec![[one(15, TOP, transfer(FILE_HANDLE, 0, 64, 0)), one(28, DIR, transfer(DIR_HANDLE, 0, 4096, 0))].concat()];
    let rows = [first, on_inodes(), on_trees(), on_files(), on_attributes(), broken()].concat();
    let inputs = seeds.entry("request").or_default();
    inputs.extend(rows.iter().map(|row| [prelude(), row.clone()].concat()));
    // Several in one session.
    inputs.extend(rows.chunks(9).map(|rows| [prelude(), rows.concat()].concat()));
}
