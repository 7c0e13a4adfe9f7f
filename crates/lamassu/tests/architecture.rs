//! Which crate may depend on which, by the table in ARCHITECTURE.md, and which module of a crate on which. Maps of
//! modules are complete.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Libraries that are for few crates: what the others never do.
const FOR_FEW: [(&str, &[&str]); 9] = [
    ("fuser", &["lamassu-fuse"]),
    ("clap", &["lamassu", "lamassu-server"]),
    ("indicatif", &["lamassu"]),
    ("redb", &["lamassu-access", "lamassu-anchor", "lamassu-server"]),
    ("tokio", &["lamassu-rpc", "lamassu-server", "lamassu-gateway"]),
    ("tonic", &["lamassu-rpc", "lamassu-server"]),
    ("s3s", &["lamassu-gateway"]),
    ("cedar-policy", &["lamassu-access"]),
    ("pasetors", &["lamassu-access"]),
];

/// The crates in the order of the table.
fn table() -> Vec<String> {
    let page = include_str!("../../../ARCHITECTURE.md");
    let section = page.split("\n## ").find(|section| section.starts_with("Crates")).expect("the section");
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    cells.map(String::from).collect()
}

/// The crates of the workspace with the names of what they depend on when they are built, not when they are tested.
fn manifests() -> HashMap<String, Vec<String>> {
    let mut cargo = Command::new(env!("CARGO"));
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml");
    cargo.args(["metadata", "--no-deps", "--offline", "--format-version", "1", "--manifest-path", manifest]);
    let out = cargo.output().expect("cargo runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let metadata: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let text = |value: &Value| value.as_str().expect("a text").to_string();
    let packages = metadata["packages"].as_array().expect("packages").iter();
    let of = |package: &Value| {
        let needed = package["dependencies"].as_array().expect("dependencies").iter().filter(|d| d["kind"] != "dev");
        (text(&package["name"]), needed.map(|d| text(&d["name"])).collect())
    };
    packages.map(of).collect()
}

#[test]
fn each_crate_depends_only_on_those_above_it() {
    let (table, manifests) = (table(), manifests());
    let place = |name: &str| table.iter().position(|one| one == name);
    for (name, needed) in &manifests {
        let own = place(name).unwrap_or_else(|| panic!("{name} is not in the table of ARCHITECTURE.md"));
        for other in needed.iter().filter(|other| manifests.contains_key(*other)) {
            assert!(place(other) < Some(own), "{name} depends on {other}, which is not above it in ARCHITECTURE.md");
        }
    }
    assert_eq!(table.len(), manifests.len(), "a crate of the table is not in the workspace, or twice in the table");
}

#[test]
fn some_libraries_are_for_few_crates() {
    for (name, needed) in manifests() {
        for (library, users) in FOR_FEW {
            assert!(users.contains(&&*name) || !needed.iter().any(|one| one == library), "{name} depends on {library}");
        }
    }
}

/// The modules of a crate depend on one another in one direction. What is excepted, by crate: a module, and another
/// that may name it all the same.
const EXCEPTED: [(&str, &[(&str, &str)]); 6] = [
    // The grammar has the options of every command, and the dispatcher matches on the grammar.
    ("lamassu", &[("args", "cmd")]),
    // Where an anchor lies goes by the policy, and who has it by the lock; both, what opens a vault, and the errors say
    // what an anchor is.
    ("lamassu-host", &[("anchors", "error"), ("anchors", "lock"), ("anchors", "open"), ("anchors", "policy")]),
    // The errors contain those of histories and receipts. A source is parsed by the table of providers and by the forms
    // of recovery keys, which make what a source gives.
    ("lamassu-keys", &[("history", "error"), ("receipt", "error"), ("providers", "source"), ("recovery", "source")]),
    // All unsafe code is in `abi`, which calls the plugin, and through which the plugin calls nbdkit.
    ("lamassu-nbdkit", &[("abi", "end"), ("abi", "log"), ("abi", "plugin")]),
    // A file system has a policy of upkeep, which is carried out on any file system.
    ("lamassu-vault", &[("file_system", "upkeep")]),
    // The errors say which volume they are about.
    ("lamassu-volume", &[("name", "error")]),
];

fn sources(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    let all = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    // Modules of unit tests name what they like.
    all.filter(|path| path.file_name().is_none_or(|name| name != "tests.rs")).collect()
}

/// The words behind every `crate::`, those in braces too; without comments and unit tests.
fn named(source: &str) -> BTreeSet<String> {
    let code = source.split("#[cfg(test)]\nmod").next().unwrap_or_default();
    let code: String = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut names = BTreeSet::new();
    for behind in code.split("crate::").skip(1) {
        let Some(list) = behind.strip_prefix('{') else {
            names.insert(word(behind));
            continue;
        };
        let (mut depth, mut starts) = (1, vec![0]);
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 1 => starts.push(at + 1),
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
        names.extend(starts.into_iter().map(|at| word(list[at..].trim_start())));
    }
    names
}

/// What each module of a crate names of the others, by its own name or by that of something the root passes on.
fn modules(name: &str) -> BTreeMap<String, BTreeSet<String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src");
    let of = |path: &Path| {
        let first = path.strip_prefix(&root).expect("below it").iter().next().expect("a name");
        first.to_string_lossy().trim_end_matches(".rs").to_string()
    };
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in sources(&root) {
        graph.entry(of(&path)).or_default().extend(named(&std::fs::read_to_string(&path).expect("a source")));
    }
    // `pub use module::{A, B};`, over any number of lines.
    let lib = std::fs::read_to_string(root.join("lib.rs")).unwrap_or_default();
    let passed: HashMap<&str, &str> = (lib.split("\npub use ").skip(1).chain(lib.split("\npub(crate) use ").skip(1)))
        .filter_map(|rest| rest.split_once(';')?.0.split_once("::"))
        .flat_map(|(module, names)| names.split(|c: char| !c.is_alphanumeric() && c != '_').map(move |n| (n, module)))
        .collect();
    let passed_on = |name: &str| passed.get(name).map(|module| module.to_string());
    graph.retain(|module, _| !["lib", "main", "testing"].contains(&module.as_str()));
    let known: BTreeSet<String> = graph.keys().cloned().collect();
    for (module, names) in &mut graph {
        let resolved = names.iter().map(|name| passed_on(name).unwrap_or_else(|| name.clone()));
        *names = resolved.filter(|name| known.contains(name) && name != module).collect();
    }
    graph
}

