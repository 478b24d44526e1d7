//! The sentence in an XML error document, and the title of a web page.

/// The elements in which object stores put the sentence, and the title of a web page, the most informative first.
const ELEMENTS: [&str; 5] = ["message", "details", "title", "h1", "code"];
/// The longest character entity that is recognised.
const MAX_ENTITY_BYTES: usize = 10;

pub(super) fn sentence(markup: &str) -> Option<String> {
    // ASCII case conversion keeps the length, so positions are valid in both texts.
    let lower = markup.to_ascii_lowercase();
    ELEMENTS.iter().find_map(|name| {
        let text = without_tags(markup.get(content_of(&lower, name)?)?);
        (!text.trim().is_empty()).then_some(text)
    })
}

/// The range of the text in the first element with this name; it extends to the end if the closing tag is missing.
fn content_of(lower: &str, name: &str) -> Option<std::ops::Range<usize>> {
    let opening = format!("<{name}");
    let mut from = 0;
    loop {
        let rest = lower.get(from..)?;
        let after = from + rest.find(&opening)? + opening.len();
        let rest = lower.get(after..)?;
        from = after;
        // `<message-id>` is another element.
        if rest.starts_with(|c: char| c == '>' || c.is_ascii_whitespace()) {
            let start = after + rest.find('>')? + 1;
            let length = lower.get(start..)?.find(&format!("</{name}"));
            return Some(start..length.map_or(lower.len(), |length| start + length));
        }
    }
}

fn without_tags(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['<', '&']) {
        let (before, found) = rest.split_at(at);
        plain.push_str(before);
        rest = if found.starts_with('<') {
            plain.push(' ');
            found.split_once('>').map_or("", |(_tag, after)| after)
        } else {
            match entity(found) {
                Some((character, after)) => {
                    plain.push(character);
                    after
                }
                None => {
                    plain.push('&');
                    found.strip_prefix('&').unwrap_or_default()
                }
            }
        };
    }
    plain + rest
}

/// Decodes the entity at the start of a text; returns its character and the text after it.
fn entity(text: &str) -> Option<(char, &str)> {
    let (name, after) = text.strip_prefix('&')?.split_once(';')?;
    if name.len() > MAX_ENTITY_BYTES {
        return None;
    }
    let number = |digits: &str, base| u32::from_str_radix(digits, base).ok().and_then(char::from_u32);
    let character = match name {
        "amp" => '&',
        "lt" => '<',
        "gt" => '>',
        "quot" => '"',
        "apos" => '\'',
        "nbsp" => ' ',
        _ => match name.strip_prefix("#x").or_else(|| name.strip_prefix("#X")) {
            Some(digits) => number(digits, 16)?,
            None => number(name.strip_prefix('#')?, 10)?,
        },
    };
    Some((character, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_of_object_stores_and_titles_of_web_pages_are_found() {
        let s3 = "<?xml version=\"1.0\"?>\n<Error><Code>AccessDenied</Code><Message>Request has expired</Message>\
            <AWSAccessKeyId>AKIA</AWSAccessKeyId><StringToSign>secret</StringToSign></Error>";
        for (markup, expected) in [
            (s3, "Request has expired"),
            ("<Error><Code>NoSuchKey</Code></Error>", "NoSuchKey"),
            ("<Error><Code>NoSuchKey</Code><Message/><Details>No object k</Details></Error>", "No object k"),
            (
                "<!DOCTYPE html><html><head><title>Attention &amp; wait</title></head><body><h1>x</h1>",
                "Attention & wait",
            ),
            ("<html><TITLE lang=en>Sign in &#8211; &#x41;&bogus;</TITLE>", "Sign in – A&bogus;"),
            ("<html><title></title><h1>Gone <b>away</b></h1>", "Gone  away "),
            ("<html><title>cut o", "cut o"),
            ("<message-id>7</message-id><message>text</message>", "text"),
        ] {
            assert_eq!(sentence(markup).as_deref(), Some(expected), "{markup}");
        }
        for markup in ["<html><body><p>long text</p>", "<", "<title", "<message", "<html><title>  </title>"] {
            assert_eq!(sentence(markup), None, "{markup}");
        }
    }
}
