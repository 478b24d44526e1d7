//! The client against a daemon that plays its part of the protocol, or lies.
#![allow(clippy::unwrap_used)]

mod broken;
mod fake;
mod open;
mod specification;
mod verbs;
mod view;
