//! Known answers for every primitive (Z13). They run when asked for, and cost nothing otherwise.
//!
//! The test runs on the kernels that this process uses. The answers are from the standards named at each, and from
//! `testdata/vectors/`.

use crate::aead::Aead;
use crate::argon::argon2id;
use crate::hex::hex;
use crate::kernel::{AES_128, AES_256, Kernel};
use crate::name::{siv_open, siv_seal};
use crate::oprf::{Element, PublicKey, ServerKey};
use crate::suite::chacha::XChaCha;
use crate::suite::{CipherSuite, KnownAnswer};
use crate::xaes::Xaes;
use crate::{Engine, InnerKey, KeyRing, Keyed, Provider, Salts, Secret, Suite, Verify, sign, wrap};
use chacha20::ChaCha20;
use chacha20::cipher::{KeyIvInit, StreamCipher};
use lamassu_format::header::Argon2Params;

/// What gave a wrong answer. Nothing this process encrypts or decrypts can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "self-test failed: {primitive} gave a wrong answer on kernel {kernel:?}; use LAMASSU_CPU=portable to see whether the processor is at fault, and do not write with this program"
)]
pub struct SelfTestFailure {
    /// What failed: a primitive, or a suite from block to key to ciphertext and back.
    pub primitive: &'static str,
    /// On which kernel.
    pub kernel: Kernel,
}

