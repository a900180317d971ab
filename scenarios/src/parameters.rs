//! Parameters: values that `--set` or the seed put into a file before it is read.

use crate::language::Parameter;
use crate::source::{Problem, Source, join};
use serde::Deserialize;
use softhca_fabric::Seed;
use std::collections::BTreeMap;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The parameters of a run by name, as TOML writes their values.
pub type Values = BTreeMap<String, String>;

/// What `--set NAME=all` asks for.
pub const ALL: &str = "all";

/// The most values that a range may have.
const MOST_VALUES: u64 = 10_000;

/// The parameters that a file declares.
pub(crate) fn declared(source: &Source) -> Result<BTreeMap<String, Parameter>, Problem> {
    #[derive(Deserialize)]
    struct Part {
        #[serde(default)]
        parameters: BTreeMap<String, Parameter>,
    }
    let part: Part = toml::from_str(&source.text).map_err(|error| source.from_toml(&error))?;
    for (name, parameter) in &part.parameters {
        let path = join("parameters", name);
        if !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-') {
            return Err(source
                .problem(&path, format!("{name:?}: a parameter is named with letters, digits, _ and -")));
        }
        if let Some(range) = parameter.range {
            if !parameter.values.is_empty() {
                return Err(source.problem(&path, "a parameter has `values` or a `range`, not both"));
            }
            if parameter.step == 0 || (range.0.last - range.0.first) / parameter.step >= MOST_VALUES {
                let message = format!("a range has a step above 0 and at most {MOST_VALUES} values");
                return Err(source.problem(&join(&path, "range"), message));
            }
        }
        if parameter.by_seed && choices(parameter).is_empty() {
            return Err(source
                .problem(&path, "the seed cannot pick a value: there is nothing to pick from")
                .help("give `values` or a `range`"));
        }
    }
    Ok(part.parameters)
}

/// The values of a sweep, as TOML writes them.
pub(crate) fn choices(parameter: &Parameter) -> Vec<String> {
    match parameter.range {
        Some(range) => {
            (range.0.first..=range.0.last).step_by(parameter.step as usize).map(|n| n.to_string()).collect()
        }
        None => parameter.values.iter().map(toml::Value::to_string).collect(),
    }
}

/// The values of one run: what was set, what the seed picks, else the defaults.
pub(crate) fn choose(declared: &BTreeMap<String, Parameter>, set: &Values, seed: u64) -> Values {
    let value = |(index, (name, parameter)): (usize, (&String, &Parameter))| {
        let value = match set.get(name) {
            Some(value) => value.clone(),
            None if parameter.by_seed => {
                let choices = choices(parameter);
                let pick = Seed(seed).below(choices.len() as u64, &[0x7061_7261, index as u64]);
                choices[pick as usize].clone()
            }
            None => parameter.default.to_string(),
        };
        (name.clone(), value)
    };
    declared.iter().enumerate().map(value).collect()
}

/// Checks what `--set` asks for, and turns it into a list of settings: several if a parameter is swept.
pub(crate) fn sweep(
    source: &Source,
    declared: &BTreeMap<String, Parameter>,
    set: &[(String, String)],
) -> Result<Vec<Values>, Problem> {
    let mut runs = vec![Values::new()];
    for (name, text) in set {
        let Some(parameter) = declared.get(name) else {
            let message = format!("--set {name}={text}: the file has no parameter {name:?}");
            return Err(source.nowhere(message).suggest(name, declared.keys().map(String::as_str)));
        };
        let choices = choices(parameter);
        let wanted = if text == ALL {
            if choices.is_empty() {
                let message = format!("--set {name}=all: the parameter has no `values` and no `range`");
                return Err(source.problem(&join("parameters", name), message));
            }
            choices
        } else {
            let value = literal(text);
            if !choices.is_empty() && !choices.contains(&value) {
                let message = format!("--set {name}={text}: not one of the values of the parameter");
                let problem = source.problem(&join("parameters", name), message);
                return Err(problem.help(format!("there are: {}", shortened(&choices))));
            }
            vec![value]
        };
        runs = runs
            .iter()
            .flat_map(|run| {
                wanted.iter().map(|value| {
                    let mut run = run.clone();
                    run.insert(name.clone(), value.clone());
                    run
                })
            })
            .collect();
    }
    Ok(runs)
}

fn shortened(choices: &[String]) -> String {
    match choices {
        [first, .., last] if choices.len() > 12 => format!("{first} … {last}"),
        _ => choices.join(", "),
    }
}

/// A value as TOML writes it; what is no number, boolean or list is a string.
fn literal(text: &str) -> String {
    #[derive(Deserialize)]
    struct Holder {
        value: toml::Value,
    }
    match toml::from_str::<Holder>(&format!("value = {text}")) {
        Ok(holder) => holder.value.to_string(),
        Err(_) => toml::Value::String(text.to_owned()).to_string(),
    }
}

/// Puts values in the places that name them: `"$name"` becomes the value, `"${name}us"` a string with it.
pub(crate) fn substitute<'i>(
    source: &Source,
    tree: &mut Spanned<DeTable<'i>>,
    values: &'i Values,
) -> Result<(), Problem> {
    for (key, value) in tree.get_mut().iter_mut() {
        if key.get_ref() != "parameters" {
            put(source, value, key.get_ref(), values)?;
        }
    }
    Ok(())
}

fn put<'i>(
    source: &Source,
    value: &mut Spanned<DeValue<'i>>,
    path: &str,
    values: &'i Values,
) -> Result<(), Problem> {
    let unknown = |name: &str| {
        let message = format!("${name}: the file has no such parameter");
        source.problem(path, message).suggest(name, values.keys().map(String::as_str))
    };
    match value.get_mut() {
        DeValue::String(text) => {
            if let Some(name) = text.strip_prefix('$').filter(|name| !name.starts_with('{')) {
                let literal = values.get(name).ok_or_else(|| unknown(name))?;
                let parsed = DeValue::parse(literal).map_err(|error| source.from_toml(&error))?;
                *value.get_mut() = parsed.into_inner();
            } else if text.contains("${") {
                let mut result = String::new();
                let mut rest = &text[..];
                while let Some((before, after)) = rest.split_once("${") {
                    let Some((name, behind)) = after.split_once('}') else {
                        return Err(source.problem(path, "`${` has no `}`"));
                    };
                    result += before;
                    // The addresses of hosts are put in when the program runs.
                    if name.starts_with("ADDRESS_") {
                        result += &format!("${{{name}}}");
                    } else {
                        result += values.get(name).ok_or_else(|| unknown(name))?.trim_matches('"');
                    }
                    rest = behind;
                }
                result += rest;
                *text = result.into();
            }
        }
        DeValue::Array(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                put(source, item, &join(path, &index.to_string()), values)?;
            }
        }
        DeValue::Table(table) => {
            for (key, item) in table.iter_mut() {
                put(source, item, &join(path, key.get_ref()), values)?;
            }
        }
        _ => {}
    }
    Ok(())
}
