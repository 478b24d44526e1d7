//! Peers: other machines that may have a file, asked for it by its digest before the servers of its registry.
//!
//! A peer is any server of OCI's distribution API, such as another blobd with `[serve]`. It is asked only for files whose
//! SHA-256 is known, so what it sends is verified as what the registry sends. What it does not have, and what it sends too
//! slowly or wrongly, comes from the registry. A request of a peer leads to no other request: `[serve]` sends only what is
//! stored, so that peers that name each other do not ask in circles.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use blobd_store_format::digest::Digest;

use super::RegistryPolicy;
use super::error::{RegistryError, Result};
use super::origin::Registry;

/// The longest that a peer may take for the head of its response, and then for the next bytes. Peers are near; the registry
/// is asked instead.
pub(super) const PATIENCE: Duration = Duration::from_millis(1500);
/// How long a peer that failed is not asked, and how long a file is not requested from a peer that lacks it.
const SET_ASIDE: Duration = Duration::from_secs(60);
/// The most failures and missing files that are remembered.
const MAX_REMEMBERED: usize = 4096;

#[derive(Debug)]
pub(super) struct Peers {
    servers: Vec<Registry>,
    /// The time until which a peer is not asked for a file; without a digest, for any file.
    set_aside: Mutex<BTreeMap<(usize, Option<Digest>), Instant>>,
}

/// A peer by its number in the configuration.
pub(super) type PeerNumber = usize;

impl Peers {
    pub(super) fn new(policy: &RegistryPolicy) -> Result<Self> {
        let unusable = |base: &str| RegistryError::Mirror {
            host: "peers".to_owned(),
            base: blobd_store_format::source::without_userinfo(base).into_owned(),
        };
        let servers = policy.peers.iter().map(|base| Registry::at(base).ok_or_else(|| unusable(base)));
        Ok(Self { servers: servers.collect::<Result<_>>()?, set_aside: Mutex::default() })
    }

    pub(super) const fn has_any(&self) -> bool {
        !self.servers.is_empty()
    }

    /// The peers that may have the file. Which one comes first depends on the digest, so that many files come from many peers.
    pub(super) fn for_file(&self, digest: Digest) -> Vec<(PeerNumber, &Registry)> {
        let count = self.servers.len();
        let mut peers: Vec<_> = self.servers.iter().enumerate().collect();
        if count > 1 {
            let first = digest.as_bytes().first().copied().unwrap_or_default();
            peers.rotate_left(usize::from(first) % count);
        }
        if count > 0 {
            let now = Instant::now();
            let set_aside = self.set_aside.lock().unwrap_or_else(PoisonError::into_inner);
            let is_set_aside = |key| set_aside.get(&key).is_some_and(|until| *until > now);
            peers.retain(|(peer, _)| !is_set_aside((*peer, None)) && !is_set_aside((*peer, Some(digest))));
        }
        peers
    }

    /// Does not ask the peer for a while: for this file, or for any.
    pub(super) fn set_aside(&self, peer: PeerNumber, digest: Option<Digest>) {
        let now = Instant::now();
        let mut set_aside = self.set_aside.lock().unwrap_or_else(PoisonError::into_inner);
        if set_aside.len() >= MAX_REMEMBERED {
            set_aside.retain(|_, until| *until > now);
        }
        if set_aside.len() < MAX_REMEMBERED || digest.is_none() {
            set_aside.insert((peer, digest), now + SET_ASIDE);
        }
    }

    /// Does not ask a server for a while if it is a peer, because it sent wrong bytes.
    pub(super) fn set_aside_server(&self, name: &str) {
        if let Some(peer) = self.servers.iter().position(|server| server.name() == name) {
            tracing::info!("peer {name}: sent wrong bytes; it is not asked for a minute");
            self.set_aside(peer, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(urls: &[&str]) -> Peers {
        let peers = urls.iter().map(|url| (*url).to_owned()).collect();
        Peers::new(&RegistryPolicy { peers, ..RegistryPolicy::default() }).unwrap()
    }

    #[test]
    fn peers_that_failed_or_lack_a_file_are_not_asked_for_it() {
        let peers = peers(&["http://a:1", "http://b:1", "http://c:1"]);
        let (one, other) = (Digest::of(b"one"), Digest::of(b"other"));
        let asked = |digest| -> Vec<usize> {
            let mut asked: Vec<_> = peers.for_file(digest).into_iter().map(|(peer, _)| peer).collect();
            asked.sort_unstable();
            asked
        };
        assert_eq!(asked(one), [0, 1, 2]);
        peers.set_aside(0, Some(one));
        assert_eq!((asked(one), asked(other)), (vec![1, 2], vec![0, 1, 2]));
        peers.set_aside(2, None);
        assert_eq!((asked(one), asked(other)), (vec![1], vec![0, 1]));
        peers.set_aside_server("b:1");
        assert_eq!((asked(one), asked(other)), (vec![], vec![0]));
    }

    #[test]
    fn what_is_remembered_is_limited_and_failures_come_first() {
        let peers = peers(&["http://a:1"]);
        for number in 0..=MAX_REMEMBERED {
            peers.set_aside(0, Some(Digest::of(&number.to_le_bytes())));
        }
        assert_eq!(peers.set_aside.lock().unwrap().len(), MAX_REMEMBERED);
        peers.set_aside(0, None);
        assert!(peers.for_file(Digest::of(b"x")).is_empty());
    }

    #[test]
    fn files_are_spread_over_the_peers() {
        let peers = peers(&["http://a:1", "http://b:1"]);
        let first = |number: u8| peers.for_file(Digest::of(&[number])).first().map(|(peer, _)| *peer);
        let firsts: std::collections::BTreeSet<_> = (0..64).map(first).collect();
        assert_eq!(firsts.len(), 2);
    }
}
