//! Addressing of packets: the headers that carry a packet to its peer, and its priority.

use crate::AddressVector;
use crate::core::hca_state::HcaState;
use softhca_types::InfiniBandPort;
use softhca_wire::smp::Lid;
use softhca_wire::{AddressHeaders, Grh, LocalRoute, Qpn};

/// The addressing headers of a flow between two queue pairs.
pub(crate) fn address_headers(
    hca: &HcaState,
    vector: &AddressVector,
    local: Qpn,
    remote: Qpn,
) -> AddressHeaders {
    if let Some(port) = &hca.infiniband {
        return routed_headers(port, vector);
    }
    let source = hca.gid(vector.sgid_index);
    AddressHeaders {
        source: source.ip(),
        destination: vector.dgid.ip(),
        source_port: source_port(vector.flow_label, local, remote),
        traffic_class: vector.traffic_class,
        flow_label: vector.flow_label,
        hop_limit: if vector.hop_limit == 0 { 64 } else { vector.hop_limit },
        identification: 0,
        local: LocalRoute::NONE,
    }
}

/// The headers of a flow that leaves an InfiniBand port. A packet has a GRH if its address vector has a GID.
#[cold]
fn routed_headers(port: &InfiniBandPort, vector: &AddressVector) -> AddressHeaders {
    let local = LocalRoute {
        slid: port.lid_with(vector.src_path_bits),
        dlid: Lid(vector.dlid),
        service_level: vector.service_level & 0xf,
    };
    let grh = (!vector.dgid.is_unspecified()).then(|| Grh {
        source: port.gids.get(usize::from(vector.sgid_index)).copied().unwrap_or_default(),
        destination: vector.dgid,
        traffic_class: vector.traffic_class,
        flow_label: vector.flow_label,
        payload_length: 0,
        hop_limit: vector.hop_limit,
    });
    AddressHeaders::routed(local, grh.as_ref())
}

/// The UDP source port of a flow, in the dynamic range. As on Linux, it is a hash of the flow label or, if that is
/// zero, of the two queue pair numbers.
fn source_port(flow_label: u32, local: Qpn, remote: Qpn) -> u16 {
    let label = match flow_label & 0xf_ffff {
        0 => {
            let mut v = u64::from(local.value()) * u64::from(remote.value());
            v ^= v >> 20;
            v ^= v >> 40;
            (v & 0xf_ffff) as u32
        }
        label => label,
    };
    0xc000 | ((label & 0x3fff) ^ (label >> 14)) as u16
}

/// The priority of a packet: the upper three bits of its DSCP or, if it has none, its service level.
pub(crate) const fn priority(addressing: &AddressHeaders, service_level: u8) -> u8 {
    match addressing.traffic_class >> 2 {
        0 => service_level & 7,
        dscp => dscp >> 3,
    }
}
