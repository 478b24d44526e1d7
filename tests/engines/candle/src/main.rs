//! Completes a prompt with candle, greedily: `blobd-engine-candle MODEL|FILE.gguf PROMPT [TOKENS]`.
//!
//! MODEL is opened through blobd's socket, and candle reads its tensors from the maps of the blobs. A path
//! with a `/` is an ordinary file, for comparison. Like every engine here, it prints `ready PID "TEXT"`, then
//! keeps the weights loaded until its standard input ends; or it prints `cannot REASON` if it does not
//! support the model.

use std::fs::File;
use std::io::{Cursor, Read, Seek};
use std::process::ExitCode;

use blobd_client::Client;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Device, IndexOp, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;

type Error = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("candle: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let (Some(model), Some(prompt)) = (arguments.next(), arguments.next()) else {
        return Err("usage: blobd-engine-candle MODEL|FILE.gguf PROMPT [TOKENS]".into());
    };
    let count = arguments.next().map_or(Ok(24), |number| number.parse())?;
    if model.contains('/') {
        return complete(&mut File::open(&model)?, &prompt, count);
    }
    let opened = Client::connect_default()?.open(&model.parse()?)?;
    // A GGUF file in memory that consists of the blobs' own pages.
    let image = opened.contiguous()?;
    complete(&mut Cursor::new(&*image), &prompt, count)
}

fn complete(file: &mut (impl Read + Seek), prompt: &str, count: usize) -> Result<(), Error> {
    let content = Content::read(file)?;
    let device = Device::Cpu;
    let prepared = Vocabulary::read(&content).and_then(|vocabulary| {
        let tokens = vocabulary.tokens_of(prompt)?;
        Ok((vocabulary, tokens, ModelWeights::from_gguf(content, file, &device)?))
    });
    let (vocabulary, mut tokens, mut model) = match prepared {
        Ok(prepared) => prepared,
        Err(reason) => {
            // After the first line, candle's errors have a backtrace.
            println!("cannot {}", reason.to_string().lines().next().unwrap_or_default());
            return Ok(());
        }
    };
    let (mut text, mut position) = (String::new(), 0);
    for _ in 0..count {
        let logits = model.forward(&Tensor::new(&tokens[..], &device)?.unsqueeze(0)?, position)?;
        position += tokens.len();
        let next = logits.i(0)?.argmax(0)?.to_scalar::<u32>()?;
        if next == vocabulary.end {
            break;
        }
        text.push_str(&vocabulary.text_of(next)?);
        tokens = vec![next];
    }
    println!("ready {} {}", std::process::id(), serde_json::to_string(&text)?);
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    drop(model);
    Ok(())
}

/// The tokens of the file: enough to tokenise a prompt of whole words.
struct Vocabulary {
    tokens: Vec<String>,
    begin: Option<u32>,
    end: u32,
}

impl Vocabulary {
    fn read(content: &Content) -> Result<Self, Error> {
        let value = |key: &str| content.metadata.get(key).ok_or_else(|| format!("no {key}"));
        let architecture = value("general.architecture")?.to_string()?;
        let kind = value("tokenizer.ggml.model")?.to_string()?;
        if (architecture.as_str(), kind.as_str()) != ("llama", "llama") {
            return Err(format!("not llama with llama's tokenizer, but {architecture} with {kind}").into());
        }
        let tokens = value("tokenizer.ggml.tokens")?.to_vec()?;
        let tokens = tokens.iter().map(|token| token.to_string().cloned()).collect::<Result<_, _>>()?;
        let wants_begin = content.metadata.get("tokenizer.ggml.add_bos_token").map(Value::to_bool);
        let begin = value("tokenizer.ggml.bos_token_id")?.to_u32()?;
        Ok(Self {
            tokens,
            begin: wants_begin.transpose()?.unwrap_or(true).then_some(begin),
            end: value("tokenizer.ggml.eos_token_id")?.to_u32()?,
        })
    }

    /// Each word must be one token, because this is not a full tokeniser.
    fn tokens_of(&self, prompt: &str) -> Result<Vec<u32>, Error> {
        let mut ids: Vec<u32> = self.begin.into_iter().collect();
        for word in prompt.split_whitespace() {
            let token = format!("\u{2581}{word}");
            let id = self.tokens.iter().position(|known| *known == token);
            ids.push(id.ok_or_else(|| format!("{word:?} is not a token of the model"))?.try_into()?);
        }
        Ok(ids)
    }

    fn text_of(&self, id: u32) -> Result<String, Error> {
        let token = self.tokens.get(usize::try_from(id)?).ok_or_else(|| format!("token {id} is not in the vocabulary"))?;
        Ok(token.replace('\u{2581}', " "))
    }
}
