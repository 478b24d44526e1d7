//! Parses the subset of TypeScript in which docs/JSON.md describes shapes.
//!
//! ```text
//! type Name = Union
//! Union     = Part ("|" Part)*
//! Part      = Base ("&" Base)*             the keys of several objects together
//! Base      = Primary ("[]")*
//! Primary   = Name | "text" | true | false | { key?: Union, … } | Record<string, Union> | ( Union )
//! ```

use std::collections::BTreeMap;

/// A value that a run must show at least once: an optional key, an alternative, an element of an array.
pub(super) type Point = usize;

/// The type of a value.
#[derive(Clone, Debug)]
pub(super) enum Type {
    /// A type that is declared in the document, or one of its scalars.
    Named(String),
    /// This text or truth value.
    Literal(serde_json::Value),
    /// A list of values; the point is an element.
    Array(Box<Type>, Point),
    /// An object with any keys; the point is an entry.
    Record(Box<Type>, Point),
    /// An object with these keys and no others.
    Object(Vec<Member>),
    /// An object with the keys of all these objects.
    All(Vec<Type>),
    /// One of several types.
    Union(Vec<(Type, Point)>),
}

/// A key of an object.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) key: String,
    /// Whether the key may be absent: the points of an object that has it and of one that does not.
    pub(super) optional: Option<[Point; 2]>,
    pub(super) value: Type,
}

/// Declared types by name.
#[derive(Debug, Default)]
pub(super) struct Types {
    pub(super) declared: BTreeMap<String, Type>,
    /// A description of each point, for messages.
    pub(super) points: Vec<String>,
    /// The command lines that a comment above a type names, with the type's name.
    pub(super) commands: Vec<(String, String)>,
}

impl Types {
    /// Adds the declarations of one block of the document.
    pub(super) fn add(&mut self, block: &str) {
        let mut command_lines = Vec::new();
        let tokens = tokens(block);
        let mut parser = Parser { tokens: tokens.into_iter().peekable(), types: self, path: String::new() };
        while let Some(token) = parser.tokens.next() {
            match token {
                Token::Comment(text) if text.starts_with("blobd ") => command_lines.push(text),
                Token::Comment(_) => {}
                Token::Word(word) if word == "type" => {
                    let name = parser.declaration();
                    parser.types.commands.extend(command_lines.drain(..).map(|line| (line, name.clone())));
                }
                other => panic!("expected `type`, found {other:?} in\n{block}"),
            }
        }
        assert!(command_lines.is_empty(), "no type follows {command_lines:?}");
    }

    fn new_point(&mut self, what: String) -> Point {
        self.points.push(what);
        self.points.len() - 1
    }

    /// The members of an object type.
    pub(super) fn members<'t>(&'t self, object: &'t Type) -> Vec<&'t Member> {
        match object {
            Type::Object(members) => members.iter().collect(),
            Type::Named(name) => self.members(self.declared(name)),
            Type::All(parts) => parts.iter().flat_map(|part| self.members(part)).collect(),
            other => panic!("expected an object, found {other:?}"),
        }
    }

    pub(super) fn declared(&self, name: &str) -> &Type {
        self.declared.get(name).unwrap_or_else(|| panic!("type {name}: not declared in docs/JSON.md"))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Word(String),
    Text(String),
    Comment(String),
    Sign(char),
}

fn tokens(block: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut rest = block.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = if let Some(comment) = rest.strip_prefix("//") {
            let length = comment.find('\n').unwrap_or(comment.len());
            tokens.push(Token::Comment(comment[..length].trim().to_owned()));
            length + 2
        } else if let Some(text) = rest.strip_prefix('"') {
            let length = text.find('"').expect("the end of a text");
            tokens.push(Token::Text(text[..length].to_owned()));
            length + 2
        } else if first.is_alphanumeric() || first == '_' {
            let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            tokens.push(Token::Word(rest[..length].to_owned()));
            length
        } else {
            tokens.push(Token::Sign(first));
            first.len_utf8()
        };
        rest = rest[length..].trim_start();
    }
    tokens
}

struct Parser<'t> {
    tokens: std::iter::Peekable<std::vec::IntoIter<Token>>,
    types: &'t mut Types,
    /// Where in the declarations the parser is, for the names of points.
    path: String,
}

