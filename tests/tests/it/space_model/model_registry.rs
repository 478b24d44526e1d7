//! A registry with the models of the cases, which can interrupt pulls.

use blobd_client::protocol::request::PullParams;
use blobd_store_format::reference::Reference;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::samples::{LARGE, LARGE_RELATIVE, files};

/// Small files that share tensors, a mixture of experts, and two that take more than one request to pull.
pub(super) const FILES: [usize; 6] = [0, 1, 2, 3, LARGE, LARGE_RELATIVE];
const TEMPLATE: &[u8] = b"{{ .Prompt }}";

pub(super) struct ModelRegistry(FakeRegistry);

impl ModelRegistry {
    pub(super) fn start() -> Self {
        let registry = FakeRegistry::start().unwrap();
        for file in FILES {
            let weights = ("application/vnd.ollama.image.model", files()[file].bytes.as_slice());
            let template = ("application/vnd.ollama.image.template", TEMPLATE);
            registry.add_model(&model(file), b"{}", &[weights, template]).unwrap();
        }
        Self(registry)
    }

    /// The parameters of a pull of a file's model.
    pub(super) fn pull(&self, file: usize, name: Reference) -> PullParams {
        let source = self.0.name(&model(file)).parse().unwrap();
        PullParams { source, name: Some(name), limit_rate: None, force: true }
    }

    /// From now on, pulls fail in the middle of the weights, or with `whole` after them.
    pub(super) fn break_off(&self, file: usize, whole: bool) {
        const GONE: u16 = 410;
        const ALWAYS: usize = usize::MAX;
        if whole {
            let template = format!("/cdn/sha256:{}", sha256(TEMPLATE));
            self.0.add_fault(&template, ALWAYS, Fault::Status(GONE));
        } else {
            let weights = format!("/cdn/{}", files()[file].digest);
            self.0.add_fault(&weights, 1, Fault::CutAfter(files()[file].bytes.len() / 2));
            self.0.add_fault(&weights, ALWAYS, Fault::Status(GONE));
        }
    }

    /// From now on, pulls succeed.
    pub(super) fn clear_faults(&self) {
        self.0.clear_faults();
    }
}

fn model(file: usize) -> String {
    format!("library/file-{file}:latest")
}
