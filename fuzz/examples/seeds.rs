//! Writes a few small seeds for every target into `corpus/`: `cargo run --example seeds`.
//!
//! They are generated here instead of stored as files, so that their content is readable.

use std::error::Error;
use std::fs;
use std::path::Path;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::event::ImportProgress;
use blobd_client::protocol::frame::Frame;
use blobd_client::protocol::response::{OpenHead, OpenLayer, OpenPiece, TensorLocation};
use blobd_model::quant::BlockLayout;
use blobd_store_format::artifact::Referrers;
use blobd_store_format::delta::{Delta, HeaderPatch, patch};
use blobd_store_format::descriptor::{Compression, Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::{ByteOrder, GgmlType, GgufError, GgufWriter, Header, Value};
use blobd_store_format::index::{LayoutModel, LayoutSignature, ManifestIndex};
use blobd_store_format::inventory::Inventory;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::{Member, Piece, Recipe, seal};
use blobd_store_format::signature::{Bundle, SignatureArtifact, SignedFile, Statement};
use blobd_store_format::split::{SplitPlan, Splitter, Target};
use blobd_store_format::tensor::TensorFormat;
use blobd_store_format::tensor_index::TensorIndex;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    for (name, writer) in ggufs()? {
        let file = file(&writer)?;
        for (target, portion) in [("header", 0), ("header", 255), ("file_layout", 3), ("split", 3)] {
            write(target, &format!("{name}-{portion}"), &[&[portion], &file[..]].concat())?;
        }
        write("estimate", name, &[&[1; 40], &file[..]].concat())?;
        if let Some(recipe) = recipe(&file) {
            write("recipe", name, &recipe)?;
        }
    }
    for (name, json) in recipes()? {
        write("recipe", name, &json)?;
    }
    for layout in BlockLayout::all() {
        let (id, size) = (u8::try_from(layout.ggml_type().id())?, usize::try_from(layout.bytes())?);
        write("quant", &layout.ggml_type().name(), &[&[id][..], &vec![0x3c; 2 * size]].concat())?;
    }
    // Alignment 32; two experts of 64 bytes, in reverse; a stack; one of an unknown type far away.
    write("split", "script", &[3, 5, 1, 1, 0, 1, 0, 0, 3, 7, 2, 12, 8, 77, 4, 9])?;
    for (name, json) in [
        ("one", r#"{"data":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#),
        ("metadata", r#"{"__metadata__":{"quant_type":"int4","w.group_size":"64"}}"#),
        (
            "quantised",
            r#"{"w":{"dtype":"U32","shape":[2,2],"data_offsets":[0,16]},"w.scale":{"dtype":"BF16","shape":[24],"data_offsets":[16,64]}}"#,
        ),
        (
            "experts",
            r#"{"m.experts.1.w1.weight":{"dtype":"U8","shape":[64],"data_offsets":[0,64]},"m.experts.0.w1.weight":{"dtype":"U8","shape":[64],"data_offsets":[64,128]}}"#,
        ),
    ] {
        write("safetensors", name, json.as_bytes())?;
    }
    let shards =
        "model-00001-of-00002.safetensors\nmodel-00002-of-00002.safetensors\nunet/x.safetensors\nx.bin";
    let index = r#"{"metadata":{"total_size":9},"weight_map":{"a":"model-00001-of-00002.safetensors"}}"#;
    let pipeline = r#"{"_class_name":"P","unet":["diffusers","U"],"vae":["diffusers","V"]}"#;
    write("model_folder", "shards", [shards, index, pipeline].join("\n\n").as_bytes())?;
    for kind in *b"0LxS" {
        write("tar", &format!("kind-{}", char::from(kind)), &tar(kind))?;
    }
    for (name, line) in [
        (
            "open",
            r#"{"time":"2026-11-24T10:00:00.500Z","uid":1000,"pid":7,"verb":"open","model":"m:1","result":"ok"}"#,
        ),
        (
            "denied",
            r#"{"time":"","uid":0,"verb":"pull","result":"denied","message":"https://u:p@h/a?b","details":{"a":[1]}}"#,
        ),
        ("torn", r#"{"time":"2026-11-24T10:0"#),
    ] {
        write("audit", name, line.as_bytes())?;
    }
    write("manifest", "imported", manifest()?.raw())?;
    write("manifest", "index", br#"{"schemaVersion":2,"manifests":[]}"#)?;
    for (name, text) in [
        ("short", "llama3"),
        ("hf", "hf.co/me/repo-GGUF:Q4_K_M"),
        ("http", "http://127.0.0.1:5000/a/b:c"),
        ("hub-file", "https://huggingface.co/me/repo/resolve/main/a/x-Q4_0-00001-of-00002.gguf"),
        ("file", "https://example.org/a/x.gguf?signature=1"),
        ("blob", "sha256-e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        ("pinned", "a/b@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    ] {
        write("reference", name, text.as_bytes())?;
    }
    write_tensor_indexes()?;
    write_deltas()?;
    write_signatures()?;
    write_frames()
}

/// A header of this kind with content, and a plain file. The target computes the check sums.
fn tar(kind: u8) -> Vec<u8> {
    let entry = |name: &[u8], kind: u8, content: &[u8]| {
        let mut entry = vec![0; 512];
        entry[..name.len()].copy_from_slice(name);
        entry[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
        entry[156] = kind;
        entry[257..263].copy_from_slice(b"ustar\0");
        entry.extend_from_slice(content);
        entry.resize(1024, 0);
        entry
    };
    [entry(b"a", kind, b"15 path=m.gguf\n"), entry(b"./b", b'0', b"GGUF"), vec![0; 1024]].concat()
}

fn write(target: &str, name: &str, bytes: &[u8]) -> Result<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    fs::create_dir_all(&directory)?;
    Ok(fs::write(directory.join(name), bytes)?)
}

fn ggufs() -> std::result::Result<Vec<(&'static str, GgufWriter)>, GgufError> {
    let mut dense = GgufWriter::new();
    dense.metadata("general.architecture", "llama")?.metadata("general.alignment", 64_u32)?;
    dense.metadata("tokenizer.ggml.tokens", Value::from(vec!["<s>", "a", "b"]))?;
    dense.metadata("scores", Value::from(vec![0.5_f32, 1.0]))?;
    dense.tensor("token_embd.weight", GgmlType::Q4_K, &[256, 2])?;
    dense.tensor("output_norm.weight", GgmlType::F32, &[5])?;

    let mut experts = GgufWriter::new();
    for expert in [0, 10, 1, 2, 3, 4, 5, 6, 7, 8, 9] {
        experts.tensor(&format!("blk.0.ffn_up.{expert}.weight"), GgmlType::F32, &[8, 2])?;
    }
    experts.tensor("blk.1.ffn_gate_exps.weight", GgmlType::F32, &[4, 2, 2])?;

    let mut odd = GgufWriter::new().with_byte_order(ByteOrder::Big).with_version(2);
    odd.metadata("raw", Value::String(vec![0xff, 0xfe]))?.metadata("flag", true)?;
    odd.tensor_at("last", GgmlType::from_id(77), &[5], 96)?;
    odd.tensor_at("empty", GgmlType::F16, &[0], 32)?;
    odd.tensor_at("first", GgmlType::I8, &[3], 0)?;

    Ok(vec![("dense", dense), ("experts", experts), ("odd", odd), ("nothing", GgufWriter::new())])
}

/// The header, data, and a tail.
fn file(writer: &GgufWriter) -> Result<Vec<u8>> {
    let mut file = writer.header()?;
    file.extend((0..writer.data_size()?.max(100)).map(|place| u8::try_from(place % 251).unwrap_or(0)));
    file.extend(b"tail");
    Ok(file)
}

fn recipe(file: &[u8]) -> Option<Vec<u8>> {
    let plan = SplitPlan::new(Header::parse(file).ok()?.file_layout(file.len() as u64).ok()?);
    let mut blobs = vec![Vec::new(); plan.blobs().len()];
    let mut literals = vec![Vec::new(); plan.literal_count()];
    for part in Splitter::new(&plan).push(file).ok()? {
        match part.target {
            // In file order, which for experts differs from the order in the blob; a recipe does not check
            // that.
            Target::Blob { blob, .. } => blobs[blob].extend(part.bytes),
            Target::Literal { literal } => literals[literal].extend(part.bytes),
        }
    }
    let digests: Vec<Digest> = blobs.iter().map(|blob| Digest::of(blob)).collect();
    Some(plan.recipe(Digest::of(file), &digests, literals).ok()?.to_json())
}

/// Recipes of every kind, and of every version by its fields.
fn recipes() -> Result<Vec<(&'static str, Vec<u8>)>> {
    let (file, blob) = (Digest::of(b"archive"), Digest::of(b"blob"));
    let pieces = vec![Piece::Zeros { zeros: 4 }, Piece::Blob { blob, offset: 0, length: 8 }];
    let path = "m/a.safetensors".to_owned();
    let member = Member {
        path,
        offset: 4,
        size: 8,
        digest: blob,
        format: Some(TensorFormat::Safetensors),
        tensors: 0,
    };
    let archive = Recipe::for_archive(file, pieces, Vec::new(), vec![member])?;
    let packed = Recipe::for_packed(Digest::of(b"packed"), 5, Compression::Zstd, archive.clone())?;
    let parts = format!(r#""pieces":[{{"blob":"{blob}","offset":0,"length":8}}],"tensors":[]"#);
    let member = format!(r#"[{{"path":"a","offset":0,"size":8,"digest":"{blob}","tensors":0}}]"#);
    let unpacked = format!(r#"{{"compression":"gzip","digest":"{file}","size":8}}"#);
    let earlier = |version: u32, size: u64, fields: &str| {
        let start = format!(r#"{{"version":{version},"file":"{blob}","size":{size}"#);
        seal(format!("{start},{parts}{fields}}}").into_bytes())
    };
    Ok(vec![
        ("archive", archive.to_json()),
        ("packed", packed.to_json()),
        ("whole", Recipe::for_whole_file(blob, 8)?.to_json()),
        ("version-1", earlier(1, 8, "")),
        ("version-2", earlier(2, 8, &format!(r#","members":{member}"#))),
        ("version-3", earlier(3, 4, &format!(r#","members":{member},"unpacked":{unpacked}"#))),
        ("version-4", earlier(4, 8, r#","whole":true"#)),
        ("version-5", earlier(5, 8, r#","kind":"whole""#)),
    ])
}

fn manifest() -> Result<Manifest> {
    let descriptor = |media_type: &str, content: &[u8]| Descriptor {
        media_type: MediaType::new(media_type),
        digest: Digest::of(content),
        size: content.len() as u64,
    };
    let layers = vec![
        descriptor(MediaType::OLLAMA_MODEL, b"weights"),
        descriptor("application/vnd.ollama.image.template", b"{{ .Prompt }}"),
    ];
    Ok(Manifest::compose(descriptor(MediaType::DOCKER_CONFIG, b"{}"), layers)?)
}

/// Writes an index of the model that the target expects, and a list that names it.
fn write_signatures() -> Result<()> {
    let file = |path: &str| SignedFile { path: path.to_owned(), digest: Digest::of(path.as_bytes()) };
    let statement = Statement::new("model", vec![file("model.safetensors"), file("unet/config.json")]);
    let payload = statement.and_then(|statement| statement.to_json())?;
    let bundle = Bundle::compose("0a1b2c", &payload, b"signature")?;
    write("signature", "bundle", bundle.text().as_bytes())?;
    write("signature", "statement", &payload)?;
    let manifest = |content: &[u8]| Descriptor {
        media_type: MediaType::new(MediaType::OCI_MANIFEST),
        digest: Digest::of(content),
        size: content.len() as u64,
    };
    let artifact = SignatureArtifact::compose(&manifest(b"model"), &bundle)?;
    write("signature_artifact", "artifact", &artifact)?;
    let name = Some("registry.example/team/m:1".to_owned());
    let models = [LayoutModel { manifest: manifest(b"model"), name, ref_name: Some("1".to_owned()) }];
    let bundle = Some(Digest::of(bundle.text().as_bytes()));
    let signatures = [LayoutSignature { manifest: manifest(&artifact), bundle }];
    write("signature_artifact", "index", &ManifestIndex::compose_layout(&models, &signatures)?)
}

fn write_tensor_indexes() -> Result<()> {
    let descriptor = |media_type: &str, content: &[u8]| Descriptor {
        media_type: MediaType::new(media_type),
        digest: Digest::of(content),
        size: content.len() as u64,
    };
    let recipe = descriptor(TensorIndex::RECIPE_TYPE, b"recipe");
    let subject = descriptor(MediaType::OCI_MANIFEST, b"model");
    let index = TensorIndex::compose(&subject, &[(Digest::of(b"file"), recipe)])?;
    write("tensor_index", "index", &index)?;
    let list =
        Referrers::with_artifact(None, &TensorIndex::KIND, &descriptor(MediaType::OCI_MANIFEST, &index))?;
    write("tensor_index", "list", &list.unwrap_or_default())
}

/// Writes an inventory, the manifest of a delta, and a patch with its base.
fn write_deltas() -> Result<()> {
    write("delta", "inventory", &Inventory::new([Digest::of(b"a"), Digest::of(b"b")]).to_bytes())?;
    let patch =
        patch::make(b"the other header, of this model's relative", b"the header, of this model's relative");
    let digest = Digest::of(b"header");
    let layer = Delta::patch_layer(&patch);
    let delta = Delta {
        manifest: Delta::manifest_layer(&manifest()?),
        recipes: [(Digest::of(b"file"), Delta::recipe_layer(b"recipe"))].into(),
        blobs: [(digest, Delta::blob_layer(digest, 6))].into(),
        patches: [(digest, HeaderPatch { layer, size: 36, base: Digest::of(b"base") })].into(),
        given: vec!["llama3:8b".to_owned()],
    };
    write("delta", "manifest", delta.compose()?.raw())?;
    write("delta", "patch", &[&[36, 42][..], b"the other header, of this model's relative", &patch].concat())
}

/// Writes streams of frames, and the same as responses of a daemon, with and without descriptors.
fn write_frames() -> Result<()> {
    let opened = bytes_of(&opened())?;
    write("frame", "open", &[&[9], &opened[..]].concat())?;
    let import = bytes_of(&[
        Frame::Progress(ImportProgress { completed: 1, total: 2, ..ImportProgress::default() }),
        Frame::Error(ErrorBody::new(ErrorCode::InvalidInput, "no GGUF file")),
    ])?;
    write("frame", "import", &[&[0], &import[..]].concat())?;
    write("frame", "ack", &[&[255], &Frame::Ack { received: 4 }.encode()?[..]].concat())?;

    let head = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: blobd-fd/1\r\n\r\n";
    let fds_frame = Frame::Fds { first: 0, count: 2 }.encode()?;
    let attach_at = u16::try_from(head.len() + opened.len() - fds_frame.len())?.to_le_bytes();
    let lines = opened_lines()?;
    for verb in [4, 5] {
        write("response", &format!("open-{verb}"), &[&[verb, 2], &attach_at[..], head, &opened].concat())?;
        write("response", &format!("open-lines-{verb}"), &[&[verb | 0x80, 2, 0, 0], &lines[..]].concat())?;
    }
    write("response", "import", &[&[3, 0, 0, 0][..], head, &import].concat())?;
    let lines = "{\"status\":\"pulling\"}\n{\"error\":{\"code\":\"upstream\",\"message\":\"gone\"}}\n";
    let chunked = format!(
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{lines}\r\n0\r\n\r\n",
        lines.len()
    );
    write("response", "pull", &[&[2, 0, 0, 0][..], chunked.as_bytes()].concat())?;
    let models = "HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{\"models\":[]}";
    write("response", "models", &[&[0, 0, 0, 0][..], models.as_bytes()].concat())
}

fn bytes_of(frames: &[Frame]) -> Result<Vec<u8>> {
    Ok(frames.iter().map(Frame::encode).collect::<std::result::Result<Vec<_>, _>>()?.concat())
}

fn opened_lines() -> Result<Vec<u8>> {
    let lines = opened().iter().map(serde_json::to_vec).collect::<std::result::Result<Vec<_>, _>>()?;
    Ok(lines.join(&b'\n'))
}

fn opened() -> Vec<Frame> {
    let layer = |media_type: &str, size, fd, piece_count| OpenLayer {
        media_type: MediaType::new(media_type),
        name: None,
        digest: Digest::of(media_type.as_bytes()),
        size,
        fd,
        format: TensorFormat::Gguf,
        header: None,
        piece_count,
    };
    let head = OpenHead {
        name: "m:latest".to_owned(),
        digest: Digest::of(b"m"),
        layers: vec![
            layer(MediaType::OLLAMA_MODEL, 67, None, 3),
            layer("application/vnd.ollama.image.template", 13, Some(1), 0),
        ],
        tensor_count: 1,
        fd_count: 2,
    };
    let pieces = vec![
        OpenPiece::Fd { fd: 0, offset: 0, length: 64 },
        OpenPiece::Zeros { zeros: 1 },
        OpenPiece::Literal { literal: vec![1, 2] },
    ];
    let tensor = TensorLocation {
        name: "t".to_owned(),
        type_name: "F32".to_owned(),
        shape: vec![8, 2],
        layer: 0,
        fd: Some(0),
        offset: 0,
        size: 64,
        experts: None,
    };
    vec![
        Frame::Open(head),
        Frame::Pieces { layer: 0, pieces },
        Frame::Tensors(vec![tensor]),
        Frame::Fds { first: 0, count: 2 },
    ]
}
