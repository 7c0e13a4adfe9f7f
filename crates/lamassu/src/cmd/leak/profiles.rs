//! What an observer sees of files, by their profile.
//!
//! A profile is sealed in a file's pages: they are opened here, and nothing else is.

use super::{Equal, what_is_equal};
use crate::distinct::Distinct;
use crate::fault::Result;
use crate::open::{self, Unsealed};
use crate::text;
use lamassu_format::{Domain, Profile};
use lamassu_host::control::protocol::ShownProfile;
use lamassu_store::backend::{BackendDir, Stat};
use lamassu_vault::{KnownProfile, Options};
use serde::Serialize;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The blocks of one profile get one `SHARE`th of the memory for all blocks.
const SHARE: usize = 8;

/// Files, counted by profile.
pub struct Profiles {
    unsealed: Unsealed,
    memory: usize,
    dir: PathBuf,
    rows: Vec<Row>,
    /// That of the present file.
    current: Option<usize>,
    unknown: u64,
}

struct Row {
    profile: Profile,
    files: u64,
    changing: u64,
    bytes: u64,
    plain_blocks: u64,
    blocks: Distinct,
}

/// Those of one profile.
#[derive(Serialize)]
pub struct OfProfile {
    protect: String,
    /// null: blocks that are stored plain have no keys
    block_keys: Option<String>,
    /// null: they are not encrypted
    cipher: Option<String>,
    hash: String,
    files: u64,
    /// files whose profile is being changed: some blocks may still have the old one
    changing: u64,
    /// as they are stored
    bytes: u64,
    plain_blocks: u64,
    equal_blocks: Equal,
    /// how far equal blocks are equal: a deduplication domain, or `everywhere`, with plain data too
    equal_within: &'static str,
    #[serde(skip)]
    told: &'static str,
}

impl Profiles {
    pub fn new(unsealed: Unsealed, memory: usize, dir: &Path) -> Profiles {
        Profiles { unsealed, memory: memory / SHARE, dir: dir.into(), rows: Vec::new(), current: None, unknown: 0 }
    }

    /// The next file. One that does not open, or has no page, has no profile that could be told.
    pub fn begin(&mut self, dir: &dyn BackendDir, name: &OsStr, st: &Stat) -> Result<()> {
        self.current = None;
        let Some(KnownProfile { profile, is_changing }) = self.profile(dir, name, st)? else {
            self.unknown += 1;
            return Ok(());
        };
        let at = self.rows.iter().position(|row| row.profile == profile).unwrap_or_else(|| {
            let blocks = Distinct::new(self.memory, &self.dir);
            self.rows.push(Row { profile, files: 0, changing: 0, bytes: 0, plain_blocks: 0, blocks });
            self.rows.len() - 1
        });
        let row = &mut self.rows[at];
        row.files += 1;
        row.changing += u64::from(is_changing);
        row.bytes = row.bytes.saturating_add(st.len);
        self.current = Some(at);
        Ok(())
    }

    fn profile(&self, dir: &dyn BackendDir, name: &OsStr, st: &Stat) -> Result<Option<KnownProfile>> {
        if st.len == 0 {
            return Ok(None);
        }
        // What cannot be read is told where its blocks are.
        let Ok(backing) = dir.open_file(name, false) else { return Ok(None) };
        let header = &self.unsealed.found.header;
        let ring = self.unsealed.keys.key_ring(header.suite())?;
        let approved_only = self.unsealed.policy().is_approved_only();
        // One thread: nothing is decrypted but pages.
        let options = Options { approved_only, threads: 1, ..open::options(true) };
        let opened = lamassu_vault::open_orphan(backing, header, ring, &options, &name.to_string_lossy());
        Ok(opened.ok().map(|file| {
            let (profile, is_changing) = file.profile();
            KnownProfile { profile, is_changing }
        }))
    }

    /// A data block of it.
    pub fn block(&mut self, is_plain: bool, digest: u128, len: u32) -> Result<()> {
        let Some(row) = self.current.map(|at| &mut self.rows[at]) else { return Ok(()) };
        row.plain_blocks += u64::from(is_plain);
        row.blocks.add(digest, len)
    }

    /// The profiles, the default first; and the number of files whose profile could not be determined.
    pub fn finish(mut self) -> Result<(Vec<OfProfile>, u64)> {
        self.rows.sort_by_key(|row| row.profile.number());
        let header = &self.unsealed.found.header;
        let (suite, domain) = (header.suite(), header.domain());
        let rows = self.rows.into_iter().map(|row| {
            let known = KnownProfile { profile: row.profile, is_changing: false };
            let ShownProfile { protect, block_keys, cipher, hash, .. } = ShownProfile::of(known, suite);
            let (equal_within, told) = leaks(row.profile, domain);
            Ok(OfProfile {
                protect,
                block_keys,
                cipher,
                hash,
                files: row.files,
                changing: row.changing,
                bytes: row.bytes,
                plain_blocks: row.plain_blocks,
                equal_blocks: row.blocks.count()?.into(),
                equal_within,
                told,
            })
        });
        Ok((rows.collect::<Result<_>>()?, self.unknown))
    }
}

/// How far equal blocks are equal, and what an observer has of that.
fn leaks(profile: Profile, of_vault: Domain) -> (&'static str, &'static str) {
    if profile.protection().is_plain() {
        return ("everywhere", "blocks are read as they are, and are equal to plain data; tails are sealed");
    }
    let domain = profile.domain(of_vault);
    (domain.name(), what_is_equal(domain))
}

impl OfProfile {
    /// For people.
    pub fn told(&self) -> String {
        let part = |name: &Option<String>| name.clone().unwrap_or_else(|| "-".into());
        let changing = if self.changing > 0 { format!(", {} being changed", self.changing) } else { String::new() };
        format!(
            "  {:<10} {:<11} {:<9} {:<8} {} files{changing}, {}; {}, {} plain to see\n{:14}{}\n",
            self.protect,
            part(&self.block_keys),
            part(&self.cipher),
            self.hash,
            self.files,
            text::bytes(self.bytes),
            self.equal_blocks.told("blocks"),
            self.plain_blocks,
            "",
            self.told
        )
    }
}
