//! A random walk over mostly valid verbs on several queue pairs, against a simple model of memory and
//! completion order, in every recovery mode and all kinds of weather.
//!
//! A case that fails is kept in `tests/random_walk/regressions.txt` and comes first in every later run, so
//! `cargo test -p softhca-tests --test random_walk` replays it. `PROPTEST_CASES=20000` walks further.

mod check;
mod model;
mod play;
mod walk;

use check::{Demand, check_datagrams, check_reliable, check_unreliable};
use play::Play;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use softhca_engine::{QpKind, Recovery};
use walk::{Weather, any_walk};

fn config() -> ProptestConfig {
    let kept = concat!(env!("CARGO_MANIFEST_DIR"), "/random_walk/regressions.txt");
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(kept))),
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    }
}

fn any_recovery() -> impl Strategy<Value = Recovery> {
    prop::sample::select(vec![Recovery::Fatal, Recovery::GoBackN, Recovery::GoBack0])
}

fn any_weather() -> impl Strategy<Value = Weather> {
    prop::sample::select(vec![
        Weather::Fair,
        Weather::Echoes,
        Weather::Showers,
        Weather::Drizzle,
        Weather::Storm,
    ])
}

fn reliable(recovery: Recovery, weather: Weather) -> impl Strategy<Value = walk::Walk> {
    any_walk(QpKind::Rc, recovery, weather)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn without_faults_everything_succeeds_in_every_mode(
        walk in any_recovery().prop_flat_map(|recovery| reliable(recovery, Weather::Fair)),
    ) {
        check_reliable(&walk, Demand::Success)?;
    }

    #[test]
    fn duplicates_are_no_loss_in_any_mode(
        walk in any_recovery().prop_flat_map(|recovery| reliable(recovery, Weather::Echoes)),
    ) {
        check_reliable(&walk, Demand::Success)?;
    }

    #[test]
    fn fatal_executes_nothing_twice_and_flushes_in_order(
        walk in prop_oneof![reliable(Recovery::Fatal, Weather::Showers), reliable(Recovery::Fatal, Weather::Storm)],
    ) {
        check_reliable(&walk, Demand::Order)?;
    }

    #[test]
    fn go_back_n_executes_everything_exactly_once_within_its_retries(
        walk in prop_oneof![reliable(Recovery::GoBackN, Weather::Showers), reliable(Recovery::GoBackN, Weather::Drizzle)],
    ) {
        check_reliable(&walk, Demand::Success)?;
    }

    #[test]
    fn go_back_n_beyond_its_retries_executes_nothing_twice_and_flushes_in_order(
        walk in reliable(Recovery::GoBackN, Weather::Storm),
    ) {
        check_reliable(&walk, Demand::Order)?;
    }

    #[test]
    fn go_back_0_completes_everything_exactly_once_within_its_retries(
        walk in prop_oneof![reliable(Recovery::GoBack0, Weather::Showers), reliable(Recovery::GoBack0, Weather::Drizzle)],
    ) {
        check_reliable(&walk, Demand::Success)?;
    }

    #[test]
    fn go_back_0_beyond_its_retries_completes_nothing_twice_and_flushes_in_order(
        walk in reliable(Recovery::GoBack0, Weather::Storm),
    ) {
        check_reliable(&walk, Demand::Order)?;
    }

    #[test]
    fn an_unreliable_connection_delivers_whole_messages_and_once_if_they_stay_in_line(
        walk in any_weather().prop_flat_map(|weather| any_walk(QpKind::Uc, Recovery::Fatal, weather)),
    ) {
        check_unreliable(&walk)?;
    }

    #[test]
    fn a_datagram_arrives_once_unless_a_cable_copied_it(
        walk in any_weather().prop_flat_map(|weather| any_walk(QpKind::Ud, Recovery::Fatal, weather)),
    ) {
        check_datagrams(&walk)?;
    }

    #[test]
    fn the_same_walk_gives_the_same_frames_and_events(
        walk in any_recovery().prop_flat_map(|recovery| reliable(recovery, Weather::Storm)),
    ) {
        let [first, second] = [(), ()].map(|()| {
            let mut play = Play::new(&walk);
            play.run();
            play.record.take()
        });
        prop_assert!(first.sent == second.sent);
        prop_assert!(first.events == second.events);
        prop_assert!(first.faults == second.faults);
    }
}
