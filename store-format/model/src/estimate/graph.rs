//! The memory of the computation graph, by architecture.
//!
//! Source: `GraphSize` in Ollama's `fs/ggml/ggml.go`, revision d5a0d8d904 of August 2025. Divisions are integer
//! divisions, evaluated after the products as written.

use super::Settings;
use super::hyperparameters::{Experts, Hyperparameters};
use super::number::Number;

/// The settings in the form that the formulas use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scope {
    pub(super) parallel: Number,
    /// At most the context of one sequence.
    pub(super) batch: Number,
    /// The context of all sequences.
    pub(super) context: Number,
}

/// The bytes of a graph when part of the model is on the device, and when all of it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GraphNumbers {
    pub(super) partial: Number,
    pub(super) full: Number,
}

/// The numbers of the formulas under short names, as in the formulas.
struct Symbols {
    /// Batch.
    b: Number,
    /// Context of all sequences.
    c: Number,
    /// Embedding length.
    e: Number,
    /// Most heads.
    h: Number,
    /// Most key and value heads.
    k: Number,
    /// Size of a head: embedding length divided by heads, and size of a key head.
    d0: Number,
    d: Number,
    /// Vocabulary.
    v: Number,
}

/// The graph by the formula of the architecture; `None` without a formula. `kv_total` is the KV cache of all blocks in
/// bytes.
pub(super) fn graph(model: &Hyperparameters, scope: &Scope, kv_total: Number) -> Option<GraphNumbers> {
    let symbols = Symbols::new(model, scope);
    Some(match model.architecture.as_str() {
        "llama" | "llama4" => symbols.llama(model.experts),
        "mllama" => symbols.mllama(model.rope_freqs.into()),
        "gemma" | "gemma2" | "gemma3" => symbols.gemma(),
        "gemma3n" => {
            let graph = symbols.gemma();
            GraphNumbers { partial: 4 * graph.partial, full: 4 * graph.full }
        }
        "command-r" => symbols.command_r(),
        "qwen2" => symbols.qwen2(),
        "phi2" => symbols.phi2(),
        "stablelm" => symbols.stablelm(),
        "deepseek2" => symbols.deepseek2(),
        "chatglm" => symbols.chatglm(model.qkv_bias.map(Number::from)),
        "gptoss" | "gpt-oss" => gpt_oss(model, kv_total),
        _ => return None,
    })
}

/// Ollama's value for an architecture without a formula, and for a formula that gives 0.
pub(super) fn fallback(model: &Hyperparameters, kv_total: Number) -> Number {
    let groups = Number::from(model.heads_max) / model.kv_heads_min.max(1);
    groups * kv_total / 6
}

fn gpt_oss(model: &Hyperparameters, kv_total: Number) -> GraphNumbers {
    let groups = 2 * Number::from(model.heads_max) / model.kv_heads_min.max(1);
    GraphNumbers { partial: groups * kv_total / 6, full: 0.into() }
}

impl Scope {
    pub(super) fn new(settings: &Settings) -> Self {
        let Settings { context, batch, parallel, .. } = *settings;
        let parallel = Number::from(parallel);
        Self { parallel, batch: batch.min(context).into(), context: parallel * context }
    }
}

impl Symbols {
    fn new(model: &Hyperparameters, scope: &Scope) -> Self {
        Self {
            b: scope.batch,
            c: scope.context,
            e: model.embedding.into(),
            h: model.heads_max.into(),
            k: model.kv_heads_max.into(),
            d0: model.head_size.into(),
            d: model.head_size_k.into(),
            v: model.vocabulary.into(),
        }
    }

    /// The bytes of the output layer when it is on the device, and of its weights in 6-bit blocks when it is not.
    fn output(&self) -> Number {
        4 * self.b * (self.e + self.v)
    }

    fn output_weights(&self) -> Number {
        self.e * self.v * 105 / 128
    }

    fn llama(&self, experts: Experts) -> GraphNumbers {
        let Self { b, c, e, h, k, d0, .. } = *self;
        let attention = 4 * b * (1 + e + c.max(e)) + e * e * 9 / 16 + 4 * c * (b * h + d0 * k);
        let graph = GraphNumbers {
            full: (4 * b * (1 + 4 * e + c * (1 + h))).max(self.output()),
            partial: 4 * b * e + attention.max(self.output() + self.output_weights()),
        };
        match experts {
            Experts::None => graph,
            Experts::Stacked { gate_bytes, feed_forward } => {
                let gates = 3 * Number::from(gate_bytes)
                    + 4 * b * (2 * Number::from(feed_forward) + k + e + c + d0 * k);
                let attention = 4 * (c * b * h + c * d0 * k + b * 1024 + d0 * k * b);
                GraphNumbers { partial: gates.max(attention), ..graph }
            }
            Experts::Separate { rows } => self.separate_experts(rows.into()),
        }
    }

