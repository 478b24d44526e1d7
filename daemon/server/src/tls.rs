//! The certificate of the port for other machines, and connections with and without TLS.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use blobd_registry::{open_regular, read_regular};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

/// A certificate with its private key.
#[derive(Clone, Debug)]
pub(crate) struct Tls(Arc<ServerConfig>);

#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    #[error("cannot read: {0}")]
    Unreadable(#[from] io::Error),
    #[error("can be read or changed by others: expected mode 0600 or 0640, found {mode:04o}")]
    Mode { mode: u32 },
    #[error("contains no {expected} in PEM")]
    Content { expected: &'static str },
    #[error("cannot be used: {0}")]
    Unusable(#[from] rustls::Error),
}

/// More than any chain of certificates has.
const MAX_BYTES: u64 = 1 << 20;

impl Tls {
    /// Reads the chain of certificates, the machine's own first.
    pub(crate) fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let wrong = TlsError::Content { expected: "certificate" };
        let bytes = read_regular(path, MAX_BYTES)?;
        let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
        certificates.ok().filter(|certificates| !certificates.is_empty()).ok_or(wrong)
    }

    /// Reads a private key, which only its owner may be able to change, and others cannot read.
    pub(crate) fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
        let mode = open_regular(path)?.metadata()?.mode() & 0o777;
        if mode & 0o027 != 0 {
            return Err(TlsError::Mode { mode });
        }
        let bytes = read_regular(path, MAX_BYTES)?;
        PrivateKeyDer::from_pem_slice(&bytes).map_err(|_other| TlsError::Content { expected: "private key" })
    }

    /// # Errors
    /// [`TlsError::Unusable`], such as when the key is that of another certificate.
    pub(crate) fn new(
        certificates: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(certificates, key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(Arc::new(config)))
    }

    /// `None` if the client does not complete the handshake.
    async fn accept(&self, stream: TcpStream) -> Option<Box<dyn Connection>> {
        match TlsAcceptor::from(Arc::clone(&self.0)).accept(stream).await {
            Ok(stream) => Some(Box::new(stream)),
            Err(error) => {
                tracing::debug!("serve.listen: a connection without TLS that works: {error}");
                None
            }
        }
    }
}

/// A connection with or without TLS.
pub(crate) trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// The connection of a client, with TLS if there is a certificate.
pub(crate) async fn secured(stream: TcpStream, tls: Option<Tls>) -> Option<Box<dyn Connection>> {
    // Small answers are not kept back for more to send.
    let _ = stream.set_nodelay(true);
    match tls {
        Some(tls) => tls.accept(stream).await,
        None => Some(Box::new(stream)),
    }
}
