//! Decodes a `metadata.json` in which most values are texts that occurred before.
//!
//! Tensors that lie alike have one text behind their names, and shards in the same files one list of files. Which text
//! follows which one recurs, too: a text is mostly compared with the one that is expected, and neither searched nor
//! decoded. Others are decoded as in a strict pass.
//!
//! Whatever is not as expected ends the attempt: [`super::decode`] then makes a strict pass, which knows all errors.

use super::json::{Object, Records};
use super::records::{HolderRecord, TensorRecord};
use super::write::is_plain;
use super::{Decoder, Metadata, Stored, parse_storage_key};
use serde::de::{Deserialize, DeserializeSeed, Deserializer};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

/// Known texts with which one is compared, besides the expected one.
const MAX_TRIED: usize = 8;
/// Most texts. A tree of thousands of ranks has some for each rank.
const MAX_TEXTS: usize = 1 << 20;

/// The content of a text; `None`: it is damaged, or has another form than most.
pub(super) fn decode(text: &str) -> Option<Metadata> {
    let (mut cursor, mut decoder) = (Cursor { text, at: 0 }, Decoder::default());
    cursor.take('{')?;
    cursor.name("state_dict_metadata")?;
    read_tensors(&mut cursor, &mut decoder)?;
    cursor.take(',')?;
    cursor.name("storage_data")?;
    read_storage(&mut cursor, &mut decoder)?;
    cursor.take('}')?;
    cursor.rest().is_empty().then_some(decoder.metadata)
}

fn read_tensors(cursor: &mut Cursor<'_>, decoder: &mut Decoder) -> Option<()> {
    let mut texts = Texts::default();
    // The first tensor of each text.
    let mut firsts: Vec<u32> = Vec::new();
    cursor.members(|cursor| {
        let name = cursor.text()?;
        cursor.take(':')?;
        let rest = cursor.rest();
        if let Some(number) = texts.find(rest) {
            cursor.at += texts.known[number].len();
            return decoder.add_like(&name, firsts[number]).ok();
        }
        let TensorValue(record) = cursor.value()?;
        let id = decoder.metadata.tensors.len() as u32;
        decoder.add_tensor(&name, record).ok()?;
        let number = texts.add(&rest[..rest.len() - cursor.rest_len()])?;
        if number == firsts.len() {
            firsts.push(id);
        }
        Some(())
    })
}

fn read_storage(cursor: &mut Cursor<'_>, decoder: &mut Decoder) -> Option<()> {
    let tensors = &decoder.metadata.tensors;
    let n_cells = tensors
        .iter()
        .map(|one| one.fragmentations.iter().product());
    let n_cells: Vec<u64> = n_cells.collect();
    let are_plain: Vec<bool> = tensors.iter().map(|one| is_plain(&one.name)).collect();
    let mut texts = Texts::default();
    // By text, file and rank of each holder.
    let mut lists: Vec<Vec<(u32, u64)>> = Vec::new();
    // For each tensor its cells, each with the number of its text.
    let mut cells: Vec<Vec<(u32, u32)>> = vec![Vec::new(); n_cells.len()];
    let mut last = 0;
    cursor.members(|cursor| {
        // The shards of a tensor follow each other, or those of a rank, in the order of the tensors.
        let mut near = [last, last + 1]
            .into_iter()
            .filter(|id| are_plain.get(*id) == Some(&true));
        let near = near.find_map(|id| {
            let name = &decoder.metadata.tensors[id].name;
            Some((id, cursor.shard_of(name)?))
        });
        let (id, cell) = if let Some(found) = near {
            found
        } else {
            let key = cursor.text()?;
            let (name, cell) = parse_storage_key(&key).ok()?;
            (*decoder.tensors.get(&*name)? as usize, cell)
        };
        last = id;
        if cell >= n_cells[id] {
            return None;
        }
        cursor.take(':')?;
        let rest = cursor.rest();
        let number = if let Some(number) = texts.find(rest) {
            cursor.at += texts.known[number].len();
            number
        } else {
            let HoldersValue(holders) = cursor.value()?;
            let holders = holders.iter().map(|holder| {
                let file = decoder.file(holder.file.as_deref()?).ok()?;
                Some((file, holder.rank?))
            });
            let holders = holders.collect::<Option<Vec<_>>>()?;
            let number = texts.add(&rest[..rest.len() - cursor.rest_len()])?;
            if number == lists.len() {
                lists.push(holders);
            }
            number
        };
        if lists[number].is_empty() {
            return None;
        }
        cells[id].push((cell as u32, number as u32));
        Some(())
    })?;
    let mut known: HashMap<Vec<(u32, u32)>, Arc<super::CellTable>> = HashMap::new();
    for ((tensor, cells), n_cells) in decoder.metadata.tensors.iter_mut().zip(cells).zip(n_cells) {
        if let Some(table) = known.get(&cells)
            && cells.len() as u64 == n_cells
        {
            tensor.cells = Arc::clone(table);
            continue;
        }
        let holders = cells.iter().flat_map(|&(cell, number)| {
            let of_cell = lists[number as usize].iter();
            of_cell.map(move |&(file, rank)| (cell, file, rank))
        });
        let stored = Stored {
            holders: holders.collect(),
            cells: cells.iter().map(|(cell, _)| *cell).collect(),
        };
        tensor.cells = Arc::new(stored.into_table(tensor).ok()?);
        known.insert(cells, Arc::clone(&tensor.cells));
    }
    Some(())
}

