//! What can be said of a vault whose keys are not loaded: that its directories have records, and its files the lengths that files here have.
//!
//! Says nothing of contents, names or attributes, nor whether anything is missing: that takes the keys.

use super::entry::looked_at;
use super::{Problem, Report, kind, listing};
use crate::dataset::has_header;
use crate::{Dataset, Kind, Result};
use lamassu_format::PAGE_LEN;
use lamassu_format::header::{NameMode, VaultHeader};
use lamassu_format::name::{DIR_RECORD, Stored, classify};
use lamassu_store::BackendDir;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn problem(stored: &Path, kind: &str, text: String) -> Problem {
    Problem { stored: stored.display().to_string(), kind: kind.to_owned(), text, ..Problem::default() }
}

/// Looks through the tree of a vault without its keys. Datasets in it are listed and not gone into.
///
/// # Errors
/// Those of the store, for the root.
pub fn check_locked(root: Arc<dyn BackendDir>, header: &VaultHeader) -> Result<Report> {
    let mut report = Report::default();
    // Each is opened when its turn comes, through its parent, which stays open until the last in it was.
    let mut todo = vec![(root, OsString::new(), PathBuf::new())];
    while let Some((above, name, stored)) = todo.pop() {
        let opened = if name.is_empty() { Ok(above) } else { above.open_dir(&name) };
        let dir = match opened {
            Ok(dir) => dir,
            Err(e) => {
                report.add(problem(&stored, kind::IO, format!("the directory does not open: {e}")));
                continue;
            }
        };
        let entries = match dir.read_dir() {
            Ok(entries) => entries,
            Err(e) if stored.as_os_str().is_empty() => return Err(listing(e)),
            Err(e) => {
                report.add(problem(&stored, kind::IO, format!("the directory cannot be listed: {e}")));
                continue;
            }
        };
        match has_header(&*dir) {
            Ok(true) if !stored.as_os_str().is_empty() => {
                report.datasets.push(Dataset { plain: None, stored });
                continue;
            }
            Err(e) => {
                let text = format!("whether the directory is a dataset cannot be seen: {e}");
                report.add(problem(&stored, kind::IO, text));
                continue;
            }
            Ok(_) => {}
        }
        report.directories += 1;
        if header.names() == NameMode::Encrypted && !entries.iter().any(|e| e.name == OsStr::new(DIR_RECORD)) {
            let text = "its directory record is missing, so the names in it are lost".to_owned();
            report.add(problem(&stored, kind::RECORD, text));
        }
        for e in entries {
            let at = stored.join(&e.name);
            match classify(header.names(), e.name.as_bytes()) {
                Stored::Sealed(_) | Stored::Long(_) | Stored::Plain => {}
                Stored::Foreign => {
                    let text = "something that this version of Lamassu did not write".to_owned();
                    report.add(problem(&at, kind::FOREIGN, text));
                    continue;
                }
                Stored::Root | Stored::DirRecord | Stored::Companion(_) | Stored::LinkRest(_) => continue,
            }
            let st = match looked_at(|| dir.stat_entry(&e.name)) {
                Ok(st) => st,
                Err(e) => {
                    report.add(problem(&at, kind::IO, format!("cannot be looked at: {e}")));
                    continue;
                }
            };
            match st.kind {
                Kind::Dir => todo.push((dir.clone(), e.name, at)),
                Kind::File => {
                    report.files += 1;
                    if st.len % PAGE_LEN as u64 != 0 {
                        let text =
                            format!("{} bytes is no length that a file here has: it was cut or added to", st.len);
                        report.add(problem(&at, kind::LENGTH, text));
                    }
                }
                Kind::Symlink => report.symlinks += 1,
                Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => report.other += 1,
            }
        }
    }
    Ok(report)
}
