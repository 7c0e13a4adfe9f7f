use super::client::finish;
use super::*;
use crate::Secret;
use data_encoding::HEXLOWER;
use serde_json::Value;

const VECTORS: &str = include_str!("../../../../testdata/vectors/voprf.json");

fn bytes(value: &Value) -> Vec<u8> {
    HEXLOWER.decode(value.as_str().expect("a string").as_bytes()).expect("hex")
}

fn array<const N: usize>(value: &Value) -> [u8; N] {
    bytes(value).try_into().expect("that long")
}

fn all<const N: usize>(value: &Value) -> Vec<[u8; N]> {
    value.as_array().expect("an array").iter().map(array).collect()
}

fn scalar(value: &Value) -> Scalar {
    Option::from(Scalar::from_canonical_bytes(array(value))).expect("a scalar")
}

fn vectors() -> (Value, ServerKey) {
    let vectors: Value = serde_json::from_str(VECTORS).expect("parses");
    let seed = Secret::new(&mut array(&vectors["Seed"]));
    let key = ServerKey::derive(&seed, &bytes(&vectors["KeyInfo"]));
    (vectors, key)
}

#[test]
fn rfc9497_vectors() {
    let (all_of, server) = vectors();
    assert_eq!(server.public(), &array(&all_of["pkSm"]));
    let public = PublicKey::parse(server.public()).expect("a key");
    let key = scalar(&all_of["skSm"]);
    assert_eq!(&key * curve25519_dalek::constants::RISTRETTO_BASEPOINT_TABLE, public.point());
    let cases = all_of["vectors"].as_array().expect("an array");
    assert_eq!(cases.len(), 3);
    for case in cases {
        let inputs: Vec<Vec<u8>> = case["Input"].as_array().expect("an array").iter().map(bytes).collect();
        let blinds: Vec<Scalar> = case["Blind"].as_array().expect("an array").iter().map(scalar).collect();
        let (blinded, evaluated) = (all(&case["BlindedElement"]), all(&case["EvaluationElement"]));
        // Blind of the RFC.
        for ((input, blind), element) in inputs.iter().zip(&blinds).zip(&blinded) {
            assert_eq!(&(hash_to_group(input) * blind).compress().to_bytes(), element);
        }
        let evaluation = server.evaluate_with(&blinded, scalar(&case["ProofRandomScalar"])).expect("evaluates");
        assert_eq!(evaluation, Evaluation { elements: evaluated, proof: array(&case["Proof"]) });
        let sent = parse_all(&blinded).expect("elements");
        let points = public.verified((&sent, &blinded), &evaluation).expect("verifies");
        let outputs: Vec<[u8; 64]> = all(&case["Output"]);
        for (((input, point), blind), output) in inputs.iter().zip(points).zip(&blinds).zip(&outputs) {
            assert_eq!(&finish(input, &(point * blind.invert())), output);
        }
        // And by the blinding that is used here: another message, the same outputs.
        let ours = public.blind(&inputs).expect("blinds");
        assert!(ours.elements().iter().zip(&blinded).all(|(ours, theirs)| ours != theirs));
        let evaluation = server.evaluate(ours.elements()).expect("evaluates");
        assert_eq!(*public.finalize(&inputs, &ours, &evaluation).expect("verifies"), outputs);
    }
}

