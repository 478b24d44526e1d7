//! Whatever two users pull from whatever registries, the guest gets no byte that only denied models have, unless the
//! registry that the guest pulled from has served it.

use std::collections::BTreeSet;

use blobd_store_format::recipe::Piece;
use proptest::prelude::*;

use super::*;

/// Files of one layout, by their numbers.
fn files() -> [Vec<u8>; 4] {
    [file(0, [0; 6]), file(0, [1, 0, 1, 1, 0, 1]), file(1, [1; 6]), file(1, [2, 1, 0, 2, 1, 1])]
}

const SOURCES: usize = 2;

#[derive(Clone, Debug)]
enum Step {
    /// The owner adds a file from a registry of the owner's own.
    Add {
        file: usize,
        is_secret: bool,
    },
    /// A source publishes another model. It may be incomplete, and its server may break off in the file.
    Publish {
        source: usize,
        named: usize,
        served: usize,
        is_complete: bool,
        breaks_off: bool,
    },
    Pull {
        uid: u32,
        source: usize,
    },
    /// The guest asks what a pull would do.
    Plan {
        source: usize,
    },
    /// All models with names of one kind are removed.
    Remove {
        secret: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let (file, source) = (0..4_usize, 0..SOURCES);
    prop_oneof![
        2 => (file.clone(), any::<bool>()).prop_map(|(file, is_secret)| Step::Add { file, is_secret }),
        4 => (source.clone(), file.clone(), file, any::<bool>(), prop::bool::weighted(0.3)).prop_map(
            |(source, named, served, is_complete, breaks_off)| {
                Step::Publish { source, named, served, is_complete, breaks_off }
            },
        ),
        3 => (prop::bool::weighted(0.7), source.clone()).prop_map(|(is_guest, source)| {
            Step::Pull { uid: if is_guest { GUEST } else { OWNER }, source }
        }),
        1 => source.prop_map(|source| Step::Plan { source }),
        1 => any::<bool>().prop_map(|secret| Step::Remove { secret }),
    ]
}

/// Which bytes of each file were served as they are in the file, and how many bytes differed from it.
#[derive(Clone, Default)]
struct Served {
    right: [BTreeSet<(usize, usize)>; 4],
    bytes: usize,
}

impl Served {
    fn add(&mut self, file: usize, range: (usize, usize)) {
        self.right[file].insert(range);
    }

    fn has(&self, file: usize, range: std::ops::Range<usize>) -> bool {
        let mut end = range.start;
        // In the order of their starts.
        for (from, to) in &self.right[file] {
            if *from <= end {
                end = end.max(*to);
            }
        }
        end >= range.end
    }

    fn union(&self, other: &Self) -> Self {
        let mut all = self.clone();
        for (file, ranges) in other.right.iter().enumerate() {
            all.right[file].extend(ranges);
        }
        all.bytes += other.bytes;
        all
    }
}

/// The file that a source names and the one that it serves.
#[derive(Clone, Copy)]
struct Published {
    named: usize,
    served: usize,
    breaks_off: bool,
}

struct World {
    site: Site,
    files: [Vec<u8>; 4],
    sources: [Source; SOURCES],
    published: [Option<Published>; SOURCES],
    /// The requests that each source has had.
    seen: [usize; SOURCES],
    by_source: [Served; SOURCES],
    by_guest: Served,
    names: usize,
}

impl World {
    fn new() -> Self {
        Self {
            site: Site::new(),
            files: files(),
            sources: [(); SOURCES].map(|()| Source::start()),
            published: [None; SOURCES],
            seen: [0; SOURCES],
            by_source: Default::default(),
            by_guest: Served::default(),
            names: 0,
        }
    }

    fn do_step(&mut self, step: &Step) {
        self.names += 1;
        match *step {
            Step::Add { file, is_secret } => {
                let space = if is_secret { "secret" } else { "open" };
                self.site.add(&format!("{space}/{}", self.names), &self.files[file]);
            }
            Step::Publish { source, named, served, is_complete, breaks_off } => {
                self.note_served(source, OWNER);
                let evil = &self.sources[source];
                evil.publish(&self.files[named], &self.files[served], is_complete);
                evil.registry.clear_faults();
                if breaks_off {
                    evil.break_off_after(BREAK);
                }
                self.published[source] = Some(Published { named, served, breaks_off });
            }
            Step::Pull { uid, source } => self.pull(uid, source),
            Step::Plan { source } => self.plan(source),
            Step::Remove { secret } => self.remove(secret),
        }
    }

