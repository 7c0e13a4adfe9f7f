//! `policy.toml`, as an administrator writes it. Anything invalid is refused with its line: a rule that is misread
//! would forbid nothing.

use super::{Patterns, Policy, Rule, Words};
use crate::config::at_line;
use crate::{Result, ServerError};
use lamassu_format::profile::{KeyKind, Protection};
use lamassu_format::{Cipher, Domain, Hash, Suite};
use lamassu_rpc::limits::{RULE_MAX, is_name};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::ops::Range;
use std::path::Path;
use toml::Spanned;

/// Its name in the server's directory.
pub const FILE: &str = "policy.toml";
/// Longest file, in bytes: the answer of `policy show` contains all of it.
const LEN_MAX: usize = 1 << 20;
const RULES_MAX: usize = 1000;

/// What `init` writes.
pub const COMMENTED: &str = r#"# Policy of lamassu-server: which protections and algorithms hosts may use in which vaults (docs/server.md#policy).
# It is read at the server's start, and on SIGHUP (`systemctl reload lamassu-server`). Without rules everything is
# allowed. `lamassu-server run --check-config DIR` checks this file, `lamassu-server policy test` shows its effect.

# Sets of hosts; rules refer to a set with @. Hosts are named as in `lamassu-server host list`; * matches any text.
#[groups]
#laptops = ["lt-*", "anna"]

# Sets of vaults: ids as `lamassu info` shows them, or prefixes of ids with a *.
#[vaults]
#finance = ["5f0c3a52-7b1e-4c8d-9a51-0d2f6b7c8e90"]

# A rule forbids or requires something. A refused host gets the rule's name. No rule allows what another one forbids.
#[[rule]]
#name = "finance is encrypted and verified"
# The hosts and vaults that the rule applies to: names, patterns and sets; "!x" excludes x. Default: all. A vault stands
# for itself and all datasets in it.
#hosts = ["@laptops", "node1", "!anna"]
#vaults = ["@finance"]
# Aspects of files that are created or written. Plain blocks have neither a cipher nor block keys: a rule that requires
# one forbids them.
#   protections: both, encrypt, integrity, none       ciphers: aes-256, aes-128, chacha20
#   hashes: sha-256, blake3                           keys: convergent, random
# Aspects of vaults. A forbidden vault can only be read.
#   suites: aes, paper, blake3, chacha                domains: zone, family, file, none
#require.protections = ["both"]
#forbid.ciphers = ["aes-128"]
#forbid.suites = ["paper"]
"#;

