//! Injections: a point and the fault there, as text, as the rules of a run and as a scenario.

use super::point::{Point, PointKind, flow_id};
use super::target::Target;
use softhca::fault::{
    Action, BitPosition, FaultPoint, IcrcPolicy, InclusiveRange, InjectedEvent, PacketType, ProgramAction,
    ProgramFault, Repeat, Rule, RuleId, Selector,
};
use softhca::{CompletionStatus, Errno, Verb};
use softhca_scenarios::{ParameterValues, Plan, Scenario};
use std::fmt;
use std::str::FromStr;

/// The events that a sweep raises.
pub const EVENTS: [InjectedEvent; 3] =
    [InjectedEvent::PortErr, InjectedEvent::QpFatal, InjectedEvent::DeviceFatal];
/// The statuses that a sweep injects: a lost peer, a rejected request.
pub const STATUSES: [CompletionStatus; 2] =
    [CompletionStatus::RetryExceededError, CompletionStatus::RemoteAccessError];
/// How long a link is down.
const FLAP_TIME: &str = "50ms";

softhca_wire::named_enum! {
    /// A fault of packets in a sweep, named as in scenario files.
    pub enum PacketFault {
        Drop => "drop",
        Duplicate => "duplicate",
        Delay => "delay",
        Corrupt => "corrupt",
    }
}

impl PacketFault {
    const fn action(self) -> Action {
        match self {
            PacketFault::Drop => Action::Drop,
            PacketFault::Duplicate => Action::Duplicate { copies: 1 },
            // Longer than the clean run has between packets.
            PacketFault::Delay => Action::Delay { ns: 20_000_000 },
            PacketFault::Corrupt => Action::Corrupt { bit: BitPosition::Random, icrc: IcrcPolicy::Stale },
        }
    }
}

/// The fault that is injected at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweepFault {
    /// The call fails once.
    Errno(Errno),
    /// This call and all later ones fail.
    ErrnoFromNowOn(Errno),
    /// The completion has this status, one of [`STATUSES`].
    Status(CompletionStatus),
    /// The notification of the completion is lost.
    LostNotification,
    /// The device raises this event in the call, one of [`EVENTS`].
    Event(InjectedEvent),
    /// The link goes down in the call, and up [`FLAP_TIME`] later.
    LinkFlap,
    /// The packet is lost, duplicated, delayed or corrupted.
    Packet(PacketFault),
}

/// A point and the fault there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// Its point.
    pub point: Point,
    /// The fault.
    pub fault: SweepFault,
}

impl fmt::Display for SweepFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SweepFault::Errno(errno) => write!(f, "{errno}"),
            SweepFault::ErrnoFromNowOn(errno) => write!(f, "{errno}+"),
            SweepFault::Status(status) => f.write_str(status.name()),
            SweepFault::LostNotification => f.write_str("lost-notification"),
            SweepFault::Event(event) => f.write_str(event.name()),
            SweepFault::LinkFlap => f.write_str("link-flap"),
            SweepFault::Packet(fault) => f.write_str(fault.name()),
        }
    }
}

impl FromStr for SweepFault {
    type Err = String;

    fn from_str(text: &str) -> Result<SweepFault, String> {
        let event = InjectedEvent::from_name(text).filter(|event| EVENTS.contains(event));
        let status = CompletionStatus::from_name(text).filter(|status| STATUSES.contains(status));
        let named = match text {
            "lost-notification" => Some(SweepFault::LostNotification),
            "link-flap" => Some(SweepFault::LinkFlap),
            _ => event
                .map(SweepFault::Event)
                .or(status.map(SweepFault::Status))
                .or(PacketFault::from_name(text).map(SweepFault::Packet)),
        };
        if let Some(fault) = named {
            return Ok(fault);
        }
        let (name, later) = text.strip_suffix('+').map_or((text, false), |name| (name, true));
        let errno = Errno::from_name(name).ok_or_else(|| format!("{text:?} is not a fault of a sweep"))?;
        Ok(if later { SweepFault::ErrnoFromNowOn(errno) } else { SweepFault::Errno(errno) })
    }
}

/// `client:post_send:1:3:ENOMEM`: program, verb, object (0 for the device), call, fault.
impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Point { role, object, nth, .. } = &self.point;
        write!(f, "{role}:{}:{}:{nth}:{}", self.point.name(), object.unwrap_or(0), self.fault)
    }
}

