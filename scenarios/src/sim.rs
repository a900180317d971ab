//! Plans in virtual time.

use crate::evaluate::{self, RunResults};
use crate::executor::Executor;
use crate::hosts::{Hosts, build_fabric};
use crate::plan::Plan;
use crate::recorder::Recording;
use crate::report::Outcome;
use softhca::sim::SimulatedFabric;
use softhca_engine::Instant;
use softhca_fabric::Fault;

/// The longest virtual time of a run without a `duration`.
const MAX_VIRTUAL_TIME_NS: u64 = 600_000_000_000;

/// Executes a plan in virtual time and evaluates it.
pub fn simulate(plan: &Plan, recording: Recording) -> Outcome {
    trace_faults(plan, recording).0
}

/// Runs a plan and returns all packets that faults changed or dropped, with their links.
pub(crate) fn trace_faults(plan: &Plan, recording: Recording) -> (Outcome, Vec<(usize, Fault)>) {
    run_plan(plan, recording).unwrap_or_else(|error| (Outcome::failed_to_run(error), Vec::new()))
}

fn run_plan(plan: &Plan, recording: Recording) -> Result<(Outcome, Vec<(usize, Fault)>), String> {
    if !plan.commands.is_empty() {
        return Err("the file starts programs, which run in real time only: use `--on udp`".into());
    }
    plan.check_has_queue_pairs()?;
    let (fabric, devices) = build_fabric(plan);
    let mut hosts = Hosts::new(plan, devices, Some(fabric.clone()))?;
    hosts.start_recording(recording).map_err(|error| error.to_string())?;
    let mut executor = Executor::new(plan);
    let deadline_ns = plan.heal.as_ref().map(|heal| heal.deadline_ns);
    let limit = plan.duration_ns.or(deadline_ns);
    let timed_out =
        run(&fabric, &mut hosts, &mut executor, limit.unwrap_or(MAX_VIRTUAL_TIME_NS)) && limit.is_none();
    let mut recorder = hosts.stop_recording().expect("the hosts record since they were created");
    fabric.with(|world| {
        debug_assert!(world.frame_counters().is_balanced(), "the world checks this itself");
        for (id, switch) in world.switches() {
            let ports = switch.links().filter_map(|(link, _)| switch.counters(link));
            let max_queue_bytes = ports.map(|port| port.max_queue_bytes).max().unwrap_or(0);
            recorder.record.set_max_queue_bytes(id, max_queue_bytes);
        }
    });
    let end = hosts.final_state(now_ns(&fabric), timed_out);
    let results = RunResults { record: &recorder.record, log: &executor.log, end: &end };
    let mut outcome =
        evaluate::evaluate(plan, &results, &|qp, offset, length| hosts.read_memory(qp, offset, length));
    let faults = recorder.add_to(&mut outcome);
    Ok((outcome, faults))
}

fn now_ns(fabric: &SimulatedFabric) -> u64 {
    fabric.with(|world| world.now().nanos())
}

/// Runs until no event is left or the limit is reached. Returns whether events are left.
fn run(fabric: &SimulatedFabric, hosts: &mut Hosts<'_>, executor: &mut Executor<'_>, limit_ns: u64) -> bool {
    loop {
        while executor.deliver_events(|| now_ns(fabric), hosts) {}
        if executor.log.error.is_some() {
            return false;
        }
        let network_at = fabric.with(|world| world.next_event_at()).map(Instant::nanos);
        let program_at = executor.next_due();
        let Some(next) = [network_at, program_at].into_iter().flatten().min() else { return false };
        if next > limit_ns {
            fabric.with(|world| world.run_until(Instant::from_nanos(limit_ns)));
            return true;
        }
        if network_at == Some(next) {
            fabric.with(|world| world.step());
        } else {
            // The network has no earlier event, so this only advances the clock.
            fabric.with(|world| world.run_until(Instant::from_nanos(next)));
            executor.run_due(next, hosts);
        }
    }
}
