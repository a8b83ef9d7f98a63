//! The licences of what the executables and libraries of the relocatable tree are made of: each dependency's own files,
//! as MIT, BSD and Apache-2.0 ask of whoever hands out a binary.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rgpu_tests::tree;
use serde_json::Value;

use crate::process;

/// How the files are called that hold a licence or what it asks to be passed on.
const NAMES: &[&str] = &["license", "licence", "copying", "copyright", "notice", "unlicense"];

/// Copies the licence files of every dependency that `packages` are built from to `folder`, one folder for each.
pub fn collect(packages: &[&str], folder: &Path) -> Result<()> {
    let mut command = process::cargo();
    command.args([
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--filter-platform",
        "x86_64-unknown-linux-gnu",
    ]);
    let metadata = process::output(command.current_dir(tree::root()))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata is no JSON")?;
    for (name, manifest, spdx) in dependencies(&metadata, packages) {
        let target = folder.join(&name);
        std::fs::create_dir_all(&target).with_context(|| format!("cannot create {}", target.display()))?;
        let source = Path::new(&manifest).parent().context("a manifest without a folder")?;
        std::fs::write(target.join("SPDX"), format!("{spdx}\n"))
            .with_context(|| format!("cannot write in {}", target.display()))?;
        let context = || format!("cannot copy the licences of {name}");
        for entry in std::fs::read_dir(source).with_context(context)? {
            let entry = entry.with_context(context)?;
            let file = entry.file_name().to_string_lossy().to_lowercase();
            if NAMES.iter().any(|word| file.starts_with(word)) && entry.path().is_file() {
                std::fs::copy(entry.path(), target.join(entry.file_name())).with_context(context)?;
            }
        }
    }
    ensure!(folder.is_dir(), "no dependency of {} was found", packages.join(", "));
    Ok(())
}

/// Name with version, manifest and licence expression of every package from a registry that `packages` need, build tools and
/// tests aside.
fn dependencies(metadata: &Value, packages: &[&str]) -> Vec<(String, String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let all: BTreeMap<String, Value> =
        list(&metadata["packages"]).into_iter().map(|package| (text(&package["id"]), package)).collect();
    let needs: BTreeMap<String, Vec<String>> = list(&metadata["resolve"]["nodes"])
        .into_iter()
        .map(|node| {
            let normal = |need: &Value| list(&need["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
            let ids = list(&node["deps"])
                .iter()
                .filter(|need| normal(need))
                .map(|need| text(&need["pkg"]))
                .collect();
            (text(&node["id"]), ids)
        })
        .collect();
    let mut reached = BTreeSet::new();
    let mut left: Vec<String> = all
        .iter()
        .filter(|(_, package)| packages.iter().any(|name| package["name"] == *name))
        .map(|(id, _)| id.clone())
        .collect();
    while let Some(id) = left.pop() {
        left.extend(needs.get(&id).into_iter().flatten().filter(|need| !reached.contains(*need)).cloned());
        reached.insert(id);
    }
    reached
        .iter()
        .filter_map(|id| all.get(id))
        .filter(|package| !package["source"].is_null())
        .map(|package| {
            let name = format!("{}-{}", text(&package["name"]), text(&package["version"]));
            (name, text(&package["manifest_path"]), text(&package["license"]))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_linked_counts() {
        let metadata = serde_json::json!({
            "packages": [
                { "id": "own", "name": "own", "version": "1", "source": null },
                { "id": "used", "name": "used", "version": "2", "source": "registry", "manifest_path": "/u", "license": "MIT" },
                { "id": "test", "name": "test", "version": "3", "source": "registry" },
            ],
            "resolve": { "nodes": [
                { "id": "own", "deps": [
                    { "pkg": "used", "dep_kinds": [{ "kind": null }] },
                    { "pkg": "test", "dep_kinds": [{ "kind": "dev" }] },
                ] },
            ] },
        });
        let found = dependencies(&metadata, &["own"]);
        assert_eq!(found, [("used-2".to_owned(), "/u".to_owned(), "MIT".to_owned())]);
    }
}
