//! Files of `torch.save`: real ones against their ground truth, hostile ones refused.

use reshard_core::source::{Method, Source};
use reshard_formats::objects::{Objects, read_file};
use reshard_formats::torch_file::equal::{Known, Read};
use reshard_formats::torch_file::{Leaf, TorchFile};
use reshard_formats::zip::Window;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data/torch")
        .join(name)
}

/// dtype, shape and bytes of each tensor, by path.
type Tensors = BTreeMap<String, (String, Vec<u64>, Vec<u8>)>;

/// The tensors of a file.
fn tensors(path: &Path) -> reshard_core::Result<Tensors> {
    let source = Source::open(path, false, Method::Auto)?;
    let file = TorchFile::read(Window::whole(&source))?;
    let mut found = BTreeMap::new();
    for (name, leaf) in file.leaves()? {
        let Leaf::Tensor(tensor) = leaf else {
            continue;
        };
        let storage = &file.storages()[tensor.storage];
        let mut bytes = vec![0; storage.n_bytes as usize];
        source.read_at(storage.start, &mut bytes)?;
        if storage
            .crc
            .is_some_and(|crc| reshard_formats::torch_file::crc32(&bytes) != crc)
        {
            return Err(reshard_core::Error::damaged(
                "a storage differs from its CRC-32",
            ));
        }
        let item = tensor.dtype.unit().1;
        let n: u64 = tensor.shape.iter().product();
        let mut out = Vec::new();
        for i in 0..n {
            let (mut rest, mut at) = (i, tensor.offset);
            for (extent, stride) in tensor.shape.iter().zip(&tensor.strides).rev() {
                at += rest % extent * stride;
                rest /= extent;
            }
            out.extend_from_slice(&bytes[(at * item) as usize..((at + 1) * item) as usize]);
        }
        found.insert(name, (tensor.dtype.name().to_owned(), tensor.shape, out));
    }
    Ok(found)
}

#[test]
fn real_files_have_the_tensors_of_their_ground_truth() {
    let folder = data("pt_files");
    let truth = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let truth = safetensors::SafeTensors::deserialize(&truth).unwrap();
    let mut n = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("expected") {
            continue;
        }
        let found = tensors(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let prefix = format!("{name}::");
        let expected: Vec<_> = truth
            .names()
            .into_iter()
            .filter_map(|key| key.strip_prefix(&prefix))
            .collect();
        let mut keys: Vec<_> = found.keys().map(String::as_str).collect();
        let mut wanted = expected.clone();
        keys.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(keys, wanted, "{name}");
        for key in expected {
            let view = truth.tensor(&format!("{prefix}{key}")).unwrap();
            let (dtype, shape, bytes) = &found[key];
            assert_eq!(format!("{:?}", view.dtype()), *dtype, "{name} {key}");
            assert_eq!(
                view.shape().iter().map(|n| *n as u64).collect::<Vec<_>>(),
                *shape,
                "{name} {key}"
            );
            assert_eq!(view.data(), bytes, "{name} {key}");
            n += 1;
        }
    }
    assert!(n > 50, "{n}");
}

