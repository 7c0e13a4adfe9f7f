//! Versions of the protocol: with each call a host says which ones it speaks, and the server takes the newest that both
//! speak.
//!
//! A new version is a change that a program of the version before would misunderstand. A field that older programs can
//! ignore needs none. A server speaks the versions of the hosts that are still to be updated, and is updated first.

use std::fmt;
use std::str::FromStr;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Metadata of each call, and of a refusal for its sake: the [`Versions`] that the sender speaks.
pub const KEY: &str = "lamassu-protocol";

/// The versions that this program speaks.
pub const SPOKEN: Versions = Versions { oldest: 1, newest: 1 };

/// Versions from the oldest to the newest. As text: `1-3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    oldest: u32,
    newest: u32,
}

impl Versions {
    /// The newest version that is among both.
    pub fn common(self, other: Versions) -> Option<u32> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }

    /// Whether a version is among them.
    pub fn have(self, version: u32) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.oldest, self.newest)
    }
}

/// The text names no versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoVersions;

impl FromStr for Versions {
    type Err = NoVersions;

    fn from_str(text: &str) -> Result<Versions, NoVersions> {
        let (oldest, newest) = text.split_once('-').ok_or(NoVersions)?;
        let number = |text: &str| text.parse().map_err(|_| NoVersions);
        let versions = Versions { oldest: number(oldest)?, newest: number(newest)? };
        if versions.oldest <= versions.newest { Ok(versions) } else { Err(NoVersions) }
    }
}

/// The versions that metadata name.
pub fn of(metadata: &MetadataMap) -> Option<Versions> {
    metadata.get(KEY)?.to_str().ok()?.parse().ok()
}

/// At the server: the version of a call, whose host speaks `theirs`, as far as it says.
///
/// # Errors
/// A refusal, if the host speaks no version that this program speaks, or does not say.
#[allow(clippy::result_large_err, reason = "tonic's")]
pub fn agreed(theirs: Option<Versions>) -> Result<u32, Status> {
    theirs.and_then(|theirs| SPOKEN.common(theirs)).ok_or_else(|| {
        let theirs = theirs.map_or_else(|| "does not say which ones it speaks".into(), |v| format!("speaks {v}"));
        let what = format!("the server speaks the versions {SPOKEN} of the protocol, and this host {theirs}");
        let mut status = Status::unimplemented(what);
        status.metadata_mut().insert(KEY, spoken());
        status
    })
}

fn spoken() -> MetadataValue<tonic::metadata::Ascii> {
    SPOKEN.to_string().parse().expect("two numbers are ASCII")
}

/// At the host: says with each call which versions it speaks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Speaks;

impl Interceptor for Speaks {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert(KEY, spoken());
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_that_both_speak() {
        let of = |text: &str| text.parse::<Versions>().unwrap();
        for (ours, theirs, common) in [
            ("1-1", "1-1", Some(1)),
            ("1-3", "2-7", Some(3)),
            ("2-7", "1-3", Some(3)),
            ("1-9", "4-5", Some(5)),
            ("1-2", "3-4", None),
            ("3-4", "1-2", None),
        ] {
            assert_eq!(of(ours).common(of(theirs)), common, "{ours} {theirs}");
            assert_eq!(of(ours).to_string(), ours);
        }
        assert!(of("2-4").have(2) && of("2-4").have(4) && !of("2-4").have(5));
        for text in ["", "1", "-", "2-1", "1-2-3", "a-b", "1-4294967296", "-1-1"] {
            assert_eq!(text.parse::<Versions>(), Err(NoVersions), "{text:?}");
        }
    }

    #[test]
    fn a_host_is_refused_that_speaks_none_or_does_not_say() {
        for said in [None, Some("7-9".parse().unwrap())] {
            let refused = agreed(said).unwrap_err();
            assert_eq!((refused.code(), of(refused.metadata())), (tonic::Code::Unimplemented, Some(SPOKEN)));
        }
        assert_eq!(agreed("1-9".parse().ok()).unwrap(), 1);
    }
}
