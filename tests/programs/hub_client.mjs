// Downloads a repository with @huggingface/hub: `hub_client.mjs URL REPOSITORY FOLDER`. Prints, as JSON, the SHA-256 of each file
// of the downloaded snapshot.
import assert from "node:assert";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import * as hub from "@huggingface/hub";

const [hubUrl, repo, cacheDir] = process.argv.slice(2);
// The library reports each download there.
console.debug = () => {};
const digest = (bytes) => createHash("sha256").update(bytes).digest("hex");
const model = await hub.modelInfo({ name: repo, hubUrl, additionalFields: ["sha", "filePaths"] });
assert.equal(model.name, repo);
assert.equal(model.private, false);
const folder = await hub.snapshotDownload({ repo, hubUrl, cacheDir });
assert.ok(folder.endsWith(model.sha), folder);
const digests = {};
for await (const file of hub.listFiles({ repo, hubUrl, recursive: true })) {
  if (file.type !== "file") continue;
  assert.ok(model.filePaths.includes(file.path), file.path);
  assert.ok(await hub.fileExists({ repo, hubUrl, path: file.path }), file.path);
  const info = await hub.fileDownloadInfo({ repo, hubUrl, path: file.path });
  const bytes = readFileSync(join(folder, file.path));
  assert.equal(info.size, bytes.length);
  digests[file.path] = digest(bytes);
  assert.equal(digests[file.path], file.lfs.oid);
  const blob = await hub.downloadFile({ repo, hubUrl, path: file.path });
  const part = Buffer.from(await blob.slice(8, 100).arrayBuffer());
  assert.ok(part.equals(bytes.subarray(8, 100)));
}
assert.equal(await hub.fileExists({ repo, hubUrl, path: "no/such/file" }), false);
console.log(JSON.stringify(digests));
