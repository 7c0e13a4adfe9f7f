//! A real gateway over a real vault, asked by real clients.

mod boto;
mod chain;
mod clients;
mod copies;
mod crash;
mod doors;
mod hostile;
mod lab;
mod mounted;
mod operation;
mod provider;
mod provider_tls;
mod providers;
mod remote;
mod tenants;
