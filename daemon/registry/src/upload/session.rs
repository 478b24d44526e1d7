//! One upload at a registry: its address, which changes with every response, and the requests that send bytes to it.

use std::ops::Range;
use std::pin::pin;

use blobd_store_format::digest::Digest;
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderValue, RANGE};
use hyper::{Method, StatusCode};
use tokio::sync::mpsc;
use tokio::time::timeout;
use url::Url;

use super::body::UploadBody;
use super::{Destination, STORED, UploadContent, UploadError};
use crate::Shared;
use crate::address_scope::AddressScope;
use crate::auth::Outcome;
use crate::connect_failure::ConnectFailure;
use crate::error::{RegistryError, Result};
use crate::origin::host_of;
use crate::request::{MAX_REDIRECTS, Response, Target, is_redirect, redirect_target};
use crate::token_cache::Authorization;
use crate::transport::Request;

/// The address of an upload.
#[derive(Clone, Debug)]
pub(super) struct Session {
    url: Url,
    /// The narrowest scope of its address.
    reach: AddressScope,
}

impl Session {
    /// The upload that a response names.
    pub(super) fn opened_by(response: &Response) -> Result<Self> {
        let url = redirect_target(&response.url, response.headers()).map_err(|reason| {
            RegistryError::unusable(response.host(), format!("address of the upload refused: {reason}"))
        })?;
        Ok(Self { url, reach: response.reach })
    }

    fn target<'d>(
        &self,
        destination: &'d Destination,
        method: Method,
        accepted: &'static [StatusCode],
    ) -> Target<'d> {
        Target { reach: self.reach, ..destination.target_at(method, self.url.clone(), accepted) }
    }

    /// Where the upload goes on, and how many bytes the registry has kept; `None` if that is not certain.
    pub(super) async fn status(
        &self,
        shared: &Shared,
        destination: &Destination,
    ) -> Result<Option<(Self, u64)>> {
        let target = self.target(destination, Method::GET, STORED);
        let response = shared.get(&target).await?;
        let kept = response.headers().get(RANGE).and_then(|range| kept_bytes(range.to_str().ok()?));
        Ok(kept.and_then(|kept| Some((Self::opened_by(&response).ok()?, kept))))
    }

    /// A request that appends a part.
    pub(super) fn patch<'d>(&self, destination: &'d Destination, part: &Range<u64>) -> Target<'d> {
        const ACCEPTED: &[StatusCode] = &[StatusCode::ACCEPTED, StatusCode::CREATED, StatusCode::NO_CONTENT];
        let target = self.target(destination, Method::PATCH, ACCEPTED);
        let range = format!("{}-{}", part.start, part.end.saturating_sub(1));
        match HeaderValue::try_from(range) {
            Ok(range) => target.with(CONTENT_RANGE, range),
            Err(_never) => target,
        }
    }

    /// A request that appends the last part, or nothing, and ends the upload.
    pub(super) fn put<'d>(&self, destination: &'d Destination, digest: Digest) -> Target<'d> {
        let mut target = self.target(destination, Method::PUT, STORED);
        // Keeps the query, which names the upload at many registries.
        target.url.query_pairs_mut().append_pair("digest", &digest.to_string());
        target
    }
}

/// The bytes in a `Range: 0-4999999`. `0-0` is what registries say of nothing and of one byte.
fn kept_bytes(range: &str) -> Option<u64> {
    let (first, last) = range.trim().trim_start_matches("bytes=").split_once('-')?;
    let last: u64 = last.parse().ok()?;
    (first == "0" && last > 0).then(|| last.saturating_add(1))
}

/// The bytes of a file that wait for the connection.
const CHUNKS_WAITING: usize = 4;

impl Shared {
    /// Sends a part of a file as the body of a request. Repeats it once with credentials if the registry requires them, and
    /// follows redirects. `sent` is how many bytes the connection has taken.
    pub(super) async fn send_content<C: UploadContent>(
        &self,
        mut target: Target<'_>,
        part: Range<u64>,
        content: &mut C,
        sent: &mut u64,
    ) -> Result<Response, UploadError<C::Error>> {
        let (mut redirects, mut is_authorized) = (0, false);
        loop {
            let authorization = self.tokens.get(target.origin, &target.repository);
            let (response, _open) = self.send_once(&target, authorization, &part, content, sent).await?;
            let status = response.response.status();
            if is_redirect(status, &target.method) && redirects < MAX_REDIRECTS {
                redirects += 1;
                let next = redirect_target(&response.url, response.headers());
                target.url = next.map_err(|reason| {
                    RegistryError::unusable(response.host(), format!("redirect refused: {reason}"))
                })?;
                target.reach = response.reach;
            } else if status == StatusCode::UNAUTHORIZED && response.is_from(target.origin) && !is_authorized
            {
                // A token can expire while an earlier part is sent.
                is_authorized = true;
                match self.authorization(&target, &response).await? {
                    Outcome::Authorized(new) => self.tokens.insert(target.origin, &target.repository, new),
                    Outcome::Refused(advice) => {
                        return Ok(Response { advice, ..response }.checked(&target, &self.limits).await?);
                    }
                }
            } else {
                return Ok(response.checked(&target, &self.limits).await?);
            }
        }
    }

