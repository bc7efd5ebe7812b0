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

use reshard_core::error::Printable;
use reshard_core::{Error, Kind, Result};
use std::collections::HashMap;

/// Highest protocol that is read.
const MAX_PROTOCOL: u8 = 5;
/// Bytes of memory for each byte of input, and for any input. A `.metadata` of many chunks takes 14 for each byte.
const BYTES_PER_BYTE: usize = 24;
const BASE_BYTES: usize = 8 << 20;
/// Digits of an integer beyond 64 bits.
const MAX_LONG_BYTES: usize = 1 << 10;

/// The number of a value of a [`Pickle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(u32);

/// One object of a pickle. Containers refer to others by number, so that shared objects and cycles stay what they are.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of at most 64 bits.
    Int(i64),
    /// A larger integer: two's complement, least significant byte first.
    Long(Box<[u8]>),
    /// A float.
    Float(f64),
    /// Text.
    Text(Box<str>),
    /// Bytes.
    Bytes(Box<[u8]>),
    /// A tuple.
    Tuple(Box<[Id]>),
    /// A list.
    List(Vec<Id>),
    /// A dict, in the order in which its keys were first set. The last value of a key counts.
    Dict(Vec<(Id, Id)>),
    /// A set; of a frozenset the same.
    Set(Vec<Id>),
    /// A class or a function by name: never imported.
    Global(Box<(Box<str>, Box<str>)>),
    /// What a call or a class would have made.
    Record(Box<Record>),
    /// A persistent id: an object that is stored outside the pickle.
    Persistent(Id),
}

/// A call that was not made.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The function or class; a [`Value::Global`].
    pub function: Id,
    /// Its arguments; a [`Value::Tuple`].
    pub arguments: Id,
    /// What was to become its attributes.
    pub state: Option<Id>,
    /// Keys and values that were to be set.
    pub items: Vec<(Id, Id)>,
    /// Values that were to be appended.
    pub appended: Vec<Id>,
}

/// The decoded objects.
#[derive(Debug)]
pub struct Pickle {
    values: Vec<Value>,
    root: Id,
    n_bytes: usize,
}

