//! The format that `ibnetdiscover` prints and `ibsim` reads.

use super::{MAX_FILE, MAX_NODES, MAX_PORTS, NodeKind, PortId, Topology, TopologyError, TopologyNode};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

/// The first GUIDs of nodes whose file states none.
const HCA_GUIDS: u64 = 0x0010_0000;
const SWITCH_GUIDS: u64 = 0x0020_0000;
/// GUIDs of HCAs without stated ones are this far apart, which leaves room for ports.
const GUID_STEP: u64 = 0x100;

/// The rest of a line, with the position of its start.
struct Cursor<'a> {
    rest: &'a str,
    line: usize,
    column: usize,
}

impl<'a> Cursor<'a> {
    fn error(&self, reason: impl Into<String>) -> TopologyError {
        TopologyError::Line { line: self.line, column: self.column, reason: reason.into() }
    }

    fn advance(&mut self, bytes: usize) -> &'a str {
        let (skipped, rest) = self.rest.split_at(bytes);
        self.column += skipped.chars().count();
        self.rest = rest;
        skipped
    }

    fn skip_space(&mut self) {
        self.advance(self.rest.len() - self.rest.trim_start().len());
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.rest.starts_with(text);
        if found {
            self.advance(text.len());
        }
        found
    }

    /// The text between two delimiters at this position.
    fn delimited(&mut self, open: char, close: char) -> Result<&'a str, TopologyError> {
        if !self.rest.starts_with(open) {
            return Err(self.error(format!("expected {open}")));
        }
        let Some(end) = self.rest[1..].find(close) else {
            return Err(self.error(format!("{open} without {close}")));
        };
        Ok(&self.advance(end + 2)[1..=end])
    }

    fn port(&mut self) -> Result<u8, TopologyError> {
        let at = Cursor { ..*self };
        let text = self.delimited('[', ']')?;
        text.parse().map_err(|_| at.error(format!("{text:?} is not a port number")))
    }

    fn word(&mut self) -> &'a str {
        let end = self.rest.find(char::is_whitespace).unwrap_or(self.rest.len());
        self.advance(end)
    }
}

/// One end of a link line, to be resolved when all nodes are known.
struct LinkLine<'a> {
    from: PortId,
    to: &'a str,
    to_port: u8,
    at: Cursor<'a>,
}

pub(super) fn parse(text: &str) -> Result<Topology, TopologyError> {
    if text.len() > MAX_FILE {
        return Err(TopologyError::TooLarge(text.len()));
    }
    let mut topology = Topology::default();
    let mut names = BTreeMap::new();
    let mut links = Vec::new();
    let mut stated_guid = None;
    let mut guids = BTreeSet::new();
    for (index, line) in text.lines().enumerate() {
        let mut at = Cursor { rest: line, line: index + 1, column: 1 };
        at.skip_space();
        if at.rest.is_empty() || at.rest.starts_with('#') {
            continue;
        }
        if at.rest.starts_with('[') {
            links.push(parse_link(&mut topology, at)?);
            continue;
        }
        let start = Cursor { ..at };
        let word = at.word();
        if let Some((key, value)) = word.split_once('=') {
            if matches!(key, "switchguid" | "caguid" | "rtguid") {
                stated_guid =
                    Some(guid(value).ok_or_else(|| start.error(format!("{value:?} is not a GUID")))?);
            }
            continue;
        }
        let kind = match word {
            "Switch" => NodeKind::Switch,
            "Ca" | "Hca" | "Rt" | "Router" => NodeKind::Hca,
            "include" | "do" => {
                return Err(start.error(format!(
                    "{word:?} is a command of ibsim, which topology files here do not have"
                )));
            }
            _ => return Err(start.error(format!("{word:?} is not Switch, Ca, Hca, a link or a comment"))),
        };
        let (name, node) = parse_node(at, kind, stated_guid.take(), topology.nodes.len())?;
        if topology.nodes.len() == MAX_NODES {
            return Err(start.error(format!("more than {MAX_NODES} nodes")));
        }
        if !guids.insert(node.guid) {
            return Err(start.error(format!("another node has the GUID {:#x}", node.guid)));
        }
        if names.insert(name, topology.nodes.len()).is_some() {
            return Err(start.error(format!("another node has the name {name:?}")));
        }
        topology.nodes.push(node);
    }
    links.into_iter().try_for_each(|link| connect(&mut topology, &names, &link))?;
    Ok(topology)
}

