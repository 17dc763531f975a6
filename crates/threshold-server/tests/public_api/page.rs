//! Writes one crate's public API as a page: its modules, their types with methods, functions and constants.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde_json::Value;

use crate::rustdoc::{Docs, first_sentence, inner, list, summary};
use crate::signature::Signatures;

/// One line of the page, and the crates that its signature names.
struct Line {
    depth: usize,
    text: String,
    named: BTreeSet<String>,
}

/// A public module.
struct Module<'a> {
    path: String,
    item: &'a Value,
}

/// The whole page; `update` is the command that writes it.
pub(crate) fn write(docs: &Docs, update: &str) -> String {
    let krate = docs.root()["name"].as_str().unwrap_or_default();
    let name = krate.replace('_', "-");
    let modules = modules(docs);
    let mut page = format!(
        "# The API of `{name}`\n\nLists every public item of `{name}` {}, built with all features, so that you can find the \
         one you need and see\nin a review what a change adds or breaks. `cargo doc --open` has the full documentation.\n\n\
         Generated; do not edit. Write it again with `{update}`.\n\n",
        docs.version()
    );
    for module in &modules {
        let _ = writeln!(page, "- [`{}`](#{}): {}", module.path, anchor(&module.path), summary(module.item));
    }
    for module in &modules {
        let _ = write!(page, "\n## `{}`\n\n{}\n\n", module.path, summary(module.item));
        for Line { depth, text, .. } in module_lines(docs, module) {
            let _ = writeln!(page, "{}- {text}", "  ".repeat(depth));
        }
    }
    page
}

/// Every crate that a public signature names, with that signature.
pub(crate) fn foreign(docs: &Docs) -> Vec<(String, String)> {
    let lines = modules(docs).into_iter().flat_map(|module| {
        let lines = module_lines(docs, &module);
        lines.into_iter().map(move |line| (module.path.clone(), line))
    });
    let named = lines.flat_map(|(path, line)| {
        let text = format!("{path}: {}", line.text);
        line.named.into_iter().map(move |krate| (krate, text.clone()))
    });
    named.collect()
}

/// GitHub's anchor of a heading that is a path in backticks.
fn anchor(path: &str) -> String {
    path.replace("::", "")
}

/// All public modules, the crate itself first.
fn modules(docs: &Docs) -> Vec<Module<'_>> {
    let mut found = Vec::new();
    let name = docs.root()["name"].as_str().unwrap_or_default();
    walk(docs, docs.root(), name, &mut found);
    found.sort_by(|one, other| one.path.cmp(&other.path));
    found
}

fn walk<'a>(docs: &'a Docs, item: &'a Value, path: &str, found: &mut Vec<Module<'a>>) {
    found.push(Module { path: path.to_owned(), item });
    for child in list(&inner(item).1["items"]).filter_map(|id| docs.item(id)) {
        if inner(child).0 == "module" {
            let name = child["name"].as_str().unwrap_or_default();
            walk(docs, child, &format!("{path}::{name}"), found);
        }
    }
}

/// The items of a module: types, traits, functions, constants, then names for items that are listed elsewhere.
fn module_lines(docs: &Docs, module: &Module<'_>) -> Vec<Line> {
    let order = ["struct", "enum", "union", "type_alias", "trait", "function", "macro", "constant", "static"];
    let mut items: BTreeMap<(usize, String), Vec<Line>> = BTreeMap::new();
    let mut uses: BTreeMap<String, Line> = BTreeMap::new();
    let writer = Signatures::new(docs);
    for item in list(&inner(module.item).1["items"]).filter_map(|id| docs.item(id)) {
        let (kind, held) = inner(item);
        let item = match kind {
            "module" => continue,
            "use" => match docs.item(&held["id"]).filter(|_| home(docs, &held["id"]).as_ref() == Some(&module.path)) {
                Some(target) => target,
                None => {
                    named_elsewhere(docs, held, &mut uses);
                    continue;
                }
            },
            _ => item,
        };
        let rank = order.iter().position(|each| *each == inner(item).0).unwrap_or(order.len());
        let lines = Lines { docs, writer: &writer, lines: Vec::new() }.of(item);
        let name = lines.first().map(|line| line.text.clone()).unwrap_or_default();
        items.insert((rank, name), lines);
    }
    let uses = uses.into_iter().map(|(parent, line)| {
        let text = format!("`use {parent}::{{{}}}`", line.text);
        Line { text, ..line }
    });
    items.into_values().flatten().chain(uses).collect()
}

