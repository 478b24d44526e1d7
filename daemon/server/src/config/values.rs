//! Reads the values of the configuration file. Errors say what is expected in the user's terms.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blobd_store_format::size::{exact_bytes, meanings_of_number, parse_rate, parse_size};
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Unexpected, Visitor};
use serde_json::{Value as Json, json};

use crate::user_set::{Member, NameOrNumber};

/// A kind of value that is written as text or as a whole number.
pub(super) trait Value {
    type Output;

    const EXPECTED: &'static str;
    /// The word for such a value in errors about lists.
    const NOUN: &'static str = "value";

    fn from_text(_text: &str) -> Option<Self::Output> {
        None
    }

    fn from_number(_number: u64) -> Option<Self::Output> {
        None
    }

    /// Returns what is expected if the text is wrong.
    fn parse(text: &str) -> Result<Self::Output, String> {
        Self::from_text(text).ok_or_else(|| Self::EXPECTED.to_owned())
    }

    /// Returns what is expected if the number is wrong.
    fn parse_number(number: u64) -> Result<Self::Output, String> {
        Self::from_number(number).ok_or_else(|| Self::EXPECTED.to_owned())
    }

    /// A wrong text as an error names it: without passwords.
    fn shown(text: &str) -> Cow<'_, str> {
        Cow::Borrowed(text)
    }
}

struct Reader<T>(PhantomData<T>);

impl<T: Value> Visitor<'_> for Reader<T> {
    type Value = T::Output;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T::Output, E> {
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_negative) => Err(E::invalid_value(Unexpected::Signed(number), &self)),
        }
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T::Output, E> {
        let refused = |expected: String| E::invalid_value(Unexpected::Unsigned(number), &&*expected);
        T::parse_number(number).map_err(refused)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T::Output, E> {
        T::parse(text).map_err(|expected| E::invalid_value(Unexpected::Str(&T::shown(text)), &&*expected))
    }
}

pub(super) fn required<'de, T: Value, D: Deserializer<'de>>(deserializer: D) -> Result<T::Output, D::Error> {
    deserializer.deserialize_any(Reader::<T>(PhantomData))
}

pub(super) fn optional<'de, T: Value, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T::Output>, D::Error> {
    required::<T, D>(deserializer).map(Some)
}

/// One value, or a list of values; an empty list if the key is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

impl<T> Default for OneOrMore<T> {
    fn default() -> Self {
        Self::More(Vec::new())
    }
}

impl<T> OneOrMore<T> {
    pub(super) fn as_slice(&self) -> &[T] {
        match self {
            Self::One(only) => std::slice::from_ref(only),
            Self::More(all) => all,
        }
    }
}

/// Reads one value, or a list of at least one.
pub(super) fn one_or_more<'de, T: Value, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<OneOrMore<T::Output>, D::Error> {
    deserializer.deserialize_any(ListReader::<T>(PhantomData))
}

struct ListReader<T>(PhantomData<T>);

impl<'de, T: Value> Visitor<'de> for ListReader<T> {
    type Value = OneOrMore<T::Output>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a {0} or a list of {0}s", T::NOUN)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Reader::<T>(PhantomData).visit_str(text).map(OneOrMore::One)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        #[derive(Deserialize)]
        #[serde(transparent, bound = "T: Value")]
        struct Listed<T: Value>(#[serde(deserialize_with = "required::<T, _>")] T::Output);

        let mut values = Vec::new();
        while let Some(Listed::<T>(value)) = list.next_element()? {
            values.push(value);
        }
        if values.is_empty() {
            let what = format!("expected at least one {}, found an empty list", T::NOUN);
            return Err(A::Error::custom(what));
        }
        Ok(OneOrMore::More(values))
    }
}

/// A size with a unit: of a number without one, people mean gibibytes as often as bytes.
pub(super) struct Size;

impl Value for Size {
    type Output = u64;

    const EXPECTED: &'static str = "a size such as \"200 GiB\"";

    fn parse(text: &str) -> Result<u64, String> {
        parse_size(text).map_err(|_refusal| expected_unit(text, "", Self::EXPECTED))
    }

    fn parse_number(number: u64) -> Result<u64, String> {
        Self::parse(&number.to_string())
    }
}

pub(super) struct Rate;

impl Value for Rate {
    type Output = u64;

    const EXPECTED: &'static str = "a rate such as \"50 MiB/s\"";

    fn parse(text: &str) -> Result<u64, String> {
        parse_rate(text).map_err(|_refusal| expected_unit(text, "/s", Self::EXPECTED))
    }

    fn parse_number(number: u64) -> Result<u64, String> {
        Self::parse(&number.to_string())
    }
}

