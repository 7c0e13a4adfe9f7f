//! Vaults on a host: opened under one policy, kept with their keys, served, rotated, unloaded. Front-ends (a mount, the
//! command line, gateways, servers) call this crate; it never names any of them.
//!
//! | module | what |
//! |---|---|
//! | [`policy`] | approved primitives, memory, pins, notes; what the process around a vault knows |
//! | [`pins`] | whose signature a header must carry |
//! | [`notes`] | which slots opened last on this host |
//! | [`anchors`] | the anchors of vaults on this host |
//! | [`unlock`] | a header, key material, and what opens it |
//! | [`open`] | from a directory to an open vault |
//! | [`places`] | where this host keeps anchors, pins and notes |
//! | [`place`] | a directory of a vault, held open |
//! | [`created`] | checks what this process has just made in a directory that others may change |
//! | [`store_kind`] | the kind of store below a directory |
//! | [`lock`] | the writer's lock, taken without opening the vault |
//! | [`keeper`] | the keys of every vault that is open, by member |
//! | [`serve`] | a vault that is served, with its datasets: slots, epochs, re-keying |
//! | [`datasets`] | datasets of a served vault |
//! | [`job`] | long work on its own thread: re-keying, a change of profiles |
//! | [`check`](mod@check) | a vault verified and repaired, with the datasets in it |
//! | `profiles` | profiles of a served vault, shown and changed |
//! | [`rotation`], [`needing`], [`slots`] | changes of epochs and of slots, also of a vault that is not open |
//! | [`restore`] | copies of a header, made and put back |
//! | [`destroy`] | what becomes unreadable with a vault's keys |
//! | [`served_keys`] | keys that a server keeps, for sources `server://…` |
//! | [`create`], `compression` | a vault made in an empty directory; how a new vault, dataset or zone compresses |
//! | [`clone`] | a vault copied in the store, under a header of its own |
//! | [`control`] | the control protocol with other processes; counters |
//! | `turns` | drives this host's turns of a vault that several hosts use |
//! | `walks` | re-keying and changes of profiles in such turns |
//! | `guard` | drops the kernel's caches of a vault that another host may use meanwhile |
//! | `answer` | answers requests about a served vault |
//! | [`error`], [`kind`] | one enum of errors, and a program's reaction to each |
//!
//! Locks, outer before inner: the jobs of a [`Served`]; of its [`keeper::Keeper`] the lock of a vault's header, then
//! the kept keys; the update lock of a header's file; the anchors that are open. The forest calls the keeper while it
//! holds the lock of the member that it opens or closes, so a holder of a header's lock or of the kept keys asks the
//! forest only for vaults and headers that are there, which takes no such lock. A thread holds the lock of one header
//! at most.
//!
//! Never: reads arguments, asks a person, prints, or depends on a transport.

pub mod anchors;
mod answer;
pub mod check;
pub mod clone;
pub mod compression;
pub mod control;
pub mod create;
pub mod created;
pub mod datasets;
pub mod destroy;
pub mod error;
mod guard;
pub mod job;
pub mod keeper;
pub mod kind;
pub mod lock;
pub mod needing;
pub mod notes;
pub mod open;
pub mod pins;
pub mod place;
pub mod places;
pub mod policy;
mod profiles;
pub mod restore;
pub mod rotation;
pub mod serve;
pub mod served_keys;
pub mod slots;
pub mod store_kind;
#[cfg(test)]
mod testing;
mod turns;
pub mod unlock;
mod walks;

pub use anchors::{Access, Anchors};
pub use error::{Error, Result, message};
pub use guard::when_session_ends;
pub use keeper::{Keeper, TurnOpening};
pub use kind::FaultKind;
pub use lamassu_rpc::token::Token as JoinToken;
pub use lock::WriterLock;
pub use open::{Found, Opened, Unsealed, backend, options};
pub use pins::Pins;
pub use place::Place;
pub use policy::{Policy, Surroundings};
pub use serve::Served;

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    data_encoding::HEXLOWER.encode(bytes)
}
