//! The tensors in the files of `torch.save` of all ranks of a run, put together.
//!
//! A run of 1,024 ranks has a million parts of a thousand tensors, of which most are described alike. A part is three
//! numbers: its file, what is held of the tensor, and which of several parts of the tensor in the file it is. Tensors whose
//! parts are the same numbers lie alike: their parts are compared and ordered once.

use crate::objects::read_file;
use crate::torch_file::mesh::Meshes;
use crate::torch_file::{Leaf, Regions, TorchFile};
use reshard_core::control::Control;
use reshard_core::copies::{Copies, first_different};
use reshard_core::dtype::Dtype;
use reshard_core::error::Printable;
use reshard_core::header::check_name;
use reshard_core::index::{Held as HeldPart, Index};
use reshard_core::region::{Dims, Region, row_major_strides};
use reshard_core::stored::StoredTensor;
use reshard_core::team::Team;
use reshard_core::tile::Tile;
use reshard_core::{Error, Kind, Result};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MIXED_HINT: &str = "the files are of different saves, or not of all ranks of one run";
/// Ranks that a message names.
const MAX_NAMED: usize = 8;
/// The number of the only part of a tensor in a file.
const ONLY: u32 = u32::MAX;

/// A file of a rank.
#[derive(Debug, Clone)]
pub struct RankFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its number in the index.
    pub file: u32,
    /// The rank that wrote it, unless its `ShardedTensors` say another one.
    pub rank: u64,
}

/// A file whose tensors are known.
#[derive(Debug)]
pub struct KnownFile {
    /// It, with the rank that wrote it.
    pub file: RankFile,
    /// Whether it has values that are no tensors.
    pub has_values: bool,
}

/// What torch calls a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// A tensor that is on a rank as a whole.
    Tensor,
    /// A part of a tensor of a device mesh.
    DTensor,
    /// Regions of a tensor.
    ShardedTensor,
}

impl Class {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::DTensor => "DTensor",
            Self::ShardedTensor => "ShardedTensor",
        }
    }
}

/// What a file holds of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Held {
    /// What torch calls it.
    pub class: Class,
    /// The element type.
    pub dtype: Dtype,
    /// The shape of the whole tensor.
    pub shape: Vec<u64>,
    /// The shape of what is stored.
    pub local: Vec<u64>,
    /// Its first element in the whole tensor; `None`: nothing is stored.
    offset: Option<Vec<u64>>,
    /// Of a `ShardedTensor` the number of the list of the regions of all ranks, and the number of ranks.
    listed: Option<(u32, u64)>,
}

/// A part of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Place {
    file: u32,
    held: u32,
    /// Which of several in the file, or `ONLY`.
    part: u32,
}

/// A file that was read, before its tensors are joined with those of others.
#[derive(Debug)]
pub struct ReadFile {
    rank: u64,
    has_values: bool,
    tensors: Vec<(String, Read)>,
}

#[derive(Debug)]
enum Read {
    Held(Held),
    Regions(Regions),
}

/// The tensors of all ranks.
#[derive(Debug, Default)]
pub struct RankTensors {
    files: Vec<KnownFile>,
    keys: Vec<Arc<str>>,
    by_key: HashMap<Arc<str>, u32>,
    /// The parts of each key, in the order of the files.
    places: Vec<Vec<Place>>,
    held: Vec<Arc<Held>>,
    by_held: HashMap<Arc<Held>, u32>,
    lists: Vec<Arc<[u64]>>,
    by_list: HashMap<Arc<[u64]>, u32>,
}

/// Distinct parts of a tensor, each with the places of its copies. Those without an element are left out.
type Parts<'a> = Vec<(&'a [u64], &'a [u64], Vec<Place>)>;

/// The key and the places of copies, and what of them is compared.
type KeyCopies<'a> = ((&'a str, Vec<Place>), Copies);

/// How the parts of tensors that lie alike are stored.
enum Arranged {
    /// They form a grid: the bounds of the parts of each dim, and for each part the files that hold it.
    Grid {
        bounds: Vec<Vec<u64>>,
        starts: Arc<[u32]>,
        files: Arc<[u32]>,
    },
    /// Offset and shape of each part, and where it is.
    Tiles(Vec<(Vec<u64>, Vec<u64>, Place)>),
}

