//! Which modules use methods of which others.
//!
//! The receiver of a call is typed from what the crate declares: parameters, fields, results of functions and methods,
//! patterns, and the common methods of `Option`, `Result`, collections and iterators. What is still unknown is
//! resolved by the method's name if that has several words, a single module of the crate defines methods of that name,
//! and neither another crate of the workspace nor the standard library ([`COMMON`]) does. All other calls are counted
//! and not followed: a use may be missed, but one is hardly ever reported falsely.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::TokenStream;
use syn::parse::Parser as _;
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Block, Expr, Item, Pat, Token};

use super::names::{ModulePath, Names};
use super::source::{Module, is_test};
use super::std_types::{COMMON, argument, arguments, element, parameters_of_std, result_of, result_of_std};
use super::types::{Declarations, Function, Generics, Known, TypeId, TypeReader, substituted, unwrapped};

/// The uses of a crate's methods.
#[derive(Debug, Default)]
pub(crate) struct MethodUses {
    /// The module with the call, the module that defines the method, and the method.
    pub(crate) uses: Vec<(ModulePath, ModulePath, String)>,
    /// Calls of methods that several modules define.
    pub(crate) unresolved: usize,
}

/// Finds the uses of a crate's methods. `foreign` are the names of methods of other crates.
pub(crate) fn method_uses(root: &Module, foreign: &BTreeSet<String>) -> MethodUses {
    let declarations = Declarations::of(root);
    let names = Names { root };
    let by_name = declarations.methods_by_name();
    let crate_ = Crate { names: &names, declarations: &declarations, by_name: &by_name, foreign };
    let mut uses = MethodUses::default();
    add_module(&crate_, root, &mut Vec::new(), &mut uses);
    uses
}

struct Crate<'c> {
    names: &'c Names<'c>,
    declarations: &'c Declarations,
    by_name: &'c BTreeMap<&'c str, BTreeSet<&'c [String]>>,
    foreign: &'c BTreeSet<String>,
}

fn add_module(of: &Crate<'_>, module: &Module, path: &mut ModulePath, uses: &mut MethodUses) {
    let reader = TypeReader { names: of.names, module: path.clone() };
    let scopes = vec![BTreeMap::new()];
    let mut calls = Calls { of, reader, generics: Generics::default(), scopes, uses };
    module.items.iter().for_each(|item| calls.visit_item(item));
    for child in &module.children {
        path.push(child.name.clone());
        add_module(of, child, path, uses);
        path.pop();
    }
}

/// Visits the code of one module.
struct Calls<'c> {
    of: &'c Crate<'c>,
    reader: TypeReader<'c>,
    generics: Generics,
    /// The variables, the innermost scope last.
    scopes: Vec<BTreeMap<String, Known>>,
    uses: &'c mut MethodUses,
}

impl<'c> Calls<'c> {
    fn note(&mut self, id: &TypeId, function: &Function, name: &str) {
        let through = format!("{}::{name}", id.name);
        self.uses.uses.push((self.reader.module.clone(), function.module.clone(), through));
    }

    fn note_call(&mut self, receiver: &Known, name: &str) {
        let declarations = self.of.declarations;
        if let Some((id, method)) = declarations.method(receiver, name) {
            return self.note(id, method, name);
        }
        let is_unknown = matches!(unwrapped(receiver), Known::Unknown | Known::Parameter(_));
        let Some(modules) = self.of.by_name.get(name).filter(|_| is_unknown) else { return };
        let is_ambiguous = modules.len() > 1
            || !name.contains('_')
            || COMMON.contains(&name)
            || self.of.foreign.contains(name);
        match modules.first().filter(|_| !is_ambiguous) {
            Some(module) => {
                let used = (self.reader.module.clone(), module.to_vec(), format!("?::{name}"));
                self.uses.uses.push(used);
            }
            None => self.uses.unresolved += 1,
        }
    }

    fn in_scope(&mut self, work: impl FnOnce(&mut Self)) {
        self.scopes.push(BTreeMap::new());
        work(self);
        self.scopes.pop();
    }

    fn in_function(&mut self, signature: &syn::Signature, body: &Block) {
        let outer = self.generics.clone();
        self.generics = self.reader.generics(&signature.generics, &outer);
        self.in_scope(|calls| {
            if let Some(this) = calls.generics.this.clone() {
                calls.bind_name("self", this);
            }
            for input in &signature.inputs {
                if let syn::FnArg::Typed(typed) = input {
                    let known = calls.reader.read(&typed.ty, &calls.generics);
                    calls.bind(&typed.pat, known);
                }
            }
            calls.visit_block(body);
        });
        self.generics = outer;
    }

