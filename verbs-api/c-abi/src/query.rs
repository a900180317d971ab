//! Queries of a device, its port and its tables.

use crate::abi::*;
use crate::address::wrong_port;
use crate::context::{ContextHandle, ContextState};
use crate::errno::{self, Rejection};
use crate::faults;
use crate::object::Found;
use core::ffi::{c_char, c_int, c_uint};
use core::mem::{MaybeUninit, zeroed};
use softhca::{DeviceLimits, Gid, InfiniBandPort, PortState, Verb};

/// The only P_Key: the default partition with full membership.
const DEFAULT_PKEY: u16 = 0xffff;

/// Entries of the P_Key table of a port of a subnet.
const SUBNET_P_KEYS: u16 = 128;

fn to_c_int(value: u32) -> c_int {
    value.try_into().unwrap_or(c_int::MAX)
}

fn device_attr(open: &ContextState) -> ibv_device_attr {
    let limits = &open.attributes.limits;
    // SAFETY: zero is valid for every field.
    let mut attr: ibv_device_attr = unsafe { zeroed() };
    for (to, from) in attr.fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *to = from as c_char;
    }
    attr.node_guid = open.device.guid().to_be();
    attr.sys_image_guid = attr.node_guid;
    attr.max_mr_size = DeviceLimits::MAX_MR_SIZE;
    attr.page_size_cap = 0xffff_f000;
    attr.vendor_id = open.attributes.profile.vendor_id;
    attr.vendor_part_id = open.attributes.profile.vendor_part_id;
    attr.max_qp = to_c_int(limits.max_qp);
    attr.max_qp_wr = to_c_int(limits.max_qp_wr);
    attr.device_cap_flags = IBV_DEVICE_PORT_ACTIVE_EVENT
        | IBV_DEVICE_SYS_IMAGE_GUID
        | IBV_DEVICE_RC_RNR_NAK_GEN
        | IBV_DEVICE_MEM_WINDOW
        | IBV_DEVICE_XRC
        | IBV_DEVICE_SRQ_RESIZE
        | IBV_DEVICE_MEM_MGT_EXTENSIONS
        | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    attr.max_sge = to_c_int(limits.max_sge);
    attr.max_sge_rd = to_c_int(limits.max_sge);
    attr.max_cq = to_c_int(limits.max_cq);
    attr.max_cqe = to_c_int(limits.max_cqe);
    attr.max_mr = to_c_int(limits.max_mr);
    attr.max_mw = to_c_int(limits.max_mr);
    attr.max_pd = to_c_int(limits.max_pd);
    attr.max_qp_rd_atom = c_int::from(limits.max_qp_rd_atom);
    attr.max_qp_init_rd_atom = c_int::from(limits.max_qp_rd_atom);
    attr.max_res_rd_atom = to_c_int(u32::from(limits.max_qp_rd_atom).saturating_mul(limits.max_qp));
    attr.atomic_cap = IBV_ATOMIC_HCA;
    attr.max_mcast_grp = to_c_int(limits.max_mcast_grp);
    attr.max_mcast_qp_attach = to_c_int(limits.max_mcast_qp_attach);
    attr.max_total_mcast_qp_attach =
        to_c_int(limits.max_mcast_grp.saturating_mul(limits.max_mcast_qp_attach));
    attr.max_ah = to_c_int(limits.max_ah);
    attr.max_srq = to_c_int(limits.max_srq);
    attr.max_srq_wr = to_c_int(limits.max_qp_wr);
    attr.max_srq_sge = to_c_int(limits.max_sge);
    attr.max_pkeys = if open.device.is_infiniband() { SUBNET_P_KEYS } else { 1 };
    attr.local_ca_ack_delay = open.attributes.profile.local_ca_ack_delay;
    attr.phys_port_cnt = 1;
    attr
}

pub extern "C" fn query_device(context: ContextHandle, attr: &mut MaybeUninit<ibv_device_attr>) -> c_int {
    errno::code("ibv_query_device", || {
        let open = context.find()?;
        faults::announce(Verb::QueryDevice, None)?;
        open.context.check_device()?;
        attr.write(device_attr(&open));
        Ok(())
    })
}

