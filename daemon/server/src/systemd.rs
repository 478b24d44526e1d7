//! What systemd passes to a service, and what a service tells systemd: `sd_listen_fds(3)`, `sd_notify(3)`.
//!
//! Written here because it is a few variables, one descriptor and one datagram: a crate would be longer than this.
//! Without the variables, nothing of this has an effect.

mod activation;
mod notify;

pub(crate) use activation::{ActivationError, PassedSocket};
pub(crate) use notify::{Notifier, keep_alive};