    /// Reads the requests of a user to a source.
    fn note_served(&mut self, source: usize, uid: u32) {
        let requests = self.sources[source].registry.requests();
        let Some(Published { named, served, breaks_off }) = self.published[source] else { return };
        let file = format!("/cdn/{}", Digest::of(&self.files[named]));
        for request in
            requests.iter().skip(self.seen[source]).filter(|request| request.path.starts_with(&file))
        {
            let size = self.files[named].len();
            let mut range = request.header("range").and_then(|range| parse(range, size)).unwrap_or(0..size);
            if breaks_off {
                let sent = if range.start < BREAK { BREAK } else { 0 };
                range.end = range.end.min(range.start + sent);
            }
            let mut ranges = equal_ranges(&self.files[named], &self.files[served], range.clone());
            let owners: &mut [&mut Served] = match uid {
                GUEST => &mut [&mut self.by_source[source], &mut self.by_guest],
                _ => &mut [&mut self.by_source[source]],
            };
            for served in owners {
                served.bytes += range.len();
                ranges.iter_mut().for_each(|range| served.add(named, *range));
            }
        }
        self.seen[source] = requests.len();
    }

    fn pull(&mut self, uid: u32, source: usize) {
        let Some(Published { named, .. }) = self.published[source] else { return };
        let (held, name) = (self.readable_blobs(), format!("pulled/{}", self.names));
        let pulled = self.site.pull(uid, &self.sources[source], &name);
        self.note_served(source, uid);
        if uid != GUEST || pulled.is_err() {
            return;
        }
        assert!(self.site.reads(GUEST, &name, &self.files[named]));
        let served = self.by_guest.union(&self.by_source[source]);
        let model = self.site.store.names().model(&name.parse().unwrap()).unwrap();
        let recipe = model.files[1].recipe.clone().unwrap();
        for (offset, piece) in recipe.pieces().with_offsets() {
            let Piece::Blob { blob, length, .. } = piece else { continue };
            let [start, end] = [offset, offset + length].map(|place| usize::try_from(place).unwrap());
            let is_allowed = held.contains(blob) || served.has(named, start..end);
            assert!(is_allowed, "bytes {start}..{end} of file {named} were given to the guest");
        }
    }

    fn plan(&mut self, source: usize) {
        if self.published[source].is_none() {
            return;
        }
        let may_reuse = !self.readable_blobs().is_empty();
        let [stored, resumed, similar] = from_store(&self.site.plan(GUEST, &self.sources[source]));
        self.note_served(source, GUEST);
        if may_reuse {
            return;
        }
        assert_eq!((stored, similar), (0, 0), "only denied models are stored");
        let served = self.by_guest.union(&self.by_source[source]);
        assert!(resumed <= served.bytes as u64, "{resumed} of {} served", served.bytes);
    }

    fn remove(&mut self, secret: bool) {
        for tag in self.site.store.names().summaries().unwrap() {
            if (tag.reference.namespace() == "secret") == secret {
                self.site.remove(&tag.reference);
            }
        }
    }

    /// The blobs of all models that the guest may open.
    fn readable_blobs(&self) -> BTreeSet<Digest> {
        let policy = self.site.policy(GUEST);
        let tags = self.site.store.names().summaries().unwrap();
        let readable = tags.iter().filter(|tag| policy.check_named(&self.site.store, &tag.reference).is_ok());
        let models = readable.map(|tag| self.site.store.names().model(&tag.reference).unwrap());
        let recipes = models.flat_map(|model| model.files).filter_map(|file| file.recipe);
        recipes.flat_map(|recipe| recipe.digests()).collect()
    }
}

/// After how many bytes of a file a server breaks off, if it does.
const BREAK: usize = 700 << 10;

/// `bytes=FIRST-LAST`.
fn parse(range: &str, size: usize) -> Option<std::ops::Range<usize>> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let end = last.parse().map_or(size, |last: usize| size.min(last + 1));
    Some(first.parse().ok()?..end)
}

/// The parts of a range in which two files are the same.
fn equal_ranges(a: &[u8], b: &[u8], range: std::ops::Range<usize>) -> Vec<(usize, usize)> {
    let (mut ranges, mut start) = (Vec::new(), range.start);
    for place in range.clone() {
        if a[place] != b[place] {
            ranges.push((start, place));
            start = place + 1;
        }
    }
    ranges.push((start, range.end));
    ranges
}

proptest! {
    // Each case moves some megabytes. `PROPTEST_CASES` tries more.
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 64, ..ProptestConfig::default() })]

    #[test]
    fn guest_gets_nothing_that_only_denied_models_have_and_no_registry_served(
        steps in prop::collection::vec(step(), 4..14),
    ) {
        let mut world = World::new();
        steps.iter().for_each(|step| world.do_step(step));
    }
}

fn cases() -> u32 {
    const DEFAULT: u32 = 12;
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(DEFAULT)
}
