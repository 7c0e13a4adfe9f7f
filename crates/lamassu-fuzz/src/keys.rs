//! What people, servers and the store give `lamassu-keys` beside headers: shares of a recovery key, a KMIP server's
//! answers, the history.

use crate::bytes::Bytes;
use lamassu_crypto::Secret;
use lamassu_keys::{shares, testing};

/// Bytes of a share before its checksum.
const SHARE: usize = 37;

/// Shares as they are typed. First byte even: the text; odd: payloads of 37 bytes each, which get the checksum that
/// belongs to them.
pub fn share(input: &[u8]) {
    let Some((mode, rest)) = input.split_first() else { return };
    if mode.is_multiple_of(2) {
        drop(shares::join(rest));
        return;
    }
    let payloads: Vec<&[u8; SHARE]> = rest.chunks_exact(SHARE).filter_map(|p| p.try_into().ok()).take(17).collect();
    let texts: Vec<String> = payloads.iter().map(|p| testing::share_of_payload(p)).collect();
    let joined = shares::join(texts.join("\n\n").as_bytes());
    let Some(first) = payloads.first() else {
        assert!(joined.is_err(), "a key of no share");
        return;
    };
    // The number of a share in the upper half of its first byte, how many it takes in the lower; set and vault are the
    // next four bytes.
    let mut numbers: Vec<u8> = payloads.iter().map(|p| p[0] >> 4).collect();
    let count = numbers.len();
    numbers.sort_unstable();
    numbers.dedup();
    let of_one_set = payloads.iter().all(|p| p[0] & 15 == first[0] & 15 && p[1..5] == first[1..5]);
    let good = first[0] & 15 >= 2 && numbers[0] > 0 && numbers.len() == count && of_one_set;
    let enough = count >= usize::from(first[0] & 15);
    assert_eq!(joined.is_ok(), good && enough, "{joined:?}");
}

/// What a KMIP server answers: any bytes.
pub fn answer(input: &[u8]) {
    let (id, has_state, key) = testing::take_kmip_answers(input);
    let takes = [id.is_some(), has_state, key.is_some()].into_iter().filter(|taken| *taken).count();
    assert!(takes <= 1, "one answer to several questions");
    if let Some(id) = id {
        assert!((1..=255).contains(&id.len()) && !id.contains(char::is_control));
    }
}

/// A history. First byte even: its bytes; odd: the contents of entries, which are sealed and chained as entries are,
/// one of them then changed.
pub fn history(input: &[u8]) {
    let mut input = Bytes::new(input);
    let (key, id) = (Secret::new(&mut [3; 32]), [4; 16]);
    if input.u8().is_multiple_of(2) {
        assert_eq!(testing::read_history(&key, &id, input.rest()), (0, 0), "nobody can forge an entry");
        return;
    }
    let (at, flip) = (usize::from(input.u16()), input.u8());
    let contents: Vec<&[u8]> = input.rest().split(|b| *b == b'\n').collect();
    let mut chain = testing::history_of(&key, &id, &contents).expect("randomness");
    let (seen, good) = testing::read_history(&key, &id, &chain);
    assert!(seen <= contents.len() && good <= chain.len());
    if good == 0 || flip == 0 {
        return;
    }
    let at = at % good;
    chain[at] ^= flip;
    let (seen_then, good_then) = testing::read_history(&key, &id, &chain);
    assert!(seen_then < seen && good_then <= at, "a changed entry verifies");
}
