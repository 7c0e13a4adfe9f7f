//! Checks a request before the protocol handles it: parts of S3 that are not supported are refused at once, and so is
//! an `x-amz-` header that the signature does not cover.
//!
//! The checks apply to what [`s3s`] will read: names and values of the query are decoded as it decodes them, and
//! `Authorization` is read by position. Anything ambiguous is refused: a name that is encoded without need, a value
//! that is not ASCII, a repeated parameter or header, two signatures. Every request must have exactly one signature of
//! version 4.

use crate::s3::NULL_VERSION;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use percent_encoding::percent_decode_str;
use s3s::{S3Error, S3Result, s3_error};

/// How requests are signed.
const ALGORITHM: &str = "AWS4-HMAC-SHA256";
/// Hexadecimal digits of a signature.
const SIGNATURE_LEN: usize = 64;
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
            let Some(authorization) = Authorization::parse(value) else {
                let said = "the header is not AWS4-HMAC-SHA256 Credential=..., SignedHeaders=..., Signature=...";
                return Err(s3_error!(AuthorizationHeaderMalformed, "{said}"));
            };
            Some(authorization.signed_headers)
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

/// What the header `Authorization` says besides the signature. Nothing covers this header: whoever has a signed request
/// can alter it. [`s3s`] takes its pieces by position. A reader that looked for them could find other signed headers in
/// the same text, and let an unsigned one pass. So there is one form.
struct Authorization<'a> {
    credential: &'a str,
    signed_headers: &'a str,
}

