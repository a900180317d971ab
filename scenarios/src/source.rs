//! The text of a scenario file: where things stand in it, and how to say what is wrong there.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use toml::de::{DeTable, DeValue};

/// Something in a file that cannot be used: what, where, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The file, as it was named.
    pub file: String,
    /// The line, counted from 1; 0 if the problem is not in the text.
    pub line: usize,
    /// The column in characters, counted from 1.
    pub column: usize,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub help: Option<String>,
    /// The line itself.
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

/// A file with its name.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub name: String,
    pub text: String,
    /// Where each key, or the item of an array, stands: `fault.2.match.psn`.
    spans: BTreeMap<String, Range<usize>>,
}

impl Source {
    /// Takes note of where everything stands.
    pub fn new(name: &str, text: &str) -> Result<Source, Diagnostic> {
        let mut source = Source { name: name.into(), text: text.into(), spans: BTreeMap::new() };
        let tree = DeTable::parse(text).map_err(|error| source.toml_error(&error))?;
        let mut places = BTreeMap::new();
        record_table_spans(tree.get_ref(), "", &mut places);
        source.spans = places;
        Ok(source)
    }

    /// A problem at the place of a key. Where that key is not written, its nearest parent's place is taken.
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

    /// A problem that stands nowhere in the text.
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

    /// What the TOML reader or serde found, with a suggestion where a name is nearly right.
    pub fn toml_error(&self, error: &toml::de::Error) -> Diagnostic {
        let message = error.message().trim().to_owned();
        let mut problem = match error.span() {
            Some(span) => self.error_at_offset(span.start, message.clone()),
            None => self.error_without_position(message.clone()),
        };
        problem.help = suggestion_from_serde(&message);
        problem
    }
}

impl Diagnostic {
    /// With advice.
    pub(crate) fn help(mut self, help: impl Into<String>) -> Diagnostic {
        self.help = Some(help.into());
        self
    }

    /// With the nearest of the names that would have been right, or all of them.
    pub(crate) fn suggest<'a>(mut self, wrong: &str, right: impl IntoIterator<Item = &'a str>) -> Diagnostic {
        let right: Vec<&str> = right.into_iter().collect();
        self.help = closest_name(wrong, &right).or_else(|| match right.is_empty() {
            true => None,
            false => Some(format!("there are: {}", right.join(", "))),
        });
        self
    }
}

/// "did you mean", if one of the names is near.
fn closest_name(wrong: &str, right: &[&str]) -> Option<String> {
    let distance = |name: &&&str| strsim::damerau_levenshtein(&wrong.to_lowercase(), &name.to_lowercase());
    let best = right.iter().min_by_key(distance)?;
    let near = distance(&best) <= 1 + wrong.chars().count().max(best.chars().count()) / 3;
    near.then(|| format!("did you mean `{best}`?"))
}

/// Serde names what it expected in backticks: the nearest of those, if any.
fn suggestion_from_serde(message: &str) -> Option<String> {
    let rest = message.strip_prefix("unknown ")?;
    let mut quoted = rest.split('`').skip(1).step_by(2);
    let wrong = quoted.next()?;
    let right: Vec<&str> = quoted.collect();
    closest_name(wrong, &right)
}

fn record_table_spans(table: &DeTable<'_>, path: &str, places: &mut BTreeMap<String, Range<usize>>) {
    for (key, value) in table.iter() {
        let path = join_path(path, key.get_ref());
        // A table written over several headers has the place of its key; a value has its own.
        let span = match value.get_ref() {
            DeValue::Table(_) | DeValue::Array(_) => key.span(),
            _ => value.span(),
        };
        places.insert(path.clone(), span);
        record_value_spans(value.get_ref(), &path, places);
    }
}

fn record_value_spans(value: &DeValue<'_>, path: &str, places: &mut BTreeMap<String, Range<usize>>) {
    match value {
        DeValue::Table(table) => record_table_spans(table, path, places),
        DeValue::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                let path = join_path(path, &index.to_string());
                places.insert(path.clone(), item.span());
                record_value_spans(item.get_ref(), &path, places);
            }
        }
        _ => {}
    }
}

/// A longer path.
pub(crate) fn join_path(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}
