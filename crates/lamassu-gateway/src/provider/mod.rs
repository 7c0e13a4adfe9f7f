//! The access proxy of a provider: S3 over a directory, with one bucket for each tenant. The objects are ciphertext
//! under sealed names.
//!
//! The tenant's own rules decide on each request, over tokens (docs/access.md, `lamassu-access`). The proxy knows a
//! bucket and a public key of each tenant. It holds no key of a tenant and no table of people, and it sees no
//! attribute.
//!
//! | module | what |
//! |---|---|
//! | `config` | the provider's configuration file |
//! | `published` | a tenant's publications: verified, never older than before |
//! | `admission` | admits the holders of credentials |
//! | `bounded` | a bound of what is logged about refused requests |
//! | `run` | runs the proxy |

mod admission;
mod bounded;
pub mod config;
mod published;
mod run;

pub use config::ProviderConfig;
pub use run::{check, public_key, serve};
