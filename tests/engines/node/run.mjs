// Completes a prompt with llama.cpp, greedily, and says where the weights are:
// `node run.mjs MODEL.gguf PROMPT [TOKENS]`. The first line is JSON: the text, and of the memory that
// maps files below a folder called `blobs` the proportional share; what is neither is the engine's own.
import { readFileSync } from "node:fs";
import { getLlama, LlamaCompletion } from "node-llama-cpp";

const [modelPath, prompt, tokens = "24"] = process.argv.slice(2);
const llama = await getLlama({ gpu: false, build: "never", logLevel: "warn", maxThreads: 1 });
const model = await llama.loadModel({ modelPath, gpuLayers: 0, useMmap: true });
const context = await model.createContext({ contextSize: 256, threads: 1 });
const completion = new LlamaCompletion({ contextSequence: context.getSequence() });
const text = await completion.generateCompletion(prompt, { maxTokens: Number(tokens), temperature: 0 });

let ofBlobs = false;
let blobs_kib = 0;
for (const line of readFileSync("/proc/self/smaps", "utf8").split("\n")) {
    if (/^[0-9a-f]+-[0-9a-f]+ /.test(line)) ofBlobs = line.includes("/blobs/sha256-");
    else if (ofBlobs && line.startsWith("Pss:")) blobs_kib += Number(line.split(/\s+/)[1]);
}
console.log(JSON.stringify({ text, blobs_kib }));
process.exit(0);
