//! Findings that hosts report to a server: what a host says is kept, shown to administrators, and posted.

use crate::bytes::Bytes;
use lamassu_server::alerts::{Alert, Finding, printable};
use std::collections::BTreeSet;

/// Bytes of a path that is kept, and of a text: a character that is not shown takes three.
const PATH_LEN_MAX: usize = 1024;
const TEXT_LEN_MAX: usize = 3 * 500;

/// The first byte says how: all of it as it comes, or texts that the fuzzer makes up in a report of the right form.
pub fn alert_finding(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    let mode = bytes.u8();
    if mode & 1 == 0 {
        let Ok(text) = std::str::from_utf8(bytes.rest()) else { return };
        if let Some(finding) = Finding::parse(text) {
            is_kept(finding);
        }
        return;
    }
    let path_len = usize::from(bytes.u16());
    let path = String::from_utf8_lossy(bytes.take(path_len)).repeat(1 + usize::from(mode >> 1 & 31));
    let text = String::from_utf8_lossy(bytes.rest()).into_owned();
    let event = |path: &str| {
        let report = serde_json::json!({
            "time": 7, "kind": "stale", "path": path, "found_by": "read", "is_damage": mode & 0x80 != 0, "text": text,
        });
        Finding::parse(&report.to_string())
    };
    let Some(finding) = event(&path) else {
        assert!(path.len() > 4200 || text.len() > 500, "a report of the right form is taken");
        return;
    };
    if let Some(other) = event(&format!("{path}a")) {
        assert_ne!(finding.path, other.path, "two places are told apart");
    }
    is_kept(finding);
}

/// What was taken is short, can be printed, and is read again from the server's state.
fn is_kept(finding: Finding) {
    let is_word = |word: &str| word.len() <= 32 && word.bytes().all(|b| b.is_ascii_lowercase() || b == b'-');
    assert!(is_word(&finding.kind) && is_word(&finding.found_by) && finding.kind != "not-kept");
    assert!(finding.path.len() <= PATH_LEN_MAX && finding.text.len() <= TEXT_LEN_MAX);
    assert!(printable(&finding.path) == finding.path && printable(&finding.text) == finding.text);
    let alert = Alert {
        number: 1,
        vault: "00".repeat(16),
        outermost: Some("01".repeat(16)),
        count: u64::MAX,
        first: 1,
        last: 2,
        hosts: BTreeSet::from(["host".into()]),
        finding,
        posted: true,
        acknowledged: None,
    };
    let row = serde_json::to_vec(&alert).expect("memory takes everything");
    assert_eq!(serde_json::from_slice::<Alert>(&row).expect("what was written reads"), alert);
}
