//! What a crate declares: its types with their fields and methods, and its functions.

use std::collections::{BTreeMap, BTreeSet};

use syn::{FnArg, GenericArgument, GenericParam, Item, PathArguments, ReturnType, Type, TypeParamBound};

use super::names::{ModulePath, Names};
use super::source::{Module, is_test};

/// A type as far as it is known without a type checker. References and lifetimes are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Known {
    /// A type or trait of the crate.
    Declared(TypeId),
    /// A type of another crate by its name, with its arguments. Functions have their parameters and their result,
    /// iterators are `Iterator`, tuples and slices have names in parentheses.
    Foreign(String, Vec<Self>),
    /// A type parameter.
    Parameter(String),
    #[default]
    Unknown,
}

/// A type or trait: the module that declares it, and its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TypeId {
    pub(crate) module: ModulePath,
    pub(crate) name: String,
}

/// A function or method.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    /// The module that defines it.
    pub(crate) module: ModulePath,
    /// The types of its parameters without `self`.
    pub(crate) parameters: Vec<Known>,
    pub(crate) output: Known,
}

/// All declarations of a crate.
#[derive(Debug, Default)]
pub(crate) struct Declarations {
    fields: BTreeMap<(TypeId, String), Known>,
    /// The fields of tuple structs and of variants, by the name of the struct or variant.
    tuples: BTreeMap<(TypeId, String), Vec<Known>>,
    methods: BTreeMap<(TypeId, String), Function>,
    /// Methods of traits that types implement; those of the types themselves come first.
    implemented: BTreeMap<(TypeId, String), Function>,
    functions: BTreeMap<(ModulePath, String), Function>,
    derefs: BTreeMap<TypeId, Known>,
}

/// What a name in a type may mean besides a path: `Self`, and type parameters with the traits that bound them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Generics {
    pub(crate) this: Option<Known>,
    bounds: BTreeMap<String, Known>,
}

impl Generics {
    pub(crate) fn of_trait(id: TypeId) -> Self {
        Self { this: Some(Known::Declared(id)), bounds: BTreeMap::new() }
    }
}

/// Types that are used like the type that they contain.
const WRAPPERS: [&str; 10] = [
    "Arc",
    "Rc",
    "Box",
    "Cow",
    "MutexGuard",
    "RwLockReadGuard",
    "RwLockWriteGuard",
    "Ref",
    "RefMut",
    "LazyLock",
];

impl Declarations {
    pub(crate) fn of(root: &Module) -> Self {
        let mut declarations = Self::default();
        declarations.add_module(&Names { root }, root, &mut Vec::new());
        declarations
    }

    fn add_module(&mut self, names: &Names<'_>, module: &Module, path: &mut ModulePath) {
        let reader = TypeReader { names, module: path.clone() };
        module.items.iter().for_each(|item| self.add_item(&reader, item));
        for child in &module.children {
            path.push(child.name.clone());
            self.add_module(names, child, path);
            path.pop();
        }
    }

    fn add_item(&mut self, reader: &TypeReader<'_>, item: &Item) {
        let id = |name: &syn::Ident| TypeId { module: reader.module.clone(), name: name.to_string() };
        match item {
            Item::Struct(item) => {
                let generics = reader.generics(&item.generics, &Generics::default());
                self.add_fields(reader, &generics, &id(&item.ident), &item.ident, &item.fields);
            }
            Item::Enum(item) => {
                let generics = reader.generics(&item.generics, &Generics::default());
                for variant in &item.variants {
                    self.add_fields(reader, &generics, &id(&item.ident), &variant.ident, &variant.fields);
                }
            }
            Item::Trait(item) => {
                let this = Generics::of_trait(id(&item.ident));
                for function in &item.items {
                    if let syn::TraitItem::Fn(function) = function {
                        self.add_method(reader, &this, &id(&item.ident), &function.sig);
                    }
                }
            }
            Item::Impl(item) => self.add_impl(reader, item),
            Item::Fn(item) => {
                let function = reader.function(&item.sig, &Generics::default());
                self.functions.insert((reader.module.clone(), item.sig.ident.to_string()), function);
            }
            _ => {}
        }
    }

    fn add_fields(
        &mut self,
        reader: &TypeReader<'_>,
        generics: &Generics,
        id: &TypeId,
        part: &syn::Ident,
        fields: &syn::Fields,
    ) {
        for field in fields {
            let known = reader.read(&field.ty, generics);
            match &field.ident {
                Some(name) => drop(self.fields.insert((id.clone(), name.to_string()), known)),
                None => self.tuples.entry((id.clone(), part.to_string())).or_default().push(known),
            }
        }
    }

