//! The client with a fake daemon, which follows the protocol or sends wrong data.
#![allow(clippy::unwrap_used)]

mod broken;
mod fake;
mod open;
mod specification;
mod verbs;
mod view;
