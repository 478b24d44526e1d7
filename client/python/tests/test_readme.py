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

DOCUMENTS = [HERE.parent / "README.md", HERE.parent.parent.parent / "docs" / "engines" / "python.md"]


class Documents(DaemonTest):
    def test_examples_run(self) -> None:
        self.daemon.import_model("llama3:8b", gguf([*DENSE, STACKED[0]]))
        self.addCleanup(self.daemon.command, "rm", "llama3:8b")
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
