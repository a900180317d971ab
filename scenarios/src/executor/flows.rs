//! Flows: the next work request of a flow, and the rounds of a ping-pong.

use super::{Executor, ObservedCompletion, Origin};
use crate::hosts::Hosts;
use crate::plan::{FlowKind, FlowPlan, WorkOperation, WorkRequest};
use crate::schedule::Work;
use softhca_fabric::Seed;
use softhca_types::Completion;

impl Executor<'_> {
    /// Posts messages of a flow up to its depth.
    pub(super) fn post_flow(&mut self, now_ns: u64, index: usize, hosts: &mut Hosts<'_>) {
        let plan = self.plan;
        let flow = &plan.flows[index];
        while !self.log.progress[index].is_finished && !hosts.program_of(flow.qp).is_killed {
            let progress = self.log.progress[index];
            if flow.count.is_some_and(|count| progress.posted >= count) {
                return;
            }
            if flow.until_ns.is_some_and(|until| now_ns > until) {
                // Outstanding messages can still complete.
                self.log.progress[index].is_finished = true;
                return;
            }
            if progress.outstanding >= flow.depth {
                return;
            }
            if progress.next_at_ns > now_ns {
                if !progress.is_scheduled {
                    self.log.progress[index].is_scheduled = true;
                    self.schedule.add_work(progress.next_at_ns, Work::Flow(index));
                }
                return;
            }
            let work = self.work_request(index, progress.posted);
            let posted = self.post(now_ns, flow.qp, &work, Origin::Flow(index), hosts);
            let progress = &mut self.log.progress[index];
            progress.posted += 1;
            progress.next_at_ns = now_ns + flow.interval_ns;
            match posted {
                true => progress.outstanding += 1,
                false => progress.is_finished = true,
            }
        }
    }

    /// The n-th work request of a flow.
    fn work_request(&self, index: usize, n: u64) -> WorkRequest {
        let flow = &self.plan.flows[index];
        let (job, offset) = match flow.kind {
            FlowKind::Uniform(job) => (job, 0),
            FlowKind::PingPong => (WorkOperation::Send { immediate: None }, 0),
            FlowKind::KeyValue { keys, read_per_billion: reads } => {
                let seed = Seed(self.schedule.seed);
                let words = |what| [0x6b76, index as u64, n, what];
                let key = seed.below(keys, &words(0));
                let job = if seed.happens(reads, &words(1)) {
                    WorkOperation::Read
                } else {
                    WorkOperation::Write { immediate: None }
                };
                (job, key * u64::from(flow.bytes))
            }
        };
        let bytes = if matches!(job, WorkOperation::FetchAdd { .. }) { 8 } else { flow.bytes };
        WorkRequest { offset, remote_offset: offset, ..WorkRequest::new(job, bytes) }
    }

    /// Processes the completion of a message.
    pub(super) fn on_flow_completion(
        &mut self,
        now_ns: u64,
        flow: usize,
        success: bool,
        hosts: &mut Hosts<'_>,
    ) {
        let progress = &mut self.log.progress[flow];
        progress.outstanding = progress.outstanding.saturating_sub(1);
        match success {
            true => progress.done += 1,
            false => progress.is_finished = true,
        }
        self.post_flow(now_ns, flow, hosts);
    }

    /// The ping-pong flow of a queue pair.
    pub(super) fn ping_pong_of(&self, qp: usize) -> Option<usize> {
        let peer = self.plan.qps[qp].peer;
        let takes_part = |flow: &FlowPlan| flow.qp == qp || flow.qp == peer;
        self.plan.flows.iter().position(|flow| flow.kind == FlowKind::PingPong && takes_part(flow))
    }

    /// Processes a received ping-pong message: the peer replies, the initiator starts the next round.
    pub(super) fn on_ping_pong_receive(
        &mut self,
        now_ns: u64,
        qp: usize,
        completion: &Completion,
        hosts: &mut Hosts<'_>,
    ) {
        let Some(flow) = self.ping_pong_of(qp) else { return };
        if self.plan.flows[flow].qp == qp {
            let progress = self.log.progress[flow];
            // The latency of a round starts with its first message.
            let posted_ns = progress.next_at_ns;
            let bytes = self.plan.flows[flow].bytes;
            let origin = Some(Origin::Flow(flow));
            self.log.completions.push(ObservedCompletion {
                time_ns: now_ns,
                qp,
                completion: *completion,
                origin,
                posted_ns,
                bytes,
            });
            self.on_flow_completion(now_ns, flow, true, hosts);
        } else {
            let work = self.work_request(flow, 0);
            self.post(now_ns, qp, &work, Origin::PingPongReply(flow), hosts);
        }
    }
}
