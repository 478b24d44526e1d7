//! Sizes, rates and numbers as text: written for people, and read from what they type.

/// A size in binary units with three significant digits: `4.34 GiB`, `512 B`.
pub fn human_bytes(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    // From 1023.5 of a unit on, rounding would print 1024 of it instead of 1.00 of the next.
    let is_enough = |(_, unit): &(&str, u128)| u128::from(bytes) * 2 < unit * 2047;
    let (unit, unit_bytes) = UNITS.into_iter().find(is_enough).unwrap_or(LARGEST_UNIT);
    let hundredths = (u128::from(bytes) * 100 + unit_bytes / 2) / unit_bytes;
    match hundredths {
        0..1000 => format!("{}.{:02} {unit}", hundredths / 100, hundredths % 100),
        1000..9995 => format!("{}.{} {unit}", (hundredths + 5) / 100, (hundredths + 5) % 100 / 10),
        _ => format!("{} {unit}", (hundredths + 50) / 100),
    }
}

/// A whole, a part of it, and the rest, in the unit of the whole: `142.1 MiB`, `73.0 MiB`, `69.1 MiB`. The rounded
/// numbers add up.
pub fn human_difference(whole: u64, part: u64) -> [String; 3] {
    let rest = whole.saturating_sub(part);
    let unit = UNITS.iter().rev().find(|(_, unit)| u128::from(whole) >= *unit);
    let Some((name, unit)) = unit.filter(|_| part <= whole) else {
        return [whole, part, rest].map(human_bytes);
    };
    let decimals = if u128::from(whole) < 10 * unit { 2 } else { 1 };
    let scale = 10u128.pow(decimals);
    let [whole, part] = [whole, part].map(|bytes| (u128::from(bytes) * scale + unit / 2) / unit);
    [whole, part, whole.saturating_sub(part)].map(|number| {
        let digits = usize::try_from(decimals).unwrap_or_default();
        format!("{}.{:0digits$} {name}", number / scale, number % scale)
    })
}

/// A size that somebody has chosen, as people write it, without rounding: `20 GB`, `1.5 GiB`, `1234567 B`.
pub fn exact_bytes(bytes: u64) -> String {
    let units = UNITS
        .into_iter()
        .rev()
        .chain(DECIMAL_UNITS.into_iter().rev())
        .filter(|(_, unit)| u128::from(bytes) >= *unit);
    let exact = units.filter_map(|(name, unit)| {
        let hundredths = u128::from(bytes) * 100;
        hundredths.is_multiple_of(unit).then(|| {
            let hundredths = hundredths / unit;
            let number = format!("{}.{:02}", hundredths / 100, hundredths % 100);
            format!("{} {name}", without_zeros(&number))
        })
    });
    let in_bytes = format!("{bytes} B");
    // The first of equally long ones: the largest unit, binary before decimal.
    exact
        .chain([in_bytes])
        .min_by_key(|text| text.trim_end_matches(char::is_alphabetic).len())
        .unwrap_or_default()
}

/// A limit in a message: as it was chosen, or rounded if it was computed.
pub fn limit_bytes(bytes: u64) -> String {
    let exact = exact_bytes(bytes);
    if bytes >= 10_000 && exact.ends_with(" B") { human_bytes(bytes) } else { exact }
}

/// A rate that somebody has chosen: `20 MB/s`.
pub fn exact_rate(bytes_per_second: u64) -> String {
    exact_bytes(bytes_per_second) + "/s"
}

const UNITS: [(&str, u128); 6] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("PiB", 1 << 50),
    ("EiB", 1 << 60),
];
const LARGEST_UNIT: (&str, u128) = ("EiB", 1 << 60);
const DECIMAL_UNITS: [(&str, u128); 5] = [
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("PB", 1_000_000_000_000_000),
];

/// Parses a size. Units are powers of 1024 (`KiB` to `PiB`, or `K` to `P`) or of 1000 (`KB` to `PB`), in upper or lower
/// case. Fractions have at most six digits. A number without a unit is refused, because it is rarely meant to be bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    if let Some(meanings) = meanings_of_number(text, "") {
        return Err(format!("{text:?}: a size needs a unit: write {meanings}"));
    }
    let refused = || format!("{text:?}: not a size; write for example 200GiB or 5GB");
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

