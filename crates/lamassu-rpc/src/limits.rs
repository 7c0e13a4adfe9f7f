//! The limits that a server's policy sets to a host in a vault: the profiles of files that it may make and write. The
//! rules stay at the server. A host is told their effect, by numbers of profiles, when a session begins and after each
//! change. It can then refuse an operation itself, before any work is done.
//!
//! The host's check decides nothing: the server judges each commit anyway.

use crate::convert::Garbled;
use crate::proto;
use lamassu_format::Profile;
use std::sync::Arc;

/// Numbers of profiles.
const NUMBERS: usize = 1 << Profile::BITS;
/// Longest name of a rule, in bytes.
pub const RULE_MAX: usize = 64;
/// Longest text on what a rule forbids, in bytes.
pub const WHAT_MAX: usize = 128;
/// The metadata of a status that holds the name of a rule.
pub const RULE_KEY: &str = "lamassu-rule";

/// The reason why a profile is forbidden.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forbidden {
    /// the rule's name: printable ASCII
    pub rule: Arc<str>,
    /// what it forbids, for people
    pub what: Arc<str>,
}

/// The forbidden profiles, each with the reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits([Option<Forbidden>; NUMBERS]);

/// Whether a text may appear in a status and in a log.
fn is_plain(text: &str, most: usize) -> bool {
    (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic())
}

/// Whether this is a valid name of a rule.
pub fn is_name(name: &str) -> bool {
    is_plain(name, RULE_MAX) && name.trim() == name
}

impl Limits {
    /// The limits from a decision on each existing profile.
    pub fn of(mut decide: impl FnMut(Profile) -> Option<Forbidden>) -> Limits {
        let mut limits = Limits::default();
        for (number, place) in (0_u8..).zip(&mut limits.0) {
            *place = Profile::of_number(number).and_then(&mut decide);
        }
        limits
    }

    /// Why files of a profile may not be made or written; `None`: they may.
    pub fn forbids(&self, profile: Profile) -> Option<&Forbidden> {
        self.0.get(usize::from(profile.number())).and_then(Option::as_ref)
    }

    /// Whether nothing is forbidden.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// As a message.
    pub fn to_proto(&self) -> proto::Policy {
        let said = |(profile, forbidden): (u32, &Option<Forbidden>)| {
            let Forbidden { rule, what } = forbidden.as_ref()?;
            Some(proto::Forbidden { profile, rule: rule.to_string(), what: what.to_string() })
        };
        proto::Policy { forbidden: (0..).zip(&self.0).filter_map(said).collect() }
    }

    /// From a message.
    ///
    /// # Errors
    /// [`Garbled`].
    pub fn from_proto(policy: &proto::Policy) -> Result<Limits, Garbled> {
        let mut limits = Limits::default();
        for said in &policy.forbidden {
            let profile = u8::try_from(said.profile).ok().and_then(Profile::of_number);
            let profile = profile.ok_or(Garbled("a profile that there is not"))?;
            let place = limits.0.get_mut(usize::from(profile.number())).filter(|place| place.is_none());
            let place = place.ok_or(Garbled("a profile is named twice"))?;
            if !is_name(&said.rule) || !is_plain(&said.what, WHAT_MAX) {
                return Err(Garbled("a rule's name"));
            }
            *place = Some(Forbidden { rule: said.rule.as_str().into(), what: said.what.as_str().into() });
        }
        Ok(limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forbidden(rule: &str) -> Forbidden {
        Forbidden { rule: rule.into(), what: "plain blocks".into() }
    }

    #[test]
    fn limits_come_back() {
        let plain = |profile: Profile| profile.protection().is_plain().then(|| forbidden("no plain"));
        let limits = Limits::of(plain);
        assert_eq!(Limits::from_proto(&limits.to_proto()), Ok(limits.clone()));
        let none = Profile::of_number(3).unwrap();
        assert_eq!(limits.forbids(none).map(|one| &*one.rule), Some("no plain"));
        assert!(limits.forbids(Profile::DEFAULT).is_none() && !limits.is_empty() && Limits::default().is_empty());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let said = |profile, rule: &str| proto::Forbidden { profile, rule: rule.into(), what: "w".into() };
        let read = |forbidden| Limits::from_proto(&proto::Policy { forbidden });
        assert!(read(vec![said(3, "a"), said(1, "a")]).is_ok());
        for bad in [
            vec![said(3, "a"), said(3, "a")],
            vec![said(5, "a")],
            vec![said(32, "a")],
            vec![said(256, "a")],
            vec![said(u32::MAX, "a")],
            vec![said(3, "")],
            vec![said(3, " a")],
            vec![said(3, "a\nb")],
            vec![said(3, "\u{e9}")],
            vec![said(3, &"a".repeat(RULE_MAX + 1))],
        ] {
            assert!(read(bad.clone()).is_err(), "{bad:?}");
        }
    }
}
