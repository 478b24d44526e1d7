# Run the checks of CI: all of them, or the part `quick` or `full`
check *part:
    .ci/run {{ part }}

# Run only the tests; some need docker-registry and are skipped without it
test *arguments:
    cargo test --workspace {{ arguments }}

# Test the Python and Go clients with the daemon; skips a language that is not installed
clients:
    cargo build --package blobd
    .ci/clients

# Check an edit: format, lints, and the tests of what has changed since a commit
quick base="HEAD":
    .ci/after-edit {{ base }}

# Make N random changes to a crate and list those that its unit tests do not notice; needs cargo-mutants
mutants crate n="20" *seed:
    .ci/mutants {{ crate }} {{ n }} {{ seed }}

# Check format and lints only
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings

# Print crates, modules and which uses which; fails if the modules of a crate depend on each other in a cycle
structure:
    cargo run --quiet --package blobd-tests --bin structure

# Format all sources
fmt:
    cargo fmt --all
    cd fuzz && cargo fmt

# Build the optimised binary: target/release/blobd
build:
    cargo build --release --package blobd

# Build and install everything, including the systemd units: `just install DESTDIR=/tmp/tree PREFIX=/usr`
install *settings:
    packaging/build
    env {{ settings }} packaging/install

# Build Debian packages in target/debian
deb:
    packaging/build
    packaging/build-deb

# Build static binaries for x86-64 and ARM64, and try that of this machine; needs musl-tools and cross compilers
static:
    packaging/build-static
    packaging/check-static target/$(uname -m)-unknown-linux-musl/release/blobd

# Build everything that a release has, in target/release-VERSION: static binaries, Debian packages, sources, checksums
release:
    packaging/release

# Install, use, restart, upgrade and purge the Debian package under a real systemd; skipped without root
systemd:
    packaging/build
    cargo build --release --package blobd-tests --bin test-client
    tests/systemd/newer
    tests/systemd/run

# Run the demo: a model is pulled, split, shared, opened and exported, offline
demo:
    cargo run --release -- demo

# Draw the README's pictures again: the recording of a run, and how copies are shared on disk and in memory
recording: build
    python3 docs/images/record.py target/release/blobd demo > docs/images/demo.svg
    python3 docs/images/sharing.py > docs/images/sharing.svg

# Take the README's screenshots of `blobd web` again; needs chromium
pictures:
    BLOBD_PICTURES={{ justfile_directory() }}/docs/images cargo test --package blobd-tests --test it -- web::page::pictures_show

# Check the accessibility of the page of `blobd web` with axe-core from npm; needs chromium
axe:
    npm install --no-save --no-audit --no-fund --prefix target/axe axe-core@4
    cargo test --package blobd-tests --test it -- web::page::accessibility

# Measure against plain tools (docs/BENCHMARKS.md); the pull needs curl and is skipped without it
bench *arguments: build
    cargo run --release --package blobd-tests --bin bench -- {{ arguments }}

# Crash the store on the real kernel (docs/RELIABILITY.md); parts are skipped without root
crash *arguments: build
    cargo run --release --package blobd-tests --bin crash -- {{ arguments }}

# Attack a daemon as one user while another works with it (docs/SECURITY.md); skipped without root
abuse *arguments: build
    cargo run --release --package blobd-tests --bin abuse -- {{ arguments }}

# Let ten users with quotas pull and import at once for some minutes; skipped without root
quotas seconds="180":
    BLOBD_QUOTA_SECONDS={{ seconds }} cargo test --package blobd-tests --test it ten_users -- --nocapture

# Compare with an independent reader of GGUF files; needs `pip install gguf`
oracle +files: build
    python3 tests/oracle.py target/release/blobd {{ files }}

# Calculate the expected memory estimates of the tests again, independently of blobd (docs/ESTIMATES.md)
estimates:
    python3 tests/estimates.py > store-format/model/src/estimate/expected.json

# Compare dequantisation with an independent implementation, bit for bit; needs `pip install gguf`
quants:
    cargo build --release --package blobd-tests --bin dequantize
    python3 tests/quants.py target/release/dequantize

# Compare `blobd tensor` with an independent reader and numpy; needs `pip install gguf`
tensors *files: build
    python3 tests/tensors.py target/release/blobd {{ files }}

# Check edited and rewritten models with PyPI's gguf and, if found in $LLAMA_BIN, llama.cpp's tools
rewrite +files: build
    python3 tests/rewrite.py target/release/blobd {{ files }}

# Compare the KV cache and the graph that `fit` estimates with llama.cpp's allocator; skipped without llama-fit-params
kv-oracle *models: build
    python3 tests/kv_oracle.py target/release/blobd {{ models }}

# Compare headers with an independent reader, on these files and 200 generated ones; needs `pip install gguf`
headers *files: build
    python3 tests/headers.py target/release/blobd {{ files }}

# Run real engines on a model of yours, from the plain file and from blobd; skips engines whose language is not installed
engines model prompt=" The" text="": build
    tests/engines/run target/release/blobd {{ model }} "{{ prompt }}" "{{ text }}"

# Download a model of yours from the hub's API of `[serve]` with the clients of Rust and llama.cpp, which are built first
downloads model: build
    tests/engines/downloads target/release/blobd {{ model }}

# Run two engine processes on two models that share tensors, and measure the memory of their weights together
siblings one two prompt=" The": build
    tests/engines/siblings target/release/blobd {{ one }} {{ two }} "{{ prompt }}"

# Run two Python processes on one folder of safetensors files, and measure their memory; needs NumPy or PyTorch
folder model: build
    tests/engines/folder target/release/blobd {{ model }}

# Check what models of three architectures share with their GGUF conversions; needs transformers and torch
converted converter: build
    python3 tests/converted.py target/release/blobd {{ converter }}

# Check that huggingface_hub and blobd read each other's models; needs huggingface_hub, 1.x or 2.x
hub-stores model: build
    python3 tests/hub_stores.py target/release/blobd {{ model }}

# Run every fuzz target for some seconds; needs cargo-fuzz and a C++ compiler
fuzz seconds="60":
    #!/usr/bin/env bash
    set -euo pipefail
    cd fuzz
    cargo run --quiet --example seeds
    export RUSTC_BOOTSTRAP=1 # cargo-fuzz uses flags of the nightly compiler
    for target in $(cargo fuzz list); do
        # No sanitizer: the compiler ensures memory safety outside of a few modules (docs/ARCHITECTURE.md).
        cargo fuzz run --sanitizer none "$target" -- \
            -max_total_time={{ seconds }} -max_len=16384 -timeout=5 -rss_limit_mb=512
    done

# Build the crates' documentation, including this project's private items
doc:
    cargo doc --no-deps --workspace --document-private-items

# Check licences, banned and duplicate crates, sources and advisories; needs cargo-deny
deny:
    cargo deny check
