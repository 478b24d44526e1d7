/* blobd's client library: opens a model from a blobd daemon and maps its tensors without a
 * copy. Link with -lblobd_client; a static library also takes -lpthread -ldl -lm.
 *
 * The library has no global state and starts no thread. Any number of threads may use a model at
 * once; close it only when no thread uses it any more. Each model, image and weights that a function
 * gets comes from the function that opens it, and was not closed. Strings are UTF-8.
 *
 * Generated from client/capi/src: change that and run `BLESS=1 cargo test -p blobd-client-c`. */
#ifndef BLOBD_CLIENT_H
#define BLOBD_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An open model: its tensors, and the lease that marks it as in use. */
typedef struct blobd_model blobd_model;

/* A model as one GGUF file in memory. */
typedef struct blobd_image blobd_image;

/* Why a function failed. */
typedef struct blobd_error {
    /* 0 no error, 1 other failure, 2 invalid request, 3 not found, 4 busy, 5 corrupt data,
     * 6 no space left on the disk or in a quota, 7 denied by the rights or the policy,
     * 8 no daemon answers. */
    int code;
    /* What happened and what to do, for people, in one line. Terminated by a zero byte. */
    char message[508];
} blobd_error;

/* Read-only bytes that never change. */
typedef struct blobd_bytes {
    /* The first byte. It is page-aligned for a tensor that is a whole blob. Not null even if `size`
     * is 0. */
    const void *data;
    /* The number of bytes. */
    size_t size;
} blobd_bytes;

/* A tensor of a model. The pointers are valid until the model is closed. */
typedef struct blobd_tensor {
    /* The name. */
    const char *name;
    /* The name of the ggml type, such as `Q4_K`. */
    const char *type_name;
    /* The dimensions in GGUF order, the fastest first. */
    const uint64_t *shape;
    /* The number of dimensions; 0 for a scalar. */
    size_t rank;
    /* The size of the tensor in bytes. */
    uint64_t size;
    /* The number of experts stacked in it; 0 if it is not a stack. */
    uint64_t expert_count;
    /* The size of each expert in bytes. */
    uint64_t expert_size;
} blobd_tensor;

/* Opens a model with all its tensors. Returns null on failure.
 *
 * `socket` is the path of the daemon's socket. If it is null, `BLOBD_SOCKET` is used, or without that
 * the system's socket or, on a machine without a daemon for all users, this user's. `error` may be null. The caller must release the result with `blobd_close`. Any
 * number of threads may use it at once.
 *
 * Requirements:
 * `socket` is null or a C string. `reference` is a C string. `error` is null or points to an error. */
blobd_model *blobd_open(const char *socket, const char *reference, blobd_error *error);

/* Releases the lease and unmaps the tensors. Images stay valid. A null pointer is ignored.
 *
 * Requirements:
 * `model` is null or comes from `blobd_open` and was not closed. It and its tensors are not used any more. */
void blobd_close(blobd_model *model);

/* The model's shortest unique name, valid until it is closed. */
const char *blobd_name(const blobd_model *model);

/* The number of tensors of the model. */
size_t blobd_tensor_count(const blobd_model *model);

/* Writes the tensor with this index to `out`; the first in file order has index 0. Returns false if
 * there is no such tensor.
 *
 * Requirements:
 * `out` points to a tensor. */
bool blobd_tensor_at(const blobd_model *model, size_t index, blobd_tensor *out);

/* The index of the tensor with this name; `SIZE_MAX` if there is none.
 *
 * Requirements:
 * `name` is a C string. */
size_t blobd_tensor_find(const blobd_model *model, const char *name);

/* Maps a tensor, if it is not mapped yet. Returns false on failure. The bytes are valid until the model
 * is closed, even if the daemon ends or the model is removed. All processes share them in the page
 * cache.
 *
 * Requirements:
 * `out` points to bytes; `error` is null or points to an error. */
bool blobd_map(const blobd_model *model, size_t index, blobd_bytes *out, blobd_error *error);

/* Maps a stack of experts and returns the bytes of one. Returns false on failure, for example if the
 * tensor is not a stack. A page is read from disk only when it is accessed.
 *
 * Requirements:
 * As for `blobd_map`. */
bool blobd_expert(const blobd_model *model, size_t index, uint64_t expert, blobd_bytes *out, blobd_error *error);