type List = Option<Spanned<Vec<Spanned<String>>>>;

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Read {
    groups: BTreeMap<Spanned<String>, Vec<Spanned<String>>>,
    vaults: BTreeMap<Spanned<String>, Vec<Spanned<String>>>,
    rule: Vec<Spanned<ReadRule>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadRule {
    name: Spanned<String>,
    hosts: List,
    vaults: List,
    #[serde(default)]
    forbid: Aspects,
    #[serde(default)]
    require: Aspects,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Aspects {
    suites: List,
    domains: List,
    protections: List,
    ciphers: List,
    hashes: List,
    keys: List,
}

impl Aspects {
    fn is_empty(&self) -> bool {
        let Aspects { suites, domains, protections, ciphers, hashes, keys } = self;
        [suites, domains, protections, ciphers, hashes, keys].into_iter().all(Option::is_none)
    }
}

/// What is wrong, and where.
struct Wrong(Range<usize>, String);

type Found<T> = std::result::Result<T, Wrong>;

fn wrong<T>(span: Range<usize>, what: impl Into<String>) -> Found<T> {
    Err(Wrong(span, what.into()))
}

/// The kind of names that patterns match.
#[derive(Clone, Copy)]
struct NameKind {
    names: &'static str,
    set: &'static str,
    is_part: fn(u8) -> bool,
    hint: &'static str,
}

const HOSTS: NameKind = NameKind {
    names: "a host",
    set: "groups",
    is_part: |byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'),
    hint: "letters, digits, dots and hyphens, * for any text, or @ and a name from [groups]",
};
const VAULTS: NameKind = NameKind {
    names: "a vault",
    set: "vaults",
    is_part: |byte| byte.is_ascii_hexdigit() || byte == b'-',
    hint: "an id as `lamassu info` shows it, the beginning of one and *, or @ and a name from [vaults]",
};
const ID_DIGITS: usize = 32;

impl NameKind {
    fn pattern(self, text: &Spanned<String>) -> Found<String> {
        let plain = text.get_ref();
        let is_one = !plain.is_empty() && plain.bytes().all(|byte| byte == b'*' || (self.is_part)(byte));
        let (no, hint) = (|| format!("{plain:?} is no name of {}: {}", self.names, self.hint), self.hint);
        if !is_one {
            return wrong(text.span(), no());
        }
        if self.set == HOSTS.set {
            return Ok(plain.clone());
        }
        let id = plain.replace('-', "").to_ascii_lowercase();
        let has_all = id.len() == ID_DIGITS || (id.contains('*') && id.len() <= ID_DIGITS);
        if has_all {
            Ok(id)
        } else {
            wrong(text.span(), format!("{plain:?} has not the {ID_DIGITS} digits of an id: {hint}"))
        }
    }

    fn sets(self, read: BTreeMap<Spanned<String>, Vec<Spanned<String>>>) -> Found<BTreeMap<String, Vec<String>>> {
        let set = |(name, members): (Spanned<String>, Vec<Spanned<String>>)| {
            if !is_name(name.get_ref()) || name.get_ref().starts_with(['@', '!']) {
                return wrong(name.span(), "a set has a name of printable ASCII, which does not begin with @ or !");
            }
            if members.is_empty() {
                return wrong(name.span(), format!("[{}]: there is nothing in it", self.set));
            }
            let members = members.iter().map(|member| self.pattern(member)).collect::<Found<_>>()?;
            Ok((name.into_inner(), members))
        };
        read.into_iter().map(set).collect()
    }

    fn patterns(self, list: &List, sets: &BTreeMap<String, Vec<String>>) -> Found<Patterns> {
        let mut patterns = Patterns::default();
        let Some(list) = list else { return Ok(patterns) };
        if list.get_ref().is_empty() {
            return wrong(list.span(), "an empty list is of nothing: leave it out for all");
        }
        for text in list.get_ref() {
            let (to, plain) = match text.get_ref().strip_prefix('!') {
                Some(plain) => (&mut patterns.but, plain),
                None => (&mut patterns.those, text.get_ref().as_str()),
            };
            match plain.strip_prefix('@') {
                Some(set) => match sets.get(set) {
                    Some(members) => to.extend(members.iter().cloned()),
                    None => return wrong(text.span(), format!("[{}] has no {set:?}", self.set)),
                },
                None => to.push(self.pattern(&Spanned::new(text.span(), plain.into()))?),
            }
        }
        Ok(patterns)
    }
}

/// The values of a list, each by its name.
fn values<T: Copy + PartialEq>(list: &List, all: &[T], name: fn(T) -> &'static str) -> Found<Option<Vec<T>>> {
    let Some(list) = list else { return Ok(None) };
    if list.get_ref().is_empty() {
        return wrong(list.span(), "an empty list says nothing");
    }
    let one = |word: &Spanned<String>| match all.iter().find(|value| name(**value) == word.get_ref()) {
        Some(value) => Ok(*value),
        None => {
            let all: Vec<_> = all.iter().map(|value| name(*value)).collect();
            wrong(word.span(), format!("{:?} is none of {}", word.get_ref(), all.join(", ")))
        }
    };
    list.get_ref().iter().map(one).collect::<Found<_>>().map(Some)
}

fn words<T: Copy + PartialEq>(
    (forbid, require): (&List, &List),
    all: &[T],
    name: fn(T) -> &'static str,
) -> Found<Words<T>> {
    let (forbidden, required) = (values(forbid, all, name)?.unwrap_or_default(), values(require, all, name)?);
    let both = required.iter().flatten().find(|value| forbidden.contains(value));
    if let (Some(both), Some(list)) = (both, forbid) {
        return wrong(list.span(), format!("{} is forbidden and required by one rule", name(*both)));
    }
    if all.iter().all(|value| forbidden.contains(value)) {
        return wrong(forbid.as_ref().map_or(0..0, Spanned::span), "nothing would be left");
    }
    Ok(Words { forbidden, required })
}

fn rule(read: ReadRule, sets: [&BTreeMap<String, Vec<String>>; 2]) -> Found<Rule> {
    let ReadRule { name, hosts, vaults, forbid, require } = read;
    if !is_name(name.get_ref()) {
        return wrong(name.span(), format!("a rule's name has 1 to {RULE_MAX} characters of printable ASCII"));
    }
    if forbid.is_empty() && require.is_empty() {
        return wrong(name.span(), "the rule neither forbids nor requires anything");
    }
    Ok(Rule {
        name: name.into_inner(),
        hosts: HOSTS.patterns(&hosts, sets[0])?,
        vaults: VAULTS.patterns(&vaults, sets[1])?,
        suites: words((&forbid.suites, &require.suites), &Suite::ALL, Suite::name)?,
        domains: words((&forbid.domains, &require.domains), &Domain::ALL, Domain::name)?,
        protections: words((&forbid.protections, &require.protections), &Protection::ALL, Protection::name)?,
        ciphers: words((&forbid.ciphers, &require.ciphers), &Cipher::ALL, Cipher::name)?,
        hashes: words((&forbid.hashes, &require.hashes), &Hash::ALL, Hash::name)?,
        keys: words((&forbid.keys, &require.keys), &KeyKind::ALL, KeyKind::name)?,
    })
}

fn policy(read: Read) -> Found<Policy> {
    let (groups, vaults) = (HOSTS.sets(read.groups)?, VAULTS.sets(read.vaults)?);
    if read.rule.len() > RULES_MAX {
        return wrong(0..0, format!("there are more than {RULES_MAX} rules"));
    }
    let (mut names, mut rules) = (BTreeSet::new(), Vec::new());
    for one in read.rule {
        let span = one.get_ref().name.span();
        let made = rule(one.into_inner(), [&groups, &vaults])?;
        if !names.insert(made.name.clone()) {
            return wrong(span, format!("there are two rules {:?}", made.name));
        }
        rules.push(made);
    }
    Ok(Policy { rules })
}

/// Parses a policy.
///
/// # Errors
/// What is wrong, and in which line.
pub fn parse(text: &str) -> std::result::Result<Policy, String> {
    let read: Read = toml::from_str(text).map_err(|error| at_line(text, error.span(), error.message()))?;
    policy(read).map_err(|Wrong(span, what)| at_line(text, (span != (0..0)).then_some(span), &what))
}

/// The text in a server's directory, if it exists.
///
/// # Errors
/// [`ServerError::Config`], [`ServerError::File`].
pub(super) fn read_text(dir: &Path, name: &str) -> Result<Option<String>> {
    let path = dir.join(name);
    let wrong = |detail: &str| ServerError::Config { path: path.clone(), detail: detail.into() };
    // Opening a pipe would block.
    if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        return Err(wrong("it is no regular file"));
    }
    match std::fs::read_to_string(&path) {
        Ok(text) if text.len() > LEN_MAX => Err(wrong("it has more than 1 MiB")),
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == ErrorKind::InvalidData => Err(wrong("it is no text (UTF-8)")),
        Err(error) => Err(ServerError::file("read", &path)(error)),
    }
}

impl Policy {
    /// Reads the policy of the server in `dir`, and its text.
    ///
    /// # Errors
    /// [`ServerError::Config`], [`ServerError::File`].
    pub fn read(dir: &Path) -> Result<(Policy, String)> {
        // A missing file is an error: it may be about to be replaced, or be a dangling link. It does not mean a policy
        // without rules.
        let text = read_text(dir, FILE)?.ok_or_else(|| ServerError::Config {
            path: dir.join(FILE),
            detail: "there is no such file; an empty one has no rules".into(),
        })?;
        let wrong = |detail| ServerError::Config { path: dir.join(FILE), detail };
        Ok((parse(&text).map_err(wrong)?, text))
    }
}
