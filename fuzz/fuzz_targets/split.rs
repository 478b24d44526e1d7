//! Splitting and rebuilding a file.
//!
//! Invariant: a file with a plan is rebuilt bit for bit from its blobs and its recipe, with any
//! names, types, order and padding of its tensors, and in any portions; the recipe reads back
//! from its JSON; and every tensor's bytes are where the recipe says.
#![no_main]

use std::collections::BTreeMap;
use std::convert::Infallible;

use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};
use blobd_store_format::recipe::Recipe;
use blobd_store_format::split::{SplitPlan, Splitter, Target};
use libfuzzer_sys::fuzz_target;

/// Larger files test nothing more.
const MAX_FILE_BYTES: u64 = 1 << 20;

fuzz_target!(|input: &[u8]| {
    let Some((portion, input)) = input.split_first() else { return };
    // Other bytes are a script that generates a GGUF file.
    let Some(file) = complete(input.to_vec()).or_else(|| complete(made_by(input)?)) else { return };
    let Ok(header) = Header::parse(&file) else { return };
    let Ok(layout) = header.file_layout(file.len() as u64) else { return };
    let plan = SplitPlan::new(layout);
    let stored = store(&plan, &file, usize::from(*portion) * 7 + 1);
    assert!(rebuild(&stored) == file, "the rebuilt file differs");
    assert!(Recipe::parse(stored.recipe.to_json()).is_ok_and(|recipe| recipe == stored.recipe));
    assert_tensors_are_found(&stored, &header, &file);
    assert_chunks_cover(&plan, u64::from(*portion) + 1);
});

/// A reader of the script.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }
}

/// The header of a file with tensors as the script says, possibly with experts to be packed.
fn made_by(script: &[u8]) -> Option<Vec<u8>> {
    let mut script = Script(script);
    let mut writer = GgufWriter::new();
    let alignment = 1_u32 << (script.byte()? % 13);
    writer.metadata("general.alignment", alignment).ok()?;
    let mut position = 0;
    while let Some(kind) = script.byte() {
        let (layer, number) = (kind >> 4 & 1, script.byte()?);
        let name = match kind & 3 {
            0 => format!("t{number}"),
            1 => format!("blk.{layer}.ffn_up.{}.weight", number % 16),
            2 => format!("blk.{layer}.ffn_gate.{}.weight", number % 16),
            _ => format!("blk.{layer}.ffn_down_exps.weight"),
        };
        let ggml_type = match kind >> 2 & 3 {
            0 => GgmlType::F32,
            1 => GgmlType::I8,
            2 => GgmlType::Q8_0,
            _ => GgmlType::from_id(script.byte()?.into()),
        };
        let step = script.byte()?;
        let shape: &[u64] = match step & 3 {
            0 => &[16],
            1 => &[32, 2],
            2 => &[4, 2, 2],
            _ => &[0, 5],
        };
        // After the previous tensor, or at another offset.
        let offset = match step >> 2 & 3 {
            0 => position,
            1 => position + u64::from(alignment) * u64::from(script.byte()?),
            2 => u64::from(alignment) * u64::from(script.byte()?),
            _ => (position + u64::from(step)).next_multiple_of(alignment.into()),
        };
        // A type that does not fit the shape is refused here, a duplicate name at the end.
        writer.tensor_at(&name, ggml_type, shape, offset).ok()?;
        position = position.max((offset + 128).next_multiple_of(alignment.into()));
    }
    writer.header().ok()
}

/// The file that starts with these bytes, long enough for its tensors; `None` if it would be large.
fn complete(mut file: Vec<u8>) -> Option<Vec<u8>> {
    let header = Header::parse(&file).ok()?;
    let end = |offset: u64, size: u64| header.data_offset().checked_add(offset)?.checked_add(size);
    let mut size = file.len() as u64;
    for tensor in header.tensors() {
        size = size.max(end(tensor.offset(), tensor.size_bytes().unwrap_or(1))?);
    }
    if size > MAX_FILE_BYTES {
        return None;
    }
    let missing = (file.len() as u64..size).map(|place| (place % 251) as u8 + 1);
    file.extend(missing);
    Some(file)
}

struct Stored {
    recipe: Recipe,
    blobs: BTreeMap<Digest, Vec<u8>>,
}

fn store(plan: &SplitPlan, file: &[u8], portion: usize) -> Stored {
    let mut blobs: Vec<Vec<u8>> = plan.blobs().iter().map(|blob| vec![0; blob.size as usize]).collect();
    let mut written = vec![0; blobs.len()];
    let mut literals = vec![Vec::new(); plan.literal_count()];
    let mut splitter = Splitter::new(plan);
    for bytes in file.chunks(portion) {
        for part in splitter.push(bytes).expect("the plan is for this file") {
            match part.target {
                Target::Blob { blob, offset_in_blob } => {
                    let start = offset_in_blob as usize;
                    blobs[blob][start..start + part.bytes.len()].copy_from_slice(part.bytes);
                    written[blob] += part.bytes.len();
                }
                Target::Literal { literal } => literals[literal].extend(part.bytes),
            }
        }
    }
    splitter.finish().expect("all bytes were pushed");
    assert!(blobs.iter().map(Vec::len).eq(written), "a byte of a blob is written twice or never");
    let digests: Vec<Digest> = blobs.iter().map(|blob| Digest::of(blob)).collect();
    let recipe = plan.clone().recipe(Digest::of(file), &digests, literals).expect("all parts are there");
    Stored { recipe, blobs: digests.into_iter().zip(blobs).collect() }
}

fn rebuild(stored: &Stored) -> Vec<u8> {
    let mut file = vec![0xee; stored.recipe.size() as usize];
    let read = stored.recipe.pieces().read_at(0, &mut file, |blob, offset, buffer| {
        buffer.copy_from_slice(range(stored, blob, offset, buffer.len() as u64));
        Ok::<_, Infallible>(())
    });
    assert_eq!(read, Ok(file.len()));
    file
}

fn range(stored: &Stored, blob: Digest, offset: u64, length: u64) -> &[u8] {
    let bytes = stored.blobs.get(&blob).map_or(&[][..], Vec::as_slice);
    &bytes[offset as usize..][..length as usize]
}

fn assert_tensors_are_found(stored: &Stored, header: &Header, file: &[u8]) {
    for (info, entry) in header.tensors().zip(stored.recipe.tensors().iter()) {
        assert_eq!(info.name(), entry.name);
        assert!(info.size_bytes().is_none_or(|size| size == entry.size));
        let start = (header.data_offset() + info.offset()) as usize;
        let expected = if entry.size == 0 { &[][..] } else { &file[start..][..entry.size as usize] };
        assert!(range(stored, entry.digest, entry.offset, entry.size) == expected, "{}", entry.name);
    }
}

fn assert_chunks_cover(plan: &SplitPlan, max: u64) {
    let max = max * 64;
    let mut position = 0;
    while position < plan.file_size() {
        let end = plan.chunk_end(position, max);
        assert!(position < end && end <= plan.file_size() && end - position <= max);
        position = end;
    }
}
