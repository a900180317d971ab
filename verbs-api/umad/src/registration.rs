//! Agents: which MADs a program sends and receives at a port.

use crate::abi::RegistrationAttributes;
use crate::port::{find, set_errno};
use core::ffi::{c_int, c_long};
use softhca_control::{AgentRegistration, SubnetRequest, SubnetResponse};

/// The OUI of agents of a vendor class that name none: that of OpenIB.
const DEFAULT_OUI: [u8; 3] = [0x00, 0x14, 0x05];
/// The vendor classes whose MADs have an OUI.
const OUI_CLASSES: core::ops::RangeInclusive<c_int> = 0x30..=0x4f;
/// `UMAD_USER_RMPP`: the program segments itself.
const USER_RMPP: u32 = 1;
const MASK_WORDS: usize = 2;

/// Registers an agent; an error is a positive errno.
fn register_agent(descriptor: c_int, registration: AgentRegistration) -> Result<c_int, c_int> {
    let port = find(descriptor).ok_or(libc::EBADF)?;
    let response = port.control.lock().subnet(SubnetRequest::RegisterAgent(registration));
    match response {
        Ok((SubnetResponse::Agent(agent), _)) => Ok(agent as c_int),
        Ok(_) => Err(libc::EIO),
        Err(error) => Err(error.errno()),
    }
}

/// # Safety
///
/// The mask is null or has 128 bits.
unsafe fn methods(mask: *const c_long) -> [u64; MASK_WORDS] {
    if mask.is_null() {
        return [0; MASK_WORDS];
    }
    // SAFETY: the caller promises the length. The words are those of a 64-bit machine.
    unsafe { mask.cast::<[u64; MASK_WORDS]>().read_unaligned() }
}

/// `umad_register`
pub unsafe extern "C" fn register(
    descriptor: c_int,
    class: c_int,
    version: c_int,
    rmpp_version: u8,
    mask: *const c_long,
) -> c_int {
    // SAFETY: the caller passes a mask or null.
    unsafe { register_class(descriptor, class, version, rmpp_version, DEFAULT_OUI, mask) }
}

/// `umad_register_oui`
pub unsafe extern "C" fn register_oui(
    descriptor: c_int,
    class: c_int,
    rmpp_version: u8,
    oui: *const [u8; 3],
    mask: *const c_long,
) -> c_int {
    if !OUI_CLASSES.contains(&class) || oui.is_null() {
        return -libc::EINVAL;
    }
    // SAFETY: the caller passes three bytes, and a mask or null.
    unsafe { register_class(descriptor, class, 1, rmpp_version, *oui, mask) }
}

/// # Safety
///
/// The mask is null or has 128 bits.
unsafe fn register_class(
    descriptor: c_int,
    class: c_int,
    version: c_int,
    rmpp_version: u8,
    oui: [u8; 3],
    mask: *const c_long,
) -> c_int {
    // SAFETY: the caller promises it.
    let methods = unsafe { methods(mask) };
    let (mgmt_class, class_version) = (class as u8, version as u8);
    let registration = AgentRegistration { mgmt_class, class_version, methods, oui, rmpp_version };
    match register_agent(descriptor, registration) {
        Ok(agent) => agent,
        Err(errno) => {
            set_errno(errno);
            -libc::EPERM
        }
    }
}

/// `umad_register2`: returns a positive errno.
pub unsafe extern "C" fn register2(
    descriptor: c_int,
    attributes: *mut RegistrationAttributes,
    agent: *mut u32,
) -> c_int {
    // SAFETY: the caller passes a structure, or null.
    let Some(attributes) = (unsafe { attributes.as_mut() }) else { return libc::EINVAL };
    let [zero, oui @ ..] = attributes.oui.to_be_bytes();
    let needs_oui = OUI_CLASSES.contains(&attributes.mgmt_class.into());
    if agent.is_null() || needs_oui && (zero != 0 || oui == [0; 3]) {
        return libc::EINVAL;
    }
    if attributes.flags & !USER_RMPP != 0 {
        // The flags that are supported.
        attributes.flags = USER_RMPP;
        return libc::EINVAL;
    }
    let rmpp_version = if attributes.flags & USER_RMPP == 0 { attributes.rmpp_version } else { 0 };
    let registration = AgentRegistration {
        mgmt_class: attributes.mgmt_class,
        class_version: attributes.mgmt_class_version,
        methods: attributes.method_mask,
        oui,
        rmpp_version,
    };
    match register_agent(descriptor, registration) {
        Ok(number) => {
            // SAFETY: the caller passes a place for the number.
            unsafe { agent.write(number as u32) };
            0
        }
        Err(errno) => errno,
    }
}

/// `umad_unregister`
pub extern "C" fn unregister(descriptor: c_int, agent: c_int) -> c_int {
    let Some(port) = find(descriptor) else {
        set_errno(libc::EBADF);
        return -1;
    };
    let response = port.control.lock().subnet(SubnetRequest::UnregisterAgent(agent as u32));
    match response {
        Ok(_) => 0,
        Err(error) => {
            set_errno(error.errno());
            -1
        }
    }
}