impl ReadFile {
    /// Reads the tensors of a file.
    ///
    /// Args: `n_ranks` is how many ranks there are by its name, which says the rank, too.
    ///
    /// # Errors
    /// It cannot be read, is damaged, or another rank wrote it than its name says; a placement is not supported.
    pub fn read(file: &RankFile, prefix: &str, n_ranks: Option<u64>) -> Result<Self> {
        let (decoded, leaves) = read_file(&file.path, true)?;
        Self::of(file, &decoded, leaves, prefix, n_ranks)
    }

    /// The tensors of a file that was read.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn of(
        file: &RankFile,
        decoded: &TorchFile,
        leaves: Vec<(String, Leaf)>,
        prefix: &str,
        n_ranks: Option<u64>,
    ) -> Result<Self> {
        let mut writers = leaves.iter().filter_map(|(name, leaf)| match leaf {
            Leaf::Regions(regions) => Some((name, (regions.rank, regions.n_ranks))),
            _ => None,
        });
        let first = writers.next();
        let rank = first.map_or(file.rank, |(_, (rank, _))| rank);
        let fault = |name: &str, error: Error| {
            let key = [prefix, name].concat();
            let path = file.path.to_string_lossy();
            let error = error.within(format_args!("`{}`", Printable(&path)));
            error.path(&file.path).key(&key)
        };
        for (name, (rank, n)) in first.into_iter().chain(writers) {
            let wrote = format!("`{}` was saved by rank {rank} of {n}", Printable(name));
            if let Some(n_ranks) = n_ranks.filter(|n_ranks| (rank, n) != (file.rank, *n_ranks)) {
                let message = format!(
                    "{wrote}, and the name of the file says rank {} of {n_ranks}",
                    file.rank
                );
                let error = Error::damaged(message)
                    .hint("the file was renamed, or is of another run: copy it again");
                return Err(fault(name, error));
            }
            if let Some((of_first, (first_rank, first_n))) = first
                && (rank, n) != (first_rank, first_n)
            {
                let message = format!(
                    "{wrote}, and `{}` by rank {first_rank} of {first_n}",
                    Printable(of_first)
                );
                let error = Error::damaged(message).hint("save the file of each rank alone");
                return Err(fault(name, error));
            }
        }
        let mut meshes = Meshes::new(rank);
        let mut has_values = false;
        let mut tensors = Vec::with_capacity(leaves.len());
        for (name, leaf) in leaves {
            let held = match leaf {
                Leaf::Other(_) => {
                    has_values = true;
                    continue;
                }
                Leaf::Regions(regions) => Read::Regions(regions),
                Leaf::Tensor(tensor) => Read::Held(Held {
                    class: Class::Tensor,
                    dtype: tensor.dtype,
                    shape: tensor.shape.clone(),
                    offset: Some(vec![0; tensor.shape.len()]),
                    local: tensor.shape,
                    listed: None,
                }),
                Leaf::Sharded(sharded) => {
                    let offset = decoded.part_offset(&name, &sharded, &mut meshes);
                    Read::Held(Held {
                        class: Class::DTensor,
                        dtype: sharded.local.dtype,
                        offset: Some(offset.map_err(|error| fault(&name, error))?),
                        shape: sharded.shape,
                        local: sharded.local.shape,
                        listed: None,
                    })
                }
            };
            let key = [prefix, name.as_str()].concat();
            if !key.is_empty() {
                check_name(&key).map_err(|error| fault(&name, error))?;
            }
            tensors.push((name, held));
        }
        Ok(Self {
            rank,
            has_values,
            tensors,
        })
    }
}

