//! SIGINT, SIGTERM and SIGHUP; and SIGXFSZ, by which a write must not end the process.
//!
//! Most commands simply end, with the code for it and the terminal as it was (a prompt switches echo off). Commands
//! that change a vault ask [`interrupted`] and end cleanly; a second signal ends them at once, which the commit
//! protocol survives.

use crate::exit::Code;
use crate::output;
use crate::terminal::Settings;
use lamassu_host::Error as HostError;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

/// How long the last message may take.
const SAYING_MAX: Duration = Duration::from_millis(500);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Set on the signal's own stack, from the first [`flag_only`] on: the thread that waits for signals may be late.
static ARRIVED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// What the first signal does.
#[derive(Default)]
enum OnSignal {
    /// End the process.
    #[default]
    Exit,
    /// Set a flag: the command checks it and ends in good order.
    Flag,
    /// Call this, off the signal's own stack.
    Call(Box<dyn FnMut() + Send>),
}

static ON_SIGNAL: Mutex<OnSignal> = Mutex::new(OnSignal::Exit);

/// Starts the thread that waits for signals. Not before a fork.
pub fn start() {
    survive_file_size_limit();
    // Prompts use the terminal, whatever standard input is.
    let terminal = Settings::now();
    let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) else { return };
    let wait = move || {
        for _ in signals.forever() {
            on_signal(terminal.as_ref());
        }
    };
    // Without the thread signals would be lost. Then the default action is better: `Signals` is dropped with the
    // closure.
    let _ = std::thread::Builder::new().name("signals".into()).spawn(wait);
}

/// Catches SIGXFSZ without doing anything: so a write past the limit of file sizes (ulimit -f) fails with EFBIG, and a
/// child process has the default action again.
pub fn survive_file_size_limit() {
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

fn on_signal(terminal: Option<&Settings>) {
    let mut on_signal = ON_SIGNAL.lock().unwrap_or_else(PoisonError::into_inner);
    let again = match &*on_signal {
        // Do not set the flag: the command would print the message a second time.
        OnSignal::Exit => true,
        OnSignal::Flag | OnSignal::Call(_) => INTERRUPTED.swap(true, Ordering::AcqRel),
    };
    match &mut *on_signal {
        OnSignal::Call(call) => call(),
        OnSignal::Flag if !again => {}
        OnSignal::Flag | OnSignal::Exit => {
            if let Some(terminal) = terminal {
                terminal.put_back();
            }
            say_stopped();
            std::process::exit(Code::Interrupted.number().into());
        }
    }
}

/// Prints the same message as commands that end in good order. The reader of standard error may have stopped, and the
/// process must end nevertheless.
fn say_stopped() {
    let (tell, told) = mpsc::channel();
    let say = move || {
        // A prompt, or a bar, may be on the line.
        if output::has_terminal() {
            output::say(format_args!(""));
        }
        output::say(format_args!("lamassu: {}", HostError::Interrupted));
        let _ = tell.send(());
    };
    if std::thread::Builder::new().spawn(say).is_ok() {
        let _ = told.recv_timeout(SAYING_MAX);
    }
}

/// From now on the first signal only sets the flag that [`interrupted`] reads.
pub fn flag_only() {
    set(OnSignal::Flag);
    ARRIVED.get_or_init(|| {
        let arrived = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // Without it the thread alone tells.
            let _ = signal_hook::flag::register(signal, arrived.clone());
        }
        arrived
    });
}

/// The same for a process that a first signal would end; one that does something else with signals keeps to that.
pub fn go_through() {
    let mut on_signal = ON_SIGNAL.lock().unwrap_or_else(PoisonError::into_inner);
    if matches!(*on_signal, OnSignal::Exit) {
        *on_signal = OnSignal::Flag;
    }
}

/// From now on every signal calls `call`.
pub fn call(call: impl FnMut() + Send + 'static) {
    set(OnSignal::Call(Box::new(call)));
}

/// Whether a signal came. After [`flag_only`], one that came during a system call counts as soon as that has returned.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Acquire) || ARRIVED.get().is_some_and(|arrived| arrived.load(Ordering::SeqCst))
}

/// An error if a signal came.
pub fn check() -> Result<(), HostError> {
    if interrupted() { Err(HostError::Interrupted) } else { Ok(()) }
}

fn set(what: OnSignal) {
    *ON_SIGNAL.lock().unwrap_or_else(PoisonError::into_inner) = what;
}
