//! Writes a `metadata.json` and its binary table.
//!
//! Thousands of tensors differ in their name alone: everything else is given once, as a [`Kind`], and its text is made
//! once. The file is made in pieces, because it can have hundreds of MB.

use super::DeviceLayout;
use super::table::{MAGIC, Writer};
use reshard_core::error::{Error, Kind as ErrorKind, Printable, Result};
use reshard_core::header::all_bytes;
use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::mem::take;

/// A piece ends with the tensor that makes it at least as long.
const PIECE_BYTES: usize = 1 << 20;
/// Most bytes of the texts of kinds that are kept: one of many ranks can have megabytes.
const MAX_TEXTS_BYTES: usize = 64 << 20;

/// Tensors with the same dtype, shape, partition, holders and part.
#[derive(Debug)]
pub struct Kind {
    /// The dtype in the spelling of the file.
    pub dtype: String,
    /// The global shape in elements.
    pub shape: Vec<u64>,
    /// Number of the grid.
    pub grid: usize,
    /// Number of the list of cells.
    pub cells: usize,
}

/// What tensors with one partition and one place share.
#[derive(Debug)]
pub struct Grid {
    /// The `replica_id` of each rank.
    pub replica_id: Vec<u64>,
    /// Number of parts of each dim.
    pub fragmentations: Vec<u64>,
    /// Number of the layout.
    pub layout: usize,
    /// The `global_offset` of each shard, in the order of the text.
    pub offsets: Vec<u64>,
}

/// A shard of the tensors of a grid, in one part.
#[derive(Debug)]
pub struct Cell {
    /// Its `global_offset`.
    pub offset: u64,
    /// The ranks that hold it.
    pub rank_group: Vec<u64>,
    /// Numbers of the files of these ranks.
    pub files: Vec<usize>,
}

/// A shard file.
#[derive(Debug)]
pub struct File {
    /// Its name.
    pub name: String,
    /// The rank that writes it.
    pub rank: u64,
    /// Numbers of the tensors in it.
    pub tensors: Vec<u32>,
}

/// The content of a `metadata.json`: tensors `0..keys.len()` of these kinds.
#[derive(Debug)]
pub struct Description<K> {
    /// The names of the tensors, each once.
    pub keys: Vec<K>,
    /// The number of the kind of each tensor.
    pub kind_of: Vec<u32>,
    /// The kinds.
    pub kinds: Vec<Kind>,
    /// The distinct grids.
    pub grids: Vec<Grid>,
    /// The distinct layouts, in the order in which tensors first have them.
    pub layouts: Vec<DeviceLayout>,
    /// The distinct lists of cells, in the order of the text.
    pub cells: Vec<Vec<Cell>>,
    /// The files.
    pub files: Vec<File>,
    /// For names that [`is_plain`] refuses: the JSON of the name of a shard before and after its number.
    pub shard_names: HashMap<u32, (String, String)>,
}

/// Makes the text in pieces, and the table while it does so.
#[derive(Debug)]
pub struct Encoder<K> {
    of: Description<K>,
    /// For each file a bit for each tensor.
    held: Vec<Vec<u64>>,
    /// The start of an entry of each file, before the ranks of the cell.
    starts: Vec<String>,
    /// The text of the ranks of each cell in a list. All ranks can hold a cell, and each of them can have a file.
    groups: Vec<Vec<String>>,
    texts: Vec<String>,
    texts_bytes: usize,
    /// The next tensor: twice through all of them.
    next: usize,
    is_begun: bool,
    is_ended: bool,
    table: Table,
}

/// The parts of the table that follow from the files that hold each tensor.
#[derive(Debug, Default)]
struct Table {
    /// The number of each file that a tensor has named, in the order in which they did.
    number_of: HashMap<usize, u32>,
    files: Vec<usize>,
    holders: HashMap<Vec<u8>, u32>,
    in_order: Vec<u8>,
    /// The holders of a list of cells in these files, by what `holders_of` is given.
    known: HashMap<Vec<u32>, u32>,
    /// The start of a tensor of each kind behind its name.
    kinds: Vec<Vec<u8>>,
    tensors: Vec<u8>,
}

