//! Derives capabilities from prompt templates: Jinja templates in the header, and Go templates in a manifest.

/// The Jinja template of a GGUF header. It is searched as plain text, as Ollama does.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChatTemplate<'t>(pub(super) &'t str);

/// Fragments of Jinja templates that handle the result of a tool.
const TOOL_RESULTS: [&str; 9] = [
    "tool_response",
    "tool_results",
    "role'] == 'tool'",
    "role'] == \"tool\"",
    "role\"] == 'tool'",
    "role\"] == \"tool\"",
    "message.role == 'tool'",
    "message.role == \"tool\"",
    "ipython",
];

impl ChatTemplate<'_> {
    pub(super) fn capabilities(self) -> [(&'static str, bool); 3] {
        [("tools", self.uses_tools()), ("insert", false), ("thinking", self.thinks())]
    }

    /// Whether Ollama prefers this template to the manifest's: if it has more capabilities and lacks none.
    pub(super) fn is_preferred_to(self, go: &GoTemplate) -> bool {
        let count = |all: [(&str, bool); 3]| all.iter().filter(|(_, is_there)| *is_there).count();
        let (own, other) = (self.capabilities(), go.capabilities());
        if count(own) > count(other) {
            return !go.handles_tool_results() || self.handles_tool_results();
        }
        own == other && self.uses_tools() && self.handles_tool_results() && !go.handles_tool_results()
    }

    fn has(self, text: &str) -> bool {
        self.0.contains(text)
    }

    fn uses_tools(self) -> bool {
        self.has("tools") || self.has("tool_call")
    }

    /// Whether the template writes thoughts between tags, or removes those of earlier turns. Thoughts in a separate
    /// field have no tags and are not found.
    fn thinks(self) -> bool {
        let has_tags = self.has("<think>") && self.has("</think>");
        let removes = self.has("content.split('</think>')") || self.has("content.split(\"</think>\")");
        has_tags || removes && !self.has("reasoning_content") && !self.has("<SPECIAL_12>")
    }

    fn handles_tool_results(self) -> bool {
        let calls = self.has("tool_calls") || self.has("assistant_tool_call");
        self.uses_tools() && calls && TOOL_RESULTS.iter().any(|text| self.has(text))
    }
}

/// The template of a manifest, in the syntax of Go.
#[derive(Clone, Debug)]
pub(super) struct GoTemplate<'t> {
    text: &'t str,
    /// The names of fields and variables in its actions, in lower case, as Ollama compares them.
    names: Vec<String>,
}

impl<'t> GoTemplate<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Self { text, names: actions(text).flat_map(names).collect() }
    }

    pub(super) fn capabilities(&self) -> [(&'static str, bool); 3] {
        let thinks = self.uses("thinking") && self.uses("messages");
        [("tools", self.uses("tools")), ("insert", self.uses("suffix")), ("thinking", thinks)]
    }

    /// Whether it writes Harmony, the format of gpt-oss.
    pub(super) fn is_harmony(&self) -> bool {
        ["<|start|>", "<|end|>"].iter().all(|tag| self.text.contains(tag))
    }

    fn uses(&self, name: &str) -> bool {
        self.names.iter().any(|used| used == name)
    }

    fn handles_tool_results(&self) -> bool {
        let results = ["eq .Role \"tool\"", "tool_response", "TOOL_RESULTS"];
        let has_results = results.iter().any(|text| self.text.contains(text));
        self.uses("tools") && self.uses("toolcalls") && has_results
    }
}

/// The texts between `{{` and `}}`, without comments.
fn actions(template: &str) -> impl Iterator<Item = &str> {
    let after = template.split("{{").skip(1);
    let actions = after.map(|rest| rest.split_once("}}").map_or(rest, |(action, _)| action));
    actions.filter(|action| !action.trim_start_matches(['-', ' ']).starts_with("/*"))
}

/// The names after a dot or a dollar sign in an action, outside quoted texts, in lower case.
fn names(action: &str) -> impl Iterator<Item = String> {
    let outside = action.split('"').step_by(2);
    outside.flat_map(|code| {
        let parts = code.split(['.', '$']).skip(1);
        let is_letter = |c: char| c.is_alphanumeric() || c == '_';
        parts.map(move |part| part.chars().take_while(|c| is_letter(*c)).collect::<String>().to_lowercase())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_actions_only() {
        let found = |template: &str| GoTemplate::new(template).names;
        assert_eq!(found("{{ if .Tools }}.Suffix{{ end }}"), ["tools"]);
        assert_eq!(
            found("{{- range $i, $_ := .Messages }}{{ $.System }}"),
            ["i", "_", "messages", "", "system"]
        );
        assert_eq!(found("{{ printf \".Tools\" }}"), [""; 0]);
        assert_eq!(found("{{- /* .Tools */ -}}"), [""; 0]);
        assert_eq!(found("{{ .ToolCalls"), ["toolcalls"]);
        assert_eq!(found("no action"), [""; 0]);
    }

    #[test]
    fn names_are_compared_as_a_whole() {
        let caps = |template| GoTemplate::new(template).capabilities();
        assert_eq!(caps("{{ .ToolsX }}{{ .Suffixes }}").iter().filter(|(_, is)| *is).count(), 0);
        assert_eq!(caps("{{ .Thinking }}")[2], ("thinking", false), "without messages");
    }

    #[test]
    fn thoughts_are_not_tagged_if_the_template_reads_them_from_a_field() {
        let thinks = |text| ChatTemplate(text).capabilities()[2].1;
        assert!(thinks("<think>x</think>"));
        assert!(!thinks("<think>"));
        assert!(thinks("{{ content.split('</think>')[-1] }}"));
        assert!(!thinks("{{ content.split('</think>')[-1] }}{{ reasoning_content }}"));
    }

    #[test]
    fn template_of_the_header_is_preferred_if_it_can_do_more_and_loses_nothing() {
        let results = "tools tool_calls tool_response <think></think>";
        let go = |text| GoTemplate::new(text);
        assert!(ChatTemplate(results).is_preferred_to(&go("{{ .Prompt }}")));
        assert!(!ChatTemplate("tools").is_preferred_to(&go("{{ .Tools }}")));
        let with_results = "{{ .Tools }}{{ .ToolCalls }}{{ if eq .Role \"tool\" }}{{ end }}";
        assert!(!ChatTemplate("tools <think></think>").is_preferred_to(&go(with_results)));
        assert!(ChatTemplate("tools tool_calls ipython").is_preferred_to(&go("{{ .Tools }}")));
    }
}
