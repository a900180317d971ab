//! Parameters: values that `--set` or the seed substitutes in a file.

use crate::source::{Result, Source, join_path};
use crate::spec::ParameterSpec;
use serde::Deserialize;
use softhca_fabric::Seed;
use std::collections::BTreeMap;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

/// Parameter values of a run by name, in TOML notation.
pub type ParameterValues = BTreeMap<String, String>;

/// The value of `--set` that sweeps a parameter.
pub const SWEEP_ALL: &str = "all";

/// Maximum number of values of a range.
const MAX_RANGE_VALUES: u64 = 10_000;

/// The parameters that a file declares.
pub(crate) fn parse_declarations(
    source: &Source,
    tree: &Spanned<DeTable<'_>>,
) -> Result<BTreeMap<String, ParameterSpec>> {
    let Some((_, declared)) = tree.get_ref().iter().find(|(key, _)| key.get_ref() == "parameters") else {
        return Ok(BTreeMap::new());
    };
    let parameters: BTreeMap<String, ParameterSpec> =
        BTreeMap::deserialize(ValueDeserializer::from(declared.clone()))
            .map_err(|error| source.toml_error(&error))?;
    for (name, parameter) in &parameters {
        let path = join_path("parameters", name);
        if !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-') {
            return Err(source
                .error_at(&path, format!("{name:?}: parameter names consist of letters, digits, _ and -")));
        }
        if let Some(range) = parameter.range {
            if !parameter.values.is_empty() {
                return Err(source.error_at(&path, "give either `values` or `range`, not both"));
            }
            if parameter.step == 0 || (range.0.last - range.0.first) / parameter.step >= MAX_RANGE_VALUES {
                let message =
                    format!("a range needs a step above 0 and has at most {MAX_RANGE_VALUES} values");
                return Err(source.error_at(&join_path(&path, "range"), message));
            }
        }
        if parameter.by_seed && sweep_values(parameter).is_empty() {
            return Err(source
                .error_at(&path, "the seed has no values to select from")
                .help("give `values` or a `range`"));
        }
    }
    Ok(parameters)
}

/// The values of a sweep, in TOML notation.
pub(crate) fn sweep_values(parameter: &ParameterSpec) -> Vec<String> {
    match parameter.range {
        Some(range) => {
            (range.0.first..=range.0.last).step_by(parameter.step as usize).map(|n| n.to_string()).collect()
        }
        None => parameter.values.iter().map(toml::Value::to_string).collect(),
    }
}

/// Which parameters the seed selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BySeed {
    /// Those that say so.
    Declared,
    /// All that have several values.
    All,
}

/// The values of one run: from `set`, else selected by the seed, else the defaults.
pub(crate) fn resolve(
    declared: &BTreeMap<String, ParameterSpec>,
    set: &ParameterValues,
    seed: u64,
    by_seed: BySeed,
) -> ParameterValues {
    let value = |(index, (name, parameter)): (usize, (&String, &ParameterSpec))| {
        let value = match set.get(name) {
            Some(value) => value.clone(),
            None if parameter.by_seed || by_seed == BySeed::All && !sweep_values(parameter).is_empty() => {
                let choices = sweep_values(parameter);
                let pick = Seed(seed).below(choices.len() as u64, &[0x7061_7261, index as u64]);
                choices[pick as usize].clone()
            }
            None => parameter.default.to_string(),
        };
        (name.clone(), value)
    };
    declared.iter().enumerate().map(value).collect()
}

/// Checks the arguments of `--set` and returns the values of each run: several if a parameter is swept.
pub(crate) fn sweep(
    source: &Source,
    declared: &BTreeMap<String, ParameterSpec>,
    set: &[(String, String)],
) -> Result<Vec<ParameterValues>> {
    let mut runs = vec![ParameterValues::new()];
    for (name, text) in set {
        let Some(parameter) = declared.get(name) else {
            let message = format!("--set {name}={text}: the file declares no parameter {name:?}");
            return Err(source
                .error_without_position(message)
                .suggest(name, declared.keys().map(String::as_str)));
        };
        let choices = sweep_values(parameter);
        let wanted = if text == SWEEP_ALL {
            if choices.is_empty() {
                let message = format!("--set {name}=all: the parameter has no `values` and no `range`");
                return Err(source.error_at(&join_path("parameters", name), message));
            }
            choices
        } else {
            let value = to_toml_literal(text);
            if !choices.is_empty() && !choices.contains(&value) {
                let message = format!("--set {name}={text}: not an allowed value of the parameter");
                let problem = source.error_at(&join_path("parameters", name), message);
                return Err(problem.help(format!("allowed values: {}", abbreviate(&choices))));
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

fn abbreviate(choices: &[String]) -> String {
    match choices {
        [first, .., last] if choices.len() > 12 => format!("{first} … {last}"),
        _ => choices.join(", "),
    }
}

/// A value in TOML notation. Text that is not a number, boolean or list becomes a string.
fn to_toml_literal(text: &str) -> String {
    #[derive(Deserialize)]
    struct Holder {
        value: toml::Value,
    }
    match toml::from_str::<Holder>(&format!("value = {text}")) {
        Ok(holder) => holder.value.to_string(),
        Err(_) => toml::Value::String(text.to_owned()).to_string(),
    }
}

/// Replaces references by values: `"$name"` becomes the value, `"${name}us"` a string that contains it.
pub(crate) fn substitute<'i>(
    source: &Source,
    tree: &mut Spanned<DeTable<'i>>,
    values: &'i ParameterValues,
) -> Result<()> {
    for (key, value) in tree.get_mut().iter_mut() {
        if key.get_ref() != "parameters" {
            substitute_value(source, value, key.get_ref(), values)?;
        }
    }
    Ok(())
}

fn substitute_value<'i>(
    source: &Source,
    value: &mut Spanned<DeValue<'i>>,
    path: &str,
    values: &'i ParameterValues,
) -> Result<()> {
    let unknown = |name: &str| {
        let message = format!("${name}: the file declares no such parameter");
        source.error_at(path, message).suggest(name, values.keys().map(String::as_str))
    };
    match value.get_mut() {
        DeValue::String(text) => {
            if let Some(name) = text.strip_prefix('$').filter(|name| !name.starts_with('{')) {
                let literal = values.get(name).ok_or_else(|| unknown(name))?;
                let parsed = DeValue::parse(literal).map_err(|error| source.toml_error(&error))?;
                *value.get_mut() = parsed.into_inner();
            } else if text.contains("${") {
                let mut result = String::new();
                let mut rest = &text[..];
                while let Some((before, after)) = rest.split_once("${") {
                    let Some((name, behind)) = after.split_once('}') else {
                        return Err(source.error_at(path, "`${` without `}`"));
                    };
                    result += before;
                    // Addresses of hosts and the free port are substituted when the program starts.
                    let is_free_port = name == "PORT" && !values.contains_key(name);
                    if is_free_port || name.starts_with("ADDRESS_") {
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
                substitute_value(source, item, &join_path(path, &index.to_string()), values)?;
            }
        }
        DeValue::Table(table) => {
            for (key, item) in table.iter_mut() {
                substitute_value(source, item, &join_path(path, key.get_ref()), values)?;
            }
        }
        _ => {}
    }
    Ok(())
}
