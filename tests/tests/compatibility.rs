//! Compares `docs/compatibility.md`, which says for every function of the three libraries whether and how it
//! is served, with the sources. `UPDATE_DOCS=1 cargo test -p rgpu-tests --test compatibility` regenerates it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use rgpu_tests::calls::{self, Place, Places};
use rgpu_tests::tree;

/// Whether a function is supported.
#[derive(Clone, PartialEq, Eq, Debug)]
enum How {
    /// It does what the manual says, but may refuse certain arguments.
    Served,
    /// Refused, with the reason.
    Refused(String),
}

/// A function in the sources.
struct Function {
    name: String,
    body: String,
    exported: bool,
}

/// A library's source files without tests, in order of their names.
fn sources(library: &str) -> Vec<(String, String)> {
    fn collect(folder: &Path, found: &mut Vec<(String, String)>) {
        for entry in fs::read_dir(folder).expect("a folder of the repository") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            if path.is_dir() {
                collect(&path, found);
            } else if name.ends_with(".rs") && !name.contains("tests") {
                let text = fs::read_to_string(&path).expect("a source file");
                let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default().to_owned();
                found.push((path.to_string_lossy().into_owned(), text));
            }
        }
    }
    let mut found = Vec::new();
    collect(&tree::root().join("guest-cudart").join(library).join("src"), &mut found);
    found.sort();
    found
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether a name belongs to the API with this prefix.
fn is_of(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).and_then(|rest| rest.chars().next()).is_some_and(|c| c.is_ascii_uppercase())
}

/// The text from the first `open` to its closing bracket.
fn bracketed(text: &str, open: char, close: char) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        if c == open {
            depth += 1;
        } else if c == close {
            depth -= 1;
            if depth == 0 {
                return &text[..=at];
            }
        }
    }
    text
}

/// Every function that a library's sources define, including those in macros.
fn functions(library: &str, prefix: &str) -> Vec<Function> {
    let mut all = Vec::new();
    for (path, text) in sources(library) {
        for (at, _) in text.match_indices("fn ").filter(|_| !path.ends_with("macros.rs")) {
            let before = text[..at].chars().next_back();
            if before.is_some_and(is_word) {
                continue;
            }
            let rest = &text[at + 3..];
            let name: String = rest.chars().take_while(|c| is_word(*c)).collect();
            let after = rest[name.len()..].trim_start();
            let other = after
                .strip_prefix('/')
                .map(|rest| rest.trim_start().chars().take_while(|c| is_word(*c)).collect());
            let Some(open) = rest.find(['{', ';']) else { continue };
            let body = match rest[open..].starts_with('{') {
                true => bracketed(&rest[open..], '{', '}'),
                // The runtime's short form: an expression after the closure's parameters.
                false => &rest[..open],
            };
            let exported = is_of(&name, prefix);
            for name in [Some(name), other].into_iter().flatten().filter(|name| !name.is_empty()) {
                all.push(Function { name, body: body.to_owned(), exported });
            }
        }
        for line in text.lines().map(str::trim).filter(|_| !path.ends_with("macros.rs")) {
            if let Some(rest) = line.strip_prefix("alias ")
                && let Some((name, target)) = rest.split_once(" = ")
            {
                let target: String = target.chars().take_while(|c| is_word(*c)).collect();
                all.push(Function {
                    name: name.trim().to_owned(),
                    body: format!("{target}("),
                    exported: true,
                });
            }
        }
    }
    all
}

/// Names in the `unsupported!` lists, each with its reason or the reason before the list.
fn refused(library: &str) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for (path, text) in sources(library) {
        if path.ends_with("macros.rs") {
            continue;
        }
        for (at, _) in text.match_indices("unsupported! {") {
            let list = bracketed(&text[at + "unsupported! ".len()..], '{', '}');
            let before: Vec<&str> =
                text[..at].lines().rev().skip(1).take_while(|l| !l.trim().is_empty()).collect();
            let mut doc: Vec<&str> =
                before.iter().filter_map(|line| line.trim().strip_prefix("/// ")).collect();
            if doc.is_empty() {
                doc = text.lines().map_while(|line| line.strip_prefix("//! ")).collect();
            } else {
                doc.reverse();
            }
            let chapter = doc.join(" ").trim_end_matches('.').to_owned();
            for item in list.trim_matches(['{', '}']).split([',', ';']) {
                let (name, reason) = item.split_once(':').map_or((item, None), |(n, r)| (n, Some(r)));
                let name = name.trim();
                if !name.is_empty() && name.chars().all(is_word) {
                    let reason = reason.map(|r| r.trim().trim_matches('"').to_owned());
                    all.insert(name.to_owned(), reason.unwrap_or_else(|| chapter.clone()));
                }
            }
        }
    }
    all
}

/// Words followed by an opening bracket.
fn calls(body: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    for (at, _) in body.match_indices('(') {
        let start = body[..at].rfind(|c| !is_word(c)).map_or(0, |before| before + 1);
        if start < at {
            found.insert(&body[start..at]);
        }
    }
    found
}

