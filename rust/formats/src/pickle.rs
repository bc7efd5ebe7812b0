//! A pickle, decoded into inert values. No name is imported and nothing is called.
//!
//! A pickle is a program for a stack machine that builds Python objects. Where it asks for a class or a function, this decoder
//! keeps the name; where it asks for a call, it keeps a [`Record`] of the name and the arguments. Readers of a format give a
//! meaning to the few names that they know, and treat every other record as opaque.
//!
//! Only the opcodes that checkpoint writers emit are accepted. Names that run code or reach the system when a real unpickler
//! calls them are refused: no checkpoint needs them. The decoder does not recurse, and memory is bounded by a multiple of the
//! input.
//!
//! Source of the opcodes: `Lib/pickletools.py` of Python 3.

mod short;

pub use short::Classes;

use reshard_core::error::Printable;
use reshard_core::{Error, Kind, Result};
use short::{Shape, Short};
use std::collections::HashMap;

/// Highest protocol that is read.
const MAX_PROTOCOL: u8 = 5;
/// Bytes of memory for each byte of input, and for any input. A `.metadata` of many chunks takes 6 for each byte.
const BYTES_PER_BYTE: usize = 24;
const BASE_BYTES: usize = 8 << 20;
/// Attributes of an object: those of checkpoint formats have less than ten.
const MAX_ATTRIBUTES: usize = 256;
/// What a record takes more when it gets items or appended values.
const RECORD_PART_BYTES: usize = 64;
/// Digits of an integer beyond 64 bits.
const MAX_LONG_BYTES: usize = 1 << 10;

/// The number of a value of a [`Pickle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(u32);

