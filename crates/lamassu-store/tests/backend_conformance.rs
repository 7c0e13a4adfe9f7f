//! One suite for every backend: each method of the trait, and the errno each refusal carries.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "conformance/attributes.rs"]
mod attributes;
#[path = "conformance/files.rs"]
mod files;
#[path = "conformance/names.rs"]
mod names;

use lamassu_store::backend::{
    Backend, BackendDir, CrashBackend, FaultBackend, LocalBackend, MemoryBackend, RenameMode,
};
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;

/// A backend under test, and what goes when it goes.
struct Store {
    backend: Box<dyn Backend>,
    _dir: Option<tempfile::TempDir>,
}

impl Store {
    fn root(&self) -> Arc<dyn BackendDir> {
        self.backend.root()
    }
}

fn name(s: &str) -> &OsStr {
    OsStr::new(s)
}

#[track_caller]
fn expect_errno<T>(result: io::Result<T>, expected: i32) {
    match result {
        Ok(_) => panic!("succeeded, expected {}", io::Error::from_raw_os_error(expected)),
        Err(e) => {
            assert_eq!(e.raw_os_error(), Some(expected), "{e}, not {}", io::Error::from_raw_os_error(expected))
        }
    }
}

fn rename(root: &Arc<dyn BackendDir>, from: &str, to: &str, mode: RenameMode) -> io::Result<()> {
    root.rename(name(from), &**root, name(to), mode)
}

fn local_in(parent: &std::path::Path) -> Store {
    // Modes are compared exactly.
    rustix::process::umask(rustix::fs::Mode::empty());
    let dir = tempfile::tempdir_in(parent).unwrap();
    let backend = LocalBackend::open(dir.path()).unwrap();
    Store { backend: Box::new(backend), _dir: Some(dir) }
}

fn local() -> Store {
    local_in(&std::env::temp_dir())
}

/// tmpfs where there is one: other errno, other holes.
fn local_shm() -> Store {
    let shm = std::path::Path::new("/dev/shm");
    if shm.is_dir() { local_in(shm) } else { local() }
}

fn memory() -> Store {
    Store { backend: Box::new(MemoryBackend::new()), _dir: None }
}

/// What is live while a store records.
fn crash() -> Store {
    Store { backend: Box::new(CrashBackend::with_granularity(16384)), _dir: None }
}

/// No faults: a wrapper must change nothing.
fn fault() -> Store {
    let Store { backend, _dir } = local();
    Store { backend: Box::new(FaultBackend::new(Arc::from(backend))), _dir }
}

macro_rules! suite {
    ($($backend:ident),* : $($module:ident::$case:ident),* $(,)?) => {
        suite!(@each [$($backend)*] ($($module::$case)*));
    };
    (@each [$($backend:ident)*] $cases:tt) => {
        $( mod $backend { suite!(@cases $backend $cases); } )*
    };
    (@cases $backend:ident ($($module:ident::$case:ident)*)) => {
        $( #[test] fn $case() { crate::$module::$case(&crate::$backend()) } )*
    };
}

suite!(local, local_shm, memory, crash, fault:
    files::reads_what_was_written,
    files::read_is_short_only_at_the_end,
    files::length_grows_and_shrinks,
    files::punch_frees_and_keeps_the_length,
    files::holes_are_found,
    files::allocate_keeps_the_length,
    files::read_only_handles_refuse_writes,
    files::refuses_impossible_offsets,
    files::syncs,
    files::unlinked_file_stays_usable,
    files::threads_write_side_by_side,
    names::creates_exclusively,
    names::opens_only_regular_files,
    names::stat_and_open_opens_full_regular_files_alone,
    names::opens_only_directories,
    names::never_follows_links,
    names::refuses_names_that_are_paths,
    names::lists_everything_once,
    names::large_directory,
    names::listings_do_not_disturb_one_another,
    names::removes,
    names::hard_links,
    names::rename_replaces,
    names::rename_noreplace,
    names::rename_exchanges,
    names::rename_refuses_loops_and_kinds,
    names::rename_across_directories,
    names::other_stores_are_other_devices,
    names::holds_entries,
    names::makes_nodes,
    names::directory_gone,
    names::stat_of_the_store,
    attributes::modes,
    attributes::owners,
    attributes::times,
    attributes::times_not_through_links,
    attributes::xattrs_of_files,
    attributes::xattrs_of_entries,
    attributes::changes_move_times,
    attributes::link_counts,
);
