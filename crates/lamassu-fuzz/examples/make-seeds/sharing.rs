//! Tokens, messages of sessions, reports, policies; what access proxies take.

use super::Seeds;
use lamassu_anchor::head::Head;
use lamassu_crypto::Secret;
use lamassu_crypto::oprf::ServerKey;
use lamassu_lease::locks::{Conflict, Lock, LockAnswer, LockKey, LockKind, Range};
use lamassu_lease::{Call, Grant, GrantNo, Mode, Object, Reply, RequestNo};
use lamassu_rpc::convert::{from_call, from_reply};
use lamassu_rpc::proto;
use prost::Message;

/// The number of the first grant of a server's first run.
const FIRST_GRANT: u64 = (1 << 40) + 4;

pub fn sharing(seeds: &mut Seeds) {
    access(seeds);
    // Of the authority 05…05, with the secret 07…07.
    let code = "AUCQKBIFAUCQKBIFAUCQKBIFAUCQKBIFAUCQKBIFAUCQKBIFAUCQOBYHA4DQOBYHA4DQOBYHA4DQP7KV";
    let line = format!("lamassu-join:server.example:7433/{code}");
    let cut_off = line.as_bytes()[..line.len() - 1].to_vec();
    seeds.entry("join_token").or_default().extend([line.into_bytes(), cut_off]);
    let object = Object(1);
    let acquire = |mode| Call::Acquire { request: RequestNo(1), object, mode };
    let grant = Grant { object, mode: Mode::Exclusive, number: GrantNo(FIRST_GRANT) };
    let key = LockKey { file: Object(1), kind: LockKind::Range, owner: 7 };
    let lock = Lock { key, range: Range::new(3, 9).expect("a range"), mode: Mode::Exclusive, pid: 5 };
    let calls = [
        (0, acquire(Mode::Shared)),
        (1, acquire(Mode::Exclusive)),
        (0, Call::Release { grant, keeps: Some(Mode::Shared) }),
        (1, Call::Heartbeat { beat: 1 }),
        (2, Call::Resume { number: 1, held: vec![grant], kept: vec![], taken_over: vec![grant], locks: vec![lock] }),
        (0, Call::Lock { request: RequestNo(2), lock, waits: true }),
        (1, Call::TestLock { request: RequestNo(3), lock }),
        (0, Call::CancelLock { request: RequestNo(2) }),
        (1, Call::Unlock { request: RequestNo(4), key, range: lock.range }),
        (1, Call::TakenOver { grant }),
        (1, Call::Leave),
    ];
    let mut all = Vec::new();
    for (who, call) in calls {
        let message = from_call(&call, proto::Of { vault: vec![1; 16], session: 1 }).encode_to_vec();
        let one = [&[4, who, message.len() as u8], &*message].concat();
        all.extend(&one);
        seeds.entry("leases").or_default().push(one);
    }
    // Time, another start, an end, a new session, and all of it again.
    let twice = [&all[..], &[0xf8, 1, 2, 3], &all[..], &[1, 0x78]].concat();
    seeds.entry("leases").or_default().extend([all, twice]);
    lock_answers(seeds);
    findings(seeds);
}

/// Requests about locks, each with an answer.
fn lock_answers(seeds: &mut Seeds) {
    let range = Range::new(3, 9).expect("a range");
    let conflict = LockAnswer::Conflict(Conflict { range, mode: Mode::Exclusive, pid: 7 });
    let (done, dead, many) = (LockAnswer::Done, LockAnswer::Deadlock, LockAnswer::TooMany);
    let answers = [done, conflict, LockAnswer::Cancelled, dead, many, done];
    // A shared range, an exclusive one, a whole file twice, a test, an unlock.
    let asked = [4, 4 | 8 | 32, 4 | 16, 4 | 8 | 16 | 32, 5, 5 | 8];
    let mut all = Vec::new();
    for (number, (what, answer)) in asked.into_iter().zip(answers).enumerate() {
        let reply = Reply::Lock { request: RequestNo(number as u64), answer };
        let message = from_reply(&reply, Head([7; 32])).encode_to_vec();
        let one = [&[what, 3, 6, 6, message.len() as u8], &*message].concat();
        all.extend(&one);
        seeds.entry("lock_answers").or_default().push(one);
    }
    // Cancelled, reported, given up, reported; the session ends.
    let again = [&all[..], &[4 | 8, 0, 9, 6 * 8 + 2, 1, 6 * 8 + 3, 1, 0], &all[..]].concat();
    seeds.entry("lock_answers").or_default().extend([all, again]);
}

