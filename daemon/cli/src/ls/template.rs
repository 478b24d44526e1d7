//! `--format TEMPLATE`: a line of text per model.

use std::str::FromStr;

use blobd_cli_common::output::{human_bytes, or_dash, printable};
use blobd_cli_common::times::relative;
use blobd_client::protocol::response::ModelSummary;
use clap::ValueEnum;

use super::Facts;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template {
    /// Empty for the table.
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Field(Field),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Field {
    Name,
    Id,
    Digest,
    Size,
    Bytes,
    OnDisk,
    Modified,
    Age,
    Used,
    Pinned,
    Origin,
    Kind,
    Architecture,
    Quantization,
    State,
}

impl FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "table" {
            return Ok(Self { parts: Vec::new() });
        }
        // Docker's spelling of fields.
        let text = text.replace("{{", "{").replace("}}", "}").replace("\\t", "\t").replace("\\n", "\n");
        let (mut parts, mut rest) = (Vec::new(), text.as_str());
        while let Some((before, after)) = rest.split_once('{') {
            let (name, after) = after.split_once('}').ok_or("a { without a }")?;
            parts.push(Part::Text(before.to_owned()));
            parts.push(Part::Field(field(name)?));
            rest = after;
        }
        parts.push(Part::Text(rest.to_owned()));
        Ok(Self { parts })
    }
}

fn field(text: &str) -> Result<Field, String> {
    let name = text.trim().trim_start_matches('.');
    <Field as ValueEnum>::from_str(name, true).map_err(|_unknown| {
        let known = Field::value_variants().iter().filter_map(Field::to_possible_value);
        let known: Vec<String> = known.map(|value| value.get_name().to_owned()).collect();
        format!("unknown field {text:?}: expected one of {}", known.join(", "))
    })
}

impl Template {
    pub(super) const fn is_table(&self) -> bool {
        self.parts.is_empty()
    }

    pub(super) fn needs_usage(&self) -> bool {
        [Field::Used, Field::OnDisk].iter().any(|field| self.parts.contains(&Part::Field(*field)))
    }

    /// Whether it shows something that only the model's header says. Usually it is recorded.
    pub(super) fn needs_header(&self, model: &ModelSummary) -> bool {
        let shows = |field| self.parts.contains(&Part::Field(field));
        shows(Field::Architecture) && model.architecture.is_none()
            || shows(Field::Quantization) && model.quantization.is_none()
            || shows(Field::Kind) && model.kind.is_none()
    }

    pub(super) fn line(&self, model: &ModelSummary, facts: &Facts) -> String {
        let part = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Field(field) => printable(&field.value(model, facts)),
        };
        self.parts.iter().map(part).chain(["\n".to_owned()]).collect()
    }
}

impl Field {
    fn value(self, model: &ModelSummary, facts: &Facts) -> String {
        match self {
            Self::Name => model.name.clone(),
            Self::Id => model.digest.short(),
            Self::Digest => model.digest.to_string(),
            Self::Size => human_bytes(model.size),
            Self::Bytes => model.size.to_string(),
            Self::OnDisk => or_dash(facts.on_disk(model)),
            Self::Modified => model.modified.clone(),
            Self::Age => relative(&model.modified),
            Self::Used => or_dash(facts.used(model)),
            Self::Pinned => model.pinned.to_string(),
            Self::Origin => or_dash(model.origin.as_deref()),
            Self::Kind => or_dash(facts.kind(model)),
            Self::Architecture => or_dash(facts.architecture(model)),
            Self::Quantization => or_dash(facts.quantization(model)),
            Self::State => or_dash(model.damage.as_ref()),
        }
    }
}

#[cfg(test)]
mod tests {
    use blobd_store_format::digest::Digest;

    use super::super::summary;
    use super::*;

    #[test]
    fn fields_are_filled_in_both_spellings() {
        let model =
            ModelSummary { size: 2048, modified: "2020-01-01T00:00:00Z".to_owned(), ..summary("a\u{1b}:b") };
        let line = |text: &str| text.parse::<Template>().unwrap().line(&model, &Facts::default());
        assert_eq!(line("{name}\\t{size} {bytes}!"), "a\u{fffd}:b\t2.00 KiB 2048!\n");
        assert_eq!(line("{{.Name}} {{ .Origin }}"), "a\u{fffd}:b -\n");
        assert_eq!(line("{id}"), format!("{}\n", Digest::of(b"").short()));
        assert!("table".parse::<Template>().unwrap().is_table());
        assert!("{nope}".parse::<Template>().unwrap_err().contains("expected one of "));
        assert!("{name".parse::<Template>().is_err());
    }
}