/* The model's weights as one GGUF file in memory, without a copy. Returns null on failure.
 *
 * `component` is `model`, `projector`, `adapter`, …; null means `model`. The caller must release the
 * image with `blobd_image_free`. It stays valid after the model is closed.
 *
 * Requirements:
 * `component` is null or a C string; `error` is null or points to an error. */
blobd_image *blobd_contiguous(const blobd_model *model, const char *component, blobd_error *error);

/* The image's bytes, page-aligned; valid until the image is freed. */
blobd_bytes blobd_image_bytes(const blobd_image *image);

/* The number of bytes of the image's tensors that were copied, because they are not page-aligned in
 * their blob. */
size_t blobd_image_copied_bytes(const blobd_image *image);

/* Unmaps an image. A null pointer is ignored.
 *
 * Requirements:
 * `image` is null or comes from `blobd_contiguous` and was not freed. Its bytes are not used any more. */
void blobd_image_free(blobd_image *image);

/* Facts from the header of a model's first GGUF file. The pointers are valid until the model is closed. */
typedef struct blobd_facts {
    /* The architecture, such as `llama`; `unknown` if the header has none. */
    const char *architecture;
    /* The template of a chat, in Jinja; null if the header has none. */
    const char *chat_template;
    /* The number of elements of all tensors in this file, whatever `general.parameter_count` says. */
    uint64_t parameter_count;
    /* The number of the file type in llama.cpp; 0 if unknown, as in Ollama. */
    uint64_t file_type;
    /* The number of blocks; 0 if missing. */
    uint64_t block_count;
    /* The longest context for which the model was trained, in tokens; 0 if missing. */
    uint64_t context_length;
    /* The length of an embedding; 0 if missing. */
    uint64_t embedding_length;
    /* The most attention heads of a block; 1 if missing. */
    uint64_t head_count_max;
    /* The fewest attention heads of a block; 1 if missing. */
    uint64_t head_count_min;
    /* The most key and value heads of a block; 1 if missing. */
    uint64_t head_count_kv_max;
    /* The fewest key and value heads of a block; 1 if missing. */
    uint64_t head_count_kv_min;
} blobd_facts;

/* The sizes of a model's attention heads, in elements. */
typedef struct blobd_head_sizes {
    /* The largest size of a head: the embedding length divided by the fewest heads; 0 if there are none. */
    uint64_t max;
    /* The size of a key head: `attention.key_length`; `max` if missing. */
    uint64_t k;
    /* The size of a value head: `attention.value_length`; `max` if missing. */
    uint64_t v;
} blobd_head_sizes;

/* Reads the header of the model's first GGUF file. Returns false on failure, for example if the model has none.
 *
 * Requirements:
 * `out` points to facts; `error` is null or points to an error. */
bool blobd_facts_of(const blobd_model *model, blobd_facts *out, blobd_error *error);

/* Reads the sizes of the heads from the header of the model's first GGUF file. Returns false on failure, for example if
 * the model has none.
 *
 * Requirements:
 * `out` points to sizes; `error` is null or points to an error. */
bool blobd_head_sizes_of(const blobd_model *model, blobd_head_sizes *out, blobd_error *error);

/* Writes the `uint32` with this key in the header of the model's first GGUF file to `out`. Returns false if the
 * header has none of exactly this type, even if it has one of another width, or if it cannot be read.
 *
 * Keys that start with `general.` or `tokenizer.` are looked up as they are, all others with the architecture
 * in front: `block_count` is `llama.block_count`.
 *
 * Requirements:
 * `key` is a C string; `out` points to a value of the type. */
bool blobd_metadata_u32(const blobd_model *model, const char *key, uint32_t *out);

/* Writes the `uint64` with this key to `out`; see `blobd_metadata_u32`. */
bool blobd_metadata_u64(const blobd_model *model, const char *key, uint64_t *out);

/* Writes the `int32` with this key to `out`; see `blobd_metadata_u32`. */
bool blobd_metadata_i32(const blobd_model *model, const char *key, int32_t *out);

/* Writes the `int64` with this key to `out`; see `blobd_metadata_u32`. */
bool blobd_metadata_i64(const blobd_model *model, const char *key, int64_t *out);

