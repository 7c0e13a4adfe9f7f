//! What a block's key depends on in addition to its content and K_in (§10): the salt, by deduplication domain, the
//! method, and how the block is compressed.

use crate::BlockKey;
use crate::oblivious::Token;
use lamassu_format::{BlockNo, Compression, Domain, FileId, Method};

/// The longest salt, bytes: a file's id and a block's number.
pub(crate) const SALT_MAX: usize = 24;

/// The salts of a batch's blocks, or that they are stored plain; their cipher and hash; and how they are compressed.
#[derive(Clone, Copy, Debug)]
pub struct Salts<'a> {
    domain: Domain,
    file: FileId,
    numbers: Numbers<'a>,
    is_plain: bool,
    method: Method,
    compression: Option<Compression>,
}

/// The numbers of a batch's blocks in their file.
#[derive(Clone, Copy, Debug)]
enum Numbers<'a> {
    From(BlockNo),
    Each(&'a [BlockNo]),
    /// No numbers: tokens, which take the place of the salt.
    Tokens(&'a [Token]),
}

impl<'a> Salts<'a> {
    /// No salt: equal blocks have equal keys wherever K_in is known.
    pub const EMPTY: Salts<'static> = Salts {
        domain: Domain::Zone,
        file: FileId::NONE,
        numbers: Numbers::From(BlockNo::ZERO),
        is_plain: false,
        method: Method::OF_SUITE,
        compression: None,
    };
    /// For plain blocks: their key is their hash, without a salt.
    pub const PLAIN: Salts<'static> = Salts { is_plain: true, ..Salts::EMPTY };

    /// Salts of consecutive blocks of a file, from block `first` on.
    pub fn from_block(domain: Domain, file: FileId, first: BlockNo) -> Salts<'static> {
        Salts { domain, file, numbers: Numbers::From(first), ..Salts::EMPTY }
    }

    /// Salts of the blocks with these numbers in a file.
    pub fn of_blocks(domain: Domain, file: FileId, numbers: &'a [BlockNo]) -> Salts<'a> {
        Salts { domain, file, numbers: Numbers::Each(numbers), ..Salts::EMPTY }
    }

    /// Tokens in the place of salts, to verify keys that contain one ([`crate::oblivious`]).
    pub(crate) fn of_tokens(tokens: &'a [Token]) -> Salts<'a> {
        Salts { domain: Domain::File, numbers: Numbers::Tokens(tokens), ..Salts::EMPTY }
    }

    /// Whether the blocks are stored as they are.
    pub fn is_plain(self) -> bool {
        self.is_plain
    }

    /// The same for blocks of another method.
    ///
    /// Sealing and opening panic if the suite does not have it.
    pub const fn by(self, method: Method) -> Salts<'a> {
        Salts { method, ..self }
    }

    pub(crate) fn method(self) -> Method {
        self.method
    }

    /// The same with compression of encrypted blocks before they are sealed. When blocks are opened, their keys tell
    /// whether they are compressed.
    pub const fn compressed(self, compression: Option<Compression>) -> Salts<'a> {
        Salts { compression, ..self }
    }

    /// How blocks are compressed when they are sealed.
    pub(crate) fn compression(self) -> Option<Compression> {
        self.compression.filter(|_| !self.is_plain)
    }

    /// The salts of the batch without its first `n` blocks.
    pub(crate) fn skip(self, n: usize) -> Salts<'a> {
        let numbers = match self.numbers {
            Numbers::From(first) => Numbers::From(first + n as u64),
            Numbers::Each(numbers) => Numbers::Each(&numbers[n..]),
            Numbers::Tokens(tokens) => Numbers::Tokens(&tokens[n..]),
        };
        Salts { numbers, ..self }
    }

    /// The salts of the first `count` blocks, which borrow nothing.
    pub(crate) fn to_owned(self, count: usize) -> OwnedSalts {
        let numbers = (0..count).map(|at| self.number(at)).collect();
        let Salts { domain, file, numbers: _, is_plain, method, compression } = self;
        OwnedSalts { domain, file, numbers, is_plain, method, compression }
    }

    /// The salts of some blocks of the batch. `numbers`, of the same length, takes their numbers.
    pub(crate) fn pick<'b>(self, blocks: &[usize], numbers: &'b mut [BlockNo]) -> Salts<'b> {
        for (number, &at) in numbers.iter_mut().zip(blocks) {
            *number = self.number(at);
        }
        Salts { numbers: Numbers::Each(numbers), ..self }
    }

    fn number(self, at: usize) -> BlockNo {
        match self.numbers {
            Numbers::From(first) => first + at as u64,
            Numbers::Each(numbers) => numbers[at],
            Numbers::Tokens(_) => BlockNo::ZERO,
        }
    }

    /// Bytes of each salt.
    pub(crate) fn len(self) -> usize {
        match self.domain {
            Domain::Zone | Domain::Family => 0,
            Domain::File => 16,
            Domain::None => SALT_MAX,
        }
    }

    /// Writes the salt of block `at` of the batch to `out`, which is as long.
    pub(crate) fn write(self, at: usize, out: &mut [u8]) {
        if !self.domain.is_salted() {
            return;
        }
        if let Numbers::Tokens(tokens) = self.numbers {
            return out.copy_from_slice(&tokens[at]);
        }
        let (file, number) = out.split_at_mut(self.file.0.len());
        file.copy_from_slice(&self.file.0);
        if self.domain == Domain::None {
            number.copy_from_slice(&self.number(at).0.to_le_bytes());
        }
    }
}

/// [`Salts`] that borrow nothing.
pub(crate) struct OwnedSalts {
    domain: Domain,
    file: FileId,
    numbers: Vec<BlockNo>,
    is_plain: bool,
    method: Method,
    compression: Option<Compression>,
}

impl OwnedSalts {
    pub fn as_salts(&self) -> Salts<'_> {
        let salts = Salts::of_blocks(self.domain, self.file, &self.numbers);
        Salts { is_plain: self.is_plain, method: self.method, compression: self.compression, ..salts }
    }
}

/// The keys of a batch that is to be opened, and the salts they were derived with.
#[derive(Clone, Copy, Debug)]
pub struct Keyed<'a> {
    /// A key for each block.
    pub keys: &'a [BlockKey],
    /// Their salts.
    pub salts: Salts<'a>,
}

impl<'a> Keyed<'a> {
    /// Keys without salts.
    pub fn unsalted(keys: &'a [BlockKey]) -> Keyed<'a> {
        Keyed { keys, salts: Salts::EMPTY }
    }
}
