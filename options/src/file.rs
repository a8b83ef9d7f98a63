//! A configuration file as sections of keys and values with their line numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::Error;

/// A configuration file, before its keys are checked.
#[derive(Debug)]
pub struct File {
    pub(crate) path: PathBuf,
    sections: Vec<Section>,
}

/// A section: a table of the file with the options of the daemon, or of one virtual machine.
#[derive(Debug)]
pub struct Section {
    /// Its name; empty for keys outside any section.
    pub name: String,
    /// The line where it begins.
    pub line: usize,
    pub(crate) values: Vec<Value>,
}

/// A key with its value, as the words that a command line would have.
#[derive(Debug)]
pub(crate) struct Value {
    pub key: String,
    pub line: usize,
    pub words: Vec<String>,
}

impl File {
    /// Reads a file. `sections` names the tables that are separate sections, which may appear more than once;
    /// the keys of other tables get the table's name as a prefix.
    pub fn read(path: &Path, sections: &[&str]) -> Result<File, Error> {
        let text =
            std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        File::parse(path, &text, sections)
    }

    /// Like [`read`](Self::read), with the text of a file; `path` is for error messages.
    pub fn parse(path: &Path, text: &str, sections: &[&str]) -> Result<File, Error> {
        let reader = Reader { path, text };
        let table = DeTable::parse(text).map_err(|e| {
            let line = reader.line(e.span().unwrap_or_default());
            let text = reader.repeated_section(line).unwrap_or_else(|| e.message().to_owned());
            Error::Syntax { path: path.to_owned(), line, text }
        })?;
        let mut root = Section { name: String::new(), line: 1, values: Vec::new() };
        let mut found = Vec::new();
        for (key, value) in table.get_ref() {
            let name = key.get_ref().as_ref();
            if !sections.contains(&name) {
                reader.flatten(name, key, value, &mut root)?;
                continue;
            }
            let tables: Vec<_> = match value.get_ref() {
                DeValue::Array(list) => list.iter().map(|item| (item, item.get_ref().as_table())).collect(),
                _ => vec![(value, value.get_ref().as_table())],
            };
            for (at, table) in tables {
                let Some(table) = table else {
                    return Err(reader.wrong(key.span(), name, "must be a section"));
                };
                let line = reader.line(at.span());
                let mut section = Section { name: name.to_owned(), line, values: Vec::new() };
                for (key, value) in table {
                    reader.flatten(key.get_ref(), key, value, &mut section)?;
                }
                found.push(section);
            }
        }
        found.insert(0, root);
        Ok(File { path: path.to_owned(), sections: found })
    }

    /// The path that it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The keys outside any section whose values differ from those of another version of the file.
    pub fn differences(&self, other: &File) -> Vec<String> {
        let values = |file: &File| -> BTreeMap<String, Vec<String>> {
            let all = file.sections("").flat_map(|section| &section.values);
            all.map(|value| (value.key.clone(), value.words.clone())).collect()
        };
        let (ours, theirs) = (values(self), values(other));
        let keys: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
        keys.into_iter().filter(|key| ours.get(*key) != theirs.get(*key)).cloned().collect()
    }

    /// The sections with this name, in the order of the file. There is always one section without a name.
    pub fn sections(&self, name: &str) -> impl Iterator<Item = &Section> {
        self.sections.iter().filter(move |section| section.name == name)
    }
}

impl Section {
    /// Whether it has a key.
    pub fn has(&self, key: &str) -> bool {
        self.values.iter().any(|value| value.key == key)
    }

    /// The line of a key, or the line of the section if it does not have the key.
    pub fn line_of(&self, key: &str) -> usize {
        self.values.iter().find(|value| value.key == key).map_or(self.line, |value| value.line)
    }

    pub(crate) fn full_key(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }
}

struct Reader<'t> {
    path: &'t Path,
    text: &'t str,
}

impl Reader<'_> {
    fn line(&self, at: Range<usize>) -> usize {
        self.text.get(..at.start).map_or(1, |before| before.matches('\n').count() + 1)
    }

    /// What to say of the section that begins in this line, if the file has the same one above. The packaged
    /// files have every section, so this happens to whoever adds one at their end.
    fn repeated_section(&self, line: usize) -> Option<String> {
        let header = |line: &str| line.split('#').next().unwrap_or_default().trim().to_owned();
        let own = header(self.text.lines().nth(line.checked_sub(1)?)?);
        if !own.starts_with('[') || own.starts_with("[[") {
            return None;
        }
        let first = self.text.lines().position(|text| header(text) == own)? + 1;
        (first < line)
            .then(|| format!("there is a section {own} already, in line {first}: put the keys there"))
    }

    fn wrong(&self, at: Range<usize>, key: &str, text: impl Into<String>) -> Error {
        Error::Key { path: self.path.to_owned(), line: self.line(at), key: key.to_owned(), text: text.into() }
    }

    fn flatten(
        &self,
        key: &str,
        at: &Spanned<std::borrow::Cow<'_, str>>,
        value: &Spanned<DeValue<'_>>,
        section: &mut Section,
    ) -> Result<(), Error> {
        if let DeValue::Table(table) = value.get_ref() {
            for (inner, value) in table {
                self.flatten(&format!("{key}.{}", inner.get_ref()), inner, value, section)?;
            }
            return Ok(());
        }
        let word = |value: &DeValue<'_>| match value {
            DeValue::String(text) => Ok(text.to_string()),
            DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
                .map(|number| number.to_string())
                .map_err(|e| e.to_string()),
            DeValue::Boolean(value) => Ok(value.to_string()),
            _ => Err("must be a string, a number, true or false, or a list of them".to_owned()),
        };
        let words = match value.get_ref() {
            DeValue::Array(list) => list.iter().map(|item| word(item.get_ref())).collect(),
            value => word(value).map(|word| vec![word]),
        };
        let words = words.map_err(|text| self.wrong(value.span(), &section.full_key(key), text))?;
        let line = self.line(at.span());
        section.values.push(Value { key: key.to_owned(), line, words });
        Ok(())
    }
}