/// What may be meant by a number other than 0 without a unit: `20MiB or 20GiB, or 20B for bytes`. `None` for other texts.
pub fn meanings_of_number(text: &str, suffix: &str) -> Option<String> {
    let number: u64 = text.trim().parse().ok().filter(|number| *number > 0)?;
    Some(match (number, suffix) {
        (0..1_000_000, "") => format!("{number}MiB or {number}GiB, or {number}B for bytes"),
        (0..1_000_000, _) => {
            format!("{number}KB{suffix} or {number}MB{suffix}, or {number}B{suffix} for bytes")
        }
        _ => format!("{number}B{suffix} or {number}KiB{suffix}"),
    })
}

/// Parses a number of bytes per second: a size, which may end with `/s`.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let size = text.trim().strip_suffix("/s").unwrap_or(text);
    if let Some(meanings) = meanings_of_number(size, "/s") {
        return Err(format!("{text:?}: a rate needs a unit: write {meanings}"));
    }
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
            ("1024 B", 1024),
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
        for (text, bytes) in [("20MB/s", 20_000_000), ("1 MiB/s ", 1 << 20), ("500K", 500 << 10), ("7B", 7)] {
            assert_eq!(parse_rate(text), Ok(bytes), "{text}");
        }
        for text in ["", "/s", "20MB/h", "20MB/s/s", "fast"] {
            assert!(parse_rate(text).unwrap_err().contains("not a rate"), "{text}");
        }
    }

    #[test]
    fn numbers_without_unit_are_refused_with_their_likely_meanings() {
        for (text, meanings) in [
            ("20", "\"20\": a size needs a unit: write 20MiB or 20GiB, or 20B for bytes"),
            ("5000000", "\"5000000\": a size needs a unit: write 5000000B or 5000000KiB"),
        ] {
            assert_eq!(parse_size(text).unwrap_err(), meanings);
        }
        for (text, meanings) in [
            ("20", "\"20\": a rate needs a unit: write 20KB/s or 20MB/s, or 20B/s for bytes"),
            ("1000000/s", "\"1000000/s\": a rate needs a unit: write 1000000B/s or 1000000KiB/s"),
        ] {
            assert_eq!(parse_rate(text).unwrap_err(), meanings);
        }
        assert_eq!((parse_size("0"), parse_rate("0")), (Ok(0), Ok(0)));
    }

    #[test]
    fn chosen_sizes_are_written_as_they_were_typed() {
        for text in [
            "1 MB",
            "20 GB",
            "200 GiB",
            "1.5 GiB",
            "12.5 MiB",
            "400 KB",
            "512 KiB",
            "1234567 B",
            "7 B",
            "0 B",
            "2 TiB",
            "50 MB",
            "16 MiB",
            "4 KiB",
            "1 KB",
            "10 TB",
            "64 GiB",
            "100 MiB",
            "2.25 GB",
        ] {
            assert_eq!(exact_bytes(parse_size(text).unwrap()), text);
        }
        assert_eq!(exact_rate(20_000_000), "20 MB/s");
        assert_eq!(
            (limit_bytes(20_000_000_000), limit_bytes(1_073_741_825)),
            ("20 GB".into(), "1.00 GiB".into())
        );
        for bytes in [1, 999, 1023, 1025, 123_456_789, u64::MAX, (1 << 60) + 1, 3 << 59] {
            let text = exact_bytes(bytes);
            assert!(parse_size(&text) == Ok(bytes) || text.ends_with("EiB"), "{bytes}: {text}");
        }
    }

    #[test]
    fn parts_of_a_difference_add_up_as_they_are_shown() {
        assert_eq!(human_difference(148_609_433, 76_441_190), ["141.7 MiB", "72.9 MiB", "68.8 MiB"]);
        assert_eq!(human_difference(3 << 30, 1 << 30), ["3.00 GiB", "1.00 GiB", "2.00 GiB"]);
        assert_eq!(human_difference(200 << 20, 200 << 20), ["200.0 MiB", "200.0 MiB", "0.0 MiB"]);
        assert_eq!(human_difference(900, 100), ["900 B", "100 B", "800 B"]);
        assert_eq!(human_difference(900, 4096), ["900 B", "4.00 KiB", "0 B"]);
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
