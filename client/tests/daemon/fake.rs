// A fake daemon with one model, which follows `docs/PROTOCOL.md`. Its fields are public, so that a
// test can make it send wrong data. (No `//!` here: the crate's front page includes this
// file in its example.)

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use blobd_client::Client;
use blobd_client::protocol::connection::Connection;
use blobd_client::protocol::frame::{Frame, encode_pieces, encode_tensors};
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_client::protocol::response::{OpenHead, OpenLayer, OpenPiece, TensorLocation};
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::digest::Digest;
use blobd_store_format::tensor::TensorFormat;

pub(crate) fn bytes_of(seed: u8, length: usize) -> Vec<u8> {
    (0..=250u8).cycle().skip(seed.into()).take(length).collect()
}

/// A client of a daemon that serves every request with `response`, each on a thread of its own.
pub(crate) fn client_of(response: impl Fn(Call) + Clone + Send + Sync + 'static) -> Client {
    Client::with_connector(Arc::new(move || {
        let (ours, theirs) = UnixStream::pair()?;
        let response = response.clone();
        thread::spawn(move || Call::read(theirs).map(response));
        Ok(ours)
    }))
}

/// Serves every request to a socket at this path.
pub(crate) fn listen(socket: &Path, response: impl Fn(Call) + Send + 'static) {
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            Call::read(stream.unwrap()).map(&response);
        }
    });
}

/// A request that has been read.
pub(crate) struct Call {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    pub(crate) stream: UnixStream,
}

impl Call {
    /// Reads a request; `None` if the peer closes the connection without sending one.
    pub(crate) fn read(mut stream: UnixStream) -> Option<Self> {
        let mut bytes = Vec::new();
        let mut byte = [0];
        while !bytes.ends_with(b"\r\n\r\n") {
            stream.read_exact(&mut byte).ok()?;
            bytes.push(byte[0]);
        }
        let head = String::from_utf8(bytes).unwrap().to_lowercase();
        let length = head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        stream.read_exact(&mut body).unwrap();
        Some(Self { head, body, stream })
    }

    /// The first line of the request, such as `get /v1/version http/1.1`.
    pub(crate) fn line(&self) -> &str {
        self.head.lines().next().unwrap()
    }

    /// Responds and closes; a client that has already disconnected does not matter.
    pub(crate) fn respond(mut self, status: u16, body: &str) {
        let length = body.len();
        let text = format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n\r\n{body}");
        let _client_gone = self.stream.write_all(text.as_bytes());
    }

    /// Responds in chunks, and ends the body if it is `complete`.
    pub(crate) fn stream_chunks(mut self, chunks: &[&str], complete: bool) {
        let mut text = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
        for chunk in chunks {
            text += &format!("{:x}\r\n{chunk}\r\n", chunk.len());
        }
        if complete {
            text += "0\r\n\r\n";
        }
        self.stream.write_all(text.as_bytes()).unwrap();
    }

    /// Switches to frames.
    pub(crate) fn upgrade(mut self) -> Connection {
        assert!(self.head.contains("connection: upgrade\r\nupgrade: blobd-fd/1\r\n"), "{}", self.head);
        let head = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: blobd-fd/1\r\n\r\n";
        self.stream.write_all(head.as_bytes()).unwrap();
        Connection::new(self.stream)
    }
}

/// A model: the daemon's description of it, and the descriptors that the daemon sends.
pub(crate) struct FakeModel {
    pub(crate) head: OpenHead,
    pub(crate) pieces: Vec<Vec<OpenPiece>>,
    pub(crate) tensors: Vec<TensorLocation>,
    pub(crate) files: Vec<Arc<File>>,
}

impl FakeModel {
    /// A model with one split layer that has no tensors yet.
    pub(crate) fn new() -> Self {
        let mut model = Self {
            head: OpenHead {
                name: "tiny:latest".to_owned(),
                digest: Digest::of(b"manifest"),
                layers: Vec::new(),
                tensor_count: 0,
                fd_count: 0,
            },
            pieces: Vec::new(),
            tensors: Vec::new(),
            files: Vec::new(),
        };
        model.add_layer(MediaType::OLLAMA_MODEL, None, 0);
        model
    }

