//! Random sequences of mostly valid verbs on several queue pairs, checked against a simple model of memory and completion
//! order, in every recovery mode and with all levels of faults: RC, XRC, UC and UD, receive queues of their own and shared
//! ones, memory windows, queue pairs that are drained and resumed, end-to-end credits.
//!
//! A failing case is kept in `tests/conformance/random_walk/regressions.txt` and runs first in later runs, so
//! `cargo test -p softhca-tests --test conformance random_walk` replays it. `PROPTEST_CASES=10000` runs that many
//! of each test.

mod check;
mod model;
mod runner;
mod walk;

use check::{Expected, check_datagrams, check_reliable, check_unreliable};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use runner::WalkRun;
use softhca_engine::{QpType, Recovery};
use walk::{FaultLevel, any_walk};

fn config() -> ProptestConfig {
    let kept = concat!(env!("CARGO_MANIFEST_DIR"), "/conformance/random_walk/regressions.txt");
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(kept))),
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    }
}

fn any_recovery() -> impl Strategy<Value = Recovery> {
    prop::sample::select(vec![Recovery::Fatal, Recovery::GoBackN, Recovery::GoBack0])
}

fn any_fault_level() -> impl Strategy<Value = FaultLevel> {
    prop::sample::select(vec![
        FaultLevel::None,
        FaultLevel::Duplicates,
        FaultLevel::Few,
        FaultLevel::Rare,
        FaultLevel::Many,
    ])
}

fn reliable(recovery: Recovery, level: FaultLevel) -> impl Strategy<Value = walk::Walk> {
    prop_oneof![
        2 => any_walk(QpType::Rc, recovery, level),
        1 => any_walk(QpType::XrcInitiator, recovery, level),
    ]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn without_faults_everything_succeeds_in_every_mode(
        walk in any_recovery().prop_flat_map(|recovery| reliable(recovery, FaultLevel::None)),
    ) {
        check_reliable(&walk, Expected::Success)?;
    }

    #[test]
    fn duplicates_are_not_a_loss_in_any_mode(
        walk in any_recovery().prop_flat_map(|recovery| reliable(recovery, FaultLevel::Duplicates)),
    ) {
        check_reliable(&walk, Expected::Success)?;
    }

    #[test]
    fn fatal_executes_nothing_twice_and_flushes_in_order(
        walk in prop_oneof![reliable(Recovery::Fatal, FaultLevel::Few), reliable(Recovery::Fatal, FaultLevel::Many)],
    ) {
        check_reliable(&walk, Expected::OrderedFailure)?;
    }

    #[test]
    fn go_back_n_executes_everything_exactly_once_within_its_retries(
        walk in prop_oneof![reliable(Recovery::GoBackN, FaultLevel::Few), reliable(Recovery::GoBackN, FaultLevel::Rare)],
    ) {
        check_reliable(&walk, Expected::Success)?;
    }

    #[test]
    fn go_back_n_beyond_its_retries_executes_nothing_twice_and_flushes_in_order(
        walk in reliable(Recovery::GoBackN, FaultLevel::Many),
    ) {
        check_reliable(&walk, Expected::OrderedFailure)?;
    }

    #[test]
    fn go_back_0_completes_everything_exactly_once_within_its_retries(
        walk in prop_oneof![reliable(Recovery::GoBack0, FaultLevel::Few), reliable(Recovery::GoBack0, FaultLevel::Rare)],
    ) {
        check_reliable(&walk, Expected::Success)?;
    }

    #[test]
    fn go_back_0_beyond_its_retries_completes_nothing_twice_and_flushes_in_order(
        walk in reliable(Recovery::GoBack0, FaultLevel::Many),
    ) {
        check_reliable(&walk, Expected::OrderedFailure)?;
    }

    #[test]
    fn uc_delivers_complete_messages_and_once_if_they_stay_in_order(
        walk in any_fault_level().prop_flat_map(|level| any_walk(QpType::Uc, Recovery::Fatal, level)),
    ) {
        check_unreliable(&walk)?;
    }

    #[test]
    fn a_datagram_arrives_once_unless_a_link_duplicated_it(
        walk in any_fault_level().prop_flat_map(|level| any_walk(QpType::Ud, Recovery::Fatal, level)),
    ) {
        check_datagrams(&walk)?;
    }

    #[test]
    fn the_same_walk_gives_the_same_frames_and_events(
        walk in any_recovery().prop_flat_map(|recovery| reliable(recovery, FaultLevel::Many)),
    ) {
        let [first, second] = [(), ()].map(|()| {
            let mut play = WalkRun::new(&walk);
            play.run();
            play.recording.take()
        });
        prop_assert!(first.sent == second.sent);
        prop_assert!(first.events == second.events);
        prop_assert!(first.faults == second.faults);
    }

    #[test]
    fn the_straight_path_changes_no_frame_and_no_event(
        walk in (any_recovery(), any_fault_level()).prop_flat_map(|(recovery, level)| reliable(recovery, level)),
    ) {
        let [straight, general] = [true, false].map(|straight_path| {
            let mut play = WalkRun::with_straight_path(&walk, straight_path);
            play.run();
            play.recording.take()
        });
        prop_assert!(straight.sent == general.sent);
        prop_assert!(straight.events == general.events);
        prop_assert!(straight.faults == general.faults);
    }
}
