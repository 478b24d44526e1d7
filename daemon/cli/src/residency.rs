//! How much of a model is in the page cache: for `ps`, `warm` and `show --residency`.

use std::collections::BTreeMap;
use std::io;

use blobd_client::error::ModelError;
use blobd_client::model::{BlobSlice, OpenModel};
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::OpenParams;
use blobd_client::protocol::response::TensorLocation;
use blobd_client::residency::Residency;
use blobd_store_format::expert::separate_expert;
use blobd_store_format::size::human_bytes;
use serde::Serialize;

use super::Global;
use super::connect::{client_error, connect, note_name};
use super::model_name::{ModelName, only};
use crate::output::{Table, print, print_json, terminal_width};

/// A stack of experts, or all other tensors of a model.
#[derive(Debug, Default, Serialize)]
struct Group {
    name: String,
    /// The number of experts; 0 if this is not a stack.
    experts: u64,
    /// How many of them are completely in memory.
    resident_experts: u64,
    bytes: u64,
    resident_bytes: u64,
}

#[derive(Serialize)]
struct ModelResidency<'m> {
    name: &'m str,
    bytes: u64,
    resident_bytes: u64,
    groups: Vec<Group>,
}

/// All blobs of an open model, in the order of its files.
pub(super) fn blobs(model: &OpenModel) -> Result<Vec<BlobSlice>, ModelError> {
    let count = u32::try_from(model.fd_count()).unwrap_or(u32::MAX);
    (0..count).map(|number| model.blob_bytes(number)).collect()
}

/// `None` if the kernel does not report it to this user.
pub(super) fn of_model(model: &OpenModel) -> Result<Option<Residency>, ModelError> {
    let parts = blobs(model)?.iter().map(BlobSlice::residency).collect::<io::Result<Vec<_>>>();
    Ok(parts.ok().map(|parts| parts.into_iter().fold(Residency::default(), Residency::plus)))
}

/// `3.1 GiB (72 %)`
pub(super) fn share(residency: Residency) -> String {
    let Residency { bytes, resident_bytes } = residency;
    let percent = u128::from(resident_bytes) * 100 / u128::from(bytes.max(1));
    format!("{} ({percent} %)", human_bytes(resident_bytes))
}

/// Shows how much is in memory of each stack of experts, of the other tensors, and of all files.
pub(super) fn show(global: &Global, model: &ModelName) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let reference = only(global, &connected.client, model)?;
    let model = connected.client.open_with(&OpenParams::new(reference.clone())).map_err(client_error)?;
    note_name(global, &reference, model.name());
    let all = of_model(&model).map_err(model_error)?.ok_or_else(denied)?;
    let groups = groups(&model).map_err(model_error)?;
    let Residency { bytes, resident_bytes } = all;
    if global.json {
        return print_json(&ModelResidency { name: model.name(), bytes, resident_bytes, groups });
    }
    let mut table = Table::new(&["PART", "EXPERTS", "SIZE", "IN MEMORY"], &[1, 2, 3]);
    for group in groups {
        let (bytes, resident_bytes) = (group.bytes, group.resident_bytes);
        let experts = match group.experts {
            0 => "-".to_owned(),
            count => format!("{}/{count}", group.resident_experts),
        };
        table.row([group.name, experts, human_bytes(bytes), share(Residency { bytes, resident_bytes })]);
    }
    table.row(["all files".to_owned(), String::new(), human_bytes(bytes), share(all)]);
    print(&table.render(terminal_width()))
}

pub(super) fn model_error(error: ModelError) -> ErrorBody {
    ErrorBody::new(error.code(), error)
}

fn denied() -> ErrorBody {
    let message = "residency: the kernel reports it only to the owner of the store's files and to root";
    ErrorBody::new(ErrorCode::Denied, message).with_hint("run the command as the daemon's user, or as root")
}

/// The stacks of experts in file order, then one group for all other tensors.
fn groups(model: &OpenModel) -> Result<Vec<Group>, ModelError> {
    let (mut stacks, mut places) = (Vec::new(), BTreeMap::new());
    let mut rest = Group { name: "other tensors".to_owned(), ..Group::default() };
    for tensor in model.tensors() {
        let map = model.map_tensor(tensor)?;
        let experts = match tensor.experts {
            Some(experts) => (0..experts.count).filter_map(|number| map.expert_bytes(number)).collect(),
            None if separate_expert(&tensor.name).is_some() => vec![map.bytes().clone()],
            None => {
                rest.add(map.bytes());
                continue;
            }
        };
        let name = stack_name(tensor);
        let place = *places.entry(name.clone()).or_insert(stacks.len());
        if place == stacks.len() {
            stacks.push(Group { name, ..Group::default() });
        }
        if let Some(stack) = stacks.get_mut(place) {
            experts.iter().for_each(|expert| stack.add_expert(expert));
        }
    }
    stacks.push(rest);
    Ok(stacks)
}

impl Group {
    fn add(&mut self, bytes: &BlobSlice) -> Residency {
        // Cannot fail: `of_model` has already succeeded for all blobs.
        let residency = bytes.residency().unwrap_or_default();
        self.bytes += residency.bytes;
        self.resident_bytes += residency.resident_bytes;
        residency
    }

    fn add_expert(&mut self, bytes: &BlobSlice) {
        let Residency { bytes, resident_bytes } = self.add(bytes);
        self.experts += 1;
        self.resident_experts += u64::from(bytes == resident_bytes);
    }
}

/// `blk.3.ffn_up` for `blk.3.ffn_up.7.weight`, the tensor of one expert; for a stack the tensor's name.
fn stack_name(tensor: &TensorLocation) -> String {
    let without_number = || tensor.name.strip_suffix(".weight")?.rsplit_once('.').map(|(stack, _)| stack);
    let stack = if tensor.experts.is_some() { None } else { without_number() };
    stack.unwrap_or(&tensor.name).to_owned()
}
