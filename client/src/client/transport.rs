//! Chooses a daemon, sends requests and receives responses: one connection per request, repeated if the server was
//! replaced.

use std::env;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{MutexGuard, PoisonError};
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use serde::de::DeserializeOwned;

use super::{Client, MAX_SPARE_AGE, SOCKET_VARIABLE};
use crate::error::ClientError;
use crate::http::{Request as HttpRequest, Response};
use crate::protocol::error::ErrorBody;
use crate::protocol::event::Event;
use crate::protocol::route::{Document, Events, Request, Route};
use crate::sockets::{self, SYSTEM_SOCKET, default_sockets, user_sockets};

impl Client {
    /// A client of the default daemon: the one that `BLOBD_SOCKET` names, otherwise the system's, otherwise this
    /// user's.
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

impl Client {
    pub(super) fn document<R: Request<Answer = Document<T>>, T: DeserializeOwned>(
        &self,
        params: &R::Params,
    ) -> Result<T, ClientError> {
        self.repeated::<R, _>(params, Response::json)
    }

    /// Sends a request whose answer is events, and receives them until its result.
    pub(super) fn events<R, P, D>(
        &self,
        params: &R::Params,
        mut on_event: impl FnMut(Event<P, D>),
    ) -> Result<D, ClientError>
    where
        R: Request<Answer = Events<P, D>>,
        P: DeserializeOwned,
        D: DeserializeOwned + Clone,
    {
        self.repeated::<R, _>(params, |response| {
            let mut lines = response.lines()?;
            while let Some(event) = lines.next_json()? {
                let result = match &event {
                    Event::Progress(_) => None,
                    Event::Done(done) => Some(Ok(D::clone(done))),
                    Event::Failed(response) => Some(Err(response.error.clone().into())),
                };
                on_event(event);
                if let Some(result) = result {
                    return result;
                }
            }
            Err(ClientError::Closed)
        })
    }

    /// Sends a request, and receives its answer with `receive`; again if its server ends and another one replaces it.
    pub(super) fn repeated<R: Request, T>(
        &self,
        params: &R::Params,
        receive: impl FnMut(Response) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        self.repeated_request(R::ROUTE, || HttpRequest::of::<R>(params), receive)
    }

    /// [`Self::repeated`] for a request that `request` makes for each attempt.
    pub(super) fn repeated_request<T>(
        &self,
        route: Route,
        request: impl Fn() -> Result<HttpRequest, ClientError>,
        mut receive: impl FnMut(Response) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let repeat = if route.is_repeatable() { RepeatPolicy::Always } else { RepeatPolicy::IfUnread };
        self.run_repeated(repeat, || receive(self.send(request()?)?))
    }

    /// Runs a request again as long as its server ends and another one replaces it. A daemon may be replaced while its
    /// socket stays with systemd: the next one gets the requests that the last one has not read.
    fn run_repeated<T>(
        &self,
        repeat: RepeatPolicy,
        mut run: impl FnMut() -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let Some(replaced) = &self.replaced else { return repeated_by_next_daemon(repeat, run) };
        for _ in 0..MAX_REPEATS {
            match run() {
                Err(error) if repeat.allows(&error) && replaced() => {}
                Err(ClientError::Closed) if replaced() => return Err(ClientError::ServerEnded),
                done => return done,
            }
        }
        run()
    }

    fn send(&self, request: HttpRequest) -> Result<Response, ClientError> {
        let stream = self.stream()?;
        if self.timeout.is_some() {
            stream.set_read_timeout(self.timeout)?;
            stream.set_write_timeout(self.timeout)?;
        }
        request.send(stream, &self.ids.next_id())
    }

    fn stream(&self) -> Result<UnixStream, ClientError> {
        match self.spare().take() {
            Some((since, stream)) if since.elapsed() < MAX_SPARE_AGE && !has_ended(&stream) => Ok(stream),
            _ => self.new_stream(),
        }
    }

    pub(super) fn spare(&self) -> MutexGuard<'_, Option<(Instant, UnixStream)>> {
        // The value is always consistent, so a poisoned lock is safe to use.
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn new_stream(&self) -> Result<UnixStream, ClientError> {
        (self.connector)().map_err(|reason| {
            let reason = match reason.downcast::<ErrorBody>() {
                Ok(body) => return ClientError::Daemon(body),
                Err(reason) => reason,
            };
            let socket = self.socket.clone();
            match reason.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    match sockets::evidence_of_service(Path::new(&socket)) {
                        Some(evidence) => ClientError::Unavailable { socket, evidence },
                        None => ClientError::NotRunning { socket },
                    }
                }
                _ => {
                    let hint = sockets::hint(Path::new(&socket), &reason);
                    ClientError::Connect { socket, reason, hint }
                }
            }
        })
    }
}

/// Runs a request again if the daemon has ended and its service manager keeps the socket, so that the next daemon gets
/// it. A daemon that ends twice while it runs a request probably ends because of it.
fn repeated_by_next_daemon<T>(
    repeat: RepeatPolicy,
    mut run: impl FnMut() -> Result<T, ClientError>,
) -> Result<T, ClientError> {
    let mut was_read = false;
    for _ in 0..MAX_DAEMONS {
        match run() {
            Err(ClientError::Closed) if repeat.allows(&ClientError::Closed) && !was_read => was_read = true,
            Err(ClientError::NotRunning { .. }) if was_read => return Err(ClientError::Closed),
            Err(error) if RepeatPolicy::IfUnread.allows(&error) => {}
            done => return done,
        }
    }
    run()
}

#[derive(Clone, Copy, Debug)]
enum RepeatPolicy {
    Always,
    /// Those that the server has certainly not read.
    IfUnread,
}

impl RepeatPolicy {
    fn allows(self, error: &ClientError) -> bool {
        match error {
            // Sent by the kernel when a socket is closed whose data was not read.
            ClientError::Io(error) => error.kind() == io::ErrorKind::ConnectionReset,
            ClientError::Closed => matches!(self, Self::Always),
            _ => false,
        }
    }
}

/// Servers that end one after the other while one request is tried. More would be a fault of the server.
const MAX_REPEATS: u32 = 100;

/// Daemons that end, one after the other, before they read a request.
const MAX_DAEMONS: u32 = 3;

/// Whether the daemon has closed an unused connection.
fn has_ended(stream: &UnixStream) -> bool {
    let peeked = recv(stream, &mut [0_u8], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    !matches!(peeked, Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR))
}
