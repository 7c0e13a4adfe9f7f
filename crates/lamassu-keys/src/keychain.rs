//! The keychain: epochs of K_in and K_out, sealed under the file key (§4).
//!
//! Guarantees: epochs ascend, K_in has at least one. The serialised form lives in wiped memory only, and no error
//! quotes it.

use crate::providers::server::{self, ObliviousKey};
use crate::{KeyError, Tier};
use data_encoding::HEXLOWER;
use lamassu_crypto::oblivious::Oblivious;
use lamassu_crypto::{Secret, SecretBytes, wrap};
use lamassu_format::Suite;
use lamassu_format::header::SealedKeychain;
use serde::Deserialize;
use std::io::Write;
use std::sync::Arc;

/// One generation of a key.
pub struct Epoch {
    number: u32,
    created: u64,
    key: Secret<32>,
    whose: Whose,
    /// of K_in alone
    oblivious: Option<ObliviousKey>,
}

/// Which other vaults have an epoch's key, as of its entry into the keychain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    /// made for this keychain
    Own,
    /// from a zone, a key server's zone, or the vault that contains a dataset
    Zones,
}

impl Epoch {
    /// From 1, ascending.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// When it was made, in seconds since 1970.
    pub fn created(&self) -> u64 {
        self.created
    }

    /// The key.
    pub fn key(&self) -> &Secret<32> {
        &self.key
    }

    /// Whether it came from a zone, or from the vault that contains a dataset, which has it too.
    pub fn is_zones(&self) -> bool {
        self.whose == Whose::Zones
    }

    /// The key at a server that block keys depend on; `None`: they depend on this key alone.
    pub fn oblivious(&self) -> Option<&ObliviousKey> {
        self.oblivious.as_ref()
    }

    fn duplicate(&self) -> Epoch {
        let Epoch { number, created, ref key, whose, ref oblivious } = *self;
        Epoch { number, created, key: key.duplicate(), whose, oblivious: oblivious.clone() }
    }

    /// A fresh key.
    fn own(number: u32, created: u64, oblivious: Option<ObliviousKey>) -> Result<Epoch, KeyError> {
        Ok(Epoch { number, created, key: Secret::random()?, whose: Whose::Own, oblivious })
    }

    fn of_zone(&self) -> Epoch {
        Epoch { whose: Whose::Zones, ..self.duplicate() }
    }
}

impl std::fmt::Debug for Epoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Epoch").field("number", &self.number).field("created", &self.created).finish_non_exhaustive()
    }
}

/// Refuses a suite that has no oblivious keys.
///
/// # Errors
/// [`KeyError::SuiteNotOblivious`].
pub fn check_oblivious(suite: Suite) -> Result<(), KeyError> {
    if suite.takes_salt() { Ok(()) } else { Err(KeyError::SuiteNotOblivious { suite }) }
}

/// Every epoch of K_in and K_out of a vault or zone.
#[derive(Debug)]
pub struct Keychain {
    inner: Vec<Epoch>,
    outer: Vec<Epoch>,
}

impl Keychain {
    /// Fresh keys: epoch 1 of K_in and, if `outer`, of K_out.
    ///
    /// # Errors
    /// [`KeyError::NoRandom`].
    pub fn generate(outer: bool, created: u64) -> Result<Self, KeyError> {
        let first = || Ok::<_, KeyError>(vec![Epoch::own(1, created, None)?]);
        Ok(Keychain { inner: first()?, outer: if outer { first()? } else { Vec::new() } })
    }

    /// Keys of a zone at a key server: epoch 1 of K_in and, if given, of K_out.
    pub(crate) fn of(inner: &Secret<32>, outer: Option<&Secret<32>>, created: u64) -> Self {
        let first = |key: &Secret<32>| {
            let (number, whose, oblivious) = (1, Whose::Zones, None);
            Epoch { number, created, key: key.duplicate(), whose, oblivious }
        };
        Keychain { inner: vec![first(inner)], outer: outer.map(first).into_iter().collect() }
    }

    /// Epochs of K_in, ascending; at least one.
    pub fn inner(&self) -> &[Epoch] {
        &self.inner
    }

    /// Epochs of K_out, ascending; may be empty in a zone.
    pub fn outer(&self) -> &[Epoch] {
        &self.outer
    }

    /// A copy.
    pub fn duplicate(&self) -> Self {
        let copy = |epochs: &[Epoch]| epochs.iter().map(Epoch::duplicate).collect();
        Keychain { inner: copy(&self.inner), outer: copy(&self.outer) }
    }

