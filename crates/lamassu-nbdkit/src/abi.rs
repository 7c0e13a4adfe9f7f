//! nbdkit's C interface, version 2 (nbdkit-plugin(3), `nbdkit-plugin.h` of nbdkit 1.30): the one module with unsafe
//! code. Every callback catches panics, tells nbdkit the errno and the message, and calls `plugin`.
//!
//! nbdkit promises: pointers that it passes are valid until the callback returns; a handle is one that `open` has
//! returned, and no callback of it is under way when `close` is called; buffers have `count` bytes, and no other thread
//! uses them meanwhile.

use crate::failure::{Failure, Result};
use crate::log::Bounded;
use crate::plugin::{self, Connection};
use crate::settings::HELP;
use lamassu_volume::{Extent, Zeros};
use libc::{c_char, c_int, c_void};
use parking_lot::Mutex;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::OnceLock;
use std::time::Instant;

const API_VERSION: c_int = 2;
const THREAD_MODEL_PARALLEL: c_int = 3;
const FLAG_MAY_TRIM: u32 = 1 << 0;
const FLAG_FUA: u32 = 1 << 1;
const FLAG_REQ_ONE: u32 = 1 << 2;
const FLAG_FAST_ZERO: u32 = 1 << 3;
const FUA_NATIVE: c_int = 2;
const CACHE_EMULATE: c_int = 1;
const EXTENT_HOLE_ZERO: u32 = 3;
const NEVER: c_int = 0;
const ALWAYS: c_int = 1;

/// A callback that this plugin does not have, of any type.
type Unused = Option<unsafe extern "C" fn()>;
type Can = Option<extern "C" fn(*mut c_void) -> c_int>;

/// `struct nbdkit_plugin`. nbdkit reads `struct_size` bytes, so the fields of later versions may be left out.
#[repr(C)]
struct Plugin {
    struct_size: u64,
    api_version: c_int,
    thread_model: c_int,
    name: *const c_char,
    longname: *const c_char,
    version: *const c_char,
    description: *const c_char,
    load: Option<extern "C" fn()>,
    unload: Option<extern "C" fn()>,
    config: Option<extern "C" fn(*const c_char, *const c_char) -> c_int>,
    config_complete: Option<extern "C" fn() -> c_int>,
    config_help: *const c_char,
    open: Option<extern "C" fn(c_int) -> *mut c_void>,
    close: Option<extern "C" fn(*mut c_void)>,
    get_size: Option<extern "C" fn(*mut c_void) -> i64>,
    can_write: Can,
    can_flush: Can,
    is_rotational: Can,
    can_trim: Can,
    of_version_1: [Unused; 5],
    errno_is_preserved: c_int,
    dump_plugin: Unused,
    can_zero: Can,
    can_fua: Can,
    pread: Option<extern "C" fn(*mut c_void, *mut c_void, u32, u64, u32) -> c_int>,
    pwrite: Option<extern "C" fn(*mut c_void, *const c_void, u32, u64, u32) -> c_int>,
    flush: Option<extern "C" fn(*mut c_void, u32) -> c_int>,
    trim: Option<extern "C" fn(*mut c_void, u32, u64, u32) -> c_int>,
    zero: Option<extern "C" fn(*mut c_void, u32, u64, u32) -> c_int>,
    magic_config_key: *const c_char,
    can_multi_conn: Can,
    can_extents: Can,
    extents: Option<extern "C" fn(*mut c_void, u32, u64, u32, *mut c_void) -> c_int>,
    can_cache: Can,
    cache: Unused,
    thread_model_of: Unused,
    can_fast_zero: Can,
    preconnect: Unused,
    get_ready: Option<extern "C" fn() -> c_int>,
    after_fork: Option<extern "C" fn() -> c_int>,
    list_exports: Option<extern "C" fn(c_int, c_int, *mut c_void) -> c_int>,
    default_export: Option<extern "C" fn(c_int, c_int) -> *const c_char>,
    export_description: Unused,
    cleanup: Option<extern "C" fn()>,
    block_size: Option<extern "C" fn(*mut c_void, *mut u32, *mut u32, *mut u32) -> c_int>,
}

