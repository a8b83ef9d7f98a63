//! Checks the documents: every path, link and command in them exists, the book's table of contents is
//! complete, and no page refers to a document outside the repository.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// The targets of links within the repository, each with the heading it names, or "".
fn links(text: &str) -> Vec<(&str, &str)> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let within = targets.filter(|target| !target.contains("://"));
    within.map(|target| target.split_once('#').unwrap_or((target, ""))).collect()
}

/// The anchors that GitHub and the book give to a page's headings: lower case, "-" for each space, no other
/// punctuation.
fn headings(text: &str) -> BTreeSet<String> {
    let (mut found, mut in_block) = (BTreeSet::new(), false);
    for line in text.lines() {
        in_block ^= line.trim_start().starts_with("```");
        let Some(title) = line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#'))
        else {
            continue;
        };
        if !in_block {
            let kept = title.trim().to_lowercase();
            let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            found.insert(kept.map(|c| if c == ' ' { '-' } else { c }).collect());
        }
    }
    found
}

/// The lines of a page's code blocks in one of these languages.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<Vec<&'a str>> {
    let (mut found, mut open) = (Vec::new(), None);
    for line in text.lines() {
        match (&mut open, line.trim_start().strip_prefix("```")) {
            (None, Some(name)) => open = Some((name.trim() == language, Vec::new())),
            (Some((_, lines)), None) => lines.push(line),
            (Some(_), Some(_)) => {
                found.extend(open.take().filter(|(wanted, _)| *wanted).map(|(_, lines)| lines))
            }
            (None, None) => {}
        }
    }
    found
}

/// All files of the repository, as paths from its root, without build outputs.
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

/// Whether a code span that names a file or folder of the repository names one that exists. Pages may leave
/// out leading folders.
fn exists(span: &str, files: &BTreeSet<String>) -> bool {
    let span = span.trim_end_matches('/');
    files.contains(span)
        || files.iter().any(|file| file.ends_with(span) && file[..file.len() - span.len()].ends_with('/'))
}

/// Whether a code span names a file or folder of the repository: a path that begins with one of its folders,
/// or any file of a kind that the pages only mention from the repository.
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
        let mut dead = Vec::new();
        for (file, heading) in links(&text) {
            let target = if file.is_empty() { page.clone() } else { folder.join(file) };
            let is_there = match fs::read_to_string(&target) {
                Ok(text) if !heading.is_empty() => headings(&text).contains(heading),
                _ => heading.is_empty() && target.exists(),
            };
            if !is_there {
                dead.push(format!("{file}#{heading}"));
            }
        }
        for (kind, target) in absent.chain(dead.iter().map(|link| ("link", link.as_str()))) {
            missing.push(format!("{}: {kind} {target}", page.display()));
        }
    }
    assert!(missing.is_empty(), "do not exist:\n{}", missing.join("\n"));
}

#[test]
fn pages_that_programs_and_sources_name_exist() {
    let files = files();
    let (mut missing, mut found) = (Vec::new(), 0);
    for file in files.iter().filter(|file| [".rs", ".c", ".sh"].iter().any(|end| file.ends_with(end))) {
        let text = fs::read_to_string(tree::root().join(file)).expect("a source file");
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || "/._-".contains(c)));
        for word in words.filter(|word| word.starts_with("docs/") && word.ends_with(".md")) {
            found += 1;
            if !files.contains(word) {
                missing.push(format!("{file}: {word}"));
            }
        }
    }
    assert!(
        found > 20 && missing.is_empty(),
        "{found} pages are named; do not exist:\n{}",
        missing.join("\n")
    );
}

