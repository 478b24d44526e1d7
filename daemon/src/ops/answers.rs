//! What was told to those who opened a model last. Whoever opens the same in the same way is told the
//! same, and nothing is put together again: a model of a thousand tensors takes about a millisecond.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_store::{Model, StoredFile};
use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;

use crate::permits::Permit;

/// What a client is told of the model that it opens, and what it is passed.
#[derive(Debug)]
pub struct Answer {
    /// The frames before the descriptors, the head and its tables, in parts of any length.
    pub frames: Vec<Vec<u8>>,
    /// The blobs to pass, in order, each with the least length it must have in bytes.
    pub blobs: Vec<(Digest, u64)>,
    /// What it takes in memory, if that is counted for all who share it.
    pub(crate) memory: OnceLock<Permit>,
}

impl Answer {
    /// One whose memory is not counted yet.
    #[must_use]
    pub const fn new(frames: Vec<Vec<u8>>, blobs: Vec<(Digest, u64)>) -> Self {
        Self { frames, blobs, memory: OnceLock::new() }
    }

    /// What it takes in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let frames: usize = self.frames.iter().map(Vec::len).sum();
        frames + self.blobs.len() * size_of::<(Digest, u64)>()
    }
}

/// The answers given last.
#[derive(Debug, Default)]
pub struct Answers(Mutex<VecDeque<Given>>);

#[derive(Debug)]
struct Given {
    params: OpenParams,
    reference: Reference,
    manifest: Digest,
    /// The recipes of the model's files, where they have one. Whether they are kept in memory is not
    /// decided here: without them the answer is of no use any more.
    recipes: Vec<Option<Weak<Recipe>>>,
    answer: Kept,
}

#[derive(Debug)]
enum Kept {
    /// Until others have been asked for more recently.
    Small(Arc<Answer>),
    /// As long as somebody is being told it.
    Large(Weak<Answer>),
}

impl Answers {
    /// How many are kept, and how large they are in all: a few models that are opened again and again.
    const MAX_COUNT: usize = 16;
    const MAX_BYTES: usize = 8 << 20;

    /// What was told of this very model, stored as it is now.
    pub(super) fn find(&self, params: &OpenParams, model: &Model) -> Option<Arc<Answer>> {
        let mut given = self.lock();
        let place = given.iter().position(|given| given.params == *params && given.is_of(model))?;
        let found = given.remove(place)?;
        let answer = match &found.answer {
            Kept::Small(answer) => Arc::clone(answer),
            Kept::Large(answer) => answer.upgrade()?,
        };
        given.push_front(found);
        Some(answer)
    }

    /// Remembers an answer, and forgets those that were not asked for the longest. Lists of tensors are
    /// long themselves, and seldom asked for twice.
    pub(super) fn keep(&self, params: &OpenParams, model: &Model, answer: &Arc<Answer>) {
        if matches!(params.tensors, TensorSelection::Names(_) | TensorSelection::Experts(_)) {
            return;
        }
        let mut given = self.lock();
        // An older one of the same model would never be found again, nor one whose recipes are gone.
        given.retain(|given| given.params != *params && given.is_alive());
        given.push_front(Given::new(params, model, answer));
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
    fn new(params: &OpenParams, model: &Model, answer: &Arc<Answer>) -> Self {
        let recipes = model.files.iter().map(|file| file.recipe.as_ref().map(Arc::downgrade));
        Self {
            params: params.clone(),
            reference: model.reference.clone(),
            manifest: model.manifest.digest(),
            recipes: recipes.collect(),
            answer: if answer.bytes() > Answers::MAX_BYTES {
                Kept::Large(Arc::downgrade(answer))
            } else {
                Kept::Small(Arc::clone(answer))
            },
        }
    }

    /// Whether it is about this model, and each of its recipes the very one.
    fn is_of(&self, model: &Model) -> bool {
        let is_same = |(known, file): (&Option<Weak<Recipe>>, &StoredFile)| match (known, &file.recipe) {
            (None, None) => true,
            (Some(known), Some(recipe)) => known.upgrade().is_some_and(|known| Arc::ptr_eq(&known, recipe)),
            _ => false,
        };
        self.reference == model.reference
            && self.manifest == model.manifest.digest()
            && self.recipes.len() == model.files.len()
            && self.recipes.iter().zip(&model.files).all(is_same)
    }

    fn is_alive(&self) -> bool {
        let is_told = !matches!(&self.answer, Kept::Large(answer) if answer.strong_count() == 0);
        is_told && self.recipes.iter().flatten().all(|recipe| recipe.strong_count() > 0)
    }

    fn bytes(&self) -> usize {
        let prefix = match &self.params.tensors {
            TensorSelection::Prefix(prefix) => prefix.len(),
            _ => 0,
        };
        let params = prefix + self.params.component.as_ref().map_or(0, String::len);
        let answer = match &self.answer {
            Kept::Small(answer) => answer.bytes(),
            // It is there anyway.
            Kept::Large(_) => 0,
        };
        params + answer
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
        let answer = Arc::new(Answer::new(vec![vec![0; bytes]], Vec::new()));
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
        assert!(has(&answers, "large"), "what is not kept pushes nothing out");
    }

    #[test]
    fn answer_that_is_too_large_to_keep_is_shared_while_it_is_told() {
        let answers = Answers::default();
        let told = Arc::new(Answer::new(vec![vec![0; Answers::MAX_BYTES + 1]], Vec::new()));
        let params = OpenParams::new("m".parse().unwrap());
        answers.keep(&params, &model("m"), &told);
        let shared = answers.find(&params, &model("m")).expect("somebody is being told");
        assert!(Arc::ptr_eq(&told, &shared));
        drop((told, shared));
        assert!(!has(&answers, "m"));
    }

    #[test]
    fn lists_of_names_and_what_has_lost_its_recipe_are_not_kept() {
        let (answers, params) = (Answers::default(), OpenParams::new("m".parse().unwrap()));
        let answer = Arc::new(Answer::new(Vec::new(), Vec::new()));
        let tensors = TensorSelection::Names(vec!["a".to_owned()]);
        let by_name = OpenParams { tensors, ..params.clone() };
        answers.keep(&by_name, &model("m"), &answer);
        assert!(answers.find(&by_name, &model("m")).is_none());
        let recipe = || Arc::new(Recipe::new(Digest::of(b"x"), Vec::new(), Vec::new()).unwrap());
        let split = |recipe: &Arc<Recipe>| {
            let mut model = model("m");
            let descriptor = model.manifest.config().clone();
            model.files = vec![StoredFile { descriptor, recipe: Some(Arc::clone(recipe)) }];
            model
        };
        let kept = recipe();
        answers.keep(&params, &split(&kept), &answer);
        assert!(answers.find(&params, &split(&kept)).is_some());
        assert!(answers.find(&params, &split(&recipe())).is_none(), "another of the same content");
        assert_eq!(Arc::strong_count(&kept), 1, "nothing here keeps it");
        drop(kept);
        keep(&answers, "other", 1);
        assert_eq!(answers.lock().len(), 1);
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
