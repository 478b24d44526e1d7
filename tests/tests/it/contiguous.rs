//! A model as one GGUF file in memory, from a real daemon, in every layout.

use blobd_store_format::gguf::Header;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;

use crate::layouts::layouts;

/// Compares an image's tensors with those of the original file.
fn assert_same_tensors(image: &[u8], file: &ModelFile, name: &str) {
    let header = Header::parse(image).unwrap();
    assert_eq!(header.tensors().len(), file.tensors.len(), "{name}");
    for (found, expected) in header.tensors().zip(&file.tensors) {
        let start = usize::try_from(header.data_offset() + found.offset()).unwrap();
        assert_eq!(found.name(), expected.name, "{name}");
        assert_eq!(found.ggml_type(), expected.ggml_type, "{name}");
        assert_eq!(found.shape().dimensions(), expected.shape, "{name}");
        assert!(image[start..start + expected.bytes().len()] == expected.bytes(), "{name}: {}", found.name());
        assert_eq!(start % rustix::param::page_size(), 0, "{name}: {}", found.name());
    }
    for (key, value) in &file.metadata {
        let found = header.value(key).map(|found| found.to_value());
        // As text, because NaN is not equal to itself.
        assert_eq!(format!("{found:?}"), format!("{:?}", Some(value)), "{name}: {key}");
    }
}

#[test]
fn image_of_every_layout_has_the_files_tensors_and_metadata() {
    let daemon = TestDaemon::start();
    for (name, file) in layouts() {
        let path = file.write_to(daemon.scratch(), &format!("{name}.gguf"));
        daemon
            .command()
            .run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()])
            .succeeds();
        let model = daemon.client().open(&name.parse().unwrap()).unwrap();
        match model.contiguous() {
            Ok(image) => assert_same_tensors(&image, &file, name),
            // A tensor of unknown size has no place in the image.
            Err(error) => assert_eq!(name, "unknown-types", "{error}"),
        }
    }
}
