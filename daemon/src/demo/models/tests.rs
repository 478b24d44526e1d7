use blobd_store_format::digest::Digest;
use blobd_store_format::file_type::file_type_name;
use blobd_store_format::gguf::Header;
use blobd_store_format::split::{BlobContent, SplitPlan, Splitter, Target};

use super::*;

/// Two blocks, so that hashing costs nothing even unoptimised.
const TINY: Dimensions = Dimensions { block_count: 2, vocabulary_length: 512, ..Dimensions::SMALL_MIXTRAL };

fn written(model: &SyntheticModel) -> Vec<u8> {
    let file = tempfile::NamedTempFile::new().unwrap();
    let size = model.write_to(file.path()).unwrap();
    let bytes = std::fs::read(file.path()).unwrap();
    assert_eq!(bytes.len() as u64, size);
    bytes
}

fn header_of(model: &SyntheticModel) -> Header {
    Header::parse(&model.header().unwrap()).unwrap()
}

/// The digests of the blobs that a file is split into, with what each holds.
fn blobs(file: &[u8]) -> Vec<(BlobContent, Digest)> {
    let plan = SplitPlan::new(&Header::parse(file).unwrap(), file.len() as u64).unwrap();
    let index = |offset: u64| usize::try_from(offset).unwrap();
    let mut blobs: Vec<Vec<u8>> = plan.blobs().iter().map(|blob| vec![0; index(blob.size)]).collect();
    for part in Splitter::new(&plan).push(file).unwrap() {
        if let Target::Blob { blob, offset_in_blob } = part.target {
            let start = index(offset_in_blob);
            blobs[blob][start..start + part.bytes.len()].copy_from_slice(part.bytes);
        }
    }
    plan.blobs().iter().zip(blobs).map(|(planned, bytes)| (planned.content, Digest::of(&bytes))).collect()
}

#[test]
fn tensor_counts_are_those_of_the_published_models() {
    let llama = SyntheticModel::llama("x", Dimensions::SMALL_LLAMA);
    let mixtral = |experts| SyntheticModel::mixtral("x", Dimensions::SMALL_MIXTRAL, experts);
    for (model, count) in [(llama, 291), (mixtral(Experts::Stacked), 323), (mixtral(Experts::Separate), 995)]
    {
        assert_eq!(model.tensor_count(), count);
        assert_eq!(header_of(&model).tensors().len(), count);
    }
}

#[test]
fn names_shapes_and_types_are_those_of_llama_cpp() {
    let header = header_of(&SyntheticModel::llama("x", Dimensions::LLAMA3_8B));
    for (name, ggml_type, shape) in [
        ("token_embd.weight", GgmlType::Q4_K, vec![4096, 128_256]),
        ("blk.0.ffn_down.weight", GgmlType::Q6_K, vec![14336, 4096]),
        ("blk.4.ffn_down.weight", GgmlType::Q4_K, vec![14336, 4096]),
        ("blk.31.attn_v.weight", GgmlType::Q6_K, vec![4096, 1024]),
        ("blk.31.attn_norm.weight", GgmlType::F32, vec![4096]),
        ("output.weight", GgmlType::Q6_K, vec![4096, 128_256]),
    ] {
        let tensor = header.tensors().find(|tensor| tensor.name() == name).expect(name);
        assert_eq!(tensor.ggml_type(), ggml_type, "{name}");
        assert_eq!(tensor.shape().dimensions(), shape, "{name}");
    }
    let mixture = header_of(&SyntheticModel::mixtral("x", Dimensions::SMALL_MIXTRAL, Experts::Stacked));
    let stack = mixture.tensors().find(|tensor| tensor.name() == "blk.7.ffn_up_exps.weight").unwrap();
    assert_eq!(stack.shape().dimensions(), [256, 256, 8]);
}

#[test]
fn full_size_is_that_of_the_published_file() {
    let size = SyntheticModel::llama("x", Dimensions::LLAMA3_8B).size_bytes().unwrap();
    // Meta-Llama-3-8B-Instruct.Q4_K_M.gguf has 4,920,734,272 bytes; it has a longer header.
    assert!((4_910_000_000..4_925_000_000).contains(&size), "{size}");
    let size = SyntheticModel::mixtral("x", Dimensions::MIXTRAL_8X7B, Experts::Stacked).size_bytes().unwrap();
    assert!((28_300_000_000..28_600_000_000).contains(&size), "{size}");
}

