//! Checks a request before the protocol handles it: parts of S3 that are not supported are refused at once, and
//! anything that a signature does not cover is ignored.
//!
//! The checks apply to what [`s3s`] will read: names and values of the query are decoded as it decodes them. Anything
//! ambiguous is refused: a name that is encoded without need, a value that is not ASCII, a repeated parameter or
//! header, two signatures. Every request must have exactly one signature of version 4.

use crate::s3::NULL_VERSION;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, StatusCode, header};
use percent_encoding::percent_decode_str;
use s3s::{S3Error, S3Result, s3_error};

/// Longest validity of a presigned URL, as in S3.
const PRESIGNED_SECONDS_MAX: u64 = 7 * 24 * 3600;
/// Headers that may occur once, in ASCII.
const PLAIN: [HeaderName; 4] = [header::AUTHORIZATION, header::CONTENT_TYPE, header::CONTENT_LENGTH, header::HOST];
/// The same.
const PLAIN_AMZ: [&str; 5] =
    ["x-amz-content-sha256", "x-amz-date", "x-amz-copy-source", "x-amz-decoded-content-length", "x-amz-security-token"];

/// Checks a request.
///
/// # Errors
/// The error for the client.
pub fn check(parts: &Parts, object_max: u64) -> S3Result<()> {
    for name in PLAIN.iter().map(HeaderName::as_str).chain(PLAIN_AMZ) {
        let mut values = parts.headers.get_all(name).iter();
        if values.next().is_some_and(|value| value.to_str().is_err()) {
            return Err(s3_error!(InvalidRequest, "the header {name} is not plain ASCII"));
        }
        if values.next().is_some() {
            return Err(s3_error!(InvalidRequest, "the header {name} is there twice"));
        }
    }
    let query = Query::of(parts.uri.query().unwrap_or_default())?;
    let text = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
    let authorization = text("authorization");
    let is_old = authorization.is_some_and(|value| value.starts_with("AWS "))
        || query.has("Signature")
        || query.has("AWSAccessKeyId");
    if is_old {
        return Err(s3_error!(InvalidRequest, "signatures of version 2 are not taken; sign by version 4"));
    }
    let is_form = text("content-type").is_some_and(|kind| kind.to_ascii_lowercase().starts_with("multipart/"));
    if parts.method == Method::POST && is_form {
        return Err(s3_error!(NotImplemented, "uploads by HTML forms: use a presigned address"));
    }
    let signed = match (authorization, query.is_presigned()) {
        (Some(_), true) => return Err(s3_error!(InvalidRequest, "a request has one signature")),
        (Some(value), false) => {
            if text("x-amz-content-sha256").is_none() {
                return Err(s3_error!(InvalidRequest, "the header x-amz-content-sha256 is missing"));
            }
            value.split([',', ' ']).find_map(|part| part.strip_prefix("SignedHeaders="))
        }
        (None, true) => {
            // Whether it has expired, the library says (403), as it has the date.
            let seconds = query.get("X-Amz-Expires").and_then(|seconds| seconds.parse::<u64>().ok());
            if seconds.is_none_or(|seconds| seconds > PRESIGNED_SECONDS_MAX) {
                let said = "X-Amz-Expires is a number of seconds, not negative, and 7 days at most";
                return Err(s3_error!(AuthorizationQueryParametersError, "{said}"));
            }
            query.get("X-Amz-SignedHeaders")
        }
        (None, false) => return Err(forbidden("the request is not signed".into())),
    };
    check_signed(&parts.headers, signed.unwrap_or_default())?;
    if query.all("versionId").any(|version| !version.is_empty() && version != NULL_VERSION) {
        return Err(s3_error!(NoSuchVersion, "objects have no versions here but \"null\""));
    }
    check_length(&parts.headers, object_max)
}

/// The session token of a request that has passed the checks: from its header, or from a presigned URL.
///
/// # Errors
/// `InvalidRequest`: there are both.
pub fn session_token(parts: &Parts) -> S3Result<Option<String>> {
    let query = Query::of(parts.uri.query().unwrap_or_default())?;
    let header = parts.headers.get("x-amz-security-token").and_then(|value| value.to_str().ok());
    match (header, query.get("X-Amz-Security-Token")) {
        (Some(_), Some(_)) => Err(s3_error!(InvalidRequest, "a request has one session token")),
        (token, None) | (None, token) => Ok(token.map(String::from)),
    }
}

/// The decoded parameters of a URL.
struct Query(Vec<(String, String)>);