// SAFETY: the pointers are to constants.
unsafe impl Sync for Plugin {}
// SAFETY: as above.
unsafe impl Send for Plugin {}

// What nbdkit 1.30 has: the callbacks behind `struct nbdkit_plugin`'s head lie one pointer behind another.
const _: () = assert!(size_of::<Plugin>() == 8 + 8 + 4 * 8 + 12 * 8 - 8 + 5 * 8 + 8 + 8 * 8 + 17 * 8);

unsafe extern "C" {
    fn nbdkit_error(format: *const c_char, ...);
    fn nbdkit_set_error(errno: c_int);
    fn nbdkit_export_name() -> *const c_char;
    fn nbdkit_strdup_intern(text: *const c_char) -> *const c_char;
    fn nbdkit_add_extent(extents: *mut c_void, offset: u64, length: u64, kind: u32) -> c_int;
    fn nbdkit_add_export(exports: *mut c_void, name: *const c_char, description: *const c_char) -> c_int;
}

static PLUGIN: OnceLock<Plugin> = OnceLock::new();

/// The symbol that nbdkit looks up when it has loaded this library.
#[unsafe(no_mangle)]
pub extern "C" fn plugin_init() -> *const c_void {
    ptr::from_ref(PLUGIN.get_or_init(described)).cast()
}

fn described() -> Plugin {
    static HELP_TEXT: OnceLock<CString> = OnceLock::new();
    let help = HELP_TEXT.get_or_init(|| CString::new(HELP).unwrap_or_default());
    Plugin {
        struct_size: size_of::<Plugin>() as u64,
        api_version: API_VERSION,
        thread_model: THREAD_MODEL_PARALLEL,
        name: c"lamassu".as_ptr(),
        longname: c"Lamassu".as_ptr(),
        version: concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast(),
        description: c"volumes of encrypted Lamassu vaults".as_ptr(),
        load: Some(load),
        unload: None,
        config: Some(config),
        config_complete: Some(config_complete),
        config_help: help.as_ptr(),
        open: Some(open),
        close: Some(close),
        get_size: Some(get_size),
        can_write: Some(can_write),
        can_flush: Some(always),
        is_rotational: Some(never),
        can_trim: Some(always),
        of_version_1: [None; 5],
        errno_is_preserved: 0,
        dump_plugin: None,
        can_zero: Some(always),
        can_fua: Some(can_fua),
        pread: Some(pread),
        pwrite: Some(pwrite),
        flush: Some(flush),
        trim: Some(trim),
        zero: Some(zero),
        magic_config_key: c"vault".as_ptr(),
        can_multi_conn: Some(always),
        can_extents: Some(always),
        extents: Some(extents),
        can_cache: Some(can_cache),
        cache: None,
        thread_model_of: None,
        can_fast_zero: Some(always),
        preconnect: None,
        get_ready: Some(get_ready),
        after_fork: Some(after_fork),
        list_exports: Some(list_exports),
        default_export: Some(default_export),
        export_description: None,
        cleanup: Some(cleanup),
        block_size: Some(block_size),
    }
}

/// A line in nbdkit's log.
pub fn say(text: &str) {
    let text = CString::new(text.replace('\0', "")).unwrap_or_default();
    // SAFETY: the format takes one string, and both end with a zero.
    unsafe { nbdkit_error(c"%s".as_ptr(), text.as_ptr()) }
}

