//! The set of extended headers that follow a BTH, their order on the wire and their lengths.

use crate::{Aeth, AtomicAckEth, AtomicEth, Deth, Feth, Ieth, Immediate, Reth, XrcEth};
use bitflags::bitflags;

bitflags! {
    /// The extended headers that follow a BTH, in wire order.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct ExtendedHeaders: u16 {
        /// Q_Key and source queue pair of a datagram.
        const DETH = 1;
        /// The SRQ of an XRC request.
        const XRCETH = 1 << 1;
        /// The parameters of a FLUSH.
        const FETH = 1 << 2;
        /// Virtual address, rkey and length of an RDMA request.
        const RETH = 1 << 3;
        /// Virtual address, rkey and operands of an atomic.
        const ATOMIC = 1 << 4;
        /// Syndrome and MSN.
        const AETH = 1 << 5;
        /// The original value of an atomic.
        const ATOMIC_ACK = 1 << 6;
        /// Immediate data.
        const IMMEDIATE = 1 << 7;
        /// The rkey to invalidate.
        const IETH = 1 << 8;
    }
}

/// Calls a macro for each extended header, in wire order.
macro_rules! in_wire_order {
    ($each:ident) => {
        $each!(deth, DETH, Deth);
        $each!(xrceth, XRCETH, XrcEth);
        $each!(feth, FETH, Feth);
        $each!(reth, RETH, Reth);
        $each!(atomic, ATOMIC, AtomicEth);
        $each!(aeth, AETH, Aeth);
        $each!(atomic_ack, ATOMIC_ACK, AtomicAckEth);
        $each!(immediate, IMMEDIATE, Immediate);
        $each!(ieth, IETH, Ieth);
    };
}
pub(crate) use in_wire_order;

impl ExtendedHeaders {
    /// Total bytes of these headers.
    pub const fn length(self) -> usize {
        let mut length = 0;
        macro_rules! add {
            ($field:ident, $flag:ident, $kind:ty) => {
                if self.contains(ExtendedHeaders::$flag) {
                    length += <$kind>::LEN;
                }
            };
        }
        in_wire_order!(add);
        length
    }
}
