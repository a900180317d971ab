//! Writes pcapng: an interface per port, nanoseconds, and a comment where there is something to say.
//!
//! Equal calls give equal bytes on every machine: little-endian, no host name, no clock.

use softhca_wire::{
    AddressHeaders, EtherType, Ethernet, Gid, Grh, ICRC_LEN, Icrc, MacAddress, NetworkHeaders, Pfc, RoceFrame,
};
use std::io::{self, Write};

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;

const OPTION_END: u16 = 0;
const COMMENT: u16 = 1;
const PACKET_FLAGS: u16 = 2;
const INTERFACE_NAME: u16 = 2;
const INTERFACE_DESCRIPTION_TEXT: u16 = 3;
const APPLICATION: u16 = 4;
const RESOLUTION: u16 = 9;

/// An interface of the capture that is being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InterfaceId(u32);

/// Which way a packet goes at the interface that sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketDirection {
    /// It arrives.
    Inbound,
    /// It leaves.
    Outbound,
}

/// The headers around a transport packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum RoceVersion {
    /// Ethernet, IP and UDP, as it was sealed for.
    #[default]
    V2,
    /// Ethernet and GRH: RoCE v1. The ICRC is changed to fit; a wrong one stays wrong.
    V1,
}

/// A pcapng file being written.
///
/// ```
/// use softhca_trace::{CaptureReader, CaptureWriter};
/// let mut file = Vec::new();
/// let mut writer = CaptureWriter::new(&mut file)?;
/// writer.add_interface("alice", "10.0.0.1")?;
/// assert_eq!(CaptureReader::new(&file[..]).unwrap().count(), 0);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct CaptureWriter<W> {
    output: W,
    version: RoceVersion,
    interfaces: u32,
    /// The block at hand; kept to be used again.
    block: Vec<u8>,
}

impl<W: Write> CaptureWriter<W> {
    /// Starts a file of RoCEv2 frames.
    pub fn new(output: W) -> io::Result<CaptureWriter<W>> {
        CaptureWriter::with_version(output, RoceVersion::V2)
    }

    /// Starts a file whose packets are framed like this.
    pub fn with_version(output: W, framing: RoceVersion) -> io::Result<CaptureWriter<W>> {
        let mut writer = CaptureWriter { output, version: framing, interfaces: 0, block: Vec::new() };
        writer.begin_block(SECTION_HEADER);
        writer.put_words([0x1a2b_3c4d, 1, u32::MAX, u32::MAX]);
        writer.put_option(APPLICATION, b"SoftHCA");
        writer.end_block()?;
        Ok(writer)
    }

    /// Adds an interface. Interfaces may come at any time before their first packet.
    pub fn add_interface(&mut self, name: &str, description: &str) -> io::Result<InterfaceId> {
        const ETHERNET: u32 = 1;
        const NO_SNAP_LENGTH: u32 = 0;
        self.begin_block(INTERFACE_DESCRIPTION);
        self.put_words([ETHERNET, NO_SNAP_LENGTH]);
        self.put_option(INTERFACE_NAME, name.as_bytes());
        self.put_option(INTERFACE_DESCRIPTION_TEXT, description.as_bytes());
        self.put_option(RESOLUTION, &[9]);
        self.end_block()?;
        self.interfaces += 1;
        Ok(InterfaceId(self.interfaces - 1))
    }

    /// Writes a packet, from the BTH to the ICRC, with these headers.
    pub fn write_packet(
        &mut self,
        time_ns: u64,
        interface: InterfaceId,
        heading: PacketDirection,
        headers: &AddressHeaders,
        packet: &[u8],
        comment: Option<&str>,
    ) -> io::Result<()> {
        let frame = match self.version {
            RoceVersion::V2 => RoceFrame::new(headers, packet).to_vec(),
            RoceVersion::V1 => roce_v1_frame(headers, packet),
        };
        self.write_frame(time_ns, interface, heading, &frame, comment)
    }

    /// Writes a priority pause frame.
    pub fn write_pause(
        &mut self,
        time_ns: u64,
        interface: InterfaceId,
        heading: PacketDirection,
        pause: &Pfc,
        comment: Option<&str>,
    ) -> io::Result<()> {
        self.write_frame(time_ns, interface, heading, &pause.emit(), comment)
    }

    /// Writes an Ethernet frame, without its check sequence, as it is.
    pub fn write_frame(
        &mut self,
        time_ns: u64,
        InterfaceId(interface): InterfaceId,
        heading: PacketDirection,
        frame: &[u8],
        comment: Option<&str>,
    ) -> io::Result<()> {
        debug_assert!(interface < self.interfaces, "an interface of this file");
        let length = frame.len() as u32;
        self.begin_block(ENHANCED_PACKET);
        self.put_words([interface, (time_ns >> 32) as u32, time_ns as u32, length, length]);
        self.put_padded(frame);
        if let Some(comment) = comment {
            self.put_option(COMMENT, comment.as_bytes());
        }
        let direction: u32 = if heading == PacketDirection::Inbound { 1 } else { 2 };
        self.put_option(PACKET_FLAGS, &direction.to_le_bytes());
        self.end_block()
    }

