//! The filter language of `softhca trace`, `softhca exec` and the explorer: `qp == 0x12 && psn > +100 && nak`.
//!
//! `explorer/page/filter.js` is its twin; `filter_cases.json` tests both.

use crate::ladder::Flows;
use crate::sequence::Arrival;
use crate::{Mad, Packet, PacketContents};
use serde::Deserialize;
use softhca_fabric::Endpoint;
use softhca_wire::{Ecn, Opcode, Operation, Syndrome};
use std::net::IpAddr;
use thiserror::Error;

/// A field of the language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterField {
    /// The short name.
    pub name: &'static str,
    /// The names in Wireshark.
    pub wireshark: &'static [&'static str],
    /// The meaning.
    pub description: &'static str,
}

macro_rules! fields {
    ($($name:literal [$($wireshark:literal),*] $description:literal;)*) => {
        /// The fields that have a value.
        pub const FILTER_FIELDS: &[FilterField] =
            &[$( FilterField { name: $name, wireshark: &[$($wireshark),*], description: $description }, )*];
    };
}

fields! {
    "number" ["frame.number"] "number of the packet in the file, from 1";
    "time" ["frame.time_relative"] "seconds since the first packet";
    "src" ["ip.src", "ipv6.src"] "source address";
    "dst" ["ip.dst", "ipv6.dst"] "destination address";
    "addr" ["ip.addr", "ipv6.addr"] "source or destination address";
    "port" ["udp.srcport"] "UDP source port";
    "ecn" ["ip.dsfield.ecn"] "ECN field: 3 is a mark (CE)";
    "opcode" ["infiniband.bth.opcode"] "opcode: a number, or a name such as WRITE_FIRST";
    "qp" [] "queue pair at either end, where known";
    "dest_qp" ["infiniband.bth.destqp"] "destination queue pair";
    "psn" ["infiniband.bth.psn"] "PSN; with a sign, counted from the first request of the flow";
    "ack_req" ["infiniband.bth.a"] "1 if an acknowledgement is requested";
    "pad" ["infiniband.bth.padcnt"] "pad bytes";
    "pkey" ["infiniband.bth.p_key"] "partition key";
    "payload" [] "bytes of payload";
    "va" ["infiniband.reth.va"] "virtual address";
    "rkey" ["infiniband.reth.r_key"] "remote key";
    "len" ["infiniband.reth.dmalen"] "length of a WRITE or READ";
    "syndrome" ["infiniband.aeth.syndrome"] "syndrome of an ACK or NAK";
    "msn" ["infiniband.aeth.msn"] "message sequence number";
    "qkey" ["infiniband.deth.q_key"] "Q_Key of a datagram";
    "src_qp" ["infiniband.deth.srcqp"] "sending queue pair of a datagram";
    "imm" ["infiniband.immdt"] "immediate data";
}

/// The words that stand alone: each is true or false of a packet.
pub const FILTER_FLAGS: &[(&str, &str)] = &[
    ("request", "a request"),
    ("response", "a response, ACK or NAK"),
    ("send", "part of a SEND"),
    ("write", "part of an RDMA WRITE"),
    ("read", "a READ request or response"),
    ("atomic", "an atomic request or its response"),
    ("ack", "an ACK"),
    ("nak", "a NAK, RNR NAK included"),
    ("rnr", "an RNR NAK"),
    ("cnp", "a CNP"),
    ("cm", "a message of the connection manager"),
    ("ce", "a packet with an ECN mark"),
    ("retransmission", "a request whose PSN was sent before"),
    ("gap", "a request before which PSNs were not seen"),
    ("lost", "a packet that was lost: in two joined captures, and in the explorer"),
    ("bad_icrc", "a packet with a wrong ICRC"),
    ("malformed", "a malformed packet"),
];

/// The fields of a packet that the language sees. Absent fields compare as false.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct FilterInput {
    /// The fields with numbers, by their short name.
    pub numbers: std::collections::BTreeMap<String, Vec<f64>>,
    /// Source and destination address.
    pub addresses: Option<(IpAddr, IpAddr)>,
    /// The opcode's name with its service: `RC WRITE_FIRST`.
    pub opcode: String,
    /// The PSN relative to the first of its flow.
    pub relative_psn: Option<i64>,
    /// The words that are true.
    pub flags: Vec<String>,
}

