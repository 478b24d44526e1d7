//! `tag`: gives a model another name.

use std::sync::Arc;

use blobd_client::protocol::request::TagParams;
use blobd_client::protocol::response::Tagged;
use blobd_store::{Ingest, Store};

use super::{OpError, error::refuse_pinned};

/// Points `target` at the manifest of `source`. Copies no data.
pub fn tag(store: &Arc<Store>, params: &TagParams) -> Result<Tagged, OpError> {
    refuse_pinned(&params.target)?;
    let lease = store.leases().grant(format!("tag {}", params.target.short()));
    let model = store.leased_model(&params.source, &lease)?;
    let ingest = Ingest::begin(store, lease)?;
    ingest.commit(&params.target, &model.manifest, None)?;
    Ok(Tagged { name: params.target.short(), digest: model.manifest.digest() })
}