/// The value of a tensor.
struct TensorValue<'de>(TensorRecord<'de>);

impl<'de> Deserialize<'de> for TensorValue<'de> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        let mut record = TensorRecord::default();
        Object(&mut record).deserialize(json)?;
        Ok(Self(record))
    }
}

/// The value of a storage key.
struct HoldersValue<'de>(Vec<HolderRecord<'de>>);

impl<'de> Deserialize<'de> for HoldersValue<'de> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        Records::default().deserialize(json).map(Self)
    }
}

/// A place in a text. Its methods skip what is allowed between tokens, and return `None` if something else follows.
struct Cursor<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Cursor<'t> {
    /// The text from the next token on.
    fn rest(&mut self) -> &'t str {
        let bytes = &self.text.as_bytes()[self.at..];
        let is_space = |byte: &&u8| matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
        self.at += bytes.iter().take_while(is_space).count();
        &self.text[self.at..]
    }

    fn rest_len(&self) -> usize {
        self.text.len() - self.at
    }

    fn next_is(&mut self, token: char) -> bool {
        self.rest().starts_with(token)
    }

    fn take(&mut self, token: char) -> Option<()> {
        let is_next = self.next_is(token);
        self.at += usize::from(is_next);
        is_next.then_some(())
    }

    /// A name of a member.
    fn name(&mut self, expected: &str) -> Option<()> {
        (self.text()? == expected).then_some(())?;
        self.take(':')
    }

    fn text(&mut self) -> Option<Cow<'t, str>> {
        let inner = self.rest().strip_prefix('"')?;
        let end = inner
            .bytes()
            .position(|byte| matches!(byte, b'"' | b'\\' | ..b' '))?;
        if inner.as_bytes()[end] != b'"' {
            return self.value().map(Cow::Owned);
        }
        self.at += end + 2;
        Some(Cow::Borrowed(&inner[..end]))
    }

    /// The number of a cell, if this is the key of one of a tensor with a plain name.
    fn shard_of(&mut self, name: &str) -> Option<u64> {
        let key = self.rest().strip_prefix("\"('")?.strip_prefix(name)?;
        let number = key.strip_prefix("', (")?;
        let n_digits = number.bytes().take_while(u8::is_ascii_digit).count();
        let (digits, end) = number.split_at(n_digits);
        let after = end.strip_prefix(",))\"")?;
        let is_plain = digits == "0" || !digits.starts_with('0');
        let cell = digits.parse().ok().filter(|_| is_plain)?;
        self.at = self.text.len() - after.len();
        Some(cell)
    }

    fn value<T: Deserialize<'t>>(&mut self) -> Option<T> {
        let mut json = serde_json::Deserializer::from_str(self.rest()).into_iter();
        let value = json.next()?.ok()?;
        self.at += json.byte_offset();
        Some(value)
    }

    /// The members of an object, each from its name on.
    fn members(&mut self, mut each: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.take('{')?;
        if self.take('}').is_some() {
            return Some(());
        }
        loop {
            each(self)?;
            if self.take(',').is_none() {
                return self.take('}');
            }
        }
    }
}

/// Texts of complete values, each once.
#[derive(Default)]
struct Texts<'t> {
    known: Vec<&'t str>,
    numbers: HashMap<&'t str, usize>,
    /// For each one the number of that which followed it last.
    after: Vec<usize>,
    /// Those that were found last, the newest first.
    recent: Vec<usize>,
}

impl<'t> Texts<'t> {
    /// The number of a known text with which this one begins. A complete value is no begin of another one.
    fn find(&mut self, rest: &str) -> Option<usize> {
        let expected = self.after[*self.recent.first()?];
        let mut tried = std::iter::once(&expected).chain(&self.recent);
        let found = *tried.find(|number| rest.starts_with(self.known[**number]))?;
        self.found(found);
        Some(found)
    }

    /// The number of a text, which is added if it is new; `None`: there are too many.
    fn add(&mut self, text: &'t str) -> Option<usize> {
        let next = self.known.len();
        let number = *self.numbers.entry(text).or_insert(next);
        if number == next {
            (next < MAX_TEXTS).then_some(())?;
            self.known.push(text);
            self.after.push(number);
        }
        self.found(number);
        Some(number)
    }

