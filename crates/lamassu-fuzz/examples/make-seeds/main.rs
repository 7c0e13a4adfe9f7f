//! Writes `fuzz/seeds` from `testdata` and from the layouts that the targets read: `fuzz/make-seeds` calls it with the
//! folder of seeds and a folder with the unpacked golden vaults.

mod provider;
mod requests;
mod rows;
mod sharing;

use data_encoding::HEXLOWER;
use lamassu_crypto::compress::{pack, version_of};
use lamassu_format::header::VaultId;
use lamassu_format::{Codec, Compression};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
type Seeds = BTreeMap<&'static str, Vec<Vec<u8>>>;

fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(out), Some(testdata), Some(vaults)) = (args.next(), args.next(), args.next()) else {
        return Err("usage: make-seeds SEEDS TESTDATA UNPACKED".into());
    };
    let mut seeds = Seeds::new();
    headers(&mut seeds, &vaults)?;
    keychains(&mut seeds);
    pages(&mut seeds, &testdata)?;
    payloads(&mut seeds)?;
    records(&mut seeds, &testdata)?;
    texts(&mut seeds, &testdata)?;
    files(&mut seeds);
    shares(&mut seeds);
    answers(&mut seeds);
    histories(&mut seeds);
    anchor_rows(&mut seeds);
    tree_records(&mut seeds);
    requests::requests(&mut seeds);
    sharing::sharing(&mut seeds);
    rows::rows(&mut seeds);
    provider::provider(&mut seeds);
    for (target, inputs) in seeds {
        let dir = out.join(target);
        std::fs::create_dir_all(&dir)?;
        for (i, input) in inputs.iter().enumerate() {
            std::fs::write(dir.join(format!("{i:03}")), input)?;
        }
    }
    Ok(())
}

fn vectors(testdata: &Path, name: &str) -> Result<Vec<Value>> {
    let text = std::fs::read(testdata.join("vectors").join(name))?;
    Ok(serde_json::from_slice(&text)?)
}

fn hex(value: &Value) -> Vec<u8> {
    value.as_str().and_then(|text| HEXLOWER.decode(text.as_bytes()).ok()).unwrap_or_default()
}

fn headers(seeds: &mut Seeds, vaults: &Path) -> Result<()> {
    let mut vaults: Vec<_> = std::fs::read_dir(vaults)?.collect::<std::io::Result<_>>()?;
    vaults.sort_by_key(|e| e.file_name());
    for vault in vaults {
        let header = std::fs::read(vault.path().join("lamassu.vault"))?;
        let zone = String::from_utf8(header.clone())?.replace("lamassu-vault", "lamassu-zone");
        let members = ["zone", "reserved_slots", "names", "name_max", "small_files"];
        let mut zone: serde_json::Map<String, Value> = serde_json::from_str(&zone)?;
        members.iter().for_each(|member| drop(zone.remove(*member)));
        let inputs = seeds.entry("header").or_default();
        inputs.push(header);
        inputs.push(serde_json::to_vec(&zone)?);
    }
    Ok(())
}

/// What precedes the keychain: vault or zone, kind, id, label, cost, time.
fn keychains(seeds: &mut Seeds) {
    let epoch = |n: u32| format!("{{\"created\":1,\"epoch\":{n},\"key\":\"{}\"}}", "5a".repeat(32));
    let chains = [
        format!("{{\"inner\":[{}],\"outer\":[{}]}}", epoch(1), epoch(1)),
        format!("{{\"inner\":[{},{}],\"outer\":[]}}", epoch(1), epoch(2)),
        format!("{{\"inner\":[{}],\"outer\":[{}]}}", epoch(u32::MAX), epoch(7)),
        format!("{{\"inner\":[{},{}],\"outer\":[]}}", epoch(2), epoch(2)),
        "{\"inner\":[],\"outer\":[]}".to_owned(),
    ];
    for (i, chain) in chains.iter().enumerate() {
        for kind in 0..3u8 {
            let mut input = vec![i as u8 & 1, kind, 1, 0, 4, 0, b'n', b'o', b't', b'e'];
            if kind == 2 {
                input.push(8);
            }
            input.extend_from_slice(&[0; 10][..if kind == 2 { 9 } else { 10 }]);
            input.extend_from_slice(chain.as_bytes());
            seeds.entry("keychain").or_default().push(input);
        }
    }
}

