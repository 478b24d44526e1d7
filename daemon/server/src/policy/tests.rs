use super::*;
use crate::principal::tests::principal;
use crate::user_set::{Member, NameOrNumber};

fn user(uid: u32) -> Principal {
    principal(uid, uid, None)
}

fn users(uids: &[u32]) -> UserSet {
    let members: Vec<_> = uids.iter().map(|uid| Member::User(NameOrNumber::Number(*uid))).collect();
    UserSet::new(&members, &Names::default())
}

fn rule(action: Action) -> Rule {
    Rule {
        action,
        registries: Vec::new(),
        names: Vec::new(),
        licenses: Vec::new(),
        formats: Vec::new(),
        users: UserSet::new(&[Member::Everyone], &Names::default()),
        except: UserSet::default(),
        reason: Some("not reviewed".to_owned()),
        line: Some(7),
    }
}

fn patterns(texts: &[&str]) -> Vec<Pattern> {
    texts.iter().map(|text| Pattern::parse(text).unwrap()).collect()
}

fn hosts(texts: &[&str]) -> Vec<Pattern> {
    texts.iter().map(|text| Pattern::host(text).unwrap()).collect()
}

fn names(texts: &[&str]) -> Vec<NamePattern> {
    texts.iter().map(|text| NamePattern::parse(text).unwrap()).collect()
}

fn policy(default: Action, rules: Vec<Rule>) -> Policy {
    Policy { rules, default, file: Some("/c.toml".into()), names: Names::default() }
}

fn pulled(source: &str, others: &[&str]) -> Subject {
    let mut subject = Subject::default();
    subject.add_source(&source.parse().unwrap());
    others.iter().for_each(|name| subject.add_name(&name.parse().unwrap()));
    subject
}

fn licensed(subject: Subject, licenses: &[&str]) -> Subject {
    let are = |values: &[&str]| Known::Are(values.iter().map(|value| (*value).to_owned()).collect());
    Subject { terms: Terms { licenses: are(licenses), formats: are(&["gguf"]) }, ..subject }
}

/// The number of the rule that decides, and whether it allows; 0 for the default.
fn decided(policy: &Policy, uid: u32, subject: &Subject) -> Option<(bool, usize)> {
    match policy.decide(&user(uid), subject) {
        Decision::Allowed(rule) => Some((true, rule.map_or(0, |(number, _)| number))),
        Decision::Denied(rule) => Some((false, rule.map_or(0, |(number, _)| number))),
        Decision::Undecided => None,
    }
}

#[test]
fn first_rule_that_applies_decides_and_the_default_is_last() {
    let allow = Rule { names: names(&["acme/good"]), ..rule(Action::Allow) };
    let deny = Rule { names: names(&["acme/*"]), ..rule(Action::Deny) };
    let policy = policy(Action::Allow, vec![allow, deny]);
    assert_eq!(decided(&policy, 1, &pulled("acme/good", &[])), Some((true, 1)));
    assert_eq!(decided(&policy, 1, &pulled("acme/bad", &[])), Some((false, 2)));
    assert_eq!(decided(&policy, 1, &pulled("other/bad", &[])), Some((true, 0)));
}

#[test]
fn rule_is_only_for_its_users() {
    let deny = Rule { users: users(&[1, 2]), except: users(&[2]), ..rule(Action::Deny) };
    let policy = policy(Action::Allow, vec![deny]);
    let model = pulled("acme/x", &[]);
    assert_eq!([1, 2, 3].map(|uid| decided(&policy, uid, &model).unwrap().0), [false, true, true]);
    assert_eq!([1, 2, 3].map(|uid| policy.allows_all_to(&user(uid))), [false, true, true]);
}

#[test]
fn no_name_bypasses_a_rule() {
    let deny = Rule { names: names(&["acme/*"]), ..rule(Action::Deny) };
    let denying = policy(Action::Allow, vec![deny]);
    assert!(!decided(&denying, 1, &pulled("acme/x", &["mine"])).unwrap().0);
    assert!(!decided(&denying, 1, &pulled("other/x", &["mine", "acme/y"])).unwrap().0);
    let allow = Rule { names: names(&["acme/*"]), ..rule(Action::Allow) };
    let allowing = policy(Action::Deny, vec![allow]);
    assert!(decided(&allowing, 1, &pulled("acme/x", &["mine"])).unwrap().0);
    assert!(!decided(&allowing, 1, &pulled("other/x", &["acme/x"])).unwrap().0);
    let mut imported = Subject::default();
    imported.add_local();
    imported.add_name(&"acme/x".parse().unwrap());
    assert!(decided(&allowing, 1, &imported).unwrap().0);
    imported.add_name(&"mine".parse().unwrap());
    assert!(!decided(&allowing, 1, &imported).unwrap().0);
}

#[test]
fn registry_is_that_of_the_origin() {
    let deny = Rule { registries: hosts(&["*.example.com", "local"]), ..rule(Action::Deny) };
    let policy = policy(Action::Allow, vec![deny]);
    assert!(!decided(&policy, 1, &pulled("a.example.com:5000/acme/x", &["mine"])).unwrap().0);
    assert!(decided(&policy, 1, &pulled("acme/x", &["a.example.com:5000/acme/x"])).unwrap().0);
    let mut imported = Subject::default();
    imported.add_local();
    assert!(!decided(&policy, 1, &imported).unwrap().0);
}

