//! What is promised of objects, checked by boto3: `boto.py` and, of objects in parts, `parts.py`, one function each.

use crate::lab::{Lab, has, run};

fn checked(name: &str) {
    if is_there() {
        check(&Lab::new(""), name);
    }
}

/// Runs a function of `boto.py`, or of another program beside it: `PROGRAM::FUNCTION`.
pub fn check(lab: &Lab, name: &str) {
    let (program, name) = name.split_once("::").unwrap_or(("boto", name));
    let program = format!("{}/tests/it/{program}.py", env!("CARGO_MANIFEST_DIR"));
    // Nothing is compiled into the tree.
    run(lab.client("/usr/bin/python3").arg("-B").arg(program).arg(name));
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
    checked("parts::multipart");
}

#[test]
fn large_parts_have_the_sums_that_come_behind_them() {
    checked("parts::large_parts");
}

#[test]
fn uploads_that_end_leave_nothing() {
    checked("parts::ends");
}

#[test]
fn objects_are_made_of_the_parts_that_were_named() {
    checked("parts::parts_again");
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
fn chunks_that_were_altered_are_refused() {
    checked("chunks::signed_chunks");
}

#[test]
fn what_follows_a_body_is_verified() {
    checked("chunks::trailers");
}

#[test]
fn documents_are_what_their_requests_say() {
    checked("chunks::documents");
}

#[test]
fn what_a_signature_covers_is_not_the_senders_choice() {
    checked("chunks::stripped");
}

#[test]
fn what_a_signature_covers_is_said_at_one_place() {
    checked("chunks::decoys");
}

/// boto3 computes these two by a library that Debian does not have: `scripts/setup` installs it beside moto.
#[test]
fn checksums_of_a_client_that_knows_all_of_them() {
    let python = std::env::var("LAMASSU_CRT_PYTHON").unwrap_or("/opt/moto/bin/python3".into());
    let has_it = std::process::Command::new(&python).args(["-c", "import awscrt, boto3"]).output();
    if !has_it.is_ok_and(|out| out.status.success()) {
        eprintln!("NOTE: {python} has no awscrt (scripts/setup installs it): CRC32C and CRC64NVME by boto3 NOT tested");
        return;
    }
    let (lab, program) = (Lab::new(""), format!("{}/tests/it/boto.py", env!("CARGO_MANIFEST_DIR")));
    run(lab.client(&python).arg("-B").arg(program).arg("crt_checksums"));
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