impl Query {
    /// Refuses parameters that another parser could read differently.
    fn of(query: &str) -> S3Result<Query> {
        let garbled = || s3_error!(InvalidURI, "the query is not UTF-8, percent-encoded");
        let decoded = |text: &str| {
            let text = text.replace('+', " ");
            percent_decode_str(&text).decode_utf8().map(|text| text.into_owned()).map_err(|_| garbled())
        };
        let mut all: Vec<(String, String)> = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (raw, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = decoded(raw)?;
            if is_of_signature(&name) && (raw != name || all.iter().any(|(other, _)| *other == name)) {
                return Err(s3_error!(InvalidRequest, "the parameter {name} is encoded, or is there twice"));
            }
            all.push((name, decoded(value)?));
        }
        Ok(Query(all))
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |(other, _)| other == name).map(|(_, value)| &**value)
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.all(name).next()
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(other, _)| other.eq_ignore_ascii_case(name))
    }

    /// Whether any part of a signature of version 4 is present.
    fn is_presigned(&self) -> bool {
        ["X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Signature", "X-Amz-SignedHeaders"]
            .iter()
            .any(|name| self.has(name))
    }
}

fn is_of_signature(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.starts_with("x-amz-") || name == "signature" || name == "awsaccesskeyid"
}

/// Whether a request is signed for a region that does not exist, such as `US` from a client without a region. The
/// answer names the right one, and the client signs again.
pub fn has_no_region(parts: &Parts) -> bool {
    let authorization = parts.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let scope =
        authorization.and_then(|value| value.split([' ', ',']).find_map(|part| part.strip_prefix("Credential=")));
    let region = scope.and_then(|scope| scope.split('/').nth(2));
    region.is_some_and(|region| !region.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-')))
}

/// Checks that every header with a meaning for the request is signed, as S3 demands: someone who alters a request on
/// its way cannot add one.
fn check_signed(headers: &HeaderMap, signed: &str) -> S3Result<()> {
    let is_signed = |name: &str| signed.split(';').any(|signed| signed == name);
    // A signed header that is absent could be added.
    if let Some(name) = signed.split(';').find(|name| !headers.contains_key(*name)) {
        return Err(s3_error!(InvalidRequest, "the header {name:?} is signed, and not there"));
    }
    let unsigned = headers.keys().map(|name| name.as_str()).find(|name| name.starts_with("x-amz-") && !is_signed(name));
    match unsigned {
        Some(name) => Err(forbidden(format!("the header {name} is not signed"))),
        None if !is_signed("host") => Err(forbidden("the header host is not signed".into())),
        None => Ok(()),
    }
}

fn forbidden(text: String) -> S3Error {
    let mut error = s3_error!(AccessDenied, "{text}");
    error.set_status_code(StatusCode::FORBIDDEN);
    error
}

fn check_length(headers: &HeaderMap, object_max: u64) -> S3Result<()> {
    for name in [header::CONTENT_LENGTH.as_str(), "x-amz-decoded-content-length"] {
        let Some(value) = headers.get(name) else { continue };
        match value.to_str().ok().and_then(|value| value.parse::<u64>().ok()) {
            None => return Err(s3_error!(InvalidRequest, "the header {name} is no number")),
            Some(length) if length > object_max && name != header::CONTENT_LENGTH.as_str() => return Err(too_large()),
            // Signed chunks are longer than their content.
            Some(length) if length / 2 > object_max => return Err(too_large()),
            Some(_) => {}
        }
    }
    let is_chunked = headers.contains_key("x-amz-decoded-content-length");
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if !is_chunked && length.is_some_and(|length| length > object_max) { Err(too_large()) } else { Ok(()) }
}

fn too_large() -> S3Error {
    s3_error!(EntityTooLarge, "larger than this gateway takes in one request: upload it in parts")
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    const SIGNED: &str = "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/s3/aws4_request, \
        SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature=00";

    fn checked(uri: &str, headers: &[(&str, &str)]) -> S3Result<()> {
        let mut request = Request::builder().method("POST").uri(uri).header("host", "h");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        check(&parts, 1000)
    }

    #[test]
    fn what_is_not_signed_does_not_pass() {
        let good = [("authorization", SIGNED), ("x-amz-content-sha256", "x"), ("x-amz-date", "d")];
        assert!(checked("/b/k", &good).is_ok());
        let code = |extra: (&str, &str)| {
            let headers: Vec<_> = good.iter().copied().chain([extra]).collect();
            checked("/b/k", &headers).map_err(|error| error.code().as_str().to_owned())
        };
        assert_eq!(code(("x-amz-copy-source", "/other/key")), Err("AccessDenied".into()));
        assert_eq!(code(("x-amz-meta-a", "b")), Err("AccessDenied".into()));
        assert_eq!(code(("x-amz-date", "again")), Err("InvalidRequest".into()));
        assert_eq!(code(("content-type", "multipart/form-data; boundary=x")), Err("NotImplemented".into()));
        assert_eq!(code(("content-length", "1001")), Err("EntityTooLarge".into()));
        assert_eq!(code(("content-length", "1000")), Ok(()));
        assert_eq!(code(("content-length", "-1")), Err("InvalidRequest".into()));
        let without_host = SIGNED.replace("host;", "");
        let headers = [("authorization", without_host.as_str()), ("x-amz-content-sha256", "x"), ("x-amz-date", "d")];
        assert!(checked("/b/k", &headers).is_err());
        assert!(checked("/b/k", &[("authorization", SIGNED), ("x-amz-date", "d")]).is_err());
    }

    #[test]
    fn there_is_one_version_however_another_is_named() {
        let good = [("authorization", SIGNED), ("x-amz-content-sha256", "x"), ("x-amz-date", "d")];
        for query in ["", "versionId=", "versionId=null", "version%49d=nul%6C", "versionid=x", "versionId"] {
            checked(&format!("/b/k?{query}"), &good).expect(query);
        }
        for query in ["versionId=x", "version%49d=x", "a=b&versionId=%78", "versionId=null&versionId=x", "versionId=+"]
        {
            let refused = checked(&format!("/b/k?{query}"), &good).expect_err(query);
            assert_eq!(refused.code().as_str(), "NoSuchVersion", "{query}");
        }
    }

    #[test]
    fn old_signatures_and_long_times_are_refused() {
        assert!(checked("/b/k?AWSAccessKeyId=A&Signature=x&Expires=1", &[]).is_err());
        assert!(checked("/b/k", &[("authorization", "AWS A:x")]).is_err());
        let presigned =
            |seconds: u64| format!("/b/k?X-Amz-Expires={seconds}&X-Amz-SignedHeaders=host&X-Amz-Signature=0");
        assert!(checked(&presigned(604_800), &[]).is_ok());
        let code =
            |uri: &str| checked(uri, &[]).map_err(|error| (error.code().as_str().to_owned(), error.status_code()));
        let refused = ("AuthorizationQueryParametersError".to_owned(), Some(StatusCode::BAD_REQUEST));
        for uri in [presigned(604_801), presigned(60).replace("=60", "=-60"), presigned(60).replace("=60", "=x")] {
            assert_eq!(code(&uri), Err(refused.clone()), "{uri}");
        }
        assert!(checked(&presigned(60), &[("x-amz-acl", "private")]).is_err());
    }

    #[test]
    fn what_can_be_read_in_two_ways_is_refused() {
        let presigned = "/b/k?X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=0&X-Amz-Algorithm=A";
        assert!(checked(presigned, &[]).is_ok());
        for (from, to) in [
            ("SignedHeaders", "Signed%48eaders"),
            ("X-Amz-Expires", "X-Amz-%45xpires"),
            ("X-Amz-Signature", "%58-Amz-Signature"),
            ("Headers=host", "Headers=host&X-Amz-SignedHeaders=host;x-amz-acl"),
            ("Expires=60", "Expires=60&x-amz-expires=9999999"),
            ("Headers=host", "Headers=host;content-md5"),
            ("Expires=60", "Expires=%FF"),
        ] {
            assert!(checked(&presigned.replace(from, to), &[]).is_err() || to.contains("x-amz-expires"), "{to}");
        }
        for query in ["AWSAccessKey%49d=A&Signatur%65=x", "awsaccesskeyid=A&signature=x", "a=%ff"] {
            assert!(checked(&format!("/b/k?{query}"), &[]).is_err(), "{query}");
        }
        // Two signatures, none, and one with what is no ASCII.
        let good = [("authorization", SIGNED), ("x-amz-content-sha256", "x"), ("x-amz-date", "d")];
        assert!(checked(presigned, &good).is_err());
        assert!(checked("/b/k", &[]).is_err());
        let strange = SIGNED.replace("x-amz-date,", "x-amz-date;\u{e9},");
        assert!(checked("/b/k", &[("authorization", &strange), good[1], good[2]]).is_err());
        let absent = SIGNED.replace("x-amz-date,", "x-amz-date;x-amz-acl,");
        assert!(checked("/b/k", &[("authorization", &absent), good[1], good[2]]).is_err());
        let form = ("content-type", "multipart/form-data; boundary=x; a=\"\u{e9}\"");
        assert!(checked("/b/k", &[good[0], good[1], good[2], form]).is_err());
    }
}
