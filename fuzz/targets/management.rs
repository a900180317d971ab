//! The payload of packets to QP1.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_wire::cm::{Datagram, Message};

fuzz_target!(|bytes: &[u8]| {
    let Ok(datagram) = Datagram::parse(bytes) else { return };
    let written = datagram.emit();
    assert_eq!(Datagram::parse(&written), Ok(datagram));
    assert!(!datagram.to_string().contains('\n'));
    let header = match &datagram.message {
        Message::Req(req) => req.rdma_cm_header(),
        Message::SidrReq(req) => req.rdma_cm_header(),
        _ => None,
    };
    if let Some(Ok(header)) = header {
        assert_eq!(softhca_wire::cm::RdmaCmHeader::parse(&header.emit()), Ok(header));
    }
});
