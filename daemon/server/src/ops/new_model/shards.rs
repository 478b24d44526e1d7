//! Checks that the files of a sharded model are exactly its shards.
//!
//! The registry's list and the headers of the shards are both untrusted. Engines crash or compute wrong results
//! when a shard is missing or repeated.

use std::collections::BTreeSet;

use blobd_model::facts::ModelFacts;
use blobd_store_format::file_format::Shard;

use crate::ops::OpError;

/// The facts of a model from those of its files of weights, summed over shards. Refuses files that are not
/// exactly the shards of one model.
pub(super) fn joined(model: &str, files: &[ModelFacts]) -> Result<ModelFacts, OpError> {
    let mut facts = files.first().cloned().unwrap_or_default();
    let shards: Vec<(Shard, &ModelFacts)> =
        files.iter().filter_map(|file| Some((file.shard?, file))).collect();
    if let Some(what) = contradiction(&shards) {
        return Err(OpError::Shards { model: model.to_owned(), what });
    }
    if !shards.is_empty() {
        // The others have no metadata.
        let first = shards.iter().find(|(shard, _)| shard.number == Some(0));
        facts.kind = first.map_or(facts.kind, |(_, file)| file.kind);
        let sum = |count: fn(&ModelFacts) -> u64| {
            shards.iter().fold(0u64, |sum, (_, file)| sum.saturating_add(count(file)))
        };
        facts.parameters = sum(|file| file.parameters);
        facts.tensor_count = sum(|file| file.tensor_count);
    }
    Ok(facts)
}

fn contradiction(shards: &[(Shard, &ModelFacts)]) -> Option<String> {
    let (first, _) = shards.first()?;
    let (count, found) = (first.count, shards.len() as u64);
    if let Some((other, _)) = shards.iter().find(|(shard, _)| shard.count != count) {
        return Some(format!("one shard says that there are {count} shards, another says {}", other.count));
    }
    if found != count {
        return Some(missing(shards, count).unwrap_or_else(|| format!("{found} of {count} shards")));
    }
    let mut seen = BTreeSet::new();
    for (shard, _) in shards {
        match shard.number {
            Some(number) if number < count && seen.insert(number) => {}
            Some(number) if number < count => {
                return Some(format!("shard {} twice", number.saturating_add(1)));
            }
            Some(number) => return Some(format!("a shard with number {number} of {count}")),
            None => return Some("a shard without a number".to_owned()),
        }
    }
    let tensor_count = shards.iter().fold(0u64, |sum, (_, file)| sum.saturating_add(file.tensor_count));
    let wrong_total =
        shards.iter().filter_map(|(shard, _)| shard.total_tensor_count).find(|total| *total != tensor_count);
    wrong_total.map(|total| format!("{tensor_count} tensors in all shards, {total} declared"))
}

/// Which shards are missing; `None` if none is, or if the numbers of the others are not certain.
fn missing(shards: &[(Shard, &ModelFacts)], count: u64) -> Option<String> {
    /// A header may claim any number of shards.
    const MAX_NAMED: usize = 8;
    let numbers: BTreeSet<u64> = shards.iter().map(|(shard, _)| shard.number).collect::<Option<_>>()?;
    let is_certain = numbers.len() == shards.len() && numbers.iter().all(|number| *number < count);
    let missing = count.checked_sub(numbers.len() as u64).filter(|missing| is_certain && *missing > 0)?;
    let absent = (0..count).filter(|number| !numbers.contains(number)).take(MAX_NAMED);
    let named: Vec<_> = absent.map(|number| number.saturating_add(1).to_string()).collect();
    let (named, more) = (named.join(", "), missing.saturating_sub(named.len() as u64));
    Some(match (missing, more) {
        (1, _) => format!("shard {named} of {count} is missing"),
        (_, 0) => format!("shards {named} of {count} are missing"),
        _ => format!("shards {named} and {more} more of {count} are missing"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(number: u64, count: u64, total: u64) -> ModelFacts {
        let shard = Some(Shard { number: Some(number), count, total_tensor_count: Some(total) });
        ModelFacts { parameters: 10, tensor_count: 2, shard, ..ModelFacts::default() }
    }

    fn refused(files: &[ModelFacts]) -> String {
        joined("m", files).expect_err("was accepted").to_string()
    }

    #[test]
    fn facts_of_all_shards_are_summed() {
        let whole = joined("m", &[file(1, 2, 4), file(0, 2, 4)]).unwrap();
        assert_eq!((whole.parameters, whole.tensor_count), (20, 4));
        let one = ModelFacts { parameters: 7, ..ModelFacts::default() };
        assert_eq!(joined("m", &[one]).unwrap().parameters, 7);
        assert_eq!(joined("m", &[]).unwrap(), ModelFacts::default());
    }

    #[test]
    fn missing_repeated_or_contradictory_shards_are_refused() {
        assert!(refused(&[file(0, 2, 4)]).contains("shard 2 of 2 is missing"));
        assert!(refused(&[file(2, 3, 4), file(0, 3, 4)]).contains("shard 2 of 3 is missing"));
        assert!(refused(&[file(1, 4, 4)]).contains("shards 1, 3, 4 of 4 are missing"));
        let many = refused(&[file(0, u64::MAX, 4)]);
        assert!(many.contains("shards 2, 3, 4, 5, 6, 7, 8, 9 and 18446744073709551606 more of"), "{many}");
        assert!(refused(&[file(0, 1, 4), file(0, 1, 4)]).contains("2 of 1 shards"));
        assert!(refused(&[file(0, 2, 4), file(0, 2, 4)]).contains("shard 1 twice"));
        assert!(refused(&[file(0, 2, 4), file(7, 2, 4)]).contains("number 7"));
        assert!(refused(&[file(0, 2, 4), file(1, 3, 4)]).contains("another says 3"));
        assert!(refused(&[file(0, 2, 5), file(1, 2, 5)]).contains("4 tensors in all shards, 5 declared"));
    }
}