    /// Flushes the output.
    pub fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }

    /// Returns the writer.
    pub fn into_inner(self) -> W {
        self.output
    }

    /// Starts a block; its length is filled in at its end.
    fn begin_block(&mut self, kind: u32) {
        self.block.clear();
        self.put_words([kind, 0]);
    }

    fn put_words<const N: usize>(&mut self, put_words: [u32; N]) {
        self.block.extend(put_words.into_iter().flat_map(u32::to_le_bytes));
    }

    fn put_padded(&mut self, bytes: &[u8]) {
        self.block.extend_from_slice(bytes);
        self.block.resize(self.block.len().next_multiple_of(4), 0);
    }

    /// Adds an option; one that is too long for the format is cut.
    fn put_option(&mut self, code: u16, value: &[u8]) {
        let value = &value[..value.len().min(usize::from(u16::MAX))];
        self.put_words([u32::from(code) | (value.len() as u32) << 16]);
        self.put_padded(value);
    }

    fn end_block(&mut self) -> io::Result<()> {
        self.put_words([OPTION_END.into()]);
        let length = self.block.len() as u32 + 4;
        self.put_words([length]);
        self.block[4..8].copy_from_slice(&length.to_le_bytes());
        self.output.write_all(&self.block)
    }
}

/// The packet as RoCE v1 would frame it.
fn roce_v1_frame(headers: &AddressHeaders, packet: &[u8]) -> Vec<u8> {
    let grh = Grh {
        source: Gid::from(headers.source),
        destination: Gid::from(headers.destination),
        traffic_class: headers.traffic_class,
        flow_label: headers.flow_label,
        payload_length: packet.len() as u16,
        hop_limit: headers.hop_limit,
    };
    let mut sealed = packet.to_vec();
    if let Ok((transport, found)) = Icrc::split(packet) {
        let (right, version_1) = (Icrc::compute(headers, transport), Icrc::compute_v1(&grh, transport));
        // A wrong ICRC stays wrong in the same bits.
        let icrc: [u8; ICRC_LEN] = std::array::from_fn(|i| version_1.0[i] ^ right.0[i] ^ found.0[i]);
        sealed[transport.len()..].copy_from_slice(&icrc);
    }
    let ethernet = Ethernet {
        destination: MacAddress::from_ip(headers.destination),
        source: MacAddress::from_ip(headers.source),
        vlan: None,
        ether_type: EtherType::ROCE,
    };
    RoceFrame {
        ethernet: Some(ethernet),
        network: NetworkHeaders::V1(grh),
        packet: &sealed,
        ethernet_padding: &[],
    }
    .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CaptureReader, Packet, PacketContents, Record};
    use softhca_wire::{Bth, Opcode, Psn, Qpn};
    use std::net::Ipv4Addr;

    fn headers() -> AddressHeaders {
        let host = |last| Ipv4Addr::new(10, 0, 0, last).into();
        AddressHeaders {
            identification: 0x1234,
            traffic_class: 2,
            ..AddressHeaders::between(host(1), host(2))
        }
    }

    fn sealed() -> Vec<u8> {
        let opcode = Opcode::from_byte(0x04).expect("RC SEND_ONLY");
        let mut packet = vec![0; Bth::LEN + 8 + ICRC_LEN];
        Bth::new(opcode, Qpn::new(0x11), Psn::new(7)).emit(&mut packet);
        Icrc::write(&headers(), &mut packet);
        packet
    }

    fn read(file: &[u8]) -> Vec<Record> {
        CaptureReader::new(file).expect("a capture").map(|record| record.expect("a record")).collect()
    }

    fn is_intact(record: &Record) -> bool {
        match Packet::new(record, 0).contents {
            PacketContents::Roce(roce) => roce.icrc_ok,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        for framing in [RoceVersion::V2, RoceVersion::V1] {
            let mut writer = CaptureWriter::with_version(Vec::new(), framing).unwrap();
            let alice = writer.add_interface("alice", "10.0.0.1").unwrap();
            let bob = writer.add_interface("bob", "10.0.0.2").unwrap();
            let time = 5_000_000_007;
            writer
                .write_packet(time, alice, PacketDirection::Outbound, &headers(), &sealed(), Some("dropped"))
                .unwrap();
            let mut damaged = sealed();
            damaged[14] ^= 1;
            writer.write_packet(time + 1, bob, PacketDirection::Inbound, &headers(), &damaged, None).unwrap();
            let pause = Pfc { source: MacAddress([2, 0, 10, 0, 0, 1]), pause: [Some(9); 8] };
            writer.write_pause(time + 2, bob, PacketDirection::Outbound, &pause, None).unwrap();
            let file = writer.into_inner();
            let [first, second, third] = &read(&file)[..] else { panic!("three records") };
            assert_eq!((first.time_ns, is_intact(first)), (time, true), "{framing:?}");
            assert_eq!((second.time_ns, is_intact(second)), (time + 1, false), "{framing:?}");
            assert_eq!(Packet::new(third, 0).contents, PacketContents::Pause(pause));
            assert!(file.windows(7).any(|bytes| bytes == b"dropped"));
        }
    }
}
