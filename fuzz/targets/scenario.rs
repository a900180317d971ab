//! Scenario files: parsing, parameters and planning. Every error must be printable.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_scenarios::Scenario;

fuzz_target!(|text: &str| {
    let scenario = match Scenario::parse("fuzz.toml", text) {
        Ok(scenario) => scenario,
        Err(error) => return drop(error.to_string()),
    };
    match scenario.sweep(&[]) {
        Ok(sets) => {
            for set in sets.iter().take(2) {
                if let Err(error) = scenario.plan(set, scenario.seed) {
                    drop(error.to_string());
                }
            }
        }
        Err(error) => drop(error.to_string()),
    }
});
