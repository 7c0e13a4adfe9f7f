//! Anchors that hosts put.

use super::*;
use std::sync::{OnceLock, Weak};

/// Who may use two vaults could else put each into the other. Nothing would bound the datasets in them.
#[test]
fn a_vault_is_not_put_into_its_own_dataset() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, caller) = vaults(dir.path());
    let (vaults, [one, two, _]) = (Arc::new(vaults), VAULTS);
    let of = [one, two].map(|id| rows(&vaults, &id));
    let begin = |id, around| vaults.begin_put(&caller, &id, None, Some(around)).unwrap_or_else(|_| panic!("begins"));
    // Both begin while nothing lies in anything.
    let (mut first, mut second) = (begin(one, two), begin(two, one));
    for (put, rows) in [(&mut first, &of[0]), (&mut second, &of[1])] {
        put.take(rows).unwrap_or_else(|_| panic!("takes"));
    }
    vaults.forget(&one).unwrap_or_else(|_| panic!("retires"));
    first.finish(&caller).unwrap_or_else(|_| panic!("puts"));
    assert_eq!(vaults.state().around(&one), Some(two));
    vaults.forget(&two).unwrap_or_else(|_| panic!("retires"));
    assert!(matches!(second.finish(&caller), Err(Refused::NotGranted)));
    assert!(matches!(vaults.begin_put(&caller, &two, None, Some(one)), Err(Refused::NotGranted)));
    assert_eq!(vaults.state().around(&two), None);
    let mut alone = vaults.begin_put(&caller, &two, None, None).unwrap_or_else(|_| panic!("begins"));
    assert!(alone.take(&of[1]).is_ok() && alone.finish(&caller).is_ok());
}

/// It may have grants of very many, and put what it knows of each. Each that is open takes files and memory.
#[test]
fn who_puts_what_is_here_opens_no_vault_for_that() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, caller) = vaults(dir.path());
    let vaults = Arc::new(Vaults { unused: UNUSED, room: Room::of(1), ..vaults });
    let of: HashMap<_, _> = VAULTS.map(|id| (id, rows(&vaults, &id))).into();
    VAULTS.iter().for_each(|id| vaults.close_unused(id));
    let head = Head([0; 32]).after(&of[&VAULTS[1]]);
    DiskTable::open(&anchor(dir.path(), &VAULTS[1])).unwrap().commit(&[head.change()]).unwrap();
    let _attended = attend(&vaults, &caller, &VAULTS[0]);
    for (id, is_known) in [(VAULTS[1], false), (VAULTS[2], true)] {
        let mut put = vaults.begin_put(&caller, &id, None, None).unwrap_or_else(|_| panic!("begins"));
        assert!(put.take(&of[&id]).is_ok());
        let done = put.finish(&caller);
        assert!(if is_known { matches!(done, Err(Refused::Known)) } else { done.is_ok_and(|its| its == head) });
        assert_eq!(open(&vaults), [VAULTS[0]]);
    }
    // One that is open is asked itself.
    let mut put = vaults.begin_put(&caller, &VAULTS[0], None, None).unwrap_or_else(|_| panic!("begins"));
    assert!(put.take(&of[&VAULTS[0]]).is_ok() && matches!(put.finish(&caller), Err(Refused::Known)));
}

type Once = Box<dyn FnOnce(&Arc<Vaults>) + Send>;

/// Files. Of each new one that is not installed they note whether its vault could be used while it was removed.
struct Watched {
    files: Files,
    vaults: OnceLock<Weak<Vaults>>,
    was_free: std::sync::Mutex<Vec<bool>>,
    /// What happens after the next answer whether a vault has an anchor.
    next: std::sync::Mutex<Option<Once>>,
}

impl Watched {
    fn vaults(&self) -> Arc<Vaults> {
        self.vaults.get().and_then(Weak::upgrade).expect("they use these files")
    }
}

struct WatchedNew {
    new: Option<Box<dyn NewAnchor>>,
    id: VaultId,
    of: Arc<Watched>,
}

impl AnchorStore for Arc<Watched> {
    fn all(&self) -> Result<Vec<VaultId>> {
        self.files.all()
    }

    fn has(&self, id: &VaultId) -> Result<bool> {
        let has = self.files.has(id);
        let next = self.next.lock().unwrap().take();
        next.into_iter().for_each(|next| next(&self.vaults()));
        has
    }

    fn open(&self, id: &VaultId) -> std::result::Result<Arc<dyn Table>, AnchorError> {
        self.files.open(id)
    }

