//! `show`: what it says about a model.

use std::fs;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::raw_gguf::{RawGguf, id, string};
use serde_json::json;

fn import(daemon: &TestDaemon, name: &str, file: &[u8]) {
    let path = daemon.scratch().join(format!("{name}.gguf"));
    fs::write(&path, file).unwrap();
    let path = path.to_str().unwrap();
    daemon.command().run(["import", path, "--name", name]).succeeds();
}

#[test]
fn keys_and_values_that_json_cannot_hold_stay_apart() {
    let daemon = TestDaemon::start();
    let file = RawGguf::new()
        .key(b"k\xff", id::U32, 1_u32.to_le_bytes())
        .key(b"k\xfe", id::U32, 2_u32.to_le_bytes())
        .key(b"k\\xff", id::U32, 3_u32.to_le_bytes())
        .key("nan", id::FLOAT32, f32::NAN.to_le_bytes())
        .key("low", id::FLOAT32, f32::NEG_INFINITY.to_le_bytes())
        .key("bytes", id::STRING, string(b"\xff\x00"))
        .with_data(&[]);
    import(&daemon, "odd", &file);
    let shown = daemon.command().line("show odd --json").succeeds().json();
    let expected = json!({
        "k\\xff": 1, "k\\xfe": 2, "k\\\\xff": 3, "nan": "NaN", "low": "-Infinity", "bytes": {"base64": "/wA="},
    });
    assert_eq!(shown["metadata"], expected);
}
