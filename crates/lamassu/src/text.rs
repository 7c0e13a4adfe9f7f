//! Numbers and times as people write and read them.

use lamassu_format::compression::ROUND_MIN;
use lamassu_format::header::Slot;
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_host::compression::{Chosen, NoCodec};
use lamassu_host::slots::is_unsafe;
use lamassu_keys::date::civil;
pub use lamassu_keys::date::time;

/// Parses `4096`, `4K`, `4KiB`, `1M`: powers of 1024, as zfs(8) and mkfs take them.
pub fn parse_block_size(text: &str) -> Result<u32, String> {
    const RULE: &str = "a power of two from 4096 (4K) to 1048576 (1M)";
    parse_size(text).filter(|n| Geometry::new(*n, 1).is_some()).ok_or_else(|| RULE.into())
}

/// The same for measurements, which allow sizes below those of vaults.
pub fn parse_measured_block_size(text: &str) -> Result<u32, String> {
    const RULE: &str = "a power of two from 1024 (1K) to 1048576 (1M)";
    let fits = |n: &u32| n.is_power_of_two() && (1 << 10..=1 << 20).contains(n);
    parse_size(text).filter(fits).ok_or_else(|| RULE.into())
}

/// Parses to how many bytes lengths of compressed blocks are rounded up.
pub fn parse_round(text: &str) -> Result<u32, String> {
    const RULE: &str = "a power of two from 512 to half a block, such as 4K";
    parse_size(text).filter(|n| n.is_power_of_two() && *n >= ROUND_MIN).ok_or_else(|| RULE.into())
}

/// Parses a compression: see [`Chosen`].
pub fn parse_compression(text: &str) -> Result<Chosen, String> {
    text.parse().map_err(|error: NoCodec| error.to_string())
}

/// Parses the bytes of a batch of blocks, for measurements.
pub fn parse_batch(text: &str) -> Result<u32, String> {
    const RULE: &str = "a number of bytes from 1K to 256M, such as 16M";
    parse_size(text).filter(|n| (1 << 10..=256 << 20).contains(n)).ok_or_else(|| RULE.into())
}

fn parse_size(text: &str) -> Option<u32> {
    let lower = text.trim().to_ascii_lowercase();
    let digits_end = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
    let (digits, unit) = lower.split_at(digits_end);
    let factor = match unit {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        _ => return None,
    };
    digits.parse::<u32>().ok()?.checked_mul(factor)
}

/// Parses the size of a volume: `10485760`, `20G`, but not `1.5`; powers of 1024.
pub fn parse_volume_size(text: &str) -> Result<u64, String> {
    const RULE: &str = "a number of bytes, such as 10485760, 512M, 20G or 1T";
    let lower = text.trim().to_ascii_lowercase();
    let digits_end = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
    let (digits, unit) = lower.split_at(digits_end);
    let shift = match unit {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        "p" | "pb" | "pib" => 50,
        _ => return Err(RULE.into()),
    };
    digits.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift)).ok_or_else(|| RULE.into())
}

/// Parses a number of bytes a second: `500K`, `50M`, `1G`; powers of 1024.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    const RULE: &str = "a number of bytes a second, such as 500K, 50M or 1G";
    let lower = text.trim().trim_end_matches("/s").to_ascii_lowercase();
    let digits_end = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
    let (digits, unit) = lower.split_at(digits_end);
    let factor = match unit {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        _ => return Err(RULE.into()),
    };
    digits.parse::<u64>().ok().and_then(|n| n.checked_mul(factor)).filter(|n| *n > 0).ok_or_else(|| RULE.into())
}

/// A suite by name, for clap.
pub fn suites() -> impl clap::builder::TypedValueParser<Value = Suite> {
    use clap::builder::TypedValueParser;
    clap::builder::PossibleValuesParser::new(Suite::ALL.map(Suite::name))
        .map(|name| Suite::from_name(&name).expect("clap lets only these names through"))
}

/// A deduplication domain by name, for clap.
pub fn domains() -> impl clap::builder::TypedValueParser<Value = Domain> {
    use clap::builder::TypedValueParser;
    clap::builder::PossibleValuesParser::new(Domain::ALL.map(Domain::name))
        .map(|name| Domain::from_name(&name).expect("clap lets only these names through"))
}