    fn begin(&self, id: &VaultId) -> std::result::Result<Box<dyn NewAnchor>, AnchorError> {
        Ok(Box::new(WatchedNew { new: Some(self.files.begin(id)?), id: *id, of: self.clone() }))
    }

    fn put_away(&self, id: &VaultId) -> Result<bool> {
        self.files.put_away(id)
    }

    fn free(&self) -> u64 {
        self.files.free()
    }

    fn name(&self, id: &VaultId) -> String {
        self.files.name(id)
    }
}

impl NewAnchor for WatchedNew {
    fn table(&self) -> Arc<dyn Table> {
        self.new.as_ref().expect("is there until it is installed").table()
    }

    fn install(mut self: Box<Self>) -> Result<()> {
        self.new.take().expect("is installed once").install()
    }
}

impl Drop for WatchedNew {
    fn drop(&mut self) {
        if self.new.is_some() {
            let is_free = self.of.vaults().slot(&self.id).try_lock().is_some();
            self.of.was_free.lock().unwrap().push(is_free);
        }
    }
}

/// With etcd that takes seconds or more, and whoever has a grant can put what is here already.
#[test]
fn nobody_waits_for_a_vault_while_rows_that_were_put_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, caller) = vaults(dir.path());
    let (rows, [here, _, gone]) = (VAULTS.map(|id| rows(&vaults, &id)), VAULTS);
    VAULTS.iter().for_each(|id| vaults.close_unused(id));
    let (files, (vaults_of, was_free, next)) = (Files::open(dir.path()).unwrap(), Default::default());
    let watched = Arc::new(Watched { files, vaults: vaults_of, was_free, next });
    let vaults = Arc::new(Vaults { anchors: Arc::new(watched.clone()), ..vaults });
    watched.vaults.set(Arc::downgrade(&vaults)).expect("once");
    let begin = |vaults: &Arc<Vaults>, id, rows: &[Change]| {
        let mut put = vaults.begin_put(&caller, &id, None, None).unwrap_or_else(|_| panic!("begins"));
        assert!(put.take(rows).is_ok());
        put
    };
    assert!(matches!(begin(&vaults, here, &rows[0]).finish(&caller), Err(Refused::Known)));
    // It is there when the put begins, and has gone and come again when that ends.
    let late = begin(&vaults, gone, &rows[2]);
    vaults.forget(&gone).unwrap_or_else(|_| panic!("is retired"));
    let (other, of) = (caller.clone(), rows[2].clone());
    *watched.next.lock().unwrap() = Some(Box::new(move |vaults| {
        let mut put = vaults.begin_put(&other, &gone, None, None).unwrap_or_else(|_| panic!("begins"));
        assert!(put.take(&of).is_ok() && put.finish(&other).is_ok());
    }));
    assert!(late.finish(&caller).is_ok());
    assert_eq!(*watched.was_free.lock().unwrap(), [true; 2]);
}

/// Nor does one that has newer rows of a vault that was restored, if there is no room.
#[test]
fn a_vault_that_was_restored_is_opened_for_a_host_only_if_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, caller) = vaults(dir.path());
    let (rows, copied) = (rows(&vaults, &VAULTS[1]), vaults.state().copied().unwrap());
    vaults.close_unused(&VAULTS[1]);
    let other = tempfile::tempdir().unwrap();
    State::make(other.path()).unwrap().fill(&copied, &[VAULTS[1]]).unwrap();
    let state = Arc::new(State::open(other.path()).unwrap());
    let vaults = Vaults { common: Common { state, ..vaults.common.clone() }, unused: UNUSED, ..vaults };
    let vaults = Arc::new(Vaults { room: Room::of(1), ..vaults });
    let (vault, begun) = attend(&vaults, &caller, &VAULTS[0]);
    let puts = || {
        let put = vaults.begin_put(&caller, &VAULTS[1], Some(Head([9; 32])), None);
        let mut put = put.unwrap_or_else(|_| panic!("begins"));
        assert!(put.take(&rows).is_ok());
        put.finish(&caller)
    };
    assert!(matches!(puts(), Err(Refused::TooMuch(_))));
    assert_eq!(open(&vaults), [VAULTS[0]]);
    assert!(vault.call(begun.line, Call::Leave).is_ok());
    drop(vault);
    assert!(puts().is_ok_and(|head| head == Head([9; 32])), "another one gives way");
}
