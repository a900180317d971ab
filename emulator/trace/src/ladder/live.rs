//! Ladders of packets as they come: each packet is a row at once, and nothing is drawn twice.

use super::builder::{LadderBuilder, packet_step};
use super::draw::Canvas;
use super::step::matches_qpn;
use super::{Emphasis, LadderStyle, Side, Step};
use crate::{NameTable, Packet};
use softhca_wire::Qpn;
use std::collections::BTreeMap;

/// Draws the rows of several ladders as one text: where another connection continues, its heading is repeated.
#[derive(Debug)]
pub struct LiveLadder {
    builder: LadderBuilder,
    style: LadderStyle,
    connections: Vec<Canvas>,
    /// The connection of each flow, and the side that it comes from.
    connection_of_flow: BTreeMap<usize, (usize, Side)>,
    current: Option<usize>,
}

impl LiveLadder {
    /// Nothing was seen yet.
    pub fn new(names: NameTable, style: LadderStyle) -> LiveLadder {
        LiveLadder {
            builder: LadderBuilder::new(names),
            style,
            connections: Vec::new(),
            connection_of_flow: BTreeMap::new(),
            current: None,
        }
    }

    /// The rows for the next packet of a capture, if it concerns this queue pair: its number, decimal or with
    /// `0x`. Empty if there is nothing to draw.
    pub fn draw_packet(&mut self, draw_packet: &Packet<'_>, queue_pair: Option<&str>) -> String {
        let Some(sent) = self.builder.ladder_packet(draw_packet) else { return String::new() };
        let flow = self.builder.flows().get(sent.flow);
        let ends = [flow.from_qp, Some(flow.to.qpn)];
        if queue_pair.is_some_and(|wanted| !matches_qpn(wanted, &ends)) {
            return String::new();
        }
        let (index, side) = self.locate(sent.flow);
        let requester = if sent.opcode.operation().is_request() { side } else { side.opposite() };
        let unseen = sent.unseen_text(self.builder.flows(), self.builder.names());
        let unseen = unseen.map(|text| Step::note(draw_packet.time_ns, requester, Emphasis::Unusual, text));
        let mut step =
            packet_step(&[(draw_packet.time_ns, sent)], self.builder.flows(), self.builder.names());
        let [own, other] = step.outstanding_delta;
        (step.side, step.outstanding_delta) =
            (side, if side == Side::Left { [own, other] } else { [other, own] });
        let names = self.names(&step.side, ends, draw_packet);
        let is_new = self.current.replace(index) != Some(index);
        let canvas = &mut self.connections[index];
        if is_new {
            canvas.repeat_heading(&names);
        }
        unseen.iter().for_each(|step| canvas.write_step(step));
        canvas.write_step(&step);
        canvas.take_text()
    }

    fn names(&self, side: &Side, ends: [Option<Qpn>; 2], packet: &Packet<'_>) -> [String; 2] {
        let crate::PacketContents::Roce(roce) = &packet.contents else { return Default::default() };
        let network = &roce.frame.network;
        let names = self.builder.names();
        let names = [
            names.queue_pair_heading(network.source(), ends[0]),
            names.queue_pair_heading(network.destination(), ends[1]),
        ];
        let [own, other] = names;
        if *side == Side::Left { [own, other] } else { [other, own] }
    }

    /// The connection of a flow, and the side that it comes from. The host that is seen first is on the left.
    fn locate(&mut self, flow: usize) -> (usize, Side) {
        if let Some(place) = self.connection_of_flow.get(&flow) {
            return *place;
        }
        let reverse = self.builder.flows().reverse(flow);
        let place = match reverse.and_then(|other| self.connection_of_flow.get(&other)) {
            Some((index, side)) => (*index, side.opposite()),
            None => {
                self.connections.push(Canvas::live(self.style));
                (self.connections.len() - 1, Side::Left)
            }
        };
        self.connection_of_flow.insert(flow, place);
        place
    }
}
