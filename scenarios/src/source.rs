//! The text of a scenario file, the positions of its keys, and error messages with positions.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// An error in a scenario file, with its position and advice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Name of the file.
    pub file: String,
    /// Line, from 1; 0 if the error has no position.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Error message.
    pub message: String,
    /// Advice.
    pub help: Option<String>,
    /// Text of the line.
    pub excerpt: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.file, self.message)?,
            _ => {
                write!(f, "{}:{}:{}: {}", self.file, self.line, self.column, self.message)?;
                let margin = self.line.to_string().len();
                write!(f, "\n {} | {}", self.line, self.excerpt)?;
                write!(f, "\n {:margin$} | {:>width$}", "", "^", width = self.column)?;
            }
        }
        match &self.help {
            Some(help) => write!(f, "\n   help: {help}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Diagnostic {}

/// A line of a scenario file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct SourceLine {
    pub file: String,
    /// From 1.
    pub line: usize,
}

/// The result of reading a scenario file.
pub(crate) type Result<T, E = Diagnostic> = std::result::Result<T, E>;

/// A scenario file.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub name: String,
    pub text: String,
    /// Position of each key and array item, by path: `fault.2.match.psn`.
    spans: BTreeMap<String, Range<usize>>,
}

impl Source {
    /// Parses a file and records the position of each key.
    pub fn parse<'t>(name: &str, text: &'t str) -> Result<(Source, Spanned<DeTable<'t>>), Diagnostic> {
        let mut source = Source { name: name.into(), text: text.into(), spans: BTreeMap::new() };
        let tree = DeTable::parse(text).map_err(|error| source.toml_error(&error))?;
        record_table_spans(tree.get_ref(), "", &mut source.spans);
        Ok((source, tree))
    }

    /// An error at the position of a key below `path`.
    pub fn error_in(&self, path: &str, key: &str, message: impl Into<String>) -> Diagnostic {
        self.error_at(&join_path(path, key), message)
    }

    /// An error at the position of a key. If the file does not contain the key, its closest parent is used.
    pub fn error_at(&self, path: &str, message: impl Into<String>) -> Diagnostic {
        let mut path = path;
        loop {
            if let Some(span) = self.spans.get(path) {
                return self.error_at_offset(span.start, message.into());
            }
            match path.rsplit_once('.') {
                Some((parent, _)) => path = parent,
                None => return self.error_without_position(message),
            }
        }
    }

    /// The line of a key or table.
    pub fn line(&self, path: &str) -> SourceLine {
        let Diagnostic { file, line, .. } = self.error_at(path, "");
        SourceLine { file, line }
    }

    pub fn error_without_position(&self, message: impl Into<String>) -> Diagnostic {
        Diagnostic {
            file: self.name.clone(),
            line: 0,
            column: 0,
            message: message.into(),
            help: None,
            excerpt: String::new(),
        }
    }

    fn error_at_offset(&self, offset: usize, message: String) -> Diagnostic {
        let offset = offset.min(self.text.len());
        let before = &self.text[..offset];
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        let excerpt = self.text[start..].lines().next().unwrap_or_default().to_owned();
        Diagnostic {
            file: self.name.clone(),
            line: before.matches('\n').count() + 1,
            column: before[start..].chars().count() + 1,
            message,
            help: None,
            excerpt,
        }
    }

    /// An error of the TOML parser or of serde, with the closest valid name.
    pub fn toml_error(&self, error: &toml::de::Error) -> Diagnostic {
        let message = error.message().trim().to_owned();
        let mut diagnostic = match error.span() {
            Some(span) => self.error_at_offset(span.start, message.clone()),
            None => self.error_without_position(message.clone()),
        };
        diagnostic.help = suggestion_from_serde(&message);
        diagnostic
    }
}

impl Diagnostic {
    /// Adds advice.
    pub(crate) fn help(mut self, help: impl Into<String>) -> Diagnostic {
        self.help = Some(help.into());
        self
    }

    /// Adds the closest valid name, or all valid names.
    pub(crate) fn suggest<'a>(mut self, wrong: &str, right: impl IntoIterator<Item = &'a str>) -> Diagnostic {
        let right: Vec<&str> = right.into_iter().collect();
        self.help = closest_name(wrong, &right).or_else(|| match right.is_empty() {
            true => None,
            false => Some(format!("valid names: {}", right.join(", "))),
        });
        self
    }
}

/// "did you mean", if a valid name is close.
fn closest_name(wrong: &str, right: &[&str]) -> Option<String> {
    let distance = |name: &&&str| strsim::damerau_levenshtein(&wrong.to_lowercase(), &name.to_lowercase());
    let best = right.iter().min_by_key(distance)?;
    let near = distance(&best) <= 1 + wrong.chars().count().max(best.chars().count()) / 3;
    near.then(|| format!("did you mean `{best}`?"))
}

/// The closest of the names that serde lists in backticks.
fn suggestion_from_serde(message: &str) -> Option<String> {
    let rest = message.strip_prefix("unknown ")?;
    let mut quoted = rest.split('`').skip(1).step_by(2);
    let wrong = quoted.next()?;
    let right: Vec<&str> = quoted.collect();
    closest_name(wrong, &right)
}

fn record_table_spans(table: &DeTable<'_>, path: &str, spans: &mut BTreeMap<String, Range<usize>>) {
    for (key, value) in table.iter() {
        let path = join_path(path, key.get_ref());
        // A table can have several headers: use the position of its key.
        let span = match value.get_ref() {
            DeValue::Table(_) | DeValue::Array(_) => key.span(),
            _ => value.span(),
        };
        spans.insert(path.clone(), span);
        record_value_spans(value.get_ref(), &path, spans);
    }
}

fn record_value_spans(value: &DeValue<'_>, path: &str, spans: &mut BTreeMap<String, Range<usize>>) {
    match value {
        DeValue::Table(table) => record_table_spans(table, path, spans),
        DeValue::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                let path = join_path(path, &index.to_string());
                spans.insert(path.clone(), item.span());
                record_value_spans(item.get_ref(), &path, spans);
            }
        }
        _ => {}
    }
}

/// Appends a key to a path.
pub(crate) fn join_path(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}
