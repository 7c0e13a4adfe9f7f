//! Checks a vault without its keys: directories have records, and files have lengths that files of a vault can have.
//!
//! It verifies no contents, names or attributes, and cannot tell whether anything is missing: that takes the keys.

use super::entry::looked_at;
use super::{Problem, Report, kind, listing};
use crate::walk::{Failed, Met, Visit, has_header, walk};
use crate::{Dataset, Kind, Result};
use lamassu_format::PAGE_LEN;
use lamassu_format::header::{NameMode, VaultHeader};
use lamassu_format::name::{Stored, classify};
use lamassu_store::BackendDir;
use lamassu_store::backend::Listed;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Walks the tree of a vault without its keys. Datasets in it are listed but not entered.
///
/// # Errors
/// Those of the store, for the root.
pub fn check_locked(root: Arc<dyn BackendDir>, header: &VaultHeader) -> Result<Report> {
    let mut look = Look { mode: header.names(), report: Report::default() };
    walk(Met::first(root, PathBuf::new(), ()), &mut look)?;
    Ok(look.report)
}

/// A walk over the tree.
struct Look {
    mode: NameMode,
    report: Report,
}

impl Look {
    fn note(&mut self, stored: &Path, kind: &str, text: String) {
        let stored = stored.display().to_string();
        self.report.add(Problem { stored, kind: kind.to_owned(), text, ..Problem::default() });
    }
}

impl Visit for Look {
    type Passed = ();
    /// Whether it has a record.
    type Here = bool;
    type Error = crate::VaultError;

    fn enter(&mut self, at: &Met<()>, dir: &Arc<dyn BackendDir>) -> Result<Option<bool>> {
        match has_header(&**dir) {
            Ok(true) if !at.is_root() => {
                self.report.datasets.push(Dataset { plain: None, stored: at.stored.clone() });
                return Ok(None);
            }
            Err(e) => {
                let text = format!("cannot tell whether the directory is a dataset: {e}");
                self.note(&at.stored, kind::IO, text);
                return Ok(None);
            }
            Ok(_) => {}
        }
        self.report.directories += 1;
        Ok(Some(false))
    }

    fn entry(
        &mut self,
        at: &Met<()>,
        dir: &Arc<dyn BackendDir>,
        has_record: &mut bool,
        e: &Listed,
    ) -> Result<Option<()>> {
        let stored = || at.stored.join(&e.name);
        match classify(self.mode, e.name.as_bytes()) {
            Stored::Sealed(_) | Stored::Long(_) | Stored::Plain => {}
            Stored::Foreign => {
                let text = "something that this version of Lamassu did not write".to_owned();
                self.note(&stored(), kind::FOREIGN, text);
                return Ok(None);
            }
            Stored::DirRecord => {
                *has_record = true;
                return Ok(None);
            }
            Stored::Root | Stored::Companion(_) | Stored::LinkRest(_) => return Ok(None),
        }
        let st = match looked_at(|| dir.stat_entry(&e.name)) {
            Ok(st) => st,
            Err(e) => {
                self.note(&stored(), kind::IO, format!("cannot be looked at: {e}"));
                return Ok(None);
            }
        };
        match st.kind {
            Kind::Dir => return Ok(Some(())),
            Kind::File => {
                self.report.files += 1;
                if st.len % PAGE_LEN as u64 != 0 {
                    let text = format!("{} bytes is no length that a file here has: it was cut or added to", st.len);
                    self.note(&stored(), kind::LENGTH, text);
                }
            }
            Kind::Symlink => self.report.symlinks += 1,
            Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => self.report.other += 1,
        }
        Ok(None)
    }

    fn leave(&mut self, at: &Met<()>, _dir: &Arc<dyn BackendDir>, has_record: bool) {
        if self.mode == NameMode::Encrypted && !has_record {
            let text = "its directory record is missing, so the names in it are lost".to_owned();
            self.note(&at.stored, kind::RECORD, text);
        }
    }

    fn failed(&mut self, at: &Met<()>, what: Failed, e: std::io::Error) -> Result<()> {
        match what {
            Failed::List if at.is_root() => return Err(listing(e)),
            Failed::List => self.note(&at.stored, kind::IO, format!("the directory cannot be listed: {e}")),
            Failed::Open => self.note(&at.stored, kind::IO, format!("the directory does not open: {e}")),
        }
        Ok(())
    }
}
