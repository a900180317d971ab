//! Converts packet selectors, and rejects selectors that no packet can match.

use super::builder::PlanBuilder;
use super::{Node, Plan, names};
use crate::quantity::{IntegerRange, PsnRange};
use crate::source::{Result, join_path};
use crate::spec::PacketMatch;
use softhca_fabric::{Direction, PacketClasses, Selector};
use softhca_wire::Opcode;

impl PlanBuilder<'_> {
    /// The link and direction of `on`; none for all links of external programs.
    pub(super) fn link_selector(
        &self,
        on: Option<&str>,
        path: &str,
    ) -> Result<Option<(usize, Option<Direction>)>> {
        match on {
            Some(text) => self.network.link_direction(text, self.source, &join_path(path, "on")).map(Some),
            None if self.network.links.len() == 1 => Ok(Some((0, None))),
            None if self.has_external_programs => Ok(None),
            None => Err(self.error_at(path, "missing `on`").help("add on = \"alice -> bob\"")),
        }
    }

    /// The selector of a rule or an expectation.
    pub(super) fn selector(
        &mut self,
        matching: &PacketMatch,
        way: Option<(usize, Option<Direction>)>,
        path: &str,
    ) -> Result<Selector> {
        let classes = names::packet_classes(matching).map_err(|why| self.error_in(path, "class", why))?;
        let opcodes = self.opcodes(matching, path)?;
        if let Some(classes) = classes
            && !opcodes.is_empty()
            && !opcodes.iter().any(|opcode| classes.may_contain(*opcode))
        {
            let message = "this rule can never fire: no packet of this class has this opcode";
            return Err(self.error_in(path, "opcode", message));
        }
        let qp = self.optional_qp(matching.qp.as_ref(), path)?;
        if matching.priority.is_some_and(|priority| priority > 7) {
            return Err(self.error_in(path, "priority", "this rule can never fire: priorities are 0 to 7"));
        }
        if let (Some(window), Some(ends)) = (matching.time, self.file.duration)
            && window.0.first >= ends.0
        {
            let message = "this rule can never fire: its time window starts after the end of the run";
            return Err(self.error_in(path, "time", message));
        }
        if matching.transmission.is_some_and(|transmission| transmission.0.last == 0) {
            let message = "this rule can never fire: transmissions count from 1";
            return Err(self.error_in(path, "transmission", message));
        }
        self.check_cm_match(matching, classes, way, path)?;
        self.check_can_match(matching, classes, qp, way, path)?;
        let span = |numbers: Option<IntegerRange>| numbers.map(|numbers| numbers.0);
        let (mut psn, mut absolute_psn) = (None, None);
        match matching.psn {
            Some(PsnRange::Relative(span)) => psn = Some(span),
            Some(PsnRange::Absolute(span)) => absolute_psn = Some(span),
            None => {}
        }
        Ok(Selector {
            direction: way.and_then(|(_, direction)| direction),
            classes,
            opcodes,
            flow_id: qp.map(Plan::role_of),
            packet_type: None,
            psn,
            absolute_psn,
            message: span(matching.message),
            packet: span(matching.packet),
            transmission: span(matching.transmission),
            priority: matching.priority,
            time_ns: matching.time.map(|window| window.0),
        })
    }

    fn opcodes(&self, matching: &PacketMatch, path: &str) -> Result<Vec<Opcode>> {
        let mut found = Vec::new();
        for name in matching.opcode.iter().flat_map(|names| names.all()) {
            let wanted = name.replace(['-', ' '], "_").to_uppercase();
            let is_it = |opcode: &Opcode| {
                wanted == opcode.name() || wanted == opcode.to_string().replace(' ', "_").to_uppercase()
            };
            let before = found.len();
            found.extend(Opcode::all().filter(is_it));
            if found.len() == before {
                let mut names: Vec<&str> = Opcode::all().map(Opcode::name).collect();
                names.sort_unstable();
                names.dedup();
                let problem = self.error_in(path, "opcode", format!("unknown opcode {name:?}"));
                return Err(problem.suggest(&wanted, names));
            }
        }
        Ok(found)
    }

    /// Whether packets between two hosts can cross a link in a direction. A switch end can lead to any host.
    pub(super) fn path_crosses(
        &self,
        way: Option<(usize, Option<Direction>)>,
        [from, to]: [usize; 2],
    ) -> bool {
        let Some((link, Some(direction))) = way else { return true };
        let [mut first, mut second] = self.network.links[link].ends;
        if direction == Direction::Backward {
            (first, second) = (second, first);
        }
        let may_be = |node, host| match node {
            Node::Host(end) => end == host,
            Node::Switch(_) => true,
        };
        may_be(first, from) && may_be(second, to)
    }

    /// Rejects a selector that no packet of the scenario can match.
    fn check_can_match(
        &self,
        matching: &PacketMatch,
        classes: Option<PacketClasses>,
        qp: Option<usize>,
        way: Option<(usize, Option<Direction>)>,
        path: &str,
    ) -> Result<()> {
        if self.has_external_programs {
            return Ok(());
        }
        let never =
            |key: &str, why: String| self.error_in(path, key, format!("this rule can never fire: {why}"));
        let (requests, responses) = names::request_and_response(classes);
        if !requests && !responses {
            // CNPs and management datagrams do not follow from work requests.
            return Ok(());
        }
        let everything = classes.unwrap_or(PacketClasses::Data);
        let all_responses = classes.unwrap_or(PacketClasses::Responses);
        let passes = |from: usize, to: usize| self.path_crosses(way, [from, to]);
        let mut found = false;
        let (mut packets, mut messages, mut longest) = (Some(0), Some(0), 0);
        for (index, plan) in self.qps.iter().enumerate() {
            if qp.is_some_and(|qp| qp != index) {
                continue;
            }
            let Some(traffic) = self.traffic.of(index) else { continue };
            let peer = self.qps[plan.peer].host;
            let to_any_host =
                traffic.to_multicast && (0..self.network.hosts.len()).any(|host| passes(plan.host, host));
            let sends = requests && (passes(plan.host, peer) || to_any_host) && traffic.may_send(everything);
            let receives = responses && passes(peer, plan.host) && traffic.may_be_answered(all_responses);
            if sends || receives {
                found = true;
                packets = packets.zip(traffic.packets).map(|(a, b): (u64, u64)| a.max(b));
                messages = messages.zip(traffic.messages).map(|(a, b): (u64, u64)| a.max(b));
                longest = longest.max(traffic.max_packets);
            }
        }
        // A selector without a class also matches CM messages.
        if classes.is_none() && qp.is_none() && self.may_send_cm_message(&|_| true, way) {
            return Ok(());
        }
        if !found {
            let who = qp.map_or("no queue pair", |qp| &self.qps[qp].name);
            let verb = if qp.is_some() { "does not send or receive" } else { "sends or receives" };
            let why = format!("{who} {verb} such a packet in this direction");
            let key = if matching.class.is_some() { "class" } else { "qp" };
            return Err(
                never(key, why).help("check the direction of `on`, the class, and the steps and workloads")
            );
        }
        if let (Some(PsnRange::Relative(span)), Some(packets)) = (matching.psn, packets)
            && span.first >= packets
        {
            return Err(never(
                "psn",
                format!("the requests use {packets} PSNs, +0 to +{}", packets.saturating_sub(1)),
            ));
        }
        if let (Some(numbers), Some(messages)) = (matching.message, messages)
            && numbers.0.first >= messages
        {
            return Err(never(
                "message",
                format!("the file sends {messages} messages, 0 to {}", messages.saturating_sub(1)),
            ));
        }
        if let Some(numbers) = matching.packet
            && numbers.0.first >= longest
        {
            return Err(never(
                "packet",
                format!("the longest message has {longest} packets, 0 to {}", longest.saturating_sub(1)),
            ));
        }
        Ok(())
    }
}