impl FromStr for Injection {
    type Err = String;

    fn from_str(text: &str) -> Result<Injection, String> {
        let wrong = || format!("{text:?} is not PROGRAM:VERB:OBJECT:NTH:FAULT");
        let words: Vec<&str> = text.split(':').collect();
        let [role, verb, object, nth, fault] = words[..] else { return Err(wrong()) };
        let kind = match verb {
            "completion" => PointKind::Completion,
            "request" => PointKind::Request,
            "response" => PointKind::Response,
            name => PointKind::Call(
                Verb::from_name(name).ok_or_else(|| format!("{text:?}: no verb has the name {name:?}"))?,
            ),
        };
        let fault: SweepFault = fault.parse()?;
        let fits = match fault {
            SweepFault::Packet(_) => matches!(kind, PointKind::Request | PointKind::Response),
            SweepFault::Status(_) | SweepFault::LostNotification => kind == PointKind::Completion,
            _ => matches!(kind, PointKind::Call(_)),
        };
        if !fits {
            return Err(format!("{text:?}: {fault} is not a fault of {verb}"));
        }
        let (object, nth): (u32, u64) =
            (object.parse().map_err(|_| wrong())?, nth.parse().map_err(|_| wrong())?);
        let object = Some(object).filter(|object| *object > 0);
        Ok(Injection { point: Point { role: role.into(), kind, object, nth: nth.max(1) }, fault })
    }
}

impl Injection {
    /// The rule of a packet fault.
    pub fn packet_rule(&self, target: &Target) -> Option<Rule> {
        let SweepFault::Packet(fault) = self.fault else { return None };
        let program = target.role_of(&self.point.role)?;
        let host = target.hosts().iter().position(|host| *host == target.program[program].host)?;
        let is_request = self.point.kind == PointKind::Request;
        let selector = Selector {
            flow_id: Some(flow_id(host, self.point.object.unwrap_or(1))),
            packet_type: Some(if is_request { PacketType::Request } else { PacketType::Response }),
            psn: Some(InclusiveRange::exactly(self.point.nth - 1)),
            transmission: Some(InclusiveRange::exactly(1)),
            ..Selector::default()
        };
        Some(Rule { id: RuleId(1), selector, repeat: Repeat::times(1), action: fault.action() })
    }

    /// The fault as a scenario file for `softhca exec --scenario`.
    pub fn scenario(&self, target: &Target) -> String {
        let Point { kind, object, nth, role } = &self.point;
        let host = target.role_of(role).map_or("alice", |program| target.program[program].host.as_str());
        let hosts: Vec<String> = target.hosts().iter().map(|host| format!("{host} = {{}}")).collect();
        let qp = format!("{host}.{}", object.unwrap_or(1));
        let times = match self.fault {
            SweepFault::ErrnoFromNowOn(_) => format!("skip = {}", nth - 1),
            _ => format!("nth = {nth}"),
        };
        let action = match self.fault {
            SweepFault::Errno(errno) | SweepFault::ErrnoFromNowOn(errno) => {
                format!("{{ fail = \"{errno}\" }}")
            }
            SweepFault::Status(status) => format!("{{ set-status = \"{}\" }}", status.name()),
            SweepFault::LostNotification => "\"drop-notification\"".into(),
            SweepFault::Event(event) => {
                let name = event.name().to_lowercase().replace('_', "-");
                format!("{{ raise-event = \"{name}\" }}")
            }
            SweepFault::LinkFlap => "{ raise-event = \"port-err\" }".into(),
            SweepFault::Packet(fault) => match (fault.name(), fault.action()) {
                (name, Action::Duplicate { copies }) => format!("{{ {name} = {copies} }}"),
                (name, Action::Delay { ns }) => format!("{{ {name} = \"{ns}ns\" }}"),
                (name, Action::Corrupt { .. }) => format!("{{ {name} = {{}} }}"),
                (name, _) => format!("\"{name}\""),
            },
        };
        let place = match kind {
            PointKind::Call(verb) => {
                let object = object.map_or(String::new(), |object| format!("object = {object}\n"));
                format!("host = \"{host}\"\nverb = \"{}\"\n{object}{times}", verb.name())
            }
            PointKind::Completion => format!("qp = \"{qp}\"\n{times}"),
            PointKind::Request | PointKind::Response => {
                let (class, psn) = (self.point.name(), nth - 1);
                format!(
                    "match = {{ class = \"{class}\", qp = \"{qp}\", psn = \"+{psn}\", transmission = 1 }}\ntimes = 1"
                )
            }
        };
        let hosts = hosts.join("\n");
        let up = match self.fault {
            SweepFault::LinkFlap => format!(
                "name = \"down\"\n\n[[fault]]\nhost = \"{host}\"\nafter = {{ fault = \"down\" }}\nat = \"{FLAP_TIME}\"\n\
                 action = {{ raise-event = \"port-active\" }}\n"
            ),
            _ => String::new(),
        };
        format!("title = \"{self}\"\n\n[hosts]\n{hosts}\n\n[[fault]]\n{place}\naction = {action}\n{up}")
    }

