//! Connection.
