//! Compares the result of a walk with the model.

use super::model::{DirectionModel, GRH_BYTES};
use super::runner::{Outcome, WalkRun};
use super::walk::{RandomFault, Verb, Walk};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use softhca_engine::{QpState, Recovery};
use softhca_fabric::Action;
use softhca_types::CompletionStatus;

/// Whether valid requests may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Every request succeeds.
    Success,
    /// Requests may fail, in order.
    OrderedFailure,
}

type CheckResult = Result<(), TestCaseError>;

/// Checks every direction of an RC or XRC walk.
pub fn check_reliable(walk: &Walk, demand: Expected) -> CheckResult {
    let mut run = WalkRun::new(walk);
    run.run();
    check_drained(&run)?;
    check_credits(walk, &run)?;
    for index in 0..run.directions.len() {
        let outcome = run.outcome(index);
        let direction = &run.directions[index];
        // An error in one direction eventually ends the other one, and a responder does not repeat a lost NAK.
        let is_lossless = walk.faults.iter().all(|fault| matches!(fault.action, Action::Duplicate { .. }));
        let is_ended = run.directions[index ^ 1].first_failing().is_some()
            || direction.first_failing().is_some() && !is_lossless;
        let demand = if is_ended { Expected::OrderedFailure } else { demand };
        check_direction(walk, index, direction, &outcome, demand)
            .map_err(|error| TestCaseError::fail(format!("direction {index}: {error}")))?;
    }
    Ok(())
}

/// In SQD, a queue pair starts no work request.
fn check_drained(run: &WalkRun<'_>) -> CheckResult {
    for (direction, range) in &run.drains {
        prop_assert_eq!(run.fetched(*direction, range.clone()), 0, "direction {} in SQD", direction);
    }
    Ok(())
}

/// With end-to-end credits, a requester is at most one message ahead of the receives that its peer has posted. A shared
/// receive queue gives no credits.
fn check_credits(walk: &Walk, run: &WalkRun<'_>) -> CheckResult {
    if !walk.credits || walk.shared_receives {
        return Ok(());
    }
    for direction in 0..run.directions.len() {
        for (place, posted) in run.receives_when_sent(direction) {
            prop_assert!(place <= posted, "direction {}: message {}, {} receives", direction, place, posted);
        }
    }
    Ok(())
}

fn check_direction(
    walk: &Walk,
    index: usize,
    direction: &DirectionModel,
    outcome: &Outcome,
    demand: Expected,
) -> CheckResult {
    let done = check_sends(direction, outcome)?;
    if demand == Expected::Success {
        let wanted = direction.first_failing().unwrap_or(direction.requests.len());
        prop_assert_eq!(done, wanted, "{:?}", outcome.sends);
        let wanted = direction.requests.get(wanted);
        match wanted {
            // The peer executes a READ or an atomic, and what follows, before the requester looks at its lkeys.
            Some(request) if request.fails_at_response() => {
                prop_assert!((request.end_psn()..=direction.packets()).contains(&outcome.executed_psns));
            }
            _ => prop_assert_eq!(
                outcome.executed_psns,
                wanted.map_or(direction.packets(), |request| request.first_psn)
            ),
        }
        let failed =
            outcome.sends.iter().map(|completion| completion.status).find(|status| !status.is_success());
        prop_assert_eq!(failed, wanted.and_then(|request| request.failure));
    }
    let acknowledged = direction.requests[..done].last().map_or(0, |request| request.end_psn());
    prop_assert!(acknowledged <= outcome.executed_psns, "a request succeeded that was not executed");
    // go-back-0 restarts a message but does not undo its stores.
    let touched = outcome.stored.iter().map(|(psn, _)| psn + 1).max().unwrap_or(0);
    let reached = outcome.executed_psns.max(touched);
    let mut state = direction.state_after(index, |psn| psn < reached);
    prop_assert!(outcome.target == state.target, "the target differs from the model");
    let received = match reached == outcome.executed_psns {
        true => std::mem::take(&mut state.received),
        false => direction.state_after(index, |psn| psn < outcome.executed_psns).received,
    };
    check_receives(walk, direction, outcome, &received)?;
    check_once(walk, direction, outcome)?;
    for request in direction.requests[..done].iter().filter(|request| request.request.verb != Verb::Send) {
        for (at, length) in &request.sges {
            let range = *at as usize..*at as usize + *length as usize;
            prop_assert!(
                outcome.sender[range.clone()] == state.sender[range],
                "{:?} brought other bytes",
                request
            );
        }
    }
    Ok(())
}