/// Events as hosts have them, whole and with a path or a text that is altered.
fn findings(seeds: &mut Seeds) {
    let event = r#"{"time":1764223200,"kind":"stale","vault":"00000000000000000000000000000001","path":"ab/cd","inode":3,
        "range":{"segment":1,"page":2,"pages":1,"block":4,"blocks":2},"found_by":"read","is_damage":true,
        "text":"blocks 4 to 5: older than what was written last"}"#;
    let as_it_comes = |text: &str| [&[0], text.as_bytes()].concat();
    let short = r#"{"time":0,"kind":"session-unknown","path":"","found_by":"check","is_damage":false,"text":"x"}"#;
    let long = event.replace("ab/cd", &"a/\\u001b".repeat(520));
    let mut seed = vec![0x81 | 9 << 1, 7, 0];
    seed.extend("ab/\u{e9}\u{202e}".as_bytes());
    seed.extend("damaged page".as_bytes());
    let all = [as_it_comes(event), as_it_comes(short), as_it_comes(&long), seed, vec![63 << 1 | 1, 200, 0, b'x']];
    seeds.entry("alert_finding").or_default().extend(all);
    // Keys that a server keeps: the number of what it is, and that.
    let hex = "0".repeat(40 + 144);
    let active =
        format!(r#"{{"state":"active","made":7,"made_by":"node1","digest":"{}","wrapped":"{hex}"}}"#, "ab".repeat(32));
    let deleted = r#"{"state":"deleted","key":"vault-1","made":7,"made_by":"node1","digest":"ab","deleted":9,"overwritten":2,"granted":["node1"],"given":[{"host":"node1","last":8}],"backups":[8]}"#;
    let all = [(0, "vault-1_b.c"), (0, "a/b"), (1, &*active), (1, deleted), (2, &hex[40..]), (3, "{}")];
    let all = all.map(|(what, text): (u8, &str)| [&[what], text.as_bytes()].concat());
    seeds.entry("served_keys").or_default().extend(all.into_iter().chain([vec![4, 9, 0, 1], vec![4]]));
    let server = ServerKey::derive(&Secret::new(&mut [6; 32]), b"fuzz");
    let evaluated = server.evaluate(&[*server.public(), *server.public()]).expect("a server's own element");
    let elements = evaluated.elements.as_flattened();
    let batch = |mode: u8, elements: &[u8], rest: &[u8]| [&[mode][..], elements, rest].concat();
    seeds.entry("evaluations").or_default().extend([
        batch(0, elements, &[]),
        batch(0, &server.public()[..31], &[]),
        batch(0, &[0; 32], elements),
        batch(1, elements, &[7; 31]),
        batch(1, elements, &[9; 64]),
    ]);
    policies(seeds);
}

/// What the access proxy of a provider takes, and a tenant's rules.
fn access(seeds: &mut Seeds) {
    let signed = lamassu_access::Status { seq: 1, bundle: 1, time: 5, revoked: ["0".repeat(32)].into() };
    let signed = signed.sign(&lamassu_crypto::Secret::new(&mut [9; 32]), "acme").unwrap_or_default();
    let policy = r#"{"effect":"forbid","principal":{"op":"==","entity":{"type":"P","id":"x"}},"action":{"op":"in","entities":[{"type":"Action","id":"read"}]},"resource":{"op":"in","entity":{"type":"K","id":"a"}},"conditions":[{"kind":"when","body":{"containsAny":{"left":{".":{"left":{"Var":"principal"},"attr":"t"}},"right":{"Set":[{"Value":"a"}]}}}},{"kind":"unless","body":{"!":{"arg":{"Value":false}}}}]}"#;
    let bundle = format!(r#"{{"seq":1,"epoch":1,"vocabulary":"v","time":5,"policies":[{policy}]}}"#);
    let claims = format!(
        r#"{{"id":"{0}","sub":"x","tokens":["a"],"epoch":1,"vocabulary":"v","begins":900,"ends":1500,"told":"{0}{0}"}}"#,
        "0".repeat(32)
    );
    let rule = "permit(principal == User::\"x\", action in [Action::\"read\", Action::\"list\"], resource in Key::\"a\") \
        when { principal has dept && [\"a\", \"b\"].contains(principal.dept) || principal.teams.containsAll([\"c\"]) } \
        unless { principal has level && principal.level >= -3 };\nforbid(principal, action, resource is Key in \
        Key::\"a/b\") when { !(principal has level) || (if 3 > principal.level then true else resource == Key::\"a\") };";
    let all =
        [(0, &*signed), (1, &bundle), (2, &claims), (3, rule)].map(|(kind, text)| [&[kind], text.as_bytes()].concat());
    seeds.entry("access").or_default().extend(all);
}

/// A server's policy, and what a host is told of one.
fn policies(seeds: &mut Seeds) {
    let whole = lamassu_server::policy::COMMENTED.replace("\n#", "\n").replace("\n ", "\n# ");
    let rule = "[[rule]]\nname = \"r\"\nhosts = [\"!a*\"]\nforbid.suites = [\"aes\"]\nrequire.keys = [\"random\"]\n";
    let sets = "[groups]\na = [\"b\"]\n[vaults]\nc = [\"00*\"]\n[[rule]]\nname = \"r\"\nvaults = [\"@c\"]\nforbid.hashes = [\"blake3\"]\n";
    let texts = [&*whole, rule, sets, ""].map(|text| [&[0], text.as_bytes()].concat());
    let told = |profile: u8| [&[profile, 8][..], b"no plain", &[5], b"plain"].concat();
    let all = texts.into_iter().chain([[vec![1], told(3), told(1)].concat(), vec![1]]);
    seeds.entry("policy").or_default().extend(all);
}
