//! An import: the client passes an open file, the daemon tells how far it is.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blobd_client::protocol::frame::Frame;
use blobd_client::protocol::request::ImportParams;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::connection::{FrameStream, SessionError, unexpected};
use super::peer::Peer;
use crate::ops::{self, OpError};
use crate::state::Daemon;

/// How often the client hears how far its import is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Serves one import. When the client goes, the import stops and leaves nothing behind.
pub(crate) async fn serve_import(
    daemon: Arc<Daemon>,
    mut stream: FrameStream,
    peer: Peer,
    params: ImportParams,
) {
    let name = params.file_name.clone();
    if let Err(error) = import(&daemon, &mut stream, params).await
        && let Some(left_out) = daemon.limits.log.admit(peer.uid)
    {
        tracing::info!("{}: import of {name:?}: {error}{left_out}", peer.description());
    }
}

async fn import(
    daemon: &Arc<Daemon>,
    stream: &mut FrameStream,
    params: ImportParams,
) -> Result<(), SessionError> {
    let file = receive_file(stream).await?;
    let cancelled = Arc::new(AtomicBool::new(false));
    let _cancel = CancelOnDrop(Arc::clone(&cancelled));
    let (report, mut progress) = watch::channel((0, 0));
    let stop = Arc::clone(&cancelled);
    let work = async {
        let room = Arc::clone(&daemon.intakes).acquire_owned().await;
        let import = move |daemon: &Daemon| {
            // Given back when the work is over, not when its client has gone.
            let _room = room;
            let mut report = |completed, total| {
                let _ = report.send((completed, total));
            };
            ops::import(&daemon.store, &params, &file, &stop, &mut report)
        };
        daemon.blocking(import).await
    };
    tokio::pin!(work);
    let mut ticks = interval(PROGRESS_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let done = loop {
        tokio::select! {
            done = &mut work => break done,
            () = stream.closed() => {
                cancelled.store(true, Ordering::Relaxed);
                let _ = work.await;
                return Err(SessionError::Closed);
            }
            _ = ticks.tick() => {
                let (completed, total) = *progress.borrow_and_update();
                stream.send_frame(&Frame::Progress { completed, total }).await?;
            }
        }
    };
    stream.send_frame(&answer(done)).await
}

/// Stops the import on every way out: a frame that cannot be sent ends the session too.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn answer(done: Result<blobd_client::protocol::response::Imported, OpError>) -> Frame {
    match done {
        Ok(imported) => Frame::Imported(imported),
        Err(error) => Frame::Error(error.body()),
    }
}

/// The first frame must bring exactly one descriptor.
async fn receive_file(stream: &mut FrameStream) -> Result<File, SessionError> {
    match stream.receive().await? {
        Frame::Fds { first: 0, count: 1 } => {}
        frame => return Err(unexpected(&frame, "one file")),
    }
    let fd = stream.take_fds().pop_front();
    fd.map(File::from).ok_or(SessionError::Unexpected { found: "no descriptor".into(), expected: "one file" })
}