pub extern "C" fn query_device_ex(
    context: ContextHandle,
    input: Option<&u32>,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    errno::code("ibv_query_device_ex", || {
        let open = context.find()?;
        faults::announce(Verb::QueryDevice, None)?;
        open.context.check_device()?;
        // An input begins with a mask of further requests; none is supported.
        if input.is_some_and(|mask| *mask != 0) {
            return Err(Rejection::invalid("comp_mask of the input is not 0"));
        }
        // SAFETY: zero is valid for every field and means that the feature is absent.
        let mut all: ibv_device_attr_ex = unsafe { zeroed() };
        all.orig_attr = device_attr(&open);
        all.device_cap_flags_ex = u64::from(all.orig_attr.device_cap_flags);
        // Completions carry the HCA's time in nanoseconds.
        all.completion_timestamp_mask = u64::MAX;
        all.hca_core_clock = 1_000_000;
        all.phys_port_cnt_ex = 1;
        // SAFETY: a valid pointer of the caller, of the given size.
        unsafe { copy_sized(&all, attr, size) };
        Ok(())
    })
}

/// Copies a structure to a caller whose version may be shorter or longer.
unsafe fn copy_sized<T>(from: &T, to: *mut T, size: usize) {
    let (to, known) = (to.cast::<u8>(), size_of::<T>().min(size));
    // SAFETY: `from` has `known` bytes, `to` has `size`.
    unsafe {
        core::ptr::copy_nonoverlapping((&raw const *from).cast::<u8>(), to, known);
        core::ptr::write_bytes(to.add(known), 0, size - known);
    }
}

pub extern "C" fn query_port_sized(
    context: ContextHandle,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    errno::code("ibv_query_port", || {
        let open = find_port(context, port.into())?;
        faults::announce(Verb::QueryPort, None)?;
        open.context.check_device()?;
        if let Some(port) = subnet_port(&open)? {
            let all = infiniband_port_attr(&port, open.attributes.limits.max_msg_sz);
            // SAFETY: a valid pointer of the caller, of the given size.
            unsafe { copy_sized(&all, attr, size) };
            return Ok(());
        }
        // SAFETY: zero is valid for every field.
        let mut all: ibv_port_attr = unsafe { zeroed() };
        (all.state, all.phys_state) = match open.context.port_state() {
            PortState::Active => (IBV_PORT_ACTIVE, IBV_PHYSICAL_STATE_LINK_UP),
            PortState::Down => (IBV_PORT_DOWN, IBV_PHYSICAL_STATE_DISABLED),
        };
        all.max_mtu = c_int::from(open.port.max_mtu.code());
        all.active_mtu = c_int::from(open.port.active_mtu.code());
        all.gid_tbl_len = open.context.gid_table_len().into();
        all.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
        all.max_msg_sz = open.attributes.limits.max_msg_sz;
        all.pkey_tbl_len = 1;
        all.max_vl_num = 1;
        all.active_width = IBV_WIDTH_4X;
        all.active_speed = IBV_SPEED_FDR;
        all.link_layer = IBV_LINK_LAYER_ETHERNET;
        all.flags = IBV_QPF_GRH_REQUIRED;
        // SAFETY: a valid pointer of the caller, of the given size.
        unsafe { copy_sized(&all, attr, size) };
        Ok(())
    })
}

/// The port of a device on an InfiniBand subnet; `None` for a RoCE port.
fn subnet_port(open: &ContextState) -> Result<Option<InfiniBandPort>, Rejection> {
    if !open.device.is_infiniband() {
        return Ok(None);
    }
    Ok(open.context.infiniband_port()?)
}