    fn found(&mut self, number: usize) {
        if let Some(last) = self.recent.first() {
            self.after[*last] = number;
        }
        if let Some(at) = self.recent.iter().position(|one| *one == number) {
            self.recent[..=at].rotate_right(1);
        } else {
            self.recent.truncate(MAX_TRIED - 1);
            self.recent.insert(0, number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::{decode_strictly, storage_key};
    use proptest::prelude::*;
    use proptest::sample::{Index, select};
    use serde_json::{Value, json};

    #[derive(Debug, Clone)]
    struct Tensor {
        name: &'static str,
        dtype: &'static str,
        n_parts: u64,
        first_file: u64,
        n_copies: u64,
    }

    fn tensor() -> impl Strategy<Value = Tensor> {
        let names = select(vec![
            "w",
            "v",
            "it's",
            "a\"b",
            "ü",
            "layers.0.w",
            "layers.1.w",
        ]);
        (
            names,
            select(vec!["Float32", "BFloat16"]),
            1_u64..4,
            0_u64..3,
            1_u64..3,
        )
            .prop_map(|(name, dtype, n_parts, first_file, n_copies)| Tensor {
                name,
                dtype,
                n_parts,
                first_file,
                n_copies,
            })
    }

    /// The text, with the shards of each tensor together, or those of each rank.
    fn text_of(tensors: &[Tensor], is_by_rank: bool, is_pretty: bool) -> String {
        let described = tensors.iter().map(|one| {
            let n = one.n_parts;
            let chunk = |i| json!({"global_offset": [i], "local_shape": [2]});
            let layout = json!({
                "device_matrix": [n], "tensor_map": [0], "interleaved_parallel": false, "alias_name": ["tp"],
                "rank_list": (0..n).collect::<Vec<_>>(),
            });
            let value = json!({
                "properties": {"dtype": one.dtype, "replica_id": 0}, "global_shape": [2 * n], "axis_fragmentations": [n],
                "layout": layout, "chunk": (0..n).map(chunk).collect::<Vec<_>>(),
            });
            (one.name.to_owned(), value)
        });
        let described: Vec<(String, Value)> = described.collect();
        let mut shards: Vec<_> = tensors
            .iter()
            .enumerate()
            .flat_map(|(i, one)| (0..one.n_parts).map(move |cell| (i, cell)))
            .collect();
        if is_by_rank {
            shards.sort_by_key(|(i, cell)| (*cell, *i));
        }
        let shards = shards.into_iter().map(|(i, cell)| {
            let one = &tensors[i];
            let holder = |copy| {
                let rank = one.first_file + cell + copy * one.n_parts;
                json!({"file_name": format!("{rank}.safetensors"), "storage_rank": rank, "rank_group": [rank]})
            };
            let holders = (0..one.n_copies).map(holder).collect::<Vec<_>>();
            (storage_key(one.name, cell), Value::from(holders))
        });
        let shards: Vec<(String, Value)> = shards.collect();
        let member = |name: &str, value: Vec<(String, Value)>| {
            let members = value.iter().map(|(name, value)| {
                let value = if is_pretty {
                    serde_json::to_string_pretty(value)
                } else {
                    serde_json::to_string(value)
                };
                format!("{}: {}", Value::from(&**name), value.unwrap())
            });
            format!(
                "\"{name}\": {{{}}}",
                members.collect::<Vec<_>>().join(", \n")
            )
        };
        let sections = [
            member("state_dict_metadata", described),
            member("storage_data", shards),
        ];
        format!("{{{}}}", sections.join(","))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn texts_that_recur_are_those_of_a_strict_pass(
            tensors in proptest::collection::vec(tensor(), 0..8),
            is_by_rank: bool,
            is_pretty: bool,
            changes in proptest::collection::vec((any::<Index>(), any::<Index>(), 0_usize..4), 0..3),
        ) {
            let mut tensors = tensors;
            let mut seen = std::collections::HashSet::new();
            tensors.retain(|one| seen.insert(one.name));
            let mut text = text_of(&tensors, is_by_rank, is_pretty);
            let strict = decode_strictly(&text).unwrap();
            prop_assert_eq!(decode(&text), Some(strict));
            for (at, from, n) in changes {
                // A few characters are replaced by others of the text.
                let characters: Vec<char> = text.chars().collect();
                let (at, from) = (at.index(characters.len()), from.index(characters.len()));
                let replaced = characters[from..].iter().take(n);
                let rest = characters.iter().skip(at + n);
                text = characters[..at].iter().chain(replaced).chain(rest).collect();
            }
            if let Some(found) = decode(&text) {
                prop_assert_eq!(Some(found), decode_strictly(&text).ok());
            }
        }
    }
}
