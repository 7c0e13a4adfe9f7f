//! Programs that people use, unmodified, with real data.

use crate::lab::{Lab, has, run};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A tree of files of all sorts of sizes and names.
fn tree(lab: &Lab) -> std::path::PathBuf {
    let root = lab.path("tree");
    for (name, len) in [
        ("a.txt", 11),
        ("empty", 0),
        ("sub/with space/ü.bin", 70_000),
        ("sub/+plus&amp.bin", 4096),
        ("sub/deep/er/file", 4097),
        ("large.bin", 21 << 20),
    ] {
        let path = root.join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::copy(lab.data("noise", len), path).expect("copied");
    }
    root
}

#[track_caller]
fn assert_same(one: &Path, other: &Path) {
    run(Command::new("diff").arg("-r").arg(one).arg(other));
}

#[test]
fn aws_cli() {
    if has("aws") {
        by_aws_cli(&Lab::new(""));
    }
}

/// What that program does, to a gateway of whatever kind.
pub fn by_aws_cli(lab: &Lab) {
    let (tree, back, url) = (tree(lab), lab.path("back"), lab.url());
    let aws = |args: &[&str]| run(lab.client("aws").args(["--endpoint-url", &url]).args(args));
    let path = |path: &Path| path.to_str().expect("a name").to_owned();
    aws(&["s3", "mb", "s3://alice-aws"]);
    aws(&["s3", "sync", "--only-show-errors", &path(&tree), "s3://alice-aws/t"]);
    assert_eq!(aws(&["s3", "sync", &path(&tree), "s3://alice-aws/t"]), "", "everything is there");
    assert!(aws(&["s3", "ls", "--recursive", "s3://alice-aws"]).contains("t/sub/with space/ü.bin"));
    aws(&["s3", "cp", "--only-show-errors", "s3://alice-aws/t/large.bin", "s3://alice-aws/copy"]);
    aws(&["s3", "mv", "--only-show-errors", "s3://alice-aws/copy", "s3://alice-aws/t/copy"]);
    aws(&["s3", "sync", "--only-show-errors", "s3://alice-aws/t", &path(&back)]);
    fs::rename(back.join("copy"), lab.path("copy")).expect("the copy");
    assert_same(&tree, &back);
    assert_same(&tree.join("large.bin"), &lab.path("copy"));
    aws(&["s3", "rb", "--force", "s3://alice-aws"]);
    assert_eq!(aws(&["s3", "ls"]), "");
}

#[test]
fn s3cmd() {
    if has("s3cmd") {
        by_s3cmd(&Lab::new(""));
    }
}

/// What that program does, to a gateway of whatever kind.
pub fn by_s3cmd(lab: &Lab) {
    let (tree, host) = (tree(lab), format!("127.0.0.1:{}", lab.port));
    lab.write(
        "s3cfg",
        &format!(
            "[default]\naccess_key = ALICE\nsecret_key = alice-secret-alice-secret\nhost_base = {host}\n\
             host_bucket = {host}\nuse_https = False\nsignature_v2 = False\nmultipart_chunk_size_mb = 5\n"
        ),
    );
    let s3cmd = |args: &[&str]| run(lab.client("s3cmd").arg("-c").arg(lab.path("s3cfg")).arg("--quiet").args(args));
    let path = |path: &Path| path.to_str().expect("a name").to_owned();
    s3cmd(&["mb", "s3://alice-s3cmd"]);
    s3cmd(&["sync", &(path(&tree) + "/"), "s3://alice-s3cmd/t/"]);
    let info = run(lab.client("s3cmd").arg("-c").arg(lab.path("s3cfg")).args(["info", "s3://alice-s3cmd/t/a.txt"]));
    assert!(info.contains("MD5 sum") && info.contains("File size: 11"), "{info}");
    let back = lab.path("back");
    fs::create_dir(&back).expect("a directory");
    s3cmd(&["sync", "s3://alice-s3cmd/t/", &(path(&back) + "/")]);
    assert_same(&tree, &back);
    s3cmd(&["del", "--recursive", "--force", "s3://alice-s3cmd/"]);
    s3cmd(&["rb", "s3://alice-s3cmd"]);
}

#[test]
fn rclone() {
    if has("rclone") {
        by_rclone(&Lab::new(""));
    }
}

/// What that program does, to a gateway of whatever kind.
pub fn by_rclone(lab: &Lab) {
    let tree = tree(lab);
    lab.write(
        "rclone.conf",
        &format!(
            "[gw]\ntype = s3\nprovider = Other\nendpoint = {}\naccess_key_id = ALICE\n\
             secret_access_key = alice-secret-alice-secret\nregion = us-east-1\nchunk_size = 5Mi\n\
             upload_cutoff = 6Mi\nlist_chunk = 2\n",
            lab.url()
        ),
    );
    let rclone = |args: &[&str]| run(lab.client("rclone").arg("--config").arg(lab.path("rclone.conf")).args(args));
    let path = |path: &Path| path.to_str().expect("a name").to_owned();
    rclone(&["mkdir", "gw:alice-rclone"]);
    rclone(&["sync", &path(&tree), "gw:alice-rclone/t"]);
    rclone(&["check", "--download", &path(&tree), "gw:alice-rclone/t"]);
    rclone(&["check", &path(&tree), "gw:alice-rclone/t"]);
    rclone(&["copyto", "gw:alice-rclone/t/large.bin", "gw:alice-rclone/copied"]);
    rclone(&["moveto", "gw:alice-rclone/copied", "gw:alice-rclone/t/moved"]);
    let listed = rclone(&["lsf", "-R", "--files-only", "gw:alice-rclone"]);
    assert_eq!(listed.lines().count(), 7, "{listed}");
    rclone(&["copy", "gw:alice-rclone/t", &path(&lab.path("back"))]);
    fs::remove_file(lab.path("back/moved")).expect("moved");
    assert_same(&tree, &lab.path("back"));
    rclone(&["purge", "gw:alice-rclone"]);
}

#[test]
fn restic() {
    if has("restic") {
        by_restic(&Lab::new(""));
    }
}

/// What that program does, to a gateway of whatever kind.
pub fn by_restic(lab: &Lab) {
    let tree = tree(lab);
    let restic = |args: &[&str]| {
        let mut command = lab.client("restic");
        command.env("RESTIC_REPOSITORY", format!("s3:{}/alice-restic/repo", lab.url())).env("RESTIC_PASSWORD", "p");
        run(command.args(["--no-cache", "--quiet"]).args(args))
    };
    restic(&["init"]);
    restic(&["backup", "--host", "h", tree.to_str().expect("a name")]);
    fs::write(tree.join("a.txt"), "changed").expect("writes");
    restic(&["backup", "--host", "h", tree.to_str().expect("a name")]);
    restic(&["check", "--read-data"]);
    let back = lab.path("back");
    restic(&["restore", "latest", "--target", back.to_str().expect("a name")]);
    assert_same(&tree, &back.join(tree.strip_prefix("/").expect("absolute")));
    restic(&["forget", "--keep-last", "1", "--prune"]);
    restic(&["check", "--read-data"]);
}
