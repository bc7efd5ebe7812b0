//! Requests: local arrays, each made of regions of the tensors of an index.

use crate::error::{Error, Kind, Printable, Result};
use crate::geometry::joined::{Joined, JoinedPart, KeyAndShape};
use crate::geometry::layout::Layout;
use crate::geometry::region::{Region, row_major_strides};
use crate::geometry::tile::Tile;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// One requested array, made of tiles of keys.
#[derive(Debug, Clone)]
pub struct RequestedArray {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) tiles: Vec<(String, Tile)>,
    pub(crate) padding: Vec<(u64, u64)>,
    /// The keys of its tiles, and the global shapes that the request assumes.
    pub(crate) keys: Arc<[KeyAndShape]>,
}

/// The local arrays that are requested.
#[derive(Debug, Clone, Default)]
pub struct Request {
    pub(crate) arrays: Vec<RequestedArray>,
}

/// The parts of several keys that a rank holds, each under the name of its key: a [`Request`] that is made when it is
/// used. Thousands of ranks request parts of the same keys.
#[derive(Debug)]
pub struct RankRequest {
    keys: Arc<[(String, Arc<Layout>)]>,
    rank: u64,
}

impl RankRequest {
    /// The request of a rank.
    ///
    /// # Errors
    /// A mesh has no such rank, or the rank holds no part of a key.
    pub fn new(keys: Arc<[(String, Arc<Layout>)]>, rank: u64) -> Result<Self> {
        let this = Self { keys, rank };
        this.parts().try_for_each(|part| {
            let (key, layout, position) = part?;
            check_holds(key, layout, position)
        })?;
        Ok(this)
    }

    fn request(&self) -> Result<Request> {
        let mut request = Request {
            arrays: Vec::with_capacity(self.keys.len()),
        };
        for part in self.parts() {
            let (key, layout, position) = part?;
            request.add(key, key, layout, position)?;
        }
        Ok(request)
    }

    /// The keys that ranks hold parts of, and the layout of each.
    pub(crate) fn keys(&self) -> &Arc<[(String, Arc<Layout>)]> {
        &self.keys
    }

    /// The rank.
    pub(crate) fn rank(&self) -> u64 {
        self.rank
    }

    /// The same request, if the rank holds all of the tensors as they are.
    pub(crate) fn whole(&self) -> Option<WholeRequest> {
        let mut request = WholeRequest::default();
        self.keys
            .iter()
            .all(|(_, layout)| layout.is_whole())
            .then(|| {
                for (key, layout) in &*self.keys {
                    request.add(key, None, layout.shape());
                }
                request
            })
    }

    /// The key of each array and the number of its elements.
    pub(crate) fn n_elements(&self) -> impl Iterator<Item = Result<(&str, u64)>> {
        self.parts().map(|part| {
            let (key, layout, position) = part?;
            Ok((key, layout.local_shape(position).iter().product()))
        })
    }

    fn parts(&self) -> impl Iterator<Item = Result<(&str, &Layout, u64)>> {
        self.keys.iter().map(|(key, layout)| {
            let position = layout.mesh().position(self.rank);
            let position = position
                .map_err(|error| error.within(format_args!("`{}`", Printable(key))).key(key));
            Ok((key.as_str(), &**layout, position?))
        })
    }
}

/// Tensors as they are, each with its name and key: a [`Request`] in columns. Most of 100,000 tensors are copied without
/// geometry, and an object for each takes longer than its bytes.
#[derive(Debug, Default)]
pub struct WholeRequest {
    names: Texts,
    /// Empty: the keys are the names.
    keys: Texts,
    extents: Vec<u64>,
    /// The end of each shape in `extents`.
    shape_ends: Vec<usize>,
}

/// Texts in one string.
#[derive(Debug, Default)]
struct Texts {
    text: String,
    ends: Vec<usize>,
}

impl Texts {
    fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len());
    }

    fn range(&self, range: Range<usize>) -> impl Iterator<Item = &str> {
        let mut start = start_of(&self.ends, range.start);
        self.ends[range]
            .iter()
            .map(move |&end| &self.text[std::mem::replace(&mut start, end)..end])
    }
}

/// Where an entry begins, if each begins where the one before it ends.
fn start_of(ends: &[usize], i: usize) -> usize {
    i.checked_sub(1).map_or(0, |before| ends[before])
}

