//! Descriptors whose last close blocks: TCP sockets that linger over data that their peer never reads,
//! passed at every place of a request where descriptors do not belong.

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
use crate::ground::{Ground, request};

/// How long a close may block.
const LINGER: Duration = Duration::from_secs(12);
/// The kernel's least; it takes somewhat more.
const SMALL_BUFFER: usize = 4096;
/// From one request to the next, of each kind.
const PERIOD: Duration = Duration::from_millis(400);
/// Peers that do not read: of those that linger still, and of no more.
const PEERS: usize = 64;
/// How long an answer is waited for; it is not what this is about.
const GLANCE: Duration = Duration::from_millis(200);

/// Where in a connection the descriptor is passed.
#[derive(Clone, Copy, Debug)]
enum Place {
    FirstByte,
    Head,
    Body,
    AfterRequest,
    BeforeClose,
    Frame,
}

const PLACES: [Place; 6] =
    [Place::FirstByte, Place::Head, Place::Body, Place::AfterRequest, Place::BeforeClose, Place::Frame];

pub(crate) fn prepare(ground: &Ground) -> Outcome<Begin> {
    let ground = ground.clone();
    Ok(Box::new(move || {
        for place in PLACES {
            let mut sockets = Sockets::listen()?;
            ground.repeat(PERIOD, move |ground| {
                let socket = sockets.make()?;
                match pass(ground, place, &socket) {
                    Ok(()) => ground.count("passed"),
                    Err(_refused) => {
                        ground.count("refused");
                        // This close is the last then, and must not block the attacker.
                        set_socket_linger(&socket, None)?;
                    }
                }
                Ok(())
            });
        }
        Ok(())
    }))
}

fn pass(ground: &Ground, place: Place, socket: &TcpStream) -> Outcome<()> {
    let (get, fds) = (request("GET /v1/version HTTP/1.1\r\nConnection: close", ""), [socket.as_fd()]);
    let post = request("POST /v1/pull/plan HTTP/1.1\r\nConnection: close", &"x".repeat(64));
    // The descriptor comes with the first byte of the second part.
    let (before, with) = match place {
        Place::FirstByte => ("", get.as_str()),
        Place::Head => get.split_at(get.len() / 2),
        Place::Body => post.split_at(post.len() - 32),
        Place::AfterRequest => (get.as_str(), "x"),
        Place::BeforeClose => ("", "G"),
        Place::Frame => {
            let stream = ground.upgrade("/v1/import", r#"{"file_name":"socket.gguf"}"#)?;
            return crate::ground::pass_file(&stream, socket.as_fd());
        }
    };
    let mut stream: UnixStream = ground.connect()?;
    stream.write_all(before.as_bytes())?;
    let sent = send_message(&stream, with.as_bytes(), &fds)?;
    stream.write_all(with.as_bytes().get(sent..).unwrap_or_default())?;
    if !matches!(place, Place::BeforeClose) {
        stream.set_read_timeout(Some(GLANCE))?;
        // Whatever the answer is.
        let _ = stream.read(&mut [0; 4096]);
    }
    Ok(())
}

/// Connected pairs, one end of which is never read.
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

    /// A socket with more to send than its peer takes.
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
