//! The devices of a plan and what its programs have on them, through the Rust API: the same in virtual and in real
//! time.

mod cm;
mod cm_connections;
mod fabric;
mod multicast;
mod multicast_groups;

pub use cm_connections::CmEvent;
pub(crate) use fabric::build_fabric;

use crate::plan::{Change, Continuation, PairPlan, Plan, WorkRequest};
use crate::quantity::Time;
use crate::recorder::{Recorder, Recording};
use crate::schedule::{Effect, HostControl};
use crate::spec::Errno;
use crate::verbs::{DATAGRAM_QKEY, MAX_PATTERN_BYTES, fill_pattern, region_length, send_request};
use cm_connections::CmConnections;
use multicast_groups::MulticastGroups;
use softhca::cm::RDMA_UDP_QKEY;
use softhca::{
    AddressHandle, AddressVector, CompletionQueue, ConnectOptions, Context, Device, Error, MemoryRegion,
    ModifyQp, ProtectionDomain, QpState, QueuePair, ReceiveRequest, SendRequest, sim::SimulatedFabric,
    trace::SharedSink,
};
use softhca_engine::{Instant, Wait};
use softhca_fabric::{Endpoint, Flow, HostId, LinkId, LinkState, Rule, RuleCounters, RuleId};
use softhca_trace::NameTable;
use softhca_types::{AccessFlags, Completion, Counters, FaultTrigger, InjectedEvent, VerbsError};
use softhca_wire::{Gid, Psn, Qpn, QueueKey, RemoteKey};
use std::io;
use std::net::IpAddr;
use std::time::Duration;

/// The least ACK timeout on real sockets, as an exponent: half a second. On a busy machine a shorter one causes
/// retransmissions.
const MIN_REAL_ACK_TIMEOUT: u8 = 17;

/// A queue pair of the plan on its device.
struct HostQueuePair {
    domain: ProtectionDomain,
    /// None if it is destroyed.
    pair: Option<QueuePair>,
    region: MemoryRegion,
    cq: CompletionQueue,
    /// The destination of datagrams.
    target: Option<(AddressHandle, Qpn, QueueKey)>,
    qpn: Qpn,
    sq_psn: Psn,
    /// Address, key and area size of the region as it was registered.
    memory: (u64, RemoteKey, u64),
}

/// The devices and rules at the end of a run.
pub struct FinalState {
    /// The counters of each rule, for each place where it is installed.
    pub rule_counters: Vec<(RuleId, RuleCounters)>,
    pub counters: Vec<Counters>,
    /// The states of all queue pairs; none for those that are destroyed or unknown.
    pub states: Vec<Option<QpState>>,
    /// What the posted requests of each queue pair wait for.
    pub waits: Vec<Option<String>>,
    pub ended_ns: u64,
    /// The run did not end by itself.
    pub timed_out: bool,
    /// Expectations about time are not checked.
    pub in_real_time: bool,
}

/// The program of a host, as faults change it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProgramState {
    pub stalled_until: u64,
    pub no_receives_until: u64,
    pub receive_delay: u64,
    pub is_killed: bool,
}

/// The devices of all hosts. Queue pairs and hosts are indices in the plan.
pub struct Hosts<'p> {
    plan: &'p Plan,
    devices: Vec<Device>,
    contexts: Vec<Context>,
    programs: Vec<ProgramState>,
    qps: Vec<HostQueuePair>,
    connections: CmConnections,
    multicast: MulticastGroups,
    /// The names of everything in the run.
    pub names: NameTable,
    /// The network, in virtual time.
    fabric: Option<SimulatedFabric>,
    /// The recorder of a run in virtual time, once it runs.
    recorder: Option<SharedSink<Recorder>>,
    /// Events and faults of a run in real time that faults may wait for.
    pub(crate) triggers: Vec<FaultTrigger>,
    has_waiting_faults: bool,
}

