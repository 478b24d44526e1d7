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
//! - [`daemon`], [`command`], [`reader`]: processes: the daemon, one command, a client that maps
//! - [`verbs`]: one set of calls for the store in process, the socket and the embedded command
//! - [`model`], [`raw_gguf`]: model files, valid and hostile; [`oracle`] reads them independently
//! - [`store_dir`], [`memory`], [`http`]: what lies in a store, what a process holds, raw requests
//! - [`places`], [`wait`], [`programs`], [`compiler`]: where files go, how to wait, where the binaries
//!   are, how programs in C are made
//! - [`mount`]: models as files; [`mount_namespace`]: mounts that nobody else sees; [`hanging`]: files that
//!   nobody answers for; [`fuse`]: what such file systems have in common
//! - [`registry`]: a registry that misbehaves on demand; [`offers`] are pulled from one in this process
//! - [`crash_disk`], [`faulty_disk`]: disks that forget or fail; [`steps`] are done to a store on
//!   them with [`samples`], and [`world`] says what should be there afterwards
//!
//! What fails here panics with the reason: that is how a test says no.
#![allow(clippy::unwrap_used, clippy::expect_used)]

pub mod command;
pub mod compiler;
pub mod crash_disk;
pub mod daemon;
pub mod faulty_disk;
pub mod filler;
pub mod fuse;
pub mod hanging;
pub mod http;
pub mod memory;
pub mod mount;
pub mod mount_namespace;
pub mod offers;
pub mod oracle;
pub mod programs;
pub mod raw_gguf;
pub mod reader;
pub mod samples;
pub mod steps;
pub mod store_dir;
pub mod verbs;
pub mod wait;
pub mod world;

pub use blobd_fixtures::{model, places, registry};