/// `128 KiB`; bytes below 1 KiB, one decimal above.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if n < 1024 {
        return format!("{n} bytes");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 { format!("{value:.0} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// The start of a day in seconds since 1970: of `2027-01-31` (UTC), or of a number of days from `now`; `None` for
/// `never`.
pub fn parse_expiry(text: &str, now: u64) -> Result<Option<u64>, String> {
    const RULE: &str = "a date as 2027-01-31, a number of days, or never";
    if text == "never" {
        return Ok(None);
    }
    if let Ok(days) = text.parse::<u32>() {
        return Ok(Some(now.saturating_add(u64::from(days) * DAY)));
    }
    let parts: Vec<&str> = text.split('-').collect();
    let digits = |part: &str, len: usize| part.len() == len && part.bytes().all(|b| b.is_ascii_digit());
    let [year, month, day] = parts[..] else { return Err(RULE.into()) };
    if !(digits(year, 4) && digits(month, 2) && digits(day, 2)) {
        return Err(RULE.into());
    }
    let number = |part: &str| part.parse::<i64>().map_err(|_| RULE.to_string());
    let date = (number(year)?, number(month)?, number(day)?);
    // The inverse is exact, so an impossible day shows by a different result.
    let days = days_of(date);
    if civil(days) != date || days < 0 {
        return Err(RULE.into());
    }
    Ok(Some(days.unsigned_abs() * DAY))
}

const DAY: u64 = 86400;

/// The inverse of [`civil`] for possible dates.
fn days_of((year, month, day): (i64, i64, i64)) -> i64 {
    let (year, month_from_march) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// A warning for a slot's owner if it expires within 30 days, or has expired.
pub fn expiry_warning(slot: &Slot, now: u64) -> Option<String> {
    const AHEAD: u64 = 30 * DAY;
    let expires = slot.expires?;
    let (id, label) = (slot.id, printable(&slot.label));
    let date = date(expires);
    let renew = "`lamassu key change` replaces it";
    if expires <= now {
        Some(format!("slot {id} ({label:?}) expired on {date}; {renew}"))
    } else if expires - now <= AHEAD {
        let days = (expires - now).div_ceil(DAY);
        Some(format!("slot {id} ({label:?}) expires on {date}, within {days} days; {renew}"))
    } else {
        None
    }
}

/// `2026-01-31`.
pub fn date(unix_seconds: u64) -> String {
    time(i64::try_from(unix_seconds).unwrap_or(i64::MAX / 2)).chars().take_while(|c| *c != 'T').collect()
}

/// A text from the store on one line: characters that could forge lines, move a cursor or reverse the following text
/// are escaped.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if is_unsafe(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// Lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    data_encoding::HEXLOWER.encode(bytes)
}

/// `drwxr-xr-x`.
pub fn mode(kind: char, bits: u32) -> String {
    let mut out = String::with_capacity(10);
    out.push(kind);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let rwx = bits >> shift & 7;
        out.push(if rwx & 4 != 0 { 'r' } else { '-' });
        out.push(if rwx & 2 != 0 { 'w' } else { '-' });
        out.push(match (rwx & 1 != 0, bits & special != 0) {
            (true, false) => 'x',
            (false, false) => '-',
            (true, true) => letter,
            (false, true) => letter.to_ascii_uppercase(),
        });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes() {
        for (text, size) in [("4096", 4096), ("4K", 4096), ("128k", 131_072), ("128KiB", 131_072), ("1M", 1 << 20)] {
            assert_eq!(parse_block_size(text), Ok(size), "{text}");
        }
        for bad in ["", "K", "4095", "2K", "12K", "2M", "4G", "-4K", "4 apples", "99999999999K"] {
            assert!(parse_block_size(bad).is_err(), "{bad}");
        }
        assert_eq!((parse_measured_block_size("1K"), parse_measured_block_size("1m")), (Ok(1024), Ok(1 << 20)));
        for bad in ["512", "3K", "2M", "K"] {
            assert!(parse_measured_block_size(bad).unwrap_err().contains("1024"), "{bad}");
        }
        assert_eq!((parse_batch("16M"), parse_batch("5000")), (Ok(16 << 20), Ok(5000)));
        for bad in ["0", "1023", "257M", "4G", ""] {
            assert!(parse_batch(bad).unwrap_err().contains("256M"), "{bad}");
        }
    }

    #[test]
    fn sizes_of_volumes() {
        for (text, size) in [("512", 512), ("20G", 20 << 30), ("1t", 1 << 40), ("3KiB", 3072)] {
            assert_eq!(parse_volume_size(text), Ok(size), "{text}");
        }
        for bad in ["", "G", "1.5G", "-1", "20 apples", "99999999P"] {
            assert!(parse_volume_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(time(seconds), text);
        }
    }

    #[test]
    fn expiries() {
        assert_eq!(parse_expiry("never", 5), Ok(None));
        assert_eq!(parse_expiry("0", 5), Ok(Some(5)));
        assert_eq!(parse_expiry("90", 5), Ok(Some(90 * 86400 + 5)));
        for (text, seconds) in [("1970-01-01", 0), ("2000-02-29", 951_782_400), ("2100-03-01", 4_107_542_400)] {
            assert_eq!(parse_expiry(text, 0), Ok(Some(seconds)), "{text}");
            assert_eq!(date(seconds), text);
        }
        for bad in [
            "",
            "-1",
            "2027-1-31",
            "2027-02-29",
            "2027-13-01",
            "2027-00-10",
            "2027-01-31x",
            "1969-12-31",
            "soon",
            "2027-01",
        ] {
            assert!(parse_expiry(bad, 0).is_err(), "{bad}");
        }
    }

    #[test]
    fn no_line_can_be_forged() {
        assert_eq!(printable("a\nclean: \u{1b}[2J ü"), "a\\nclean: \\u{1b}[2J ü");
        assert_eq!(printable("a\u{202e}b\u{2066}c\u{2028}d"), "a\\u{202e}b\\u{2066}c\\u{2028}d");
    }

    #[test]
    fn sizes_and_modes() {
        assert_eq!(bytes(0), "0 bytes");
        assert_eq!(bytes(131_072), "128 KiB");
        assert_eq!(bytes(1_600_000), "1.5 MiB");
        assert_eq!(mode('d', 0o1777), "drwxrwxrwt");
        assert_eq!(mode('-', 0o4644), "-rwSr--r--");
    }
}
