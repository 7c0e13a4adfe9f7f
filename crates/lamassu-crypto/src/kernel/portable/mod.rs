//! Kernels without any processor feature: constant in time, and slow. They run under `LAMASSU_CPU=portable`, and on
//! processors without AES or SHA instructions.

pub(super) mod aes;
pub(super) mod sha256;