    /// Adds a layer of `size` bytes; returns its number.
    pub(crate) fn add_layer(&mut self, media_type: &str, fd: Option<u32>, size: u64) -> usize {
        // Each layer is a different file.
        let digest = Digest::of(format!("{media_type} {}", self.pieces.len()).as_bytes());
        let media_type = MediaType::new(media_type);
        let layer = OpenLayer {
            media_type,
            name: None,
            digest,
            size,
            fd,
            format: TensorFormat::Gguf,
            header: None,
            piece_count: 0,
        };
        self.head.layers.push(layer);
        self.pieces.push(Vec::new());
        self.pieces.len() - 1
    }

    /// Adds a file with these bytes; returns its descriptor's number.
    pub(crate) fn add_file(&mut self, bytes: &[u8]) -> u32 {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        self.files.push(Arc::new(file));
        self.head.fd_count += 1;
        self.head.fd_count - 1
    }

    /// Adds an F32 tensor of the first layer, at `offset` in the file of a descriptor.
    pub(crate) fn add_tensor(&mut self, name: &str, fd: Option<u32>, offset: u64, size: u64) {
        let (name, type_name, shape) = (name.to_owned(), "F32".to_owned(), vec![size / 4]);
        let tensor = TensorLocation { name, type_name, shape, layer: 0, fd, offset, size, experts: None };
        self.tensors.push(tensor);
        self.head.tensor_count += 1;
    }

    /// Sets what the first layer is made of.
    pub(crate) fn set_pieces(&mut self, pieces: Vec<OpenPiece>, size: u64) {
        self.head.layers[0].piece_count = u64::try_from(pieces.len()).unwrap();
        self.head.layers[0].size = size;
        self.pieces[0] = pieces;
    }

    /// A client of a daemon with this model.
    pub(crate) fn client(self) -> Client {
        let model = Arc::new(self);
        client_of(move |call| model.serve(call))
    }

    /// Sends the whole response to an open, then waits for the client to end the lease.
    pub(crate) fn serve(&self, call: Call) {
        let params: OpenParams = serde_json::from_slice(&call.body).unwrap();
        let mut connection = call.upgrade();
        self.send_tables(&mut connection, &params);
        self.send_files(&mut connection);
        // The lease: ends when the client closes.
        let _closed = connection.receive();
    }

    /// Sends everything up to the descriptors.
    pub(crate) fn send_tables(&self, connection: &mut Connection, params: &OpenParams) {
        let chosen = |tensor: &&TensorLocation| match &params.tensors {
            TensorSelection::Prefix(prefix) => tensor.name.starts_with(prefix),
            TensorSelection::None => false,
            _ => true,
        };
        let tensors: Vec<_> = self.tensors.iter().filter(chosen).collect();
        let mut head = self.head.clone();
        head.tensor_count -= u64::try_from(self.tensors.len() - tensors.len()).unwrap();
        let mut bytes = Frame::Open(head).encode().unwrap();
        for (layer, pieces) in (0..).zip(&self.pieces) {
            encode_pieces(layer, pieces, &mut bytes).unwrap();
        }
        encode_tensors(tensors, &mut bytes).unwrap();
        connection.send_bytes(&bytes).unwrap();
    }

    /// Sends the descriptors in acknowledged batches; stops when the client does.
    pub(crate) fn send_files(&self, connection: &mut Connection) {
        let mut first = 0;
        for batch in self.files.chunks(64) {
            let count = u32::try_from(batch.len()).unwrap();
            let fds: Vec<_> = batch.iter().map(|file| file.as_fd()).collect();
            let sent = connection.send(&Frame::Fds { first, count }, &fds);
            first += count;
            match sent.and_then(|()| connection.receive()) {
                Ok(response) => assert_eq!(response, Frame::Ack { received: first }),
                Err(_client_gone) => return,
            }
        }
    }
}
