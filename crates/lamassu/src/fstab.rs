//! mount(8)'s view of this program: started as `mount.lamassu` or `mount.fuse.lamassu` it takes `SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS]`, and so a line of fstab.

use crate::fault::Fault;
use std::ffi::OsString;
use std::path::Path;

const NAMES: [&str; 3] = ["mount.lamassu", "mount.fuse.lamassu", "mount.fuse3.lamassu"];

/// The command line of `lamassu mount`, if this is mount(8) calling; otherwise what was given.
pub fn rewrite(argv: Vec<OsString>) -> Result<Vec<OsString>, Fault> {
    let name = argv.first().and_then(|a| Path::new(a).file_name()).unwrap_or_default();
    if !NAMES.iter().any(|n| name == *n) {
        return Ok(argv);
    }
    let mut out: Vec<OsString> = ["lamassu", "mount"].map(OsString::from).into();
    let mut places = Vec::new();
    let mut rest = argv.into_iter().skip(1);
    while let Some(arg) = rest.next() {
        match arg.to_str() {
            Some("-o") => {
                let words = rest.next().ok_or(Fault::Usage("-o needs options after it"))?;
                out.extend(["-o".into(), words]);
            }
            Some("-v") => out.push("-v".into()),
            // mount(8) keeps no mtab of FUSE mounts; unknown options are refused even when it is told to be sloppy.
            Some("-n" | "-s") => {}
            Some("-f") => return Err(Fault::Usage("a fake mount (-f) is not offered")),
            // The type, which we know.
            Some("-t" | "-N") => drop(rest.next()),
            Some(option) if option.starts_with('-') && option.len() > 1 => {
                return Err(Fault::Usage("mount helpers take: SOURCE MOUNTPOINT [-nsv] [-o OPTIONS]"));
            }
            Some(_) | None => places.push(arg),
        }
    }
    out.push("--".into());
    out.extend(places);
    Ok(out)
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
        assert_eq!(rewritten("lamassu mount -x").unwrap(), "lamassu mount -x");
        assert_eq!(rewritten("mount.lamassu a b -o"), None);
        assert_eq!(rewritten("mount.lamassu a b -x"), None);
    }
}
