//! What is promised of objects, checked by boto3: `boto.py`, one function each.

use crate::lab::{Lab, has, run};

fn checked(name: &str) {
    if is_there() {
        let lab = Lab::new("");
        run(lab.client("/usr/bin/python3").arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/boto.py")).arg(name));
    }
}

/// Whether boto3 is.
pub fn is_there() -> bool {
    has("python3") && python_has("boto3")
}

fn python_has(module: &str) -> bool {
    let found = std::process::Command::new("/usr/bin/python3")
        .args(["-c", &format!("import {module}")])
        .output()
        .expect("runs");
    if !found.status.success() {
        eprintln!("NOTE: python3-{module} is not installed (scripts/setup installs it): NOT tested");
    }
    found.status.success()
}

#[test]
fn objects_are_what_was_put() {
    checked("objects");
}

#[test]
fn keys_work_or_are_refused() {
    checked("keys");
}

#[test]
fn lists_are_those_of_a_model() {
    checked("lists");
}

#[test]
fn pages_go_on_behind_keys_that_end_with_the_delimiter() {
    checked("markers");
}

#[test]
fn objects_are_made_of_parts() {
    checked("multipart");
}

#[test]
fn uploads_that_end_leave_nothing() {
    checked("ends");
}

#[test]
fn objects_are_made_of_the_parts_that_were_named() {
    checked("parts_again");
}

#[test]
fn directories_that_are_objects_stay() {
    checked("directories");
}

#[test]
fn copies_and_conditional_writes() {
    checked("copies");
}

#[test]
fn checksums_are_verified_and_kept() {
    checked("checksums");
}

#[test]
fn presigned_addresses_are_for_what_they_say() {
    checked("presigned");
}

#[test]
fn tenants_do_not_reach_one_another() {
    checked("tenants");
}

#[test]
fn what_is_not_done_is_refused() {
    checked("unsupported");
}