impl Pickle {
    /// Decodes one pickle at the beginning of some bytes.
    ///
    /// # Errors
    /// `Kind::Damaged` if it is no such pickle; `Kind::Unsupported` for an opcode, a protocol or a name that is refused.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        Machine::new(bytes).run()
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
        self.values.len()
    }

    /// Whether there is none, which does not happen.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// All objects, in the order in which they were made.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// A value.
    pub fn get(&self, id: Id) -> &Value {
        &self.values[id.0 as usize]
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
            Value::Int(int) => Some(*int),
            _ => None,
        }
    }

    /// The elements of a tuple or a list; those of a `torch.Size` too.
    pub fn sequence(&self, id: Id) -> Option<&[Id]> {
        match self.get(id) {
            Value::Tuple(items) => Some(items),
            Value::List(items) => Some(items),
            Value::Record(record) if self.name(record.function) == Some(("torch", "Size")) => {
                match self.get(record.arguments) {
                    Value::Tuple(items) if items.len() == 1 => match self.get(items[0]) {
                        Value::Tuple(items) => Some(items),
                        Value::List(items) => Some(items),
                        _ => None,
                    },
                    Value::Tuple(items) if items.is_empty() => Some(&[]),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Keys and values of a dict, also of an `OrderedDict`, a `defaultdict` or a `Counter`.
    pub fn items(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.get(id) {
            Value::Dict(items) => Some(items),
            Value::Record(record)
                if matches!(
                    self.name(record.function),
                    Some(("collections", "OrderedDict" | "defaultdict" | "Counter"))
                ) =>
            {
                Some(&record.items)
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
            .find(|(one, _)| self.text(*one) == Some(key))
            .map(|(_, value)| *value)
    }

    /// Module and name of a class or function.
    pub fn name(&self, id: Id) -> Option<(&str, &str)> {
        match self.get(id) {
            Value::Global(name) => Some((&name.0, &name.1)),
            _ => None,
        }
    }

    /// A record.
    pub fn record(&self, id: Id) -> Option<&Record> {
        match self.get(id) {
            Value::Record(record) => Some(record),
            _ => None,
        }
    }

    /// The record of a call of this name.
    pub fn call(&self, id: Id, module: &str, name: &str) -> Option<&Record> {
        let record = self.record(id)?;
        (self.name(record.function) == Some((module, name))).then_some(record)
    }

    /// An attribute that a record sets by a dict of attributes.
    pub fn attribute(&self, record: &Record, name: &str) -> Option<Id> {
        self.item(record.state?, name)
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

fn check_name(module: &str, name: &str) -> Result<()> {
    let refuse = |why: &str| {
        let message = format!(
            "it names `{}.{}`, {why}",
            Printable(module),
            Printable(name)
        );
        Err(Error::new(Kind::Unsupported, message).hint("nothing was imported or called; do not load this file with a reader that executes pickles"))
    };
    let is_identifier = |text: &str| {
        !text.is_empty()
            && text.len() <= 256
            && text.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    if !is_identifier(name) || module.len() > 512 || !module.split('.').all(is_identifier) {
        return refuse("which is not a plain name");
    }
    let top = module.split('.').next().unwrap_or_default();
    if REFUSED_MODULES.contains(&top) || REFUSED_NAMES.contains(&(module, name)) {
        return refuse("which no checkpoint needs and which can run code");
    }
    if matches!(top, "builtins" | "__builtin__") && !BUILTINS.contains(&name) {
        return refuse("which no checkpoint needs and which can run code");
    }
    Ok(())
}

fn unknown(opcode: u8) -> Error {
    let message = format!("opcode 0x{opcode:02x}, which no checkpoint writer uses");
    Error::new(Kind::Unsupported, message)
}

fn damaged(message: impl Into<String>) -> Error {
    Error::damaged(message)
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: Memo,
    /// Memory that the values take beyond their slots.
    n_held: usize,
    budget: usize,
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
                self.sparse.remove(&number);
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
    fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            values: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Memo::default(),
            n_held: 0,
            budget: bytes
                .len()
                .saturating_mul(BYTES_PER_BYTE)
                .saturating_add(BASE_BYTES),
        }
    }

    fn run(mut self) -> Result<Pickle> {
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
        Ok(Pickle {
            values: self.values,
            root,
            n_bytes: self.at,
        })
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
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'J' => {
                let value = i64::from(i32::from_le_bytes(self.array()?));
                self.push(Value::Int(value))
            }
            b'K' => {
                let value = i64::from(self.byte()?);
                self.push(Value::Int(value))
            }
            b'M' => {
                let value = i64::from(u16::from_le_bytes(self.array()?));
                self.push(Value::Int(value))
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
                self.push(Value::Float(value))
            }
            0x8c | b'X' | 0x8d => {
                let n = self.length(opcode, [0x8c, b'X', 0x8d])?;
                self.text(n)
            }
            b'C' | b'B' | 0x8e => {
                let n = self.length(opcode, [b'C', b'B', 0x8e])?;
                let bytes: Box<[u8]> = self.take(n)?.into();
                self.hold(bytes.len())?;
                self.push(Value::Bytes(bytes))
            }
            b'U' | b'T' => {
                // Of Python 2: text in ASCII, or bytes.
                let n = self.length(opcode, [b'U', b'T', 0])?;
                let bytes = self.take(n)?;
                let value = match std::str::from_utf8(bytes) {
                    Ok(text) => Value::Text(text.into()),
                    Err(_) => Value::Bytes(bytes.into()),
                };
                self.hold(n as usize)?;
                self.push(value)
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
            b')' => self.push(Value::Tuple(Box::default())),
            0x85..=0x87 => {
                let items = self.pop_n(usize::from(opcode - 0x84))?;
                self.tuple(items)
            }
            b't' => {
                let items = self.pop_mark()?;
                self.tuple(items)
            }
            b']' => self.push(Value::List(Vec::new())),
            b'l' => {
                let items = self.pop_mark()?;
                self.hold(4 * items.len())?;
                self.push(Value::List(items))
            }
            b'}' => self.push(Value::Dict(Vec::new())),
            b'd' => {
                let items = self.pop_mark()?;
                self.push(Value::Dict(Vec::new()))?;
                self.set_items(&items)
            }
            0x8f => self.push(Value::Set(Vec::new())),
            0x91 => {
                let items = self.pop_mark()?;
                self.check_keys(items.iter())?;
                self.hold(4 * items.len())?;
                self.push(Value::Set(items))
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
                let items = self.pop_n(2)?;
                self.set_items(&items)
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
                match (
                    &self.values[module.0 as usize],
                    &self.values[name.0 as usize],
                ) {
                    (Value::Text(module), Value::Text(name)) => {
                        let (module, name) = (module.to_string(), name.to_string());
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
                self.push(Value::Persistent(id))
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

    fn push(&mut self, value: Value) -> Result<()> {
        self.hold(size_of::<Value>() + size_of::<Id>())?;
        let id = u32::try_from(self.values.len()).map_err(|_| damaged("too many objects"))?;
        self.values.push(value);
        self.stack.push(Id(id));
        Ok(())
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

    fn pop_n(&mut self, n: usize) -> Result<Vec<Id>> {
        if self.stack.len() < self.floor() + n {
            return Err(damaged("it takes more from the stack than is there"));
        }
        Ok(self.stack.split_off(self.stack.len() - n))
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>> {
        let from = self
            .marks
            .pop()
            .ok_or_else(|| damaged("there is no mark on the stack"))?;
        Ok(self.stack.split_off(from))
    }

    fn top(&self) -> Result<Id> {
        if self.stack.len() <= self.floor() {
            return Err(damaged("it takes more from the stack than is there"));
        }
        Ok(self.stack[self.stack.len() - 1])
    }

    fn tuple(&mut self, items: Vec<Id>) -> Result<()> {
        self.hold(4 * items.len())?;
        self.push(Value::Tuple(items.into()))
    }

    fn text(&mut self, n: u64) -> Result<()> {
        let bytes = self.take(n)?;
        let text =
            std::str::from_utf8(bytes).map_err(|_| damaged("text that is not valid UTF-8"))?;
        self.hold(text.len())?;
        self.push(Value::Text(text.into()))
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
            return self.push(Value::Long(bytes.into()));
        }
        let fill = if bytes.last().is_some_and(|b| b & 0x80 != 0) {
            0xff
        } else {
            0
        };
        let mut wide = [fill; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Int(i64::from_le_bytes(wide)))
    }

    fn global(&mut self, module: &str, name: &str) -> Result<()> {
        check_name(module, name)?;
        self.hold(module.len() + name.len() + 32)?;
        self.push(Value::Global(Box::new((module.into(), name.into()))))
    }

    fn call(&mut self, function: Id, arguments: Id) -> Result<()> {
        if !matches!(self.values[function.0 as usize], Value::Global(_)) {
            return Err(Error::new(
                Kind::Unsupported,
                "it calls something that is not a name",
            ));
        }
        if !matches!(self.values[arguments.0 as usize], Value::Tuple(_)) {
            return Err(damaged("the arguments of a call are no tuple"));
        }
        self.hold(size_of::<Record>())?;
        let record = Record {
            function,
            arguments,
            state: None,
            items: Vec::new(),
            appended: Vec::new(),
        };
        self.push(Value::Record(Box::new(record)))
    }

    fn build(&mut self) -> Result<()> {
        let state = self.pop()?;
        let target = self.top()?;
        let is_special = |id: &Id| matches!(&self.values[id.0 as usize], Value::Text(text) if text.starts_with("__"));
        if let Value::Dict(items) = &self.values[state.0 as usize]
            && items.iter().any(|(key, _)| is_special(key))
        {
            return Err(Error::new(
                Kind::Unsupported,
                "it sets an attribute that belongs to the class",
            ));
        }
        let Value::Record(record) = &mut self.values[target.0 as usize] else {
            return Err(damaged("it sets attributes of something that has none"));
        };
        record.state = Some(state);
        Ok(())
    }

    fn append(&mut self, items: &[Id]) -> Result<()> {
        self.hold(8 * items.len())?;
        let target = self.top()?;
        match &mut self.values[target.0 as usize] {
            Value::List(list) | Value::Set(list) => list.extend_from_slice(items),
            Value::Record(record) => record.appended.extend_from_slice(items),
            _ => return Err(damaged("it appends to something that is no list")),
        }
        Ok(())
    }

    fn set_items(&mut self, items: &[Id]) -> Result<()> {
        if !items.len().is_multiple_of(2) {
            return Err(damaged("a key without a value"));
        }
        self.check_keys(items.iter().step_by(2))?;
        self.hold(8 * items.len())?;
        let target = self.top()?;
        let pairs = items.chunks_exact(2).map(|pair| (pair[0], pair[1]));
        match &mut self.values[target.0 as usize] {
            Value::Dict(dict) => dict.extend(pairs),
            Value::Record(record) => record.items.extend(pairs),
            _ => return Err(damaged("it sets a key of something that is no dict")),
        }
        Ok(())
    }

    /// Lists, dicts and sets cannot be keys.
    fn check_keys<'b>(&self, mut keys: impl Iterator<Item = &'b Id>) -> Result<()> {
        let is_bad = |id: &Id| {
            matches!(
                self.values[id.0 as usize],
                Value::List(_) | Value::Dict(_) | Value::Set(_)
            )
        };
        if keys.any(is_bad) {
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
        self.hold(4)?;
        self.stack.push(id);
        Ok(())
    }
}
