//! A MAD on its way.

use softhca_wire::MadHeader;
use softhca_wire::Malformed;
use softhca_wire::smp::{Lid, Smp};

/// The default partition, with full membership.
pub(crate) const DEFAULT_P_KEY: u16 = 0xffff;
/// The Q_Key of QP1.
pub(crate) const GENERAL_Q_KEY: u32 = 0x8001_0000;

/// A management datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mad {
    /// To QP0: subnet management.
    Subnet(Smp),
    /// To QP1: all other classes.
    General([u8; MadHeader::DATAGRAM_LEN]),
}

/// A MAD with the fields of the headers before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The source.
    pub slid: Lid,
    /// The destination.
    pub dlid: Lid,
    /// The service level.
    pub sl: u8,
    /// The partition key.
    pub p_key: u16,
    /// The queue key.
    pub q_key: u32,
    /// The sending queue pair.
    pub source_qp: u32,
    /// The receiving queue pair.
    pub destination_qp: u32,
    /// The MAD.
    pub mad: Mad,
}

impl Packet {
    /// A packet between QP0s.
    pub fn subnet(slid: Lid, dlid: Lid, smp: Smp) -> Packet {
        let mad = Mad::Subnet(smp);
        Packet { slid, dlid, sl: 0, p_key: DEFAULT_P_KEY, q_key: 0, source_qp: 0, destination_qp: 0, mad }
    }

    /// Parses the MAD: an SMP for QP0.
    pub fn parse_mad(destination_qp: u32, bytes: &[u8; MadHeader::DATAGRAM_LEN]) -> Result<Mad, Malformed> {
        if destination_qp == 0 {
            return Smp::parse(bytes).map(Mad::Subnet);
        }
        let header = MadHeader::parse(bytes)?;
        match header.mgmt_class {
            Smp::CLASS_LID_ROUTED | Smp::CLASS_DIRECTED => {
                Err(Malformed::Field { what: "class of a MAD to QP1", value: header.mgmt_class.into() })
            }
            _ => Ok(Mad::General(*bytes)),
        }
    }

    /// The bytes of the MAD.
    pub fn mad_bytes(&self) -> [u8; MadHeader::DATAGRAM_LEN] {
        match &self.mad {
            Mad::Subnet(smp) => smp.emit(),
            Mad::General(bytes) => *bytes,
        }
    }
}
