"""The client with daemons that do not run, close the connection or send wrong data."""

from __future__ import annotations

import json
import os
import pickle
import struct
import tempfile
import threading
import unittest
from random import Random
from typing import Any, Callable, Dict, List, Optional, Type
from unittest import mock

from support import UPGRADED, FakeDaemon, FakePeer, entry, layer, open_fds, temporary_file

from test_daemon import numpy

import blobd
from blobd import _wire
from blobd._responses import Head, _read_layer, _read_plain_tensor, _read_tensor, component
from blobd._sockets import check_private, hint_for

Script = Callable[[FakePeer], None]


def ask(script: Script, action: Callable[[blobd.Client], Any]) -> Any:
    """The result of an action against a fake daemon that runs this script."""
    with FakeDaemon(script) as fake:
        return action(blobd.Client(fake.socket, timeout=5))


def open_with(*frames: Dict[str, Any], tensors: int = 0, fds: int = 0, layers: Any = None) -> Script:
    """A script that sends a head and then these frames."""

    def script(peer: FakePeer) -> None:
        peer.head(tensors, fds, layers)
        for frame in frames:
            peer.frame(**frame)
        peer.wait_for_close()

    return script


class Away(unittest.TestCase):
    def test_no_socket_says_what_to_start(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "blobd.sock")
            with self.assertRaises(blobd.NotRunningError) as caught:
                blobd.Client(path).open("m")
        self.assertEqual(
            str(caught.exception), f"blobd daemon: nothing listens on {path}; start it with `blobd serve`"
        )
        self.assertEqual(caught.exception.code, "unavailable")

    def test_default_sockets_are_tried_in_order(self) -> None:
        uid = os.geteuid()
        user = [f"/run/user/{uid}/blobd/blobd.sock", f"/tmp/blobd-{uid}/blobd.sock"]
        for runtime, first in [("/x", ["/x/blobd/blobd.sock"]), ("relative", []), (f"/run/user/{uid}", [])]:
            with mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": runtime}):
                self.assertEqual(blobd.default_sockets(), ["/run/blobd/blobd.sock", *first, *user])

    def test_directory_that_others_could_have_made_is_refused(self) -> None:
        uid = os.geteuid()
        with tempfile.TemporaryDirectory() as folder:
            link = os.path.join(folder, "link")
            os.symlink(folder, link)
            check_private(folder, uid)
            for path, owner, refusal in [(folder, uid + 1, "wrong owner"), (link, uid, "not a directory")]:
                with self.assertRaisesRegex(PermissionError, refusal):
                    check_private(path, owner)
            os.chmod(folder, 0o711)
            with self.assertRaisesRegex(PermissionError, "wrong mode: expected 0700, found 0711"):
                check_private(folder, uid)

    def test_refused_user_learns_what_to_do(self) -> None:
        self.assertIn("only uid 5 may connect", hint_for(0o600, 5, 7))
        self.assertIn("can set socket_group", hint_for(0o660, 5, 0))
        self.assertIn("join the group 987654", hint_for(0o660, 5, 987654))

    def test_other_failures_to_connect_have_their_reason(self) -> None:
        with self.assertRaises(blobd.ConnectError) as caught:
            blobd.Client("/tmp/" + "x" * 200).version()
        self.assertIn("cannot connect to /tmp/x", str(caught.exception))

    def test_refused_permission_is_denied(self) -> None:
        with mock.patch("socket.socket.connect", side_effect=PermissionError(13, "Permission denied")):
            with self.assertRaises(blobd.ConnectError) as caught:
                blobd.Client("/run/x.sock").version()
        self.assertEqual(caught.exception.code, "denied")
        self.assertIn("does not admit you", str(caught.exception))

    def test_silent_daemon_times_out(self) -> None:
        with FakeDaemon(FakePeer.wait_for_close) as fake:
            with self.assertRaises(blobd.TimedOutError):
                blobd.Client(fake.socket, timeout=0.05).version()
            with self.assertRaises(blobd.TimedOutError):
                blobd.Client(fake.socket, timeout=0.05).open("m")


class FailureTest(unittest.TestCase):
    def fails(self, kind: Type[blobd.BlobdError], script: Script, part: str = "", action: Any = None) -> Any:
        before = open_fds()
        with self.assertRaises(kind) as caught:
            ask(script, action or (lambda client: client.version()))
        self.assertIn(part, str(caught.exception))
        for _ in range(100):
            # The fake daemon's end is closed when its thread ends.
            if open_fds() <= before:
                break
            threading.Event().wait(0.01)
        self.assertLessEqual(open_fds(), before)
        return caught.exception


