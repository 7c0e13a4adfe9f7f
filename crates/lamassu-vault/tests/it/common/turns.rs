//! A vault that hosts use by turns.

use super::{Recipe, anchored, local_fast, options};
use lamassu_anchor::table::{Change, MemoryTable, Space, Standing, Table, Visit};
use lamassu_anchor::{Anchor, AnchorError, ServerFault, Touched};
use lamassu_store::backend::FaultBackend;
use lamassu_vault::*;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A table as hosts have it from a server, which keeps all commits.
#[derive(Default)]
pub struct Served {
    table: MemoryTable,
    pub commits: Mutex<Vec<Change>>,
    /// How often all entries were looked through.
    pub searches: AtomicUsize,
    pub has_ended: AtomicBool,
}

impl Served {
    fn check(&self) -> std::result::Result<(), AnchorError> {
        match self.has_ended.load(Ordering::SeqCst) {
            true => Err(AnchorError::Server { server: "test".into(), fault: ServerFault::Ended }),
            false => Ok(()),
        }
    }
}

impl Table for Served {
    fn get(&self, space: Space, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, AnchorError> {
        self.check().and_then(|()| self.table.get(space, key))
    }
    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> std::result::Result<(), AnchorError> {
        if space == Space::Entries && prefix.is_empty() {
            self.searches.fetch_add(1, Ordering::SeqCst);
        }
        self.check().and_then(|()| self.table.scan(space, prefix, visit))
    }
    fn commit(&self, changes: &[Change]) -> std::result::Result<(), AnchorError> {
        self.check()?;
        self.table.commit(changes)?;
        self.commits.lock().extend(changes.iter().cloned());
        Ok(())
    }
    fn may_end(&self) -> bool {
        true
    }
    fn standing(&self) -> Standing {
        if self.check().is_ok() { Standing::Good } else { Standing::Ended }
    }
    fn wait_until_good(&self) -> std::result::Result<(), AnchorError> {
        self.check()
    }
}

/// The table of one turn, which is over when another one begins.
struct InTurn {
    served: Arc<Served>,
    is_over: AtomicBool,
}

impl Table for InTurn {
    fn get(&self, space: Space, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, AnchorError> {
        self.served.get(space, key)
    }
    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> std::result::Result<(), AnchorError> {
        self.served.scan(space, prefix, visit)
    }
    fn commit(&self, changes: &[Change]) -> std::result::Result<(), AnchorError> {
        assert!(!self.is_over.load(Ordering::SeqCst), "the turn is over");
        self.served.commit(changes)
    }
    fn may_end(&self) -> bool {
        true
    }
    fn standing(&self) -> Standing {
        if self.is_over.load(Ordering::SeqCst) { Standing::GivenUp } else { self.served.standing() }
    }
    fn wait_until_good(&self) -> std::result::Result<(), AnchorError> {
        self.served.wait_until_good()
    }
}

/// A vault that hosts use by turns.
pub struct Lab {
    pub recipe: Recipe,
    pub backend: Arc<FaultBackend>,
    pub table: Arc<Served>,
    present: Mutex<Option<Arc<InTurn>>>,
    pub dir: tempfile::TempDir,
}

/// What a host keeps between its turns.
#[derive(Default)]
pub struct Host {
    pub left: Option<Left>,
    pub seen: usize,
}

impl Lab {
    pub fn new() -> Lab {
        let (dir, local) = local_fast();
        let backend = Arc::new(FaultBackend::new(local));
        let (recipe, table) = (Recipe::default(), Arc::<Served>::default());
        Vault::make_tree(&*backend, &recipe.header(), &recipe.ring()).unwrap();
        let served: Arc<dyn Table> = table.clone();
        drop(anchored::new_anchor(&recipe.header(), &*backend, &served));
        Lab { recipe, backend, table, present: Mutex::default(), dir }
    }

    /// A turn of a host, with these epochs. `is_told`: it learns what others have changed.
    pub fn turn(&self, host: &mut Host, newest: u8, is_told: bool) -> Vault {
        let all: Vec<u8> = (1..=newest).rev().collect();
        let vault = self.opened(&all);
        let mut touched = Touched::default();
        touched.add(&self.table.commits.lock()[host.seen..]);
        if let Some(left) = host.left.take() {
            vault.take_up(left, is_told.then_some(&touched)).map_err(|(_, error)| error).unwrap();
        }
        vault
    }

    /// A turn in which nothing is written.
    pub fn look(&self, host: &mut Host) -> Vault {
        let vault = self.opened_with(&[1], options(true));
        let mut touched = Touched::default();
        touched.add(&self.table.commits.lock()[host.seen..]);
        if let Some(left) = host.left.take() {
            vault.take_up(left, Some(&touched)).map_err(|(_, error)| error).unwrap();
        }
        vault
    }

    pub fn opened(&self, all: &[u8]) -> Vault {
        self.opened_with(all, options(false))
    }

    pub fn opened_with(&self, all: &[u8], options: Options) -> Vault {
        self.table.has_ended.store(false, Ordering::SeqCst);
        let turn = Arc::new(InTurn { served: self.table.clone(), is_over: AtomicBool::new(false) });
        if let Some(before) = self.present.lock().replace(turn.clone()) {
            before.is_over.store(true, Ordering::SeqCst);
        }
        let anchor = Arc::new(Anchor::open(turn, &self.recipe.header().id()).unwrap());
        let options = Options { anchor: Some(anchor), by_turns: true, ..options };
        Vault::open(self.backend.clone(), &self.recipe.header(), self.recipe.ring_of_epochs(all, all), options).unwrap()
    }

    pub fn end(&self, host: &mut Host, vault: Vault) {
        let (left, done) = vault.leave();
        done.unwrap();
        (host.left, host.seen) = (Some(left), self.table.commits.lock().len());
    }
}
