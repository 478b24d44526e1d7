//! What a request that was refused is about, for its record in the audit log.

use blobd_client::protocol::edit::EditParams;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::promote::PromoteParams;
use blobd_client::protocol::request::{
    ImportParams, OpenParams, PinParams, PullParams, ReleaseParams, RemoveParams, RenameParams, TagParams,
    UndeleteParams, VerifyParams,
};
use blobd_client::protocol::space::RemovePartialsParams;
use hyper::Request;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;

use super::verbs::{Subject, short_name};
use super::{Caller, reference};

/// The requests whose paths end with the name of a model.
const OF_MODELS: [&str; 6] =
    ["/v1/models/", "/v1/manifests/", "/v1/heads/", "/v1/fit/", "/v1/history/", "/v1/sharing/"];

/// Notes the model that the path or the parameters name. Malformed ones name none.
pub(super) async fn note_subject(caller: &Caller, path: &str, request: Request<Incoming>) {
    if let Some(name) = OF_MODELS.iter().find_map(|start| path.strip_prefix(start)) {
        let name = reference(name).ok();
        return caller.record.note_subject(name.as_ref().map(short_name), None);
    }
    let _malformed = match path {
        "/v1/open" => note::<OpenParams>(caller, request).await,
        "/v1/import" => note::<ImportParams>(caller, request).await,
        "/v1/pull" | "/v1/pull/plan" | "/v1/resolve" | "/v1/inspect" => {
            note::<PullParams>(caller, request).await
        }
        "/v1/edit" => note::<EditParams>(caller, request).await,
        "/v1/promote" => note::<PromoteParams>(caller, request).await,
        "/v1/remove" => note::<RemoveParams>(caller, request).await,
        "/v1/undelete" => note::<UndeleteParams>(caller, request).await,
        "/v1/tag" => note::<TagParams>(caller, request).await,
        "/v1/rename" => note::<RenameParams>(caller, request).await,
        "/v1/pin" => note::<PinParams>(caller, request).await,
        "/v1/verify" => note::<VerifyParams>(caller, request).await,
        "/v1/release" => note::<ReleaseParams>(caller, request).await,
        "/v1/partials/remove" => note::<RemovePartialsParams>(caller, request).await,
        _ => Ok(()),
    };
}

async fn note<P: DeserializeOwned + Subject>(
    caller: &Caller,
    request: Request<Incoming>,
) -> Result<(), ErrorBody> {
    caller.params::<P>(request).await.map(drop)
}
