//! Reads the values of the configuration file. What is expected is said in the user's terms.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blobd_store_format::size::{parse_rate, parse_size};
use serde::de::{Deserializer, Error, Unexpected, Visitor};

use super::SocketGroup;
use crate::user_set::{Member, NameOrNumber};

/// A value that is written as text or as a whole number.
pub(super) trait Value: Sized {
    const EXPECTED: &'static str;

    /// The value of this text; `None` if it is not one.
    fn of_text(text: &str) -> Option<Self>;

    /// The value of this number; `None` if it is not one.
    fn of_number(_number: u64) -> Option<Self> {
        None
    }

    /// A text that is not one, as an error names it: without passwords.
    fn shown(text: &str) -> Cow<'_, str> {
        Cow::Borrowed(text)
    }
}

/// Reads a [`Value`].
struct Reader<T>(PhantomData<T>);

impl<T: Value> Visitor<'_> for Reader<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        let value = u64::try_from(number).ok().and_then(T::of_number);
        value.ok_or_else(|| E::invalid_value(Unexpected::Signed(number), &self))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        T::of_number(number).ok_or_else(|| E::invalid_value(Unexpected::Unsigned(number), &self))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        T::of_text(text).ok_or_else(|| E::invalid_value(Unexpected::Str(&T::shown(text)), &self))
    }
}

pub(super) fn read<'de, T: Value, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    deserializer.deserialize_any(Reader(PhantomData))
}

pub(super) fn of_text<T: Value, E: Error>(text: &str) -> Result<T, E> {
    Reader(PhantomData).visit_str(text)
}

struct Size(u64);

impl Value for Size {
    const EXPECTED: &'static str = "a size such as \"200 GiB\" or a number of bytes";

    fn of_text(text: &str) -> Option<Self> {
        parse_size(text).ok().map(Self)
    }

    fn of_number(number: u64) -> Option<Self> {
        Some(Self(number))
    }
}

pub(super) fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    read(deserializer).map(|Size(bytes)| Some(bytes))
}

struct LoopbackAddress(SocketAddr);

impl Value for LoopbackAddress {
    const EXPECTED: &'static str = "an address of loopback with a port, such as \"127.0.0.1:9750\"";

    fn of_text(text: &str) -> Option<Self> {
        text.parse().ok().filter(|address: &SocketAddr| address.ip().is_loopback()).map(Self)
    }
}

pub(super) fn loopback_address<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<SocketAddr>, D::Error> {
    read(deserializer).map(|LoopbackAddress(address)| Some(address))
}

/// A size that is not optional.
pub(super) fn whole_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    read(deserializer).map(|Size(bytes)| bytes)
}

struct Rate(u64);

impl Value for Rate {
    const EXPECTED: &'static str = "a rate such as \"50 MiB/s\" or a number of bytes per second";

    fn of_text(text: &str) -> Option<Self> {
        parse_rate(text).ok().map(Self)
    }

    fn of_number(number: u64) -> Option<Self> {
        Some(Self(number))
    }
}

pub(super) fn rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    read(deserializer).map(|Rate(bytes)| bytes)
}

pub(super) fn optional_rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    rate(deserializer).map(Some)
}

struct Days(Duration);

impl Days {
    /// More would be a mistake.
    const MAX: Duration = Duration::from_secs(100 * 365 * 86400);
}

impl Value for Days {
    const EXPECTED: &'static str = "a number of days or a time such as \"2 weeks\"";

    fn of_text(text: &str) -> Option<Self> {
        let time = humantime::parse_duration(text).ok()?;
        (time <= Self::MAX).then_some(Self(time))
    }

    fn of_number(number: u64) -> Option<Self> {
        let time = Duration::from_secs(number.checked_mul(86400)?);
        (time <= Self::MAX).then_some(Self(time))
    }
}

pub(super) fn days<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    read(deserializer).map(|Days(time)| time)
}

struct Percent(u8);

impl Value for Percent {
    const EXPECTED: &'static str = "a percentage from 0 to 100";

    fn of_text(text: &str) -> Option<Self> {
        text.strip_suffix('%')?.trim().parse().ok().and_then(Self::of_number)
    }

    fn of_number(number: u64) -> Option<Self> {
        u8::try_from(number).ok().filter(|percent| *percent <= 100).map(Self)
    }
}

