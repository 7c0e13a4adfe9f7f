//! Files of an anchored vault (`docs/freshness.md`, section 3): what they share.

use crate::integrity::Records;
use lamassu_anchor::{Anchor, AnchorError, ObjectId};
use std::sync::Arc;

/// Where the tree records of files lie: a cache, believed in nothing.
pub trait Trees: Send + Sync {
    /// Those of a file.
    fn records(&self, object: ObjectId) -> Arc<dyn Records>;
}

/// What the files of an anchored vault share.
pub struct AnchoredFiles {
    anchor: Arc<Anchor>,
    trees: Arc<dyn Trees>,
}

/// Which files were closed before a barrier of the whole store began.
#[derive(Default)]
pub struct ClosedFiles {}

impl AnchoredFiles {
    /// Over an open anchor.
    pub fn new(anchor: Arc<Anchor>, trees: Arc<dyn Trees>) -> Arc<AnchoredFiles> {
        Arc::new(AnchoredFiles { anchor, trees })
    }

    /// The anchor.
    pub fn anchor(&self) -> &Arc<Anchor> {
        &self.anchor
    }

    /// Where tree records lie.
    pub fn trees(&self) -> &Arc<dyn Trees> {
        &self.trees
    }

    /// To be called before a barrier of the whole store: the files that were closed until now, with pages that no
    /// commit of the anchor covers.
    pub fn closed(&self) -> ClosedFiles {
        ClosedFiles {}
    }

    /// To be called after that barrier has succeeded: what those files are is queued for the anchor's next commit.
    ///
    /// # Errors
    /// Those of the anchor.
    pub fn covered(&self, closed: ClosedFiles) -> Result<(), AnchorError> {
        let ClosedFiles {} = closed;
        Ok(())
    }
}
