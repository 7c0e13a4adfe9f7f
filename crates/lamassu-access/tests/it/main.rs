//! The policy manager as a program uses it, and the proxy's decisions beside Cedar's over plain attributes.

mod equal;
mod manager;
