//! Reads structs and enums that serde serialises from Rust sources.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use syn::punctuated::Punctuated;
use syn::{Attribute, Expr, ExprLit, Fields, GenericArgument, Item, Lit, Meta, PathArguments, Token, Type};

/// The types that can be serialised, by name.
#[derive(Debug, Default)]
pub(super) struct RustTypes(BTreeMap<String, Option<RustType>>);

#[derive(Clone, Debug)]
pub(super) struct RustType {
    pub(super) name: String,
    pub(super) doc: String,
    pub(super) shape: Shape,
}

#[derive(Clone, Debug)]
pub(super) enum Shape {
    Object(Vec<Field>),
    /// One of these texts, each with its documentation.
    Texts(Vec<(String, String)>),
}

#[derive(Clone, Debug)]
pub(super) struct Field {
    /// The key in JSON.
    pub(super) key: String,
    pub(super) doc: String,
    pub(super) kind: Kind,
    pub(super) presence: Presence,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Always,
    /// The key may be absent, and is never `null`.
    Optional,
    Nullable,
    /// The keys of the field's type are keys of the object.
    Flat,
    /// The same, but all of them may be absent.
    OptionalFlat,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Digest,
    Time,
    /// A whole number of this many bits.
    Unsigned(u8),
    Signed,
    Float,
    Bool,
    /// Only ever `true`.
    True,
    /// Any JSON; with the name of the alias, if there is one.
    Json(Option<String>),
    List(Box<Kind>),
    Map(Box<Kind>),
    Named(String),
}

impl RustTypes {
    /// Reads a file, or all files below a directory.
    pub(super) fn read(&mut self, path: &Path) {
        if path.is_dir() {
            let entries = fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            return entries.for_each(|entry| self.read(&entry.unwrap().path()));
        }
        let Ok(source) = fs::read_to_string(path) else { panic!("{}: cannot be read", path.display()) };
        let file = syn::parse_file(&source).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for item in file.items {
            if let Some(found) = serialised(item) {
                let name = found.name.clone();
                // A name that two modules use means neither.
                self.0.entry(name).and_modify(|first| *first = None).or_insert(Some(found));
            }
        }
    }

    pub(super) fn find(&self, name: &str) -> Option<&RustType> {
        let found = self.0.get(name)?;
        Some(found.as_ref().unwrap_or_else(|| panic!("{name}: two Rust types have this name; rename one")))
    }

    pub(super) fn get(&self, name: &str) -> &RustType {
        self.find(name).unwrap_or_else(|| panic!("{name}: no Rust type has this name and derives Serialize"))
    }

    /// The fields of an object type, without those of the flat ones.
    pub(super) fn fields(&self, name: &str) -> &[Field] {
        match &self.get(name).shape {
            Shape::Object(fields) => fields,
            Shape::Texts(_) => panic!("{name}: expected a struct, found an enum"),
        }
    }

    /// These types and all that they consist of: each after what it consists of.
    pub(super) fn closure(&self, roots: &[&str]) -> Vec<&RustType> {
        let mut ordered = Vec::new();
        roots.iter().for_each(|root| self.visit(root, &mut ordered));
        ordered
    }

    fn visit<'t>(&'t self, name: &str, ordered: &mut Vec<&'t RustType>) {
        let found = self.get(name);
        if ordered.iter().any(|before| before.name == name) {
            return;
        }
        if let Shape::Object(fields) = &found.shape {
            fields.iter().filter_map(|field| field.kind.named()).for_each(|inner| self.visit(inner, ordered));
        }
        ordered.push(found);
    }
}

impl Kind {
    /// The name of the type that it is or contains.
    pub(super) fn named(&self) -> Option<&str> {
        match self {
            Self::Named(name) => Some(name),
            Self::List(inner) | Self::Map(inner) => inner.named(),
            _ => None,
        }
    }

    fn from_type(found: &Type) -> Self {
        let path = match found {
            Type::Path(path) => &path.path,
            Type::Reference(inner) => return Self::from_type(&inner.elem),
            Type::Slice(inner) => return Self::List(Box::new(Self::from_type(&inner.elem))),
            _ => panic!("a field has a type that this test does not know"),
        };
        let last = path.segments.last().expect("a path has a name");
        let arguments: Vec<_> = match &last.arguments {
            PathArguments::AngleBracketed(list) => list.args.iter().filter_map(argument).collect(),
            _ => Vec::new(),
        };
        let inner = |index: usize| Box::new(Self::from_type(arguments[index]));
        match last.ident.to_string().as_str() {
            "Option" | "Box" => *inner(0),
            "Vec" => Self::List(inner(0)),
            "BTreeMap" | "Map" => Self::Map(inner(1)),
            "String" | "str" | "Cow" | "MediaType" | "ModelKind" | "ErrorCode" | "Content" => Self::Text,
            "Digest" => Self::Digest,
            "Time" => Self::Time,
            "u32" => Self::Unsigned(32),
            "u64" | "usize" => Self::Unsigned(64),
            "i32" => Self::Signed,
            "f64" => Self::Float,
            "bool" => Self::Bool,
            "Value" | "Json" => Self::Json(None),
            alias @ ("MetadataValue" | "SettingValue") => Self::Json(Some(alias.to_owned())),
            name => Self::Named(name.to_owned()),
        }
    }
}

