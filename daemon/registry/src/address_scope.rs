//! Address policy: which addresses a registry may lead to.
//!
//! A registry chooses the targets of redirects and token requests. Without a rule it could make the daemon
//! send requests to hosts that only the daemon can reach: a cloud's metadata service, a host in the local
//! network, another daemon on this machine. The rule: never to an address of narrower scope than the one at
//! which the registry itself responded. It is checked when connecting, since a name can resolve to any
//! address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use url::{Host, Url};

/// The scope of an address, the widest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum AddressScope {
    /// Routed on the internet.
    Public,
    /// Routed inside an organisation or a provider's network only (RFC 1918, RFC 6598, RFC 4193).
    Private,
    /// This machine.
    Loopback,
    /// Link-local, not assigned to any host, or a cloud's metadata service.
    Reserved,
}

impl std::fmt::Display for AddressScope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Public => "public",
            Self::Private => "private",
            Self::Loopback => "loopback",
            Self::Reserved => "link-local or reserved",
        })
    }
}

impl AddressScope {
    /// An IPv6 address that wraps an IPv4 address has the scope of the IPv4 address.
    pub(super) fn from_address(address: IpAddr) -> Self {
        match address {
            _ if METADATA.contains(&address) => Self::Reserved,
            IpAddr::V4(address) => Self::from_v4(address),
            IpAddr::V6(address) => {
                wrapped_v4(address).map_or_else(|| Self::from_v6(address), |v4| Self::from_address(v4.into()))
            }
        }
    }

    /// The scope of a URL whose host is an address or a name that always means this machine (RFC 6761); `None` for any
    /// other name.
    pub(super) fn from_url(url: &Url) -> Option<Self> {
        match url.host()? {
            Host::Domain(name) => {
                // A name may end with the dot of the root.
                let name = name.strip_suffix('.').unwrap_or(name);
                (name == "localhost" || name.ends_with(".localhost")).then_some(Self::Loopback)
            }
            Host::Ipv4(address) => Some(Self::from_address(address.into())),
            Host::Ipv6(address) => Some(Self::from_address(address.into())),
        }
    }

    fn from_v4(address: Ipv4Addr) -> Self {
        let [a, b, ..] = address.octets();
        match (a, b) {
            (127, _) => Self::Loopback,
            (10, _) | (172, 16..=31) | (192, 168) | (100, 64..=127) => Self::Private,
            // This network, link-local, benchmarks, multicast, reserved and broadcast.
            (0, _) | (169, 254) | (198, 18..=19) | (224..=255, _) => Self::Reserved,
            _ => Self::Public,
        }
    }

    fn from_v6(address: Ipv6Addr) -> Self {
        match address.segments() {
            [0, 0, 0, 0, 0, 0, 0, 1] => Self::Loopback,
            [0xfc00..=0xfdff, ..] => Self::Private,
            // Only 2000::/3 is assigned.
            [0x2000..=0x3fff, ..] => Self::Public,
            _ => Self::Reserved,
        }
    }
}

/// Metadata services outside 169.254.0.0/16: Alibaba's, Azure's, Oracle's, and AWS's by IPv6.
const METADATA: [IpAddr; 4] = [
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
];

/// The IPv4 address inside a mapped (`::ffff:…`), NAT64 (`64:ff9b::…`) or 6to4 (`2002:…`) address.
fn wrapped_v4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let join = |high: u16, low: u16| Ipv4Addr::from(u32::from(high) << 16 | u32::from(low));
    match address.segments() {
        [0, 0, 0, 0, 0, 0xffff, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x2002, high, low, ..] => Some(join(high, low)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn well_known_addresses_have_their_scopes() {
        for (address, scope) in [
            ("1.1.1.1", AddressScope::Public),
            ("172.32.0.1", AddressScope::Public),
            ("2606:4700::1111", AddressScope::Public),
            ("10.0.0.1", AddressScope::Private),
            ("172.31.255.255", AddressScope::Private),
            ("192.168.1.1", AddressScope::Private),
            ("100.64.0.1", AddressScope::Private),
            ("fd12::1", AddressScope::Private),
            ("127.0.0.1", AddressScope::Loopback),
            ("127.255.255.254", AddressScope::Loopback),
            ("::1", AddressScope::Loopback),
            ("0.0.0.0", AddressScope::Reserved),
            ("::", AddressScope::Reserved),
            ("169.254.169.254", AddressScope::Reserved),
            ("fe80::1", AddressScope::Reserved),
            ("fd00:ec2::254", AddressScope::Reserved),
            ("100.100.100.200", AddressScope::Reserved),
            ("224.0.0.1", AddressScope::Reserved),
            ("255.255.255.255", AddressScope::Reserved),
            ("::ffff:127.0.0.1", AddressScope::Loopback),
            ("::ffff:169.254.169.254", AddressScope::Reserved),
            ("64:ff9b::10.0.0.1", AddressScope::Private),
            ("2002:7f00:1::", AddressScope::Loopback),
        ] {
            assert_eq!(AddressScope::from_address(address.parse().unwrap()), scope, "{address}");
        }
    }

    #[test]
    fn names_have_no_scope_before_they_are_resolved() {
        let scope = |url: &str| AddressScope::from_url(&url.parse().unwrap());
        assert_eq!(scope("http://169.254.169.254/latest"), Some(AddressScope::Reserved));
        assert_eq!(scope("http://[::1]:80/"), Some(AddressScope::Loopback));
        // Other spellings of 127.0.0.1.
        assert_eq!(scope("http://2130706433/"), Some(AddressScope::Loopback));
        assert_eq!(scope("http://127.1/"), Some(AddressScope::Loopback));
        assert_eq!(scope("http://LOCALHOST/"), Some(AddressScope::Loopback));
        assert_eq!(scope("http://a.localhost/"), Some(AddressScope::Loopback));
        assert_eq!(scope("http://localhost./"), Some(AddressScope::Loopback));
        assert_eq!(scope("http://localhost.example/"), None);
    }
}
