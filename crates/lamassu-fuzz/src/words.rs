//! Texts: stored names, key sources, mount options.

use lamassu_crypto::name::NameKey;
use lamassu_crypto::{Secret, SecretBytes};
use lamassu_format::header::{NameMode, SlotKind};
use lamassu_format::name::{self, Stored};
use lamassu_fuse::MountOptions;
use lamassu_keys::{KeySource, Material};

/// A stored name, and the same bytes as a plain one.
pub fn names(input: &[u8]) {
    if let Some(decoded) = name::decode(input) {
        assert_eq!(name::encode(&decoded).as_bytes(), input, "two texts for the same bytes");
        assert_eq!(name::encoded_len(decoded.len()), input.len());
    }
    for mode in [NameMode::Encrypted, NameMode::Plain] {
        let again = match name::classify(mode, input) {
            Stored::Sealed(sealed) => name::encode(&sealed),
            Stored::Long(hash) => name::long_name(&hash),
            Stored::Companion(hash) => name::companion_name(&hash),
            Stored::LinkRest(id) => name::link_rest_name(&id),
            Stored::Root | Stored::DirRecord | Stored::Plain | Stored::Foreign => continue,
        };
        assert_eq!(again.as_bytes(), input, "two stored names for the same thing");
    }
    if let Some(sealed) = name::parse_xattr_name(input) {
        assert_eq!(name::xattr_name(&sealed).as_bytes(), input);
    }
    let key = NameKey::new(&Secret::new(&mut [9; 32]), [10; 16]);
    assert!(key.open(input).is_err(), "nobody can forge a name");
    for mode in [NameMode::Encrypted, NameMode::Plain] {
        if name::check_name(mode, input, 255).is_err() {
            continue;
        }
        assert!(!input.is_empty() && input.len() <= 255 && !input.contains(&b'/') && !input.contains(&0));
        let sealed = key.seal(input);
        assert_eq!(key.open(&sealed).expect("it was sealed so"), input);
        let stored = name::entry_name(&sealed, 255).unwrap_or_else(|| name::long_name(&NameKey::hash(&sealed)));
        assert!(stored.len() <= 255);
        assert!(matches!(name::classify(NameMode::Encrypted, stored.as_bytes()), Stored::Sealed(_) | Stored::Long(_)));
    }
}

/// A key source: refused, or written again letter for letter. Never loaded: that would read files.
pub fn source(input: &[u8]) {
    for kind in SlotKind::ALL {
        if let Ok(material) = Material::new(kind, SecretBytes::new(input.to_vec())) {
            assert_eq!(material.kind(), kind);
        }
    }
    let Ok(text) = std::str::from_utf8(input) else { return };
    match text.parse::<KeySource>() {
        Ok(source) => {
            assert_eq!(source.to_string(), text);
            let at_server = ["kmip:", "server:"].iter().any(|scheme| text.starts_with(scheme));
            assert!(at_server || text.starts_with(source.kind().name()));
        }
        // It may be a passphrase typed in the wrong place.
        Err(e) => assert!(text.len() < 24 || !e.to_string().contains(text), "the error repeats the text"),
    }
}

/// Mount options: within their bounds whatever was asked for.
pub fn options(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let mut options = MountOptions::default();
    let done = options.apply(text);
    assert!((1..=64).contains(&options.threads) && options.read_ahead_kib <= 1 << 20);
    assert!(!options.subtype.is_empty() && options.subtype.bytes().all(|b| b.is_ascii_graphic() && b != b','));
    assert!(!options.fsname.contains(','));
    if done.is_ok() {
        let mut again = MountOptions::default();
        again.apply(text).expect("the same words");
        assert_eq!(again, options);
    }
}
