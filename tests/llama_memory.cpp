// Prints the memory that llama.cpp takes for models: weights, context (KV cache) and computation graph, in bytes.
//
//     c++ -std=c++17 tests/llama_memory.cpp -I LLAMA/include -I LLAMA/ggml/include -I LLAMA/src -L LLAMA/build/bin -lllama -lggml
//     echo "MODEL.gguf 2048 1 512 f16 f16" | ./a.out
//
// A line of the input: the file, the context of all sequences, the sequences, the batch, and the types of keys and values in
// the cache. Nothing is allocated, so a file needs only its header; `truncate` gives it the size that the header tells.
// The sizes in store-format/model/src/estimate/llama_cpp_measured.json are from llama.cpp b11434.
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "ggml.h"
#include "llama-ext.h"
#include "llama.h"

static ggml_type type_named(const std::string &name) {
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        const char *known = ggml_type_name(static_cast<ggml_type>(type));
        if (known && name == known) return static_cast<ggml_type>(type);
    }
    return GGML_TYPE_F16;
}

static bool print_memory(const std::string &line) {
    std::istringstream words(line);
    std::string path, keys, values;
    unsigned context = 0, sequences = 1, batch = 512;
    words >> path >> context >> sequences >> batch >> keys >> values;

    llama_model_params model_params = llama_model_default_params();
    model_params.no_alloc = true;
    model_params.load_mode = LLAMA_LOAD_MODE_NONE;
    model_params.use_extra_bufts = false;
    llama_model *model = llama_model_load_from_file(path.c_str(), model_params);
    if (!model) return false;

    llama_context_params params = llama_context_default_params();
    params.n_ctx = context;
    params.n_seq_max = sequences;
    params.n_ubatch = batch;
    params.type_k = type_named(keys);
    params.type_v = type_named(values);
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.kv_unified = false;
    params.swa_full = false;
    llama_context *loaded = llama_init_from_model(model, params);
    if (loaded) {
        size_t weights = 0, cache = 0, graph = 0;
        for (const auto &[buffer, bytes] : llama_get_memory_breakdown(loaded)) {
            weights += bytes.model;
            cache += bytes.context;
            graph += bytes.compute;
        }
        printf("%s\t%zu\t%zu\t%zu\n", line.c_str(), weights, cache, graph);
        llama_free(loaded);
    }
    llama_model_free(model);
    return loaded != nullptr;
}

int main() {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    std::string line;
    while (std::getline(std::cin, line)) {
        if (!print_memory(line)) printf("%s\trefused\n", line.c_str());
        fflush(stdout);
    }
}
