//! Keys that are withheld between a host's crash and the recovery (Z9): who does not have them opens nothing, recovers
//! nothing, and changes no byte of the store and no row at the server.

use crate::common::raw::rows;
use crate::common::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What lies in a directory: each name, and its content.
fn all_below(dir: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut all = BTreeMap::new();
    let mut left = vec![dir.to_owned()];
    while let Some(path) = left.pop() {
        let kind = path.symlink_metadata().unwrap().file_type();
        if kind.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let content = match () {
            () if kind.is_dir() => None,
            () if kind.is_symlink() => Some(fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()),
            () => Some(fs::read(&path).unwrap()),
        };
        all.insert(path, content);
    }
    all
}

/// What the next host may try, and the exit code without the right key.
const TRIED: [&str; 9] = [
    "mount --anchor URL store/v m-b",
    "mount --shared --anchor URL store/v m-b",
    "mount --read-only --anchor URL store/v m-b",
    "ls --anchor URL store/v",
    "cat --anchor URL store/v synced-0",
    "cp --anchor URL store/v key vault:/put",
    "check --repair --anchor URL store/v",
    "rekey --full --anchor URL store/v",
    "key rotate --inner --anchor URL store/v",
];

#[test]
fn who_has_no_key_recovers_nothing_of_a_host_that_was_killed() {
    let lab = Lab::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| lab.joined(name));
    let id = lab.vault(a);
    [b, c].iter().for_each(|host| lab.grant(*host, &id));
    a.mount().ok();
    let content = |n: usize| format!("{n} ").repeat(9000 + n);
    for n in 0..8 {
        a.write(&format!("synced-{n}"), &content(n)).unwrap();
    }
    // It is killed in the middle of more, nothing of which was acknowledged.
    let mut files: Vec<_> = (0..4).map(|n| fs::File::create(a.file(&format!("open-{n}"))).unwrap()).collect();
    files.iter_mut().for_each(|file| std::io::Write::write_all(file, &[7; 300_000]).unwrap());
    let overwritten = fs::File::options().write(true).open(a.file("synced-7")).unwrap();
    std::os::unix::fs::FileExt::write_at(&overwritten, &[9; 8000], 4096).unwrap();
    kill(a.daemon(), "-KILL");
    drop((files, overwritten));
    let _ = Command::new("umount").arg("-l").arg(a.file("")).output();
    let anchor = lab.path(&format!("server/anchors/{}.anchor", id.replace('-', "")));
    wait_for("the session of the killed host does not end", || lab.metric("sessions") == 0.0);
    let (store, at_server) = (all_below(&lab.path("store")), rows(&anchor));
    assert!(store.len() > 10 && at_server.1.len() > 10);
    let tries = |what: &str, with: &dyn Fn(&mut Command), codes: &[i32]| {
        for line in TRIED {
            let mut command = b.command();
            with(&mut command);
            let line = line.replace("URL", &lab.url());
            let ran = Ran::from(command.args(line.split(' ')).stdin(Stdio::null()).output().unwrap());
            assert!(codes.contains(&ran.code), "{what}: {line}: {ran:?}");
            // A mount's process may still be about to end its session.
            wait_for("its session does not end", || lab.metric("sessions") == 0.0);
            assert!(all_below(&lab.path("store")) == store, "{what}: {line} has changed the store");
            assert!(rows(&anchor) == at_server, "{what}: {line} has changed rows");
        }
        assert!(fs::read_dir(b.file("")).unwrap().next().is_none(), "{what}: something is mounted");
    };
    tries("without a key", &|command| _ = command.env_remove("LAMASSU_KEY"), &[9]);
    let other = lab.path("other-key");
    fs::write(&other, [8; 32]).unwrap();
    fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    tries("with a wrong key", &|command| _ = command.env("LAMASSU_KEY", "raw:file:other-key"), &[12]);
    lab.serve(&["host", "grant", "--not", "@b", &format!("@{id}")]).ok();
    tries("with the key, and without the grant", &|_| {}, &[68]);
    lab.serve(&["host", "revoke", "@b"]).ok();
    tries("with the key, and revoked", &|_| {}, &[68]);
    // One with keys puts it right.
    wait_for("the vault is free", || c.mount().code == 0);
    for n in 0..7 {
        assert_eq!(fs::read_to_string(c.file(&format!("synced-{n}"))).unwrap(), content(n));
    }
    // What was not acknowledged is there, or what was before.
    let found = fs::read(c.file("synced-7")).unwrap();
    let was = content(7).into_bytes();
    assert_eq!(found.len(), was.len());
    assert!(
        found
            .iter()
            .zip(&was)
            .enumerate()
            .all(|(at, (now, was))| { now == was || (4096..12_096).contains(&at) && *now == 9 })
    );
    c.write("after", "more").unwrap();
    c.umount().ok();
    assert!(rows(&anchor) != at_server && all_below(&lab.path("store")) != store);
    c.run("check store/v").ok();
}
