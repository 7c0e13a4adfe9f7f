//! Anchors on their way to a server and back: what was cut off, or not answered, is done again, and nowhere are two
//! anchors of one vault in use.

use crate::common::*;
use crate::datasets::the_dataset_in;
use crate::policy::reload;
use std::fs;
use std::path::PathBuf;

/// The directory of a host's anchors.
fn anchors(host: Host<'_>) -> PathBuf {
    host.lab.path(&format!("state-{}/lamassu/anchors", host.name))
}

/// A file about a vault in it.
fn usual(host: Host<'_>, id: &str, ext: &str) -> PathBuf {
    anchors(host).join(format!("{}.{ext}", id.replace('-', "")))
}

/// Keeps the anchors of a host, as they are now, in `kept`.
fn keep(host: Host<'_>, kept: &str) {
    copy(&anchors(host), &host.lab.path(kept));
}

/// Puts them back, but leaves the notes of their places.
fn put_back(host: Host<'_>, kept: &str) {
    for file in fs::read_dir(host.lab.path(kept)).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_some_and(|ext| ext == "anchor") {
            let usual = anchors(host).join(file.file_name().unwrap());
            let _ = fs::remove_file(&usual);
            copy(&file, &usual);
        }
    }
}

fn to_server(host: Host<'_>, vault: &str) -> Ran {
    host.run(&format!("anchor move {vault} {}", host.lab.url()))
}

#[test]
fn an_anchor_comes_back_to_the_usual_place() {
    let lab = Lab::new();
    let a = lab.joined("a");
    let id = lab.vault(a);
    a.mount().ok();
    a.write("f", "content").unwrap();
    a.umount().ok();
    let (file, note) = (usual(a, &id, "anchor"), usual(a, &id, "place"));
    for has_copy in [false, true] {
        if !has_copy {
            fs::remove_file(&file).unwrap();
        }
        a.run(&format!("anchor move store/v {}", file.display())).ok();
        assert!(file.exists() && !note.exists() && lab.vaults().is_empty());
        assert_eq!(a.run("cat store/v f").ok().out, "content");
        a.run("check store/v").ok();
        to_server(a, "store/v").ok();
        assert_eq!(a.run("cat store/v f").ok().out, "content");
    }
}

/// The host is killed after the server has given the anchor up, and before it notes that, or gets no answer.
#[test]
fn the_same_command_ends_what_the_server_has_done() {
    let lab = Lab::new();
    let a = lab.joined("a");
    let id = lab.vault(a);
    copy(&usual(a, &id, "anchor"), &lab.path("early"));
    a.mount().ok();
    a.write("f", "content").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    let there = lab.dir.path().canonicalize().unwrap().join("anchor");
    for to in [there, usual(a, &id, "anchor")] {
        let is_usual = to == usual(a, &id, "anchor");
        let line = format!("anchor move store/v {}", to.display());
        keep(a, "kept");
        a.run(&line).ok();
        copy(&to, &lab.path("taken"));
        fs::remove_dir_all(anchors(a)).unwrap();
        copy(&lab.path("kept"), &anchors(a));
        a.run("ls store/v").code(68);
        // A file that no attempt of this host has made, and one that is older than the copy.
        a.run(&line).code(if is_usual { 68 } else { 28 });
        fs::write(usual(a, &id, "taking"), format!("{}\n", to.display())).unwrap();
        if !is_usual {
            fs::rename(lab.path("early"), &to).unwrap();
            a.run(&line).code(68);
            assert!(to.exists() && usual(a, &id, "anchor").exists());
            fs::rename(lab.path("taken"), &to).unwrap();
        }
        a.run(&line).ok();
        assert_eq!(a.run("cat store/v f").ok().out, "content");
        a.run("check store/v").ok();
        assert!(!usual(a, &id, "taking").exists() && usual(a, &id, "anchor").exists() == is_usual);
        to_server(a, "store/v").ok();
        [lab.path("kept"), lab.path("taken")].iter().for_each(|path| {
            let _ = fs::remove_dir_all(path).or_else(|_| fs::remove_file(path));
        });
    }
    // One that the server has not done begins anew, in the place of the file.
    copy(&usual(a, &id, "anchor"), &lab.path("anchor"));
    a.run("anchor move store/v anchor").code(28);
    let to = lab.dir.path().canonicalize().unwrap().join("anchor");
    fs::write(usual(a, &id, "taking"), format!("{}\n", to.display())).unwrap();
    a.run("anchor move store/v anchor").ok();
    assert_eq!(a.run("cat store/v f").ok().out, "content");
}