#[test]
fn hostile_files_are_refused() {
    let folder = data("hostile");
    let cases: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("hostile.json")).unwrap()).unwrap();
    let good = tensors(&folder.join("good.pt")).unwrap();
    let (mut n, mut wrong) = (0, Vec::new());
    for (name, case) in cases.as_object().unwrap() {
        if !name.contains(".p") || !folder.join(name).is_file() {
            continue;
        }
        n += 1;
        let found = tensors(&folder.join(name));
        let want = case["want"].as_str().unwrap();
        let is_right = match &found {
            Err(error) => want != "equal" && !error.message().is_empty(),
            Ok(found) => want != "refuse" && (found.is_empty() || found.get("w") == good.get("w")),
        };
        if !is_right {
            wrong.push(format!("{name}: {want}, {found:?}"));
        }
    }
    assert!(n > 90, "{n}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Every tensor of a folder of `torch.distributed.checkpoint`, whole.
fn dcp(folder: &Path) -> reshard_core::Result<Tensors> {
    let path = folder.join(".metadata");
    let bytes = std::fs::read(&path)
        .map_err(|error| reshard_core::Error::io("cannot read", &path, &error))?;
    let metadata = reshard_formats::dcp::Dcp::decode(&bytes)?;
    let mut found = BTreeMap::new();
    for tensor in &metadata.tensors {
        let dtype = tensor.dtype.clone().map_err(reshard_core::Error::damaged)?;
        let item = dtype.unit().1;
        let n: u64 = tensor.shape.iter().product();
        let n_stored: u64 = tensor
            .chunks
            .iter()
            .map(|chunk| chunk.shape.iter().product::<u64>())
            .sum();
        if n_stored != n {
            return Err(reshard_core::Error::damaged("holes or overlaps"));
        }
        let mut out = vec![0; (n * item) as usize];
        for chunk in tensor.chunks.iter() {
            let name = &metadata.files[chunk.place.file as usize];
            if Path::new(name).components().count() != 1
                || name.contains("..")
                || name.contains('\0')
                || name.starts_with('/')
            {
                return Err(reshard_core::Error::damaged("a path"));
            }
            if chunk.place.transforms != 0 {
                return Err(reshard_core::Error::damaged("a transform"));
            }
            let source = Source::open(&folder.join(name), false, Method::Auto)?;
            let place = chunk.place;
            let window = Window::new(&source, place.offset, place.n_bytes)?;
            let (storage, stored) = reshard_formats::dcp::item_tensor(window, dtype, chunk.shape)?;
            let mut bytes = vec![0; storage.n_bytes as usize];
            source.read_at(storage.start, &mut bytes)?;
            for i in 0..chunk.shape.iter().product::<u64>() {
                let (mut rest, mut at, mut to, mut step) = (i, stored.offset, 0, 1);
                for d in (0..chunk.shape.len()).rev() {
                    let here = rest % chunk.shape[d];
                    rest /= chunk.shape[d];
                    at += here * stored.strides[d];
                    to += (chunk.offset[d] + here) * step;
                    step *= tensor.shape[d];
                }
                let (at, to, item) = ((at * item) as usize, (to * item) as usize, item as usize);
                out[to..to + item].copy_from_slice(&bytes[at..at + item]);
            }
        }
        found.insert(
            tensor.name.clone(),
            (dtype.name().to_owned(), tensor.shape.clone(), out),
        );
    }
    Ok(found)
}

#[test]
fn real_folders_of_dcp_have_the_tensors_of_their_ground_truth() {
    let cases = [
        ("dcp_fsdp2/checkpoint/step-10", "dcp_fsdp2/expected/step-10"),
        ("dcp_fsdp2/checkpoint/step-3", "dcp_fsdp2/expected/step-3"),
        ("dcp_2d/checkpoint", "dcp_2d"),
        ("dcp_hsdp/checkpoint", "dcp_hsdp"),
        ("dcp_plain/checkpoint", "dcp_plain"),
        ("dcp_threads/checkpoint_items", "dcp_threads"),
        ("dcp_threads/checkpoint_threads", "dcp_threads"),
    ];
    for (folder, expected) in cases {
        let found = dcp(&data(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
        let truth = std::fs::read(data(expected).join("expected.safetensors")).unwrap();
        let truth = safetensors::SafeTensors::deserialize(&truth).unwrap();
        let mut keys = truth.names();
        keys.sort_unstable();
        assert_eq!(
            found.keys().map(String::as_str).collect::<Vec<_>>(),
            keys,
            "{folder}"
        );
        for key in keys {
            let view = truth.tensor(key).unwrap();
            let (dtype, shape, bytes) = &found[key];
            assert_eq!(format!("{:?}", view.dtype()), *dtype, "{folder} {key}");
            assert_eq!(
                view.shape().iter().map(|n| *n as u64).collect::<Vec<_>>(),
                *shape,
                "{folder} {key}"
            );
            assert!(view.data() == bytes, "{folder} {key}");
        }
    }
}

#[test]
fn hostile_folders_of_dcp_are_refused() {
    let folder = data("hostile");
    let cases: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("hostile.json")).unwrap()).unwrap();
    let good = dcp(&folder.join("dcp_good")).unwrap();
    let (mut n, mut wrong) = (0, Vec::new());
    for (name, case) in cases
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| name.starts_with("dcp_"))
    {
        n += 1;
        let found = dcp(&folder.join(name));
        let want = case["want"].as_str().unwrap();
        match &found {
            Err(error) if want == "equal" => wrong.push(format!("{name}: {error}")),
            Ok(found) if want == "refuse" || *found != good => {
                wrong.push(format!("{name}: {want}, but read"));
            }
            _ => {}
        }
    }
    assert!(n > 35, "{n}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Every fifth byte of the file of a rank, changed: a file that is equal to that of another rank is decoded to the same values.
#[test]
fn a_file_that_is_equal_to_a_known_one_is_decoded_to_the_same_values() {
    let name = "ds_zero3_bf16/checkpoint/global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt";
    let mut known = Known::default();
    let Ok(Read::Decoded(mut first)) = known.read(&data(name), false) else {
        panic!("nothing is known before")
    };
    assert!(known.keep(&mut first) && !known.keep(&mut first));
    // The members of the archive of another rank have other names.
    let mut bytes = std::fs::read(data(name)).unwrap();
    for at in 0..bytes.len() {
        if bytes[at..].starts_with(b"rank_1_mp") {
            bytes[at + 5] = b'7';
        }
    }
    let values = |file: &TorchFile, leaves: &[(String, Leaf)]| {
        let meant = Objects::new(file.pickle()); // numbers of values
        let shown = leaves.iter().map(|(name, leaf)| match leaf {
            Leaf::Tensor(one) => format!("{name} {:?}", (one.dtype, &one.shape, one.storage)),
            Leaf::Other(id) => format!("{name} {:?}", meant.get(*id)),
            _ => panic!("no shards"),
        });
        shown.collect::<Vec<_>>()
    };
    let expected = values(&first.file, &first.leaves);
    let path = std::env::temp_dir().join(format!("reshard-equal-{}.pt", std::process::id()));
    let (mut n_equal, mut n_decoded, mut n_refused) = (0, 0, 0);
    for at in (0..bytes.len()).step_by(5) {
        bytes[at] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let alone = read_file(&path, false);
        match known.read(&path, false) {
            Ok(Read::Equal(number)) => {
                let (file, leaves) = alone.unwrap();
                assert_eq!(
                    (number, values(&file, &leaves)),
                    (0, expected.clone()),
                    "{at}"
                );
                n_equal += 1;
            }
            Ok(Read::Decoded(found)) => {
                let (file, leaves) = alone.unwrap();
                assert_eq!(values(&found.file, &found.leaves), values(&file, &leaves));
                n_decoded += 1;
            }
            Err(error) => {
                assert_eq!(error.to_string(), alone.unwrap_err().to_string());
                n_refused += 1;
            }
        }
        bytes[at] ^= 1;
    }
    std::fs::remove_file(&path).unwrap();
    // Most bytes are padding and contents. The CRC of the pickle finds each change of it.
    assert!(
        n_equal > 200 && n_refused > 200,
        "{n_equal} {n_decoded} {n_refused}"
    );

    // The same pickle, whose storages have other sizes, is not equal.
    let (from, to) = (b"data/10", b"data/1a");
    let mut other = bytes;
    let places = other
        .windows(from.len())
        .enumerate()
        .filter(|(_, found)| found == from);
    for at in places.map(|(at, _)| at).collect::<Vec<_>>() {
        other[at..at + to.len()].copy_from_slice(to);
    }
    std::fs::write(&path, &other).unwrap();
    let refused = known.read(&path, false).unwrap_err().to_string();
    std::fs::remove_file(&path).unwrap();
    assert!(
        refused.contains("storage `10` is not in the file"),
        "{refused}"
    );
}
