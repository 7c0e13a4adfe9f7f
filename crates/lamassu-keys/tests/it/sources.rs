//! Key source URIs, and what files and variables give.
use lamassu_format::header::SlotKind;
use lamassu_keys::{Ask, KeySource, Material, Purpose, SourceError, Warning};
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const ASK: Ask<'static> = Ask { subject: "test", purpose: Purpose::Unlock, stdin: false };

fn parse(uri: &str) -> Result<KeySource, SourceError> {
    uri.parse()
}

#[test]
#[cfg(feature = "https")]
fn a_query_is_nobody_elses_business() {
    let source = parse("hex:https://h/key?token=hunter2#ca=x").unwrap();
    assert_eq!(source.to_string(), "hex:https://h/key?…");
    assert!(!format!("{source:?}").contains("hunter2"));
    assert_ne!(source, parse("hex:https://h/key?token=hunter3#ca=x").unwrap());
}

#[test]
fn valid_forms() {
    for (uri, kind, interactive) in [
        ("passphrase:prompt", SlotKind::Passphrase, true),
        ("passphrase:file:/etc/key", SlotKind::Passphrase, false),
        ("passphrase:file:a:b", SlotKind::Passphrase, false),
        ("raw:file:key", SlotKind::Raw, false),
        ("hex:file:./key with spaces", SlotKind::Hex, false),
        ("passphrase:env:VAULT_KEY1", SlotKind::Passphrase, false),
        ("recovery:prompt", SlotKind::Recovery, true),
        ("recovery:file:paper", SlotKind::Recovery, false),
        ("recovery-shares:prompt", SlotKind::RecoveryShares, true),
        ("recovery-shares:stdin", SlotKind::RecoveryShares, false),
        ("raw:stdin", SlotKind::Raw, false),
        ("hex:fd:3", SlotKind::Hex, false),
        ("passphrase:credential:vault", SlotKind::Passphrase, false),
        #[cfg(feature = "kmip")]
        ("kmip://h/7#ca=x", SlotKind::Raw, false),
        ("server://h:7433/vault-1", SlotKind::Raw, false),
    ] {
        let source = parse(uri).unwrap();
        assert_eq!((source.kind(), source.is_interactive(), source.to_string().as_str()), (kind, interactive, uri));
        assert_eq!(parse(&source.to_string()).unwrap(), source);
    }
}

#[test]
fn nonsense_is_refused_with_the_valid_forms_and_never_repeated() {
    for uri in [
        "",
        "hunter2",
        "passphrase",
        "passphrase:",
        "passphrase:hunter2",
        "passphrase:hunter2:x",
        "raw",
        "raw:",
        "file:/key",
        "Passphrase:prompt",
        "passphrase:PROMPT",
        "hex:prompt",
        "raw:prompt",
        "raw:env:X",
        "hex:env:X",
        ":prompt",
        "hunter2:file:x",
    ] {
        let text = parse(uri).unwrap_err().to_string();
        assert!(
            text.contains("passphrase|recovery|recovery-shares:prompt, passphrase|raw|hex|recovery|recovery-shares:file:PATH, passphrase:env:NAME,"),
            "{text}"
        );
        assert!(!text.contains("hunter2"), "{text}");
    }
    for (uri, usage) in [
        ("passphrase:prompt:now", "passphrase:prompt"),
        ("raw:file", "raw:file:PATH"),
        ("raw:file:", "raw:file:PATH"),
        ("passphrase:env", "passphrase:env:NAME"),
        ("passphrase:env:", "passphrase:env:NAME"),
        ("passphrase:env:my hunter2", "passphrase:env:NAME"),
        ("passphrase:env:1X", "passphrase:env:NAME"),
        ("raw:stdin:0", "raw:stdin"),
        ("hex:fd", "hex:fd:N"),
        ("hex:fd:hunter2", "hex:fd:N"),
        ("hex:credential:../key", "hex:credential:NAME"),
    ] {
        assert_eq!(parse(uri).unwrap_err().to_string(), format!("write {usage}"));
    }
}

fn load(kind: &str, content: &[u8], mode: u32) -> Result<(Material, Vec<Warning>), SourceError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    std::fs::write(&path, content).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    let loaded = parse(&format!("{kind}:file:{}", path.display())).unwrap().load(&ASK)?;
    Ok((loaded.material, loaded.warnings))
}

