"""The codes of errors are those of the protocol."""

from __future__ import annotations

import json
import re
import unittest

from support import HERE, FakeDaemon

import blobd
from blobd.errors import CODES

PROTOCOL = HERE.parent.parent.parent / "docs" / "PROTOCOL.md"
# A row of the table of error codes: code, meaning, HTTP status, exit code.
ROW = re.compile(r"^\| `([a-z_]+)` \| .* \| [45]\d\d \| \d \|$", re.MULTILINE)


class Codes(unittest.TestCase):
    def test_every_code_of_the_protocol_is_known(self) -> None:
        documented = ROW.findall(PROTOCOL.read_text())
        self.assertGreaterEqual(len(documented), 12)
        self.assertEqual(sorted(documented), sorted(CODES))

    def test_every_code_of_the_protocol_arrives(self) -> None:
        for code in ROW.findall(PROTOCOL.read_text()):
            body = json.dumps({"error": {"code": code, "message": "m"}}).encode()
            with FakeDaemon(lambda peer: peer.respond(500, body)) as fake:
                with self.assertRaises(blobd.DaemonError) as caught:
                    blobd.Client(fake.socket, timeout=5).version()
            self.assertEqual(caught.exception.code, code)


if __name__ == "__main__":
    unittest.main()
