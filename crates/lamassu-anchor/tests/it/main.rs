//! What an anchor keeps. One program: it is linked once, and its tests share all processors.
#![allow(clippy::unwrap_used)] // a helper of a test may panic, too

mod doubtful;
mod export;
mod file_model;
mod long_queue;
mod model;
mod named_again;
mod names_model;
mod opened_again;
mod tables;
mod threads;
mod way;
