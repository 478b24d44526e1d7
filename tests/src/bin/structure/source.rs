//! Reads the modules of a crate and the paths that they name.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, UseTree};

/// A module with its submodules, without unit tests.
#[derive(Default)]
pub(crate) struct Module {
    /// Empty for the root.
    pub(crate) name: String,
    pub(crate) children: Vec<Module>,
    /// Names imported by `use` declarations, with their paths.
    pub(crate) imports: Vec<Import>,
    /// All paths in the source, as written.
    pub(crate) paths: Vec<Vec<String>>,
    /// Its items, without submodules.
    pub(crate) items: Vec<Item>,
}

/// A name imported by a `use` declaration.
#[derive(Debug)]
pub(crate) struct Import {
    /// None for `*`.
    pub(crate) name: Option<String>,
    pub(crate) path: Vec<String>,
}

impl Module {
    /// Reads a crate from its root file.
    pub(crate) fn read(root: &Path) -> Result<Self, Box<dyn Error>> {
        let directory = root.parent().unwrap_or(root);
        let text = fs::read_to_string(root).map_err(|error| format!("{}: {error}", root.display()))?;
        Self::parse(
            String::new(),
            &text,
            &ModuleFile { file: root.to_path_buf(), below: directory.to_path_buf() },
        )
    }

    fn parse(name: String, text: &str, place: &ModuleFile) -> Result<Self, Box<dyn Error>> {
        let file = syn::parse_file(text).map_err(|error| format!("{}: {error}", place.file.display()))?;
        Self::of_items(name, file.items, place)
    }

    fn of_items(name: String, items: Vec<Item>, place: &ModuleFile) -> Result<Self, Box<dyn Error>> {
        let mut module = Self { name, ..Self::default() };
        for item in items.into_iter().filter(|item| !is_test(attributes(item))) {
            match item {
                Item::Mod(child) => module.children.push(place.read(child)?),
                item => {
                    module.visit_item(&item);
                    module.items.push(item);
                }
            }
        }
        Ok(module)
    }

    /// Whether it declares an item of this name itself.
    pub(crate) fn declares(&self, name: &str) -> bool {
        self.items.iter().any(|item| declared(item).is_some_and(|(ident, _)| ident == name))
    }

    /// Whether it declares a struct, enum, union or trait of this name.
    pub(crate) fn declares_type(&self, name: &str) -> bool {
        self.items.iter().any(|item| declared(item).is_some_and(|(ident, is_type)| is_type && ident == name))
    }

    fn note_tree(&mut self, prefix: &[String], tree: &UseTree) {
        let with = |name: String| prefix.iter().cloned().chain([name]).collect::<Vec<_>>();
        match tree {
            UseTree::Path(path) => self.note_tree(&with(path.ident.to_string()), &path.tree),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.note_tree(prefix, tree)),
            UseTree::Glob(_) => self.note_import(None, prefix.to_vec()),
            UseTree::Name(name) if name.ident == "self" => {
                self.note_import(prefix.last().cloned(), prefix.to_vec());
            }
            UseTree::Name(name) => {
                self.note_import(Some(name.ident.to_string()), with(name.ident.to_string()));
            }
            UseTree::Rename(name) => {
                self.note_import(Some(name.rename.to_string()), with(name.ident.to_string()));
            }
        }
    }

    fn note_import(&mut self, name: Option<String>, path: Vec<String>) {
        self.paths.push(path.clone());
        self.imports.push(Import { name, path });
    }

    /// Records everything that looks like a path in the arguments of a macro.
    fn note_tokens(&mut self, tokens: TokenStream) {
        let (mut path, mut colons) = (Vec::new(), 0);
        for token in tokens {
            match token {
                TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
                TokenTree::Ident(name) if colons == 2 && !path.is_empty() => {
                    path.push(name.to_string());
                    colons = 0;
                }
                token => {
                    self.paths.push(std::mem::take(&mut path));
                    colons = 0;
                    match token {
                        TokenTree::Ident(name) => path.push(name.to_string()),
                        TokenTree::Group(group) => self.note_tokens(group.stream()),
                        _ => {}
                    }
                }
            }
        }
        self.paths.push(path);
    }
}

impl<'ast> Visit<'ast> for Module {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        if !is_test(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.note_tree(&[], &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.paths.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.note_tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }
}

/// The name that an item declares, and whether it is that of a type or trait.
fn declared(item: &Item) -> Option<(&syn::Ident, bool)> {
    match item {
        Item::Struct(item) => Some((&item.ident, true)),
        Item::Enum(item) => Some((&item.ident, true)),
        Item::Union(item) => Some((&item.ident, true)),
        Item::Trait(item) => Some((&item.ident, true)),
        Item::Type(item) => Some((&item.ident, false)),
        Item::Fn(item) => Some((&item.sig.ident, false)),
        Item::Const(item) => Some((&item.ident, false)),
        Item::Static(item) => Some((&item.ident, false)),
        _ => None,
    }
}

/// The attributes of the items that may be for tests only.
fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Const(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        _ => &[],
    }
}

/// Whether something is compiled for unit tests only.
pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|argument| argument.is_ident("test"))
    })
}

/// The file of a module, and the directory of its submodules' files.
struct ModuleFile {
    file: PathBuf,
    below: PathBuf,
}

impl ModuleFile {
    /// Reads a submodule, from its own file unless it is inline.
    fn read(&self, module: ItemMod) -> Result<Module, Box<dyn Error>> {
        let name = module.ident.to_string();
        let below = self.below.join(&name);
        if let Some((_, items)) = module.content {
            return Module::of_items(name, items, &Self { file: self.file.clone(), below });
        }
        let files = [self.below.join(format!("{name}.rs")), below.join("mod.rs")];
        let Some(file) = files.into_iter().find(|file| file.is_file()) else {
            return Err(format!("{}: module {name} has no file", self.file.display()).into());
        };
        let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        Module::parse(name, &text, &Self { file, below })
    }
}

#[cfg(test)]
pub(crate) fn inline(text: &str) -> Module {
    let place = ModuleFile { file: PathBuf::from("test"), below: PathBuf::new() };
    Module::parse(String::new(), text, &place).unwrap()
}
