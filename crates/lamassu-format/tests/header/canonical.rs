//! The canonical form, which covers all of a header, and round trips.

use crate::samples::{parse, vault};
use lamassu_format::header::{
    Admin, Argon2Params, Header, HistoryHead, HistoryMark, KeyArea, NameMode, Predecessor, PublicKey, Role,
    SealedKeychain, Slot, SlotKind, TokenMechanism, TokenSealed, TokenSignature, TokenSigning, VaultHeader,
    VaultParams, ZoneFile, ZoneId, ZoneParams,
};
use lamassu_format::{Domain, Geometry, Suite};
use proptest::prelude::*;

/// Printed by Python: `json.dumps(sample without mac, sort_keys=True, separators=(",", ":"), ensure_ascii=False)`. Runs
/// of one byte are shortened here.
#[test]
fn canonical_form_is_what_python_prints() {
    let run = |digits: &str, n: usize| digits.repeat(n);
    let expected = format!(
        concat!(
            r#"{{"block_size":4096,"created":1700000000,"features":[],"format":"lamassu-vault","id":"{id}","#,
            r#""keychain":{{"nonce":"{kn}","sealed":"{ks}"}},"name_max":255,"names":"encrypted","next_slot":6,"#,
            r#""reserved_slots":8,"slots":[{{"argon2":{{"lanes":4,"memory_kib":65536,"passes":3}},"created":1700000001,"#,
            r#""id":3,"kind":"passphrase","label":"Zoë's \"laptop\" \\ /","nonce":"{n1}","salt":"{s1}","wrapped":"{w1}"}},"#,
            r#"{{"created":0,"id":5,"kind":"raw","label":"","nonce":"{n2}","salt":"{s2}","wrapped":"{w2}"}}],"#,
            r#""small_files":"convergent","suite":"aes","version":1,"zone":"{zone}"}}"#
        ),
        id = run("77", 16),
        kn = run("99", 24),
        ks = run("aa", 40),
        n1 = run("22", 24),
        s1 = run("11", 32),
        w1 = run("33", 48),
        n2 = run("55", 24),
        s2 = run("44", 32),
        w2 = run("66", 48),
        zone = run("88", 16),
    );
    assert_eq!(String::from_utf8(parse(&vault()).unwrap().mac_input()).unwrap(), expected);
}

fn any_slot(id: u32) -> impl Strategy<Value = Slot> {
    // Four of them are within what a header may ask for.
    let cost =
        (1u32..=16, 1u32..=64, 128u32..=4 << 20).prop_map(|(p, t, m)| Argon2Params::new(m.min((16 << 20) / t), t, p));
    let label = "\\PC{0,60}".prop_filter("no control characters", |l| !l.chars().any(char::is_control));
    let token = (0..TokenMechanism::ALL.len(), prop::collection::vec(any::<u8>(), 1..300)).prop_map(|(m, sealed)| {
        let signed = TokenSigning::ALL.get(sealed.len() % 3);
        let signature = signed.map(|mechanism| TokenSignature { mechanism: *mechanism, value: sealed.clone() });
        TokenSealed { mechanism: TokenMechanism::ALL[m], sealed, signature }
    });
    let kinds = (0..SlotKind::ALL.len()).prop_map(|k| SlotKind::ALL[k]);
    let bytes = (any::<[u8; 32]>(), any::<[u8; 24]>(), any::<[u8; 32]>(), any::<[u8; 16]>());
    (kinds, label, any::<u64>(), cost, token, bytes).prop_map(
        move |(kind, label, created, cost, token, (salt, nonce, w1, w2))| {
            let argon2 = if kind == SlotKind::Passphrase { cost } else { None };
            let token = (kind == SlotKind::Pkcs11).then_some(token);
            let parent = (kind == SlotKind::Parent).then_some([w2[0]; 88]);
            let role = Role::Administrator;
            let expires = w1[0].is_multiple_of(2).then_some(created);
            let wrapped = [&w1[..], &w2[..]].concat();
            Slot { id, kind, label, created, salt, argon2, token, parent, role, expires, nonce, wrapped }
        },
    )
}

