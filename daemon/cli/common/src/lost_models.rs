//! Models that were removed, evicted or replaced, as text.

use blobd_client::protocol::naming::{Kept, LostModel, NameEffects};
use blobd_store_format::text::one_line;

use crate::output::{human_bytes, printable, terminal_width};
use crate::times::local;

const MAX_WIDTH: usize = 100;

/// The most lines of kept bytes; of more, the largest are listed.
const MAX_KEPT_LINES: usize = 8;

/// Further effects of giving a name to a model: the replaced model, evicted models, notes.
pub fn effects(effects: &NameEffects) -> String {
    let replaced: String = effects.displaced.iter().map(|model| line("replaced", model)).collect();
    let notes = effects.notes.iter().map(|note| format!("note: {}\n", printable(note)));
    replaced + &evicted(&effects.evicted) + &notes.collect::<String>()
}

/// The lines about models that were evicted.
pub fn evicted(models: &[LostModel]) -> String {
    models.iter().map(|model| line("evicted", model)).collect()
}

/// The line about a model that lost its name, and what became of its bytes.
pub fn line(verb: &str, model: &LostModel) -> String {
    format!("{}: {}\n", subject(verb, model), what_became_of(model))
}

/// The verb, and the model with its digest and size.
pub fn subject(verb: &str, model: &LostModel) -> String {
    let LostModel { name, digest, size, .. } = model;
    format!("{verb} {} {} ({})", printable(name), digest.short(), human_bytes(*size))
}

fn what_became_of(model: &LostModel) -> String {
    if let Some(until) = &model.kept_until {
        let name = printable(&model.name);
        return format!("in the trash until {}; `blobd undelete {name} --force` restores it", local(until));
    }
    let mut parts = Vec::new();
    if model.freed_bytes > 0 {
        parts.push(format!("{} freed", human_bytes(model.freed_bytes)));
    }
    if model.reclaimable_bytes > 0 {
        parts.push(format!("`blobd gc` frees {}", human_bytes(model.reclaimable_bytes)));
    }
    if model.kept_bytes() > 0 {
        let (bytes, by) = (human_bytes(model.kept_bytes()), one_line(&model.keepers(), width() / 2));
        parts.push(format!("{bytes} needed by {by}"));
    }
    if parts.is_empty() { "nothing to free".to_owned() } else { parts.join(", ") }
}

/// The lines about bytes that are not freed, the largest first, and what needs them.
pub fn kept(groups: &[Kept]) -> String {
    let mut groups: Vec<&Kept> = groups.iter().collect();
    groups.sort_by_key(|kept| std::cmp::Reverse(kept.bytes));
    let (listed, others) = groups.split_at(groups.len().min(MAX_KEPT_LINES));
    let mut text: String = listed.iter().map(|kept| kept_line(kept)).collect();
    if !others.is_empty() {
        let bytes = others.iter().map(|kept| kept.bytes).fold(0, u64::saturating_add);
        let bytes = human_bytes(bytes);
        text.push_str(&format!("kept {bytes} in {} more groups, which --json lists\n", others.len()));
    }
    text
}

fn kept_line(Kept { bytes, by }: &Kept) -> String {
    let bytes = human_bytes(*bytes);
    if by.is_empty() {
        return format!("kept {bytes} that nothing needs any more; `blobd gc` frees it\n");
    }
    let start = format!("kept {bytes} needed by ");
    let by = one_line(by, width().saturating_sub(start.chars().count()));
    format!("{start}{by}\n")
}

fn width() -> usize {
    terminal_width().min(MAX_WIDTH)
}

#[cfg(test)]
mod tests {
    use blobd_store_format::digest::Digest;

    use super::*;

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("model-{number}:latest")).collect()
    }

    fn model(freed_bytes: u64, reclaimable_bytes: u64, kept: Vec<Kept>) -> LostModel {
        let (name, digest) = ("m:latest".to_owned(), Digest::of(b"m"));
        LostModel { name, digest, size: 3 << 20, freed_bytes, reclaimable_bytes, kept, kept_until: None }
    }

    #[test]
    fn line_names_the_model_its_bytes_and_who_keeps_them() {
        let id = Digest::of(b"m").short();
        let kept = vec![Kept { bytes: 1 << 20, by: names(2) }];
        assert_eq!(
            line("evicted", &model(2 << 20, 0, kept)),
            format!(
                "evicted m:latest {id} (3.00 MiB): 2.00 MiB freed, 1.00 MiB needed by model-0:latest, \
                 model-1:latest\n"
            )
        );
        assert_eq!(
            line("replaced", &model(0, 4096, Vec::new())),
            format!("replaced m:latest {id} (3.00 MiB): `blobd gc` frees 4.00 KiB\n")
        );
        assert!(line("replaced", &model(0, 0, Vec::new())).ends_with(": nothing to free\n"));
    }

    #[test]
    fn replaced_model_that_the_trash_keeps_can_be_restored() {
        let kept_until = Some("2026-12-02T18:20:00Z".to_owned());
        let line = line("replaced", &LostModel { kept_until, ..model(0, 0, Vec::new()) });
        assert!(line.contains("(3.00 MiB): in the trash until 2026-12-0"), "{line}");
        assert!(line.ends_with("; `blobd undelete m:latest --force` restores it\n"), "{line}");
    }

    #[test]
    fn long_lists_are_cut_to_lines() {
        let text = kept(&[Kept { bytes: 1 << 20, by: names(100) }]);
        assert!(text.chars().count() <= MAX_WIDTH + 1 && text.contains(" more\n"), "{text}");
        let groups: Vec<_> = (1..30).map(|bytes| Kept { bytes, by: names(1) }).collect();
        let text = kept(&groups);
        assert!(text.starts_with("kept 29 B needed by model-0:latest\n"), "{text}");
        assert!(text.ends_with("kept 231 B in 21 more groups, which --json lists\n"), "{text}");
    }
}
