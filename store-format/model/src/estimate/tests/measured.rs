//! Compares KV cache and graph with llama.cpp's own allocator.
//!
//! `tests/llama_memory.cpp` printed the sizes with llama.cpp b11434, whose models had these tensors and 16-bit floats
//! in the cache.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::ollama::ExpectedHeader;
use super::*;
use crate::estimate::rule::NOT_COMPARED;

const MEBIBYTE: u64 = 1 << 20;

#[derive(Deserialize)]
struct Measured {
    name: String,
    header: ExpectedHeader,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    context: u64,
    kv: u64,
    graph: u64,
}

#[test]
fn cache_and_graph_are_those_of_llama_cpp_within_a_mebibyte() {
    let measured: Vec<Measured> = serde_json::from_str(include_str!("../llama_cpp_measured.json")).unwrap();
    let mut architectures = BTreeSet::new();
    for Measured { name, header, cases } in &measured {
        let header = header.header();
        let models = set(&header);
        let contexts: Vec<u64> = cases.iter().map(|case| case.context).collect();
        assert_eq!(contexts, [2048, 32768], "{name}");
        for Case { context, kv, graph } in cases {
            let settings = settings(*context, 1, CacheType::F16);
            let estimate = models.estimate(&settings, Basis::LlamaCpp).unwrap();
            let differences =
                [estimate.kv_total_bytes.abs_diff(*kv), estimate.graph_full_bytes.abs_diff(*graph)];
            assert!(
                differences.into_iter().all(|bytes| bytes < MEBIBYTE),
                "{name}, {context}: {differences:?}"
            );
        }
        architectures.insert(models.model.metadata().architecture().to_owned());
    }
    assert!(architectures.len() >= 60, "{architectures:?}");
    assert!(NOT_COMPARED.iter().all(|name| !architectures.contains(*name)));
    let documentation = include_str!("../../../../../docs/ESTIMATES.md").replace('\n', " ");
    let listed = format!("not compared with llama.cpp: {}.", NOT_COMPARED.join(", "));
    assert!(documentation.contains(&listed), "docs/ESTIMATES.md: {listed}");
}