/// The answer to a move is lost, and other hosts go on. The same command again makes no second anchor of the file.
#[test]
fn a_move_that_is_repeated_after_others_went_on_leaves_one_anchor() {
    let lab = Lab::new();
    let [a, b] = ["a", "b"].map(|name| lab.joined(name));
    a.run("init store/v").ok();
    a.run("mount store/v m-a").ok();
    a.run("dataset create m-a/p").ok();
    a.write("f", "old").unwrap();
    a.write("p/f", "old").unwrap();
    a.umount().ok();
    let id = a.id("store/v");
    keep(a, "kept");
    // The first attempt, refused: nothing has changed.
    to_server(a, "store/v").code(68);
    assert!(!usual(a, &id, "place").exists());
    assert_eq!(a.run("cat store/v f").ok().out, "old");
    [a, b].iter().for_each(|host| lab.grant(*host, &id));
    to_server(a, "store/v").ok();
    put_back(a, "kept");
    b.mount().ok();
    b.write("f", "newer").unwrap();
    b.write("p/f", "newer").unwrap();
    b.umount().ok();
    lab.wait_until_free();
    let has_newer = || {
        assert_eq!(a.run("cat store/v f").ok().out, "newer");
        assert_eq!(a.run("cat store/v p/f").ok().out, "newer");
        a.run("check store/v").ok();
        assert!(usual(a, &id, "place").exists());
    };
    let told = to_server(a, "store/v").ok().says("those of 1 datasets");
    assert!(!told.err.contains("stays where it is"), "{told:?}");
    has_newer();
    // Nor if this host may not ask any more.
    put_back(a, "kept");
    lab.serve(&["host", "grant", "--not", "@a", &format!("@{id}")]).ok();
    to_server(a, "store/v").code(68).says("may have accepted the anchor");
    a.run("cat store/v f").code(68);
    assert!(usual(a, &id, "place").exists());
    lab.grant(a, &id);
    to_server(a, "store/v").ok();
    has_newer();
}

/// What the server has accepted once is accepted again, whatever its policy says by now.
#[test]
fn a_move_is_repeated_under_a_policy_that_came_after_it() {
    let lab = Lab::new();
    let a = lab.joined("a");
    a.run("init store/v").ok();
    let id = a.id("store/v");
    lab.grant(a, &id);
    keep(a, "kept");
    to_server(a, "store/v").ok();
    put_back(a, "kept");
    reload(&lab, "[[rule]]\nname = \"domains\"\nrequire.domains = [\"file\"]\n", true);
    to_server(a, "store/v").ok();
    to_server(a, "store/v").code(28);
    // Other rows are none of those.
    a.run("init store/w").ok();
    lab.grant(a, &a.id("store/w"));
    to_server(a, "store/w").code(76);
    a.run("ls store/w").ok();
}

/// Nothing is opened, and nothing removed that another host is making.
#[test]
fn an_anchor_at_a_server_is_not_rebuilt_from_the_store() {
    let mut lab = Lab::new();
    let a = lab.joined("a");
    let id = lab.vault(a);
    let staged = lab.path("store/v/lamassu.staging").join("ab".repeat(16));
    fs::create_dir_all(&staged).unwrap();
    a.run("anchor rebuild store/v").code(28);
    assert!(staged.exists());
    // Also in another place, and for a dataset that this host has never used.
    let b = lab.joined("b");
    lab.grant(b, &id);
    b.run(&format!("ls --anchor {} store/v", lab.url())).ok();
    a.mount().ok();
    a.run("dataset create m-a/p").ok();
    a.umount().ok();
    lab.wait_until_free();
    b.run("anchor rebuild --anchor new store/v").code(28);
    b.run(&format!("anchor rebuild {}", the_dataset_in(&lab, "store/v"))).code(28);
    // Who has lost the server says so by choosing a file.
    lab.stop("-KILL");
    let b = lab.host("b");
    b.run("anchor rebuild --anchor new store/v").ok().says("does not answer");
    b.run("ls --anchor new store/v").ok();
}
