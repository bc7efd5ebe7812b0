//! The stored parts of quantised weights, read region by region.

use reshard_core::control::Control;
use reshard_core::copy::fill;
use reshard_core::dtype::Dtype;
use reshard_core::index::Index;
use reshard_core::memory::Stores;
use reshard_core::region::{Region, row_major_strides};
use reshard_core::request::Request;
use reshard_core::shard_file::ShardFile;
use reshard_core::stored::ZEROS;
use reshard_core::team::Team;
use reshard_core::{Error, Kind, Result};
use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

/// Most bytes of one read of a part that is copied together. A larger one would be divided over the threads of a pool, all
/// of which can be waiting for their own parts.
const READ_BYTES: u64 = 1 << 20;

/// A part: a tensor of an index.
#[derive(Debug)]
pub(super) struct Part {
    /// Its role and the name of its weight, as the caller of `add_to` names it.
    pub(super) key: String,
    /// Its dtype.
    pub(super) dtype: Dtype,
    /// Its shape in the index.
    pub(super) shape: Vec<u64>,
    place: OnceLock<Option<Place>>,
}

/// The bytes of a part that is one run of a mapped file.
#[derive(Debug)]
struct Place {
    file: Arc<ShardFile>,
    start: u64,
}

impl Part {
    pub(super) fn new(index: &Index, key: &str) -> Result<Self> {
        let (dtype, shape) = index.info(key)?;
        if dtype.unit().0 != 1 {
            let message = format!("`{key}` is {dtype}, expected complete bytes");
            return Err(Error::new(Kind::Unsupported, message).key(key));
        }
        Ok(Self {
            key: key.to_owned(),
            dtype,
            shape,
            place: OnceLock::new(),
        })
    }

    /// The place of a part that is stored in one piece, and needs no comparison with a checksum.
    fn place(&self, index: &Index) -> Result<Option<&Place>> {
        if let Some(known) = self.place.get() {
            return Ok(known.as_ref());
        }
        let found = self.find(index)?;
        Ok(self.place.get_or_init(|| found).as_ref())
    }

    fn find(&self, index: &Index) -> Result<Option<Place>> {
        let stored = index.stored_arrays(&self.key)?;
        let [(tensor, tiles)] = stored.as_slice() else {
            return Ok(None);
        };
        let [tile] = tiles.as_slice() else {
            return Ok(None);
        };
        let strides = row_major_strides(&self.shape);
        let dims = self.shape.iter().zip(&tile.local_strides).zip(&strides);
        let is_whole =
            tile.global == Region::whole(&self.shape) && tile.local_offset == 0 && { dims }
                .all(|((extent, stride), expected)| *extent == 1 || stride == expected);
        if !is_whole || tensor.file == ZEROS {
            return Ok(None);
        }
        let file = index.open(tensor.file)?;
        if !file.source().is_mapped() || file.checksums().is_some() || file.has_crc() {
            return Ok(None);
        }
        let found = file.tensor(&tensor.name);
        let found = found.filter(|(dtype, shape, _)| {
            *dtype == self.dtype
                && shape.iter().product::<u64>() == self.shape.iter().product::<u64>()
        });
        if file.table().strides(&tensor.name).is_some() {
            return Ok(None);
        }
        Ok(found.map(|(_, _, start)| Place { file, start }))
    }

    /// The bytes of a region in row-major order. `scratch` holds them where they are not borrowed.
    ///
    /// # Errors
    /// The region is outside of the part, or cannot be read.
    pub(super) fn read<'a>(
        &self,
        index: &Index,
        offset: &[u64],
        shape: &[u64],
        place: &'a mut Option<Arc<ShardFile>>,
        scratch: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let region = Region::new(offset.to_vec(), shape.to_vec())?;
        if !region.lies_in(&self.shape) {
            let message = format!(
                "`{}` has shape {:?}, and {region} is read",
                self.key, self.shape
            );
            return Err(Error::damaged(message).key(&self.key));
        }
        let unit = self.dtype.unit().1;
        if let Some(found) = self.place(index)?
            && let Some(first) = run_of(&self.shape, &region)
        {
            let file = &*place.insert(Arc::clone(&found.file));
            let bytes = file
                .source()
                .bytes(found.start + first * unit, region.n_elements() * unit)?;
            if let Some(bytes) = bytes {
                return Ok(bytes);
            }
        }
        scratch.clear();
        scratch.resize((region.n_elements() * unit) as usize, 0);
        self.copy(index, &region, scratch)?;
        Ok(scratch)
    }

    /// Copies a region, in pieces of bounded size.
    fn copy(&self, index: &Index, region: &Region, to: &mut [u8]) -> Result<()> {
        let n_bytes = to.len() as u64;
        if n_bytes == 0 {
            return Ok(());
        }
        let outer = (0..region.rank()).find(|&dim| region.shape()[dim] > 1);
        if let (true, Some(dim)) = (n_bytes > READ_BYTES, outer) {
            let each = n_bytes / region.shape()[dim];
            let n = (READ_BYTES / each).clamp(1, region.shape()[dim] - 1);
            let (mut first, mut second) = (region.shape().to_vec(), region.shape().to_vec());
            let mut offset = region.offset().to_vec();
            first[dim] = n;
            second[dim] -= n;
            let (head, tail) = to.split_at_mut((n * each) as usize);
            self.copy(index, &Region::new(offset.clone(), first)?, head)?;
            offset[dim] += n;
            return self.copy(index, &Region::new(offset, second)?, tail);
        }
        let mut request = Request::default();
        request.add_region(&self.key, &self.key, region.clone());
        let plan = index.plan_together(&[Cow::Borrowed(&request)], None, true)?;
        let pool = Team::current();
        fill(&plan, vec![to], Stores::Plain, &Control::default(), &pool)
    }
}

/// The first element of a region that is one run of a row-major tensor; `None`: it is several.
fn run_of(shape: &[u64], region: &Region) -> Option<u64> {
    let strides = row_major_strides(shape);
    let outer = (0..shape.len()).find(|&dim| region.shape()[dim] != 1);
    let inner = outer.map_or(shape.len(), |dim| dim + 1);
    let is_run = (inner..shape.len()).all(|dim| region.shape()[dim] == shape[dim]);
    let first = region
        .offset()
        .iter()
        .zip(&strides)
        .map(|(at, stride)| at * stride);
    is_run.then(|| first.sum())
}