fn any_keys() -> impl Strategy<Value = KeyArea> {
    let slots = prop::collection::btree_set(1u32..u32::MAX, 1..5)
        .prop_flat_map(|ids| ids.into_iter().map(any_slot).collect::<Vec<_>>());
    let sealed = prop::collection::vec(any::<u8>(), 16..300);
    (any::<[u8; 16]>(), slots, any::<[u8; 24]>(), sealed, any::<[u8; 32]>()).prop_map(
        |(id, mut slots, nonce, sealed, mac)| {
            // One parent slot at most.
            let mut seen = false;
            slots.retain(|s| s.kind != SlotKind::Parent || !std::mem::replace(&mut seen, true));
            let next_slot = slots.iter().map(|s| s.id).max().unwrap() + 1;
            let keychain = SealedKeychain { nonce, sealed, oblivious: false };
            KeyArea { id, next_slot, slots, keychain, admin: None, history: None, mac }
        },
    )
}

/// With an administrator, a use slot and a mark of the history, for three of four values of `by`.
fn signed(mut keys: KeyArea, by: u64) -> KeyArea {
    keys.history = (by & 1 == 1).then_some(HistoryMark { count: 1 + (by >> 8), head: HistoryHead([by as u8; 32]) });
    if by & 2 == 2 {
        let before = vec![Predecessor { public: PublicKey([1; 32]), signature: [2; 64] }; by as usize % 3];
        keys.admin = Some(Admin { public: PublicKey(keys.mac), signature: [by as u8; 64], before });
        for (i, slot) in keys.slots.iter_mut().enumerate() {
            if i > 0 && by >> i & 1 == 1 {
                slot.role = Role::Use;
            } else {
                slot.wrapped.resize(80, 1);
            }
        }
    }
    keys
}

prop_compose! {
    fn any_vault()(
        keys in any_keys(), zone in any::<[u8; 16]>(), suite in 0usize..4, log in 12u32..=20, reserved in 1u16..=62,
        plain in any::<bool>(), name_max in 64u8..=255, convergent in any::<bool>(), created in any::<u64>(),
        snapshot in any::<bool>(), domain in prop::sample::select(&Domain::ALL[..]),
    ) -> VaultHeader {
        let domain = if domain.is_for(Suite::ALL[suite]) { domain } else { Domain::Family };
        let params = VaultParams {
            zone: ZoneId(zone), suite: Suite::ALL[suite], geometry: Geometry::new(1 << log, reserved).unwrap(),
            names: if plain { NameMode::Plain } else { NameMode::Encrypted }, name_max,
            convergent_small_files: convergent && !domain.is_salted(), domain, created,
        };
        let header = VaultHeader::new(params, signed(keys, created));
        if snapshot { header.into_snapshot() } else { header }
    }
}

proptest! {
    #[test]
    fn vaults_round_trip(h in any_vault()) {
        let json = h.to_json().unwrap();
        let again = VaultHeader::parse(&json).unwrap();
        prop_assert_eq!(&again, &h);
        prop_assert_eq!(again.mac_input(), h.mac_input());
    }

    #[test]
    fn zones_round_trip(keys in any_keys(), suite in 0usize..4, log in 12u32..=20, created in any::<u64>()) {
        let z = ZoneFile::new(ZoneParams { suite: Suite::ALL[suite], block_size: 1 << log, compression: None, created }, keys);
        prop_assert_eq!(ZoneFile::parse(&z.to_json().unwrap()).unwrap(), z);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = VaultHeader::parse(&bytes);
        let _ = ZoneFile::parse(&bytes);
    }

    /// Whatever is changed in the text: it is refused, or means the same, or the input of the MAC (or the MAC) differs.
    #[test]
    fn every_change_is_refused_or_covered(at in any::<prop::sample::Index>(), to in any::<u8>(), cut in any::<bool>()) {
        let good = parse(&vault()).unwrap();
        let mut text = vault().to_string().into_bytes();
        let at = at.index(text.len());
        if cut { text.remove(at); } else { text[at] = to; }
        if let Ok(h) = VaultHeader::parse(&text) {
            let same = h.mac_input() == good.mac_input() && h.keys().mac == good.keys().mac;
            prop_assert_eq!(same, h == good);
        }
    }
}
