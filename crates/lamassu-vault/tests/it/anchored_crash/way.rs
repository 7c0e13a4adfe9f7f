//! The directories around what was synced.

use super::*;

/// A barrier of the whole store has covered a new directory and a file in it. The directory gets another name, and a
/// commit of what was covered comes before the fsync.
#[test]
fn what_an_fsync_covered_is_reached_although_its_directory_has_moved() {
    let steps: Vec<Step<'_>> = vec![
        ("", &|v| link_to(v, "b", "B")),
        ("", &|v| link_to(v, "x", "X")),
        ("sync!", &sync),
        ("", &|v| _ = v.dir("d")),
        ("", &|v| _ = v.new_file("d/f")),
        ("", &|v| link_to(v, "new", "N")),
        ("rename that needs a barrier", &|v| mv(v, "new", "b", RenameMode::Replace).unwrap()),
        ("", &|v| mv(v, "d", "e", RenameMode::NoReplace).unwrap()),
        ("", &|v| rm(v, "x").unwrap()),
        ("commit of what is covered", &|v| link_to(v, "x", "again")),
        ("ack e/f", &|v| fsync(v, "e/f")),
        ("ack e", &|_| {}),
        ("", &|v| link_to(v, "end", "E")),
    ];
    for recipe in [Recipe::default(), Recipe::plain()] {
        run(recipe, &steps).survive(true);
    }
}

/// Of a directory that was replaced nothing is recorded, so recovery could not look into it for what was moved out.
#[test]
fn what_was_moved_out_of_a_directory_survives_that_it_is_replaced() {
    let steps: Vec<Step<'_>> = vec![
        ("", &|v| _ = v.dir("d")),
        ("", &|v| _ = v.dir("d/s")),
        ("", &|v| link_to(v, "d/x", "X")),
        ("", &|v| link_to(v, "d/s/deep", "S")),
        ("", &|v| _ = v.dir("e")),
        ("sync!", &sync),
        ("", &|v| mv(v, "d/x", "y", RenameMode::NoReplace).unwrap()),
        ("", &|v| mv(v, "d/s/deep", "z", RenameMode::NoReplace).unwrap()),
        ("", &|v| rmdir(v, "d/s").unwrap()),
        ("", &|v| mv(v, "e", "d", RenameMode::Replace).unwrap()),
        ("sync!", &sync),
    ];
    for recipe in [Recipe::default(), Recipe::plain()] {
        let mut run = run(recipe, &steps);
        // Behind the first sync.
        run.states.drain(..6);
        run.states[0].0 += 1;
        run.always = vec!["X".to_owned(), "S".to_owned()];
        run.survive(true);
    }
}
