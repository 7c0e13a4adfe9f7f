//! Which crate may depend on which, by the table in ARCHITECTURE.md, and which module on which, at every level. Maps of
//! modules are complete. No module names another by a glob.

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

/// Modules side by side, in a crate or in a module of it, depend on one another in one direction. What is excepted, by
/// what they lie in: a module, and another that may name it all the same.
const EXCEPTED: [(&str, &[(&str, &str)]); 14] = [
    // The grammar has the options of every command, and the dispatcher matches on the grammar.
    ("lamassu", &[("args", "cmd")]),
    // Replacements that are under way are part of what is in force, and change it.
    ("lamassu-anchor::anchor", &[("replace", "state")]),
    // A record of the log is written to the open file, whose database begins behind the log.
    ("lamassu-anchor::table::on_disk", &[("backend", "log")]),
    // An upload in parts becomes an object, and the list of uploads shows what it has so far.
    ("lamassu-gateway::objects", &[("uploads", "multipart")]),
    // The trait of stores has what the requests ask for and what they answer with.
    ("lamassu-gateway::s3", &[("read", "store"), ("upload", "store"), ("upload", "listing")]),
    // Where an anchor lies goes by the policy, and who has it by the lock; both, what opens a vault, and the errors say
    // what an anchor is.
    ("lamassu-host", &[("anchors", "error"), ("anchors", "lock"), ("anchors", "open"), ("anchors", "policy")]),
    // The errors contain those of histories and receipts. A source is parsed by the table of providers and by the forms
    // of recovery keys, which make what a source gives.
    ("lamassu-keys", &[("history", "error"), ("receipt", "error"), ("providers", "source"), ("recovery", "source")]),
    // All unsafe code is in `abi`, which calls the plugin, and through which the plugin calls nbdkit.
    ("lamassu-nbdkit", &[("abi", "end"), ("abi", "log"), ("abi", "plugin")]),
    // A turn ends in the session that it was asked for in, and the copy is brought up to date when one begins.
    ("lamassu-rpc::host", &[("mirrored", "turns"), ("session", "turns")]),
    // What is put is based on the copy, which takes over what was put.
    ("lamassu-rpc::host::mirrored", &[("copy", "put")]),
    // An entry is held in a directory, and linked into one.
    ("lamassu-store::backend::local", &[("dir", "entry")]),
    // Parts of an open file: blocks that a copy or a caller has sealed; the commit under way; the tree over its blocks.
    (
        "lamassu-store::file",
        &[("copy", "state"), ("presealed", "state"), ("concurrent", "primitives"), ("blocks", "fresh")],
    ),
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

/// A module, by its names from the root of the crate on.
type Module = Vec<String>;

/// Whether a character may be in a name.
fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Adds the paths that a path or a list at the start of `text` stands for, each behind `before`. Returns what follows.
fn add_paths<'a>(text: &'a str, before: &[String], paths: &mut BTreeSet<Module>) -> &'a str {
    if let Some(list) = text.strip_prefix('{') {
        let mut rest = list;
        loop {
            rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
            if rest.is_empty() || rest.starts_with('}') {
                return rest.get(1..).unwrap_or_default();
            }
            // What is left of an item: `*`, or `as` with a name.
            rest = add_paths(rest, before, paths).trim_start_matches(|c: char| c != ',' && c != '}');
        }
    }
    let (name, rest) = text.split_at(text.find(|c: char| !is_of_name(c)).unwrap_or(text.len()));
    let path = [before, &[name.to_owned()]].concat();
    match rest.strip_prefix("::") {
        Some(below) if below.starts_with(|c: char| is_of_name(c) || c == '{') => add_paths(below, &path, paths),
        _ => {
            paths.insert(path);
            rest
        }
    }
}

