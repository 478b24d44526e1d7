//! Many clients at a time, slow ones, and too many.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;

use blobd_store_format::digest::Digest;
use blobd_tests::memory::status_bytes;
use blobd_tests::model::ModelFile;
use blobd_tests::wait::{DEADLINE, eventually};
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

use super::{Answer, Site};

/// Connects from an address of its own, with a small buffer, and requests a file.
fn request_from(client: u8, site: SocketAddr, path: &str) -> TcpStream {
    let stream: OwnedFd = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    set_socket_recv_buffer_size(&stream, 4 << 10).unwrap();
    bind(&stream, &SocketAddrV4::new(Ipv4Addr::new(127, 0, 1, client), 0)).unwrap();
    connect(&stream, &site).unwrap();
    let mut stream = TcpStream::from(stream);
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {site}\r\nConnection: close\r\n\r\n").unwrap();
    stream
}

#[test]
fn two_hundred_slow_clients_take_little_memory_and_delay_nobody() {
    let site = Site::start();
    let weights = site.add(&ModelFile::dense_of(1, 4, 1024), &["tiny"]);
    assert!(weights.len() > 8 << 20, "{}", weights.len());
    let path = format!("/v2/tiny/blobs/{}", Digest::of(&weights));
    assert!(site.get(&path).body == weights);
    let before = status_bytes(site.daemon.pid(), "RssAnon");
    let mut slow: Vec<TcpStream> =
        (1..=200).map(|client| request_from(client, site.address, &path)).collect();
    for stream in &mut slow {
        // Each receives a part, and then nothing more.
        stream.read_exact(&mut [0; 8 << 10]).unwrap();
    }
    // Somebody else reads a whole file, and another opens a model on the socket.
    assert!(site.get(&path).body == weights);
    site.daemon.client().models().unwrap();
    let grown = status_bytes(site.daemon.pid(), "RssAnon").saturating_sub(before);
    assert!(grown < 100 << 20, "{grown} bytes for 200 clients");
    // They all go on where they were.
    for mut stream in slow.drain(..).take(3) {
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert!(rest.ends_with(&weights[weights.len() / 2..]));
    }
    eventually("nothing is read any more", || {
        site.daemon.client().models().is_ok() && site.daemon.open_descriptors() < 100
    });
}

#[test]
fn client_with_too_many_connections_is_told_so_and_others_are_served() {
    let site = Site::start_with("max_connections_per_client = 2");
    let weights = site.add(&ModelFile::dense_of(1, 4, 1024), &["tiny"]);
    let path = format!("/v2/tiny/blobs/{}", Digest::of(&weights));
    let mut held: Vec<TcpStream> = (0..2).map(|_| request_from(1, site.address, &path)).collect();
    for stream in &mut held {
        stream.read_exact(&mut [0; 1 << 10]).unwrap();
    }
    let answer_to = |client| {
        let mut bytes = Vec::new();
        request_from(client, site.address, "/v2/").read_to_end(&mut bytes).unwrap();
        Answer::parse(&bytes)
    };
    let refused = answer_to(1);
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert_eq!(answer_to(2).status, 200);
    drop(held);
    eventually("its connections have ended", || answer_to(1).status == 200);
}

#[test]
fn connection_serves_many_requests() {
    let site = Site::start();
    let mut stream = TcpStream::connect(site.address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    for _ in 0..50 {
        write!(stream, "GET /v2/ HTTP/1.1\r\nHost: {}\r\n\r\n", site.address).unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n{}") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.extend(byte);
        }
        assert!(head.starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", String::from_utf8_lossy(&head));
    }
}
