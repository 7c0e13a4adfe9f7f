//! K_in and K_out of an isolation zone at a KMIP server, as in section 3 of the paper (docs/format.md, section 4).
//!
//! The zone's name is in attributes that every server knows: Name, Object Group and Application Specific Information.
//! If the server accepts custom attributes, it is also in the paper's integer attribute. The keys are found by their
//! names and their group.

use super::client::Session;
use super::operations::{Attribute, Usage};
use super::{make, named};
use crate::fault::ServerFault;
use crate::source::ZoneKeys;

/// The namespace that owns the Application Specific Information.
const NAMESPACE: &str = "lamassu-isolation-zone";
/// The paper's attribute: an integer.
const CUSTOM: &str = "x-Isolation-Zone";

/// Which of the two keys.
#[derive(Clone, Copy)]
enum Role {
    Inner,
    Outer,
}

/// The names of a zone's key.
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

/// Makes the keys of a zone that are missing, for example after an interrupted attempt. Returns the identifiers of the
/// new ones.
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
            // For people and other programs. If the server does not accept this attribute, the zone's name is in three
            // others. A server that is gone is noticed below.
            let _ = session.add(id, Attribute::Custom(CUSTOM, number));
        }
    }
    keys(session, zone)?;
    Ok(made)
}