/* Writes the `float32` with this key to `out`; see `blobd_metadata_u32`. */
bool blobd_metadata_f32(const blobd_model *model, const char *key, float *out);

/* Writes the `float64` with this key to `out`; see `blobd_metadata_u32`. */
bool blobd_metadata_f64(const blobd_model *model, const char *key, double *out);

/* Writes the `bool` with this key to `out`; see `blobd_metadata_u32`. */
bool blobd_metadata_bool(const blobd_model *model, const char *key, bool *out);

/* Writes the text with this key to `out`: UTF-8, not terminated by a zero byte, valid until the model is closed.
 * Returns false if the header has none of type `string`, or if it is not UTF-8.
 *
 * Requirements:
 * As for `blobd_metadata_u32`. */
bool blobd_metadata_string(const blobd_model *model, const char *key, blobd_bytes *out);

/* Copies the elements of the `uint32` array with this key to `out`, at most `capacity` of them. Returns how many the
 * array has, so a first call with a capacity of 0 tells how much room it needs; `SIZE_MAX` if the header has no array of
 * exactly this type. Keys are those of `blobd_metadata_u32`.
 *
 * Requirements:
 * `key` is a C string; `out` points to `capacity` values, or is null if that is 0. */
size_t blobd_metadata_u32_array(const blobd_model *model, const char *key, uint32_t *out, size_t capacity);

/* Copies the elements of the `uint64` array with this key; see `blobd_metadata_u32_array`. */
size_t blobd_metadata_u64_array(const blobd_model *model, const char *key, uint64_t *out, size_t capacity);

/* Copies the elements of the `int32` array with this key; see `blobd_metadata_u32_array`. */
size_t blobd_metadata_i32_array(const blobd_model *model, const char *key, int32_t *out, size_t capacity);

/* Copies the elements of the `int64` array with this key; see `blobd_metadata_u32_array`. */
size_t blobd_metadata_i64_array(const blobd_model *model, const char *key, int64_t *out, size_t capacity);

/* Copies the elements of the `float32` array with this key; see `blobd_metadata_u32_array`. */
size_t blobd_metadata_f32_array(const blobd_model *model, const char *key, float *out, size_t capacity);

/* Copies the elements of the `float64` array with this key; see `blobd_metadata_u32_array`. */
size_t blobd_metadata_f64_array(const blobd_model *model, const char *key, double *out, size_t capacity);

/* Copies the elements of the `bool` array with this key; see `blobd_metadata_u32_array`. */
size_t blobd_metadata_bool_array(const blobd_model *model, const char *key, bool *out, size_t capacity);

/* Writes where the texts of the `string` array with this key are to `out`, such as the tokens of a vocabulary; see
 * `blobd_metadata_u32_array`. Each is as `blobd_metadata_string` returns it. Texts that are not UTF-8 are left out.
 *
 * Requirements:
 * As for `blobd_metadata_u32_array`. */
size_t blobd_metadata_string_array(const blobd_model *model, const char *key, blobd_bytes *out, size_t capacity);

/* The tensors of one layer of a model, such as `blk.0`. The pointer is valid until the model is closed. */
typedef struct blobd_layer {
    /* The name: what the names of its tensors start with. */
    const char *name;
    /* The number of its tensors. */
    size_t tensor_count;
    /* The size of its tensors in bytes. */
    uint64_t size;
} blobd_layer;

/* The number of layers to which the model's tensors belong. The names of tensors are split at their dots: if one of the
 * parts is `blk` or `mm` and at least two follow, the layer's name ends with the part after it, as in `blk.0`; otherwise it
 * is the first part, as in `token_embd`. */
size_t blobd_layer_count(const blobd_model *model);

/* Writes the layer with this index to `out`; they are sorted by name. Returns false if there is no such layer.
 *
 * Requirements:
 * `out` points to a layer. */
bool blobd_layer_at(const blobd_model *model, size_t index, blobd_layer *out);

/* The index of the layer with this name; `SIZE_MAX` if there is none.
 *
 * Requirements:
 * `name` is a C string. */
size_t blobd_layer_find(const blobd_model *model, const char *name);

/* The index of a layer's tensor in the model, for `blobd_tensor_at` and `blobd_map`; `SIZE_MAX` if the layer has no such
 * tensor. The first by name has number 0. */
