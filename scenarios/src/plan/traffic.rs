//! Upper bounds of the traffic of a plan, which show that a rule can never fire.

use super::{FlowKind, FlowPlan, PairPlan, QpPlan, StepAction, StepPlan, WorkOperation};
use softhca_engine::QpType;
use softhca_fabric::{PacketClass, PacketClasses};
use std::collections::BTreeMap;

/// The requests of one queue pair.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QpTraffic {
    /// Number of PSNs of its requests; none if unlimited.
    pub packets: Option<u64>,
    /// Number of messages.
    pub messages: Option<u64>,
    /// Number of packets of its longest message.
    pub max_packets: u64,
    pub sends: bool,
    pub writes: bool,
    pub reads: bool,
    pub atomics: bool,
    pub datagrams: bool,
    /// Some datagrams go to multicast groups, and so to every host.
    pub to_multicast: bool,
    /// The peer acknowledges requests.
    pub is_reliable: bool,
}

impl QpTraffic {
    fn is_empty(&self) -> bool {
        self.packets == Some(0)
    }

    /// Whether the queue pair can send requests of these classes.
    pub fn may_send(&self, classes: PacketClasses) -> bool {
        let has = |class| classes.contains(class);
        !self.is_empty()
            && (self.sends && has(PacketClass::Send)
                || self.writes && has(PacketClass::Write)
                || self.reads && has(PacketClass::ReadRequest)
                || self.atomics && has(PacketClass::Atomic)
                || self.datagrams && has(PacketClass::Datagram))
    }

    /// Whether the queue pair can receive responses of these classes.
    pub fn may_be_answered(&self, classes: PacketClasses) -> bool {
        let has = |class| classes.contains(class);
        if self.is_empty() || !self.is_reliable {
            return false;
        }
        match classes {
            PacketClasses::Only(PacketClass::ReadResponse) => self.reads,
            PacketClasses::Only(PacketClass::AtomicResponse) => self.atomics,
            PacketClasses::Responses | PacketClasses::Naks => true,
            PacketClasses::Only(PacketClass::Nak(_)) => true,
            _ => has(PacketClass::Ack) || has(PacketClass::RnrNak),
        }
    }
}

/// The traffic of every queue pair.
#[derive(Clone, Debug, Default)]
pub(super) struct TrafficSummary {
    traffic: BTreeMap<usize, QpTraffic>,
    /// External programs generate the traffic.
    has_external_programs: bool,
}

impl TrafficSummary {
    pub fn new(
        qps: &[QpPlan],
        pairs: &[PairPlan],
        steps: &[StepPlan],
        flows: &[FlowPlan],
        is_open: bool,
    ) -> TrafficSummary {
        let mut reach = TrafficSummary { traffic: BTreeMap::new(), has_external_programs: is_open };
        if is_open {
            return reach;
        }
        for (index, qp) in qps.iter().enumerate() {
            let is_reliable = pairs[qp.pair].kind == QpType::Rc;
            let silent =
                QpTraffic { packets: Some(0), messages: Some(0), is_reliable, ..QpTraffic::default() };
            reach.traffic.insert(index, silent);
        }
        for step in steps {
            if let StepAction::Post(work) = &step.action {
                let pair = &pairs[qps[step.qp].pair];
                reach.add(step.qp, pair, work.operation, work.bytes, Some(u64::from(step.repeat)));
                reach.traffic.entry(step.qp).or_default().to_multicast |= work.group.is_some();
            }
        }
        for flow in flows {
            let pair = &pairs[qps[flow.qp].pair];
            let jobs: &[WorkOperation] = match &flow.kind {
                FlowKind::Uniform(job) => &[*job],
                FlowKind::PingPong => &[WorkOperation::Send { immediate: None }],
                FlowKind::KeyValue { .. } => &[WorkOperation::Write { immediate: None }, WorkOperation::Read],
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

    fn add(&mut self, qp: usize, pair: &PairPlan, job: WorkOperation, bytes: u32, times: Option<u64>) {
        let traffic = self.traffic.entry(qp).or_default();
        let length = u64::from(bytes.div_ceil(pair.mtu.bytes())).max(1);
        let more = |sum: Option<u64>, each: u64| Some(sum?.saturating_add(each.saturating_mul(times?)));
        traffic.packets = more(traffic.packets, length);
        traffic.messages = more(traffic.messages, 1);
        traffic.max_packets = traffic.max_packets.max(length);
        match job {
            WorkOperation::Send { .. } if pair.kind.is_datagram() => traffic.datagrams = true,
            WorkOperation::Send { .. } => traffic.sends = true,
            WorkOperation::Write { .. } => traffic.writes = true,
            WorkOperation::Read => traffic.reads = true,
            WorkOperation::CompareSwap { .. } | WorkOperation::FetchAdd { .. } => traffic.atomics = true,
        }
    }

    /// The traffic of a queue pair; none if external programs generate it.
    pub fn of(&self, qp: usize) -> Option<&QpTraffic> {
        if self.has_external_programs { None } else { self.traffic.get(&qp) }
    }
}
