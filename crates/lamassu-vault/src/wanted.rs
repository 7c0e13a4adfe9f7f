//! The attributes that a new entry gets.

use crate::acl::Inherited;
use lamassu_store::backend::Stat;

/// Owner, mode and access control lists of a new entry.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub uid: u32,
    pub gid: u32,
    pub mode: Option<u32>,
    pub inherited: Option<Inherited>,
}

impl Wanted {
    /// The new owner and group, each only if that of `st` differs. `None`: neither differs.
    pub fn owner_change(&self, st: &Stat) -> Option<(Option<u32>, Option<u32>)> {
        let uid = (st.uid != self.uid).then_some(self.uid);
        let gid = (st.gid != self.gid).then_some(self.gid);
        (uid.is_some() || gid.is_some()).then_some((uid, gid))
    }
}
