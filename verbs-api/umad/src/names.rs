//! Texts for classes, methods, attributes and statuses.

use core::ffi::{CStr, c_char};

type Table<T> = [(T, &'static CStr)];

fn find<T: PartialEq + Copy>(tables: &[&Table<T>], number: T, otherwise: &'static CStr) -> *const c_char {
    let mut entries = tables.iter().flat_map(|table| table.iter());
    entries.find(|(known, _)| *known == number).map_or(otherwise, |(_, text)| text).as_ptr()
}

const UNKNOWN: &CStr = c"<unknown>";
const SUBNET: u8 = 0x01;
const SUBNET_DIRECTED: u8 = 0x81;
const ADMINISTRATION: u8 = 0x03;
const COMMUNICATION: u8 = 0x07;

const CLASSES: &Table<u8> = &[
    (SUBNET, c"Subn"),
    (SUBNET_DIRECTED, c"Subn"),
    (ADMINISTRATION, c"SubnAdm"),
    (0x04, c"Perf"),
    (0x05, c"BM"),
    (0x06, c"DevMgt"),
    (COMMUNICATION, c"ComMgt"),
    (0x08, c"SNMP"),
    (0x10, c"DevAdm"),
    (0x11, c"BootMgt"),
    (0x12, c"BIS"),
    (0x21, c"CongestionManagment"),
];

const METHODS: &Table<u8> = &[
    (0x01, c"Get"),
    (0x02, c"Set"),
    (0x81, c"GetResp"),
    (0x03, c"Send"),
    (0x05, c"Trap"),
    (0x06, c"Report"),
    (0x86, c"ReportResp"),
    (0x07, c"TrapRepress"),
];

const ADMINISTRATION_METHODS: &Table<u8> = &[
    (0x12, c"GetTable"),
    (0x92, c"GetTableResp"),
    (0x15, c"Delete"),
    (0x95, c"DeleteResp"),
    (0x14, c"GetMulti"),
    (0x94, c"GetMultiResp"),
    (0x13, c"GetTraceTable"),
];

const ATTRIBUTES: &Table<u16> = &[(0x01, c"Class Port Info"), (0x02, c"Notice"), (0x03, c"Inform Info")];

const SUBNET_ATTRIBUTES: &Table<u16> = &[
    (0x10, c"NodeDescription"),
    (0x11, c"NodeInfo"),
    (0x12, c"SwitchInfo"),
    (0x14, c"GUIDInfo"),
    (0x15, c"PortInfo"),
    (0x16, c"P_KeyTable"),
    (0x17, c"SLtoVLMappingTable"),
    (0x18, c"VLArbitrationTable"),
    (0x19, c"LinearForwardingTable"),
    (0x1a, c"RandomForwardingTable"),
    (0x1b, c"MulticastForwardingTable"),
    (0x1c, c"LinkSpeedWidthPairsTable"),
    (0x1d, c"VendorSpecificMadsTable"),
    (0x1e, c"HierarchyInfo"),
    (0x20, c"SMInfo"),
    (0x30, c"VendorDiag"),
    (0x31, c"LedInfo"),
    (0x32, c"CableInfo"),
    (0x33, c"PortInfoExtended"),
];

const ADMINISTRATION_ATTRIBUTES: &Table<u16> = &[
    (0x11, c"NodeRecord"),
    (0x12, c"PortInfoRecord"),
    (0x13, c"SLtoVLMappingTableRecord"),
    (0x14, c"SwitchInfoRecord"),
    (0x15, c"LinearForwardingTableRecord"),
    (0x16, c"RandomForwardingTableRecord"),
    (0x17, c"MulticastForwardingTableRecord"),
    (0x18, c"SMInfoRecord"),
    (0x19, c"LinkSpeedWidthPairsTableRecord"),
    (0x20, c"LinkRecord"),
    (0x30, c"GuidInfoRecord"),
    (0x31, c"ServiceRecord"),
    (0x33, c"P_KeyTableRecord"),
    (0x35, c"PathRecord"),
    (0x36, c"VLArbitrationTableRecord"),
    (0x38, c"MCMemberRecord"),
    (0x39, c"TraceRecord"),
    (0x3a, c"MultiPathRecord"),
    (0x3b, c"ServiceAssociationRecord"),
    (0x3c, c"HierarchyInfoRecord"),
    (0x3d, c"CableInfoRecord"),
    (0x3e, c"PortInfoExtendedRecord"),
    (0xf3, c"InformInfoRecord"),
];

const COMMUNICATION_ATTRIBUTES: &Table<u16> = &[
    (0x10, c"ConnectRequest"),
    (0x11, c"MsgRcptAck"),
    (0x12, c"ConnectReject"),
    (0x13, c"ConnectReply"),
    (0x14, c"ReadyToUse"),
    (0x15, c"DisconnectRequest"),
    (0x16, c"DisconnectReply"),
    (0x17, c"ServiceIDResReq"),
    (0x18, c"ServiceIDResReqResp"),
    (0x19, c"LoadAlternatePath"),
    (0x1a, c"AlternatePathResponse"),
    (0x1b, c"SuggestAlternatePath"),
    (0x1c, c"SuggestPathResponse"),
];

/// Bits 2 to 4 of a status.
const INVALID_FIELDS: &Table<u16> = &[
    (0x04, c"Bad Version"),
    (0x08, c"Method not supported"),
    (0x0c, c"Method/Attribute combo not supported"),
    (0x1c, c"Invalid attribute/modifier field"),
];

/// The upper half of a status of subnet administration.
const ADMINISTRATION_STATUSES: &Table<u16> = &[
    (0, c"Success"),
    (1, c"No Resources"),
    (2, c"Request Invalid"),
    (3, c"No Records"),
    (4, c"Too Many Records"),
    (5, c"Invalid GID"),
    (6, c"Insufficient Components"),
    (7, c"Request Denied"),
    (8, c"Priority Suggested"),
];

/// `umad_class_str`
pub extern "C" fn class_str(class: u8) -> *const c_char {
    let otherwise = match class {
        0x09..=0x0f | 0x30..=0x4f => c"Vendor",
        0x10..=0x2f => c"Application",
        _ => UNKNOWN,
    };
    find(&[CLASSES], class, otherwise)
}

/// `umad_method_str`
pub extern "C" fn method_str(class: u8, method: u8) -> *const c_char {
    match class {
        ADMINISTRATION => find(&[ADMINISTRATION_METHODS, METHODS], method, UNKNOWN),
        _ => find(&[METHODS], method, UNKNOWN),
    }
}

/// `umad_attribute_str`
pub extern "C" fn attribute_str(class: u8, attribute: u16) -> *const c_char {
    let own = match class {
        SUBNET | SUBNET_DIRECTED => SUBNET_ATTRIBUTES,
        ADMINISTRATION => ADMINISTRATION_ATTRIBUTES,
        COMMUNICATION => COMMUNICATION_ATTRIBUTES,
        _ => &[],
    };
    find(&[own, ATTRIBUTES], u16::from_be(attribute), UNKNOWN)
}

/// `umad_common_mad_status_str`
pub extern "C" fn common_mad_status_str(status: u16) -> *const c_char {
    match u16::from_be(status) {
        status if status & 1 != 0 => c"Busy".as_ptr(),
        status if status & 2 != 0 => c"Redirection required".as_ptr(),
        status => find(&[INVALID_FIELDS], status & 0x1c, c"Success"),
    }
}

/// `umad_sa_mad_status_str`
pub extern "C" fn sa_mad_status_str(status: u16) -> *const c_char {
    find(&[ADMINISTRATION_STATUSES], u16::from_be(status) >> 8, c"Undefined Error")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: *const c_char) -> &'static str {
        // SAFETY: every text is a C string of this file.
        unsafe { CStr::from_ptr(text) }.to_str().expect("ASCII")
    }

    #[test]
    fn numbers_have_the_texts_of_libibumad() {
        assert_eq!(
            [0x81, 0x03, 0x32, 0x55].map(|class| text(class_str(class))),
            ["Subn", "SubnAdm", "Vendor", "<unknown>"]
        );
        assert_eq!(
            [text(method_str(3, 0x92)), text(method_str(3, 0x81)), text(method_str(1, 0x92))],
            ["GetTableResp", "GetResp", "<unknown>"]
        );
        let attribute = |class, id: u16| text(attribute_str(class, id.to_be()));
        assert_eq!(
            [attribute(1, 0x15), attribute(3, 0x35), attribute(7, 0x10), attribute(4, 2)],
            ["PortInfo", "PathRecord", "ConnectRequest", "Notice"]
        );
        let status = |status: u16| text(common_mad_status_str(status.to_be()));
        assert_eq!(
            [status(0), status(1), status(0x0c), status(0x1c)],
            ["Success", "Busy", "Method/Attribute combo not supported", "Invalid attribute/modifier field"]
        );
        assert_eq!(text(sa_mad_status_str(0x0300_u16.to_be())), "No Records");
    }
}
