//! The manual page `blobd.toml(5)`: the sections of `docs/CONFIGURATION.md`, with the table of keys.

use blobd_cli_common::local_server::ConfigurationKey;

use super::escaped;

pub(super) const NAME: &str = "blobd.toml";

const DOCUMENT: &str = include_str!("../../../../docs/CONFIGURATION.md");

/// The list of contents leads nowhere in a manual page.
const LEFT_OUT: &str = "Contents";

pub(super) fn page(keys: &[ConfigurationKey]) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let mut page = format!(
        ".TH BLOBD.TOML 5 \"\" \"blobd {version}\" blobd\n.ad l\n.nh\n\
         .SH NAME\n{} \\- the configuration file of blobd, config.toml\n",
        escaped(NAME)
    );
    let sections = DOCUMENT.split("\n## ").skip(1).filter_map(|section| section.split_once('\n'));
    for (title, body) in sections.filter(|(title, _)| *title != LEFT_OUT) {
        page.push_str(&format!(".SH {}\n", escaped(&title.to_uppercase())));
        // Blocks are separated by empty lines, which code may have too.
        for (index, part) in body.split("```").enumerate() {
            page.push_str(&if index % 2 == 0 { prose(part, keys) } else { code(part) });
        }
    }
    page.push_str(".SH SEE ALSO\n\\fBblobd\\fR(1), \\fBblobd\\-config\\-show\\fR(1)\n");
    page
}

/// Paragraphs; the table of keys is replaced by a list.
fn prose(text: &str, keys: &[ConfigurationKey]) -> String {
    let blocks =
        text.split("\n\n").map(str::trim).filter(|block| !block.is_empty() && !block.starts_with("<!--"));
    let block = |block: &str| match block.starts_with("| key |") {
        true => keys.iter().map(entry).collect(),
        false => format!(".PP\n{}\n", inline(&block.replace('\n', " "))),
    };
    blocks.map(block).collect()
}

fn entry(key: &ConfigurationKey) -> String {
    let default = inline(key.default);
    let restart = if key.needs_restart { " Needs a restart." } else { "" };
    format!(".TP\n\\fB{}\\fR\n{}. Default: {default}.{restart}\n", escaped(key.name), inline(key.meaning))
}

fn code(block: &str) -> String {
    let lines = block.lines().skip(1).map(|line| escaped(line) + "\n");
    format!(".PP\n.nf\n{}.fi\n", lines.collect::<String>())
}

/// One line of Markdown: code becomes bold, and links become their text.
fn inline(line: &str) -> String {
    let mut text = String::new();
    for (index, part) in without_targets(line).split('`').enumerate() {
        let part = escaped(part);
        text.push_str(&if index % 2 == 1 { format!("\\fB{part}\\fR") } else { part });
    }
    text
}

fn without_targets(line: &str) -> String {
    let mut parts = line.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    let text = parts.fold(first, |text, part| text + part.split_once(')').map_or("", |(_, rest)| rest));
    // Brackets of a value, such as `["*"]`, are inside of code.
    let code_or_text = text.split('`').enumerate();
    let parts = code_or_text
        .map(|(index, part)| if index % 2 == 1 { part.to_owned() } else { part.replace('[', "") });
    parts.collect::<Vec<_>>().join("`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use blobd_cli_common::local_server::LocalServer;

    #[test]
    fn page_has_every_key_with_its_default_and_the_example_line_by_line() {
        let keys = (LocalServer::default().configuration_keys)();
        let page = page(&keys);
        for key in keys {
            assert!(page.contains(&format!(".TP\n\\fB{}\\fR\n", escaped(key.name))), "{}", key.name);
        }
        assert!(page.contains("\nevict = \"pullable\"\n") && page.contains(".SH EXAMPLE\n"), "{page}");
        assert!(page.contains("Default: \\fB[\"*\"]\\fR."), "{page}");
        assert!(!page.contains(".md") && !page.contains("test: configuration"), "{page}");
        assert!(page.lines().all(|line| !line.contains("](")), "{page}");
    }

    #[test]
    fn links_become_their_text_and_code_becomes_bold() {
        assert_eq!(
            inline("the [trash](A.md#b) keeps `[\"*\"]`, see [`x-y`](#z)."),
            "the trash keeps \\fB[\"*\"]\\fR, see \\fBx\\-y\\fR\\&."
        );
    }
}