class Responses(FailureTest):
    def test_errors_have_the_protocols_code_and_class(self) -> None:
        for code, kind in [
            ("not_found", blobd.NotFoundError),
            ("busy", blobd.BusyError),
            ("corrupt", blobd.CorruptError),
            ("denied", blobd.DeniedError),
            ("no_space", blobd.DaemonError),
        ]:
            content = {"code": code, "message": "model x: so", "hint": "do this", "request": "x.1"}
            body = json.dumps({"error": content}).encode()
            error = self.fails(kind, lambda peer: peer.respond(404, body), "model x: so; do this")
            self.assertEqual((error.code, error.hint, error.request), (code, "do this", "x.1"))
            again = pickle.loads(pickle.dumps(error))
            self.assertEqual((type(again), str(again)), (kind, str(error)))
            self.assertEqual((again.code, again.hint, again.request), (code, "do this", "x.1"))

    def test_unknown_code_counts_as_internal(self) -> None:
        body = b'{"error":{"code":"tired","message":"m"}}'
        self.assertEqual(self.fails(blobd.DaemonError, lambda peer: peer.respond(500, body)).code, "internal")

    def test_status_without_an_error_is_no_protocol(self) -> None:
        for status in (101, 204, 500):
            script: Script = lambda peer: peer.respond(status, b"{}")
            self.fails(blobd.ProtocolError, script, f"expected 200, found {status}")

    def test_bytes_that_are_no_http_are_refused(self) -> None:
        for text in (b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"\r\n\r\n"):
            self.fails(blobd.ProtocolError, lambda peer: peer.send(text), "not HTTP")

    def test_endless_head_is_cut_off(self) -> None:
        self.fails(blobd.ProtocolError, lambda peer: peer.send(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20000), "head")

    def test_endless_body_is_cut_off(self) -> None:
        text = b"HTTP/1.1 200 OK\r\ncontent-length: 9999999999\r\n\r\n"
        self.fails(blobd.ProtocolError, lambda peer: peer.send(text), "body")

    def test_chunked_body_is_read(self) -> None:
        body = b'{"version":"1","protocol":1,"root":"/","pid":7}'
        text = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n" + body[:5]
        text += b"\r\n%x;x=y\r\n%s\r\n0\r\n\r\n" % (len(body) - 5, body[5:])
        self.assertEqual(ask(lambda peer: peer.send(text), lambda client: client.version()).pid, 7)

    def test_malformed_chunks_are_refused(self) -> None:
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        for chunks in (b"x\r\n", b"-1\r\n", b"\r\n", b"1\r\n{xx\r\n", b"fffffffffff\r\n", b"y" * 2000):
            self.fails(blobd.ProtocolError, lambda peer: peer.send(head + chunks))

    def test_response_cut_off_is_closed(self) -> None:
        for text in (b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"):
            self.fails(blobd.ClosedError, lambda peer: peer.send(text), "see its log")

    def test_json_of_another_form_is_refused(self) -> None:
        deep = b"[" * 100_000 + b"]" * 100_000
        for body in (b"", b"[]", b"{}", b"\xff", b'{"version":1}', b'{"models":[3]}', deep, b"9" * 5000):
            self.fails(blobd.ProtocolError, lambda peer: peer.respond(200, body))
            self.fails(blobd.ProtocolError, lambda peer: peer.respond(200, body), "", lambda client: client.models())

    def test_unknown_fields_are_ignored(self) -> None:
        body = b'{"version":"1","protocol":1,"root":"/","pid":7,"mood":"fine"}'
        self.assertEqual(ask(lambda peer: peer.respond(200, body), lambda client: client.version()).root, "/")


class Opens(FailureTest):
    def fails_to_open(self, script: Script, part: str = "", kind: Any = blobd.ProtocolError) -> Any:
        return self.fails(kind, script, part, lambda client: client.open("m"))

    def test_request_is_as_the_protocol_wants_it(self) -> None:
        seen: List[bytes] = []

        def script(peer: FakePeer) -> None:
            seen.append(peer.request)
            peer.head(0, 0)
            peer.wait_for_close()

        ask(script, lambda client: client.open("llama3:8b", component="model", prefix="blk.").close())
        head, _, body = seen[0].partition(b"\r\n\r\n")
        self.assertTrue(head.startswith(b"POST /v1/open HTTP/1.1\r\n"))
        self.assertIn(b"upgrade: blobd-fd/1", head)
        self.assertIn(b"\r\nx-request-id: ", head)
        expected = {"reference": "llama3:8b", "tensors": {"prefix": "blk."}, "component": "model"}
        self.assertEqual(json.loads(body), expected)

    def test_batches_are_acknowledged_one_by_one(self) -> None:
        acks: List[Any] = []

        def script(peer: FakePeer) -> None:
            peer.head(0, 66)
            for first, count in ((0, 64), (64, 2)):
                fds = [temporary_file(b"x") for _ in range(count)]
                peer.frame(fds, fds={"first": first, "count": count})
                for fd in fds:
                    os.close(fd)
                acks.append(peer.read_frame())
            peer.wait_for_close()

        ask(script, lambda client: client.open("m").close())
        self.assertEqual(acks, [{"ack": {"received": 64}}, {"ack": {"received": 66}}])

    def test_oversized_frame_is_refused_before_it_is_read(self) -> None:
        for length in (_wire.MAX_FRAME_BYTES + 1, 0xFFFFFFFF):
            script: Script = lambda peer: peer.send(UPGRADED + struct.pack("<I", length))
            self.fails_to_open(script, "at most 1048576 allowed")

    def test_frames_of_another_form_are_refused(self) -> None:
        for text in (b"", b"[]", b"{}", b"7", b'{"a":1,"b":2}', b"{", b'{"open":3}', b'{"open":{}}'):
            self.fails_to_open(lambda peer: peer.send(UPGRADED + struct.pack("<I", len(text)) + text))
        self.fails_to_open(open_with({"progress": {}}, tensors=1), "frame: expected 'tensors', found 'progress'")
        self.fails_to_open(open_with({"fds": []}, fds=1), "fds is no object")

    def test_error_frame_is_the_daemons_error(self) -> None:
        frame = {"error": {"code": "corrupt", "message": "blob x: damaged"}}
        self.fails_to_open(open_with(frame, tensors=1), "blob x: damaged", blobd.CorruptError)

    def test_daemon_that_goes_away_is_closed(self) -> None:
        def script(peer: FakePeer) -> None:
            peer.head(3, 0)

        self.fails_to_open(script, "see its log", blobd.ClosedError)

    def test_counts_beyond_the_limits_are_refused(self) -> None:
        self.fails_to_open(open_with(tensors=1 << 40), "tensor_count")
        self.fails_to_open(open_with(fds=1 << 31), "fd_count")
        self.fails_to_open(open_with(tensors=-1), "tensor_count")
        self.fails_to_open(open_with(layers=[layer()] * 4097), "4097 layers")

    def test_lists_that_never_end_or_overflow_are_refused(self) -> None:
        self.fails_to_open(open_with({"tensors": []}, tensors=1, fds=1), "1 to 1")
        self.fails_to_open(open_with({"tensors": [entry()] * 2}, tensors=1, fds=1), "1 to 1")

    def test_tensors_that_make_no_sense_are_refused(self) -> None:
        for fields, part in [
            ({"layer": 1}, "no such layer"),
            ({"fd": 1}, "beyond the 1 announced"),
            ({"fd": None}, "bytes without a descriptor"),
            ({"fd": True}, "fd"),
            ({"offset": (1 << 64) - 1}, "ends beyond"),
            ({"offset": -1}, "offset"),
            ({"size": 1.5}, "size"),
            ({"shape": [-1]}, "shape"),
            ({"shape": "x"}, "shape"),
            ({"type": 3}, "type"),
            ({"experts": {"count": 3, "stride": 3}}, "experts do not add up"),
        ]:
            with self.subTest(fields):
                self.fails_to_open(open_with({"tensors": [entry(**fields)]}, tensors=1, fds=1), part)

    def test_layers_that_make_no_sense_are_refused(self) -> None:
        for fields in ({"fd": 0}, {"header": {"fd": 0, "size": 1}}, {"header": 3}, {"size": -1}, {"piece_count": 1}):
            with self.subTest(fields):
                self.fails_to_open(open_with(layers=[layer(**fields)]))

    def test_batches_out_of_order_are_refused(self) -> None:
        for first, count in ((1, 1), (0, 0), (0, 4)):
            frame = {"fds": {"first": first, "count": count}}
            self.fails_to_open(open_with(frame, fds=3), "received after 0 of 3")

    def send_fds(self, promised: int, came: int, fd_count: int) -> Script:
        def script(peer: FakePeer) -> None:
            peer.head(0, fd_count)
            fds = [temporary_file(b"x") for _ in range(came)]
            try:
                peer.frame(fds, fds={"first": 0, "count": promised})
            finally:
                for fd in fds:
                    os.close(fd)
            peer.wait_for_close()

        return script

    def test_other_number_of_descriptors_than_promised_is_refused_and_leaks_none(self) -> None:
        self.fails_to_open(self.send_fds(2, 1, 2), "1 descriptors received with a frame that announces 2")
        self.fails_to_open(self.send_fds(1, 2, 2), "2 descriptors received with a frame that announces 1")

    def test_more_descriptors_than_there_is_room_for_are_lost_and_leak_none(self) -> None:
        self.fails_to_open(self.send_fds(64, 65, 65), "too many files open", blobd.FdsLostError)

    def test_flipped_bytes_never_escape_as_other_errors(self) -> None:
        head = {"name": "m", "digest": "d", "layers": [layer(header=None)], "tensor_count": 1, "fd_count": 0}
        tensors = [entry(fd=None, size=0, experts={"count": 0, "stride": 9})]
        response = UPGRADED
        for frame in ({"open": head}, {"tensors": tensors}):
            text = json.dumps(frame).encode()
            response += struct.pack("<I", len(text)) + text
        broken = bytearray()
        with FakeDaemon(lambda peer: peer.send(bytes(broken))) as fake:
            client, random, opened = blobd.Client(fake.socket, timeout=5), Random(7), 0
            for _ in range(500):
                broken[:] = response
                for _ in range(random.randrange(3)):
                    broken[random.randrange(len(broken))] = random.choice(b'\x00\x01\xff0-9"{}[],:\\ez')
                try:
                    client.open("m").close()
                    opened += 1
                except blobd.BlobdError:
                    pass
            self.assertGreater(opened, 100)

    def test_unasked_descriptors_are_closed(self) -> None:
        sent = threading.Event()

        def script(peer: FakePeer) -> None:
            fd = temporary_file(b"x")
            peer.send(UPGRADED)
            head = {"name": "m", "digest": "d", "layers": [], "tensor_count": 0, "fd_count": 0}
            peer.frame([fd], open=head)
            os.close(fd)
            sent.set()
            peer.wait_for_close()

        before = open_fds()
        with FakeDaemon(script) as fake, blobd.Client(fake.socket).open("m"):
            # The fake daemon is in this process: its copy must be closed before they are counted.
            self.assertTrue(sent.wait(60))
            # The listener and both ends of the connection.
            self.assertLessEqual(open_fds(), before + 3)


class LyingSizes(unittest.TestCase):
    """Wrong numbers that are detected only by the descriptors' files."""

    def open(self, file: int, tensors: Optional[List[Any]] = None, /, **fields: Any) -> blobd.OpenModel:
        known = [entry(**fields)] if tensors is None else tensors

        def script(peer: FakePeer) -> None:
            peer.head(len(known), 1, [layer(fd=0, header={"fd": 0, "size": 999})])
            peer.frame(tensors=known)
            peer.frame([file], fds={"first": 0, "count": 1})
            peer.wait_for_close()

        fake = FakeDaemon(script)
        self.addCleanup(fake.__exit__)
        self.addCleanup(os.close, file)
        model = blobd.Client(fake.socket, timeout=5).open("m")
        self.addCleanup(model.close)
        return model

    def test_tensor_behind_the_end_of_its_file_is_never_touched(self) -> None:
        for length in (0, 63):
            model = self.open(temporary_file(bytes(length)))
            with self.assertRaises(blobd.ShortError) as caught:
                model["t"]
            self.assertEqual(caught.exception.code, "corrupt")
            self.assertIn(f"length of its file: expected 64 bytes, found {length}; run `blobd verify`", str(caught.exception))
            for lying in (lambda: model.header(), lambda: model.layer_bytes(0), lambda: model.numpy("t")):
                with self.assertRaises(blobd.ShortError):
                    lying()

    def test_what_is_no_file_is_not_mapped(self) -> None:
        reading, writing = os.pipe()
        self.addCleanup(os.close, writing)
        with self.assertRaises(blobd.MapError):
            self.open(reading)["t"]
        with self.assertRaises(blobd.MapError):
            self.open(os.open("/", os.O_RDONLY))["t"]

    def test_tensor_without_elements_is_an_empty_buffer(self) -> None:
        model = self.open(temporary_file(bytes(999)), fd=None, size=0, shape=[0])
        self.assertEqual(bytes(model["t"]), b"")
        if numpy is not None:
            self.assertEqual(model.numpy("t").shape, (0,))

    def test_shape_that_does_not_fit_its_size_is_no_view(self) -> None:
        model = self.open(temporary_file(bytes(64)), shape=[17])
        with self.assertRaises(blobd.BlobdError):
            model.numpy("t")

    def test_first_of_two_tensors_with_one_name_is_found(self) -> None:
        model = self.open(temporary_file(bytes(64)), [entry(size=4), entry(size=8)])
        self.assertEqual((model.tensor("t").size, len(model), len(model.tensors)), (4, 1, 2))
        self.assertEqual(len(model.map(model.tensors[1])), 8)

    def test_large_blob_starts_at_a_huge_page(self) -> None:
        size = (5 << 20) + 1
        model = self.open(temporary_file(bytes(range(256)) * (size // 256) + b"!"), size=size, shape=[size])
        view = model["t"]
        self.assertEqual((len(view), view[255], view[-1]), (size, 255, ord("!")))
        with open("/proc/self/maps") as maps:
            starts = [int(line.split("-")[0], 16) for line in maps if "memfd:blob" in line]
        self.assertTrue(any(start % (2 << 20) == 0 for start in starts), starts)

    def test_text_that_is_none_is_an_error(self) -> None:
        def script(peer: FakePeer) -> None:
            fd = temporary_file(b"\xff" * 64)
            peer.head(0, 1, [layer(fd=0, media_type="application/vnd.ollama.image.template")])
            peer.frame([fd], fds={"first": 0, "count": 1})
            os.close(fd)
            peer.wait_for_close()

        with FakeDaemon(script) as fake, blobd.Client(fake.socket).open("m") as model:
            with self.assertRaises(blobd.ModelError):
                model.text("template")


class TensorEntries(unittest.TestCase):
    def test_short_way_of_reading_an_entry_gives_what_the_long_one_gives(self) -> None:
        head = Head("m", "sha256:0", tuple(_read_layer(0, layer(), 1) for _ in range(2)), 1, 3)
        plain = {"name": "t", "type": "F32", "shape": [2, 3], "layer": 1, "fd": 2, "offset": 64, "size": 24}
        read = _read_plain_tensor(plain, head)
        self.assertEqual(read, _read_tensor(plain, head))
        self.assertEqual(repr(read), repr(_read_tensor(plain, head)))
        without_offset = {key: value for key, value in plain.items() if key != "offset"}
        self.assertEqual(_read_plain_tensor(without_offset, head), _read_tensor(without_offset, head))
        wrong: List[Any] = [None, True, -1, 1 << 64, 2.0, "2", [], {}, [True], [-1], [2.0], [None]]
        for key in plain:
            for value in wrong:
                changed = {**plain, key: value}
                found = _read_plain_tensor(changed, head)
                if found is not None:
                    self.assertEqual(found, _read_tensor(changed, head), changed)
            found = _read_plain_tensor({name: value for name, value in plain.items() if name != key}, head)
            self.assertEqual(found is None, key != "offset", key)
        for changes in ({"layer": 2}, {"fd": 3}, {"size": (1 << 64) - 64}, {"experts": {"count": 2, "stride": 12}}):
            self.assertIsNone(_read_plain_tensor({**plain, **changes}, head), changes)
        self.assertIsNone(_read_plain_tensor([plain], head))


class Words(unittest.TestCase):
    def test_components_of_the_well_known_media_types(self) -> None:
        for media_type, expected in [
            ("application/vnd.ollama.image.model", "model"),
            ("application/vnd.ollama.image.params", "params"),
            ("application/vnd.docker.container.image.v1+json", "config"),
            ("application/vnd.docker.ai.gguf.v3", "model"),
            ("application/vnd.docker.ai.mmproj", "projector"),
            ("application/vnd.cncf.model.weight.v1.raw", "model"),
            ("application/vnd.cnai.model.config.v1+json", "config"),
            ("application/vnd.cncf.model.weight.config.v1.raw", "weight.config"),
            ("text/plain", "text/plain"),
        ]:
            self.assertEqual(component(media_type), expected, media_type)

    def test_missing_library_says_what_to_install(self) -> None:
        from blobd._views import numpy_view
        from blobd._responses import Tensor

        known = Tensor("t", "F32", (1,), 0, 4, 0, 0, None)
        with mock.patch.dict("sys.modules", {"numpy": None}):
            with self.assertRaises(blobd.ModelError) as caught:
                numpy_view(known, memoryview(bytes(4)), "<")
        self.assertIn("pip install numpy", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
