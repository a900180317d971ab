//! Compares what became of a walk with the model.

use crate::model::{DirectionModel, GRH_BYTES};
use crate::runner::{Outcome, WalkRun};
use crate::walk::{RandomFault, Verb, Walk};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use softhca_engine::{QpState, Recovery};
use softhca_fabric::Action;
use softhca_queue::{Completion, CompletionStatus};

/// Whether requests may fail that nothing is wrong with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Every request succeeds.
    Success,
    /// Requests fail, but in the right way.
    OrderedFailure,
}

type CheckResult = Result<(), TestCaseError>;

/// Checks every lane of a reliable walk.
pub fn check_reliable(walk: &Walk, demand: Expected) -> CheckResult {
    let mut play = WalkRun::new(walk);
    play.run();
    for index in 0..play.directions.len() {
        let outcome = play.outcome(index);
        let lane = &play.directions[index];
        // What is wrong in one direction ends the other one sooner or later, and who refused something does
        // not say so again when its answer is lost.
        let is_lossless =
            walk.faults.iter().all(|trouble| matches!(trouble.action, Action::Duplicate { .. }));
        let is_ended = play.directions[index ^ 1].first_failing().is_some()
            || lane.first_failing().is_some() && !is_lossless;
        let demand = if is_ended { Expected::OrderedFailure } else { demand };
        check_direction(walk, index, lane, &outcome, demand)
            .map_err(|error| TestCaseError::fail(format!("lane {index}: {error}")))?;
    }
    Ok(())
}

fn check_direction(
    walk: &Walk,
    index: usize,
    lane: &DirectionModel,
    outcome: &Outcome,
    demand: Expected,
) -> CheckResult {
    let done = check_sends(lane, outcome)?;
    if demand == Expected::Success {
        let wanted = lane.first_failing().unwrap_or(lane.requests.len());
        prop_assert_eq!(done, wanted, "{:?}", outcome.sends);
        let wanted = lane.requests.get(wanted);
        prop_assert_eq!(outcome.executed_psns, wanted.map_or(lane.packets(), |deed| deed.first_psn));
        let failed =
            outcome.sends.iter().map(|completion| completion.status).find(|status| !status.is_success());
        prop_assert_eq!(failed, wanted.and_then(|deed| deed.failure));
    }
    let acknowledged = lane.requests[..done].last().map_or(0, |deed| deed.end_psn());
    prop_assert!(acknowledged <= outcome.executed_psns, "a request succeeded that was not executed");
    // Going back to the start of a message forgets it, not what it has stored.
    let touched = outcome.stored.iter().map(|(psn, _)| psn + 1).max().unwrap_or(0);
    let reached = outcome.executed_psns.max(touched);
    let effect = lane.state_after(index, |psn| psn < reached);
    prop_assert!(outcome.target == effect.target, "the target is not what the model says");
    check_receives(lane, outcome, &lane.state_after(index, |psn| psn < outcome.executed_psns).received)?;
    check_once(walk, lane, outcome)?;
    for deed in lane.requests[..done].iter().filter(|deed| deed.request.verb != Verb::Send) {
        for (at, length) in &deed.sges {
            let range = *at as usize..*at as usize + *length as usize;
            prop_assert!(
                outcome.sender[range.clone()] == effect.sender[range],
                "{:?} brought other bytes",
                deed
            );
        }
    }
    Ok(())
}

/// Successes in order, then one failure, then everything else flushed in order. Returns the successes.
fn check_sends(lane: &DirectionModel, outcome: &Outcome) -> Result<usize, TestCaseError> {
    let sends = &outcome.sends;
    let failure = sends.iter().find(|completion| !completion.status.is_success());
    let done = failure.map_or(lane.requests.len(), |completion| completion.wr_id as usize);
    let signalled = (0..done).filter(|number| lane.requests[*number].request.signalled);
    let expected: Vec<u64> = signalled.chain(done..lane.requests.len()).map(|number| number as u64).collect();
    let found: Vec<u64> = sends.iter().map(|completion| completion.wr_id).collect();
    prop_assert_eq!(found, expected, "{:?} {:?}", sends, outcome.sender_state);
    for completion in sends {
        let allowed: &[CompletionStatus] = match completion.wr_id as usize {
            id if id < done => &[CompletionStatus::Success],
            id if id == done => match lane.requests[id].failure {
                Some(CompletionStatus::LocalProtectionError) => &[
                    CompletionStatus::LocalProtectionError,
                    CompletionStatus::RetryExceededError,
                    CompletionStatus::WrFlushError,
                ],
                Some(_) => &[
                    CompletionStatus::RemoteAccessError,
                    CompletionStatus::RetryExceededError,
                    CompletionStatus::WrFlushError,
                ],
                None => &[CompletionStatus::RetryExceededError, CompletionStatus::WrFlushError],
            },
            _ => &[CompletionStatus::WrFlushError],
        };
        prop_assert!(allowed.contains(&completion.status), "{:?}", completion);
    }
    if failure.is_some() {
        prop_assert_eq!(outcome.sender_state, QpState::Error);
    }
    Ok(done)
}

