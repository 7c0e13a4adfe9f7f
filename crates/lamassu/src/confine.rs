//! The rights that a mounting process gives up, so that an attacker who takes it over by a flaw can do less.
//!
//! Every process of this program is without core dumps and tracers (`lamassu_crypto::secret::harden_process`). A
//! process that mounts as root also keeps only the capabilities that a file system server needs. Once the mount is up,
//! system calls that it does not need are refused: running programs, inspecting other processes, sockets other than
//! local ones, kernel modules, mounting.
//!
//! A process of an ordinary user keeps its rights: it unmounts by `fusermount3`, which is set-uid. A filter would need
//! "no new privileges", which would make that impossible. Landlock is not used: it forbids umount(2) to the process
//! that it confines. Never: makes a mount fail; a refusal of the kernel is logged.

use rustix::thread::{CapabilitySet, CapabilitySets};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// For files of other users: modes, owners, device nodes. `SYS_ADMIN` to unmount. `IPC_LOCK` for keys that are made
/// later.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_ADMIN);

/// Whether this process can mount and unmount by itself.
fn is_privileged() -> bool {
    rustix::process::geteuid().is_root()
        && rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// Drops the capabilities that serving a vault does not need. To be called before any thread starts, since each thread
/// has its own.
pub fn drop_capabilities() {
    if !is_privileged() {
        return;
    }
    if let Err(error) = keep_only(KEPT) {
        tracing::debug!(%error, "capabilities stay as they are");
    }
}

fn keep_only(kept: CapabilitySet) -> io::Result<()> {
    rustix::thread::clear_ambient_capability_set()?;
    for capability in CapabilitySet::all().difference(kept).iter() {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // This kernel does not know it, or this process may not drop it (no SETPCAP).
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let now = rustix::thread::capabilities(None)?;
    let left = CapabilitySets {
        effective: now.effective.intersection(kept),
        permitted: now.permitted.intersection(kept),
        inheritable: CapabilitySet::empty(),
    };
    Ok(rustix::thread::set_capabilities(None, left)?)
}

/// Whether the filter of this process refuses connections.
static HAS_NO_NETWORK: AtomicBool = AtomicBool::new(false);

/// Whether this process can still make connections to other machines.
pub fn has_network() -> bool {
    !HAS_NO_NETWORK.load(Ordering::Relaxed)
}

/// Once the mount is up: forbids new privileges, and system calls that serving does not need, for all threads. With
/// `network`: connections are allowed, to a server that keeps the vault's anchor or the key of a zone.
pub fn seal(network: bool) {
    if !is_privileged() {
        return;
    }
    match filter_system_calls(network) {
        Ok(()) => HAS_NO_NETWORK.store(!network, Ordering::Relaxed),
        Err(error) => tracing::debug!(%error, "system calls stay as they are"),
    }
}

/// Refused with `EPERM`. A list of calls that are not needed, not of those that are: a later standard library may use
/// other calls.
const REFUSED: &[libc::c_long] = &[
    // other programs, other processes
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_setns,
    libc::SYS_unshare,
    // the kernel
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // the host
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    // mounts, and files by other ways than their directory
    libc::SYS_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fspick,
    libc::SYS_fsmount,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_mount_setattr,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_by_handle_at,
];

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: Option<u32> = Some(0xc000_003e); // AUDIT_ARCH_X86_64
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: Option<u32> = Some(0xc000_00b7); // AUDIT_ARCH_AARCH64
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const ARCHITECTURE: Option<u32> = None;

/// The first call number of x86-64's other ABI.
const X32_FIRST: u32 = 0x4000_0000;

/// Offsets in `struct seccomp_data`. For the 64-bit argument its low half, on little-endian machines, as the two above
/// are.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const FIRST_ARGUMENT: u32 = 16;

/// What clone(2) can make in addition to a thread or a process: mount, cgroup, UTS, IPC, user, PID and network
/// namespaces.
const NEW_NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const IF_ANY_BIT: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// The filter, as a program of the classic BPF machine: a sequence of tests, each followed by its refusal.
fn program(architecture: u32, network: bool) -> Vec<libc::sock_filter> {
    let step = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let refuse = step(RETURN, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0);
    let allow = step(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
    let mut steps = vec![step(LOAD, ARCH, 0, 0), step(IF_EQUAL, architecture, 1, 0), refuse, step(LOAD, NUMBER, 0, 0)];
    steps.extend([step(IF_AT_LEAST, X32_FIRST, 0, 1), refuse]);
    for number in REFUSED {
        steps.extend([step(IF_EQUAL, *number as u32, 0, 1), refuse]);
    }
    // clone3(2) has its flags in memory, which no filter can read. It fails as on a kernel without it, so that the C
    // library uses clone(2), whose flags are an argument.
    let unknown = step(RETURN, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32, 0, 0);
    steps.extend([step(IF_EQUAL, libc::SYS_clone3 as u32, 0, 1), unknown]);
    steps.extend([step(IF_EQUAL, libc::SYS_clone as u32, 0, 4), step(LOAD, FIRST_ARGUMENT, 0, 0)]);
    steps.extend([step(IF_ANY_BIT, NEW_NAMESPACES, 0, 1), refuse, allow]);
    // Sockets: for the system log and, with `network`, for the server of the vault's anchor or its zone's key.
    let families = if network { &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6][..] } else { &[libc::AF_UNIX] };
    let behind = families.len() as u8 + 2;
    steps.extend([step(IF_EQUAL, libc::SYS_socket as u32, 0, behind), step(LOAD, FIRST_ARGUMENT, 0, 0)]);
    for (nth, family) in (1..).zip(families) {
        steps.push(step(IF_EQUAL, *family as u32, families.len() as u8 + 1 - nth, 0));
    }
    steps.extend([refuse, allow]);
    steps
}

fn filter_system_calls(network: bool) -> io::Result<()> {
    let Some(architecture) = ARCHITECTURE else { return Ok(()) };
    rustix::thread::set_no_new_privs(true)?;
    let mut steps = program(architecture, network);
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // For all threads, and without the mitigation of speculative execution that old kernels add to every filter.
    let flags = libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: `program` and the steps it points to live until the call returns; the kernel copies them.
    match unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) } {
        0 => Ok(()),
        // The number of a thread that could not follow: one with a filter of its own.
        1.. => Err(io::ErrorKind::Other.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const CHILD: &str = "LAMASSU_TEST_CONFINED";

    /// In a process of its own, since confinement cannot be undone.
    #[test]
    fn what_is_given_up_is_gone() {
        if std::env::var_os(CHILD).is_some() {
            return confined();
        }
        if !is_privileged() {
            eprintln!("SKIPPED: not root, so nothing is given up");
            return;
        }
        let name = "confine::tests::what_is_given_up_is_gone";
        let args = [name, "--exact", "--nocapture", "--test-threads=1"];
        let out = Command::new(std::env::current_exe().unwrap()).args(args).env(CHILD, "1").output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }

    fn confined() {
        let (ask, asked) = std::sync::mpsc::channel::<()>();
        drop_capabilities();
        // A thread that exists already is confined with the others.
        let earlier = std::thread::spawn(move || {
            asked.recv().unwrap();
            try_what_is_refused();
        });
        seal(false);
        try_what_is_refused();
        ask.send(()).unwrap();
        earlier.join().unwrap();
        // Needed calls still work.
        std::os::unix::net::UnixDatagram::unbound().unwrap();
        std::thread::spawn(|| std::fs::read("/proc/self/status").unwrap()).join().unwrap();
        let none = rustix::mount::unmount("/nothing is here", rustix::mount::UnmountFlags::empty());
        assert_eq!(none, Err(rustix::io::Errno::NOENT));
    }

    fn try_what_is_refused() {
        let refused = |rc: libc::c_long, what: &str| {
            assert_eq!((rc, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EPERM)), "{what}");
        };
        assert_eq!(Command::new("/bin/true").status().unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(std::net::UdpSocket::bind("127.0.0.1:0").unwrap_err().raw_os_error(), Some(libc::EPERM));
        // SAFETY: plain system calls without memory; each is refused before it does anything.
        unsafe {
            refused(libc::syscall(libc::SYS_ptrace, libc::PTRACE_TRACEME, 0, 0, 0), "ptrace");
            refused(libc::syscall(libc::SYS_unshare, 0), "unshare");
            refused(libc::syscall(libc::SYS_io_uring_setup, 1, 0), "io_uring_setup");
            refused(
                libc::syscall(libc::SYS_clone, libc::CLONE_NEWUSER | libc::SIGCHLD, 0, 0, 0, 0),
                "clone with a namespace",
            );
            refused(libc::syscall(libc::SYS_fspick, -1, c"/".as_ptr(), 0), "fspick");
            refused(libc::syscall(libc::SYS_socket, libc::AF_PACKET, libc::SOCK_RAW, 0), "socket");
        }
        let sets = rustix::thread::capabilities(None).unwrap();
        assert!(KEPT.contains(sets.permitted) && KEPT.contains(sets.effective) && sets.inheritable.is_empty());
        assert!(rustix::thread::no_new_privs().unwrap());
    }
}