    /// The keys of a zone, for a vault of it.
    pub(crate) fn for_member(&self) -> Self {
        let copy = |epochs: &[Epoch]| epochs.iter().map(Epoch::of_zone).collect();
        Keychain { inner: copy(&self.inner), outer: copy(&self.outer) }
    }

    /// New keys, except K_in, which is the newest of `other`, with its number there.
    ///
    /// # Errors
    /// [`KeyError::NoRandom`].
    pub(crate) fn sharing_inner(other: &Keychain, created: u64) -> Result<Self, KeyError> {
        let inner = other.inner.last().map(Epoch::of_zone).into_iter().collect();
        Ok(Keychain { inner, outer: Self::generate(true, created)?.outer })
    }

    /// K_in of `self` and K_out of `other`.
    pub(crate) fn with_outer_of(self, other: Keychain) -> Self {
        Keychain { inner: self.inner, outer: other.outer }
    }

    /// Adds an epoch with a fresh key, which new writes then use; returns its number.
    ///
    /// # Errors
    /// [`KeyError::NoRandom`], [`KeyError::EpochsUsedUp`].
    pub fn append(&mut self, tier: Tier, created: u64) -> Result<u32, KeyError> {
        self.append_epoch(tier, created, None)
    }

    /// The same; an epoch of K_in has `oblivious`.
    pub(crate) fn append_epoch(
        &mut self,
        tier: Tier,
        created: u64,
        oblivious: Option<ObliviousKey>,
    ) -> Result<u32, KeyError> {
        let epochs = self.epochs_mut(tier);
        let last = epochs.last().map_or(0, |e| e.number);
        let number = last.checked_add(1).ok_or(KeyError::EpochsUsedUp)?;
        epochs.push(Epoch::own(number, created, oblivious.filter(|_| tier == Tier::Inner))?);
        Ok(number)
    }

    /// The key at a server that belongs to the newest K_in.
    pub fn oblivious(&self) -> Option<&ObliviousKey> {
        self.inner.last().and_then(Epoch::oblivious)
    }

    /// The same keychain; epoch 1 of K_in depends on this key at a server. For a new zone.
    pub(crate) fn with_oblivious(mut self, key: ObliviousKey) -> Keychain {
        self.inner.iter_mut().for_each(|epoch| epoch.oblivious = Some(key.clone()));
        self
    }

    /// Whether any epoch is oblivious.
    fn is_oblivious(&self) -> bool {
        self.inner.iter().any(|epoch| epoch.oblivious.is_some())
    }

    /// Removes an epoch: data under it can no longer be read with this keychain. Never the newest.
    ///
    /// # Errors
    /// [`KeyError::NoEpoch`], [`KeyError::NewestEpoch`].
    pub fn remove(&mut self, tier: Tier, number: u32) -> Result<(), KeyError> {
        let epochs = self.epochs_mut(tier);
        let at = epochs.iter().position(|e| e.number == number).ok_or(KeyError::NoEpoch { tier, number })?;
        if at + 1 == epochs.len() {
            return Err(KeyError::NewestEpoch { tier, number });
        }
        epochs.remove(at);
        Ok(())
    }

    /// Takes over the epochs of `other`, a zone's, that are newer than all of its own. Returns their numbers. Epochs
    /// that both have must be equal.
    ///
    /// # Errors
    /// [`KeyError::OtherEpochs`] if an epoch with the same number has another key, or the newest one here is newer than
    /// all of `other`'s.
    pub fn adopt(&mut self, tier: Tier, other: &Keychain) -> Result<Vec<u32>, KeyError> {
        let (ours, theirs) = (self.epochs(tier), other.epochs(tier));
        let newest = ours.last().map_or(0, |e| e.number);
        let is_other =
            |t: &Epoch, e: &Epoch| !wrap::equal(t.key.expose(), e.key.expose()) || t.oblivious != e.oblivious;
        let differs = |e: &Epoch| theirs.iter().any(|t| t.number == e.number && is_other(t, e));
        if ours.iter().any(differs) || theirs.last().is_none_or(|t| t.number < newest) {
            return Err(KeyError::OtherEpochs { tier });
        }
        let newer: Vec<Epoch> = theirs.iter().filter(|t| t.number > newest).map(Epoch::of_zone).collect();
        let numbers = newer.iter().map(Epoch::number).collect();
        self.epochs_mut(tier).extend(newer);
        Ok(numbers)
    }