/// Successes in order, then one failure, then everything else flushed in order. Returns the successes.
fn check_sends(direction: &DirectionModel, outcome: &Outcome) -> Result<usize, TestCaseError> {
    let sends = &outcome.sends;
    let failure = sends.iter().find(|completion| !completion.status.is_success());
    let done = failure.map_or(direction.requests.len(), |completion| completion.wr_id as usize);
    let signalled = (0..done).filter(|number| direction.requests[*number].request.signalled);
    let expected: Vec<u64> =
        signalled.chain(done..direction.requests.len()).map(|number| number as u64).collect();
    let found: Vec<u64> = sends.iter().map(|completion| completion.wr_id).collect();
    prop_assert_eq!(found, expected, "{:?} {:?}", sends, outcome.sender_state);
    for completion in sends {
        let allowed: &[CompletionStatus] = match completion.wr_id as usize {
            id if id < done => &[CompletionStatus::Success],
            id if id == done => match direction.requests[id].failure {
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

/// Every executed message consumed the next receive. If the queue pair failed, the others are flushed in order; a shared
/// receive queue keeps them, but for the one of a message in progress.
fn check_receives(
    walk: &Walk,
    direction: &DirectionModel,
    outcome: &Outcome,
    received: &[(usize, Vec<u8>)],
) -> CheckResult {
    let most = match outcome.receiver_state {
        QpState::Error if walk.shared_receives => received.len() + 1,
        QpState::Error => direction.receives,
        _ => received.len(),
    };
    let ids: Vec<u64> = outcome.receives.iter().map(|completion| completion.wr_id).collect();
    if walk.shared_receives {
        prop_assert!((received.len()..=most).contains(&ids.len()), "{:?}", outcome.receives);
        prop_assert!(ids.is_sorted_by(|a, b| a < b), "{:?}", ids);
    } else {
        prop_assert_eq!(ids, (0..most as u64).collect::<Vec<_>>(), "{:?}", outcome.receives);
    }
    // A WRITE of one packet with immediate and a bad rkey fails its receive.
    let failing = direction.first_failing().map(|number| &direction.requests[number]);
    let fails_receive = failing.is_some_and(|request| {
        request.failure == Some(CompletionStatus::RemoteAccessError)
            && request.consumes_receive()
            && request.packets == 1
    });
    for (number, completion) in outcome.receives.iter().enumerate() {
        match received.get(number) {
            Some((request, data)) => check_received(direction, outcome, number, *request, data, 0)?,
            None => {
                let is_failed = fails_receive
                    && number == received.len()
                    && completion.status == CompletionStatus::LocalAccessError;
                prop_assert!(is_failed || completion.status == CompletionStatus::WrFlushError);
            }
        }
    }
    Ok(())
}

fn check_received(
    direction: &DirectionModel,
    outcome: &Outcome,
    number: usize,
    request: usize,
    data: &[u8],
    header: u32,
) -> CheckResult {
    let completion = &outcome.receives[number];
    let request = &direction.requests[request];
    prop_assert_eq!(completion.status, CompletionStatus::Success);
    prop_assert_eq!(completion.byte_len, request.length + header);
    prop_assert_eq!(completion.imm_data, request.immediate.unwrap_or(0));
    let at = header as usize;
    prop_assert!(
        outcome.receive_memory[number][at..at + data.len()] == *data,
        "{:?} received other bytes",
        completion
    );
    Ok(())
}

/// Stores happen once and in PSN order. go-back-0 repeats the stores of an incomplete message.
fn check_once(walk: &Walk, direction: &DirectionModel, outcome: &Outcome) -> CheckResult {
    let stored = &outcome.stored;
    if walk.recovery == Recovery::GoBack0 {
        for request in &direction.requests {
            let (last, range) = (request.end_psn() - 1, request.first_psn..request.end_psn());
            let Some(end) = stored.iter().position(|(psn, _)| *psn == last) else { continue };
            let later = stored[end..].iter().filter(|(psn, _)| *psn != last && range.contains(psn));
            prop_assert_eq!(later.count(), 0, "{:?} was executed again", request);
        }
        return Ok(());
    }
    for pair in stored.windows(2) {
        let ((earlier, at), (later, next)) = (pair[0], pair[1]);
        prop_assert!(earlier < later || earlier == later && at < next, "{:?}", pair);
    }
    Ok(())
}

/// UC: only complete messages complete, once and in order.
pub fn check_unreliable(walk: &Walk) -> CheckResult {
    let mut run = WalkRun::new(walk);
    run.run();
    check_drained(&run)?;
    // A duplicate or delayed message is received again: only messages in order are received once.
    let in_line = |fault: &RandomFault| {
        !matches!(fault.action, Action::Reorder { .. } | Action::Delay { .. } | Action::Duplicate { .. })
    };
    let is_straight = walk.faults.iter().all(in_line);
    for index in 0..run.directions.len() {
        let outcome = run.outcome(index);
        let direction = &run.directions[index];
        prop_assert_eq!(check_sends(direction, &outcome)?, direction.requests.len());
        prop_assert_eq!(outcome.receiver_state, QpState::ReadyToSend);
        let delivered = check_delivered(walk, direction, &outcome, 0, index)?;
        if !is_straight {
            continue;
        }
        check_once(walk, direction, &outcome)?;
        let executed = |psn| outcome.stored.iter().any(|(stored, _)| *stored == psn);
        let state = direction.state_after(index, executed);
        prop_assert!(outcome.target == state.target, "the target differs from the packets");
        prop_assert!(delivered.is_sorted_by(|a, b| a < b), "{:?}", delivered);
    }
    Ok(())
}

/// UD: each datagram at most once unless the link duplicated it, in order unless the link reordered it.
pub fn check_datagrams(walk: &Walk) -> CheckResult {
    let mut run = WalkRun::new(walk);
    run.run();
    check_drained(&run)?;
    let is_straight = |action: &Action| !matches!(action, Action::Reorder { .. } | Action::Delay { .. });
    for index in 0..run.directions.len() {
        let outcome = run.outcome(index);
        let direction = &run.directions[index];
        prop_assert_eq!(check_sends(direction, &outcome)?, direction.requests.len());
        let delivered = check_delivered(walk, direction, &outcome, GRH_BYTES, index)?;
        for request in 0..direction.requests.len() {
            let times = delivered.iter().filter(|number| **number == request).count() as u64;
            prop_assert!(times <= 1 + outcome.copies, "{} was delivered {} times", request, times);
        }
        if walk.faults.iter().all(|fault| is_straight(&fault.action)) {
            prop_assert!(delivered.is_sorted(), "{:?}", delivered);
        }
    }
    Ok(())
}

/// The requests that consumed a receive, in order of their completions.
fn check_delivered(
    walk: &Walk,
    direction: &DirectionModel,
    outcome: &Outcome,
    header: u32,
    index: usize,
) -> Result<Vec<usize>, TestCaseError> {
    let sender = direction.initial_sender(index);
    let mut delivered = Vec::new();
    for (number, completion) in outcome.receives.iter().enumerate() {
        prop_assert!(completion.wr_id == number as u64 || walk.shared_receives);
        let request = completion.imm_data as usize - 1;
        let is_send = direction.requests[request].request.verb == Verb::Send;
        let data = if is_send { direction.data(&direction.requests[request], &sender) } else { Vec::new() };
        check_received(direction, outcome, number, request, &data, header)?;
        delivered.push(request);
    }
    Ok(delivered)
}
