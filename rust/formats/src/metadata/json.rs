//! Strict parsing of JSON into plain records over a streaming parser: fields in any order, none of them twice, plain
//! integers, bounded lists and bounded nesting. Unknown fields are skipped, under the same limits.

use reshard_core::header::{MAX_RANK, NUMBER_END};
use serde::de::{self, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

/// Deepest nesting of values that are skipped.
const MAX_DEPTH: usize = 16;
/// Most unknown fields of one object.
const MAX_UNKNOWN: usize = 64;

/// An object with known fields.
pub(super) trait Record<'de> {
    /// Their names.
    const FIELDS: &'static [&'static str];

    /// Reads the value of a field from `map`. It is called at most once for each field.
    fn field<A: MapAccess<'de>>(&mut self, field: usize, map: &mut A) -> Result<(), A::Error>;
}

/// Reads the value of a field.
pub(super) fn read<'de, A: MapAccess<'de>, S: DeserializeSeed<'de>>(
    map: &mut A,
    seed: S,
    into: &mut Option<S::Value>,
) -> Result<(), A::Error> {
    *into = Some(map.next_value_seed(seed)?);
    Ok(())
}

/// An object whose keys are data.
pub(super) trait Members<'de> {
    /// Reads the value of a key from `map`. A key can occur more than once.
    fn member<A: MapAccess<'de>>(
        &mut self,
        key: Cow<'de, str>,
        map: &mut A,
    ) -> Result<(), A::Error>;
}

/// Reads an object into its members.
pub(super) struct Map<'m, M> {
    pub(super) members: &'m mut M,
    pub(super) expecting: &'static str,
}

impl<'de, M: Members<'de>> DeserializeSeed<'de> for Map<'_, M> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de, M: Members<'de>> Visitor<'de> for Map<'_, M> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expecting)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key_seed(Text)? {
            self.members.member(key, &mut map)?;
        }
        Ok(())
    }
}

/// Reads an object into a record.
pub(super) struct Object<'r, R>(pub(super) &'r mut R);

impl<'de, R: Record<'de>> DeserializeSeed<'de> for Object<'_, R> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de, R: Record<'de>> Visitor<'de> for Object<'_, R> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with {}", R::FIELDS.join(", "))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = 0_u32;
        let mut unknown: Vec<Cow<'de, str>> = Vec::new();
        while let Some(key) = map.next_key_seed(Text)? {
            let field = R::FIELDS.iter().position(|&field| field == key);
            let is_new = match field {
                Some(field) => seen & 1 << field == 0,
                None => !unknown.contains(&key),
            };
            if !is_new {
                return Err(A::Error::custom(format_args!("field `{key}` occurs twice")));
            }
            if let Some(field) = field {
                seen |= 1 << field;
                self.0.field(field, &mut map)?;
            } else if unknown.len() == MAX_UNKNOWN {
                return Err(A::Error::custom(format_args!(
                    "more than {MAX_UNKNOWN} unknown fields"
                )));
            } else {
                unknown.push(key);
                map.next_value_seed(Skip::default())?;
            }
        }
        Ok(())
    }
}

/// Reads a list of records.
#[derive(Default)]
pub(super) struct Records<R>(PhantomData<R>);

impl<'de, R: Record<'de> + Default> DeserializeSeed<'de> for Records<R> {
    type Value = Vec<R>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Vec<R>, D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de, R: Record<'de> + Default> Visitor<'de> for Records<R> {
    type Value = Vec<R>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of objects with {}", R::FIELDS.join(", "))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<R>, A::Error> {
        let mut records = Vec::new();
        loop {
            let mut record = R::default();
            if seq.next_element_seed(Object(&mut record))?.is_none() {
                return Ok(records);
            }
            records.push(record);
        }
    }
}

/// Reads a record or null.
#[derive(Default)]
pub(super) struct Nullable<R>(PhantomData<R>);

impl<'de, R: Record<'de> + Default> DeserializeSeed<'de> for Nullable<R> {
    type Value = Option<R>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Option<R>, D::Error> {
        json.deserialize_option(self)
    }
}

impl<'de, R: Record<'de> + Default> Visitor<'de> for Nullable<R> {
    type Value = Option<R>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "null or an object with {}", R::FIELDS.join(", "))
    }

    fn visit_none<E: de::Error>(self) -> Result<Option<R>, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, json: D) -> Result<Option<R>, D::Error> {
        let mut record = R::default();
        Object(&mut record).deserialize(json)?;
        Ok(Some(record))
    }
}

