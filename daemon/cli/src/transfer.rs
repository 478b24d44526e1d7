//! `blobd transfer`

use blobd_cli_common::Global;
use blobd_cli_common::connect::{client_error, connect, print_report, print_result};
use blobd_cli_common::model_name::parse_new_name;
use blobd_client::protocol::push::{TransferParams, Transferred};
use blobd_store_format::size::parse_rate;
use clap::Args;

use crate::push::{Sending, render};
use crate::{ErrorBody, Reference};

/// Copy a model from registry to registry, without storing it
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd transfer llama3:8b registry.example/team/llama3:8b
  blobd transfer old:5000/team/tiny:q4 new.example/team/tiny:q4 --dry-run    what the second lacks
  blobd transfer llama3:8b lan:5000/llama3:8b --insecure --limit-rate 20MB

The manifest keeps its bytes, so the model keeps its ID. Files that the second registry has are not
moved; each of the others is verified while it passes through this machine. The tensor index and the
signatures beside the model go with it.
`blobd login HOST` stores credentials. Ctrl-C stops with exit code 130.")]
pub(super) struct Params {
    /// The model at its registry, as for `blobd pull`: [host/][path/…/]model[:tag][@digest]
    #[arg(value_name = "SRC", value_parser = parse_new_name)]
    source: Reference,
    /// Publish it as host/[path/…/]model[:tag]
    #[arg(value_name = "DST", value_parser = parse_new_name)]
    destination: Reference,
    /// Connect to the registry of DST over plain HTTP
    #[arg(long)]
    insecure: bool,
    /// Pass on at most this many bytes per second, such as 20MB
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    limit_rate: Option<u64>,
    /// Show what the registry of DST has already, and move nothing
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let Params { insecure, limit_rate, dry_run, .. } = *params;
    let (source, destination) = (params.source.clone(), params.destination.clone());
    let request = TransferParams { source, destination, insecure, limit_rate, dry_run };
    let mut shown = Sending::new(global, dry_run);
    let transferred = connected.client.transfer(&request, |event| shown.show(event)).map_err(client_error);
    shown.end()?;
    let print = if dry_run { print_result } else { print_report };
    print(global, &transferred?, |transferred: &Transferred| render(&transferred.publication, ""))
}
