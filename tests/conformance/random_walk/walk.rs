//! A walk: the posted requests and the environment, as a plain value that proptest can shrink.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use softhca_engine::{AckPolicy, MemoryWindowType, QpType, Recovery};
use softhca_fabric::{Action, BitPosition, Choice, IcrcPolicy, PacketClass, PacketClasses, Repeat};
use softhca_wire::Mtu;
use std::num::NonZeroU32;

/// All inputs of a run.
#[derive(Clone, Debug)]
pub struct Walk {
    pub seed: u64,
    pub kind: QpType,
    pub recovery: Recovery,
    pub acks: AckPolicy,
    pub ack_request_every: u32,
    pub mtu: Mtu,
    /// Maximum outstanding READs and atomics.
    pub max_rd_atomic: u8,
    /// The RNR timer code.
    pub rnr_timer: u8,
    pub hosts: usize,
    /// The queue pairs of a host take receives from one shared receive queue. XRC always does.
    pub shared_receives: bool,
    /// End-to-end credits.
    pub credits: bool,
    /// The memory window through which peers access the target of a direction, if any, by connection and side.
    pub windows: Vec<Option<Window>>,
    /// The initial PSNs of each connection.
    pub psns: Vec<[u32; 2]>,
    pub faults: Vec<RandomFault>,
    pub steps: Vec<Step>,
}

/// A fault rule for every link.
#[derive(Clone, Debug)]
pub struct RandomFault {
    pub classes: Option<PacketClasses>,
    pub repeat: Repeat,
    pub action: Action,
}

/// A memory window.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub kind: MemoryWindowType,
    pub zero_based: bool,
}

/// One step of the walk. Directions are taken modulo their number.
#[derive(Clone, Debug)]
pub enum Step {
    /// Posts a request at the sending end of a direction.
    Post {
        direction: usize,
        request: Request,
    },
    /// Posts receives at the receiving end of a direction.
    Receive {
        direction: usize,
        count: usize,
    },
    /// Lets time pass.
    Run {
        nanoseconds: u64,
    },
    /// Moves the sending queue pair of a direction to SQD, or back to RTS.
    Drain {
        direction: usize,
    },
    Resume {
        direction: usize,
    },
    /// Binds the window of a direction anew, under another key, if nothing is outstanding.
    Rebind {
        direction: usize,
    },
}

/// A request in terms that survive shrinking: offsets and sizes are reduced to their ranges later.
#[derive(Clone, Debug)]
pub struct Request {
    pub verb: Verb,
    /// Whole packets, plus or minus a few bytes.
    pub packets: u32,
    pub extra_bytes: i32,
    /// The number of SGEs.
    pub sges: usize,
    /// The offset into the peer's memory, in units of eight bytes.
    pub remote_slot: u64,
    pub immediate: bool,
    pub signalled: bool,
    pub fence: bool,
    pub inline: bool,
    /// Sends the result of the last READ; needs a fence.
    pub forwards_read: bool,
    pub bad_key: Option<BadKey>,
}

/// An invalid key of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadKey {
    Lkey,
    Rkey,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Send,
    Write,
    Read,
    CompareSwap,
    FetchAdd,
}

/// The level of faults on the links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultLevel {
    /// No faults.
    None,
    /// Duplicates only, which are not a loss.
    Duplicates,
    /// So few faults that no retry count is exhausted.
    Few,
    /// About one packet in a hundred: independent retries do not all fail.
    Rare,
    /// Any faults.
    Many,
}

fn any_request(kind: QpType) -> impl Strategy<Value = Request> {
    let verbs = match kind {
        QpType::Rc | QpType::XrcInitiator => {
            vec![Verb::Send, Verb::Write, Verb::Read, Verb::CompareSwap, Verb::FetchAdd]
        }
        QpType::Uc => vec![Verb::Send, Verb::Write],
        _ => vec![Verb::Send],
    };
    let sizes = (select(verbs), 0..=4u32, -1..=3i32, 1..=3usize, 0..=600u64);
    let flags = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.2));
    let flaw = prop::option::weighted(0.01, select(vec![BadKey::Lkey, BadKey::Rkey]));
    (sizes, flags, prop::bool::weighted(0.2), flaw).prop_map(
        |((verb, packets, odd, sges, place), (immediate, signalled, fence, inline), relay, flaw)| Request {
            verb,
            packets,
            extra_bytes: odd,
            sges,
            remote_slot: place,
            immediate,
            signalled,
            fence,
            inline,
            forwards_read: relay,
            bad_key: flaw,
        },
    )
}

