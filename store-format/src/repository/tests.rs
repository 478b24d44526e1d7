//! Which files are chosen in invented repositories that resemble those of the big publishers.

use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;

/// The format is explained at the top of the file.
const REPOSITORIES: &str = include_str!("repositories.txt");

struct Repository {
    name: String,
    files: Vec<String>,
    /// What is requested, and what is expected.
    cases: Vec<(String, String)>,
}

fn repositories() -> Vec<Repository> {
    let mut repositories: Vec<Repository> = Vec::new();
    for line in REPOSITORIES.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix("== ") {
            repositories.push(Repository { name: name.to_owned(), files: Vec::new(), cases: Vec::new() });
            continue;
        }
        let repository = repositories.last_mut().unwrap();
        match line.strip_prefix("> ") {
            Some(case) => {
                let (wanted, expected) = case.split_once(" = ").unwrap();
                repository.cases.push((wanted.to_owned(), expected.to_owned()));
            }
            None => line.split(' ').for_each(|pattern| repository.files.extend(expanded(pattern))),
        }
    }
    repositories
}

/// The names that a pattern with `{a,b}` and `#-of-3` stands for.
fn expanded(pattern: &str) -> Vec<String> {
    if let Some((start, rest)) = pattern.split_once('{') {
        let (choices, end) = rest.split_once('}').unwrap();
        return choices.split(',').flat_map(|choice| expanded(&format!("{start}{choice}{end}"))).collect();
    }
    match pattern.split_once("#-of-") {
        None => vec![pattern.to_owned()],
        Some((start, rest)) => {
            let (count, end) = rest.split_once('.').unwrap();
            let count: usize = count.parse().unwrap();
            (1..=count).map(|number| format!("{start}{number:05}-of-{count:05}.{end}")).collect()
        }
    }
}

/// `FILE`, `FILE (3 shards)`, with `+ FILE` for each component; or the refusal.
fn chosen(files: &[String], wanted: &str) -> String {
    let listed = RepositoryFiles::new(files.iter().map(String::as_str));
    let (wanted, components) = match wanted.split_once(" --projector ") {
        Some((wanted, name)) => {
            (wanted, Components { projector: Projector::Named(name.to_owned()), ..Components::default() })
        }
        None => (wanted, Components::default()),
    };
    let choice = match wanted.split_at_checked(1).unwrap() {
        (":", "") => listed.choose(Wanted::Tag("latest"), &components),
        (":", tag) => listed.choose(Wanted::Tag(tag), &components),
        (_, path) => listed.choose(Wanted::File(path), &components),
    };
    let Choice { model, projector, draft } = match choice {
        Ok(choice) => choice,
        Err(Refusal::Ambiguous { candidates }) => return format!("several: {}", candidates.join(" ")),
        Err(Refusal::NoSuchTag { .. }) => return "no such tag".to_owned(),
        Err(Refusal::MissingShards { count, missing }) => {
            let missing: Vec<_> = missing.iter().map(|(number, _)| number.to_string()).collect();
            return format!("missing {} of {count}", missing.join(" "));
        }
        Err(refusal) => return refusal.to_string(),
    };
    let mut text = files[model[0]].clone();
    if model.len() > 1 {
        write!(text, " ({} shards)", model.len()).unwrap();
    }
    for component in [projector, draft].iter().filter(|files| !files.is_empty()) {
        write!(text, " + {}", files[component[0]]).unwrap();
    }
    text
}

