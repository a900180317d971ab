//! Frames of the mechanisms below the card, written one by one: what a switch or a congested receiver sends.

use softhca_trace::{CaptureWriter, Heading};
use softhca_wire::{Bth, Ecn, Envelope, Icrc, MacAddress, Opcode, Pfc, Psn, Qpn};
use std::net::{IpAddr, Ipv4Addr};

/// One capture.
pub struct Piece {
    pub name: &'static str,
    pub about: &'static str,
    pub write: fn(&mut CaptureWriter<Vec<u8>>) -> std::io::Result<()>,
}

/// Every capture.
pub const PIECES: &[Piece] = &[
    Piece {
        name: "cnp",
        about: "Congestion: a packet leaves as ECN-capable, arrives marked, and is answered with a CNP",
        write: notification,
    },
    Piece {
        name: "pfc",
        about: "Priority flow control: priority 3 is paused, and let go on 100 µs later",
        write: pauses,
    },
];

const ALICE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const BOB: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

/// From the BTH to the ICRC.
fn packet(envelope: &Envelope, bth: &Bth, payload: usize) -> Vec<u8> {
    let mut packet = vec![0; Bth::LEN + payload + 4];
    bth.emit(&mut packet);
    Icrc::seal(envelope, &mut packet);
    packet
}

fn notification(writer: &mut CaptureWriter<Vec<u8>>) -> std::io::Result<()> {
    let alice = writer.add_interface("alice", "10.0.0.1")?;
    let bob = writer.add_interface("bob", "10.0.0.2")?;
    let send = Opcode::from_byte(0x04).expect("RC SEND_ONLY");
    let bth = Bth { ack_request: true, ..Bth::new(send, Qpn::new(0x1f_0002), Psn::new(1000)) };
    let capable = Envelope { traffic_class: Ecn::Capable0 as u8, ..Envelope::between(ALICE, BOB) };
    let marked = Envelope { traffic_class: Ecn::CongestionExperienced as u8, ..capable };
    let data = packet(&capable, &bth, 64);
    writer.packet(0, alice, Heading::Out, &capable, &data, Some("it may be marked: ECN says capable"))?;
    writer.packet(1_000, bob, Heading::In, &marked, &data, Some("a switch marked it on the way"))?;
    let back = Envelope::between(BOB, ALICE);
    // A CNP has 16 reserved bytes behind its BTH.
    let notice = packet(&back, &Bth::new(Opcode::CNP, Qpn::new(0x52_0002), Psn::new(0)), 16);
    writer.packet(1_000, bob, Heading::Out, &back, &notice, Some("bob's card asks alice to slow down"))
}

fn pauses(writer: &mut CaptureWriter<Vec<u8>>) -> std::io::Result<()> {
    let bob = writer.add_interface("bob", "10.0.0.2")?;
    let mut pause = [None; 8];
    for (time_ns, quanta, comment) in
        [(0, u16::MAX, "XOFF: bob's queue is nearly full"), (100_000, 0, "XON: there is room again")]
    {
        pause[3] = Some(quanta);
        let frame = Pfc { source: MacAddress::of(BOB), pause };
        writer.pause(time_ns, bob, Heading::Out, &frame, Some(comment))?;
    }
    Ok(())
}
