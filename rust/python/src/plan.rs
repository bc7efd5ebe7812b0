//! Plans and their execution.

use crate::buffer::{Borrowed, Buffer, disjoint};
use crate::errors::raise;
use crate::records::{ARRAY_STACK, PART_SUM, PLANNED_ARRAY, WRITTEN_RANGE, not_finite_list};
use crate::run::{run, run_in_team};
use crate::write::{Buffers, Written, with_buffers, write_plan};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyList, PyString, PyTuple};
use reshard_core::control::Control;
use reshard_core::copies::are_equal;
use reshard_core::copy::fill;
use reshard_core::dtype::Dtype;
use reshard_core::memory::{Memory, Stores};
use reshard_core::plan::{Plan as CorePlan, PlanSource};
use reshard_core::verify::verify;
use reshard_core::writer;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

/// Arrays of at least this size get separate memory, so that dropping one frees it.
const OWN_MEMORY_BYTES: u64 = 2 << 20;
/// Smaller arrays share memory of this size.
const SHARED_MEMORY_BYTES: u64 = 8 << 20;
const ALIGN_BYTES: u64 = 64;
/// As many small arrays with one dtype and shape have memory of their own, in which they lie at equal distances.
const MIN_STACK: usize = 16;

/// Literal bytes, the start of each array, and `(position, array)` of each CRC-32.
type Container<'py> = (Bound<'py, PyBytes>, Vec<u64>, Vec<(u64, usize)>);

/// The arrays as Python takes them. Arrays that follow each other often have one dtype and one shape, made once.
pub(crate) fn array_infos<'py, 'a>(
    py: Python<'py>,
    arrays: impl Iterator<Item = (&'a str, Dtype, &'a [u64], u64)>,
) -> PyResult<Vec<Bound<'py, PyTuple>>> {
    let mut last: Option<(Dtype, &[u64], Bound<'py, PyString>, Bound<'py, PyTuple>)> = None;
    arrays
        .map(|(name, dtype, shape, n_bytes)| {
            let known = last.take_if(|known| known.0 == dtype && known.1 == shape);
            let (_, _, dtype_name, tuple) = &*last.insert(match known {
                Some(known) => known,
                None => (
                    dtype,
                    shape,
                    PyString::intern(py, dtype.name()),
                    PyTuple::new(py, shape)?,
                ),
            });
            let name = PyString::new(py, name);
            PLANNED_ARRAY.of(py, (name, dtype_name, tuple, n_bytes))
        })
        .collect()
}

/// Arrays with this dtype and shape, by number. All are in one memory each, in this order and `step` bytes apart.
struct Stack {
    dtype: Dtype,
    shape: Vec<u64>,
    step: u64,
    numbers: Vec<usize>,
}

/// Where arrays are put: sizes of memories, number of the memory of each array and its first byte there.
struct Places {
    sizes: Vec<u64>,
    of_arrays: Vec<(usize, u64)>,
    kinds: Vec<Stack>,
}

impl Places {
    fn of(plan: &CorePlan<'_>) -> Self {
        let arrays = plan.arrays();
        let mut numbers: HashMap<(Dtype, &[u64]), usize> = HashMap::new();
        let mut kinds: Vec<Stack> = Vec::new();
        let mut kind_of = Vec::with_capacity(arrays.len());
        for (i, array) in arrays.iter().enumerate() {
            let known = kind_of.last().copied().filter(|&last: &usize| {
                let last = &kinds[last];
                last.dtype == array.dtype && last.shape[..] == array.shape[..]
            });
            let number = known.unwrap_or_else(|| {
                *numbers
                    .entry((array.dtype, &array.shape))
                    .or_insert_with(|| {
                        kinds.push(Stack {
                            dtype: array.dtype,
                            shape: array.shape.to_vec(),
                            step: array.n_bytes().next_multiple_of(ALIGN_BYTES),
                            numbers: Vec::new(),
                        });
                        kinds.len() - 1
                    })
            });
            kinds[number].numbers.push(i);
            kind_of.push(number);
        }
        let mut sizes: Vec<u64> = Vec::new();
        let mut shared: Option<usize> = None;
        let mut of_kind: Vec<Option<usize>> = vec![None; kinds.len()];
        let mut places = Vec::with_capacity(arrays.len());
        for (array, number) in arrays.iter().zip(kind_of) {
            let n_bytes = array.n_bytes();
            if n_bytes >= OWN_MEMORY_BYTES {
                places.push((sizes.len(), 0));
                sizes.push(n_bytes);
                continue;
            }
            let Stack { step, numbers, .. } = &kinds[number];
            let last = if numbers.len() >= MIN_STACK {
                &mut of_kind[number]
            } else {
                &mut shared
            };
            let fits = |i: &usize| sizes[*i] + step <= SHARED_MEMORY_BYTES;
            let memory = last.filter(fits).unwrap_or(sizes.len());
            if memory == sizes.len() {
                sizes.push(0);
            }
            *last = Some(memory);
            places.push((memory, sizes[memory]));
            sizes[memory] += step;
        }
        Self {
            sizes,
            of_arrays: places,
            kinds,
        }
    }
}

