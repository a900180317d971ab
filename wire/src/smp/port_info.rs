//! PortInfo: the state and the settings of a port.

use super::Lid;
use crate::code::code;
use crate::layout::{layout, number_field};

code! {
    /// The logical state of a port: which packets may pass.
    PortState(u8), 4 {
        /// In a Set: leave the state.
        NO_CHANGE = 0 "no change",
        DOWN = 1 "Down",
        /// Only SMPs pass.
        INITIALIZE = 2 "Initialize",
        /// SMPs pass; other packets are received but not sent.
        ARMED = 3 "Armed",
        ACTIVE = 4 "Active",
    }
}

code! {
    /// The physical state of a port.
    PhysicalState(u8), 4 {
        /// In a Set: leave the state.
        NO_CHANGE = 0 "no change",
        SLEEP = 1 "Sleep",
        POLLING = 2 "Polling",
        DISABLED = 3 "Disabled",
        TRAINING = 4 "PortConfigurationTraining",
        LINK_UP = 5 "LinkUp",
    }
}

bitflags::bitflags! {
    /// The capabilities of a port (IBA 14.2.5.6).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct PortCapabilities: u32 {
        /// A subnet manager runs at the port.
        const SM = 1 << 1;
        /// The port sends notices.
        const NOTICE = 1 << 2;
        /// The port sends traps.
        const TRAP = 1 << 3;
        /// The port maps service levels to virtual lanes.
        const SL_MAPPING = 1 << 6;
        /// The node has a system image GUID.
        const SYSTEM_IMAGE_GUID = 1 << 11;
        /// The port supports speeds beyond QDR.
        const EXTENDED_SPEEDS = 1 << 14;
        /// The port supports the connection manager.
        const COMMUNICATION_MANAGEMENT = 1 << 16;
        /// The port supports vendor classes.
        const VENDOR_CLASS = 1 << 20;
        /// The port sends a trap when its capabilities change.
        const CAPABILITY_MASK_NOTICE = 1 << 22;
        /// The port supports the request to register again.
        const CLIENT_REREGISTRATION = 1 << 25;
        /// Bits with other meanings are kept.
        const _ = !0;
    }
}

number_field! {
    PortCapabilities, 32, |n| PortCapabilities::from_bits_retain(n as u32), |n: PortCapabilities| n.bits().into();
}

