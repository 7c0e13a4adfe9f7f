//! Errors of keys. No variant holds a secret.

use crate::receipt::ReceiptError;
use crate::{FileError, HistoryError, SourceError, Tier};
use lamassu_crypto::NoRandom;
use lamassu_format::header::{Destroyed, HeaderError, SlotKind};
use lamassu_format::{Domain, Suite};

/// An operation on keys failed. For [`KeyError::is_wrong_key`] a program can ask again.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The user's: the source is valid, but no slot opens with it. (Or someone altered that slot: the two cannot be
    /// distinguished.)
    #[error("wrong key: of the slots that a {kind} key can open, none opens with it ({tried} tried)", kind = .kind.name())]
    WrongKey {
        /// kind of the material
        kind: SlotKind,
        /// slots tried
        tried: usize,
    },
    /// The user's: the header has no slot for this kind of source.
    #[error("wrong key: no slot is opened by a {kind} key; there are slots for {have}", kind = .kind.name(), have = names(.have))]
    NoSlotOfKind {
        /// kind of the material
        kind: SlotKind,
        /// kinds there are
        have: Vec<SlotKind>,
    },
    /// Someone who can write to the store: the key is right, but the MAC over the header is not.
    #[error("the key is right, but the header was altered or damaged; restore it from a backup copy")]
    HeaderAltered,
    /// A faulty program's: the header is authentic, but its keychain does not open or is invalid.
    #[error("the header is authentic, but its keychain is not valid; restore the header from a backup copy")]
    KeychainInvalid,
    /// The file is no header, is damaged, or is newer than this program.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// Another header lies in the place of that which the keys were loaded from.
    #[error("the header is another vault's: its keys are not those that are loaded; put the vault's own back")]
    OtherHeader,
    /// The keys were destroyed: no key opens it any more.
    #[error(
        "its keys were destroyed on {} (receipt {}): nothing opens it any more, but a copy of its header from before: `lamassu key restore`",
        crate::date::time(i64::try_from(.0.time).unwrap_or(i64::MAX / 2)),
        data_encoding::HEXLOWER.encode(&.0.receipt)
    )]
    Destroyed(Destroyed),
    /// The user's: the destruction was completed, and there is nothing to continue.
    #[error(
        "the header from before is gone, so it cannot be proven that this key opened it; destroy it with the server's or the token's own tool"
    )]
    NothingToProve,
    /// Its author, someone who changed it, or damage.
    #[error("the receipt is not valid: {0}")]
    Receipt(#[from] ReceiptError),
    /// The user's: no such slot.
    #[error("there is no slot {id}; `lamassu key list` shows those there are")]
    NoSlot {
        /// the id asked for
        id: u32,
    },
    /// The user's: without a slot nothing opens the header again.
    #[error("slot {id} is the last one and cannot be removed; add another first")]
    LastSlot {
        /// the id asked for
        id: u32,
    },
    /// The user's: no room.
    #[error("all {max} key slots are in use; remove one first")]
    SlotsFull {
        /// most slots
        max: usize,
    },
    /// Four thousand million slots were added in this header's life.
    #[error("slot ids are used up in this header")]
    SlotIdsUsedUp,
    /// The user's: the suite's block keys are as published, and do not depend on a server.
    #[error("suite {} has no oblivious keys; aes, blake3 and chacha have", .suite.name())]
    SuiteNotOblivious {
        /// the suite
        suite: Suite,
    },
    /// Epochs are numbered in 32 bits.
    #[error("epochs are used up in this keychain")]
    EpochsUsedUp,
    /// The user's: there is no such epoch.
    #[error("there is no epoch {number} of the {tier} key", tier = .tier.name())]
    NoEpoch {
        /// of which key
        tier: Tier,
        /// asked for
        number: u32,
    },
    /// The user's: new data uses this epoch.
    #[error("epoch {number} of the {tier} key is the newest, which new writes use; rotate first", tier = .tier.name())]
    NewestEpoch {
        /// of which key
        tier: Tier,
        /// asked for
        number: u32,
    },
    /// The user's: the zone file's epochs are not those this vault has.
    #[error(
        "the zone's {tier} keys do not continue those of this vault: it is an older copy of the zone file, or the vault has rotated on its own",
        tier = .tier.name()
    )]
    OtherEpochs {
        /// of which key
        tier: Tier,
    },
    /// The user's: a vault takes over keys of its own zone only.
    #[error("this vault belongs to another zone")]
    OtherZone,
    /// The user's: the key is shared, and a rotation of one vault alone would end that.
    #[error(
        "this vault shares its {tier} key with its zone. To rotate it for all: `lamassu zone rotate FILE`, then for each vault \
         `lamassu key rotate --{tier} --zone FILE --zone-key SOURCE`. To end the sharing: --leave-zone",
        tier = .tier.name()
    )]
    SharedKey {
        /// which key
        tier: Tier,
    },
    /// The user's: a vault has its zone's suite.
    #[error("the zone's suite is {zone}, not {wanted}; leave out the suite or make another zone", zone = .zone.name(), wanted = .wanted.name())]
    ZoneSuite {
        /// the zone's
        zone: Suite,
        /// what was asked for
        wanted: Suite,
    },
    /// The user's: a narrower domain than a zone's has a K_in that no zone knows.
    #[error("a vault whose deduplication domain is {domain} has an inner key of its own; leave out the zone", domain = .domain.name())]
    DomainNotZone {
        /// what was asked for
        domain: Domain,
    },
    /// The user's: a dataset can share the K_in of its parent's zone where the parent has one.
    #[error(
        "the vault it lies in has the deduplication domain {domain}, so there is no zone to share; use the domain family, file or none", domain = .domain.name()
    )]
    NoZoneToShare {
        /// the parent's
        domain: Domain,
    },
    /// The user's: the zone shares K_in alone.
    #[error("this zone has no outer key to share; use an own outer key")]
    NoOuterKey,
    /// The machine's: Argon2 could not run.
    #[error("Argon2id could not run with {memory_kib} KiB of memory")]
    Argon2 {
        /// memory asked for
        memory_kib: u32,
    },
    /// The slot's maker, or someone who can write there: it needs more memory than is granted to a slot that nothing
    /// vouches for yet.
    #[error(
        "slot {slot} asks for {} MiB of memory (Argon2id), and {} MiB, half of what is free here, is the most that a slot gets unasked; it was not tried, and \
         no other opens with this key",
        .memory_kib / 1024, .spare_kib / 1024
    )]
    Argon2Memory {
        /// not tried
        slot: u32,
        /// what it asks for
        memory_kib: u32,
        /// what it would get
        spare_kib: u32,
    },
    /// The same, of all the slots that were tried before.
    #[error(
        "slot {slot} was not tried, and none before opens with this key: the vaults that this one lies in have slots too, and all of them together ask for \
         more than {} GiB of memory to be filled by Argon2id",
        lamassu_format::header::Argon2Params::WORK_MAX >> 20
    )]
    Argon2Work {
        /// not tried
        slot: u32,
    },
    /// The same for a token, which each slot takes an operation of.
    #[error(
        "slot {slot} was not tried, and none before opens with this token: the vaults that this one lies in have slots too, and more than {} of them were \
         tried",
        lamassu_format::header::SLOTS_MAX
    )]
    TokenWork {
        /// not tried
        slot: u32,
    },
    /// A writer of the store forged the slot, or it belongs to a key that may not sign. Whoever knows an RSA key's
    /// public half can seal a slot of another header for it.
    #[error(
        "slot {slot} opens with the token's RSA key, but nothing shows that it was made with that key: anyone who knows its public half could have made \
         this header. Name the administrator who must have signed it: --admin-key or --admin-zone"
    )]
    TokenUnproven {
        /// the slot
        slot: u32,
    },
    /// The user's: a slot of such a key would prove nothing.
    #[error(
        "the token's RSA key may not sign (or its public half is not in the token), and nothing here has an administrator who could vouch for its slot: \
         use a key that may decrypt and sign, an AES key, or a vault with an administrator (`lamassu key admin init`)"
    )]
    TokenCannotSign,
    /// The user's: readers refuse a header whose slots ask for more.
    #[error(
        "a passphrase slot of this cost fills {} GiB of memory (Argon2id, memory times passes), the slots there are {} GiB, and all of a header together \
         may fill {} GiB; give it a lower cost (--argon2-ms), or remove a slot first",
        .asked.div_ceil(1 << 20), .taken.div_ceil(1 << 20), lamassu_format::header::Argon2Params::WORK_MAX >> 20
    )]
    SlotsTooDear {
        /// what the new one asks for, KiB times passes
        asked: u64,
        /// what those ask for that there are
        taken: u64,
    },
    /// The source did not give a key.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The header's file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The user's: this slot opens the vault and may change nothing.
    #[error(
        "slot {slot} is use-only: it opens the vault, but its header is changed with an administrator's slot alone; give --key the source of one of those (`lamassu key list` shows them)"
    )]
    NotAdministrator {
        /// the slot that opened
        slot: u32,
    },
    /// Someone who has the file key and no administrator's slot, or damage: the MAC is right, but the signature is not.
    #[error(
        "the administrator's signature over the header does not verify: a user of a use-only slot changed it, or it is damaged; restore it from a backup copy"
    )]
    SignatureInvalid,
    /// Someone who can write to the store: the header is authentic, but an older one.
    #[error(
        "the header is older than the one that these keys opened: it was put back, and lacks {lacks}. Nothing was changed. Put the newer one back with `lamassu key restore BACKUP DIR` \
         before the vault is unmounted: until then the mount has all keys, and without it what was written under keys that the header lacks can be read no more. \
         If there is no newer backup, copy the files out of the mount first. If it is put back already, and its history had to begin anew, unmount and mount again"
    )]
    OlderHeader {
        /// what of it
        lacks: &'static str,
    },
    /// Someone who has the file key: the header has another signature than the pinned administrator's, or none.
    #[error(
        "the header is not signed by the administrator that is pinned for this vault ({}); if the administrator did change, correct the pin, otherwise restore the header from a backup copy",
        .found.as_ref().map_or("it has no signature".into(), |key| format!("it is signed by {key}"))
    )]
    OtherAdministrator {
        /// the key that did sign it, in hex
        found: Option<String>,
    },
    /// The user's: no slot would be left that can change the header.
    #[error("slot {id} is the last administrator's; make another one first")]
    LastAdministrator {
        /// the id asked for
        id: u32,
    },
    /// The user's mistake: a use-only slot makes sense only where another slot may do more.
    #[error(
        "this header has no administrator, so no slot can be use-only; `lamassu key admin init` makes you its administrator"
    )]
    NoAdministrator,
    /// The user's: there is one already.
    #[error("this header has an administrator already")]
    HasAdministrator,
    /// The user's: this dataset's header has no slot for its parent.
    #[error("this dataset does not inherit its key: no slot of it is opened by the vault it lies in")]
    NoParentSlot,
    /// The user's: there is one already.
    #[error("this dataset inherits its key already")]
    HasParentSlot,
    /// The user's: what lets the vault above open a dataset is not exchanged for a key.
    #[error(
        "slot {id} is the one by which the vault it lies in opens this dataset, and only `lamassu dataset set PATH inherit=yes|no` adds or removes it; give --key the source of a slot of the dataset's own (`lamassu key add` makes one)"
    )]
    ParentSlot {
        /// the slot
        id: u32,
    },
    /// The store's, or another parent's: the slot is sealed under no key of this parent.
    #[error(
        "the keys of the vault it lies in do not open this dataset: it was moved here from another vault, or its parent slot is damaged; load it with a key of its own, or restore its header"
    )]
    OtherParent,
    /// The history could not be read or written.
    #[error(transparent)]
    History(#[from] HistoryError),
    /// The kernel's.
    #[error(transparent)]
    NoRandom(#[from] NoRandom),
}

impl KeyError {
    /// Whether the key given is the wrong one for this header (exit code 12 of the command line).
    pub fn is_wrong_key(&self) -> bool {
        matches!(self, KeyError::WrongKey { .. } | KeyError::NoSlotOfKind { .. })
    }
}

fn names(kinds: &[SlotKind]) -> String {
    kinds.iter().map(|k| k.name()).collect::<Vec<_>>().join(", ")
}
