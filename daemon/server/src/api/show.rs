//! Requests that describe one model.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::fit::{FitParams, FitReport};
use blobd_client::protocol::response::{ModelDetails, ModelHeads};
use blobd_client::protocol::route;
use blobd_client::protocol::signatures::{SignatureReport, SignaturesParams};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use bytes::Bytes;
use serde::Serialize;
use tokio::sync::mpsc::{self, Sender};
use tracing::Instrument as _;

use super::Caller;
use super::answer::{json_length, json_of, reduced};
use super::body::{
    Answer, IncompleteResponse, Params, Reply, counted, details_response, parts_response, raw_response,
};
use super::details::{DetailsStream, STREAM_BYTES};
use super::read_model::{Reads, read_model};
use crate::large_models::{ReadPermit, ResponseMemory};
use crate::ops::{self, HeadContent, HeadsOutline};
use crate::permits::Permit;
use crate::state::Daemon;

/// A description that is sent at once or part by part.
enum Described {
    Whole(Vec<u8>),
    Parts(Box<DetailsStream>),
}

impl Described {
    fn bytes(&self) -> usize {
        match self {
            Self::Whole(json) => json.len(),
            Self::Parts(details) => details.head_bytes() + STREAM_BYTES,
        }
    }
}

pub(super) async fn show(caller: &Caller, reference: Params<Reference>) -> Answer<ModelDetails> {
    let (named, policy) = (reference.clone(), caller.policy());
    let read = move |daemon: &Daemon| {
        let mut shown = ops::outline(&daemon.store, &named)?;
        let decision = policy.decision(&daemon.store, &named)?;
        if !decision.allowed {
            // It can have whole texts, such as the template.
            shown.details.metadata.clear();
        }
        shown.details.policy = Some(decision);
        let mut details = DetailsStream::new(shown);
        Ok(match details.whole() {
            Some(json) => Described::Whole(json),
            None => Described::Parts(Box::new(details)),
        })
    };
    let count = async |described: &Described, _: &_| caller.memory(described.bytes()).await;
    let (described, permit, memory) = read_model(caller, &reference, Reads::Headers, read, count).await?;
    Ok(Reply::new(match described {
        Described::Whole(json) => raw_response(json, memory),
        Described::Parts(details) => details_response(details.within(permit), memory),
    }))
}

/// The memory that the model needs to run, from its headers and the settings in the query.
pub(super) async fn fit(caller: &Caller, params: Params<(Reference, FitParams)>) -> Answer<FitReport> {
    let (reference, params) = (*params).clone();
    let (named, policy, holder) = (reference.clone(), caller.policy(), caller.peer.description());
    let read = move |daemon: &Daemon| {
        policy.check_named(&daemon.store, &named)?;
        match ops::fit(&daemon.store, &named, &params, holder.clone())? {
            Ok(report) => json_of(&report, json_length(&report)?).map(Ok),
            Err(refused) => Ok(Err(refused)),
        }
    };
    let count = async |json: &Result<Vec<u8>, ErrorBody>, model: &ReadPermit| {
        if let Some(response) = model.claim_response() {
            return Ok(Some(ResponseMemory::WithModel { _response: response }));
        }
        let permit = caller.memory(json.as_ref().map_or(0, Vec::len)).await?;
        Ok(permit.map(|permit| ResponseMemory::Own { _permit: permit }))
    };
    let (json, _read, memory) = read_model(caller, &reference, Reads::AllHeaders, read, count).await?;
    Ok(Reply::new(raw_response(json?, memory)))
}

pub(super) async fn signatures(caller: &Caller, params: Params<SignaturesParams>) -> Answer<SignatureReport> {
    let policy = caller.policy();
    caller.respond(move |daemon| ops::signatures(&daemon.store, &policy, &params)).await
}

/// Memory for each byte of a manifest: the text, and the parsed values.
const BYTES_PER_MANIFEST_BYTE: usize = 4;

pub(super) async fn manifest(
    caller: &Caller,
    reference: Params<Reference>,
) -> Result<Reply<route::Bytes<Manifest>>, ErrorBody> {
    let daemon = &caller.daemon;
    let named = reference.clone();
    let weigh = move |daemon: &Daemon| Ok(daemon.store.names().manifest_length(&named)?);
    let length = daemon.blocking(caller.turn().await, weigh).await?;
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let memory = caller.memory(length.saturating_mul(BYTES_PER_MANIFEST_BYTE)).await?;
    let read = move |daemon: &Daemon| {
        Ok(daemon.store.names().manifest(&daemon.store.names().resolve(&reference)?)?.raw().to_vec())
    };
    let json = daemon.blocking(caller.turn().await, read).await?;
    let memory = reduced(memory, json.len());
    Ok(Reply::new(raw_response(json, memory)))
}

/// Bytes that are read and encoded at a time. A multiple of three, so that the base64 of the parts is that of the
/// whole.
const PART: usize = 24 << 10;
const PART_BYTES: u64 = PART as u64;
const _: () = assert!(PART.is_multiple_of(3));

/// Memory of a response while it is sent: the bytes and the base64 of a part, the parts that wait, and copies in hyper.
const HEADS_STREAM_BYTES: usize = 5 * PART;

/// More than the description of a file needs, without its name.
const FILE_BYTES: usize = 512;

pub(super) async fn heads(caller: &Caller, reference: Params<Reference>) -> Answer<ModelHeads> {
    let (named, policy, holder) = (reference.clone(), caller.policy(), caller.peer.description());
    let read = move |daemon: &Daemon| {
        policy.check_named(&daemon.store, &named)?;
        ops::heads(&daemon.store, &named, holder.clone())
    };
    let count = async |outline: &HeadsOutline, _: &_| {
        caller.memory(outline_bytes(outline) + HEADS_STREAM_BYTES).await
    };
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
            let _ = stream.parts.send(Err(IncompleteResponse)).await;
        }
    };
    tokio::spawn(send.in_current_span());
    Ok(Reply::new(parts_response(waiting)))
}

fn outline_bytes(outline: &HeadsOutline) -> usize {
    let texts = outline.heads.files.iter().map(|file| file.name.as_ref().map_or(0, String::len));
    let files = outline.heads.files.len().saturating_mul(FILE_BYTES);
    texts.fold(files, usize::saturating_add)
}

enum Stop {
    ClientHasGone,
    Failed(ops::OpError),
}

struct HeadsStream {
    daemon: Arc<Daemon>,
    uid: u32,
    parts: Sender<Result<Bytes, IncompleteResponse>>,
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

fn open_end(value: &impl Serialize, end: &str) -> Result<Vec<u8>, Stop> {
    let mut json = json(value)?;
    json.truncate(json.len().saturating_sub(end.len()));
    Ok(json)
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, Stop> {
    serde_json::to_vec(value).map_err(|error| Stop::Failed(ops::OpError::Internal(error.to_string())))
}
