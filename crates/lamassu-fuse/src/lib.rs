//! FUSE front-end: translates kernel requests into calls of a [`FileSystem`](lamassu_vault::FileSystem).
//!
//! Guarantees: every request gets exactly one reply, also when the file system below panics (`EIO`) or is frozen (the
//! reply comes after the thaw, while reads go on); every error has one errno, from the vault's one exhaustive table
//! ([`errno_of`]).
//!
//! Never: decides what an operation means (the vault does), keeps file data, waits on its own mount from a request
//! handler.
//!
//! | module | what it does |
//! |---|---|
//! | `mount/` | mounting, waiting for the end, unmounting; the start of the FUSE session |
//! | `adapter/` | one short method for each kernel request, and their shared state (`Shared`) |
//! | `tuning/` | settings of the host that make mounts faster, outside the path of requests |
//! | `options` | the words of `-o` |
//! | [`control`] | freeze, thaw, status and calls of other processes, by ioctl |
//!
//! Order of locks; a lock is taken only while locks to its left in its own line are held:
//!
//! * `Shared::admin`, then the gate's state: freeze and thaw.
//! * `tuning::windows` state, then `Shared::uses`: a fill begins only while the file is not open for writing.
//! * `tuning::dirty` state, then the limits last written.
//! * `Lifetime`, then the state of `Tuning`: the start of the threads.
//! * `uses`, `descriptors`, `absent`, `uncached`, `synchronous`, `without_capability`, `closed`, and the state of
//!   `tuning::awake`: alone.
//!
//! Calls into the file system below hold `admin` (freeze, thaw) or the windows' state (`may_cache` alone), and no other
//! lock.
//!
//! `docs/semantics.md` says what differs from a local file system.

mod adapter;
pub mod control;
mod mount;
mod options;
mod tuning;

pub use adapter::RequestCount;
pub use lamassu_vault::errno_of;
pub use mount::{MountError, Mounted, Mountpoint, Unmounter, mount, mount_answering, root_of, unmount};
#[cfg(feature = "testing")]
pub use mount::{Served, serve};
pub use options::{CacheMode, KeepAwake, MountOptions, OptionError};
