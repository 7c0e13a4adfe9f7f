//! Mount options, in the words of mount.fuse(8) and gocryptfs.

/// What the kernel may keep of file contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// Reads and writes are cached; writes reach the daemon in large pieces, later.
    #[default]
    WriteBack,
    /// Reads are cached; every write reaches the daemon before write(2) returns.
    Through,
    /// No plaintext stays in the page cache (except of files mapped into memory).
    None,
}

impl std::str::FromStr for CacheMode {
    type Err = OptionError;
    fn from_str(s: &str) -> Result<Self, OptionError> {
        match s {
            "writeback" => Ok(CacheMode::WriteBack),
            "through" => Ok(CacheMode::Through),
            "none" => Ok(CacheMode::None),
            _ => Err(OptionError::BadValue { option: "cache", value: s.into() }),
        }
    }
}

/// Whether processors are kept from sleeping while many requests come (docs/semantics.md, "Mount options").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KeepAwake {
    /// They sleep as the kernel decides.
    #[default]
    Never,
    /// They are kept awake; an error if the user may not ask for that.
    Always,
}

impl std::str::FromStr for KeepAwake {
    type Err = OptionError;
    fn from_str(s: &str) -> Result<Self, OptionError> {
        match s {
            "never" => Ok(KeepAwake::Never),
            "always" => Ok(KeepAwake::Always),
            _ => Err(OptionError::BadValue { option: "keep_awake", value: s.into() }),
        }
    }
}

/// An option that cannot be applied.
#[derive(Debug, thiserror::Error)]
pub enum OptionError {
    /// The user's: not an option of ours.
    #[error("unknown mount option `{0}`")]
    Unknown(String),
    /// The user's: known, but not supported here.
    #[error("mount option `{0}` is not supported")]
    Unsupported(&'static str),
    /// The user's: the value is invalid.
    #[error("mount option `{option}` cannot be `{value}`")]
    BadValue {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
    },
}

/// How to mount. `default_permissions` is always on: the kernel checks modes and owners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// Kernel caching of contents.
    pub cache: CacheMode,
    /// Nothing can be changed through this mount.
    pub read_only: bool,
    /// Other users may use the mount (for non-root: only with `user_allow_other` in /etc/fuse.conf).
    pub allow_other: bool,
    /// root may use the mount too, other users not.
    pub allow_root: bool,
    /// Users that may call, in addition to root and the user who mounts: see [`crate::control::Caller`].
    pub delegates: Vec<u32>,
    /// Request threads, 1 to 64.
    pub threads: usize,
    /// The source shown by mount(8) and df(1).
    pub fsname: String,
    /// The type shown is `fuse.SUBTYPE`.
    pub subtype: String,
    /// Device nodes work (root only).
    pub dev: bool,
    /// Set-uid programs work (root only).
    pub suid: bool,
    /// `nodev` was given: it overrules `allow_dev`, wherever that stands.
    pub no_dev: bool,
    /// `nosuid` was given: it overrules `allow_suid`, wherever that stands.
    pub no_suid: bool,
    /// Programs can be run.
    pub exec: bool,
    /// No access times. The kernel sends none to FUSE daemons in any case.
    pub noatime: bool,
    /// Every write is synchronous.
    pub sync: bool,
    /// Directory changes are synchronous.
    pub dirsync: bool,
    /// Mount over a directory that is not empty.
    pub nonempty: bool,
    /// Read-ahead of the mount in KiB, set where the system lets us; 0 keeps the kernel's 128.
    pub read_ahead_kib: u32,
    /// Most bytes of one read request, a multiple of 4096. Small requests are decrypted and copied to the kernel while
    /// they are still in the processor's cache. Not smaller than the blocks of the file system, which would then be
    /// read several times.
    pub max_read: u32,
    /// Whether processors are kept from sleeping while many requests come.
    pub keep_awake: KeepAwake,
}

impl Default for MountOptions {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        MountOptions {
            cache: CacheMode::default(),
            read_only: false,
            allow_other: false,
            allow_root: false,
            delegates: Vec::new(),
            threads: processors.clamp(2, 4),
            fsname: "lamassu".into(),
            subtype: "lamassu".into(),
            dev: false,
            suid: false,
            no_dev: false,
            no_suid: false,
            exec: true,
            noatime: false,
            sync: false,
            dirsync: false,
            nonempty: false,
            read_ahead_kib: 4096,
            max_read: 512 << 10,
            keep_awake: KeepAwake::default(),
        }
    }
}

impl MountOptions {
    /// Applies one `-o` argument: options separated by commas. Later ones win. Options for mount(8) and systemd
    /// (`noauto`, `_netdev`, `x-…`, …) are accepted and ignored, so that a line of fstab can be passed as it is.
    pub fn apply(&mut self, argument: &str) -> Result<(), OptionError> {
        argument.split(',').filter(|word| !word.is_empty()).try_for_each(|word| self.apply_word(word))
    }