/// The descriptor with a number that the process which started nbdkit has left open for this plugin.
pub fn descriptor(number: c_int) -> io::Result<OwnedFd> {
    // SAFETY: only asks whether the number is a descriptor.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and by its parameter it is this plugin's own.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A descriptor of this process by its number.
pub fn borrowed<'a>(number: c_int) -> BorrowedFd<'a> {
    // SAFETY: the number is not -1. Where it is closed meanwhile, or another's, calls with it fail, or are about that:
    // nothing of this process depends on it.
    unsafe { BorrowedFd::borrow_raw(number) }
}

/// Logs why a callback fails. Clients send failing requests as often as they like.
pub fn fails(why: &str) {
    static TOLD: Mutex<Bounded> = Mutex::new(Bounded::new());
    for line in TOLD.lock().lines(why, Instant::now()) {
        say(&crate::log::printable(&line));
    }
}

/// Runs a callback's work. `None`: it failed, and nbdkit has the error.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Option<T> {
    // State that a panic left incomplete is behind locks of the vault, which are not poisoned. The request is answered
    // EIO.
    let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(Failure::Panicked));
    match done {
        Ok(value) => Some(value),
        Err(error) => {
            if !matches!(error, Failure::NotFast | Failure::Told) {
                fails(&error.to_string());
            }
            // SAFETY: a number.
            unsafe { nbdkit_set_error(error.errno()) };
            None
        }
    }
}

fn status(done: Option<()>) -> c_int {
    if done.is_some() { 0 } else { -1 }
}

/// # Safety
/// `text` is a string that ends with a zero, or null.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Ok("");
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::Setting("a text is not UTF-8".into()))
}

/// # Safety
/// `handle` is what [`open`] has returned, not closed yet.
unsafe fn connection<'a>(handle: *mut c_void) -> &'a Connection {
    // SAFETY: the caller's promise; a Connection is shared by the threads that serve its client.
    unsafe { &*handle.cast_const().cast() }
}

extern "C" fn load() {
    guarded(|| {
        plugin::load();
        Ok(())
    });
}

extern "C" fn config(key: *const c_char, value: *const c_char) -> c_int {
    // SAFETY: nbdkit's strings.
    status(guarded(|| plugin::config(unsafe { text(key) }?, unsafe { text(value) }?)))
}

extern "C" fn config_complete() -> c_int {
    status(guarded(plugin::config_complete))
}

extern "C" fn get_ready() -> c_int {
    status(guarded(plugin::get_ready))
}

extern "C" fn after_fork() -> c_int {
    status(guarded(plugin::after_fork))
}

extern "C" fn cleanup() {
    guarded(|| {
        plugin::cleanup();
        Ok(())
    });
}

extern "C" fn list_exports(_read_only: c_int, _is_tls: c_int, exports: *mut c_void) -> c_int {
    status(guarded(|| {
        for export in plugin::exports()? {
            let name = CString::new(export.name).unwrap_or_default();
            let description = CString::new(export.description).unwrap_or_default();
            // SAFETY: nbdkit's list; it copies both strings.
            if unsafe { nbdkit_add_export(exports, name.as_ptr(), description.as_ptr()) } != 0 {
                return Err(io::Error::last_os_error().into());
            }
        }
        Ok(())
    }))
}

extern "C" fn default_export(_read_only: c_int, _is_tls: c_int) -> *const c_char {
    guarded(|| {
        let name = plugin::default_export()?.unwrap_or_default();
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: nbdkit copies the string, and keeps the copy.
        Ok(unsafe { nbdkit_strdup_intern(name.as_ptr()) })
    })
    .unwrap_or(ptr::null())
}

extern "C" fn open(read_only: c_int) -> *mut c_void {
    guarded(|| {
        // SAFETY: nbdkit's string, which is there while a client is being opened.
        let export = unsafe { text(nbdkit_export_name()) }.map_err(|_| Failure::NoExport)?;
        let opened = Connection::open(read_only != 0, export)?;
        Ok(Box::into_raw(Box::new(opened)).cast())
    })
    .unwrap_or(ptr::null_mut())
}

extern "C" fn close(handle: *mut c_void) {
    guarded(|| {
        // SAFETY: `open` has made it, and nbdkit gives it back once.
        drop(unsafe { Box::<Connection>::from_raw(handle.cast()) });
        Ok(())
    });
}

