//! Checking one entry: a file's pages and blocks, a link's target, attributes.

use super::runs::{DamageRun, runs};
use super::{Checker, Found, Located, Problem, kind};
use crate::attr_value::Holder;
use crate::digests::digest_of_dataset;
use crate::error::is_not_found;
use crate::event::{EventRange, IntegrityEvent};
use crate::inode::StoreId;
use crate::symlink::{self, LinkFault};
use crate::walk::{has_header, header_id};
use crate::{Dataset, Kind, VaultError, attr_value};
use lamassu_anchor::SealedPart;
use lamassu_store::backend::Stat;
use lamassu_store::file::{Damage, DamageKind, FileCheck};
use lamassu_store::{BackendDir, File, StoreError};
use std::collections::HashSet;
use std::collections::hash_map::Entry as MapEntry;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::time::Duration;

/// The rests that the symbolic links of one directory need.
#[derive(Default)]
pub(super) struct Links {
    /// Ids of their rests.
    pub rests: HashSet<[u8; 16]>,
    /// Links whose rest is not known: they do not open, or were not looked at.
    pub unknown: u64,
}

/// Whether something that a listing shows as this kind may be a symbolic link.
pub(super) fn may_be_link(listed: Option<Kind>) -> bool {
    listed.is_none_or(|kind| kind == Kind::Symlink)
}

/// How often an entry of the listing is looked for. A check has the vault to itself, so no honest process moves
/// entries. An attacker that keeps exchanging entries must not make the check skip one.
const LOOKS_MAX: u32 = 20;
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);

/// Repeats a lookup that does not find the entry.
pub(super) fn looked_at<T>(mut look: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    for _ in 1..LOOKS_MAX {
        match look() {
            Err(e) if is_not_found(&e) => std::thread::sleep(BETWEEN_LOOKS),
            done => return done,
        }
    }
    look()
}