    /// The plan of a fault that is more than one rule.
    pub fn plan(&self, target: &Target) -> Result<Option<Plan>, String> {
        if self.fault != SweepFault::LinkFlap {
            return Ok(None);
        }
        let scenario = Scenario::parse(&self.to_string(), &self.scenario(target));
        let plan = scenario.and_then(|scenario| scenario.plan(&ParameterValues::new(), scenario.seed));
        plan.map(Some).map_err(|problem| problem.to_string())
    }

    /// The rule of a fault of the program; `None` for packets and [`Injection::plan`].
    pub fn rule(&self) -> Option<ProgramFault> {
        let Point { kind, object, nth, .. } = self.point;
        let action = match self.fault {
            SweepFault::Packet(_) | SweepFault::LinkFlap => return None,
            SweepFault::Errno(errno) | SweepFault::ErrnoFromNowOn(errno) => ProgramAction::Fail(errno),
            SweepFault::Status(status) => ProgramAction::SetStatus(status, None),
            SweepFault::LostNotification => ProgramAction::DropNotification,
            SweepFault::Event(event) => ProgramAction::Raise(event),
        };
        let point = match kind {
            PointKind::Call(verb) => FaultPoint::Call(verb),
            _ => FaultPoint::Completion,
        };
        let times = (!matches!(self.fault, SweepFault::ErrnoFromNowOn(_))).then_some(1);
        let repeat = Repeat { skip: nth - 1, times, ..Repeat::default() };
        Some(ProgramFault { id: 1, process: None, point, object, repeat, after: None, until: None, action })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_its_text() {
        for text in [
            "client:post_send:1:3:ENOMEM",
            "server:reg_mr:0:2:ENOMEM+",
            "server:completion:2:7:RETRY_EXC_ERR",
            "client:completion:1:1:lost-notification",
            "client:post_send:1:1:DEVICE_FATAL",
            "client:rdma_connect:1:1:link-flap",
            "client:request:1:4:drop",
            "server:response:2:1:corrupt",
        ] {
            let injection: Injection = text.parse().expect(text);
            assert_eq!(injection.to_string(), text);
            // The file with the fault can be used.
            let program = ["client", "server"]
                .map(|name| format!("[[program]]\nname = \"{name}\"\ncommand = [\"x\"]\n"));
            let target: Target = toml::from_str(&program.concat()).expect("a target");
            let file = injection.scenario(&target);
            softhca_scenarios::Scenario::parse("fault.toml", &file).expect(&file);
        }
        for text in [
            "client:request:1:1:ENOMEM",
            "client:post_send:1:1:drop",
            "client",
            "client:no_verb:0:1:EIO",
            "c:post_send:x:1:EIO",
            "c:post_send:1:1:EWHAT",
        ] {
            assert!(text.parse::<Injection>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_fault_from_now_on_has_no_limit() {
        let once: Injection = "c:post_send:1:3:ENOMEM".parse().expect("an address");
        let later: Injection = "c:post_send:1:3:ENOMEM+".parse().expect("an address");
        let repeat = |injection: Injection| injection.rule().expect("a call").repeat;
        assert_eq!((repeat(once.clone()).skip, repeat(once).times), (2, Some(1)));
        assert_eq!((repeat(later.clone()).skip, repeat(later).times), (2, None));
    }
}
