//! The crates that a program or library contains: those of this workspace and from the registry.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use rgpu_tests::tree;
use serde_json::Value;

use crate::process;

/// A crate that is linked into a delivered program or library.
#[derive(Debug, PartialEq)]
pub struct Crate {
    pub name: String,
    pub version: String,
    /// SPDX expression.
    pub license: String,
    /// Path of its Cargo.toml.
    pub manifest: String,
    /// Whether it belongs to this workspace.
    pub own: bool,
    /// `name@version` of each crate that it links.
    pub needs: Vec<String>,
}

impl Crate {
    /// `name@version`
    pub fn id(&self) -> String {
        format!("{}@{}", self.name, self.version)
    }
}

/// `packages` and everything that they link on the delivered platform, see [`among`].
pub fn linked(packages: &[&str]) -> Result<Vec<Crate>> {
    Ok(among(&metadata()?, packages))
}

/// What Cargo knows about all crates.
pub fn metadata() -> Result<Value> {
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
    serde_json::from_str(&metadata).context("cargo metadata is not valid JSON")
}

/// `packages` and everything that they link on the delivered platform, without dependencies of build scripts
/// and tests. Sorted by name and version.
pub fn among(metadata: &Value, packages: &[&str]) -> Vec<Crate> {
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
    let id = |package: &Value| format!("{}@{}", text(&package["name"]), text(&package["version"]));
    let mut crates: Vec<Crate> = reached
        .iter()
        .filter_map(|key| Some((key, all.get(key)?)))
        .map(|(key, package)| Crate {
            name: text(&package["name"]),
            version: text(&package["version"]),
            // Old manifests separate alternatives with a slash.
            license: text(&package["license"]).replace('/', " OR "),
            manifest: text(&package["manifest_path"]),
            own: package["source"].is_null(),
            needs: needs.get(key).into_iter().flatten().filter_map(|need| all.get(need)).map(id).collect(),
        })
        .collect();
    crates.sort_by_key(Crate::id);
    crates
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_linked_crates_count() {
        let metadata = serde_json::json!({
            "packages": [
                { "id": "own", "name": "own", "version": "1", "source": null },
                { "id": "used", "name": "used", "version": "2", "source": "registry", "manifest_path": "/u", "license": "MIT/Zlib" },
                { "id": "test", "name": "test", "version": "3", "source": "registry" },
            ],
            "resolve": { "nodes": [
                { "id": "own", "deps": [
                    { "pkg": "used", "dep_kinds": [{ "kind": null }] },
                    { "pkg": "test", "dep_kinds": [{ "kind": "dev" }] },
                ] },
            ] },
        });
        let found = among(&metadata, &["own"]);
        assert_eq!(found.iter().map(Crate::id).collect::<Vec<_>>(), ["own@1", "used@2"]);
        assert_eq!(found[0].needs, ["used@2"]);
        assert!(found[0].own && !found[1].own);
        assert_eq!((found[1].manifest.as_str(), found[1].license.as_str()), ("/u", "MIT OR Zlib"));
    }
}