fn any_step(kind: QpType) -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..6usize, any_request(kind)).prop_map(|(direction, request)| Step::Post { direction, request }),
        3 => (0..6usize, 1..=4usize).prop_map(|(direction, count)| Step::Receive { direction, count }),
        2 => select(vec![100, 1_000, 3_000, 20_000, 200_000, 2_000_000])
            .prop_map(|nanoseconds| Step::Run { nanoseconds }),
        1 => (0..6usize, 0..3usize).prop_map(|(direction, what)| match what {
            0 => Step::Drain { direction },
            1 => Step::Resume { direction },
            _ => Step::Rebind { direction },
        }),
    ]
}

fn any_action(level: FaultLevel) -> BoxedStrategy<Action> {
    let duplicate = (1..=2u32).prop_map(|copies| Action::Duplicate { copies });
    let reorder = (1..=5u32, 1_000..400_000u64).prop_map(|(by, within_ns)| Action::Reorder {
        by: NonZeroU32::new(by).expect("at least one"),
        within_ns,
    });
    let delay = prop_oneof![1..10_000u64, 500_000..1_200_000u64].prop_map(|ns| Action::Delay { ns });
    let corrupt = Action::Corrupt { bit: BitPosition::Random, icrc: IcrcPolicy::Stale };
    match level {
        FaultLevel::Duplicates => duplicate.boxed(),
        _ => {
            prop_oneof![4 => Just(Action::Drop), 2 => duplicate, 2 => reorder, 1 => delay, 1 => Just(corrupt)]
                .boxed()
        }
    }
}

fn any_fault(level: FaultLevel) -> impl Strategy<Value = RandomFault> {
    let classes = prop_oneof![
        3 => Just(None),
        2 => Just(Some(PacketClasses::Data)),
        1 => select(vec![PacketClass::Ack, PacketClass::ReadResponse, PacketClass::AtomicResponse, PacketClass::RnrNak])
            .prop_map(|class| Some(PacketClasses::Only(class))),
    ];
    let once = (0..30u64).prop_map(|skip| Repeat { skip, times: Some(1), ..Repeat::default() });
    let often = (1..150u32)
        .prop_map(|per_mille| Repeat::choice(Choice::Probability { per_billion: per_mille * 1_000_000 }));
    let rarely = (1..15u32)
        .prop_map(|per_mille| Repeat::choice(Choice::Probability { per_billion: per_mille * 1_000_000 }));
    let repeat = match level {
        FaultLevel::Few => once.boxed(),
        FaultLevel::Rare => rarely.boxed(),
        _ => prop_oneof![once, often].boxed(),
    };
    (classes, repeat, any_action(level)).prop_map(|(classes, repeat, action)| RandomFault {
        classes,
        repeat,
        action,
    })
}

fn any_window(kind: QpType) -> BoxedStrategy<Option<Window>> {
    let kinds = match kind {
        QpType::Ud => return Just(None).boxed(),
        // A window of type 2 belongs to the queue pair that binds it, and an XRC target binds nothing.
        QpType::XrcInitiator => vec![MemoryWindowType::Type1],
        _ => vec![MemoryWindowType::Type1, MemoryWindowType::Type2],
    };
    let window = (select(kinds), any::<bool>()).prop_map(|(kind, zero_based)| Window { kind, zero_based });
    prop::option::weighted(0.4, window).boxed()
}

/// Walks over queue pairs of one type.
pub fn any_walk(kind: QpType, recovery: Recovery, level: FaultLevel) -> impl Strategy<Value = Walk> {
    let faults = match level {
        FaultLevel::None => 0..1usize,
        _ => 1..4,
    };
    let near_the_wrap = 0x00ff_fff0..0x0100_0010u32;
    let psn = prop_oneof![Just(0), near_the_wrap.prop_map(|psn| psn & 0xff_ffff), 0..0x100_0000u32];
    let device = (
        select(vec![AckPolicy::PerRequest, AckPolicy::Coalesce]),
        select(vec![1, 2, 3, 64u32]),
        select(Mtu::ALL.to_vec()),
        1..=4u8,
        select(vec![1, 5, 12u8]),
    );
    let scene = (any::<u64>(), 2..=3usize, vec([psn.clone(), psn], 1..=3));
    let features = (any::<bool>(), any::<bool>(), vec(any_window(kind), 6));
    (scene, device, features, vec(any_fault(level), faults), vec(any_step(kind), 1..40)).prop_map(
        move |(
            (seed, hosts, psns),
            (acks, ack_request_every, mtu, reads, rnr_timer),
            (shared_receives, credits, windows),
            faults,
            steps,
        )| Walk {
            seed,
            // UC queue pairs cannot use a shared receive queue.
            shared_receives: kind == QpType::XrcInitiator || shared_receives && kind != QpType::Uc,
            credits,
            windows,
            kind,
            recovery,
            acks,
            ack_request_every,
            mtu,
            max_rd_atomic: reads,
            rnr_timer,
            hosts,
            psns,
            faults,
            steps,
        },
    )
}
