//! A scenario file that was read: from text to plans.

use crate::language::{File, Parameter};
use crate::parameters::{self, Values};
use crate::plan::{self, Plan};
use crate::source::{Problem, Source};
use serde::Deserialize;
use std::collections::BTreeMap;
use toml::de::{DeTable, Deserializer};

/// A scenario file that was read and checked.
#[derive(Clone, Debug)]
pub struct Scenario {
    source: Source,
    parameters: BTreeMap<String, Parameter>,
    /// What the scenario shows.
    pub title: String,
    /// The seed unless the command line gives one.
    pub seed: u64,
}

impl Scenario {
    /// Reads a file: `name` is what messages call it, `text` what is in it. Everything is checked with the
    /// default parameters.
    pub fn read(name: &str, text: &str) -> Result<Scenario, Problem> {
        let source = Source::new(name, text)?;
        let parameters = parameters::declared(&source)?;
        let mut scenario = Scenario { source, parameters, title: String::new(), seed: 1 };
        let file = scenario.file(&scenario.choose(&Values::new(), 1))?;
        (scenario.title, scenario.seed) = (file.title, file.seed);
        scenario.plan(&Values::new(), scenario.seed)?;
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
    pub fn sweep(&self, set: &[(String, String)]) -> Result<Vec<Values>, Problem> {
        let runs = parameters::sweep(&self.source, &self.parameters, set)?;
        for run in &runs {
            self.plan(run, self.seed)?;
        }
        Ok(runs)
    }

    fn choose(&self, set: &Values, seed: u64) -> Values {
        parameters::choose(&self.parameters, set, seed)
    }

    fn file(&self, values: &Values) -> Result<File, Problem> {
        let source = &self.source;
        let mut tree = DeTable::parse(&source.text).map_err(|error| source.from_toml(&error))?;
        parameters::substitute(source, &mut tree, values)?;
        File::deserialize(Deserializer::from(tree)).map_err(|error| source.from_toml(&error))
    }

    /// The plan of one run.
    pub fn plan(&self, set: &Values, seed: u64) -> Result<Plan, Problem> {
        let values = self.choose(set, seed);
        let file = self.file(&values)?;
        plan::build(&file, &self.source, values, seed)
    }
}
