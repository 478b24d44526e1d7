//! Descriptors whose last close blocks: TCP sockets with `SO_LINGER` and data that their peer never reads.
//! They are passed at every place of a request where no descriptor is expected.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blobd_client::protocol::connection::send_message;
use rustix::net::sockopt::{set_socket_linger, set_socket_recv_buffer_size, set_socket_send_buffer_size};

use super::Begin;
use crate::Outcome;
use crate::context::{AttackContext, request};

/// How long a close may block.
const LINGER: Duration = Duration::from_secs(12);
/// The kernel's minimum; it allocates somewhat more.
const SMALL_BUFFER: usize = 4096;
/// From one request to the next, of each kind.
const PERIOD: Duration = Duration::from_millis(400);
/// The most peers that are kept open without reading: enough for all sockets that still linger.
const PEERS: usize = 64;
/// How long the attacker waits for a response, which it does not need.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(200);

/// Where in a connection the descriptor is passed.
#[derive(Clone, Copy, Debug)]
enum SendPoint {
    FirstByte,
    Head,
    Body,
    AfterRequest,
    BeforeClose,
    Frame,
}

const SEND_POINTS: [SendPoint; 6] = [
    SendPoint::FirstByte,
    SendPoint::Head,
    SendPoint::Body,
    SendPoint::AfterRequest,
    SendPoint::BeforeClose,
    SendPoint::Frame,
];

pub(crate) fn prepare(context: &AttackContext) -> Outcome<Begin> {
    let context = context.clone();
    Ok(Box::new(move || {
        for place in SEND_POINTS {
            let mut sockets = Sockets::listen()?;
            context.repeat(PERIOD, move |context| {
                let socket = sockets.make()?;
                match pass(context, place, &socket) {
                    Ok(()) => context.count("passed"),
                    Err(_refused) => {
                        context.count("refused");
                        // The daemon has no copy, so that this close is the last and must not block.
                        set_socket_linger(&socket, None)?;
                    }
                }
                Ok(())
            });
        }
        Ok(())
    }))
}

fn pass(context: &AttackContext, place: SendPoint, socket: &TcpStream) -> Outcome<()> {
    let (get, fds) = (request("GET /v1/version HTTP/1.1\r\nConnection: close", ""), [socket.as_fd()]);
    let post = request("POST /v1/pull/plan HTTP/1.1\r\nConnection: close", &"x".repeat(64));
    // The descriptor comes with the first byte of the second part.
    let (before, with) = match place {
        SendPoint::FirstByte => ("", get.as_str()),
        SendPoint::Head => get.split_at(get.len() / 2),
        SendPoint::Body => post.split_at(post.len() - 32),
        SendPoint::AfterRequest => (get.as_str(), "x"),
        SendPoint::BeforeClose => ("", "G"),
        SendPoint::Frame => {
            let stream = context.upgrade("/v1/import", r#"{"file_name":"socket.gguf"}"#)?;
            return crate::context::pass_file(&stream, socket.as_fd());
        }
    };
    let mut stream: UnixStream = context.connect()?;
    stream.write_all(before.as_bytes())?;
    let sent = send_message(&stream, with.as_bytes(), &fds)?;
    stream.write_all(with.as_bytes().get(sent..).unwrap_or_default())?;
    if !matches!(place, SendPoint::BeforeClose) {
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        // The response does not matter.
        let _ = stream.read(&mut [0; 4096]);
    }
    Ok(())
}

/// Connected pairs of sockets, of which one end never reads.
struct Sockets {
    listener: TcpListener,
    peers: VecDeque<TcpStream>,
}

impl Sockets {
    fn listen() -> Outcome<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        set_socket_recv_buffer_size(&listener, SMALL_BUFFER)?;
        Ok(Self { listener, peers: VecDeque::new() })
    }

    /// A socket with more unsent data than its peer's buffer holds.
    fn make(&mut self) -> Outcome<TcpStream> {
        let mut socket = TcpStream::connect(self.listener.local_addr()?)?;
        self.peers.push_back(self.listener.accept()?.0);
        if self.peers.len() > PEERS {
            self.peers.pop_front();
        }
        set_socket_send_buffer_size(&socket, SMALL_BUFFER)?;
        socket.set_nonblocking(true)?;
        while socket.write(&[0; 1024]).is_ok() {}
        socket.set_nonblocking(false)?;
        set_socket_linger(&socket, Some(LINGER))?;
        Ok(socket)
    }
}
