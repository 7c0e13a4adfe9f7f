//! Where the time goes is told by stage, if that is asked. Alone in its process, since the counters are the process's.

#![allow(clippy::unwrap_used)] // a helper of a test may panic, too

#[path = "it/common/mod.rs"]
mod common;

use common::*;
use lamassu_crypto::stages;

#[test]
fn times_are_told_by_stage_once_they_are_measured() {
    let (_dir, backend) = local();
    let content = vec![7; 2_000_000];
    let v = Recipe::default().make(&backend);
    v.put("before", &content);
    assert!(stages::times().is_none());
    stages::measure();
    v.put("f", &content);
    v.clean();
    v.close().unwrap();
    let v = Recipe::default().open(&backend).unwrap();
    assert!(v.get("f") == content);
    let times = stages::times().unwrap();
    // This vault does not compress.
    let (compress, all) = times.0.split_last().unwrap();
    assert!(all.iter().all(|time| !time.is_zero()) && compress.is_zero(), "{times}");
    let told = times.to_string();
    let names: Vec<&str> = told.split(' ').map(|word| word.split_once('=').unwrap().0).collect();
    assert_eq!(names, ["encrypt", "decrypt", "key", "store", "compress"]);
}