impl RankTensors {
    /// Adds the tensors of a file.
    ///
    /// # Errors
    /// There are too many.
    pub fn push(&mut self, mut file: RankFile, prefix: &str, read: ReadFile) -> Result<()> {
        file.rank = read.rank;
        let number = as_u32(self.files.len())?;
        let has_values = read.has_values;
        self.files.push(KnownFile { file, has_values });
        let mut next = 0;
        for (name, read) in read.tensors {
            let name = if prefix.is_empty() {
                name
            } else {
                [prefix, &name].concat()
            };
            // Files mostly hold the same tensors in the same order.
            let key = match self.keys.get(next) {
                Some(key) if **key == *name => next,
                _ => self.key_number(name)? as usize,
            };
            next = key + 1;
            let mut push = |part: u32, held: u32| {
                self.places[key].push(Place {
                    file: number,
                    held,
                    part,
                });
            };
            match read {
                Read::Held(held) => {
                    let held = number_of(&mut self.held, &mut self.by_held, held)?;
                    push(ONLY, held);
                }
                Read::Regions(regions) => {
                    let list = number_of(&mut self.lists, &mut self.by_list, regions.all)?;
                    let of = |offset: Option<Vec<u64>>, local: Vec<u64>| Held {
                        class: Class::ShardedTensor,
                        dtype: regions.dtype,
                        shape: regions.shape.clone(),
                        local,
                        offset,
                        listed: Some((list, regions.n_ranks)),
                    };
                    if regions.held.is_empty() {
                        let none = of(None, Vec::new());
                        push(ONLY, number_of(&mut self.held, &mut self.by_held, none)?);
                    }
                    let is_only = regions.held.len() == 1;
                    for (part, (offset, tensor)) in regions.held.into_iter().enumerate() {
                        let held = of(Some(offset), tensor.shape);
                        let held = number_of(&mut self.held, &mut self.by_held, held)?;
                        push(if is_only { ONLY } else { as_u32(part)? }, held);
                    }
                }
            }
        }
        Ok(())
    }

    fn key_number(&mut self, key: String) -> Result<u32> {
        if let Some(&number) = self.by_key.get(key.as_str()) {
            return Ok(number);
        }
        let number = as_u32(self.keys.len())?;
        let key: Arc<str> = key.into();
        self.keys.push(Arc::clone(&key));
        self.by_key.insert(key, number);
        self.places.push(Vec::new());
        Ok(number)
    }

    /// The tensors of a file, or of all, in the order in which they first occur: the file, the key and what is held. Those
    /// of several files that differ only in where their parts begin are one.
    pub fn tensors(&self, file: Option<u32>) -> Vec<(&RankFile, &str, &Held)> {
        let mut found = Vec::new();
        for (key, places) in self.keys.iter().zip(&self.places) {
            let places = file.map_or(&places[..], |file| {
                let first = places.partition_point(|place| place.file < file);
                let end = places.partition_point(|place| place.file <= file);
                &places[first..end]
            });
            let mut known = HashSet::new();
            for place in places {
                let held = self.held(*place);
                if known.insert((held.class, held.dtype, &held.local)) {
                    found.push((self.file(*place), &**key, held));
                }
            }
        }
        found
    }

    /// The files.
    pub fn files(&self) -> &[KnownFile] {
        &self.files
    }

    fn places(&self, key: &str) -> Result<&[Place]> {
        let number = self.by_key.get(key).ok_or_else(|| {
            let message = format!("there is no tensor `{}`", Printable(key));
            Error::new(Kind::Key, message).key(key)
        });
        number.map(|number| &*self.places[*number as usize])
    }

    fn held(&self, place: Place) -> &Held {
        &self.held[place.held as usize]
    }

    fn file(&self, place: Place) -> &RankFile {
        &self.files[place.file as usize].file
    }

    fn path(&self, place: Place) -> &Path {
        &self.file(place).path
    }

    fn stored_name(key: &str, place: Place) -> String {
        match place.part {
            ONLY => key.to_owned(),
            part => format!("{key}[{part}]"),
        }
    }