/// The memory of the arrays of a plan: a sequence of `(buffer, first byte)`.
#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Loaded {
    buffers: Vec<Py<Buffer>>,
    places: Vec<(usize, u64)>,
    kinds: Vec<Stack>,
}

#[pymethods]
impl Loaded {
    fn __len__(&self) -> usize {
        self.places.len()
    }

    fn __getitem__<'py>(
        &self,
        py: Python<'py>,
        number: usize,
    ) -> PyResult<(Bound<'py, Buffer>, u64)> {
        let place = self.places.get(number);
        let (memory, start) =
            place.ok_or_else(|| PyIndexError::new_err("there is no array with this number"))?;
        Ok((self.buffers[*memory].bind(py).clone(), *start))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let places = (0..self.places.len()).map(|number| self.__getitem__(py, number));
        PyList::new(py, places.collect::<PyResult<Vec<_>>>()?)?.try_iter()
    }

    /// Arrays with one dtype and shape that lie at equal distances in one buffer.
    #[getter]
    fn stacks<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let range = py.import("builtins")?.getattr("range")?;
        let mut found = Vec::new();
        for Stack {
            dtype,
            shape,
            step,
            numbers,
        } in &self.kinds
        {
            let shape = PyTuple::new(py, shape)?;
            let is_stack = |pair: &[usize]| {
                let ((memory, start), after) = (self.places[pair[0]], self.places[pair[1]]);
                *step > 0 && (memory, start + step) == after
            };
            let mut rest = &numbers[..];
            while let Some(&first) = rest.first() {
                let n = 1 + rest.windows(2).take_while(|pair| is_stack(pair)).count();
                let (stack, after) = rest.split_at(n);
                let end = first + n;
                let stack = if stack.last() == Some(&(end - 1)) {
                    range.call1((first, end))?
                } else {
                    PyList::new(py, stack)?.into_any()
                };
                let (memory, start) = self.places[first];
                let buffer = self.buffers[memory].bind(py).clone();
                let dtype = PyString::intern(py, dtype.name());
                let values = (buffer, start, *step, dtype, &shape, stack);
                found.push(ARRAY_STACK.of(py, values)?);
                rest = after;
            }
        }
        Ok(found)
    }
}

#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Plan(pub(crate) CorePlan<'static>);

