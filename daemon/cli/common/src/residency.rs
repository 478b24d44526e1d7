//! Which part of a model is in the page cache, for `ps`, `warm` and `show --residency`.

use std::collections::BTreeMap;
use std::io;

use blobd_client::error::ModelError;
use blobd_client::model::{BlobSlice, OpenModel};
use blobd_client::protocol::request::OpenParams;
use blobd_client::protocol::response::TensorLocation;
use blobd_client::residency::Residency;
use blobd_store_format::expert::separate_expert;
use serde::Serialize;

use crate::connect::{client_error, connect, model_error, note_name};
use crate::model_name::{ModelName, only};
use crate::output::{Table, human_bytes, or_dash, print, print_json, terminal_width};
use crate::{ErrorBody, ErrorCode, Global};

/// A stack of experts, or all other tensors of a model.
#[derive(Debug, Default, Serialize)]
struct Group {
    name: String,
    /// 0 if this is not a stack.
    experts: u64,
    /// Experts that are completely in memory.
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

/// The ranges of all blobs of the model.
pub fn blobs(model: &OpenModel) -> Result<Vec<BlobSlice>, ModelError> {
    let count = u32::try_from(model.fd_count()).unwrap_or(u32::MAX);
    (0..count).map(|number| model.blob_bytes(number)).collect()
}

/// `None` if the kernel does not report it to this user.
pub fn of_model(model: &OpenModel) -> Result<Option<Residency>, ModelError> {
    let parts = blobs(model)?.iter().map(BlobSlice::residency).collect::<io::Result<Vec<_>>>();
    Ok(parts.ok().map(|parts| parts.into_iter().fold(Residency::default(), Residency::plus)))
}

/// `3.1 GiB (72 %)`
pub fn share(residency: Residency) -> String {
    let Residency { bytes, resident_bytes } = residency;
    let percent = u128::from(resident_bytes) * 100 / u128::from(bytes.max(1));
    format!("{} ({percent} %)", human_bytes(resident_bytes))
}

/// Prints how much of each part of the model is in memory.
pub fn show(global: &Global, model: &ModelName) -> Result<(), ErrorBody> {
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
    let rows = groups.into_iter().map(|Group { name, experts, resident_experts, bytes, resident_bytes }| {
        let experts = or_dash((experts > 0).then(|| format!("{resident_experts}/{experts}")));
        [name, experts, human_bytes(bytes), share(Residency { bytes, resident_bytes })]
    });
    let mut table = Table::with_rows(&["PART", "EXPERTS", "SIZE", "IN MEMORY"], &[1, 2, 3], rows);
    table.row(["all files".to_owned(), String::new(), human_bytes(bytes), share(all)]);
    print(&table.render(terminal_width()))
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
