//! A server's policy: the file that an administrator writes, and what a host is told of it.

use crate::bytes::Bytes;
use lamassu_format::{Domain, Profile, Suite};
use lamassu_rpc::limits::Limits;
use lamassu_rpc::proto;
use lamassu_server::policy::{Subject, parse};

/// The first byte says what the rest is: a policy, or what a server says of one.
pub fn policy(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    match bytes.u8() % 2 {
        0 => {
            let Ok(text) = std::str::from_utf8(bytes.rest()) else { return };
            let Ok(policy) = parse(text) else { return };
            for suite in Suite::ALL {
                let (host, vault) = ("node1".into(), "5f0c3a527b1e4c8d9a510d2f6b7c8e90".into());
                let around = vec!["9e0c3a527b1e4c8d9a510d2f6b7c8e91".into()];
                let subject = Subject { host, vault, around, suite, domain: Domain::Zone };
                let limits = policy.limits(&subject);
                assert_eq!(
                    Limits::from_proto(&limits.to_proto()).as_ref(),
                    Ok(&limits),
                    "a host is told what is decided"
                );
                let all = (0..=u8::MAX).filter_map(Profile::of_number);
                let forbidden = all.filter(|profile| limits.forbids(*profile).is_some()).count();
                let is_whole = policy.forbids_vault(&subject).is_some();
                assert!(!is_whole || forbidden == 20, "nothing is written in a vault that is forbidden");
                assert!(!policy.is_empty() || forbidden == 0, "without rules everything is allowed");
            }
        }
        _ => {
            let mut forbidden = Vec::new();
            while !bytes.is_empty() {
                let profile = u32::from(bytes.u8());
                let mut text = || {
                    let len = usize::from(bytes.u8());
                    String::from_utf8_lossy(bytes.take(len)).into_owned()
                };
                let (rule, what) = (text(), text());
                forbidden.push(proto::Forbidden { profile, rule, what });
            }
            let said = proto::Policy { forbidden };
            let Ok(limits) = Limits::from_proto(&said) else { return };
            let mut said = said;
            said.forbidden.sort_by_key(|one| one.profile);
            assert_eq!(limits.to_proto(), said, "what is taken is what was said");
        }
    }
}
