//! What is known of a member: its place, its state, its vault while it is open.

use super::Number;
use crate::error::io;
use crate::inode::StoreId;
use crate::left::Left;
use crate::locks::Locks;
use crate::root::ShownPermissions;
use crate::turns::Turns;
use crate::{Attr, HandleId, Ino, ROOT, Result, Vault};
use lamassu_anchor::ObjectId;
use lamassu_format::header::VaultId;
use lamassu_format::root::RootRecord;
use lamassu_store::Backend;
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a member is at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Seen, not opened yet.
    Sighted,
    /// Open.
    Loaded,
    /// No key for it was found.
    Locked,
    /// Closed by request; not opened again by itself.
    Unloaded,
}

pub(super) enum Inside {
    Sighted,
    Loaded(Arc<Vault>),
    Locked,
    Unloaded,
}

/// A member, as it is shown.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its number.
    pub number: Number,
    /// Of its vault.
    pub id: VaultId,
    /// At this moment.
    pub state: State,
}

/// A member.
pub(super) struct KnownMember {
    pub number: Number,
    pub id: VaultId,
    pub store: StoreId,
    pub backend: Arc<dyn Backend>,
    /// The member it lies in, and its directory's number there; `None` while that member is not open.
    pub place: Mutex<Option<(Number, Ino)>>,
    pub inside: RwLock<Inside>,
    /// One opening at a time.
    pub opening: Mutex<()>,
    pub owed: Mutex<Owed>,
    pub cached: AtomicBool,
    /// The root's permissions when the vault was open last.
    pub permissions: Mutex<Option<ShownPermissions>>,
    /// Set while several hosts take turns with it.
    pub by_turns: RwLock<Option<Arc<ByTurns>>>,
    /// With turns: the permissions of a dataset's entry in the vault around it, when they were last shown.
    pub entry: Mutex<Option<RootRecord>>,
}

/// The vault of a member in the present turn, and what the next turn takes over.
pub(super) struct ByTurns {
    pub turns: Arc<Turns>,
    pub locks: Arc<dyn Locks>,
    /// State that the last vault has left, while none is open. Held shared by operations without a turn, exclusively to
    /// begin or end a turn.
    pub left: RwLock<Option<Mutex<Left>>>,
    /// The objects of files that were open when the last turn ended. Requests for locks come while a turn begins or
    /// ends, too, which may take as long as the server does, and must not wait for that.
    pub open_objects: Mutex<HashMap<Ino, ObjectId>>,
    /// What the kernel has given back, and was not taken back yet: it came while a turn began or ended.
    pub given_back: Mutex<Vec<GivenBack>>,
    /// The attributes of the mount's root as this host last read them: in this turn, or in its last one. Requests to
    /// the daemon go to the root, which therefore opens also while this host can have no turn.
    pub root: Mutex<Option<Attr>>,
    /// Whether something that was written in a turn could not be committed.
    pub has_lost: AtomicBool,
}

/// What the kernel has referred to until now, by numbers of the member.
pub(super) enum GivenBack {
    References(Ino, u64),
    File(HandleId),
    Dir(HandleId),
}

impl ByTurns {
    pub fn new(turns: Arc<Turns>, locks: Arc<dyn Locks>, root: Option<Attr>) -> Arc<ByTurns> {
        Arc::new(ByTurns {
            turns,
            locks,
            left: RwLock::default(),
            open_objects: Mutex::default(),
            given_back: Mutex::default(),
            root: Mutex::new(root),
            has_lost: AtomicBool::new(false),
        })
    }
}

/// The kernel's references to numbers of a member's closed vaults. When they are given back, they must not be
/// subtracted from those of the open vault.
#[derive(Default)]
pub(super) struct Owed {
    pub counts: HashMap<Ino, u64>,
    /// The vault that is being closed: its references are not counted yet.
    pub ending: Option<Arc<Vault>>,
}

impl KnownMember {
    pub fn new(
        number: Number,
        id: VaultId,
        store: StoreId,
        backend: Arc<dyn Backend>,
        vault: Option<Arc<Vault>>,
    ) -> Arc<KnownMember> {
        let permissions = vault.as_ref().map(|vault| vault.root_permissions.shown().clone());
        Arc::new(KnownMember {
            number,
            id,
            store,
            backend,
            place: Mutex::new(None),
            inside: RwLock::new(vault.map_or(Inside::Sighted, Inside::Loaded)),
            opening: Mutex::new(()),
            owed: Mutex::default(),
            cached: AtomicBool::new(true),
            permissions: Mutex::new(permissions),
            by_turns: RwLock::default(),
            entry: Mutex::default(),
        })
    }

    pub fn loaded(&self) -> Option<Arc<Vault>> {
        match &*self.inside.read() {
            Inside::Loaded(vault) => Some(vault.clone()),
            Inside::Sighted | Inside::Locked | Inside::Unloaded => None,
        }
    }

    pub fn by_turns(&self) -> Option<Arc<ByTurns>> {
        self.by_turns.read().clone()
    }

    /// Notes that its vault is open.
    pub fn set_loaded(&self, vault: Arc<Vault>) {
        *self.permissions.lock() = Some(vault.root_permissions.shown().clone());
        *self.inside.write() = Inside::Loaded(vault);
    }

    /// Takes its vault, which is about to be closed and replaced by another.
    pub fn take_loaded(&self) -> Option<Arc<Vault>> {
        let inside = &mut *self.inside.write();
        match std::mem::replace(inside, Inside::Sighted) {
            Inside::Loaded(vault) => Some(vault),
            other => {
                *inside = other;
                None
            }
        }
    }

    pub fn state(&self) -> State {
        match &*self.inside.read() {
            Inside::Sighted if self.by_turns.read().is_some() => State::Loaded,
            Inside::Sighted => State::Sighted,
            Inside::Loaded(_) => State::Loaded,
            Inside::Locked => State::Locked,
            Inside::Unloaded => State::Unloaded,
        }
    }

    pub fn place(&self) -> Option<(Number, Ino)> {
        *self.place.lock()
    }

    /// Sets the place. True: it was not known, so the caller's reference to the directory must be kept.
    pub fn set_place(&self, parent: Number, ino: Ino) -> bool {
        self.place.lock().replace((parent, ino)) != Some((parent, ino))
    }

    pub fn cached(&self) -> bool {
        self.cached.load(Ordering::Relaxed)
    }

    pub fn set_cached(&self, cached: bool) {
        self.cached.store(cached, Ordering::Relaxed);
    }

    /// The kernel gives references back.
    pub fn forget(&self, ino: Ino, mut count: u64) {
        let mut owed = self.owed.lock();
        if let Some(old) = owed.counts.get_mut(&ino) {
            let settled = count.min(*old);
            (*old, count) = (*old - settled, count - settled);
            if *old == 0 {
                owed.counts.remove(&ino);
            }
        }
        if count == 0 {
            return;
        }
        // Under the lock, so that a vault whose references are being counted either includes this one or does not.
        if let Some(vault) = owed.ending.clone().or_else(|| self.loaded()) {
            vault.forget(ino, count);
        }
    }

    /// stat of the root while its vault is not open: from its backing directory, with the permissions that it showed
    /// last.
    pub fn backing_attr(&self) -> Result<Attr> {
        const BLOCK_SIZE: u32 = 4096;
        let st = self.backend.root().stat().map_err(io("stat"))?;
        let shown = self.permissions.lock().clone();
        let st = shown.map_or(st, |shown| shown.over(st));
        Ok(Attr::new(ROOT, &st, st.len, BLOCK_SIZE))
    }
}