    fn add_impl(&mut self, reader: &TypeReader<'_>, item: &syn::ItemImpl) {
        let generics = reader.generics(&item.generics, &Generics::default());
        let Known::Declared(id) = reader.read(&item.self_ty, &generics) else { return };
        let generics = Generics { this: Some(Known::Declared(id.clone())), ..generics };
        for inner in &item.items {
            match inner {
                syn::ImplItem::Fn(function) if is_test(&function.attrs) => {}
                syn::ImplItem::Fn(function) => {
                    let methods =
                        if item.trait_.is_some() { &mut self.implemented } else { &mut self.methods };
                    let method = reader.function(&function.sig, &generics);
                    methods.insert((id.clone(), function.sig.ident.to_string()), method);
                }
                syn::ImplItem::Type(associated) if associated.ident == "Target" => {
                    self.derefs.insert(id.clone(), reader.read(&associated.ty, &generics));
                }
                _ => {}
            }
        }
    }

    fn add_method(&mut self, reader: &TypeReader<'_>, generics: &Generics, id: &TypeId, of: &syn::Signature) {
        self.methods.insert((id.clone(), of.ident.to_string()), reader.function(of, generics));
    }

    /// The names of all methods of the crate's types, with the modules that define them.
    pub(crate) fn methods_by_name(&self) -> BTreeMap<&str, BTreeSet<&[String]>> {
        let mut by_name: BTreeMap<&str, BTreeSet<&[String]>> = BTreeMap::new();
        for ((_, name), method) in self.methods.iter().chain(&self.implemented) {
            by_name.entry(name).or_default().insert(&method.module);
        }
        by_name
    }

    /// The method of a type, or of what it dereferences to.
    pub(crate) fn method(&self, of: &Known, name: &str) -> Option<(&TypeId, &Function)> {
        self.types_of(of).into_iter().find_map(|id| {
            let key = (id.clone(), name.to_owned());
            let found = self.methods.get_key_value(&key).or_else(|| self.implemented.get_key_value(&key));
            found.map(|((id, _), method)| (id, method))
        })
    }

    pub(crate) fn field(&self, of: &Known, name: &str) -> Known {
        if let Known::Foreign(tuple, parts) = unwrapped(of)
            && tuple == "()"
        {
            return name.parse().ok().and_then(|place: usize| parts.get(place).cloned()).unwrap_or_default();
        }
        let position: Option<usize> = name.parse().ok();
        let found = self.types_of(of).into_iter().find_map(|id| match position {
            Some(place) => self.tuples.get(&(id.clone(), id.name.clone()))?.get(place),
            None => self.fields.get(&(id.clone(), name.to_owned())),
        });
        found.cloned().unwrap_or_default()
    }

    /// The fields of a tuple struct or of a variant.
    pub(crate) fn tuple(&self, id: &TypeId, part: &str) -> Option<&[Known]> {
        self.tuples.get(&(id.clone(), part.to_owned())).map(Vec::as_slice)
    }

    pub(crate) fn function(&self, module: &[String], name: &str) -> Option<&Function> {
        self.functions.get(&(module.to_vec(), name.to_owned()))
    }

    /// The type itself without wrappers, and what it dereferences to.
    fn types_of(&self, of: &Known) -> Vec<TypeId> {
        let mut types: Vec<TypeId> = Vec::new();
        let mut next = unwrapped(of).clone();
        while let Known::Declared(id) = next
            && !types.contains(&id)
        {
            next = self.derefs.get(&id).map(|target| unwrapped(target).clone()).unwrap_or_default();
            types.push(id);
        }
        types
    }
}

/// Without the wrappers around it.
pub(crate) fn unwrapped(of: &Known) -> &Known {
    match of {
        Known::Foreign(name, inner) if WRAPPERS.contains(&name.as_str()) => {
            inner.first().map_or(of, unwrapped)
        }
        _ => of,
    }
}

/// Reads types as they are written in one module.
pub(crate) struct TypeReader<'n> {
    pub(crate) names: &'n Names<'n>,
    pub(crate) module: ModulePath,
}