/// The lines of a source without its comments and without the items that only tests have; and the modules among those
/// that are in files of their own.
fn code_of(source: &str) -> (String, Vec<String>) {
    let (mut code, mut of_tests) = (String::new(), Vec::new());
    let mut lines = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    while let Some(line) = lines.next() {
        if line.trim_start() != "#[cfg(test)]" {
            code += line;
            code.push('\n');
            continue;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        let Some(item) = lines.find(|line| !line.trim_start().starts_with("#[")) else { break };
        let name = item.rsplit_once("mod ").and_then(|(_, name)| name.strip_suffix(';'));
        of_tests.extend(name.map(String::from));
        // As rustfmt has it, an item of several lines ends with a brace below its beginning.
        if !item.ends_with([';', '}', ',']) {
            let _ = lines.find(|line| line.strip_prefix(indent).is_some_and(|end| end.starts_with('}')));
        }
    }
    (code, of_tests)
}

/// The paths, from the root of the crate on, that the module `own` names behind `crate::`, `self::` and `super::`;
/// without comments and unit tests.
fn named(source: &str, own: &[String]) -> BTreeSet<Module> {
    let (code, _) = code_of(source);
    let mut paths = BTreeSet::new();
    for (word, steps_up) in [("crate::", own.len()), ("self::", 0), ("super::", 1)] {
        for (at, _) in code.match_indices(word) {
            // The end of a longer word, or not the first of several.
            if code[..at].ends_with(|c: char| is_of_name(c) || c == ':') {
                continue;
            }
            let (mut behind, mut up) = (&code[at + word.len()..], steps_up);
            while let Some(further) = behind.strip_prefix("super::") {
                (behind, up) = (further, up + 1);
            }
            if let Some(from) = own.len().checked_sub(up) {
                add_paths(behind, &own[..from], &mut paths);
            }
        }
    }
    paths
}

/// The sources of a crate, by module; those of the root under no name.
fn modules(name: &str) -> BTreeMap<Module, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src");
    let mut modules: BTreeMap<Module, String> = BTreeMap::new();
    for path in sources(&root).iter().filter(|path| path.extension().is_some_and(|ext| ext == "rs")) {
        let below = path.strip_prefix(&root).expect("below it").with_extension("");
        let mut module: Module = below.iter().map(|name| name.to_string_lossy().into_owned()).collect();
        module.pop_if(|last| ["lib", "main", "mod"].contains(&last.as_str()));
        modules.entry(module).or_default().push_str(&std::fs::read_to_string(path).expect("a source"));
    }
    let of_tests = |(module, source): (&Module, &String)| {
        code_of(source).1.into_iter().map(|name| [&module[..], &[name]].concat()).collect::<Vec<_>>()
    };
    let of_tests: Vec<Module> = modules.iter().flat_map(of_tests).collect();
    modules.retain(|module, _| !module.iter().any(|name| name == "testing"));
    modules.retain(|module, _| !of_tests.iter().any(|tests| module.starts_with(tests)));
    modules
}

/// The `use` items with a `*` for the names of a module of this crate, whose module is one of `below` or is named from
/// `crate`, `self` or `super` on. The names of an enum's variants are no module's.
fn globs(source: &str, below: &BTreeSet<String>) -> Vec<String> {
    let (code, _) = code_of(source);
    let lines = code.split_inclusive('\n').scan(0, |at, line| {
        *at += line.len();
        Some((*at - line.len(), line))
    });
    let starts = lines.filter_map(|(at, line)| {
        let item = line.trim_start();
        let item = item.strip_prefix("pub").map_or(item, |rest| rest.trim_start_matches(|c| c != ' ').trim_start());
        Some(at + line.len() - item.strip_prefix("use ")?.len())
    });
    let items = starts.filter_map(|at| code[at..].split_once(';')).map(|(item, _)| item);
    let is_ours = |item: &&str| {
        let first = item.split(|c: char| !is_of_name(c)).next().unwrap_or_default();
        ["crate", "self", "super"].contains(&first) || below.contains(first)
    };
    // `super::Call::*` has the variants of an enum.
    let has_glob = |item: &&str| {
        let stars = item.match_indices('*').map(|(at, _)| item[..at].trim_end_matches("::"));
        let mut of = stars.map(|before| before.rsplit(|c: char| !is_of_name(c)).next().unwrap_or_default());
        of.any(|last| !last.starts_with(char::is_uppercase))
    };
    items.filter(is_ours).filter(has_glob).map(String::from).collect()
}

/// Otherwise the order of modules could not be checked: a glob names everything, and shows nothing.
#[test]
fn no_module_names_another_by_a_glob() {
    for name in table() {
        let modules = modules(&name);
        for (module, source) in &modules {
            let is_below = |one: &&Module| one.len() > module.len() && one.starts_with(module);
            let below = modules.keys().filter(is_below).map(|one| one[module.len()].clone()).collect();
            let globs = globs(source, &below);
            assert!(globs.is_empty(), "{name}: {} has {globs:?}: write the names out", module.join("::"));
        }
    }
}