impl FilterInput {
    fn set(&mut self, name: &str, value: impl Into<f64>) {
        self.numbers.entry(name.into()).or_default().push(value.into());
    }

    fn flag(&mut self, name: &str, is_set: bool) {
        if is_set {
            self.flags.push(name.into());
        }
    }
}

/// Why an expression is not one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("column {column}: {message}")]
pub struct FilterError {
    /// The column of the error, counted from 1.
    pub column: usize,
    /// The error and its correction.
    pub message: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Value {
    Number(f64),
    Relative(i64),
    Address(IpAddr),
    Text(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    Contains,
}

#[derive(Clone, Debug, PartialEq)]
enum Node {
    Or(Box<Node>, Box<Node>),
    And(Box<Node>, Box<Node>),
    Not(Box<Node>),
    Present(&'static str),
    Flag(&'static str),
    Compare(&'static str, Operator, Value),
}

impl Node {
    fn uses(&self, name: &str) -> bool {
        match self {
            Node::Or(one, other) | Node::And(one, other) => one.uses(name) || other.uses(name),
            Node::Not(node) => node.uses(name),
            Node::Present(used) | Node::Flag(used) | Node::Compare(used, ..) => *used == name,
        }
    }
}

/// A parsed expression.
#[derive(Clone, Debug, PartialEq)]
pub struct Filter {
    root: Node,
}

impl std::str::FromStr for Filter {
    type Err = FilterError;

    fn from_str(text: &str) -> Result<Filter, FilterError> {
        let mut parser = Parser { tokens: tokens(text)?, at: 0, end: text.chars().count() + 1 };
        let root = parser.or()?;
        match parser.peek() {
            None => Ok(Filter { root }),
            Some(token) => {
                Err(parser.error(format!("`{token}` is unexpected here; join conditions with && or ||")))
            }
        }
    }
}

impl Filter {
    /// Whether a packet passes.
    pub fn matches(&self, input: &FilterInput) -> bool {
        evaluate(&self.root, input)
    }

    /// Whether it uses a field or word, given by its short name.
    pub fn uses(&self, name: &str) -> bool {
        self.root.uses(name)
    }
}

/// The tokens with their columns.
fn tokens(text: &str) -> Result<Vec<(usize, String)>, FilterError> {
    let characters: Vec<char> = text.chars().collect();
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < characters.len() {
        let start = at;
        let rest = &characters[at..];
        let token: String = match rest {
            [space, ..] if space.is_whitespace() => {
                at += 1;
                continue;
            }
            ['&', '&', ..] | ['|', '|', ..] | ['=' | '!' | '<' | '>', '=', ..] => rest[..2].iter().collect(),
            ['(' | ')' | '!' | '<' | '>', ..] => rest[..1].iter().collect(),
            ['"', text @ ..] => {
                let Some(length) = text.iter().position(|character| *character == '"') else {
                    return Err(FilterError {
                        column: start + 1,
                        message: "the string has no closing quote".into(),
                    });
                };
                rest[..length + 2].iter().collect()
            }
            _ => {
                let is_word = |c: &&char| c.is_alphanumeric() || "._:+-/".contains(**c);
                rest.iter().take_while(is_word).collect()
            }
        };
        if token.is_empty() {
            let message = format!("`{}` is not part of the language", characters[start]);
            return Err(FilterError { column: start + 1, message });
        }
        at += token.chars().count();
        tokens.push((start + 1, token));
    }
    Ok(tokens)
}

struct Parser {
    tokens: Vec<(usize, String)>,
    at: usize,
    /// The column after the last character.
    end: usize,
}

impl Parser {
    fn peek(&self) -> Option<&str> {
        self.tokens.get(self.at).map(|(_, token)| token.as_str())
    }

    fn take(&mut self, words: &[&str]) -> bool {
        let found = self.peek().is_some_and(|token| words.contains(&token));
        self.at += usize::from(found);
        found
    }

    fn error(&self, message: String) -> FilterError {
        FilterError { column: self.tokens.get(self.at).map_or(self.end, |(column, _)| *column), message }
    }

    fn or(&mut self) -> Result<Node, FilterError> {
        let mut node = self.and()?;
        while self.take(&["||", "or"]) {
            node = Node::Or(Box::new(node), Box::new(self.and()?));
        }
        Ok(node)
    }

    fn and(&mut self) -> Result<Node, FilterError> {
        let mut node = self.not()?;
        while self.take(&["&&", "and"]) {
            node = Node::And(Box::new(node), Box::new(self.not()?));
        }
        Ok(node)
    }

    fn not(&mut self) -> Result<Node, FilterError> {
        if self.take(&["!", "not"]) {
            return Ok(Node::Not(Box::new(self.not()?)));
        }
        if self.take(&["("]) {
            let node = self.or()?;
            return if self.take(&[")"]) {
                Ok(node)
            } else {
                Err(self.error("a closing ) is missing".into()))
            };
        }
        self.condition()
    }

    fn condition(&mut self) -> Result<Node, FilterError> {
        let Some(word) = self.peek().map(str::to_owned) else {
            return Err(self.error("a condition is missing, such as psn == 7 or nak".into()));
        };
        if let Some((flag, _)) = FILTER_FLAGS.iter().find(|(name, _)| *name == word) {
            self.at += 1;
            return Ok(Node::Flag(flag));
        }
        let found =
            FILTER_FIELDS.iter().find(|field| field.name == word || field.wireshark.contains(&word.as_str()));
        let Some(field) = found else {
            return Err(self.error(unknown_field(&word)));
        };
        self.at += 1;
        let operator = match self.peek() {
            Some("==" | "eq") => Operator::Equal,
            Some("!=" | "ne") => Operator::NotEqual,
            Some("<" | "lt") => Operator::Less,
            Some("<=" | "le") => Operator::LessOrEqual,
            Some(">" | "gt") => Operator::Greater,
            Some(">=" | "ge") => Operator::GreaterOrEqual,
            Some("contains") => Operator::Contains,
            _ => return Ok(Node::Present(field.name)),
        };
        self.at += 1;
        let value = self.value(field.name, operator)?;
        self.at += 1;
        Ok(Node::Compare(field.name, operator, value))
    }

    /// The value of a comparison; it is not taken yet, so that errors point at it.
    fn value(&self, field: &str, operator: Operator) -> Result<Value, FilterError> {
        let Some(token) = self.peek().filter(|token| !["&&", "||", "(", ")"].contains(token)) else {
            return Err(self.error(format!("a value for {field} is missing")));
        };
        let is_order = !matches!(operator, Operator::Equal | Operator::NotEqual);
        match field {
            "src" | "dst" | "addr" => match token.parse() {
                Ok(address) if !is_order => Ok(Value::Address(address)),
                Ok(_) => {
                    Err(self.error(format!("addresses are compared with == and !=, not otherwise: {field}")))
                }
                Err(_) => Err(self.error(format!("`{token}` is no IP address"))),
            },
            "opcode" => match number(token) {
                Some(number) if operator != Operator::Contains => Ok(Value::Number(number)),
                _ if matches!(operator, Operator::Equal | Operator::NotEqual | Operator::Contains) => {
                    Ok(Value::Text(token.trim_matches('"').to_uppercase()))
                }
                _ => Err(self.error("names of opcodes are compared with ==, != and contains".into())),
            },
            _ if operator == Operator::Contains => {
                Err(self.error(format!("contains is for names of opcodes; compare {field} with a number")))
            }
            "psn" if token.starts_with(['+', '-']) => match token.trim_start_matches('+').parse() {
                Ok(relative) => Ok(Value::Relative(relative)),
                Err(_) => Err(self.error(format!("`{token}` is no number"))),
            },
            _ => match number(token) {
                Some(number) => Ok(Value::Number(number)),
                None => Err(self.error(format!("`{token}` is no number; {field} is compared with one"))),
            },
        }
    }
}

/// A number: decimal, with a fraction, or with 0x.
fn number(token: &str) -> Option<f64> {
    match token.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok().map(|number| number as f64),
        None if token.starts_with(|first: char| first.is_ascii_digit()) => token.parse().ok(),
        None => None,
    }
}

fn unknown_field(word: &str) -> String {
    let names = FILTER_FIELDS
        .iter()
        .flat_map(|field| [field.name].into_iter().chain(field.wireshark.iter().copied()));
    let names = names.chain(FILTER_FLAGS.iter().map(|(name, _)| *name));
    let closest =
        names.map(|name| (strsim::levenshtein(word, name), name)).min_by_key(|(distance, _)| *distance);
    match closest {
        Some((distance, name)) if distance <= 2.max(word.len() / 4) => {
            format!("unknown field `{word}`; did you mean {name}?")
        }
        _ => format!(
            "unknown field `{word}`; some fields are qp, psn, opcode and src, some words are nak and retransmission"
        ),
    }
}

fn evaluate(node: &Node, input: &FilterInput) -> bool {
    match node {
        Node::Or(one, other) => evaluate(one, input) || evaluate(other, input),
        Node::And(one, other) => evaluate(one, input) && evaluate(other, input),
        Node::Not(node) => !evaluate(node, input),
        Node::Flag(name) => input.flags.iter().any(|flag| flag == name),
        Node::Present(name) => match *name {
            "src" | "dst" | "addr" => input.addresses.is_some(),
            "opcode" => !input.opcode.is_empty(),
            name => input.numbers.contains_key(name),
        },
        Node::Compare(name, operator, value) => compare(name, *operator, value, input),
    }
}

/// A field with several values compares as true if one of them does; `!=` if none is equal.
fn compare(name: &str, operator: Operator, value: &Value, input: &FilterInput) -> bool {
    let holds = |ordering: Option<std::cmp::Ordering>| {
        ordering.is_some_and(|ordering| match operator {
            Operator::Equal => ordering.is_eq(),
            Operator::NotEqual => ordering.is_ne(),
            Operator::Less => ordering.is_lt(),
            Operator::LessOrEqual => ordering.is_le(),
            Operator::Greater => ordering.is_gt(),
            Operator::GreaterOrEqual => ordering.is_ge(),
            Operator::Contains => false,
        })
    };
    match value {
        Value::Relative(wanted) => holds(input.relative_psn.map(|psn| psn.cmp(wanted))),
        Value::Address(wanted) => {
            let Some((source, destination)) = input.addresses else { return false };
            let is_equal = match name {
                "src" => source == *wanted,
                "dst" => destination == *wanted,
                _ => source == *wanted || destination == *wanted,
            };
            is_equal == (operator == Operator::Equal)
        }
        Value::Text(wanted) => {
            if input.opcode.is_empty() {
                return false;
            }
            let name = input.opcode.split(' ').next_back().unwrap_or_default();
            match operator {
                Operator::Contains => input.opcode.contains(wanted.as_str()),
                operator => (name == wanted || input.opcode == *wanted) == (operator == Operator::Equal),
            }
        }
        Value::Number(wanted) => {
            let Some(values) = input.numbers.get(name).filter(|values| !values.is_empty()) else {
                return false;
            };
            match operator {
                Operator::NotEqual => values.iter().all(|value| value != wanted),
                _ => values.iter().any(|value| holds(value.partial_cmp(wanted))),
            }
        }
    }
}

/// Filters the packets of a capture in order: it follows flows, for relative PSNs and queue pairs of senders.
#[derive(Debug)]
pub struct PacketFilter {
    filter: Filter,
    flows: Flows,
    packets: u64,
}

impl PacketFilter {
    /// A filter at the start of a capture.
    pub fn new(filter: Filter) -> PacketFilter {
        PacketFilter { filter, flows: Flows::default(), packets: 0 }
    }

    /// Whether the next packet of the capture passes.
    pub fn matches(&mut self, packet: &Packet<'_>) -> bool {
        self.matches_input(packet, FilterInput::default())
    }

    /// Whether the next packet of two joined captures passes. It was lost between them, or not.
    pub fn matches_joined(&mut self, packet: &Packet<'_>, is_lost: bool) -> bool {
        let mut input = FilterInput::default();
        input.flag("lost", is_lost);
        self.matches_input(packet, input)
    }

    fn matches_input(&mut self, packet: &Packet<'_>, mut input: FilterInput) -> bool {
        self.packets += 1;
        input.set("number", self.packets as f64);
        input.set("time", packet.time_ns as f64 / 1e9);
        match &packet.contents {
            PacketContents::Roce(roce) => self.describe(roce, &mut input),
            PacketContents::Malformed(network, _) => {
                input.addresses = network.as_ref().map(|network| (network.source(), network.destination()));
                input.flag("malformed", true);
            }
            PacketContents::Pause(_) | PacketContents::Other(_) => {}
        }
        self.filter.matches(&input)
    }

    fn describe(&mut self, roce: &crate::RocePacket<'_>, input: &mut FilterInput) {
        let header = &roce.transport.header;
        let (bth, network) = (header.bth, &roce.frame.network);
        let payload = roce.transport.payload.len() as u32;
        let to = Endpoint { address: network.destination(), qpn: bth.destination_qp };
        let port = network.addressing().map_or(0, |addressing| addressing.source_port);
        let sender = header.deth.map(|deth| deth.source_qp);
        let flow = self.flows.flow_index(network.source(), sender, to, bth.opcode, port);
        let arrival = self.flows.observe(flow, header, payload).arrival;
        let is_request = bth.opcode.operation().is_request();
        let base = self.flows.base_psn(flow, is_request, &crate::NameTable::default());
        input.addresses = Some((network.source(), network.destination()));
        input.opcode = bth.opcode.to_string();
        input.relative_psn = base.map(|base| i64::from(bth.psn.distance(base)));
        input.set("port", port);
        input.set("ecn", network.traffic_class() & 3);
        input.set("opcode", bth.opcode.byte());
        input.set("qp", bth.destination_qp.value());
        if let Some(qpn) = self.flows.get(flow).from_qp {
            input.set("qp", qpn.value());
        }
        input.set("dest_qp", bth.destination_qp.value());
        input.set("psn", bth.psn.value());
        input.set("ack_req", u8::from(bth.ack_request));
        input.set("pad", bth.pad);
        input.set("pkey", bth.pkey.0);
        input.set("payload", payload);
        let reth = header.reth.map(|reth| (reth.virtual_address, reth.rkey.0));
        if let Some((va, rkey)) = reth.or(header.atomic.map(|atomic| (atomic.virtual_address, atomic.rkey.0)))
        {
            input.set("va", va as f64);
            input.set("rkey", rkey);
        }
        header.reth.iter().for_each(|reth| input.set("len", reth.dma_length));
        if let Some(aeth) = header.aeth {
            input.set("syndrome", aeth.syndrome.byte());
            input.set("msn", aeth.msn);
        }
        if let Some(deth) = header.deth {
            input.set("qkey", deth.qkey.0);
            input.set("src_qp", deth.source_qp.value());
        }
        header.immediate.iter().for_each(|immediate| input.set("imm", immediate.0));
        let operation = bth.opcode.operation();
        let syndrome = header.aeth.map(|aeth| aeth.syndrome);
        let is_ack_packet = operation == Operation::Acknowledge;
        input.flag("request", is_request);
        input.flag("response", !is_request && bth.opcode != Opcode::CNP);
        input.flag("send", operation == Operation::Send);
        input.flag("write", operation == Operation::Write);
        input.flag("read", matches!(operation, Operation::ReadRequest | Operation::ReadResponse));
        input.flag("atomic", operation.is_atomic() || operation == Operation::AtomicAcknowledge);
        input.flag("ack", is_ack_packet && matches!(syndrome, Some(Syndrome::Ack(_))));
        input.flag("nak", matches!(syndrome, Some(Syndrome::Nak(_) | Syndrome::RnrNak(_))));
        input.flag("rnr", matches!(syndrome, Some(Syndrome::RnrNak(_))));
        input.flag("cnp", bth.opcode == Opcode::CNP);
        input.flag("cm", matches!(roce.mad, Some(Mad::Cm(_))));
        input.flag("ce", roce.ecn() == Ecn::CongestionExperienced);
        input.flag("retransmission", arrival == Some(Arrival::Again));
        input.flag("gap", matches!(arrival, Some(Arrival::AfterGap { .. })));
        input.flag("bad_icrc", !roce.icrc_ok);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Cases {
        packets: std::collections::BTreeMap<String, FilterInput>,
        /// The expression, and the names of the packets that pass.
        matches: Vec<(String, Vec<String>)>,
        /// The expression, the column and the message.
        errors: Vec<(String, usize, String)>,
    }

    #[test]
    fn expressions_select_the_packets_of_the_table() {
        let cases: Cases = serde_json::from_str(include_str!("filter_cases.json")).expect("the table");
        for (expression, expected) in cases.matches {
            let filter: Filter = expression.parse().unwrap_or_else(|error| panic!("{expression}: {error}"));
            let passed: Vec<&String> = cases
                .packets
                .iter()
                .filter(|(_, input)| filter.matches(input))
                .map(|(name, _)| name)
                .collect();
            assert_eq!(passed, expected.iter().collect::<Vec<_>>(), "{expression}");
        }
        for (expression, column, message) in cases.errors {
            let error = expression.parse::<Filter>().expect_err(&expression);
            assert_eq!((error.column, error.message), (column, message), "{expression}");
        }
    }
}
