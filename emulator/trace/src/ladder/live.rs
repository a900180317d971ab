//! Ladders of packets as they come: each packet is a row at once, and nothing is drawn twice.

use super::draw::Canvas;
use super::gather::{Ladders, arrow};
use super::{Side, Style, is_one_of};
use crate::{Cast, Packet};
use softhca_wire::Qpn;
use std::collections::BTreeMap;

/// Draws the rows of several ladders as one text: where another connection goes on, its heading is repeated.
#[derive(Debug)]
pub struct LiveLadders {
    gathered: Ladders,
    style: Style,
    connections: Vec<Canvas>,
    /// The connection of each flow, and the side that it comes from.
    of_flow: BTreeMap<usize, (usize, Side)>,
    current: Option<usize>,
}

impl LiveLadders {
    /// Nothing was seen yet.
    pub fn new(cast: Cast, style: Style) -> LiveLadders {
        LiveLadders {
            gathered: Ladders::new(cast),
            style,
            connections: Vec::new(),
            of_flow: BTreeMap::new(),
            current: None,
        }
    }

    /// The rows for the next packet of a capture, if it concerns this queue pair: its number, decimal or with
    /// `0x`. Empty if there is nothing to draw.
    pub fn packet(&mut self, packet: &Packet<'_>, queue_pair: Option<&str>) -> String {
        let Some(sent) = self.gathered.sight(packet) else { return String::new() };
        let flow = self.gathered.flows().get(sent.flow);
        let ends = [flow.from_qp, Some(flow.to.qpn)];
        if queue_pair.is_some_and(|wanted| !is_one_of(wanted, &ends)) {
            return String::new();
        }
        let (index, side) = self.place(sent.flow);
        let mut step = arrow(&[(packet.time_ns, sent)], self.gathered.flows(), self.gathered.cast());
        let [own, other] = step.bars;
        (step.side, step.bars) = (side, if side == Side::Left { [own, other] } else { [other, own] });
        let names = self.names(&step.side, ends, packet);
        let is_new = self.current.replace(index) != Some(index);
        let canvas = &mut self.connections[index];
        if is_new {
            canvas.head(&names);
        }
        canvas.step(&step);
        canvas.take()
    }

    fn names(&self, side: &Side, ends: [Option<Qpn>; 2], packet: &Packet<'_>) -> [String; 2] {
        let crate::Contents::Roce(roce) = &packet.contents else { return Default::default() };
        let network = &roce.frame.network;
        let cast = self.gathered.cast();
        let names = [cast.heading(network.source(), ends[0]), cast.heading(network.destination(), ends[1])];
        let [own, other] = names;
        if *side == Side::Left { [own, other] } else { [other, own] }
    }

    /// The connection of a flow, and the side that it comes from. Whoever is seen first is on the left.
    fn place(&mut self, flow: usize) -> (usize, Side) {
        if let Some(place) = self.of_flow.get(&flow) {
            return *place;
        }
        let reverse = self.gathered.flows().reverse(flow);
        let place = match reverse.and_then(|other| self.of_flow.get(&other)) {
            Some((index, side)) => (*index, side.across()),
            None => {
                self.connections.push(Canvas::live(self.style));
                (self.connections.len() - 1, Side::Left)
            }
        };
        self.of_flow.insert(flow, place);
        place
    }
}
