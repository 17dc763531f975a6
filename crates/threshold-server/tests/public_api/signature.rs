//! Writes signatures on one line, as they are declared, and collects the crates whose types they name.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::Value;

use crate::rustdoc::{Docs, list, variant};

/// Writes the signatures of one crate.
pub(crate) struct Signatures<'a> {
    docs: &'a Docs,
    /// The crates of all types and traits that were named since this was taken last.
    named: RefCell<BTreeSet<String>>,
}

impl<'a> Signatures<'a> {
    pub(crate) fn new(docs: &'a Docs) -> Self {
        Self { docs, named: RefCell::default() }
    }

    /// Takes the crates that were named.
    pub(crate) fn named(&self) -> BTreeSet<String> {
        self.named.take()
    }

    /// `const fn name<T: Bound>(&self, cost: u64) -> T where …`.
    pub(crate) fn function(&self, name: &str, function: &Value) -> String {
        let header = &function["header"];
        let mut text = String::new();
        for (flag, word) in [("is_const", "const "), ("is_async", "async "), ("is_unsafe", "unsafe ")] {
            if header[flag] == true {
                text.push_str(word);
            }
        }
        let generics = &function["generics"];
        let inputs = list(&function["sig"]["inputs"]).map(|input| self.input(&input[0], &input[1]));
        text + "fn "
            + name
            + &self.params(generics)
            + &format!("({})", join(inputs))
            + &self.output(&function["sig"]["output"])
            + &self.wheres(generics)
    }

    /// `self` in its short forms, or `name: Type`.
    fn input(&self, name: &Value, typed: &Value) -> String {
        let name = name.as_str().unwrap_or("_");
        if name != "self" {
            return format!("{name}: {}", self.typed(typed));
        }
        let text = self.typed(typed);
        match text.as_str() {
            "Self" => "self".to_owned(),
            "&mut Self" => "&mut self".to_owned(),
            borrowed => match borrowed.strip_prefix('&').and_then(|rest| rest.strip_suffix("Self")) {
                Some(lifetime) => format!("&{lifetime}self"),
                None => format!("self: {text}"),
            },
        }
    }

    pub(crate) fn output(&self, output: &Value) -> String {
        if output.is_null() { String::new() } else { format!(" -> {}", self.typed(output)) }
    }

    /// `<'a, T: Bound>`, without the parameters that `impl Trait` stands for.
    pub(crate) fn params(&self, generics: &Value) -> String {
        let params = list(&generics["params"]).filter_map(|param| {
            let name = param["name"].as_str()?;
            match variant(&param["kind"]) {
                ("type", kind) if kind["is_synthetic"] == true => None,
                ("type", kind) => {
                    let default = Some(&kind["default"]).filter(|default| !default.is_null());
                    let default = default.map(|default| format!(" = {}", self.typed(default))).unwrap_or_default();
                    Some(format!("{name}{}{default}", self.colon(&kind["bounds"])))
                }
                ("const", kind) => Some(format!("const {name}: {}", self.typed(&kind["type"]))),
                _ => Some(name.to_owned()),
            }
        });
        let params = join(params.filter(|param| param != "'_" && !param.starts_with("'life")));
        if params.is_empty() { params } else { format!("<{params}>") }
    }

    /// ` where T: Bound`.
    pub(crate) fn wheres(&self, generics: &Value) -> String {
        let predicates = list(&generics["where_predicates"]).map(|predicate| match variant(predicate) {
            ("bound_predicate", held) => format!("{}{}", self.typed(&held["type"]), self.colon(&held["bounds"])),
            ("lifetime_predicate", held) => {
                format!(
                    "{}: {}",
                    text(&held["lifetime"]),
                    list(&held["outlives"]).map(text).collect::<Vec<_>>().join(" + ")
                )
            }
            (_, held) => format!("{} == {}", self.typed(&held["lhs"]), self.term(&held["rhs"])),
        });
        let predicates = join(predicates);
        if predicates.is_empty() { predicates } else { format!(" where {predicates}") }
    }

    /// `: Bound + Bound`.
    pub(crate) fn colon(&self, bounds: &Value) -> String {
        let bounds = self.bounds(bounds);
        if bounds.is_empty() { bounds } else { format!(": {bounds}") }
    }

    fn bounds(&self, bounds: &Value) -> String {
        let bounds = list(bounds).map(|bound| match variant(bound) {
            ("trait_bound", held) => {
                let maybe = if held["modifier"] == "maybe" { "?" } else { "" };
                format!("{maybe}{}{}", self.higher_ranked(&held["generic_params"]), self.path(&held["trait"]))
            }
            ("outlives", lifetime) => text(lifetime).to_owned(),
            _ => "use<…>".to_owned(),
        });
        bounds.collect::<Vec<_>>().join(" + ")
    }

