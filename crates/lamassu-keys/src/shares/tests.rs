use super::*;
use proptest::prelude::*;

fn sheets(need: u8, of: u8) -> Vec<String> {
    let key = Secret::new(&mut [0x5a; 32]);
    let shares = split(&key, Scheme::new(need, of).unwrap(), &[0xab; 16]).unwrap();
    shares.iter().map(|s| String::from_utf8(s.sheet(of).expose().to_vec()).unwrap()).collect()
}

fn err(texts: &[&str]) -> ShareError {
    join(texts.join("\n\n").as_bytes()).unwrap_err()
}

#[test]
fn any_three_of_five() {
    let s = sheets(3, 5);
    assert!(s[1].starts_with("# Share 2 of 5 of a recovery key for abab…: any 3 of them open it.\n 1. "));
    for (a, b, c) in [(0, 1, 2), (4, 2, 0), (3, 1, 4)] {
        let all = [&*s[a], &s[b], &s[c]].concat();
        assert_eq!(join(all.as_bytes()).unwrap().expose(), &[0x5a; 32]);
    }
    assert_eq!(join(s.concat().as_bytes()).unwrap().expose(), &[0x5a; 32], "more than it takes");
    // As words in one row, shortened, in capitals.
    let row: String = s[..3].concat().lines().filter(|l| !l.starts_with('#')).collect::<Vec<_>>().join(" ");
    let short = row.split_whitespace().map(|w| &w[..w.len().min(4)]).collect::<Vec<_>>().join(" ");
    assert_eq!(join(short.to_uppercase().as_bytes()).unwrap().expose(), &[0x5a; 32]);
}

#[test]
fn mistakes_are_told_apart() {
    let (s, other) = (sheets(3, 5), sheets(3, 5));
    assert_eq!(err(&[]), ShareError::None);
    assert_eq!(err(&[&s[0], &s[1]]), ShareError::TooFew { found: 2, need: 3 });
    assert_eq!(err(&[&s[0], &s[3], &s[0]]), ShareError::Duplicate { number: 1 });
    assert!(matches!(err(&[&s[0], &s[1], &other[2]]), ShareError::Mixed { place: 3, number: 3, .. }));
    let words: Vec<&str> = s[1].lines().skip(1).flat_map(str::split_whitespace).filter(|w| !w.ends_with('.')).collect();
    assert_eq!(err(&[&s[0], &words[..29].join(" ")]), ShareError::Count { place: 2, found: 29 });
    let mut wrong = words.clone();
    wrong[6] = "lamassu";
    assert_eq!(err(&[&s[0], &wrong.join(" ")]), ShareError::Word { place: 2, position: 7 });
    wrong[6] = if words[6] == "zoo" { "zone" } else { "zoo" };
    assert_eq!(err(&[&s[0], &wrong.join(" ")]), ShareError::Checksum { place: 2 });
    let mut swapped = words.clone();
    let other = (1..30).find(|i| words[*i] != words[0]).unwrap();
    swapped.swap(0, other);
    assert_eq!(err(&[&swapped.join(" ")]), ShareError::Checksum { place: 1 });
    assert!(!err(&["correct horse battery staple"]).to_string().contains("horse"));
}

#[test]
fn schemes() {
    assert_eq!("3-of-5".parse(), Ok(Scheme { need: 3, of: 5 }));
    assert_eq!("15-of-15".parse(), Ok(Scheme { need: 15, of: 15 }));
    for bad in ["1-of-5", "0-of-0", "4-of-3", "2-of-16", "3of5", "3-of-", "", "-of-"] {
        assert!(bad.parse::<Scheme>().is_err(), "{bad}");
    }
}

/// By hand: GF(2^8) modulo x^8+x^4+x^3+x^2+1.
fn mul(mut a: u8, mut b: u8) -> u8 {
    let mut product = 0;
    while b > 0 {
        if b & 1 == 1 {
            product ^= a;
        }
        a = a << 1 ^ if a & 0x80 != 0 { 0x1d } else { 0 };
        b >>= 1;
    }
    product
}

/// Nothing but the source that it is given decides what the shares are: not one of their bits comes from another
/// generator.
#[test]
fn every_coefficient_is_of_the_source_given() {
    let key = Secret::new(&mut std::array::from_fn(|i| i as u8 * 7 + 3));
    for (need, of) in [(2, 3), (3, 5), (15, 15)] {
        let (mut drawn, mut state) = (Vec::new(), 1u32);
        let source = |out: &mut [u8]| {
            out.fill_with(|| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            });
            drawn.push(out.to_vec());
            Ok(())
        };
        let shares = split_with(&key, Scheme::new(need, of).unwrap(), &[0; 16], source).unwrap();
        assert_eq!(shares.len(), usize::from(of));
        // First the set's mark, then a draw for each coefficient, byte by byte of the key, the highest power first;
        // a coefficient is a draw's first byte.
        let (set, drawn) = drawn.split_first().unwrap();
        assert_eq!(drawn.len(), 32 * usize::from(need - 1));
        for share in &shares {
            assert_eq!(share.set, set[..]);
            for (i, powers) in drawn.chunks(usize::from(need - 1)).enumerate() {
                let high = powers.iter().fold(0, |sum, draw| mul(sum, share.number) ^ draw[0]);
                assert_eq!(share.point.expose()[i], mul(high, share.number) ^ key.expose()[i]);
            }
        }
    }
}