impl<'a> Authorization<'a> {
    /// `None`: it has another form. Some clients leave out the spaces after the commas.
    fn parse(value: &'a str) -> Option<Authorization<'a>> {
        let pieces = value.strip_prefix(ALGORITHM)?.strip_prefix(' ')?;
        let mut pieces = pieces.split(',').map(|piece| piece.trim_start_matches(' '));
        let credential = pieces.next()?.strip_prefix("Credential=")?;
        let signed_headers = pieces.next()?.strip_prefix("SignedHeaders=")?;
        let signature = pieces.next()?.strip_prefix("Signature=")?;
        let is_name = |name: &str| HeaderName::from_lowercase(name.as_bytes()).is_ok();
        let is_so = pieces.next().is_none()
            && !credential.contains(char::is_whitespace)
            && signed_headers.split(';').all(is_name)
            && signature.len() == SIGNATURE_LEN
            && signature.bytes().all(|b| b.is_ascii_hexdigit());
        is_so.then_some(Authorization { credential, signed_headers })
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
    let value = parts.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let region = value.and_then(Authorization::parse).and_then(|signed| signed.credential.split('/').nth(2));
    region.is_some_and(|region| !region.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-')))
}

/// Checks that every header with a meaning for the request is signed, as S3 demands: someone who alters a request on
/// its way cannot add one.
fn check_signed(headers: &HeaderMap, signed: &str) -> S3Result<()> {
    let is_signed = |name: &str| signed.split(';').any(|signed| signed == name);
    let is_of_protocol = |name: &HeaderName| name.as_str().starts_with("x-amz-");
    // The library verifies a signature without the values that are not UTF-8.
    let is_unseen = |value: &HeaderValue| str::from_utf8(value.as_bytes()).is_err();
    if let Some((name, _)) = headers.iter().find(|(name, value)| is_of_protocol(name) && is_unseen(value)) {
        return Err(s3_error!(InvalidRequest, "the header {name} is not UTF-8"));
    }
    // A signed header that is absent could be added.
    if let Some(name) = signed.split(';').find(|name| !headers.contains_key(*name)) {
        return Err(s3_error!(InvalidRequest, "the header {name:?} is signed, and not there"));
    }
    match headers.keys().find(|name| is_of_protocol(name) && !is_signed(name.as_str())) {
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
        SignedHeaders=host;x-amz-content-sha256;x-amz-date, \
        Signature=0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

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

    /// Whoever has a signed request can alter `Authorization`, and add headers. In each of these `s3s` would find the
    /// list that was signed, or none.
    #[test]
    fn signed_headers_stand_at_one_place() {
        const DECOY: &str = "SignedHeaders=host;x-amz-content-sha256;x-amz-copy-source;x-amz-date";
        let with = |from: &str, to: &str| SIGNED.replacen(from, &to.replace("DECOY", DECOY), 1);
        for altered in [
            with(" ", ",DECOY "),
            with(" ", ",DECOY, "),
            with(" ", ",Credential=A,DECOY,Signature=0 "),
            with("AWS4", "DECOY,AWS4"),
            with("AWS4-HMAC-SHA256", "DECOY"),
            with(" Cred", " DECOY Cred"),
            with(" Cred", " DECOY, Cred"),
            with("=A/", "=A,DECOY/"),
            with("=A/", "=A DECOY/"),
            with(", Signed", ", DECOY, Signed"),
            with(", Signature", ", DECOY, Signature"),
            with(", Signature", " DECOY, Signature"),
            with("Signature=", "Signature=DECOY"),
            format!("{SIGNED}, {DECOY}"),
            format!("{SIGNED} {DECOY}"),
            format!("{DECOY}, {SIGNED}"),
        ] {
            let copied = ("x-amz-copy-source", "/other/key");
            let headers = [("authorization", &*altered), ("x-amz-content-sha256", "x"), ("x-amz-date", "d"), copied];
            let refused = checked("/b/k", &headers).expect_err(&altered);
            assert_eq!(refused.code().as_str(), "AuthorizationHeaderMalformed", "{altered}");
            assert_eq!(refused.status_code(), Some(StatusCode::BAD_REQUEST));
        }
    }

    #[test]
    fn a_signature_has_one_form() {
        let code = |authorization: &str| {
            let headers = [("authorization", authorization), ("x-amz-content-sha256", "x"), ("x-amz-date", "d")];
            checked("/b/k", &headers).map_err(|error| error.code().as_str().to_owned())
        };
        // As clients write it: s3cmd leaves spaces out.
        for (from, to) in [(", ", ", "), (", ", ","), (", ", ",  "), ("256 Cred", "256  Cred")] {
            assert_eq!(code(&SIGNED.replace(from, to)), Ok(()), "{to}");
        }
        for (from, to) in [
            ("AWS4-HMAC-SHA256 ", ""),
            ("AWS4-HMAC-SHA256 ", "AWS4-HMAC-SHA256"),
            ("AWS4-HMAC-SHA256 ", "AWS4-HMAC-SHA256\t"),
            ("AWS4-HMAC-SHA256", "aws4-hmac-sha256"),
            ("AWS4-HMAC-SHA256", "AWS4-ECDSA-P256-SHA256"),
            ("Credential=", "Credential= "),
            ("Credential=", "credential="),
            ("A/2026", "A B/2026"),
            (", Signed", " Signed"),
            (", Signed", ",\tSigned"),
            ("host;", "Host;"),
            ("host;", "host;;"),
            ("host;", "host ;"),
            ("host;x-amz-content-sha256;x-amz-date", ""),
            (", Signature", " , Signature"),
            (", Signature", ";Signature"),
            ("Signature=0", "Signature="),
            ("Signature=0", "Signature=00"),
            ("Signature=0", "Signature=g"),
            ("Signature=0", "Signature= 0"),
            ("cdef0", "cdef 0"),
        ] {
            let altered = SIGNED.replace(from, to);
            assert_eq!(code(&altered), Err("AuthorizationHeaderMalformed".into()), "{altered}");
        }
        assert_eq!(code(&format!("{SIGNED},")), Err("AuthorizationHeaderMalformed".into()));
    }

    /// The signed headers as [`s3s`] reads them: its `AuthorizationV4::parse`.
    fn by_position(value: &str) -> Option<&str> {
        let (algorithm, mut rest) = value.split_once(' ')?;
        rest = rest.trim_start().strip_prefix("Credential=")?;
        for _ in ["key", "date", "region", "service"] {
            rest = rest.split_once('/')?.1;
        }
        rest = rest.strip_prefix("aws4_request,")?.trim_start().strip_prefix("SignedHeaders=")?;
        let (signed, rest) = rest.split_once(',')?;
        let signature = rest.trim_start().strip_prefix("Signature=")?;
        (!algorithm.is_empty() && !signature.trim_end().contains(' ')).then_some(signed)
    }

    /// Of all orders of the pieces, no one passes that the library would read in another way.
    #[test]
    fn what_passes_is_read_as_the_library_reads_it() {
        let (credential, rest) = SIGNED.split_once(' ').and_then(|(_, rest)| rest.split_once(", ")).expect("a form");
        let (signed, signature) = rest.split_once(", ").expect("a form");
        let pieces = [ALGORITHM, " ", ",", credential, signed, "SignedHeaders=host;x-amz-copy-source", signature, "/"];
        let mut passed = 0;
        for number in 0..pieces.len().pow(6) {
            let mut value = ALGORITHM.to_owned();
            for place in 0..6 {
                value.push_str(pieces[number / pieces.len().pow(place) % pieces.len()]);
                if let Some(found) = Authorization::parse(&value) {
                    assert_eq!(by_position(&value), Some(found.signed_headers), "{value}");
                    passed += 1;
                }
            }
        }
        assert!(passed > 0);
        assert_eq!(by_position(SIGNED), Authorization::parse(SIGNED).map(|signed| signed.signed_headers));
    }

    /// s3cmd signs for `US`, and leaves spaces out.
    #[test]
    fn a_region_that_does_not_exist_is_noticed() {
        let is_none = |authorization: &str| {
            let request = Request::builder().header("authorization", authorization).body(()).expect("a request");
            has_no_region(&request.into_parts().0)
        };
        assert!(is_none(&SIGNED.replace("us-east-1", "US").replace(", ", ",")));
        assert!(!is_none(SIGNED) && !is_none(&SIGNED.replace("us-east-1", "any-2")));
        assert!(!is_none("AWS4-HMAC-SHA256 nonsense"));
    }

    /// The signature is verified without such values.
    #[test]
    fn a_signed_header_that_is_not_text_is_refused() {
        let signed = SIGNED.replace("date,", "date;x-amz-meta-a,");
        let code = |values: &[&[u8]]| {
            let mut request = Request::builder().method("PUT").uri("/b/k").header("host", "h");
            for (name, value) in [("authorization", &*signed), ("x-amz-content-sha256", "x"), ("x-amz-date", "d")] {
                request = request.header(name, value);
            }
            for value in values {
                request = request.header("x-amz-meta-a", *value);
            }
            let (parts, ()) = request.body(()).expect("a request").into_parts();
            check(&parts, 1000).map_err(|error| error.code().as_str().to_owned())
        };
        assert_eq!(code(&[b"text"]), Ok(()));
        assert_eq!(code(&["t\u{e9}xt".as_bytes(), b"text"]), Ok(()));
        assert_eq!(code(&[b"t\xe9xt"]), Err("InvalidRequest".into()));
        assert_eq!(code(&[b"text", b"t\xe9xt"]), Err("InvalidRequest".into()));
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
