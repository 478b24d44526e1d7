/* blobd's client library: opens a model from a blobd daemon and maps its tensors without a
 * copy. Link with -lblobd_client; a static library also takes -lpthread -ldl -lm.
 *
 * Nothing here is global or starts a thread. A model may be used by any number of threads at once,
 * but closed by one that is the last. Strings are UTF-8.
 *
 * Made from client/capi/src/lib.rs: change that and run `BLESS=1 cargo test -p blobd-client-c`. */
#ifndef BLOBD_CLIENT_H
#define BLOBD_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A model that is held open: its tensors, and the lease that shows it as in use. */
typedef struct blobd_model blobd_model;

/* A model as one GGUF file in memory. */
typedef struct blobd_image blobd_image;

/* Why a function failed. */
typedef struct blobd_error {
    /* 0 if nothing failed, else: 1 failed, 2 wrong use, 3 not found, 4 busy, 5 corrupt data,
     * 6 no space, 7 denied. */
    int code;
    /* One line for people, which says what to do; ends with a zero byte. */
    char message[508];
} blobd_error;

/* Bytes that can be read and never change. */
typedef struct blobd_bytes {
    /* The first byte; at the start of a page for a tensor with a blob of its own. Not null even if
     * there are none. */
    const void *data;
    /* How many there are. */
    size_t size;
} blobd_bytes;

/* A tensor as the model's table has it. The pointers are valid until the model is closed. */
typedef struct blobd_tensor {
    /* The name. */
    const char *name;
    /* The name of the ggml type, such as `Q4_K`. */
    const char *type_name;
    /* The dimensions in GGUF order, the fastest first. */
    const uint64_t *shape;
    /* How many dimensions there are; 0 is a scalar. */
    size_t rank;
    /* How many bytes the tensor has. */
    uint64_t size;
    /* How many experts are stacked in it; 0 if it is no stack. */
    uint64_t expert_count;
    /* How many bytes each expert has. */
    uint64_t expert_size;
} blobd_tensor;

/* Opens a model with all its tensors: null on failure.
 *
 * The daemon is the one behind `socket`; if that is null, the one that `BLOBD_SOCKET` names, or else
 * the one at the usual places. `error` may be null. The result belongs to the caller, who gives it to
 * `blobd_close`; any number of threads may use it at once.
 *
 * The caller promises:
 * `socket` is null or a C string, `reference` is a C string, `error` is null or points to an error. */
blobd_model *blobd_open(const char *socket, const char *reference, blobd_error *error);

/* Ends the lease and unmaps the tensors. Images stay. A null pointer is ignored.
 *
 * The caller promises:
 * `model` is null or comes from `blobd_open` and was not closed; nobody uses it or its tensors any more. */
void blobd_close(blobd_model *model);

/* The model's shortest unique name, valid until it is closed.
 *
 * The caller promises:
 * `model` comes from `blobd_open` and is open. */
const char *blobd_name(const blobd_model *model);

/* How many tensors the model has.
 *
 * The caller promises:
 * `model` comes from `blobd_open` and is open. */
size_t blobd_tensor_count(const blobd_model *model);

/* Tells what the tensor with this number is, from 0 on in file order; false if there is none.
 *
 * The caller promises:
 * `model` comes from `blobd_open` and is open; `out` points to a tensor. */
bool blobd_tensor_at(const blobd_model *model, size_t index, blobd_tensor *out);

/* The number of the tensor with this name; `SIZE_MAX` if there is none.
 *
 * The caller promises:
 * `model` comes from `blobd_open` and is open; `name` is a C string. */
size_t blobd_tensor_find(const blobd_model *model, const char *name);

/* Maps a tensor, if it is not mapped yet: false on failure. The bytes are valid until the model is
 * closed, whatever becomes of the daemon and the model; they are the page cache's, shared by all
 * processes.
 *
 * The caller promises:
 * `model` comes from `blobd_open` and is open; `out` points to bytes; `error` is null or points to an
 * error. */
bool blobd_map(const blobd_model *model, size_t index, blobd_bytes *out, blobd_error *error);

/* Maps a stack of experts and finds one of them: false on failure, such as when the tensor is no stack.
 * Only the pages that are touched are read.
 *
 * The caller promises:
 * As for `blobd_map`. */
bool blobd_expert(const blobd_model *model, size_t index, uint64_t expert, blobd_bytes *out, blobd_error *error);

/* The model's weights as one GGUF file in memory, without a copy: null on failure.
 *
 * `component` is `model`, `projector`, `adapter`, …; null means `model`. The image belongs to the caller,
 * who gives it to `blobd_image_free`; it outlives the model.
 *
 * The caller promises:
 * `model` comes from `blobd_open` and is open; `component` is null or a C string; `error` is null or
 * points to an error. */
blobd_image *blobd_contiguous(const blobd_model *model, const char *component, blobd_error *error);

/* The image's bytes, from a page's start on; valid until it is freed.
 *
 * The caller promises:
 * `image` comes from `blobd_contiguous` and is not freed. */
blobd_bytes blobd_image_bytes(const blobd_image *image);

/* How many bytes of the image's tensors had to be copied, because they do not start at a page's start
 * in their blob.
 *
 * The caller promises:
 * `image` comes from `blobd_contiguous` and is not freed. */
size_t blobd_image_copied_bytes(const blobd_image *image);

/* Unmaps an image. A null pointer is ignored.
 *
 * The caller promises:
 * `image` is null or comes from `blobd_contiguous` and was not freed; nobody uses its bytes any more. */
void blobd_image_free(blobd_image *image);

#ifdef __cplusplus
}
#endif

#endif