#[test]
fn globs_are_found_and_tests_are_left_out() {
    let below = BTreeSet::from(["types".to_owned()]);
    let source = "//! use super::comment::*;\n#[cfg(test)]\nmod crash;\nmod types;\npub use types::*;\nuse std::arch::*;\n\
                  pub(crate) use crate::{a::{B, *}, c};\nuse other::*;\nfn f() {\n    use super::g::*;\n    use self::Call::*;\n}\n\
                  #[cfg(test)]\n#[allow(unused)]\nmod tests {\n    use super::*;\n}\nuse super::last::*;\n";
    assert_eq!(globs(source, &below), ["types::*", "crate::{a::{B, *}, c}", "super::g::*", "super::last::*"]);
    assert_eq!(code_of(source).1, ["crash"]);
}

/// What each module directly below `parent` names of the others, by its own name or by that of something that `parent`
/// passes on.
fn graph(modules: &BTreeMap<Module, String>, parent: &[String]) -> BTreeMap<String, BTreeSet<String>> {
    let below = |module: &[String]| module.strip_prefix(parent)?.first().cloned();
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (module, source) in modules {
        if let Some(own) = below(module) {
            graph.entry(own).or_default().extend(named(source, module).iter().filter_map(|path| below(path)));
        }
    }
    // `use module::{A, B};`, over any number of lines.
    let source = modules.get(parent).map(String::as_str).unwrap_or_default();
    let uses = ["use ", "pub use ", "pub(crate) use ", "pub(super) use "].map(|word| format!("\n{word}"));
    let passed: HashMap<&str, &str> = (uses.iter().flat_map(|word| source.split(word.as_str()).skip(1)))
        .filter_map(|rest| rest.split_once(';')?.0.split_once("::"))
        .flat_map(|(module, names)| names.split(|c: char| !is_of_name(c)).map(move |name| (name, module)))
        .collect();
    let known: BTreeSet<String> = graph.keys().cloned().collect();
    for (module, names) in &mut graph {
        let resolve = |name: &String| match known.contains(name) {
            true => name.clone(),
            false => passed.get(name.as_str()).map_or_else(String::new, |module| module.to_string()),
        };
        *names = names.iter().map(resolve).filter(|name| known.contains(name) && name != module).collect();
    }
    graph
}

#[test]
fn modules_depend_on_one_another_in_one_direction() {
    let mut excepted: HashMap<&str, &[(&str, &str)]> = EXCEPTED.into_iter().collect();
    for name in table() {
        let modules = modules(&name);
        // The root, and every module with modules in it.
        let above = |module: &Module| (0..module.len()).map(|n| module[..n].to_vec()).collect::<Vec<_>>();
        let parents: BTreeSet<Module> = modules.keys().flat_map(above).collect();
        for parent in &parents {
            let place = [std::slice::from_ref(&name), parent].concat().join("::");
            let mut graph = graph(&modules, parent);
            for (module, other) in excepted.remove(&*place).unwrap_or_default() {
                let removed = graph.get_mut(*other).is_some_and(|names| names.remove(*module));
                assert!(removed, "{place}: {other} does not name {module} any more: take the exception away");
            }
            // What names nothing that is left goes, until nothing is left, or a cycle.
            while let Some(free) = graph.iter().find(|(_, names)| names.is_empty()).map(|(module, _)| module.clone()) {
                graph.remove(&free);
                graph.values_mut().for_each(|names| _ = names.remove(&free));
            }
            assert!(graph.is_empty(), "modules of {place} name one another in a circle, or lead to one: {graph:#?}");
        }
    }
    assert!(excepted.is_empty(), "exceptions for what does not exist: {excepted:?}");
}

#[test]
fn paths_are_found_in_lists_and_from_below() {
    let own = ["a", "b"].map(String::from);
    let source = "use crate::{x::{Y, z as w}, V};\nuse super::c::D;\n// super::no\n\
                  fn f() { super::super::e::g(); self::h(); }";
    let found: Vec<_> = named(source, &own).iter().map(|path| path.join("::")).collect();
    assert_eq!(found, ["V", "a::b::h", "a::c::D", "e::g", "x::Y", "x::z"]);
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
