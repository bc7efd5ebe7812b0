//! Tensors that are stored alike, and those that an index leaves out: what a list of 100,000 tensors is made of.

use super::Index;
use super::table::{Found, Near};
use crate::error::Result;
use crate::geometry::dtype::Dtype;
use crate::geometry::layout::Cuts;
use crate::geometry::region::Region;
use crate::planning::stored::{Form, Holders};
use std::collections::HashMap;
use std::sync::Arc;

/// What tensors that are stored alike have in common: dtype, shape, and the regions with the number of their files.
/// A tensor that one file holds completely has no regions here.
type Kind = (Dtype, Vec<u64>, Vec<(Region, usize)>);

/// Where a tensor lies, without its regions, which can be millions: shape, cuts, and the numbers of the tables of its
/// files. One file is its number. A layout is its address.
type Place = (Vec<u64>, Vec<Cuts>, [usize; 3]);

/// Numbers of tables by their content. Tensors of one layout often share theirs, which is looked at once.
#[derive(Default)]
struct Tables<'a> {
    by_address: HashMap<usize, usize>,
    by_content: HashMap<&'a [u32], usize>,
}

impl<'a> Tables<'a> {
    fn number(&mut self, table: &'a [u32]) -> usize {
        let by_content = &mut self.by_content;
        let next = by_content.len();
        let number = || *by_content.entry(table).or_insert(next);
        *self
            .by_address
            .entry(table.as_ptr().addr())
            .or_insert_with(number)
    }

    fn place_of(&mut self, found: &Found<'a>) -> Option<Place> {
        if let Some(file) = found.only_file() {
            return Some((found.shape().to_vec(), Vec::new(), [file as usize, 0, 0]));
        }
        let Found::Listed(stored) = found else {
            return None;
        };
        let grid = match &stored.form {
            Form::Grid(grid) => grid,
            Form::Divided(divided) => {
                let layout = Arc::as_ptr(divided.layout()).addr();
                let numbers = [layout, self.number(divided.files()), 5];
                let place = (stored.shape.clone(), Vec::new(), numbers);
                return divided.joint().is_none().then_some(place);
            }
            Form::Tiles(_) => return None,
            Form::Flat(flat) => {
                // Which elements each rank holds follows from the shape.
                let files = flat.lines().files_of_ranks().filter(|_| flat.is_uncut())?;
                return Some((stored.shape.clone(), Vec::new(), [self.number(files), 0, 4]));
            }
        };
        let tables = match &grid.holders {
            Holders::File(file) => [*file as usize, 0, 0],
            Holders::Mesh(layout, files) => [Arc::as_ptr(layout).addr(), self.number(files), 1],
            Holders::Table { starts, files } => [self.number(starts), self.number(files), 2],
            Holders::Cells(files) => [self.number(files), 0, 3],
        };
        Some((stored.shape.clone(), grid.cuts.clone(), tables))
    }
}

impl Index {
    /// For each key, in the order of [`Self::keys`], the number of its place. Tensors of one number have the same shape
    /// and the same stored regions in the same files. Those of several numbers may have them, too: no region is looked
    /// at.
    pub fn places(&self) -> Result<Vec<u32>> {
        let (mut tables, mut places) = (Tables::default(), HashMap::<Place, u32>::new());
        let mut near = Near::default();
        let mut next = 0;
        let number_of = |key| {
            let found = self.found_near(key, &mut near)?;
            let place = tables.place_of(&found);
            let number = place.map_or(next, |place| *places.entry(place).or_insert(next));
            next += u32::from(number == next);
            Ok(number)
        };
        self.keys().map(number_of).collect()
    }

    /// For each key, in the order of [`Self::keys`], the number of its kind, and for each kind the number of its first
    /// key. Tensors of a kind have the same dtype, shape and stored regions, each in the same number of files.
    pub fn alike(&self) -> Result<(Vec<u32>, Vec<u32>)> {
        let mut kinds: HashMap<Kind, u32> = HashMap::new();
        let mut near = Near::default();
        let places = self.places()?;
        let mut of_places: HashMap<(Dtype, u32), u32> = HashMap::new();
        let (mut of_keys, mut firsts) = (Vec::with_capacity(self.len()), Vec::new());
        for (number, key) in self.keys().enumerate() {
            let found = self.found_near(key, &mut near)?;
            let (dtype, shape) = match &found {
                Found::Listed(stored) => (self.dtype(stored)?, stored.shape.clone()),
                Found::InWholeFile(_, entry) => (entry.dtype, entry.shape.clone()),
            };
            if let Some(&kind) = of_places.get(&(dtype, places[number])) {
                of_keys.push(kind);
                continue;
            }
            let regions = if found.only_file().is_some() {
                Vec::new()
            } else {
                let shards = self.shards(key)?.into_iter();
                shards
                    .map(|(region, files)| (region, files.len()))
                    .collect()
            };
            let next = firsts.len() as u32;
            let kind = *kinds.entry((dtype, shape, regions)).or_insert(next);
            of_places.insert((dtype, places[number]), kind);
            if kind == next {
                firsts.push(number as u32);
            }
            of_keys.push(kind);
        }
        Ok((of_keys, firsts))
    }

    /// The names of the tensors of a file that the index does not take from it. Opens the file.
    pub fn not_taken(&self, file: u32) -> Result<Vec<String>> {
        let opened = self.open(file)?;
        let table = opened.table();
        let names = (0..table.len()).map(|i| table.entry(i).name);
        let is_taken = |name: &str| match self.found(name) {
            Ok(found) if found.only_file() == Some(file) => true,
            Ok(_) => self.holders(name).is_ok_and(|files| files.contains(&file)),
            Err(_) => false,
        };
        Ok(names
            .filter(|name| !is_taken(name))
            .map(str::to_owned)
            .collect())
    }
}
