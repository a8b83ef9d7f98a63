//! The bill of materials: the crates in the executables and libraries, with their versions. Its format is
//! CycloneDX, which vulnerability scanners read: <https://cyclonedx.org/docs/1.5/json/>.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rgpu_tests::tree;
use serde_json::{Value, json};

use crate::dependencies::Crate;

/// Writes the bill of materials of `crates` to `file`. The same crates make the same file.
pub fn write(crates: &[Crate], file: &Path) -> Result<()> {
    let lock = std::fs::read_to_string(tree::root().join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let bill = bill(crates, &checksums(&lock)?)?;
    let text = serde_json::to_string_pretty(&bill).context("the bill of materials")?;
    std::fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))
}

fn bill(crates: &[Crate], checksums: &HashMap<String, String>) -> Result<Value> {
    let version = crates.iter().find(|one| one.own).map_or("0", |one| &one.version);
    let mut components = Vec::new();
    for one in crates {
        let mut component = json!({
            "type": if one.own { "application" } else { "library" },
            "bom-ref": one.id(),
            "name": one.name,
            "version": one.version,
            "licenses": [{ "expression": one.license }],
        });
        if !one.own {
            let checksum = checksums.get(&one.id());
            ensure!(checksum.is_some(), "Cargo.lock has no checksum of {}", one.id());
            component["purl"] = json!(format!("pkg:cargo/{}", one.id()));
            component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
        }
        components.push(component);
    }
    let graph: Vec<_> = crates.iter().map(|one| json!({ "ref": one.id(), "dependsOn": one.needs })).collect();
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": { "type": "application", "name": "rgpu", "version": version } },
        "components": components,
        "dependencies": graph,
    }))
}

/// The SHA-256 of each crate from the registry, by `name@version`.
fn checksums(lock: &str) -> Result<HashMap<String, String>> {
    let lock: toml::Table = lock.parse().context("Cargo.lock is not valid TOML")?;
    let packages =
        lock.get("package").and_then(toml::Value::as_array).context("Cargo.lock has no packages")?;
    let text = |package: &toml::Value, key: &str| Some(package.get(key)?.as_str()?.to_owned());
    Ok(packages
        .iter()
        .filter_map(|package| {
            let id = format!("{}@{}", text(package, "name")?, text(package, "version")?);
            Some((id, text(package, "checksum")?))
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crates() -> [Crate; 2] {
        let one = |name: &str, own, needs: &[&str]| Crate {
            name: name.into(),
            version: "1.2.3".into(),
            license: "MIT".into(),
            manifest: String::new(),
            own,
            needs: needs.iter().map(|need| (*need).to_owned()).collect(),
        };
        [one("rgpuctl", true, &["clap@1.2.3"]), one("clap", false, &[])]
    }

    #[test]
    fn a_crate_has_its_checksum_and_what_it_links() {
        let lock = "[[package]]\nname = \"clap\"\nversion = \"1.2.3\"\nchecksum = \"ab12\"\n[[package]]\nname = \"rgpuctl\"\nversion = \"1.2.3\"\n";
        let bill = bill(&crates(), &checksums(lock).unwrap()).unwrap();
        assert_eq!(bill["components"][1]["purl"], "pkg:cargo/clap@1.2.3");
        assert_eq!(bill["components"][1]["hashes"][0]["content"], "ab12");
        assert_eq!(bill["dependencies"][0], json!({ "ref": "rgpuctl@1.2.3", "dependsOn": ["clap@1.2.3"] }));
        assert_eq!(bill["metadata"]["component"]["version"], "1.2.3");
    }

    #[test]
    fn the_bill_of_this_tree_names_what_a_program_links() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("bill.json");
        write(&crate::dependencies::linked(&["rgpuctl"]).unwrap(), &file).unwrap();
        let bill: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let names: Vec<_> =
            bill["components"].as_array().unwrap().iter().map(|c| c["name"].clone()).collect();
        assert!(names.contains(&json!("rgpuctl")) && names.contains(&json!("clap")), "{names:?}");
    }

    #[test]
    fn a_crate_without_a_checksum_is_an_error() {
        assert!(bill(&crates(), &HashMap::new()).is_err());
    }
}