size_t blobd_layer_tensor(const blobd_model *model, size_t layer, size_t number);

/* The tensors of an open model that has one safetensors file per tensor or group of experts, such as Ollama's models for
 * image generation and for MLX, or those of one component; and the lease that marks it as in use. */
typedef struct blobd_weights blobd_weights;

/* A tensor, or a part of a quantised one. The parts of a quantised tensor `T` are `T_scale`, `T_qbias` and
 * `T_global_scale`. The pointers are valid until the weights are closed. */
typedef struct blobd_weight {
    /* The name; it starts with the component unless one was requested. */
    const char *name;
    /* The name of the element type in the file, such as `BF16`; that of packed elements is `U32`. */
    const char *dtype;
    /* The dimensions in the file, the slowest first. */
    const uint64_t *shape;
    /* The number of dimensions; 0 for a scalar. */
    size_t rank;
    /* The size of the tensor in bytes. */
    uint64_t size;
    /* How it is quantised: `int4`, `int8`, `nvfp4`, `mxfp4`, `mxfp8`, …; null if it is not, or if that is unknown. */
    const char *quant_type;
    /* How many elements of a row share a scale; 0 if it is not quantised, or if that is unknown. */
    uint32_t group_size;
    /* Whether it has a scale and is therefore quantised. */
    bool is_quantized;
    /* Whether it is a scale or bias of another tensor. */
    bool is_part;
} blobd_weight;

/* Opens the tensors of a model. Returns null on failure, for example if the model has no tensor layer.
 *
 * `component` is a component such as `transformer` or `text_encoder`, whose files are then the only ones opened; null or
 * empty means the whole model. `socket` and `error` are as for `blobd_open`. The caller must release the result with
 * `blobd_weights_close`. Any number of threads may use it at once.
 *
 * Requirements:
 * `socket` and `component` are null or C strings. `reference` is a C string. `error` is null or points to an error. */
blobd_weights *blobd_weights_open(const char *socket, const char *reference, const char *component, blobd_error *error);

/* Releases the lease and unmaps the tensors. A null pointer is ignored.
 *
 * Requirements:
 * `weights` is null or comes from `blobd_weights_open` and was not closed. It and its tensors are not used any more. */
void blobd_weights_close(blobd_weights *weights);

/* The number of tensors, with the parts of quantised tensors. */
size_t blobd_weight_count(const blobd_weights *weights);

/* Writes the tensor with this index to `out`; they are sorted by name. Returns false if there is no such tensor.
 *
 * Requirements:
 * `out` points to a weight. */
bool blobd_weight_at(const blobd_weights *weights, size_t index, blobd_weight *out);

/* The index of the tensor or part with this name; `SIZE_MAX` if there is none.
 *
 * Requirements:
 * `name` is a C string. */
size_t blobd_weight_find(const blobd_weights *weights, const char *name);

/* The bytes of a tensor, as they are stored, without a copy; valid until the weights are closed. Returns false on failure.
 *
 * Requirements:
 * `out` points to bytes; `error` is null or points to an error. */
bool blobd_weight_map(const blobd_weights *weights, size_t index, blobd_bytes *out, blobd_error *error);

/* The bytes of one element of a tensor's slowest dimension, such as an expert of a stack. Returns false on failure.
 *
 * Requirements:
 * As for `blobd_weight_map`. */
bool blobd_weight_expert(const blobd_weights *weights, size_t index, uint64_t expert, blobd_bytes *out, blobd_error *error);

/* How the model is quantised, in capital letters (`INT4`, `NVFP4`, `Q8`, …): as the first file that declares it says, else
 * as `model_index.json` says, else as inferred from scales in separate layers; null if unknown. */
const char *blobd_weights_quantization(const blobd_weights *weights);

/* How many elements share a scale, as the source of `blobd_weights_quantization` says, else the default of that type; 0 if
 * unknown. */
uint32_t blobd_weights_group_size(const blobd_weights *weights);

/* The name of the model's component with this number, whichever is requested; they are sorted. Null if there is none. */
const char *blobd_weights_component(const blobd_weights *weights, size_t number);

/* The name of the group of tensors with this number, such as the experts of a layer; they are sorted. Null if there is
 * none. */
const char *blobd_weights_group(const blobd_weights *weights, size_t number);

