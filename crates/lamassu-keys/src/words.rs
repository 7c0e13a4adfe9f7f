//! The words of recovery keys and their shares.

/// The word of the list that equals a word, or begins with its four letters.
pub(crate) fn whole(word: &str) -> Option<&'static str> {
    const TOLD_APART: usize = 4;
    let language = bip39::Language::English;
    if let Some(i) = language.find_word(word) {
        return Some(language.word_list()[usize::from(i)]);
    }
    if word.len() < TOLD_APART {
        return None;
    }
    let mut found = language.word_list().iter().filter(|w| w.starts_with(word));
    found.next().filter(|_| found.next().is_none()).copied()
}
