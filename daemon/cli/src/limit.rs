//! `blobd limit`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::LimitParams;
use blobd_store_format::size::human_bytes;
use clap::Args;

use super::connect::{client_error, connect, print_result};
use super::{Global, usage};

/// Show or set the rate limit of all pulls of the daemon together
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd limit                                  show the limit
  blobd limit 20MB                             20 MB per second; applies to running pulls at once
  blobd limit off                              no limit

The limit lasts until the daemon stops. It starts with limit_rate under [transfer] in the
configuration. `blobd pull --limit-rate` limits a single pull.")]
pub(super) struct Params {
    /// Bytes per second, such as 20MB, or off; if omitted, the limit is shown
    #[arg(value_name = "RATE", value_parser = parse_rate)]
    rate: Option<Rate>,
}

#[derive(Clone, Copy, Debug)]
struct Rate(Option<u64>);

fn parse_rate(text: &str) -> Result<Rate, String> {
    if matches!(text, "off" | "none") {
        Ok(Rate(None))
    } else {
        blobd_store_format::size::parse_rate(text).map(|bytes| Rate(Some(bytes)))
    }
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let limit = match params.rate {
        None => connected.client.limit(),
        Some(_) if connected.is_embedded() => {
            let hint = "start `blobd serve`, limit one pull with `blobd pull --limit-rate`, or set limit_rate \
                        under [transfer] in the configuration";
            return Err(
                usage("limit: no daemon is running, so the limit would have no effect").with_hint(hint)
            );
        }
        Some(Rate(bytes_per_second)) => connected.client.set_limit(&LimitParams { bytes_per_second }),
    };
    let limit = limit.map_err(client_error)?;
    print_result(global, &limit, |limit| match limit.bytes_per_second {
        None => "no limit\n".to_owned(),
        Some(rate) => format!("{} per second\n", human_bytes(rate)),
    })
}
