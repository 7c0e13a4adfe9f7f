//! Alerts about vaults whose content is not what was written. A host reports each of its integrity events
//! (`docs/alerts.md`). Events of one kind at one place of a vault make one alert, which stays until an administrator
//! closes it.

use data_encoding::HEXLOWER;
use lamassu_crypto::wrap::sha256;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Alerts at most of one vault and of all datasets that lie in it, or did. Further findings are counted by one more
/// alert, of the kind [`NOT_KEPT`].
pub const ALERTS_MAX: u64 = 2000;
/// Names of hosts that an alert has at most.
pub const HOSTS_MAX: usize = 32;
/// Limits on one finding as it arrives: bytes of its path and its text, and of its JSON, in which a byte takes up to
/// six.
const PATH_MAX: usize = 4200;
const TEXT_MAX: usize = 500;
const FINDING_LEN_MAX: usize = 32 << 10;
/// Bytes of a path that are kept. A longer path is cut, and a digest of all of it is appended.
const PATH_KEPT: usize = 1000;
/// The kind of an alert that counts findings without an alert of their own.
pub const NOT_KEPT: &str = "not-kept";
/// Longest word for a kind, and for `found_by`.
const WORD_MAX: usize = 32;

/// A host's finding: an integrity event. Members that are not listed here are dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// time of the finding by the host's clock, seconds since 1970
    pub time: u64,
    /// a word of `docs/alerts.md`
    pub kind: String,
    /// path in the store, below the vault's directory
    pub path: String,
    /// path in the mount, if known
    #[serde(default)]
    pub inode: Option<u64>,
    /// which part of a file
    #[serde(default)]
    pub range: Option<Range>,
    /// `read`, `check` or `recovery`
    pub found_by: String,
    /// `false`: all data can still be read
    pub is_damage: bool,
    /// a sentence for people
    pub text: String,
}

/// Which part of a file a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// segment of the first page
    pub segment: u64,
    /// first page
    pub page: u64,
    /// how many
    pub pages: u64,
    /// first block, if known
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<u64>,
    /// how many
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u64>,
}

impl Finding {
    /// Parses what a host sent; `None`: it is invalid.
    pub fn parse(text: &str) -> Option<Finding> {
        let finding: Finding = serde_json::from_str(text).ok().filter(|_| text.len() <= FINDING_LEN_MAX)?;
        let are_words = is_word(&finding.kind) && is_word(&finding.found_by) && finding.kind != NOT_KEPT;
        let is_short = finding.path.len() <= PATH_MAX && finding.text.len() <= TEXT_MAX;
        let path = printable(&finding.path);
        let path = match path.len() {
            ..=PATH_KEPT => path,
            _ => {
                let digest = HEXLOWER.encode(&sha256(finding.path.as_bytes())[..8]);
                format!("{}…{digest}", &path[..path.floor_char_boundary(PATH_KEPT)])
            }
        };
        (are_words && is_short).then(|| Finding { path, text: printable(&finding.text), ..finding })
    }
}

/// A text without characters that control a terminal or change the order of display.
pub fn printable(text: &str) -> String {
    let acts = |c: char| {
        let is_format = matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}');
        c.is_control() || is_format || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
    };
    text.chars().map(|c| if acts(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Words are printable, and can be compared in scripts.
fn is_word(word: &str) -> bool {
    let is_good = |c: char| c.is_ascii_lowercase() || c == '-';
    !word.is_empty() && word.len() <= WORD_MAX && word.chars().all(is_good)
}

/// Findings of one kind at one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alert {
    /// the alert's number, never used again
    pub number: u64,
    /// the vault, hex
    pub vault: String,
    /// the outermost vault that it lay in at the first finding, hex; none: it was no dataset
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outermost: Option<String>,
    /// number of findings there
    pub count: u64,
    /// time of the first report by the server's clock, seconds since 1970
    pub first: u64,
    /// time of the last report
    pub last: u64,
    /// the hosts that found it; the first [`HOSTS_MAX`]
    pub hosts: BTreeSet<String>,
    /// the first finding
    #[serde(flatten)]
    pub finding: Finding,
    /// Whether the webhook has accepted it.
    #[serde(default)]
    pub posted: bool,
    /// Set when an administrator has acknowledged it.
    #[serde(default)]
    pub acknowledged: Option<Acknowledged>,
}

/// An administrator's acknowledgement of an alert.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acknowledged {
    /// time of the acknowledgement, seconds since 1970
    pub at: u64,
    /// the administrator's note
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

impl Alert {
    /// Writes it to the system's log.
    pub(crate) fn say(&self) {
        let Finding { kind, path, text, is_damage, .. } = &self.finding;
        let hosts = self.hosts.iter().map(String::as_str).collect::<Vec<_>>().join(",");
        tracing::error!(target: "alert", number = self.number, vault = self.vault, hosts, kind, ?path, is_damage, "{text}");
    }
}

/// The alerts that an administrator's request selects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Which {
    /// Those with these numbers.
    Numbers(BTreeSet<u64>),
    /// All, or all of one vault.
    All {
        /// only those of this vault, hex
        vault: Option<String>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_an_event_with_words_that_can_be_printed() {
        let event = r#"{"time":7,"kind":"stale","vault":"00","path":"ab/cd","inode":3,"range":{"segment":1,"page":2,"pages":1},
            "found_by":"read","is_damage":true,"text":"damaged page","later":1}"#;
        let finding = Finding::parse(event).expect("parses");
        assert_eq!(
            (finding.kind.as_str(), finding.inode, finding.range.map(|range| range.page)),
            ("stale", Some(3), Some(2))
        );
        for (from, to) in [
            ("\"stale\"", "\"st\\u001bale\""),
            ("\"stale\"", "\"\""),
            ("\"stale\"", "\"not-kept\""),
            ("\"read\"", "\"Read\""),
            ("true", "1"),
            ("\"ab/cd\"", "7"),
        ] {
            assert_eq!(Finding::parse(&event.replacen(from, to, 1)), None, "{to}");
        }
        assert_eq!(Finding::parse(&event.replacen("ab/cd", &"x".repeat(PATH_MAX + 1), 1)), None);
        // What is kept of it is short, can be printed, and is another for another path.
        let long = |last: &str| {
            let path = "\\u001b".repeat(PATH_MAX - 1) + last;
            Finding::parse(&event.replacen("ab/cd", &path, 1)).expect("parses").path
        };
        assert!(long("a") != long("b") && long("a").len() < PATH_KEPT + 24 && !long("a").contains('\u{1b}'));
        assert_eq!(printable("a\n\u{9b}\u{202e}\u{7f}é/b"), "a\u{fffd}\u{fffd}\u{fffd}\u{fffd}é/b");
    }
}
