#!/usr/bin/env python3
"""Calculates memory estimates independently of blobd, for its tests.

    python3 tests/estimates.py > store-format/model/src/estimate/expected.json

The formulas are those of Ollama's estimator of August 2025 (revision d5a0d8d904), written as in
docs/ESTIMATES.md. The models have the dimensions of published ones. A test of store-format builds their
headers from the same JSON and compares every number with blobd's.
"""

import json
import sys

# Block length and bytes of the tensor types used below.
TYPES = {"F32": (1, 4), "F16": (1, 2), "Q4_0": (32, 18), "Q4_K": (256, 144), "Q6_K": (256, 210), "MXFP4": (32, 17)}
# Bytes per element of the cache, as a fraction.
CACHE_TYPES = {"f16": (2, 1), "q8_0": (1, 1), "q4_0": (1, 2)}
CONTEXTS = (4096, 32768)
PARALLEL = (1, 4)
BATCH = 512


def tensor_bytes(kind, shape):
    count = 1
    for length in shape:
        count *= length
    block, size = TYPES[kind]
    assert shape[0] % block == 0
    return count // block * size


class Model:
    """A model's metadata (keys without the architecture), vocabulary and tensors."""

    def __init__(self, name, arch, keys, vocabulary, blocks, others):
        self.name = name
        self.arch = arch
        self.keys = keys
        self.vocabulary = vocabulary
        self.blocks = [blocks(i) if callable(blocks) else blocks for i in range(keys["block_count"])]
        self.others = others
        self.tensors = {f"blk.{i}.{name}": t for i, block in enumerate(self.blocks) for name, t in block.items()}
        self.tensors.update(others)

    def size(self, layer):
        return sum(tensor_bytes(*t) for name, t in self.tensors.items() if name.startswith(layer + "."))

    def heads(self, key, pick):
        value = self.keys.get(key, 1)
        return pick(value) if isinstance(value, list) else value


def symbols(m, ctx, par):
    s = {}
    s["P"] = par
    s["B"] = min(ctx, BATCH)
    s["C"] = ctx * par
    s["E"] = m.keys["embedding_length"]
    s["H"] = m.heads("attention.head_count", max)
    s["Hmin"] = m.heads("attention.head_count", min)
    s["K"] = m.heads("attention.head_count_kv", max)
    s["Kmin"] = m.heads("attention.head_count_kv", min)
    s["Dmax"] = s["E"] // s["Hmin"] if s["Hmin"] else 0
    s["D"] = m.keys.get("attention.key_length", s["Dmax"])
    s["Dv"] = m.keys.get("attention.value_length", s["Dmax"])
    s["V"] = m.vocabulary
    s["N"] = m.keys["block_count"]
    return s