/// Suite, block size, reserved slots, page number, content.
fn pages(seeds: &mut Seeds, testdata: &Path) -> Result<()> {
    let inputs = seeds.entry("page").or_default();
    for page in vectors(testdata, "pages.json")?.iter().take(4) {
        inputs.push([&[0, 0, 7, 0][..], &hex(&page["content"])].concat());
    }
    let geometry = lamassu_format::Geometry::new(4096, 8).ok_or("a geometry")?;
    let mut page = lamassu_format::Page::empty(lamassu_format::FileId([3; 16]));
    for (used, tail, pending, g) in [(0, 100, 0, 0), (5, 700, 0b10100, 0), (116, 0, 1, 1), (3, 0, 7, 2)] {
        page.keys = lamassu_format::Keys::from(&vec![[6; 32]; used][..]);
        page.tail = vec![1; tail];
        page.pending = pending;
        page.replaced = pending & 0b100;
        page.previous = lamassu_format::Keys::from(&vec![[8; 32]; page.replaced.count_ones() as usize][..]);
        page.size = (g * geometry.blocks_per_page() + used as u64) * 4096 + tail as u64;
        (page.session, page.sequence) = (2, 4);
        let built = page.build(&geometry, lamassu_format::PageNo(g));
        inputs.push([&[0, 0, 7, g as u8][..], &built[lamassu_format::page::SEALED_AT..]].concat());
    }
    Ok(())
}

/// Suite, block size, codec, payload.
fn payloads(seeds: &mut Seeds) -> Result<()> {
    let inputs = seeds.entry("payload").or_default();
    let blocks = [vec![0; 4096], b"the same words, ".repeat(256), (0..4096u32).map(|at| (at / 16) as u8).collect()];
    for (n, codec) in [Codec::Lz4, Codec::Zstd(1), Codec::Zstd(3)].into_iter().enumerate() {
        let compression = Compression::new(codec, version_of(codec), 512, (lamassu_format::Suite::Aes, 4096))?;
        for block in &blocks {
            let mut packed = block.clone();
            let len = pack(compression, &mut packed);
            inputs.push([&[0, 0, n as u8][..], &packed[..len]].concat());
        }
    }
    inputs.push([&[1, 0, 0][..], &[1, 255, 255, 255]].concat());
    Ok(())
}

/// Contents of sealed records, for the targets that seal them; and sealed ones as texts.
fn records(seeds: &mut Seeds, testdata: &Path) -> Result<()> {
    for record in vectors(testdata, "records.json")?.iter().take(10) {
        let content = hex(&record["content"]);
        let kind = record["kind"].as_u64().unwrap_or(1) as u8;
        let text = lamassu_format::name::encode(&hex(&record["record"])).into_bytes();
        match kind {
            1 => {
                // Mode: bit 0 the root, then raw, b64 or sealed; then the kind of record.
                for mode in [0b100, 0b101, 0b1_0100, 0b1000_0100] {
                    seeds.entry("dir_record").or_default().push([&[mode][..], &content].concat());
                }
                seeds.entry("dir_record").or_default().push([&[0][..], &text].concat());
            }
            2 => {
                seeds.entry("symlink").or_default().push([&[1][..], &content].concat());
                seeds.entry("symlink").or_default().push([&[0][..], &text].concat());
            }
            5 => seeds.entry("xattr").or_default().push([&[0, 9][..], b"user.note", &content].concat()),
            _ => {}
        }
    }
    let mut record = [0; lamassu_format::record::DIR_RECORD_LEN_MAX];
    let profile = lamassu_format::Profile::of_number(1).expect("integrity");
    let _ = lamassu_format::DirRecord { id: [1; 16], secret: &[2; 32], profile }.encode_into(&mut record);
    seeds.entry("dir_record").or_default().push([&[4][..], &record].concat());
    let root = lamassu_format::RootRecord { mode: 0o750, uid: 1000, gid: 100 }.encode();
    let mut sessions = lamassu_format::SessionRecord::after(3, 0);
    _ = sessions.begin(0);
    // Mode: bit 0 the record of sessions, then raw, b64 or sealed.
    for mode in [0u8, 2, 4, 0x84] {
        seeds.entry("state_record").or_default().push([&[mode][..], &root].concat());
        seeds.entry("state_record").or_default().push([&[mode | 1][..], &sessions.encode()].concat());
    }
    let id = [9; 16];
    for mode in [2u8, 2 | 0x40 | 0x20, 2 | 0x10, 2 | 0x80] {
        let input = [&[mode][..], &id, &200u16.to_le_bytes(), &[b'r'; 200], &[b'f'; 680]].concat();
        seeds.entry("symlink").or_default().push(input);
    }
    seeds.entry("xattr").or_default().push([&[4, 9][..], b"user.note", b"value"].concat());
    seeds.entry("xattr").or_default().push([&[4, 24][..], b"system.posix_acl_default", &[2, 0, 0, 0]].concat());
    seeds.entry("xattr").or_default().push([&[1, 4][..], b"Zm9v", b"value"].concat());
    seeds.entry("xattr").or_default().push([&[2, 9][..], b"user.note", b"value"].concat());
    Ok(())
}