    /// Applies one option, commas and all.
    pub fn apply_word(&mut self, word: &str) -> Result<(), OptionError> {
        let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        if let Some(value) = value {
            return self.apply_value(name, value, word);
        }
        match name {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "allow_other" => self.allow_other = true,
            "allow_root" => self.allow_root = true,
            "dev" | "nodev" => (self.dev, self.no_dev) = (name == "dev", name == "nodev"),
            "suid" | "nosuid" => (self.suid, self.no_suid) = (name == "suid", name == "nosuid"),
            // mount(8) does not pass `dev` and `suid` on, since they are the defaults of other file systems, and it
            // puts `nodev` and `nosuid` before the words that it does not know. `allow_dev` and `allow_suid` reach us
            // from fstab too, and are overruled by those.
            "allow_dev" => self.dev = !self.no_dev,
            "allow_suid" => self.suid = !self.no_suid,
            "exec" => self.exec = true,
            "noexec" => self.exec = false,
            "atime" | "relatime" | "strictatime" => self.noatime = false,
            "noatime" | "nodiratime" => self.noatime = true,
            "sync" => self.sync = true,
            "async" => self.sync = false,
            "dirsync" => self.dirsync = true,
            "nonempty" => self.nonempty = true,
            "kernel_cache" | "default_permissions" | "big_writes" | "async_read" | "use_ino" | "hard_remove" => {}
            "direct_io" => self.cache = CacheMode::None,
            "defaults" | "auto" | "noauto" | "user" | "nouser" | "users" | "owner" | "group" | "_netdev" | "nofail" => {
            }
            "auto_unmount" => return Err(OptionError::Unsupported("auto_unmount")),
            _ if name.starts_with("x-") || name.starts_with("X-") => {}
            _ => return Err(OptionError::Unknown(word.into())),
        }
        Ok(())
    }

    fn apply_value(&mut self, name: &str, value: &str, word: &str) -> Result<(), OptionError> {
        match name {
            "fsname" => self.fsname = value.into(),
            "subtype" => {
                if value.is_empty() || !value.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_') {
                    return Err(OptionError::BadValue { option: "subtype", value: value.into() });
                }
                self.subtype = value.into();
            }
            "cache" => self.cache = value.parse()?,
            "keep_awake" => self.keep_awake = value.parse()?,
            "threads" | "max_threads" => {
                self.threads = value
                    .parse()
                    .ok()
                    .filter(|n| (1..=64).contains(n))
                    .ok_or_else(|| OptionError::BadValue { option: "threads", value: value.into() })?;
            }
            "read_ahead_kb" => {
                self.read_ahead_kib = value
                    .parse()
                    .ok()
                    .filter(|n| *n <= 1 << 20)
                    .ok_or_else(|| OptionError::BadValue { option: "read_ahead_kb", value: value.into() })?;
            }
            "comment" => {}
            _ if name.starts_with("x-") || name.starts_with("X-") => {}
            _ => return Err(OptionError::Unknown(word.into())),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_fstab_are_understood() {
        let mut o = MountOptions::default();
        o.apply("rw,nosuid,nodev,noexec,allow_other,fsname=/srv/x,cache=through,noauto,x-systemd.automount,threads=3")
            .unwrap();
        o.apply("ro,,suid").unwrap();
        assert!(o.read_only && o.allow_other && o.suid && !o.dev && !o.exec);
        assert_eq!((o.fsname.as_str(), o.cache, o.threads), ("/srv/x", CacheMode::Through, 3));
        let of = |words: &str| {
            let mut o = MountOptions::default();
            o.apply(words).unwrap();
            (o.dev, o.suid)
        };
        assert_eq!(of("nosuid,allow_dev"), (true, false));
        assert_eq!(of("allow_suid,nodev"), (false, true));
        assert_eq!(of("nodev,nosuid,allow_dev,allow_suid"), (false, false));
        assert_eq!(of("allow_dev,allow_suid,nodev,nosuid"), (false, false));
        assert_eq!(of("nodev,dev,nosuid,suid"), (true, true));
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let mut o = MountOptions::default();
        for bad in [
            "nosuch",
            "nosuch=1",
            "threads=0",
            "threads=x",
            "cache=fast",
            "keep_awake=yes",
            "subtype=a/b",
            "auto_unmount",
            "ro=1",
        ] {
            let error = o.apply(bad).unwrap_err().to_string();
            assert!(error.contains(bad.split('=').next().unwrap()), "{bad}: {error}");
        }
        assert_eq!(o, MountOptions::default());
    }
}