type Table = BTreeMap<String, How>;

fn driver() -> Table {
    let all = functions("cuda", "cu");
    let mut table: Table = all.into_iter().filter(|f| f.exported).map(|f| (f.name, How::Served)).collect();
    table.extend(refused("cuda").into_iter().map(|(name, why)| (name, How::Refused(why))));
    table
}

/// The runtime is a layer over the driver API: a function that only calls refused functions of the driver is
/// refused.
fn runtime(driver: &Table) -> Table {
    let of = |body: &str| {
        let called: Vec<&How> = calls(body).iter().filter_map(|name| driver.get(*name)).collect();
        match called.first() {
            Some(first) if called.iter().all(|how| matches!(how, How::Refused(_))) => (*first).clone(),
            _ => How::Served,
        }
    };
    let all = functions("cudart", "cuda");
    let mut table: Table = all.into_iter().filter(|f| f.exported).map(|f| (f.name, of(&f.body))).collect();
    for (name, target) in handed_on() {
        if let Some(how) = driver.get(&target) {
            table.insert(name, how.clone());
        }
    }
    table.extend(refused("cudart").into_iter().map(|(name, why)| (name, How::Refused(why))));
    table
}

/// The API names that a library exports, in all its versions.
fn exported(library: &str, prefix: &str) -> BTreeSet<String> {
    let folder = tree::root().join("guest-cudart").join(library).join("exports");
    let lists = fs::read_dir(folder).expect("the lists of exported names");
    let texts = lists.map(|list| fs::read_to_string(list.expect("a list").path()).expect("a list of names"));
    texts
        .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .filter(|name| is_of(name, prefix))
        .collect()
}

fn nvml() -> Table {
    let mut table: Table = exported("nvml", "nvml").into_iter().map(|name| (name, How::Served)).collect();
    table.extend(refused("nvml").into_iter().map(|(name, why)| (name, How::Refused(why))));
    table
}

/// Functions with a limited effect, which NVIDIA's driver 580 on Linux limits in the same way.
const NOTES: &[(&str, &str)] = &[
    ("cuDeviceGetLuid", "returns `CUDA_ERROR_NOT_SUPPORTED` for every device, as everywhere on Linux"),
    ("cuProfilerStart", "only checks that a context is current; there is no profiler"),
    ("cuProfilerStop", "only checks that a context is current; there is no profiler"),
    ("cudaProfilerStart", "only checks that a context is current; there is no profiler"),
    ("cudaProfilerStop", "only checks that a context is current; there is no profiler"),
];

/// Lists variants for the per-thread default stream together with their function.
fn folded(table: &Table) -> BTreeMap<&str, (&How, Vec<&str>)> {
    let mut rows: BTreeMap<&str, (&How, Vec<&str>)> = BTreeMap::new();
    for (name, how) in table {
        let base = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds"));
        match base.filter(|base| table.get(*base) == Some(how)) {
            Some(base) => rows.entry(base).or_insert((how, Vec::new())).1.push(&name[base.len()..]),
            None => {
                rows.entry(name).or_insert((how, Vec::new()));
            }
        }
    }
    rows
}

/// Where a function is served, according to the counts of its calls and those of its variants. Without such
/// counts, those of the function that it is another name or version of.
fn place(name: &str, variants: &[&str], others: &BTreeMap<String, String>, places: &Places) -> Option<Place> {
    let names = || [""].iter().chain(variants).map(|suffix| format!("{name}{suffix}"));
    let own = names().filter_map(|name| places.get(&name).copied()).max();
    let versions = ["_v2", "_v3"];
    let mut others_of_it: Vec<String> = versions.iter().map(|version| format!("{name}{version}")).collect();
    others_of_it.extend(versions.iter().filter_map(|version| name.strip_suffix(version)).map(str::to_owned));
    own.or_else(|| names().filter_map(|name| places.get(others.get(&name)?).copied()).max())
        .or_else(|| others_of_it.iter().filter_map(|name| places.get(name).copied()).max())
}

/// Functions that are other names of functions: aliases in the driver's library, and runtime functions that
/// pass their arguments to one driver function.
fn other_names() -> BTreeMap<String, String> {
    let all = functions("cuda", "cu").into_iter();
    let mut found: BTreeMap<String, String> =
        all.filter_map(|f| Some((f.name, f.body.strip_suffix('(')?.to_owned()))).collect();
    found.extend(handed_on());
    found
}

/// Runtime functions that `=>` defines as a driver function with the same arguments, each with that function.
fn handed_on() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (_, text) in sources("cudart") {
        for (at, _) in text.match_indices("=> cu") {
            let names = text[..at].trim_end().rsplit([' ', '\n']).next().unwrap_or_default();
            let target: String = text[at + 3..].chars().take_while(|c| is_word(*c)).collect();
            let names = names.split('/').filter(|name| is_of(name, "cuda"));
            found.extend(names.map(|name| (name.to_owned(), target.clone())));
        }
    }
    found
}

