//! Records of a few attributes, kept without a dict each.
//!
//! Nearly all objects of a description of many chunks are records of three classes. Picklers write all of a class alike:
//! the class and the names of the attributes from the memo, no arguments, and values. Such a record is decoded at once and
//! takes 28 bytes instead of 100 and more; integers, texts and sizes that occurred shortly before are not made again.
//!
//! A record that is written in another way is decoded as anything else. A dict that is used again, and a record or a size
//! that gets more later, are not kept: then the whole pickle is decoded again without this.

use super::{Id, Machine, NO_STATE, Node, Pickle, Record, Result, Span, Store, Value, damaged};

/// Attributes of such a record.
const MAX_FIELDS: usize = 8;
/// Lists of attributes. Each one is compared with.
const MAX_SHAPES: usize = 16;
const MAX_DIMS: usize = 8;
/// Objects of one record that a later one can recall.
const MAX_MEMO: usize = 64;
/// Values of a kind that are kept to be used again.
const N_RECENT: usize = 1 << 12;

/// Module and name of the classes of such records.
pub type Classes = &'static [(&'static str, &'static str)];

/// The class of some records, and the names of their attributes.
#[derive(Debug)]
pub(super) struct Shape {
    class: Id,
    arguments: Id,
    keys: Box<[Id]>,
}

impl Shape {
    /// A record, of which the values begin at `start`.
    pub(super) fn record<'a>(&'a self, links: &'a [Id], start: u32) -> Record<'a> {
        let start = start as usize;
        Record {
            function: self.class,
            arguments: self.arguments,
            state: None,
            fields: Some((&self.keys, &links[start..start + self.keys.len()])),
            items: &[],
            appended: &[],
        }
    }
}

/// What a machine knows of such records.
pub(super) struct Short {
    classes: Classes,
    /// Where the classes were named.
    known: Vec<Id>,
    size: Option<Id>,
    recent: Vec<Id>,
    /// Whether something was asked for that is not kept.
    pub(super) is_lost: bool,
}

impl Short {
    pub(super) fn new(classes: Classes) -> Self {
        Self {
            classes,
            known: Vec::new(),
            size: None,
            recent: if classes.is_empty() {
                Vec::new()
            } else {
                vec![NO_STATE; 3 * N_RECENT]
            },
            is_lost: false,
        }
    }

    /// Notes that a class was named.
    pub(super) fn named(&mut self, module: &str, name: &str, id: Id) {
        if self.classes.is_empty() {
            return;
        }
        if (module, name) == ("torch", "Size") {
            self.size.get_or_insert(id);
        } else if self.classes.contains(&(module, name)) && self.known.len() < MAX_SHAPES {
            self.known.push(id);
        }
    }
}

/// The same numbers give the same place among those of a kind.
fn place(kind: usize, numbers: impl Iterator<Item = u64>) -> usize {
    let mix = |hash: u64, n: u64| (hash.rotate_left(5) ^ n).wrapping_mul(0x517c_c1b7_2722_0a95);
    kind * N_RECENT + (numbers.fold(0, mix) >> (64 - N_RECENT.ilog2())) as usize
}

fn is_number(bytes: &[u8], n: usize) -> bool {
    let number = bytes.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
    number.is_some_and(|number| number as usize == n)
}

/// A position behind that of the machine, and what it makes.
struct Ahead {
    at: usize,
    memo: [Id; MAX_MEMO],
    n_memo: usize,
}

