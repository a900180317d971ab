//! Explores the choices of devices whose placement is not in order, systematically and within a limit.

use crate::placement::Interleaving;
use crate::report::Failure;
use crate::sim::World;
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

/// The variable that selects one interleaving of [`World::explore`].
const VARIABLE: &str = "SOFTHCA_INTERLEAVING";

/// The result of an exploration in which no run failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exploration {
    /// The number of runs.
    pub runs: u32,
    /// Whether these were all interleavings that differ. If not, the limit was reached.
    pub is_complete: bool,
}

/// The first run of an exploration that failed: one with the fewest unusual choices.
#[derive(Clone, PartialEq)]
pub struct FailedInterleaving {
    /// The number of runs, including this one.
    pub runs: u32,
    /// The choices of the run, for the variable `SOFTHCA_INTERLEAVING`.
    pub interleaving: String,
    /// The failure.
    pub failure: Failure,
}

impl fmt::Display for FailedInterleaving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let thread = std::thread::current();
        let test = thread.name().filter(|name| *name != "main").map(|name| format!(" {name}"));
        let FailedInterleaving { runs, interleaving, failure } = self;
        write!(
            f,
            "interleaving {runs} failed: {failure}\n\nTo run this interleaving alone: {VARIABLE}={interleaving} cargo \
             test{}",
            test.unwrap_or_default()
        )
    }
}

/// As its display, so that `unwrap` shows sentences.
impl fmt::Debug for FailedInterleaving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error for FailedInterleaving {}

impl World {
    /// Runs a program once for each order in which data may become visible, at most `limit` times. `prepare` adds hosts
    /// and checks; [`Settings::placement`](crate::Settings::placement) says which orders are possible.
    ///
    /// A choice is made when something reads data that need not be visible yet, and only if the bytes differ. The first
    /// run takes the choices of a device in order, the next runs deviate from it once, then twice, and so on. So the
    /// first failure has the fewest deviations. The seed decides everything else.
    ///
    /// With the variable `SOFTHCA_INTERLEAVING`, it runs only that interleaving.
    ///
    /// ```
    /// use softhca::sim::World;
    ///
    /// let explored = World::explore(1, 100, |world| {
    ///     world.host("alone", |_| async {});
    /// });
    /// assert_eq!(explored.unwrap().runs, 1);
    /// ```
    ///
    /// # Errors
    /// The first failure, with the interleaving that repeats it.
    ///
    /// # Panics
    /// If `SOFTHCA_INTERLEAVING` is not an interleaving.
    pub fn explore(
        seed: u64,
        limit: u32,
        prepare: impl Fn(&mut World),
    ) -> Result<Exploration, Box<FailedInterleaving>> {
        let chosen = std::env::var(VARIABLE).ok();
        let chosen: Option<Interleaving> =
            chosen.map(|text| text.parse().unwrap_or_else(|why| panic!("{VARIABLE}: {why}")));
        let is_alone = chosen.is_some();
        // The interleavings to run, those with the fewest deviations first.
        let mut waiting = BTreeMap::from([((0, 0), chosen.unwrap_or_default())]);
        let mut explored = Exploration { runs: 0, is_complete: !is_alone };
        let mut serial = 0;
        while let Some((_, interleaving)) = waiting.pop_first() {
            if explored.runs == limit {
                explored.is_complete = false;
                break;
            }
            explored.runs += 1;
            let mut world = World::new(seed);
            world.follow(interleaving.clone());
            prepare(&mut world);
            if let Err(failure) = world.run() {
                let (runs, interleaving) = (explored.runs, interleaving.to_string());
                return Err(Box::new(FailedInterleaving { runs, interleaving, failure }));
            }
            if is_alone {
                break;
            }
            let (alternatives, overflowed) = world.made_choices();
            explored.is_complete &= !overflowed;
            let Interleaving(deviations) = interleaving;
            let first = deviations.last_key_value().map_or(0, |(number, _)| number + 1);
            for (number, alternatives) in (0..).zip(alternatives).skip(first as usize) {
                for choice in 1..alternatives {
                    let mut deviations = deviations.clone();
                    deviations.insert(number, choice);
                    serial += 1;
                    waiting.insert((deviations.len(), serial), Interleaving(deviations));
                }
                // More than the limit are never run.
                while waiting.len() > (limit - explored.runs) as usize {
                    waiting.pop_last();
                    explored.is_complete = false;
                }
            }
        }
        Ok(explored)
    }
}