fn infiniband_port_attr(port: &InfiniBandPort, max_msg_sz: u32) -> ibv_port_attr {
    // SAFETY: zero is valid for every field.
    let mut all: ibv_port_attr = unsafe { zeroed() };
    all.state = port.state.into();
    all.phys_state = port.physical_state;
    all.max_mtu = port.mtu_cap.into();
    all.active_mtu = port.neighbor_mtu.into();
    all.gid_tbl_len = port.gids.len() as c_int;
    all.port_cap_flags = port.capabilities;
    all.max_msg_sz = max_msg_sz;
    all.bad_pkey_cntr = port.p_key_violations.into();
    all.qkey_viol_cntr = port.q_key_violations.into();
    all.pkey_tbl_len = port.p_keys.len() as u16;
    (all.lid, all.lmc) = (port.lid, port.lmc);
    (all.sm_lid, all.sm_sl) = (port.sm_lid, port.sm_sl);
    all.max_vl_num = port.vl_cap;
    all.subnet_timeout = port.subnet_timeout;
    all.init_type_reply = port.init_type_reply;
    all.active_width = port.width_active;
    all.active_speed = match port.extended_speed_active {
        0 => port.speed_active,
        // FDR and faster.
        extended => extended.checked_mul(IBV_SPEED_FDR).unwrap_or(IBV_SPEED_FDR),
    };
    all.link_layer = IBV_LINK_LAYER_INFINIBAND;
    all
}

/// The first version of the structure ended before `link_layer`; programs compiled today call [`query_port_sized`].
pub extern "C" fn query_port(context: ContextHandle, port: u8, attr: *mut ibv_port_attr) -> c_int {
    query_port_sized(context, port, attr, core::mem::offset_of!(ibv_port_attr, link_layer))
}

/// The current speed in units of 100 Mbit/s.
pub extern "C" fn query_port_speed(context: ContextHandle, port: u32, into: &mut MaybeUninit<u64>) -> c_int {
    /// Four lanes of FDR, as [`query_port_sized`] reports.
    const SPEED: u64 = 562;
    errno::code("ibv_query_port_speed", || {
        let open = find_port(context, port)?;
        let speed = subnet_port(&open)?.map(|port| u64::from(port.rate) * 10);
        into.write(speed.unwrap_or(SPEED));
        Ok(())
    })
}

/// The context behind a pointer, if it has the port.
fn find_port<'a>(context: ContextHandle, port: u32) -> Result<Found<'a, ContextState>, Rejection> {
    let open = context.find()?;
    if port == 1 { Ok(open) } else { Err(wrong_port(port)) }
}

/// The entry of the GID table of a port.
fn find_gid(context: ContextHandle, port: u32, index: i64) -> Result<Gid, Rejection> {
    let open = find_port(context, port)?;
    let table = match subnet_port(&open)? {
        Some(port) => port.gids,
        None => (0..open.context.gid_table_len()).filter_map(|index| open.context.gid(index)).collect(),
    };
    let found = usize::try_from(index).ok().and_then(|index| table.get(index)).copied();
    found.ok_or_else(|| {
        let last = table.len().saturating_sub(1);
        Rejection::invalid(format!("GID index {index} does not exist: the table has the entries 0 to {last}"))
    })
}

pub extern "C" fn query_gid(
    context: ContextHandle,
    port: u8,
    index: c_int,
    into: &mut MaybeUninit<[u8; 16]>,
) -> c_int {
    errno::minus_one("ibv_query_gid", || {
        let gid = find_gid(context, port.into(), index.into())?;
        faults::announce(Verb::QueryGid, None)?;
        into.write(gid.0);
        Ok(())
    })
}

fn gid_entry(gid: Gid, index: u32, is_infiniband: bool) -> ibv_gid_entry {
    let [high, low] = [0, 8].map(|at| u64::from_ne_bytes(gid.0[at..at + 8].try_into().expect("eight bytes")));
    ibv_gid_entry {
        gid: [high, low],
        gid_index: index,
        port_num: 1,
        gid_type: if is_infiniband { IBV_GID_TYPE_IB } else { IBV_GID_TYPE_ROCE_V2 },
        ndev_ifindex: if is_infiniband { 0 } else { interface_of(gid) },
    }
}

/// The interface with the address of a GID; the loopback interface if none has it.
fn interface_of(gid: Gid) -> u32 {
    let address = gid.ip();
    if address.is_loopback() {
        return 1;
    }
    let mut list = core::ptr::null_mut();
    // SAFETY: the list is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return 1;
    }
    let (mut at, mut found) = (list, 1);
    while !at.is_null() {
        // SAFETY: an entry of the list.
        let interface = unsafe { &*at };
        // SAFETY: an address of the family that it says.
        if unsafe { crate::address::ip_of(interface.ifa_addr) } == Some(address) {
            // SAFETY: a string of the entry.
            found = unsafe { libc::if_nametoindex(interface.ifa_name) };
            break;
        }
        at = interface.ifa_next;
    }
    // SAFETY: it came from `getifaddrs`.
    unsafe { libc::freeifaddrs(list) };
    found
}