impl Machine<'_> {
    /// Decodes the record whose class was recalled, if it is one of those. `None`: it is not, and nothing was done.
    pub(super) fn short_record(&mut self, class: Id) -> Option<()> {
        if !self.short.known.contains(&class) || !self.memo.sparse.is_empty() {
            return None;
        }
        let mut ahead = Ahead {
            at: self.at,
            memo: [NO_STATE; MAX_MEMO],
            n_memo: 0,
        };
        self.expect(&mut ahead, b")\x81")?;
        let has_memo = self.memoized(&mut ahead, NO_STATE)?;
        self.expect(&mut ahead, b"}")?;
        self.memoized(&mut ahead, NO_STATE)?;
        self.expect(&mut ahead, b"(")?;
        let (mut keys, mut values) = ([NO_STATE; MAX_FIELDS], [NO_STATE; MAX_FIELDS]);
        let mut n = 0;
        loop {
            let opcode = self.next(&mut ahead)?;
            if opcode == b'u' {
                break;
            }
            if n == MAX_FIELDS {
                return None;
            }
            keys[n] = self.recalled(&mut ahead, opcode)?;
            values[n] = self.short_value(&mut ahead)?;
            n += 1;
        }
        self.expect(&mut ahead, b"b")?;
        let shape = self.shape(class, &keys[..n])?;
        self.hold(4 * (n + ahead.n_memo)).ok()?;
        let start = Store::span(&mut self.store.links, &values[..n]).ok()?.start;
        let top = self.stack.pop()?;
        if self.push(Node::Short { shape, start }).is_err() {
            self.stack.push(top);
            return None;
        }
        if has_memo {
            ahead.memo[0] = *self.stack.last()?;
        }
        self.memo.dense.extend(&ahead.memo[..ahead.n_memo]);
        self.store.n += 2;
        self.at = ahead.at;
        Some(())
    }

    fn shape(&mut self, class: Id, keys: &[Id]) -> Option<u32> {
        let mut shapes = self.store.shapes.iter();
        if let Some(number) = shapes.position(|one| one.class == class && *one.keys == *keys) {
            return Some(number as u32);
        }
        let is_plain =
            |id: &Id| matches!(self.store.get(*id), Value::Text(text) if !text.starts_with("__"));
        if self.store.shapes.len() == MAX_SHAPES || !keys.iter().all(is_plain) {
            return None;
        }
        let arguments = self.made_once(3, Node::Tuple(super::EMPTY))?;
        self.store.n -= 1;
        self.store.shapes.push(Shape {
            class,
            arguments,
            keys: keys.into(),
        });
        Some(self.store.shapes.len() as u32 - 1)
    }

    fn next(&self, ahead: &mut Ahead) -> Option<u8> {
        let byte = *self.bytes.get(ahead.at)?;
        ahead.at += 1;
        Some(byte)
    }

    fn bytes<const N: usize>(&self, ahead: &mut Ahead) -> Option<[u8; N]> {
        let bytes = self.bytes.get(ahead.at..)?.first_chunk()?;
        ahead.at += N;
        Some(*bytes)
    }

    fn expect(&self, ahead: &mut Ahead, opcodes: &[u8]) -> Option<()> {
        let is_there = self.bytes.get(ahead.at..)?.starts_with(opcodes);
        ahead.at += opcodes.len();
        is_there.then_some(())
    }

    /// Whether the memo gets the object, with the next number; any other one is not expected.
    fn memoized(&self, ahead: &mut Ahead, id: Id) -> Option<bool> {
        let n = self.memo.dense.len() + ahead.n_memo;
        let rest = self.bytes.get(ahead.at..)?;
        let n_bytes = match *rest {
            [0x94, ..] => 1,
            [b'q', number, ..] if usize::from(number) == n => 2,
            [b'r', ref rest @ ..] if is_number(rest, n) => 5,
            [b'q' | b'r', ..] => return None,
            _ => return Some(false),
        };
        *ahead.memo.get_mut(ahead.n_memo)? = id;
        ahead.n_memo += 1;
        ahead.at += n_bytes;
        Some(true)
    }

    fn recalled(&self, ahead: &mut Ahead, opcode: u8) -> Option<Id> {
        let number = match opcode {
            b'h' => usize::from(self.next(ahead)?),
            b'j' => u32::from_le_bytes(self.bytes(ahead)?) as usize,
            _ => return None,
        };
        let id = *self.memo.dense.get(number)?;
        (id != NO_STATE).then_some(id)
    }

    fn short_value(&mut self, ahead: &mut Ahead) -> Option<Id> {
        let opcode = self.next(ahead)?;
        match opcode {
            b'h' | b'j' => {
                let id = self.recalled(ahead, opcode)?;
                if self.short.size == Some(id) {
                    return self.short_size(ahead);
                }
                Some(id)
            }
            b'N' => self.made_once(0, Node::None),
            0x89 => self.made_once(1, Node::Bool(false)),
            0x88 => self.made_once(2, Node::Bool(true)),
            0x8c | b'X' => {
                let n = if opcode == b'X' {
                    u32::from_le_bytes(self.bytes(ahead)?) as usize
                } else {
                    usize::from(self.next(ahead)?)
                };
                let bytes = self.bytes.get(ahead.at..)?.get(..n)?;
                ahead.at += n;
                let id = self.recent_text(std::str::from_utf8(bytes).ok()?)?;
                self.memoized(ahead, id)?;
                Some(id)
            }
            _ => {
                let value = self.short_int(ahead, opcode)?;
                self.recent_int(value)
            }
        }
    }

    fn short_int(&self, ahead: &mut Ahead, opcode: u8) -> Option<i64> {
        Some(match opcode {
            b'K' => i64::from(self.next(ahead)?),
            b'M' => i64::from(u16::from_le_bytes(self.bytes(ahead)?)),
            b'J' => i64::from(i32::from_le_bytes(self.bytes(ahead)?)),
            0x8a => {
                let n = usize::from(self.next(ahead)?);
                let bytes = self.bytes.get(ahead.at..)?.get(..n).filter(|_| n <= 8)?;
                ahead.at += n;
                let is_negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
                let mut wide = [if is_negative { 0xff } else { 0 }; 8];
                wide[..n].copy_from_slice(bytes);
                i64::from_le_bytes(wide)
            }
            _ => return None,
        })
    }

    /// `torch.Size((1, 2))`, behind the class.
    fn short_size(&mut self, ahead: &mut Ahead) -> Option<Id> {
        let (mut dims, mut n) = ([NO_STATE; MAX_DIMS], 0);
        let mut is_marked = false;
        loop {
            let opcode = self.next(ahead)?;
            let n_expected = match opcode {
                b'(' if n == 0 && !is_marked => {
                    is_marked = true;
                    continue;
                }
                b't' if is_marked => n,
                0x85..=0x87 if !is_marked => usize::from(opcode - 0x84),
                b')' if !is_marked => 0,
                _ => {
                    let value = self.short_int(ahead, opcode)?;
                    *dims.get_mut(n)? = self.recent_int(value)?;
                    n += 1;
                    continue;
                }
            };
            if n_expected != n || (opcode == b't' && n == 0) {
                return None;
            }
            let [tuple, arguments, size] = self.recent_size(&dims[..n])?;
            if opcode != b')' {
                self.memoized(ahead, tuple)?;
            }
            self.expect(ahead, b"\x85")?;
            self.memoized(ahead, arguments)?;
            self.expect(ahead, b"R")?;
            self.memoized(ahead, size)?;
            self.store.n += 3;
            return Some(size);
        }
    }

    // -- values, made unless an equal one was made shortly before

    fn made_once(&mut self, which: usize, node: Node) -> Option<Id> {
        self.push_once(which, node).ok()?;
        self.stack.pop()
    }

    fn made(&mut self, node: Node) -> Option<Id> {
        self.push(node).ok()?;
        self.store.n -= 1;
        self.stack.pop()
    }

    fn recent_int(&mut self, value: i64) -> Option<Id> {
        self.store.n += 1;
        let at = place(0, std::iter::once(value.cast_unsigned()));
        let recent = self.short.recent[at];
        if recent != NO_STATE && matches!(self.node(recent), Node::Int(found) if found == value) {
            return Some(recent);
        }
        let id = self.made(Node::Int(value))?;
        self.short.recent[at] = id;
        Some(id)
    }

    fn recent_text(&mut self, text: &str) -> Option<Id> {
        self.store.n += 1;
        let words = text.as_bytes().chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        let at = place(1, words);
        let recent = self.short.recent[at];
        if recent != NO_STATE && self.store.get(recent) == Value::Text(text) {
            return Some(recent);
        }
        self.hold(text.len()).ok()?;
        let span = Store::next_span(self.store.text.len(), text.len()).ok()?;
        self.store.text.push_str(text);
        let id = self.made(Node::Text(span))?;
        self.short.recent[at] = id;
        Some(id)
    }

    /// The tuple, the arguments and the call.
    fn recent_size(&mut self, dims: &[Id]) -> Option<[Id; 3]> {
        let at = place(2, dims.iter().map(|id| u64::from(id.0)));
        let recent = self.short.recent[at];
        if recent != NO_STATE {
            let nodes = [Id(recent.0 - 2), Id(recent.0 - 1), recent];
            if matches!(self.node(nodes[0]), Node::Tuple(span) if span.of(&self.store.links) == dims)
            {
                return Some(nodes);
            }
        }
        let function = self.short.size?;
        self.hold(4 * (dims.len() + 1)).ok()?;
        let span = Store::span(&mut self.store.links, dims).ok()?;
        let tuple = self.made(Node::Tuple(span))?;
        let span: Span = Store::span(&mut self.store.links, &[tuple]).ok()?;
        let arguments = self.made(Node::Tuple(span))?;
        let size = self.made(Node::Record {
            function,
            arguments,
            state: NO_STATE,
        })?;
        self.short.recent[at] = size;
        Some([tuple, arguments, size])
    }

    // -- what is not kept

    /// That something is asked for that is not kept; [`Pickle::decode_records`] then decodes otherwise.
    pub(super) fn lost<T>(&mut self) -> Result<T> {
        self.short.is_lost = true;
        Err(damaged("what it recalls was not kept"))
    }

    /// Whether others share an object, or its dict was not kept, so that it must not change.
    pub(super) fn must_not_change(&self, id: Id) -> bool {
        match self.node(id) {
            Node::Short { .. } => true,
            Node::Record { function, .. } => {
                !self.short.classes.is_empty()
                    && self.store.get(function) == Value::Global("torch", "Size")
            }
            _ => false,
        }
    }
}