impl WholeRequest {
    /// Requests a tensor. Its key is its name, or every tensor is given with a key.
    pub(crate) fn add(&mut self, name: &str, key: Option<&str>, shape: &[u64]) {
        self.names.push(name);
        if let Some(key) = key {
            self.keys.push(key);
        }
        self.extents.extend_from_slice(shape);
        self.shape_ends.push(self.extents.len());
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.shape_ends.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Name, key and shape of each tensor.
    pub fn arrays(&self) -> impl Iterator<Item = (&str, &str, &[u64])> {
        self.arrays_in(0..self.len())
    }

    /// The same for some tensors, by number.
    pub(crate) fn arrays_in(
        &self,
        range: Range<usize>,
    ) -> impl Iterator<Item = (&str, &str, &[u64])> {
        let keys = if self.keys.ends.is_empty() {
            &self.names
        } else {
            &self.keys
        };
        let mut start = start_of(&self.shape_ends, range.start);
        let shapes = self.shape_ends[range.clone()]
            .iter()
            .map(move |&end| &self.extents[std::mem::replace(&mut start, end)..end]);
        let texts = self.names.range(range.clone()).zip(keys.range(range));
        texts
            .zip(shapes)
            .map(|((name, key), shape)| (name, key, shape))
    }

    fn request(&self) -> Request {
        let mut request = Request::default();
        for (name, key, shape) in self.arrays() {
            request.add_region(name, key, Region::whole(shape));
        }
        request
    }
}

/// A request, or how it is made.
#[derive(Debug)]
pub enum Requested {
    /// All of its arrays.
    Listed(Request),
    /// Those of a rank.
    OfRank(RankRequest),
    /// Tensors as they are.
    Whole(WholeRequest),
}

impl Requested {
    /// Number of arrays.
    pub fn len(&self) -> usize {
        match self {
            Self::Listed(request) => request.len(),
            Self::OfRank(request) => request.keys.len(),
            Self::Whole(request) => request.len(),
        }
    }

    /// Whether there is no array.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The request.
    pub fn request(&self) -> Result<Cow<'_, Request>> {
        match self {
            Self::Listed(request) => Ok(Cow::Borrowed(request)),
            Self::OfRank(request) => request.request().map(Cow::Owned),
            Self::Whole(request) => Ok(Cow::Owned(request.request())),
        }
    }

    /// The request, to add arrays to it.
    pub fn listed(&mut self) -> Result<&mut Request> {
        *self = Self::Listed(match std::mem::take(self) {
            Self::Listed(request) => request,
            Self::OfRank(request) => request.request()?,
            Self::Whole(request) => request.request(),
        });
        match self {
            Self::Listed(request) => Ok(request),
            Self::OfRank(_) | Self::Whole(_) => unreachable!("it is listed"),
        }
    }
}

impl Default for Requested {
    fn default() -> Self {
        Self::Listed(Request::default())
    }
}

fn check_holds(key: &str, layout: &Layout, position: u64) -> Result<()> {
    if layout.holds(position) {
        return Ok(());
    }
    let message = format!(
        "rank {} holds no part of `{}`",
        layout.mesh().rank_at(position),
        Printable(key)
    );
    Err(Error::new(Kind::Argument, message).key(key))
}

impl Request {
    /// Number of arrays.
    pub fn len(&self) -> usize {
        self.arrays.len()
    }

    /// Whether there is no array.
    pub fn is_empty(&self) -> bool {
        self.arrays.is_empty()
    }

    /// Requests the part of `key` that the rank at a position of the mesh holds.
    ///
    /// # Errors
    /// The rank holds no part.
    pub fn add(&mut self, name: &str, key: &str, layout: &Layout, position: u64) -> Result<()> {
        check_holds(key, layout, position)?;
        let tiles = layout.tiles(position);
        let shape = layout.local_shape(position);
        let filled: u64 = tiles.iter().map(|tile| tile.global.n_elements()).sum();
        let n: u64 = shape.iter().product();
        self.arrays.push(RequestedArray {
            name: name.to_owned(),
            shape,
            tiles: tiles
                .into_iter()
                .map(|tile| (key.to_owned(), tile))
                .collect(),
            padding: if filled < n {
                vec![(filled, n)]
            } else {
                Vec::new()
            },
            keys: [(key.to_owned(), Some(layout.shape().to_vec()))].into(),
        });
        Ok(())
    }

    /// The arrays, in order.
    pub fn arrays(&self) -> &[RequestedArray] {
        &self.arrays
    }

    /// Requests a region of `key`.
    pub fn add_region(&mut self, name: &str, key: &str, region: Region) {
        let shape = region.shape().to_vec();
        let tile = Tile {
            local_offset: 0,
            local_strides: row_major_strides(&shape),
            global: region,
        };
        self.arrays.push(RequestedArray {
            name: name.to_owned(),
            shape,
            keys: [(key.to_owned(), None)].into(),
            tiles: vec![(key.to_owned(), tile)],
            padding: Vec::new(),
        });
    }

    /// Requests the part of a rank in a joined array.
    ///
    /// # Errors
    /// The mesh has no such rank, the rank holds none of the tensors, or the array is too long.
    pub fn add_joined(&mut self, joined: &Joined, rank: u64) -> Result<()> {
        let JoinedPart { n, tiles, padding } = joined.part_of(rank)?;
        let key = |number: u32| joined.keys()[number as usize].0.clone();
        self.arrays.push(RequestedArray {
            name: joined.name().to_owned(),
            shape: vec![n],
            tiles: tiles
                .into_iter()
                .map(|(number, tile)| (key(number), tile))
                .collect(),
            padding,
            keys: joined.held_keys(joined.mesh().position(rank)?)?,
        });
        Ok(())
    }
}

impl RequestedArray {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its shape.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }
}
