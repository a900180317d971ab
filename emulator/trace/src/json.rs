//! The JSON object of a packet. Its keys are a contract with programs that read them; absent headers have
//! no key.

use crate::{Mad, Packet, PacketContents, RocePacket};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use softhca_wire::cm::{CommunicationId, Datagram, Message, RdmaCmHeader};
use softhca_wire::{Aeth, NetworkHeaders, Syndrome};

/// An object in the making.
struct Object<M>(M);

impl<M: SerializeMap> Object<M> {
    fn put(&mut self, key: &'static str, value: impl Serialize) -> Result<&mut Self, M::Error> {
        self.0.serialize_entry(key, &value)?;
        Ok(self)
    }

    /// A key that is absent without a value.
    fn put_some(&mut self, key: &'static str, value: Option<impl Serialize>) -> Result<&mut Self, M::Error> {
        match value {
            Some(value) => self.put(key, value),
            None => Ok(self),
        }
    }
}

impl Serialize for Packet<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = Object(serializer.serialize_map(None)?);
        object.put("time_ns", self.time_ns)?;
        match &self.contents {
            PacketContents::Roce(roce) => object.put_roce(roce)?,
            PacketContents::Malformed(network, reason) => object
                .put_some("src", network.as_ref().map(NetworkHeaders::source))?
                .put_some("dst", network.as_ref().map(NetworkHeaders::destination))?
                .put("malformed", reason.to_string())?,
            PacketContents::Pause(pause) => object.put("other", pause.to_string())?,
            PacketContents::Other(other) => object.put("other", other.to_string())?,
        };
        object.0.end()
    }
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

/// The fields that distinguish exchanges; the capture has the others.
struct CmObject<'a>(&'a Datagram);

impl<M: SerializeMap> Object<M> {
    fn put_roce(&mut self, roce: &RocePacket<'_>) -> Result<&mut Self, M::Error> {
        let header = &roce.transport.header;
        let reth = header.reth.map(|reth| RethObject {
            va: reth.virtual_address,
            rkey: reth.rkey.0,
            len: reth.dma_length,
        });
        let request = header.atomic.map(|atomic| AtomicObject::Request {
            va: atomic.virtual_address,
            rkey: atomic.rkey.0,
            swap_or_add: atomic.swap_or_add,
            compare: atomic.compare,
        });
        let response = header.atomic_ack.map(|response| AtomicObject::Response { original: response.0 });
        let cm = match &roce.mad {
            Some(Mad::Cm(datagram)) => Some(CmObject(datagram)),
            _ => None,
        };
        self.put("src", roce.frame.network.source())?
            .put("dst", roce.frame.network.destination())?
            .put("opcode", header.bth.opcode.to_string())?
            .put("dest_qp", header.bth.destination_qp.value())?
            .put("psn", header.bth.psn.value())?
            .put("ack_req", header.bth.ack_request)?
            .put("pad", header.bth.pad)?
            .put_some(
                "deth",
                header.deth.map(|deth| DethObject { qkey: deth.qkey.0, src_qp: deth.source_qp.value() }),
            )?
            .put_some("xrc_srq", header.xrceth.map(|xrceth| xrceth.0))?
            .put_some("flush", header.feth.map(|feth| feth.0))?
            .put_some("reth", reth)?
            .put_some("atomic", request.or(response))?
            .put_some("aeth", header.aeth.map(AethObject::from))?
            .put_some("imm", header.immediate.map(|immediate| immediate.0))?
            .put_some("ieth", header.ieth.map(|ieth| ieth.0))?
            .put_some("cm", cm)?
            .put("payload", roce.transport.payload.len())?
            .put("ecn", roce.ecn().name())?
            .put("icrc", if roce.icrc_ok { "ok" } else { "bad" })
    }

    fn put_comm_ids(
        &mut self,
        local: CommunicationId,
        remote: CommunicationId,
    ) -> Result<&mut Self, M::Error> {
        self.put("local_id", local.0)?.put("remote_id", remote.0)
    }

    fn put_addresses(&mut self, addresses: Option<RdmaCmHeader>) -> Result<&mut Self, M::Error> {
        self.put_some("src", addresses.map(|header| header.source))?
            .put_some("src_port", addresses.map(|header| header.source_port))?
            .put_some("dst", addresses.map(|header| header.destination))
    }
}

impl Serialize for CmObject<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = Object(serializer.serialize_map(None)?);
        object.put("attr", self.0.message.name())?.put("tid", self.0.header.transaction_id)?;
        match &self.0.message {
            Message::Req(req) => object
                .put("local_id", req.local_id.0)?
                .put("service", req.service_id.to_string())?
                .put("qp", req.local_qpn.value())?
                .put("psn", req.starting_psn.value())?
                .put_some("mtu", req.path_mtu().map(|mtu| mtu.bytes()))?
                .put("responder_resources", req.responder_resources)?
                .put("initiator_depth", req.initiator_depth)?
                .put_addresses(req.rdma_cm_header().and_then(Result::ok))?,
            Message::Rep(rep) => object
                .put_comm_ids(rep.local_id, rep.remote_id)?
                .put("qp", rep.local_qpn.value())?
                .put("psn", rep.starting_psn.value())?
                .put("responder_resources", rep.responder_resources)?
                .put("initiator_depth", rep.initiator_depth)?,
            Message::Rej(rej) => {
                object.put_comm_ids(rej.local_id, rej.remote_id)?.put("reason", rej.reason.0)?
            }
            Message::Dreq(dreq) => {
                object.put_comm_ids(dreq.local_id, dreq.remote_id)?.put("qp", dreq.remote_qpn.value())?
            }
            Message::SidrReq(req) => object
                .put("request_id", req.request_id)?
                .put("service", req.service_id.to_string())?
                .put_addresses(req.rdma_cm_header().and_then(Result::ok))?,
            Message::SidrRep(rep) => object
                .put("request_id", rep.request_id)?
                .put("service", rep.service_id.to_string())?
                .put("qp", rep.qpn.value())?
                .put("qkey", rep.qkey.0)?
                .put("status", rep.status.0)?,
            Message::Lap(lap) => {
                object.put_comm_ids(lap.local_id, lap.remote_id)?.put("qp", lap.remote_qpn.value())?
            }
            Message::Apr(apr) => {
                object.put_comm_ids(apr.local_id, apr.remote_id)?.put("status", apr.status.0)?
            }
            Message::Mra(mra) => object.put_comm_ids(mra.local_id, mra.remote_id)?,
            Message::Rtu(rtu) => object.put_comm_ids(rtu.local_id, rtu.remote_id)?,
            Message::Drep(drep) => object.put_comm_ids(drep.local_id, drep.remote_id)?,
        };
        object.0.end()
    }
}
