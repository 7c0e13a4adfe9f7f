//! Recovery keys in shares, and on a standard output that nobody reads.

use crate::support::{Bench, Ran};
use std::io;
use std::process::Stdio;

/// The sheets that `key add --recovery --shares` prints.
fn sheets(b: &Bench, scheme: &str, vault: &str) -> Vec<String> {
    let printed = b.run(&format!("key add --recovery --shares {scheme} {vault}")).ok().says("not shown again").text();
    printed.split("\n\n").map(|sheet| sheet.trim_end().to_string() + "\n").collect()
}

#[test]
fn any_three_of_five_shares_open() {
    let b = Bench::new();
    b.run("init v").ok();
    let s = sheets(&b, "3-of-5", "v");
    assert_eq!(s.len(), 5);
    let id = b.run("info --json v").ok().json()["id"].as_str().unwrap()[..4].to_string();
    assert!(s[3].starts_with(&format!("# Share 4 of 5 of a recovery key for {id}…: any 3 of them")), "{}", s[3]);
    let slot = b.run("key list --json v").ok().json()["slots"][1].clone();
    assert_eq!((&slot["kind"], &slot["label"]), (&"recovery-shares".into(), &"recovery key, 3 of 5 shares".into()));
    for some in [[0, 1, 2], [4, 1, 3]] {
        b.secret("some", some.map(|i| s[i].as_str()).concat().as_bytes());
        b.run("ls -k recovery-shares:file:some v").ok();
    }
    // Typed, each on a line, four letters of each word; no more are asked for than it takes.
    let line = |i: usize| {
        let words = s[i].lines().skip(1).flat_map(str::split_whitespace).filter(|w| !w.ends_with('.'));
        words.map(|w| &w[..w.len().min(4)]).collect::<Vec<_>>().join(" ").to_uppercase() + "\n"
    };
    b.run_with("ls -k recovery-shares:prompt v", [line(2), line(0), line(4)].concat().as_bytes()).ok();
    b.run_with("ls -k recovery-shares:stdin v", [line(2), line(0), line(4)].concat().as_bytes()).ok();

    // Each mistake is its own.
    let other = sheets(&b, "3-of-5", "v");
    b.run("init w").ok();
    let strange = sheets(&b, "2-of-2", "w");
    for (given, words) in [
        (s[..2].concat(), "2 of the 3 shares"),
        ([&*s[0], &*s[1], &*s[0]].concat(), "share 1 was given twice"),
        ([&*s[0], &*s[1], &*other[2]].concat(), "of another set"),
        ([&*s[0], &*strange[0]].concat(), "of another set"),
        (s[..3].concat().replacen(" 2. ", " 2. x", 1), "word 2 of the share given first"),
        (line(0) + "\n" + line(1).split_once(' ').unwrap().1, "has 29"),
        (String::new(), "no shares"),
    ] {
        b.secret("some", given.as_bytes());
        b.run("ls -k recovery-shares:file:some v").code(9).says(words);
    }
    b.secret("some", [&*strange[0], &*strange[1]].concat().as_bytes());
    b.run("ls -k recovery-shares:file:some w").ok();
    b.run("ls -k recovery-shares:file:some v").code(12);
    b.run_with("ls -k recovery-shares:prompt v", line(0).as_bytes()).code(9).says("1 of the 3");

    for bad in ["1-of-3", "4-of-3", "2-of-16", "three"] {
        b.run(&format!("key add --recovery --shares {bad} v")).code(2);
    }
    b.run("key add --shares 2-of-3 -n raw:file:key v").code(2);
}

/// A standard output whose reader is gone before anything is written.
fn into_closed_pipe(b: &Bench, line: &str) -> Ran {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let child = b.command(line.split(' ')).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    child.wait_with_output().unwrap().into()
}

#[test]
fn words_that_nobody_saw_leave_no_slot() {
    let b = Bench::new();
    b.run("init v").ok();
    for line in ["key add --recovery v", "key add --recovery --shares 2-of-3 v"] {
        let ran = into_closed_pipe(&b, line).code(1).says("could not be printed").says("was removed again");
        assert!(ran.err.contains("standard output"), "{}", ran.err);
        assert_eq!(b.run("key list --json v").ok().json()["slots"].as_array().unwrap().len(), 1);
    }
    let events = b.run("history v").ok().text();
    assert!(events.contains("could not be printed"), "{events}");
    // A list that nobody reads on is no failure.
    into_closed_pipe(&b, "key list v").code(0);
}
