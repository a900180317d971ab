//! Which of many runs a command does: `--seeds A..B` and `--shard K/N`.

use std::ops::RangeInclusive;
use std::str::FromStr;

/// A range of seeds, inclusive.
#[derive(Clone, Debug)]
pub struct SeedRange(pub RangeInclusive<u64>);

impl FromStr for SeedRange {
    type Err = String;

    fn from_str(text: &str) -> Result<SeedRange, String> {
        let ends = text.split_once("..").and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        match ends {
            Some((first, last)) if first <= last => Ok(SeedRange(first..=last)),
            Some(_) => Err("the range is empty".into()),
            None => Err("expected A..B, for example 1..1000".into()),
        }
    }
}

/// One of several equal parts of all runs.
#[derive(Clone, Copy, Debug)]
pub struct Shard {
    index: usize,
    count: usize,
}

impl Shard {
    /// The runs of a shard, or all of them without one.
    pub fn select<T>(shard: Option<Shard>, runs: Vec<T>) -> impl Iterator<Item = T> {
        let Shard { index, count } = shard.unwrap_or(Shard { index: 1, count: 1 });
        runs.into_iter().skip(index - 1).step_by(count)
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Shard, String> {
        let parts = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
        match parts {
            Some((part, of)) if 1 <= part && part <= of => Ok(Shard { index: part, count: of }),
            Some(_) => Err("K counts from 1: 1/4, 2/4, 3/4, 4/4".into()),
            None => Err("expected K/N, for example 1/4".into()),
        }
    }
}
