//! Ends a request from another thread.

use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Client, Connector};

/// Ends the requests of a client that [`Client::stoppable`] has made.
#[derive(Clone, Default)]
pub struct Stop(Arc<Mutex<Stopping>>);

#[derive(Default)]
struct Stopping {
    is_stopped: bool,
    /// The connection of the last request.
    stream: Option<UnixStream>,
}

impl Client {
    /// A client for one request, and what ends that request: the daemon then sees that its client is gone.
    pub fn stoppable(&self) -> (Self, Stop) {
        let stop = Stop::default();
        let (inner, connector) = (stop.clone(), Arc::clone(&self.connector));
        let client = Self {
            connector: Arc::new(move || inner.connect(&*connector)),
            // That of the first request belongs to this client.
            spare: Arc::default(),
            ..self.clone()
        };
        (client, stop)
    }
}

impl Stop {
    /// Ends the running request, and lets no other begin.
    pub fn stop(&self) {
        let mut state = self.state();
        state.is_stopped = true;
        if let Some(stream) = state.stream.take() {
            // Fails only if it has ended.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether [`Self::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        self.state().is_stopped
    }

    fn connect(&self, connector: &Connector) -> io::Result<UnixStream> {
        let stream = connector()?;
        let mut state = self.state();
        if state.is_stopped {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the request was stopped"));
        }
        state.stream = Some(stream.try_clone()?);
        Ok(stream)
    }

    fn state(&self) -> MutexGuard<'_, Stopping> {
        // The value is always consistent, so a poisoned lock is safe to use.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stop").field("is_stopped", &self.is_stopped()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::thread;

    use super::*;

    /// A server that never responds.
    #[test]
    fn stopped_request_ends_and_its_server_notices() {
        let (sender, servers) = std::sync::mpsc::channel();
        let connector = move || {
            let (client, server) = UnixStream::pair()?;
            sender.send(server).map_err(io::Error::other)?;
            Ok(client)
        };
        let (client, stop) = Client::with_connector(Arc::new(connector)).stoppable();
        thread::scope(|scope| {
            let request = scope.spawn(|| client.version().is_err());
            let mut server = servers.recv().unwrap();
            assert!(!stop.is_stopped());
            stop.stop();
            let mut received = Vec::new();
            server.read_to_end(&mut received).unwrap();
            assert!(request.join().unwrap());
        });
        assert!(client.version().is_err(), "no other one begins");
    }
}
