//! The harness of the integration tests: it drives the real `blobd` binary as a user would.
//!
//! ```no_run
//! use blobd_tests::daemon::TestDaemon;
//! use blobd_tests::model::ModelFile;
//!
//! let daemon = TestDaemon::start();
//! let file = ModelFile::dense(1).write_to(daemon.scratch(), "tiny-F32.gguf");
//! daemon.command().run(["import".as_ref(), file.as_os_str()]).succeeds();
//! let model = daemon.client().open(&"tiny:F32".parse()?)?;
//! assert!(model.tensor("token_embd.weight").is_some());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - [`daemon`], [`command`], [`reader`]: processes: the daemon, a command, a client that maps a model
//! - [`service`]: a daemon as systemd starts it
//! - [`verbs`]: the same calls for a store in this process, the socket and embedded commands
//! - [`model`], [`raw_gguf`], [`folders`]: model files, valid and malformed, and models of several files; [`oracle`] reads them independently of blobd
//! - [`store_dir`], [`memory`], [`http`]: files of a store, memory of a process, raw requests; [`routes`]: a request of each
//!   route
//! - [`temp_dirs`], [`wait`], [`programs`], [`compiler`]: temporary directories, waiting with a deadline, the
//!   binaries under test, programs in C
//! - [`mount`]: models as files; [`mount_namespace`]: private mounts; [`hanging`]: files whose operations hang;
//!   [`fuse`]: common parts of the FUSE file systems
//! - [`moves`]: killed moves of models in the layouts of several programs
//! - [`file_source`]: imports of files that this process has open
//! - [`tensor_indexes`]: tensor indexes at such a registry, right and forged
//! - [`registry`]: a registry with chosen faults; [`pulls`]: pulls in this process from such a registry
//! - [`crash_disk`], [`faulty_disk`]: disks that lose unsynced data or fail; [`steps`]: operations on a store on
//!   such a disk, with the files of [`samples`]; [`store_state`]: the expected and the actual content of a store
//!
//! Functions panic with the reason when a test fails.
#![allow(clippy::unwrap_used, clippy::expect_used)]

pub mod archives;
pub mod browser;
pub mod command;
pub mod compiler;
pub mod crash_disk;
pub mod daemon;
pub mod faulty_disk;
pub mod file_source;
pub mod filler;
pub mod folders;
pub mod fuse;
pub mod hanging;
pub mod http;
pub mod memory;
pub mod mount;
pub mod mount_namespace;
pub mod moves;
pub mod oracle;
pub mod programs;
pub mod pulls;
pub mod raw_gguf;
pub mod reader;
pub mod routes;
pub mod samples;
pub mod service;
pub mod steps;
pub mod store_dir;
pub mod store_state;
pub mod tensor_indexes;
pub mod terminal;
pub mod verbs;
pub mod wait;

pub use blobd_fixtures::{model, proxy, registry, temp_dirs, tls};