fn texts(seeds: &mut Seeds, testdata: &Path) -> Result<()> {
    for name in vectors(testdata, "names.json")?.iter().take(8) {
        let plain = name["name"].as_str().unwrap_or_default().as_bytes();
        for text in [name["entry"].as_str(), name["long"].as_str(), name["name"].as_str()].into_iter().flatten() {
            seeds.entry("names").or_default().push(text.as_bytes().to_vec());
        }
        for mode in 0..4u8 {
            seeds.entry("companion").or_default().push([&[mode][..], plain].concat());
        }
    }
    for name in ["lamassu.dir", "lamassu.vault", "lamassu.link.CQkJCQkJCQkJCQkJCQkJCQ", ".", "..", "a/b"] {
        seeds.entry("names").or_default().push(name.as_bytes().to_vec());
        seeds.entry("companion").or_default().push([&[2][..], name.as_bytes()].concat());
        seeds.entry("companion").or_default().push([&[3][..], name.as_bytes()].concat());
    }
    seeds.entry("companion").or_default().push([&[2][..], &[b'x'; 255]].concat());
    let sources = [
        "passphrase:prompt",
        "passphrase:file:/root/key",
        "passphrase:env:NAME",
        "raw:file:k",
        "hex:file:/k",
        "raw:prompt",
    ];
    for source in sources {
        seeds.entry("source").or_default().push(source.as_bytes().to_vec());
    }
    seeds.entry("source").or_default().push([b'a'; 64].to_vec());
    for options in [
        "rw,nosuid,nodev,noexec,allow_other,fsname=/srv/x,cache=through,noauto,x-systemd.automount,threads=3",
        "ro,,suid,subtype=a-b,read_ahead_kb=1024",
        "cache=none,direct_io,max_threads=64,defaults,_netdev,nofail,comment=x",
    ] {
        seeds.entry("options").or_default().push(options.as_bytes().to_vec());
    }
    Ok(())
}

/// Suite, block size, small files, shape, state; where and how much is written; then what the store does.
fn files(seeds: &mut Seeds) {
    for shape in 0..8u8 {
        for state in 0..6u8 {
            let mut input = vec![shape % 4, u8::from(shape == 2), 0, shape, state];
            input.extend_from_slice(&(u64::from(shape) * 70_000 + 11).to_le_bytes());
            input.extend_from_slice(&5000u16.to_le_bytes());
            // One act: its kind, two sectors, what it needs besides.
            let act = shape.wrapping_mul(7).wrapping_add(state) % 10;
            input.extend_from_slice(&[act, shape * 9, 0, state, 0, 3, 1, 4, 0, 9]);
            seeds.entry("file").or_default().push(input);
        }
    }
}

/// Odd: payloads of 37 bytes (number and threshold, set, vault, point); even: words.
fn shares(seeds: &mut Seeds) {
    let payload = |number: u8, need: u8| [&[number << 4 | need, 1, 2, 3, 4][..], &[number; 32]].concat();
    for (need, numbers) in [(2, &[1, 2][..]), (3, &[1, 2]), (3, &[1, 9, 4]), (2, &[1, 1]), (0, &[1]), (15, &[15])] {
        let payloads: Vec<u8> = numbers.iter().flat_map(|n| payload(*n, need)).collect();
        seeds.entry("share").or_default().push([&[1][..], &payloads].concat());
    }
    let words = format!("# Share 1 of 2\n1. {}\n\n{}", "abandon ".repeat(30), "zoo zoo");
    seeds.entry("share").or_default().push([&[0][..], words.as_bytes()].concat());
}

