//! Sizes, rates and numbers as text: written for people, and read from what they type.

/// A size in binary units with three significant digits: `4.34 GiB`, `512 B`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut unit_bytes = 1024u128;
    let mut unit = "KiB";
    // From 1023.5 of a unit on, rounding would print 1024 of it instead of 1.00 of the next.
    for name in UNITS.into_iter().skip(1) {
        if u128::from(bytes) * 2 < unit_bytes * 2047 {
            break;
        }
        (unit_bytes, unit) = (unit_bytes * 1024, name);
    }
    let hundredths = (u128::from(bytes) * 100 + unit_bytes / 2) / unit_bytes;
    match hundredths {
        0..1000 => format!("{}.{:02} {unit}", hundredths / 100, hundredths % 100),
        1000..9995 => format!("{}.{} {unit}", (hundredths + 5) / 100, (hundredths + 5) % 100 / 10),
        _ => format!("{} {unit}", (hundredths + 50) / 100),
    }
}

/// Parses a number of bytes. Units are powers of 1024 (`KiB` to `PiB`, or `K` to `P`) or of 1000 (`KB` to
/// `PB`), in upper or lower case. Fractions have at most six digits.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let refused = || format!("{text:?}: not a size; write for example 200GiB, 5GB or a number of bytes");
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit_bytes = unit_bytes(unit.trim()).ok_or_else(refused)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.len() > 6 || (whole.is_empty() && fraction.is_empty()) {
        return Err(refused());
    }
    let digits = |digits: &str| if digits.is_empty() { Some(0u128) } else { digits.parse().ok() };
    let whole = digits(whole).ok_or_else(refused)?;
    let scale = (0..fraction.len()).fold(1u128, |scale, _| scale * 10);
    let part = digits(fraction).ok_or_else(refused)?;
    let bytes = whole.checked_mul(unit_bytes).and_then(|bytes| bytes.checked_add(part * unit_bytes / scale));
    bytes.and_then(|bytes| u64::try_from(bytes).ok()).ok_or_else(refused)
}

/// Parses a number of bytes per second: a size, which may end with `/s`.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let size = text.trim().strip_suffix("/s").unwrap_or(text);
    parse_size(size).map_err(|_refusal| format!("{text:?}: not a rate; write for example 20MB/s or 500KiB"))
}

fn unit_bytes(unit: &str) -> Option<u128> {
    let unit = unit.to_ascii_lowercase();
    let (letter, base) = match unit.strip_suffix("ib") {
        Some(letter) => (letter, 1024u128),
        None => match unit.strip_suffix('b') {
            Some(letter) => (letter, 1000),
            None => (unit.as_str(), 1024),
        },
    };
    let power = match letter {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        "p" => 5,
        _ => return None,
    };
    Some(base.pow(power))
}

/// A number as people write it, with this many significant digits: `-0.507`, `12.5`, `1.2e-9`.
pub fn human_number(number: f64, digits: usize) -> String {
    // Powers of ten that are written without an exponent.
    const PLAIN: std::ops::Range<i32> = -5..9;
    let scientific = format!("{number:.*e}", digits.saturating_sub(1));
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scientific };
    let Some(power) = exponent.parse::<i32>().ok().filter(|power| PLAIN.contains(power)) else {
        return format!("{}e{exponent}", without_zeros(mantissa));
    };
    let decimals = i64::try_from(digits).unwrap_or(0) - 1 - i64::from(power);
    without_zeros(&format!("{number:.*}", usize::try_from(decimals).unwrap_or(0))).to_owned()
}

/// Without zeros at the end of the fraction.
fn without_zeros(number: &str) -> &str {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_significant_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (10 << 20, "10.0 MiB"),
            (1 << 30, "1.00 GiB"),
            (4_661_224_676, "4.34 GiB"),
            (1998 << 20, "1.95 GiB"),
            ((100 << 20) - 1, "100 MiB"),
            (1023 << 20, "1023 MiB"),
            ((1 << 30) - 1, "1.00 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(human_bytes(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn sizes_are_read_in_every_common_spelling() {
        for (text, bytes) in [
            ("0", 0),
            ("1024", 1024),
            ("1k", 1024),
            ("1 KiB", 1024),
            ("1KB", 1000),
            ("12.5 MiB", 13_107_200),
            (" 2tib ", 2 << 40),
            (".5G", 1 << 29),
            ("7 B", 7),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn rates_may_say_per_second() {
        for (text, bytes) in [("20MB/s", 20_000_000), ("1 MiB/s ", 1 << 20), ("500K", 500 << 10), ("7", 7)] {
            assert_eq!(parse_rate(text), Ok(bytes), "{text}");
        }
        for text in ["", "/s", "20MB/h", "20MB/s/s", "fast"] {
            assert!(parse_rate(text).unwrap_err().contains("not a rate"), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_refused() {
        for text in ["", "GiB", "-1", "1.2.3", "1 XB", "99999999999 PiB", "1,5G", ".", "0.12345678G"] {
            assert!(parse_size(text).unwrap_err().contains("not a size"), "{text}");
        }
    }

    #[test]
    fn numbers_are_written_without_exponents_unless_they_are_very_large_or_small() {
        for (number, digits, text) in [
            (-0.507, 6, "-0.507"),
            (-0.507_123_456, 4, "-0.5071"),
            (0.0, 6, "0"),
            (1.0, 6, "1"),
            (100.0, 4, "100"),
            (12345.678, 4, "12346"),
            (0.999_999_9, 3, "1"),
            (0.000_012_3, 6, "0.0000123"),
            (0.000_001_23, 6, "1.23e-6"),
            (-3.0e38, 6, "-3e38"),
            (f64::MIN_POSITIVE, 3, "2.23e-308"),
            (f64::NAN, 3, "NaN"),
            (f64::INFINITY, 3, "inf"),
        ] {
            assert_eq!(human_number(number, digits), text);
        }
    }
}