/// One object of a pickle. Containers refer to others by number, so that shared objects and cycles stay what they are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of at most 64 bits.
    Int(i64),
    /// A larger integer: two's complement, least significant byte first.
    Long(&'a [u8]),
    /// A float.
    Float(f64),
    /// Text.
    Text(&'a str),
    /// Bytes.
    Bytes(&'a [u8]),
    /// A tuple.
    Tuple(&'a [Id]),
    /// A list.
    List(&'a [Id]),
    /// A dict, in the order in which its keys were first set. The last value of a key counts.
    Dict(&'a [[Id; 2]]),
    /// A set; of a frozenset the same.
    Set(&'a [Id]),
    /// A class or a function by module and name: never imported.
    Global(&'a str, &'a str),
    /// What a call or a class would have made.
    Record(Record<'a>),
    /// A persistent id: an object that is stored outside the pickle.
    Persistent(Id),
}

/// A call that was not made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Record<'a> {
    /// The function or class; a [`Value::Global`].
    pub function: Id,
    /// Its arguments; a [`Value::Tuple`].
    pub arguments: Id,
    /// What was to become its attributes.
    pub state: Option<Id>,
    /// Names and values of its attributes, where they are kept without a dict; see [`Pickle::decode_records`].
    pub fields: Option<(&'a [Id], &'a [Id])>,
    /// Keys and values that were to be set.
    pub items: &'a [[Id; 2]],
    /// Values that were to be appended.
    pub appended: &'a [Id],
}

/// The decoded objects.
#[derive(Debug)]
pub struct Pickle {
    store: Store,
    root: Id,
    n_bytes: usize,
}

/// All objects. A description of many chunks has twenty for each chunk, so an object takes 16 bytes, and what it consists
/// of lies in a few long vectors. Immutable objects that occur often exist once.
#[derive(Debug, Default)]
struct Store {
    nodes: Vec<Node>,
    /// The elements of tuples, and those that a list, dict or set got at once.
    links: Vec<Id>,
    /// Those of lists, dicts and sets that got more later.
    grown: Vec<Vec<Id>>,
    text: String,
    bytes: Vec<u8>,
    globals: Vec<(Box<str>, Box<str>)>,
    /// Items and appended values of the few records that have some: numbers in `grown`.
    filled: HashMap<Id, [Option<u32>; 2]>,
    /// How many objects there are, those that exist once counted as often as they occur.
    n: usize,
    shapes: Vec<Shape>,
}

/// A range of one of the vectors.
#[derive(Debug, Clone, Copy)]
struct Span {
    start: u32,
    len: u32,
}

#[derive(Debug, Clone, Copy)]
enum Node {
    None,
    Bool(bool),
    Int(i64),
    Long(Span),
    Float(f64),
    Text(Span),
    Bytes(Span),
    Tuple(Span),
    Many(Many, Span),
    /// As `Many`, with the number of its elements in `grown`.
    Grown(Many, u32),
    Global(u32),
    /// The state is `NO_STATE` if there is none.
    Record {
        function: Id,
        arguments: Id,
        state: Id,
    },
    /// A record with its values from `start` among the links.
    Short {
        shape: u32,
        start: u32,
    },
    Persistent(Id),
}

/// No object: a state that a record has not, or an entry of the memo that was not kept.
const NO_STATE: Id = Id(u32::MAX);
const EMPTY: Span = Span { start: 0, len: 0 };

/// What can get elements after it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Many {
    List,
    Dict,
    Set,
}

impl Span {
    fn of<T>(self, all: &[T]) -> &[T] {
        let start = self.start as usize;
        &all[start..start + self.len as usize]
    }
}

impl Store {
    fn get(&self, id: Id) -> Value<'_> {
        match self.nodes[id.0 as usize] {
            Node::None => Value::None,
            Node::Bool(value) => Value::Bool(value),
            Node::Int(value) => Value::Int(value),
            Node::Long(span) => Value::Long(span.of(&self.bytes)),
            Node::Float(value) => Value::Float(value),
            Node::Text(span) => {
                let start = span.start as usize;
                Value::Text(&self.text[start..start + span.len as usize])
            }
            Node::Bytes(span) => Value::Bytes(span.of(&self.bytes)),
            Node::Tuple(span) => Value::Tuple(span.of(&self.links)),
            Node::Many(many, span) => many.value(span.of(&self.links)),
            Node::Grown(many, number) => many.value(&self.grown[number as usize]),
            Node::Global(number) => {
                let (module, name) = &self.globals[number as usize];
                Value::Global(module, name)
            }
            Node::Record {
                function,
                arguments,
                state,
            } => {
                let [items, appended] = self.filled.get(&id).copied().unwrap_or_default();
                let grown = |number: Option<u32>| {
                    number.map_or(&[][..], |number| &self.grown[number as usize][..])
                };
                Value::Record(Record {
                    function,
                    arguments,
                    state: (state != NO_STATE).then_some(state),
                    fields: None,
                    items: grown(items).as_chunks().0,
                    appended: grown(appended),
                })
            }
            Node::Short { shape, start } => {
                Value::Record(self.shapes[shape as usize].record(&self.links, start))
            }
            Node::Persistent(id) => Value::Persistent(id),
        }
    }

    fn span<T: Copy>(all: &mut Vec<T>, items: &[T]) -> Result<Span> {
        let span = Self::next_span(all.len(), items.len())?;
        all.extend_from_slice(items);
        Ok(span)
    }

    fn next_span(start: usize, len: usize) -> Result<Span> {
        let too_many = |_| damaged("too many objects");
        Ok(Span {
            start: u32::try_from(start).map_err(too_many)?,
            len: u32::try_from(len).map_err(too_many)?,
        })
    }

    fn new_grown(&mut self, items: Vec<Id>) -> Result<u32> {
        let number = u32::try_from(self.grown.len()).map_err(|_| damaged("too many objects"))?;
        self.grown.push(items);
        Ok(number)
    }

    /// Adds elements to a list, dict or set.
    fn extend(&mut self, id: Id, many: Many, items: &[Id]) -> Result<()> {
        match self.nodes[id.0 as usize] {
            Node::Many(_, span) if span.len == 0 => {
                self.nodes[id.0 as usize] = Node::Many(many, Self::span(&mut self.links, items)?);
            }
            Node::Many(_, span) => {
                let joined = [span.of(&self.links), items].concat();
                let number = self.new_grown(joined)?;
                self.nodes[id.0 as usize] = Node::Grown(many, number);
            }
            Node::Grown(_, number) => self.grown[number as usize].extend_from_slice(items),
            _ => unreachable!("the caller looked at it"),
        }
        Ok(())
    }

    /// Adds items (0) or appended values (1) to a record.
    fn fill(&mut self, id: Id, which: usize, items: &[Id]) -> Result<()> {
        if let Some(number) = self.filled.get(&id).and_then(|numbers| numbers[which]) {
            self.grown[number as usize].extend_from_slice(items);
        } else {
            let number = self.new_grown(items.to_vec())?;
            self.filled.entry(id).or_default()[which] = Some(number);
        }
        Ok(())
    }
}

impl Many {
    fn value(self, items: &[Id]) -> Value<'_> {
        match self {
            Self::List => Value::List(items),
            Self::Set => Value::Set(items),
            // Keys and values are only added in pairs.
            Self::Dict => Value::Dict(items.as_chunks().0),
        }
    }
}

impl Pickle {
    /// Decodes one pickle at the beginning of some bytes.
    ///
    /// # Errors
    /// `Kind::Damaged` if it is no such pickle; `Kind::Unsupported` for an opcode, a protocol or a name that is refused.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        Self::decode_records(bytes, &[])
    }

    /// The object.
    pub fn root(&self) -> Id {
        self.root
    }

    /// Bytes up to the end of the pickle.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.store.n
    }

    /// Whether there is none, which does not happen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All objects, in the order in which they were made; numbers and `None` can stand for several.
    pub fn values(&self) -> impl Iterator<Item = Value<'_>> {
        (0..self.store.nodes.len() as u32).map(|i| self.get(Id(i)))
    }

    /// A value.
    pub fn get(&self, id: Id) -> Value<'_> {
        self.store.get(id)
    }

    /// Text, if a value is text.
    pub fn text(&self, id: Id) -> Option<&str> {
        match self.get(id) {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// An integer of 64 bits, if a value is one.
    pub fn int(&self, id: Id) -> Option<i64> {
        match self.get(id) {
            Value::Int(int) => Some(int),
            _ => None,
        }
    }

    /// The elements of a tuple or a list; those of a `torch.Size` too.
    pub fn sequence(&self, id: Id) -> Option<&[Id]> {
        match self.get(id) {
            Value::Tuple(items) | Value::List(items) => Some(items),
            Value::Record(record) if self.name(record.function) == Some(("torch", "Size")) => {
                match self.get(record.arguments) {
                    Value::Tuple(&[items]) => match self.get(items) {
                        Value::Tuple(items) | Value::List(items) => Some(items),
                        _ => None,
                    },
                    Value::Tuple([]) => Some(&[]),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Keys and values of a dict, also of an `OrderedDict`, a `defaultdict` or a `Counter`.
    pub fn items(&self, id: Id) -> Option<&[[Id; 2]]> {
        match self.get(id) {
            Value::Dict(items) => Some(items),
            Value::Record(record)
                if matches!(
                    self.name(record.function),
                    Some(("collections", "OrderedDict" | "defaultdict" | "Counter"))
                ) =>
            {
                Some(record.items)
            }
            _ => None,
        }
    }

    /// The value of a key of a dict that is text.
    pub fn item(&self, id: Id, key: &str) -> Option<Id> {
        let items = self.items(id)?;
        items
            .iter()
            .rev()
            .find(|[one, _]| self.text(*one) == Some(key))
            .map(|[_, value]| *value)
    }

    /// Module and name of a class or function.
    pub fn name(&self, id: Id) -> Option<(&str, &str)> {
        match self.get(id) {
            Value::Global(module, name) => Some((module, name)),
            _ => None,
        }
    }

    /// A record.
    pub fn record(&self, id: Id) -> Option<Record<'_>> {
        match self.get(id) {
            Value::Record(record) => Some(record),
            _ => None,
        }
    }

    /// The record of a call of this name.
    pub fn call(&self, id: Id, module: &str, name: &str) -> Option<Record<'_>> {
        let record = self.record(id)?;
        (self.name(record.function) == Some((module, name))).then_some(record)
    }

    /// An attribute that a record sets by a dict of attributes. A dict of more than `MAX_ATTRIBUTES` is none: many records
    /// could share it, and each one would be searched.
    pub fn attribute(&self, record: Record<'_>, name: &str) -> Option<Id> {
        if let Some((keys, values)) = record.fields {
            let found = keys.iter().rposition(|key| self.text(*key) == Some(name));
            return found.map(|number| values[number]);
        }
        let state = record.state?;
        (self.items(state)?.len() <= MAX_ATTRIBUTES).then(|| self.item(state, name))?
    }
}

/// Modules of which no name has a place in a checkpoint: what they hold runs code, reaches the system or unpickles again.
const REFUSED_MODULES: &[&str] = &[
    "_pickle",
    "_posixsubprocess",
    "_thread",
    "_winapi",
    "cloudpickle",
    "commands",
    "ctypes",
    "dill",
    "importlib",
    "marshal",
    "multiprocessing",
    "nt",
    "operator",
    "os",
    "pickle",
    "pip",
    "popen2",
    "posix",
    "pty",
    "runpy",
    "shutil",
    "socket",
    "subprocess",
    "sys",
    "urllib",
    "webbrowser",
];

/// The builtins that make values. Every other builtin is refused.
const BUILTINS: &[&str] = &[
    "bool",
    "bytearray",
    "bytes",
    "complex",
    "dict",
    "float",
    "frozenset",
    "int",
    "list",
    "long",
    "object",
    "range",
    "set",
    "slice",
    "str",
    "tuple",
    "unicode",
];

/// Names of torch and numpy that read files or unpickle again.
const REFUSED_NAMES: &[(&str, &str)] = &[
    ("torch", "load"),
    ("torch.serialization", "load"),
    ("torch.storage", "_load_from_bytes"),
    ("torch.hub", "load"),
    ("torch", "compile"),
    ("torch.jit", "load"),
    ("io", "open"),
    ("_io", "open"),
    ("_io", "FileIO"),
    ("numpy", "load"),
    ("numpy", "fromfile"),
    ("numpy", "memmap"),
    ("_codecs", "lookup"),
    ("functools", "reduce"),
    ("copyreg", "__newobj_ex__"),
];

const BUILTIN_MODULES: &[&str] = &["builtins", "__builtin__"];

/// The class inside of another one that checkpoints name: module, class, and the inner one. A `ShardedTensor` says with it
/// which rank of which processes wrote it.
const INNER_CLASS: (&str, &str, &str) = (
    "torch.distributed._shard.sharded_tensor.api",
    "ShardedTensor",
    "ProcessGroupState",
);
const INNER_CLASS_NAME: &str = "ShardedTensor.ProcessGroupState";

/// The one builtin that is accepted as a function: only [`Machine::call`] decides with which arguments.
const GETATTR: &str = "getattr";

const RUNS_CODE: &str = "which no checkpoint needs and which can run code";

fn refused_name(module: &str, name: &str, why: &str) -> Error {
    let message = format!(
        "it names `{}.{}`, {why}",
        Printable(module),
        Printable(name)
    );
    Error::new(Kind::Unsupported, message).hint(
        "nothing was imported or called; do not load this file with a reader that executes pickles",
    )
}

fn is_identifier(text: &str) -> bool {
    !text.is_empty() && text.len() <= 256 && text.chars().all(|c| c.is_alphanumeric() || c == '_')
}

fn check_name(module: &str, name: &str) -> Result<()> {
    if (module, name) == (INNER_CLASS.0, INNER_CLASS_NAME) {
        return Ok(());
    }
    if !is_identifier(name) || module.len() > 512 || !module.split('.').all(is_identifier) {
        return Err(refused_name(module, name, "which is not a plain name"));
    }
    let top = module.split('.').next().unwrap_or_default();
    if REFUSED_MODULES.contains(&top) || REFUSED_NAMES.contains(&(module, name)) {
        return Err(refused_name(module, name, RUNS_CODE));
    }
    let is_known =
        BUILTINS.contains(&name) || (name == GETATTR && BUILTIN_MODULES.contains(&module));
    if BUILTIN_MODULES.contains(&top) && !is_known {
        return Err(refused_name(module, name, RUNS_CODE));
    }
    Ok(())
}

fn unknown(opcode: u8) -> Error {
    let message = format!("opcode 0x{opcode:02x}, which no checkpoint writer uses");
    Error::new(Kind::Unsupported, message)
}

fn too_many_attributes() -> Error {
    let message = "its objects share attributes more often than any writer does";
    Error::new(Kind::Unsupported, message)
}

fn damaged(message: impl Into<String>) -> Error {
    Error::damaged(message)
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    store: Store,
    /// The numbers of `None`, `False`, `True`, `()` and of 0 to 255, once they occurred.
    once: Box<[Option<Id>; 260]>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: Memo,
    /// Memory that the values take beyond their slots.
    n_held: usize,
    /// How many names of attributes were looked at.
    n_attributes: usize,
    budget: usize,
    short: Short,
}

/// Values by memo number: dense ones in a vector, as every writer makes them, others in a map.
#[derive(Default)]
struct Memo {
    dense: Vec<Id>,
    sparse: HashMap<u32, Id>,
}

impl Memo {
    fn len(&self) -> usize {
        self.dense.len() + self.sparse.len()
    }

    fn put(&mut self, number: u32, id: Id) {
        let n = self.dense.len();
        match (number as usize).cmp(&n) {
            std::cmp::Ordering::Less => self.dense[number as usize] = id,
            std::cmp::Ordering::Equal => {
                if !self.sparse.is_empty() {
                    self.sparse.remove(&number);
                }
                self.dense.push(id);
            }
            std::cmp::Ordering::Greater => {
                self.sparse.insert(number, id);
            }
        }
    }

    fn get(&self, number: u32) -> Option<Id> {
        self.dense
            .get(number as usize)
            .or_else(|| self.sparse.get(&number))
            .copied()
    }
}

impl<'a> Machine<'a> {
    fn new(bytes: &'a [u8], classes: Classes) -> Self {
        Self {
            bytes,
            at: 0,
            store: Store::default(),
            once: Box::new([None; 260]),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Memo::default(),
            n_held: 0,
            n_attributes: 0,
            budget: bytes
                .len()
                .saturating_mul(BYTES_PER_BYTE)
                .saturating_add(BASE_BYTES),
            short: Short::new(classes),
        }
    }

    /// The root, and the bytes up to the end.
    fn run(&mut self) -> Result<(Id, usize)> {
        loop {
            let place = self.at;
            let opcode = self.byte()?;
            if opcode == b'.' {
                break;
            }
            self.step(opcode)
                .map_err(|error| error.within(format_args!("byte {place} of the pickle")))?;
        }
        let root = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err(damaged("the pickle ends with more than one object"));
        }
        Ok((root, self.at))
    }

    fn step(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            0x80
            | 0x95
            | b'N'
            | 0x88..=0x8e
            | b'J'
            | b'K'
            | b'M'
            | b'G'
            | b'X'
            | b'C'
            | b'B'
            | b'U'
            | b'T' => self.literal(opcode),
            b'('
            | b')'
            | 0x85..=0x87
            | b't'
            | b']'
            | b'l'
            | b'}'
            | b'd'
            | 0x8f..=0x91
            | b'a'
            | b'e'
            | b's'
            | b'u' => self.container(opcode),
            _ => self.other(opcode),
        }
    }

    /// Numbers and text, and what only frames them.
    fn literal(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            0x80 => {
                let protocol = self.byte()?;
                if protocol > MAX_PROTOCOL {
                    let message =
                        format!("pickle protocol {protocol}, known are those up to {MAX_PROTOCOL}");
                    return Err(Error::new(Kind::Unsupported, message));
                }
                Ok(())
            }
            0x95 => self.take(8).map(|_| ()), // FRAME: the length is a hint for buffering
            b'N' => self.push_once(0, Node::None),
            0x88 => self.push_once(2, Node::Bool(true)),
            0x89 => self.push_once(1, Node::Bool(false)),
            b'J' => {
                let value = i64::from(i32::from_le_bytes(self.array()?));
                self.int(value)
            }
            b'K' => {
                let value = i64::from(self.byte()?);
                self.int(value)
            }
            b'M' => {
                let value = i64::from(u16::from_le_bytes(self.array()?));
                self.int(value)
            }
            0x8a => {
                let n = u64::from(self.byte()?);
                self.long(n)
            }
            0x8b => {
                let n = i32::from_le_bytes(self.array()?);
                let n =
                    u64::try_from(n).map_err(|_| damaged(format!("an integer of {n} bytes")))?;
                self.long(n)
            }
            b'G' => {
                let value = f64::from_be_bytes(self.array()?);
                self.push(Node::Float(value))
            }
            0x8c | b'X' | 0x8d => {
                let n = self.length(opcode, [0x8c, b'X', 0x8d])?;
                let bytes = self.take(n)?;
                let text = std::str::from_utf8(bytes)
                    .map_err(|_| damaged("text that is not valid UTF-8"))?;
                self.text(text)
            }
            b'C' | b'B' | 0x8e => {
                let n = self.length(opcode, [b'C', b'B', 0x8e])?;
                let bytes = self.take(n)?;
                self.binary(bytes)
            }
            b'U' | b'T' => {
                // Of Python 2: text in ASCII, or bytes.
                let n = self.length(opcode, [b'U', b'T', 0])?;
                let bytes = self.take(n)?;
                match std::str::from_utf8(bytes) {
                    Ok(text) => self.text(text),
                    Err(_) => self.binary(bytes),
                }
            }
            _ => Err(unknown(opcode)),
        }
    }

    /// Tuples, lists, dicts and sets.
    fn container(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            b'(' => {
                self.hold(8)?;
                self.marks.push(self.stack.len());
                Ok(())
            }
            b')' => self.push_once(3, Node::Tuple(EMPTY)),
            0x85..=0x87 => {
                let from = self.start_of_last(usize::from(opcode - 0x84))?;
                self.tuple(from)
            }
            b't' => {
                let from = self.start_at_mark()?;
                self.tuple(from)
            }
            b']' => self.push(Node::Many(Many::List, EMPTY)),
            b'}' => self.push(Node::Many(Many::Dict, EMPTY)),
            0x8f => self.push(Node::Many(Many::Set, EMPTY)),
            b'l' => {
                let items = self.pop_mark()?;
                self.push(Node::Many(Many::List, EMPTY))?;
                self.append(&items)
            }
            b'd' => {
                let items = self.pop_mark()?;
                self.push(Node::Many(Many::Dict, EMPTY))?;
                self.set_items(&items)
            }
            0x91 => {
                let items = self.pop_mark()?;
                self.check_keys(items.iter())?;
                self.push(Node::Many(Many::Set, EMPTY))?;
                self.append(&items)
            }
            b'a' => {
                let item = self.pop()?;
                self.append(&[item])
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.append(&items)
            }
            0x90 => {
                let items = self.pop_mark()?;
                self.check_keys(items.iter())?;
                self.append(&items)
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set_items(&[key, value])
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set_items(&items)
            }
            _ => Err(unknown(opcode)),
        }
    }

    /// Names, calls and the memo.
    fn other(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            b'c' => {
                let module = self.line()?;
                let name = self.line()?;
                self.global(module, name)
            }
            0x93 => {
                let name = self.pop()?;
                let module = self.pop()?;
                match (self.store.get(module), self.store.get(name)) {
                    (Value::Text(module), Value::Text(name)) => {
                        let (module, name) = (module.to_owned(), name.to_owned());
                        self.global(&module, &name)
                    }
                    _ => Err(damaged("a name that is no text")),
                }
            }
            b'R' | 0x81 => {
                let arguments = self.pop()?;
                let function = self.pop()?;
                self.call(function, arguments)
            }
            b'b' => self.build(),
            b'Q' => {
                let id = self.pop()?;
                self.push(Node::Persistent(id))
            }
            b'q' => {
                let number = u32::from(self.byte()?);
                self.memoize(number)
            }
            b'r' => {
                let number = u32::from_le_bytes(self.array()?);
                self.memoize(number)
            }
            0x94 => {
                let number =
                    u32::try_from(self.memo.len()).map_err(|_| damaged("too many memo entries"))?;
                self.memoize(number)
            }
            b'h' => {
                let number = u32::from(self.byte()?);
                self.recall(number)
            }
            b'j' => {
                let number = u32::from_le_bytes(self.array()?);
                self.recall(number)
            }
            _ => Err(unknown(opcode)),
        }
    }

    // -- input

    fn take(&mut self, n: u64) -> Result<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        let n = usize::try_from(n).ok().filter(|n| *n <= left);
        let n = n.ok_or_else(|| {
            damaged("the pickle is cut short, or a length in it is larger than what is there")
        })?;
        let bytes = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(bytes)
    }

    fn byte(&mut self) -> Result<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let bytes = self.take(N as u64)?;
        Ok(bytes.try_into().expect("as many as asked for"))
    }

    /// A length of one, four or eight bytes, by the opcode.
    fn length(&mut self, opcode: u8, [one, four, _]: [u8; 3]) -> Result<u64> {
        Ok(if opcode == one {
            u64::from(self.byte()?)
        } else if opcode == four {
            u64::from(u32::from_le_bytes(self.array()?))
        } else {
            u64::from_le_bytes(self.array()?)
        })
    }

    fn line(&mut self) -> Result<&'a str> {
        let rest = &self.bytes[self.at..];
        let n = rest.iter().take(1024).position(|b| *b == b'\n');
        let n = n.ok_or_else(|| damaged("a name without an end"))?;
        self.at += n + 1;
        std::str::from_utf8(&rest[..n]).map_err(|_| damaged("a name that is not valid UTF-8"))
    }

    // -- values

    fn hold(&mut self, n_bytes: usize) -> Result<()> {
        self.n_held += n_bytes;
        if self.n_held > self.budget {
            let message = format!(
                "its {} bytes unfold into more than {} bytes of objects",
                self.bytes.len(),
                self.budget
            );
            return Err(Error::new(Kind::Unsupported, message));
        }
        Ok(())
    }

    fn push(&mut self, node: Node) -> Result<()> {
        self.hold(size_of::<Node>() + size_of::<Id>())?;
        let id = u32::try_from(self.store.nodes.len()).ok();
        let id = id.filter(|id| Id(*id) != NO_STATE);
        let id = id.ok_or_else(|| damaged("too many objects"))?;
        self.store.nodes.push(node);
        self.store.n += 1;
        self.stack.push(Id(id));
        Ok(())
    }

    /// A value that never changes, made when it first occurs.
    fn push_once(&mut self, which: usize, node: Node) -> Result<()> {
        if let Some(id) = self.once[which] {
            self.hold(size_of::<Id>())?;
            self.store.n += 1;
            self.stack.push(id);
            return Ok(());
        }
        self.push(node)?;
        self.once[which] = self.stack.last().copied();
        Ok(())
    }

    fn int(&mut self, value: i64) -> Result<()> {
        match u8::try_from(value) {
            Ok(small) => self.push_once(4 + usize::from(small), Node::Int(value)),
            Err(_) => self.push(Node::Int(value)),
        }
    }

    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Id> {
        if self.stack.len() <= self.floor() {
            return Err(damaged("it takes more from the stack than is there"));
        }
        Ok(self.stack.pop().expect("counted above"))
    }

    /// Where the last `n` values of the stack begin.
    fn start_of_last(&self, n: usize) -> Result<usize> {
        if self.stack.len() < self.floor() + n {
            return Err(damaged("it takes more from the stack than is there"));
        }
        Ok(self.stack.len() - n)
    }

    /// Where the values behind the last mark begin; the mark is taken.
    fn start_at_mark(&mut self) -> Result<usize> {
        let from = self.marks.pop();
        from.ok_or_else(|| damaged("there is no mark on the stack"))
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>> {
        let from = self.start_at_mark()?;
        Ok(self.stack.split_off(from))
    }

    fn top(&self) -> Result<Id> {
        if self.stack.len() <= self.floor() {
            return Err(damaged("it takes more from the stack than is there"));
        }
        Ok(self.stack[self.stack.len() - 1])
    }

    fn tuple(&mut self, from: usize) -> Result<()> {
        self.hold(4 * (self.stack.len() - from))?;
        let span = Store::span(&mut self.store.links, &self.stack[from..])?;
        self.stack.truncate(from);
        self.push(Node::Tuple(span))
    }

    fn text(&mut self, text: &str) -> Result<()> {
        self.hold(text.len())?;
        let span = Store::next_span(self.store.text.len(), text.len())?;
        self.store.text.push_str(text);
        self.push(Node::Text(span))
    }

    fn binary(&mut self, bytes: &[u8]) -> Result<()> {
        self.hold(bytes.len())?;
        let span = Store::span(&mut self.store.bytes, bytes)?;
        self.push(Node::Bytes(span))
    }

    fn long(&mut self, n: u64) -> Result<()> {
        let bytes = self.take(n)?;
        if bytes.len() > MAX_LONG_BYTES {
            return Err(Error::new(
                Kind::Unsupported,
                format!("an integer of {n} bytes"),
            ));
        }
        if bytes.len() > 8 {
            self.hold(bytes.len())?;
            let span = Store::span(&mut self.store.bytes, bytes)?;
            return self.push(Node::Long(span));
        }
        let fill = if bytes.last().is_some_and(|b| b & 0x80 != 0) {
            0xff
        } else {
            0
        };
        let mut wide = [fill; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        self.int(i64::from_le_bytes(wide))
    }

    fn global(&mut self, module: &str, name: &str) -> Result<()> {
        check_name(module, name)?;
        self.hold(module.len() + name.len() + 32)?;
        let number = u32::try_from(self.store.globals.len());
        let number = number.map_err(|_| damaged("too many objects"))?;
        self.store.globals.push((module.into(), name.into()));
        self.push(Node::Global(number))?;
        self.short.named(module, name, self.top()?);
        Ok(())
    }

    fn node(&self, id: Id) -> Node {
        self.store.nodes[id.0 as usize]
    }

    fn call(&mut self, function: Id, arguments: Id) -> Result<()> {
        let Value::Global(module, name) = self.store.get(function) else {
            return Err(Error::new(
                Kind::Unsupported,
                "it calls something that is not a name",
            ));
        };
        let Value::Tuple(given) = self.store.get(arguments) else {
            return Err(damaged("the arguments of a call are no tuple"));
        };
        if name == GETATTR && BUILTIN_MODULES.contains(&module) {
            // Python 3.11.0 to 3.11.3 pickles a member of an enum as `getattr(Class, "NAME")`; later ones as `Class(value)`,
            // which this is read like. A record is never called, so nothing else can be reached through it.
            let &[class, member] = given else {
                return Err(refused_name(module, name, RUNS_CODE));
            };
            if let Value::Global(module, outer) = self.store.get(class)
                && let Value::Text(inner) = self.store.get(member)
                && (module, outer, inner) == INNER_CLASS
            {
                // So do protocols before 4 name it; later ones name it as it is stored here.
                return self.global(INNER_CLASS.0, INNER_CLASS_NAME);
            }
            let is_member = matches!(self.store.get(class), Value::Global(_, class) if class != GETATTR)
                && matches!(self.store.get(member), Value::Text(member) if is_identifier(member) && !member.starts_with('_'));
            if !is_member {
                return Err(refused_name(module, name, RUNS_CODE));
            }
            self.stack.push(member);
            self.tuple(self.stack.len() - 1)?;
            let arguments = self.pop()?;
            return self.push(Node::Record {
                function: class,
                arguments,
                state: NO_STATE,
            });
        }
        let items = self.given_items(module, name, given)?;
        self.push(Node::Record {
            function,
            arguments,
            state: NO_STATE,
        })?;
        if items.is_empty() {
            return Ok(());
        }
        self.set_items(&items)
    }

    /// Keys and values that a dict is called with: a `Counter` with a dict, an `OrderedDict` of Python 2 with a list of
    /// pairs. Other dicts get theirs after the call.
    fn given_items(&self, module: &str, name: &str, given: &[Id]) -> Result<Vec<Id>> {
        let (("collections", "Counter" | "OrderedDict"), &[content]) = ((module, name), given)
        else {
            return Ok(Vec::new());
        };
        let pairs = match self.store.get(content) {
            Value::Dict(items) => return Ok(items.as_flattened().to_vec()),
            Value::List(pairs) | Value::Tuple(pairs) => pairs,
            _ => return Err(damaged("a dict of something that has no keys")),
        };
        let mut items = Vec::new();
        for pair in pairs {
            match self.store.get(*pair) {
                Value::List(pair @ &[_, _]) | Value::Tuple(pair @ &[_, _]) => items.extend(pair),
                _ => return Err(damaged("a dict of something that is no pair")),
            }
        }
        Ok(items)
    }

    fn build(&mut self) -> Result<()> {
        let built = self.pop()?;
        let target = self.top()?;
        let is_special =
            |id: Id| matches!(self.store.get(id), Value::Text(text) if text.starts_with("__"));
        if let Value::Dict(items) = self.store.get(built) {
            // Many records can share one dict.
            self.n_attributes += items.len();
            if self.n_attributes > self.budget {
                return Err(too_many_attributes());
            }
        }
        if let Value::Dict(items) = self.store.get(built)
            && items.iter().any(|[key, _]| is_special(*key))
        {
            return Err(Error::new(
                Kind::Unsupported,
                "it sets an attribute that belongs to the class",
            ));
        }
        if self.must_not_change(target) {
            return self.lost();
        }
        let Node::Record { state, .. } = &mut self.store.nodes[target.0 as usize] else {
            return Err(damaged("it sets attributes of something that has none"));
        };
        *state = built;
        Ok(())
    }

    fn append(&mut self, items: &[Id]) -> Result<()> {
        self.hold(8 * items.len())?;
        let target = self.top()?;
        if self.must_not_change(target) {
            return self.lost();
        }
        match self.node(target) {
            Node::Many(many @ (Many::List | Many::Set), _)
            | Node::Grown(many @ (Many::List | Many::Set), _) => {
                self.store.extend(target, many, items)
            }
            Node::Record { .. } => {
                self.hold(RECORD_PART_BYTES)?;
                self.store.fill(target, 1, items)
            }
            _ => Err(damaged("it appends to something that is no list")),
        }
    }

    fn set_items(&mut self, items: &[Id]) -> Result<()> {
        if !items.len().is_multiple_of(2) {
            return Err(damaged("a key without a value"));
        }
        self.check_keys(items.iter().step_by(2))?;
        self.hold(8 * items.len())?;
        let target = self.top()?;
        if self.must_not_change(target) {
            return self.lost();
        }
        match self.node(target) {
            Node::Many(Many::Dict, _) | Node::Grown(Many::Dict, _) => {
                self.store.extend(target, Many::Dict, items)
            }
            Node::Record { .. } => {
                self.hold(RECORD_PART_BYTES)?;
                self.store.fill(target, 0, items)
            }
            _ => Err(damaged("it sets a key of something that is no dict")),
        }
    }

    /// Lists, dicts and sets cannot be keys.
    fn check_keys<'b>(&self, mut keys: impl Iterator<Item = &'b Id>) -> Result<()> {
        if keys.any(|id| matches!(self.node(*id), Node::Many(..) | Node::Grown(..))) {
            return Err(damaged("a list, dict or set as a key"));
        }
        Ok(())
    }

    // -- memo

    fn memoize(&mut self, number: u32) -> Result<()> {
        let top = self.top()?;
        self.hold(8)?;
        self.memo.put(number, top);
        Ok(())
    }

    fn recall(&mut self, number: u32) -> Result<()> {
        let id = self.memo.get(number);
        let id = id.ok_or_else(|| {
            damaged(format!(
                "it recalls memo entry {number}, which was never set"
            ))
        })?;
        if id == NO_STATE {
            return self.lost();
        }
        self.hold(4)?;
        self.stack.push(id);
        let n = self.store.n;
        if self.short_record(id).is_none() {
            self.store.n = n;
        }
        Ok(())
    }
}
