//! What every mount must do, whatever lies below: functions over an empty directory inside it. `suite_tests!` makes one
//! test of each.

#![allow(dead_code)]

pub mod acl;
pub mod attributes;
pub mod content;
pub mod support;
pub mod tree;

/// One `#[test]` per function of the suite. `$with` takes the test's name and a function over a directory. It makes a
/// mount, and has the function run in it by `support::in_child`.
#[macro_export]
macro_rules! suite_tests {
    // What only a file system that keeps access control lists can do.
    (with lists $with:expr) => {
        $crate::suite_tests!($with);
        $crate::suite_tests!(@ $with, acl:
            access_lists_are_enforced, lists_of_directories_are_enforced, default_lists_are_inherited,
            set_group_id_falls_when_outsiders_set_lists, capabilities_are_kept_and_cleared);
    };
    ($with:expr) => {
        $crate::suite_tests!(@ $with, content:
            write_and_read_back, appends_interleave, truncates_both_ways, shared_maps, direct_io,
            direct_writes_beside_cached_readers, synchronous_writes, holes_are_found,
            data_only_in_the_page_cache_is_found, fallocate_modes, offsets_past_4_gib, unlinked_files_live_on,
            syncs_after_files_were_replaced, concurrent_writers, large_file_survives_eviction,
            copies_by_copy_file_range, locks_between_handles, random_readers_never_see_old_bytes,
            reads_through_a_write_only_open_s_pages, maps_of_a_directly_opened_file,
            random_operations_match_a_model);
        $crate::suite_tests!(@ $with, tree:
            lists_5000_entries, deletes_while_listing, renames, rename_flags, hard_links, symbolic_links,
            special_files, long_names, refusals, created_names_replace_remembered_absence, programs_run,
            running_programs_are_not_written, deep_directories, removed_directories_live_on,
            directories_are_opened_while_they_go);
        $crate::suite_tests!(@ $with, attributes:
            modes_and_umask, times_to_the_nanosecond, times_at_the_ends_of_the_range, sizes_and_times_follow_writes,
            xattrs, statfs_makes_sense, set_id_bits_fall_on_change_of_owner, set_id_bits_fall_on_writes_of_others,
            others_are_kept_out);
    };
    (@ $with:expr, $module:ident: $($name:ident),* $(,)?) => {
        $(#[test] fn $name() {
            $with(concat!(module_path!(), "::", stringify!($name)), $crate::suite::$module::$name)
        })*
    };
}