#[test]
fn commands_in_the_pages_are_shell() {
    let mut wrong = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for block in blocks(&text, "sh") {
            let script = block.join("\n");
            let checked = Command::new("bash").args(["-n", "-c", &script]).output().expect("bash");
            if !checked.status.success() {
                let said = String::from_utf8_lossy(&checked.stderr).into_owned();
                wrong.push(format!("{}: {said}{script}", page.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "not what a shell reads:\n{}", wrong.join("\n"));
}

/// Debian's own Python refuses them.
#[test]
fn pages_install_packages_of_python_into_environments_of_their_own() {
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for block in blocks(&text, "sh") {
            let made = block.iter().position(|line| line.contains("python3 -m venv"));
            let used = block.iter().position(|line| line.contains("pip install"));
            assert!(
                used.is_none() || made.is_some_and(|at| Some(at) < used),
                "{}: {block:?}",
                page.display()
            );
        }
    }
}

#[test]
fn every_picture_is_in_a_page_and_has_the_format_of_its_name() {
    let folder = tree::root().join("docs/pictures");
    let shown: BTreeSet<PathBuf> = pages()
        .iter()
        .flat_map(|page| {
            let text = fs::read_to_string(page).expect("a page");
            let folder = page.parent().expect("a page has a folder").to_owned();
            let targets = links(&text).into_iter().map(|(file, _)| folder.join(file));
            targets.collect::<Vec<_>>()
        })
        .collect();
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(&folder).expect("the folder of pictures") {
        let path = entry.expect("an entry").path();
        assert!(shown.contains(&path), "no page shows {}", path.display());
        let bytes = fs::read(&path).expect("a picture");
        let begin: &[u8] =
            if path.extension().is_some_and(|kind| kind == "png") { b"\x89PNG" } else { b"<svg " };
        assert!(bytes.starts_with(begin), "{} is of another kind", path.display());
        names.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
    }
    // Those of `cargo xtask screenshots`.
    assert!(["top.svg", "timeline.png"].iter().all(|name| names.contains(*name)), "{names:?}");
}

/// The pages of the book, as paths from `docs`.
fn book() -> BTreeSet<String> {
    let docs = tree::root().join("docs");
    let inside = pages().into_iter().filter_map(|page| page.strip_prefix(&docs).ok().map(Path::to_owned));
    inside.map(|page| page.display().to_string()).filter(|page| page != "SUMMARY.md").collect()
}

/// Checks, or updates, the list of decisions in the table of contents.
fn check_list_of_decisions() {
    let docs = tree::root().join("docs");
    let mut list = String::new();
    for page in book().iter().filter(|page| page.starts_with("decisions/0")) {
        let text = fs::read_to_string(docs.join(page)).expect("a page");
        let number: u32 = page["decisions/".len()..][..4].parse().expect("a decision's number");
        let title = text.lines().next().unwrap_or_default().trim_start_matches("# ");
        let title = title.trim_start_matches(|c: char| c.is_ascii_digit() || ".: ".contains(c));
        list.push_str(&format!("  - [{number}. {title}]({page})\n"));
    }
    test_kit::check_generated(&docs.join("SUMMARY.md").display().to_string(), Some("decisions"), &list);
}

#[test]
fn the_book_has_each_page_once_and_leads_nowhere_else() {
    check_list_of_decisions();
    let docs = tree::root().join("docs");
    let contents = fs::read_to_string(docs.join("SUMMARY.md")).expect("the table of contents");
    let listed: Vec<&str> = links(&contents).into_iter().map(|(file, _)| file).collect();
    let pages = book();
    for page in &pages {
        let times = listed.iter().filter(|file| *file == page).count();
        assert_eq!(times, 1, "docs/SUMMARY.md has {page} {times} times");
    }
    // Anything outside the book would be a dead link in it, so pages name it without a link.
    let mut outside = Vec::new();
    for page in &pages {
        let path = docs.join(page);
        let text = fs::read_to_string(&path).expect("a page");
        let folder = path.parent().expect("a page has a folder");
        for (file, _) in links(&text) {
            let target = folder.join(file).canonicalize().unwrap_or_default();
            let within = target.starts_with(docs.canonicalize().expect("the folder"));
            if !file.is_empty() && (!within || target.ends_with("SUMMARY.md")) {
                outside.push(format!("{page}: {file}"));
            }
        }
    }
    assert!(outside.is_empty(), "links that lead out of the book:\n{}", outside.join("\n"));
}

/// Restarting the daemon ends all sessions and guests. For another configuration, a reload is enough.
#[test]
fn no_page_and_no_message_has_vhost_rgpu_restarted_for_its_configuration() {
    let sources =
        ["enrollment.rs", "doctor/slurm.rs"].map(|name| tree::root().join("rgpuctl/src").join(name));
    // A socket is made anew only with its daemon.
    let restarts = |file: &PathBuf| {
        let text = fs::read_to_string(file).expect("a file").replace("vhost-rgpu.socket", "");
        text.contains("systemctl restart vhost-rgpu")
    };
    let wrong: Vec<PathBuf> = pages().into_iter().chain(sources).filter(restarts).collect();
    assert!(wrong.is_empty(), "these say to restart vhost-rgpu: {wrong:?}");
}

/// The flags of each command in the reference: `rgpuctl run` and so on, and the daemons with their
/// configuration's settings.
fn known_flags() -> BTreeMap<String, BTreeSet<String>> {
    fn add(all: &mut BTreeMap<String, BTreeSet<String>>, command: &str, text: &str) {
        let flags = text.split(|c: char| !(c.is_ascii_alphanumeric() || "-_".contains(c)));
        let flags = flags.filter(|word| word.starts_with("--")).map(str::to_owned);
        all.entry(command.to_owned()).or_default().extend(flags);
    }
    let page = |name: &str| fs::read_to_string(tree::root().join("docs").join(name)).expect("a page");
    let (mut all, mut command) = (BTreeMap::new(), String::new());
    for line in page("command-line.md").lines() {
        if let Some(title) = line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with("##"))
        {
            command = title.to_owned();
            all.insert(command.clone(), ["--help", "--version"].map(str::to_owned).into());
        } else if line.starts_with("| `") {
            add(&mut all, &command, line.split('|').nth(1).unwrap_or_default());
        }
    }
    for line in page("configuration.md").lines().filter(|line| line.starts_with("| `")) {
        for daemon in ["rgpu-server", "vhost-rgpu"] {
            add(&mut all, daemon, line.split('|').nth(2).unwrap_or_default());
        }
    }
    // The commands of cargo xtask are the variants of an enum.
    let xtask = fs::read_to_string(tree::root().join("xtask/src/main.rs")).expect("the file");
    let variants = xtask.split("enum Command {").nth(1).and_then(|rest| rest.split("\n}").next());
    for variant in variants.unwrap_or_default().lines().filter_map(|line| line.strip_prefix("    ")) {
        let name: String = variant.chars().take_while(char::is_ascii_alphanumeric).collect();
        let dashed: String = name
            .char_indices()
            .map(|(i, c)| match (i, c.is_ascii_uppercase()) {
                (1.., true) => format!("-{}", c.to_ascii_lowercase()),
                _ => c.to_ascii_lowercase().to_string(),
            })
            .collect();
        all.insert(format!("cargo xtask {dashed}"), BTreeSet::new());
    }
    all
}

/// Checks a command line that may call one of rgpu's programs. Words after "--" belong to another program.
fn fault(line: &str, known: &BTreeMap<String, BTreeSet<String>>) -> Option<String> {
    let line = line.split(" -- ").next().unwrap_or_default();
    let line = line.split(" #").next().unwrap_or_default();
    for part in line.split(['|', ';']).flat_map(|part| part.split("&&")) {
        let words: Vec<&str> = part.split_whitespace().collect();
        if let ["cargo", "xtask", name, ..] = words.as_slice() {
            let placeholder = name.starts_with('-') || !name.is_ascii();
            if !placeholder && !known.contains_key(&format!("cargo xtask {name}")) {
                return Some(format!("cargo xtask {name}: no such command"));
            }
        }
        let Some(at) = words.iter().position(|word| {
            ["rgpuctl", "rgpu-server", "vhost-rgpu"].contains(word) || word.ends_with("/release/rgpuctl")
        }) else {
            continue;
        };
        // An argument of another program may be one of our names: systemctl restart vhost-rgpu.
        let behind = at > 0 && !words[..at].iter().all(|word| word.contains('=') || *word == "RUST_LOG");
        if behind {
            continue;
        }
        let mut command = words[at].rsplit('/').next().unwrap_or_default().to_owned();
        let mut rest = &words[at + 1..];
        while let Some(sub) = rest.first().filter(|word| !word.starts_with('-')) {
            let longer = format!("{command} {sub}");
            if !known.contains_key(&longer) {
                break;
            }
            command = longer;
            rest = &rest[1..];
        }
        let Some(flags) = known.get(&command) else { return Some(format!("{command}: no such command")) };
        if let (true, Some(sub)) = (command == "rgpuctl", rest.first().filter(|word| !word.starts_with('-')))
        {
            return Some(format!("rgpuctl {sub}: no such command"));
        }
        let given = rest.iter().filter(|word| word.starts_with("--") && word.len() > 2);
        for flag in given.map(|word| word.split(['=', ',', '`']).next().unwrap_or_default()) {
            if !flags.contains(flag) {
                return Some(format!("{command} has no {flag}"));
            }
        }
    }
    None
}

#[test]
fn commands_in_the_pages_exist() {
    let known = known_flags();
    assert!(known["rgpuctl run"].contains("--server") && known["rgpu-server"].contains("--listen"));
    for wrong in [
        "rgpuctl rum -- x",
        "rgpuctl run --sever a",
        "A=b vhost-rgpu --nothing",
        "cargo xtask boil",
        "ls; rgpu-server --x",
    ] {
        assert!(fault(wrong, &known).is_some(), "{wrong}");
    }
    for right in
        ["rgpuctl run --server a -- rgpuctl --x", "systemctl restart vhost-rgpu --now", "rgpuctl --version"]
    {
        assert_eq!(fault(right, &known), None, "{right}");
    }
    let mut wrong = Vec::new();
    for page in pages() {
        // Decisions and measurements describe their own time.
        if ["decisions", "benchmarks"].iter().any(|part| page.iter().any(|name| name == *part)) {
            continue;
        }
        let text = fs::read_to_string(&page).expect("a page");
        let lines = blocks(&text, "sh").concat();
        for line in lines.iter().chain(code_spans(&text).iter()) {
            wrong.extend(fault(line, &known).map(|fault| format!("{}: {fault}: {line}", page.display())));
        }
    }
    assert!(wrong.is_empty(), "commands that do not exist:\n{}", wrong.join("\n"));
}

#[test]
fn examples_of_configuration_are_toml_with_keys_that_exist() {
    let reference = fs::read_to_string(tree::root().join("docs/configuration.md")).expect("the page");
    let rows = reference.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let keys: BTreeSet<&str> = rows.collect();
    /// All keys of a table that hold values, prefixed with their enclosing tables.
    fn flat(table: &toml::Table, prefix: &str, found: &mut Vec<String>) {
        for (key, value) in table {
            let path = format!("{prefix}{key}");
            match value {
                toml::Value::Table(inner) => flat(inner, &format!("{path}."), found),
                toml::Value::Array(all) if all.iter().any(toml::Value::is_table) => {
                    all.iter()
                        .filter_map(toml::Value::as_table)
                        .for_each(|t| flat(t, &format!("{path}."), found));
                }
                _ => found.push(path),
            }
        }
    }
    let mut wrong = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for block in blocks(&text, "toml") {
            let example = block.join("\n");
            let mut found = Vec::new();
            match example.parse::<toml::Table>() {
                Ok(table) => flat(&table, "", &mut found),
                Err(error) => wrong.push(format!("{}: {error}\n{example}", page.display())),
            }
            // [native] has the keys of [[vm]]; a group or a client has those outside any section.
            let known = |key: &String| {
                let last = key.split_once('.').map_or("", |(_, last)| last);
                keys.contains(key.as_str())
                    || keys.contains(format!("vm.{last}").as_str())
                    || keys.contains(last)
            };
            wrong.extend(
                found.iter().filter(|key| !known(key)).map(|key| format!("{}: no key {key}", page.display())),
            );
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
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
        // Issues are outside the repository, too.
        for part in text.split("ssue ").skip(1).filter(|part| part.starts_with(|c: char| c.is_ascii_digit()))
        {
            let number: String = part.chars().take_while(char::is_ascii_digit).collect();
            found.push(format!("{}: issue {number}", page.display()));
        }
    }
    assert!(found.is_empty(), "refer to documents outside the repository:\n{}", found.join("\n"));
}

/// The fields of a schema's object, nested ones included, as rows of a Markdown table.
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

#[test]
fn the_page_about_libvirt_has_the_domain_that_is_tested() {
    let file = fs::read_to_string(tree::root().join("qemu-configs/libvirt.xml")).expect("the file");
    let domain = &file[file.find("<domain").expect("a domain")..];
    let page = tree::root().join("docs/libvirt.md").display().to_string();
    test_kit::check_generated(&page, Some("domain"), &format!("\n```xml\n{domain}```\n\n"));
}

#[test]
fn messages_in_the_page_about_troubleshooting_are_printed_somewhere() {
    let sources = files().into_iter().filter(|file| file.ends_with(".rs") || file.ends_with(".c"));
    let mut said = String::new();
    for file in sources.filter(|file| !file.starts_with("tests/")) {
        let text = fs::read_to_string(tree::root().join(file)).expect("a source file");
        // A backslash at the end of a line continues the text.
        let mut joined = false;
        for line in text.lines() {
            let line = if joined { line.trim_start() } else { line };
            joined = line.ends_with('\\');
            said.push_str(line.trim_end_matches('\\'));
            said.push_str(if joined { "" } else { "\n" });
        }
    }
    let page = fs::read_to_string(tree::root().join("docs/troubleshooting.md")).expect("the page");
    let (mut missing, mut found) = (Vec::new(), 0);
    for row in page.lines().filter_map(|line| line.strip_prefix("| ")) {
        for span in code_spans(row.split(" | ").next().unwrap_or_default()) {
            if span.starts_with("lspci") {
                continue;
            }
            // Placeholders stand for values in the message.
            let pieces =
                span.split('…').flat_map(|part| part.split("HOST")).flat_map(|part| part.split("REASON"));
            for piece in pieces.map(|piece| piece.trim_matches([' ', ':', '(', ')', ',', '.'])) {
                found += 1;
                if piece.len() >= 12 && !piece.starts_with("FILE") && !said.contains(piece) {
                    missing.push(piece);
                }
            }
        }
    }
    assert!(found > 60, "the page has {found} pieces of messages");
    assert!(missing.is_empty(), "nothing prints these:\n{}", missing.join("\n"));
}

#[test]
fn the_table_of_alerts_follows_from_the_rules() {
    let rules = fs::read_to_string(tree::root().join("monitoring/rgpu-alerts.yml")).expect("the rules");
    let mut table = String::from("\n| alert | severity | it says | it advises |\n|---|---|---|---|\n");
    for rule in rules.split("- alert: ").skip(1) {
        let after = |key: &str| rule.split(key).nth(1).unwrap_or_else(|| panic!("{key} in {rule}"));
        let quoted = |key: &str| after(key).split('"').nth(1).unwrap_or_default();
        let severity = after("severity: ").split_whitespace().next().unwrap_or_default();
        // A Prometheus template value: {{ $labels.instance }}
        let plain = |text: &str| {
            let mut parts = text.split("{{ ");
            let mut plain = parts.next().unwrap_or_default().to_owned();
            for part in parts {
                let (value, rest) = part.split_once(" }}").expect("a template's end");
                match value.split(' ').next().unwrap_or_default() {
                    "if" | "end" => plain.push_str(rest),
                    "else" => plain += &format!(" or {rest}"),
                    value => {
                        let name = value.trim_start_matches("$labels.").trim_start_matches('$');
                        plain += &format!("*{name}*{rest}");
                    }
                }
            }
            plain.replace('|', "\\|")
        };
        let name = rule.lines().next().unwrap_or_default();
        let (says, advises) = (plain(quoted("summary:")), plain(quoted("description:")));
        table.push_str(&format!("| `{name}` | {severity} | {says} | {advises} |\n"));
    }
    table.push('\n');
    test_kit::check_generated(
        &tree::root().join("docs/metrics.md").display().to_string(),
        Some("alerts"),
        &table,
    );
}
