//! The mount helper: started as `mount.fuse.lamassu` or `mount.lamassu`, this program takes `SOURCE MOUNTPOINT [-sfnv]
//! [-o OPTIONS]` from mount(8), and so a line of fstab. mount.fuse3(8), which is used for types without a helper of
//! their own, starts plain `lamassu` with the same arguments.

use lamassu_host::Error as HostError;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

const NAMES: [&str; 3] = ["mount.lamassu", "mount.fuse.lamassu", "mount.fuse3.lamassu"];

/// The command line of `lamassu mount`, if mount(8) is the caller; otherwise the given one.
pub fn rewrite(argv: Vec<OsString>) -> Result<Vec<OsString>, HostError> {
    if !is_helper(&argv) {
        return Ok(argv);
    }
    let by_name = is_named_helper(&argv);
    let mut out: Vec<OsString> = ["lamassu", "mount"].map(OsString::from).into();
    let mut places = Vec::new();
    let mut rest = argv.into_iter().skip(1);
    while let Some(arg) = rest.next() {
        match arg.to_str() {
            Some("-o") => {
                let words = rest.next().ok_or(HostError::Usage("-o needs options after it"))?;
                out.extend(["-o".into(), if by_name { words } else { without_defaults(words) }]);
            }
            // The type, which is known.
            Some("-t" | "-N") => drop(rest.next()),
            Some(flags) if flags.len() > 1 && flags.starts_with('-') => {
                for flag in flags.chars().skip(1) {
                    out.extend(flag_of(flag)?.map(OsString::from));
                }
            }
            Some(_) | None => places.push(arg),
        }
    }
    out.push("--".into());
    out.extend(places);
    Ok(out)
}

/// Whether mount(8) is the caller: by this program's name; or, with mount.fuse3, by an absolute path in the place of
/// the command, since no command begins with `/`.
fn is_helper(argv: &[OsString]) -> bool {
    is_named_helper(argv) || argv.get(1).is_some_and(|a| a.as_bytes().starts_with(b"/"))
}

fn is_named_helper(argv: &[OsString]) -> bool {
    let name = argv.first().and_then(|a| Path::new(a).file_name()).unwrap_or_default();
    NAMES.iter().any(|n| name == *n)
}

/// mount.fuse3 adds `dev` and `suid` to root's options by itself, so they are ignored: `allow_dev` and `allow_suid` ask
/// for them.
fn without_defaults(words: OsString) -> OsString {
    let mut kept: Vec<&[u8]> = Vec::new();
    for word in words.as_bytes().split(|b| *b == b',') {
        let is_whole = !kept.last().is_some_and(|before| before.ends_with(b"\\"));
        if !(is_whole && (word == b"dev" || word == b"suid")) {
            kept.push(word);
        }
    }
    OsString::from_vec(kept.join(&b','))
}

/// The option for a flag of mount(8); `None` for a flag without effect: FUSE mounts are not in an mtab (`-n`).
fn flag_of(flag: char) -> Result<Option<&'static str>, HostError> {
    match flag {
        'v' => Ok(Some("-v")),
        'r' => Ok(Some("--read-only")),
        's' => Ok(Some("--sloppy")),
        'f' => Ok(Some("--fake")),
        'n' | 'w' => Ok(None),
        _ => Err(HostError::Usage("mount helpers take: SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS]")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(line: &str) -> Option<String> {
        let argv = line.split(' ').map(OsString::from).collect();
        let out = rewrite(argv).ok()?;
        Some(out.iter().map(|a| a.to_str().unwrap()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn a_line_of_fstab() {
        assert_eq!(
            rewritten("/sbin/mount.fuse.lamassu /srv/v /mnt -n -o rw,key=raw:file:/k").unwrap(),
            "lamassu mount -o rw,key=raw:file:/k -- /srv/v /mnt"
        );
        assert_eq!(rewritten("mount.lamassu /v /m -sfv").unwrap(), "lamassu mount --sloppy --fake -v -- /v /m");
        // mount.fuse3 /srv/v /mnt -t fuse.lamassu
        assert_eq!(rewritten("lamassu /srv/v /mnt -o rw").unwrap(), "lamassu mount -o rw -- /srv/v /mnt");
        assert_eq!(
            rewritten("lamassu /srv/v /mnt -o rw,dev,suid,allow_dev,fsname=a\\,dev").unwrap(),
            "lamassu mount -o rw,allow_dev,fsname=a\\,dev -- /srv/v /mnt"
        );
        assert_eq!(rewritten("mount.lamassu /v /m -o dev").unwrap(), "lamassu mount -o dev -- /v /m");
        assert_eq!(rewritten("lamassu mount -x").unwrap(), "lamassu mount -x");
        assert_eq!(rewritten("lamassu").unwrap(), "lamassu");
        assert_eq!(rewritten("mount.lamassu a b -o"), None);
        assert_eq!(rewritten("mount.lamassu a b -x"), None);
    }
}
