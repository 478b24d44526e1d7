//! The report of a verification.

use std::collections::BTreeSet;

use blobd_client::protocol::upkeep::CorruptBlob;

use crate::ops::survey::{Damage, Finding, Need, Survey};

/// The report is sent as one line, and clients accept lines of up to 1 MiB.
const MAX_REPORT_BYTES: usize = 900 << 10;
/// A tensor may be part of very many models, and a name has up to 500 bytes.
const MAX_MODELS: usize = 20;

/// The entry of a finding that is not repaired, with the models that need it.
pub(super) fn entry(survey: &Survey, finding: &Finding, need: Option<&Need>) -> CorruptBlob {
    let models = match &finding.damage {
        Damage::Recipe => survey.names_with(finding.digest),
        Damage::Manifest { model } => BTreeSet::from([model.as_str()]),
        _ => need.map(|need| survey.names_of(&need.files)).unwrap_or_default(),
    };
    let surplus = models.len().saturating_sub(MAX_MODELS);
    let mut models: Vec<String> = models.into_iter().take(MAX_MODELS).map(str::to_owned).collect();
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

/// Collects as many entries as fit into [`MAX_REPORT_BYTES`].
#[derive(Debug, Default)]
pub(super) struct Report {
    listed: Vec<CorruptBlob>,
    bytes: usize,
    surplus: usize,
}

impl Report {
    pub(super) fn add(&mut self, entry: CorruptBlob) {
        let length = serde_json::to_vec(&entry).map_or(0, |json| json.len() + 1);
        self.bytes = self.bytes.saturating_add(length);
        if self.bytes <= MAX_REPORT_BYTES {
            self.listed.push(entry);
        } else {
            self.surplus += 1;
        }
    }

    /// The entries; the last one says how many did not fit.
    pub(super) fn finish(mut self) -> Vec<CorruptBlob> {
        let surplus = self.surplus;
        if let Some(last) = self.listed.last_mut().filter(|_| surplus > 0) {
            last.reason.push_str(&format!("; {surplus} more are damaged: repair these, then verify again"));
        }
        self.listed
    }
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
        let reported = |count: u32| {
            let mut report = Report::default();
            (0..count).map(entry).for_each(|entry| report.add(entry));
            report.finish()
        };
        assert_eq!(reported(10).len(), 10);
        let listed = reported(10_000);
        let surplus = 10_000 - listed.len();
        assert!(listed.len() > 1000 && surplus > 1000, "{surplus}");
        assert!(listed.last().unwrap().reason.contains(&format!("{surplus} more are damaged")));
        assert!(serde_json::to_vec(&listed).unwrap().len() < 1 << 20);
    }
}
