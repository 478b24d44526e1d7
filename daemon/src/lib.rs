//! The parts of the `blobd` binary: the daemon, which serves the models of a [`blobd_store`] on a Unix socket,
//! and the command line. Access to registries is in [`blobd_registry`].
//!
//! An import splits a model file: each tensor becomes one blob named by its digest, and a recipe says how to
//! rebuild the file:
//!
//! ```
//! use std::sync::Arc;
//! use blobd::ingest::ingest_file;
//! use blobd_store::{Ingest, Store};
//! use blobd_store_format::gguf::{GgmlType, GgufWriter};
//!
//! let root = tempfile::tempdir()?;
//! let store = Arc::new(Store::open(root.path().join("store"))?);
//! let mut writer = GgufWriter::new();
//! writer.tensor("token_embd.weight", GgmlType::F32, &[256])?;
//! let mut file = writer.header()?;
//! file.extend([1; 1024]);
//!
//! let mut ingest = Ingest::begin(&store, store.leases().grant("an example"))?;
//! let size = file.len() as u64;
//! let taken = ingest_file(&mut ingest, &mut file.as_slice(), size, &mut |_completed| ())?;
//! assert_eq!(taken.digest, blobd_store_format::digest::Digest::of(&file));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! From the outside in: [`cli`] turns arguments into requests; `server` and `api` turn requests into verbs;
//! [`ops`] has one file per verb; `session` serves open models. [`ingest`] and [`transfer`] bring files into
//! the store. `mount` is a client of the daemon that shows models as files.

mod admission;
mod api;
pub mod cli;
mod client_file;
mod config;
mod demo;
mod housekeeping;
pub mod ingest;
mod large_models;
mod limits;
mod log_limit;
mod mount;
mod open_sessions;
pub mod ops;
mod output;
mod permits;
mod principal;
mod read_model;
mod server;
mod session;
mod size;
mod socket;
mod state;
mod sys;
pub mod transfer;