/// What is searched for is kept under this, so that the search does not find itself.
const MASK: u8 = 0xa5;

/// How many of `needles`, which are masked, stand in this process's memory.
fn found(needles: &[Vec<u8>]) -> usize {
    use std::os::unix::fs::FileExt;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    let stands_in = |content: &[u8], needle: &[u8]| {
        let is_it = |w: &[u8]| w.len() >= needle.len() && w.iter().zip(needle).all(|(a, b)| a ^ MASK == *b);
        memchr::memchr_iter(needle[0] ^ MASK, content).any(|at| is_it(&content[at..]))
    };
    let mut seen = vec![false; needles.len()];
    for line in maps.lines().filter(|line| line.contains(" rw")) {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
        // Wiped: else the next search finds the copy that this one has made.
        let mut content = Zeroizing::new(vec![0; usize::try_from(to - from).unwrap()]);
        let Ok(read) = memory.read_at(&mut content, from) else { continue };
        seen.iter_mut().zip(needles).for_each(|(seen, needle)| *seen |= stands_in(&content[..read], needle));
    }
    seen.iter().filter(|seen| **seen).count()
}

/// Neither the coefficients, nor the points, nor the key that was joined of them: with the library's own wiping,
/// ours, and what ciphers leave on the stack.
#[test]
fn nothing_of_a_set_is_left_in_memory() {
    const NEED: usize = 15;
    let masked = |bytes: &[u8]| bytes.iter().map(|b| b ^ MASK).collect::<Vec<u8>>();
    let mut coefficients = vec![Vec::with_capacity(NEED - 1)];
    let (key, mut needles) = (Secret::random().unwrap(), Vec::new());
    {
        let source = |out: &mut [u8]| {
            lamassu_crypto::random(out)?;
            // The first draw is the set's mark.
            if out.len() == 4 {
                if coefficients.last().is_none_or(|c| c.len() == NEED - 1) {
                    coefficients.push(Vec::with_capacity(NEED - 1));
                }
                coefficients.last_mut().unwrap().push(out[0] ^ MASK);
            }
            Ok(())
        };
        let shares = split_with(&key, Scheme::new(15, 15).unwrap(), &[1; 16], source).unwrap();
        // In halves: what the allocator keeps in memory that was given back overwrites the first.
        needles.extend(shares.iter().flat_map(|s| s.point.expose().chunks(16)).map(masked));
        needles.extend(key.expose().chunks(16).map(masked));
        assert_eq!(found(&needles), needles.len(), "the search finds what is there");
        let collected = Collected { shares };
        assert_eq!(collected.join().unwrap().expose(), key.expose());
    }
    drop(key);
    assert_eq!(coefficients.len(), 32);
    needles.append(&mut coefficients);
    assert_eq!(found(&needles), 0);
}

#[test]
fn where_the_source_fails_there_are_no_shares() {
    let key = Secret::new(&mut [7; 32]);
    for good in [0, 1, 2, 40] {
        let mut calls = 0;
        let source = |out: &mut [u8]| {
            calls += 1;
            out.fill(calls);
            if i32::from(calls) > good { Err(NoRandom::from(getrandom::Error::UNEXPECTED)) } else { Ok(()) }
        };
        assert!(split_with(&key, Scheme::new(3, 5).unwrap(), &[0; 16], source).is_err());
    }
}

/// The arithmetic of §4b: the key at x = 0.
#[test]
fn the_field_is_that_of_the_format_page() {
    let inverse = |a: u8| (1..=255).find(|b| mul(a, *b) == 1).unwrap();
    let key = Secret::new(&mut std::array::from_fn(|i| i as u8 * 7 + 1));
    let shares = split(&key, Scheme::new(2, 3).unwrap(), &[0; 16]).unwrap();
    let (a, b) = (&shares[0], &shares[2]);
    for i in 0..32 {
        // Lagrange: y_a · x_b / (x_b − x_a) + y_b · x_a / (x_a − x_b); minus is plus here.
        let d = inverse(a.number ^ b.number);
        let at_zero = mul(a.point.expose()[i], mul(b.number, d)) ^ mul(b.point.expose()[i], mul(a.number, d));
        assert_eq!(at_zero, key.expose()[i]);
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = join(&bytes);
    }

    #[test]
    fn words_in_any_number_never_panic(n in 0usize..100, seed in any::<u64>()) {
        let list = bip39::Language::English.word_list();
        let words: Vec<_> = (0..n).map(|i| list[(seed as usize ^ (i * 7919)) % 2048]).collect();
        prop_assert!(join(words.join(" ").as_bytes()).is_err());
    }
}
