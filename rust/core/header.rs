#![allow(missing_docs, dead_code, clippy::all, clippy::pedantic)]
use crate::dtype::Dtype; use crate::error::{Error,Result}; use std::path::Path; use std::fs::File; use std::os::unix::fs::FileExt;
#[derive(Debug)] pub struct Header{e:Vec<(String,Dtype,Vec<u64>,u64,u64)>,m:Option<Vec<(String,String)>>,d:u64}
pub struct Entry<'a> { pub name: &'a str, pub dtype: Dtype, pub shape: &'a [u64], pub start: u64, pub end: u64 }
impl Header { pub fn read(f:&File,_p:&Path,_n:u64)->Result<Self>{
 let mut b=[0;8]; f.read_exact_at(&mut b,0).map_err(|e|Error::damaged(e.to_string()))?; let n=u64::from_le_bytes(b); let mut j=vec![0;n as usize]; f.read_exact_at(&mut j,8).map_err(|e|Error::damaged(e.to_string()))?;
 let v:serde_json::Value=serde_json::from_slice(&j).map_err(|e|Error::damaged(e.to_string()))?; let mut e=vec![]; let mut m=None;
 for (k,t) in v.as_object().unwrap(){ if k=="__metadata__"{m=Some(t.as_object().unwrap().iter().map(|(a,b)|(a.clone(),b.as_str().unwrap().to_owned())).collect());continue}
  e.push((k.clone(),Dtype::parse(t["dtype"].as_str().unwrap())?,t["shape"].as_array().unwrap().iter().map(|x|x.as_u64().unwrap()).collect(),t["data_offsets"][0].as_u64().unwrap(),t["data_offsets"][1].as_u64().unwrap())); }
 e.sort_by_key(|x|(x.3,x.4)); Ok(Self{e,m,d:8+n}) }
 pub fn entry(&self,i:usize)->Entry<'_>{let x=&self.e[i];Entry{name:&x.0,dtype:x.1,shape:&x.2,start:x.3,end:x.4}} pub fn find(&self,n:&str)->Option<usize>{self.e.iter().position(|x|x.0==n)} pub fn len(&self)->usize{self.e.len()} pub fn data_start(&self)->u64{self.d} pub fn metadata(&self)->Option<&[(String,String)]>{self.m.as_deref()} }
pub fn build(t:&[(&str,Dtype,&[u64])],m:&[(String,String)],a:u64)->Result<(Vec<u8>,Vec<u64>)>{
 let mut o=serde_json::Map::new(); if !m.is_empty(){o.insert("__metadata__".into(),m.iter().cloned().collect::<std::collections::BTreeMap<_,_>>().into_iter().map(|(k,v)|(k,serde_json::Value::from(v))).collect::<serde_json::Map<_,_>>().into());}
 let mut at=0;let mut s=vec![]; for (n,d,sh) in t {let l=d.n_bytes(sh).unwrap(); s.push(at); o.insert(n.to_string(),serde_json::json!({"dtype":d.name(),"shape":sh,"data_offsets":[at,at+l]})); at+=l;}
 let mut j=serde_json::to_vec(&o).unwrap(); while (j.len() as u64+8)%a!=0{j.push(b' ');} let mut h=(j.len() as u64).to_le_bytes().to_vec(); h.extend(j); Ok((h,s))}
