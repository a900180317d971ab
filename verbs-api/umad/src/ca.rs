//! Channel adapters and their ports.

use crate::abi::{Ca, DeviceNode, MAX_PORTS, NAME_LEN, Port, set_text};
use crate::subnet::{hcas, index_of, ports, resolve, text};
use core::ffi::{c_char, c_int};
use core::ptr;
use softhca_control::{SubnetHca, SubnetPort};

const CHANNEL_ADAPTER: u32 = 1;

/// `umad_init`
pub extern "C" fn init() -> c_int {
    0
}

/// `umad_done`
pub extern "C" fn done() -> c_int {
    0
}

/// `umad_get_cas_names`
pub unsafe extern "C" fn get_cas_names(names: *mut [c_char; NAME_LEN], max: c_int) -> c_int {
    if names.is_null() || max <= 0 {
        return 0;
    }
    let count = hcas().len().min(max as usize);
    for index in 0..count {
        // SAFETY: the caller has room for `max` names.
        set_text(unsafe { &mut *names.add(index) }, &SubnetHca::device_name(index));
    }
    count as c_int
}

/// `umad_get_ca_device_list`
pub extern "C" fn get_ca_device_list() -> *mut DeviceNode {
    let mut head = ptr::null_mut();
    for index in (0..hcas().len()).rev() {
        let name = SubnetHca::device_name(index);
        // SAFETY: the block has room for the node and a name with its zero; `calloc` aligns it for both.
        unsafe {
            let node = libc::calloc(1, size_of::<DeviceNode>() + name.len() + 1).cast::<DeviceNode>();
            if node.is_null() {
                free_ca_device_list(head);
                return ptr::null_mut();
            }
            let at = node.add(1).cast::<c_char>();
            ptr::copy_nonoverlapping(name.as_ptr().cast(), at, name.len());
            node.write(DeviceNode { next: head, ca_name: at });
            head = node;
        }
    }
    head
}

/// `umad_free_ca_device_list`
pub unsafe extern "C" fn free_ca_device_list(mut node: *mut DeviceNode) {
    while !node.is_null() {
        // SAFETY: the caller passes the list that `get_ca_device_list` allocated, once.
        unsafe {
            let next = (*node).next;
            libc::free(node.cast());
            node = next;
        }
    }
}

/// `umad_sort_ca_device_list`: sorts by name. With `size` zero the length is that of the list.
pub unsafe extern "C" fn sort_ca_device_list(head: *mut *mut DeviceNode, size: usize) -> c_int {
    if head.is_null() {
        return libc::EINVAL;
    }
    let mut nodes = Vec::new();
    // SAFETY: the caller passes a list that ends with a null pointer, whose names are C strings.
    unsafe {
        let mut node = *head;
        while !node.is_null() {
            nodes.push(node);
            node = (*node).next;
        }
        if size != 0 && size != nodes.len() {
            return libc::EINVAL;
        }
        nodes.sort_by_key(|node| text((**node).ca_name));
        for (index, node) in nodes.iter().enumerate() {
            (**node).next = nodes.get(index + 1).copied().unwrap_or(ptr::null_mut());
        }
        *head = nodes.first().copied().unwrap_or(ptr::null_mut());
    }
    0
}

/// `umad_get_ca_portguids`: index 0 stands for the port that a channel adapter does not have.
pub unsafe extern "C" fn get_ca_portguids(name: *const c_char, guids: *mut u64, max: c_int) -> c_int {
    let hcas = hcas();
    // SAFETY: the caller passes a C string or null.
    let Some(hca) = find(&hcas, unsafe { text(name) }) else { return -libc::ENODEV };
    if guids.is_null() {
        return 0;
    }
    let all: Vec<u64> = core::iter::once(0).chain(ports(hca).map(|(_, port)| port.guid.to_be())).collect();
    if all.len() > max.max(0) as usize {
        return -libc::ENOMEM;
    }
    // SAFETY: the caller has room for `max` GUIDs.
    unsafe { ptr::copy_nonoverlapping(all.as_ptr(), guids, all.len()) };
    all.len() as c_int
}