/// An item of TTLV: tag, type, length, value, padding.
fn item(tag: u32, kind: u8, value: &[u8]) -> Vec<u8> {
    let mut bytes = [&tag.to_be_bytes()[1..], &[kind], &(value.len() as u32).to_be_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

/// Answers of a KMIP server: to Locate (8), Get (10) and Get Attributes (11), and a refusal.
fn answers(seeds: &mut Seeds) {
    let number = |tag, n: u32| item(tag, 5, &n.to_be_bytes());
    let id = item(0x42_0094, 7, b"17");
    let material = item(0x42_0043, 8, &[7; 32]);
    let block = item(0x42_0040, 1, &[number(0x42_0042, 1), item(0x42_0045, 1, &material)].concat());
    let key = [number(0x42_0057, 2), id.clone(), item(0x42_008f, 1, &block)].concat();
    let state = [item(0x42_000a, 7, b"State"), number(0x42_000b, 2)].concat();
    let attributes = [id.clone(), item(0x42_0008, 1, &state)].concat();
    for (operation, payload) in [(8, id.clone()), (8, id.repeat(2)), (8, vec![]), (10, key), (11, attributes)] {
        let batch = [number(0x42_005c, operation), number(0x42_007f, 0), item(0x42_007c, 1, &payload)].concat();
        seeds.entry("answer").or_default().push(item(0x42_007b, 1, &item(0x42_000f, 1, &batch)));
    }
    let refused = [number(0x42_007f, 1), number(0x42_007e, 3), item(0x42_007d, 7, b"no\x1b[2J")].concat();
    seeds.entry("answer").or_default().push(item(0x42_007b, 1, &item(0x42_000f, 1, &refused)));
}

/// Odd: where and how an entry is changed, then contents, one a line.
fn histories(seeds: &mut Seeds) {
    let entry =
        r#"{"time":1,"event":"created","uid":0,"host":"h","slot":1,"tier":"inner","epoch":2,"details":{"a":"b"}}"#;
    for (at, flip, lines) in [(0u16, 0u8, 1), (0, 1, 2), (300, 0x80, 3), (44, 4, 1)] {
        let contents = vec![entry; lines].join("\n");
        let input = [&[1][..], &at.to_le_bytes(), &[flip], contents.as_bytes()].concat();
        seeds.entry("history").or_default().push(input);
    }
    seeds.entry("history").or_default().push([&[0, 0, 1, 0, 0][..], &[0; 600]].concat());
}

/// Trees of each degree and height, with nothing, pages, or records altered, and pages that are written afterwards.
fn tree_records(seeds: &mut Seeds) {
    for (degree, pages, every) in [(0, 1_u16, 0), (0, 40, 0), (1, 250, 3), (2, 250, 0), (2, 299, 200)] {
        for acts in
            [&[][..], &[0, 5, 0], &[1, 7, 0, 2, 0, 0], &[3, 0, 0, 27, 1, 0], &[0x24, 2, 0, 1, 2, 3, 4], &[5, 0, 0]]
        {
            let head = [&[degree][..], &pages.to_le_bytes(), &[every]].concat();
            let mut seed = [&head[..], acts].concat();
            // The rest of the acts loses records; some writes follow.
            seed.resize(seed.len() + 72, 2);
            seed.extend([3, 0, 1, 200, 0, 0, 17, 0, 8]);
            seeds.entry("tree_records").or_default().push(seed);
        }
    }
}

/// Rows of every kind, each behind the byte that says what it is.
fn anchor_rows(seeds: &mut Seeds) {
    use lamassu_anchor::row::{Content, Cut, FileRow, Inodes, Open, Over, Sealed};
    use lamassu_anchor::{
        Digest, EntryPlace, EntryRow, Intent, ObjectId, ObjectKind, Revision, Row, Token, TokenKey, VaultRow, Window,
    };
    let digest = |byte| Digest([byte; 32]);
    let (name, window) = (Token([5; 16]), Window { session: 7, tag: lamassu_format::SessionTag([6; 6]), covered: 300 });
    let cut = Some(Cut { after: window, from: lamassu_format::PageNo(2) });
    let open = Open { file: lamassu_format::FileId([3; 16]), windows: [window].into_iter().collect(), cut };
    let contents = [
        Content::File(FileRow {
            root: digest(1),
            size: 5000,
            twin: Some(digest(2)),
            blocks: Some(digest(3)),
            ..FileRow::default()
        }),
        Content::File(FileRow { root: digest(1), size: 1 << 40, open: Some(open), ..FileRow::default() }),
        Content::File(FileRow { profile: lamassu_format::Profile::of_number(3).expect("none"), ..FileRow::default() }),
        Content::Dir { record: Sealed::Is(digest(4)), parent: ObjectId(1), name },
        Content::Link(Sealed::Becomes { old: digest(4), new: digest(5) }),
        Content::Char(0x501),
        Content::Fifo,
    ];
    let row = |content| Row { mode: 0o644, uid: 1000, gid: 100, links: 1, content, attributes: Sealed::Is(digest(6)) };
    let place = |dir| EntryPlace { dir: ObjectId(dir), name };
    let was = EntryRow { kind: ObjectKind::File, object: ObjectId(300) };
    let vault = VaultRow {
        vault: VaultId([1; 16]),
        revision: Revision(9),
        next_object: ObjectId(301),
        next_intent: 4,
        sessions: lamassu_anchor::row::Announced { recorded: 6, last: 7 },
        suite: lamassu_format::Suite::Chacha,
        domain: lamassu_format::Domain::File,
        degree_log2: 4,
        blocks: false,
        is_in_use: false,
        tokens: TokenKey::new([2; 32]),
        header: Sealed::Is(digest(7)),
        history: (3, digest(8)),
        next_history: None,
        root_permissions: Sealed::Nothing,
    };
    let mut rows: Vec<_> = contents.into_iter().map(|content| (0, row(content).encode())).collect();
    rows.push((1, was.encode()));
    rows.push((2, Intent::Remove { at: place(1), was }.encode()));
    rows.push((
        2,
        Intent::Move {
            from: place(1),
            to: place(2),
            to_name: b"name"[..].into(),
            over: Over::Replaced,
            inodes: Inodes { source: 11, target: 12 },
        }
        .encode(),
    ));
    rows.push((3, vault.encode()));
    anchor_exports(seeds, &vault, &rows);
    seeds.entry("anchor_row").or_default().extend(rows.into_iter().map(|(kind, bytes)| [&[kind][..], &bytes].concat()));
}

/// An export of these rows, and one that begins like an export and goes on like a row of the vault.
fn anchor_exports(seeds: &mut Seeds, vault: &lamassu_anchor::VaultRow, rows: &[(u8, Vec<u8>)]) {
    use lamassu_anchor::export::Writer;
    use lamassu_anchor::table::Space;
    let of = |kind| rows.iter().filter(move |(of, _)| *of == kind).map(|(_, bytes)| bytes.as_slice()).zip(1_u64..);
    let key = |number: u64, more: &[u8]| [&number.to_be_bytes()[..], more].concat();
    let digests = [9; 16 * 32];
    let mut all = vec![(Space::Vault, b"vault".to_vec(), vault.encode())];
    all.extend(of(0).map(|(row, number)| (Space::Objects, key(number, &[]), row.to_vec())));
    all.push((Space::Open, key(2, &[]), Vec::new()));
    all.extend(of(1).map(|(entry, number)| (Space::Entries, key(number, &[5; 16]), entry.to_vec())));
    all.push((Space::Held, key(2, &key(0, &[])), digests.to_vec()));
    all.extend(of(2).map(|(intent, number)| (Space::Intents, key(number, &[]), intent.to_vec())));
    let mut export = Vec::new();
    let mut writer = Writer::begin(&mut export, vault).expect("memory takes everything");
    all.iter().for_each(|(space, key, value)| writer.row(*space, key, value).expect("rows are short"));
    writer.end(&lamassu_crypto::Secret::new(&mut [3; 32])).expect("memory takes everything");
    anchor_logs(seeds, &all);
    let made_up = [&export[..40], &vault.encode()].concat();
    seeds.entry("anchor_export").or_default().extend([export, made_up]);
}

/// The record of a commit of these rows, as the log of an anchor has it; and its changes by themselves.
fn anchor_logs(seeds: &mut Seeds, rows: &[(lamassu_anchor::table::Space, Vec<u8>, Vec<u8>)]) {
    use lamassu_anchor::table::{Change, DiskTable, Table};
    const BLOCK_LEN: usize = 4096;
    const HEAD_LEN: usize = 64;
    let path = std::env::temp_dir().join(format!("lamassu-seeds-{}", std::process::id()));
    let table = DiskTable::create(&path).expect("a file that is not there yet");
    let changes = rows.iter().enumerate().map(|(n, (space, key, value))| Change {
        space: *space,
        key: key.clone(),
        value: Some(value.clone()).filter(|_| n % 5 != 4),
    });
    table.commit(&changes.collect::<Vec<_>>()).expect("there is room for it");
    let file = std::fs::read(&path).expect("its own file");
    drop(table);
    std::fs::remove_file(&path).expect("its own file");
    let record = &file[BLOCK_LEN..];
    let len = u64::from_le_bytes(record[24..32].try_into().expect("8 bytes")) as usize;
    let changes = &record[HEAD_LEN..HEAD_LEN + len];
    let blocks = (HEAD_LEN + len).next_multiple_of(BLOCK_LEN);
    seeds.entry("anchor_log").or_default().extend([record[..blocks].to_vec(), changes.to_vec()]);
}