#[test]
fn demo_models_stay_small() {
    let llama = SyntheticModel::llama("x", Dimensions::SMALL_LLAMA).size_bytes().unwrap();
    assert!((30 << 20..50 << 20).contains(&llama), "{llama}");
    let mixtral = SyntheticModel::mixtral("x", Dimensions::SMALL_MIXTRAL, Experts::Separate);
    let mixtral = mixtral.size_bytes().unwrap();
    assert!((20 << 20..40 << 20).contains(&mixtral), "{mixtral}");
}

#[test]
fn metadata_names_the_model() {
    let header = header_of(&SyntheticModel::llama("Some Llama", TINY).with_chat_template("{{ x }}"));
    let text = |key| header.value(key).and_then(|value| value.as_str());
    let number = |key| header.value(key).and_then(|value| value.as_u64());
    assert_eq!(header.architecture(), Some("llama"));
    assert_eq!(text("general.name"), Some("Some Llama"));
    assert_eq!(text("tokenizer.chat_template"), Some("{{ x }}"));
    assert_eq!(number("llama.embedding_length"), Some(256));
    let file_type = number("general.file_type").and_then(|id| u32::try_from(id).ok());
    assert_eq!(file_type.and_then(file_type_name), Some("Q4_K_M"));
    for key in ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"] {
        assert_eq!(header.value(key).unwrap().as_array().unwrap().len(), 512, "{key}");
    }
}

#[test]
fn same_description_gives_the_same_bytes() {
    let model = SyntheticModel::llama("x", TINY);
    let bytes = written(&model);
    assert_eq!(bytes, written(&model.clone()));
    assert_eq!(bytes.len() as u64, model.size_bytes().unwrap());
    assert_ne!(bytes, written(&model.with_seed(1)));
}

#[test]
fn no_two_tensors_are_alike() {
    let mut digests: Vec<Digest> =
        blobs(&written(&SyntheticModel::llama("x", TINY))).into_iter().map(|(_, digest)| digest).collect();
    let count = digests.len();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), count);
}

#[test]
fn fine_tune_differs_in_its_header_and_the_retrained_tensors() {
    let base = SyntheticModel::llama("x", TINY);
    let tuned = base.clone().with_retrained(["blk.1.attn_q.weight"]).with_chat_template("{{ y }}");
    let (base, tuned) = (blobs(&written(&base)), blobs(&written(&tuned)));
    let differing = base.iter().zip(&tuned).filter(|(base, tuned)| base != tuned).count();
    assert_eq!((base.len(), differing), (tuned.len(), 2));
}

#[test]
fn both_spellings_of_a_mixture_share_every_expert() {
    let spelt = |experts| blobs(&written(&SyntheticModel::mixtral("x", TINY, experts)));
    let (stacked, separate) = (spelt(Experts::Stacked), spelt(Experts::Separate));
    let groups = separate.iter().filter(|(content, _)| *content == BlobContent::ExpertGroup);
    let groups: Vec<Digest> = groups.map(|(_, digest)| *digest).collect();
    assert_eq!(groups.len(), 6);
    assert!(groups.iter().all(|group| stacked.iter().any(|(_, digest)| digest == group)));
    let shared = separate.iter().filter(|(_, digest)| stacked.iter().any(|(_, other)| other == digest));
    // Everything but the header.
    assert_eq!(shared.count(), separate.len() - 1);
}

#[test]
fn f32_weights_are_ordinary_numbers() {
    let mut bytes = Vec::new();
    Stream::new(0, "output_norm.weight", GgmlType::F32, 0).copy_to(1024, &mut bytes).unwrap();
    for bytes in bytes.chunks_exact(4) {
        let value = f32::from_le_bytes(bytes.try_into().unwrap());
        assert!((1.0..2.0).contains(&value), "{value}");
    }
}

#[test]
fn stream_can_be_entered_anywhere() {
    let stream = |start, length| {
        let mut bytes = Vec::new();
        Stream::new(7, "x", GgmlType::Q4_K, start).copy_to(length, &mut bytes).unwrap();
        bytes
    };
    let length = CHUNKS_AND_A_BIT;
    assert_eq!(stream(0, length)[4096..], stream(4096, length - 4096));
}

/// More than a chunk, and not a whole number of words.
const CHUNKS_AND_A_BIT: u64 = (2 << 20) + 13;

#[test]
fn rows_of_broken_blocks_are_refused() {
    let model = SyntheticModel::llama("x", Dimensions { embedding_length: 100, ..TINY });
    assert!(model.size_bytes().is_err());
}
