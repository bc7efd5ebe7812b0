#![expect(
    unsafe_code,
    reason = "the buffer protocol and numpy arrays export and import raw memory"
)]
//! The buffer protocol: exported memory (`Buffer`) and borrowed buffers of Python objects (`Borrowed`). The memory of
//! numpy arrays is borrowed without it (`ArrayMemory`), which is faster.

use crate::errors::raise;
use memmap2::MmapMut;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use reshard_core::memory::Memory;
use reshard_core::{Error, Kind};
use std::ffi::{c_char, c_int};

/// Owned memory or a private map, exported as a writable buffer of bytes. Every view of it keeps it alive.
#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Buffer {
    address: *mut u8,
    len: usize,
    _owner: Owner,
}

#[expect(dead_code, reason = "owns the memory")]
enum Owner {
    Memory(Memory),
    Map(MmapMut),
}

// SAFETY: the memory is owned and does not move. Rust does not access it after it was exported, and Python threads
// synchronize their accesses themselves, as for any array.
unsafe impl Send for Buffer {}
// SAFETY: as for Send; `&Buffer` exposes only address and length.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(crate) fn of_memory(mut memory: Memory) -> Self {
        let bytes = memory.as_mut_slice();
        let (address, len) = (bytes.as_mut_ptr(), bytes.len());
        Self {
            address,
            len,
            _owner: Owner::Memory(memory),
        }
    }

    pub(crate) fn of_map(mut map: MmapMut) -> Self {
        let (address, len) = (map.as_mut_ptr(), map.len());
        Self {
            address,
            len,
            _owner: Owner::Map(map),
        }
    }

    pub(crate) fn address(&self) -> usize {
        self.address as usize
    }
}

#[pymethods]
impl Buffer {
    fn __len__(&self) -> usize {
        self.len
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: the interpreter passed `view` to be filled. `slf` owns the `len` bytes at `address`, and the view
        // holds a reference to `slf`, so that the bytes outlive the view. The size of an allocation fits isize.
        let status = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                this.address.cast(),
                this.len.cast_signed(),
                0,
                flags,
            )
        };
        if status != 0 {
            Err(PyErr::fetch(slf.py()))
        } else {
            Ok(())
        }
    }
}

/// A borrowed buffer of a Python object. It is released on drop, which requires the interpreter attached.
pub(crate) struct Borrowed {
    view: Box<ffi::Py_buffer>,
}

// SAFETY: other threads use only the address, which the exporter keeps valid until the release. numpy does not for an
// array that is resized with `refcheck=False` meanwhile, or whose map is truncated: the caller must not do that. The
// value is dropped, and so released, only with the interpreter attached.
unsafe impl Send for Borrowed {}
// SAFETY: as for Send.
unsafe impl Sync for Borrowed {}

