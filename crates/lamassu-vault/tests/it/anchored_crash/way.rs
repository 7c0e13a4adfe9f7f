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

/// fsync of a directory, or of a file, syncs one directory. Another name of what it is for may be in another one.
#[test]
fn an_fsync_makes_no_name_durable_in_a_directory_that_it_has_not_synced() {
    fn link(v: &Vault, path: &str) {
        v.link(v.ino(path), v.ino("e"), n("y")).unwrap();
    }
    type Change = fn(&Vault);
    let cases: [(Option<&str>, Change); 3] = [
        (Some("X"), |v| {
            link(v, "d/x");
            rm(v, "d/x").unwrap();
            fsync_dir(v, "d");
        }),
        (Some("S"), |v| {
            link(v, "d/s/deep");
            rm(v, "d/s/deep").unwrap();
            rmdir(v, "d/s").unwrap();
            fsync_dir(v, "d");
        }),
        (None, |v| {
            link(v, "d/f");
            fsync(v, "d/f");
        }),
    ];
    for (always, change) in cases {
        let made = |v: &Vault| {
            ["d", "d/s", "e"].iter().for_each(|dir| _ = v.dir(dir));
            link_to(v, "d/x", "X");
            link_to(v, "d/s/deep", "S");
            v.put("d/f", &1_u64.to_le_bytes());
        };
        let steps: Vec<Step<'_>> =
            vec![("", &made), ("sync!", &sync), ("", &change), ("", &|v| link_to(v, "end", "E"))];
        for recipe in [Recipe::default(), Recipe::plain()] {
            let mut run = run(recipe, &steps);
            // Behind the first sync.
            run.states.drain(..2);
            run.states[0].0 += 1;
            run.always = always.map(str::to_owned).into_iter().collect();
            run.survive(true);
        }
    }
}