impl<'p> Hosts<'p> {
    /// Creates and connects the queue pairs of a plan on these devices.
    pub(crate) fn new(
        plan: &'p Plan,
        devices: Vec<Device>,
        fabric: Option<SimulatedFabric>,
    ) -> Result<Hosts<'p>, String> {
        for (host, device) in devices.iter().enumerate() {
            if let Some(faults) = plan.program_faults(host) {
                device.set_program_faults(faults);
            }
        }
        let contexts = devices.iter().map(Device::open).collect();
        let mut hosts = Hosts {
            plan,
            devices,
            contexts,
            programs: vec![ProgramState::default(); plan.hosts.len()],
            qps: Vec::new(),
            connections: CmConnections::default(),
            multicast: MulticastGroups::default(),
            names: NameTable::new(),
            fabric,
            recorder: None,
            triggers: Vec::new(),
            has_waiting_faults: plan.has_waiting_faults(),
        };
        hosts.add_names();
        for qp in 0..plan.qps.len() {
            if usize::try_from(region_length(plan.pair_of(qp).area_bytes)).is_err() {
                return Err(format!("{}: its memory is too large for this machine", plan.qps[qp].name));
            }
            hosts.create(qp).map_err(|error| format!("{}: cannot create it: {error}", plan.qps[qp].name))?;
        }
        for pair in &plan.pairs {
            hosts
                .connect_pair(pair)
                .map_err(|error| format!("{}: cannot connect it: {error}", plan.qps[pair.qps[0]].name))?;
        }
        hosts.multicast = MulticastGroups::new(plan, &hosts)?;
        hosts.install_rules();
        Ok(hosts)
    }

    /// Names the hosts, switches, links and rules of the plan.
    fn add_names(&mut self) {
        for (index, host) in self.plan.hosts.iter().enumerate() {
            self.names.add_host(HostId(index as u32), &host.name, self.devices[index].address());
        }
        for (index, switch) in self.plan.switches.iter().enumerate() {
            self.names.add_switch(softhca_fabric::SwitchId(index as u32), &switch.name);
        }
        for (index, link) in self.plan.links.iter().enumerate() {
            self.names.add_link(LinkId(index as u32), link.ends);
        }
        for fault in &self.plan.faults {
            self.names.add_rule(fault.id, &fault.name);
        }
        for link_rule in &self.plan.link_rules {
            self.names.add_rule(link_rule.rule.id, link_rule.name);
        }
    }

    fn create(&mut self, qp: usize) -> Result<(), Error> {
        let pair = self.plan.pair_of(qp);
        let context = &self.contexts[self.plan.qps[qp].host];
        let domain = context.allocate_protection_domain()?;
        let length = region_length(pair.area_bytes);
        let region = domain.allocate_region(length, pair.access | AccessFlags::LOCAL_WRITE)?;
        if pair.area_bytes <= MAX_PATTERN_BYTES {
            region.write_at(0, &fill_pattern(qp, pair.area_bytes as usize));
        }
        let cq = context.create_completion_queue(pair.cqe)?;
        let mut builder = domain
            .create_queue_pair(pair.kind, &cq)
            .max_send_wr(pair.max_send_wr)
            .max_recv_wr(pair.posted_receives.max(128));
        if pair.uses_cm && pair.kind.is_datagram() {
            builder = builder.sq_psn(Psn::new(0));
        } else if self.fabric.is_some() {
            builder = builder.sq_psn(pair.sq_psns[usize::from(pair.qps[1] == qp)]);
        }
        let created = builder.build()?;
        self.qps.push(HostQueuePair {
            qpn: created.qpn(),
            sq_psn: created.endpoint().psn,
            memory: (region.address(), region.rkey(), pair.area_bytes),
            pair: Some(created),
            region,
            cq,
            target: None,
            domain,
        });
        self.names.add_queue_pair(self.endpoint(qp), &self.plan.qps[qp].name);
        Ok(())
    }

    /// Connects a pair, or prepares it for the connection manager.
    fn connect_pair(&mut self, plan: &PairPlan) -> Result<(), Error> {
        let [a, b] = plan.qps;
        let [first, second] = [self.pair(a)?, self.pair(b)?];
        if plan.kind.is_datagram() {
            let qkey = if plan.uses_cm { RDMA_UDP_QKEY } else { DATAGRAM_QKEY };
            first.start_ud(qkey)?;
            second.start_ud(qkey)?;
        } else if plan.uses_cm {
            // As `rdma_create_qp` does: receives can be posted.
            let init =
                ModifyQp::default().state(QpState::Init).pkey_index(0).port(1).access_flags(plan.access);
            first.modify(&init)?;
            second.modify(&init)?;
        } else {
            first.connect_both(&second, &self.connect_options(plan))?;
        }
        if plan.uses_cm {
            return Ok(());
        }
        for [here, there] in [[a, b], [b, a]] {
            let peer = self.endpoint(there);
            if plan.kind.is_datagram() {
                let address_vector = AddressVector {
                    traffic_class: plan.traffic_class,
                    ..AddressVector::to(Gid::from(peer.address))
                };
                let handle = self.qps[here].domain.create_address_handle(address_vector)?;
                self.qps[here].target = Some((handle, peer.qpn, DATAGRAM_QKEY));
            }
            self.register_flow(here, (!plan.kind.is_datagram()).then_some(peer));
        }
        Ok(())
    }

    fn connect_options(&self, plan: &PairPlan) -> ConnectOptions {
        // Zero disables the timer, and a delay that a fault injects is compared with it.
        let keeps_timeout = self.fabric.is_some() || plan.timeout == 0 || self.plan.has_delay_faults();
        ConnectOptions {
            path_mtu: plan.mtu,
            access: plan.access,
            max_rd_atomic: plan.max_rd_atomic,
            timeout: if keeps_timeout { plan.timeout } else { plan.timeout.max(MIN_REAL_ACK_TIMEOUT) },
            retry_cnt: plan.retry_count,
            rnr_retry: plan.rnr_retry,
            min_rnr_timer: plan.min_rnr_timer,
            traffic_class: plan.traffic_class,
        }
    }

    fn install_rules(&self) {
        match &self.fabric {
            Some(fabric) => fabric::install_rules(fabric, self.plan),
            None => {
                for (host, device) in self.devices.iter().enumerate() {
                    self.plan.faults.iter().for_each(|fault| device.name_rule(fault.id, &fault.name));
                    for (name, rule) in self.plan.rules_for_host(host) {
                        if !name.is_empty() {
                            device.name_rule(rule.id, name);
                        }
                        device.add_rule(self.plan.seed, rule);
                    }
                }
            }
        }
    }

    /// The program of a queue pair.
    pub fn program_of(&self, qp: usize) -> &ProgramState {
        &self.programs[self.plan.qps[qp].host]
    }

    pub fn is_destroyed(&self, qp: usize) -> bool {
        self.qps[qp].pair.is_none()
    }

    /// The events and faults since the last call that faults may wait for.
    pub(crate) fn take_triggers(&mut self) -> Vec<FaultTrigger> {
        let mut triggers = std::mem::take(&mut self.triggers);
        if !self.has_waiting_faults {
            return Vec::new();
        }
        if let Some(recorder) = &self.recorder {
            triggers.append(&mut recorder.lock().triggers);
        }
        // A rule that only counts has no event.
        let counters = self.rule_counters();
        let fired = counters.iter().filter(|(_, counters)| counters.fired > 0);
        triggers.extend(fired.map(|(id, _)| FaultTrigger::Fault(id.0)));
        triggers
    }

    fn rule_counters(&self) -> Vec<(RuleId, RuleCounters)> {
        match &self.fabric {
            Some(fabric) => fabric::rule_counters(fabric, self.plan),
            None => {
                let rules = self.devices.iter().flat_map(Device::rules);
                rules.map(|(rule, counters)| (rule.id, counters)).collect()
            }
        }
    }

    /// A recorder for the events of these hosts.
    pub(crate) fn recorder(&self, recording: Recording) -> io::Result<Recorder> {
        let addresses = self.devices.iter().map(Device::address);
        let qps = (0..self.qps.len()).map(|qp| (self.endpoint(qp), self.qps[qp].sq_psn));
        Recorder::new(self.plan, self.names.clone(), addresses, qps, recording)
    }

    /// Starts to record the events of a run in virtual time.
    pub(crate) fn start_recording(&mut self, recording: Recording) -> io::Result<()> {
        let recorder = SharedSink::new(self.recorder(recording)?);
        if let Some(fabric) = &self.fabric {
            fabric.set_sink(recorder.clone());
            fabric::set_initial_rates(fabric, self.plan, |qp| self.qps[qp].qpn);
        }
        self.recorder = Some(recorder);
        Ok(())
    }

    /// Ends what [`Hosts::start_recording`] began.
    pub(crate) fn stop_recording(&mut self) -> Option<Recorder> {
        if let Some(fabric) = &self.fabric {
            fabric.set_sink(());
        }
        self.recorder.take()?.into_inner()
    }

    /// The queue pairs that may have completions, and the hosts that may have connection events.
    pub(crate) fn take_ready(&self) -> (Vec<usize>, Vec<usize>) {
        match &self.recorder {
            Some(recorder) => recorder.lock().take_ready(),
            None => ((0..self.qps.len()).collect(), self.connections.hosts()),
        }
    }

    /// The address and QPN of a queue pair.
    pub fn endpoint(&self, qp: usize) -> Endpoint {
        Endpoint { address: self.address(self.plan.qps[qp].host), qpn: self.qps[qp].qpn }
    }

    pub fn address(&self, host: usize) -> IpAddr {
        self.devices[host].address()
    }

    /// Registers a queue pair that is ready to send, for rules and traces.
    fn register_flow(&mut self, qp: usize, responder: Option<Endpoint>) {
        let (requester, first_psn) = (self.endpoint(qp), self.qps[qp].sq_psn);
        let flow = Flow { id: Plan::role_of(qp), requester, responder, first_psn };
        for at in [qp, self.plan.qps[qp].peer] {
            self.devices[self.plan.qps[at].host].add_flow(self.plan.seed, flow);
        }
        self.names.add_flow(&flow);
        if let Some(recorder) = &self.recorder {
            recorder.lock().add_flow(qp, &flow);
        }
    }

    fn pair(&self, qp: usize) -> Result<QueuePair, Error> {
        let (resource, number) = (softhca_engine::Resource::QueuePair, self.qps[qp].qpn.value());
        self.qps[qp].pair.clone().ok_or(VerbsError::NotFound { resource, number }.into())
    }

    pub fn poll(&self, qp: usize) -> Option<Completion> {
        match &self.fabric {
            // Time advances between polls only.
            Some(_) => self.qps[qp].cq.try_poll(),
            None => self.qps[qp].cq.poll(),
        }
    }

    /// Whether a queue pair or a connection waits for a response.
    #[cfg(feature = "udp")]
    pub fn is_outstanding(&self) -> bool {
        let waits = |qp: &HostQueuePair| {
            let snapshot = qp.pair.as_ref().and_then(|pair| pair.query().ok());
            snapshot.is_some_and(|snapshot| snapshot.outstanding > 0)
        };
        self.qps.iter().any(waits) || self.connections.is_outstanding()
    }

    /// The state of the devices at the end of a run.
    pub fn final_state(&self, ended_ns: u64, timed_out: bool) -> FinalState {
        let states = self.qps.iter().map(|qp| qp.pair.as_ref().and_then(|pair| pair.state().ok()));
        FinalState {
            rule_counters: self.rule_counters(),
            counters: self.contexts.iter().map(Context::counters).collect(),
            states: states.collect(),
            waits: (0..self.qps.len()).map(|qp| self.describe_wait(qp)).collect(),
            ended_ns,
            timed_out,
            in_real_time: self.fabric.is_none(),
        }
    }

    /// The event for which the posted requests of a queue pair wait, in words. Only a simulation knows.
    fn describe_wait(&self, qp: usize) -> Option<String> {
        let (side, host) = (&self.qps[qp], HostId(self.plan.qps[qp].host as u32));
        side.pair.as_ref()?;
        let wait = self.fabric.as_ref()?.with(|world| {
            let paused = world.paused_priorities(host);
            world.host(host).hca().wait_of(side.qpn).map(|wait| (wait, paused))
        });
        let peer = &self.plan.qps[self.plan.qps[qp].peer].name;
        let until = |until: Option<Instant>| match until {
            Some(until) => format!("until {}", Time(until.nanos())),
            None => "without a timeout".into(),
        };
        Some(match wait? {
            (Wait::Response { psn, until: deadline }, _) => {
                format!("a response of {peer} to PSN +{}, {}", psn.since(side.sq_psn), until(deadline))
            }
            (Wait::Receive { psn, until: retry }, _) => {
                format!(
                    "{peer} to post a receive for PSN +{}, {}",
                    psn.since(side.sq_psn),
                    until(Some(retry))
                )
            }
            (Wait::Transmission, 0) => "permission to send".into(),
            (Wait::Transmission, paused) => {
                format!("the end of the pause of its port (priorities {paused:#010b})")
            }
        })
    }

    pub fn read_memory(&self, qp: usize, offset: u64, length: u64) -> Vec<u8> {
        self.qps[qp].region.read_at(offset, length)
    }

    pub fn post(&mut self, qp: usize, id: u64, work: &WorkRequest) -> Result<(), Errno> {
        let (side, peer) = (&self.qps[qp], &self.qps[self.plan.qps[qp].peer]);
        let Some(pair) = &side.pair else { return Err(Errno::EINVAL) };
        let (operation, flags, sge) = send_request(work, side.memory, peer.memory);
        let (inline, gather) = (work.inline.then(|| self.inline_data(qp, &sge)), [sge]);
        let gather: &[_] = if work.bytes == 0 || work.inline { &[] } else { &gather };
        let mut request = SendRequest::new(id, operation, gather).flags(flags);
        if let Some(bytes) = &inline {
            request = request.inline_data(bytes);
        }
        if let Some(group) = work.group {
            let (handle, qkey) = self.multicast.target(qp, group);
            request = request.ud_address(handle, Qpn::MULTICAST, qkey);
        } else if let Some((handle, qpn, qkey)) = &side.target {
            request = request.ud_address(handle, *qpn, *qkey);
        }
        pair.post_send(&request).map_err(post_error)
    }

    fn inline_data(&self, qp: usize, sge: &softhca_types::Sge) -> Vec<u8> {
        self.read_memory(qp, sge.address - self.qps[qp].memory.0, sge.length.into())
    }

    /// Posts a receive at an offset of the memory of a queue pair.
    pub fn post_receive(&mut self, qp: usize, id: u64, offset: u64, bytes: u32) -> Result<(), Errno> {
        let side = &self.qps[qp];
        let Some(pair) = &side.pair else { return Err(Errno::EINVAL) };
        let request = ReceiveRequest { wr_id: id, sg_list: &[side.region.sge(offset, bytes)] };
        pair.post_recv(&request).map_err(post_error)
    }

    pub fn modify(&mut self, qp: usize, state: QpState, notify_drained: bool) -> Result<(), String> {
        let mut modify = ModifyQp::default().state(state);
        if notify_drained {
            modify = modify.sqd_async_notify(true);
        }
        self.pair(qp).and_then(|pair| pair.modify(&modify)).map(|_| ()).map_err(|error| error.to_string())
    }

    pub fn destroy(&mut self, qp: usize) {
        self.qps[qp].pair = None;
    }

    pub fn unmap(&mut self, qp: usize) -> Result<(), String> {
        let Some(fabric) = &self.fabric else {
            return Err("the memory of a real process cannot be unmapped".into());
        };
        let device = &self.devices[self.plan.qps[qp].host];
        fabric.unmap(device, self.qps[qp].region.rkey()).map_err(|error| error.to_string())
    }

    pub fn deregister(&mut self, qp: usize) -> Result<(), String> {
        self.qps[qp].region.deregister().map_err(|error| error.to_string())
    }

    /// Changes the access rights of the memory region of a queue pair.
    pub fn reregister(&mut self, qp: usize, access: AccessFlags) -> Result<(), String> {
        self.qps[qp].region.change_access(access).map_err(|error| error.to_string())
    }

    pub fn attach_multicast(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        let gid = self.multicast.gid(group);
        self.pair(qp).and_then(|pair| pair.attach_multicast(gid)).map_err(|error| error.to_string())
    }

    pub fn detach_multicast(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        let gid = self.multicast.gid(group);
        self.pair(qp).and_then(|pair| pair.detach_multicast(gid)).map_err(|error| error.to_string())
    }

    fn raise_event(&self, host: usize, event: InjectedEvent, object: Option<u32>) -> Result<(), String> {
        let mut qps = (0..self.qps.len()).filter(|qp| self.plan.qps[*qp].host == host);
        let qp = qps.nth(object.unwrap_or(1).saturating_sub(1) as usize).map(|qp| &self.qps[qp]);
        let number = match event {
            InjectedEvent::QpFatal => qp.map(|qp| qp.qpn.value()),
            InjectedEvent::CqErr => qp.map(|qp| qp.cq.handle()),
            _ => None,
        };
        if event.object().is_some() && number.is_none() {
            let host = &self.plan.hosts[host].name;
            return Err(format!("{host} has no such object for {}", event.name()));
        }
        self.contexts[host].raise_event(event, number).map_err(|error| error.to_string())
    }

    fn kill_program(&mut self, host: usize) {
        self.programs[host].is_killed = true;
        for (qp, plan) in self.plan.qps.iter().enumerate() {
            if plan.host == host {
                self.qps[qp].pair = None;
            }
        }
        self.destroy_cm_ids(host);
    }
}

