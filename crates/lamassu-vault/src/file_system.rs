//! The one list of operations that a front-end may call.

use crate::locks::{Locks, Object};
use crate::{
    Access, Attr, DirEntry, Entry, Fallocate, HandleId, Ino, Kind, Owner, Permissions, RenameMode, Result, SetAttr,
    SetXattr, Sought, StatFs, Upkeep, Vault, Whence, turns::Turns,
};
use lamassu_store::Hole;
use std::ffi::OsStr;
use std::sync::Arc;

/// Declares [`FileSystem`], and implements it for [`Vault`] by the inherent methods of the same names. `provided`:
/// methods with a default. `own`: methods whose default a single vault keeps.
macro_rules! file_system {
    (
        $($(#[$doc:meta])* fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $out:ty)?;)*
        provided {
            $($(#[$p_doc:meta])* fn $p_name:ident(&self $(, $p_arg:ident: $p_type:ty)*) -> $p_out:ty = $default:expr;)*
        }
        own { $($own:tt)* }
    ) => {
        /// A file system without a kernel: a [`Vault`], several as a [`crate::Forest`], or another directory in their
        /// place.
        ///
        /// Methods take `&self` and may be called from many threads. Errors are those of [`Vault`]'s methods of the
        /// same names.
        pub trait FileSystem: Send + Sync + 'static {
            $($(#[$doc])* fn $name(&self $(, $arg: $type)*) $(-> $out)?;)*
            $($(#[$p_doc])* fn $p_name(&self $(, $p_arg: $p_type)*) -> $p_out { $(let _ = $p_arg;)* $default })*
            $($own)*
        }

        impl FileSystem for Vault {
            $(fn $name(&self $(, $arg: $type)*) $(-> $out)? { Vault::$name(self $(, $arg)*) })*
            $(fn $p_name(&self $(, $p_arg: $p_type)*) -> $p_out { Vault::$p_name(self $(, $p_arg)*) })*
        }

        /// A file system that tells the name of each method before it calls it: for tests of front-ends.
        #[cfg(feature = "testing")]
        pub struct Overheard<F> {
            /// the file system
            pub inner: F,
            /// called with the method's name
            pub told: Box<dyn Fn(&'static str) + Send + Sync>,
        }

        #[cfg(feature = "testing")]
        impl<F: FileSystem> FileSystem for Overheard<F> {
            $(fn $name(&self $(, $arg: $type)*) $(-> $out)? {
                (self.told)(stringify!($name));
                self.inner.$name($($arg),*)
            })*
            $(fn $p_name(&self $(, $p_arg: $p_type)*) -> $p_out {
                (self.told)(stringify!($p_name));
                self.inner.$p_name($($p_arg),*)
            })*
        }

        /// A file system whose every method panics: for tests of front-ends.
        #[cfg(feature = "testing")]
        pub struct Panics;

        #[cfg(feature = "testing")]
        impl FileSystem for Panics {
            $(fn $name(&self $(, $arg: $type)*) $(-> $out)? { $(let _ = $arg;)* panic!("on purpose") })*
            $(fn $p_name(&self $(, $p_arg: $p_type)*) -> $p_out { $(let _ = $p_arg;)* panic!("on purpose") })*
        }
    };
}

file_system! {
    /// Makes the store quiet and consistent until [`FileSystem::thaw`]. The front-end calls no method that changes
    /// anything in between.
    fn freeze(&self) -> Result<()>;
    /// Finds an entry; adds a reference.
    fn lookup(&self, parent: Ino, name: &OsStr) -> Result<Entry>;
    /// Gives references back.
    fn forget(&self, ino: Ino, count: u64);
    /// stat.
    fn getattr(&self, ino: Ino, handle: Option<HandleId>) -> Result<Attr>;
    /// chmod, chown, truncate, utimens in one.
    fn setattr(&self, ino: Ino, handle: Option<HandleId>, set: &SetAttr) -> Result<Attr>;
    /// readlink.
    fn readlink(&self, ino: Ino) -> Result<Vec<u8>>;
    /// mknod.
    fn mknod(&self, parent: Ino, name: &OsStr, kind: Kind, mode: u32, rdev: u64, owner: Owner) -> Result<Entry>;
    /// mkdir.
    fn mkdir(&self, parent: Ino, name: &OsStr, mode: u32, owner: Owner) -> Result<Entry>;
    /// symlink.
    fn symlink(&self, parent: Ino, name: &OsStr, target: &[u8], owner: Owner) -> Result<Entry>;
    /// link.
    fn link(&self, ino: Ino, parent: Ino, name: &OsStr) -> Result<Entry>;
    /// unlink.
    fn unlink(&self, parent: Ino, name: &OsStr) -> Result<()>;
    /// rmdir.
    fn rmdir(&self, parent: Ino, name: &OsStr) -> Result<()>;
    /// renameat2.
    fn rename(&self, parent: Ino, name: &OsStr, to_parent: Ino, to_name: &OsStr, mode: RenameMode) -> Result<()>;
    /// Creates (exclusively) and opens.
    fn create(&self, parent: Ino, name: &OsStr, mode: u32, access: Access, owner: Owner) -> Result<(Entry, HandleId)>;
    /// Opens a regular file.
    fn open_file(&self, ino: Ino, access: Access) -> Result<HandleId>;
    /// Reads; short at the end of the file, or before a range that cannot be read.
    fn read(&self, handle: HandleId, offset: u64, buf: &mut [u8]) -> Result<usize>;
    /// Writes.
    fn write(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize>;
    /// fsync, fdatasync.
    fn fsync(&self, handle: HandleId, data_only: bool) -> Result<()>;
    /// The last close.
    fn release(&self, handle: HandleId) -> Result<()>;
    /// fallocate.
    fn fallocate(&self, handle: HandleId, mode: Fallocate, offset: u64, len: u64) -> Result<()>;
    /// SEEK_DATA and SEEK_HOLE. Looks at `most` bytes of the file, roughly.
    fn seek(&self, handle: HandleId, offset: u64, whence: Whence, most: u64) -> Result<Sought>;
    /// Opens a directory.
    fn open_dir(&self, ino: Ino) -> Result<HandleId>;
    /// Lists from a cookie until `fill` answers false.
    fn read_dir(&self, handle: HandleId, cookie: u64, fill: &mut dyn FnMut(&DirEntry, u64) -> bool) -> Result<()>;
    /// The same, with what [`FileSystem::lookup`] finds of each entry except `.` and `..`, and with a reference to it,
    /// which `fill` takes over whatever it answers.
    fn read_dir_plus(
        &self, handle: HandleId, cookie: u64, fill: &mut dyn FnMut(&DirEntry, Option<Entry>, u64) -> bool
    ) -> Result<()>;
    /// Closes a directory.
    fn release_dir(&self, handle: HandleId) -> Result<()>;
    /// fsync of a directory.
    fn fsync_dir(&self, handle: HandleId) -> Result<()>;
    /// getxattr.
    fn get_xattr(&self, ino: Ino, name: &OsStr) -> Result<Vec<u8>>;
    /// setxattr.
    fn set_xattr(&self, ino: Ino, name: &OsStr, value: &[u8], mode: SetXattr) -> Result<()>;
    /// listxattr.
    fn list_xattr(&self, ino: Ino) -> Result<Vec<Vec<u8>>>;
    /// removexattr.
    fn remove_xattr(&self, ino: Ino, name: &OsStr) -> Result<()>;
    /// statvfs.
    fn statfs(&self) -> Result<StatFs>;
    provided {
        /// Whether access control lists are kept, inherited and held in step with the mode, so that the kernel may
        /// enforce them.
        fn keeps_acls(&self) -> bool = false;
        /// Whether writing a file may wait long for a server, for the keys of its blocks. Other requests must not wait
        /// for it then.
        fn waits_for_keys(&self, ino: Ino) -> bool = false;
        /// Ends the use of the file system; called once, after the last request.
        fn close(&self) -> Result<()> = Ok(());
        /// Called every few seconds while in use.
        fn maintain(&self) -> Result<()> = Ok(());
        /// Ends a freeze.
        fn thaw(&self) -> Result<()> = Ok(());
        /// Writes at the current end of the file.
        fn append(&self, handle: HandleId, data: &[u8]) -> Result<usize> = Err(crate::VaultError::Invalid);
        /// One close(2).
        fn flush(&self, handle: HandleId) -> Result<()> = Ok(());
        /// The memory that the listing of an open directory takes until it is closed, bytes.
        fn listing_bytes(&self, handle: HandleId) -> usize = 0;
        /// The hole at `offset`, empty where there are data: as far as `until`, and as far as pages of `most` bytes
        /// tell.
        fn hole_at(&self, handle: HandleId, offset: u64, until: u64, most: u64) -> Result<Hole> = Err(crate::VaultError::Invalid);
        /// Where the data at `offset` ends: at a hole, or at `until`, where the search stops.
        fn data_until(&self, handle: HandleId, offset: u64, until: u64) -> Result<u64> = Err(crate::VaultError::Invalid);
        /// Copies a range between open files, (handle, offset) each, without reading the data; `None`: not possible
        /// here. May copy less.
        fn copy_range(&self, from: (HandleId, u64), to: (HandleId, u64), len: u64) -> Result<Option<u64>> = Ok(None);
    }
    own {
        /// Whether the kernel may keep contents of this file.
        fn may_cache(&self, ino: Ino) -> bool {
            let _ = ino;
            true
        }
        /// Writes what the kernel had cached. No program waits for that, so it reports nothing that an earlier turn has
        /// lost: the next write or sync of a program does.
        fn write_pages(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize> {
            self.write(handle, offset, data)
        }
        /// Whether several hosts take turns.
        fn hosts_take_turns(&self) -> bool {
            false
        }
        /// Where requests about an inode or a handle wait for a turn, if several hosts take turns with it. The first
        /// call for a dataset makes this host one of them. Without a turn only these calls are made: giving references
        /// back, syncs, and closing handles.
        fn join_turns(&self, number: u64) -> Option<Arc<Turns>> {
            let _ = number;
            None
        }
        /// The same for requests that show attributes. If this differs from [`FileSystem::join_turns`], a change of
        /// attributes needs a turn of both, and this one first.
        fn turns_that_show(&self, ino: Ino) -> Option<Arc<Turns>> {
            self.join_turns(ino)
        }
        /// Lets a freeze that is under way, and may wait for other hosts, fail soon. Whether there was one.
        fn stop_freezing(&self) -> bool {
            false
        }
        /// Lets no further turn begin. Returns when the present ones have ended.
        fn stop_turns(&self) {}
        /// The permissions of a directory, for a decision in a turn about its content.
        fn permissions(&self, dir: Ino) -> Result<Permissions> {
            let Attr { mode, uid, gid, .. } = self.getattr(dir, None)?;
            Ok(Permissions { mode, uid, gid })
        }
        /// Whether the vault of an inode can be used, in a turn.
        fn is_open(&self, ino: Ino) -> Result<()> {
            let _ = ino;
            Ok(())
        }
        /// Locks of programs, if they hold among several hosts.
        fn locks(&self, number: u64) -> Option<Arc<dyn Locks>> {
            let _ = number;
            None
        }
        /// A file, as its locks name it. Needs no turn.
        fn locked_file(&self, ino: Ino) -> Result<Object> {
            let _ = ino;
            Err(crate::VaultError::Invalid)
        }
        /// The signal that asks for a call of [`FileSystem::work_off`].
        fn upkeep(&self) -> Upkeep {
            Upkeep::default()
        }
        /// Called when there is upkeep: does in the background what calls would have to do later.
        fn work_off(&self) -> Result<()> {
            Ok(())
        }
        /// Called as often as [`FileSystem::maintain`], while changes can go on, since it may wait for them. Unloads
        /// what has been idle for long enough.
        fn unload_idle(&self) -> Result<()> {
            Ok(())
        }
    }
}
