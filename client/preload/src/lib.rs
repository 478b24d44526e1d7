//! The library that `blobd exec` preloads: it makes `/blobd/<reference>.gguf` readable as a file, and `/blobd/<reference>`
//! as the folder of a model that is one.
//!
//! The dynamic linker binds a program's `open`, `read`, `mmap`, … to the functions in `hooks`.
//! When a path below `/blobd/` is opened, the library requests the model's image (`image`) from the
//! `blobd exec` that started the program: a header, and descriptors of blobs, which are mapped behind
//! it. The program gets a descriptor of a placeholder: an empty file of the right length, opened with
//! `O_PATH`. The kernel reports its size but refuses to read or map it and, where supported, to open it
//! again. A hook calls the kernel first and acts only if the kernel refuses, so other files have almost
//! no overhead, and a call without a hook fails with `EBADF` or `ENXIO` instead of reading zeros.
//!
//! Files of `blobd mount` are shown in the same way (`mounted`).
//!
//! Mappings share the blobs' pages with all processes, private ones until they are written. Not supported: writing, listing
//! `/blobd`, statically linked programs, and a name that comes to mean another model: a process keeps the model
//! that it opened first.
//!
//! Every function here is called by C under the contract of the C function that it replaces, or calls C.
// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![allow(unsafe_code)]

mod files;
mod fork;
mod hooks;
mod image;
mod memory;
mod mounted;
mod next;
mod paths;
mod request;
mod streams;
mod sys;