#[test]
fn claimed_registry_denies_and_never_allows() {
    let mut copied = Subject::default();
    copied.add_local();
    copied.add_claim(&"hf.co/me/x".parse().unwrap());
    let on_hub = |action| Rule { registries: hosts(&["huggingface.co"]), ..rule(action) };
    assert!(!decided(&policy(Action::Allow, vec![on_hub(Action::Deny)]), 1, &copied).unwrap().0);
    assert!(!decided(&policy(Action::Deny, vec![on_hub(Action::Allow)]), 1, &copied).unwrap().0);
    let of_files = Rule { registries: hosts(&["local"]), ..rule(Action::Allow) };
    assert!(decided(&policy(Action::Deny, vec![of_files]), 1, &copied).unwrap().0);
}

/// Every spelling that `blobd pull` accepts for the same host.
#[test]
fn no_spelling_of_a_registry_bypasses_a_rule() {
    let deny = Rule { registries: hosts(&["huggingface.co", "10.0.0.7"]), ..rule(Action::Deny) };
    let policy = policy(Action::Allow, vec![deny]);
    for source in [
        "hf.co/acme/x",
        "huggingface.co:443/acme/x",
        "hf.co./acme/x",
        "https://huggingface.co:443/acme/x/resolve/main/x.gguf",
        "https://hf.co:8443/acme/x/resolve/main/x.gguf",
        "10.0.0.7/acme/x",
        "167772167/acme/x",
        "http://[::ffff:10.0.0.7]:5000/acme/x",
    ] {
        assert!(!decided(&policy, 1, &pulled(source, &[])).unwrap().0, "{source}");
    }
}

#[test]
fn license_decides_as_soon_as_it_is_known() {
    let deny = Rule { licenses: patterns(&["cc-by-nc-*", "unknown"]), ..rule(Action::Deny) };
    let by_name = Rule { names: names(&["acme/*"]), ..rule(Action::Deny) };
    let both = policy(Action::Allow, vec![deny, by_name]);
    let model = pulled("other/x", &[]);
    assert_eq!(decided(&both, 1, &model), None);
    assert_eq!(decided(&both, 1, &licensed(model.clone(), &["mit"])), Some((true, 0)));
    assert_eq!(decided(&both, 1, &licensed(model.clone(), &["mit", "CC-BY-NC-4.0"])), Some((false, 1)));
    assert_eq!(decided(&both, 1, &licensed(model.clone(), &["unknown"])), Some((false, 1)));
    // Denied whatever its license is: nothing has to be downloaded to know that.
    assert_eq!(decided(&both, 1, &pulled("acme/x", &[])), Some((false, 2)));
    let allow = Rule { licenses: patterns(&["mit", "apache-2.0"]), ..rule(Action::Allow) };
    let allowing = policy(Action::Deny, vec![allow]);
    assert_eq!(decided(&allowing, 1, &model), None);
    assert_eq!(decided(&allowing, 1, &licensed(model.clone(), &["mit", "apache-2.0"])), Some((true, 1)));
    assert_eq!(decided(&allowing, 1, &licensed(model, &["mit", "other"])), Some((false, 0)));
}

#[test]
fn all_conditions_of_a_rule_must_be_met() {
    let deny = Rule {
        registries: hosts(&["hf.co"]),
        names: names(&["acme/*"]),
        formats: patterns(&["gguf"]),
        ..rule(Action::Deny)
    };
    let policy = policy(Action::Allow, vec![deny]);
    assert_eq!(decided(&policy, 1, &pulled("hf.co/other/x", &[])), Some((true, 0)));
    assert_eq!(decided(&policy, 1, &pulled("acme/x", &[])), Some((true, 0)));
    assert_eq!(decided(&policy, 1, &pulled("hf.co/acme/x", &[])), None);
    assert_eq!(decided(&policy, 1, &licensed(pulled("hf.co/acme/x", &[]), &["mit"])), Some((false, 1)));
}

/// The error about an imported model of an unknown license.
fn refused(policy: &Policy, rule: Option<(usize, &Rule)>) -> Refusal {
    let mut subject = licensed(Subject::default(), &["unknown"]);
    subject.add_local();
    subject.add_name(&"x".parse().unwrap());
    policy.refusal(&user(70001), "model x:latest", &subject, rule)
}

#[test]
fn refusal_names_the_rule_its_reason_and_its_place() {
    let policy = policy(Action::Deny, vec![rule(Action::Deny)]);
    let refusal = refused(&policy, Some((1, &policy.rules[0])));
    let message = "model x:latest: denied to uid 70001 by rule 1 of the policy: not reviewed";
    assert_eq!(refusal.message, message);
    assert!(refusal.hint.starts_with("the rule is in /c.toml:7; "), "{}", refusal.hint);
    let refusal = refused(&policy, None);
    assert!(refusal.hint.starts_with("policy.default in /c.toml is \"deny\""), "{}", refusal.hint);
}

#[test]
fn refusal_says_what_the_conditions_found() {
    let found = |denying: Rule| {
        let policy = policy(Action::Allow, vec![denying]);
        let message = refused(&policy, Some((1, &policy.rules[0]))).message;
        message.split_once("; found: ").map(|(_, found)| found.to_owned())
    };
    let licenses = patterns(&["cc-*", "unknown"]);
    assert_eq!(found(Rule { licenses, ..rule(Action::Deny) }).as_deref(), Some("license unknown"));
    let (registries, formats) = (hosts(&["local"]), patterns(&["gguf"]));
    assert_eq!(
        found(Rule { registries, formats, ..rule(Action::Deny) }).as_deref(),
        Some("registry local, format gguf")
    );
    assert_eq!(
        found(Rule { names: names(&["x"]), ..rule(Action::Deny) }).as_deref(),
        Some("name library/x:latest")
    );
    let allowing = Rule { licenses: patterns(&["mit"]), ..rule(Action::Allow) };
    let policy = policy(Action::Deny, vec![allowing]);
    let message = refused(&policy, None).message;
    assert!(message.ends_with("which allows only what a rule allows; found: license unknown"), "{message}");
}
