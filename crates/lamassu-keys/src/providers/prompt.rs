//! `prompt`: a passphrase that a person types on the terminal, without echo; twice when a slot is made. Or the words of
//! a recovery key or of its shares, typed or pasted as they were printed, on several lines: no line is left for a shell
//! to run and to remember.
//!
//! Standard input is read only on request, and only if it is not a terminal: then the passphrase is its first line, and
//! is not confirmed.

use super::Location;
use crate::recovery;
use crate::shares::{self, Collected, SHARES_MAX, ShareError};
use crate::source::{Ask, Fetched, KeyProvider, PASSPHRASE_MAX, Purpose, SourceError};
use lamassu_crypto::{SecretBytes, wrap};
use lamassu_format::header::SlotKind;
use rustix::fs::OFlags;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use zeroize::{Zeroize, Zeroizing};

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
        let given = ask.stdin && !io::stdin().is_terminal();
        let mut terminal = None;
        let mut read = |text: &str| if given { stdin_line() } else { ask_terminal(&mut terminal, text) };
        let bytes = match kind {
            SlotKind::Recovery => recovery_key(ask, &mut read)?,
            SlotKind::RecoveryShares => shares(ask, &mut read)?,
            _ if given => stdin_line()?,
            _ => typed(ask, &mut read)?,
        };
        Ok(Fetched::bytes(bytes))
    }
}

/// Asks, and asks again if a slot is made.
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

/// The words of a recovery key. Asked once for a new slot too: they have a checksum.
fn recovery_key(
    ask: &Ask<'_>,
    read: &mut dyn FnMut(&str) -> Result<SecretBytes, SourceError>,
) -> Result<SecretBytes, SourceError> {
    let text = lines(Heading::Skipped, recovery::WORDS, &mut |found| match found {
        0 => read(&format!("Recovery key for {}: ", ask.subject)),
        _ => read(&more(found, recovery::WORDS)),
    })?;
    // If words are missing, their parser says so.
    Ok(text.unwrap_or_else(|| SecretBytes::new(Vec::new())))
}

/// Asks for shares until there are enough. A share that is misread or does not fit ends the attempt, and the error
/// names it.
fn shares(
    ask: &Ask<'_>,
    read: &mut dyn FnMut(&str) -> Result<SecretBytes, SourceError>,
) -> Result<SecretBytes, SourceError> {
    let mut collected = Collected::default();
    let mut all = Zeroizing::new(Vec::<u8>::with_capacity(TEXT_MAX * usize::from(SHARES_MAX)));
    loop {
        let text = match collected.progress() {
            None => format!("Shares for {}: ", ask.subject),
            Some((given, need)) if given >= need => return Ok(SecretBytes::new(std::mem::take(&mut *all))),
            Some((given, need)) => format!("Another share ({given} of {need} given): "),
        };
        let share = lines(Heading::Ends, shares::WORDS, &mut |found| match found {
            0 => read(&text),
            _ => read(&more(found, shares::WORDS)),
        })?;
        // There are no more: the error of joining says what is missing.
        let Some(share) = share else { return Ok(SecretBytes::new(std::mem::take(&mut *all))) };
        let before = collected.progress();
        collected.add(share.expose())?;
        if collected.progress() == before {
            return Err(ShareError::None.into());
        }
        all.extend_from_slice(share.expose());
    }
}

/// The prompt while words are missing.
fn more(found: usize, need: usize) -> String {
    format!("{found} of {need} words; the next ones: ")
}

/// Most bytes of one text of words: one line of the maximal length, and its end.
const TEXT_MAX: usize = PASSPHRASE_MAX + 1;

/// The effect of a line that begins with `#`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Heading {
    Skipped,
    /// It begins another text, so words are missing.
    Ends,
}

