"""The client against a real daemon."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
import unittest
from typing import Any, List

from support import Daemon, HERE, Registry, gguf, open_fds, safetensors, tensor

import blobd

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]
try:
    import torch
except ImportError:
    torch = None

DENSE = [
    tensor("token_embd.weight", "F32", 64, 100),
    tensor("blk.0.attn_q.weight", "Q8_0", 64, 64),
    tensor("blk.0.attn_norm.weight", "F16", 64),
    tensor("blk.1.attn_q.weight", "Q8_0", 64, 64),
    tensor("output.weight", "F32", 64, 10000),
]
STACKED = [tensor("blk.0.ffn_up_exps.weight", "Q8_0", 64, 32, 4), tensor("output_norm.weight", "F32", 64)]
# The experts of one group are 8192 bytes, which is two pages; those of the other are small.
SEPARATE = [tensor(f"blk.0.ffn_up.{expert}.weight", "F32", 64, 32) for expert in range(4)]
SEPARATE += [tensor(f"blk.0.ffn_down.{expert}.weight", "F32", 16, 4) for expert in range(4)]
# A published video model has a convolution of five dimensions.
VIDEO = [tensor("patch_embedding.weight", "F16", 2, 2, 1, 16, 8), tensor("scalar", "F32")]
NORM = ("model.norm.weight", "BF16", [8], bytes(range(16)))
PACKED = [
    ("blocks.0.q.weight", "U32", [2, 8], bytes(64)),
    ("blocks.0.q.weight.scale", "U8", [2, 4], bytes(range(8))),
]
# A model for image generation, with a file per tensor.
IMAGE = [
    ("tensor", safetensors([NORM]), "text_encoder/model.norm.weight"),
    ("tensor", safetensors(PACKED, quant_type="nvfp4"), "transformer/blocks.0.q.weight"),
    ("json", b'{"_class_name":"ZImagePipeline"}', "model_index.json"),
]
TEMPLATE = "{{ .Prompt }} — and so on"
PARAMS = '{"temperature":0.5}'


class DaemonTest(unittest.TestCase):
    """One daemon for all tests."""

    daemon: Daemon

    @classmethod
    def setUpClass(cls) -> None:
        cls.daemon = Daemon()
        cls.addClassCleanup(cls.daemon.close)
        cls.daemon.import_model("dense", gguf(DENSE))
        cls.daemon.import_model("unaligned", gguf(DENSE, alignment=None))
        cls.daemon.import_model("stacked", gguf(STACKED))
        cls.daemon.import_model("separate", gguf(SEPARATE))
        cls.daemon.import_model("video", gguf(VIDEO))
        registry = Registry([("model", gguf(DENSE)), ("template", TEMPLATE.encode()), ("params", PARAMS.encode())])
        cls.addClassCleanup(registry.close)
        cls.daemon.command("pull", "--name", "spoken", registry.reference)
        registry = Registry(IMAGE)
        cls.addClassCleanup(registry.close)
        cls.daemon.command("pull", "--name", "z-image", registry.reference)

    def setUp(self) -> None:
        self.client = blobd.Client(self.daemon.socket, timeout=30)

    def open(self, reference: str, **selection: Any) -> blobd.OpenModel:
        model = self.client.open(reference, **selection)
        self.addCleanup(model.close)
        return model


class Verbs(DaemonTest):
    def test_version_and_models_are_the_daemons(self) -> None:
        version = self.client.version()
        self.assertEqual((version.protocol, version.pid), (1, self.daemon.process and self.daemon.process.pid))
        names = [model.name for model in self.client.models()]
        self.assertIn("dense:latest", names)
        self.assertEqual(len(names), 7)
        self.assertTrue(all(model.size > 0 and model.digest.startswith("sha256:") for model in self.client.models()))

    def test_module_asks_the_daemon_that_the_environment_names(self) -> None:
        before = os.environ.get("BLOBD_SOCKET")
        os.environ["BLOBD_SOCKET"] = self.daemon.socket
        try:
            self.assertEqual(len(blobd.models()), 7)
            self.assertEqual(blobd.version().protocol, 1)
            with blobd.open("dense") as model:
                self.assertEqual(bytes(model["output.weight"]), DENSE[-1][3])
        finally:
            os.environ.pop("BLOBD_SOCKET")
            if before is not None:
                os.environ["BLOBD_SOCKET"] = before

    def test_unknown_model_is_not_found(self) -> None:
        with self.assertRaises(blobd.NotFoundError) as caught:
            self.client.open("nobody:8b")
        self.assertEqual(caught.exception.code, "not_found")
        self.assertIn("nobody", str(caught.exception))
        with self.assertRaises(blobd.NotFoundError):
            self.client.model("nobody:8b")

    def test_error_has_the_id_of_its_request(self) -> None:
        client = blobd.Client(self.daemon.socket, timeout=30, request_prefix="job-7")
        for verb, expected in [(client.open, "job-7.1"), (client.model, "job-7.2"), (client.open, "job-7.3")]:
            with self.assertRaises(blobd.NotFoundError) as caught:
                verb("nobody:8b")
            self.assertEqual(caught.exception.request, expected)

    def test_malformed_name_is_an_invalid_request(self) -> None:
        with self.assertRaises(blobd.DaemonError) as caught:
            self.client.open("//:")
        self.assertEqual(caught.exception.code, "invalid_request")

    def test_details_have_metadata_and_tensors(self) -> None:
        details = self.client.model("dense")
        self.assertEqual(details["architecture"], "llama")
        self.assertEqual([entry["name"] for entry in details["tensors"]], [name for name, *_ in DENSE])


    def test_estimate_is_that_of_the_command(self) -> None:
        import json

        for name, settings, options in [
            ("dense", {"context": 512, "vram_bytes": [1 << 30, 1 << 31]}, "--ctx 512 --vram 1GiB --vram 2GiB"),
            ("stacked", {"cpu_moe": True, "vram_bytes": [1 << 20], "basis": "ollama"}, "--cpu-moe --vram 1MiB --basis ollama"),
            ("dense", {"cache_type_k": "q8_0", "batch": 64, "vram_bytes": [0]}, "--cache-type-k q8_0 --batch 64 --vram 0"),
            # Its tensors are layers of their own.
            ("z-image", {"vram_bytes": [0]}, "--vram 0"),
        ]:
            done = self.daemon.run("fit", name, "--json", *options.split())
            self.assertEqual(self.client.fit(name, **settings), json.loads(done.stdout), (settings, done.stderr))
        need = self.client.fit("dense")
        self.assertNotIn("fits", need)
        self.assertEqual(self.client.fit("dense", memory_bytes=0)["fits"], False)
        with self.assertRaises(blobd.DaemonError) as caught:
            self.client.fit("dense", parallel=0)
        self.assertEqual(caught.exception.code, "invalid_request")


class Metadata(DaemonTest):
    def test_metadata_is_the_files(self) -> None:
        metadata = self.open("dense").metadata()
        self.assertEqual(metadata.architecture, "llama")
        self.assertEqual(metadata["tokenizer.ggml.tokens"], [f"word{number}" for number in range(100)])
        self.assertEqual(metadata.get_as("general.alignment", "uint32"), 32)
        self.assertIsNone(metadata.get_as("general.alignment", "uint64"))
        self.assertEqual(metadata.parameter_count, self.client.model("dense")["parameters"])

    def test_selection_without_the_weights_has_no_metadata(self) -> None:
        with self.assertRaises(blobd.ModelError):
            self.open("spoken", component="template").metadata()


class Weights(DaemonTest):
    def test_model_with_a_file_per_tensor_is_read_by_name(self) -> None:
        with self.client.open_weights("z-image") as weights:
            self.assertEqual(weights.components, ["text_encoder", "transformer"])
            self.assertEqual(bytes(weights["text_encoder/model.norm.weight"]), NORM[3])
            self.assertEqual(weights.quantization, "NVFP4")
        with self.client.open_weights("z-image", component="transformer") as weights:
            self.assertEqual(weights.names, ["blocks.0.q.weight", "blocks.0.q.weight_scale"])
            self.assertEqual(bytes(weights["blocks.0.q.weight_scale"]), PACKED[1][3])
        with self.assertRaises(blobd.WeightsError) as caught:
            self.client.open_weights("dense")
        self.assertEqual(caught.exception.code, "not_found")
        self.daemon.wait_for_no_session()


class Tensors(DaemonTest):
    def test_every_tensor_is_the_files(self) -> None:
        model = self.open("dense")
        self.assertEqual(list(model), [name for name, *_ in DENSE])
        for name, kind, shape, data in DENSE:
            with self.subTest(name):
                known = model.tensor(name)
                self.assertEqual((known.type, known.shape, known.size), (kind, shape, len(data)))
                self.assertEqual(model.layers[known.layer].component, "model")
                self.assertEqual(bytes(model[name]), data)

    def test_tensors_are_grouped_by_layer(self) -> None:
        layers = blobd.group_layers(self.open("dense").tensors)
        self.assertEqual(list(layers), ["blk.0", "blk.1", "output", "token_embd"])
        self.assertEqual(list(layers["blk.0"]), ["attn_norm.weight", "attn_q.weight"])
        self.assertEqual(layers["output"]["weight"].name, "output.weight")

    def test_buffer_is_read_only(self) -> None:
        view = self.open("dense")["output.weight"]
        self.assertTrue(view.readonly)
        with self.assertRaises(TypeError):
            view[0] = 1

    def test_selections_bring_what_they_name(self) -> None:
        self.assertEqual(list(self.open("dense", prefix="blk.1.")), ["blk.1.attn_q.weight"])
        self.assertEqual(list(self.open("dense", names=["output.weight"])), ["output.weight"])
        self.assertEqual(list(self.open("dense", names=[])), [])
        self.assertEqual(len(self.open("spoken", component="template").layers), 1)
        with self.assertRaises(blobd.NotFoundError):
            self.client.open("dense", component="template")
        with self.assertRaises(blobd.NotFoundError):
            self.client.open("dense", names=["no.such.tensor"])
        with self.assertRaises(ValueError):
            self.client.open("dense", prefix="blk.", names=["output.weight"])
        with self.assertRaises(TypeError):
            self.client.open("dense", names="output.weight")

    def test_missing_tensor_is_a_key_error(self) -> None:
        model = self.open("dense")
        self.assertNotIn("missing", model)
        self.assertIsNone(model.get("missing"))
        with self.assertRaises(KeyError) as caught:
            model["missing"]
        self.assertIsInstance(caught.exception, blobd.NoTensorError)
        self.assertIn("model dense:latest: no tensor 'missing'", str(caught.exception))

    def test_texts_are_the_layers(self) -> None:
        model = self.open("spoken")
        self.assertEqual((model.text("template"), model.text("params")), (TEMPLATE, PARAMS))
        self.assertIsNone(model.text("license"))
        self.assertEqual(
            [layer.component for layer in model.layers], ["config", "model", "template", "params"]
        )
        with self.assertRaises(blobd.ModelError):
            model.layer_bytes(1)
        with self.assertRaises(blobd.ModelError):
            model.layer_bytes(9)

    def test_header_is_the_files_start(self) -> None:
        header = self.open("dense").header()
        self.assertEqual(bytes(header), gguf(DENSE)[: len(header)])

    def test_digests_are_the_stores(self) -> None:
        digests = self.open("dense", prefix="blk.").tensor_digests()
        self.assertEqual(sorted(digests), sorted(name for name, *_ in DENSE if name.startswith("blk.")))
        self.assertTrue(all(digest.startswith("sha256:") for digest in digests.values()))

    def test_stacked_experts_are_found_without_mapping(self) -> None:
        model = self.open("stacked")
        name, _, _, data = STACKED[0]
        known = model.tensor(name)
        assert known.experts is not None
        self.assertEqual(known.experts.count, 4)
        for index in range(4):
            start, end = known.expert_range(index)
            self.assertEqual(bytes(model.expert(name, index)), data[start:end])
        for index in (-1, 4):
            with self.assertRaises(IndexError):
                model.expert(name, index)
        with self.assertRaises(IndexError):
            model.expert("output_norm.weight", 0)

    def test_packed_experts_share_a_descriptor(self) -> None:
        model = self.open("separate")
        fds = {model.tensor(name).fd for name, *_ in SEPARATE[:4]}
        self.assertEqual(len(fds), 1)
        for name, _, _, data in SEPARATE:
            self.assertEqual(bytes(model[name]), data)


class Sessions(DaemonTest):
    def test_session_lasts_until_close(self) -> None:
        # The daemon may still be ending those of earlier tests.
        self.daemon.wait_for_no_session()
        with self.client.open("dense") as model:
            self.assertEqual([session["pid"] for session in self.daemon.sessions()], [os.getpid()])
            view = model["output.weight"]
        self.assertTrue(model.closed)
        self.daemon.wait_for_no_session()
        self.assertEqual(bytes(view), DENSE[-1][3])
        model.close()
        with self.assertRaises(blobd.SessionClosedError):
            model["output.weight"]

    def test_forgotten_model_ends_its_session(self) -> None:
        model = self.client.open("dense")
        del model
        gc.collect()
        self.daemon.wait_for_no_session()

    def test_nothing_is_leaked(self) -> None:
        self.client.open("dense").close()
        before, maps = open_fds(), _map_count()
        for _ in range(20):
            with self.client.open("dense") as model:
                self.assertEqual(len(dict(model)), 5)
                with model.contiguous() as whole:
                    self.assertGreater(len(whole.buffer), 0)
        with self.assertRaises(blobd.NotFoundError):
            self.client.open("nobody")
        del model, whole
        gc.collect()
        self.assertEqual(open_fds(), before)
        self.assertLess(_map_count() - maps, 20)

    def test_descriptors_are_read_only_and_close_on_exec(self) -> None:
        import fcntl

        model = self.open("dense")
        fd = model.fd(0)
        assert fd is not None
        self.assertEqual(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE, os.O_RDONLY)
        self.assertTrue(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
        with self.assertRaises(blobd.ModelError):
            model.fd(99)

    def test_many_tensors_open_under_a_small_limit(self) -> None:
        many = [tensor(f"blk.{number}.attn_norm.weight", "F32", 64) for number in range(300)]
        self.daemon.import_model("many", gguf(many))
        self.addCleanup(self.daemon.command, "rm", "many")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_fds() + 100, hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        model = self.open("many")
        self.assertIsNone(model.fd(0))
        for name, _, _, data in many:
            self.assertEqual(bytes(model[name]), data)
        with self.assertRaises(blobd.ModelError) as caught:
            model.contiguous()
        self.assertIn("ulimit -n", str(caught.exception))

    def test_too_small_a_limit_is_an_error_that_says_so(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = open_fds()
        # Enough for the connection and some descriptors, not for all.
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 3, hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with self.assertRaises(blobd.FdsLostError) as caught:
            self.client.open("dense")
        self.assertIn("ulimit -n", str(caught.exception))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self.assertEqual(open_fds(), before)

    def test_maps_outlive_the_daemon_and_it_can_be_opened_again(self) -> None:
        model = self.open("dense")
        view = model["output.weight"]
        self.daemon.stop()
        try:
            self.assertEqual(bytes(view), DENSE[-1][3])
            self.assertEqual(bytes(model["token_embd.weight"]), DENSE[0][3])
            with self.assertRaises(blobd.NotRunningError) as caught:
                self.client.open("dense")
            self.assertIn("start it with `blobd serve`", str(caught.exception))
        finally:
            self.daemon.start()
        self.assertEqual(bytes(self.open("dense")["output.weight"]), DENSE[-1][3])

    def test_threads_share_a_model(self) -> None:
        model = self.open("dense")
        failures: List[str] = []

        def read() -> None:
            for name, _, _, data in DENSE:
                if bytes(model[name]) != data:
                    failures.append(name)

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_views_outlive_everything_at_exit(self) -> None:
        script = (
            f"import blobd; model = blobd.Client({self.daemon.socket!r}).open('dense')\n"
            "view = model['output.weight']; whole = model.contiguous(); print(view[0], whole.buffer[0])"
        )
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src")}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout.split(), [str(DENSE[-1][3][0]), str(ord("G"))])


@unittest.skipIf(numpy is None, "numpy is not installed")
class NumpyViews(DaemonTest):
    def test_plain_types_are_arrays_of_their_shape(self) -> None:
        model = self.open("dense")
        array = model.numpy("token_embd.weight")
        self.assertEqual((array.shape, array.dtype), ((100, 64), numpy.float32))
        self.assertEqual(array.tobytes(), DENSE[0][3])
        self.assertEqual(model.numpy("blk.0.attn_norm.weight").dtype, numpy.float16)

    def test_view_is_no_copy_and_read_only(self) -> None:
        model = self.open("dense")
        array = model.numpy("output.weight")
        again = numpy.frombuffer(model["output.weight"], dtype=numpy.uint8)
        self.assertEqual(array.ctypes.data, again.ctypes.data)
        self.assertFalse(array.flags.writeable)
        with self.assertRaises(ValueError):
            array[0, 0] = 1

    def test_quantised_types_are_rows_of_bytes(self) -> None:
        array = self.open("stacked").numpy("blk.0.ffn_up_exps.weight")
        self.assertEqual((array.shape, array.dtype), ((4, 32, 68), numpy.uint8))

    def test_array_keeps_its_memory(self) -> None:
        model = self.client.open("dense")
        array = model.numpy("output.weight")
        model.close()
        del model
        gc.collect()
        self.assertEqual(array.tobytes(), DENSE[-1][3])


@unittest.skipIf(torch is None, "torch is not installed")
class TorchViews(DaemonTest):
    def test_plain_types_are_tensors_of_their_shape(self) -> None:
        view = self.open("dense").torch("token_embd.weight")
        self.assertEqual((tuple(view.shape), view.dtype), ((100, 64), torch.float32))
        self.assertEqual(view.numpy().tobytes(), DENSE[0][3])


def _map_count() -> int:
    with open("/proc/self/maps") as maps:
        return len(maps.readlines())


if __name__ == "__main__":
    unittest.main()
