//! Keys that a server keeps: their names and addresses, as hosts and people write them; how they are wrapped, as the
//! server's disk has it. What hosts have evaluated.

use crate::bytes::Bytes;
use lamassu_crypto::oprf::{BATCH_MAX, Evaluation, PublicKey, ServerKey};
use lamassu_crypto::{Secret, SecretBytes};
use lamassu_format::header::SlotKind;
use lamassu_keys::providers::server::is_name;
use lamassu_keys::{KeySource, Material};
use lamassu_rpc::convert;
use lamassu_server::keys::Master;
use lamassu_server::state::Key;
use std::sync::OnceLock;

/// What is wrapped under one master key.
fn master() -> &'static (String, Master) {
    static MASTER: OnceLock<(String, Master)> = OnceLock::new();
    MASTER.get_or_init(|| Master::make(&material()).expect("randomness"))
}

fn material() -> Material {
    Material::new(SlotKind::Raw, SecretBytes::new(vec![5; 32])).expect("a key")
}

/// The first byte says what the rest is: a name and an address; a row of the state; a wrapped key; what holds the
/// master key, or a change of the one there is.
pub fn served_keys(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    let mode = bytes.u8();
    match mode % 5 {
        0 => {
            let Ok(text) = std::str::from_utf8(bytes.rest()) else { return };
            let source = format!("server://keeper.example/{text}").parse::<KeySource>();
            assert_eq!(source.is_ok(), is_name(text), "a name that cannot be written, or an address without one");
            assert!(
                !is_name(text) || !text.contains(['/', '\\', '\0', ' ']) && !text.starts_with('.') && text.len() < 64
            );
        }
        1 => {
            let Ok(key) = serde_json::from_slice::<Key>(bytes.rest()) else { return };
            let row = serde_json::to_vec(&key).expect("memory takes everything");
            assert_eq!(serde_json::from_slice::<Key>(&row).expect("what was written reads"), key);
            if let Some(kept) = key.kept() {
                assert!(master().1.unwrap("a", kept.wrapped()).is_none(), "nobody can forge a key");
            }
        }
        2 => {
            let Ok(wrapped) = std::str::from_utf8(bytes.rest()) else { return };
            assert!(master().1.unwrap("a", wrapped).is_none(), "nobody can forge a key");
        }
        3 => {
            let Ok(zone) = std::str::from_utf8(bytes.rest()) else { return };
            assert!(Master::open(zone, &material()).is_err(), "nobody can forge what holds a master key");
        }
        _ => {
            let (at, flip) = (usize::from(bytes.u16()), bytes.u8());
            let key = Secret::new(&mut [7; 32]);
            let mut wrapped = master().1.wrap("a", &key).expect("randomness").into_bytes();
            let at = at % wrapped.len();
            wrapped[at] ^= flip & 0x7f;
            let opened = std::str::from_utf8(&wrapped).ok().and_then(|wrapped| master().1.unwrap("a", wrapped));
            assert_eq!(opened.is_some(), flip & 0x7f == 0, "a changed key opens");
        }
    }
}

/// The first byte says what the rest is: elements that a host wants evaluated, or a server's answer to one.
pub fn evaluations(input: &[u8]) {
    static KEYS: OnceLock<(ServerKey, PublicKey)> = OnceLock::new();
    let (server, public) = KEYS.get_or_init(|| {
        let server = ServerKey::derive(&Secret::new(&mut [6; 32]), b"fuzz");
        let public = PublicKey::parse(server.public()).expect("a server's own key");
        (server, public)
    });
    let mut bytes = Bytes::new(input);
    let mode = bytes.u8();
    let rest = bytes.rest();
    if mode.is_multiple_of(2) {
        let Ok(elements) = convert::elements(rest) else {
            assert!(rest.is_empty() || !rest.len().is_multiple_of(32) || rest.len() > 32 * BATCH_MAX);
            return;
        };
        let elements = &elements[..elements.len().min(4)];
        if let Ok(evaluation) = server.evaluate(elements) {
            assert_eq!(evaluation.elements.len(), elements.len());
            // What is evaluated is of the group: it is evaluated again.
            assert!(server.evaluate(&evaluation.elements).is_ok());
        }
        return;
    }
    let inputs = [[1; 32], [2; 32]];
    let blinded = public.blind(&inputs).expect("randomness");
    let (elements, rest) = rest.as_chunks::<32>();
    let mut proof = [0; 64];
    proof[..rest.len()].copy_from_slice(rest);
    let honest = server.evaluate(blinded.elements()).expect("a server's own evaluation");
    assert!(public.finalize(&inputs, &blinded, &honest).is_ok());
    let forged = Evaluation { elements: elements.to_vec(), proof };
    assert!(public.finalize(&inputs, &blinded, &forged).is_err(), "nobody can forge an answer");
    let other = Evaluation { proof, ..honest };
    assert!(public.finalize(&inputs, &blinded, &other).is_err(), "nobody can forge a proof");
}
