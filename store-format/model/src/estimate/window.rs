//! Sliding windows of llama.cpp: their length, and the blocks that have one.
//!
//! Source: `load_arch_hparams` of each architecture in llama.cpp 0c1e57098, and `load_swa_pattern`.

use super::keys::Keys;
use super::recurrent::Recurrent;

/// The sliding window of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    /// Its length.
    pub(super) tokens: u64,
    /// Which blocks have it; empty if none has.
    pub(super) blocks: Vec<bool>,
}

/// How an architecture uses `attention.sliding_window`.
#[derive(Clone, Copy)]
struct Rule {
    length: Length,
    blocks: Blocks,
}

#[derive(Clone, Copy)]
enum Length {
    /// The key's value; no window if the key is missing.
    Key,
    /// The key's value, or this default.
    KeyOr(u64),
    /// This length, unless the key is 0. With `needs_key`, there is no window if the key is missing.
    Fixed { tokens: u64, needs_key: bool },
}

/// The blocks with a window, unless `attention.sliding_window_pattern` is an array that lists them.
#[derive(Clone, Copy)]
enum Blocks {
    /// All except the last block of each group of this size.
    AllButLastOf(u64),
    /// All except the first block of each group of this size.
    AllButFirstOf(u64),
    /// The pattern must be an array.
    Listed,
    /// The blocks with attention.
    Attention,
}

const KEY: &str = "attention.sliding_window";
const PATTERN_KEY: &str = "attention.sliding_window_pattern";

/// The window of a model with this number of blocks. Only the first `trunk` blocks can have one.
pub(super) fn read(keys: &mut Keys<'_>, blocks: usize, trunk: usize, recurrent: &[Recurrent]) -> Window {
    let Some(rule) = rule(keys.metadata().architecture(), trunk) else { return Window::default() };
    let found = keys.optional(KEY);
    let tokens = match (rule.length, found) {
        (Length::Fixed { .. }, Some(0)) | (Length::Fixed { needs_key: true, .. }, None) => 0,
        (Length::Fixed { tokens, .. }, _) | (Length::KeyOr(tokens), None) => tokens,
        (Length::Key | Length::KeyOr(_), Some(tokens)) => tokens,
        (Length::Key, None) => 0,
    };
    if tokens == 0 {
        return Window::default();
    }
    let listed = keys.flags(PATTERN_KEY, blocks).filter(|_| !matches!(rule.blocks, Blocks::Attention));
    let blocks = listed.unwrap_or_else(|| {
        let every = keys.optional(PATTERN_KEY);
        let is_windowed = |block: u64, recurrent: &Recurrent| match rule.blocks {
            // With a group size of 0, all blocks have the window.
            Blocks::AllButLastOf(default) => {
                let every = every.unwrap_or(default);
                block.checked_rem(every).is_none_or(|place| place.saturating_add(1) < every)
            }
            Blocks::AllButFirstOf(default) => {
                block.checked_rem(every.unwrap_or(default)).is_none_or(|place| place != 0)
            }
            Blocks::Listed => false,
            Blocks::Attention => *recurrent == Recurrent::No,
        };
        let pattern = (0..).zip(recurrent).map(|(block, recurrent)| is_windowed(block, recurrent));
        let in_trunk = pattern.take(trunk).chain(std::iter::repeat(false));
        in_trunk.take(blocks).collect()
    });
    if matches!(rule.blocks, Blocks::Listed) && !blocks.contains(&true) {
        keys.add_missing(PATTERN_KEY);
    }
    Window { tokens, blocks }
}

fn rule(architecture: &str, blocks: usize) -> Option<Rule> {
    let rule = |length, blocks| Some(Rule { length, blocks });
    match architecture {
        "gemma2" => rule(Length::KeyOr(4096), Blocks::AllButLastOf(2)),
        "gemma3" => rule(Length::Key, Blocks::AllButLastOf(6)),
        "gemma3n" => rule(Length::Key, Blocks::AllButLastOf(5)),
        "gpt-oss" => rule(Length::Key, Blocks::AllButLastOf(2)),
        "llama4" => rule(Length::Fixed { tokens: 8192, needs_key: false }, Blocks::AllButLastOf(4)),
        "smallthinker" => rule(Length::Fixed { tokens: 4096, needs_key: true }, Blocks::AllButFirstOf(4)),
        "cohere2" | "olmo2" | "afmoe" | "mellum" | "muse-glimmer" => {
            rule(Length::Key, Blocks::AllButLastOf(4))
        }
        "cohere2moe" | "laguna" => rule(Length::Key, Blocks::AllButFirstOf(4)),
        // Only the model of 32 billion parameters, which has 64 blocks, uses its window.
        "exaone4" if blocks == 64 => rule(Length::KeyOr(4096), Blocks::AllButLastOf(4)),
        "exaone-moe" => rule(Length::KeyOr(128), Blocks::AllButLastOf(4)),
        "plamo3" => rule(Length::Key, Blocks::AllButLastOf(8)),
        "gemma4" | "mimo2" | "step35" | "maple" | "granite_swa" | "spark2_5" => {
            rule(Length::Key, Blocks::Listed)
        }
        "lfm2" => rule(Length::Key, Blocks::Attention),
        _ => None,
    }
}