/* The index of a group's tensor, in the order of the group's file; `SIZE_MAX` if the group has no such tensor. */
size_t blobd_weights_group_member(const blobd_weights *weights, size_t group, size_t number);

/* The bytes of a JSON file of the model by its path, such as `tokenizer/tokenizer_config.json`; valid until the weights are
 * closed. Returns false on failure, for example if the model has no such file.
 *
 * Requirements:
 * `path` is a C string; `out` points to bytes; `error` is null or points to an error. */
bool blobd_weights_json(const blobd_weights *weights, const char *path, blobd_bytes *out, blobd_error *error);

/* How a model would be run, and into what memory it should fit. Set all to zero first: what is zero has the default of
 * `blobd fit`. */
typedef struct blobd_fit_params {
    /* The context of one sequence, in tokens. */
    uint64_t context;
    /* The tokens that are processed together. */
    uint64_t batch;
    /* The sequences that are processed at the same time, each with the whole context. */
    uint64_t parallel;
    /* The type of keys in the cache, such as `f16` or `q8_0`. */
    const char *cache_type_k;
    /* The type of values in the cache. */
    const char *cache_type_v;
    /* The formulas: `llama.cpp` or `ollama`. */
    const char *basis;
    /* The memory of each device that the model may take. */
    const uint64_t *vram_bytes;
    /* The number of devices. */
    size_t vram_count;
    /* The machine's memory that the model may take; null if it is not limited. */
    const uint64_t *memory_bytes;
    /* The context for which the model was trained, in place of `context`. */
    bool trained_context;
    /* Leave the experts of a mixture in the machine's memory. */
    bool cpu_moe;
} blobd_fit_params;

/* The memory that a model needs, and whether it fits. */
typedef struct blobd_fit {
    /* What is needed in all, on devices and in the machine's memory. */
    uint64_t needed_bytes;
    /* What one device must have so that everything fits on it. */
    uint64_t required_bytes;
    /* The weights. */
    uint64_t weights_bytes;
    /* The part of the weights that is read from the disk row by row. */
    uint64_t table_bytes;
    /* The KV cache. */
    uint64_t kv_bytes;
    /* The computation graph if all of the model is on one device. */
    uint64_t graph_bytes;
    /* The context of one sequence, in tokens. */
    uint64_t context;
    /* The context for which the model was trained; 0 if unknown. */
    uint64_t trained_context;
    /* The largest context with which everything fits; 0 if none, or if it is not known into what. */
    uint64_t max_context;
    /* The layers on devices; 0 if there are none. */
    uint64_t layers;
    /* The layers of the model; 0 if it is not known into what the model should fit. */
    uint64_t layers_of;
    /* What is in the machine's memory. */
    uint64_t memory_bytes;
    /* Whether the formulas know this model. If not, KV cache and graph are unknown, and it never fits. */
    bool has_rule;
    /* Whether it is known into what the model should fit: the parameters have devices or memory. */
    bool has_answer;
    /* Whether everything fits; false without an answer. */
    bool fits;
} blobd_fit;

/* Estimates the memory that a model needs, as `blobd fit` does, and writes it to `out`; opens and loads nothing. Returns
 * false on failure. `params` may be null; `socket` and `error` are as for `blobd_open`.
 *
 * Requirements:
 * `socket` is null or a C string. `reference` is a C string. `params` is null or points to parameters, whose strings are null
 * or C strings, whose `vram_bytes` has `vram_count` elements, and whose `memory_bytes` is null or points to a number. `out`
 * points to an estimate. `error` is null or points to an error. */
bool blobd_fit_of(const char *socket, const char *reference, const blobd_fit_params *params, blobd_fit *out, blobd_error *error);

/* The same estimate as `blobd fit --json` prints it, without `machine`: a C string that the caller must release with
 * `blobd_text_free`. Returns null on failure.
 *
 * Requirements:
 * As for `blobd_fit_of`. */
char *blobd_fit_json(const char *socket, const char *reference, const blobd_fit_params *params, blobd_error *error);

/* Frees a text. A null pointer is ignored.
 *
 * Requirements:
 * `text` is null or comes from `blobd_fit_json` and was not freed. */
void blobd_text_free(char *text);

#ifdef __cplusplus
}
#endif

#endif
