//! The performance management agent of a node: port counters (IBA 16.1).

use crate::rmpp::Datagram;
use alloc::vec;
use alloc::vec::Vec;
use softhca_wire::smp::{Method, Status};

/// Where the attribute begins in a MAD of this class.
const DATA: usize = 64;
const CLASS_PORT_INFO: u16 = 0x01;
const PORT_COUNTERS: u16 = 0x12;
const PORT_COUNTERS_EXTENDED: u16 = 0x1d;
/// A port number that stands for all ports.
const ALL_PORTS: u8 = 255;
/// AllPortSelect, extended counters, and PortXmitWait.
const CAPABILITIES: u16 = 1 << 8 | 1 << 9 | 1 << 12;
/// 4.096 µs · 2^18 is about a second.
const RESPONSE_TIME: u32 = 18;

softhca_wire::named_enum! {
    /// A counter of a port, by its name in Linux.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub enum PortCounter {
        /// Symbol errors.
        SymbolErrors => "symbol_error",
        /// Links that were trained again after an error.
        LinkErrorRecovery => "link_error_recovery",
        /// Failed link trainings: the link went down.
        LinkDowned => "link_downed",
        /// Received packets with an error.
        ReceiveErrors => "port_rcv_errors",
        /// Packets that a switch could not forward.
        RelayErrors => "port_rcv_switch_relay_errors",
        /// Packets that were not sent.
        TransmitDiscards => "port_xmit_discards",
        /// Management packets that had no room.
        Vl15Dropped => "VL15_dropped",
        /// Words of four bytes that were sent.
        TransmitData => "port_xmit_data",
        /// Words of four bytes that were received.
        ReceiveData => "port_rcv_data",
        /// Packets that were sent.
        TransmitPackets => "port_xmit_packets",
        /// Packets that were received.
        ReceivePackets => "port_rcv_packets",
        /// Ticks in which data waited and could not be sent.
        TransmitWait => "port_xmit_wait",
    }
}

/// The counters of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PortCounters([u64; PortCounter::ALL.len()]);

impl PortCounters {
    /// Adds to a counter.
    pub fn add(&mut self, counter: PortCounter, count: u64) {
        let value = &mut self.0[counter as usize];
        *value = value.saturating_add(count);
    }

    /// The value of a counter.
    pub fn get(&self, counter: PortCounter) -> u64 {
        self.0[counter as usize]
    }
}

/// A field of an attribute: the counter, its first byte and width, and its bit in CounterSelect.
type CounterField = (PortCounter, usize, usize, u32);

/// CounterSelect2 follows in the upper half.
const FIELDS: &[CounterField] = &[
    (PortCounter::SymbolErrors, 4, 2, 0),
    (PortCounter::LinkErrorRecovery, 6, 1, 1),
    (PortCounter::LinkDowned, 7, 1, 2),
    (PortCounter::ReceiveErrors, 8, 2, 3),
    (PortCounter::RelayErrors, 12, 2, 5),
    (PortCounter::TransmitDiscards, 14, 2, 6),
    (PortCounter::Vl15Dropped, 22, 2, 11),
    (PortCounter::TransmitData, 24, 4, 12),
    (PortCounter::ReceiveData, 28, 4, 13),
    (PortCounter::TransmitPackets, 32, 4, 14),
    (PortCounter::ReceivePackets, 36, 4, 15),
    (PortCounter::TransmitWait, 40, 4, 16),
];

/// All packets here are unicast ones.
const EXTENDED_FIELDS: &[CounterField] = &[
    (PortCounter::TransmitData, 8, 8, 0),
    (PortCounter::ReceiveData, 16, 8, 1),
    (PortCounter::TransmitPackets, 24, 8, 2),
    (PortCounter::ReceivePackets, 32, 8, 3),
    (PortCounter::TransmitPackets, 40, 8, 4),
    (PortCounter::ReceivePackets, 48, 8, 5),
];

