//! Which daemon a client uses if it is not told one.

use std::env;

use super::{Client, SOCKET_VARIABLE};
use crate::error::ClientError;
use crate::sockets::{SYSTEM_SOCKET, default_sockets, user_sockets};

impl Client {
    /// A client of the default daemon: the one that `BLOBD_SOCKET` names, otherwise the system's, otherwise this
    /// user's.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and as [`connect_to_system`](Self::connect_to_system).
    pub fn connect_default() -> Result<Self, ClientError> {
        if let Some(socket) = env::var_os(SOCKET_VARIABLE).filter(|socket| !socket.is_empty()) {
            return Self::connect(socket);
        }
        match Self::connect_to_system()? {
            Some(client) => Ok(client),
            None => Self::connect_to_own(),
        }
    }

    /// A client of the daemon that serves all users of this machine; `None` if the machine has none. Only then may a
    /// program use a daemon or a store of its user without being told to: the models of the system are not there.
    ///
    /// # Errors
    /// [`ClientError::Unavailable`] when the daemon is installed and does not listen, [`ClientError::Connect`] when it
    /// does not admit this user.
    pub fn connect_to_system() -> Result<Option<Self>, ClientError> {
        match Self::connect(SYSTEM_SOCKET) {
            Ok(client) => Ok(Some(client)),
            Err(ClientError::NotRunning { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A client of the first daemon of this user that listens.
    fn connect_to_own() -> Result<Self, ClientError> {
        let mut refused = None;
        for socket in user_sockets() {
            match Self::connect(socket) {
                Err(ClientError::NotRunning { .. }) => {}
                Err(error) => refused = refused.or(Some(error)),
                connected => return connected,
            }
        }
        let names: Vec<_> = default_sockets().iter().map(|socket| socket.display().to_string()).collect();
        Err(refused.unwrap_or(ClientError::NotRunning { socket: names.join(" or ") }))
    }
}
