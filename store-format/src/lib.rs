//! The formats of a blobd store: from bytes to checked values and back.
//!
//! This crate turns bytes into checked values and plans, and values back into bytes: digests,
//! references, manifests, recipes, the headers of model files, and the plan by which a file is split
//! into one blob per tensor. It reads no files, sockets or clocks, starts no thread and contains no
//! `unsafe`; its `clippy.toml` enforces that. The input is untrusted: every length is checked before
//! use, nothing recurses on input, and no allocation is sized by an unchecked number.
//!
//! Split a small GGUF file into blobs and make its recipe:
//!
//! ```
//! use blobd_store_format::digest::Digest;
//! use blobd_store_format::file_format::{HeaderReader, Progress};
//! use blobd_store_format::gguf::{GgmlType, GgufWriter, Value};
//! use blobd_store_format::split::{SplitPlan, Splitter, Target};
//!
//! let mut writer = GgufWriter::new();
//! writer.metadata("general.architecture", Value::from("llama"))?;
//! writer.tensor("token_embd.weight", GgmlType::F32, &[8, 2])?;
//! let mut file = writer.header()?;
//! file.extend([7u8; 64]);
//!
//! let mut reader = HeaderReader::new();
//! let Progress::Done = reader.push(&file)? else { panic!("the header is complete") };
//! let plan = SplitPlan::new(reader.finish()?.file_layout(file.len() as u64)?);
//! let mut blobs = vec![Vec::new(); plan.blobs().len()];
//! let mut literals = vec![Vec::new(); plan.literal_count()];
//! for part in Splitter::new(&plan).push(&file)? {
//!     match part.target {
//!         Target::Blob { blob, .. } => blobs[blob].extend(part.bytes),
//!         Target::Literal { literal } => literals[literal].extend(part.bytes),
//!     }
//! }
//! let digests: Vec<Digest> = blobs.iter().map(|blob| Digest::of(blob)).collect();
//! let recipe = plan.recipe(Digest::of(&file), &digests, literals)?;
//! assert_eq!(recipe.size(), file.len() as u64);
//! assert_eq!(recipe.tensors().get(0).unwrap().digest, Digest::of(&[7u8; 64]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - Names: [`digest`], [`reference`](mod@reference), [`host`], [`glob`], [`name_pattern`], [`similar_names`], [`derived_name`],
//!   [`served_name`];
//!   what is pulled: [`source`], [`repository`], [`origin`].
//! - A registry's records: [`descriptor`], [`manifest`], [`index`], [`tensor_index`], [`tensor_layers`], [`json_error`]; [`signature`]s.
//! - Model files: [`file_format`] (the table of formats), [`gguf`], [`safetensors`], [`archive`], [`content_type`],
//!   [`file_layout`], [`tensor`], [`expert`], [`file_type`]; files that belong together: [`model_folder`], [`shard_set`],
//!   [`model_file`].
//! - Stored files: [`split`], [`recipe`], [`stored_file`], [`layout`] (paths), [`reach`] (what is alive),
//!   [`file_paths`] (exports).
//! - Text for people: [`size`], [`text`].
// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "a name that says it all needs no comment")]

pub mod archive;
pub mod artifact;
pub mod content_type;
pub mod delta;
pub mod derived_name;
pub mod descriptor;
pub mod digest;
pub mod expert;
pub mod file_format;
pub mod file_layout;
pub mod file_paths;
pub mod file_type;
mod ggml_type;
pub mod gguf;
pub mod git_id;
pub mod glob;
pub mod host;
pub mod index;
pub mod inventory;
pub mod json_error;
pub mod layout;
pub mod manifest;
pub mod model_file;
pub mod model_folder;
pub mod name_pattern;
pub mod origin;
pub mod python_json;
pub mod reach;
pub mod recipe;
pub mod reference;
pub mod repository;
pub mod safetensors;
pub mod served_name;
pub mod shard_set;
pub mod signature;
pub mod similar_names;
pub mod size;
pub mod source;
pub mod split;
pub mod stored_file;
pub mod tensor;
pub mod tensor_index;
pub mod tensor_layers;
mod tensor_table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod text;

/// The on-disk format of a store, a copy of `docs/STORE-FORMAT.md`.
#[cfg(doc)]
#[doc = include_str!("../../docs/STORE-FORMAT.md")]
pub mod spec {}
