"""Completes a prompt greedily with llama.cpp's C interface, from the tensors of a model that blobd opens, without a file:
`llama.py FOLDER MODEL|FILE.gguf PROMPT [TOKENS]`.

FOLDER contains libllama and libggml. `gguf_init_from_buffer` reads the metadata from the contiguous view;
`llama_model_init_from_user` requests each tensor, and gets a pointer into the view. llama.cpp copies the tensors that it
repacks. Like every engine here, it prints `ready PID "TEXT"`, then keeps the weights loaded until its
standard input ends.
"""

import contextlib
import ctypes
import json
import mmap
import os
import pathlib
import sys
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_int64, c_size_t, c_void_p

import blobd


class Parameters(ctypes.Structure):
    """An opaque structure of parameters, passed by value; larger than the structure of any version."""

    _fields_ = [("words", c_int64 * 64)]


class Tokens(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = [("count", c_int32), ("pointers", c_void_p * 6)]


class Init(ctypes.Structure):
    """`gguf_init_params`."""

    _fields_ = [("no_alloc", c_bool), ("context", c_void_p)]


SetTensor = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
Log = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)


def load(folder: str):
    """The functions of all libraries, by name."""
    found = sorted(pathlib.Path(folder).glob("*.so"))
    order = ["libggml-base.", "libggml.", "libllama."]
    paths = [path for start in order for path in found if path.name.startswith(start)]
    libraries = [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in paths]

    def function(name: str, result, *arguments):
        for library in libraries:
            if hasattr(library, name):
                found = getattr(library, name)
                found.restype, found.argtypes = result, list(arguments)
                return found
        raise SystemExit(f"llama.py: no {name} in these libraries")

    return function


@contextlib.contextmanager
def image(name: str):
    """The address and size of a GGUF file in memory: a model's, or, if `name` contains a `/`, a plain file's."""
    if "/" not in name:
        with blobd.open(name) as model, model.contiguous() as gguf:
            yield gguf.address, gguf.size
        return
    with open(name, "rb") as file:
        # Never written to; ctypes returns addresses of writable memory only.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    yield ctypes.addressof(ctypes.c_char.from_buffer(content)), len(content)


def main() -> None:
    folder, name, prompt = sys.argv[1:4]
    count = int(sys.argv[4]) if len(sys.argv) > 4 else 24
    function = load(folder)
    quiet = Log(lambda _level, text, _data: None)
    function("llama_log_set", None, Log, c_void_p)(quiet, None)
    function("ggml_backend_load_all_from_path", None, c_char_p)(folder.encode())

    with image(name) as (address, size):
        gguf_init = function("gguf_init_from_buffer", c_void_p, c_void_p, c_size_t, Init)
        metadata = gguf_init(address, size, Init(True, None))
        start = function("gguf_get_data_offset", c_size_t, c_void_p)(metadata)
        find = function("gguf_find_tensor", c_int64, c_void_p, c_char_p)
        offset = function("gguf_get_tensor_offset", c_size_t, c_void_p, c_int64)
        get_name = function("ggml_get_name", c_void_p, c_void_p)
        get_data = function("ggml_get_data", c_void_p, c_void_p)
        get_size = function("ggml_nbytes", c_size_t, c_void_p)
        buffer_name = function("ggml_backend_buffer_name", c_char_p, c_void_p)
        copy = function("ggml_backend_tensor_set", None, c_void_p, c_void_p, c_size_t, c_size_t)

        def give(tensor: int, _data) -> None:
            name_at = get_name(tensor)
            index = find(metadata, ctypes.string_at(name_at))
            if index < 0:
                os.write(2, b"llama.py: the file does not have a tensor that llama.cpp requests\n")
                os._exit(1)
            source = address + start + offset(metadata, index)
            # `data` is the field before `name`, `buffer` the second one.
            data = c_void_p.from_address(name_at - 8)
            assert data.value == get_data(tensor)
            if buffer_name(c_void_p.from_address(tensor + 8)) == b"CPU":
                data.value = source
            else:
                copy(tensor, source, 0, get_size(tensor))

        callback = SetTensor(give)
        parameters = function("llama_model_default_params", Parameters)()
        init = function("llama_model_init_from_user", c_void_p, c_void_p, SetTensor, c_void_p, Parameters)
        engine = init(metadata, callback, None, parameters)
        if not engine:
            print("cannot llama_model_init_from_user refuses it", flush=True)
            os._exit(0)
        text = complete(function, engine, prompt.encode(), count)
        print("ready", os.getpid(), json.dumps(text, ensure_ascii=False), flush=True)
        sys.stdin.read()
        # llama.cpp frees what it allocated when the process ends.
        os._exit(0)


def complete(function, engine: int, prompt: bytes, count: int) -> str:
    vocabulary = function("llama_model_get_vocab", c_void_p, c_void_p)(engine)
    tokens = (c_int32 * 512)()
    tokenize = function(
        "llama_tokenize", c_int32, c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool
    )
    length = tokenize(vocabulary, prompt, len(prompt), tokens, len(tokens), True, False)
    context_parameters = function("llama_context_default_params", Parameters)()
    new_context = function("llama_init_from_model", c_void_p, c_void_p, Parameters)
    context = new_context(engine, context_parameters)
    function("llama_set_n_threads", None, c_void_p, c_int32, c_int32)(context, 1, 1)
    greedy = function("llama_sampler_init_greedy", c_void_p)()
    sample = function("llama_sampler_sample", c_int32, c_void_p, c_void_p, c_int32)
    batch = function("llama_batch_get_one", Tokens, POINTER(c_int32), c_int32)
    decode = function("llama_decode", c_int32, c_void_p, Tokens)
    is_end = function("llama_vocab_is_eog", c_bool, c_void_p, c_int32)
    to_piece = function(
        "llama_token_to_piece", c_int32, c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool
    )
    text, piece = b"", ctypes.create_string_buffer(256)
    for _ in range(count):
        if decode(context, batch(tokens, length)) != 0:
            raise SystemExit("llama.py: cannot decode")
        tokens[0], length = sample(greedy, context, -1), 1
        if is_end(vocabulary, tokens[0]):
            break
        size = to_piece(vocabulary, tokens[0], piece, len(piece), 0, False)
        text += piece.raw[:size]
    return text.decode(errors="replace")


main()
