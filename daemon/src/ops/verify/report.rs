//! Findings as they are told.

use std::collections::BTreeSet;

use blobd_client::protocol::upkeep::CorruptBlob;

use super::{Damage, Finding, Need, Survey};

/// The report travels as one line, of which a client takes 1 MiB.
const MAX_REPORT_BYTES: usize = 900 << 10;
/// A tensor may be part of very many models, and a name has up to 500 bytes.
const MAX_MODELS: usize = 20;

/// A finding with the models that need it, not repaired.
pub(super) fn entry(survey: &Survey, finding: &Finding, need: Option<&Need>) -> CorruptBlob {
    let models = match &finding.damage {
        Damage::Recipe => survey.models_with(finding.digest),
        Damage::Manifest { model } => BTreeSet::from([model.clone()]),
        _ => need.map(|need| need.models.clone()).unwrap_or_default(),
    };
    let surplus = models.len().saturating_sub(MAX_MODELS);
    let mut models: Vec<String> = models.into_iter().take(MAX_MODELS).collect();
    if surplus > 0 {
        models.push(format!("and {surplus} more"));
    }
    CorruptBlob {
        digest: finding.digest,
        models,
        repaired: false,
        reason: finding.reason.clone(),
        fetched_bytes: None,
    }
}

/// As many entries as fit; the last one says how many do not.
pub(super) fn limited(mut corrupt: Vec<CorruptBlob>) -> Vec<CorruptBlob> {
    let mut bytes = 0usize;
    let length = |entry: &CorruptBlob| serde_json::to_vec(entry).map_or(0, |json| json.len() + 1);
    let fitting = corrupt.iter().take_while(|entry| {
        bytes = bytes.saturating_add(length(entry));
        bytes <= MAX_REPORT_BYTES
    });
    let fitting = fitting.count();
    let surplus = corrupt.len().saturating_sub(fitting);
    corrupt.truncate(fitting);
    if let Some(last) = corrupt.last_mut().filter(|_| surplus > 0) {
        last.reason.push_str(&format!("; {surplus} more are damaged: verify again when these are mended"));
    }
    corrupt
}

#[cfg(test)]
mod tests {
    use blobd_store_format::digest::Digest;

    use super::*;

    #[test]
    fn report_that_is_too_long_says_how_much_is_left_out() {
        let entry = |index: u32| CorruptBlob {
            digest: Digest::of(&index.to_le_bytes()),
            models: vec!["m".repeat(400)],
            repaired: false,
            reason: "is missing".to_owned(),
            fetched_bytes: None,
        };
        assert_eq!(limited((0..10).map(entry).collect()).len(), 10);
        let listed = limited((0..10_000).map(entry).collect());
        let surplus = 10_000 - listed.len();
        assert!(listed.len() > 1000 && surplus > 1000, "{surplus}");
        assert!(listed.last().unwrap().reason.contains(&format!("{surplus} more are damaged")));
        assert!(serde_json::to_vec(&listed).unwrap().len() < 1 << 20);
    }
}