#[pymethods]
impl Plan {
    #[getter]
    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let arrays = self.0.arrays().iter();
        let arrays = arrays.map(|a| (a.name.as_str(), a.dtype, a.shape.as_slice(), a.n_bytes()));
        array_infos(py, arrays)
    }

    #[getter]
    fn n_bytes(&self) -> u64 {
        self.0.n_bytes()
    }

    #[getter]
    fn n_copies(&self) -> usize {
        self.0.n_copy_ops()
    }

    #[getter]
    fn source_bytes(&self) -> BTreeMap<u32, u64> {
        self.0.source_bytes()
    }

    fn only(&self, py: Python<'_>, arrays: Vec<usize>) -> PyResult<Self> {
        raise(py, self.0.only(&arrays)).map(Self)
    }

    #[pyo3(signature = (*, threads=None, progress=None))]
    fn load(
        &self,
        py: Python<'_>,
        threads: Option<i64>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Loaded> {
        let Places {
            sizes,
            of_arrays: places,
            kinds,
        } = Places::of(&self.0);
        let mut memories = raise(
            py,
            sizes
                .iter()
                .map(|size| Memory::new(*size as usize))
                .collect::<Result<Vec<_>, _>>(),
        )?;
        let control = Control::default();
        run_in_team(py, threads, self.0.n_bytes(), progress, &control, |team| {
            let mut rests: Vec<(u64, &mut [u8])> = memories
                .iter_mut()
                .map(|memory| (0, memory.as_mut_slice()))
                .collect();
            let mut out = Vec::with_capacity(places.len());
            for (array, &(memory, start)) in self.0.arrays().iter().zip(&places) {
                let (at, rest) = std::mem::take(&mut rests[memory]);
                let (_, rest) = rest.split_at_mut((start - at) as usize);
                let (to, rest) = rest.split_at_mut(array.n_bytes() as usize);
                rests[memory] = (start + array.n_bytes(), rest);
                out.push(to);
            }
            fill(&self.0, out, Stores::Fresh, &control, team)
        })?;
        let buffers = memories
            .into_iter()
            .map(|memory| Py::new(py, Buffer::of_memory(memory)))
            .collect::<PyResult<_>>()?;
        Ok(Loaded {
            buffers,
            places,
            kinds,
        })
    }

    #[pyo3(signature = (out, *, threads=None, progress=None))]
    fn fill(
        &self,
        py: Python<'_>,
        out: Vec<Bound<'_, PyAny>>,
        threads: Option<i64>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let borrowed = out
            .iter()
            .map(Borrowed::writable)
            .collect::<PyResult<Vec<_>>>()?;
        disjoint(py, &borrowed)?;
        let control = Control::default();
        run_in_team(py, threads, self.0.n_bytes(), progress, &control, |team| {
            fill(
                &self.0,
                borrowed.iter().map(Borrowed::bytes_mut).collect(),
                Stores::Streaming,
                &control,
                team,
            )
        })?;
        Ok(control.fetched_bytes())
    }

    #[pyo3(signature = (other, *, threads=None))]
    fn are_equal(&self, py: Python<'_>, other: &Self, threads: Option<i64>) -> PyResult<Vec<bool>> {
        let control = Control::default();
        run_in_team(py, threads, 0, None, &control, |team| {
            are_equal(&self.0, &other.0, &control, team)
        })
    }

    fn views<'py>(&self, py: Python<'py>) -> PyResult<Vec<Option<(Bound<'py, Buffer>, u64)>>> {
        let mut maps: HashMap<u32, Bound<'py, Buffer>> = HashMap::new();
        let mut views = Vec::with_capacity(self.0.arrays().len());
        for array in self.0.arrays() {
            let view = array
                .contiguous()
                .and_then(|copy_op| match self.0.source(copy_op) {
                    PlanSource::File(id, file) => Some((*id, file, copy_op.src_start_bytes)),
                    PlanSource::Memory(_) => None,
                });
            let Some((id, file, start)) = view else {
                views.push(None);
                continue;
            };
            let buffer = if let Some(buffer) = maps.get(&id) {
                buffer.clone()
            } else {
                let Some(map) = raise(py, file.source().private_map())? else {
                    views.push(None);
                    continue;
                };
                let buffer = Bound::new(py, Buffer::of_map(map))?;
                maps.insert(id, buffer.clone());
                buffer
            };
            // Unaligned views are slow, and some libraries reject them. Such arrays are copied.
            let is_aligned = (buffer.get().address() as u64 + start)
                .is_multiple_of(array.unit_bytes().next_power_of_two());
            views.push(is_aligned.then_some((buffer, start)));
        }
        // Views are verified here. Copies are verified when they are copied.
        let viewed: Vec<_> = (0..views.len()).filter(|&i| views[i].is_some()).collect();
        let n_bytes = viewed.iter().map(|&i| self.0.arrays()[i].n_bytes()).sum();
        let control = Control::default();
        run(py, None, n_bytes, None, &control, || {
            verify(&self.0, &viewed, &control)
        })?;
        Ok(views)
    }

    #[pyo3(signature = (path, *, metadata=None, container=None, buffers=None, threads=None, durable=true, direct=true, mode=0o640, progress=None))]
    #[expect(clippy::too_many_arguments, reason = "the options of a file")]
    fn write(
        &self,
        py: Python<'_>,
        path: PathBuf,
        metadata: Option<BTreeMap<String, String>>,
        container: Option<Container<'_>>,
        buffers: Option<&Buffers>,
        threads: Option<i64>,
        durable: bool,
        direct: bool,
        mode: u32,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Written> {
        let options = options_of(metadata, container, durable, direct, mode);
        write_plan(py, &path, &self.0, &options, buffers, threads, progress)
    }

    #[pyo3(signature = (path, start, end, *, upload=None, metadata=None, container=None, buffers=None, threads=None, durable=true, direct=true, mode=0o640, progress=None))]
    #[expect(clippy::too_many_arguments, reason = "the options of a file")]
    fn write_part<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        start: u64,
        end: u64,
        upload: Option<String>,
        metadata: Option<BTreeMap<String, String>>,
        container: Option<Container<'_>>,
        buffers: Option<&Buffers>,
        threads: Option<i64>,
        durable: bool,
        direct: bool,
        mode: u32,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let options = options_of(metadata, container, durable, direct, mode);
        let written = with_buffers(py, buffers, |buffers| {
            let control = Control::default();
            run(
                py,
                threads,
                end.saturating_sub(start),
                progress,
                &control,
                || {
                    let (part, upload) = (start..end, upload.as_deref());
                    writer::write_part(&path, &self.0, &options, part, upload, buffers, &control)
                },
            )
        })?;
        let chunks: Vec<u8> = written
            .chunks
            .iter()
            .flat_map(|one| one.to_le_bytes())
            .collect();
        let sums = written.sums.into_iter().map(|sum| PART_SUM.of(py, sum));
        let record = (
            written.range.start,
            written.range.end,
            written.n_bytes,
            written.header_bytes,
            written.header_checksum,
            PyBytes::new(py, &chunks),
            not_finite_list(py, &written.not_finite)?,
            sums.collect::<PyResult<Vec<_>>>()?,
            written.first_sent,
            written.sent,
        );
        WRITTEN_RANGE.of(py, record)
    }

    #[pyo3(signature = (path, upload, numbers, *, container, sums, buffers=None, threads=None))]
    #[expect(clippy::too_many_arguments, reason = "the options of a file")]
    fn send_left(
        &self,
        py: Python<'_>,
        path: PathBuf,
        upload: String,
        numbers: Vec<u64>,
        container: Container<'_>,
        sums: Vec<writer::SumOfPart>,
        buffers: Option<&Buffers>,
        threads: Option<i64>,
    ) -> PyResult<Vec<String>> {
        let container = container_of(container);
        let left = writer::LeftParts {
            upload: &upload,
            numbers: &numbers,
            sums: &sums,
        };
        with_buffers(py, buffers, |buffers| {
            let control = Control::default();
            run(py, threads, self.0.n_bytes(), None, &control, || {
                writer::send_left(&path, &self.0, &container, &left, buffers, &control)
            })
        })
    }
}