    fn bind_name(&mut self, name: &str, known: Known) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name.to_owned(), known);
        }
    }

    /// Gives the names in a pattern their types.
    fn bind(&mut self, pattern: &Pat, known: Known) {
        match pattern {
            Pat::Ident(name) => {
                if let Some((_, inner)) = &name.subpat {
                    self.bind(inner, known.clone());
                }
                self.bind_name(&name.ident.to_string(), known);
            }
            Pat::Type(typed) => {
                let written = self.reader.read(&typed.ty, &self.generics);
                self.bind(&typed.pat, if written == Known::Unknown { known } else { written });
            }
            Pat::Reference(inner) => self.bind(&inner.pat, known),
            Pat::Paren(inner) => self.bind(&inner.pat, known),
            Pat::Tuple(parts) => {
                let types = arguments(&known, "()");
                for (place, part) in parts.elems.iter().enumerate() {
                    self.bind(part, types.get(place).cloned().unwrap_or_default());
                }
            }
            Pat::TupleStruct(of) => {
                let types = self.parts_of(&of.path, &known);
                for (place, part) in of.elems.iter().enumerate() {
                    self.bind(part, types.get(place).cloned().unwrap_or_default());
                }
            }
            Pat::Struct(of) => {
                let id = self.type_of_path(&of.path).map_or(known, Known::Declared);
                for field in &of.fields {
                    let name = match &field.member {
                        syn::Member::Named(name) => name.to_string(),
                        syn::Member::Unnamed(place) => place.index.to_string(),
                    };
                    let known = self.of.declarations.field(&id, &name);
                    self.bind(&field.pat, known);
                }
            }
            Pat::Or(cases) => cases.cases.iter().for_each(|case| self.bind(case, known.clone())),
            Pat::Slice(parts) => parts.elems.iter().for_each(|part| self.bind(part, element(&known))),
            _ => {}
        }
    }

    /// The types in a tuple struct or variant that a pattern names.
    fn parts_of(&self, path: &syn::Path, known: &Known) -> Vec<Known> {
        let last = path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default();
        if let Some(id) = self.type_of_path(path)
            && let Some(parts) = self.of.declarations.tuple(&id, &last)
        {
            return parts.to_vec();
        }
        match (last.as_str(), unwrapped(known)) {
            ("Some" | "Ok", Known::Foreign(_, inner)) => inner.first().cloned().into_iter().collect(),
            ("Err", Known::Foreign(_, inner)) => inner.get(1).cloned().into_iter().collect(),
            (variant, Known::Declared(id)) => {
                self.of.declarations.tuple(id, variant).map(<[Known]>::to_vec).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    /// The type that a path is or begins with, such as that of a variant or a method.
    fn type_of_path(&self, path: &syn::Path) -> Option<TypeId> {
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if names.first().is_some_and(|first| first == "Self") {
            let Some(Known::Declared(id)) = self.generics.this.clone() else { return None };
            return Some(id);
        }
        let named = self.of.names.resolve(&self.reader.module, &names)?;
        let name = named.rest.first().filter(|_| self.of.names.is_type(&named))?.clone();
        Some(TypeId { module: named.module, name })
    }

    /// The function or method that a path names.
    fn function_of_path(&self, path: &syn::Path) -> Option<(Option<TypeId>, &'c Function)> {
        let of = self.of;
        let last = path.segments.last()?.ident.to_string();
        if path.segments.len() > 1
            && let Some(id) = self.type_of_path(path)
        {
            let (_, method) = of.declarations.method(&Known::Declared(id.clone()), &last)?;
            return Some((Some(id), method));
        }
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let named = self.of.names.resolve(&self.reader.module, &names)?;
        let function = named.rest.first().and_then(|name| of.declarations.function(&named.module, name))?;
        Some((None, function))
    }

    /// The type of an expression, as far as it is known.
    fn infer(&mut self, expression: &Expr) -> Known {
        match expression {
            Expr::Path(path) => match path.path.get_ident() {
                Some(name) => self.variable(&name.to_string()).unwrap_or_default(),
                None => Known::Unknown,
            },
            Expr::Field(field) => {
                let name = match &field.member {
                    syn::Member::Named(name) => name.to_string(),
                    syn::Member::Unnamed(place) => place.index.to_string(),
                };
                self.of.declarations.field(&self.infer(&field.base), &name)
            }
            Expr::MethodCall(call) => self.infer_method(call),
            Expr::Call(call) => self.infer_call(call),
            Expr::Reference(inner) => self.infer(&inner.expr),
            Expr::Paren(inner) => self.infer(&inner.expr),
            Expr::Unary(inner) => self.infer(&inner.expr),
            Expr::Try(inner) => argument(&self.infer(&inner.expr), 0),
            Expr::Await(inner) => self.infer(&inner.base),
            Expr::Index(inner) => element(&self.infer(&inner.expr)),
            Expr::Struct(of) => self.type_of_path(&of.path).map_or(Known::Unknown, Known::Declared),
            Expr::Cast(cast) => self.reader.read(&cast.ty, &self.generics),
            Expr::Tuple(parts) => {
                Known::Foreign("()".to_owned(), parts.elems.iter().map(|part| self.infer(part)).collect())
            }
            Expr::Array(parts) => Known::Foreign(
                "[]".to_owned(),
                parts.elems.first().map(|part| self.infer(part)).into_iter().collect(),
            ),
            Expr::Block(block) => self.infer_block(&block.block),
            Expr::If(of) => self.infer_block(&of.then_branch),
            Expr::Match(of) => of.arms.first().map_or(Known::Unknown, |arm| self.infer(&arm.body)),
            Expr::Closure(closure) => Known::Foreign("Fn".to_owned(), vec![self.infer_closure(closure, &[])]),
            _ => Known::Unknown,
        }
    }

    fn infer_block(&mut self, block: &Block) -> Known {
        match block.stmts.last() {
            Some(syn::Stmt::Expr(last, None)) => self.infer(last),
            _ => Known::Unknown,
        }
    }

    fn variable(&self, name: &str) -> Option<Known> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).cloned()
    }

    fn infer_call(&mut self, call: &syn::ExprCall) -> Known {
        let Expr::Path(path) = &*call.func else {
            return result_of(&self.infer(&call.func));
        };
        if let Some(name) = path.path.get_ident()
            && let Some(callable) = self.variable(&name.to_string())
        {
            return result_of(&callable);
        }
        if let Some((_, function)) = self.function_of_path(&path.path) {
            let inferred: Vec<Known> = call.args.iter().map(|argument| self.infer(argument)).collect();
            return substituted(function, &inferred);
        }
        let last = path.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default();
        let mut first = || call.args.first().map_or(Known::Unknown, |argument| self.infer(argument));
        match last.as_str() {
            "Some" | "Ok" => Known::Foreign("Option".to_owned(), vec![first()]),
            "clone" | "new" | "from" | "take" if path.path.segments.len() > 1 => match first() {
                // `Arc::clone(&x)`, `Mutex::new(x)`, `mem::take(x)`: good enough for the methods of `x`.
                Known::Unknown => Known::Unknown,
                inner => inner,
            },
            // A tuple struct.
            _ => self.type_of_path(&path.path).map_or(Known::Unknown, Known::Declared),
        }
    }

    fn infer_method(&mut self, call: &syn::ExprMethodCall) -> Known {
        let receiver = self.infer(&call.receiver);
        let name = call.method.to_string();
        if let Some((_, method)) = self.of.declarations.method(&receiver, &name) {
            let inferred: Vec<Known> = call.args.iter().map(|argument| self.infer(argument)).collect();
            return substituted(method, &inferred);
        }
        let parameters = parameters_of_std(&receiver, &name);
        let closure = call.args.iter().find_map(|argument| match argument {
            Expr::Closure(closure) => Some(self.infer_closure(closure, &parameters)),
            _ => None,
        });
        result_of_std(&receiver, &name, closure.unwrap_or_default())
    }

    /// The type of the result of a closure with these parameters.
    fn infer_closure(&mut self, closure: &syn::ExprClosure, parameters: &[Known]) -> Known {
        if let syn::ReturnType::Type(_, output) = &closure.output {
            return self.reader.read(output, &self.generics);
        }
        self.scopes.push(BTreeMap::new());
        for (place, input) in closure.inputs.iter().enumerate() {
            self.bind(input, parameters.get(place).cloned().unwrap_or_default());
        }
        let output = self.infer(&closure.body);
        self.scopes.pop();
        output
    }

    /// Gives the parameters of a closure that is passed to a method their types.
    fn visit_argument(&mut self, argument: &Expr, parameters: &[Known]) {
        let Expr::Closure(closure) = argument else { return self.visit_expr(argument) };
        self.in_scope(|calls| {
            for (place, input) in closure.inputs.iter().enumerate() {
                calls.bind(input, parameters.get(place).cloned().unwrap_or_default());
            }
            calls.visit_expr(&closure.body);
        });
    }

    fn visit_tokens(&mut self, tokens: &TokenStream) {
        let parser = Punctuated::<Expr, Token![,]>::parse_terminated;
        if let Ok(arguments) = parser.parse2(tokens.clone()) {
            arguments.iter().for_each(|argument| self.visit_expr(argument));
        }
    }
}

