//! The view that programs have of the HCAs of their host: `/sys/class/infiniband`, `/sys/class/infiniband_mad` and
//! `/dev/infiniband`.

use crate::sysfs::{hex_groups, link_entries, write_files, write_line};
use softhca_control::SubnetHca;
use softhca_subnet::{PortId, Subnet};
use softhca_wire::smp::{PhysicalState, PortInfo, PortState};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The most ports of an HCA that libibumad can name.
const MAX_PORTS: u8 = 9;
/// The version of the user MAD interface.
const ABI_VERSION: &str = "5";
/// P_Keys in files: the first block of the table.
const P_KEYS: usize = 32;

/// The files of a host.
pub(super) struct HostView {
    scratch: PathBuf,
    ports: BTreeMap<PortId, PortFiles>,
}

struct PortFiles {
    folder: PathBuf,
    sm_device: PathBuf,
    shown: BTreeMap<String, String>,
}

impl HostView {
    /// Creates the files of a host's HCAs below a folder.
    pub fn create(root: &Path, subnet: &Subnet, hcas: &[usize]) -> io::Result<HostView> {
        let (sys, nodes) = (root.join("sys"), root.join("dev/infiniband"));
        let classes = ["infiniband", "infiniband_verbs", "infiniband_mad"];
        // A complete `/sys` for programs that can be given another root.
        link_entries(Path::new("/sys"), &sys, &["class"])?;
        link_entries(Path::new("/sys/class"), &sys.join("class"), &classes)?;
        let [devices, _, mads] = classes.map(|class| sys.join("class").join(class));
        for folder in [&devices, &mads, &nodes, &sys.join("class/infiniband_verbs")] {
            std::fs::create_dir_all(folder)?;
        }
        write_line(&mads.join("abi_version"), ABI_VERSION)?;
        let mut view = HostView { scratch: root.join(".new"), ports: BTreeMap::new() };
        for (index, node) in hcas.iter().enumerate() {
            let name = SubnetHca::device_name(index);
            let device = devices.join(&name);
            let topology = &subnet.topology().nodes[*node];
            let guid = hex_groups(&topology.guid.to_be_bytes());
            let files = [
                ("node_type", "1: CA"),
                ("node_desc", &topology.description),
                ("node_guid", &guid),
                ("sys_image_guid", &guid),
                ("hca_type", "SoftHCA"),
                ("board_id", "SoftHCA"),
                ("fw_ver", env!("CARGO_PKG_VERSION")),
                ("hw_rev", "0"),
            ];
            write_files(&device, &files)?;
            for port in 1..=topology.port_count().min(MAX_PORTS) {
                let number = view.ports.len();
                let folder = device.join(format!("ports/{port}"));
                for folder in [folder.join("gids"), folder.join("pkeys")] {
                    std::fs::create_dir_all(folder)?;
                }
                write_line(&folder.join("link_layer"), "InfiniBand")?;
                let umad = mads.join(format!("umad{number}"));
                write_files(&umad, &[("ibdev", &name), ("port", &port.to_string())])?;
                symlink("/dev/null", nodes.join(format!("umad{number}")))?;
                let sm_device = nodes.join(format!("issm{number}"));
                std::fs::write(&sm_device, "")?;
                let id = PortId { node: *node, port };
                view.ports.insert(id, PortFiles { folder, sm_device, shown: BTreeMap::new() });
                view.update(subnet, id);
            }
        }
        Ok(view)
    }

    /// The ports and the files by which programs say that they manage the subnet.
    pub fn sm_devices(&self) -> Vec<(PortId, PathBuf)> {
        self.ports.iter().map(|(port, files)| (*port, files.sm_device.clone())).collect()
    }

    /// Writes the values of a port that have changed, if the host has it.
    pub fn update(&mut self, subnet: &Subnet, port: PortId) {
        let Some(files) = self.ports.get_mut(&port) else { return };
        for (name, value) in values(subnet, port) {
            if files.shown.get(&name) != Some(&value) {
                // A folder that somebody removed is not created again. A reader finds the old value or the new one.
                let _ = write_line(&self.scratch, &value)
                    .and_then(|()| std::fs::rename(&self.scratch, files.folder.join(&name)));
                files.shown.insert(name, value);
            }
        }
    }
}

fn values(subnet: &Subnet, port: PortId) -> Vec<(String, String)> {
    let info = subnet.port_info(port);
    let text = |name: &str, value: String| (name.into(), value);
    let mut values = vec![
        text("lid", format!("{:#x}", info.lid.0)),
        text("lid_mask_count", info.lmc.to_string()),
        text("sm_lid", format!("{:#x}", info.sm_lid.0)),
        text("sm_sl", info.sm_sl.to_string()),
        text("cap_mask", format!("{:#010x}", info.capabilities.bits())),
        text("rate", rate(info)),
        text("state", state(info.state)),
        text("phys_state", physical_state(info.physical_state)),
    ];
    for (index, guid) in subnet.port_guids(port).iter().enumerate() {
        let gid = (u128::from(info.gid_prefix) << 64 | u128::from(*guid)).to_be_bytes();
        values.push(text(&format!("gids/{index}"), hex_groups(&gid)));
    }
    let keys = subnet.p_keys(port).iter().take(P_KEYS).enumerate();
    values.extend(keys.map(|(index, key)| text(&format!("pkeys/{index}"), format!("{key:#06x}"))));
    values
}

fn state(state: PortState) -> String {
    let name = match state {
        PortState::DOWN => "DOWN",
        PortState::INITIALIZE => "INIT",
        PortState::ARMED => "ARMED",
        PortState::ACTIVE => "ACTIVE",
        _ => "NOP",
    };
    format!("{}: {name}", state.0)
}

fn physical_state(state: PhysicalState) -> String {
    let name = match state {
        PhysicalState::SLEEP => "Sleep",
        PhysicalState::POLLING => "Polling",
        PhysicalState::DISABLED => "Disabled",
        PhysicalState::TRAINING => "PortConfigurationTraining",
        PhysicalState::LINK_UP => "LinkUp",
        _ => "<unknown>",
    };
    format!("{}: {name}", state.0)
}

/// The rate as Linux prints it.
fn rate(info: &PortInfo) -> String {
    let lanes = info.lanes();
    format!("{} Gb/sec ({lanes}X {})", info.rate(), info.speed_name())
}
