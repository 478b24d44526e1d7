//! Metadata values: borrowed when read, owned when written.

use std::fmt;

use super::cursor::{ByteOrder, Cursor, Stop};
use super::value_type::ValueType;

/// A metadata value, borrowed from its header.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MetadataValue<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    /// Any byte but 0 is true, as in llama.cpp.
    Bool(bool),
    /// Usually text, but the format allows any bytes; see [`MetadataValue::as_str`]. It may hold
    /// control characters: escape it before it reaches a terminal.
    String(&'a [u8]),
    Array(ArrayRef<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> MetadataValue<'a> {
    /// The text of a string that is UTF-8.
    pub fn as_str(&self) -> Option<&'a str> {
        match self {
            Self::String(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// The value of any integer type, if it is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(value) => value.try_into().ok(),
            Self::I16(value) => value.try_into().ok(),
            Self::I32(value) => value.try_into().ok(),
            Self::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(value) => Some(value),
            _ => None,
        }
    }

    pub fn as_array(&self) -> Option<ArrayRef<'a>> {
        match *self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }
}

/// An array of values of one type, borrowed from its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayRef<'a> {
    element: ValueType,
    count: usize,
    /// The elements; for an array of a checked header, exactly these.
    bytes: &'a [u8],
    order: ByteOrder,
}

impl<'a> ArrayRef<'a> {
    /// The type of the elements; never an array.
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = MetadataValue<'a>> + use<'a> {
        let mut cursor = Cursor::new(self.bytes, 0, self.order);
        let element = self.element;
        (0..self.count).map_while(move |_| MetadataValue::read(&mut cursor, element).ok())
    }

    fn read(cursor: &mut Cursor<'a>) -> Result<Self, Stop> {
        let element = ValueType::from_id(cursor.u32()?).filter(|element| *element != ValueType::Array);
        // The parser refuses both an unknown type and an array of arrays: nothing gets here.
        let element = element.ok_or(Stop::NeedMore)?;
        let count = cursor.count(element.least_bytes() as u64)?;
        Ok(Self { element, count, bytes: cursor.rest(), order: cursor.order() })
    }
}

impl fmt::Display for ArrayRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// The number of elements that fit a table row; token lists have 262,144.
        const SHOWN: usize = 8;
        f.write_str("[")?;
        for (index, value) in self.iter().take(SHOWN).enumerate() {
            write!(f, "{}{value}", if index == 0 { "" } else { ", " })?;
        }
        match self.count.saturating_sub(SHOWN) {
            0 => f.write_str("]"),
            more => write!(f, ", … {more} more]"),
        }
    }
}

/// A metadata value to be written.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// Any bytes; text comes from `Value::from("…")`.
    String(Vec<u8>),
    Array(ArrayValue),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// An array of strings that need not be UTF-8.
    pub fn strings(strings: impl IntoIterator<Item = Vec<u8>>) -> Self {
        let values = strings.into_iter().map(Self::String).collect();
        Self::Array(ArrayValue { element: ValueType::String, values })
    }
}

/// An array to be written: values of one type, never arrays. Made by `Value::from(vec![…])` or
/// [`Value::strings`].
#[derive(Clone, Debug, PartialEq)]
pub struct ArrayValue {
    element: ValueType,
    values: Vec<Value>,
}

impl ArrayValue {
    /// An array of `values`, which must have the type `element`, which must not be an array.
    pub const fn new(element: ValueType, values: Vec<Value>) -> Self {
        Self { element, values }
    }

    pub fn element_type(&self) -> ValueType {
        self.element
    }

    pub fn values(&self) -> &[Value] {
        &self.values
    }
}

/// A Rust type whose values can be elements of a metadata array.
pub trait ArrayElement: Into<Value> {
    const TYPE: ValueType;
}

impl<T: ArrayElement> From<Vec<T>> for Value {
    fn from(values: Vec<T>) -> Self {
        let values = values.into_iter().map(Into::into).collect();
        Self::Array(ArrayValue { element: T::TYPE, values })
    }
}

/// What all types of numbers do alike.
macro_rules! numbers {
    ($($variant:ident($native:ty))*) => {
        impl<'a> MetadataValue<'a> {
            pub const fn value_type(&self) -> ValueType {
                match self {
                    $(Self::$variant(_) => ValueType::$variant,)*
                    Self::Bool(_) => ValueType::Bool,
                    Self::String(_) => ValueType::String,
                    Self::Array(_) => ValueType::Array,
                }
            }

            /// An owned copy, for the writer.
            pub fn to_value(&self) -> Value {
                match *self {
                    $(Self::$variant(value) => Value::$variant(value),)*
                    Self::Bool(value) => Value::Bool(value),
                    Self::String(bytes) => Value::String(bytes.to_vec()),
                    Self::Array(array) => {
                        let values = array.iter().map(|value| value.to_value()).collect();
                        Value::Array(ArrayValue { element: array.element, values })
                    }
                }
            }

            /// Reads a value whose length has been checked.
            pub(super) fn read(cursor: &mut Cursor<'a>, value_type: ValueType) -> Result<Self, Stop> {
                Ok(match value_type {
                    $(ValueType::$variant => Self::$variant(<$native>::from_le_bytes(cursor.number()?)),)*
                    ValueType::Bool => Self::Bool(cursor.number::<1>()? != [0]),
                    ValueType::String => Self::String(cursor.string()?),
                    ValueType::Array => Self::Array(ArrayRef::read(cursor)?),
                })
            }
        }

        impl Value {
            pub const fn value_type(&self) -> ValueType {
                match self {
                    $(Self::$variant(_) => ValueType::$variant,)*
                    Self::Bool(_) => ValueType::Bool,
                    Self::String(_) => ValueType::String,
                    Self::Array(_) => ValueType::Array,
                }
            }
        }

        /// Strings are quoted and escaped, so that they are safe for a terminal.
        impl fmt::Display for MetadataValue<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant(value) => value.fmt(f),)*
                    Self::Bool(value) => value.fmt(f),
                    Self::String(bytes) => write!(f, "{:?}", String::from_utf8_lossy(bytes)),
                    Self::Array(array) => array.fmt(f),
                }
            }
        }
    };
}

numbers! { U8(u8) I8(i8) U16(u16) I16(i16) U32(u32) I32(i32) F32(f32) U64(u64) I64(i64) F64(f64) }

macro_rules! elements {
    ($($variant:ident($native:ty) $convert:expr;)*) => {$(
        impl From<$native> for Value {
            fn from(value: $native) -> Self {
                Self::$variant($convert(value))
            }
        }

        impl ArrayElement for $native {
            const TYPE: ValueType = ValueType::$variant;
        }
    )*};
}

elements! {
    U8(u8) std::convert::identity;
    I8(i8) std::convert::identity;
    U16(u16) std::convert::identity;
    I16(i16) std::convert::identity;
    U32(u32) std::convert::identity;
    I32(i32) std::convert::identity;
    F32(f32) std::convert::identity;
    Bool(bool) std::convert::identity;
    String(&str) Vec::from;
    String(String) String::into_bytes;
    U64(u64) std::convert::identity;
    I64(i64) std::convert::identity;
    F64(f64) std::convert::identity;
}
