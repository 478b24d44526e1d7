//! Metrics and health: their form, their documents, and that each metric moves when its event happens.

mod alerts;
mod documents;
mod events;
mod health;
mod listener;
mod samples;
mod table;