/// Adds a name for an item that is listed elsewhere to the names from the same module.
fn named_elsewhere(docs: &Docs, held: &Value, uses: &mut BTreeMap<String, Line>) {
    let (source, name) = (held["source"].as_str().unwrap_or_default(), held["name"].as_str().unwrap_or_default());
    let (parent, own) = source.rsplit_once("::").unwrap_or(("crate", source));
    let line =
        uses.entry(parent.to_owned()).or_insert_with(|| Line { depth: 0, text: String::new(), named: BTreeSet::new() });
    if !line.text.is_empty() {
        line.text.push_str(", ");
    }
    line.text.push_str(own);
    if own != name {
        let _ = write!(line.text, " as {name}");
    }
    line.named.extend(docs.origin(&held["id"]).map(|origin| origin.krate.to_owned()));
}

/// The module that lists an item: its own if that is public, else the nearest public one above, which re-exports it.
fn home(docs: &Docs, id: &Value) -> Option<String> {
    let origin = docs.origin(id)?;
    let modules: BTreeSet<String> = modules(docs).into_iter().map(|module| module.path).collect();
    let mut parents = origin.path.as_slice();
    while let Some((_, above)) = parents.split_last() {
        let path = above.join("::");
        if modules.contains(&path) {
            return Some(path);
        }
        parents = above;
    }
    None
}

struct Lines<'a> {
    docs: &'a Docs,
    writer: &'a Signatures<'a>,
    lines: Vec<Line>,
}

impl<'a> Lines<'a> {
    fn add(&mut self, depth: usize, signature: &str, item: &Value) {
        let about = first_sentence(&summary(item));
        let text = if about.is_empty() { format!("`{signature}`") } else { format!("`{signature}`: {about}") };
        self.lines.push(Line { depth, text, named: self.writer.named() });
    }

    fn of(mut self, item: &'a Value) -> Vec<Line> {
        let (kind, held) = inner(item);
        let name = item["name"].as_str().unwrap_or_default();
        let generics = &held["generics"];
        // Whether a user can build or match all of it is part of what a change may break.
        let open = if list(&item["attrs"]).any(|each| each == "non_exhaustive") { "#[non_exhaustive] " } else { "" };
        match kind {
            "struct" => {
                let head =
                    format!("{open}struct {name}{}{}", self.writer.params(generics), self.writer.wheres(generics));
                self.add(0, &head, item);
                self.fields(1, &held["kind"]);
                self.methods(&held["impls"]);
            }
            "enum" => {
                let head = format!("{open}enum {name}{}{}", self.writer.params(generics), self.writer.wheres(generics));
                self.add(0, &head, item);
                for variant in list(&held["variants"]).filter_map(|id| self.docs.item(id)) {
                    self.variant(variant);
                }
                self.methods(&held["impls"]);
            }
            "trait" => {
                let (params, wheres) = (self.writer.params(generics), self.writer.wheres(generics));
                self.add(0, &format!("trait {name}{params}{}{wheres}", self.writer.colon(&held["bounds"])), item);
                for member in list(&held["items"]).filter_map(|id| self.docs.item(id)) {
                    self.member(member);
                }
            }
            "function" => self.add(0, &self.writer.function(name, held), item),
            "constant" => self.add(0, &format!("const {name}: {}", self.writer.typed(&held["type"])), item),
            "type_alias" => {
                let params = self.writer.params(generics);
                self.add(0, &format!("type {name}{params} = {}", self.writer.typed(&held["type"])), item);
            }
            other => self.add(0, &format!("{other} {name}"), item),
        }
        self.lines
    }

