//! The parts that a client names when it completes an upload: the same checks and tags for both object stores.

use super::Refusal;
use super::attrs::Shown;
use data_encoding::HEXLOWER;
use s3s::crypto::{Checksum as _, Md5};
use std::collections::BTreeMap;

/// Most parts, as in S3.
pub const PARTS_MAX: u32 = 10_000;
/// Smallest part but the last, as in S3.
const PART_MIN: u64 = 5 << 20;

/// The client's data about a part when it completes an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completed {
    /// from 1
    pub number: u32,
    /// its entity tag
    pub etag: String,
    /// the checksums that the client sent, by algorithm
    pub checksums: BTreeMap<String, String>,
}

/// The parts that the client names, each found by its number, if they match the uploaded ones. `algorithm` is the
/// checksum algorithm of the upload.
///
/// # Errors
/// [`Refusal::NoPart`], [`Refusal::PartOrder`], [`Refusal::SmallPart`]; those of `find`.
pub fn chosen<P: AsRef<Shown>, E: From<Refusal>>(
    named: &[Completed],
    algorithm: Option<&str>,
    mut find: impl FnMut(u32) -> Result<Option<P>, E>,
) -> Result<Vec<P>, E> {
    if named.is_empty() {
        return Err(Refusal::NoPart(1).into());
    }
    if named.windows(2).any(|pair| pair[0].number >= pair[1].number) {
        return Err(Refusal::PartOrder.into());
    }
    let mut parts = Vec::with_capacity(named.len());
    for wanted in named {
        let part = find(wanted.number)?.filter(|part| {
            let Shown { attrs, .. } = part.as_ref();
            let said = algorithm.and_then(|algorithm| wanted.checksums.get(algorithm));
            let known = algorithm.and_then(|algorithm| attrs.checksums.get(algorithm));
            attrs.etag == wanted.etag && (said.is_none() || said == known)
        });
        parts.push(part.ok_or(Refusal::NoPart(wanted.number))?);
    }
    let numbers = named.iter().map(|wanted| wanted.number);
    match parts.iter().zip(numbers).rev().skip(1).find(|(part, _)| P::as_ref(part).size < PART_MIN) {
        Some((_, number)) => Err(Refusal::SmallPart(number).into()),
        None => Ok(parts),
    }
}

/// The name that a part is stored under in its upload.
pub fn name_of(number: u32) -> String {
    format!("{number:05}")
}

/// The number of the part that is stored under a name; `None`: no part is.
pub fn number_of(name: &str) -> Option<u32> {
    name.parse().ok().filter(|number| (1..=PARTS_MAX).contains(number) && name == name_of(*number))
}

/// The entity tag of an object made of parts with these tags, as S3 computes it; `None`: one of the tags is no MD5.
pub fn tag_of<'a>(tags: impl Iterator<Item = &'a str>) -> Option<String> {
    let (mut hash, mut count) = (Md5::new(), 0);
    for tag in tags {
        hash.update(&HEXLOWER.decode(tag.as_bytes()).ok().filter(|md5| md5.len() == 16)?);
        count += 1;
    }
    Some(format!("{}-{count}", HEXLOWER.encode(hash.finalize().as_ref())))
}

#[cfg(test)]
mod tests {
    use super::super::attrs::Attrs;
    use super::*;
    use lamassu_vault::Time;

    struct There(Shown);

    impl AsRef<Shown> for There {
        fn as_ref(&self) -> &Shown {
            &self.0
        }
    }

    fn found(number: u32) -> Result<Option<There>, Refusal> {
        let sizes = [PART_MIN, PART_MIN - 1, 1];
        let there = sizes.get(number as usize).map(|size| {
            let checksums = [("SHA1".to_owned(), "s".to_owned())].into();
            let attrs = Attrs { etag: "e".into(), checksums, ..Attrs::default() };
            There(Shown { attrs, size: *size, mtime: Time { seconds: 0, nanos: 0 } })
        });
        Ok(there)
    }

    fn asked(numbers: &[u32], etag: &str, sum: Option<&str>) -> Result<usize, Refusal> {
        let named = numbers.iter().map(|number| Completed {
            number: *number,
            etag: etag.into(),
            checksums: sum.map(|sum| ("SHA1".to_owned(), sum.to_owned())).into_iter().collect(),
        });
        chosen(&named.collect::<Vec<_>>(), Some("SHA1"), found).map(|parts| parts.len())
    }

    #[test]
    fn parts_are_those_that_are_there() {
        assert_eq!(asked(&[0, 1], "e", None), Ok(2));
        assert_eq!(asked(&[0, 2], "e", Some("s")), Ok(2));
        assert_eq!(asked(&[0, 1, 2], "e", None), Err(Refusal::SmallPart(1)));
        assert_eq!(asked(&[1, 0], "e", None), Err(Refusal::PartOrder));
        assert_eq!(asked(&[0, 0], "e", None), Err(Refusal::PartOrder));
        assert_eq!(asked(&[0, 3], "e", None), Err(Refusal::NoPart(3)));
        assert_eq!(asked(&[0], "f", None), Err(Refusal::NoPart(0)));
        assert_eq!(asked(&[0], "e", Some("t")), Err(Refusal::NoPart(0)));
        assert_eq!(asked(&[], "e", None), Err(Refusal::NoPart(1)));
    }

    #[test]
    fn a_part_has_one_name() {
        for number in [1, 42, PARTS_MAX] {
            assert_eq!(number_of(&name_of(number)), Some(number));
        }
        for name in ["1", "+1", "+0001", "-0001", "00000", "000001", "10001", "00003.hAAAA", "upload", ""] {
            assert_eq!(number_of(name), None, "{name}");
        }
    }

    #[test]
    fn a_tag_is_the_md5_of_md5s() {
        let tag = "d41d8cd98f00b204e9800998ecf8427e";
        assert_eq!(tag_of([tag].into_iter()).as_deref(), Some("59adb24ef3cdbe0297f05b395827453f-1"));
        assert_eq!(tag_of([tag, "x"].into_iter()), None);
    }
}
