#!/usr/bin/env python3
"""Compares the KV cache and the graph that `blobd fit --basis llama.cpp` estimates with llama.cpp's own allocator.

    python3 tests/kv_oracle.py target/release/blobd [MODEL.gguf ...]

runs llama.cpp's `llama-fit-params`, which LLAMA_FIT_PARAMS names or PATH has; without it, everything is skipped. If the
Python package `gguf` is installed, small models with sliding windows, latent attention and recurrent layers are generated
too. Both programs must agree within 1 MiB, the precision of the tool's output. Graphs are compared for one sequence only.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CONTEXTS = (512, 4096, 5000, 32768)
PARALLEL = (1, 4)
TYPES = (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "f16"), ("f32", "q5_1"), ("iq4_nl", "bf16"))
EMBEDDING = 512
VOCABULARY = 64


def allocated(tool, model, context, parallel, k, v):
    """MiB of KV cache and graph, as llama.cpp allocates them; None if it refuses the settings."""
    command = [tool, "--fit-print", "on", "-m", model, "-c", str(context * parallel), "-np", str(parallel),
               "-ctk", k, "-ctv", v, "-fa", "on"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0 or not run.stdout.strip():
        return None
    # device, model, context, compute
    rows = [line.split() for line in run.stdout.strip().splitlines()]
    return sum(int(row[-2]) for row in rows), sum(int(row[-1]) for row in rows)


def estimated(blobd, model, context, parallel, k, v):
    """Bytes of KV cache and graph by blobd's estimate; None if it refuses the settings."""
    command = [blobd, "fit", model, "--basis", "llama.cpp", "--json", "--ctx", str(context), "--parallel", str(parallel),
               "--cache-type-k", k, "--cache-type-v", v]
    with tempfile.TemporaryDirectory() as root:
        run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "BLOBD_ROOT": root})
    if run.returncode != 0:
        return None
    answer = json.loads(run.stdout)
    return answer["kv_total_bytes"], answer["graph_full_bytes"]