layout! {
    /// The state and the settings of a port.
    pub struct PortInfo: 64 bytes {
        /// The key that changes need, unless zero.
        m_key: u64 = 0,
        /// The prefix of the port's GIDs.
        gid_prefix: u64 = 8,
        /// The first LID of the port.
        lid: Lid = 16,
        /// The LID of the master subnet manager.
        sm_lid: Lid = 18,
        /// The capabilities of the port.
        capabilities: PortCapabilities = 20,
        /// A diagnostic code of the vendor.
        diag_code: u16 = 24,
        /// How long the M_Key protects after a violation, in seconds; zero for ever.
        m_key_lease: u16 = 26,
        /// The port that received the request.
        local_port: u8 = 28,
        /// Enabled widths: 1 for 1x, 2 for 4x.
        width_enabled: u8 = 29,
        /// Supported widths.
        width_supported: u8 = 30,
        /// The width in use.
        width_active: u8 = 31,
        /// Supported speeds: 1 for SDR, 2 for DDR, 4 for QDR.
        speed_supported: u8 = 32 [0..4],
        /// The logical state.
        state: PortState = 32 [4..8],
        /// The physical state.
        physical_state: PhysicalState = 33 [0..4],
        /// The physical state that a port has after it went down.
        down_default: PhysicalState = 33 [4..8],
        /// The protection that the M_Key gives.
        m_key_protect: u8 = 34 [0..2],
        /// The port has 2^LMC LIDs.
        lmc: u8 = 34 [5..8],
        /// The speed in use.
        speed_active: u8 = 35 [0..4],
        /// Enabled speeds.
        speed_enabled: u8 = 35 [4..8],
        /// The MTU of the link: 1 for 256 bytes to 5 for 4096.
        neighbor_mtu: u8 = 36 [0..4],
        /// The service level of packets to the subnet manager.
        sm_sl: u8 = 36 [4..8],
        /// Supported data VLs: 1 for one, 2 for two, 3 for four, 4 for eight, 5 for fifteen.
        vl_cap: u8 = 37 [0..4],
        /// The initialization that the node requests from the manager.
        init_type: u8 = 37 [4..8],
        /// How much the high-priority table may send in a row.
        vl_high_limit: u8 = 38,
        /// Entries of the high-priority table.
        vl_arbitration_high_cap: u8 = 39,
        /// Entries of the low-priority table.
        vl_arbitration_low_cap: u8 = 40,
        /// The initialization that the manager performed.
        init_type_reply: u8 = 41 [0..4],
        /// The highest MTU.
        mtu_cap: u8 = 41 [4..8],
        /// Packets that a VL drops before it stalls.
        vl_stall_count: u8 = 42 [0..3],
        /// The time a packet may be at the head of a queue: 4.096 µs · 2^n.
        hoq_life: u8 = 42 [3..8],
        /// Data VLs in use, coded as `vl_cap`.
        operational_vls: u8 = 43 [0..4],
        /// Whether a switch port checks the partitions of arriving packets.
        inbound_enforcement: bool = 43 [4..5],
        /// Whether a switch port checks the partitions of departing packets.
        outbound_enforcement: bool = 43 [5..6],
        /// Whether a switch port drops arriving raw packets.
        filter_raw_inbound: bool = 43 [6..7],
        /// Whether a switch port drops departing raw packets.
        filter_raw_outbound: bool = 43 [7..8],
        /// SMPs with a wrong M_Key.
        m_key_violations: u16 = 44,
        /// Packets with a wrong P_Key.
        p_key_violations: u16 = 46,
        /// Packets with a wrong Q_Key.
        q_key_violations: u16 = 48,
        /// Entries of the GUID table.
        guid_cap: u8 = 50,
        /// In a Set: clients register again.
        client_reregister: bool = 51 [0..1],
        /// Suppresses traps about multicast packets.
        multicast_p_key_trap_suppression: u8 = 51 [1..3],
        /// The longest time through the subnet: 4.096 µs · 2^n. It limits the rate of traps.
        subnet_timeout: u8 = 51 [3..8],
        /// The longest time to a response: 4.096 µs · 2^n.
        response_time: u8 = 52 [3..8],
        /// The threshold of local physical errors.
        local_physical_errors: u8 = 53 [0..4],
        /// The threshold of overrun errors.
        overrun_errors: u8 = 53 [4..8],
        /// A hint for the credits of the link.
        max_credit_hint: u16 = 54,
        /// The round trip of the link.
        round_trip_latency: u32 = 57 [0..24],
        /// Further capabilities.
        capabilities_2: u16 = 60,
        /// The extended speed in use: 1 for FDR, 2 for EDR, 4 for HDR.
        extended_speed_active: u8 = 62 [0..4],
        /// Supported extended speeds.
        extended_speed_supported: u8 = 62 [4..8],
        /// Enabled extended speeds.
        extended_speed_enabled: u8 = 63 [3..8],
    }
}

impl PortInfo {
    /// The lanes in use.
    pub const fn lanes(&self) -> u32 {
        match self.width_active {
            2 => 4,
            4 => 8,
            8 => 12,
            16 => 2,
            _ => 1,
        }
    }

    /// The name and the rate of a lane in use, in Mb/s.
    const fn lane(&self) -> (&'static str, u32) {
        match (self.extended_speed_active, self.speed_active) {
            (1, _) => ("FDR", 14_062),
            (2, _) => ("EDR", 25_000),
            (4, _) => ("HDR", 50_000),
            (8, _) => ("NDR", 100_000),
            (_, 2) => ("DDR", 5_000),
            (_, 4) => ("QDR", 10_000),
            _ => ("SDR", 2_500),
        }
    }

    /// The name of the speed in use.
    pub const fn speed_name(&self) -> &'static str {
        self.lane().0
    }

    /// The rate of the link in Gb/s, without fractions.
    pub const fn rate(&self) -> u32 {
        self.lanes() * self.lane().1 / 1000
    }

    /// Whether one of the port's LIDs is this one.
    pub fn has_lid(&self, lid: Lid) -> bool {
        self.lid.is_unicast() && lid.0 >= self.lid.0 && lid.0 - self.lid.0 < 1 << self.lmc
    }
}
