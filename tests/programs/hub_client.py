"""Downloads a repository with huggingface_hub from HF_ENDPOINT: `hub_client.py REPOSITORY FOLDER`. Prints, as JSON, the SHA-256
of each file and what the API says about it."""

import hashlib
import json
import pathlib
import sys

from huggingface_hub import HfApi, HfFileSystem, file_exists, snapshot_download

repository, folder = sys.argv[1:]
downloaded = pathlib.Path(snapshot_download(repository, cache_dir=folder))
again = pathlib.Path(snapshot_download(repository, cache_dir=folder, revision=downloaded.name))
assert again == downloaded, (again, downloaded)
# As `hf cache verify` does.
verified = HfApi().verify_repo_checksums(repository, cache_dir=folder)
assert verified.checked_count > 0, verified
assert not (verified.mismatches or verified.missing_paths or verified.extra_paths), verified
digests = {
    path.relative_to(downloaded).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in downloaded.rglob("*")
    if path.is_file()
}
api = HfApi()
listed = sorted(api.list_repo_files(repository))
assert listed == sorted(digests), (listed, digests)
known = {info.path: (info.size, info.lfs.sha256) for info in api.get_paths_info(repository, listed)}
assert known == {name: ((downloaded / name).stat().st_size, digest) for name, digest in digests.items()}, known
assert api.get_paths_info(repository, ["no/such/file"]) == []
assert file_exists(repository, listed[0]) and not file_exists(repository, "no/such/file")
assert api.list_repo_refs(repository).branches[0].name == "main"
with HfFileSystem().open(f"{repository}/{listed[0]}", "rb") as file:
    assert hashlib.sha256(file.read()).hexdigest() == digests[listed[0]]
print(json.dumps(digests))