pub(super) fn percent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u8, D::Error> {
    read(deserializer).map(|Percent(percent)| percent)
}

pub(super) fn optional_percent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u8>, D::Error> {
    percent(deserializer).map(Some)
}

/// A relative path would mean another file in each directory in which a command is started.
impl Value for PathBuf {
    const EXPECTED: &'static str = "an absolute path such as \"/srv/models\"";

    fn of_text(text: &str) -> Option<Self> {
        Path::new(text).is_absolute().then(|| Self::from(text))
    }
}

pub(super) fn path<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
    read(deserializer).map(Some)
}

struct Mode(u32);

impl Value for Mode {
    const EXPECTED: &'static str = "an octal mode such as \"0660\", at least \"0600\"";

    fn of_text(text: &str) -> Option<Self> {
        let is_octal = (3..=5).contains(&text.trim_start_matches("0o").len());
        let mode = u64::from_str_radix(text.trim_start_matches("0o"), 8).ok()?;
        if is_octal { Self::of_number(mode) } else { None }
    }

    /// The owner's bits must be there: the owner could not connect. 660 written in decimal has others.
    fn of_number(number: u64) -> Option<Self> {
        let is_mode = number & !0o777 == 0 && number & 0o600 == 0o600;
        if is_mode { u32::try_from(number).ok().map(Self) } else { None }
    }
}

pub(super) fn mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    read(deserializer).map(|Mode(mode)| Some(mode))
}

impl Value for SocketGroup {
    const EXPECTED: &'static str = "the name or the number of a group";

    fn of_text(text: &str) -> Option<Self> {
        name_or_number(text).map(|group| match group {
            NameOrNumber::Name(name) => Self::Name(name),
            NameOrNumber::Number(gid) => Self::Number(gid),
        })
    }

    fn of_number(number: u64) -> Option<Self> {
        account_number(number).map(Self::Number)
    }
}

pub(super) fn group<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketGroup>, D::Error> {
    read(deserializer).map(Some)
}

impl Value for Member {
    const EXPECTED: &'static str = "a user, a group such as \"@staff\", a number, or \"*\"";

    fn of_text(text: &str) -> Option<Self> {
        if text == "*" {
            return Some(Self::Everyone);
        }
        match text.strip_prefix('@') {
            Some(group) => name_or_number(group).map(Self::Group),
            None => name_or_number(text).map(Self::User),
        }
    }

    fn of_number(number: u64) -> Option<Self> {
        account_number(number).map(NameOrNumber::Number).map(Self::User)
    }
}

/// Names of directory services have `@`, spaces and backslashes: `ann@example.com`, `DOMAIN\domain users`.
fn name_or_number(text: &str) -> Option<NameOrNumber> {
    if let Ok(number) = text.parse() {
        return account_number(number).map(NameOrNumber::Number);
    }
    let is_whole = !text.is_empty() && text.trim() == text && !text.starts_with('@');
    // The colon separates the fields in which every name service answers; a star would look like a pattern.
    let is_name = is_whole && !text.contains([':', '*']) && !text.contains(char::is_control);
    is_name.then(|| NameOrNumber::Name(text.to_owned()))
}

/// The largest number means no user and no group.
fn account_number(number: u64) -> Option<u32> {
    u32::try_from(number).ok().filter(|id| *id != u32::MAX)
}

/// The member that this text names, if it is one.
pub(super) fn member_of(text: &str) -> Option<Member> {
    Member::of_text(text)
}

pub(super) fn member<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Member, D::Error> {
    read(deserializer)
}

pub(super) fn optional_size(bytes: Option<u64>) -> serde_json::Value {
    bytes.map_or(serde_json::Value::Null, size_value)
}

/// A size as the configuration file has it.
pub(super) fn size_value(bytes: u64) -> serde_json::Value {
    in_whole_units(bytes).map_or_else(|| serde_json::json!(bytes), |text| serde_json::json!(text))
}

/// A size as error messages show it.
pub(super) fn size_text(bytes: u64) -> String {
    in_whole_units(bytes).unwrap_or_else(|| format!("{bytes} bytes"))
}

/// In the largest unit that leaves no fraction, if there is one.
fn in_whole_units(bytes: u64) -> Option<String> {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let unit = UNITS.into_iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit));
    unit.map(|(name, unit)| format!("{} {name}", bytes / unit))
}