    /// `for<'a> `.
    fn higher_ranked(&self, params: &Value) -> String {
        let names = join(list(params).map(|param| text(&param["name"]).to_owned()));
        if names.is_empty() { names } else { format!("for<{names}> ") }
    }

    pub(crate) fn typed(&self, typed: &Value) -> String {
        let (kind, held) = variant(typed);
        match kind {
            "resolved_path" => self.path(held),
            "generic" | "primitive" => match text(held) {
                "never" => "!".to_owned(),
                "unit" => "()".to_owned(),
                name => name.to_owned(),
            },
            "borrowed_ref" => {
                let lifetime = held["lifetime"].as_str().map(|name| format!("{name} ")).unwrap_or_default();
                let lifetime = if lifetime == "'_ " { String::new() } else { lifetime };
                let mutable = if held["is_mutable"] == true { "mut " } else { "" };
                format!("&{lifetime}{mutable}{}", self.referent(&held["type"]))
            }
            "tuple" => format!("({})", join(list(held).map(|part| self.typed(part)))),
            "slice" => format!("[{}]", self.typed(held)),
            "array" => format!("[{}; {}]", self.typed(&held["type"]), text(&held["len"])),
            "impl_trait" => format!("impl {}", self.bounds(held)),
            "dyn_trait" => self.dynamic(held),
            "function_pointer" => {
                let inputs = list(&held["sig"]["inputs"]).map(|input| self.typed(&input[1]));
                format!(
                    "{}fn({}){}",
                    self.higher_ranked(&held["generic_params"]),
                    join(inputs),
                    self.output(&held["sig"]["output"])
                )
            }
            "qualified_path" => self.associated(held),
            "infer" => "_".to_owned(),
            other => panic!("signatures with a {other} are not written yet: add it to tests/public_api/signature.rs"),
        }
    }

    /// What a reference leads to: several bounds behind `&` need brackets.
    fn referent(&self, typed: &Value) -> String {
        let text = self.typed(typed);
        let several = matches!(variant(typed).0, "dyn_trait" | "impl_trait") && text.contains(" + ");
        if several { format!("({text})") } else { text }
    }

    fn dynamic(&self, held: &Value) -> String {
        let mut parts: Vec<String> = list(&held["traits"])
            .map(|each| format!("{}{}", self.higher_ranked(&each["generic_params"]), self.path(&each["trait"])))
            .collect();
        parts.extend(held["lifetime"].as_str().map(str::to_owned));
        format!("dyn {}", parts.join(" + "))
    }

    /// `T::Item`, or `<T as Trait>::Item` where the trait is not plain.
    fn associated(&self, held: &Value) -> String {
        let (owner, name) = (self.typed(&held["self_type"]), text(&held["name"]));
        if !held["trait"].is_null() {
            // Named for the list of crates; `T::Item` is as clear to a reader.
            let _ = self.path(&held["trait"]);
        }
        format!("{owner}::{name}{}", self.args(&held["args"]))
    }

    /// The last part of a path, with its arguments: `HeaderMap`, `Option<&str>`.
    pub(crate) fn path(&self, path: &Value) -> String {
        if let Some(origin) = self.docs.origin(&path["id"]) {
            self.named.borrow_mut().insert(origin.krate.to_owned());
        }
        let name = text(&path["path"]);
        let name = name.rsplit("::").next().unwrap_or(name);
        format!("{name}{}", self.args(&path["args"]))
    }

    fn args(&self, args: &Value) -> String {
        match variant(args) {
            ("angle_bracketed", held) => {
                let given = list(&held["args"]).map(|arg| match variant(arg) {
                    ("type", typed) => self.typed(typed),
                    ("const", constant) => text(&constant["expr"]).to_owned(),
                    ("lifetime", name) => text(name).to_owned(),
                    _ => "_".to_owned(),
                });
                let bound = list(&held["constraints"]).map(|constraint| {
                    let name = text(&constraint["name"]);
                    match variant(&constraint["binding"]) {
                        ("equality", term) => format!("{name} = {}", self.term(term)),
                        (_, bounds) => format!("{name}{}", self.colon(bounds)),
                    }
                });
                let all = join(given.chain(bound));
                if all.is_empty() { all } else { format!("<{all}>") }
            }
            ("parenthesized", held) => {
                let inputs = list(&held["inputs"]).map(|input| self.typed(input));
                format!("({}){}", join(inputs), self.output(&held["output"]))
            }
            _ => String::new(),
        }
    }

    fn term(&self, term: &Value) -> String {
        match variant(term) {
            ("type", typed) => self.typed(typed),
            (_, constant) => text(&constant["expr"]).to_owned(),
        }
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn join(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(", ")
}