#[test]
fn right_files_are_chosen_in_the_repositories_of_all_publishers() {
    let repositories = repositories();
    assert!(repositories.len() >= 60, "{}", repositories.len());
    let mut wrong = String::new();
    for Repository { name, files, cases } in &repositories {
        assert!(!files.is_empty() && !cases.is_empty(), "{name}");
        for (wanted, expected) in cases {
            let found = chosen(files, wanted);
            if found != *expected {
                writeln!(wrong, "{name} {wanted}:\n  expected {expected}\n  found    {found}").unwrap();
            }
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

/// The order of a server's list must not matter, except where the rules say "the first".
#[test]
fn order_of_the_list_does_not_change_the_choice_of_a_tag() {
    for Repository { name, files, cases } in repositories() {
        let reversed: Vec<String> = files.iter().rev().cloned().collect();
        for (wanted, _) in
            cases.iter().filter(|(wanted, expected)| wanted != ":" && !expected.starts_with("several:"))
        {
            assert_eq!(chosen(&reversed, wanted), chosen(&files, wanted), "{name} {wanted}");
        }
    }
}

#[test]
fn components_that_are_not_wanted_are_not_chosen() {
    let files = ["m-Q4_K_M.gguf", "mmproj-F16.gguf", "mtp-m-Q8_0.gguf"];
    let listed = RepositoryFiles::new(files);
    let choose = |projector, draft| {
        listed
            .choose(Wanted::Tag("latest"), &Components { projector, draft, ..Components::default() })
            .unwrap()
    };
    let all = choose(Projector::Nearest, Draft::Nearest);
    assert_eq!((all.model, all.projector, all.draft), (vec![0], vec![1], vec![2]));
    let bare = choose(Projector::None, Draft::None);
    assert_eq!((bare.model, bare.projector, bare.draft), (vec![0], vec![], vec![]));
}

#[test]
fn projector_that_is_not_there_is_refused_with_those_that_are() {
    let listed = RepositoryFiles::new(["m-Q4_K_M.gguf", "mmproj-F16.gguf"]);
    let components = Components { projector: Projector::Named("BF16".to_owned()), ..Components::default() };
    let refusal = listed.choose(Wanted::Tag("latest"), &components);
    assert_eq!(refusal, Err(Refusal::NoProjector { projectors: vec!["mmproj-F16.gguf".to_owned()] }));
}

#[test]
fn file_that_is_not_a_projector_is_refused_as_one() {
    let files = ["m-Q4_K_M.gguf", "mtp-m.gguf", "imatrix.gguf", "mmproj-m-Q4_K_M.gguf"];
    let listed = RepositoryFiles::new(files);
    let choose = |name: &str| {
        let components = Components { projector: Projector::Named(name.to_owned()), ..Components::default() };
        listed.choose(Wanted::Tag("Q4_K_M"), &components)
    };
    for name in &files[..3] {
        let projectors = vec!["mmproj-m-Q4_K_M.gguf".to_owned()];
        assert_eq!(choose(name), Err(Refusal::NoProjector { projectors }), "{name}");
    }
    assert_eq!(choose(files[3]).unwrap().projector, [3]);
    assert_eq!(choose("Q4_K_M").unwrap().projector, [3]);
}

#[test]
fn missing_shards_have_their_names() {
    let listed = RepositoryFiles::new(["a/m-00001-of-00004.gguf", "a/m-00003-of-00004.gguf"]);
    for wanted in [
        Wanted::Tag("m"),
        Wanted::File("a/m-00001-of-00004.gguf"),
        Wanted::File("a/m-00003-of-00004.gguf"),
        Wanted::File("a/m-00004-of-00004.gguf"),
    ] {
        let missing = [2, 4].map(|number| (number, format!("a/m-{number:05}-of-00004.gguf"))).to_vec();
        let refusal = listed.choose(wanted, &Components::default());
        assert_eq!(refusal, Err(Refusal::MissingShards { count: 4, missing }), "{wanted:?}");
    }
}

#[test]
fn tags_of_a_repository_are_its_quantizations_or_names() {
    let files =
        ["m-Q4_K_M.gguf", "m-UD-IQ1_S.gguf", "Q8_0/m.gguf", "other.gguf", "mmproj-F16.gguf", "imatrix.gguf"];
    assert_eq!(RepositoryFiles::new(files).tags(), ["Q4_K_M", "UD-IQ1_S", "Q8_0", "other"]);
}

proptest! {
    #[test]
    fn any_list_is_chosen_from_or_refused(
        files in prop::collection::vec("([aQ4_K/é.-]|mmproj|mtp-|-0000[12]-of-00002|-Q8_0){0,6}(\\.gguf)?", 0..8),
        tag in "[aQ4_0é-]{0,5}|Q8_0|latest",
    ) {
        let listed = RepositoryFiles::new(files.iter().map(String::as_str));
        if let Ok(choice) = listed.choose(Wanted::Tag(&tag), &Components::default()) {
            prop_assert!(!choice.model.is_empty());
            let all = || choice.model.iter().chain(&choice.projector).chain(&choice.draft);
            prop_assert!(all().all(|file| files[*file].ends_with(".gguf")));
        }
        for file in files.iter().filter(|file| file.ends_with(".gguf")) {
            if let Ok(choice) = listed.choose(Wanted::File(file), &Components::default()) {
                prop_assert!(choice.model.iter().any(|chosen| files[*chosen] == *file));
            }
        }
    }
}

#[test]
fn all_models_of_a_folder_have_tags_that_differ() {
    let paths = [
        "README.md",
        "a-Q4_K_M.gguf",
        "a-Q8_0-00001-of-00002.gguf",
        "a-Q8_0-00002-of-00002.gguf",
        "b-q4_k_m.gguf",
        "lora-adapter.gguf",
        "mmproj-F16.gguf",
        "sub/c d.gguf",
    ];
    let repository = RepositoryFiles::new(paths);
    let models = repository.all_models();
    let found: Vec<_> = models.iter().map(|model| (model.path, model.tag.as_str())).collect();
    let expected = [
        ("a-Q4_K_M.gguf", "a-Q4_K_M"),
        ("a-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("b-q4_k_m.gguf", "b-q4_k_m"),
        ("sub/c d.gguf", "c-d"),
    ];
    assert_eq!(found, expected);
    assert_eq!(repository.other_gguf_files().collect::<Vec<_>>(), ["lora-adapter.gguf"]);
}
