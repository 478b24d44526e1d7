//! Why a connection failed, as a message that says what to check.

use std::error::Error;
use std::io;
use std::time::SystemTime;

use hyper_util::client::legacy;
use rustls::{CertificateError, InvalidMessage};

use super::address_scope::AddressScope;

/// Why a request got no response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectFailure {
    #[error("no address found ({0}); is the name right, and is there a network?")]
    NoAddress(String),
    /// The host's address is closer to this machine than the registry that led to it.
    #[error("is a {0} address, and the registry is not; refused")]
    ForbiddenAddress(AddressScope),
    #[error("connection refused; is the registry running, and is the port right?")]
    Refused,
    #[error("connection through the proxy failed: {reason}; is {variable} right?")]
    Proxy { variable: &'static str, reason: String },
    #[error("certificate has expired; this machine's clock says {0}: is that right?")]
    Expired(String),
    #[error("certificate is not valid yet; this machine's clock says {0}: is that right?")]
    NotYetValid(String),
    #[error(
        "certificate is from an issuer that this machine does not trust; if a proxy or your own \
         authority signs here, name its certificate in ca_files"
    )]
    UnknownIssuer,
    #[error("certificate is for another name; is this network behind a login page?")]
    OtherName,
    #[error(
        "server does not speak TLS; if it is a registry over plain HTTP, name it in insecure_registries or put \
         http:// before its name"
    )]
    NotTls,
    #[error("server does not respond in HTTP; if it expects TLS, put https:// before its name")]
    NotHttp,
    #[error("TLS failed: {0}")]
    Tls(String),
    /// Any other failure, such as a connection reset; a repeated request may succeed.
    #[error("{0}")]
    Other(String),
}

impl ConnectFailure {
    pub(super) fn from_error(error: &legacy::Error) -> Self {
        let innermost = innermost(error);
        // From the resolver in `connector`, or about a proxy.
        if let Some(failure) = innermost.downcast_ref::<Self>() {
            return failure.clone();
        }
        let kind = innermost.downcast_ref::<io::Error>().map(io::Error::kind);
        match (tls_error(innermost), kind) {
            (Some(tls), _) => Self::from_tls(tls),
            (None, Some(io::ErrorKind::ConnectionRefused)) => Self::Refused,
            _ if is_not_http(error) => Self::NotHttp,
            _ => Self::Other(innermost.to_string()),
        }
    }

    /// Whether a server answered, but speaks another protocol or has an untrusted certificate.
    pub(super) const fn is_tls(&self) -> bool {
        match self {
            Self::Expired(_)
            | Self::NotYetValid(_)
            | Self::UnknownIssuer
            | Self::OtherName
            | Self::NotTls
            | Self::NotHttp
            | Self::Tls(_) => true,
            Self::NoAddress(_)
            | Self::ForbiddenAddress(_)
            | Self::Refused
            | Self::Proxy { .. }
            | Self::Other(_) => false,
        }
    }

    fn from_tls(error: &rustls::Error) -> Self {
        let error = match error {
            rustls::Error::InvalidCertificate(error) => error,
            rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => return Self::NotTls,
            other => return Self::Tls(other.to_string()),
        };
        match error {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired(today()),
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                Self::NotYetValid(today())
            }
            CertificateError::UnknownIssuer => Self::UnknownIssuer,
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                Self::OtherName
            }
            other => Self::Tls(other.to_string()),
        }
    }
}

/// The root cause; the errors that wrap it say only that the client could not connect.
pub(super) fn innermost<'e>(mut error: &'e (dyn Error + 'static)) -> &'e (dyn Error + 'static) {
    while let Some(cause) = error.source() {
        error = cause;
    }
    error
}

/// Whether the response does not start like an HTTP response. An HTTP head that is too long does.
fn is_not_http(mut error: &(dyn Error + 'static)) -> bool {
    loop {
        if let Some(http) = error.downcast_ref::<hyper::Error>() {
            return http.is_parse() && !http.is_parse_too_large();
        }
        match error.source() {
            Some(cause) => error = cause,
            None => return false,
        }
    }
}

/// The TLS error inside an I/O error, at any depth. `Error::source` skips an I/O error's inner error.
fn tls_error<'e>(mut error: &'e (dyn Error + 'static)) -> Option<&'e rustls::Error> {
    loop {
        if let Some(tls) = error.downcast_ref() {
            return Some(tls);
        }
        error = error.downcast_ref::<io::Error>()?.get_ref()?;
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
    fn tls_errors_are_found_inside_io_errors() {
        let tls = || rustls::Error::DecryptError;
        assert!(tls_error(&tls()).is_some());
        assert!(tls_error(&io::Error::other(io::Error::other(tls()))).is_some());
        assert!(tls_error(&io::Error::from(io::ErrorKind::NotFound)).is_none());
    }

    #[test]
    fn tls_errors_say_what_to_check() {
        let said = |error| ConnectFailure::from_tls(&rustls::Error::InvalidCertificate(error)).to_string();
        let year = &today()[..4];
        assert!(today().len() == 10 && year.parse::<u32>().unwrap() > 2020);
        assert!(said(CertificateError::Expired).contains(year));
        assert!(said(CertificateError::NotValidYet).contains("not valid yet"));
        assert!(said(CertificateError::UnknownIssuer).contains("ca_files"));
        assert!(said(CertificateError::NotValidForName).contains("another name"));
        let plain = rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType);
        assert!(ConnectFailure::from_tls(&plain).to_string().contains("insecure_registries"));
        assert!(ConnectFailure::from_tls(&rustls::Error::DecryptError).to_string().starts_with("TLS failed"));
    }
}
