//! `prompt`: a passphrase a person types on the terminal, without echo; twice when a slot is made.
//!
//! Standard input is read only when asked for and only where it is no terminal: then the passphrase is its first line and is not confirmed.

use super::Location;
use crate::shares::{Collected, SHARES_MAX, ShareError};
use crate::source::{Ask, Fetched, KeyProvider, PASSPHRASE_MAX, Purpose, SourceError};
use lamassu_crypto::{SecretBytes, wrap};
use lamassu_format::header::SlotKind;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::fd::AsFd;
use std::sync::Arc;
use zeroize::Zeroize;

pub(super) const LOCATION: Location = Location {
    name: "prompt",
    is_scheme: false,
    usage: "prompt",
    kinds: &[SlotKind::Passphrase, SlotKind::Recovery, SlotKind::RecoveryShares],
    interactive: true,
    provider: |argument| match argument {
        None => Some(Arc::new(Prompt)),
        Some(_) => None,
    },
};

struct Prompt;

impl KeyProvider for Prompt {
    fn fetch(&self, kind: SlotKind, ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        if kind == SlotKind::RecoveryShares {
            let lines = ask.stdin && !io::stdin().is_terminal();
            return shares(ask, &mut |text| if lines { stdin_line() } else { ask_terminal(text) }).map(Fetched::bytes);
        }
        let bytes =
            if ask.stdin && !io::stdin().is_terminal() { stdin_line()? } else { typed(ask, &mut ask_terminal)? };
        Ok(Fetched::bytes(bytes))
    }
}

/// Asks, and asks again where a slot is made.
fn typed(
    ask: &Ask<'_>,
    read: &mut dyn FnMut(&str) -> Result<SecretBytes, SourceError>,
) -> Result<SecretBytes, SourceError> {
    match ask.purpose {
        Purpose::Unlock => read(&format!("Passphrase for {}: ", ask.subject)),
        Purpose::Create => {
            let first = read(&format!("New passphrase for {}: ", ask.subject))?;
            if first.expose().is_empty() {
                return Err(SourceError::EmptyPassphrase);
            }
            let second = read("The same again: ")?;
            if wrap::equal(first.expose(), second.expose()) { Ok(first) } else { Err(SourceError::Mismatch) }
        }
    }
}

/// Shares, one to a line, until there are as many as it takes. One that is misread or does not fit ends the attempt: which it was is said.
fn shares(
    ask: &Ask<'_>,
    read: &mut dyn FnMut(&str) -> Result<SecretBytes, SourceError>,
) -> Result<SecretBytes, SourceError> {
    let mut collected = Collected::default();
    let mut all = Vec::with_capacity((PASSPHRASE_MAX + 1) * usize::from(SHARES_MAX));
    loop {
        let text = match collected.progress() {
            None => format!("A share of the recovery key for {}: ", ask.subject),
            Some((found, need)) if found >= need => return Ok(SecretBytes::new(all)),
            Some((found, need)) => format!("Another share ({found} of {need} given): "),
        };
        let given = match read(&text) {
            // Standard input ended: what is missing is said by who joins them.
            Err(SourceError::Stdin { source }) if source.kind() == io::ErrorKind::UnexpectedEof && !all.is_empty() => {
                return Ok(SecretBytes::new(all));
            }
            given => given?,
        };
        let before = collected.progress();
        if let Err(error) = collected.add(given.expose()) {
            all.zeroize();
            return Err(error.into());
        }
        if collected.progress() == before {
            all.zeroize();
            return Err(ShareError::None.into());
        }
        all.extend_from_slice(given.expose());
        all.push(b'\n');
    }
}

/// A secret asked for once, as a passphrase is: on the terminal, or the first line of standard input where that is none.
#[cfg(feature = "pkcs11")]
pub(super) fn secret(text: &str, ask: &Ask<'_>) -> Result<SecretBytes, SourceError> {
    if ask.stdin && !io::stdin().is_terminal() { stdin_line() } else { ask_terminal(text) }
}

fn ask_terminal(text: &str) -> Result<SecretBytes, SourceError> {
    let typed = rpassword::prompt_password(text).map_err(|source| SourceError::Terminal { source })?;
    Ok(SecretBytes::new(typed.into_bytes()))
}

fn stdin_line() -> Result<SecretBytes, SourceError> {
    let fail = |source| SourceError::Stdin { source };
    // Not through `Stdin`: its buffer would keep the passphrase, and swallow what follows the line.
    let mut input = File::from(io::stdin().as_fd().try_clone_to_owned().map_err(fail)?);
    read_line(&mut input, PASSPHRASE_MAX).map_err(fail)?.ok_or(SourceError::PassphraseTooLong { max: PASSPHRASE_MAX })
}

/// One line without its end, byte by byte, or `None` if it has more than `max` bytes. The buffer never grows.
fn read_line(reader: &mut impl Read, max: usize) -> io::Result<Option<SecretBytes>> {
    let mut line = Vec::with_capacity(max + 2);
    let mut byte = [0u8];
    let result = loop {
        match reader.read(&mut byte) {
            Ok(0) if line.is_empty() => break Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(0) => break Ok(()),
            Ok(_) if byte[0] == b'\n' => {
                line.pop_if(|b| *b == b'\r');
                break Ok(());
            }
            Ok(_) if line.len() > max => break Ok(()),
            Ok(_) => line.push(byte[0]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => break Err(e),
        }
    };
    byte.zeroize();
    let bounded = line.len() <= max;
    let line = SecretBytes::new(line);
    result.map(|()| bounded.then_some(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(input: &[u8]) -> Option<Vec<u8>> {
        read_line(&mut &input[..], 4).unwrap().map(|l| l.expose().to_vec())
    }

    #[test]
    fn a_line_ends_at_its_end() {
        assert_eq!(line(b"abc\nmore").unwrap(), b"abc");
        assert_eq!(line(b"abc\r\n").unwrap(), b"abc");
        assert_eq!(line(b"abcd").unwrap(), b"abcd");
        assert_eq!(line(b"\n").unwrap(), b"");
        assert!(line(b"abcde\n").is_none());
        assert!(line(&[b'a'; 10_000]).is_none());
        assert_eq!(read_line(&mut &b""[..], 4).err().unwrap().kind(), io::ErrorKind::UnexpectedEof);
        let mut rest = &b"abc\nmore"[..];
        read_line(&mut rest, 4).unwrap();
        assert_eq!(rest, b"more", "what follows the line is left for others");
    }

    fn answers(purpose: Purpose, answers: &[&str]) -> Result<Vec<u8>, SourceError> {
        let mut answers = answers.iter();
        let ask = Ask { subject: "x", purpose, stdin: false };
        let typed = typed(&ask, &mut |_| Ok(SecretBytes::new(answers.next().unwrap().as_bytes().to_vec())));
        typed.map(|t| t.expose().to_vec())
    }

    #[test]
    fn a_new_passphrase_is_typed_twice() {
        assert_eq!(answers(Purpose::Unlock, &["a"]).unwrap(), b"a");
        assert_eq!(answers(Purpose::Create, &["a", "a"]).unwrap(), b"a");
        assert!(matches!(answers(Purpose::Create, &["a", "b"]), Err(SourceError::Mismatch)));
        assert!(matches!(answers(Purpose::Create, &[""]), Err(SourceError::EmptyPassphrase)));
    }
}