    fn separate_experts(&self, f: Number) -> GraphNumbers {
        let Self { b, c, e, h, k, d0, .. } = *self;
        let gates = 4 * b * (3 + d0 * k + e + c * (1 + h) + f) + (e * e + 3 * e * k * f) * 9 / 16;
        let attention = 4 * b * (1 + 2 * e + c * (1 + h)) + e * (6 * c * k / h + e * 9 / 16);
        GraphNumbers { full: 4 * b * (2 + 3 * e + c * (1 + h) + 2 * k + f), partial: gates.max(attention) }
    }

    fn mllama(&self, rope_freqs: Number) -> GraphNumbers {
        let Self { b, c, e, h, k, d, .. } = *self;
        let attention = 4 * (b * (2 * e + 1 + c * (1 + h) + d * h) + rope_freqs + d * c * k);
        GraphNumbers {
            full: (4 * b * (2 + 3 * e + d * h + c * (1 + h))).max(self.output()),
            partial: attention.max(self.output() + self.output_weights()),
        }
    }

    fn gemma(&self) -> GraphNumbers {
        let Self { b, c, e, h, d, v, .. } = *self;
        let attention = 4 * b * (2 * e + 1 + 2 * d * h + c + c * h) + 4 * d * c * 8 + e * d * h * 9 / 16;
        GraphNumbers {
            full: self.output().max(4 * b * (2 + c + c * h + 2 * e + 2 * d * h)),
            partial: (4 * e * b + self.output_weights() + 4 * v * b).max(attention),
        }
    }

    fn command_r(&self) -> GraphNumbers {
        let Self { b, c, e, h, .. } = *self;
        let attention = 4 * b * (1 + 2 * e + c * (1 + h)) + 4 * e * c + e * e * 9 / 16;
        GraphNumbers {
            full: self.output().max(4 * b * (2 + 4 * e + c * (1 + h))),
            partial: (self.output() + self.output_weights()).max(attention),
        }
    }

    fn qwen2(&self) -> GraphNumbers {
        let Self { b, c, e, h, .. } = *self;
        let attention = 4 * (b * (1 + 2 * e + c * (1 + h)) + e * (1 + c));
        GraphNumbers {
            full: self.output().max(4 * b * (1 + 2 * e + c + c * h)),
            partial: (self.output() + self.output_weights()).max(attention),
        }
    }

    fn phi2(&self) -> GraphNumbers {
        let Self { b, c, e, h, v, .. } = *self;
        GraphNumbers {
            full: self.output().max(4 * b * (1 + 4 * e + c + c * h)),
            partial: (4 * b * (2 * e + v) + self.output_weights()).max(4 * b * (2 + 3 * e + c + c * h)),
        }
    }

    fn stablelm(&self) -> GraphNumbers {
        let Self { b, c, e, h, v, .. } = *self;
        let full = 4 * b * (c * (1 + h) + 3 * e + 2);
        GraphNumbers { full, partial: (4 * b * (v + 2 * e)).max(full) }
    }

    fn deepseek2(&self) -> GraphNumbers {
        let Self { b, c, e, k, d, v, .. } = *self;
        let attention = 4 * b * (2 * e + 1 + 2 * d * k + c + c * k) + 4 * d * c * k + e * d * k * 9 / 16;
        GraphNumbers {
            full: (4 * b * (3 * e + v)).max(4 * b * (3 * e + 2 + c * (1 + k) + 2 * d * k)),
            partial: (4 * b * (3 * e + v) + self.output_weights()).max(attention),
        }
    }

    fn chatglm(&self, qkv_bias: Option<Number>) -> GraphNumbers {
        let Self { b, c, e, h, d, .. } = *self;
        let (full, partial) = (self.output(), self.output() + self.output_weights());
        let Some(q) = qkv_bias else { return GraphNumbers { partial, full } };
        let attention = 4 * b * (1 + 2 * e + d * h + c + c * h) + 4 * d * c + 4 * c * d + 4 * q;
        GraphNumbers {
            full: full.max(4 * b * (2 + 2 * e + c + c * h + d * h + q)),
            partial: partial.max(attention),
        }
    }
}
