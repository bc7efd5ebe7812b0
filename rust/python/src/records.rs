//! The records that Python receives. Most are named tuples, which it can unpack, compare and write as JSON. Those of which
//! a file can have a million are classes of their own: an instance costs less than a tuple.
//!
//! What comes by column (`alike`, `array_kinds`) stays a tuple of lists, and pairs stay pairs: a record for each tensor
//! would take longer than the call. A result out of a few is a member of an `enum.Enum`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use reshard_core::finite::NotFinite;
use reshard_core::local_array::LocalArray;
use reshard_core::tile::Tile;
use reshard_formats::rank_tensors::Class;

/// A class made by `collections.namedtuple`, once for each process.
pub(crate) struct Record {
    name: &'static str,
    fields: &'static [&'static str],
    class: PyOnceLock<Py<PyType>>,
}

/// A box of a tensor and where it lies in a local array.
pub(crate) static TILE: Record = Record::new(
    "Tile",
    &["offset", "shape", "local_offset", "local_strides"],
);
/// An array in a file, and the tiles of a tensor in it.
pub(crate) static STORED_ARRAY: Record =
    Record::new("StoredArray", &["file", "name", "shape", "tiles"]);
/// A range of the elements of a tensor, and the flat array in which it lies.
/// A stored region of a tensor, and the files that hold it.
pub(crate) static STORED_REGION: Record =
    Record::new("StoredRegion", &["offset", "shape", "files"]);
/// What is wrong with the values of an array.
pub(crate) static ARRAY_COUNTS: Record = Record::new(
    "ArrayCounts",
    &[
        "number",
        "n_nan",
        "n_infinite",
        "first_not_finite",
        "n_negative",
        "first_negative",
    ],
);
/// How far the values of two arrays are apart.
pub(crate) static CHANGES: Record = Record::new(
    "Changes",
    &[
        "n_different",
        "n_nan",
        "n_outside",
        "max_abs",
        "squares_a",
        "squares_b",
        "squares_change",
    ],
);
/// A stored part of an array.
pub(crate) static ARRAY_PART: Record = Record::new("ArrayPart", &["name", "shape", "tiles"]);
/// The recorded layout of a tensor over the devices of its stage.
pub(crate) static DEVICE_LAYOUT: Record = Record::new(
    "DeviceLayout",
    &["device_matrix", "tensor_map", "alias_name", "rank_list"],
);

/// An array of a plan.
pub(crate) static PLANNED_ARRAY: Record =
    Record::new("PlannedArray", &["name", "dtype", "shape", "n_bytes"]);
/// Arrays of one kind that lie at equal distances in a buffer.
pub(crate) static ARRAY_STACK: Record = Record::new(
    "ArrayStack",
    &["buffer", "start", "step_bytes", "dtype", "shape", "numbers"],
);
/// What tells a file from its later content.
pub(crate) static FILE_STATE: Record =
    Record::new("FileState", &["n_bytes", "modified_ns", "inode"]);
/// A file that is not what it was.
pub(crate) static CHANGED_FILE: Record = Record::new("ChangedFile", &["path", "opened", "now"]);
/// A tensor of a file of `torch.save`.
pub(crate) static TORCH_TENSOR: Record = Record::new("TorchTensor", &["name", "dtype", "shape"]);
/// A tensor in the file of a rank.
pub(crate) static RANK_TENSOR: Record =
    Record::new("RankTensor", &["path", "key", "kind", "local"]);
/// A value of a folder of `torch.distributed.checkpoint` that is no tensor.
pub(crate) static DCP_OBJECT: Record = Record::new(
    "DcpObject",
    &["name", "file", "start", "n_bytes", "transforms"],
);
/// What a folder of `torch.distributed.checkpoint` holds.
pub(crate) static OPENED_DCP: Record =
    Record::new("OpenedDcp", &["tensors", "objects", "unsupported", "files"]);
/// A tensor of a GGUF file.
pub(crate) static GGUF_TENSOR: Record = Record::new(
    "GgufTensor",
    &[
        "name",
        "type",
        "type_number",
        "n_values",
        "n_bytes",
        "shape",
    ],
);
/// An operator of a strategy file.
pub(crate) static STRATEGY_ITEM: Record =
    Record::new("StrategyItem", &["node_name", "stage", "parallel_strategy"]);
/// A parameter of a strategy file.
pub(crate) static STRATEGY_LAYOUT_ITEM: Record = Record::new(
    "StrategyLayoutItem",
    &[
        "param_name",
        "dev_matrix",
        "tensor_map",
        "param_split_shape",
        "indices_offset",
        "field",
        "opt_weight_shard_step",
        "opt_weight_shard_size",
    ],
);
/// What a bucket says of a name.
pub(crate) static OBJECT_STATUS: Record =
    Record::new("ObjectStatus", &["n_bytes", "e_tag", "modified"]);

