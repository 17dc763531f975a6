//! Generates the JavaScript of a Worker from its wasm: the bindings of wasm-bindgen, and the entry that calls them.
//!
//! `worker-bindings WASM SHIM FOLDER` writes `bindings.js`, `bindings_bg.wasm` and `entry.js`.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use wasm_bindgen_cli_support::Bindgen;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [wasm, shim, folder] = arguments.as_slice() else { bail!("usage: worker-bindings WASM SHIM FOLDER") };
    let folder = Path::new(folder);
    let mut bindgen = Bindgen::new();
    bindgen.input_path(wasm).out_name("bindings").typescript(false).module(true)?;
    // After a panic the entry starts the wasm again.
    bindgen.reset_state_function(true).force_enable_abort_handler(true);
    // The names of functions would be a third of the file.
    bindgen.remove_name_section(true).remove_producers_section(true);
    bindgen.generate(folder).context("wasm-bindgen failed")?;

    let path = folder.join("bindings.js");
    // Neither esbuild nor workerd has imports in the source phase. A plain import of a wasm module is the same in workerd.
    let bindings = fs::read_to_string(&path)?.replace("import source ", "import ");
    fs::write(&path, &bindings)?;
    let mut entry = fs::read_to_string(shim)?;
    for name in durable_objects(&bindings) {
        entry += &format!("export const {name} = durableObject(\"{name}\");\n");
    }
    fs::write(folder.join("entry.js"), entry)?;
    Ok(())
}

/// Returns the names of the exported classes that answer requests: those of Durable Objects. The crate `worker` exports other classes
/// too.
fn durable_objects(bindings: &str) -> Vec<&str> {
    let classes = bindings.split("\nexport class ").skip(1).filter_map(|class| class.split_once(" {\n"));
    let objects = classes.filter(|(_, rest)| {
        let body = rest.split_once("\n}\n").map_or(*rest, |(body, _)| body);
        body.lines().any(|line| line.starts_with("    fetch(") || line.starts_with("    async fetch("))
    });
    objects.map(|(name, _)| name).collect()
}
