//! Operations that never end: pulls at one byte per second, and imports of files that hang when they are
//! read, inspected or closed. Their clients disconnect in the middle and start again.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use blobd_tests::model::{ModelFile, noise};
use blobd_tests::registry::FakeRegistry;

use super::Begin;
use crate::Outcome;
use crate::context::{AttackContext, pass_file};

const PULLS: usize = 12;
/// How long each client stays connected.
const LIFE: Duration = Duration::from_secs(3);
const LAYER: &str = "application/vnd.ollama.image.model";

pub(crate) fn prepare(context: &AttackContext) -> Outcome<Begin> {
    let registry = FakeRegistry::start()?;
    for number in 0..PULLS {
        let model = ModelFile::dense(1000 + number as u64).bytes();
        let config = noise(number as u64, "config", 64);
        registry
            .add_model(&format!("library/m{number}:latest"), &config, &[(LAYER, &model)])
            .map_err(|error| error.to_string())?;
    }
    // Each is opened only once: opening it again would wait for its pages, which hang by then.
    let hanging: Vec<File> = context.hanging_files.iter().map(File::open).collect::<Result<_, _>>()?;
    let (context, registry) = (context.clone(), Arc::new(registry));
    Ok(Box::new(move || {
        let mut pulls: Vec<UnixStream> = Vec::new();
        context.repeat(LIFE, move |context| {
            pulls.clear();
            for number in 0..PULLS {
                let name = registry.name(&format!("library/m{number}"));
                let body = format!(r#"{{"reference":"{name}","limit_rate":1}}"#);
                pulls.push(context.send("POST /v1/pull HTTP/1.1", &body)?);
                context.count("pulls");
            }
            Ok(())
        });
        for file in hanging {
            let mut import = None;
            context.repeat(LIFE, move |context| {
                drop(import.take());
                import = Some(begin_import(context, &file)?);
                context.count("imports");
                Ok(())
            });
        }
        Ok(())
    }))
}

fn begin_import(context: &AttackContext, file: &File) -> Outcome<UnixStream> {
    let stream = context.upgrade("/v1/import", r#"{"file_name":"hangs.gguf"}"#)?;
    pass_file(&stream, file.as_fd())?;
    Ok(stream)
}