impl<'ast> Visit<'ast> for Calls<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        // Modules within functions are rare, and modules have their own visitor.
        if !matches!(item, Item::Mod(_)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let outer = std::mem::take(&mut self.generics);
        self.generics = self.reader.generics(&item.generics, &Generics::default());
        self.generics.this = Some(self.reader.read(&item.self_ty, &self.generics));
        visit::visit_item_impl(self, item);
        self.generics = outer;
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        let id = TypeId { module: self.reader.module.clone(), name: item.ident.to_string() };
        let outer = std::mem::replace(&mut self.generics, Generics::of_trait(id));
        visit::visit_item_trait(self, item);
        self.generics = outer;
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        if !is_test(&function.attrs) {
            self.in_function(&function.sig, &function.block);
        }
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(body) = &function.default {
            self.in_function(&function.sig, body);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.in_function(&function.sig, &function.block);
    }

    fn visit_block(&mut self, block: &'ast Block) {
        self.in_scope(|calls| visit::visit_block(calls, block));
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        visit::visit_local(self, local);
        let known = local.init.as_ref().map_or(Known::Unknown, |init| self.infer(&init.expr));
        self.bind(&local.pat, known);
    }

    fn visit_expr_let(&mut self, expression: &'ast syn::ExprLet) {
        visit::visit_expr_let(self, expression);
        let known = self.infer(&expression.expr);
        self.bind(&expression.pat, known);
    }

    fn visit_expr_if(&mut self, expression: &'ast syn::ExprIf) {
        self.in_scope(|calls| visit::visit_expr_if(calls, expression));
    }

    fn visit_expr_while(&mut self, expression: &'ast syn::ExprWhile) {
        self.in_scope(|calls| visit::visit_expr_while(calls, expression));
    }

    fn visit_expr_for_loop(&mut self, expression: &'ast syn::ExprForLoop) {
        self.visit_expr(&expression.expr);
        let known = element(&self.infer(&expression.expr));
        self.in_scope(|calls| {
            calls.bind(&expression.pat, known);
            calls.visit_block(&expression.body);
        });
    }

    fn visit_expr_match(&mut self, expression: &'ast syn::ExprMatch) {
        self.visit_expr(&expression.expr);
        let known = self.infer(&expression.expr);
        for arm in &expression.arms {
            self.in_scope(|calls| {
                calls.bind(&arm.pat, known.clone());
                calls.visit_arm(arm);
            });
        }
    }

    fn visit_expr_closure(&mut self, closure: &'ast syn::ExprClosure) {
        self.in_scope(|calls| {
            for input in &closure.inputs {
                calls.bind(input, Known::Unknown);
            }
            calls.visit_expr(&closure.body);
        });
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.visit_expr(&call.receiver);
        let (receiver, name) = (self.infer(&call.receiver), call.method.to_string());
        self.note_call(&receiver, &name);
        let declared = self.of.declarations.method(&receiver, &name).map(|(_, method)| method);
        for (place, argument) in call.args.iter().enumerate() {
            let parameters = match declared.and_then(|method| method.parameters.get(place)) {
                Some(Known::Foreign(function, types)) if function.starts_with("Fn") => types.clone(),
                Some(_) => Vec::new(),
                None => parameters_of_std(&receiver, &name),
            };
            self.visit_argument(argument, &parameters);
        }
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        self.visit_expr(&call.func);
        let function = match &*call.func {
            Expr::Path(path) => self.function_of_path(&path.path).map(|(_, function)| function),
            _ => None,
        };
        for (place, argument) in call.args.iter().enumerate() {
            let parameters = match function.and_then(|function| function.parameters.get(place)) {
                Some(Known::Foreign(function, types)) if function.starts_with("Fn") => types.clone(),
                _ => Vec::new(),
            };
            self.visit_argument(argument, &parameters);
        }
    }

    /// `Type::method`, called or passed as a value.
    fn visit_expr_path(&mut self, path: &'ast syn::ExprPath) {
        if let Some((Some(id), method)) = self.function_of_path(&path.path) {
            let name = path.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default();
            self.note(&id, method, &name);
        }
        visit::visit_expr_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_tokens(&call.tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::inline;

    /// The uses of methods from other modules.
    fn uses(text: &str) -> Vec<String> {
        let uses = method_uses(&inline(text), &BTreeSet::from(["foreign".to_owned()])).uses;
        let others = uses.into_iter().filter(|(user, used, _)| user != used);
        let mut uses: Vec<String> = others
            .map(|(user, used, what)| format!("{} -> {}: {what}", user.join("::"), used.join("::")))
            .collect();
        uses.sort();
        uses.dedup();
        uses
    }

    #[test]
    fn type_of_a_receiver_is_inferred_from_declarations() {
        let declared = "mod s { pub struct S; pub struct Other; pub fn make() -> Option<S> { None } } \
             mod x { use crate::s::{S, Other}; impl S { pub fn go(&self) {} pub fn same(self) -> Self { self } } \
             impl Other { pub fn go(&self) {} } }";
        for user in [
            "fn f(s: &crate::s::S) { s.go() }",
            "use std::sync::Arc; use crate::s::S; fn f(s: &Arc<S>) { Arc::clone(s).go() }",
            "use crate::s::S; fn f(all: Vec<S>) { all.iter().for_each(|s| s.go()) }",
            "use crate::s::S; fn f(all: Vec<S>) { for s in &all { s.go() } }",
            "use crate::s::S; fn f(s: Option<S>) { if let Some(s) = s { s.go() } }",
            "use crate::s::S; fn f(s: Result<S, ()>) { match s { Ok(s) => s.go(), Err(_) => {} } }",
            "use crate::s::make; fn f() { make().unwrap().go() }",
            "use crate::s::make; fn f() -> Option<()> { let s = make()?; Some(s.go()) }",
            "use crate::s::S; struct H { s: S } impl H { fn f(&self) { self.s.go() } }",
            "use crate::s::S; struct H(S); impl std::ops::Deref for H { type Target = S; } fn f(h: H) { h.go() }",
            "use crate::s::S; struct H { s: Mutex<S> } fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {} \
             impl H { fn f(&self) { lock(&self.s).go() } }",
            "use crate::s::S; fn f(s: S) { println!(\"{:?}\", s.go()) }",
            "use crate::s::S; fn f(all: &[S]) { all.iter().for_each(S::go) }",
        ] {
            assert_eq!(uses(&format!("{declared} mod user {{ {user} }}")), ["user -> x: S::go"], "{user}");
        }
        let chained = "use crate::s::S; fn f(s: S) { s.same().go() }";
        let found = uses(&format!("{declared} mod user {{ {chained} }}"));
        assert_eq!(found, ["user -> x: S::go", "user -> x: S::same"]);
    }

    #[test]
    fn method_of_an_unknown_receiver_is_found_by_a_unique_name() {
        let declared = "mod a { pub struct A; impl A { pub fn only_here(&self) {} pub fn in_both(&self) {} pub fn word(&self) {} \
             pub fn is_empty(&self) {} pub fn foreign(&self) {} } } mod b { pub struct B; impl B { pub fn in_both(&self) {} } }";
        let found =
            |call: &str| uses(&format!("{declared} mod user {{ fn f() {{ unknown::get().{call}() }} }}"));
        assert_eq!(found("only_here"), ["user -> a: ?::only_here"]);
        for ambiguous in ["in_both", "is_empty", "word", "foreign"] {
            assert!(found(ambiguous).is_empty(), "{ambiguous}");
        }
    }

    #[test]
    fn methods_of_known_foreign_types_and_of_unit_tests_are_left_out() {
        let declared = "mod a { pub struct A; impl A { pub fn only(&self) {} } }";
        for user in [
            "fn f(path: std::path::PathBuf) { path.only() }",
            "#[cfg(test)] fn f(a: crate::a::A) { a.only() }",
            "struct U; impl U { #[cfg(test)] fn f(a: crate::a::A) { a.only() } }",
        ] {
            assert!(uses(&format!("{declared} mod user {{ {user} }}")).is_empty(), "{user}");
        }
    }
}