impl Parser<'_> {
    /// `Name = Union`, after the word `type`.
    fn declaration(&mut self) -> String {
        let name = self.word();
        self.expect('=');
        self.path.clone_from(&name);
        let declared = self.union();
        let before = self.types.declared.insert(name.clone(), declared);
        assert!(before.is_none(), "type {name}: declared twice");
        name
    }

    fn union(&mut self) -> Type {
        self.accept('|');
        let mut parts = vec![self.all()];
        while self.accept('|') {
            parts.push(self.all());
        }
        if parts.len() == 1 {
            return parts.remove(0);
        }
        let numbered = parts.into_iter().enumerate().map(|(index, part)| {
            let name = match &part {
                Type::Named(name) => name.clone(),
                Type::Literal(value) => value.to_string(),
                _ => format!("alternative {}", index + 1),
            };
            let point = self.types.new_point(format!("{} as {name}", self.path));
            (part, point)
        });
        Type::Union(numbered.collect())
    }

    fn all(&mut self) -> Type {
        let mut parts = vec![self.base()];
        while self.accept('&') {
            parts.push(self.base());
        }
        if parts.len() == 1 { parts.remove(0) } else { Type::All(parts) }
    }

    fn base(&mut self) -> Type {
        let mut base = self.primary();
        while self.accept('[') {
            self.expect(']');
            let point = self.types.new_point(format!("{}: an element", self.path));
            base = Type::Array(Box::new(base), point);
        }
        base
    }

    fn primary(&mut self) -> Type {
        match self.next() {
            Token::Text(text) => Type::Literal(text.into()),
            Token::Word(word) if word == "true" => Type::Literal(true.into()),
            Token::Word(word) if word == "false" => Type::Literal(false.into()),
            Token::Word(word) if word == "Record" => self.record(),
            Token::Word(word) => Type::Named(word),
            Token::Sign('{') => self.object(),
            Token::Sign('(') => {
                let inner = self.union();
                self.expect(')');
                inner
            }
            other => panic!("{}: expected a type, found {other:?}", self.path),
        }
    }

    fn record(&mut self) -> Type {
        self.expect('<');
        assert_eq!(self.word(), "string", "{}: keys are text", self.path);
        self.expect(',');
        let value = self.union();
        self.expect('>');
        let point = self.types.new_point(format!("{}: an entry", self.path));
        Type::Record(Box::new(value), point)
    }

    fn object(&mut self) -> Type {
        let outer = self.path.clone();
        let mut members = Vec::new();
        while !self.accept('}') {
            let key = self.word();
            self.path = format!("{outer}.{key}");
            let optional = self.accept('?').then(|| {
                let present = self.types.new_point(format!("{} present", self.path));
                [present, self.types.new_point(format!("{} absent", self.path))]
            });
            self.expect(':');
            let value = self.union();
            members.push(Member { key, optional, value });
            self.path.clone_from(&outer);
            if !self.accept(',') {
                self.expect('}');
                break;
            }
        }
        Type::Object(members)
    }

    /// The next token that is not a comment.
    fn next(&mut self) -> Token {
        self.skip_comments();
        self.tokens.next().unwrap_or_else(|| panic!("{}: the block ends", self.path))
    }

    /// Skips comments, but not above the next declaration: they may name its commands.
    fn skip_comments(&mut self) {
        while self.tokens.next_if(is_comment).is_some() {}
    }

    fn accept(&mut self, sign: char) -> bool {
        // A comment can only be followed by a sign of this type within an object or between alternatives.
        let mut ahead = self.tokens.clone();
        let found = ahead.find(|token| !is_comment(token)) == Some(Token::Sign(sign));
        if found {
            self.tokens = ahead;
        }
        found
    }

    fn expect(&mut self, sign: char) {
        let found = self.next();
        assert_eq!(found, Token::Sign(sign), "{}", self.path);
    }

    fn word(&mut self) -> String {
        match self.next() {
            Token::Word(word) => word,
            other => panic!("{}: expected a name, found {other:?}", self.path),
        }
    }
}

fn is_comment(token: &Token) -> bool {
    matches!(token, Token::Comment(_))
}

#[test]
fn declarations_of_the_notation_are_parsed() {
    let mut types = Types::default();
    types.add(
        "// blobd ls\n// blobd ls TEXT\ntype List = {\n  models: Model[], // one per name\n  note?: string,\n}\n\
         // shared\ntype Model = Named & { size: Bytes | null, kind: \"a\" | \"b\" }\n\
         type Named = { name: string }",
    );
    assert_eq!(types.commands, [("blobd ls".into(), "List".into()), ("blobd ls TEXT".into(), "List".into())]);
    let keys = |name: &str| -> Vec<_> {
        types.members(types.declared(name)).iter().map(|member| member.key.clone()).collect()
    };
    assert_eq!(keys("List"), ["models", "note"]);
    assert_eq!(keys("Model"), ["name", "size", "kind"]);
    assert!(types.points.contains(&"List.note absent".to_owned()), "{:?}", types.points);
    assert!(types.points.contains(&"Model.kind as \"b\"".to_owned()), "{:?}", types.points);
}
