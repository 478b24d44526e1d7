// Completes a prompt with llama.cpp, greedily: `node run.mjs MODEL.gguf PROMPT [TOKENS]`. Like every engine
// here, it prints `ready PID "TEXT"`, then keeps the weights loaded until its standard input ends.
import { getLlama, LlamaCompletion } from "node-llama-cpp";

const [modelPath, prompt, tokens = "24"] = process.argv.slice(2);
const llama = await getLlama({ gpu: false, build: "never", logLevel: "warn", maxThreads: 1 });
const model = await llama.loadModel({ modelPath, gpuLayers: 0, useMmap: true });
const context = await model.createContext({ contextSize: 256, threads: 1 });
const completion = new LlamaCompletion({ contextSequence: context.getSequence() });
const text = await completion.generateCompletion(prompt, { maxTokens: Number(tokens), temperature: 0 });

console.log(`ready ${process.pid} ${JSON.stringify(text)}`);
process.stdin.on("end", () => process.exit(0)).resume();
