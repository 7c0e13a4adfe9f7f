//! Kernels for x86-64. Every function here asks for processor features; [`super::Kernel`] calls it only where they have been detected.

pub(super) mod aesni;
pub(super) mod sha_avx512;
pub(super) mod sha_ni;
pub(super) mod vaes;
