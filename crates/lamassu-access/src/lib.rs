//! Access control at a provider on attributes that it cannot read (docs/access.md).
//!
//! A tenant writes rules in Cedar about plain attributes of its people. Each attribute with a value becomes a *token*:
//! a MAC under a key of the present epoch, which the tenant alone has. Rules are compiled to Cedar over tokens and
//! published, signed, to the provider's access proxy. People get short-lived signed credentials that carry their
//! tokens. The proxy decides by comparing tokens.
//!
//! | module | what |
//! |---|---|
//! | `error` | what goes wrong |
//! | `kem` | a key that a credential and the proxy agree on |
//! | `names` | keys of objects, sealed part by part |
//! | `token` | from attributes to tokens |
//! | `attribute` | declarations, people, the plain side of a decision |
//! | `expression`, `compile` | from rules over attributes to rules over tokens |
//! | `signed` | signed documents: PASETO |
//! | `credential`, `bundle` | what people get; what is published |
//! | `decide` | the proxy's side of a decision |
//! | `leak` | what the provider and its accomplices learn |
//! | `manager` | the tenant's policy manager: its database and its audit trail |
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

pub use attribute::{Action, Attributes, Declarations, Kind, Value};
pub use bundle::{Bundle, Status};
pub use credential::{Claims, Credential, Refusal};
pub use decide::Decider;
pub use error::{AccessError, Result};
