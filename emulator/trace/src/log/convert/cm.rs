//! Conclusions from the messages of the connection manager.

use crate::Mad;
use softhca_fabric::Endpoint;
use softhca_wire::Qpn;
use softhca_wire::cm::Message as CmMessage;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// Facts about queue pairs from the messages of the connection manager.
#[derive(Debug, Default)]
pub(super) struct CmConnections {
    /// Requests by the sender's address and communication id.
    requests: BTreeMap<(IpAddr, u32), Qpn>,
    pub(super) pairs: Vec<(Endpoint, Endpoint)>,
    /// Messages that were seen: sender, transaction and name.
    seen: BTreeSet<(IpAddr, u64, &'static str)>,
}

impl CmConnections {
    /// Takes a message; returns its name, id and whether it was sent before.
    pub(super) fn observe(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        mad: &Mad,
    ) -> Option<(&'static str, u32, bool)> {
        let Mad::Cm(datagram) = mad else { return None };
        let name = datagram.message.name();
        let id = match &datagram.message {
            CmMessage::Req(req) => {
                self.requests.insert((from, req.local_id.0), req.local_qpn);
                req.local_id.0
            }
            CmMessage::Rep(rep) => {
                if let Some(qpn) = self.requests.get(&(to, rep.remote_id.0)) {
                    let ends = [(from, rep.local_qpn), (to, *qpn)];
                    let [one, other] = ends.map(|(address, qpn)| Endpoint { address, qpn });
                    self.pairs.push((one, other));
                }
                rep.local_id.0
            }
            CmMessage::Rtu(rtu) => rtu.local_id.0,
            CmMessage::Rej(rej) => rej.local_id.0,
            CmMessage::Dreq(dreq) => dreq.local_id.0,
            CmMessage::Drep(drep) => drep.local_id.0,
            _ => 0,
        };
        let again = !self.seen.insert((from, datagram.header.transaction_id, name));
        Some((name, id, again))
    }
}
