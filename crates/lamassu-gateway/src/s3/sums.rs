//! Checksums of objects, by S3's names of their algorithms. `s3s` computes the digests.

use crate::document::Said;
use data_encoding::BASE64;
use http::HeaderMap;
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::{Checksum, CompletedPart};
use s3s::{S3Error, S3Result, s3_error};
use std::collections::BTreeMap;

/// Checksums, base64, by algorithm.
pub type Sums = BTreeMap<String, String>;

/// For each algorithm: S3's name, its field here and in the library's hasher, its header.
macro_rules! algorithms {
    ($with:ident) => {
        $with! {
            ("CRC32", checksum_crc32, crc32, "x-amz-checksum-crc32"),
            ("CRC32C", checksum_crc32c, crc32c, "x-amz-checksum-crc32c"),
            ("CRC64NVME", checksum_crc64nvme, crc64nvme, "x-amz-checksum-crc64nvme"),
            ("SHA1", checksum_sha1, sha1, "x-amz-checksum-sha1"),
            ("SHA256", checksum_sha256, sha256, "x-amz-checksum-sha256"),
        }
    };
}

macro_rules! define {
    ($(($name:literal, $field:ident, $hasher:ident, $header:literal),)*) => {
        const HEADERS: &[(&str, &str)] = &[$(($name, $header)),*];

        fn enable(hasher: &mut ChecksumHasher, name: &str) -> bool {
            match name {
                $($name => hasher.$hasher = Some(Default::default()),)*
                _ => return false,
            }
            true
        }

        /// The checksums in a client's description of a part.
        pub fn of_part(part: &CompletedPart) -> Sums {
            let all = [$(($name, part.$field.clone())),*];
            all.into_iter().filter_map(|(name, sum)| Some((name.to_owned(), sum?))).collect()
        }

        fn named(sums: Checksum) -> Sums {
            let all = [$(($name, sums.$field)),*];
            all.into_iter().filter_map(|(name, sum)| Some((name.to_owned(), sum?))).collect()
        }
    };
}
algorithms!(define);

/// Puts checksums into an output of the library that has a field for each.
macro_rules! put_sums {
    ($output:expr, $sums:expr) => {{
        let sums: &std::collections::BTreeMap<String, String> = $sums;
        $output.checksum_crc32 = sums.get("CRC32").cloned();
        $output.checksum_crc32c = sums.get("CRC32C").cloned();
        $output.checksum_crc64nvme = sums.get("CRC64NVME").cloned();
        $output.checksum_sha1 = sums.get("SHA1").cloned();
        $output.checksum_sha256 = sums.get("SHA256").cloned();
    }};
}
pub(super) use put_sums;

/// The checksums in a request's headers or trailers.
pub fn said(headers: &HeaderMap) -> S3Result<Sums> {
    let is_known = |name: &str| {
        let rest = name.strip_prefix("x-amz-checksum-");
        rest.is_none_or(|rest| ["algorithm", "mode", "type"].contains(&rest))
            || HEADERS.iter().any(|(_, header)| *header == name)
    };
    if let Some(name) = headers.keys().find(|name| !is_known(name.as_str())) {
        return Err(s3_error!(InvalidRequest, "{name} is no checksum that is known here"));
    }
    let said = HEADERS.iter().filter_map(|(name, header)| Some((name, headers.get(*header)?)));
    let text = |(name, value): (&&str, &http::HeaderValue)| match value.to_str() {
        Ok(value) => Ok((name.to_string(), value.to_owned())),
        Err(_) => Err(s3_error!(InvalidRequest, "the checksum {name} is no text")),
    };
    said.map(text).collect()
}

/// Compares a document with the MD5 and the checksums in its request's headers.
///
/// # Errors
/// `InvalidRequest`, `InvalidDigest` for some that are none.
pub fn said_of_document(headers: &HeaderMap) -> S3Result<Said> {
    let (md5, sums) = (said_md5_of_document(headers)?, said(headers)?);
    Ok(Box::new(move |document| {
        md5(document)?;
        let mut summing = Summing::of(sums.keys().map(String::as_str))?;
        summing.update(document);
        compare(&sums, &summing.finish())
    }))
}

/// Compares a document with the MD5 in its request's headers alone.
///
/// # Errors
/// `InvalidDigest`.
pub fn said_md5_of_document(headers: &HeaderMap) -> S3Result<Said> {
    let md5 = headers.get("content-md5").map(said_md5).transpose()?;
    Ok(Box::new(move |document| {
        let Some(said) = &md5 else { return Ok(()) };
        let mut md5 = Md5::new();
        md5.update(document);
        compare_md5(said, md5.finalize().as_ref())
    }))
}

fn said_md5(value: &http::HeaderValue) -> S3Result<Vec<u8>> {
    parse_md5(value.to_str().unwrap_or_default())
}

/// The MD5 that a request says.
///
/// # Errors
/// `InvalidDigest`.
pub fn parse_md5(text: &str) -> S3Result<Vec<u8>> {
    let md5 = BASE64.decode(text.as_bytes()).ok().filter(|md5| md5.len() == 16);
    md5.ok_or_else(|| s3_error!(InvalidDigest, "Content-MD5 is no MD5 in base64"))
}