extern "C" fn get_size(handle: *mut c_void) -> i64 {
    // SAFETY: nbdkit's handle.
    guarded(|| Ok(unsafe { connection(handle) }.size())).and_then(|size| i64::try_from(size).ok()).unwrap_or(-1)
}

extern "C" fn can_write(handle: *mut c_void) -> c_int {
    // SAFETY: nbdkit's handle.
    guarded(|| Ok(unsafe { connection(handle) }.can_write())).map_or(-1, c_int::from)
}

extern "C" fn always(_: *mut c_void) -> c_int {
    ALWAYS
}

extern "C" fn never(_: *mut c_void) -> c_int {
    NEVER
}

extern "C" fn can_fua(_: *mut c_void) -> c_int {
    FUA_NATIVE
}

extern "C" fn can_cache(_: *mut c_void) -> c_int {
    CACHE_EMULATE
}

extern "C" fn block_size(handle: *mut c_void, least: *mut u32, best: *mut u32, most: *mut u32) -> c_int {
    status(guarded(|| {
        // SAFETY: nbdkit's handle.
        let sizes = unsafe { connection(handle) }.block_sizes();
        // SAFETY: nbdkit's variables.
        unsafe { (*least, *best, *most) = sizes };
        Ok(())
    }))
}

extern "C" fn pread(handle: *mut c_void, buf: *mut c_void, count: u32, offset: u64, _flags: u32) -> c_int {
    status(guarded(|| {
        // SAFETY: nbdkit's buffer, whose bytes it has set before: it is never read before it is written.
        let buf = unsafe { std::slice::from_raw_parts_mut(buf.cast(), count as usize) };
        // SAFETY: nbdkit's handle.
        unsafe { connection(handle) }.read(buf, offset)
    }))
}

extern "C" fn pwrite(handle: *mut c_void, buf: *const c_void, count: u32, offset: u64, flags: u32) -> c_int {
    status(guarded(|| {
        // SAFETY: nbdkit's buffer.
        let data = unsafe { std::slice::from_raw_parts(buf.cast(), count as usize) };
        // SAFETY: nbdkit's handle.
        unsafe { connection(handle) }.write(data, offset, flags & FLAG_FUA != 0)
    }))
}

extern "C" fn flush(handle: *mut c_void, _flags: u32) -> c_int {
    // SAFETY: nbdkit's handle.
    status(guarded(|| unsafe { connection(handle) }.flush()))
}

extern "C" fn trim(handle: *mut c_void, count: u32, offset: u64, flags: u32) -> c_int {
    // SAFETY: nbdkit's handle.
    status(guarded(|| unsafe { connection(handle) }.trim(offset, count.into(), flags & FLAG_FUA != 0)))
}

extern "C" fn zero(handle: *mut c_void, count: u32, offset: u64, flags: u32) -> c_int {
    let zeros = if flags & FLAG_MAY_TRIM != 0 { Zeros::Holes } else { Zeros::Data };
    status(guarded(|| match zeros {
        Zeros::Data if flags & FLAG_FAST_ZERO != 0 => Err(Failure::NotFast),
        // SAFETY: nbdkit's handle.
        _ => unsafe { connection(handle) }.zero(offset, count.into(), zeros, flags & FLAG_FUA != 0),
    }))
}

extern "C" fn extents(handle: *mut c_void, count: u32, offset: u64, flags: u32, extents: *mut c_void) -> c_int {
    status(guarded(|| {
        let mut add = |offset, len, extent| {
            let kind = if extent == Extent::Hole { EXTENT_HOLE_ZERO } else { 0 };
            // SAFETY: nbdkit's list.
            match unsafe { nbdkit_add_extent(extents, offset, len, kind) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // SAFETY: nbdkit's handle.
        unsafe { connection(handle) }.extents(offset, count.into(), flags & FLAG_REQ_ONE != 0, &mut add)
    }))
}
