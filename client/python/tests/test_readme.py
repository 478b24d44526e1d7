"""The examples in the documents run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import unittest
from unittest import mock

from support import HERE, gguf, tensor
from test_daemon import DENSE, STACKED, DaemonTest, numpy, torch
from test_safe_open import weights, write_folder

DOCUMENTS = [HERE.parent / "README.md", HERE.parent.parent.parent / "docs" / "engines" / "python.md"]


class Documents(DaemonTest):
    def test_examples_run(self) -> None:
        self.daemon.import_model("llama3:8b", gguf([*DENSE, STACKED[0]]))
        self.addCleanup(self.daemon.command, "rm", "llama3:8b")
        shards = [weights("model.norm.weight", "F32", 4)], [weights("model.embed.weight", "F32", 8, 4)]
        folder = self.daemon.folder / "tiny"
        write_folder(folder, {f"model-0000{place}-of-00002.safetensors": each for place, each in enumerate(shards, 1)})
        self.daemon.command("import", str(folder), "--name", "tiny")
        self.addCleanup(self.daemon.command, "rm", "tiny")
        count = 0
        for document in DOCUMENTS:
            for example in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
                if ("numpy" in example and numpy is None) or ("torch" in example and torch is None):
                    continue
                with self.subTest(document.name, example=example):
                    self.run_example(example)
                    count += 1
        self.assertGreaterEqual(count, 4)

    def run_example(self, example: str) -> None:
        with mock.patch.dict(os.environ, {"BLOBD_SOCKET": self.daemon.socket}):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(example, "example", "exec"), {})


if __name__ == "__main__":
    unittest.main()
