//! Tokens: MACs of attributes with values, under the key of an epoch. Without the key, tokens of one epoch can be
//! compared, but not computed or linked across epochs.

use crate::{AttributeKind, Attributes, Declarations, Value};
use data_encoding::BASE64URL_NOPAD;
use lamassu_crypto::{Secret, wrap};
use std::collections::{BTreeMap, BTreeSet};

/// Length of a token, in bytes.
const TOKEN_LEN: usize = 16;

/// The numbers that rules compare attributes with, by attribute. Intervals begin at them.
pub type Cuts = BTreeMap<String, BTreeSet<i64>>;

/// An interval from the first number up to, but without, the second; `None` means unbounded.
pub type Interval = (Option<i64>, Option<i64>);

/// The token key of an epoch.
pub struct TokenKey(Secret<32>);

impl TokenKey {
    /// Derives the key of an epoch from a tenant's root key.
    pub fn of(root: &Secret<32>, epoch: u64) -> TokenKey {
        let info = [&b"lamassu v1 access tokens "[..], &epoch.to_le_bytes()].concat();
        TokenKey(wrap::hkdf(root.expose(), b"", &info))
    }

    fn token(&self, parts: &[&str]) -> String {
        let mut input = Vec::new();
        for part in parts {
            input.extend_from_slice(&(part.len() as u64).to_le_bytes());
            input.extend_from_slice(part.as_bytes());
        }
        BASE64URL_NOPAD.encode(&wrap::hmac(&self.0, &input)[..TOKEN_LEN])
    }

    /// Token of a text attribute with this value, or of a set that contains it.
    pub fn text(&self, name: &str, value: &str) -> String {
        self.token(&["text", name, value])
    }

    /// Token of an attribute that is present.
    pub fn present(&self, name: &str) -> String {
        self.token(&["present", name])
    }

    /// Token of a number attribute whose value lies in an interval.
    pub fn interval(&self, name: &str, (from, to): Interval) -> String {
        let bound = |bound: Option<i64>| bound.map_or_else(String::new, |bound| bound.to_string());
        self.token(&["interval", name, &bound(from), &bound(to)])
    }

    /// Token of a person.
    pub fn person(&self, name: &str) -> String {
        self.token(&["person", name])
    }

    /// All tokens of a person's attributes.
    pub fn of_attributes(&self, declared: &Declarations, attributes: &Attributes, cuts: &Cuts) -> BTreeSet<String> {
        let mut tokens = BTreeSet::new();
        for (name, value) in attributes.iter().filter(|(name, _)| declared.contains_key(*name)) {
            if declared.get(name) != Some(&AttributeKind::Set) {
                tokens.insert(self.present(name));
            }
            match value {
                Value::Text(text) => drop(tokens.insert(self.text(name, text))),
                Value::Set(all) => tokens.extend(all.iter().map(|text| self.text(name, text))),
                Value::Number(number) => {
                    let around = |cuts: &BTreeSet<i64>| {
                        let from = cuts.range(..=*number).next_back().copied();
                        (from, cuts.iter().find(|cut| *cut > number).copied())
                    };
                    tokens.extend(cuts.get(name).map(|cuts| self.interval(name, around(cuts))));
                }
            }
        }
        tokens
    }
}

/// The intervals between cuts that lie in `wanted`, whose bounds must be cuts.
pub fn intervals_in(cuts: &BTreeSet<i64>, (from, to): Interval) -> Vec<Interval> {
    let starts = std::iter::once(None).chain(cuts.iter().copied().map(Some));
    let ends = cuts.iter().copied().map(Some).chain(std::iter::once(None));
    let is_in = |(start, end): &Interval| {
        let begins = from.is_none() || start.is_some_and(|start| from <= Some(start));
        let is_over = to.is_none_or(|to| end.is_some_and(|end| end <= to));
        begins && is_over
    };
    starts.zip(ends).filter(is_in).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_of_one_epoch_and_one_meaning() {
        let root = Secret::new(&mut [1; 32]);
        let (one, two) = (TokenKey::of(&root, 1), TokenKey::of(&root, 2));
        assert_eq!(one.text("dept", "finance"), TokenKey::of(&root, 1).text("dept", "finance"));
        let all = [
            one.text("dept", "finance"),
            two.text("dept", "finance"),
            one.text("dep", "tfinance"),
            one.present("dept"),
            one.person("dept"),
            one.interval("dept", (None, Some(1))),
            one.interval("dept", (Some(1), None)),
        ];
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        assert!(all.iter().all(|token| token.len() == 22));
    }

    #[test]
    fn a_number_lies_in_one_interval() {
        let cuts: BTreeSet<i64> = [3, 7].into();
        assert_eq!(intervals_in(&cuts, (Some(3), None)), [(Some(3), Some(7)), (Some(7), None)]);
        assert_eq!(intervals_in(&cuts, (None, Some(3))), [(None, Some(3))]);
        assert_eq!(intervals_in(&cuts, (None, None)).len(), 3);
        let key = TokenKey::of(&Secret::new(&mut [1; 32]), 1);
        let declared: Declarations = [("level".to_owned(), AttributeKind::Number)].into();
        let all_cuts: Cuts = [("level".to_owned(), cuts.clone())].into();
        let (low, middle, high) = ((None, Some(3)), (Some(3), Some(7)), (Some(7), None));
        for (number, interval) in [(2, low), (3, middle), (6, middle), (7, high), (i64::MAX, high), (i64::MIN, low)] {
            let attributes: Attributes = [("level".to_owned(), Value::Number(number))].into();
            let tokens = key.of_attributes(&declared, &attributes, &all_cuts);
            assert_eq!(tokens, [key.present("level"), key.interval("level", interval)].into(), "{number}");
        }
    }
}