fn secret(kind: &str, content: &[u8]) -> Result<Vec<u8>, SourceError> {
    Ok(match load(kind, content, 0o600)?.0 {
        Material::Passphrase(p) => p.expose().to_vec(),
        Material::Key { key, .. } => key.expose().to_vec(),
        Material::Token(_) => panic!("a token"),
    })
}

#[test]
fn files_give_what_the_format_page_says() {
    assert_eq!(secret("passphrase", b"words\n").unwrap(), b"words");
    assert_eq!(secret("passphrase", b"words\r\n").unwrap(), b"words");
    assert_eq!(secret("passphrase", b" words \n\n").unwrap(), b" words \n");
    assert!(matches!(secret("passphrase", b""), Err(SourceError::EmptyPassphrase)));
    assert!(matches!(secret("passphrase", b"\n"), Err(SourceError::EmptyPassphrase)));
    assert!(matches!(secret("passphrase", b"\xff\xfe"), Err(SourceError::PassphraseNotUtf8)));
    assert_eq!(secret("passphrase", &[b'x'; 4096]).unwrap().len(), 4096);
    assert!(matches!(secret("passphrase", &[b'x'; 4097]), Err(SourceError::PassphraseTooLong { .. })));
    assert!(matches!(secret("passphrase", &[b'x'; 100_000]), Err(SourceError::FileTooLong { .. })));

    assert_eq!(secret("raw", &[7; 32]).unwrap(), [7; 32]);
    assert_eq!(secret("raw", &[b'\n'; 32]).unwrap(), [b'\n'; 32], "a raw key has no line end");
    for len in [0, 31, 33, 64] {
        assert!(matches!(secret("raw", &vec![7; len]), Err(SourceError::RawLength)));
    }

    let digits = "00fF".repeat(16);
    let bytes = [0x00, 0xff].repeat(16);
    for end in ["", "\n", "\r\n"] {
        assert_eq!(secret("hex", format!("{digits}{end}").as_bytes()).unwrap(), bytes);
    }
    for bad in [
        &digits[1..],
        &format!("{digits}0"),
        &format!("{digits}\n\n"),
        &format!(" {}", &digits[1..]),
        &"g".repeat(64),
        "",
    ] {
        assert!(matches!(secret("hex", bad.as_bytes()), Err(SourceError::Hex)), "{bad:?}");
    }
}

#[test]
fn a_key_open_to_all_is_reported() {
    for (mode, warned) in [(0o600, false), (0o640, false), (0o400, false), (0o644, true), (0o602, true)] {
        let warnings = load("raw", &[1; 32], mode).unwrap().1;
        assert_eq!(warnings.len(), usize::from(warned), "{mode:o}");
        if let [Warning::OpenToOthers { mode: shown, .. }] = &warnings[..] {
            assert_eq!(*shown, mode);
        }
    }
}

#[test]
fn unreadable_files_say_which() {
    for (path, what) in [("/does/not/exist", "No such file"), ("/", "directory")] {
        let e = parse(&format!("raw:file:{path}")).unwrap().load(&ASK).unwrap_err();
        assert!(e.to_string().contains(path) && e.to_string().contains(what), "{e}");
    }
    // A device without end is read no further than a key can be long.
    let e = parse("raw:file:/dev/zero").unwrap().load(&ASK).unwrap_err();
    assert!(matches!(e, SourceError::FileTooLong { path, .. } if path == Path::new("/dev/zero")));
}

#[test]
fn variables() {
    // Cargo sets this one.
    let loaded = parse("passphrase:env:CARGO_PKG_NAME").unwrap().load(&ASK).unwrap();
    assert!(matches!(loaded.material, Material::Passphrase(p) if p.expose() == b"lamassu-keys"));
    let e = parse("passphrase:env:LAMASSU_NO_SUCH_VARIABLE").unwrap().load(&ASK).unwrap_err();
    assert!(e.to_string().contains("LAMASSU_NO_SUCH_VARIABLE"), "{e}");
}

proptest! {
    #[test]
    fn arbitrary_texts_never_panic(text in "\\PC{0,40}", kind in 0usize..5, location in 0usize..7) {
        let _ = parse(&text);
        let kind = SlotKind::ALL[kind].name();
        let location = ["prompt", "file", "env", "stdin", "fd", "credential", "https"][location];
        if let Ok(source) = parse(&format!("{kind}:{location}:{text}")).map_err(|_| ())
            && location != "https"
        {
            prop_assert_eq!(source.to_string(), format!("{kind}:{location}:{text}"));
        }
    }
}