/// What is expected, for the error about a number without a unit or a text that is not a size.
fn expected_unit(text: &str, suffix: &str, expected: &str) -> String {
    match meanings_of_number(text, suffix) {
        Some(meanings) => format!("a unit in quotes: {meanings}"),
        None => expected.to_owned(),
    }
}

/// A size in a key whose name says that numbers are bytes.
pub(super) struct Bytes;

impl Value for Bytes {
    type Output = u64;

    const EXPECTED: &'static str = "a size such as \"200 GiB\" or a number of bytes";

    fn from_text(text: &str) -> Option<u64> {
        text.parse().ok().or_else(|| parse_size(text).ok())
    }

    fn from_number(number: u64) -> Option<u64> {
        Some(number)
    }
}

/// A rate in a key whose name says that numbers are bytes per second.
pub(super) struct BytesPerSecond;

impl Value for BytesPerSecond {
    type Output = u64;

    const EXPECTED: &'static str = "a rate such as \"50 MiB/s\" or a number of bytes per second";

    fn from_text(text: &str) -> Option<u64> {
        text.parse().ok().or_else(|| parse_rate(text).ok())
    }

    fn from_number(number: u64) -> Option<u64> {
        Some(number)
    }
}

pub(super) struct LoopbackAddress;

impl Value for LoopbackAddress {
    type Output = SocketAddr;

    const EXPECTED: &'static str = "an address of loopback with a port, such as \"127.0.0.1:9750\"";

    fn from_text(text: &str) -> Option<SocketAddr> {
        text.parse().ok().filter(|address: &SocketAddr| address.ip().is_loopback())
    }
}

pub(super) struct Days;

impl Days {
    /// More would be a mistake.
    const MAX: Duration = Duration::from_secs(100 * 365 * 86400);
}

impl Value for Days {
    type Output = Duration;

    const EXPECTED: &'static str = "a number of days or a time such as \"2 weeks\"";

    fn from_text(text: &str) -> Option<Duration> {
        humantime::parse_duration(text).ok().filter(|time| *time <= Self::MAX)
    }

    fn from_number(number: u64) -> Option<Duration> {
        number.checked_mul(86400).map(Duration::from_secs).filter(|time| *time <= Self::MAX)
    }
}

pub(super) struct Percent;

impl Value for Percent {
    type Output = u8;

    const EXPECTED: &'static str = "a percentage from 0 to 100";

    fn from_text(text: &str) -> Option<u8> {
        text.strip_suffix('%')?.trim().parse().ok().and_then(Self::from_number)
    }

    fn from_number(number: u64) -> Option<u8> {
        u8::try_from(number).ok().filter(|percent| *percent <= 100)
    }
}

/// A relative path would mean another file in each directory in which a command is started.
pub(super) struct AbsolutePath;

impl Value for AbsolutePath {
    type Output = PathBuf;

    const EXPECTED: &'static str = "an absolute path such as \"/srv/models\"";

    fn from_text(text: &str) -> Option<PathBuf> {
        Path::new(text).is_absolute().then(|| text.into())
    }
}

pub(super) struct Mode;

impl Value for Mode {
    type Output = u32;

    const EXPECTED: &'static str = "an octal mode such as \"0660\", at least \"0600\"";

    fn from_text(text: &str) -> Option<u32> {
        let digits = text.trim_start_matches("0o");
        let mode = u64::from_str_radix(digits, 8).ok().filter(|_| (3..=5).contains(&digits.len()))?;
        Self::from_number(mode)
    }

    /// The owner's bits must be there: the owner could not connect. 660 written in decimal has others.
    fn from_number(number: u64) -> Option<u32> {
        let is_mode = number & !0o777 == 0 && number & 0o600 == 0o600;
        u32::try_from(number).ok().filter(|_| is_mode)
    }
}

pub(super) struct Group;

impl Value for Group {
    type Output = NameOrNumber;

    const EXPECTED: &'static str = "the name or the number of a group";

    fn from_text(text: &str) -> Option<NameOrNumber> {
        name_or_number(text)
    }

    fn from_number(number: u64) -> Option<NameOrNumber> {
        account_number(number).map(NameOrNumber::Number)
    }
}

impl Value for Member {
    type Output = Self;

    const EXPECTED: &'static str = "a user, a group such as \"@staff\", a number, or \"*\"";

    fn from_text(text: &str) -> Option<Self> {
        match text.strip_prefix('@') {
            _ if text == "*" => Some(Self::Everyone),
            Some(group) => name_or_number(group).map(Self::Group),
            None => name_or_number(text).map(Self::User),
        }
    }

    fn from_number(number: u64) -> Option<Self> {
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

pub(super) fn optional_size(bytes: Option<u64>) -> Json {
    bytes.map_or(Json::Null, size_value)
}

/// A size as the configuration file has it.
pub(super) fn size_value(bytes: u64) -> Json {
    json!(exact_bytes(bytes))
}