/// An entry of a folder.
pub(crate) static FOLDER_ENTRY: Record = Record::new("FolderEntry", &["name", "mode", "n_bytes"]);
/// Keys that differ only in numbers.
pub(crate) static KEY_GROUP: Record = Record::new("KeyGroup", &["first", "n_keys", "numbers"]);
/// A strategy file.
pub(crate) static STRATEGY: Record = Record::new(
    "Strategy",
    &[
        "current_stage",
        "parallel_strategy_item",
        "parallel_layout_item",
    ],
);
/// A part of a file that was written.
pub(crate) static WRITTEN_RANGE: Record = Record::new(
    "WrittenRange",
    &[
        "start",
        "end",
        "n_bytes",
        "header_bytes",
        "header_checksum",
        "checksums",
        "not_finite",
        "sums",
        "first_sent",
        "sent",
    ],
);
/// What a part of a file has of an array.
pub(crate) static PART_SUM: Record = Record::new("PartSum", &["array", "n_bytes", "crc"]);
/// What this process has requested of objects.
pub(crate) static REMOTE_COUNTS: Record = Record::new(
    "RemoteCounts",
    &[
        "n_requests",
        "n_failed",
        "fetched_bytes",
        "wanted_bytes",
        "gap_bytes",
        "n_at_once",
    ],
);
/// An upload in parts that was not completed.
pub(crate) static UNFINISHED_UPLOAD: Record = Record::new(
    "UnfinishedUpload",
    &["key", "upload_id", "begun", "n_bytes"],
);
/// One action of a rule of a bucket.
pub(crate) static LIFECYCLE_RULE: Record = Record::new(
    "LifecycleRule",
    &[
        "name",
        "prefixes",
        "action",
        "storage_class",
        "when",
        "is_narrower",
    ],
);

/// The worst value of an array. Its members are the words that files have for them.
static NOT_FINITE: Enumeration = Enumeration {
    name: "NotFinite",
    base: "StrEnum",
    members: &[("NAN", "nan"), ("INFINITE", "inf")],
    class: PyOnceLock::new(),
};
/// What torch calls a tensor in the file of a rank.
static TENSOR_KIND: Enumeration = Enumeration {
    name: "TensorKind",
    base: "StrEnum",
    members: &[
        ("TENSOR", "tensor"),
        ("DTENSOR", "DTensor"),
        ("SHARDED_TENSOR", "ShardedTensor"),
    ],
    class: PyOnceLock::new(),
};
/// What became of a request for a new object.
static PUT_NEW: Enumeration = Enumeration {
    name: "PutNew",
    base: "Enum",
    members: &[
        ("CREATED", "created"),
        ("EXISTS", "exists"),
        ("UNKNOWN", "unknown"),
    ],
    class: PyOnceLock::new(),
};
/// What a rule of a bucket does.
static RULE_ACTION: Enumeration = Enumeration {
    name: "RuleAction",
    base: "StrEnum",
    members: &[
        ("EXPIRE", "expire"),
        ("MOVE", "move"),
        ("END_UPLOADS", "end uploads"),
    ],
    class: PyOnceLock::new(),
};

/// A class of `enum`, made once for each process.
pub(crate) struct Enumeration {
    name: &'static str,
    base: &'static str,
    members: &'static [(&'static str, &'static str)],
    class: PyOnceLock<Py<PyAny>>,
}

impl Enumeration {
    fn class<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        let class = self.class.get_or_try_init(py, || {
            let options = PyDict::new(py);
            options.set_item("module", "reshard._core")?;
            let base = py.import("enum")?.getattr(self.base)?;
            let class = base.call((self.name, self.members.to_vec()), Some(&options))?;
            Ok::<_, PyErr>(class.unbind())
        })?;
        Ok(class.bind(py))
    }

    fn member<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        self.class(py)?.getattr(name)
    }
}

/// Names of arrays, each with its worst value.
pub(crate) fn not_finite_list<'py>(
    py: Python<'py>,
    found: &[(String, NotFinite)],
) -> PyResult<Vec<(String, Bound<'py, PyAny>)>> {
    let named = found.iter().map(|(name, worst)| {
        let member = match worst {
            NotFinite::Nan => "NAN",
            NotFinite::Infinite => "INFINITE",
        };
        Ok((name.clone(), NOT_FINITE.member(py, member)?))
    });
    named.collect()
}

/// What torch calls a tensor.
pub(crate) fn tensor_kind(py: Python<'_>, class: Class) -> PyResult<Bound<'_, PyAny>> {
    let member = match class {
        Class::Tensor => "TENSOR",
        Class::DTensor => "DTENSOR",
        Class::ShardedTensor => "SHARDED_TENSOR",
    };
    TENSOR_KIND.member(py, member)
}

/// What became of a request for a new object.
#[cfg(feature = "remote")]
pub(crate) fn put_new_member<'py>(
    py: Python<'py>,
    outcome: &reshard_remote::write::PutNew,
) -> PyResult<Bound<'py, PyAny>> {
    use reshard_remote::write::PutNew;
    let member = match outcome {
        PutNew::Created => "CREATED",
        PutNew::Exists => "EXISTS",
        PutNew::Unknown(_) => "UNKNOWN",
    };
    PUT_NEW.member(py, member)
}

