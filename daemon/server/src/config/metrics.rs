//! The section `[metrics]`.

use std::net::SocketAddr;

use serde::Deserialize;

use super::values;

/// Where metrics can be read besides the socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct MetricsConfig {
    /// An address of loopback; none if absent.
    #[serde(deserialize_with = "values::loopback_address")]
    pub listen: Option<SocketAddr>,
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn only_addresses_of_loopback_are_accepted() {
        let parse = |listen: &str| toml::from_str::<Config>(&format!("[metrics]\nlisten = {listen}"));
        for listen in ["127.0.0.1:9750", "127.1.2.3:0", "[::1]:9750"] {
            let config = parse(&format!("{listen:?}")).unwrap();
            assert_eq!(config.metrics.listen.map(|address| address.to_string()).as_deref(), Some(listen));
        }
        for listen in
            ["0.0.0.0:9750", "192.168.1.2:9750", "[::]:9750", "localhost:9750", "127.0.0.1", ":9750", ""]
        {
            let error = parse(&format!("{listen:?}")).unwrap_err().to_string();
            assert!(error.contains("an address of loopback with a port"), "{listen}: {error}");
        }
        assert!(parse("9750").is_err());
    }
}
