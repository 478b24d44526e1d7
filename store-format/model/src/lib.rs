//! Interprets model files.
//!
//! [`blobd_store_format`] reads and writes the formats; this crate interprets their content: the kind of a
//! model, the memory that it needs, the differences between two models, and the numbers of a tensor. It reads
//! no files, sockets or clocks and contains no `unsafe`; headers and tensors are untrusted input.
//!
//! ```
//! use blobd_model::facts::ModelFacts;
//! use blobd_model::kind::ModelKind;
//! use blobd_store_format::file_format::read_header;
//! use blobd_store_format::gguf::{GgmlType, GgufWriter};
//!
//! let mut writer = GgufWriter::new();
//! writer.metadata("general.architecture", "llama")?;
//! writer.metadata("general.file_type", 7_u32)?;
//! writer.tensor("token_embd.weight", GgmlType::Q8_0, &[32, 4])?;
//! let facts = ModelFacts::from_header(&*read_header(&writer.header()?)?);
//! assert_eq!((facts.kind, facts.parameters, facts.quantization.as_deref()), (ModelKind::Model, 128, Some("Q8_0")));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - Facts from a header: [`metadata`] (typed access), [`metadata_json`], [`facts`], [`kind`], [`card`], [`overview`], [`capabilities`],
//!   [`layers`]; [`config`] and [`manifest_config`] for models whose facts are in JSON files.
//! - Memory: [`estimate`].
//! - Numbers: [`quant`] (the block types of ggml), [`convert`] (float types), [`tensor_layers`] (models of one layer per
//!   tensor).
//! - Comparing and changing models: [`diff`], [`edit`] (other metadata), [`rewrite`] (other alignment, byte order or shards).
// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "a name that says it all needs no comment")]

pub mod capabilities;
pub mod card;
pub mod config;
pub mod convert;
pub mod diff;
pub mod edit;
mod entries;
pub mod estimate;
pub mod facts;
mod float;
mod float8;
pub mod kind;
pub mod layers;
pub mod manifest_config;
pub mod metadata;
pub mod metadata_json;
pub mod overview;
pub mod quant;
pub mod rewrite;
pub mod tensor_layers;