/// Reads a string, without a copy if it has no escapes.
#[derive(Clone, Copy)]
pub(super) struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Cow<'de, str>, D::Error> {
        json.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Text {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}

/// Reads a plain integer from 0 to 2^63 - 1.
#[derive(Clone, Copy)]
pub(super) struct Number;

impl<'de> DeserializeSeed<'de> for Number {
    type Value = u64;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<u64, D::Error> {
        json.deserialize_u64(self)
    }
}

impl Visitor<'_> for Number {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a plain integer from 0 to 2^63 - 1")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<u64, E> {
        if number < NUMBER_END {
            Ok(number)
        } else {
            Err(E::invalid_value(de::Unexpected::Unsigned(number), &self))
        }
    }
}

/// Reads a list of values of one kind.
pub(super) struct List<S> {
    max_len: usize,
    seed: S,
    what: &'static str,
}

impl List<Number> {
    pub(super) fn numbers(max_len: usize) -> Self {
        Self {
            max_len,
            seed: Number,
            what: "plain integers",
        }
    }
}

impl List<Text> {
    pub(super) fn texts(max_len: usize) -> Self {
        Self {
            max_len,
            seed: Text,
            what: "strings",
        }
    }
}

impl List<Axes> {
    /// `tensor_map`: for each dim an axis, -1, or a list of them. -1 means no axis and is dropped.
    pub(super) fn tensor_map() -> Self {
        Self::axes(false)
    }

    fn axes(is_nested: bool) -> Self {
        Self {
            max_len: MAX_RANK,
            seed: Axes { is_nested },
            what: "axes, -1 and lists of them",
        }
    }
}

impl<'de, S: DeserializeSeed<'de> + Copy> DeserializeSeed<'de> for List<S> {
    type Value = Vec<S::Value>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de, S: DeserializeSeed<'de> + Copy> Visitor<'de> for List<S> {
    type Value = Vec<S::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {} {}", self.max_len, self.what)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = seq.next_element_seed(self.seed)? {
            if values.len() == self.max_len {
                return Err(A::Error::custom(format_args!(
                    "a list has more than {} entries",
                    self.max_len
                )));
            }
            values.push(value);
        }
        Ok(values)
    }
}

/// An axis, -1, or a list of them, which is not nested further.
#[derive(Clone, Copy)]
pub(super) struct Axes {
    is_nested: bool,
}

impl<'de> DeserializeSeed<'de> for Axes {
    type Value = Vec<u64>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Vec<u64>, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Axes {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_nested {
            "an axis or -1"
        } else {
            "an axis, -1 or a list of them"
        })
    }

    fn visit_u64<E: de::Error>(self, axis: u64) -> Result<Vec<u64>, E> {
        Ok(vec![axis])
    }

    fn visit_i64<E: de::Error>(self, axis: i64) -> Result<Vec<u64>, E> {
        if axis == -1 {
            Ok(Vec::new())
        } else {
            Err(E::invalid_value(de::Unexpected::Signed(axis), &self))
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Vec<u64>, A::Error> {
        if self.is_nested {
            return Err(A::Error::invalid_type(de::Unexpected::Seq, &self));
        }
        Ok(List::axes(true).visit_seq(seq)?.concat())
    }
}

/// Skips a value of any type. A value that is nested too deep or has duplicate keys is an error.
#[derive(Default)]
pub(super) struct Skip {
    depth: usize,
}

impl Skip {
    fn deeper<E: de::Error>(&self) -> Result<Self, E> {
        if self.depth == MAX_DEPTH {
            return Err(E::custom(format_args!(
                "nested deeper than {MAX_DEPTH} levels"
            )));
        }
        Ok(Self {
            depth: self.depth + 1,
        })
    }
}

impl<'de> DeserializeSeed<'de> for Skip {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Skip {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(self.deeper()?)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key_seed(Text)? {
            if seen.contains(&key) {
                return Err(A::Error::custom(format_args!("key `{key}` occurs twice")));
            }
            seen.insert(key);
            map.next_value_seed(self.deeper()?)?;
        }
        Ok(())
    }
}
