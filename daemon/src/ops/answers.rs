//! What was told to those who opened a model last. Whoever opens the same in the same way is told the
//! same, and nothing is put together again: a model of a thousand tensors takes about a millisecond.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blobd_client::protocol::request::OpenParams;
use blobd_store_format::digest::Digest;

use crate::store::Model;

/// What a client is told of the model that it opens, and what it is passed.
#[derive(Debug)]
pub struct Answer {
    /// The frames before the descriptors: the head and its tables.
    pub frames: Vec<u8>,
    /// The blobs to pass, in order, each with the least length it must have in bytes.
    pub blobs: Vec<(Digest, u64)>,
}

/// The answers given last.
#[derive(Debug, Default)]
pub struct Answers(Mutex<VecDeque<Given>>);

#[derive(Debug)]
struct Given {
    params: OpenParams,
    model: Model,
    answer: Arc<Answer>,
}

impl Answers {
    /// How many are kept, and how large they are in all: a few models that are opened again and again.
    const MAX_COUNT: usize = 16;
    const MAX_BYTES: usize = 8 << 20;

    /// What was told of this very model, stored as it is now.
    pub(super) fn find(&self, params: &OpenParams, model: &Model) -> Option<Arc<Answer>> {
        let mut given = self.lock();
        let is_same = |given: &Given| {
            given.params == *params
                && given.model.reference == model.reference
                && given.model.is_stored_as(model)
        };
        let place = given.iter().position(is_same)?;
        let found = given.remove(place)?;
        let answer = Arc::clone(&found.answer);
        given.push_front(found);
        Some(answer)
    }

    /// Remembers an answer, and forgets those that were not asked for the longest.
    pub(super) fn keep(&self, params: &OpenParams, model: &Model, answer: &Arc<Answer>) {
        let mut given = self.lock();
        // An older one of the same model would never be found again.
        given.retain(|given| given.params != *params);
        given.push_front(Given { params: params.clone(), model: model.clone(), answer: Arc::clone(answer) });
        while given.len() > Self::MAX_COUNT || given.iter().map(Given::bytes).sum::<usize>() > Self::MAX_BYTES
        {
            given.pop_back();
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Given>> {
        // Every change is complete before anything could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Given {
    fn bytes(&self) -> usize {
        self.answer.frames.len() + self.answer.blobs.len() * size_of::<(Digest, u64)>()
    }
}

#[cfg(test)]
mod tests {
    use blobd_store_format::manifest::Manifest;

    use super::*;

    fn model(name: &str) -> Model {
        let file = format!(r#"{{"mediaType":"m","digest":"{}","size":1}}"#, Digest::of(b"x"));
        let manifest = format!(r#"{{"schemaVersion":2,"config":{file},"layers":[{file}]}}"#);
        let manifest = Manifest::parse(manifest.into_bytes()).unwrap();
        Model { reference: name.parse().unwrap(), manifest, files: Vec::new() }
    }

    fn keep(answers: &Answers, name: &str, bytes: usize) {
        let answer = Arc::new(Answer { frames: vec![0; bytes], blobs: Vec::new() });
        answers.keep(&OpenParams::new(name.parse().unwrap()), &model(name), &answer);
    }

    fn has(answers: &Answers, name: &str) -> bool {
        answers.find(&OpenParams::new(name.parse().unwrap()), &model(name)).is_some()
    }

    #[test]
    fn answer_that_was_not_asked_for_the_longest_goes_first() {
        let answers = Answers::default();
        for number in 0..Answers::MAX_COUNT {
            keep(&answers, &format!("m{number}"), 10);
        }
        assert!(has(&answers, "m0"));
        keep(&answers, "one-more", 10);
        assert!(has(&answers, "m0") && has(&answers, "one-more"));
        assert!(!has(&answers, "m1"));
    }

    #[test]
    fn large_answers_push_out_others_and_one_that_is_too_large_is_not_kept() {
        let answers = Answers::default();
        keep(&answers, "small", 10);
        keep(&answers, "large", Answers::MAX_BYTES - 5);
        assert!(!has(&answers, "small") && has(&answers, "large"));
        keep(&answers, "too-large", Answers::MAX_BYTES + 1);
        assert!(!has(&answers, "too-large"));
    }

    #[test]
    fn answer_is_for_those_who_ask_for_the_same() {
        let answers = Answers::default();
        keep(&answers, "m", 10);
        let params = OpenParams::new("m".parse().unwrap());
        let of_a_part = OpenParams { component: Some("model".to_owned()), ..params.clone() };
        assert!(answers.find(&of_a_part, &model("m")).is_none());
        assert!(answers.find(&params, &model("other")).is_none());
    }
}
