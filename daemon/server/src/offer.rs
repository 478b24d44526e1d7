//! Which models are served to other machines, which host names requests may use, and who may read: the section `[serve]`.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::str;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blobd_client::loopback::{address_of, is_loopback};
use blobd_registry::open_regular;
use blobd_store_format::digest::Digest;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::reference::Reference;

use crate::principal::Principal;
use crate::tls::Tls;

/// Used only if the daemon listens for other machines, which it does not by default.
#[derive(Clone, Debug, Default)]
pub(crate) struct Offer {
    /// The models that may be seen, as far as the reader may read them.
    pub(crate) models: Vec<NamePattern>,
    pub(crate) reader: Reader,
    /// Names of this machine in requests, besides its addresses.
    pub(crate) hosts: Vec<String>,
    /// Without them, everybody who reaches the port is served.
    pub(crate) tokens: Option<Tokens>,
    /// Whether the hub's API is served too.
    pub(crate) hub: bool,
    /// The certificate; without one, connections have no TLS.
    pub(crate) tls: Option<Tls>,
    /// The hosts from which models are pulled that are requested and not stored.
    pub(crate) upstream: Vec<String>,
    /// The user in whose name they are pulled; `None` for the daemon's own.
    pub(crate) puller: Option<Principal>,
}

/// The user whose rights other machines have.
#[derive(Clone, Debug, Default)]
pub(crate) enum Reader {
    /// They see what every user of this machine may read.
    #[default]
    EveryUser,
    User(Principal),
}

impl Offer {
    pub(crate) fn includes(&self, model: &Reference) -> bool {
        self.models.iter().any(|pattern| pattern.matches(model))
    }

    /// Whether a `Host` means this machine, on a port that listens on loopback only or also for others. Other machines may
    /// use any address: a page of another site, whose name was changed to that address, still sends its own name.
    pub(crate) fn is_own_host(&self, name: &str, is_local: bool) -> bool {
        is_loopback(name)
            || !is_local && address_of(name).is_some()
            || self.hosts.iter().any(|host| host.eq_ignore_ascii_case(name))
    }
}

/// The names and secrets of those who may read.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Tokens(Vec<(String, Digest)>);

/// Shows no digest: that of a short secret can be reversed.
impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TokensError {
    #[error("cannot read: {0}")]
    Unreadable(#[from] io::Error),
    #[error("can be read or changed by others: expected mode 0600 or 0640, found {mode:04o}")]
    Mode { mode: u32 },
    #[error("line {line}: expected NAME:TOKEN with a token of at least {MIN_TOKEN_BYTES} characters")]
    Line { line: usize },
    #[error("has no token: expected lines NAME:TOKEN")]
    Empty,
}

/// Shorter ones can be guessed.
const MIN_TOKEN_BYTES: usize = 16;

impl Tokens {
    /// Reads a file that only its owner can change, and others cannot read.
    pub(crate) fn read(path: &Path) -> Result<Self, TokensError> {
        const MAX_BYTES: u64 = 1 << 20;
        let file = open_regular(path)?;
        let mode = file.metadata()?.mode() & 0o777;
        if mode & 0o027 != 0 {
            return Err(TokensError::Mode { mode });
        }
        let text = io::read_to_string(io::Read::take(file, MAX_BYTES))?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self, TokensError> {
        let lines = text.lines().enumerate().map(|(index, line)| (index.saturating_add(1), line.trim()));
        let entry = |(line, text): (usize, &str)| {
            let (name, token) = text.split_once(':').ok_or(TokensError::Line { line })?;
            let is_valid = !name.is_empty() && token.len() >= MIN_TOKEN_BYTES;
            is_valid
                .then(|| (name.to_owned(), Digest::of(token.as_bytes())))
                .ok_or(TokensError::Line { line })
        };
        let entries = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).map(entry);
        let entries = entries.collect::<Result<Vec<_>, _>>()?;
        if entries.is_empty() { Err(TokensError::Empty) } else { Ok(Self(entries)) }
    }

    /// Whose token an `Authorization` has: a name and its token (`Basic`), or a token alone (`Bearer`). Digests are
    /// compared, so the time that it takes tells nothing about a token.
    pub(crate) fn owner(&self, authorization: &str) -> Option<&str> {
        let (scheme, value) = authorization.split_once(' ')?;
        let find = |is_meant: &dyn Fn(&str) -> bool, token: &str| {
            let token = Digest::of(token.as_bytes());
            let mut known = self.0.iter();
            known.find(|(name, known)| is_meant(name) && *known == token).map(|(name, _)| name.as_str())
        };
        if scheme.eq_ignore_ascii_case("bearer") {
            return find(&|_name| true, value.trim());
        }
        if !scheme.eq_ignore_ascii_case("basic") {
            return None;
        }
        let decoded = STANDARD.decode(value.trim()).ok()?;
        let (user, token) = str::from_utf8(&decoded).ok()?.split_once(':')?;
        find(&|name| name == user, token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_by_basic_and_by_bearer() {
        let tokens = Tokens::parse("# site\n\nann:0123456789abcdef\nbob: 0:123456789abcdefg\n").unwrap();
        let basic = |text: &str| format!("Basic {}", STANDARD.encode(text));
        assert_eq!(tokens.owner(&basic("ann:0123456789abcdef")), Some("ann"));
        assert_eq!(tokens.owner("bearer 0123456789abcdef"), Some("ann"));
        assert_eq!(tokens.owner(&basic("bob: 0:123456789abcdefg")), Some("bob"));
        for wrong in [
            basic("bob:0123456789abcdef").as_str(),
            &basic("ann:0123456789abcdeF"),
            &basic("ann"),
            "Basic %%%",
            "Bearer ",
            "Bearer",
            "Digest 0123456789abcdef",
            "",
        ] {
            assert_eq!(tokens.owner(wrong), None, "{wrong}");
        }
        assert_eq!(format!("{tokens:?}"), "[\"ann\", \"bob\"]");
    }

    #[test]
    fn files_of_tokens_that_are_too_short_or_open_to_others_are_refused() {
        for (text, error) in [
            ("", "has no token"),
            ("# ann:0123456789abcdef", "has no token"),
            ("\nann", "line 2: expected NAME:TOKEN"),
            ("ann:short", "line 1: "),
            (":0123456789abcdef", "line 1: "),
        ] {
            let found = Tokens::parse(text).unwrap_err().to_string();
            assert!(found.starts_with(error), "{text}: {found}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "ann:0123456789abcdef").unwrap();
        let set = |mode| {
            let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(file.path(), permissions).unwrap();
            Tokens::read(file.path()).map_err(|error| error.to_string())
        };
        assert!(set(0o600).is_ok() && set(0o640).is_ok());
        let error = set(0o644).unwrap_err();
        assert_eq!(error, "can be read or changed by others: expected mode 0600 or 0640, found 0644");
        assert!(set(0o660).is_err());
    }

    #[test]
    fn hosts_are_this_machine_its_addresses_and_what_is_configured() {
        let offer = Offer { hosts: vec!["models.lab.example".to_owned()], ..Offer::default() };
        for (name, local, for_all) in [
            ("localhost", true, true),
            ("127.0.0.1", true, true),
            ("[::1]", true, true),
            ("10.0.0.7", false, true),
            ("[2001:db8::1]", false, true),
            ("Models.Lab.Example", true, true),
            ("evil.example", false, false),
            ("10.0.0.7.evil.example", false, false),
        ] {
            assert_eq!(offer.is_own_host(name, true), local, "{name}");
            assert_eq!(offer.is_own_host(name, false), for_all, "{name}");
        }
    }
}