#[test]
fn what_is_no_evaluation_is_refused() {
    let (_, server) = vectors();
    let other = ServerKey::derive(&Secret::new(&mut [9; 32]), b"another");
    let public = PublicKey::parse(server.public()).expect("a key");
    let inputs = [[1u8; 32], [2; 32], [3; 32]];
    let blinded = public.blind(&inputs).expect("blinds");
    let good = server.evaluate(blinded.elements()).expect("evaluates");
    let finalized = |evaluation: &Evaluation| public.finalize(&inputs, &blinded, evaluation).map(drop);
    assert_eq!(finalized(&good), Ok(()));
    assert_eq!(finalized(&other.evaluate(blinded.elements()).expect("evaluates")), Err(OprfError::Proof));
    for at in 0..64 {
        let mut changed = good.clone();
        changed.proof[at] ^= 1;
        assert_eq!(finalized(&changed), Err(OprfError::Proof), "byte {at}");
    }
    let mut swapped = good.clone();
    swapped.elements.swap(0, 1);
    assert_eq!(finalized(&swapped), Err(OprfError::Proof));
    let mut one_wrong = good.clone();
    one_wrong.elements[2] = good.elements[0];
    assert_eq!(finalized(&one_wrong), Err(OprfError::Proof));
    let identity = [0; 32];
    for bad in [identity, [0xff; 32]] {
        let mut changed = good.clone();
        changed.elements[1] = bad;
        assert_eq!(finalized(&changed), Err(OprfError::Element));
        assert!(matches!(server.evaluate(&[bad]), Err(server::EvaluateError::Oprf(OprfError::Element))));
        assert_eq!(PublicKey::parse(&bad).map(drop), Err(OprfError::Element));
    }
    let mut short = good.clone();
    short.elements.pop();
    assert_eq!(finalized(&short), Err(OprfError::Count));
    for count in [0, BATCH_MAX + 1] {
        let batch = vec![blinded.elements()[0]; count];
        assert!(matches!(server.evaluate(&batch), Err(server::EvaluateError::Oprf(OprfError::Count))));
    }
}

/// A machine that is resumed twice from one image of its memory draws the same random bytes for two batches.
#[test]
fn equal_random_bytes_for_two_batches_do_not_give_the_key_away() {
    let (all_of, server) = vectors();
    let key = scalar(&all_of["skSm"]);
    let public = PublicKey::parse(server.public()).expect("a key");
    let inputs = [[1u8; 32], [2; 32], [3; 32]];
    let blinded = public.blind(&inputs).expect("blinds");
    let of = blinded.elements();
    let batches = [&of[..1], &of[1..2], &of[..2], &[of[1], of[0]], of];
    let proofs = batches.map(|batch| {
        let evaluation = server.evaluate_drawing(batch, &[7; 64]).expect("evaluates");
        assert_eq!(server.evaluate_drawing(batch, &[7; 64]).expect("evaluates"), evaluation);
        assert_ne!(server.evaluate_drawing(batch, &[8; 64]).expect("evaluates").proof, evaluation.proof);
        let (scalars, _) = evaluation.proof.as_chunks::<32>();
        [0, 1].map(|at| Option::<Scalar>::from(Scalar::from_canonical_bytes(scalars[at])).expect("a scalar"))
    });
    for (at, [c, s]) in proofs.iter().enumerate() {
        for [other_c, other_s] in &proofs[at + 1..] {
            // s = r - c k.
            assert_ne!((s - other_s) * (other_c - c).invert(), key, "one r for both");
        }
    }
    let evaluation = server.evaluate_drawing(of, &[7; 64]).expect("evaluates");
    assert_eq!(public.finalize(&inputs, &blinded, &evaluation).map(drop), Ok(()));
    let evaluated = &evaluation.elements;
    let r = server.proof_nonce(&[7; 64], of, evaluated);
    let other = ServerKey::derive(&Secret::new(&mut [9; 32]), b"another");
    assert_ne!(other.proof_nonce(&[7; 64], of, evaluated), r);
    assert_ne!(server.proof_nonce(&[7; 64], &of[..1], &evaluated[..1]), r);
    assert_ne!(server.proof_nonce(&[7; 64], evaluated, of), r);
}

#[test]
fn blinded_elements_of_one_input_differ() {
    let (_, server) = vectors();
    let public = PublicKey::parse(server.public()).expect("a key");
    let blinded = public.blind(&[[7; 32]; 2]).expect("blinds");
    let again = public.blind(&[[7; 32]]).expect("blinds");
    let [a, b] = blinded.elements() else { panic!("two") };
    assert!(a != b && ![a, b].contains(&&again.elements()[0]));
    assert_eq!(format!("{public:?}"), "PublicKey");
    assert!(format!("{server:?}").contains("Secret<32>"));
}
