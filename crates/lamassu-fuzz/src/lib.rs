//! What the fuzz targets under `fuzz/` do with their input. Here, so that plain `cargo test` replays the seeds, every
//! input that once failed, and mutations of them, without a fuzzer.
//!
//! Each target takes any bytes. It panics if what reads them does, or if an invariant that the target states does not
//! hold: that is a finding. Keys are fixed: a fuzzer cannot forge a seal, so the targets seal what it makes up, and
//! what lies behind the seal is reached.
//!
//! | module | what its targets read |
//! |---|---|
//! | `header`, `keys` | headers, slots, keychains; shares, answers of KMIP servers, histories |
//! | `file`, `page`, `payload`, `merkle` | backing files; metadata pages; compressed blocks; tree records |
//! | `tree`, `words` | directory records, links, attributes in a vault; names, key sources, mount options |
//! | `anchor` | rows and exports of anchors |
//! | `request` | requests of the kernel |
//! | `access` | credentials, publications and rules of a provider's access proxy |
//! | `provider` | what a gateway gets from a provider of objects: listings, properties, objects |
//! | `alerts`, `policy`, `served`, `sharing` | what hosts and a server send each other; a server's policy and keys |
//! | `rows` | rows that hosts send to a server, and what its policy makes of them |
//! | `bytes`, `model` | helpers: choices from input; files whose content is known |
//!
//! There are no locks.
//!
//! Never: part of the product; touches a disk or the network.

mod access;
mod alerts;
mod anchor;
mod bytes;
mod file;
mod header;
mod keys;
mod merkle;
mod model;
mod page;
mod payload;
mod policy;
mod provider;
mod request;
mod rows;
mod served;
mod sharing;
mod tree;
mod words;

use lamassu_crypto::{KeyRing, Secret};
use lamassu_format::Suite;

/// A fuzz target.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name, also that of its folders of seeds and of its file in `fuzz/fuzz_targets`.
    pub name: &'static str,
    /// Takes one input; panics on a finding.
    pub run: fn(&[u8]),
}

/// Every target.
pub const TARGETS: &[Target] = &[
    Target { name: "header", run: header::header },
    Target { name: "keychain", run: header::keychain },
    Target { name: "page", run: page::page },
    Target { name: "payload", run: payload::payload },
    Target { name: "names", run: words::names },
    Target { name: "dir_record", run: tree::dir_record },
    Target { name: "state_record", run: tree::state_record },
    Target { name: "companion", run: tree::companion },
    Target { name: "symlink", run: tree::symlink },
    Target { name: "xattr", run: tree::xattr },
    Target { name: "source", run: words::source },
    Target { name: "options", run: words::options },
    Target { name: "file", run: file::file },
    Target { name: "share", run: keys::share },
    Target { name: "answer", run: keys::answer },
    Target { name: "history", run: keys::history },
    Target { name: "request", run: request::request },
    Target { name: "anchor_row", run: anchor::anchor_row },
    Target { name: "anchor_log", run: anchor::anchor_log },
    Target { name: "anchor_export", run: anchor::anchor_export },
    Target { name: "tree_records", run: merkle::tree_records },
    Target { name: "join_token", run: sharing::join_token },
    Target { name: "leases", run: sharing::leases },
    Target { name: "lock_answers", run: sharing::lock_answers },
    Target { name: "alert_finding", run: alerts::alert_finding },
    Target { name: "served_keys", run: served::served_keys },
    Target { name: "policy", run: policy::policy },
    Target { name: "evaluations", run: served::evaluations },
    Target { name: "host_rows", run: rows::host_rows },
    Target { name: "judged_rows", run: rows::judged_rows },
    Target { name: "access", run: access::access },
    Target { name: "listing", run: provider::listing },
    Target { name: "properties", run: provider::properties },
    Target { name: "object", run: provider::object },
];

/// Runs one target by its name.
///
/// # Panics
/// On a finding, and for a name that no target has.
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target of this name");
    (target.run)(input);
}

/// The keys of every target.
fn ring(suite: Suite) -> KeyRing {
    KeyRing::new(suite, &[Secret::new(&mut [1; 32])], &[Secret::new(&mut [2; 32])])
}
