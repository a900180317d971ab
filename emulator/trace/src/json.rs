//! The JSON object of a packet. Its keys are a contract with programs that read them; absent headers have
//! no key.

use crate::{Mad, Packet, PacketContents, RocePacket};
use serde::{Serialize, Serializer};
use softhca_wire::cm::{Datagram, Message, RdmaCmHeader};
use softhca_wire::{Aeth, NetworkHeaders, Syndrome};
use std::net::IpAddr;

impl Serialize for Packet<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let time_ns = self.time_ns;
        match &self.contents {
            PacketContents::Roce(roce) => roce_object(time_ns, roce).serialize(serializer),
            PacketContents::Malformed(network, reason) => MalformedObject {
                time_ns,
                src: network.as_ref().map(NetworkHeaders::source),
                dst: network.as_ref().map(NetworkHeaders::destination),
                malformed: reason.to_string(),
            }
            .serialize(serializer),
            PacketContents::Pause(pause) => {
                OtherObject { time_ns, other: pause.to_string() }.serialize(serializer)
            }
            PacketContents::Other(other) => {
                OtherObject { time_ns, other: other.to_string() }.serialize(serializer)
            }
        }
    }
}

#[derive(Serialize)]
struct OtherObject {
    time_ns: i64,
    other: String,
}

#[derive(Serialize)]
struct MalformedObject {
    time_ns: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    src: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dst: Option<IpAddr>,
    malformed: String,
}

#[derive(Serialize)]
struct RoceObject {
    time_ns: i64,
    src: IpAddr,
    dst: IpAddr,
    opcode: String,
    dest_qp: u32,
    psn: u32,
    ack_req: bool,
    pad: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    deth: Option<DethObject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    xrc_srq: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flush: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reth: Option<RethObject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    atomic: Option<AtomicObject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aeth: Option<AethObject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    imm: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ieth: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cm: Option<CmObject>,
    payload: usize,
    ecn: &'static str,
    icrc: &'static str,
}

#[derive(Serialize)]
struct DethObject {
    qkey: u32,
    src_qp: u32,
}

#[derive(Serialize)]
struct RethObject {
    va: u64,
    rkey: u32,
    len: u32,
}

#[derive(Serialize)]
#[serde(untagged)]
enum AtomicObject {
    Request { va: u64, rkey: u32, swap_or_add: u64, compare: u64 },
    Response { original: u64 },
}

#[derive(Serialize)]
struct AethObject {
    kind: &'static str,
    code: u8,
    msn: u32,
}

impl From<Aeth> for AethObject {
    fn from(aeth: Aeth) -> AethObject {
        let (kind, code) = match aeth.syndrome {
            Syndrome::Ack(credits) => ("ack", credits),
            Syndrome::RnrNak(timer) => ("rnr", timer.code()),
            Syndrome::Nak(code) => ("nak", code as u8),
        };
        AethObject { kind, code, msn: aeth.msn }
    }
}

fn roce_object(time_ns: i64, roce: &RocePacket<'_>) -> RoceObject {
    let header = &roce.transport.header;
    let request = header.atomic.map(|atomic| AtomicObject::Request {
        va: atomic.virtual_address,
        rkey: atomic.rkey.0,
        swap_or_add: atomic.swap_or_add,
        compare: atomic.compare,
    });
    let answer = header.atomic_ack.map(|answer| AtomicObject::Response { original: answer.0 });
    let cm = match &roce.mad {
        Some(Mad::Cm(datagram)) => Some(cm_object(datagram)),
        _ => None,
    };
    RoceObject {
        time_ns,
        src: roce.frame.network.source(),
        dst: roce.frame.network.destination(),
        opcode: header.bth.opcode.to_string(),
        dest_qp: header.bth.destination_qp.value(),
        psn: header.bth.psn.value(),
        ack_req: header.bth.ack_request,
        pad: header.bth.pad,
        deth: header.deth.map(|deth| DethObject { qkey: deth.qkey.0, src_qp: deth.source_qp.value() }),
        xrc_srq: header.xrceth.map(|xrceth| xrceth.0),
        flush: header.feth.map(|feth| feth.0),
        reth: header.reth.map(|reth| RethObject {
            va: reth.virtual_address,
            rkey: reth.rkey.0,
            len: reth.dma_length,
        }),
        atomic: request.or(answer),
        aeth: header.aeth.map(AethObject::from),
        imm: header.immediate.map(|immediate| immediate.0),
        ieth: header.ieth.map(|ieth| ieth.0),
        cm,
        payload: roce.transport.payload.len(),
        ecn: roce.ecn().name(),
        icrc: if roce.icrc_ok { "ok" } else { "bad" },
    }
}

