#![allow(missing_docs)]
use crate::error::Result;
#[derive(Debug, Default)]
pub struct CellTable {
    pub starts: Vec<u32>,
    pub holders: Vec<(u32, u64)>,
}
#[derive(Debug)]
pub struct DeviceLayout {
    pub device_matrix: Vec<u64>,
    pub tensor_map: Vec<Vec<u64>>,
    pub alias_name: Vec<String>,
    pub rank_list: Vec<u64>,
    pub interleaved_parallel: bool,
}
#[derive(Debug)]
pub struct MetadataTensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub fragmentations: Vec<u64>,
    pub layout: Option<u32>,
    pub cells: CellTable,
}
#[derive(Debug)]
pub struct Metadata {
    pub files: Vec<String>,
    pub layouts: Vec<DeviceLayout>,
    pub tensors: Vec<MetadataTensor>,
}
pub fn decode(_t: &[u8]) -> Result<Metadata> {
    todo!()
}
