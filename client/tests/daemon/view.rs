//! A model as one GGUF file in memory.

use blobd_client::error::ModelError;
use blobd_client::gguf_view::GgufView;
use blobd_client::model::OpenModel;
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_client::protocol::response::HeaderLocation;
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::gguf::{GgmlType, GgufWriter, Header, Value};

use crate::fake::{FakeModel, bytes_of};

fn page() -> usize {
    rustix::param::page_size()
}

fn open(model: FakeModel) -> OpenModel {
    model.client().open(&"tiny".parse().unwrap()).unwrap()
}

/// A header with the usual alignment of tensors of this name and number of F32s.
fn header_of(metadata: &[(&str, Value)], tensors: &[(&str, usize)]) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    for (key, value) in metadata {
        writer.metadata(key, value.clone()).unwrap();
    }
    for (name, count) in tensors {
        writer.tensor(name, GgmlType::F32, &[*count as u64]).unwrap();
    }
    writer.header().unwrap()
}

fn set_header(model: &mut FakeModel, layer: usize, header: &[u8]) {
    let fd = model.add_file(header);
    model.head.layers[layer].header = Some(HeaderLocation { fd, size: header.len() as u64 });
}

/// A model of one file; each tensor has a blob of its own.
fn model_of(tensors: &[(&str, usize)]) -> FakeModel {
    let mut model = FakeModel::new();
    let metadata = [("general.architecture", Value::from("llama")), ("general.alignment", 64_u32.into())];
    set_header(&mut model, 0, &header_of(&metadata, tensors));
    for (seed, (name, count)) in (0..).zip(tensors) {
        let fd = (*count > 0).then(|| model.add_file(&bytes_of(seed, count * 4)));
        model.add_tensor(name, fd, 0, *count as u64 * 4);
    }
    model
}

/// The tensors of an image, read as an engine reads them, each with its place in the image.
fn tensors_of(image: &[u8]) -> Vec<(String, usize, &[u8])> {
    let header = Header::parse(image).unwrap();
    let read = |tensor: blobd_store_format::tensor::TensorInfo<'_>| {
        let start = usize::try_from(header.data_offset() + tensor.offset()).unwrap();
        let length = usize::try_from(tensor.size_bytes().unwrap()).unwrap();
        (tensor.name().to_owned(), start, &image[start..start + length])
    };
    header.tensors().map(read).collect()
}

/// The segments cover the image without a gap, in whole pages.
fn assert_covered(image: &GgufView) {
    let mut end = 0;
    for segment in image.segments() {
        assert_eq!((segment.range.start, segment.range.len() % page()), (end, 0));
        end = segment.range.end;
    }
    assert_eq!(end, image.len().next_multiple_of(page()));
}

#[test]
fn image_is_a_gguf_file_with_the_same_tensors_and_outlives_the_model() {
    let tensors = [("a", 1), ("b", page() / 4), ("none", 0), ("c", 5000), ("d", 3)];
    let model = open(model_of(&tensors));
    let image = model.contiguous().unwrap();
    drop(model);
    let header = Header::parse(&image).unwrap();
    assert_eq!((header.architecture(), header.alignment()), (Some("llama"), u32::try_from(page()).unwrap()));
    assert_eq!(image.as_ptr().addr() % page(), 0);
    let found = tensors_of(&image);
    assert_eq!(found.len(), tensors.len());
    for (seed, ((name, start, bytes), (expected, count))) in (0..).zip(found.iter().zip(tensors)) {
        assert_eq!((name.as_str(), start % page()), (expected, 0));
        assert!(**bytes == bytes_of(seed, count * 4), "{name}");
    }
    assert_covered(&image);
    assert_eq!((image.segments().len(), image.copied_bytes()), (5, 0));
}

#[test]
fn only_experts_off_a_pages_start_are_copied() {
    let stride = page() + 64;
    let names = ["x.0", "x.1", "x.2"];
    let mut model = FakeModel::new();
    set_header(&mut model, 0, &header_of(&[], &names.map(|name| (name, stride / 4))));
    let fd = model.add_file(&bytes_of(7, 3 * stride));
    for (place, name) in names.iter().enumerate() {
        model.add_tensor(name, Some(fd), (place * stride) as u64, stride as u64);
    }
    let image = open(model).contiguous().unwrap();
    let copied: Vec<_> = image.segments().iter().map(|segment| segment.is_copied).collect();
    assert_eq!(copied, [true, false, true, true]);
    assert_eq!(image.copied_bytes(), 2 * stride);
    for (place, (name, _, bytes)) in tensors_of(&image).into_iter().enumerate() {
        assert!(bytes == &bytes_of(7, 3 * stride)[place * stride..(place + 1) * stride], "{name}");
    }
    assert_covered(&image);
}

