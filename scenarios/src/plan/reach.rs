//! What traffic a plan has at most: enough to see that a rule can never fire.

use super::{Deed, FlowKind, FlowPlan, Job, PairPlan, QpPlan, StepPlan};
use softhca_engine::QpKind;
use softhca_fabric::{Class, Classes};
use std::collections::BTreeMap;

/// The requests of one queue pair.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Traffic {
    /// PSNs that its requests take; none if there is no end to them.
    pub packets: Option<u64>,
    /// Messages.
    pub messages: Option<u64>,
    /// Packets of its longest request, and of its longest answer.
    pub longest: u64,
    pub sends: bool,
    pub writes: bool,
    pub reads: bool,
    pub atomics: bool,
    pub datagrams: bool,
    /// Some of it goes to multicast groups, and so to every host.
    pub to_groups: bool,
    /// Somebody acknowledges.
    pub is_reliable: bool,
}

impl Traffic {
    fn is_silent(&self) -> bool {
        self.packets == Some(0)
    }

    /// Whether requests of these classes may ever leave the queue pair.
    pub fn asks(&self, classes: Classes) -> bool {
        let has = |class| classes.contains(class);
        !self.is_silent()
            && (self.sends && has(Class::Send)
                || self.writes && has(Class::Write)
                || self.reads && has(Class::ReadRequest)
                || self.atomics && has(Class::Atomic)
                || self.datagrams && has(Class::Datagram))
    }

    /// Whether answers of these classes may ever come back.
    pub fn is_answered(&self, classes: Classes) -> bool {
        let has = |class| classes.contains(class);
        if self.is_silent() || !self.is_reliable {
            return false;
        }
        match classes {
            Classes::Only(Class::ReadResponse) => self.reads,
            Classes::Only(Class::AtomicResponse) => self.atomics,
            Classes::Answers | Classes::Naks => true,
            Classes::Only(Class::Nak(_)) => true,
            _ => has(Class::Ack) || has(Class::ReceiverNotReady),
        }
    }
}

/// The traffic of every queue pair.
#[derive(Clone, Debug, Default)]
pub(super) struct Reach {
    traffic: BTreeMap<usize, Traffic>,
    /// Real programs decide.
    is_open: bool,
}

impl Reach {
    pub fn new(
        qps: &[QpPlan],
        pairs: &[PairPlan],
        steps: &[StepPlan],
        flows: &[FlowPlan],
        is_open: bool,
    ) -> Reach {
        let mut reach = Reach { traffic: BTreeMap::new(), is_open };
        if is_open {
            return reach;
        }
        for (index, qp) in qps.iter().enumerate() {
            let is_reliable = pairs[qp.pair].kind == QpKind::Rc;
            let silent = Traffic { packets: Some(0), messages: Some(0), is_reliable, ..Traffic::default() };
            reach.traffic.insert(index, silent);
        }
        for step in steps {
            if let Deed::Post(work) = &step.deed {
                let pair = &pairs[qps[step.qp].pair];
                reach.add(step.qp, pair, work.job, work.bytes, Some(u64::from(step.repeat)));
                reach.traffic.entry(step.qp).or_default().to_groups |= work.group.is_some();
            }
        }
        for flow in flows {
            let pair = &pairs[qps[flow.qp].pair];
            let jobs: &[Job] = match &flow.kind {
                FlowKind::Same(job) => &[*job],
                FlowKind::PingPong => &[Job::Send { immediate: None }],
                FlowKind::KeyValue { .. } => &[Job::Write { immediate: None }, Job::Read],
            };
            for job in jobs {
                reach.add(flow.qp, pair, *job, flow.bytes, flow.count);
            }
            if flow.kind == FlowKind::PingPong {
                reach.add(qps[flow.qp].peer, pair, jobs[0], flow.bytes, flow.count);
            }
        }
        reach
    }

    fn add(&mut self, qp: usize, pair: &PairPlan, job: Job, bytes: u32, times: Option<u64>) {
        let traffic = self.traffic.entry(qp).or_default();
        let length = u64::from(bytes.div_ceil(pair.mtu.bytes())).max(1);
        let more = |sum: Option<u64>, each: u64| Some(sum?.saturating_add(each.saturating_mul(times?)));
        traffic.packets = more(traffic.packets, length);
        traffic.messages = more(traffic.messages, 1);
        traffic.longest = traffic.longest.max(length);
        match job {
            Job::Send { .. } if pair.kind.is_datagram() => traffic.datagrams = true,
            Job::Send { .. } => traffic.sends = true,
            Job::Write { .. } => traffic.writes = true,
            Job::Read => traffic.reads = true,
            Job::CompareSwap { .. } | Job::FetchAdd { .. } => traffic.atomics = true,
        }
    }

    /// The traffic of a queue pair; none where real programs decide.
    pub fn of(&self, qp: usize) -> Option<&Traffic> {
        if self.is_open { None } else { self.traffic.get(&qp) }
    }
}
