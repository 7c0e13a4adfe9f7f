//! Access control at a provider, on attributes that the provider cannot read (docs/access.md).
//!
//! A tenant writes rules in Cedar about plain attributes of its people. Each attribute with a value becomes a *token*:
//! a MAC under a key of the present epoch, which only the tenant has. Rules are compiled to Cedar over tokens, signed,
//! and published to the provider's access proxy. People get short-lived signed credentials that carry their tokens. The
//! proxy decides by comparing tokens.
//!
//! | module | what |
//! |---|---|
//! | `error` | the crate's errors |
//! | `kem` | key agreement between tenant and proxy, for the secret of a credential |
//! | `names` | sealing of object keys, part by part |
//! | `token` | tokens: MACs of attributes |
//! | `attribute` | declarations, people's attributes, decisions over plain attributes |
//! | `expression`, `compile` | compilation of rules over attributes to rules over tokens |
//! | `signed` | signed documents (PASETO) |
//! | `credential`, `bundle` | credentials of people; publications to the proxy |
//! | `decide` | decisions over tokens, as the proxy makes them |
//! | `leak` | what the provider learns, alone and with insiders |
//! | `manager` | the tenant's policy manager: database, publications, audit trail |
//!
//! There are no locks but the database's: one process has it open, and `manager` waits for it.
//!
//! Never: prints; reads a clock; touches a disk or opens the tenant's keys outside of `manager`.

pub mod attribute;
pub mod bundle;
pub mod compile;
pub mod credential;
pub mod decide;
mod error;
mod expression;
pub mod kem;
pub mod leak;
pub mod manager;
pub mod names;
mod signed;
pub mod token;

pub use attribute::{Action, AttributeKind, Attributes, Declarations, Value};
pub use bundle::{Bundle, Status};
pub use credential::{Claims, Credential, Refusal};
pub use decide::Decider;
pub use error::{AccessError, Result};