/// Executes a Get or Set of a node whose ports have these counters; index 0 is the management port of a switch. Returns
/// the response.
pub fn respond(request: &Datagram, ports: &mut [&mut PortCounters], arrived: u8) -> Datagram {
    let mut response = *request;
    response[3] = Method::GET_RESP.0;
    let attribute = u16::from_be_bytes([request[16], request[17]]);
    let is_set = request[3] == Method::SET.0;
    let fields = match attribute {
        CLASS_PORT_INFO if !is_set => {
            response[DATA..].fill(0);
            response[DATA..DATA + 2].fill(1);
            response[DATA + 2..DATA + 4].copy_from_slice(&CAPABILITIES.to_be_bytes());
            response[DATA + 4..DATA + 8].copy_from_slice(&RESPONSE_TIME.to_be_bytes());
            return response;
        }
        PORT_COUNTERS => FIELDS,
        PORT_COUNTERS_EXTENDED => EXTENDED_FIELDS,
        _ => return with_status(response, Status::UNSUPPORTED_ATTRIBUTE),
    };
    let selected: Vec<usize> = match request[DATA + 1] {
        ALL_PORTS => (0..ports.len()).collect(),
        // An HCA has no port 0; older tools ask it for the port that the request arrived at.
        0 if arrived != 0 && ports.len() > arrived.into() => vec![arrived.into()],
        port if usize::from(port) < ports.len() => vec![port.into()],
        _ => return with_status(response, Status::INVALID_FIELD),
    };
    if is_set {
        let high = if attribute == PORT_COUNTERS { u32::from(request[DATA + 18]) << 16 } else { 0 };
        let select = u32::from(u16::from_be_bytes([request[DATA + 2], request[DATA + 3]])) | high;
        for (counter, at, width, _) in fields.iter().filter(|(.., bit)| select >> bit & 1 != 0) {
            let value = request[DATA + at..DATA + at + width]
                .iter()
                .fold(0, |value, byte| value << 8 | u64::from(*byte));
            selected.iter().for_each(|port| ports[*port].0[*counter as usize] = value);
        }
    }
    response[DATA + 4..].fill(0);
    for (counter, at, width, _) in fields {
        let sum = selected.iter().fold(0u64, |sum, port| sum.saturating_add(ports[*port].get(*counter)));
        // Counters stay at their highest value.
        let highest = u64::MAX >> (64 - 8 * width);
        let bytes = sum.min(highest).to_be_bytes();
        response[DATA + at..DATA + at + width].copy_from_slice(&bytes[8 - width..]);
    }
    response
}

fn with_status(mut response: Datagram, status: Status) -> Datagram {
    response[4..6].copy_from_slice(&status.0.to_be_bytes());
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: Method, attribute: u16, port: u8, select: u16) -> Datagram {
        let mut mad = [0; 256];
        (mad[0], mad[1], mad[2], mad[3]) = (1, 4, 1, method.0);
        mad[16..18].copy_from_slice(&attribute.to_be_bytes());
        mad[DATA + 1] = port;
        mad[DATA + 2..DATA + 4].copy_from_slice(&select.to_be_bytes());
        mad
    }

    #[test]
    fn counters_stay_at_their_highest_value_until_they_are_reset() {
        let mut ports = [PortCounters::default(); 3];
        ports[1].add(PortCounter::SymbolErrors, 70_000);
        ports[1].add(PortCounter::TransmitData, 72);
        ports[2].add(PortCounter::TransmitData, 1 << 40);
        let mut ask = |mad: Datagram| respond(&mad, &mut ports.each_mut(), 0);
        let response = ask(request(Method::GET, PORT_COUNTERS, 1, 0));
        assert_eq!(
            (response[3], &response[DATA + 4..DATA + 6], &response[DATA + 24..DATA + 28]),
            (0x81, &[0xff, 0xff][..], &[0, 0, 0, 72][..])
        );
        let all = ask(request(Method::GET, PORT_COUNTERS_EXTENDED, ALL_PORTS, 0));
        assert_eq!(all[DATA + 8..DATA + 16], ((1u64 << 40) + 72).to_be_bytes());
        ask(request(Method::SET, PORT_COUNTERS, 1, 1));
        let response = ask(request(Method::GET, PORT_COUNTERS, 1, 0));
        assert_eq!(
            (&response[DATA + 4..DATA + 6], response[DATA + 27]),
            (&[0, 0][..], 72),
            "only what is selected"
        );
    }

    #[test]
    fn what_does_not_exist_has_a_status() {
        let mut ports = [PortCounters::default(); 2];
        let mut status = |mad: Datagram| {
            let response = respond(&mad, &mut ports.each_mut(), 1);
            u16::from_be_bytes([response[4], response[5]])
        };
        assert_eq!(status(request(Method::GET, PORT_COUNTERS, 2, 0)), Status::INVALID_FIELD.0);
        assert_eq!(status(request(Method::GET, 0x99, 1, 0)), Status::UNSUPPORTED_ATTRIBUTE.0);
        assert_eq!(status(request(Method::GET, PORT_COUNTERS, 0, 0)), 0);
        assert_eq!(status(request(Method::GET, CLASS_PORT_INFO, 0, 0)), 0);
    }
}
