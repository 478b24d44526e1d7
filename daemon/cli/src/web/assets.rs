//! The files of the page, as they are in `page/`.

/// A file of the page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asset {
    pub(super) path: &'static str,
    pub(super) media_type: &'static str,
    pub(super) content: &'static str,
}

/// All files. They contain no data of the store, so everybody may load them.
const ASSETS: [Asset; 8] = [
    Asset { path: "/", media_type: "text/html; charset=utf-8", content: include_str!("page/index.html") },
    Asset {
        path: "/style.css",
        media_type: "text/css; charset=utf-8",
        content: include_str!("page/style.css"),
    },
    script("/app.js", include_str!("page/app.js")),
    script("/connection.js", include_str!("page/connection.js")),
    script("/format.js", include_str!("page/format.js")),
    script("/tables.js", include_str!("page/tables.js")),
    script("/treemap.js", include_str!("page/treemap.js")),
    Asset { path: "/icon.svg", media_type: "image/svg+xml", content: include_str!("page/icon.svg") },
];

const fn script(path: &'static str, content: &'static str) -> Asset {
    Asset { path, media_type: "text/javascript; charset=utf-8", content }
}

pub(super) fn find(path: &str) -> Option<Asset> {
    ASSETS.into_iter().find(|asset| asset.path == path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The content security policy forbids both, and names of models are text of others.
    #[test]
    fn page_has_no_inline_code_and_sets_no_html() {
        for Asset { path, content, .. } in ASSETS {
            for forbidden in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                " style=\"",
                " onclick",
            ] {
                assert!(!content.contains(forbidden), "{path}: {forbidden}");
            }
        }
    }

    #[test]
    fn page_loads_only_its_own_files() {
        for Asset { path, content, .. } in ASSETS {
            let remote =
                content.match_indices("http").map(|(at, _)| &content[at..content.len().min(at + 40)]);
            let remote: Vec<_> =
                remote.filter(|text| text.starts_with("http:") || text.starts_with("https:")).collect();
            let is_namespace = |text: &&str| text.starts_with("http://www.w3.org/2000/svg");
            assert!(remote.iter().all(is_namespace), "{path}: {remote:?}");
        }
    }
}
