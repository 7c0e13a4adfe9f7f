//! The KMIP operations for keys: Locate, Get Attributes, Get, Create, Add Attribute, Activate, Revoke, Destroy (KMIP
//! 1.2 §4).

use super::client::{Answer, Operation, Session};
use super::ttlv::{Item, Malformed, Writer, tag};
use crate::fault::{KeyState, ServerFault};
use lamassu_crypto::Secret;

/// Bytes of a usable key.
const KEY_LEN: usize = 32;
/// Longest identifier that is accepted from a server, in bytes.
const ID_MAX: usize = 255;
/// More than one is ambiguous.
const FOUND_MAX: i32 = 2;

/// Enumerations of §9.1.3.2.
mod number {
    pub const SYMMETRIC_KEY: u32 = 2;
    pub const AES: u32 = 3;
    pub const UNINTERPRETED_TEXT: u32 = 1;
    pub const CESSATION_OF_OPERATION: u32 = 6;
    pub const FORMAT_RAW: u32 = 1;
    pub const FORMAT_TRANSPARENT_SYMMETRIC: u32 = 7;
}

/// The uses of a key (§9.1.3.3.1).
#[derive(Clone, Copy)]
pub(super) enum Usage {
    /// it wraps another key
    Wrap = 0x10 | 0x20,
    /// it encrypts and decrypts
    Encrypt = 0x04 | 0x08,
}

