//! Tensors that are stored alike, and those that an index leaves out: what a list of 100,000 tensors is made of.

use super::Index;
use super::table::{Found, Near};
use crate::error::Result;
use crate::geometry::dtype::Dtype;
use crate::geometry::region::Region;
use std::collections::HashMap;

/// What tensors that are stored alike have in common: dtype, shape, and the regions with the number of their files.
/// A tensor that one file holds completely has no regions here.
type Kind = (Dtype, Vec<u64>, Vec<(Region, usize)>);

impl Index {
    /// For each key, in the order of [`Self::keys`], the number of its kind, and for each kind the number of its first
    /// key. Tensors of a kind have the same dtype, shape and stored regions, each in the same number of files.
    pub fn alike(&self) -> Result<(Vec<u32>, Vec<u32>)> {
        let mut kinds: HashMap<Kind, u32> = HashMap::new();
        let mut near = Near::default();
        let (mut of_keys, mut firsts) = (Vec::with_capacity(self.len()), Vec::new());
        for (number, key) in self.keys().enumerate() {
            let found = self.found_near(key, &mut near)?;
            let (dtype, shape) = match &found {
                Found::Listed(stored) => (self.dtype(stored)?, stored.shape.clone()),
                Found::InWholeFile(_, entry) => (entry.dtype, entry.shape.clone()),
            };
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
