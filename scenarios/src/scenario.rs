//! A scenario file that was read: from text to plans.

use crate::parameters::{self, ParameterValues};
use crate::plan::{self, Plan};
use crate::source::{Diagnostic, Source};
use crate::spec::{ParameterSpec, ScenarioFile};
use serde::Deserialize;
use std::collections::BTreeMap;
use toml::de::{DeTable, Deserializer};

/// A scenario file that was read and checked.
#[derive(Clone, Debug)]
pub struct Scenario {
    source: Source,
    parameters: BTreeMap<String, ParameterSpec>,
    /// What the scenario shows.
    pub title: String,
    /// The seed unless the command line gives one.
    pub seed: u64,
}

impl Scenario {
    /// Reads a file: `name` is what messages call it, `text` what is in it. Everything is checked with the
    /// default parameters.
    pub fn parse(name: &str, text: &str) -> Result<Scenario, Diagnostic> {
        let source = Source::new(name, text)?;
        let parameters = parameters::parse_declarations(&source)?;
        let mut scenario = Scenario { source, parameters, title: String::new(), seed: 1 };
        let file = scenario.substituted_file(&scenario.resolve_parameters(&ParameterValues::new(), 1))?;
        (scenario.title, scenario.seed) = (file.title, file.seed);
        scenario.plan(&ParameterValues::new(), scenario.seed)?;
        Ok(scenario)
    }

    /// The file's name.
    pub fn name(&self) -> &str {
        &self.source.name
    }

    /// The file's text.
    pub fn text(&self) -> &str {
        &self.source.text
    }

    /// What `--set` asks for, as settings of runs: several where a parameter is swept.
    pub fn sweep(&self, set: &[(String, String)]) -> Result<Vec<ParameterValues>, Diagnostic> {
        let runs = parameters::sweep(&self.source, &self.parameters, set)?;
        for run in &runs {
            self.plan(run, self.seed)?;
        }
        Ok(runs)
    }

    fn resolve_parameters(&self, set: &ParameterValues, seed: u64) -> ParameterValues {
        parameters::resolve(&self.parameters, set, seed)
    }

    fn substituted_file(&self, values: &ParameterValues) -> Result<ScenarioFile, Diagnostic> {
        let source = &self.source;
        let mut tree = DeTable::parse(&source.text).map_err(|error| source.toml_error(&error))?;
        parameters::substitute(source, &mut tree, values)?;
        ScenarioFile::deserialize(Deserializer::from(tree)).map_err(|error| source.toml_error(&error))
    }

    /// The plan of one run.
    pub fn plan(&self, set: &ParameterValues, seed: u64) -> Result<Plan, Diagnostic> {
        let values = self.resolve_parameters(set, seed);
        let file = self.substituted_file(&values)?;
        plan::build(&file, &self.source, values, seed)
    }
}
