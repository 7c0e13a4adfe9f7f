//! The users of a gateway: access keys, secrets, rights to buckets, and the owner of their files.

use crate::config::Config;
use crate::limits::Tenant;
use crate::secrets::{Secret, in_line, read_private};
use crate::{GatewayError, Result};
use lamassu_access::Action;
use lamassu_vault::Owner;
use s3s::auth::SecretKey;
use s3s::{S3Result, s3_error};
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Shortest secret.
const SECRET_MIN: usize = 16;

/// What `lamassu gateway config --credentials` prints.
pub const COMMENTED: &str = r#"# The users of the gateway. This file must have mode 0600, since it has secrets.

[[user]]
# The name in the access log.
name = "alice"
# The tenant whose limits apply; by default a tenant with the user's name. It gives no rights to buckets.
#tenant = "finance"
# access_key: 3 to 128 letters and digits. secret_key: at least 16 characters; `openssl rand -base64 30` makes a good
# one.
access_key = "ALICE"
secret_key = "put a secret of your own here"
# Owner and group of files that the user makes; by default the gateway's own user.
#uid = 1000
#gid = 1000
# Buckets by name; a trailing * matches any rest. The right to write includes the right to read.
read = ["public-*"]
write = ["alice"]
# Whether the user may make and remove buckets whose names match `write`.
#make_buckets = false
"#;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    user: Vec<UserEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UserEntry {
    name: String,
    tenant: Option<String>,
    access_key: String,
    secret_key: Secret,
    uid: Option<u32>,
    gid: Option<u32>,
    #[serde(default)]
    read: Vec<String>,
    #[serde(default)]
    write: Vec<String>,
    #[serde(default)]
    make_buckets: bool,
}

/// The right to a bucket that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// to read it
    Read,
    /// to change what is in it
    Write,
    /// to make or remove it
    Make,
}

/// The rules for the holder of a credential, as one request sees them.
pub trait Rules: Send + Sync {
    /// Whether a key or a folder may be used. Without the rules: no.
    fn allow(&self, action: Action, key: &str) -> bool;
    /// Whether the rules that the request began with are still in memory. Once gone, they stay gone.
    fn are_there(&self) -> bool;
    /// Whether the credential is still in force; otherwise the error for its holder.
    ///
    /// # Errors
    /// Those for the holder.
    fn in_force(&self) -> S3Result<()>;
}

/// The rights of a user.
enum Rights {
    /// with buckets, by their names
    Buckets { read: Vec<String>, write: Vec<String>, make_buckets: bool },
    /// with keys in one bucket
    Keys { bucket: String, access_key: String, rules: Box<dyn Rules> },
}

/// A user.
pub struct User {
    /// its name in the log
    pub name: String,
    /// the tenant whose limits apply
    pub tenant: Arc<Tenant>,
    /// the owner of files that it makes
    pub owner: Owner,
    secret: SecretKey,
    rights: Rights,
    /// The credentials were read again, and it is not among them, or has others.
    is_replaced: AtomicBool,
}

impl User {
    /// The holder of a credential: access key and secret. It may use keys in the tenant's bucket.
    pub fn of_credential(
        name: String,
        tenant: Arc<Tenant>,
        (access_key, secret): (String, SecretKey),
        rules: Box<dyn Rules>,
    ) -> User {
        let (uid, gid) = own();
        let rights = Rights::Keys { bucket: tenant.name().into(), access_key, rules };
        let is_replaced = AtomicBool::new(false);
        User { name, tenant, owner: Owner { uid, gid, umask: 0 }, secret, rights, is_replaced }
    }

    /// Whether it is the holder of the credential with this access key.
    pub fn holds(&self, other: &str) -> bool {
        matches!(&self.rights, Rights::Keys { access_key, .. } if access_key == other)
    }

    /// Whether it has a right to a bucket, or to some keys in it.
    pub fn may(&self, right: Right, bucket: &str) -> bool {
        let any = |names: &[String]| names.iter().any(|name| matches(name, bucket));
        match &self.rights {
            Rights::Buckets { read, write, make_buckets } => match right {
                Right::Read => any(read) || any(write),
                Right::Write => any(write),
                Right::Make => *make_buckets && any(write),
            },
            Rights::Keys { bucket: own, .. } => right != Right::Make && bucket == own,
        }
    }

    /// Whether it may use a key, or a folder: a key that ends with a slash. The empty key is the bucket.
    pub fn may_use(&self, action: Action, bucket: &str, key: &str) -> bool {
        let right = if matches!(action, Action::Read | Action::List) { Right::Read } else { Right::Write };
        self.may(right, bucket)
            && match &self.rights {
                Rights::Buckets { .. } => true,
                Rights::Keys { rules, .. } => rules.allow(action, key.strip_suffix('/').unwrap_or(key)),
            }
    }

    /// Whether [`User::may_use`] evaluates rules, which takes time.
    pub fn has_rules(&self) -> bool {
        matches!(self.rights, Rights::Keys { .. })
    }

