//! How blocks of a file are keyed and stored: by the file's profile, or in one of several forms while the profile is
//! being changed.
//!
//! The sealed pages decide which (`docs/format.md` §9). Blocks of a file whose profile is being changed are tried in
//! each form that the vault has, and always verified. A slot's key fits one content in one form only, so trying gives
//! the store no choice.

use super::primitives::Core;
use super::state::Identity;
use super::types::{FileContext, Integrity};
use lamassu_crypto::{Keyed, Salts, Verify};
use lamassu_format::profile::Protection;
use lamassu_format::{BlockKey, BlockNo, Compression, Domain, FileId, Method, Page, Profile};
use std::sync::atomic::Ordering;

/// One way to store a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    /// The domain whose salt goes into its key; `None`: it is stored as it is.
    encrypted: Option<Domain>,
    /// Its hash, and its cipher if it is encrypted.
    method: Method,
}

/// The forms that blocks of a file or a page may have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Forms {
    file: FileId,
    /// The form of new blocks.
    first: Form,
    /// How new blocks are compressed.
    compression: Option<Compression>,
    /// Whether old blocks may have any other form.
    may_differ: bool,
}

impl Form {
    fn of(profile: Profile, ctx: &FileContext) -> Form {
        let encrypted = (!profile.protection().is_plain()).then(|| profile.domain(ctx.domain));
        Form { encrypted, method: profile.method() }
    }

    fn salts<'a>(self, file: FileId, numbers: Numbers<'a>) -> Salts<'a> {
        let salts = match (self.encrypted, numbers) {
            (None, _) => Salts::PLAIN,
            (Some(domain), Numbers::From(first)) => Salts::from_block(domain, file, first),
            (Some(domain), Numbers::Each(numbers)) => Salts::of_blocks(domain, file, numbers),
        };
        salts.by(self.method)
    }

    /// All forms of a vault.
    fn all(ctx: &FileContext) -> impl Iterator<Item = Form> {
        let suite = ctx.ring.suite();
        let has_salted = !ctx.domain.is_salted() && suite.takes_salt();
        let encrypted = [Some(ctx.domain), has_salted.then_some(Domain::File)];
        let encrypted = move |method| encrypted.into_iter().flatten().map(move |d| Form { encrypted: Some(d), method });
        let plain = |method: &Method| !method.has_short_key();
        let plain = Method::all(suite).filter(plain).map(|method| Form { encrypted: None, method });
        Method::all(suite).flat_map(encrypted).chain(plain)
    }
}

/// The numbers of blocks in their file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Numbers<'a> {
    From(BlockNo),
    Each(&'a [BlockNo]),
}

impl Numbers<'_> {
    fn at(self, at: usize) -> BlockNo {
        match self {
            Numbers::From(first) => first + at as u64,
            Numbers::Each(numbers) => numbers[at],
        }
    }
}

impl Forms {
    /// What the salts of new blocks are.
    pub fn salts(self, numbers: Numbers<'_>) -> Salts<'_> {
        self.first.salts(self.file, numbers).compressed(self.compression)
    }

    /// Whether old blocks may be in another form than new ones.
    pub fn may_differ(self) -> bool {
        self.may_differ
    }
}

impl Core {
    /// The forms of the blocks of an open file.
    pub fn forms(&self, identity: &Identity) -> Forms {
        let first = Form::of(identity.profile(), &self.ctx);
        let (compression, may_differ) = (self.ctx.compression, identity.is_changing());
        Forms { file: identity.id(), first, compression, may_differ }
    }

    /// The forms of the blocks that a page names, by its own profile.
    pub fn forms_of(&self, page: &Page) -> Forms {
        let first = Form::of(page.profile, &self.ctx);
        Forms { file: page.file_id, first, compression: self.ctx.compression, may_differ: page.changing }
    }

    /// Whether the id of the file goes into the keys of new blocks.
    pub fn is_salted(&self, identity: &Identity) -> bool {
        is_salted(&self.ctx, identity.profile())
    }

    /// The salts of new blocks from `first` on in a file with this id and profile.
    pub fn salts(&self, file: FileId, profile: Profile, first: BlockNo) -> Salts<'static> {
        Form::of(profile, &self.ctx).salts(file, Numbers::From(first)).compressed(self.ctx.compression)
    }

    /// What reads of a file check.
    pub fn verify(&self, identity: &Identity) -> Verify {
        if identity.is_changing() { Verify::Full } else { self.verify_in(identity.profile()) }
    }

    /// What reads of a file of this profile verify. A mount's `metadata` integrity applies only to files of the profile
    /// `both`: plain blocks are verified whenever their profile says so.
    pub fn verify_in(&self, profile: Profile) -> Verify {
        let is_left_out = match profile.protection() {
            Protection::Both => self.ctx.integrity == Integrity::Metadata && !self.ctx.ring.suite().is_malleable(),
            Protection::Encrypt => !self.ctx.ring.suite().is_malleable(),
            Protection::None => true,
            Protection::Integrity => false,
        };
        if is_left_out { Verify::No } else { Verify::Full }
    }

    /// Opens and verifies blocks in place, in the first of the forms that fits. Returns those that fit none, which are
    /// zeroed.
    pub fn open_blocks(&self, forms: Forms, bytes: &mut [u8], keys: &[BlockKey], numbers: Numbers<'_>) -> Vec<usize> {
        let len = self.ctx.block_len();
        let stored = forms.may_differ.then(|| bytes.to_vec());
        let keyed = Keyed { keys, salts: forms.salts(numbers) };
        let mut failed = self.ctx.engine.open(&self.ctx.ring, bytes, len, keyed, Verify::Full);
        if let Some(stored) = stored {
            failed.retain(|at| {
                let range = at * len..(at + 1) * len;
                !self.open_otherwise(forms, (&stored[range.clone()], &mut bytes[range]), &keys[*at], numbers.at(*at))
            });
        }
        failed
    }

    /// Opens one block in another form than the first. Returns whether it fits one.
    pub fn open_otherwise(
        &self,
        forms: Forms,
        (stored, opened): (&[u8], &mut [u8]),
        key: &BlockKey,
        number: BlockNo,
    ) -> bool {
        let (len, keys) = (self.ctx.block_len(), std::slice::from_ref(key));
        // Most blocks are in the same form as the one before.
        let hint = usize::from(self.form_hint.load(Ordering::Relaxed));
        let others = Form::all(&self.ctx).enumerate().filter(|(at, _)| *at != hint);
        let mut tried = Form::all(&self.ctx).enumerate().skip(hint).take(1).chain(others);
        forms.may_differ
            && tried.any(|(at, form)| {
                if form == forms.first {
                    return false;
                }
                opened.copy_from_slice(stored);
                let keyed = Keyed { keys, salts: form.salts(forms.file, Numbers::From(number)) };
                let fits = self.ctx.engine.open(&self.ctx.ring, opened, len, keyed, Verify::Full).is_empty();
                if fits {
                    self.form_hint.store(at as u8, Ordering::Relaxed);
                }
                fits
            })
    }
}

/// Whether the id of a file goes into the keys of its blocks.
pub(super) fn is_salted(ctx: &FileContext, profile: Profile) -> bool {
    !profile.protection().is_plain() && profile.domain(ctx.domain).is_salted()
}
