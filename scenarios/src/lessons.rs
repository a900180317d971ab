//! Scenarios of the library that programs contain.

macro_rules! library {
    ($($lesson:literal $name:literal)*) => {
        [$(($lesson, $name, include_str!(concat!("../library/", $name, ".toml")))),*]
    };
}

/// Scenarios of the library for lessons: the lesson, or 0, the name and the text. docs/playground.md links to them. The
/// playground opens with the first one.
pub const LESSON_SCENARIOS: &[(u8, &str, &str)] = &library![
    6 "fatal-lost-write-middle" 1 "access-wrong-rkey" 2 "ping-pong-latency" 3 "completion-held" 4 "ud-lost-datagram"
    5 "uc-lost-middle" 6 "gbn-lost-read-response" 7 "duplicate-atomic" 8 "cm-connect" 8 "cm-req" 8 "cm-reject"
    9 "multicast-members" 9 "multicast-lost-branch" 10 "rnr-recovers" 10 "receive-too-small" 10 "fatal-flush-order"
    11 "ecn-marks-and-cnps" 11 "incast-pfc" 11 "dcqcn-convergence" 12 "gbn-random-loss" 12 "livelock-go-back-0"
    0 "gbn-lost-write-middle" 0 "gb0-lost-write-middle" 0 "access-out-of-bounds" 0 "incast-without-pfc"
    0 "victim-flow" 0 "livelock-go-back-n"
];