/// A test of one primitive, and whether it passes.
type Test = (&'static str, fn(Kernel) -> bool);

/// The test whether the FIPS module is in its approved mode: its own self-tests have passed.
const MODULE: &str = "FIPS mode";

/// Runs every known answer, for a process that may use only approved primitives.
///
/// # Errors
/// As [`run_on`]; and "FIPS mode" if the FIPS module is built in and was not installed.
pub fn run_approved() -> Result<(), SelfTestFailure> {
    let kernel = Kernel::best();
    match Provider::current() == Provider::APPROVED {
        true => run_on(kernel),
        false => Err(SelfTestFailure { primitive: MODULE, kernel }),
    }
}

/// Runs every known answer on a kernel of choice.
///
/// # Errors
/// The first that was wrong.
pub fn run_on(kernel: Kernel) -> Result<(), SelfTestFailure> {
    let mut failed = None;
    each_on(kernel, |primitive, passed| {
        if !passed {
            failed.get_or_insert(primitive);
        }
    });
    failed.map_or(Ok(()), |primitive| Err(SelfTestFailure { primitive, kernel }))
}

/// Every test on a kernel of choice, and whether it passed.
pub fn each_on(kernel: Kernel, mut report: impl FnMut(&'static str, bool)) {
    let generator = match kernel.provider() {
        Provider::Own => "getrandom",
        #[cfg(feature = "fips")]
        Provider::Module => "DRBG",
    };
    let tests: [Test; 17] = [
        ("SHA-256", sha256),
        ("HMAC-SHA-256", hmac),
        ("HKDF-SHA-256", hkdf),
        ("AES-256", aes256),
        ("AES-256-CBC", cbc),
        ("AES-256-CTR", ctr),
        ("AES-128-CBC", cbc_128),
        ("AES-128-CTR", ctr_128),
        ("ChaCha20", chacha20),
        ("BLAKE3", blake3),
        ("XAES-256-GCM", xaes),
        ("XChaCha20-Poly1305", xchacha),
        ("AES-SIV", siv),
        ("Argon2id", argon),
        ("Ed25519", ed25519),
        ("VOPRF", voprf),
        (generator, random),
    ];
    #[cfg(feature = "fips")]
    if kernel.provider() == Provider::Module {
        report(MODULE, crate::module::is_approved());
    }
    for (primitive, passes) in tests {
        report(primitive, passes(kernel));
    }
    for s in Suite::ALL {
        let suite = CipherSuite::of(s);
        for answer in suite.known_answers {
            report(answer.name, suite_passes(kernel, suite, answer));
        }
    }
}

/// FIPS 180-2, Appendix B.1, over more messages than any kernel has lanes.
fn sha256(kernel: Kernel) -> bool {
    let mut out = [[0; 32]; 19];
    kernel.sha256(&[&b"abc"[..]; 19], &mut out);
    out == [hex("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"); 19]
}

/// RFC 4868 §2.7.1, AUTH256-1.
fn hmac(kernel: Kernel) -> bool {
    wrap::hmac_by(kernel.provider(), &Secret::new(&mut [0x0b; 32]), &[b"Hi There"])
        == hex("198a607eb44bfbc69903a0f1cf2bbdc5ba0aa3f3d9ae3c1c7a3b1696a0b68cf7")
}

/// RFC 5869, A.3 (the first 32 bytes).
fn hkdf(kernel: Kernel) -> bool {
    wrap::hkdf_by::<32>(kernel.provider(), &[0x0b; 22], b"", b"").expose()
        == &hex("8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d")
}

/// RFC 9497 A.1.2, test 2: blinds and proofs are random, so the server's key and the output are the known answers.
fn voprf(_: Kernel) -> bool {
    let server = ServerKey::derive(&Secret::new(&mut [0xa3; 32]), b"test key");
    let public: Element = hex("c803e2cc6b05fc15064549b5920659ca4a77b2cca6f04f6b357009335476ad4e");
    let output: ([u8; 32], [u8; 32]) = (
        hex("8a9a2f3c7f085b65933594309041fc1898d42d0858e59f90814ae90571a6df60"),
        hex("356f4610bf816f27afdd84f47719e480906d27ecd994985890e5f539e7ea74b6"),
    );
    let inputs = [[0x5a; 17]];
    let evaluated = || {
        let known = PublicKey::parse(&public).ok()?;
        let blinded = known.blind(&inputs).ok()?;
        let evaluation = server.evaluate(blinded.elements()).ok()?;
        let outputs = known.finalize(&inputs, &blinded, &evaluation).ok()?;
        let mut forged = evaluation;
        forged.proof[40] ^= 1;
        Some((outputs[0], known.finalize(&inputs, &blinded, &forged).is_err()))
    };
    let both: [[u8; 32]; 2] = output.into();
    server.public() == &public
        && evaluated().is_some_and(|(found, is_refused)| found[..] == *both.as_flattened() && is_refused)
}

/// RFC 8032 §7.1, test 1: deterministic, so the signature is a known answer too.
fn ed25519(_: Kernel) -> bool {
    let seed = Secret::new(&mut hex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"));
    let public = hex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
    let (r, s): ([u8; 32], [u8; 32]) = (
        hex("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"),
        hex("5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"),
    );
    let mut signature = [0; 64];
    signature[..32].copy_from_slice(&r);
    signature[32..].copy_from_slice(&s);
    sign::public(&seed) == public
        && sign::sign(&seed, b"") == signature
        && sign::verify(&public, b"", &signature).is_ok()
        && sign::verify(&public, b"x", &signature).is_err()
}

const SP800_38A_KEY: [u8; 32] = hex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4");
const SP800_38A_PLAIN: [u8; 16] = hex("6bc1bee22e409f96e93d7e117393172a");

/// SP 800-38A, F.1.5.
fn aes256(kernel: Kernel) -> bool {
    let mut blocks = [SP800_38A_PLAIN; 19];
    kernel.ecb_encrypt(&kernel.expand(&SP800_38A_KEY), &mut blocks);
    blocks == [hex("f3eed1bdb5d2a03c064b5a7e3db181f8"); 19]
}

/// SP 800-38A, F.2.5.
fn cbc(kernel: Kernel) -> bool {
    cbc_passes::<AES_256>(
        kernel,
        &SP800_38A_KEY,
        hex("f58c4c04d6e5f1ba779eabfb5f7bfbd69cfc4e967edb808d679f777bc6702c7d"),
    )
}

/// SP 800-38A, F.2.1. The bytes behind the key are not part of it.
fn cbc_128(kernel: Kernel) -> bool {
    let key = hex("2b7e151628aed2a6abf7158809cf4f3cffffffffffffffffffffffffffffffff");
    cbc_passes::<AES_128>(kernel, &key, hex("7649abac8119b246cee98e9b12e9197d5086cb9b507219ee95db113a917678b2"))
}

/// The first two blocks of SP 800-38A, F.2. Its IV is XORed into the first.
fn cbc_passes<const N: usize>(kernel: Kernel, key: &[u8; 32], sealed: [u8; 32]) -> bool {
    let iv: [u8; 16] = hex("000102030405060708090a0b0c0d0e0f");
    let mut plain: [u8; 32] = hex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51");
    plain.iter_mut().zip(iv).for_each(|(p, i)| *p ^= i);
    let mut lanes = [plain; 19];
    kernel.cbc_encrypt::<N>(&[*key; 19], &mut lanes.each_mut().map(|l| &mut l[..]));
    let is_sealed = lanes == [sealed; 19];
    lanes.iter_mut().for_each(|l| kernel.cbc_decrypt::<N>(key, l));
    is_sealed && lanes == [plain; 19]
}

/// AES-256 of the counters 0 and 1 under a zero key (NIST AESAVS, GFSbox key; the second by
/// `testdata/vectors/generate.py`).
fn ctr(kernel: Kernel) -> bool {
    let mut data = [0; 32];
    kernel.ctr::<AES_256>(&[0; 32], &mut data);
    data == hex("dc95c078a2408989ad48a21492842087530f8afbc74536b9a963b4f1c4cb738b")
}

/// AES-128 of the counters 0 and 1 under a zero key: H and the mask of the tag of the first test case of the GCM
/// specification (McGrew, Viega).
fn ctr_128(kernel: Kernel) -> bool {
    let mut data = [0; 32];
    kernel.ctr::<AES_128>(&[0; 32], &mut data);
    data == hex("66e94bd4ef8a2c3b884cfa59ca342b2e58e2fccefa7e3061367f1d57a4e7455a")
}

/// RFC 8439, A.1, test vector 3 begins at counter 1; this is test vector 1: zero key, zero nonce, counter 0.
fn chacha20(_: Kernel) -> bool {
    let mut data = [0; 32];
    ChaCha20::new(&[0; 32].into(), &[0; 12].into()).apply_keystream(&mut data);
    data == hex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
}

/// The BLAKE3 test vectors, keyed, empty input.
fn blake3(_: Kernel) -> bool {
    blake3::keyed_hash(b"whats the Elvish word for friend", b"").as_bytes()
        == &hex("92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26")
}

/// C2SP XAES-256-GCM, second test vector.
fn xaes(kernel: Kernel) -> bool {
    let key = Xaes::by(kernel.provider(), &Secret::new(&mut [3; 32]));
    let (nonce, aad) = (b"ABCDEFGHIJKLMNOPQRSTUVWX", b"c2sp.org/XAES-256-GCM");
    let mut content = *b"XAES-256-GCM";
    let tag = key.seal(nonce, aad, &mut content);
    let sealed = content == hex("986ec1832593df5443a17943") && tag == hex("7fd083bf3fdb41abd740a21f71eb769d");
    sealed && key.open(nonce, aad, &mut content, &tag).is_ok() && key.open(nonce, b"", &mut content, &tag).is_err()
}

/// draft-irtf-cfrg-xchacha-03, A.3.1: the tag covers all of the ciphertext.
fn xchacha(_: Kernel) -> bool {
    let key = XChaCha::new(&Secret::new(&mut std::array::from_fn(|i| 0x80 + i as u8)));
    let nonce = std::array::from_fn(|i| 0x40 + i as u8);
    let aad: [u8; 12] = hex("50515253c0c1c2c3c4c5c6c7");
    let mut content =
        *b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would be it.";
    let tag = key.seal(&nonce, &aad, &mut content);
    let sealed = tag == hex("c0875924c1c7987947deafd8780acf49");
    sealed && key.open(&nonce, &aad, &mut content, &tag).is_ok() && key.open(&nonce, b"", &mut content, &tag).is_err()
}

/// RFC 5297, A.1 with the AES-256 keys of the Miscreant project's vectors.
fn siv(_: Kernel) -> bool {
    let mut key = hex(concat!(
        "fffefdfcfbfaf9f8f7f6f5f4f3f2f1f06f6e6d6c6b6a69686766656463626160",
        "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff000102030405060708090a0b0c0d0e0f"
    ));
    let key = Secret::<64>::new(&mut key);
    let aad: [u8; 24] = hex("101112131415161718191a1b1c1d1e1f2021222324252627");
    let sealed = siv_seal(&key, &aad, &hex::<14>("112233445566778899aabbccddee"));
    let expected: [u8; 30] = hex("f125274c598065cfc26b0e71575029088b035217e380cac8919ee800c126");
    sealed == expected && siv_open(&key, &aad, &sealed).is_ok() && siv_open(&key, b"", &sealed).is_err()
}

/// `testdata/vectors/slots.json`, slot 7.
fn argon(_: Kernel) -> bool {
    let salt = hex("8fe7eb2cdb7fe390aa71eed31c1a7753611904d787dfb14bde8037219f390112");
    let cost = Argon2Params::new(64, 3, 2);
    cost.and_then(|cost| argon2id(b"correct horse battery staple", &salt, cost))
        .is_some_and(|s| s.expose() == &hex("67b97f2e7aad443ac68d5ea719e3e4351f8bca441029e737192ebccae8daecad"))
}

fn random(kernel: Kernel) -> bool {
    let (mut a, mut b) = ([0; 32], [0; 32]);
    let fill = |buf: &mut [u8; 32]| crate::random_by(kernel.provider(), buf).is_ok();
    fill(&mut a) && fill(&mut b) && a != b && a != [0; 32]
}

fn suite_passes(kernel: Kernel, suite: &CipherSuite, answer: &KnownAnswer) -> bool {
    let &KnownAnswer { method, key, ciphertext, .. } = answer;
    let (mut k_in, salts) = (suite.known_k_in, Salts::EMPTY.by(method));
    let k_in = [Secret::new(&mut k_in)];
    let ring = KeyRing::with_kernel(suite.id, &k_in, &[Secret::new(&mut [0; 32])], kernel);
    let inner: &InnerKey = &ring.inner();
    let (mut blocks, mut keys) = (vec![0; 19 * 4096], [[0; 32]; 19]);
    inner.seal(salts, &mut blocks, 4096, &mut keys);
    let mut digests = [[0; 32]; 19];
    let ciphertexts: Vec<&[u8]> = blocks.chunks(4096).collect();
    kernel.sha256(&ciphertexts, &mut digests);
    if keys != [key; 19] || digests != [ciphertext; 19] {
        return false;
    }
    blocks[7 * 4096 + 99] ^= 1;
    let keyed = Keyed { keys: &keys, salts };
    let failed = Engine::with_kernel(1, kernel).open(&ring, &mut blocks, 4096, keyed, Verify::Full);
    failed == [7] && blocks.iter().all(|&b| b == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_format::Method;

    #[test]
    fn every_kernel_passes() {
        for kernel in Kernel::available() {
            run_on(kernel).unwrap();
        }
    }

    #[test]
    fn every_method_of_every_suite_has_a_known_answer() {
        for suite in Suite::ALL {
            let tested = CipherSuite::of(suite).known_answers.iter().map(|answer| answer.method).collect::<Vec<_>>();
            assert_eq!(tested.len(), Method::all(suite).count(), "{suite:?}");
            assert!(Method::all(suite).all(|method| tested.contains(&method)), "{suite:?}");
        }
    }

    #[test]
    fn a_failure_says_what_to_do() {
        let failure = SelfTestFailure { primitive: "suite aes", kernel: Kernel::portable() };
        assert!(failure.to_string().contains("suite aes") && failure.to_string().contains("LAMASSU_CPU"));
    }
}