impl HostControl for Hosts<'_> {
    fn apply(&mut self, now_ns: u64, change: &Change) -> Result<Effect, String> {
        match (*change, &self.fabric) {
            (Change::AsyncEvent { host, event, object }, _) => self.raise_event(host, event, object)?,
            (Change::Stall { host, for_ns }, _) => {
                let until = &mut self.programs[host].stalled_until;
                *until = (*until).max(now_ns + for_ns);
                let time = Duration::from_nanos(for_ns);
                self.devices[host].stall(time).map_err(|error| error.to_string())?;
            }
            // The device and its programs know for how long.
            (Change::StallEnd { .. }, _) => {}
            (Change::WithholdReceives { host, for_ns }, _) => {
                self.programs[host].no_receives_until = now_ns + for_ns;
            }
            (Change::DelayReceives { host, delay_ns }, _) => self.programs[host].receive_delay = delay_ns,
            (Change::KillProgram { host }, _) if self.programs[host].is_killed => return Ok(Effect::Nothing),
            (Change::KillProgram { host }, _) => self.kill_program(host),
            (_, Some(fabric)) => fabric::apply(fabric, change),
            (Change::LinkState { link, state, .. }, None) => {
                let event = match state {
                    LinkState::Down => InjectedEvent::PortErr,
                    LinkState::Up => InjectedEvent::PortActive,
                };
                let mut hosts = self.plan.hosts_of_link(link);
                hosts.try_for_each(|host| self.raise_event(host, event, None))?;
            }
            (_, None) => return Err(format!("not possible on real sockets: {change:?}")),
        }
        Ok(Effect::Applied)
    }

    fn add_rule(&mut self, links: &[usize], rule: &Rule, _: &str) -> Result<(), String> {
        match &self.fabric {
            Some(fabric) => fabric::add_rule(fabric, links, rule),
            None => {
                for (host, device) in self.devices.iter().enumerate() {
                    for rule in self.plan.rule_at_host(host, links, rule) {
                        device.add_rule(self.plan.seed, rule);
                    }
                }
            }
        }
        Ok(())
    }

    fn note_trigger(&mut self, host: usize, trigger: &FaultTrigger) -> Result<(), String> {
        self.contexts[host].note_trigger(trigger.clone()).map_err(|error| error.to_string())
    }

    fn branch(&mut self, continuation: Continuation) -> Result<(), String> {
        let Some(fabric) = &self.fabric else {
            return Err("a run in real time cannot continue differently".into());
        };
        match continuation {
            Continuation::Reseeded(seed) => fabric.with(|world| world.reseed(seed)),
            Continuation::Healed => {
                fabric::heal(fabric, self.plan);
                for program in &mut self.programs {
                    (program.no_receives_until, program.receive_delay) = (0, 0);
                }
            }
        }
        Ok(())
    }
}

/// The errno of a rejected post.
fn post_error(error: Error) -> Errno {
    match error {
        Error::Verbs(VerbsError::Injected { errno, .. }) => errno,
        _ => Errno::ENOMEM,
    }
}