def kv_cache(m, s, cache):
    """The cache of each block, and the sum before the exceptions."""
    num, den = CACHE_TYPES[cache]
    per_token = (s["D"] + s["Dv"]) * s["K"]
    plain = s["C"] * per_token * num // den
    kv = [plain] * s["N"]
    total = sum(kv)
    if m.arch == "mllama":
        for i in m.keys["attention.cross_attention_layers"]:
            kv[i] = s["K"] * (s["D"] + s["Dv"]) * 4 * 1601 * 4
    elif m.arch == "gemma3":
        for i in range(s["N"]):
            if (i + 1) % 6 != 0:
                window = s["P"] * m.keys["attention.sliding_window"] + s["B"]
                kv[i] = window * per_token * num // den
    elif m.arch in ("gptoss", "gpt-oss"):
        for i in range(s["N"]):
            kv[i] = (per_token * num // den) * (s["P"] * 4096 + s["B"] if i % 2 == 0 else s["C"])
    return kv, total


def graph(m, s, total):
    """Partial and full graph."""
    B, C, E, H, K, V = (s[k] for k in "BCEHKV")
    D, D0 = s["D"], s["Dmax"]
    vocab = E * V * 105 // 128
    a = m.arch
    if a in ("llama", "llama4"):
        full = max(4 * B * (1 + 4 * E + C * (1 + H)), 4 * B * (E + V))
        partial = 4 * B * E + max(
            4 * B * (1 + E + max(C, E)) + E * E * 9 // 16 + 4 * C * (B * H + D0 * K), 4 * B * (E + V) + vocab
        )
        if "blk.0.ffn_gate_exps.weight" in m.tensors:
            S = tensor_bytes(*m.tensors["blk.0.ffn_gate_exps.weight"])
            ff = m.keys["feed_forward_length"]
            partial = max(
                3 * S + 4 * B * (2 * ff + K + E + C + D0 * K), 4 * (C * B * H + C * D0 * K + B * 1024 + D0 * K * B)
            )
        elif "blk.0.ffn_gate.0.weight" in m.tensors:
            F = m.tensors["blk.0.ffn_gate.0.weight"][1][1]
            full = 4 * B * (2 + 3 * E + C * (1 + H) + 2 * K + F)
            partial = max(
                4 * B * (3 + D0 * K + E + C * (1 + H) + F) + (E * E + 3 * E * K * F) * 9 // 16,
                4 * B * (1 + 2 * E + C * (1 + H)) + E * (6 * C * K // H + E * 9 // 16),
            )
        return partial, full
    if a == "mllama":
        R = m.tensors.get("rope_freqs.weights", ("F32", [0]))[1][0]
        return (
            max(4 * (B * (2 * E + 1 + C * (1 + H) + D * H) + R + D * C * K), 4 * B * (E + V) + vocab),
            max(4 * B * (2 + 3 * E + D * H + C * (1 + H)), 4 * B * (E + V)),
        )
    if a in ("gemma", "gemma2", "gemma3", "gemma3n"):
        full = max(4 * B * (E + V), 4 * B * (2 + C + C * H + 2 * E + 2 * D * H))
        partial = max(
            4 * E * B + vocab + 4 * V * B,
            4 * B * (2 * E + 1 + 2 * D * H + C + C * H) + 4 * D * C * 8 + E * D * H * 9 // 16,
        )
        factor = 4 if a == "gemma3n" else 1
        return factor * partial, factor * full
    if a == "command-r":
        return (
            max(4 * B * (E + V) + vocab, 4 * B * (1 + 2 * E + C * (1 + H)) + 4 * E * C + E * E * 9 // 16),
            max(4 * B * (E + V), 4 * B * (2 + 4 * E + C * (1 + H))),
        )
    if a == "qwen2":
        return (
            max(4 * B * (E + V) + vocab, 4 * (B * (1 + 2 * E + C * (1 + H)) + E * (1 + C))),
            max(4 * B * (E + V), 4 * B * (1 + 2 * E + C + C * H)),
        )
    if a == "phi2":
        return (
            max(4 * B * (2 * E + V) + vocab, 4 * B * (2 + 3 * E + C + C * H)),
            max(4 * B * (E + V), 4 * B * (1 + 4 * E + C + C * H)),
        )
    if a == "stablelm":
        full = 4 * B * (C * (1 + H) + 3 * E + 2)
        return max(4 * B * (V + 2 * E), full), full
    if a == "deepseek2":
        return (
            max(
                4 * B * (3 * E + V) + vocab,
                4 * B * (2 * E + 1 + 2 * D * K + C + C * K) + 4 * D * C * K + E * D * K * 9 // 16,
            ),
            max(4 * B * (3 * E + V), 4 * B * (3 * E + 2 + C * (1 + K) + 2 * D * K)),
        )
    if a == "chatglm":
        full, partial = 4 * B * (E + V), 4 * B * (E + V) + vocab
        if "blk.0.attn_qkv.bias" in m.tensors:
            q = m.tensors["blk.0.attn_qkv.bias"][1][0]
            full = max(full, 4 * B * (2 + 2 * E + C + C * H + D * H + q))
            partial = max(
                partial, 4 * B * (1 + 2 * E + D * H + C + C * H) + 4 * D * C + 4 * C * D + 4 * q
            )
        return partial, full
    if a in ("gptoss", "gpt-oss"):
        return 2 * H // max(s["Kmin"], 1) * total // 6, 0
    return 0, 0


LISTED = {"llama", "llama4", "mllama", "gemma", "gemma2", "gemma3", "gemma3n", "command-r", "qwen2", "phi2",
          "stablelm", "deepseek2", "chatglm", "gptoss", "gpt-oss"}


def vision(m):
    if not m.keys.get("vision.block_count"):
        return 0, 0
    weights = sum(tensor_bytes(*t) for name, t in m.tensors.items() if name.startswith("v."))
    key = lambda k: m.keys.get("vision." + k, 0)
    ev, ch, hv = key("embedding_length"), key("num_channels"), key("attention.head_count")
    i, p = key("image_size"), key("patch_size")
    if m.arch == "qwen25vl":
        px = m.keys.get("vision.max_pixels", 28 * 28 * 1280)
        n = px // (p * p)
        return weights, 4 * (2 * px * ch + n * ch * p * p + n * n * hv + ev * n)
    n = (i // p) ** 2 + (1 if "v.class_embd" in m.tensors else 0)
    if m.arch == "mllama":
        t, np = key("max_num_tiles"), n + 8 - n % 8
        return weights, 4 * (8 + i * i * ch * t + ev * n * t + 9 * ev * np * t + (np * t) ** 2 * hv)
    if m.arch in ("gemma3", "mistral3"):
        return weights, 4 * (i * i * ch + ev * p + n * n * hv)
    return weights, 0


def estimate(m, ctx, par, cache):
    s = symbols(m, ctx, par)
    kv, total = kv_cache(m, s, cache)
    partial, full = graph(m, s, total)
    if partial == 0:
        partial = s["H"] // max(s["Kmin"], 1) * total // 6
    if full == 0:
        full = partial
    return kv, partial, full


def place(m, kv, partial, full, vram):
    """How many layers are on a device of `vram` bytes, and the bytes of the whole model."""
    blocks = [m.size(f"blk.{i}") + kv[i] for i in range(len(kv))]
    output = m.size("output_norm") + (m.size("output") or m.size("token_embd")) + sum(vision(m))
    buffer = blocks[0]
    used = buffer + max(partial, full)
    layers = 0
    if vram < used + buffer:
        return 0, sum(blocks) + output
    for block in reversed(blocks):
        if used + block >= vram:
            break
        used += block
        layers += 1
    if layers == len(blocks) and used + output < vram:
        layers += 1
    if layers == 0:
        return 0, sum(blocks) + output
    everything = layers == len(blocks) + 1
    return layers, buffer + sum(blocks) + output + (full if everything else partial)


def boundaries(m, kv, partial, full):
    """Every memory size at which one more layer fits, with its neighbours."""
    blocks = [m.size(f"blk.{i}") + kv[i] for i in range(len(kv))]
    output = m.size("output_norm") + (m.size("output") or m.size("token_embd")) + sum(vision(m))
    used = blocks[0] + max(partial, full)
    rows = []
    for added in [*reversed(blocks), output]:
        used += added
        for vram in (used - 1, used, used + 1):
            rows.append([vram, *place(m, kv, partial, full, vram)])
    # What a device must have before it gets a layer.
    least = 2 * blocks[0] + max(partial, full)
    for vram in (least - 1, least, least + 1):
        rows.append([vram, *place(m, kv, partial, full, vram)])
    return rows


def runs(numbers):
    """[[value, repetitions], ...]"""
    out = []
    for number in numbers:
        if out and out[-1][0] == number:
            out[-1][1] += 1
        else:
            out.append([number, 1])
    return out


def dense(e, ff, h, k, d=None, kind="Q4_K"):
    """The tensors of a block of a llama-like model."""
    d = d or e // h
    return {
        "attn_norm.weight": ("F32", [e]),
        "attn_q.weight": (kind, [e, h * d]),
        "attn_k.weight": (kind, [e, k * d]),
        "attn_v.weight": ("Q6_K", [e, k * d]),
        "attn_output.weight": (kind, [h * d, e]),
        "ffn_norm.weight": ("F32", [e]),
        "ffn_gate.weight": (kind, [e, ff]),
        "ffn_up.weight": (kind, [e, ff]),
        "ffn_down.weight": ("Q6_K" if ff % 256 == 0 else "F16", [ff, e]),
    }


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def ends(e, v, tied=False):
    out = {"token_embd.weight": ("Q4_K", [e, v]), "output_norm.weight": ("F32", [e])}
    if not tied:
        out["output.weight"] = ("Q6_K", [e, v])
    return out


FFN = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")


def keys(n, e, h, k=None, **more):
    out = {"block_count": n, "embedding_length": e, "attention.head_count": h}
    if k is not None:
        out["attention.head_count_kv"] = k
    out.update({name.replace("__", "."): value for name, value in more.items()})
    return out


def models():
    yield Model("llama3-8b", "llama", keys(32, 4096, 32, 8, feed_forward_length=14336), 128256,
                dense(4096, 14336, 32, 8), ends(4096, 128256))
    # The later blocks of 70B have other types: layers differ in size.
    yield Model("llama3-70b", "llama", keys(80, 8192, 64, 8, feed_forward_length=28672), 128256,
                lambda i: dense(8192, 28672, 64, 8, kind="Q4_K" if i < 40 else "Q6_K"), ends(8192, 128256))
    attention = without(dense(4096, 14336, 32, 8), *FFN)
    old = {f"ffn_{p}.{x}.weight": ("Q4_0", [14336, 4096] if p == "down" else [4096, 14336])
           for p in ("gate", "up", "down") for x in range(8)}
    yield Model("mixtral-old", "llama", keys(32, 4096, 32, 8, feed_forward_length=14336), 32000,
                {**attention, **old}, ends(4096, 32000))
    new = {f"ffn_{p}_exps.weight": ("Q4_0", [14336, 4096, 8] if p == "down" else [4096, 14336, 8])
           for p in ("gate", "up", "down")}
    yield Model("mixtral-new", "llama", keys(32, 4096, 32, 8, feed_forward_length=14336), 32000,
                {**attention, **new}, ends(4096, 32000))
    stack = {f"ffn_{p}_exps.weight": ("Q4_K", [8192, 5120, 16] if p == "down" else [5120, 8192, 16])
             for p in ("gate", "up", "down")}
    llama4_vision = {"v.blk.0.attn_q.weight": ("F16", [1408, 1408]), "v.class_embd": ("F32", [1408]),
                     "mm.linear_1.weight": ("F16", [4096, 5120])}
    yield Model("llama4-scout", "llama4",
                keys(48, 5120, 40, 8, feed_forward_length=16384, attention__key_length=128,
                     attention__value_length=128, vision__block_count=34, vision__image_size=336,
                     vision__patch_size=14, vision__num_channels=3, vision__embedding_length=1408,
                     vision__attention__head_count=16), 202048,
                {**without(dense(5120, 16384, 40, 8), *FFN), **stack}, {**ends(5120, 202048), **llama4_vision})
    yield Model("gemma-7b", "gemma",
                keys(28, 3072, 16, 16, attention__key_length=256, attention__value_length=256), 256000,
                dense(3072, 24576, 16, 16, 256), ends(3072, 256000, tied=True))
    yield Model("gemma2-9b", "gemma2",
                keys(42, 3584, 16, 8, attention__key_length=256, attention__value_length=256,
                     attention__sliding_window=4096), 256000,
                dense(3584, 14336, 16, 8, 256), ends(3584, 256000, tied=True))
    gemma3_vision = {"v.patch_embedding.weight": ("F16", [14, 14, 3, 1152]),
                     **{f"v.blk.{i}.attn_q.weight": ("F16", [1152, 1152]) for i in range(27)},
                     "mm.mm_input_projection.weight": ("F16", [2560, 1152])}
    yield Model("gemma3-4b", "gemma3",
                keys(34, 2560, 8, 4, attention__key_length=256, attention__value_length=256,
                     attention__sliding_window=1024, vision__block_count=27, vision__image_size=896,
                     vision__patch_size=14, vision__num_channels=3, vision__embedding_length=1152,
                     vision__attention__head_count=16), 262145,
                dense(2560, 10240, 8, 4, 256), {**ends(2560, 262145, tied=True), **gemma3_vision})
    yield Model("gemma3n-e4b", "gemma3n",
                keys(35, 2048, 8, 2, attention__key_length=256, attention__value_length=256,
                     attention__sliding_window=512), 262144,
                dense(2048, 16384, 8, 2, 256), ends(2048, 262144, tied=True))
    yield Model("command-r-35b", "command-r", keys(40, 8192, 64, 64), 256000,
                dense(8192, 22528, 64, 64), ends(8192, 256000, tied=True))
    yield Model("qwen2-7b", "qwen2", keys(28, 3584, 28, 4), 152064,
                dense(3584, 18944, 28, 4), ends(3584, 152064))
    yield Model("phi2", "phi2", keys(32, 2560, 32, 32), 51200,
                without(dense(2560, 10240, 32, 32), "ffn_gate.weight"), ends(2560, 51200))
    yield Model("stablelm-1.6b", "stablelm", keys(24, 2048, 32, 32), 100352,
                dense(2048, 5632, 32, 32), ends(2048, 100352))
    lite = {"attn_q.weight": ("Q4_K", [2048, 3072]), "attn_kv_a_mqa.weight": ("Q4_0", [2048, 576]),
            "attn_kv_b.weight": ("Q4_0", [512, 4096]), "attn_output.weight": ("Q4_K", [2048, 2048])}
    moe = {f"ffn_{p}_exps.weight": ("Q4_0", [1408, 2048, 64] if p == "down" else [2048, 1408, 64])
           for p in ("gate", "up", "down")}
    yield Model("deepseek2-lite", "deepseek2",
                keys(27, 2048, 16, 16, attention__key_length=192, attention__value_length=128), 102400,
                lambda i: {**lite, **(moe if i else {"ffn_up.weight": ("Q4_0", [2048, 10944])})},
                ends(2048, 102400))
    glm = {"attn_qkv.weight": ("Q4_K", [4096, 4608]), "attn_output.weight": ("Q4_K", [4096, 4096]),
           "ffn_up.weight": ("Q4_K", [4096, 27392]), "ffn_down.weight": ("Q6_K", [13824, 4096])}
    yield Model("chatglm-bias", "chatglm", keys(40, 4096, 32, 2), 151552,
                {**glm, "attn_qkv.bias": ("F32", [4608])}, ends(4096, 151552))
    yield Model("chatglm-plain", "chatglm", keys(40, 4096, 32, 2), 151552, glm, ends(4096, 151552))
    yield Model("glm4", "glm4", keys(40, 4096, 32, 2), 151552, glm, ends(4096, 151552))
    oss = {"attn_q.weight": ("F16", [2880, 4096]), "attn_k.weight": ("F16", [2880, 512]),
           "attn_v.weight": ("F16", [2880, 512]), "attn_output.weight": ("F16", [4096, 2880]),
           **{f"ffn_{p}_exps.weight": ("MXFP4", [2880, 2880, 32]) for p in ("gate", "up", "down")}}
    for arch in ("gptoss", "gpt-oss"):
        yield Model(f"{arch}-20b", arch,
                    keys(24, 2880, 64, 8, attention__key_length=64, attention__value_length=64,
                         attention__sliding_window=128), 201088,
                    oss, {"token_embd.weight": ("F16", [2880, 201088]), "output_norm.weight": ("F32", [2880]),
                          "output.weight": ("F16", [2880, 201088])})
    mllama_vision = {"v.class_embd": ("F32", [1280]), "v.patch_embd.weight": ("F16", [14, 14, 3, 1280]),
                     **{f"v.blk.{i}.attn_q.weight": ("F16", [1280, 1280]) for i in range(32)}}
    yield Model("mllama-11b", "mllama",
                keys(40, 4096, 32, 8, attention__cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
                     vision__block_count=32, vision__image_size=560, vision__patch_size=14,
                     vision__num_channels=3, vision__embedding_length=1280,
                     vision__attention__head_count=16, vision__max_num_tiles=4), 128256,
                dense(4096, 14336, 32, 8), {**ends(4096, 128256), "rope_freqs.weights": ("F32", [64]),
                                            **mllama_vision})
    # Beyond the architectures with a formula, and beyond one number of heads.
    yield Model("qwen3-8b", "qwen3",
                keys(36, 4096, 32, 8, attention__key_length=128, attention__value_length=128), 151936,
                dense(4096, 12288, 32, 8), ends(4096, 151936))
    yield Model("heads-by-block", "llama",
                keys(4, 4096, [32, 16, 32, 64], [8, 0, 4, 2]), 1000,
                lambda i: dense(4096, 4096 * (i + 1), 32, 8), ends(4096, 1000))
    yield Model("qwen25vl-7b", "qwen25vl",
                keys(28, 3584, 28, 4, vision__block_count=32, vision__patch_size=14, vision__image_size=560,
                     vision__num_channels=3, vision__embedding_length=1280,
                     vision__attention__head_count=16), 152064,
                dense(3584, 18944, 28, 4), {**ends(3584, 152064), **mllama_vision})
    yield Model("mistral3-24b", "mistral3",
                keys(40, 5120, 32, 8, attention__key_length=128, attention__value_length=128,
                     vision__block_count=24, vision__image_size=1540, vision__patch_size=14,
                     vision__num_channels=3, vision__embedding_length=1024,
                     vision__attention__head_count=16), 131072,
                dense(5120, 32768, 32, 8, 128), {**ends(5120, 131072), **mllama_vision})


def header(m):
    return {
        "architecture": m.arch,
        "keys": m.keys,
        "vocabulary": m.vocabulary,
        "blocks": runs([[[name, *tensor] for name, tensor in block.items()] for block in m.blocks]),
        "others": [[name, *tensor] for name, tensor in m.others.items()],
    }


def cases(m):
    for ctx in CONTEXTS:
        for par in PARALLEL:
            for cache in CACHE_TYPES:
                kv, partial, full = estimate(m, ctx, par, cache)
                case = {"context": ctx, "batch": BATCH, "parallel": par, "cache_type": cache, "kv": runs(kv),
                        "partial": partial, "full": full}
                if (ctx, par, cache) in ((4096, 1, "f16"), (32768, 4, "q4_0")):
                    case["boundaries"] = boundaries(m, kv, partial, full)
                yield case


def main():
    out = []
    for m in models():
        basis = m.arch if m.arch in LISTED else "fallback"
        weights, vision_graph = vision(m)
        out.append({"name": m.name, "basis": f"ollama-2025-08:{basis}", "header": header(m),
                    "vision_weights": weights, "vision_graph": vision_graph,
                    "weights": sum(tensor_bytes(*t) for t in m.tensors.values()), "cases": list(cases(m))})
    # A model per line: reviewable, and small.
    lines = ",\n".join(json.dumps(m, separators=(",", ":")) for m in out)
    sys.stdout.write(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