    /// Returns the response, and what keeps the connection open until the response has been read, even if it came before all
    /// bytes were sent.
    async fn send_once<C: UploadContent>(
        &self,
        target: &Target<'_>,
        authorization: Option<Authorization>,
        part: &Range<u64>,
        content: &mut C,
        sent: &mut u64,
    ) -> Result<(Response, mpsc::Sender<Bytes>), UploadError<C::Error>> {
        let (token, advice) = target.credentials(authorization);
        let length = part.end.saturating_sub(part.start);
        let mut headers = target.headers.clone();
        headers.insert(CONTENT_LENGTH, length.into());
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        headers.extend(token.clone().map(|token| (AUTHORIZATION, token)));
        let (feed, chunks) = mpsc::channel(CHUNKS_WAITING);
        let (open, body) = (feed.clone(), UploadBody::new(chunks, length).boxed());
        let request = Request { method: target.method.clone(), url: &target.url, headers, body };
        let mut responding = pin!(self.transport.send_unlimited(request, target.reach));
        let fed = tokio::select! {
            biased;
            response = &mut responding => Some(response),
            fed = self.feed(target, feed, part, content, sent) => { fed?; None }
        };
        let response = match fed {
            Some(response) => response,
            None => match timeout(self.limits.commit, responding).await {
                Ok(response) => response,
                Err(_elapsed) => Err(self.stalled(target, self.limits.commit.as_secs())),
            },
        };
        let (response, scope) = response.map_err(|error| broken(error, *sent))?;
        tracing::debug!(host = host_of(&target.url), status = response.status().as_u16(), "response");
        let response = Response {
            response,
            url: target.url.clone(),
            reach: target.reach.min(scope.unwrap_or(AddressScope::Public)),
            is_quotable: target.may_quote(&target.url, scope),
            advice,
            authorization: token,
            linked: None,
        };
        Ok((response, open))
    }

    /// Passes the bytes on to the connection, until it has all or has ended.
    async fn feed<C: UploadContent>(
        &self,
        target: &Target<'_>,
        feed: mpsc::Sender<Bytes>,
        part: &Range<u64>,
        content: &mut C,
        sent: &mut u64,
    ) -> Result<(), UploadError<C::Error>> {
        let silence = self.limits.silence;
        let (mut offset, first) = (part.start, *sent);
        while offset < part.end {
            let mut bytes = content.read(offset).await.map_err(UploadError::Content)?;
            bytes.truncate(usize::try_from(part.end - offset).unwrap_or(usize::MAX));
            let length = bytes.len() as u64;
            match timeout(silence, feed.send(bytes)).await {
                Ok(Ok(())) => offset = offset.saturating_add(length),
                // The response or its error says why.
                Ok(Err(_closed)) => return Ok(()),
                Err(_elapsed) => return Err(self.stalled(target, silence.as_secs()).into()),
            }
            *sent = first.saturating_add(offset - part.start);
        }
        Ok(())
    }

    fn stalled(&self, target: &Target<'_>, seconds: u64) -> RegistryError {
        RegistryError::Stalled { host: host_of(&target.url), seconds }
    }
}

/// The error of a connection that failed after some bytes.
fn broken(error: RegistryError, sent_bytes: u64) -> RegistryError {
    match error {
        RegistryError::Unreachable { host, reason: ConnectFailure::Other(reason) } if sent_bytes > 0 => {
            RegistryError::BrokenUpload { host, sent_bytes, reason }
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_part_is_certain_from_the_second_byte_on() {
        for (range, kept) in [
            ("0-4999999", Some(5_000_000)),
            ("bytes=0-9", Some(10)),
            ("0-1", Some(2)),
            ("0-0", None),
            ("0--1", None),
            ("5-9", None),
            ("", None),
            ("0-", None),
        ] {
            assert_eq!(kept_bytes(range), kept, "{range}");
        }
        assert_eq!(kept_bytes(&format!("0-{}", u64::MAX)), Some(u64::MAX));
    }
}