/// Reads one text of at least `need` words, on several lines. `read` gets the number of words so far. An empty line or
/// the end of the input ends the text, but not an empty line at its start: sheets are printed with empty lines in
/// between. `None`: there were no words.
fn lines(
    heading: Heading,
    need: usize,
    read: &mut dyn FnMut(usize) -> Result<SecretBytes, SourceError>,
) -> Result<Option<SecretBytes>, SourceError> {
    // Reserved at once, so that no reallocation leaves a copy behind.
    let mut text = Zeroizing::new(Vec::<u8>::with_capacity(TEXT_MAX));
    let (mut found, mut left, mut may_be_empty) = (0, TEXT_MAX, true);
    while found < need {
        let given = match read(found) {
            Err(error) if is_end(&error) => break,
            given => given?,
        };
        let line = given.expose().trim_ascii();
        // Headings and empty lines count too, so that input of only those ends.
        left = left.checked_sub(line.len() + 1).ok_or(SourceError::PassphraseTooLong { max: PASSPHRASE_MAX })?;
        match line.first() {
            None if found > 0 || !may_be_empty => break,
            None => may_be_empty = false,
            Some(b'#') if found > 0 && heading == Heading::Ends => break,
            Some(b'#') => {}
            Some(_) => {
                found += line.split(|b| !b.is_ascii_alphabetic()).filter(|word| !word.is_empty()).count();
                text.extend_from_slice(line);
                text.push(b'\n');
            }
        }
    }
    Ok((found > 0).then(|| SecretBytes::new(std::mem::take(&mut *text))))
}

/// Whether there is no more input.
fn is_end(error: &SourceError) -> bool {
    let source = match error {
        SourceError::Stdin { source } | SourceError::Terminal { source } => source,
        _ => return false,
    };
    source.kind() == io::ErrorKind::UnexpectedEof
}

/// A secret that is asked for once, as a passphrase: on the terminal, or from the first line of standard input if that
/// is not a terminal.
#[cfg(feature = "pkcs11")]
pub(super) fn secret(text: &str, ask: &Ask<'_>) -> Result<SecretBytes, SourceError> {
    if ask.stdin && !io::stdin().is_terminal() { stdin_line() } else { ask_terminal(&mut None, text) }
}

/// Asks on the terminal. `terminal` keeps its echo off between lines: what is pasted comes before the next line is
/// asked for.
fn ask_terminal(terminal: &mut Option<Terminal>, text: &str) -> Result<SecretBytes, SourceError> {
    let fail = |source| SourceError::Terminal { source };
    let terminal = match terminal {
        Some(terminal) => terminal,
        none => none.insert(Terminal::silent().map_err(fail)?),
    };
    terminal.tty.write_all(text.as_bytes()).map_err(fail)?;
    let line = read_line(&mut terminal.tty, PASSPHRASE_MAX).map_err(fail)?;
    line.ok_or(SourceError::PassphraseTooLong { max: PASSPHRASE_MAX })
}

/// The terminal of this process, without echo until this is dropped. No buffer of this process has what is typed but
/// the one of [`read_line`].
struct Terminal {
    tty: File,
    before: Termios,
}

impl Terminal {
    fn silent() -> io::Result<Terminal> {
        let flags = OFlags::NOCTTY.bits() as i32;
        let tty = File::options().read(true).write(true).custom_flags(flags).open("/dev/tty")?;
        let before = tcgetattr(&tty)?;
        let mut silent = before.clone();
        silent.local_modes.remove(LocalModes::ECHO);
        silent.local_modes.insert(LocalModes::ECHONL);
        tcsetattr(&tty, OptionalActions::Now, &silent)?;
        Ok(Terminal { tty, before })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It may have been hung up.
        let _ = tcsetattr(&self.tty, OptionalActions::Now, &self.before);
    }
}

fn stdin_line() -> Result<SecretBytes, SourceError> {
    let fail = |source| SourceError::Stdin { source };
    // Not by `Stdin`: its buffer would keep the passphrase, and consume what follows the line.
    let mut input = File::from(io::stdin().as_fd().try_clone_to_owned().map_err(fail)?);
    read_line(&mut input, PASSPHRASE_MAX).map_err(fail)?.ok_or(SourceError::PassphraseTooLong { max: PASSPHRASE_MAX })
}

