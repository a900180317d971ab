//! Packet faults: rules with a selector, an action and a choice of packets.

use super::builder::PlanBuilder;
use super::{FaultKind, FaultPlan, LinkPlan, Node, limits};
use crate::quantity::{IntegerRange, PsnRange};
use crate::source::{Result, join_path};
use crate::spec::{ClassName, FaultAction, FaultSpec, LinkDirections, LuminaEvent, LuminaKind, PacketMatch};
use softhca_fabric::{
    Action, BitPosition, Choice, Direction, DownDirections, FieldValue, GilbertElliott, IcrcPolicy,
    InclusiveRange, Pattern, Repeat, Rule, RuleId, Scope, Selector,
};
use softhca_wire::Opcode;
use std::num::NonZeroU64;

impl PlanBuilder<'_> {
    /// A fault in the notation of Lumina: relative queue pair, relative PSN, iteration, type.
    pub(super) fn lumina_fault(&mut self, event: &LuminaEvent, id: RuleId, path: &str) -> Result<FaultPlan> {
        let Some(pair) = self.pairs.get(event.qpn as usize) else {
            let message = format!(
                "qpn {} is out of range: the file has {} pairs, counted from 0",
                event.qpn,
                self.pairs.len()
            );
            return Err(self.error_in(path, "qpn", message));
        };
        let qp = pair.qps[0];
        let host = self.qps[qp].host;
        let matching = PacketMatch {
            class: Some(ClassName::Request),
            qp: Some(self.qps[qp].name.clone()),
            psn: Some(PsnRange::Relative(InclusiveRange::exactly(event.psn))),
            transmission: Some(IntegerRange(InclusiveRange::exactly(event.iter))),
            ..PacketMatch::default()
        };
        let Some((link, direction)) = self.first_hop(host) else {
            return Err(self.error_at(path, "the requester has no link"));
        };
        let selector = self.selector(&matching, Some((link, Some(direction))), path)?;
        let action = match event.kind {
            LuminaKind::Drop => Action::Drop,
            LuminaKind::Ecn => Action::MarkCe,
            LuminaKind::Corrupt => Action::Corrupt { bit: BitPosition::Random, icrc: IcrcPolicy::Stale },
        };
        let rule = Rule { id, selector, repeat: Repeat::times(1), action };
        let name = format!(
            "{{qpn: {}, psn: {}, type: {:?}, iter: {}}}",
            event.qpn, event.psn, event.kind, event.iter
        )
        .to_lowercase();
        let kind = FaultKind::Packets { links: vec![link], rule };
        Ok(FaultPlan { id, name, optional: false, after: None, kind, at: self.source.line(path) })
    }

    /// The first link of a host, and its direction.
    fn first_hop(&self, host: usize) -> Option<(usize, Direction)> {
        self.network.links.iter().enumerate().find_map(|(index, link)| {
            let side = link.ends.iter().position(|end| *end == Node::Host(host))?;
            Some((index, if side == 0 { Direction::Forward } else { Direction::Backward }))
        })
    }

    /// A device that sends its packets slowly: a rule on its link.
    pub(super) fn slow_device(
        &self,
        fault: &FaultSpec,
        id: RuleId,
        path: &str,
        host: usize,
    ) -> Result<FaultKind> {
        if fault.at.0 != 0 {
            let message = "a slow device is slow from the beginning, or from what it waits for";
            return Err(self.error_in(path, "at", message).help("use after = { … }"));
        }
        let of_host = |link: &&LinkPlan| link.ends.contains(&Node::Host(host));
        let (Some((link, direction)), 1) =
            (self.first_hop(host), self.network.links.iter().filter(of_host).count())
        else {
            return Err(self.error_in(path, "host", "a slow device has one link"));
        };
        let selector = Selector { direction: Some(direction), ..Selector::default() };
        let action = self.packet_action(&fault.action, &selector, &join_path(path, "action"))?;
        let rule = Rule { id, selector, repeat: self.repeat(fault, path)?, action };
        Ok(FaultKind::Packets { links: vec![link], rule })
    }

    pub(super) fn packet_fault(&mut self, fault: &FaultSpec, id: RuleId, path: &str) -> Result<FaultKind> {
        let way = self.link_selector(fault.on.as_deref(), path)?;
        let selector = self.selector(&fault.packet_match, way, &join_path(path, "match"))?;
        let action = self.packet_action(&fault.action, &selector, &join_path(path, "action"))?;
        let repeat = self.repeat(fault, path)?;
        let links = match way {
            Some((link, _)) => vec![link],
            None => (0..self.network.links.len()).collect(),
        };
        Ok(FaultKind::Packets { links, rule: Rule { id, selector, repeat, action } })
    }

    fn packet_action(&self, requested: &FaultAction, selector: &Selector, path: &str) -> Result<Action> {
        Ok(match requested {
            FaultAction::Count => Action::Count,
            FaultAction::Drop => Action::Drop,
            FaultAction::Duplicate(0) => return Err(self.error_at(path, "duplicate = 0 has no effect")),
            FaultAction::Duplicate(copies) if *copies > limits::MAX_COPIES => {
                let message = format!("{copies} copies of a packet, the maximum is {}", limits::MAX_COPIES);
                return Err(self.error_at(path, message));
            }
            FaultAction::Duplicate(copies) => Action::Duplicate { copies: *copies },
            FaultAction::Reorder(reorder) => Action::Reorder { by: reorder.by, within_ns: reorder.within.0 },
            FaultAction::Delay(time) => Action::Delay { ns: time.0 },
            FaultAction::LimitRate(rate) => match NonZeroU64::new(rate.0) {
                Some(bits_per_second) => Action::LimitRate { bits_per_second },
                None => return Err(self.error_at(path, "no packet passes at rate 0").help("use drop")),
            },
            FaultAction::SlowDevice(time) if time.0 == 0 => {
                return Err(self.error_at(path, "a device that takes no time for a packet is not slow"));
            }
            FaultAction::SlowDevice(time) => Action::PacketTime { ns: time.0 },
            FaultAction::Jitter(time) => Action::Jitter { up_to_ns: time.0 },
            FaultAction::Corrupt(corruption) => {
                let place = match (corruption.bit, corruption.payload_bit) {
                    (None, None) => BitPosition::Random,
                    (Some(bit), None) => BitPosition::Bit(bit),
                    (None, Some(bit)) => BitPosition::PayloadBit(bit),
                    (Some(_), Some(_)) => {
                        return Err(self.error_at(path, "give `bit` or `payload-bit`, not both"));
                    }
                };
                Action::Corrupt {
                    bit: place,
                    icrc: if corruption.fix_icrc { IcrcPolicy::Recomputed } else { IcrcPolicy::Stale },
                }
            }
            FaultAction::MarkCe => Action::MarkCe,
            FaultAction::Rewrite(rewrite) => {
                let field = rewrite.field;
                let value = match (rewrite.value, rewrite.add) {
                    (Some(to), None) => FieldValue::Set(to),
                    (None, Some(plus)) => FieldValue::Add(plus),
                    _ => {
                        return Err(self.error_at(path, "give either `value` or `add`"));
                    }
                };
                if let FieldValue::Set(to) = value
                    && field.width() < 64
                    && to >> field.width() != 0
                {
                    return Err(self
                        .error_at(path, format!("{to:#x} exceeds the {} bits of the field", field.width())));
                }
                let possible = |opcode: &Opcode| {
                    field.is_in(*opcode)
                        && selector.classes.is_none_or(|classes| classes.may_contain(*opcode))
                        && (selector.opcodes.is_empty() || selector.opcodes.contains(opcode))
                };
                if !Opcode::all().any(|opcode| possible(&opcode)) {
                    return Err(
                        self.error_at(path, "this rule can never fire: no matching packet has this field")
                    );
                }
                Action::Rewrite { field, value }
            }
            FaultAction::LinkDown(down) => {
                let cut = if down.direction == LinkDirections::Both {
                    DownDirections::BothWays
                } else {
                    DownDirections::OneWay
                };
                Action::LinkDown {
                    directions: cut,
                    for_ns: down.duration.map_or(u64::MAX / 2, |time| time.0),
                }
            }
            _ => unreachable!("the action applies to packets"),
        })
    }

    pub(super) fn repeat(&self, fault: &FaultSpec, path: &str) -> Result<Repeat> {
        let never =
            |key: &str, why: &str| self.error_in(path, key, format!("this rule can never fire: {why}"));
        let given = [
            fault.every.is_some(),
            fault.pattern.is_some(),
            fault.probability.is_some(),
            fault.burst.is_some(),
        ];
        if given.iter().filter(|given| **given).count() > 1 {
            return Err(self.error_at(path, "give one of every, pattern, probability, burst"));
        }
        if fault.times == Some(0) {
            return Err(never("times", "times is 0"));
        }
        let mut choice = Choice::All;
        if let Some(every) = fault.every {
            choice = Choice::Every(NonZeroU64::new(every).ok_or_else(|| never("every", "every is 0"))?);
        }
        if let Some(text) = &fault.pattern {
            let pattern =
                Pattern::parse(text).map_err(|why| self.error_in(path, "pattern", why.to_string()))?;
            if pattern.never_hits() {
                return Err(never("pattern", "the pattern has no X"));
            }
            choice = Choice::Pattern(pattern);
        }
        if let Some(share) = fault.probability {
            if share.0 == 0 {
                return Err(never("probability", "the probability is 0"));
            }
            choice = Choice::Probability { per_billion: share.0 };
        }
        if let Some(burst) = fault.burst {
            if burst.good.0 == 0 && (burst.enter.0 == 0 || burst.bad.0 == 0) {
                return Err(never("burst", "neither state has hits"));
            }
            choice = Choice::Burst(GilbertElliott {
                good_to_bad: burst.enter.0,
                bad_to_good: burst.leave.0,
                hit_in_good: burst.good.0,
                hit_in_bad: burst.bad.0,
            });
        }
        let scope = if fault.per_flow { Scope::Flow } else { Scope::Rule };
        Ok(Repeat { skip: fault.skip, times: fault.times, choice, scope })
    }
}
