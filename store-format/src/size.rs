//! Sizes as text.

/// A size in binary units with three significant digits: `4.34 GiB`, `512 B`.
#[must_use]
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
}