impl Pickle {
    /// As [`Self::decode`], and records of these classes take less memory and time: their attributes are `fields`.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_records(bytes: &[u8], classes: Classes) -> Result<Self> {
        let mut machine = Machine::new(bytes, classes);
        let decoded = machine.run();
        if machine.short.is_lost {
            drop(machine); // its memory
            return Self::decode(bytes);
        }
        decoded.map(|(root, n_bytes)| Self {
            store: machine.store,
            root,
            n_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASSES: Classes = &[("m", "C")];

    /// A list of records of the class 0 with the attribute 1. The last two are in the memo as 2 and 4, their dicts as 3
    /// and 5, and their size as 7 to 9, of the class 6.
    fn list(more: &[u8]) -> Vec<u8> {
        let records = [
            b"\x80\x04](cm\nC\n\x94)\x81}(\x8c\x01a\x94K\x01ub".as_slice(),
            b"h\0)\x81\x94}\x94(h\x01M\x02\x01ub",
            b"h\0)\x81\x94}\x94(h\x01\x8c\x01tub",
            b"ctorch\nSize\n\x94",
            b"h\0)\x81}(h\x01h\x06K\x03K\x04\x86\x94\x85\x94R\x94ub",
        ];
        [&records.concat(), more, b"e."].concat()
    }

    fn shown(pickle: &Pickle, id: Id) -> String {
        let each = |ids: &[Id]| ids.iter().map(|id| shown(pickle, *id)).collect::<Vec<_>>();
        match pickle.get(id) {
            Value::List(items) | Value::Tuple(items) => format!("{:?}", each(items)),
            Value::Dict(items) => format!("{:?}", each(items.as_flattened())),
            Value::Record(record) => {
                let attribute = pickle.attribute(record, "a");
                let attribute = attribute.map(|id| shown(pickle, id));
                format!("{} {attribute:?}", shown(pickle, record.arguments))
            }
            value => format!("{value:?}"),
        }
    }

    fn n_short(pickle: &Pickle) -> usize {
        let nodes = pickle.store.nodes.iter();
        nodes
            .filter(|node| matches!(node, Node::Short { .. }))
            .count()
    }

    #[test]
    fn records_are_what_they_are_if_decoded_plainly() {
        // Nothing; a value that is recalled; a dict; the first class; what changes a record, or a size.
        let cases: [(&[u8], usize); 9] = [
            (b"", 3),
            (b"h\x02h\x09h\x07", 3),
            (b"h\x03", 0),
            (b"h\x05", 0),
            (b"h\0", 3),
            (b"h\x02}(h\x01K\x05ub", 0),
            (b"h\x09}(h\x01K\x05ub", 0),
            (b"h\x02(h\x01K\x05u", 0),
            (b"h\x09(h\x01e", 0),
        ];
        for (more, expected) in cases {
            let bytes = list(more);
            let short = Pickle::decode_records(&bytes, CLASSES).unwrap();
            let plain = Pickle::decode(&bytes).unwrap();
            assert_eq!(
                shown(&short, short.root()),
                shown(&plain, plain.root()),
                "{more:?}"
            );
            assert_eq!(
                (n_short(&short), n_short(&plain)),
                (expected, 0),
                "{more:?}"
            );
            assert_eq!(short.len(), plain.len(), "{more:?}");
        }
    }

    #[test]
    fn special_attributes_are_refused_as_if_decoded_plainly() {
        let mut bytes = list(b"\x8c\x05__a__\x94h\0)\x81}(h\x0aK\x01ub");
        let refused = |bytes: &[u8]| {
            let short = Pickle::decode_records(bytes, CLASSES).map(drop);
            let plain = Pickle::decode(bytes).map(drop);
            let message = short.unwrap_err().to_string();
            assert_eq!(message, plain.unwrap_err().to_string());
            message
        };
        assert!(refused(&bytes).contains("an attribute that belongs to the class"));
        bytes.truncate(bytes.len() - 5);
        assert!(refused(&bytes).contains("cut short"));
    }
}