#[test]
fn modules_depend_on_one_another_in_one_direction() {
    let excepted: HashMap<&str, &[(&str, &str)]> = EXCEPTED.into_iter().collect();
    for name in table() {
        let mut graph = modules(&name);
        let excepted = excepted.get(&*name).copied().unwrap_or_default();
        for (module, other) in excepted {
            let removed = graph.get_mut(*other).is_some_and(|names| names.remove(*module));
            assert!(removed, "{name}: {other} does not name {module} any more: take the exception away");
        }
        // What names nothing that is left goes, until nothing is left, or a cycle.
        while let Some(free) = graph.iter().find(|(_, names)| names.is_empty()).map(|(module, _)| module.clone()) {
            graph.remove(&free);
            graph.values_mut().for_each(|names| _ = names.remove(&free));
        }
        assert!(graph.is_empty(), "modules of {name} name one another in a circle, or lead to one: {graph:#?}");
    }
}

/// The names in the first column of the map of modules in a source's head; `None`: it has no map.
fn map_of(source: &str) -> Option<BTreeSet<String>> {
    let head = source.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim);
    let mut rows = head.skip_while(|line| !line.starts_with("| module |")).take_while(|line| line.starts_with('|'));
    rows.next()?;
    let cells = rows.filter_map(|row| row.split(" | ").next());
    let words = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    Some(words.map(|word| word.trim_end_matches('/').to_string()).collect())
}

/// The modules that a source has in files beside it or below it.
fn modules_below(path: &Path) -> BTreeSet<String> {
    let is_root = ["lib", "main", "mod"].iter().any(|name| path.file_stem().is_some_and(|stem| stem == *name));
    let dir = if is_root { path.with_file_name("") } else { path.with_extension("") };
    let entries = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    let stems = entries.filter_map(|path| Some(path.file_stem()?.to_string_lossy().into_owned()));
    stems.filter(|name| !["lib", "main", "mod", "tests"].contains(&name.as_str())).collect()
}

/// The head of each crate maps all its modules. So does every other map, and none names what is not there.
#[test]
fn maps_name_all_modules() {
    for name in table() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(&name).join("src");
        let is_head = |path: &Path| path == root.join(if root.join("lib.rs").exists() { "lib.rs" } else { "main.rs" });
        for path in sources(&root).iter().filter(|path| path.extension().is_some_and(|ext| ext == "rs")) {
            let source = std::fs::read_to_string(path).expect("a source");
            let Some(map) = map_of(&source) else {
                assert!(!is_head(path), "{}: there is no map of modules", path.display());
                continue;
            };
            let modules = modules_below(path);
            let missing: Vec<_> = modules.difference(&map).filter(|module| *module != "testing").collect();
            assert!(missing.is_empty(), "{}: the map lacks {missing:?}", path.display());
            let is_inline = |module: &str| source.contains(&format!("mod {module} {{"));
            let gone: Vec<_> = map.difference(&modules).filter(|module| !is_inline(module)).collect();
            assert!(gone.is_empty(), "{}: the map names {gone:?}, which are no modules of it", path.display());
        }
    }
}
