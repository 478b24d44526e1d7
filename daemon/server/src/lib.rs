//! The daemon: serves the models of a [`blobd_store`] on a Unix socket, and downloads them with [`blobd_registry`]. It
//! knows no command line.
//!
//! Each verb is a function of [`ops`] on an open store:
//!
//! ```
//! use blobd_server::ops;
//! use blobd_client::protocol::request::GcParams;
//!
//! let root = tempfile::tempdir()?;
//! let store = blobd_store::Store::open(root.path().join("store"))?;
//! assert!(ops::list(&store)?.models.is_empty());
//! assert_eq!(ops::gc(&store, GcParams::default())?.freed_bytes, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! From the outside in:
//!
//! - A process: [`serve`] (start, reload, stop), [`local`] (without a daemon), `config`, `systemd`, [`client_file`] (reads
//!   a client's file).
//! - Requests: `server`, `socket`, `api` (routes, answers), `session` (open models), `request_record` and `audit`.
//! - Other machines: `network`, with `tls`; what they may see: `offer`.
//! - Users: `principal`, `access`, `quotas`, `policy`, `admission`, `limits`, `names`.
//! - Verbs: [`ops`], one file each; [`ingest`] and [`transfer`] bring files into the store.
//! - Numbers: `metrics`, `monitoring`.

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod access;
mod admission;
mod api;
mod arriving;
mod audit;
pub mod client_file;
mod config;
mod embedded;
mod housekeeping;
pub mod ingest;
mod large_models;
mod limits;
pub mod local;
mod locks;
mod log_limit;
mod long_work;
mod memory_gauge;
mod metrics;
mod monitoring;
mod names;
mod network;
mod offer;
mod open_sessions;
pub mod ops;
mod peer_process;
mod permits;
mod policy;
mod principal;
mod quotas;
mod request_record;
mod requester;
mod running_pulls;
pub mod serve;
mod server;
mod session;
mod socket;
mod state;
mod store_access;
mod sys;
mod systemd;
mod tls;
pub mod transfer;
mod trust;
mod user_set;
mod verb_log;