/// Whether the name of a shard of this tensor is its text between single quotes.
pub fn is_plain(key: &str) -> bool {
    all_bytes(key, |byte| {
        matches!(byte, b' '..=b'~') && !matches!(byte, b'\'' | b'"' | b'\\')
    })
}

impl<K: AsRef<str>> Encoder<K> {
    /// Begins the text.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`]: a number is not that of an item of its list, or two tensors have one name.
    pub fn new(description: Description<K>) -> Result<Self> {
        let of = description;
        let n_tensors = of.keys.len();
        let is_sound = of.kind_of.len() == n_tensors
            && of
                .kind_of
                .iter()
                .all(|&kind| (kind as usize) < of.kinds.len())
            && of.kinds.iter().all(|kind| {
                let grid = of.grids.get(kind.grid);
                kind.cells < of.cells.len()
                    && grid.is_some_and(|grid| {
                        grid.layout < of.layouts.len()
                            && grid.fragmentations.len() == kind.shape.len()
                            && !grid.fragmentations.contains(&0)
                    })
            })
            && of
                .cells
                .iter()
                .flatten()
                .flat_map(|cell| &cell.files)
                .all(|&file| file < of.files.len())
            && of
                .files
                .iter()
                .flat_map(|file| &file.tensors)
                .all(|&tensor| (tensor as usize) < n_tensors)
            && (of.keys.iter().enumerate())
                .all(|(i, key)| is_plain(key.as_ref()) || of.shard_names.contains_key(&(i as u32)));
        if !is_sound {
            let message = "a description of metadata names what it does not list";
            return Err(Error::new(ErrorKind::Argument, message));
        }
        let mut seen = HashSet::with_capacity(n_tensors);
        if let Some(key) = of
            .keys
            .iter()
            .map(AsRef::as_ref)
            .find(|key| !seen.insert(*key))
        {
            let message = format!("`{}` is described twice", Printable(key));
            return Err(Error::new(ErrorKind::Argument, message).key(key));
        }
        drop(seen);
        let held = of.files.iter().map(|file| bits(&file.tensors, n_tensors));
        let held = held.collect();
        let starts = of.files.iter().map(|File { name, rank, .. }| {
            let name = quoted(name);
            format!(r#"{{"file_name":{name},"storage_rank":{rank},"rank_group":"#)
        });
        let starts = starts.collect();
        let groups = of.cells.iter().map(|cells| {
            let groups = cells.iter().map(|cell| numbers(&cell.rank_group));
            groups.collect()
        });
        let groups = groups.collect();
        let texts = of.kinds.iter().map(|_| String::new()).collect();
        let mut table = Table::default();
        for kind in &of.kinds {
            let grid = &of.grids[kind.grid];
            let mut out = Writer(Vec::new());
            out.text(&kind.dtype)?;
            out.longs(&kind.shape)?;
            out.longs(&grid.fragmentations)?;
            out.short(grid.layout as u32 + 1);
            table.kinds.push(out.0);
        }
        Ok(Self {
            of,
            held,
            starts,
            groups,
            texts,
            texts_bytes: 0,
            next: 0,
            is_begun: false,
            is_ended: false,
            table,
        })
    }

    /// The next piece of the text; `None` at its end.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`]: a shard is in no file.
    pub fn piece(&mut self) -> Result<Option<Vec<u8>>> {
        if self.is_ended {
            return Ok(None);
        }
        let n = self.of.keys.len();
        let mut out = String::with_capacity(PIECE_BYTES + PIECE_BYTES / 4);
        if !self.is_begun {
            self.is_begun = true;
            out.push_str(r#"{"state_dict_metadata":{"#);
        }
        while out.len() < PIECE_BYTES {
            let at = self.next;
            if at == n {
                out.push_str("},\n\"storage_data\":{");
            }
            if at == 2 * n {
                out.push_str("}}\n");
                self.is_ended = true;
                break;
            }
            if at < n {
                self.push_tensor(at, &mut out);
            } else {
                self.push_shards(at - n, &mut out)?;
            }
            self.next += 1;
        }
        Ok(Some(out.into_bytes()))
    }

    /// The table of the text, which has this digest. Its end must have been reached.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`]: the end was not reached. [`ErrorKind::Damaged`]: a list has more than 2^32 entries.
    pub fn table(&mut self, digest: &str) -> Result<Vec<u8>> {
        if !self.is_ended {
            return Err(Error::new(ErrorKind::Argument, "the text has not ended"));
        }
        let mut out = Writer(MAGIC.to_vec());
        out.text(digest)?;
        let files = self
            .table
            .files
            .iter()
            .map(|&file| &self.of.files[file].name);
        out.texts(files)?;
        out.len(self.of.layouts.len())?;
        for layout in &self.of.layouts {
            out.longs(&layout.device_matrix)?;
            out.len(layout.tensor_map.len())?;
            for axes in &layout.tensor_map {
                out.longs(axes)?;
            }
            out.texts(layout.alias_name.iter())?;
            out.longs(&layout.rank_list)?;
        }
        out.len(self.table.holders.len())?;
        out.0.append(&mut self.table.in_order);
        out.len(self.of.keys.len())?;
        out.0.append(&mut self.table.tensors);
        Ok(out.0)
    }

    fn push_tensor(&mut self, at: usize, out: &mut String) {
        let number = self.of.kind_of[at] as usize;
        out.push_str(if at == 0 { "\n" } else { ",\n" });
        push_quoted(out, self.of.keys[at].as_ref());
        out.push(':');
        if self.texts[number].is_empty() {
            if self.texts_bytes > MAX_TEXTS_BYTES {
                self.texts.iter_mut().for_each(|text| drop(take(text)));
                self.texts_bytes = 0;
            }
            let text = self.text_of(&self.of.kinds[number]);
            self.texts_bytes += text.len();
            self.texts[number] = text;
        }
        out.push_str(&self.texts[number]);
    }

    fn text_of(&self, kind: &Kind) -> String {
        let grid = &self.of.grids[kind.grid];
        let DeviceLayout {
            device_matrix,
            tensor_map,
            alias_name,
            rank_list,
            ..
        } = &self.of.layouts[grid.layout];
        let local_shape: Vec<u64> = kind
            .shape
            .iter()
            .zip(&grid.fragmentations)
            .map(|(n, parts)| n / parts)
            .collect();
        let local_shape = numbers(&local_shape);
        let tensor_map = tensor_map.iter().map(|axes| match axes[..] {
            [] => "-1".to_owned(),
            [axis] => axis.to_string(),
            _ => numbers(axes),
        });
        let names = alias_name.iter().map(|name| quoted(name));
        let chunks = grid.offsets.iter();
        let chunks = chunks
            .map(|offset| format!(r#"{{"global_offset":[{offset}],"local_shape":{local_shape}}}"#));
        format!(
            concat!(
                r#"{{"properties":{{"dtype":{},"replica_id":{},"allow_shape_mismatch":false,"allow_to_save":true}},"#,
                r#""global_shape":{},"axis_fragmentations":{},"layout":{{"device_matrix":{},"tensor_map":{},"#,
                r#""interleaved_parallel":false,"alias_name":{},"rank_list":{}}},"chunk":{}}}"#,
            ),
            quoted(&kind.dtype),
            numbers(&grid.replica_id),
            numbers(&kind.shape),
            numbers(&grid.fragmentations),
            numbers(device_matrix),
            list(tensor_map),
            list(names),
            numbers(rank_list),
            list(chunks),
        )
    }

    fn push_shards(&mut self, at: usize, out: &mut String) -> Result<()> {
        let key = self.of.keys[at].as_ref();
        let number = self.of.kind_of[at] as usize;
        let of_kind = self.of.kinds[number].cells;
        let odd = self.of.shard_names.get(&(at as u32));
        let mut comma = if at == 0 { "" } else { "," };
        // The number of the list of cells, and for each cell the number of its files and then the files.
        let mut files = vec![of_kind as u32];
        for (cell, group) in self.of.cells[of_kind].iter().zip(&self.groups[of_kind]) {
            out.push_str(comma);
            comma = ",";
            match odd {
                None => {
                    out.push_str("\n\"('");
                    out.push_str(key);
                    out.push_str("', (");
                    push_number(out, cell.offset);
                    out.push_str(",))\":[");
                }
                Some((before, after)) => {
                    let _ = write!(out, "\n{before}{}{after}:[", cell.offset);
                }
            }
            let before = files.len();
            files.push(0);
            for &file in &cell.files {
                if self.held[file][at / 64] >> (at % 64) & 1 == 0 {
                    continue;
                }
                if files.len() > before + 1 {
                    out.push(',');
                }
                out.push_str(&self.starts[file]);
                out.push_str(group);
                out.push('}');
                let next = self.table.files.len() as u32;
                let number = *self.table.number_of.entry(file).or_insert(next);
                if number == next {
                    self.table.files.push(file);
                }
                files.push(number);
            }
            out.push(']');
            files[before] = (files.len() - before - 1) as u32;
            if files[before] == 0 {
                let message = format!(
                    "shard {} of `{}` is in no file of the plan",
                    cell.offset,
                    Printable(key)
                );
                return Err(Error::new(ErrorKind::Argument, message).key(key));
            }
        }
        let holders = self.table.holders_of(&self.of.cells[of_kind], files)?;
        let mut tensors = Writer(take(&mut self.table.tensors));
        tensors.text(key)?;
        tensors.0.extend(&self.table.kinds[number]);
        tensors.short(holders);
        self.table.tensors = tensors.0;
        Ok(())
    }
}

impl Table {
    /// The number of the holders of a tensor.
    ///
    /// `known` has the number of the list of cells, and for each cell the number of its files and then the files, in
    /// the order of the cells.
    fn holders_of(&mut self, cells: &[Cell], known: Vec<u32>) -> Result<u32> {
        if let Some(&number) = self.known.get(&known) {
            return Ok(number);
        }
        let mut rest = &known[1..];
        let mut of_cells = Vec::with_capacity(cells.len());
        for cell in cells {
            let (n, after) = rest.split_first().expect("a number for each cell");
            let (own, after) = after.split_at(*n as usize);
            let mut own = own.to_vec();
            own.sort_unstable();
            of_cells.push((cell.offset, own));
            rest = after;
        }
        of_cells.sort_unstable();
        let (mut starts, mut files) = (vec![0], Vec::new());
        for (_, own) in of_cells {
            files.extend(own);
            starts.push(files.len() as u32);
        }
        let mut encoded = Writer(Vec::new());
        encoded.shorts(starts.into_iter())?;
        encoded.shorts(files.into_iter())?;
        let next = self.holders.len() as u32;
        let number = *self.holders.entry(encoded.0).or_insert_with_key(|encoded| {
            self.in_order.extend(encoded);
            next
        });
        self.known.insert(known, number);
        Ok(number)
    }
}

fn bits(numbers: &[u32], n: usize) -> Vec<u64> {
    let mut bits = vec![0; n.div_ceil(64)];
    for &number in numbers {
        bits[number as usize / 64] |= 1 << (number % 64);
    }
    bits
}

fn list(items: impl Iterator<Item = String>) -> String {
    let mut out = String::from("[");
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push(',');
        }
        out.push_str(&item);
    }
    out.push(']');
    out
}

fn numbers(numbers: &[u64]) -> String {
    list(numbers.iter().map(u64::to_string))
}

fn push_number(out: &mut String, number: u64) {
    if number < 10 {
        out.push((b'0' + number as u8) as char);
    } else {
        let _ = write!(out, "{number}");
    }
}

fn push_quoted(out: &mut String, text: &str) {
    if is_plain(text) {
        out.push('"');
        out.push_str(text);
        out.push('"');
    } else {
        out.push_str(&quoted(text));
    }
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("every text has a JSON form")
}