/// An attribute that a key is found by, or made with.
#[derive(Clone, Copy)]
pub(super) enum Attribute<'a> {
    /// Name
    Name(&'a str),
    /// Object Group
    Group(&'a str),
    /// Application Specific Information: namespace and data
    Application(&'a str, &'a str),
    /// a custom attribute, an Integer
    Custom(&'a str, i32),
}

impl Attribute<'_> {
    fn write(self, w: &mut Writer) {
        match self {
            Attribute::Name(name) => attribute(w, "Name", |w| {
                w.structure(tag::ATTRIBUTE_VALUE, |w| {
                    w.text(tag::NAME_VALUE, name);
                    w.enumeration(tag::NAME_TYPE, number::UNINTERPRETED_TEXT);
                });
            }),
            Attribute::Group(group) => attribute(w, "Object Group", |w| w.text(tag::ATTRIBUTE_VALUE, group)),
            Attribute::Application(namespace, data) => attribute(w, "Application Specific Information", |w| {
                w.structure(tag::ATTRIBUTE_VALUE, |w| {
                    w.text(tag::APPLICATION_NAMESPACE, namespace);
                    w.text(tag::APPLICATION_DATA, data);
                });
            }),
            Attribute::Custom(name, value) => attribute(w, name, |w| w.integer(tag::ATTRIBUTE_VALUE, value)),
        }
    }
}

fn attribute(w: &mut Writer, name: &str, value: impl FnOnce(&mut Writer)) {
    w.structure(tag::ATTRIBUTE, |w| {
        w.text(tag::ATTRIBUTE_NAME, name);
        value(w);
    });
}

impl Session {
    /// The one object with these attributes.
    pub(super) fn locate(&mut self, attributes: &[Attribute<'_>]) -> Result<String, ServerFault> {
        let answer = self.call(Operation::Locate, |w| {
            w.integer(tag::MAXIMUM_ITEMS, FOUND_MAX);
            attributes.iter().for_each(|a| a.write(w));
        })?;
        located(&answer)
    }

    /// The state of a key.
    pub(super) fn state(&mut self, id: &str) -> Result<KeyState, ServerFault> {
        let answer = self.call(Operation::GetAttributes, |w| {
            w.text(tag::UNIQUE_IDENTIFIER, id);
            w.text(tag::ATTRIBUTE_NAME, "State");
        })?;
        state(&answer)
    }

    /// Gets a key of 32 bytes.
    pub(super) fn get(&mut self, id: &str) -> Result<Secret<32>, ServerFault> {
        let answer = self.call(Operation::Get, |w| w.text(tag::UNIQUE_IDENTIFIER, id))?;
        key(&answer)
    }

    /// Makes a key of 32 bytes at the server. Returns its identifier. It is not active yet.
    pub(super) fn create(&mut self, usage: Usage, attributes: &[Attribute<'_>]) -> Result<String, ServerFault> {
        let answer = self.call(Operation::Create, |w| {
            w.enumeration(tag::OBJECT_TYPE, number::SYMMETRIC_KEY);
            w.structure(tag::TEMPLATE_ATTRIBUTE, |w| {
                attribute(w, "Cryptographic Algorithm", |w| w.enumeration(tag::ATTRIBUTE_VALUE, number::AES));
                attribute(w, "Cryptographic Length", |w| w.integer(tag::ATTRIBUTE_VALUE, 8 * KEY_LEN as i32));
                attribute(w, "Cryptographic Usage Mask", |w| w.integer(tag::ATTRIBUTE_VALUE, usage as i32));
                attributes.iter().for_each(|a| a.write(w));
            });
        })?;
        identifier(answer.payload()?.child(tag::UNIQUE_IDENTIFIER)?)
    }

    /// Adds an attribute to a key.
    pub(super) fn add(&mut self, id: &str, extra: Attribute<'_>) -> Result<(), ServerFault> {
        let answer = self.call(Operation::AddAttribute, |w| {
            w.text(tag::UNIQUE_IDENTIFIER, id);
            extra.write(w);
        })?;
        answer.payload().map(drop)
    }

    /// Activates a key.
    pub(super) fn activate(&mut self, id: &str) -> Result<(), ServerFault> {
        let answer = self.call(Operation::Activate, |w| w.text(tag::UNIQUE_IDENTIFIER, id))?;
        answer.payload().map(drop)
    }
}

impl Session {
    /// Revokes a key: an active one cannot be destroyed.
    pub(super) fn revoke(&mut self, id: &str) -> Result<(), ServerFault> {
        let answer = self.call(Operation::Revoke, |w| {
            w.text(tag::UNIQUE_IDENTIFIER, id);
            w.structure(tag::REVOCATION_REASON, |w| {
                w.enumeration(tag::REVOCATION_REASON_CODE, number::CESSATION_OF_OPERATION);
            });
        })?;
        answer.payload().map(drop)
    }

    /// Destroys a key.
    pub(super) fn destroy(&mut self, id: &str) -> Result<(), ServerFault> {
        let answer = self.call(Operation::Destroy, |w| w.text(tag::UNIQUE_IDENTIFIER, id))?;
        answer.payload().map(drop)
    }
}

/// An identifier that can be shown and sent back.
fn identifier(item: Item<'_>) -> Result<String, ServerFault> {
    let text = item.text()?;
    if text.is_empty() || text.len() > ID_MAX || text.contains(char::is_control) {
        return Err(Malformed::Lacks { tag: tag::UNIQUE_IDENTIFIER }.into());
    }
    Ok(text.into())
}

fn located(answer: &Answer) -> Result<String, ServerFault> {
    let mut found = Vec::new();
    for item in answer.payload()?.children()? {
        let item = item?;
        if item.is(tag::UNIQUE_IDENTIFIER) {
            found.push(identifier(item)?);
        }
    }
    match (found.pop(), found.len()) {
        (Some(id), 0) => Ok(id),
        (None, _) => Err(ServerFault::NoObject),
        (Some(_), _) => Err(ServerFault::ManyObjects),
    }
}

fn state(answer: &Answer) -> Result<KeyState, ServerFault> {
    for item in answer.payload()?.children()? {
        let item = item?;
        if item.is(tag::ATTRIBUTE) && item.child(tag::ATTRIBUTE_NAME)?.text()? == "State" {
            return Ok(KeyState::of(item.child(tag::ATTRIBUTE_VALUE)?.enumeration()?));
        }
    }
    // An object without a state, for example a certificate request or opaque data, is not a key.
    Err(ServerFault::NoState)
}

fn key(answer: &Answer) -> Result<Secret<32>, ServerFault> {
    let payload = answer.payload()?;
    let object_type = payload.child(tag::OBJECT_TYPE)?.enumeration()?;
    if object_type != number::SYMMETRIC_KEY {
        return Err(ServerFault::NotAKey { object_type });
    }
    let block = payload.child(tag::SYMMETRIC_KEY)?.child(tag::KEY_BLOCK)?;
    let format = block.child(tag::KEY_FORMAT_TYPE)?.enumeration()?;
    if block.find(tag::KEY_WRAPPING_DATA)?.is_some() {
        return Err(ServerFault::KeyFormat { format });
    }
    let material = block.child(tag::KEY_VALUE)?.child(tag::KEY_MATERIAL)?;
    let bytes = match format {
        number::FORMAT_RAW => material.bytes()?,
        number::FORMAT_TRANSPARENT_SYMMETRIC => material.child(tag::KEY)?.bytes()?,
        _ => return Err(ServerFault::KeyFormat { format }),
    };
    Secret::from_slice(bytes).ok_or(ServerFault::KeyLength { found: bytes.len() })
}

/// For [`crate::testing`].
#[cfg(feature = "testing")]
pub(crate) fn take_answers(bytes: &[u8]) -> (Option<String>, bool, Option<Secret<32>>) {
    let answer = |operation| Answer::of(operation, bytes.to_vec());
    let id = located(&answer(Operation::Locate)).ok();
    let has_state = state(&answer(Operation::GetAttributes)).is_ok();
    (id, has_state, key(&answer(Operation::Get)).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An answer that says yes, with a payload.
    fn answer(operation: Operation, fill: impl FnOnce(&mut Writer)) -> Answer {
        Answer::of(operation, message(operation, fill))
    }

    fn message(operation: Operation, fill: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let mut w = Writer::default();
        w.structure(tag::RESPONSE_MESSAGE, |w| {
            w.structure(tag::BATCH_ITEM, |w| {
                w.enumeration(tag::OPERATION, operation as u32);
                w.enumeration(tag::RESULT_STATUS, 0);
                w.structure(tag::RESPONSE_PAYLOAD, fill);
            });
        });
        w.finish()
    }

    /// What PyKMIP does not take, byte for byte as §9.1 says it: an Attribute of a name and an Integer.
    #[test]
    fn the_papers_attribute_is_an_integer() {
        let mut w = Writer::default();
        Attribute::Custom("x-Isolation-Zone", -7).write(&mut w);
        let bytes = w.finish();
        let (item, rest) = Item::split(&bytes).unwrap();
        assert!(rest.is_empty() && item.is(tag::ATTRIBUTE));
        assert_eq!(item.child(tag::ATTRIBUTE_NAME).unwrap().text(), Ok("x-Isolation-Zone"));
        assert_eq!(item.child(tag::ATTRIBUTE_VALUE).unwrap().integer(), Ok(-7));
    }

    fn refusal(reason: u32, said: &str) -> ServerFault {
        let mut w = Writer::default();
        w.structure(tag::RESPONSE_MESSAGE, |w| {
            w.structure(tag::BATCH_ITEM, |w| {
                w.enumeration(tag::RESULT_STATUS, 1);
                w.enumeration(tag::RESULT_REASON, reason);
                w.text(tag::RESULT_MESSAGE, said);
            });
        });
        Answer::of(Operation::Get, w.finish()).payload().err().unwrap()
    }

    #[test]
    fn refusals_are_told_apart() {
        assert!(matches!(refusal(1, ""), ServerFault::NoObject));
        assert!(matches!(refusal(3, ""), ServerFault::NotPermitted { op: "get the key" }));
        assert!(matches!(refusal(12, ""), ServerFault::NotPermitted { .. }));
        assert!(matches!(refusal(0x36, ""), ServerFault::KeyState(KeyState::Destroyed)));
        let long = refusal(0x100, &format!("\u{1b}[2Joh\n{}", "y".repeat(5000)));
        let text = long.to_string();
        assert!(text.contains("get the key") && text.contains("oh") && text.contains("0x100"), "{text}");
        assert!(text.len() < 400 && !text.contains(char::is_control), "{text}");
    }

    #[test]
    fn states() {
        let state_of = |name: &str, number| {
            state(&answer(Operation::GetAttributes, |w| {
                attribute(w, "Name", |w| w.structure(tag::ATTRIBUTE_VALUE, |_| {}));
                attribute(w, name, |w| w.enumeration(tag::ATTRIBUTE_VALUE, number));
            }))
        };
        assert_eq!(state_of("State", 2).unwrap(), KeyState::Active);
        assert_eq!(state_of("State", 5).unwrap(), KeyState::Destroyed);
        assert_eq!(state_of("State", 77).unwrap(), KeyState::Unknown(77));
        assert!(matches!(state_of("Rate", 2), Err(ServerFault::NoState)));
    }

    fn block(w: &mut Writer, format: u32, material: impl FnOnce(&mut Writer)) {
        w.structure(tag::SYMMETRIC_KEY, |w| {
            w.structure(tag::KEY_BLOCK, |w| {
                w.enumeration(tag::KEY_FORMAT_TYPE, format);
                w.structure(tag::KEY_VALUE, material);
            });
        });
    }

    fn key_of(object_type: u32, format: u32, material: impl FnOnce(&mut Writer)) -> Result<Secret<32>, ServerFault> {
        key(&answer(Operation::Get, |w| {
            w.enumeration(tag::OBJECT_TYPE, object_type);
            w.text(tag::UNIQUE_IDENTIFIER, "7");
            block(w, format, material);
        }))
    }

    #[test]
    fn keys_in_each_form() {
        let raw = key_of(2, 1, |w| w.bytes(tag::KEY_MATERIAL, &[7; 32])).unwrap();
        assert_eq!(raw.expose(), &[7; 32]);
        let transparent = key_of(2, 7, |w| w.structure(tag::KEY_MATERIAL, |w| w.bytes(tag::KEY, &[8; 32]))).unwrap();
        assert_eq!(transparent.expose(), &[8; 32]);
        let short = key_of(2, 1, |w| w.bytes(tag::KEY_MATERIAL, &[7; 16])).err().unwrap();
        assert!(matches!(short, ServerFault::KeyLength { found: 16 }));
        assert!(matches!(key_of(7, 1, |_| {}), Err(ServerFault::NotAKey { object_type: 7 })));
        assert!(matches!(
            key_of(2, 3, |w| w.bytes(tag::KEY_MATERIAL, &[7; 32])),
            Err(ServerFault::KeyFormat { format: 3 })
        ));
        assert!(matches!(key_of(2, 1, |w| w.text(tag::KEY_MATERIAL, "x")), Err(ServerFault::Protocol { .. })));
    }

    #[test]
    fn one_object_is_meant() {
        let of = |ids: &[&str]| {
            located(&answer(Operation::Locate, |w| ids.iter().for_each(|i| w.text(tag::UNIQUE_IDENTIFIER, i))))
        };
        assert_eq!(of(&["17"]).unwrap(), "17");
        assert!(matches!(of(&[]), Err(ServerFault::NoObject)));
        assert!(matches!(of(&["1", "2"]), Err(ServerFault::ManyObjects)));
        for bad in ["", "a\nb", &"x".repeat(256)] {
            assert!(matches!(of(&[bad]), Err(ServerFault::Protocol { .. })), "{bad:?}");
        }
    }

    proptest! {
        /// A server that answers whatever it likes: an error at the worst.
        #[test]
        fn hostile_answers_never_panic(at in any::<prop::sample::Index>(), with in any::<u8>(), cut in any::<prop::sample::Index>(), junk in prop::collection::vec(any::<u8>(), 0..200)) {
            let good = message(Operation::Get, |w| {
                w.enumeration(tag::OBJECT_TYPE, 2);
                w.text(tag::UNIQUE_IDENTIFIER, "7");
                attribute(w, "State", |w| w.enumeration(tag::ATTRIBUTE_VALUE, 2));
                block(w, 1, |w| w.bytes(tag::KEY_MATERIAL, &[7; 32]));
            });
            let mut changed = good.clone();
            changed[at.index(good.len())] = with;
            let mut cut = good[..cut.index(good.len())].to_vec();
            cut.extend_from_slice(&junk);
            for bytes in [changed, cut, junk] {
                let answer = Answer::of(Operation::Get, bytes);
                let _ = (key(&answer).is_ok(), state(&answer).is_ok(), located(&answer).is_ok());
            }
        }
    }
}
