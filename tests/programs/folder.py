"""Reads a folder with all file functions of Python. Prints the same for a model under `blobd exec` as for a real folder."""

import glob
import hashlib
import json
import mmap
import os
import pathlib
import stat
import sys

folder = sys.argv[1]


def tensors(path):
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    print(path[len(folder) :], header.pop("__metadata__", None))
    ends = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    assert [begin for begin, _ in ends] == [0] + [end for _, end in ends[:-1]] and start + ends[-1][1] == len(data)
    for name, entry in sorted(header.items()):
        begin, end = entry["data_offsets"]
        print(name, entry["dtype"], entry["shape"], hashlib.sha256(data[start + begin : start + end]).hexdigest())


def refuses(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        return error.strerror
    raise AssertionError(f"{action} {arguments}")


assert os.path.isdir(folder) and os.path.isdir(folder + "/") and not os.path.isfile(folder)
assert os.path.realpath(folder) == folder and str(pathlib.Path(folder, "x", "..").resolve()) == folder
assert os.access(folder, os.R_OK | os.X_OK)
for directory, folders, files in os.walk(folder):
    print(directory[len(folder) :], sorted(folders), sorted(files))
    assert sorted(folders + files) == sorted(os.listdir(directory))
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        path = os.path.join(directory, entry.name)
        assert entry.path == path and not entry.is_symlink() and entry.is_dir() == os.path.isdir(path)
        assert stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode) == entry.is_file() == os.path.isfile(path)
        assert os.lstat(path).st_size == os.stat(path).st_size == os.path.getsize(path) or entry.is_dir()
        assert refuses(os.readlink, path) == "Invalid argument"
        if entry.name.endswith(".safetensors"):
            tensors(path)
        elif entry.is_file():
            with open(path, "rb") as file:
                whole = file.read()
            assert os.path.getsize(path) == len(whole) and not os.access(path, os.X_OK)
            print(path[len(folder) :], hashlib.sha256(whole).hexdigest())

config = pathlib.Path(folder, "config.json")
assert config.exists() and config.is_file() and not pathlib.Path(folder, "missing.json").exists()
text = config.read_text()
print(sorted(os.path.basename(path) for path in glob.glob(folder + "/*.json")))
print(sorted(str(path.relative_to(folder)) for path in pathlib.Path(folder).rglob("*.json")))

directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
with os.fdopen(os.open("config.json", os.O_RDONLY, dir_fd=directory)) as file:
    assert file.read() == text
assert os.stat("config.json", dir_fd=directory, follow_symlinks=False).st_size == len(text)
assert sorted(os.listdir(directory)) == sorted(os.listdir(folder))
os.chdir(folder)
assert open("config.json").read() == open("./../" + os.path.basename(folder) + "/config.json").read() == text
assert os.path.realpath("config.json") == str(config)

assert refuses(open, "missing.json") == refuses(os.stat, folder + "/missing.json") == "No such file or directory"
assert refuses(os.stat, folder + "/config.json/x") == refuses(os.listdir, str(config)) == "Not a directory"