#[test]
fn packed_experts_of_whole_pages_are_mapped() {
    let stride = 2 * page();
    let mut model = FakeModel::new();
    set_header(&mut model, 0, &header_of(&[], &[("x.1", stride / 4), ("x.0", stride / 4)]));
    let fd = model.add_file(&bytes_of(3, 2 * stride));
    model.add_tensor("x.0", Some(fd), 0, stride as u64);
    model.add_tensor("x.1", Some(fd), stride as u64, stride as u64);
    let image = open(model).contiguous().unwrap();
    assert_eq!(image.copied_bytes(), 0);
    let found = tensors_of(&image);
    assert!(found[0].2 == &bytes_of(3, 2 * stride)[stride..], "the table's order is the file's");
    assert!(found[1].2 == &bytes_of(3, 2 * stride)[..stride]);
}

#[test]
fn shards_become_one_file_in_the_order_of_their_numbers() {
    let mut model = FakeModel::new();
    let second = model.add_layer(MediaType::OLLAMA_MODEL, None, 0);
    let shard = |number: u16| [("split.no", number.into()), ("split.count", Value::from(2_u16))];
    let mut first_metadata = vec![("general.architecture", Value::from("llama"))];
    first_metadata.extend(shard(0));
    set_header(&mut model, 0, &header_of(&shard(1), &[("late", 2)]));
    set_header(&mut model, second, &header_of(&first_metadata, &[("early", 3)]));
    let (late, early) = (model.add_file(&[1; 8]), model.add_file(&[2; 12]));
    model.add_tensor("late", Some(late), 0, 8);
    model.add_tensor("early", Some(early), 0, 12);
    model.tensors[1].layer = 1;
    let image = open(model).contiguous().unwrap();
    let header = Header::parse(&image).unwrap();
    assert_eq!(header.architecture(), Some("llama"));
    assert!(header.value("split.count").is_none());
    let found = tensors_of(&image);
    assert_eq!((found[0].0.as_str(), found[0].2), ("early", &[2; 12][..]));
    assert_eq!((found[1].0.as_str(), found[1].2), ("late", &[1; 8][..]));
}

#[test]
fn layer_that_is_stored_whole_is_its_own_image() {
    let file = [header_of(&[], &[("a", 8)]), vec![9; 32]].concat();
    let mut model = FakeModel::new();
    let fd = model.add_file(&file);
    model.add_layer("application/vnd.ollama.image.projector", Some(fd), file.len() as u64);
    let text = model.add_file(b"not a model");
    model.add_layer("application/vnd.ollama.image.adapter", Some(text), 11);
    let model = open(model);
    let image = model.contiguous_component("projector").unwrap();
    assert!(image[..] == file);
    assert_covered(&image);
    let error = model.contiguous_component("adapter").unwrap_err();
    assert_eq!(error.to_string(), "layer 2: no GGUF header");
}

#[test]
fn model_without_gguf_files_has_no_image() {
    let model = open(FakeModel::new());
    assert!(matches!(model.contiguous(), Err(ModelError::NoHeader { layer: Some(0) })));
    let error = model.contiguous_component("projector").unwrap_err();
    assert_eq!(error.to_string(), "model: no GGUF header");
}

#[test]
fn image_takes_all_tensors() {
    let client = model_of(&[("a", 1), ("b", 1)]).client();
    let some = TensorSelection::Prefix("a".to_owned());
    let params = OpenParams { tensors: some, ..OpenParams::new("tiny".parse().unwrap()) };
    let error = client.open_with(&params).unwrap().contiguous().unwrap_err();
    assert_eq!(error.to_string(), r#"layer 0: tensor "b" was not requested; open with TensorSelection::All"#);
}

#[test]
fn header_that_contradicts_the_file_is_refused() {
    let mut model = model_of(&[("a", 1)]);
    set_header(&mut model, 0, b"GGUF\xff\xff\xff\xff");
    let error = open(model).contiguous().unwrap_err();
    assert!(matches!(error, ModelError::Gguf { layer: Some(0), .. }), "{error}");

    let mut model = model_of(&[("a", 1)]);
    set_header(&mut model, 0, &header_of(&[], &[("a", 2)]));
    let error = open(model).contiguous().unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"tensor "a": wrong size: expected 8 bytes by its type and shape, found 4; run `blobd verify`"#
    );

    let mut model = model_of(&[("a", 1)]);
    model.tensors[0].offset = 1;
    let error = open(model).contiguous().unwrap_err();
    assert!(matches!(error, ModelError::Short { .. }), "{error}");
}

#[test]
fn tensor_of_unknown_type_has_no_place_in_an_image() {
    let mut writer = GgufWriter::new();
    writer.tensor_at("odd", GgmlType::from_id(4711), &[4], 0).unwrap();
    let mut model = FakeModel::new();
    set_header(&mut model, 0, &writer.header().unwrap());
    let error = open(model).contiguous().unwrap_err();
    assert!(matches!(error, ModelError::Gguf { layer: None, .. }), "{error}");
    assert!(error.to_string().contains("odd"), "{error}");
}
