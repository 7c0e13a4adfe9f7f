//! Users of this machine, by /etc/passwd.

use crate::fault::{Fault, Result};

/// The number of a user, given by name or number.
///
/// # Errors
/// [`Fault::NoSuchUser`].
pub fn uid_of(user: &str) -> Result<u32> {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    Ok(user.parse().ok().or_else(|| listed(&passwd, user)).ok_or_else(|| Fault::NoSuchUser { user: user.into() })?)
}

fn listed(passwd: &str, name: &str) -> Option<u32> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next()? == name { fields.nth(1)?.parse().ok() } else { None }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_names_or_numbers() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nann:x:1007:100::/home/ann:/bin/sh\nbroken\n";
        assert_eq!((listed(passwd, "ann"), listed(passwd, "root"), listed(passwd, "bob")), (Some(1007), Some(0), None));
        assert_eq!(uid_of("65534").unwrap(), 65534);
        assert!(uid_of("no such user here").is_err());
    }
}
