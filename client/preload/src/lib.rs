//! What `blobd exec` puts under a program: `/blobd/<reference>.gguf` is a file there.
//!
//! The dynamic linker binds a program's `open`, `read`, `mmap`, … to the functions in `hooks`.
//! Opening a path below `/blobd/` asks the `blobd exec` above for the model's image
//! (`image`): a header, and descriptors of blobs that are mapped behind it. The program gets a
//! descriptor of an empty file of the right length that was opened with `O_PATH`: the kernel tells its
//! size to anyone, and refuses to read or map it, or, where it can, to open it again. A hook lets the
//! kernel try first and steps in where it refuses; so other files cost next to nothing more, and a way of
//! reading that has no hook fails with `EBADF` or `ENXIO` instead of reading zeros.
//!
//! Maps are the blobs' own pages, shared with every process that uses them. What this library does
//! not do: write, list `/blobd`, follow a change of a name after its first use in a process, or reach
//! programs without a dynamic linker.
//!
//! Every function here is called by C with C's promises, or calls C.
#![allow(unsafe_code)]

mod files;
mod fork;
mod hooks;
mod image;
mod memory;
mod next;
mod reopen;
mod streams;
mod sys;