def generated(folder):
    """Generates small models of architectures whose caches differ from the usual one."""
    try:
        import gguf
        import numpy as np
    except ImportError:
        print("skipped generated models: the Python package gguf is not installed")
        return

    e, ff = EMBEDDING, 256

    def write(name, arch, blocks, keys, tensors, ends=("output_norm.weight",), outputs=()):
        path = str(Path(folder) / f"{name}.gguf")
        writer = gguf.GGUFWriter(path, arch)
        writer.add_string("tokenizer.ggml.model", "none")
        common = {"vocab_size": VOCABULARY, "context_length": 32768, "embedding_length": e, "block_count": blocks,
                  "feed_forward_length": ff, "attention.layer_norm_rms_epsilon": 1e-5}
        for key, value in {**common, **keys}.items():
            key = f"{arch}.{key}"
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        add = lambda name, shape: writer.add_tensor(name, np.zeros(shape[::-1], np.float32))
        add("token_embd.weight", [e, VOCABULARY])
        for end in ends:
            add(end, [e])
        for output in outputs:
            add(output, [e, VOCABULARY])
        for block in range(blocks):
            for tensor, shape in tensors(block).items():
                add(f"blk.{block}.{tensor}", shape)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def attention(h, k, d, dv=None):
        dv = dv or d
        return {"attn_norm.weight": [e], "attn_q.weight": [e, h * d], "attn_k.weight": [e, k * d],
                "attn_v.weight": [e, k * dv], "attn_output.weight": [h * dv, e]}

    ffn = {"ffn_norm.weight": [e], "ffn_gate.weight": [e, ff], "ffn_up.weight": [e, ff], "ffn_down.weight": [ff, e]}
    without_norm = {name: shape for name, shape in ffn.items() if name != "ffn_norm.weight"}
    heads = {"attention.head_count": 8, "attention.head_count_kv": 2}
    sizes = {"attention.key_length": 128, "attention.value_length": 128}
    norms = {"post_attention_norm.weight": [e], "post_ffw_norm.weight": [e]}
    qk = {"attn_q_norm.weight": [128], "attn_k_norm.weight": [128]}
    window = {"attention.sliding_window": 1024}
    yield write("gemma2", "gemma2", 6, {**heads, **sizes, **window},
                lambda i: {**attention(8, 2, 128), **ffn, **norms})
    yield write("gemma3", "gemma3", 13, {**heads, **sizes, **window},
                lambda i: {**attention(8, 2, 128), **ffn, **norms, **qk})
    yield write("phi3", "phi3", 4, {**heads, **window, "rope.dimension_count": 64},
                lambda i: {"attn_norm.weight": [e], "attn_qkv.weight": [e, 512 + 256], "attn_output.weight": [512, e],
                           "ffn_norm.weight": [e], "ffn_up.weight": [e, 2 * ff], "ffn_down.weight": [ff, e]})
    yield write("cohere2", "cohere2", 8, {**heads, **window, "logit_scale": 1.0, "attention.layer_norm_epsilon": 1e-5},
                lambda i: {**attention(8, 2, 64), **without_norm})
    yield write("heads-by-block", "deci", 4,
                {"attention.head_count": 8, "attention.head_count_kv": [8, 4, 2, 1], "rope.dimension_count": 64},
                lambda i: {**attention(8, 8 >> i, 64), **ffn})
    state = {"ssm.conv_kernel": 4, "ssm.inner_size": 1024, "ssm.state_size": 128, "ssm.time_step_rank": 16,
             "ssm.group_count": 1}
    inner = 1024 + 2 * 128
    mamba = {"attn_norm.weight": [e], "ssm_in.weight": [e, 2 * 1024 + 2 * 128 + 16], "ssm_conv1d.weight": [4, inner],
             "ssm_conv1d.bias": [inner], "ssm_dt.bias": [16], "ssm_a": [1, 16], "ssm_d": [1, 16],
             "ssm_norm.weight": [1024, 1], "ssm_out.weight": [1024, e]}
    yield write("mamba2", "mamba2", 6, state, lambda i: mamba)
    yield write("granitehybrid", "granitehybrid", 4,
                {**state, "attention.head_count": 8, "attention.head_count_kv": [0, 0, 2, 0], "rope.dimension_count": 64},
                lambda i: {**(attention(8, 2, 64) if i == 2 else mamba), **ffn})
    one = {"ssm_in.weight": [e, 2 * 1024], "ssm_conv1d.weight": [4, 1024], "ssm_conv1d.bias": [1024],
           "ssm_x.weight": [1024, 16 + 2 * 128], "ssm_dt_norm.weight": [16], "ssm_dt.weight": [16, 1024],
           "ssm_dt.bias": [1024], "ssm_b_norm.weight": [128], "ssm_c_norm.weight": [128], "ssm_a": [128, 1024],
           "ssm_d": [1024], "ssm_out.weight": [1024, e], "attn_norm.weight": [e]}
    yield write("jamba", "jamba", 4,
                {**{key: value for key, value in state.items() if key != "ssm.group_count"}, "attention.head_count": 8,
                 "attention.head_count_kv": [0, 2, 0, 0]},
                lambda i: {**(attention(8, 2, 64) if i == 1 else one), **ffn})
    yield write("falcon-h1", "falcon-h1", 3, {**state, **heads, "rope.dimension_count": 64},
                lambda i: {**mamba, **attention(8, 2, 64), **without_norm, "ffn_norm": [e]})
    convolution = {"attn_norm.weight": [e], "shortconv.conv.weight": [3, e], "shortconv.in_proj.weight": [e, 3 * e],
                   "shortconv.out_proj.weight": [e, e]}
    yield write("lfm2", "lfm2", 4,
                {"attention.head_count": 8, "attention.head_count_kv": [0, 0, 2, 0], "shortconv.l_cache": 3,
                 "rope.dimension_count": 64},
                lambda i: {**({**attention(8, 2, 64), "attn_q_norm.weight": [64], "attn_k_norm.weight": [64]}
                              if i == 2 else convolution), **ffn}, ends=("token_embd_norm.weight",))
    stacks = {f"ffn_{part}_exps.{kind}": [e] * (2 if kind == "weight" else 1) + [4]
              for part in ("gate", "up", "down") for kind in ("weight", "bias")}
    yield write("gpt-oss", "gpt-oss", 4,
                {**heads, "attention.sliding_window": 128, "expert_count": 4, "expert_used_count": 2,
                 "expert_feed_forward_length": e},
                lambda i: {**attention(8, 2, 64), **stacks, "post_attention_norm.weight": [e],
                           "attn_sinks.weight": [8], "ffn_gate_inp.weight": [e, 4], "ffn_gate_inp.bias": [4],
                           "attn_q.bias": [e], "attn_k.bias": [128], "attn_v.bias": [128], "attn_output.bias": [e]},
                outputs=("output.weight",))
    experts = {"expert_feed_forward_length": 256, "expert_shared_count": 1, "leading_dense_block_count": 27,
               "attention.q_lora_rank": 64, "attention.kv_lora_rank": 512, "rope.dimension_count": 64,
               "attention.head_count": 8, "attention.head_count_kv": 1, "attention.key_length": 576,
               "attention.value_length": 512, "attention.key_length_mla": 192, "attention.value_length_mla": 128}
    yield write("deepseek2", "deepseek2", 27, experts,
                lambda i: {"attn_norm.weight": [e], "attn_q.weight": [e, 8 * 192], "attn_kv_a_mqa.weight": [e, 576],
                           "attn_kv_a_norm.weight": [512], "attn_k_b.weight": [128, 512, 8],
                           "attn_v_b.weight": [512, 128, 8], "attn_output.weight": [8 * 128, e], **ffn})


def main():
    tool = os.environ.get("LLAMA_FIT_PARAMS") or shutil.which("llama-fit-params")
    if not tool:
        print("skipped: llama-fit-params is not installed; set LLAMA_FIT_PARAMS")
        return 0
    blobd, *models = sys.argv[1:]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for model in [*models, *generated(folder)]:
            worst, compared, refused = 0.0, 0, 0
            for context in CONTEXTS:
                for parallel in PARALLEL:
                    for k, v in TYPES:
                        reference = allocated(tool, model, context, parallel, k, v)
                        estimate = estimated(blobd, model, context, parallel, k, v)
                        if reference is None or estimate is None:
                            refused += 1
                            continue
                        compared += 1
                        for what, ours, theirs in zip(("KV cache", "graph"), estimate, reference):
                            if what == "graph" and parallel > 1:
                                continue
                            # The tool rounds down to MiB.
                            difference = abs(ours / 2**20 - theirs - 0.5) - 0.5
                            worst = max(worst, difference)
                            if difference >= 1:
                                wrong += 1
                                print(f"{model}: context {context}, {parallel} sequences, {k}/{v}: {what}: expected "
                                      f"{theirs} MiB (llama.cpp), found {ours / 2**20:.2f} MiB (blobd)")
            print(f"{Path(model).name}: {compared} settings compared, {refused} refused, "
                  f"largest difference beyond rounding {worst:.2f} MiB")
            if compared == 0:
                wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