fn options_of(
    metadata: Option<BTreeMap<String, String>>,
    container: Option<Container<'_>>,
    durable: bool,
    direct: bool,
    mode: u32,
) -> writer::Options {
    writer::Options {
        metadata: metadata.unwrap_or_default().into_iter().collect(),
        container: container.map(container_of),
        durable,
        direct,
        mode,
    }
}

fn container_of((literals, starts, sums): Container<'_>) -> writer::Container {
    writer::Container {
        literals: literals.as_bytes().to_vec(),
        starts,
        sums: sums
            .into_iter()
            .map(|(at, array)| writer::Sum { at, array })
            .collect(),
    }
}

#[pyfunction]
#[pyo3(signature = (path, container, parts, checksums, *, durable=true))]
pub(crate) fn write_sums<'py>(
    py: Python<'py>,
    path: PathBuf,
    container: Container<'_>,
    parts: Vec<writer::SumOfPart>,
    checksums: &[u8],
    durable: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let container = container_of(container);
    let (chunks, _) = checksums.as_chunks::<4>();
    let mut chunks: Vec<u32> = chunks.iter().map(|one| u32::from_le_bytes(*one)).collect();
    let written = py.detach(|| writer::write_sums(&path, &container, &parts, &mut chunks, durable));
    raise(py, written)?;
    let bytes: Vec<u8> = chunks.iter().flat_map(|one| one.to_le_bytes()).collect();
    Ok(PyBytes::new(py, &bytes))
}
