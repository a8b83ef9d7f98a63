//! The licenses of dependencies: which ones are allowed, and the license files in the relocatable tree, which
//! MIT, BSD and Apache-2.0 require with binaries.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rgpu_tests::tree;
use serde_json::Value;

use crate::dependencies::{self, Crate};

/// Where every dependency comes from.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Checks the rules of `deny.toml` about licenses, wildcards and sources. This replaces cargo-deny, which
/// takes minutes to compile. Returns the number of dependencies.
///
/// # Errors
/// Names every dependency with a license that is not allowed, that has no exact version, or that is not from
/// crates.io.
pub fn check() -> Result<usize> {
    let file = tree::root().join("deny.toml");
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let deny: toml::Value = toml::from_str(&text).with_context(|| format!("{}", file.display()))?;
    let allowed = deny["licenses"]["allow"].as_array().context("deny.toml has no list licenses.allow")?;
    let allowed: Vec<&str> = allowed.iter().filter_map(toml::Value::as_str).collect();
    let metadata = dependencies::metadata()?;
    let packages = metadata["packages"].as_array().context("cargo metadata has no packages")?;
    let own: Vec<&str> = packages
        .iter()
        .filter(|package| package["source"].is_null())
        .filter_map(|package| package["name"].as_str())
        .collect();
    let linked = dependencies::among(&metadata, &own);
    let problems = problems(packages, &linked, &allowed);
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(linked.iter().filter(|one| !one.own).count())
}

fn problems(packages: &[Value], linked: &[Crate], allowed: &[&str]) -> Vec<String> {
    let mut problems = Vec::new();
    for one in linked.iter().filter(|one| !one.own) {
        if let Err(error) = permits(&one.license, allowed) {
            problems.push(format!("{}: license {:?}: {error:#}", one.id(), one.license));
        }
    }
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        match package["source"].as_str() {
            Some(REGISTRY) => {}
            Some(other) => problems.push(format!("{name} is from {other}, and not from crates.io")),
            None => {
                let needs = package["dependencies"].as_array().into_iter().flatten();
                let wild = needs.filter(|need| need["req"] == "*" && need["path"].is_null());
                problems.extend(wild.map(|need| format!("{name} takes any version of {}", need["name"])));
            }
        }
    }
    problems
}

/// Whether an SPDX expression can be satisfied with the allowed licenses alone.
fn permits(license: &str, allowed: &[&str]) -> Result<()> {
    let expression = spdx::Expression::parse_mode(license, spdx::ParseMode::LAX)?;
    let allowed: Vec<spdx::Licensee> =
        allowed.iter().map(|name| spdx::Licensee::parse(name)).collect::<Result<_, _>>()?;
    let permitted = |wanted: &spdx::LicenseReq| allowed.iter().any(|one| one.satisfies(wanted));
    ensure!(expression.evaluate(permitted), "it is not among those that deny.toml allows");
    Ok(())
}

/// Prefixes of the names of files with licenses or required notices.
const NAMES: &[&str] = &["license", "licence", "copying", "copyright", "notice", "unlicense"];

/// Copies the license files of every crate from the registry to `folder`, one folder for each.
pub fn collect(crates: &[Crate], folder: &Path) -> Result<()> {
    for one in crates.iter().filter(|one| !one.own) {
        let name = format!("{}-{}", one.name, one.version);
        let target = folder.join(&name);
        std::fs::create_dir_all(&target).with_context(|| format!("cannot create {}", target.display()))?;
        let source = Path::new(&one.manifest).parent().context("a manifest without a folder")?;
        std::fs::write(target.join("SPDX"), format!("{}\n", one.license))
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
    ensure!(folder.is_dir(), "no dependency was found");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_needs_one_way_with_allowed_licenses_alone() {
        let allowed = ["MIT", "Apache-2.0 WITH LLVM-exception", "ISC"];
        for good in [
            "MIT",
            "MIT OR GPL-3.0",
            "GPL-2.0/MIT",
            "(MIT OR Apache-2.0) AND ISC",
            "Apache-2.0 WITH LLVM-exception",
        ] {
            permits(good, &allowed).unwrap();
        }
        for bad in ["GPL-3.0-only", "MIT AND GPL-3.0-only", "Apache-2.0", "", "Something"] {
            permits(bad, &allowed).unwrap_err();
        }
    }

    #[test]
    fn each_kind_of_problem_is_named() {
        let packages: Value = serde_json::json!([
            {"name": "own", "source": null, "dependencies": [
                {"name": "any", "req": "*", "path": null}, {"name": "inner", "req": "*", "path": "/inner"}]},
            {"name": "far", "source": "git+https://example.com/far"},
            {"name": "good", "source": REGISTRY, "dependencies": [{"name": "x", "req": "*", "path": null}]},
        ]);
        let linked = |license: &str| Crate {
            name: "good".to_owned(),
            version: "1.0.0".to_owned(),
            license: license.to_owned(),
            manifest: String::new(),
            own: false,
            needs: Vec::new(),
        };
        let found = problems(packages.as_array().unwrap(), &[linked("MIT"), linked("AGPL-3.0")], &["MIT"]);
        let [license, wild, far] = &found[..] else { panic!("{found:?}") };
        assert!(license.starts_with("good@1.0.0: license \"AGPL-3.0\""), "{license}");
        assert!(wild.contains("own takes any version of \"any\""), "{wild}");
        assert!(far.contains("far is from git+"), "{far}");
    }
}
