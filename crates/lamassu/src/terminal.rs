//! The settings of this process's terminal, to be put back after another program that has changed them was ended: a
//! prompt switches echo and signals off, and a signal may end its program before they are on again.

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use std::fs::File;

/// The settings at one moment.
pub struct Settings {
    terminal: File,
    settings: Termios,
}

impl Settings {
    /// Those of now; `None`: there is no terminal.
    pub fn now() -> Option<Settings> {
        let terminal = File::open("/dev/tty").ok()?;
        let settings = tcgetattr(&terminal).ok()?;
        Some(Settings { terminal, settings })
    }

    /// Puts them back. A terminal that has them is left alone: to change it would stop a process in the background.
    pub fn put_back(&self) {
        let has_others = |now: Termios| now.local_modes != self.settings.local_modes;
        if tcgetattr(&self.terminal).is_ok_and(has_others) {
            let _ = tcsetattr(&self.terminal, OptionalActions::Now, &self.settings);
        }
    }
}
