use super::*;
use crate::oprf::ServerKey;
use crate::{BlockKey, Engine, KeyRing, Keyed, Salts, Secret, Suite, Verify};
use lamassu_format::{BlockNo, Domain, FileId, Method};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A server in this process, which counts what it is asked.
pub(crate) struct Served {
    key: ServerKey,
    pub elements: AtomicUsize,
    pub calls: AtomicUsize,
    pub fault: Mutex<Option<KeyServerFault>>,
}

impl Served {
    pub fn new(seed: u8) -> Arc<Served> {
        let key = ServerKey::derive(&Secret::new(&mut [seed; 32]), b"test");
        Arc::new(Served { key, elements: 0.into(), calls: 0.into(), fault: Mutex::default() })
    }

    pub fn oblivious(self: &Arc<Self>) -> Arc<Oblivious> {
        Arc::new(Oblivious::new(*self.key.public(), self.clone()))
    }

    fn asked(&self) -> (usize, usize) {
        (self.calls.load(Ordering::Relaxed), self.elements.load(Ordering::Relaxed))
    }
}

impl Evaluate for Served {
    fn place(&self) -> String {
        "server://test/zone".into()
    }

    fn evaluate(&self, blinded: &[Element]) -> Result<Evaluation, KeyServerFault> {
        if let Some(fault) = self.fault.lock().clone() {
            return Err(fault);
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.elements.fetch_add(blinded.len(), Ordering::Relaxed);
        self.key.evaluate(blinded).map_err(|error| KeyServerFault::Failing { detail: error.to_string() })
    }
}

/// A ring with one K_in.
fn ring(suite: Suite, k_in: u8, oblivious: Option<Arc<Oblivious>>) -> KeyRing {
    let (inner, outer) = (Secret::new(&mut [k_in; 32]), Secret::new(&mut [1; 32]));
    KeyRing::of_epochs(suite, &[(1, inner, oblivious)], &[(1, outer)])
}

/// Blocks of 4096 bytes, with these bytes.
fn blocks(of: &[u8]) -> Vec<u8> {
    of.iter().flat_map(|byte| [*byte; 4096]).collect()
}

fn sealed(ring: &KeyRing, salts: Salts<'_>, plain: &[u8]) -> (Vec<u8>, Vec<BlockKey>) {
    let (mut sealed, mut keys) = (vec![0; plain.len()], vec![[0; 32]; plain.len() / 4096]);
    Engine::new(2).seal_to(&ring.inner(), salts, plain, &mut sealed, 4096, &mut keys).expect("seals");
    (sealed, keys)
}

fn methods() -> impl Iterator<Item = (Suite, Method)> {
    let suites = Suite::ALL.into_iter().filter(|suite| suite.takes_salt());
    suites.flat_map(|s| Method::all(s).map(move |m| (s, m)))
}

#[test]
fn keys_are_equal_for_all_hosts_and_open_without_the_server() {
    let served = Served::new(3);
    let nobody: Arc<dyn Evaluate> = {
        let down = Served::new(4);
        *down.fault.lock() = Some(KeyServerFault::KeepsNone);
        down
    };
    let numbers = [BlockNo(7), BlockNo(9), BlockNo(11)];
    for (suite, method) in methods() {
        for salts in [Salts::EMPTY, Salts::of_blocks(Domain::File, FileId([5; 16]), &numbers)] {
            let salts = salts.by(method);
            let plain = blocks(&[1, 2, 1]);
            let ring_of = |oblivious| ring(suite, 9, Some(oblivious));
            let one = sealed(&ring_of(served.oblivious()), salts, &plain);
            let two = sealed(&ring_of(served.oblivious()), salts, &plain);
            assert!(one == two && one.1[0] == one.1[2] && one.1[0] != one.1[1], "{suite:?}");
            assert!(one.1.iter().all(|key| key[31] & 1 == 0));
            // It reads, and asks nobody.
            let reader = ring_of(Arc::new(Oblivious::new([0xff; 32], nobody.clone())));
            let mut opened = one.0.clone();
            let keyed = Keyed { keys: &one.1, salts };
            assert!(Engine::new(1).open(&reader, &mut opened, 4096, keyed, Verify::Full).is_empty());
            assert!(opened == plain);
            // Without the right K_in nothing verifies, nor as keys of an epoch that is not oblivious.
            for other in [ring(suite, 8, Some(served.oblivious())), ring(suite, 9, None)] {
                let mut opened = one.0.clone();
                let failed = Engine::new(1).open(&other, &mut opened, 4096, keyed, Verify::Full);
                assert_eq!(failed, [0, 1, 2]);
            }
        }
    }
}

#[test]
fn each_bit_of_a_key_and_of_a_block_is_verified() {
    let served = Served::new(3);
    let ring = ring(Suite::Aes, 9, Some(served.oblivious()));
    let (stored, keys) = sealed(&ring, Salts::EMPTY, &blocks(&[1]));
    let fails = |stored: &[u8], keys: &[BlockKey]| {
        let mut opened = stored.to_vec();
        !Engine::new(1).open(&ring, &mut opened, 4096, Keyed::unsalted(keys), Verify::Full).is_empty()
    };
    assert!(!fails(&stored, &keys));
    for bit in 0..256 {
        let mut other = keys.clone();
        other[0][bit / 8] ^= 1 << (bit % 8);
        assert!(fails(&stored, &other), "bit {bit} of the key");
    }
    for at in [0, 15, 16, 2000, 4095] {
        let mut other = stored.clone();
        other[at] ^= 1;
        assert!(fails(&other, &keys), "byte {at}");
    }
}

#[test]
fn another_key_of_the_server_gives_other_keys_of_blocks() {
    let keys = |seed, k_in| {
        sealed(&ring(Suite::Aes, k_in, Some(Served::new(seed).oblivious())), Salts::EMPTY, &blocks(&[1])).1[0]
    };
    let (one, other_server, other_zone) = (keys(3, 9), keys(4, 9), keys(3, 8));
    let halves = |key: BlockKey| key.as_chunks::<16>().0.to_vec();
    for other in [other_server, other_zone] {
        assert!(halves(one).iter().zip(halves(other)).all(|(a, b)| *a != b));
    }
}

#[test]
fn what_is_known_is_not_asked_for_again() {
    let served = Served::new(3);
    let ring = ring(Suite::Aes, 9, Some(served.oblivious()));
    let mut many: Vec<u8> = (0..300).flat_map(|n: u32| n.to_le_bytes().repeat(1024)).collect();
    sealed(&ring, Salts::EMPTY, &many);
    assert_eq!(served.asked(), (2, 300));
    many.extend_from_within(..4096 * 300);
    many.extend(blocks(&[250, 250, 250]));
    let first = sealed(&ring, Salts::EMPTY, &many);
    assert_eq!(served.asked(), (3, 301), "one block that was not known, three times");
    assert!(first == sealed(&ring, Salts::EMPTY, &many) && served.asked() == (3, 301));
    assert_eq!(first.1[..300], first.1[300..600]);
    // Plain blocks have their hash, and nobody is asked.
    sealed(&ring, Salts::PLAIN, &blocks(&[77]));
    assert_eq!(served.asked(), (3, 301));
}

#[test]
fn without_the_server_nothing_is_sealed_and_nothing_stays() {
    let served = Served::new(3);
    *served.fault.lock() = Some(KeyServerFault::Unreachable { detail: "no route".into() });
    let key = ring(Suite::Aes, 9, Some(served.oblivious())).inner();
    let (plain, mut stored, mut keys) = (blocks(&[1, 2]), vec![0; 8192], vec![[0; 32]; 2]);
    let refused = Engine::new(1).seal_to(&key, Salts::EMPTY, &plain, &mut stored, 4096, &mut keys);
    let said = refused.expect_err("is down").to_string();
    assert!(said.contains("server://test/zone") && said.contains("no route"), "{said}");
    assert!(stored.iter().all(|byte| *byte == 0) && keys == [[0; 32]; 2]);
    // It is asked again once it is there.
    *served.fault.lock() = None;
    assert!(Engine::new(1).seal_to(&key, Salts::EMPTY, &plain, &mut stored, 4096, &mut keys).is_ok());
}

#[test]
fn a_server_with_another_key_is_found_out() {
    let served = Served::new(3);
    let other = Oblivious::new(*Served::new(4).key.public(), served.clone());
    let key = ring(Suite::Aes, 9, Some(Arc::new(other))).inner();
    let mut stored = blocks(&[1]);
    let refused = Engine::new(1).seal(&key, Salts::EMPTY, &mut stored, 4096, &mut [[0; 32]]).expect_err("is another");
    assert_eq!(refused.fault, KeyServerFault::Wrong(OprfError::Proof));
}

#[test]
#[should_panic = "a keychain is checked"]
fn suite_paper_has_none() {
    ring(Suite::Paper, 9, Some(Served::new(3).oblivious()));
}

/// What an implementation of another language computes (`tests/interop`), from docs/format.md.
#[test]
fn golden_vectors() {
    let vectors: serde_json::Value =
        serde_json::from_str(include_str!("../../../../testdata/vectors/oblivious.json")).expect("parses");
    let bytes = |value: &serde_json::Value| {
        data_encoding::HEXLOWER.decode(value.as_str().expect("a string").as_bytes()).expect("hex")
    };
    let k_in = Secret::from_slice(&bytes(&vectors["K_in"])).expect("32 bytes");
    let token: Token = bytes(&vectors["token"]).try_into().expect("16 bytes");
    let keys = vectors["keys"].as_array().expect("an array");
    assert_eq!(keys.len(), methods().count());
    for of in keys {
        let suite = Suite::from_name(of["suite"].as_str().expect("a string")).expect("a suite");
        let flag = |name: &str| of[name].as_bool().expect("a flag");
        let method = Method::new(flag("short_key"), flag("other_hash"));
        let kernel = crate::kernel::Kernel::best();
        let inner = crate::InnerKey::of_epoch(suite, &k_in, Some(Served::new(1).oblivious()), kernel);
        let (mut input, mut key) = ([[0; 32]], [[0; 32]]);
        inner.inputs_of_group(Salts::EMPTY.by(method), &[&[0; 4096]], &mut input);
        inner.keys_of_tokens(method, &input, &[token], &mut key);
        assert_eq!((input[0].to_vec(), key[0].to_vec()), (bytes(&of["input"]), bytes(&of["K"])), "{of}");
    }
}
