//! The library that `blobd exec` preloads: it makes `/blobd/<reference>.gguf` a file for a program.
//!
//! The dynamic linker binds a program's `open`, `read`, `mmap`, … to the functions in `hooks`.
//! Opening a path below `/blobd/` asks the `blobd exec` above for the model's image
//! (`image`): a header, and descriptors of blobs that are mapped behind it. The program gets a
//! descriptor of an empty file of the right length that was opened with `O_PATH`: the kernel tells its
//! size to anyone, and refuses to read or map it, or, where it can, to open it again. A hook calls
//! the kernel first and handles only its refusal, so other files have almost no overhead, and a call
//! without a hook fails with `EBADF` or `ENXIO` instead of reading zeros.
//!
//! Maps share the pages of the blobs with all processes. Not supported: writing, listing `/blobd`,
//! changes of a name after its first use in a process, and statically linked programs.
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
