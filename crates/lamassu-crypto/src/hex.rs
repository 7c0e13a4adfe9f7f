//! Known answers, as they are written.

/// Bytes of a hex constant.
pub(crate) const fn hex<const N: usize>(digits: &str) -> [u8; N] {
    const fn value(digit: u8) -> u8 {
        match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => panic!("a hex digit"),
        }
    }
    let digits = digits.as_bytes();
    assert!(digits.len() == 2 * N);
    let mut out = [0; N];
    let mut i = 0;
    while i < N {
        out[i] = value(digits[2 * i]) << 4 | value(digits[2 * i + 1]);
        i += 1;
    }
    out
}
