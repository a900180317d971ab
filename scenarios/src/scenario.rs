//! A parsed scenario file, and the plans of its runs.

use crate::parameters::{self, BySeed, ParameterValues};
use crate::plan::{self, Plan};
use crate::source::{Diagnostic, Source};
use crate::spec::{ExpectationFile, ParameterSpec, ScenarioFile};
use crate::swarm;
use serde::Deserialize;
use std::collections::BTreeMap;
use toml::Spanned;
use toml::de::{DeTable, Deserializer};

/// A parsed and checked scenario file.
#[derive(Clone, Debug)]
pub struct Scenario {
    source: Source,
    parameters: BTreeMap<String, ParameterSpec>,
    /// The file with the default parameters.
    file: ScenarioFile,
    /// The expectations of another file.
    more: Option<(ExpectationFile, Source)>,
    /// The plan with the default parameters and the default seed.
    plan: Plan,
    /// One sentence that states what the scenario shows.
    pub title: String,
    /// Seed if the command line gives none.
    pub seed: u64,
}

impl Scenario {
    /// Parses `text` and checks it with the default parameters. Error messages call the file `name`.
    pub fn parse(name: &str, text: &str) -> Result<Scenario, Diagnostic> {
        let (source, tree) = Source::parse(name, text)?;
        let parameters = parameters::parse_declarations(&source, &tree)?;
        // The default seed can itself be a parameter; parameters that the seed selects use seed 1 to find it.
        let values = parameters::resolve(&parameters, &ParameterValues::new(), 1, BySeed::Declared);
        let file = deserialize(&source, tree.clone(), &values)?;
        let seed = file.seed;
        let seeded = parameters::resolve(&parameters, &ParameterValues::new(), seed, BySeed::Declared);
        let file = if seeded == values { file } else { deserialize(&source, tree, &seeded)? };
        let plan = plan::builder::build(&file, &source, None, seeded, seed)?;
        Ok(Scenario { parameters, title: file.title.clone(), seed, file, more: None, plan, source })
    }

    /// Adds the `[[expect]]` and `invariants` of another file.
    pub fn with_expectations(mut self, name: &str, text: &str) -> Result<Scenario, Diagnostic> {
        let (source, tree) = Source::parse(name, text)?;
        let file = ExpectationFile::deserialize(Deserializer::from(tree));
        let more = Some((file.map_err(|error| source.toml_error(&error))?, source));
        let values = self.plan.parameters;
        self.plan = plan::builder::build(&self.file, &self.source, more.as_ref(), values, self.seed)?;
        Ok(Scenario { more, ..self })
    }

    /// The name of the file with further expectations.
    pub fn expectations_name(&self) -> Option<&str> {
        self.more.as_ref().map(|(_, source)| source.name.as_str())
    }

    /// The name of the file.
    pub fn name(&self) -> &str {
        &self.source.name
    }

    /// The text of the file.
    pub fn text(&self) -> &str {
        &self.source.text
    }

    /// The parameter values of the runs that `--set` requests: several if a parameter is swept.
    pub fn sweep(&self, set: &[(String, String)]) -> Result<Vec<ParameterValues>, Diagnostic> {
        let runs = parameters::sweep(&self.source, &self.parameters, set)?;
        for run in &runs {
            self.plan(run, self.seed)?;
        }
        Ok(runs)
    }

    /// The plan of one run.
    pub fn plan(&self, set: &ParameterValues, seed: u64) -> Result<Plan, Diagnostic> {
        let values = parameters::resolve(&self.parameters, set, seed, BySeed::Declared);
        if values != self.plan.parameters {
            let (_, tree) = Source::parse(&self.source.name, &self.source.text)?;
            let file = deserialize(&self.source, tree, &values)?;
            return plan::builder::build(&file, &self.source, self.more.as_ref(), values, seed);
        }
        match seed == self.seed {
            true => Ok(self.plan.clone()),
            false => plan::builder::build(&self.file, &self.source, self.more.as_ref(), values, seed),
        }
    }

    /// The plan of one run in which the seed draws all that the file leaves open: parameters, sizes, rates, MTU, recovery,
    /// profile and the kinds of faults.
    pub fn swarm_plan(&self, set: &ParameterValues, seed: u64) -> Result<Plan, Diagnostic> {
        let values = parameters::resolve(&self.parameters, set, seed, BySeed::All);
        let (_, tree) = Source::parse(&self.source.name, &self.source.text)?;
        let mut file = deserialize(&self.source, tree, &values)?;
        let drawn = swarm::draw_settings(&mut file, seed);
        let mut plan = plan::builder::build(&file, &self.source, self.more.as_ref(), values, seed)?;
        plan.parameters.extend(drawn);
        swarm::draw_faults(&mut plan);
        Ok(plan)
    }
}

fn deserialize<'i>(
    source: &Source,
    mut tree: Spanned<DeTable<'i>>,
    values: &'i ParameterValues,
) -> Result<ScenarioFile, Diagnostic> {
    parameters::substitute(source, &mut tree, values)?;
    ScenarioFile::deserialize(Deserializer::from(tree)).map_err(|error| source.toml_error(&error))
}
