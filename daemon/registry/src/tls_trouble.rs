//! Why a server's certificate is not accepted.

/// Why a server's certificate is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsTrouble {
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
