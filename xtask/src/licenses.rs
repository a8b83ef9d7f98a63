//! The licenses of the executables and libraries in the relocatable tree: the license files of each
//! dependency, which MIT, BSD and Apache-2.0 require with binaries.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rgpu_tests::tree;
use serde_json::Value;

use crate::process;

/// Prefixes of the names of files with licenses or required notices.
const NAMES: &[&str] = &["license", "licence", "copying", "copyright", "notice", "unlicense"];

/// Copies the license files of every dependency of `packages` to `folder`, one folder for each.
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
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata is not valid JSON")?;
    for (name, manifest, spdx) in dependencies(&metadata, packages) {
        let target = folder.join(&name);
        std::fs::create_dir_all(&target).with_context(|| format!("cannot create {}", target.display()))?;
        let source = Path::new(&manifest).parent().context("a manifest without a folder")?;
        std::fs::write(target.join("SPDX"), format!("{spdx}\n"))
            .with_context(|| format!("cannot write in {}", target.display()))?;
        let context = || format!("cannot copy the licenses of {name}");
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

/// Name with version, manifest and license expression of every registry package that `packages` depend on,
/// except build and test dependencies.
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
    fn only_linked_dependencies_count() {
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