/// The fields that distinguish exchanges; the capture has the others.
#[derive(Serialize, Default)]
struct CmObject {
    attr: &'static str,
    tid: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    local_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    service: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    qp: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    qkey: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    psn: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mtu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    responder_resources: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    initiator_depth: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    src: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    src_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dst: Option<IpAddr>,
}

impl CmObject {
    fn with_comm_ids(self, local: u32, remote: u32) -> CmObject {
        CmObject { local_id: Some(local), remote_id: Some(remote), ..self }
    }

    fn with_addresses(self, addresses: Option<RdmaCmHeader>) -> CmObject {
        CmObject {
            src: addresses.map(|header| header.source),
            src_port: addresses.map(|header| header.source_port),
            dst: addresses.map(|header| header.destination),
            ..self
        }
    }
}

fn cm_object(datagram: &Datagram) -> CmObject {
    let attr = datagram.message.name();
    let object = CmObject { attr, tid: datagram.header.transaction_id, ..CmObject::default() };
    match &datagram.message {
        Message::Req(req) => CmObject {
            local_id: Some(req.local_id.0),
            service: Some(req.service_id.to_string()),
            qp: Some(req.local_qpn.value()),
            psn: Some(req.starting_psn.value()),
            mtu: req.path_mtu().map(|mtu| mtu.bytes()),
            responder_resources: Some(req.responder_resources),
            initiator_depth: Some(req.initiator_depth),
            ..object.with_addresses(req.rdma_cm_header().and_then(Result::ok))
        },
        Message::Rep(rep) => CmObject {
            qp: Some(rep.local_qpn.value()),
            psn: Some(rep.starting_psn.value()),
            responder_resources: Some(rep.responder_resources),
            initiator_depth: Some(rep.initiator_depth),
            ..object.with_comm_ids(rep.local_id.0, rep.remote_id.0)
        },
        Message::Rej(rej) => {
            CmObject { reason: Some(rej.reason.0), ..object.with_comm_ids(rej.local_id.0, rej.remote_id.0) }
        }
        Message::Dreq(dreq) => CmObject {
            qp: Some(dreq.remote_qpn.value()),
            ..object.with_comm_ids(dreq.local_id.0, dreq.remote_id.0)
        },
        Message::SidrReq(req) => CmObject {
            request_id: Some(req.request_id),
            service: Some(req.service_id.to_string()),
            ..object.with_addresses(req.rdma_cm_header().and_then(Result::ok))
        },
        Message::SidrRep(rep) => CmObject {
            request_id: Some(rep.request_id),
            service: Some(rep.service_id.to_string()),
            qp: Some(rep.qpn.value()),
            qkey: Some(rep.qkey.0),
            status: Some(rep.status.0),
            ..object
        },
        Message::Lap(lap) => CmObject {
            qp: Some(lap.remote_qpn.value()),
            ..object.with_comm_ids(lap.local_id.0, lap.remote_id.0)
        },
        Message::Apr(apr) => {
            CmObject { status: Some(apr.status.0), ..object.with_comm_ids(apr.local_id.0, apr.remote_id.0) }
        }
        Message::Mra(mra) => object.with_comm_ids(mra.local_id.0, mra.remote_id.0),
        Message::Rtu(rtu) => object.with_comm_ids(rtu.local_id.0, rtu.remote_id.0),
        Message::Drep(drep) => object.with_comm_ids(drep.local_id.0, drep.remote_id.0),
    }
}