fn check_flags(flags: u32) -> Result<(), Rejection> {
    match flags {
        0 => Ok(()),
        _ => Err(Rejection::invalid(format!("flags {flags:#x} are unknown"))),
    }
}

pub extern "C" fn query_gid_ex(
    context: ContextHandle,
    port: u32,
    index: u32,
    into: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    errno::code("ibv_query_gid_ex", || {
        let gid = find_gid(context, port, index.into())?;
        let is_infiniband = context.find()?.device.is_infiniband();
        faults::announce(Verb::QueryGid, None)?;
        check_flags(flags)?;
        // SAFETY: a valid pointer of the caller, of the given size.
        unsafe { copy_sized(&gid_entry(gid, index, is_infiniband), into, size) };
        Ok(())
    })
}

pub extern "C" fn query_gid_table(
    context: ContextHandle,
    into: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    size: usize,
) -> isize {
    let code = errno::negative("ibv_query_gid_table", || {
        let open = context.find()?;
        let port = subnet_port(&open)?;
        let table: Vec<Gid> = match &port {
            Some(port) => port.gids.clone(),
            None => (0..open.context.gid_table_len()).filter_map(|index| open.context.gid(index)).collect(),
        };
        let used = table.iter().enumerate().filter(|(_, gid)| !gid.is_unspecified());
        let count = used.clone().count();
        check_flags(flags)?;
        if count > max_entries {
            return Err(Rejection::invalid(format!(
                "the table has {count} entries, and the array has room for {max_entries}"
            )));
        }
        for (place, (index, gid)) in used.enumerate() {
            let entry = gid_entry(*gid, index as u32, port.is_some());
            // SAFETY: the caller's array has `max_entries` entries of `size` bytes.
            unsafe { copy_sized(&entry, into.byte_add(place * size), size) };
        }
        Ok(count as c_int)
    });
    code as isize
}

pub extern "C" fn query_gid_type(
    context: ContextHandle,
    port: u8,
    index: c_uint,
    into: &mut MaybeUninit<c_int>,
) -> c_int {
    errno::minus_one("ibv_query_gid_type", || {
        find_gid(context, port.into(), index.into())?;
        let is_infiniband = context.find()?.device.is_infiniband();
        into.write(if is_infiniband { IBV_GID_TYPE_SYSFS_IB } else { IBV_GID_TYPE_SYSFS_ROCE_V2 });
        Ok(())
    })
}

pub extern "C" fn query_pkey(
    context: ContextHandle,
    port: u8,
    index: c_int,
    into: &mut MaybeUninit<u16>,
) -> c_int {
    errno::minus_one("ibv_query_pkey", || {
        let open = find_port(context, port.into())?;
        faults::announce(Verb::QueryPkey, None)?;
        if let Some(port) = subnet_port(&open)? {
            let found = usize::try_from(index).ok().and_then(|index| port.p_keys.get(index));
            let missing = || {
                let entries = port.p_keys.len();
                Rejection::invalid(format!(
                    "P_Key index {index} does not exist: the table has {entries} entries"
                ))
            };
            into.write(found.ok_or_else(missing)?.to_be());
            return Ok(());
        }
        if index != 0 {
            return Err(Rejection::invalid(format!(
                "P_Key index {index} does not exist: the table has one entry, index 0"
            )));
        }
        into.write(DEFAULT_PKEY.to_be());
        Ok(())
    })
}

pub extern "C" fn get_pkey_index(context: ContextHandle, port: u8, key: u16) -> c_int {
    errno::number("ibv_get_pkey_index", || {
        let open = find_port(context, port.into())?;
        let keys = subnet_port(&open)?.map_or(vec![DEFAULT_PKEY], |port| port.p_keys);
        let key = u16::from_be(key);
        match keys.iter().position(|own| *own == key) {
            Some(index) => Ok(index as c_int),
            None => Err(Rejection::invalid(format!("the P_Key table has no key {key:#x}"))),
        }
    })
}
