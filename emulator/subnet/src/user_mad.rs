//! A MAD as a program reads and writes it: the kernel's `struct ib_user_mad`, 64 bytes before the MAD.

use softhca_wire::smp::Lid;

/// The header of a MAD between a program and the card, in the layout of Linux's user MAD interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct UserMadHeader {
    /// The agent that sends or receives it.
    pub agent: u32,
    /// Zero, or the errno of a request that got no response.
    pub status: u32,
    /// How long to wait for a response; zero if none is expected.
    pub timeout_ms: u32,
    /// How often to send a request again.
    pub retries: u32,
    /// The other queue pair.
    pub qp: u32,
    /// The Q_Key.
    pub q_key: u32,
    /// The other LID.
    pub lid: Lid,
    /// The service level.
    pub sl: u8,
    /// The low bits of the own LID.
    pub path_bits: u8,
    /// The index of the P_Key.
    pub p_key_index: u16,
}

impl UserMadHeader {
    /// Bytes before the MAD.
    pub const LEN: usize = 64;

    /// Reads a header.
    pub fn parse(bytes: &[u8; Self::LEN]) -> UserMadHeader {
        let word = |at: usize| bytes[at..at + 4].try_into().expect("four bytes");
        let half = |at: usize| bytes[at..at + 2].try_into().expect("two bytes");
        UserMadHeader {
            agent: u32::from_ne_bytes(word(0)),
            status: u32::from_ne_bytes(word(4)),
            timeout_ms: u32::from_ne_bytes(word(8)),
            retries: u32::from_ne_bytes(word(12)),
            qp: u32::from_be_bytes(word(20)),
            q_key: u32::from_be_bytes(word(24)),
            lid: Lid(u16::from_be_bytes(half(28))),
            sl: bytes[30],
            path_bits: bytes[31],
            p_key_index: u16::from_ne_bytes(half(56)),
        }
    }

    /// The bytes of a message with its header, as the header states them.
    pub fn message_length(bytes: &[u8; Self::LEN]) -> usize {
        u32::from_ne_bytes(bytes[16..20].try_into().expect("four bytes")) as usize
    }

    /// Writes the header, for a MAD of this many bytes.
    pub fn emit(&self, mad: usize) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let native = [self.agent, self.status, self.timeout_ms, self.retries, (Self::LEN + mad) as u32];
        for (bytes, word) in bytes.chunks_exact_mut(4).zip(native) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        bytes[20..24].copy_from_slice(&self.qp.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.q_key.to_be_bytes());
        bytes[28..30].copy_from_slice(&self.lid.0.to_be_bytes());
        (bytes[30], bytes[31]) = (self.sl, self.path_bits);
        bytes[56..58].copy_from_slice(&self.p_key_index.to_ne_bytes());
        bytes
    }
}
