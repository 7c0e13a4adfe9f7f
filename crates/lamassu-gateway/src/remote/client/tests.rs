use super::*;

#[test]
fn answers_mean_what_they_say() {
    let document =
        |code: &str| format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>m</Message></Error>");
    for (status, code, said) in [
        (403, "AccessDenied", "refuses the gateway: Get: 403 AccessDenied: m"),
        (400, "InvalidToken", "refuses the gateway"),
        (400, "ExpiredToken", "has expired"),
        (403, "ExpiredToken", "has expired"),
        (400, "KeyTooLongError", "longer than the provider takes"),
        (409, "KeyIsDirectory", "cannot have both"),
        (409, "ParentIsObject", "cannot have both"),
        (404, "NoSuchBucket", "no such bucket"),
        (404, "NoSuchKey", "nothing there: Get: 404"),
        (301, "PermanentRedirect", "another endpoint"),
        (400, "AuthorizationHeaderMalformed", "another endpoint"),
        (503, "SlowDown", "busy"),
        // The status of an answer that has begun with 200 and then says what it is: `send_for`.
        (500, "InternalError", "busy"),
        (500, "KeyIsDirectory", "cannot have both"),
        (500, "PreconditionFailed", "something else there by now"),
        (500, "KeyTooLongError", "longer than the provider takes"),
        (412, "PreconditionFailed", "something else there by now: Get: 412"),
        (409, "ConditionalRequestConflict", "busy"),
        (404, "NoSuchUpload", "lost an upload"),
        (404, "Elsewhere", "not understood"),
        (501, "NotImplemented", "not support"),
        (400, "InvalidPart", "not understood"),
    ] {
        let text = fault(status, &document(code), "Get", false).to_string();
        assert!(text.contains(said), "{code}: {text}");
    }
    assert!(fault(503, "", "", false).may_pass() && !fault(403, "", "", false).may_pass());
    assert!(matches!(fault(404, "", "", true), RemoteError::Missing(_)));
    assert!(matches!(fault(404, "<html>Not Found</html>", "", false), RemoteError::Answer(_)));
}

/// Errors of many answers may be in memory at once.
#[test]
fn little_of_what_a_provider_says_is_in_an_error() {
    let said = |text: &str| format!("<Error><Code>{text}</Code><Message>{text}</Message></Error>");
    for text in ["m", "\u{fc}", "\u{1f980}"] {
        let error = fault(400, &said(&text.repeat(20_000)), "Get", false).to_string();
        assert!(error.contains(&text.repeat(70)) && error.len() < 1000, "{error}");
        let document = format!("<ListBucketResult><{0}></ListBucketResult>", text.repeat(20_000));
        let error = Page::parse(document.as_bytes()).map(drop).expect_err("it is no document");
        assert!(not_understood("List", &error).to_string().len() < 1000, "{error}");
    }
}

#[test]
fn a_tag_has_a_length_that_can_be() {
    for (etag, is_good) in [(None, false), (Some(0), false), (Some(TAG_MAX), true), (Some(TAG_MAX + 1), false)] {
        assert_eq!(checked(etag.map(|len| "t".repeat(len)), "Put").is_ok(), is_good, "{etag:?}");
    }
}
