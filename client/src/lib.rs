//! Open a model from a blobd daemon and map its tensors without a copy.
//!
//! ```
//! # #![allow(dead_code)]
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/fake.rs"));
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let socket = folder.path().join("blobd.sock");
//! # let mut fake = FakeModel::new();
//! # let fd = fake.add_file(&[7; 64]);
//! # fake.add_tensor("token_embd.weight", Some(fd), 0, 64);
//! # listen(&socket, move |call| fake.serve(call));
//! # // SAFETY: no other thread of this example reads the environment.
//! # unsafe { std::env::set_var("BLOBD_SOCKET", &socket) };
//! let client = blobd_client::Client::connect_default()?;
//! let model = client.open(&"llama3:8b".parse()?)?;
//!
//! let tensor = model.map("token_embd.weight")?;
//! println!("{} {:?}", tensor.type_name(), tensor.shape());
//! println!("{:02x?}", &tensor[..8]); // a `&[u8]` of the page cache, shared by all processes
//! # assert_eq!(tensor[..], [7; 64]);
//! # Ok(())
//! # }
//! ```
//!
//! The model is in use until the [`OpenModel`](model::OpenModel) is dropped. Maps stay valid after
//! that, and when the daemon stops or the model is removed. A [`Client`] survives a restart of the
//! daemon. There is no global state, and only [`asynchronous`] starts threads.
//!
//! Models:
//! - [`client`], [`asynchronous`]: finding a daemon; one method per verb, blocking or for any async runtime
//! - [`model`]: an open model: its tensors and files
//! - [`weights`]: models with a file per tensor: by name, component, quantisation
//! - [`gguf_view`]: a model as one GGUF file in memory, without a copy
//! - [`residency`]: how much of a tensor is in memory; prefetching, releasing and locking it
//! - [`fit`]: whether a model fits into memory
//!
//! Requests:
//! - [`protocol`]: the messages and frames, used by both ends
//! - [`error`]: why a request failed, or an open model cannot be read
//!
//! The machine, for blobd itself: [`sockets`], [`paths`], [`name_service`] (users and groups), [`journal`], and with the
//! feature `long-running` HTTP on TCP ports and signals.
//!
//! `docs/PROTOCOL.md` is the protocol's specification, for clients in other languages.

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod asynchronous;
pub mod client;
pub mod error;
pub mod fit;
pub mod gguf_view;
pub mod journal;
#[cfg(feature = "long-running")]
pub mod listener;
#[cfg(feature = "long-running")]
pub mod loopback;
pub mod model;
pub mod name_service;
pub mod paths;
#[cfg(feature = "long-running")]
pub mod process;
pub mod protocol;
pub mod residency;
pub mod sockets;
pub mod weights;

mod blob;
mod http;
mod map;
mod open;

pub use crate::client::Client;

/// The protocol, a copy of `docs/PROTOCOL.md`.
#[cfg(doc)]
#[doc = include_str!("../../docs/PROTOCOL.md")]
pub mod spec {}