    /// Whether a refusal of [`User::may_use`] came from rules that were in memory all the time.
    ///
    /// # Errors
    /// `ServiceUnavailable`: the rules are gone. The same request sent again is decided by the newer rules.
    pub fn was_judged(&self) -> S3Result<()> {
        match &self.rights {
            Rights::Keys { rules, .. } if !rules.are_there() => {
                Err(s3_error!(ServiceUnavailable, "the tenant has published other rules meanwhile: try again"))
            }
            Rights::Keys { .. } | Rights::Buckets { .. } => Ok(()),
        }
    }

    /// Whether it may continue: its credential is neither revoked, expired nor replaced.
    ///
    /// # Errors
    /// For the holder.
    pub fn may_go_on(&self) -> S3Result<()> {
        match &self.rights {
            Rights::Buckets { .. } if self.is_replaced.load(Ordering::Acquire) => {
                Err(s3_error!(AccessDenied, "this user was removed, or its secret or its rights were changed"))
            }
            Rights::Buckets { .. } => Ok(()),
            Rights::Keys { rules, .. } => rules.in_force(),
        }
    }

    /// Whether a user that was read again has the same name, tenant, owner, secret and rights.
    fn is_as(&self, read: &User) -> bool {
        let owner = |user: &User| (user.owner.uid, user.owner.gid);
        self.name == read.name
            && Arc::ptr_eq(&self.tenant, &read.tenant)
            && owner(self) == owner(read)
            && self.secret.expose() == read.secret.expose()
            && self.rights == read.rights
    }

    /// Its secret.
    pub fn secret(&self) -> SecretKey {
        self.secret.clone()
    }

    /// Whether this is its secret. Both are known to the gateway already: one verified a signature.
    pub fn has_secret(&self, other: &SecretKey) -> bool {
        self.secret.expose() == other.expose()
    }
}

fn matches(pattern: &str, bucket: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(begin) => bucket.starts_with(begin),
        None => bucket == pattern,
    }
}

impl PartialEq for Rights {
    /// Rules are never equal: each request has its own.
    fn eq(&self, other: &Rights) -> bool {
        let (Rights::Buckets { read, write, make_buckets }, Rights::Buckets { read: r, write: w, make_buckets: m }) =
            (self, other)
        else {
            return false;
        };
        (read, write, make_buckets) == (r, w, m)
    }
}

/// All users, by access key.
pub struct Credentials {
    users: HashMap<String, Arc<User>>,
}

impl Credentials {
    /// Reads a gateway's credentials. Tenants in `before` keep the use of their limits, and users that have not changed
    /// are the same: a reload ends no request of theirs.
    ///
    /// # Errors
    /// [`GatewayError::NotPrivate`], [`GatewayError::Config`], [`GatewayError::File`].
    pub fn read(config: &Config, before: Option<&Credentials>) -> Result<Credentials> {
        let path = config.credentials();
        let text = read_private(&path)?;
        let wrong = |detail: String| GatewayError::Config { path: path.clone(), detail };
        let file: File = toml::from_str(&text).map_err(|error| wrong(in_line(&text, &error)))?;
        if file.user.is_empty() {
            return Err(wrong("it has no user; `lamassu gateway config --credentials` prints one".into()));
        }
        let mut tenants: HashMap<String, Arc<Tenant>> = HashMap::new();
        let known = |name: &str| {
            let mut users = before?.users.values();
            users.find(|user| user.tenant.name() == name).map(|user| user.tenant.clone())
        };
        let mut users = HashMap::new();
        for entry in file.user {
            entry.check().map_err(|what| wrong(format!("user {:?}: {what}", entry.name)))?;
            let name = entry.tenant.clone().unwrap_or_else(|| entry.name.clone());
            let make = || known(&name).unwrap_or_else(|| Arc::new(Tenant::new(&name, config.limits_of(&name))));
            let tenant = tenants.entry(name.clone()).or_insert_with(make).clone();
            let access_key = entry.access_key.clone();
            let read = entry.user(tenant);
            let same = before.and_then(|before| before.user(&access_key)).filter(|user| user.is_as(&read)).cloned();
            if users.insert(access_key, same.unwrap_or_else(|| Arc::new(read))).is_some() {
                return Err(wrong("two users have the same access key".into()));
            }
        }
        Ok(Credentials { users })
    }

    /// A tenant that the configuration has limits for, and no user: perhaps its name is misspelt.
    pub fn tenant_of_nobody<'a>(&self, config: &'a Config) -> Option<&'a str> {
        let mut named: Vec<_> = config.tenants.keys().map(String::as_str).collect();
        named.sort_unstable();
        named.into_iter().find(|name| !self.users.values().any(|user| user.tenant.name() == *name))
    }

    /// Ends the requests of users that `now` lacks, or has with another secret or other rights.
    pub fn end_those_not_in(&self, now: &Credentials) {
        for (access_key, user) in &self.users {
            let stays = now.user(access_key).is_some_and(|same| Arc::ptr_eq(same, user));
            if !stays {
                user.is_replaced.store(true, Ordering::Release);
            }
        }
    }

    /// The user of an access key.
    pub fn user(&self, access_key: &str) -> Option<&Arc<User>> {
        self.users.get(access_key)
    }
}