/// One action of a rule of a bucket.
#[cfg(feature = "remote")]
pub(crate) fn lifecycle_rule(
    py: Python<'_>,
    rule: reshard_remote::lifecycle::Rule,
) -> PyResult<Bound<'_, PyTuple>> {
    use reshard_remote::lifecycle::Action;
    let (member, class) = match rule.action {
        Action::Expire => ("EXPIRE", String::new()),
        Action::Move(class) => ("MOVE", class),
        Action::EndUploads => ("END_UPLOADS", String::new()),
    };
    let action = RULE_ACTION.member(py, member)?;
    let values = (
        rule.name,
        rule.prefixes,
        action,
        class,
        rule.when,
        rule.is_narrower,
    );
    LIFECYCLE_RULE.of(py, values)
}

/// `tuple.__new__`: it makes an instance of a subclass without running Python code.
static NEW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

impl Record {
    const fn new(name: &'static str, fields: &'static [&'static str]) -> Self {
        Self {
            name,
            fields,
            class: PyOnceLock::new(),
        }
    }

    fn class<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyType>> {
        let class = self.class.get_or_try_init(py, || {
            let options = PyDict::new(py);
            options.set_item("module", "reshard._core")?;
            let make = py.import("collections")?.getattr("namedtuple")?;
            let class = make.call((self.name, self.fields.to_vec()), Some(&options))?;
            Ok::<_, PyErr>(class.cast_into::<PyType>()?.unbind())
        })?;
        Ok(class.bind(py))
    }

    /// An instance; as many values as fields.
    pub(crate) fn of<'py>(
        &self,
        py: Python<'py>,
        values: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error = PyErr>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let new = NEW.get_or_try_init(py, || {
            Ok::<_, PyErr>(py.get_type::<PyTuple>().getattr("__new__")?.unbind())
        })?;
        let made = new
            .bind(py)
            .call1((self.class(py)?, values.into_pyobject(py)?))?;
        Ok(made.cast_into::<PyTuple>()?)
    }
}

/// Adds the classes to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    for record in [
        &TILE,
        &STORED_ARRAY,
        &STORED_REGION,
        &ARRAY_COUNTS,
        &CHANGES,
        &ARRAY_PART,
        &DEVICE_LAYOUT,
        &PLANNED_ARRAY,
        &ARRAY_STACK,
        &FILE_STATE,
        &CHANGED_FILE,
        &TORCH_TENSOR,
        &RANK_TENSOR,
        &DCP_OBJECT,
        &OPENED_DCP,
        &GGUF_TENSOR,
        &STRATEGY_ITEM,
        &STRATEGY_LAYOUT_ITEM,
        &OBJECT_STATUS,
        &FOLDER_ENTRY,
        &KEY_GROUP,
        &STRATEGY,
        &WRITTEN_RANGE,
        &PART_SUM,
        &REMOTE_COUNTS,
        &UNFINISHED_UPLOAD,
        &LIFECYCLE_RULE,
    ] {
        module.add(record.name, record.class(module.py())?)?;
    }
    for enumeration in [&NOT_FINITE, &TENSOR_KIND, &PUT_NEW, &RULE_ACTION] {
        module.add(enumeration.name, enumeration.class(module.py())?)?;
    }
    Ok(())
}

/// A tensor of a file, with its bytes.
#[pyclass(frozen, eq, module = "reshard._core")]
#[derive(PartialEq)]
pub(crate) struct FileTensor {
    #[pyo3(get)]
    pub(crate) name: String,
    #[pyo3(get)]
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    #[pyo3(get)]
    pub(crate) start: u64,
    #[pyo3(get)]
    pub(crate) end: u64,
}

#[pymethods]
impl FileTensor {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }
}

/// An array of a file, joined from its stored parts.
#[pyclass(frozen, eq, module = "reshard._core")]
#[derive(PartialEq)]
pub(crate) struct FileArray(pub(crate) LocalArray);

#[pymethods]
impl FileArray {
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype.name()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.shape)
    }

    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let parts = self.0.parts.iter();
        parts
            .map(|part| {
                let shape = PyTuple::new(py, &part.shape)?;
                ARRAY_PART.of(py, (part.name.as_str(), shape, tile_list(py, &part.tiles)?))
            })
            .collect()
    }
}

pub(crate) fn tile_tuple<'py>(py: Python<'py>, tile: &Tile) -> PyResult<Bound<'py, PyTuple>> {
    let values = (
        PyTuple::new(py, tile.global.offset())?,
        PyTuple::new(py, tile.global.shape())?,
        tile.local_offset,
        PyTuple::new(py, &tile.local_strides)?,
    );
    TILE.of(py, values)
}

pub(crate) fn tile_list<'py>(
    py: Python<'py>,
    tiles: &[Tile],
) -> PyResult<Vec<Bound<'py, PyTuple>>> {
    tiles.iter().map(|tile| tile_tuple(py, tile)).collect()
}
