//! A vault in a directory of this host, whose store tests change by hand.

use super::*;
use std::path::PathBuf;

/// A vault in a temporary directory, with access to its store.
pub struct Lab {
    pub dir: tempfile::TempDir,
    pub backend: Arc<dyn Backend>,
    pub recipe: Recipe,
}

impl Lab {
    /// Of a vault that is empty.
    pub fn new() -> Lab {
        let (dir, backend) = local();
        let recipe = Recipe::default();
        recipe.make(&backend).close().unwrap();
        Lab { dir, backend, recipe }
    }

    pub fn open(&self) -> Vault {
        self.recipe.open(&self.backend).unwrap()
    }

    /// Where something lies in the store.
    pub fn stored(&self, path: &str) -> PathBuf {
        self.dir.path().join(self.recipe.open_read_only(&self.backend).unwrap().stored_path(n(path)).unwrap())
    }
}
