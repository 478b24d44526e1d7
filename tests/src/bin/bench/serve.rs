//! Models for other machines: the speed of one client that downloads a file, compared with a server that only sends it, and the
//! time of an open on the socket while 200 clients read.

use std::io::{ErrorKind, Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use blobd_store_format::reference::Reference;
use blobd_tests::model::{Dimensions, ModelFile};

use crate::Setup;
use crate::measure::{Daemon, Outcome, Series, gib, mib, timed};
use crate::pull::{Offer, fetch, has_curl};

const CLIENTS: u64 = 200;
/// Of these clients, every fourth takes its data slowly.
const SLOW: u64 = 4;
const OPENS_PER_ROUND: usize = 30;

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    if !has_curl()? {
        println!("\nserve: skipped: curl is not installed");
        return Ok(());
    }
    let directory = tempfile::tempdir_in(&setup.tmpfs)?;
    let file = directory.path().join("model.gguf");
    let dimensions = Dimensions { block_count: setup.blocks, ..Dimensions::LLAMA3_8B };
    let size = ModelFile::llama("bench", dimensions).write_file(&file)?;
    println!("\nserve {:.2} GiB to clients on this machine", gib(size));
    let offer = Offer::start(&file)?;
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let config = directory.path().join("config.toml");
    std::fs::write(&config, format!("[serve]\nlisten = \"{address}\"\nmax_connections_per_client = 256\n"))?;
    let daemon = Daemon::start_with(&setup.blobd, &setup.disk, Some(&config))?;
    daemon.import(&file)?;
    let path = format!("/v2/library/bench/blobs/{}", offer.layer());
    let nowhere = Path::new("/dev/null");
    let (mut plain, mut served) = (Series::default(), Series::default());
    for _ in 0..setup.rounds {
        plain.push(timed(|| fetch(&offer.layer_url(), nowhere))?.0);
        served.push(timed(|| fetch(&format!("http://{address}{path}"), nowhere))?.0);
    }
    println!("  plain server               {:8.2} GiB/s", gib(size) / plain.seconds());
    println!("  blobd                      {:8.2} GiB/s", gib(size) / served.seconds());
    println!("  speed against plain server {:8.2}", 1.0 / plain.ratio(&served));
    opens_while_clients_read(setup, &daemon, address, &path, size)
}

fn opens_while_clients_read(
    setup: &Setup,
    daemon: &Daemon,
    address: SocketAddr,
    path: &str,
    size: u64,
) -> Outcome<()> {
    let opens = || -> Outcome<Series> {
        let mut opens = Series::default();
        for _ in 0..setup.rounds * OPENS_PER_ROUND {
            opens.push(timed(|| open(daemon))?.0);
        }
        Ok(opens)
    };
    let quiet = opens()?;
    let (is_over, received) = (AtomicBool::new(false), AtomicU64::new(0));
    let (loud, took) = std::thread::scope(|scope| -> Outcome<_> {
        for number in 0..CLIENTS {
            let (is_over, received) = (&is_over, &received);
            scope.spawn(move || {
                // They stand for other machines, whose processors are not this one's.
                let _ = rustix::process::nice(19);
                while !is_over.load(Ordering::Relaxed) {
                    // A connection may be refused or end early; then there is another.
                    let _ = read_part(address, path, number, size, (is_over, received));
                }
            });
        }
        std::thread::sleep(Duration::from_secs(2));
        let loud = timed(opens);
        is_over.store(true, Ordering::Relaxed);
        let (took, loud) = loud?;
        Ok((loud, took))
    })?;
    let (quiet, loud) = (quiet.seconds() * 1e3, loud.seconds() * 1e3);
    let speed = gib(received.load(Ordering::Relaxed)) / (took.as_secs_f64() + 2.0);
    println!("  open, nobody reads         {quiet:8.2} ms median");
    println!("  open, {CLIENTS} clients read      {loud:8.2} ms median, they read {speed:.2} GiB/s");
    println!("  time against quiet         {:8.2}    (limit 2)", loud / quiet);
    println!("  peak RSS of the daemon     {:8.1} MiB (limit 128)", mib(daemon.peak_rss_bytes()?));
    Ok(())
}

fn open(daemon: &Daemon) -> Outcome<()> {
    let reference: Reference = "bench".parse()?;
    let model = daemon.client()?.open(&reference)?;
    drop(model.map_all()?);
    Ok(())
}

/// Requests a range of the file, at another place for each client.
fn read_part(
    address: SocketAddr,
    path: &str,
    number: u64,
    size: u64,
    (is_over, received): (&AtomicBool, &AtomicU64),
) -> std::io::Result<()> {
    const PART: u64 = 16 << 20;
    let start = (size / CLIENTS).saturating_mul(number);
    let end = start.saturating_add(PART).min(size).saturating_sub(1);
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let range = format!("Range: bytes={start}-{end}");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n{range}\r\nConnection: close\r\n\r\n")?;
    let mut buffer = vec![0; 64 << 10];
    while !is_over.load(Ordering::Relaxed) {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(bytes) => drop(received.fetch_add(bytes as u64, Ordering::Relaxed)),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
        if number.is_multiple_of(SLOW) {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(())
}
