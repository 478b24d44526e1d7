//! Programs that others wrote, if they are installed: stock Ollama and OCI's conformance suite. CONTRIBUTING.md says how to install
//! them.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use blobd_fixtures::skipped::skipped;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::programs::is_unavailable;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;

use super::{Site, layers};

/// Runs a program to its end; `None`, with the reason recorded as that of a skipped test, if it is not installed.
fn output_of(command: &mut Command) -> Option<Output> {
    started(command.output(), command)
}

fn started<T>(result: io::Result<T>, command: &Command) -> Option<T> {
    match result {
        Ok(started) => Some(started),
        Err(error) if is_unavailable(&error) => {
            skipped(format_args!("{} is not installed", command.get_program().display()));
            None
        }
        Err(error) => panic!("{command:?}: {error}"),
    }
}

/// `ollama serve` with a folder of its own, killed when it is dropped.
struct Ollama<'f> {
    child: Child,
    address: SocketAddr,
    folder: &'f Path,
}

impl<'f> Ollama<'f> {
    fn start(folder: &'f Path) -> Option<Self> {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut serve = Self::command(address, folder);
        serve.arg("serve").stdout(Stdio::null()).stderr(Stdio::null());
        let child = started(serve.spawn(), &serve)?;
        let ollama = Self { child, address, folder };
        eventually("Ollama listens", || TcpStream::connect(address).is_ok());
        Some(ollama)
    }

    fn command(address: SocketAddr, folder: &Path) -> Command {
        let mut command = Command::new("ollama");
        command.env("OLLAMA_HOST", address.to_string()).env("OLLAMA_MODELS", folder.join("models"));
        command.env("HOME", folder).env("NO_PROXY", "127.0.0.1");
        command
    }

    fn pull(&self, name: &str) {
        let mut pull = Self::command(self.address, self.folder);
        let pulled = pull.args(["pull", "--insecure", name]).output().unwrap();
        assert!(pulled.status.success(), "{name}: {}", String::from_utf8_lossy(&pulled.stderr));
    }

    fn blob(&self, digest: &str) -> Vec<u8> {
        fs::read(self.folder.join("models/blobs").join(format!("sha256-{digest}"))).unwrap()
    }
}

impl Drop for Ollama<'_> {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

#[test]
fn stock_ollama_pulls_what_is_stored_and_what_is_passed_through() {
    let first = Site::start();
    let weights = first.add(&ModelFile::dense(1), &["tiny:1", "hf.co/Org/Model-GGUF:Q4_0"]);
    let mirror = format!("[mirrors]\n\"registry.ollama.ai\" = \"http://{}\"\n", first.address);
    let second = Site::start_with(&format!("upstream = [\"registry.ollama.ai\"]\n{mirror}"));
    for site in [&first, &second] {
        let folder = tmpfs_directory();
        let Some(ollama) = Ollama::start(folder.path()) else { return };
        ollama.pull(&format!("http://{}/library/tiny:1", site.address));
        assert!(ollama.blob(&sha256(&weights)) == weights);
    }
    // Its names have two parts, and the model is found without the host of the hub.
    let folder = tmpfs_directory();
    let Some(ollama) = Ollama::start(folder.path()) else { return };
    ollama.pull(&format!("http://{}/Org/Model-GGUF:Q4_0", first.address));
    assert!(ollama.blob(&sha256(&weights)) == weights);
}

#[test]
fn conformance_suite_of_oci_has_no_failure() {
    let site = Site::start();
    site.add(&ModelFile::dense(1), &["tiny:1"]);
    let (manifest, digest) = site.manifest("library/tiny", "1");
    let results = tmpfs_directory();
    let mut suite = Command::new("conformance");
    suite.current_dir(results.path()).env("OCI_REGISTRY", site.address.to_string());
    suite.env("OCI_TLS", "disabled").env("OCI_REPO1", "library/tiny").env("OCI_VERSION", "1.1");
    suite.env("OCI_API_PUSH", "false").env("OCI_RO_DATA_TAGS", "1");
    suite.env("OCI_RO_DATA_MANIFESTS", &digest).env("OCI_RO_DATA_BLOBS", layers(&manifest).join(" "));
    let Some(output) = output_of(&mut suite) else { return };
    // Without pushes it cannot write its report, and ends with a panic after the summary.
    let printed = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let counts = |word: &str| -> Vec<u64> {
        let lines = printed.lines().filter_map(|line| line.trim().strip_prefix(word)?.rsplit_once(": "));
        lines.filter_map(|(_, count)| count.trim().parse().ok()).collect()
    };
    assert_eq!((counts("FAIL."), counts("Error.")), (vec![0], vec![0]), "{printed}");
    assert!(counts("Pass.").first().is_some_and(|passed| *passed >= 10), "{printed}");
}