    /// The public fields of a struct or a variant.
    fn fields(&mut self, depth: usize, kind: &Value) {
        let tuple = list(&kind["tuple"]).enumerate().map(|(at, id)| (Some(at), id));
        let plain = list(&kind["plain"]["fields"]).chain(list(&kind["struct"]["fields"])).map(|id| (None, id));
        for (at, id) in tuple.chain(plain) {
            let Some(field) = self.docs.item(id) else { continue };
            let name = at.map_or_else(|| field["name"].as_str().unwrap_or_default().to_owned(), |at| at.to_string());
            self.add(depth, &format!("{name}: {}", self.writer.typed(inner(field).1)), field);
        }
    }

    fn variant(&mut self, item: &Value) {
        let name = item["name"].as_str().unwrap_or_default();
        let kind = &inner(item).1["kind"];
        let tuple: Vec<String> = list(&kind["tuple"])
            .map(|id| self.docs.item(id).map_or_else(|| "_".to_owned(), |field| self.writer.typed(inner(field).1)))
            .collect();
        let tuple = if tuple.is_empty() { String::new() } else { format!("({})", tuple.join(", ")) };
        self.add(1, &format!("{name}{tuple}"), item);
        self.fields(2, &serde_json::json!({"struct": kind["struct"]}));
    }

    /// The methods of all inherent impls, in the order of the source, and the names of the traits.
    fn methods(&mut self, impls: &Value) {
        let mut impls: Vec<&Value> = list(impls).filter_map(|id| self.docs.item(id)).collect();
        impls.sort_by_key(|item| (item["span"]["filename"].to_string(), item["span"]["begin"][0].as_u64()));
        let (traits, inherent): (Vec<_>, Vec<_>) =
            impls.iter().map(|item| inner(item).1).partition(|block| !block["trait"].is_null());
        for member in inherent.iter().flat_map(|block| list(&block["items"])).filter_map(|id| self.docs.item(id)) {
            self.member(member);
        }
        // Those that the compiler or a blanket impl adds say nothing about this type.
        let written = traits.iter().filter(|block| {
            block["is_synthetic"] != true && block["blanket_impl"].is_null() && block["is_negative"] != true
        });
        let mut traits = BTreeSet::new();
        for block in written {
            traits.insert(self.writer.path(&block["trait"]));
            // What it is implemented with, such as `Service::Error`, is as public as an argument.
            for member in list(&block["items"]).filter_map(|id| self.docs.item(id)) {
                if let ("assoc_type", held) = inner(member) {
                    self.writer.typed(&held["type"]);
                }
            }
        }
        traits.retain(|name| name != "StructuralPartialEq");
        if !traits.is_empty() {
            let names: Vec<String> = traits.iter().map(|name| format!("`{name}`")).collect();
            let text = format!("implements {}", names.join(", "));
            self.lines.push(Line { depth: 1, text, named: self.writer.named() });
        }
    }

    /// A method, associated type or constant.
    fn member(&mut self, item: &Value) {
        let (kind, held) = inner(item);
        let name = item["name"].as_str().unwrap_or_default();
        let signature = match kind {
            "function" => self.writer.function(name, held),
            "assoc_const" => format!("const {name}: {}", self.writer.typed(&held["type"])),
            "assoc_type" => {
                format!("type {name}{}{}", self.writer.params(&held["generics"]), self.writer.colon(&held["bounds"]))
            }
            other => panic!("members of the kind {other} are not written yet: add it to tests/public_api/page.rs"),
        };
        self.add(1, &signature, item);
    }
}