    /// Whether it has every epoch of `other`: the same key under the same number.
    pub(crate) fn has_all_of(&self, other: &Keychain) -> bool {
        let has = |epochs: &[Epoch], o: &Epoch| {
            epochs.iter().any(|e| e.number == o.number && wrap::equal(e.key.expose(), o.key.expose()))
        };
        other.inner.iter().all(|o| has(&self.inner, o)) && other.outer.iter().all(|o| has(&self.outer, o))
    }

    /// Epochs of a tier, ascending.
    pub fn epochs(&self, tier: Tier) -> &[Epoch] {
        match tier {
            Tier::Inner => &self.inner,
            Tier::Outer => &self.outer,
        }
    }

    fn epochs_mut(&mut self, tier: Tier) -> &mut Vec<Epoch> {
        match tier {
            Tier::Inner => &mut self.inner,
            Tier::Outer => &mut self.outer,
        }
    }

    /// Epochs of K_in, newest first, for a key ring.
    pub(crate) fn inner_newest_first(&self) -> Vec<(u32, Secret<32>, Option<Arc<Oblivious>>)> {
        let loaded = |e: &Epoch| (e.number, e.key.duplicate(), e.oblivious.as_ref().map(server::oblivious));
        self.inner.iter().rev().map(loaded).collect()
    }

    /// Keys of K_out with their numbers, newest first, for a key ring.
    pub(crate) fn outer_newest_first(&self) -> Vec<(u32, Secret<32>)> {
        self.outer.iter().rev().map(|e| (e.number, e.key.duplicate())).collect()
    }

    /// Seals under the file key of the header `id`.
    pub(crate) fn seal(&self, file_key: &Secret<32>, id: &[u8; 16]) -> Result<SealedKeychain, KeyError> {
        let (nonce, sealed) = wrap::seal(&keychain_key(file_key), &aad(id), self.to_json().expose())?;
        Ok(SealedKeychain { nonce, sealed, oblivious: self.is_oblivious() })
    }

    /// Opens what [`Keychain::seal`] made.
    ///
    /// # Errors
    /// [`KeyError::KeychainInvalid`].
    pub(crate) fn open(
        file_key: &Secret<32>,
        id: &[u8; 16],
        sealed: &SealedKeychain,
        outer_required: bool,
    ) -> Result<Self, KeyError> {
        let json = wrap::open(&keychain_key(file_key), &sealed.nonce, &aad(id), &sealed.sealed)
            .map_err(|_| KeyError::KeychainInvalid)?;
        let keychain = Self::parse(json.expose()).ok_or(KeyError::KeychainInvalid)?;
        if outer_required && keychain.outer.is_empty() || keychain.is_oblivious() != sealed.oblivious {
            return Err(KeyError::KeychainInvalid);
        }
        Ok(keychain)
    }

    /// Canonical JSON. Written by hand into a buffer that never grows, so that no copy of a key is left behind.
    fn to_json(&self) -> SecretBytes {
        const EPOCH_LEN_MAX: usize = 140;
        let count = self.inner.len() + self.outer.len();
        let oblivious = self.inner.iter().filter_map(Epoch::oblivious).map(|key| key.to_json().len()).sum::<usize>();
        let mut out = Vec::with_capacity(64 + EPOCH_LEN_MAX * count + oblivious);
        let capacity = out.capacity();
        out.extend_from_slice(b"{\"inner\":[");
        append_epochs(&mut out, &self.inner);
        out.extend_from_slice(b"],\"outer\":[");
        append_epochs(&mut out, &self.outer);
        out.extend_from_slice(b"]}");
        debug_assert_eq!(out.capacity(), capacity);
        SecretBytes::new(out)
    }

    /// The error of `serde_json` is dropped: it may quote a key.
    fn parse(json: &[u8]) -> Option<Self> {
        let wire: WireKeychain<'_> = serde_json::from_slice(json).ok()?;
        let inner = parse_epochs(Tier::Inner, &wire.inner)?;
        let outer = parse_epochs(Tier::Outer, &wire.outer)?;
        (!inner.is_empty()).then_some(Keychain { inner, outer })
    }
}

/// Keys are borrowed from the wiped text. A key with JSON escapes is refused, since it would have to be copied.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireKeychain<'a> {
    #[serde(borrow)]
    inner: Vec<WireEpoch<'a>>,
    #[serde(borrow)]
    outer: Vec<WireEpoch<'a>>,
}

/// An evaluating key at a server (§4).
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireOblivious {
    key: String,
    public: String,
    server: String,
}

impl WireOblivious {
    fn parse(&self) -> Option<ObliviousKey> {
        let mut public = [0; 32];
        if self.public.len() != 64 || HEXLOWER.decode_mut(self.public.as_bytes(), &mut public).is_err() {
            return None;
        }
        let key = ObliviousKey { server: self.server.clone(), name: self.key.clone(), public };
        key.is_valid().then_some(key)
    }
}