/// One line without its end, read byte by byte; `None`: it has more than `max` bytes. The buffer never grows.
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
    use lamassu_crypto::Secret;

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

    /// What is made of an input, how much of it is left, and what was asked.
    fn given(kind: SlotKind, input: &str) -> (Result<Vec<u8>, SourceError>, usize, Vec<String>) {
        let (mut rest, mut asked) = (input.as_bytes(), Vec::new());
        let ask = Ask { subject: "v", purpose: Purpose::Unlock, stdin: true };
        let mut read = |text: &str| -> Result<SecretBytes, SourceError> {
            asked.push(text.to_string());
            let line = read_line(&mut rest, PASSPHRASE_MAX).map_err(|source| SourceError::Stdin { source })?;
            Ok(line.unwrap())
        };
        let text = match kind {
            SlotKind::Recovery => recovery_key(&ask, &mut read),
            _ => shares(&ask, &mut read),
        };
        (text.map(|t| t.expose().to_vec()), rest.len(), asked)
    }

    fn recovery_of(input: &str) -> (Option<[u8; 32]>, usize) {
        let (text, left, _) = given(SlotKind::Recovery, input);
        (recovery::parse(&text.unwrap()).ok().map(|key| *key.expose()), left)
    }

    #[test]
    fn a_recovery_key_is_read_as_it_was_printed() {
        let key = Secret::new(&mut [0x7f; 32]);
        let text = |bytes: SecretBytes| String::from_utf8(bytes.expose().to_vec()).unwrap();
        let (sheet, row) = (text(recovery::sheet(&key)), text(recovery::words(&key)));
        let found = (Some([0x7f_u8; 32]), "more".len());
        assert_eq!(recovery_of(&format!("{sheet}more")), found, "what follows the words is left for others");
        assert_eq!(recovery_of(&format!("{row}\nmore")), found);
        assert_eq!(recovery_of(&format!("{}\r\nmore", row.to_uppercase().replace(' ', "\r\n"))), found);
        assert_eq!(recovery_of(&format!("\n# on paper\n{}more", sheet.replacen('\n', "\n# on\n", 1))), found);
        // The end of the input, and an empty line.
        assert_eq!(recovery_of(row.as_str()), (found.0, 0));
        assert_eq!(recovery_of(&format!("legal winner\n\n{sheet}")), (None, sheet.len()));
        assert_eq!(recovery_of(&format!("\n\n{sheet}")), (None, sheet.len()));
        assert_eq!(recovery_of(""), (None, 0));
        let (_, _, asked) = given(SlotKind::Recovery, &sheet);
        assert_eq!((asked.len(), asked[0].as_str()), (6, "Recovery key for v: "));
        assert!(asked[5].starts_with("20 of 24 words"), "{asked:?}");
        // Lines without a word in them come to an end.
        let endless = given(SlotKind::Recovery, &"#\n".repeat(PASSPHRASE_MAX)).0;
        assert!(matches!(endless, Err(SourceError::PassphraseTooLong { .. })));
    }

    #[test]
    fn shares_are_read_as_they_were_printed() {
        let scheme = shares::Scheme::new(3, 5).unwrap();
        let key = Secret::new(&mut [0x5a; 32]);
        let all = shares::split(&key, scheme, &[0xab; 16]).unwrap();
        let s: Vec<String> = all.iter().map(|s| String::from_utf8(s.sheet(5).expose().to_vec()).unwrap()).collect();
        let row = |i: usize| {
            let words = s[i].lines().skip(1).flat_map(str::split_whitespace).filter(|w| !w.ends_with('.'));
            words.collect::<Vec<_>>().join(" ") + "\n"
        };
        let last = format!("\n{}", s[4]);
        for input in [
            s.join("\n"),
            s[..3].concat() + &last,
            format!("{}{}{}", row(2), s[0], row(4)),
            format!("{}\n{}\n{}", row(0), row(1), row(2)),
        ] {
            let (text, left, asked) = given(SlotKind::RecoveryShares, &input);
            assert_eq!(shares::join(&text.unwrap()).unwrap().expose(), &[0x5a; 32]);
            assert!(left == 0 || input.ends_with(&last), "no more are read than it takes");
            assert_eq!(asked[0], "Shares for v: ");
            assert!(asked.iter().any(|text| text.starts_with("Another share (2 of 3")), "{asked:?}");
        }
        let err = |input: &str| match given(SlotKind::RecoveryShares, input).0 {
            Err(SourceError::Shares(error)) => error,
            text => shares::join(&text.unwrap()).unwrap_err(),
        };
        assert_eq!(err(""), ShareError::None);
        assert_eq!(err("\n\n"), ShareError::None);
        assert_eq!(err(&s[0]), ShareError::TooFew { found: 1, need: 3 });
        assert_eq!(err(&format!("{}\n\n{}{}", s[0], s[1], s[2])), ShareError::TooFew { found: 1, need: 3 });
        assert_eq!(err(&[&*s[0], &s[1], &s[0]].concat()), ShareError::Duplicate { number: 1 });
        // A line is missing: the heading of the next share ends this one.
        let torn: String = s[0].lines().take(5).map(|line| format!("{line}\n")).collect();
        assert_eq!(err(&(torn.clone() + &s[1])), ShareError::Count { place: 1, found: 16 });
        assert_eq!(err(&(torn + "\n")), ShareError::Count { place: 1, found: 16 });
    }
}
