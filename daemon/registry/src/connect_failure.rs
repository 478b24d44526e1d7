//! Why a connection failed, in words that say what to look at.

use std::error::Error;
use std::io;
use std::time::SystemTime;

use hyper_util::client::legacy;
use rustls::{CertificateError, InvalidMessage};

use super::address_scope::AddressScope;
use super::error::RegistryError;

/// Why a server's certificate is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsFailure {
    /// Its time is over.
    #[error("its certificate has expired; this machine's clock says {today}: is that right?")]
    Expired {
        /// The machine's date.
        today: String,
    },
    /// Its time is still to come.
    #[error("its certificate is not valid yet; this machine's clock says {today}: is that right?")]
    NotYetValid {
        /// The machine's date.
        today: String,
    },
    /// Nobody whom this machine trusts has signed it.
    #[error(
        "its certificate is from an issuer that this machine does not trust; if a proxy or your own \
         authority signs here, name its certificate in ca_files"
    )]
    UnknownIssuer,
    /// It is another host's.
    #[error("its certificate is for another name; is this network behind a login page?")]
    OtherName,
    /// What it answers is no TLS.
    #[error(
        "it does not speak TLS; if it is a registry over plain HTTP, name it in insecure_registries or put \
         http:// before its name"
    )]
    NotTls,
    /// Something else.
    #[error("TLS failed: {0}")]
    Other(String),
}

/// A name has no address that may be connected to.
#[derive(Debug, thiserror::Error)]
#[error("{0} address")]
pub(super) struct TooNear(pub(super) AddressScope);

/// A name has no address.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct NoAddress(pub(super) String);

/// What a request ended in that never got an answer.
pub(super) fn unreachable(host: String, error: &legacy::Error) -> RegistryError {
    let innermost = innermost(error);
    if is_tunnel(error) {
        let said = innermost.to_string();
        let reason = said.strip_prefix(TUNNEL_ERROR).unwrap_or(&said).to_owned();
        return RegistryError::Proxy { host, reason };
    }
    if let Some(TooNear(scope)) = innermost.downcast_ref() {
        return RegistryError::ForbiddenAddress { host, scope: *scope };
    }
    if let Some(NoAddress(reason)) = innermost.downcast_ref() {
        return RegistryError::NoAddress { host, reason: reason.clone() };
    }
    let kind = innermost.downcast_ref::<io::Error>().map(io::Error::kind);
    match (tls_error(innermost), kind) {
        (Some(tls), _) => RegistryError::Tls { host, failure: tls_failure(tls) },
        (None, Some(io::ErrorKind::ConnectionRefused)) => RegistryError::Refused { host },
        _ => RegistryError::Unreachable { host, reason: innermost.to_string() },
    }
}

/// Whether a proxy was to connect. The library's own type for it is not public, its text is.
fn is_tunnel(mut error: &(dyn Error + 'static)) -> bool {
    loop {
        if error.to_string().starts_with(TUNNEL_ERROR) {
            return true;
        }
        match error.source() {
            Some(cause) => error = cause,
            None => return false,
        }
    }
}

const TUNNEL_ERROR: &str = "tunnel error: ";

/// The cause of all causes: the ones above it only say that a client could not connect.
pub(super) fn innermost<'e>(mut error: &'e (dyn Error + 'static)) -> &'e (dyn Error + 'static) {
    while let Some(cause) = error.source() {
        error = cause;
    }
    error
}

/// The failure of TLS that an input/output error holds, be it wrapped once or twice: such a wrapper
/// is not among the sources.
fn tls_error<'e>(mut error: &'e (dyn Error + 'static)) -> Option<&'e rustls::Error> {
    loop {
        if let Some(tls) = error.downcast_ref() {
            return Some(tls);
        }
        error = error.downcast_ref::<io::Error>()?.get_ref()?;
    }
}

fn tls_failure(error: &rustls::Error) -> TlsFailure {
    let error = match error {
        rustls::Error::InvalidCertificate(error) => error,
        rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => return TlsFailure::NotTls,
        other => return TlsFailure::Other(other.to_string()),
    };
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            TlsFailure::Expired { today: today() }
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            TlsFailure::NotYetValid { today: today() }
        }
        CertificateError::UnknownIssuer => TlsFailure::UnknownIssuer,
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            TlsFailure::OtherName
        }
        other => TlsFailure::Other(other.to_string()),
    }
}

fn today() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now())
        .to_string()
        .chars()
        .take_while(|c| *c != 'T')
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_tls_are_found_behind_wrappers() {
        let tls = || rustls::Error::DecryptError;
        assert!(tls_error(&tls()).is_some());
        assert!(tls_error(&io::Error::other(io::Error::other(tls()))).is_some());
        assert!(tls_error(&io::Error::from(io::ErrorKind::NotFound)).is_none());
    }

    #[test]
    fn certificates_out_of_their_time_bring_up_the_clock() {
        let said = |error| tls_failure(&rustls::Error::InvalidCertificate(error)).to_string();
        let year = &today()[..4];
        assert!(today().len() == 10 && year.parse::<u32>().unwrap() > 2020);
        assert!(said(CertificateError::Expired).contains(year));
        assert!(said(CertificateError::NotValidYet).contains("not valid yet"));
        assert!(said(CertificateError::UnknownIssuer).contains("ca_files"));
        assert!(said(CertificateError::NotValidForName).contains("another name"));
        let plain = rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType);
        assert!(tls_failure(&plain).to_string().contains("insecure_registries"));
        assert!(tls_failure(&rustls::Error::DecryptError).to_string().starts_with("TLS failed"));
    }
}
