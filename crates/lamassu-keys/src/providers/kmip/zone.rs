//! K_in and K_out of an isolation zone, kept by the server as in section 3 of the paper (docs/format.md, section 4).
//!
//! The zone stands in what every server knows: Name, Object Group and Application Specific Information; and, where the
//! server takes custom attributes, in the paper's integer attribute. The keys are found by their names and their group.

use super::client::Session;
use super::operations::{Attribute, Usage};
use super::{make, named};
use crate::fault::ServerFault;
use crate::source::ZoneKeys;

/// Application Specific Information belongs to whoever its namespace names.
const NAMESPACE: &str = "lamassu-isolation-zone";
/// The paper's attribute: an integer.
const CUSTOM: &str = "x-Isolation-Zone";

/// Which of the two keys.
#[derive(Clone, Copy)]
enum Role {
    Inner,
    Outer,
}

/// What a key of a zone is called.
struct Called {
    name: String,
    group: String,
    data: String,
}

impl Called {
    fn of(zone: &str, role: Role) -> Called {
        let role = match role {
            Role::Inner => "inner",
            Role::Outer => "outer",
        };
        Called {
            name: format!("lamassu/{zone}/{role}"),
            group: format!("lamassu/{zone}"),
            data: format!("{zone}/{role}"),
        }
    }

    fn found_by(&self) -> [Attribute<'_>; 2] {
        [Attribute::Name(&self.name), Attribute::Group(&self.group)]
    }

    fn made_with(&self) -> [Attribute<'_>; 3] {
        let [name, group] = self.found_by();
        [name, group, Attribute::Application(NAMESPACE, &self.data)]
    }
}

/// Both keys of a zone.
pub(super) fn keys(session: &mut Session, zone: &str) -> Result<ZoneKeys, ServerFault> {
    let mut key = |role| named(session, &Called::of(zone, role).found_by());
    let inner = key(Role::Inner)?;
    let outer = key(Role::Outer)?;
    Ok(ZoneKeys::new(inner, outer))
}

/// Makes those of a zone's keys that are missing, after an attempt that was cut off, say; returns the identifiers of
/// what was made.
pub(super) fn make_missing(session: &mut Session, zone: &str) -> Result<Vec<String>, ServerFault> {
    let mut made = Vec::new();
    for role in [Role::Inner, Role::Outer] {
        match make(session, Usage::Encrypt, &Called::of(zone, role).made_with()) {
            Ok(id) => made.push(id),
            Err(ServerFault::NameTaken) => {}
            Err(e) => return Err(e),
        }
    }
    if made.is_empty() {
        return Err(ServerFault::NameTaken);
    }
    if let Ok(number) = zone.parse() {
        for id in &made {
            // For people and other programs. A server that takes no such attribute has the zone in three others; one
            // that went away is noticed below.
            let _ = session.add(id, Attribute::Custom(CUSTOM, number));
        }
    }
    keys(session, zone)?;
    Ok(made)
}
