"""The loader for vLLM, on a stand-in for vLLM 0.33 with the same base classes; see `vllm_stand_in`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
import unittest
import unittest.mock
import warnings
from typing import Any, Dict, Iterable, List, Tuple

import vllm_stand_in
from support import HERE
from test_safe_open import EXPERTS, FIRST, SECOND, SafeOpenTest, torch, weights, write_folder

import blobd
from blobd import vllm_loader

ALL = {name: data for name, _, _, data in FIRST + SECOND}


class Model:
    """A model of vLLM as far as a loader sees it: it takes the weights, and says which it has."""

    def __init__(self, **attributes: Any) -> None:
        self.loaded: Dict[str, bytes] = {}
        vars(self).update(attributes)

    def load_weights(self, tensors: Iterable[Tuple[str, Any]]) -> List[str]:
        for name, tensor in tensors:
            assert name not in self.loaded, name
            self.loaded[name] = bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())
        return set(self.loaded)  # type: ignore[return-value]

    def named_parameters(self) -> List[Tuple[str, Any]]:
        return []


def config(model: str, **more: Any) -> Any:
    fields = {"model": model, "model_weights": "", "revision": None, "quantization": None, **more}
    return types.SimpleNamespace(**fields)


class LoaderTest(SafeOpenTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        shards = {"model-00001-of-00002.safetensors": FIRST, "model-00002-of-00002.safetensors": SECOND}
        both = {**shards, "consolidated.safetensors": [weights("tok_embeddings.weight", "F32", 40, 16)]}
        folder = cls.daemon.folder / "both"
        write_folder(folder, both)
        cls.daemon.command("import", str(folder), "--name", "both", "--include", "*.safetensors")

    def setUp(self) -> None:
        super().setUp()
        self.loaders = vllm_stand_in.install()
        self.addCleanup(vllm_stand_in.remove)
        for change in (
            unittest.mock.patch.dict(os.environ, {"BLOBD_SOCKET": self.daemon.socket}),
            unittest.mock.patch.object(vllm_loader, "_registered", False),
        ):
            change.start()
            self.addCleanup(change.stop)
        vllm_loader.register()
        warnings.filterwarnings("ignore", "The given buffer is not writable")

    def loader(self, **extra: Any) -> Any:
        return self.loaders["blobd"](vllm_stand_in.LoadConfig("blobd", **extra))


@unittest.skipIf(torch is None, "torch is not installed")
class Loading(LoaderTest):
    def load(self, model: str, loader: Any = None, **attributes: Any) -> Dict[str, bytes]:
        made = Model(**attributes)
        (loader or self.loader()).load_weights(made, config(model))
        self.daemon.wait_for_no_session()
        return made.loaded

    def test_all_tensors_of_all_shards_are_loaded(self) -> None:
        for model in ("/blobd/sharded", "/blobd/sharded:latest/"):
            self.assertEqual(self.load(model), ALL)

    def test_reference_may_be_given_beside_any_folder(self) -> None:
        self.assertEqual(self.load("/models/any", self.loader(reference="sharded")), ALL)
        made = Model()
        self.loader().load_weights(made, config("/models/any", model_weights="blobd://sharded"))
        self.assertEqual(made.loaded, ALL)

    def test_files_outside_of_the_index_are_left_out(self) -> None:
        self.assertEqual(self.load("/blobd/both"), ALL)
        only = self.load("/blobd/both", allow_patterns_overrides=["consolidated*"])
        self.assertEqual(list(only), ["tok_embeddings.weight"])

    def test_weights_of_another_rank_and_unused_ones_are_left_out(self) -> None:
        loader = self.loader()
        loader.local_expert_ids = {0, 2}
        self.assertEqual(len(self.load("/blobd/sharded", loader)), len(ALL) - len(EXPERTS) // 2)
        kept = self.load("/blobd/sharded", is_unused_checkpoint_weight=lambda name: ".experts." in name)
        self.assertEqual(len(kept), len(ALL) - len(EXPERTS))

    def test_secondary_sources_have_their_prefix_and_folder(self) -> None:
        source = vllm_stand_in.DefaultModelLoader.Source("/blobd/pipeline", None, subfolder="vae", prefix="vae.")
        loaded = self.load("/blobd/sharded", secondary_weights=[source])
        self.assertEqual(set(loaded) - set(ALL), {"vae.conv_in.weight"})

    def test_missing_weights_are_still_found_by_vllm(self) -> None:
        made = Model(named_parameters=lambda: [("other.weight", None)])
        with self.assertRaises(ValueError) as caught:
            self.loader().load_weights(made, config("/blobd/sharded"))
        self.assertIn("not initialized from checkpoint", str(caught.exception))


class Interface(LoaderTest):
    def test_download_checks_that_the_model_is_stored(self) -> None:
        self.loader().download_model(config("/blobd/sharded"))
        self.loader(reference="sharded").download_model(config("anything"))
        with self.assertRaises(blobd.NotFoundError):
            self.loader().download_model(config("/blobd/nobody"))

    def test_settings_of_the_default_loader_are_kept(self) -> None:
        given = vllm_stand_in.LoadConfig("blobd", reference="sharded", num_threads=4)
        loader = self.loaders["blobd"](given)
        self.assertEqual(loader.load_config.model_loader_extra_config, {"num_threads": 4})
        self.assertEqual(given.model_loader_extra_config, {"reference": "sharded", "num_threads": 4})
        with self.assertRaises(ValueError):
            self.loader(unknown=1)

    def test_other_models_and_torchao_are_refused_with_the_way_out(self) -> None:
        for call in (
            lambda: self.loader().load_weights(Model(), config("/blobd/sharded", quantization="torchao")),
            lambda: self.loader().download_model(config("meta-llama/Llama-3")),
        ):
            with self.assertRaises(ValueError) as caught:
                call()
            self.assertIn("expected", str(caught.exception))
        self.assertIn('\'{"reference": "REF"}\'', str(caught.exception))

    def test_default_loader_of_another_shape_is_refused(self) -> None:
        package: Any = sys.modules[vllm_stand_in.PACKAGE]
        with unittest.mock.patch.object(package, "DefaultModelLoader", vllm_stand_in.BaseModelLoader):
            with unittest.mock.patch.object(vllm_loader, "_registered", False):
                with self.assertRaises(RuntimeError) as caught:
                    vllm_loader.register()
        self.assertIn("_get_weights_iterator", str(caught.exception))

    def test_registering_again_does_nothing(self) -> None:
        first = self.loaders["blobd"]
        vllm_loader.register()
        self.assertIs(self.loaders["blobd"], first)

    def test_folder_in_a_mount_is_a_reference(self) -> None:
        with unittest.mock.patch.object(vllm_loader, "_mounts", lambda: ["/run/models"]):
            for path, expected in [
                ("/run/models/llama3/8b", "llama3:8b"),
                ("/run/models/hf.co/me/tiny/main/", "hf.co/me/tiny:main"),
            ]:
                self.assertEqual(vllm_loader.reference_of(path), expected)
            for path in ("/run/models/llama3", "/run/models/hub/models--a--b", "/run/models/lmstudio/blobd/a:b", "/run/modelsx/a/b", "a/b"):
                self.assertRaises(ValueError, vllm_loader.reference_of, path)

    def test_mounts_are_read_from_the_kernel(self) -> None:
        text = "a / ext4 rw 0 0\nblobd /mnt/my\\040models fuse.blobd ro 0 0\nblobd /mnt fuse ro 0 0\nother /x fuse ro 0 0\n"
        with unittest.mock.patch("builtins.open", unittest.mock.mock_open(read_data=text)):
            self.assertEqual(vllm_loader._mounts(), ["/mnt/my models", "/mnt"])

    def test_files_are_chosen_as_vllm_chooses_them(self) -> None:
        with self.client.open("sharded") as model:
            self.assertEqual(
                vllm_loader.weight_files(model), [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
            )
            with self.assertRaises(blobd.WeightsError) as caught:
                vllm_loader.weight_files(model, "vae")
            self.assertIn("folder 'vae' of model sharded:latest: no safetensors file", str(caught.exception))
        with self.client.open("pipeline") as model:
            self.assertEqual(vllm_loader.weight_files(model, "unet"), ["unet/diffusion_pytorch_model.safetensors"])


class Import(unittest.TestCase):
    def test_client_imports_no_engine(self) -> None:
        script = (
            "import sys, blobd, blobd.vllm_loader\n"
            "print([name for name in ('vllm', 'torch', 'numpy') if name in sys.modules])"
        )
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src")}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        self.assertEqual((done.stdout, done.stderr), ("[]\n", ""))

    def test_package_names_the_plugin(self) -> None:
        text = (HERE.parent / "pyproject.toml").read_text()
        self.assertIn('[project.entry-points."vllm.general_plugins"]\nblobd = "blobd.vllm_loader:register"\n', text)

    @unittest.skipIf(importlib.util.find_spec("vllm") is None, "vllm is not installed: only the stand-in is tested")
    def test_stand_in_is_like_the_installed_vllm(self) -> None:
        import dataclasses
        import inspect

        from vllm.model_executor.model_loader import DefaultModelLoader

        own = vllm_stand_in.DefaultModelLoader
        for name in ("_get_weights_iterator", "get_all_weights", "download_model", "load_weights"):
            theirs = list(inspect.signature(getattr(DefaultModelLoader, name)).parameters)
            self.assertEqual(list(inspect.signature(getattr(own, name)).parameters), theirs, name)
        fields = [field.name for field in dataclasses.fields(own.Source)]
        self.assertEqual([field.name for field in dataclasses.fields(DefaultModelLoader.Source)], fields)


if __name__ == "__main__":
    unittest.main()
