//! `blobd web`: a page that shows the store, on loopback, for one user.
//!
//! The command itself listens on a port of 127.0.0.1, and asks the daemon over its socket as any other command does. So
//! the kernel tells the daemon which user asks, the daemon listens on no port, and the page can see only what its user
//! may see. Everybody on the machine can connect to a port of loopback, so the server answers with data only if the
//! request has the key of the session ([`access`]). The page is embedded in the binary, and loads nothing from
//! elsewhere.
//!
//! | file | responsibility |
//! |---|---|
//! | `access` | the one-time token, the key of the session, and which requests are refused |
//! | `assets` | the files of the page |
//! | `relay` | the requests that the page may make, and what the daemon is asked for them |
//! | `server` | accepts connections, with limits on each |

mod access;
mod assets;
mod relay;
mod server;

pub(crate) use access::Secret;
pub(crate) use relay::Relay;
pub(crate) use server::WebServer;