impl Borrowed {
    fn get(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: `view` is writable and `object` a live object; the buffer is released in `drop`.
        let status = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) };
        if status != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self { view })
    }

    /// Writable and C-contiguous, of any format.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::get(object, ffi::PyBUF_WRITABLE | ffi::PyBUF_C_CONTIGUOUS)
    }

    /// Readable, of any format, with strides that are multiples of the size of a unit and at least 0; row-major if
    /// `row_major`. Other arrays are copied.
    pub(crate) fn readable(
        object: &Bound<'_, PyAny>,
        unit_bytes: u64,
        row_major: bool,
    ) -> PyResult<Self> {
        let this = Self::get(object, ffi::PyBUF_STRIDES)?;
        let fits = |stride: &ffi::Py_ssize_t| {
            u64::try_from(*stride).is_ok_and(|stride| stride.is_multiple_of(unit_bytes))
        };
        if this.is_row_major() || !row_major && this.strides().iter().all(fits) {
            return Ok(this);
        }
        // The buffer keeps the copy alive.
        let copy = object.call_method0(intern!(object.py(), "copy"))?;
        Self::get(&copy, ffi::PyBUF_C_CONTIGUOUS)
    }

    /// Whether the elements follow each other in row-major order.
    pub(crate) fn is_row_major(&self) -> bool {
        let order = c_char::from_ne_bytes(*b"C");
        // SAFETY: filled by PyObject_GetBuffer and not released yet.
        unsafe { ffi::PyBuffer_IsContiguous(&raw const *self.view, order) == 1 }
    }

    pub(crate) fn range(&self) -> (usize, usize) {
        (self.view.buf as usize, self.view.len.cast_unsigned())
    }

    fn dims(&self, values: *const ffi::Py_ssize_t) -> &[ffi::Py_ssize_t] {
        if values.is_null() {
            return &[];
        }
        // SAFETY: the exporter filled `ndim` values, which live as long as the view.
        unsafe { std::slice::from_raw_parts(values, self.view.ndim.cast_unsigned() as usize) }
    }

    pub(crate) fn strides(&self) -> &[ffi::Py_ssize_t] {
        self.dims(self.view.strides)
    }

    /// Strides in bytes, one per dim; empty if it is row-major.
    fn strides_bytes(&self) -> Vec<u64> {
        if self.is_row_major() {
            return Vec::new();
        }
        self.strides()
            .iter()
            .map(|stride| stride.cast_unsigned() as u64)
            .collect()
    }

    pub(crate) fn shape(&self) -> impl Iterator<Item = u64> {
        let extents = self.dims(self.view.shape).iter();
        extents.map(|extent| extent.cast_unsigned() as u64)
    }

    /// All bytes from the first to the last element.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.view.len == 0 {
            return &[];
        }
        let reach = self
            .shape()
            .zip(self.strides())
            .map(|(extent, stride)| (extent - 1) * stride.cast_unsigned() as u64)
            .sum::<u64>();
        let len = if self.strides().is_empty() {
            self.view.len.cast_unsigned() as u64
        } else {
            reach + self.view.itemsize.cast_unsigned() as u64
        };
        // SAFETY: the exporter guarantees every byte inside shape and strides until the release. If another Python
        // thread writes to it meanwhile, the saved bytes change, as for any array that is passed to a writer.
        unsafe { std::slice::from_raw_parts(self.view.buf.cast(), len as usize) }
    }

    /// The bytes, for writing. The caller must have only one slice at a time; see [`disjoint`].
    #[expect(
        clippy::mut_from_ref,
        reason = "the exporter owns the memory; `disjoint` makes it exclusive"
    )]
    pub(crate) fn bytes_mut(&self) -> &mut [u8] {
        if self.view.len == 0 {
            return &mut [];
        }
        // SAFETY: contiguous and writable as requested in `writable`. No other borrowed buffer overlaps it, as the
        // caller has checked by `disjoint`.
        unsafe {
            std::slice::from_raw_parts_mut(self.view.buf.cast(), self.view.len.cast_unsigned())
        }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // SAFETY: filled by PyObject_GetBuffer and released once. The type requires that the interpreter is attached.
        unsafe { ffi::PyBuffer_Release(&raw mut *self.view) };
    }
}

/// The memory of an array, for reading. Dropped with the interpreter attached, as [`Borrowed`].
pub(crate) enum ArrayMemory {
    /// A row-major numpy array, its first byte and the number of its bytes. The memory does not move while the array is
    /// held, unless it is resized with `refcheck=False`.
    Numpy(
        #[expect(dead_code, reason = "keeps the memory")] Py<PyUntypedArray>,
        *const u8,
        usize,
    ),
    Buffer(Borrowed),
}

// SAFETY: other threads use only the address, whose memory is kept until this is dropped.
unsafe impl Send for ArrayMemory {}
// SAFETY: as for Send.
unsafe impl Sync for ArrayMemory {}

impl ArrayMemory {
    /// That of an array that is row-major and holds no Python objects.
    pub(crate) fn of_numpy(array: &Bound<'_, PyUntypedArray>) -> Option<Self> {
        let dtype = array.dtype();
        if !array.is_c_contiguous() || dtype.has_object() {
            return None;
        }
        let n_bytes = array.len() * dtype.itemsize();
        // SAFETY: a live array, of which a field is read.
        let first = unsafe { (*array.as_array_ptr()).fields.data };
        Some(Self::Numpy(
            array.clone().unbind(),
            first.cast_const().cast(),
            n_bytes,
        ))
    }

    /// All bytes from the first to the last element.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Numpy(_, _, 0) => &[],
            // SAFETY: the array is row-major and has as many bytes; it is held. If another Python thread writes to it
            // meanwhile, the saved bytes change, as for any array that is passed to a writer.
            Self::Numpy(_, first, n_bytes) => unsafe {
                std::slice::from_raw_parts(*first, *n_bytes)
            },
            Self::Buffer(buffer) => buffer.bytes(),
        }
    }

    /// Strides in bytes, one per dim; empty if it is row-major.
    pub(crate) fn strides_bytes(&self) -> Vec<u64> {
        match self {
            Self::Numpy(..) => Vec::new(),
            Self::Buffer(buffer) => buffer.strides_bytes(),
        }
    }
}

/// Checks that buffers do not share memory, so that they can be filled in parallel.
pub(crate) fn disjoint(py: Python<'_>, buffers: &[Borrowed]) -> PyResult<()> {
    let mut ranges: Vec<_> = buffers
        .iter()
        .map(Borrowed::range)
        .filter(|(_, len)| *len > 0)
        .collect();
    ranges.sort_unstable();
    if ranges
        .windows(2)
        .any(|pair| pair[0].0 + pair[0].1 > pair[1].0)
    {
        let error = Error::new(Kind::Argument, "two arrays in `out` share memory")
            .hint("pass a separate array for each key");
        return raise(py, Err(error));
    }
    Ok(())
}
