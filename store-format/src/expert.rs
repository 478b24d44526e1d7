//! expert