fn section(text: &mut String, title: &str, table: &Table, places: &Places) {
    let rows = folded(table);
    let others = other_names();
    let served = rows.values().filter(|(how, _)| !matches!(how, How::Refused(_))).count();
    let _ = write!(
        text,
        "\n## {title}\n\n{served} of {} functions are served.\n\n| function | here |\n|---|---|\n",
        rows.len()
    );
    for (name, (how, variants)) in rows {
        let at = match place(name, &variants, &others, places) {
            Some(Place::Local) => "served, local",
            Some(Place::Forwarded) => "served, forwarded",
            Some(Place::Awaited) => "served, forwarded and awaited",
            None => "served",
        };
        let variants: String = variants.iter().map(|suffix| format!(", `{suffix}`")).collect();
        let how = match how {
            How::Served => match NOTES.iter().find(|(noted, _)| *noted == name) {
                Some((_, note)) => format!("{at}: {note}"),
                None => at.to_owned(),
            },
            How::Refused(why) => format!("**not supported**: {why}"),
        };
        let _ = writeln!(text, "| `{name}`{variants} | {how} |");
    }
}

fn made() -> String {
    let mut text = String::from(
        "# Supported functions\n\n\
         <!-- Generated from the sources: UPDATE_DOCS=1 cargo test -p rgpu-tests --test compatibility -->\n\n\
         *Served* functions do what NVIDIA's manual says. *Not supported* functions return the API's error for that and log one line. A served function may still refuse certain arguments, with the\n\
         same error and a line in the log that names them. The server refuses what its device cannot do; the software GPU can do less than NVIDIA's.\n\n\
         The tests count where calls of the test programs are served (`tests/src/calls.rs`). *Local*: all calls were answered in the program's own process. *Forwarded*: commands went to the server. *And\n\
         awaited*: some calls waited for a reply. Without any of these, no test program that runs on the software GPU calls the function. The runtime is a layer over the driver API in the same process, so the\n\
         counts of its functions are those of the driver functions that they called. A runtime function that no program calls shows the count of the driver function it stands for, or of its other version.\n",
    );
    let places = calls::recorded().expect("the record of calls");
    let driver = driver();
    section(&mut text, "Driver API: `libcuda.so.1`", &driver, &places);
    section(&mut text, "Runtime API: `libcudart.so.12`, `libcudart.so.13`", &runtime(&driver), &places);
    section(&mut text, "NVML: `libnvidia-ml.so.1`", &nvml(), &places);
    text
}

#[test]
fn the_table_of_functions_matches_the_sources() {
    let path = tree::root().join("docs/compatibility.md");
    let update = std::env::var_os("UPDATE_DOCS").is_some();
    if update {
        calls::update_record().expect("the record of calls can be written");
    }
    let made = made();
    if update {
        fs::write(&path, &made).expect("docs/ can be written");
    }
    let there = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        made == there,
        "docs/compatibility.md is out of date: run UPDATE_DOCS=1 cargo test -p rgpu-tests --test compatibility"
    );
}

#[test]
fn the_table_lists_exactly_the_exported_functions() {
    let driver = driver();
    for (library, prefix, table) in
        [("cuda", "cu", &driver), ("cudart", "cuda", &runtime(&driver)), ("nvml", "nvml", &nvml())]
    {
        let told: BTreeSet<String> = table.keys().filter(|name| is_of(name, prefix)).cloned().collect();
        let exported = exported(library, prefix);
        let differ: Vec<&String> = told.symmetric_difference(&exported).collect();
        assert!(differ.is_empty(), "{library}: {differ:?}");
    }
}

/// Functions whose classification is known.
#[test]
fn known_functions_are_classified_correctly() {
    let driver = driver();
    let runtime = runtime(&driver);
    let nvml = nvml();
    for (table, name) in [
        (&driver, "cuLaunchKernel"),
        (&driver, "cuMemcpyHtoD_v2"),
        (&driver, "cuMemcpyHtoD_v2_ptds"),
        (&driver, "cuMemMap"),
        (&driver, "cuIpcOpenMemHandle"),
        (&runtime, "cudaMalloc"),
        (&runtime, "cudaIpcGetMemHandle"),
        (&runtime, "cudaGetErrorString"),
        (&nvml, "nvmlDeviceGetMemoryInfo"),
    ] {
        assert_eq!(table.get(name), Some(&How::Served), "{name}");
    }
    for (table, name) in [
        (&driver, "cuCheckpointProcessLock"),
        (&driver, "cuImportExternalMemory"),
        (&runtime, "cudaGLGetDevices"),
        (&runtime, "cudaImportExternalMemory"),
        (&nvml, "nvmlComputeInstanceDestroy"),
    ] {
        assert!(matches!(table.get(name), Some(How::Refused(_))), "{name}");
    }
}