    /// Adds whole tensors to an index, whose files have these names. Returns the keys of which several ranks hold copies.
    ///
    /// # Errors
    /// Ranks describe a tensor differently, or their parts leave a hole or overlap.
    pub fn add_to<'a>(
        &self,
        index: &mut Index,
        keys: &[&'a str],
        hint: &str,
    ) -> Result<Vec<&'a str>> {
        self.check_runs(keys)?;
        let mut known: HashMap<&[Place], (Arranged, bool)> = HashMap::new();
        let mut copied = Vec::new();
        for key in keys {
            let places = self.places(key)?;
            if !known.contains_key(places) {
                known.insert(places, self.arranged(key, places, hint)?);
            }
            let (arranged, has_copies) = &known[places];
            if *has_copies {
                copied.push(*key);
            }
            let held = self.held(places[0]);
            match arranged {
                Arranged::Grid {
                    bounds,
                    starts,
                    files,
                } => {
                    index.add_cells(key, held.dtype, bounds.clone(), starts, files)?;
                }
                Arranged::Tiles(tiles) => self.add_tiles(index, key, places, tiles)?,
            }
        }
        Ok(copied)
    }

    fn add_tiles(
        &self,
        index: &mut Index,
        key: &str,
        places: &[Place],
        tiles: &[(Vec<u64>, Vec<u64>, Place)],
    ) -> Result<()> {
        let first = self.held(places[0]);
        let stored = tiles.iter().map(|(offset, extent, place)| {
            let tensor = StoredTensor {
                file: self.file(*place).file,
                name: Self::stored_name(key, *place),
                shape: extent.clone(),
            };
            let tile = Tile {
                global: Region::new(offset.clone(), extent.clone())?,
                local_offset: 0,
                local_strides: row_major_strides(extent),
            };
            Ok((tensor, vec![tile]))
        });
        let stored = stored.collect::<Result<Vec<_>>>()?;
        let added = index.add_tiles(
            key,
            first.dtype,
            first.shape.clone(),
            BTreeMap::new(),
            stored,
            false,
        );
        added.map_err(|error| {
            if error.kind() != Kind::Coverage {
                return error;
            }
            let path = self.path(places[0]);
            let has_others = places.iter().any(|one| one.file != places[0].file);
            let others = if has_others {
                " and the files of other ranks"
            } else {
                ""
            };
            let message = format!("{}{others}: {}", shown(path), error.message());
            Error::new(Kind::Coverage, message)
                .path(path)
                .key(key)
                .hint(MIXED_HINT)
        })
    }

    /// All `ShardedTensors` have to be of as many ranks.
    fn check_runs(&self, keys: &[&str]) -> Result<()> {
        let mut first: Option<(&str, Place, u64)> = None;
        for key in keys {
            for place in self.places(key)? {
                let Some((_, n_ranks)) = self.held(*place).listed else {
                    continue;
                };
                let (of_key, of_place, expected) = *first.get_or_insert((key, *place, n_ranks));
                if n_ranks != expected {
                    let message = format!(
                        "{}: `{}` was saved by a rank of {n_ranks}, and `{}` in {} by one of {expected}",
                        shown(self.path(*place)),
                        Printable(key),
                        Printable(of_key),
                        shown(self.path(of_place)),
                    );
                    return Err(self.mixed(message, key, *place));
                }
            }
        }
        Ok(())
    }

    fn mixed(&self, message: String, key: &str, place: Place) -> Error {
        Error::damaged(message)
            .path(self.path(place))
            .key(key)
            .hint(MIXED_HINT)
    }

    /// Ranks have to describe a tensor in the same way.
    fn check_alike(&self, key: &str, places: &[Place]) -> Result<()> {
        let first = self.held(places[0]);
        let described = |held: &Held| {
            let (class, dtype, shape) = (held.class.name(), held.dtype, Dims(&held.shape));
            format!("a {class} of {dtype} and shape {shape}")
        };
        for place in places {
            let held = self.held(*place);
            let is_equal =
                (held.class, held.dtype, &held.shape) == (first.class, first.dtype, &first.shape);
            let (found, expected) = if !is_equal {
                (format!("is {}", described(held)), described(first))
            } else if held.listed != first.listed {
                (
                    format!("has {}", self.other_region(held, first)),
                    String::new(),
                )
            } else {
                continue;
            };
            let and = if expected.is_empty() { "" } else { ", and " };
            let message = format!(
                "{}: `{}` {found}{and}{expected} in {}",
                shown(self.path(*place)),
                Printable(key),
                shown(self.path(places[0]))
            );
            return Err(self.mixed(message, key, *place));
        }
        Ok(())
    }

    /// The regions that a `ShardedTensor` lists: their first elements and shapes.
    fn regions<'a>(&'a self, held: &Held) -> impl Iterator<Item = (&'a [u64], &'a [u64])> {
        let n_dims = held.shape.len();
        let list = held
            .listed
            .map_or(&[][..], |(list, _)| &self.lists[list as usize][..]);
        list.chunks_exact(2 * n_dims.max(1))
            .map(move |one| one.split_at(n_dims))
    }

    /// What is listed otherwise than by the first rank.
    fn other_region(&self, held: &Held, first: &Held) -> String {
        let (mut found, mut expected) = (self.regions(held), self.regions(first));
        let region = |one: Option<(&[u64], &[u64])>| match one {
            None => "no region".to_owned(),
            Some((at, extent)) => format!("a region of shape {} at {}", Dims(extent), Dims(at)),
        };
        let mut n = 0;
        loop {
            let (one, other) = (found.next(), expected.next());
            if one != other || one.is_none() {
                return format!("{} as number {n}, and {}", region(one), region(other));
            }
            n += 1;
        }
    }

    fn parts(&self, places: &[Place]) -> Parts<'_> {
        let mut numbers = HashMap::new();
        let mut parts: Parts<'_> = Vec::new();
        for place in places {
            let held = &*self.held[place.held as usize];
            let Some(offset) = held.offset.as_ref().filter(|_| !held.local.contains(&0)) else {
                continue;
            };
            let number = *numbers.entry((offset, &held.local)).or_insert(parts.len());
            if number == parts.len() {
                parts.push((offset, &held.local, Vec::new()));
            }
            parts[number].2.push(*place);
        }
        parts
    }

    /// How the parts of a tensor are stored, and whether there are copies of some.
    fn arranged(&self, key: &str, places: &[Place], hint: &str) -> Result<(Arranged, bool)> {
        self.check_alike(key, places)?;
        let parts = self.parts(places);
        let first = self.held(places[0]);
        let n = elements(&first.shape);
        let n_held = parts.iter().fold(0_u128, |n, (_, extent, _)| {
            n.saturating_add(elements(extent))
        });
        if n_held < n {
            return Err(self.lacking(key, places, &parts, (n, n_held), hint));
        }
        let has_copies = parts.iter().any(|(_, _, places)| places.len() > 1);
        let is_named = places.iter().all(|place| place.part == ONLY);
        let arranged = self.grid(&first.shape, &parts).filter(|_| is_named);
        let arranged = arranged.unwrap_or_else(|| {
            let tiles = parts.iter().flat_map(|(offset, extent, places)| {
                let tile = |place: &Place| (offset.to_vec(), extent.to_vec(), *place);
                places.iter().map(tile)
            });
            Arranged::Tiles(tiles.collect())
        });
        Ok((arranged, has_copies))
    }

    /// The parts as a grid, if they form one that covers the tensor.
    fn grid(&self, shape: &[u64], parts: &Parts<'_>) -> Option<Arranged> {
        if parts.is_empty() {
            return None;
        }
        let bounds_of = |(d, extent): (usize, &u64)| {
            let mut bounds: Vec<u64> = parts.iter().map(|(offset, ..)| offset[d]).collect();
            bounds.push(*extent);
            bounds.sort_unstable();
            bounds.dedup();
            bounds
        };
        let bounds: Vec<Vec<u64>> = shape.iter().enumerate().map(bounds_of).collect();
        let n_cells = bounds
            .iter()
            .try_fold(1_usize, |n, of_dim| n.checked_mul(of_dim.len() - 1));
        let mut cells: Vec<&[Place]> = vec![&[]; parts.len()];
        if n_cells != Some(parts.len()) || bounds.iter().any(|of_dim| of_dim[0] != 0) {
            return None;
        }
        for (offset, extent, places) in parts {
            let mut cell = 0;
            for (of_dim, (at, n)) in bounds.iter().zip(offset.iter().zip(*extent)) {
                let part = of_dim.binary_search(at).ok()?;
                if at.checked_add(*n) != of_dim.get(part + 1).copied() {
                    return None;
                }
                cell = cell * (of_dim.len() - 1) + part;
            }
            if !cells[cell].is_empty() {
                return None;
            }
            cells[cell] = places;
        }
        let mut starts = vec![0];
        let mut files = Vec::new();
        for places in cells {
            files.extend(places.iter().map(|place| self.file(*place).file));
            starts.push(u32::try_from(files.len()).ok()?);
        }
        Some(Arranged::Grid {
            bounds,
            starts: starts.into(),
            files: files.into(),
        })
    }

    fn lacking(
        &self,
        key: &str,
        places: &[Place],
        parts: &Parts<'_>,
        (n, n_held): (u128, u128),
        hint: &str,
    ) -> Error {
        let ranks = places
            .iter()
            .map(|place| self.file(*place).rank.to_string());
        let named: Vec<String> = ranks.take(MAX_NAMED).collect();
        let more = if places.len() > MAX_NAMED {
            " and more"
        } else {
            ""
        };
        let mut message = format!(
            "`{}` has {n} elements, and the files of the ranks {}{more} hold {n_held} of them",
            Printable(key),
            named.join(", ")
        );
        let known: HashSet<_> = parts
            .iter()
            .map(|(offset, extent, _)| (*offset, *extent))
            .collect();
        let mut listed = self.regions(self.held(places[0]));
        if let Some((at, extent)) = listed.find(|one| !known.contains(one) && !one.1.contains(&0)) {
            let (extent, at) = (Dims(extent), Dims(at));
            let _ = write!(
                message,
                "; the region of shape {extent} at {at} is in none of the files"
            );
        }
        Error::new(Kind::Coverage, message)
            .path(self.path(places[0]))
            .key(key)
            .hint(hint)
    }

    /// The first of some tensors of which ranks hold different bytes, where they should hold copies: its key, the first
    /// rank that holds the part, and another one.
    ///
    /// # Errors
    /// There is no such tensor, or a file cannot be read.
    pub fn first_different(
        &self,
        index: &Index,
        keys: &[String],
        control: &Control,
    ) -> Result<Option<(String, u64, u64)>> {
        let groups = keys.iter().flat_map(|key| match self.copies(key) {
            Ok(groups) => groups.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error)],
        });
        let found = first_different(index, groups, control, &Team::current())?;
        Ok(found.map(|((key, places), other)| {
            let rank = |place: usize| self.file(places[place]).rank;
            (key.to_owned(), rank(0), rank(other))
        }))
    }

    /// The parts of a tensor that several files hold, and their places.
    fn copies<'a>(&self, key: &'a str) -> Result<Vec<KeyCopies<'a>>> {
        let places = self.places(key)?;
        let dtype = self.held(places[0]).dtype;
        let parts = self.parts(places).into_iter();
        let copied = parts.filter(|(_, _, places)| places.len() > 1);
        let copied = copied.map(|(_, extent, places)| {
            let held = places.iter().map(|place| HeldPart {
                file: self.file(*place).file,
                name: Self::stored_name(key, *place),
                stored_shape: extent.to_vec(),
                start: 0,
                shape: extent.to_vec(),
                strides: row_major_strides(extent),
            });
            let parts = held.collect();
            ((key, places), Copies { dtype, parts })
        });
        Ok(copied.collect())
    }
}

/// The number of a value among those that are known.
fn number_of<K: ?Sized + std::hash::Hash + Eq, T: AsRef<K> + Into<Arc<K>>>(
    all: &mut Vec<Arc<K>>,
    numbers: &mut HashMap<Arc<K>, u32>,
    value: T,
) -> Result<u32> {
    if let Some(&number) = numbers.get(value.as_ref()) {
        return Ok(number);
    }
    let number = as_u32(all.len())?;
    let value: Arc<K> = value.into();
    all.push(Arc::clone(&value));
    numbers.insert(value, number);
    Ok(number)
}

impl AsRef<Held> for Held {
    fn as_ref(&self) -> &Self {
        self
    }
}

fn elements(shape: &[u64]) -> u128 {
    shape
        .iter()
        .fold(1, |n, extent| n.saturating_mul(u128::from(*extent)))
}

fn as_u32(n: usize) -> Result<u32> {
    let too_many = |_| Error::new(Kind::Unsupported, "too many files or tensors");
    u32::try_from(n).map_err(too_many)
}

fn shown(path: &Path) -> String {
    format!("`{}`", Printable(&path.to_string_lossy()))
}