impl Checker<'_> {
    /// Checks an entry. Returns its kind; `None` if it could not be looked at, which is noted. Does not descend into a
    /// directory.
    pub(super) fn check_entry(&mut self, at: &Located, listed: Option<Kind>, links: &mut Links) -> Option<Kind> {
        let st = match looked_at(|| at.dir.stat_entry(&at.name)) {
            Ok(st) => st,
            Err(e) => {
                links.unknown += u64::from(may_be_link(listed));
                if is_not_found(&e) {
                    self.note_moving(at);
                    return None;
                }
                self.note_io(at, "stat", &e);
                return listed.filter(|k| *k == Kind::Dir);
            }
        };
        if st.kind == Kind::Symlink {
            // Its rest stands in every directory it has a name in.
            self.link(at, links);
        }
        if st.kind != Kind::Dir && st.nlink > 1 {
            match self.seen.entry(StoreId::from(&st)) {
                MapEntry::Vacant(first) => _ = first.insert(at.object),
                MapEntry::Occupied(seen) if *seen.get() == at.object => return Some(st.kind),
                // At most one of the names is right. This name's own row is not compared, since equal content would
                // match it.
                MapEntry::Occupied(_) => {
                    self.stale(at, "a link to another file lies here");
                    return Some(st.kind);
                }
            }
        }
        if st.kind == Kind::Dir && self.vault.has_datasets() {
            let look = |dir: Arc<dyn BackendDir>| Ok(has_header(&*dir)?.then(|| header_id(&*dir).ok().flatten()));
            match at.dir.open_dir(&at.name).and_then(look) {
                Ok(Some(id)) => {
                    // A header that does not parse is reported when the dataset is entered.
                    if let Some(shown) = id.map(|id| digest_of_dataset(&id))
                        && !self.is_newest(at, SealedPart::Content, shown, "the dataset here is").unwrap_or(false)
                    {
                        return None;
                    }
                    self.report.datasets.push(Dataset { plain: at.plain.clone(), stored: at.stored.clone() });
                    return None;
                }
                // Nothing in it is treated as this vault's, least of all by a repair.
                Err(e) if !is_not_found(&e) => {
                    self.note_io(at, "whether the directory is a dataset cannot be seen", &e);
                    return None;
                }
                Ok(None) | Err(_) => {}
            }
        }
        self.xattrs_of(at, &at.dir, Some(&at.name), st.kind);
        match st.kind {
            Kind::File => self.file(at, &st),
            Kind::Dir => {}
            Kind::Symlink => self.report.symlinks += 1,
            Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => self.report.other += 1,
        }
        if st.kind != Kind::Dir {
            self.progress.advance(1, 0);
        }
        Some(st.kind)
    }

    fn link(&mut self, at: &Located, links: &mut Links) {
        let ring = &self.vault.ctx.ring;
        let link = symlink::shown(ring, &*at.dir, &at.name);
        if let Ok(link) = &link {
            links.rests.extend(symlink::rest_id(ring, &link.text));
            let digest = link.digest();
            let judged = self.is_newest(at, SealedPart::Content, digest, "the target is");
            if !self.went(at, judged) {
                // The rest belongs to the newest target, not to this one.
                links.unknown += 1;
                return;
            }
        }
        let ring = &self.vault.ctx.ring;
        if let Err(fault) = link.map_err(LinkFault::from).and_then(|link| symlink::open_shown(ring, &link)) {
            links.unknown += u64::from(!matches!(fault, LinkFault::Rest));
            self.note(at, kind::SYMLINK, Found::Damage, format!("the target does not open: {fault}"));
        }
    }

    fn file(&mut self, at: &Located, st: &Stat) {
        self.report.files += 1;
        let progress = self.progress;
        let mut repair = self.repair;
        let mut verified = self.verify(at, st, repair, &mut |bytes| progress.advance(0, bytes));
        if let Err(error) = &verified
            && error.is_of_policy()
        {
            // The content still verifies. Only the change is refused.
            let text = format!("what a session left under way stays so: {error}; `lamassu profile set` mends that");
            self.note(at, kind::FORBIDDEN, Found::Harmless, text);
            self.report.unsettled = true;
            repair = false;
            verified = self.verify(at, st, repair, &mut |_| {});
        }
        for _ in 1..LOOKS_MAX {
            if !matches!(verified, Err(VaultError::NotFound | VaultError::Stale)) {
                break;
            }
            // Another entry has its name now. It is verified as well, before the check reports success.
            std::thread::sleep(BETWEEN_LOOKS);
            verified = match at.dir.stat_entry(&at.name) {
                Ok(st) => self.verify(at, &st, repair, &mut |bytes| progress.advance(0, bytes)),
                Err(e) => Err(crate::error::io("stat")(e)),
            };
        }
        match verified {
            Ok(found) => {
                self.report.pages += found.pages;
                self.report.blocks += found.blocks;
                self.report.recovered += found.recovered;
                self.report.unsealed_empty += u64::from(found.unsealed_empty);
                self.report.last_session = self.report.last_session.max(found.last_session);
                self.report.unsettled |= found.unsettled;
                runs(found.damage.into_iter().chain(found.undone), |run| self.damage(at, &run));
            }
            Err(VaultError::Store(StoreError::Damaged(damage))) => self.damage(at, &DamageRun::from(damage)),
            Err(VaultError::NotFound | VaultError::Stale) => self.note_moving(at),
            Err(VaultError::Outdated { .. }) => self.stale(at, "another file lies here than was put here last"),
            Err(e) => {
                self.report.unsettled = true;
                self.note_io(at, "the file cannot be verified", &e);
            }
        }
    }

    fn verify(&self, at: &Located, st: &Stat, repair: bool, progress: &mut dyn FnMut(u64)) -> crate::Result<FileCheck> {
        let vault = self.vault;
        let (ino, known) = {
            let nodes = vault.nodes.lock();
            let ino = nodes.find(StoreId::from(st));
            (ino.unwrap_or(st.ino), ino.map(|ino| nodes.object(ino)))
        };
        if vault.anchored.is_some() && known.is_some_and(|known| at.object.is_some_and(|object| object != known)) {
            return Err(vault.outdated_at("entry", at.stored.display().to_string()));
        }
        let _opening = vault.opening(ino).lock();
        if let Some(open) = vault.files.get(ino)
            && (open.is_writable() || !repair)
        {
            return Ok(open.file().check(repair, progress)?);
        }
        let open = |write| {
            let opened = at.dir.open_same(&at.name, st, write).map_err(crate::error::io("open"))?;
            opened.ok_or(VaultError::Stale)
        };
        // A file that must not be written is verified nevertheless.
        let (backing, write) = match repair {
            true => open(true).map(|f| (f, true)).or_else(|_| open(false).map(|f| (f, false)))?,
            false => (open(false)?, false),
        };
        let ctx = if write { &vault.ctx } else { &vault.ctx_read };
        let tag = at.stored.display().to_string();
        let file = match at.object.filter(|_| vault.anchored.is_some()) {
            Some(object) => File::open_object(ctx.clone(), backing, st.len, &tag, object)?,
            None => File::open(ctx.clone(), backing, &tag)?,
        };
        Ok(file.check(write, progress)?)
    }

    fn damage(&mut self, at: &Located, run: &DamageRun) {
        let geo = &self.vault.ctx.geometry;
        let d = &Damage { pages: run.pages, ..run.first };
        let range = match (d.kind, d.block) {
            // It is unknown where a page, or its last block, was cut.
            (DamageKind::Truncated | DamageKind::Shortened | DamageKind::UnknownSession, _) => None,
            (_, Some(block)) => Some((block, run.blocks)),
            (_, None) => Some((geo.first_block(d.page), d.pages.saturating_mul(geo.blocks_per_page()))),
        };
        let bytes = |blocks: u64| blocks.saturating_mul(geo.block_size());
        let event = IntegrityEvent {
            range: Some(EventRange::of(d, run.blocks)),
            ..IntegrityEvent::of_file(&at.stored.display().to_string(), d)
        };
        self.problem(
            Some(event),
            Problem {
                path: at.plain.as_ref().map(|p| p.display().to_string()),
                stored: at.stored.display().to_string(),
                kind: d.kind.word().to_owned(),
                segment: Some(d.segment),
                page: Some(d.page.0),
                pages: (d.pages > 1).then_some(d.pages),
                block: d.block.map(|block| block.0),
                blocks: (run.blocks > 1).then_some(run.blocks),
                offset: range.map(|(first, _)| bytes(first.0)),
                length: range.map(|(_, blocks)| bytes(blocks)),
                undone: d.kind.is_readable(),
                text: match run.blocks {
                    1 => format!("{d}: {}", d.kind.meaning()),
                    blocks => format!("{d} and the {} after it: {}", blocks - 1, d.kind.meaning()),
                },
                ..Problem::default()
            },
        );
    }

    /// What the attributes of an entry of `dir`, or of `dir` itself, are bound to.
    fn holder(&mut self, at: &Located, dir: &Arc<dyn BackendDir>, name: Option<&OsStr>, of: Kind) -> Option<Holder> {
        if of != Kind::Dir {
            return Some(Holder::File);
        }
        let opened = match name {
            Some(name) => match looked_at(|| dir.open_dir(name)) {
                Err(e) if is_not_found(&e) => {
                    self.note_moving(at);
                    return None;
                }
                opened => opened.ok()?,
            },
            None => dir.clone(),
        };
        Some(Holder::Dir(self.vault.read_names(&*opened).ok()?.dir_id()))
    }

    /// The outcome of a judgement. An error is noted as a problem.
    fn went(&mut self, at: &Located, judged: crate::Result<bool>) -> bool {
        judged.unwrap_or_else(|error| {
            self.note_io(at, "it cannot be compared with the anchor", &error);
            false
        })
    }

    /// Checks the attributes of an entry of `dir`, or of `dir` itself.
    pub(super) fn xattrs_of(&mut self, at: &Located, dir: &Arc<dyn BackendDir>, name: Option<&OsStr>, of: Kind) {
        let judged = self.are_attrs_newest(at, &**dir, name);
        if !self.went(at, judged) {
            return;
        }
        let look = || {
            let held = name.map(|name| dir.hold(name)).transpose()?;
            let listed = held.as_ref().map_or_else(|| dir.list_xattr(), |held| held.list_xattr())?;
            Ok((listed, held))
        };
        let (listed, held) = match looked_at(look) {
            Ok(found) => found,
            Err(e) => {
                let e: std::io::Error = e;
                return match e.raw_os_error() {
                    Some(libc::EPERM | libc::EOPNOTSUPP) => {}
                    Some(libc::ENOENT) => self.note_moving(at),
                    _ => self.note_io(at, "its attributes cannot be listed", &e),
                };
            }
        };
        let ring = &self.vault.ctx.ring;
        let is_ours = |attr: &OsString| attr_value::open_name(ring, attr).is_some();
        if !listed.iter().any(is_ours) {
            return;
        }
        // A record that does not open is reported by itself, and makes the attributes unverifiable.
        let Some(holder) = self.holder(at, dir, name, of) else { return };
        for attr in listed {
            let ring = &self.vault.ctx.ring;
            let shown = attr.to_string_lossy();
            let fault = match attr_value::open_name(ring, &attr) {
                None => continue,
                Some(Err(e)) => Some((kind::XATTR, format!("the name of {shown} does not open: {e}"))),
                Some(Ok(_)) => match held.as_ref().map_or_else(|| dir.get_xattr(&attr), |held| held.get_xattr(&attr)) {
                    Ok(value) => attr_value::open_value(ring, &attr, holder, &value)
                        .err()
                        .map(|e| (kind::XATTR, format!("the value of {shown} does not open: {e}"))),
                    // The attribute is not verified: an owner other than root can list the attributes of a file of mode
                    // 000, but not read them.
                    Err(e) => Some((kind::IO, format!("the attribute {shown} could not be read: {e}"))),
                },
            };
            self.report.xattrs += 1;
            if let Some((kind, text)) = fault {
                self.note(at, kind, Found::Damage, text);
            }
        }
    }
}