fn argument(argument: &GenericArgument) -> Option<&Type> {
    match argument {
        GenericArgument::Type(inner) => Some(inner),
        _ => None,
    }
}

fn serialised(item: Item) -> Option<RustType> {
    match item {
        Item::Struct(item) if derives_serialize(&item.attrs) && item.generics.params.is_empty() => {
            let Fields::Named(fields) = &item.fields else { return None };
            let fields = fields.named.iter().filter_map(field).collect();
            Some(RustType {
                name: item.ident.to_string(),
                doc: doc(&item.attrs),
                shape: Shape::Object(fields),
            })
        }
        Item::Enum(item) if derives_serialize(&item.attrs) && item.generics.params.is_empty() => {
            if item.variants.iter().any(|variant| !matches!(variant.fields, Fields::Unit)) {
                return None;
            }
            let style = serde(&item.attrs)
                .into_iter()
                .find_map(|(key, value)| (key == "rename_all").then_some(value));
            let variants = item.variants.iter().filter_map(|variant| {
                let options = serde(&variant.attrs);
                let has = |key: &str| options.iter().any(|(option, _)| option == key);
                // What a later version may say is not sent by this one.
                if has("skip") || has("other") && variant.ident == "Unknown" {
                    return None;
                }
                let name = in_style(&variant.ident.to_string(), style.as_deref().unwrap_or_default());
                Some((name, doc(&variant.attrs)))
            });
            let shape = Shape::Texts(variants.collect());
            Some(RustType { name: item.ident.to_string(), doc: doc(&item.attrs), shape })
        }
        _ => None,
    }
}

fn field(field: &syn::Field) -> Option<Field> {
    let options = serde(&field.attrs);
    let has = |key: &str| options.iter().any(|(option, _)| option == key);
    if has("skip") {
        return None;
    }
    let renamed = options.iter().find(|(option, _)| option == "rename").map(|(_, name)| name.clone());
    let key = renamed.unwrap_or_else(|| field.ident.as_ref().expect("a named field").to_string());
    let is_option = matches!(&field.ty, Type::Path(path) if path.path.segments.last().is_some_and(|last| last.ident == "Option"));
    let presence = match (has("flatten"), has("skip_serializing_if"), is_option) {
        (true, _, true) => Presence::OptionalFlat,
        (true, ..) => Presence::Flat,
        (false, true, _) => Presence::Optional,
        (false, false, true) => Presence::Nullable,
        (false, false, false) => Presence::Always,
    };
    let kind = match Kind::from_type(&field.ty) {
        Kind::Bool if presence == Presence::Optional => Kind::True,
        kind => kind,
    };
    Some(Field { key, doc: doc(&field.attrs), kind, presence })
}

fn derives_serialize(attributes: &[Attribute]) -> bool {
    let derives = attributes.iter().filter(|attribute| attribute.path().is_ident("derive"));
    let listed = |attribute: &Attribute| {
        attribute.parse_args_with(Punctuated::<syn::Path, Token![,]>::parse_terminated)
    };
    derives.filter_map(|attribute| listed(attribute).ok()).flatten().any(|path| path.is_ident("Serialize"))
}

/// The options of serde: names, each with its value or an empty one.
fn serde(attributes: &[Attribute]) -> Vec<(String, String)> {
    let ours = attributes.iter().filter(|attribute| attribute.path().is_ident("serde"));
    let listed =
        |attribute: &Attribute| attribute.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
    let options = ours.flat_map(|attribute| listed(attribute).expect("options of serde"));
    let pair = |option: Meta| {
        let name = option.path().get_ident().map(ToString::to_string).unwrap_or_default();
        let value = match &option {
            Meta::NameValue(pair) => text(&pair.value),
            _ => None,
        };
        (name, value.unwrap_or_default())
    };
    options.map(pair).collect()
}

/// The documentation as one line, without the marks of links.
fn doc(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => text(&pair.value),
        _ => None,
    });
    let lines: Vec<_> =
        lines.map(|line| line.trim().to_owned()).take_while(|line| !line.is_empty()).collect();
    lines.join(" ").replace("[`", "`").replace("`]", "`")
}

fn text(value: &Expr) -> Option<String> {
    match value {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value()),
        _ => None,
    }
}

/// `NoSpace` → `no_space` or `nospace`
fn in_style(name: &str, style: &str) -> String {
    match style {
        "lowercase" => name.to_lowercase(),
        "snake_case" => {
            let words =
                name.chars().enumerate().map(|(index, letter)| match letter.is_uppercase() && index > 0 {
                    true => format!("_{}", letter.to_lowercase()),
                    false => letter.to_lowercase().to_string(),
                });
            words.collect()
        }
        _ => panic!("{name}: expected names in snake_case or lowercase, found {style:?}"),
    }
}
