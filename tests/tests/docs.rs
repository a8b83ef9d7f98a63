//! Checks the documents: every path and link in them exists, and none refers to a document outside the repository.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use rgpu_tests::tree;

/// All pages whose paths are checked.
fn pages() -> Vec<PathBuf> {
    fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder of the repository") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                collect(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    let root = tree::root();
    let names = ["README.md", "CONTRIBUTING.md", "guest-driver/README.md", "software-gpu/README.md"];
    let mut found: Vec<PathBuf> = names.iter().map(|name| root.join(name)).collect();
    found.push(root.join("qemu-configs/README.md"));
    collect(&root.join("docs"), &mut found);
    found.sort();
    found
}

/// The text between backticks, outside of code blocks.
fn code_spans(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if !in_block {
            found.extend(line.split('`').skip(1).step_by(2));
        }
    }
    found
}

/// The targets of links within the repository.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets
        .map(|target| target.split('#').next().unwrap_or_default())
        .filter(|target| !target.is_empty() && !target.contains("://"))
        .collect()
}

/// All files of the repository, as paths from its root, without those that builds create.
fn files() -> BTreeSet<String> {
    fn collect(root: &Path, folder: &Path, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).expect("a folder of the repository") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with('.') || ["build", "target", "carry"].contains(&name.as_str()) {
                continue;
            }
            let relative = path.strip_prefix(root).expect("a path in the repository");
            found.insert(relative.to_string_lossy().into_owned());
            if path.is_dir() {
                collect(root, &path, found);
            }
        }
    }
    let (root, mut found) = (tree::root(), BTreeSet::new());
    collect(&root, &root, &mut found);
    found
}

/// Whether a code span that names a file or folder of the repository names one that exists. Pages may leave out leading
/// folders.
fn exists(span: &str, files: &BTreeSet<String>) -> bool {
    let span = span.trim_end_matches('/');
    files.contains(span)
        || files.iter().any(|file| file.ends_with(span) && file[..file.len() - span.len()].ends_with('/'))
}

/// Whether a code span names a file or folder of the repository: a path that begins with one of its folders, or any file
/// of a kind that the pages only mention from the repository.
fn names_a_file(span: &str, files: &BTreeSet<String>) -> bool {
    let first = span.split('/').next().unwrap_or_default();
    let plain = span.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
    plain && (span.ends_with(".rs") || span.contains('/') && files.contains(first))
}

#[test]
fn paths_and_links_in_the_documents_exist() {
    let files = files();
    let mut missing = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        let folder = page.parent().expect("a page has a folder");
        let paths = code_spans(&text).into_iter().filter(|span| names_a_file(span, &files));
        let absent = paths.filter(|path| !exists(path, &files)).map(|path| ("path", path));
        let dead = links(&text).into_iter().filter(|link| !folder.join(link).exists());
        for (kind, target) in absent.chain(dead.map(|link| ("link", link))) {
            missing.push(format!("{}: {kind} {target}", page.display()));
        }
    }
    assert!(missing.is_empty(), "do not exist:\n{}", missing.join("\n"));
}

#[test]
fn documents_are_found_inside_the_repository() {
    let mut found = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap_or_default();
        for outside in ["DESIGN.md", "DESIGN §", "../shared/"] {
            if text.contains(outside) {
                found.push(format!("{}: {outside}", page.display()));
            }
        }
    }
    assert!(found.is_empty(), "refer to documents outside the repository:\n{}", found.join("\n"));
}

/// The fields of a schema's object and of those in it, as rows of a table in Markdown.
fn fields(schema: &serde_json::Value, prefix: &str, rows: &mut String) {
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let kinds = match &field["type"] {
            serde_json::Value::Array(all) => {
                all.iter().filter_map(|kind| kind.as_str()).collect::<Vec<_>>().join(" or ")
            }
            kind => kind.as_str().unwrap_or("string").to_owned(),
        };
        let meaning = field["description"].as_str().unwrap_or_default();
        let (list, inner) =
            if field["items"]["properties"].is_object() { ("[]", &field["items"]) } else { ("", field) };
        rows.push_str(&format!("| `{prefix}{name}{list}` | {kinds} | {meaning} |\n"));
        fields(inner, &format!("{prefix}{name}{list}."), rows);
    }
}

#[test]
fn the_page_about_the_status_follows_from_its_schema() {
    let text = fs::read_to_string(tree::root().join("docs/status.schema.json")).expect("the schema");
    let schema: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let mut page = String::new();
    for daemon in ["rgpu-server", "vhost-rgpu"] {
        page.push_str(&format!("\n## {daemon}\n\n| field | type | meaning |\n|---|---|---|\n"));
        fields(&schema["$defs"][daemon], "", &mut page);
    }
    page.push('\n');
    test_kit::check_generated(
        &tree::root().join("docs/status.md").display().to_string(),
        Some("status"),
        &page,
    );
}
