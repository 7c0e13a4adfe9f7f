//! What the adapter asks of a file system: the vault's methods as a trait, so that it can be tested and measured with a plain directory.

use lamassu_vault::{
    Access, Attr, DirEntry, Entry, Fallocate, Forest, HandleId, Ino, Kind, Owner, RenameMode, Result, SetAttr,
    SetXattr, StatFs, Vault, Whence,
};
use std::ffi::OsStr;

/// Declares [`FileSystem`] and implements it for [`Vault`] and [`Forest`] by their inherent methods of the same names, so they cannot drift apart.
macro_rules! file_system {
    ($($(#[$doc:meta])* fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $out:ty)?;)*) => {
        /// A file system to mount; the methods mean what those of [`Vault`] mean.
        pub trait FileSystem: Send + Sync + 'static {
            $($(#[$doc])* fn $name(&self $(, $arg: $type)*) $(-> $out)?;)*
        }

        impl FileSystem for Vault {
            $(fn $name(&self $(, $arg: $type)*) $(-> $out)? { Vault::$name(self $(, $arg)*) })*
        }

        impl FileSystem for Forest {
            $(fn $name(&self $(, $arg: $type)*) $(-> $out)? { Forest::$name(self $(, $arg)*) })*
        }

        /// A file system whose every method panics.
        #[cfg(test)]
        pub(crate) struct Panics;

        #[cfg(test)]
        impl FileSystem for Panics {
            $(fn $name(&self $(, $arg: $type)*) $(-> $out)? { $(let _ = $arg;)* panic!("on purpose") })*
        }
    };
}

file_system! {
    /// Whether access control lists are kept, inherited and held in step with the mode, so that the kernel may enforce them.
    fn keeps_acls(&self) -> bool;
    /// Whether the kernel may keep contents of this file.
    fn may_cache(&self, ino: Ino) -> bool;
    /// Ends the use of the file system; called once, after the last request.
    fn close(&self) -> Result<()>;
    /// Called every few seconds while mounted.
    fn maintain(&self) -> Result<()>;
    /// Called as often, while changes can go on: it may wait for them.
    fn unload_idle(&self) -> Result<()>;
    /// Makes the store quiet and consistent until [`FileSystem::thaw`]. The adapter calls no changing method in between.
    fn freeze(&self) -> Result<()>;
    /// Ends a freeze.
    fn thaw(&self) -> Result<()>;
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
    /// One close(2).
    fn flush(&self, handle: HandleId) -> Result<()>;
    /// fsync, fdatasync.
    fn fsync(&self, handle: HandleId, data_only: bool) -> Result<()>;
    /// The last close.
    fn release(&self, handle: HandleId) -> Result<()>;
    /// fallocate.
    fn fallocate(&self, handle: HandleId, mode: Fallocate, offset: u64, len: u64) -> Result<()>;
    /// Copies a range between open files, (handle, offset) each, without looking at the data; `None`: not possible here. May copy less.
    fn copy_range(&self, from: (HandleId, u64), to: (HandleId, u64), len: u64) -> Result<Option<u64>>;
    /// SEEK_DATA and SEEK_HOLE.
    fn seek(&self, handle: HandleId, offset: u64, whence: Whence) -> Result<u64>;
    /// Opens a directory.
    fn open_dir(&self, ino: Ino) -> Result<HandleId>;
    /// Lists from a cookie until `fill` answers false.
    fn read_dir(&self, handle: HandleId, cookie: u64, fill: &mut dyn FnMut(&DirEntry, u64) -> bool) -> Result<()>;
    /// The same with what [`FileSystem::lookup`] finds of each entry but `.` and `..`, and a reference to it, which `fill` takes over whatever it answers.
    fn read_dir_plus(&self, handle: HandleId, cookie: u64, fill: &mut dyn FnMut(&DirEntry, Option<Entry>, u64) -> bool) -> Result<()>;
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
}