impl ObliviousKey {
    /// The member of its epoch, with the comma before it. Nothing in it needs an escape.
    fn to_json(&self) -> String {
        let ObliviousKey { server, name, public } = self;
        let public = HEXLOWER.encode(public);
        format!(",\"oblivious\":{{\"key\":\"{name}\",\"public\":\"{public}\",\"server\":\"{server}\"}}")
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireEpoch<'a> {
    created: u64,
    epoch: u32,
    key: &'a str,
    /// omitted if `None`; only for K_in
    #[serde(default, deserialize_with = "present")]
    oblivious: Option<WireOblivious>,
    /// omitted if false
    #[serde(default, deserialize_with = "present")]
    zone: Option<bool>,
}

/// Null differs from an omitted member.
fn present<'de, T: Deserialize<'de>, D: serde::Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

fn append_epochs(out: &mut Vec<u8>, epochs: &[Epoch]) {
    for (i, epoch) in epochs.iter().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        write!(out, "{comma}{{\"created\":{},\"epoch\":{},\"key\":\"", epoch.created, epoch.number)
            .expect("writing to a vector never fails");
        let at = out.len();
        out.resize(at + 64, 0);
        HEXLOWER.encode_mut(epoch.key.expose(), &mut out[at..]);
        out.push(b'"');
        if let Some(key) = &epoch.oblivious {
            out.extend_from_slice(key.to_json().as_bytes());
        }
        out.extend_from_slice(match epoch.whose {
            Whose::Own => b"}",
            Whose::Zones => b",\"zone\":true}",
        });
    }
}

