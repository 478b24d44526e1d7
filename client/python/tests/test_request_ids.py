"""The IDs that the client gives its requests."""

from __future__ import annotations

import json
import pickle
import re
import threading
import unittest
from typing import Any, Callable, List

from support import UPGRADED, FakeDaemon, FakePeer

import blobd
from blobd._request_ids import RequestIds


def request_id(request: bytes) -> str:
    """The ID in the head of a request; empty if it has none."""
    found = re.search(rb"\r\nx-request-id: (.*)\r\n", request)
    return found.group(1).decode() if found else ""


def echo(peer: FakePeer) -> None:
    """Refuses the request and names its own ID."""
    error = {"code": "not_found", "message": "m", "request": request_id(peer.request)}
    peer.respond(404, json.dumps({"error": error}).encode())


def request_of(action: Callable[[], Any]) -> str:
    """The request ID in the error of an action."""
    try:
        action()
    except blobd.DaemonError as error:
        return error.request or ""
    raise AssertionError("no error")


class Ids(unittest.TestCase):
    def echoing(self) -> FakeDaemon:
        fake = FakeDaemon(echo)
        self.addCleanup(fake.__exit__)
        return fake

    def test_requests_of_one_client_have_one_prefix_and_different_numbers(self) -> None:
        fake = self.echoing()
        client, other = blobd.Client(fake.socket), blobd.Client(fake.socket)
        first = request_of(client.version)
        self.assertRegex(first, r"^[0-9a-f]{12}\.1$")
        self.assertEqual(request_of(lambda: client.open("m")), first[:-1] + "2")
        self.assertEqual(request_of(client.models), first[:-1] + "3")
        self.assertNotEqual(request_of(other.version), first)

    def test_caller_can_choose_the_prefix_of_its_requests(self) -> None:
        fake = self.echoing()
        for prefix in ("a", "Job_7.step-2", "123e4567-e89b-12d3-a456-426614174000", "z" * 43):
            client = blobd.Client(fake.socket, request_prefix=prefix)
            self.assertEqual(request_of(client.version), prefix + ".1")

    def test_prefix_that_is_no_part_of_an_id_is_refused(self) -> None:
        for prefix in ("", "a b", "a\r\nx: y", "a\n", "é", "a/b", "z" * 44):
            with self.assertRaisesRegex(ValueError, "1 to 43 letters"):
                blobd.Client(request_prefix=prefix)

    def test_threads_that_share_a_client_share_no_id(self) -> None:
        ids = RequestIds()
        seen: List[str] = []
        threads = [threading.Thread(target=lambda: seen.extend(ids.next_id() for _ in range(100))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual((len(seen), len(set(seen))), (800, 800))

    def test_pickled_client_has_other_random_digits_or_the_same_prefix(self) -> None:
        fake = self.echoing()
        client = blobd.Client(fake.socket)
        again: blobd.Client = pickle.loads(pickle.dumps(client))
        first, second = request_of(client.version), request_of(again.version)
        self.assertNotEqual(first, second)
        again = pickle.loads(pickle.dumps(blobd.Client(fake.socket, request_prefix="job-7")))
        self.assertEqual(request_of(again.version), "job-7.1")

    def test_request_of_an_error_is_optional_and_not_part_of_its_text(self) -> None:
        for more, expected in [({"request": "x.1"}, "x.1"), ({}, None)]:
            envelope = {"code": "internal", "message": "m", "hint": "h", **more}

            def respond(peer: FakePeer) -> None:
                peer.respond(500, json.dumps({"error": envelope}).encode())

            def frame(peer: FakePeer) -> None:
                peer.send(UPGRADED)
                peer.frame(error=envelope)

            for script in (respond, frame):
                with FakeDaemon(script) as fake, self.assertRaises(blobd.DaemonError) as caught:
                    blobd.Client(fake.socket, timeout=5).open("m")
                self.assertEqual((caught.exception.request, str(caught.exception)), (expected, "m; h"))

    def test_request_of_another_type_is_no_protocol(self) -> None:
        body = b'{"error":{"code":"internal","message":"m","request":7}}'
        with FakeDaemon(lambda peer: peer.respond(500, body)) as fake, self.assertRaises(blobd.ProtocolError):
            blobd.Client(fake.socket, timeout=5).version()


if __name__ == "__main__":
    unittest.main()
