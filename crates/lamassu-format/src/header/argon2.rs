//! The cost of a passphrase.

/// Cost of Argon2id, within the bounds of §4, which are checked before anything runs. A cost is not authentic until its
/// slot has opened, so a header is refused if its slots together ask for more than [`Argon2Params::WORK_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argon2Params {
    memory_kib: u32,
    passes: u32,
    lanes: u32,
}

impl Argon2Params {
    /// Most memory, in KiB.
    pub const MEMORY_KIB_MAX: u32 = 4 << 20;
    /// Most passes.
    pub const PASSES_MAX: u32 = 64;
    /// Most lanes.
    pub const LANES_MAX: u32 = 16;
    /// The most work of all slots of a header together, in KiB of memory times passes. This is 64 GiB filled once: a
    /// minute or two on one machine.
    pub const WORK_MAX: u64 = 64 << 20;

    /// A cost, or `None` unless 8·lanes ≤ memory ≤ 4 GiB, 1 ≤ passes ≤ 64, 1 ≤ lanes ≤ 16.
    pub const fn new(memory_kib: u32, passes: u32, lanes: u32) -> Option<Self> {
        if lanes < 1
            || lanes > Self::LANES_MAX
            || passes < 1
            || passes > Self::PASSES_MAX
            || memory_kib < 8 * lanes
            || memory_kib > Self::MEMORY_KIB_MAX
        {
            return None;
        }
        Some(Argon2Params { memory_kib, passes, lanes })
    }

    /// m, in KiB.
    pub const fn memory_kib(&self) -> u32 {
        self.memory_kib
    }

    /// t.
    pub const fn passes(&self) -> u32 {
        self.passes
    }

    /// p.
    pub const fn lanes(&self) -> u32 {
        self.lanes
    }

    /// Its work: KiB of memory times passes.
    pub const fn work(&self) -> u64 {
        self.memory_kib as u64 * self.passes as u64
    }
}