fn parse_epochs(tier: Tier, wire: &[WireEpoch<'_>]) -> Option<Vec<Epoch>> {
    let mut last = 0;
    let mut epochs = Vec::with_capacity(wire.len());
    for e in wire {
        if e.epoch <= last || e.key.len() != 64 {
            return None;
        }
        last = e.epoch;
        let mut key = zeroize::Zeroizing::new([0u8; 32]);
        HEXLOWER.decode_mut(e.key.as_bytes(), &mut *key).ok()?;
        let whose = match e.zone {
            None => Whose::Own,
            Some(true) => Whose::Zones,
            Some(false) => return None,
        };
        let oblivious = match &e.oblivious {
            None => None,
            Some(wire) => Some(wire.parse().filter(|_| tier == Tier::Inner)?),
        };
        epochs.push(Epoch { number: e.epoch, created: e.created, key: Secret::new(&mut key), whose, oblivious });
    }
    Some(epochs)
}

fn keychain_key(file_key: &Secret<32>) -> Secret<32> {
    wrap::hkdf(file_key.expose(), b"", b"lamassu v1 keychain")
}

fn aad(id: &[u8; 16]) -> Vec<u8> {
    [&b"lamassu v1 keychain"[..], id].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(inner: &str, outer: &str) -> String {
        format!(r#"{{"inner":[{inner}],"outer":[{outer}]}}"#)
    }

    fn epoch(number: &str, key: &str) -> String {
        format!(r#"{{"created":7,"epoch":{number},"key":"{key}"}}"#)
    }

    fn epoch_of(number: u32, created: u64, mut key: [u8; 32], whose: Whose) -> Epoch {
        Epoch { number, created, key: Secret::new(&mut key), whose, oblivious: None }
    }

    #[test]
    fn an_oblivious_epoch_reads_back_and_is_of_k_in_alone() {
        let key = ObliviousKey { server: "keeper.example:7433".into(), name: "office".into(), public: [0xcd; 32] };
        let mut chain = Keychain::generate(true, 7).unwrap().with_oblivious(key.clone());
        assert_eq!(chain.append_epoch(Tier::Outer, 8, Some(key.clone())).unwrap(), 2);
        let json = chain.to_json();
        let text = std::str::from_utf8(json.expose()).unwrap();
        let public = "cd".repeat(32);
        let member = format!(r#","oblivious":{{"key":"office","public":"{public}","server":"keeper.example:7433"}}"#);
        assert_eq!(text.matches(&member).count(), 1, "{text}");
        let read = Keychain::parse(json.expose()).unwrap();
        assert_eq!(read.oblivious(), Some(&key));
        assert!(read.is_oblivious() && read.for_member().is_oblivious() && read.has_all_of(&chain));
        for (from, to) in [
            ("office", ""),
            ("office", "of fice"),
            ("keeper.example:7433", "keeper.example"),
            ("keeper.example:7433", "http://x"),
            (&public[..], "cd"),
            (r#""key":"office","#, ""),
            (&member[..], r#","oblivious":null"#),
            (&member[..], r#","oblivious":true"#),
        ] {
            assert!(Keychain::parse(text.replace(from, to).as_bytes()).is_none(), "{to}");
        }
        let of_outer = text.replace(r#"],"outer":[{"created""#, &format!(r#"],"outer":[{{{},"created""#, &member[1..]));
        assert!(of_outer != text && Keychain::parse(of_outer.as_bytes()).is_none());
        let none = text.replace(&member, "");
        assert!(!Keychain::parse(none.as_bytes()).unwrap().is_oblivious());
    }

    #[test]
    fn the_form_is_canonical() {
        let inner = vec![epoch_of(2, 7, [0xab; 32], Whose::Own)];
        let outer = vec![inner[0].of_zone()];
        let json = Keychain { inner, outer }.to_json();
        let own = epoch("2", &"ab".repeat(32));
        let zones = own.replace('}', ",\"zone\":true}");
        assert_eq!(std::str::from_utf8(json.expose()).unwrap(), text(&own, &zones));
        // The longest there is does not outgrow the buffer.
        let longest = || Epoch {
            number: u32::MAX,
            created: u64::MAX,
            ..Epoch::of_zone(&Keychain::parse(json.expose()).unwrap().inner[0])
        };
        let all = Keychain { inner: (0..30).map(|_| longest()).collect(), outer: vec![longest()] };
        assert!(all.to_json().expose().len() > 31 * 136);
    }

    #[test]
    fn malformed_keychains_are_refused() {
        let key = "ab".repeat(32);
        let (one, two) = (epoch("1", &key), epoch("2", &key));
        let ok = |json: &str| Keychain::parse(json.as_bytes()).is_some();
        assert!(ok(&text(&one, "")) && ok(&text(&format!("{one},{two}"), &two)));
        for bad in [
            text("", &one),
            text(&format!("{two},{one}"), &one),
            text(&format!("{one},{one}"), &one),
            text(&epoch("0", &key), &one),
            text(&epoch("4294967296", &key), &one),
            text(&epoch("1.0", &key), &one),
            text(&epoch("1", &key[2..]), &one),
            text(&epoch("1", &format!("{key}00")), &one),
            text(&epoch("1", &key.to_uppercase()), &one),
            text(&epoch("1", &format!("\\u0061{}", &key[1..])), &one),
            text(&one.replace("\"created\":7,", ""), &one),
            text(&one.replace("created", "made"), &one),
            text(&one.replace('}', ",\"zone\":false}"), &one),
            text(&one.replace('}', ",\"zone\":null}"), &one),
            text(&one, &one).replace("]}", "],\"more\":[]}"),
            text(&one, &one) + "x",
            "{}".into(),
            String::new(),
        ] {
            assert!(!ok(&bad), "{bad}");
        }
    }

    /// Number; time, key, and whether it is a zone's.
    type Made = (u32, (u64, [u8; 32], bool));

    proptest! {
        #[test]
        fn keychains_round_trip(epochs in prop::collection::btree_map(1u32.., (any::<u64>(), any::<[u8; 32]>(), any::<bool>()), 1..20), split in any::<prop::sample::Index>()) {
            let all: Vec<_> = epochs.into_iter().collect();
            let outer_from = split.index(all.len()) + 1;
            let whose = |zones: bool| if zones { Whose::Zones } else { Whose::Own };
            let make = |part: &[Made]| part.iter()
                .map(|(number, (created, key, zones))| epoch_of(*number, *created, *key, whose(*zones)))
                .collect::<Vec<_>>();
            let keychain = Keychain { inner: make(&all[..outer_from]), outer: make(&all[outer_from..]) };
            let (file_key, id) = (Secret::new(&mut [1; 32]), [2; 16]);
            let sealed = keychain.seal(&file_key, &id).unwrap();
            let again = Keychain::open(&file_key, &id, &sealed, false).unwrap();
            let seen: Vec<_> = again.inner.iter().chain(&again.outer).map(|e| (e.number, (e.created, *e.key.expose(), e.is_zones()))).collect();
            prop_assert_eq!(again.inner.len(), outer_from);
            prop_assert_eq!(seen, all);
            prop_assert!(Keychain::open(&file_key, &[3; 16], &sealed, false).is_err());
            prop_assert_eq!(Keychain::open(&file_key, &id, &sealed, true).is_ok(), !again.outer.is_empty());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(Keychain::parse(&bytes).is_none());
        }
    }
}
