//! One-sided programs, correct and broken, and what finds the broken ones: `cargo run --example one_sided`.
//!
//! Each program runs once for each order in which a card may make data visible. Its operations are recorded, and an order
//! of them is searched that explains their results.

mod lock;
mod log;
mod peer;
mod seqlock;

use lock::Release;
use log::Append;
use seqlock::Read;
use softhca::sim::{Exploration, FailedInterleaving, World};
use softhca::{Placement, Settings};

const INTERLEAVINGS: u32 = 2_000;

/// A program, and its name.
type Program = (&'static str, fn(&mut World));

const PROGRAMS: [Program; 7] = [
    ("lock, released by an atomic", |world| lock::prepare(world, Release::Atomic)),
    ("lock, released by a WRITE", |world| lock::prepare(world, Release::Write)),
    ("READ with a version check", |world| seqlock::prepare(world, Read::Checked)),
    ("READ without a version check", |world| seqlock::prepare(world, Read::Unchecked)),
    ("log, WRITE then atomic flag", |world| log::prepare(world, Append::WriteThenAtomic)),
    ("log, WRITE then WRITE of a flag", |world| log::prepare(world, Append::WriteThenWrite)),
    ("log, flag in the same WRITE", |world| log::prepare(world, Append::OneWrite)),
];

fn explore(program: fn(&mut World), placement: Placement) -> Result<Exploration, Box<FailedInterleaving>> {
    World::explore(1, INTERLEAVINGS, |world| {
        world.settings(Settings { placement, ..Settings::default() });
        program(world);
    })
}

fn main() {
    println!("{:<33} {:>14} {:>14} {:>14}", "", "in-order", "out-of-order", "adversarial");
    for (name, program) in PROGRAMS {
        let results = Placement::ALL.map(|placement| match explore(program, placement) {
            Ok(Exploration { runs, is_complete: true }) => format!("holds, {runs}"),
            Ok(Exploration { runs, .. }) => format!("holds, > {runs}"),
            Err(failed) => format!("fails, {}", failed.runs),
        });
        println!("{name:<33} {:>14} {:>14} {:>14}", results[0], results[1], results[2]);
    }
    println!("(and the number of interleavings)\n");
    let failed = explore(PROGRAMS[6].1, Placement::OutOfOrder).expect_err("the log is broken");
    println!("{}:\n{failed}", PROGRAMS[6].0);
}