/// Compares it with the computed one.
///
/// # Errors
/// `BadDigest`.
pub fn compare_md5(said: &[u8], computed: &[u8]) -> S3Result<()> {
    if said == computed { Ok(()) } else { Err(s3_error!(BadDigest, "the content has another MD5")) }
}

/// Computes checksums of a stream.
pub struct Summing(ChecksumHasher);

impl Summing {
    /// For some algorithms.
    ///
    /// # Errors
    /// `InvalidRequest` for an unknown one.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> S3Result<Summing> {
        let mut hasher = ChecksumHasher::default();
        for name in names {
            if !enable(&mut hasher, name) {
                return Err(unknown(name));
            }
        }
        Ok(Summing(hasher))
    }

    /// The algorithms in a request: those of its checksums, of announced trailers, and the one it asks for.
    ///
    /// # Errors
    /// As [`Summing::of`].
    pub fn asked(headers: &HeaderMap, algorithm: Option<&str>) -> S3Result<Summing> {
        let said = said(headers)?;
        let mut names: Vec<&str> = said.keys().map(String::as_str).collect();
        names.extend(announced(headers));
        names.extend(algorithm);
        Summing::of(names)
    }

    /// Adds an algorithm.
    ///
    /// # Errors
    /// As [`Summing::of`].
    pub fn add(&mut self, name: Option<&str>) -> S3Result<()> {
        match name {
            Some(name) if !enable(&mut self.0, name) => Err(unknown(name)),
            _ => Ok(()),
        }
    }

    /// Adds more content.
    pub fn update(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    /// The checksums.
    pub fn finish(self) -> Sums {
        named(self.0.finalize())
    }
}

fn unknown(name: &str) -> S3Error {
    s3_error!(InvalidRequest, "{name:?} is no algorithm of checksums that is known here")
}

/// Checks that the announced trailers were received: otherwise the body was cut off before them.
///
/// # Errors
/// `IncompleteBody`.
pub fn require_announced(headers: &HeaderMap, came: &Sums) -> S3Result<()> {
    match announced(headers).find(|name| !came.contains_key(*name)) {
        Some(name) => Err(s3_error!(IncompleteBody, "the checksum {name} did not come behind the body")),
        None => Ok(()),
    }
}

/// Algorithms of checksums that will follow the body.
fn announced(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let trailers = headers.get_all("x-amz-trailer").iter().filter_map(|value| value.to_str().ok());
    trailers.flat_map(|value| value.split(',')).filter_map(|header| {
        let header = header.trim().to_ascii_lowercase();
        HEADERS.iter().find(|(_, known)| *known == header).map(|(name, _)| *name)
    })
}

/// Compares the client's checksums with the computed ones.
///
/// # Errors
/// `BadDigest`; `InvalidRequest` for one that was not computed.
pub fn compare(said: &Sums, computed: &Sums) -> S3Result<()> {
    for (name, sum) in said {
        match computed.get(name) {
            Some(own) if own == sum => {}
            Some(_) => return Err(s3_error!(BadDigest, "the content has another checksum {name}")),
            None => return Err(s3_error!(InvalidRequest, "the checksum {name} was not announced")),
        }
    }
    Ok(())
}

/// The checksum of the parts' checksums, with the number of parts.
///
/// # Errors
/// `InvalidPart`: a part has no checksum.
pub fn composite<'a>(algorithm: &str, parts: impl ExactSizeIterator<Item = Option<&'a String>>) -> S3Result<String> {
    let (mut sums, count) = (Summing::of([algorithm])?, parts.len());
    for part in parts {
        let digest = part.and_then(|sum| BASE64.decode(sum.as_bytes()).ok());
        sums.update(&digest.ok_or_else(|| s3_error!(InvalidPart, "a part has no checksum {algorithm}"))?);
    }
    Ok(format!("{}-{count}", sums.finish().remove(algorithm).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standards() {
        let mut sums = Summing::of(HEADERS.iter().map(|(name, _)| *name)).expect("all known");
        sums.update(b"1234");
        sums.update(b"56789");
        let sums = sums.finish();
        assert_eq!(sums.len(), HEADERS.len());
        // The check values of the catalogue of parametrised CRC algorithms.
        assert_eq!(sums["CRC32"], BASE64.encode(&0xcbf4_3926_u32.to_be_bytes()));
        assert_eq!(sums["CRC32C"], BASE64.encode(&0xe306_9283_u32.to_be_bytes()));
        assert_eq!(sums["CRC64NVME"], BASE64.encode(&0xae8b_1486_0a79_9888_u64.to_be_bytes()));
        assert!(Summing::of(["CRC31"]).is_err());
    }

    #[test]
    fn what_was_said_is_compared() {
        let sums: Sums = [("SHA1".to_owned(), "x".to_owned())].into();
        assert!(compare(&sums, &sums).is_ok() && compare(&Sums::new(), &sums).is_ok());
        assert!(compare(&sums, &Sums::new()).is_err());
        let mut headers = HeaderMap::new();
        headers.insert("x-amz-trailer", "x-amz-checksum-CRC32C".parse().expect("a value"));
        let computed = Summing::asked(&headers, Some("SHA256")).expect("known").finish();
        assert_eq!(computed.keys().collect::<Vec<_>>(), ["CRC32C", "SHA256"]);
    }
}
