//! The access proxy of a provider: S3 in front of a directory, where each tenant has a bucket. What comes and goes is
//! ciphertext under sealed names.
//!
//! Who may do what, the tenant's own rules decide, over tokens (docs/access.md, `lamassu-access`). The proxy knows of a
//! tenant a bucket and a public key. It holds no key of a tenant, no table of people, and sees no attribute.
//!
//! | module | what |
//! |---|---|
//! | `config` | the provider's file |
//! | `published` | what a tenant has published: verified, and never an older one |
//! | `admission` | who may come: credentials |
//! | `run` | runs the proxy |

mod admission;
pub mod config;
mod published;
mod run;

pub use config::ProviderConfig;
pub use run::{check, public_key, serve};