impl UserEntry {
    fn check(&self) -> std::result::Result<(), String> {
        let key = &self.access_key;
        let is_key = (3..=128).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_alphanumeric());
        let (own_uid, own_gid) = own();
        let is_own = self.uid.unwrap_or(own_uid) == own_uid && self.gid.unwrap_or(own_gid) == own_gid;
        match () {
            () if !is_key => Err("access_key has 3 to 128 letters and digits".into()),
            () if self.secret_key.0.len() < SECRET_MIN => {
                Err(format!("secret_key has {SECRET_MIN} characters or more"))
            }
            () if self.name.is_empty() => Err("name is empty".into()),
            () if !is_own && own_uid != 0 => {
                Err("uid and gid of another user: a gateway that runs as root alone can make such files".into())
            }
            () => Ok(()),
        }
    }

    fn user(self, tenant: Arc<Tenant>) -> User {
        let (own_uid, own_gid) = own();
        User {
            name: self.name,
            tenant,
            owner: Owner { uid: self.uid.unwrap_or(own_uid), gid: self.gid.unwrap_or(own_gid), umask: 0 },
            secret: SecretKey::from(self.secret_key.0.as_str()),
            rights: Rights::Buckets { read: self.read, write: self.write, make_buckets: self.make_buckets },
            is_replaced: AtomicBool::new(false),
        }
    }
}

fn own() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn read(text: &str, mode: u32) -> Result<Credentials> {
        read_again(text, mode, None)
    }

    fn read_again(text: &str, mode: u32, before: Option<&Credentials>) -> Result<Credentials> {
        let dir = tempfile::tempdir().expect("a directory");
        let (config, file) = (dir.path().join("gateway.toml"), dir.path().join("credentials.toml"));
        std::fs::write(&config, "vault = \"/v\"\n").expect("writes");
        std::fs::write(&file, text).expect("writes");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).expect("chmod");
        Credentials::read(&Config::read(&config)?, before)
    }

    #[test]
    fn rights_are_by_name() {
        let credentials = read(COMMENTED, 0o600).expect("good");
        let alice = credentials.user("ALICE").expect("alice");
        assert!(alice.may(Right::Write, "alice") && alice.may(Right::Read, "alice"));
        assert!(alice.may(Right::Read, "public-1") && !alice.may(Right::Write, "public-1"));
        assert!(!alice.may(Right::Read, "bob") && !alice.may(Right::Read, "alice2"));
        assert!(!alice.may(Right::Make, "alice"));
        assert!(credentials.user("BOB").is_none());
    }

    #[test]
    fn requests_of_a_user_who_is_removed_or_changed_end_and_others_go_on() {
        let user = |name: &str, secret: &str, write: &str| {
            let (key, secret) = (name.to_uppercase(), format!("{secret} of sixteen characters"));
            format!(
                "[[user]]\nname = \"{name}\"\naccess_key = \"{key}\"\nsecret_key = \"{secret}\"\nwrite = [\"{write}\"]\n"
            )
        };
        let all = ["gone", "secret", "rights", "same"];
        let first = read(&all.map(|name| user(name, "one", "b")).concat(), 0o600).expect("good");
        let held = all.map(|name| first.user(&name.to_uppercase()).expect("is there").clone());
        let text = [user("secret", "two", "b"), user("rights", "one", "other"), user("same", "one", "b")].concat();
        let second = read_again(&text, 0o600, Some(&first)).expect("good");
        assert!(held.iter().all(|user| user.may_go_on().is_ok()), "they are not in force yet");
        first.end_those_not_in(&second);
        assert_eq!(held.each_ref().map(|user| user.may_go_on().is_ok()), [false, false, false, true]);
        // A request that began before two reloads is of the same user still.
        let third = read_again(&user("rights", "one", "other"), 0o600, Some(&second)).expect("good");
        second.end_those_not_in(&third);
        assert!(held[3].may_go_on().is_err());
        assert!(third.user("RIGHTS").expect("is there").may_go_on().is_ok());
    }

    #[test]
    fn what_others_could_read_is_refused_and_secrets_are_not_told() {
        assert!(matches!(read(COMMENTED, 0o640), Err(GatewayError::NotPrivate(_))));
        let user = |lines: &str| format!("[[user]]\nname = \"u\"\n{lines}");
        for (text, said) in [
            (String::new(), "no user"),
            (user("access_key = \"AKEY\"\nsecret_key = \"short-secret\"\n"), "16"),
            (user("access_key = \"a/b\"\nsecret_key = \"long-secret-long-secret\"\n"), "letters"),
            (user("access_key = \"AKEY\"\nsecret_key = \"long-secret-long-secret\"\ncolour = 1"), "unknown"),
            (user("access_key = \"AKEY\"\nsecret_key = long-secret\n"), "line 4"),
            (COMMENTED.repeat(2), "same access key"),
        ] {
            let error = read(&text, 0o600).err().expect(said).to_string();
            assert!(error.contains(said) && !error.contains("-secret"), "{error}");
        }
    }
}
