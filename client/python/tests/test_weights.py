"""Models with one safetensors file per tensor: the table that the tests of all clients read."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
import unittest
from typing import Any, Dict, List

from support import HERE, FakeDaemon, FakePeer, layer, temporary_file

import blobd
from blobd.safetensors import BITS

TABLE = json.loads((HERE.parent.parent / "tests" / "tensor_layers.json").read_text())
TENSOR = "application/vnd.ollama.image.tensor"
JSON = "application/vnd.ollama.image.json"


def data_byte(place: int, number: int) -> int:
    """The byte at a place of the data of the layer with this number."""
    return (place + 17 * number) % 250 + 1


def content(described: Dict[str, Any], number: int) -> bytes:
    """The file of a layer of the table."""
    if "header" in described:
        header, size = described["header"].encode(), described["data"]
    else:
        fields: Dict[str, Any] = {"__metadata__": described["metadata"]} if "metadata" in described else {}
        size = 0
        for name, dtype, shape in described["tensors"]:
            end = size + BITS[dtype] // 8
            for length in shape:
                end = size + (end - size) * length
            fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [size, end]}
            size = end
        header = json.dumps(fields).encode()
    number = described.get("file_of", number)
    data = bytes(data_byte(place, number) for place in range(size))
    return struct.pack("<Q", described.get("length", len(header))) + header + data


class ManifestDaemon(FakeDaemon):
    """Serves a model of these files."""

    def __init__(self, layers: List[Any], documents: Dict[str, Any]) -> None:
        self.files = [(TENSOR, entry["name"], content(entry, number)) for number, entry in enumerate(layers)]
        self.files += [(JSON, name, json.dumps(value).encode()) for name, value in documents.items()]
        super().__init__(self.serve)

    def serve(self, peer: FakePeer) -> None:
        layers = [
            layer(
                media_type=media_type,
                name=name,
                size=len(data),
                digest="sha256:" + hashlib.sha256(data).hexdigest(),
                fd=number,
            )
            for number, (media_type, name, data) in enumerate(self.files)
        ]
        peer.head(0, len(layers), layers)
        fds = [temporary_file(data) for _, _, data in self.files]
        if fds:
            peer.frame(fds, fds={"first": 0, "count": len(fds)})
        for fd in fds:
            os.close(fd)
        peer.read_frame()
        peer.wait_for_close()

    def open(self, component: str = "") -> blobd.ManifestWeights:
        return blobd.Client(self.socket, timeout=30).open_weights("m", component=component)


def pair(found: Any) -> Any:
    """A quantisation as the table has it."""
    return None if found is None else [found.quant_type, found.group_size]


class Table(unittest.TestCase):
    def test_every_model_is_read_as_the_table_says(self) -> None:
        self.assertEqual(len(TABLE["models"]), 22)
        for model in TABLE["models"]:
            with self.subTest(model["name"]), ManifestDaemon(model["layers"], model["json"]) as daemon:
                for expected in model["opened"]:
                    with self.subTest(component=expected["component"]):
                        self.check(daemon, model, expected)

    def check(self, daemon: ManifestDaemon, model: Dict[str, Any], expected: Dict[str, Any]) -> None:
        if "error" in expected:
            with self.assertRaises(blobd.ModelError) as caught:
                daemon.open(expected["component"])
            self.assertEqual(caught.exception.code, expected["error"])
            self.assertIn(expected["words"], str(caught.exception))
            return
        with daemon.open(expected["component"]) as weights:
            self.assertEqual(weights.components, model["components"])
            self.assertEqual([weights.quantization, weights.group_size], expected["quantization"])
            self.assertEqual(list(weights), sorted(expected["tensors"]))
            self.assertEqual(weights.names, sorted({*expected["tensors"], *expected["groups"]}))
            for name, tensor in expected["tensors"].items():
                self.check_tensor(weights, name, tensor)
            for name, members in expected["groups"].items():
                self.assertEqual(weights.group(name), members)
            for path, document in model["json"].items():
                self.assertEqual(weights.json(path), document)

    def check_tensor(self, weights: blobd.ManifestWeights, name: str, expected: Dict[str, Any]) -> None:
        found = weights.tensor(name)
        self.assertEqual((found.dtype, list(found.shape)), (expected["dtype"], expected["shape"]), name)
        self.assertEqual((found.layer, found.size), (expected["layer"], expected["size"]), name)
        places = range(expected["start"], expected["start"] + expected["size"])
        data = bytes(data_byte(place, expected["layer"]) for place in places)
        self.assertEqual(bytes(weights[name]), data, name)
        self.assertEqual(weights.is_part(name), expected.get("part", False), name)
        self.assertEqual(pair(weights.quantization_of(name)), expected.get("quantization"), name)
        if expected["shape"]:
            experts = [bytes(weights.expert(name, index)) for index in range(expected["shape"][0])]
            self.assertEqual(b"".join(experts), data, name)

    def test_every_invalid_file_is_refused(self) -> None:
        for refused in TABLE["refused"]:
            with self.subTest(refused["what"]), ManifestDaemon([{"name": "w", **refused}], {}) as daemon:
                with self.assertRaises(blobd.WeightsError) as caught:
                    daemon.open()
                self.assertEqual(caught.exception.code, "invalid_input")
                self.assertTrue(str(caught.exception).startswith('layer "w": safetensors: '), caught.exception)


def single(name: str) -> Dict[str, Any]:
    return {"name": name, "tensors": [[name, "F32", [2]]]}


class Access(unittest.TestCase):
    def test_names_that_are_no_tensors_are_explained(self) -> None:
        group = {"name": "g", "tensors": [["a", "U8", [1]]]}
        with ManifestDaemon([group], {}) as daemon, daemon.open() as weights:
            self.assertTrue(weights.has("g") and weights.has("a") and not weights.has("b"))
            self.assertIsNone(weights.group("a"))
            with self.assertRaises(blobd.NoTensorError):
                weights["b"]
            with self.assertRaises(blobd.WeightsError) as caught:
                weights["g"]
            self.assertEqual(caught.exception.code, "invalid_request")
            self.assertEqual(str(caught.exception), '"g" is a group of tensors; request one of them, such as "a"')
            copy = pickle.loads(pickle.dumps(caught.exception))
            self.assertEqual((copy.code, str(copy)), ("invalid_request", str(caught.exception)))
            with self.assertRaises(IndexError):
                weights.expert("a", 1)

    def test_json_that_is_invalid_is_refused_by_its_path(self) -> None:
        daemon = ManifestDaemon([single("w")], {"a.json": 1})
        daemon.files.append((JSON, "broken.json", b"{"))
        with daemon, daemon.open() as weights:
            self.assertEqual(weights.json("a.json"), 1)
            self.assertIsNone(weights.json("b.json"))
            with self.assertRaises(blobd.WeightsError) as caught:
                weights.json("broken.json")
            self.assertIn('file "broken.json": ', str(caught.exception))

    def test_tensors_outlive_the_model_and_are_read_only(self) -> None:
        with ManifestDaemon([single("w")], {}) as daemon:
            with daemon.open() as weights:
                view = weights["w"]
            self.assertEqual(bytes(view), bytes(range(1, 9)))
            self.assertTrue(view.readonly)



if __name__ == "__main__":
    unittest.main()