/// Every executed message took the next receive; what remains is flushed in order if the queue pair failed.
fn check_receives(lane: &DirectionModel, outcome: &Outcome, received: &[(usize, Vec<u8>)]) -> CheckResult {
    let flushed = match outcome.receiver_state {
        QpState::Error => lane.receives,
        _ => received.len(),
    };
    let ids: Vec<u64> = outcome.receives.iter().map(|completion| completion.wr_id).collect();
    prop_assert_eq!(ids, (0..flushed as u64).collect::<Vec<_>>(), "{:?}", outcome.receives);
    for (number, completion) in outcome.receives.iter().enumerate() {
        match received.get(number) {
            Some((deed, data)) => check_received(lane, outcome, completion, *deed, data, 0)?,
            None => prop_assert_eq!(completion.status, CompletionStatus::WrFlushError),
        }
    }
    Ok(())
}

fn check_received(
    lane: &DirectionModel,
    outcome: &Outcome,
    completion: &Completion,
    deed: usize,
    data: &[u8],
    header: u32,
) -> CheckResult {
    let deed = &lane.requests[deed];
    prop_assert_eq!(completion.status, CompletionStatus::Success);
    prop_assert_eq!(completion.byte_len, deed.length + header);
    prop_assert_eq!(completion.imm_data, deed.immediate.unwrap_or(0));
    let at = completion.wr_id as usize * lane.receive_bytes as usize + header as usize;
    prop_assert!(
        outcome.receive_memory[at..at + data.len()] == *data,
        "{:?} received other bytes",
        completion
    );
    Ok(())
}

/// Nothing is stored twice, and everything in the order of PSNs. Going back to the start of a message
/// stores its parts again, but never after its end.
fn check_once(walk: &Walk, lane: &DirectionModel, outcome: &Outcome) -> CheckResult {
    let stored = &outcome.stored;
    if walk.recovery == Recovery::GoBack0 {
        for deed in &lane.requests {
            let (last, range) = (deed.end_psn() - 1, deed.first_psn..deed.end_psn());
            let Some(end) = stored.iter().position(|(psn, _)| *psn == last) else { continue };
            let later = stored[end..].iter().filter(|(psn, _)| *psn != last && range.contains(psn));
            prop_assert_eq!(later.count(), 0, "{:?} was executed again", deed);
        }
        return Ok(());
    }
    for pair in stored.windows(2) {
        let ((earlier, at), (later, next)) = (pair[0], pair[1]);
        prop_assert!(earlier < later || earlier == later && at < next, "{:?}", pair);
    }
    Ok(())
}

/// Unreliable connections: whole messages or nothing of their completion, once, in order.
pub fn check_unreliable(walk: &Walk) -> CheckResult {
    let mut play = WalkRun::new(walk);
    play.run();
    // A message that comes again, or late, is taken again: only what stays in line is taken once and in order.
    let in_line = |trouble: &RandomFault| {
        !matches!(trouble.action, Action::Reorder { .. } | Action::Delay { .. } | Action::Duplicate { .. })
    };
    let is_straight = walk.faults.iter().all(in_line);
    for index in 0..play.directions.len() {
        let outcome = play.outcome(index);
        let lane = &play.directions[index];
        prop_assert_eq!(check_sends(lane, &outcome)?, lane.requests.len());
        prop_assert_eq!(outcome.receiver_state, QpState::ReadyToSend);
        let delivered = check_delivered(lane, &outcome, 0, index)?;
        if !is_straight {
            continue;
        }
        check_once(walk, lane, &outcome)?;
        let executed = |psn| outcome.stored.iter().any(|(stored, _)| *stored == psn);
        let effect = lane.state_after(index, executed);
        prop_assert!(outcome.target == effect.target, "the target is not what the packets carried");
        prop_assert!(delivered.is_sorted_by(|a, b| a < b), "{:?}", delivered);
    }
    Ok(())
}

/// Datagrams: each at most once unless the cable copied it, in order unless the cable changed that.
pub fn check_datagrams(walk: &Walk) -> CheckResult {
    let mut play = WalkRun::new(walk);
    play.run();
    let is_straight = |action: &Action| !matches!(action, Action::Reorder { .. } | Action::Delay { .. });
    for index in 0..play.directions.len() {
        let outcome = play.outcome(index);
        let lane = &play.directions[index];
        prop_assert_eq!(check_sends(lane, &outcome)?, lane.requests.len());
        let delivered = check_delivered(lane, &outcome, GRH_BYTES, index)?;
        for deed in 0..lane.requests.len() {
            let times = delivered.iter().filter(|number| **number == deed).count() as u64;
            prop_assert!(times <= 1 + outcome.copies, "{} was delivered {} times", deed, times);
        }
        if walk.faults.iter().all(|trouble| is_straight(&trouble.action)) {
            prop_assert!(delivered.is_sorted(), "{:?}", delivered);
        }
    }
    Ok(())
}

/// The requests that took a receive, in the order of their completions.
fn check_delivered(
    lane: &DirectionModel,
    outcome: &Outcome,
    header: u32,
    index: usize,
) -> Result<Vec<usize>, TestCaseError> {
    let sender = lane.initial_sender(index);
    let mut delivered = Vec::new();
    for (number, completion) in outcome.receives.iter().enumerate() {
        prop_assert_eq!(completion.wr_id, number as u64);
        let deed = completion.imm_data as usize - 1;
        let is_send = lane.requests[deed].request.verb == Verb::Send;
        let data = if is_send { lane.data(&lane.requests[deed], &sender) } else { Vec::new() };
        check_received(lane, outcome, completion, deed, &data, header)?;
        delivered.push(deed);
    }
    Ok(delivered)
}