impl TypeReader<'_> {
    pub(crate) fn generics(&self, generics: &syn::Generics, outer: &Generics) -> Generics {
        let mut all = outer.clone();
        for parameter in &generics.params {
            if let GenericParam::Type(parameter) = parameter {
                let bound = self.bounds(parameter.bounds.iter(), outer);
                let known = match bound {
                    Known::Unknown => Known::Parameter(parameter.ident.to_string()),
                    bound => bound,
                };
                all.bounds.insert(parameter.ident.to_string(), known);
            }
        }
        all
    }

    fn function(&self, signature: &syn::Signature, outer: &Generics) -> Function {
        let generics = self.generics(&signature.generics, outer);
        let typed = signature.inputs.iter().filter_map(|input| match input {
            FnArg::Typed(typed) => Some(self.read(&typed.ty, &generics)),
            FnArg::Receiver(_) => None,
        });
        Function {
            module: self.module.clone(),
            parameters: typed.collect(),
            output: self.output(&signature.output, &generics),
        }
    }

    fn output(&self, output: &ReturnType, generics: &Generics) -> Known {
        match output {
            ReturnType::Type(_, output) => self.read(output, generics),
            ReturnType::Default => Known::Foreign("()".to_owned(), Vec::new()),
        }
    }

    pub(crate) fn read(&self, written: &Type, generics: &Generics) -> Known {
        match written {
            Type::Reference(inner) => self.read(&inner.elem, generics),
            Type::Paren(inner) => self.read(&inner.elem, generics),
            Type::Group(inner) => self.read(&inner.elem, generics),
            Type::Slice(inner) => Known::Foreign("[]".to_owned(), vec![self.read(&inner.elem, generics)]),
            Type::Array(inner) => Known::Foreign("[]".to_owned(), vec![self.read(&inner.elem, generics)]),
            Type::Tuple(tuple) => Known::Foreign(
                "()".to_owned(),
                tuple.elems.iter().map(|part| self.read(part, generics)).collect(),
            ),
            Type::ImplTrait(of) => self.bounds(of.bounds.iter(), generics),
            Type::TraitObject(of) => self.bounds(of.bounds.iter(), generics),
            Type::Path(path) => self.path(&path.path, generics),
            _ => Known::Unknown,
        }
    }

    fn bounds<'b>(&self, bounds: impl Iterator<Item = &'b TypeParamBound>, generics: &Generics) -> Known {
        let traits = bounds.filter_map(|bound| match bound {
            TypeParamBound::Trait(bound) => Some(self.path(&bound.path, generics)),
            _ => None,
        });
        traits.into_iter().find(|known| *known != Known::Unknown).unwrap_or_default()
    }

    fn path(&self, path: &syn::Path, generics: &Generics) -> Known {
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let Some(last) = path.segments.last() else { return Known::Unknown };
        if let [only] = names.as_slice() {
            if only == "Self" {
                return generics.this.clone().unwrap_or_default();
            }
            if let Some(bound) = generics.bounds.get(only) {
                return bound.clone();
            }
        }
        match self.names.resolve(&self.module, &names) {
            Some(named) if named.rest.len() == 1 && self.names.is_type(&named) => {
                Known::Declared(TypeId { module: named.module, name: named.rest.concat() })
            }
            _ => self.foreign(last, generics),
        }
    }

    fn foreign(&self, last: &syn::PathSegment, generics: &Generics) -> Known {
        let name = last.ident.to_string();
        match &last.arguments {
            PathArguments::None => Known::Foreign(name, Vec::new()),
            PathArguments::Parenthesized(function) => {
                let inputs = function.inputs.iter().map(|input| self.read(&input.ty, generics));
                let output = self.output(&function.output, generics);
                Known::Foreign("Fn".to_owned(), inputs.chain([output]).collect())
            }
            PathArguments::AngleBracketed(arguments) => {
                let types = arguments.args.iter().filter_map(|argument| match argument {
                    GenericArgument::Type(argument) => Some(self.read(argument, generics)),
                    GenericArgument::AssocType(item) => Some(self.read(&item.ty, generics)),
                    _ => None,
                });
                Known::Foreign(name, types.collect())
            }
        }
    }
}

/// The output of a function, with its type parameters replaced by what the arguments have in their place.
pub(crate) fn substituted(function: &Function, arguments: &[Known]) -> Known {
    let mut types = BTreeMap::new();
    for (parameter, argument) in function.parameters.iter().zip(arguments) {
        unify(parameter, argument, &mut types);
    }
    substitute(&function.output, &types)
}

fn unify(parameter: &Known, argument: &Known, types: &mut BTreeMap<String, Known>) {
    match (parameter, argument) {
        (Known::Parameter(name), argument) => drop(types.insert(name.clone(), argument.clone())),
        // Of a function only the result counts: the argument is a closure.
        (Known::Foreign(name, of), Known::Foreign(_, found)) if name.starts_with("Fn") => {
            of.last().zip(found.last()).into_iter().for_each(|(of, found)| unify(of, found, types));
        }
        (Known::Foreign(_, of), Known::Foreign(_, found)) => {
            of.iter().zip(found).for_each(|(of, found)| unify(of, found, types));
        }
        _ => {}
    }
}

fn substitute(known: &Known, types: &BTreeMap<String, Known>) -> Known {
    match known {
        Known::Parameter(name) => types.get(name).cloned().unwrap_or_default(),
        Known::Foreign(name, inner) => {
            Known::Foreign(name.clone(), inner.iter().map(|inner| substitute(inner, types)).collect())
        }
        known => known.clone(),
    }
}
