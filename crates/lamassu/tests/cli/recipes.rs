//! Every command line of docs/keys.md works as it stands there.

use crate::support::Bench;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The lines behind `$ ` of the `console` blocks of each section.
fn recipes(page: &str) -> Vec<(&str, String)> {
    let mut found: Vec<(&str, String)> = Vec::new();
    let mut in_console = false;
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            found.push((title, String::new()));
        } else if line.starts_with("```") {
            in_console = line == "```console";
        } else if in_console {
            let command = line.strip_prefix("$ ").unwrap_or_else(|| panic!("a line without a command: {line}"));
            found.last_mut().unwrap().1 += &format!("{command}\n");
        }
    }
    found.retain(|(_, script)| !script.is_empty());
    found
}

#[test]
fn every_recipe_of_the_page_on_keys_works() {
    let recipes = recipes(include_str!("../../../../docs/keys.md"));
    assert!(recipes.len() >= 7, "{}", recipes.len());
    let program = Path::new(env!("CARGO_BIN_EXE_lamassu")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    std::thread::scope(|scope| {
        for (title, script) in recipes {
            let path = &path;
            scope.spawn(move || run(title, &script, path));
        }
    });
}

fn run(title: &str, script: &str, path: &str) {
    let b = Bench::new();
    b.dir("tokens");
    let conf = b.file("softhsm2.conf", format!("directories.tokendir = {}\n", b.path("tokens").display()).as_bytes());
    // For a server that a recipe starts. Ports that the system gives out come round again late.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    // `!` hides a failure from -e, and its success too.
    let script: String = script
        .lines()
        .map(|line| match line.strip_prefix("! ") {
            Some(refused) => format!("if {refused}; then exit 99; fi\n"),
            None => format!("{line}\n"),
        })
        .collect();
    // To files: a server that a recipe starts would hold a pipe open.
    let (out, err) = (b.path("out"), b.path("err"));
    let mut shell = Command::new("bash")
        .args(["-euxo", "pipefail", "-c", script.as_str()])
        .current_dir(b.dir("work"))
        .env_clear()
        .env("PATH", path)
        .env("XDG_STATE_HOME", b.path("state"))
        .env("SOFTHSM2_CONF", conf)
        .env("MODULE", "/usr/lib/softhsm/libsofthsm2.so")
        .env("PORT", port.to_string())
        .stdin(Stdio::piped())
        .stdout(std::fs::File::create(&out).unwrap())
        .stderr(std::fs::File::create(&err).unwrap())
        .process_group(0)
        .spawn()
        .unwrap();
    // What a person would type, each time that they are asked.
    let _ = shell.stdin.take().unwrap().write_all("correct horse battery staple\n".repeat(9).as_bytes());
    // Before the shell is reaped its group cannot be another's: then what it started ends with it.
    let group = Pid::from_child(&shell);
    waitid(WaitId::Pid(group), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
    let _ = kill_process_group(group, Signal::KILL);
    let status = shell.wait().unwrap();
    let text = |path: &Path| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    assert!(status.success(), "{title}: {status}\n{}\n{}", text(&err), text(&out));
}