/// A GUID, perhaps with a port GUID in parentheses.
fn guid(text: &str) -> Option<u64> {
    let text = text.split('(').next()?.trim_start_matches("0x");
    u64::from_str_radix(text, 16).ok().filter(|guid| *guid != 0)
}

fn parse_node<'a>(
    mut at: Cursor<'a>,
    kind: NodeKind,
    stated_guid: Option<u64>,
    index: usize,
) -> Result<(&'a str, TopologyNode), TopologyError> {
    at.skip_space();
    let start = Cursor { ..at };
    let text = at.word();
    let ports = text.parse().ok().filter(|ports| (1..=MAX_PORTS).contains(ports));
    let ports =
        ports.ok_or_else(|| start.error(format!("{text:?} is not a number of ports: 1 to {MAX_PORTS}")))?;
    at.skip_space();
    let name = at.delimited('"', '"')?;
    let comment = at.rest.split_once('#').map(|(_, comment)| comment.trim_start());
    let comment = comment.and_then(|comment| comment.strip_prefix('"')?.split('"').next());
    let first = match kind {
        NodeKind::Hca => HCA_GUIDS,
        NodeKind::Switch => SWITCH_GUIDS,
    };
    // Names of ibnetdiscover have the GUID: H-0002c903000a1b2c.
    let from_name = name.split_once('-').filter(|(prefix, _)| prefix.len() == 1);
    let guid = stated_guid.or_else(|| from_name.and_then(|(_, text)| guid(text)));
    let guid = guid.unwrap_or(first + index as u64 * GUID_STEP);
    Ok((name, TopologyNode::new(kind, comment.unwrap_or(name).to_string(), guid, ports)))
}

fn parse_link<'a>(topology: &mut Topology, mut at: Cursor<'a>) -> Result<LinkLine<'a>, TopologyError> {
    let start = Cursor { ..at };
    let Some(node) = topology.nodes.len().checked_sub(1) else {
        return Err(start.error("a link before the first node"));
    };
    let from = PortId { node, port: at.port()? };
    let count = topology.nodes[node].port_count();
    if from.port == 0 || from.port > count {
        return Err(start.error(format!("the node has ports 1 to {count}")));
    }
    if at.rest.starts_with('(') {
        topology.nodes[node].port_guids[usize::from(from.port)] = guid(at.delimited('(', ')')?);
    }
    at.skip_space();
    let to_at = Cursor { ..at };
    let to = at.delimited('"', '"')?;
    let to_port = at.port()?;
    if at.take("(") && !at.rest.contains(')') {
        return Err(at.error("( without )"));
    }
    Ok(LinkLine { from, to, to_port, at: to_at })
}

fn connect(
    topology: &mut Topology,
    names: &BTreeMap<&str, usize>,
    LinkLine { from, to, to_port, at }: &LinkLine<'_>,
) -> Result<(), TopologyError> {
    let node = *names.get(to).ok_or_else(|| at.error(format!("no node has the name {to:?}")))?;
    let count = topology.nodes[node].port_count();
    if *to_port == 0 || *to_port > count {
        return Err(at.error(format!("{to:?} has ports 1 to {count}")));
    }
    let other = PortId { node, port: *to_port };
    if *from == other {
        return Err(at.error("a port is linked to itself"));
    }
    for (port, peer) in [(*from, other), (other, *from)] {
        if topology.peer(port).is_some_and(|present| present != peer) {
            let name = &topology.nodes[port.node].description;
            return Err(at.error(format!("port {} of {name:?} has another link", port.port)));
        }
    }
    topology.connect(*from, other);
    Ok(())
}
