# What CI runs: all of it, or the lane `quick` or `full`
check *lane:
    .ci/run {{ lane }}

# The tests alone; those against a registry of others take docker-registry, else they are skipped
test *arguments:
    cargo test --workspace {{ arguments }}

# The Python and Go clients against the daemon; what is not installed is skipped
clients:
    cargo build --package blobd
    .ci/clients

# After an edit: format, lints, and the tests of what changed since a commit
quick base="HEAD":
    .ci/after-edit {{ base }}

# How many of N random changes to a crate do its unit tests notice? Needs cargo-mutants
mutants crate n="20" *seed:
    .ci/mutants {{ crate }} {{ n }} {{ seed }}

# Format and lints alone
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings

# Print crates, modules and which uses which; fails if the modules of a crate depend on each other in a cycle
structure:
    cargo run --quiet --package blobd-tests --bin structure

# Put all sources into form
fmt:
    cargo fmt --all
    cd fuzz && cargo fmt

# The optimised binary: target/release/blobd
build:
    cargo build --release --package blobd

# Build and install everything, units of systemd included: `just install DESTDIR=/tmp/tree PREFIX=/usr`
install *settings:
    packaging/build
    env {{ settings }} packaging/install

# Debian packages in target/debian
deb:
    packaging/build
    packaging/build-deb

# Install, use, restart, upgrade and purge the Debian package under a real systemd; as root, else it is skipped
systemd:
    packaging/build
    cargo build --release --package blobd-tests --bin test-client
    tests/systemd/newer
    tests/systemd/run

# A model pulled, split, shared, opened and exported, offline
demo:
    cargo run --release -- demo

# Draw the README's pictures again: a recording of a real run, and one copy on disk and in memory
recording: build
    python3 docs/images/record.py target/release/blobd demo > docs/images/demo.svg
    python3 docs/images/sharing.py > docs/images/sharing.svg

# Take the README's pictures of `blobd web` again; takes chromium
pictures:
    BLOBD_PICTURES={{ justfile_directory() }}/docs/images cargo test --package blobd-tests --test it -- web::page::pictures_show

# Measure against plain tools (docs/BENCHMARKS.md); the pull takes curl, else it is skipped
bench *arguments: build
    cargo run --release --package blobd-tests --bin bench -- {{ arguments }}

# Crash the store on the real kernel; as root, else parts are skipped (docs/RELIABILITY.md)
crash *arguments: build
    cargo run --release --package blobd-tests --bin crash -- {{ arguments }}

# Attack a daemon as one user while another works with it; as root, else it is skipped (docs/SECURITY.md)
abuse *arguments: build
    cargo run --release --package blobd-tests --bin abuse -- {{ arguments }}

# Ten users with quotas pull and import at once for some minutes; as root, else it is skipped
quotas seconds="180":
    BLOBD_QUOTA_SECONDS={{ seconds }} cargo test --package blobd-tests --test it ten_users -- --nocapture

# Compare with an independent reader of GGUF files; takes `pip install gguf`
oracle +files: build
    python3 tests/oracle.py target/release/blobd {{ files }}

# Calculate the expected memory estimates of the tests again, independently of blobd (docs/ESTIMATES.md)
estimates:
    python3 tests/estimates.py > store-format/model/src/estimate/expected.json

# Compare dequantisation with an independent one, bit for bit; takes `pip install gguf`
quants:
    cargo build --release --package blobd-tests --bin dequantize
    python3 tests/quants.py target/release/dequantize

# Compare `blobd tensor` with an independent reader and numpy; takes `pip install gguf`
tensors *files: build
    python3 tests/tensors.py target/release/blobd {{ files }}

# Check edited and rewritten models with PyPI's gguf and, if found in $LLAMA_BIN, llama.cpp's tools
rewrite +files: build
    python3 tests/rewrite.py target/release/blobd {{ files }}

# Compare the KV cache and the graph that `fit` estimates with llama.cpp's allocator; takes llama-fit-params, else it is skipped
kv-oracle *models: build
    python3 tests/kv_oracle.py target/release/blobd {{ models }}

# Compare headers with an independent reader, on these files and 200 generated ones; takes `pip install gguf`
headers *files: build
    python3 tests/headers.py target/release/blobd {{ files }}

# Real engines on a model of yours, plain and from blobd; takes node, Python, cargo, Go, else they are skipped
engines model prompt=" The" text="": build
    tests/engines/run target/release/blobd {{ model }} "{{ prompt }}" "{{ text }}"

# Two engine processes on two models that share tensors: the memory of their weights together
siblings one two prompt=" The": build
    tests/engines/siblings target/release/blobd {{ one }} {{ two }} "{{ prompt }}"

# Two Python processes on one folder of safetensors files: the memory of their weights together; takes NumPy or PyTorch
folder model: build
    tests/engines/folder target/release/blobd {{ model }}

# What llama.cpp's converter leaves alone in models of three architectures, and blobd shares; takes transformers and torch
converted converter: build
    python3 tests/converted.py target/release/blobd {{ converter }}

# A cache of the hub that huggingface_hub itself makes, imported, pulled and shown; takes huggingface_hub, 1.x or 2.x
hub-stores model: build
    python3 tests/hub_stores.py target/release/blobd {{ model }}

# Every fuzz target for so many seconds; takes cargo-fuzz and a C++ compiler
fuzz seconds="60":
    #!/usr/bin/env bash
    set -euo pipefail
    cd fuzz
    cargo run --quiet --example seeds
    export RUSTC_BOOTSTRAP=1 # cargo-fuzz takes flags of the nightly compiler
    for target in $(cargo fuzz list); do
        # No sanitizer: memory safety is the compiler's business but in client/src/map.rs, capi and preload.
        cargo fuzz run --sanitizer none "$target" -- \
            -max_total_time={{ seconds }} -max_len=16384 -timeout=5 -rss_limit_mb=512
    done

# The crates' documentation, this project's private items included
doc:
    cargo doc --no-deps --workspace --document-private-items

# Licences, banned and duplicate crates, sources, advisories; takes cargo-deny
deny:
    cargo deny check