/// `umad_get_ca`
pub unsafe extern "C" fn get_ca(name: *const c_char, ca: *mut Ca) -> c_int {
    let hcas = hcas();
    // SAFETY: the caller passes a C string or null.
    let name = unsafe { text(name) };
    let index = match name {
        Some(name) => index_of(&hcas, name),
        None => resolve(&hcas, None, 0).map(|(index, _)| index),
    };
    let Some(index) = index.filter(|_| !ca.is_null()) else { return -libc::ENODEV };
    let hca = &hcas[index];
    let node_guid = hca.node_guid.to_be();
    let mut filled = Ca {
        ca_name: [0; NAME_LEN],
        node_type: CHANNEL_ADAPTER,
        numports: ports(hca).count() as c_int,
        fw_ver: [0; 20],
        ca_type: [0; 40],
        hw_ver: [0; 20],
        node_guid,
        system_guid: node_guid,
        ports: [ptr::null_mut(); MAX_PORTS],
    };
    let name = SubnetHca::device_name(index);
    set_text(&mut filled.ca_name, &name);
    set_text(&mut filled.fw_ver, env!("CARGO_PKG_VERSION"));
    set_text(&mut filled.ca_type, "SoftHCA");
    set_text(&mut filled.hw_ver, "0");
    for (number, port) in ports(hca) {
        // SAFETY: the block has the size of the structure, which may have any bytes.
        unsafe {
            let at = libc::calloc(1, size_of::<Port>()).cast::<Port>();
            if at.is_null() || fill_port(&name, number, port, &mut *at).is_none() {
                libc::free(at.cast());
                release_ca(&raw mut filled);
                return -libc::ENOMEM;
            }
            filled.ports[number] = at;
        }
    }
    // SAFETY: the caller passes a structure to fill.
    unsafe { ca.write(filled) };
    0
}

/// `umad_release_ca`
pub unsafe extern "C" fn release_ca(ca: *mut Ca) -> c_int {
    // SAFETY: the caller passes a structure that `get_ca` filled, or null.
    let Some(ca) = (unsafe { ca.as_mut() }) else { return -libc::ENODEV };
    for port in &mut ca.ports {
        // SAFETY: `get_ca` allocated the port and its keys; a released port is null.
        unsafe {
            release_port(*port);
            libc::free((*port).cast());
        }
        *port = ptr::null_mut();
    }
    0
}

/// `umad_get_port`
pub unsafe extern "C" fn get_port(name: *const c_char, number: c_int, port: *mut Port) -> c_int {
    let hcas = hcas();
    // SAFETY: the caller passes a C string or null.
    let found = resolve(&hcas, unsafe { text(name) }, number);
    let Some((index, number)) = found else {
        return if hcas.is_empty() { -libc::ENODEV } else { -libc::EIO };
    };
    // SAFETY: the caller passes a structure to fill, or null.
    let Some(port) = (unsafe { port.as_mut() }) else { return -libc::EINVAL };
    let state = &hcas[index].ports[number - 1];
    match fill_port(&SubnetHca::device_name(index), number, state, port) {
        Some(()) => 0,
        None => -libc::ENOMEM,
    }
}

/// `umad_release_port`
pub unsafe extern "C" fn release_port(port: *mut Port) -> c_int {
    // SAFETY: the caller passes a structure that `get_port` filled, or null.
    let Some(port) = (unsafe { port.as_mut() }) else { return -libc::ENODEV };
    // SAFETY: `fill_port` allocated the keys; released ones are null.
    unsafe { libc::free(port.pkeys.cast()) };
    (port.pkeys, port.pkeys_size) = (ptr::null_mut(), 0);
    0
}

fn find<'a>(hcas: &'a [SubnetHca], name: Option<&str>) -> Option<&'a SubnetHca> {
    let index = match name {
        Some(name) => index_of(hcas, name),
        None => resolve(hcas, None, 0).map(|(index, _)| index),
    };
    hcas.get(index?)
}

/// Fills the structure; `None` without memory.
fn fill_port(name: &str, number: usize, port: &SubnetPort, filled: &mut Port) -> Option<()> {
    // SAFETY: `calloc` has no preconditions.
    let pkeys = unsafe { libc::calloc(port.p_keys.len().max(1), size_of::<u16>()) }.cast::<u16>();
    if pkeys.is_null() {
        return None;
    }
    // SAFETY: the block has room for the keys.
    unsafe { ptr::copy_nonoverlapping(port.p_keys.as_ptr(), pkeys, port.p_keys.len()) };
    *filled = Port {
        ca_name: [0; NAME_LEN],
        portnum: number as c_int,
        base_lid: port.lid.into(),
        lmc: port.lmc.into(),
        sm_lid: port.sm_lid.into(),
        sm_sl: port.sm_sl.into(),
        state: port.state.into(),
        phys_state: port.physical_state.into(),
        rate: port.rate,
        capmask: port.capabilities.to_be(),
        gid_prefix: port.gid_prefix.to_be(),
        port_guid: port.guid.to_be(),
        pkeys_size: port.p_keys.len() as u32,
        pkeys,
        link_layer: [0; NAME_LEN],
    };
    set_text(&mut filled.ca_name, name);
    set_text(&mut filled.link_layer, "InfiniBand");
    Some(())
}
