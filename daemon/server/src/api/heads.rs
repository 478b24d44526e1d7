//! The headers and short texts of a model, read and sent part by part.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use blobd_client::protocol::heads::ModelHeads;
use blobd_store_format::reference::Reference;
use bytes::Bytes;
use serde::Serialize;
use tokio::sync::mpsc::{self, Sender};
use tracing::Instrument as _;

use super::Caller;
use super::body::{Answer, CutOff, Params, Reply, counted, parts_response};
use super::read_model::{Reads, read_model};
use crate::ops::{self, HeadContent, HeadsOutline};
use crate::permits::Permit;
use crate::state::Daemon;

/// How much is read and encoded at a time. A multiple of three, so that the base64 of the parts is that of the whole.
const PART: usize = 24 << 10;
const PART_BYTES: u64 = PART as u64;
const _: () = assert!(PART.is_multiple_of(3));

/// Memory of a response that is being sent: the bytes and the base64 of a part, the parts that wait, and copies in hyper.
const STREAM_BYTES: usize = 5 * PART;

/// More than the description of a file takes, without its name.
const FILE_BYTES: usize = 512;

pub(super) async fn heads(caller: &Caller, reference: Params<Reference>) -> Answer<ModelHeads> {
    let (named, policy, holder) = (reference.clone(), caller.policy(), caller.peer.description());
    let read = move |daemon: &Daemon| {
        policy.check_named(&daemon.store, &named)?;
        ops::heads(&daemon.store, &named, holder.clone())
    };
    let count =
        async |outline: &HeadsOutline, _: &_| caller.memory(outline_bytes(outline) + STREAM_BYTES).await;
    // The headers are read once to check them, and not kept.
    let (outline, _read, memory) = read_model(caller, &reference, Reads::Headers, read, count).await?;
    let (parts, waiting) = mpsc::channel(1);
    let stream = HeadsStream {
        daemon: Arc::clone(&caller.daemon),
        uid: caller.peer.uid,
        parts,
        memory: memory.map(Arc::new),
    };
    let send = async move {
        if let Err(Stop::Failed(error)) = stream.send(outline).await {
            tracing::warn!("heads: {error}");
            let _ = stream.parts.send(Err(CutOff)).await;
        }
    };
    tokio::spawn(send.in_current_span());
    Ok(Reply::of(parts_response(waiting)))
}

fn outline_bytes(outline: &HeadsOutline) -> usize {
    let texts = outline.heads.files.iter().map(|file| file.name.as_ref().map_or(0, String::len));
    let files = outline.heads.files.len().saturating_mul(FILE_BYTES);
    texts.fold(files, usize::saturating_add)
}

/// Why a response ends early.
enum Stop {
    ClientHasGone,
    Failed(ops::OpError),
}

struct HeadsStream {
    daemon: Arc<Daemon>,
    uid: u32,
    parts: Sender<Result<Bytes, CutOff>>,
    memory: Option<Arc<Permit>>,
}

impl HeadsStream {
    async fn send(&self, outline: HeadsOutline) -> Result<(), Stop> {
        let HeadsOutline { mut heads, contents, lease: _until_all_is_read } = outline;
        let files = std::mem::take(&mut heads.files);
        // The files are the last key, and the content is the last one of a file.
        let mut text = open_end(&heads, "]}")?;
        for (place, (file, content)) in files.iter().zip(&contents).enumerate() {
            if place > 0 {
                text.push(b',');
            }
            match content {
                None => text.extend(json(file)?),
                Some(content) => {
                    text.extend(open_end(file, "}")?);
                    text.extend_from_slice(b",\"content\":\"");
                    self.send_part(std::mem::take(&mut text)).await?;
                    self.send_content(*content).await?;
                    text.extend_from_slice(b"\"}");
                }
            }
            if text.len() >= PART {
                self.send_part(std::mem::take(&mut text)).await?;
            }
        }
        text.extend_from_slice(b"]}");
        self.send_part(text).await
    }

    async fn send_content(&self, content: HeadContent) -> Result<(), Stop> {
        let mut offset = 0;
        while offset < content.bytes {
            let read = move |daemon: &Daemon| {
                Ok(BASE64.encode(content.read(&daemon.store, offset, PART_BYTES)?).into_bytes())
            };
            let part = self.daemon.disk_work(self.uid, read).await.map_err(Stop::Failed)?;
            self.send_part(part).await?;
            offset = offset.saturating_add(PART_BYTES);
        }
        Ok(())
    }

    async fn send_part(&self, part: Vec<u8>) -> Result<(), Stop> {
        let part = counted(part, self.memory.clone());
        self.parts.send(Ok(part)).await.map_err(|_closed| Stop::ClientHasGone)
    }
}

/// The JSON of a value without its end.
fn open_end(value: &impl Serialize, end: &str) -> Result<Vec<u8>, Stop> {
    let mut json = json(value)?;
    json.truncate(json.len().saturating_sub(end.len()));
    Ok(json)
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, Stop> {
    serde_json::to_vec(value).map_err(|error| Stop::Failed(ops::OpError::Internal(error.to_string())))
}
