//! A walk: what is posted when, and in which circumstances. A plain value, so that proptest can shrink it.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use softhca_engine::{Acks, QpKind, Recovery};
use softhca_fabric::{Action, Choice, Class, Classes, Place, Repeat, Seal};
use softhca_wire::Mtu;
use std::num::NonZeroU32;

/// Everything that decides a run.
#[derive(Clone, Debug)]
pub struct Walk {
    pub seed: u64,
    pub kind: QpKind,
    pub recovery: Recovery,
    pub acks: Acks,
    pub ack_request_every: u32,
    pub mtu: Mtu,
    /// Reads and atomics that may be outstanding.
    pub reads: u8,
    /// The code of the RNR timer.
    pub rnr_timer: u8,
    pub hosts: usize,
    /// The first PSNs of each pair of queue pairs.
    pub psns: Vec<[u32; 2]>,
    pub troubles: Vec<Trouble>,
    pub steps: Vec<Step>,
}

/// What happens to which packets on every cable.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub classes: Option<Classes>,
    pub repeat: Repeat,
    pub action: Action,
}

/// One thing that the script does. Lanes are taken modulo their number.
#[derive(Clone, Debug)]
pub enum Step {
    /// Posts a request at the sending end of a lane.
    Post { lane: usize, request: Request },
    /// Posts receives at the receiving end of a lane.
    Receive { lane: usize, count: usize },
    /// Lets time pass.
    Run { nanoseconds: u64 },
}

/// A request in terms that survive shrinking: places and sizes are brought into range later.
#[derive(Clone, Debug)]
pub struct Request {
    pub verb: Verb,
    /// Whole packets, and a few bytes more or less.
    pub packets: u32,
    pub odd: i32,
    /// Entries of the gather list.
    pub pieces: usize,
    /// Where in the peer's memory, in units of eight bytes.
    pub place: u64,
    pub immediate: bool,
    pub signalled: bool,
    pub fence: bool,
    pub inline: bool,
    /// Sends what the last READ brought; needs a fence.
    pub relay: bool,
    pub flaw: Option<Flaw>,
}

/// What is wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    LocalKey,
    RemoteKey,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Send,
    Write,
    Read,
    CompareSwap,
    FetchAdd,
}

/// How bad the cables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// Nothing happens to any packet.
    Fair,
    /// Packets come twice, which is no loss.
    Echoes,
    /// So few faults that no retry count is exhausted.
    Showers,
    /// One packet in a hundred or so: independent tries do not all fail.
    Drizzle,
    /// Anything.
    Storm,
}

fn any_request(kind: QpKind) -> impl Strategy<Value = Request> {
    let verbs = match kind {
        QpKind::Rc => vec![Verb::Send, Verb::Write, Verb::Read, Verb::CompareSwap, Verb::FetchAdd],
        QpKind::Uc => vec![Verb::Send, Verb::Write],
        _ => vec![Verb::Send],
    };
    let sizes = (select(verbs), 0..=4u32, -1..=3i32, 1..=3usize, 0..=600u64);
    let flags = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.2));
    let flaw = prop::option::weighted(0.01, select(vec![Flaw::LocalKey, Flaw::RemoteKey]));
    (sizes, flags, prop::bool::weighted(0.2), flaw).prop_map(
        |((verb, packets, odd, pieces, place), (immediate, signalled, fence, inline), relay, flaw)| Request {
            verb,
            packets,
            odd,
            pieces,
            place,
            immediate,
            signalled,
            fence,
            inline,
            relay,
            flaw,
        },
    )
}

fn any_step(kind: QpKind) -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..6usize, any_request(kind)).prop_map(|(lane, request)| Step::Post { lane, request }),
        3 => (0..6usize, 1..=4usize).prop_map(|(lane, count)| Step::Receive { lane, count }),
        2 => select(vec![100, 1_000, 3_000, 20_000, 200_000, 2_000_000])
            .prop_map(|nanoseconds| Step::Run { nanoseconds }),
    ]
}

fn any_action(weather: Weather) -> BoxedStrategy<Action> {
    let duplicate = (1..=2u32).prop_map(|copies| Action::Duplicate { copies });
    let reorder = (1..=5u32, 1_000..400_000u64).prop_map(|(by, within_ns)| Action::Reorder {
        by: NonZeroU32::new(by).expect("at least one"),
        within_ns,
    });
    let delay = prop_oneof![1..10_000u64, 500_000..1_200_000u64].prop_map(|ns| Action::Delay { ns });
    let corrupt = Action::Corrupt { place: Place::Anywhere, seal: Seal::Stale };
    match weather {
        Weather::Echoes => duplicate.boxed(),
        _ => {
            prop_oneof![4 => Just(Action::Drop), 2 => duplicate, 2 => reorder, 1 => delay, 1 => Just(corrupt)]
                .boxed()
        }
    }
}

fn any_trouble(weather: Weather) -> impl Strategy<Value = Trouble> {
    let classes = prop_oneof![
        3 => Just(None),
        2 => Just(Some(Classes::Data)),
        1 => select(vec![Class::Ack, Class::ReadResponse, Class::AtomicResponse, Class::ReceiverNotReady])
            .prop_map(|class| Some(Classes::Only(class))),
    ];
    let once = (0..30u64).prop_map(|skip| Repeat { skip, times: Some(1), ..Repeat::default() });
    let often = (1..150u32)
        .prop_map(|per_mille| Repeat::choice(Choice::Chance { per_billion: per_mille * 1_000_000 }));
    let rarely = (1..15u32)
        .prop_map(|per_mille| Repeat::choice(Choice::Chance { per_billion: per_mille * 1_000_000 }));
    let repeat = match weather {
        Weather::Showers => once.boxed(),
        Weather::Drizzle => rarely.boxed(),
        _ => prop_oneof![once, often].boxed(),
    };
    (classes, repeat, any_action(weather)).prop_map(|(classes, repeat, action)| Trouble {
        classes,
        repeat,
        action,
    })
}

/// Walks over queue pairs of one kind.
pub fn any_walk(kind: QpKind, recovery: Recovery, weather: Weather) -> impl Strategy<Value = Walk> {
    let troubles = match weather {
        Weather::Fair => 0..1usize,
        _ => 1..4,
    };
    let near_the_wrap = 0x00ff_fff0..0x0100_0010u32;
    let psn = prop_oneof![Just(0), near_the_wrap.prop_map(|psn| psn & 0xff_ffff), 0..0x100_0000u32];
    let device = (
        select(vec![Acks::Each, Acks::Coalesce]),
        select(vec![1, 2, 3, 64u32]),
        select(Mtu::ALL.to_vec()),
        1..=4u8,
        select(vec![1, 5, 12u8]),
    );
    let scene = (any::<u64>(), 2..=3usize, vec([psn.clone(), psn], 1..=3));
    (scene, device, vec(any_trouble(weather), troubles), vec(any_step(kind), 1..40)).prop_map(
        move |((seed, hosts, psns), (acks, ack_request_every, mtu, reads, rnr_timer), troubles, steps)| {
            Walk {
                seed,
                kind,
                recovery,
                acks,
                ack_request_every,
                mtu,
                reads,
                rnr_timer,
                hosts,
                psns,
                troubles,
                steps,
            }
        },
    )
}
