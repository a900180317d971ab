//! The files in which programs look for RDMA devices: `/sys/class/infiniband`, `/sys/class/infiniband_verbs`, the devices
//! behind them, and `/dev/infiniband`.
//!
//! The daemon keeps them in a folder of the user for each host, and updates the values that change. `softhca exec` shows
//! the folder to a program at the usual places; any program can read it where it is.

use crate::config::Config;
use crate::host::DaemonHost;
use crate::messages::report;
use crate::network_namespace::within;
use softhca_control::{HostDevice, RuntimeDir};
use softhca_types::{Counters, PortState};
use softhca_udp::interface_of;
use softhca_wire::Gid;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// The root bus of emulated devices, whose PCI domain no machine uses.
pub const PCI_ROOT: &str = "pci5fca:00";
/// How often values are updated.
const INTERVAL: Duration = Duration::from_millis(250);
/// The uverbs ABI version that rdma-core's libibverbs accepts.
const UVERBS_ABI_VERSION: &str = "6";
/// A device node that can be opened and does nothing, and its number.
const NULL: &str = "/dev/null";
const NULL_DEVICE_NUMBER: &str = "1:3";

/// Keeps the folders of all hosts of a daemon, until it is dropped.
pub(crate) struct Views {
    folder: PathBuf,
    stop: Option<SyncSender<()>>,
    updater: Option<JoinHandle<()>>,
}

impl Views {
    /// Creates the folders. Without them, programs that look in `/sys` find no device, and all others work.
    pub fn start(config: &Config, hosts: &[Arc<DaemonHost>]) -> Views {
        let folder = RuntimeDir::for_user().views(&config.name);
        let _ = std::fs::remove_dir_all(&folder);
        let mut views = Views { folder, stop: None, updater: None };
        if let Err(error) = views.create(config, hosts) {
            report!("programs will not see the devices in /sys: {}: {error}", views.folder.display());
        }
        views
    }

    fn create(&mut self, config: &Config, hosts: &[Arc<DaemonHost>]) -> io::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        // Readers list the folders of counters, so a new value is not written there.
        let scratch = self.folder.join(".new");
        let mut cards = Vec::new();
        for host in hosts {
            let root = self.folder.join(&host.device.host);
            let gids = host.driver.control(|driver| driver.hca().gids().to_vec());
            let device = DeviceFiles { device: &host.device, gids: &gids };
            // Interfaces have their names there.
            let port = within(config.namespace(&host.device.host), || device.create(&root))??;
            let (listed, scratch) = (device.entries(&root), scratch.clone());
            cards.push(Card { host: host.clone(), port, listed, shown: BTreeMap::new(), scratch });
        }
        cards.iter_mut().try_for_each(Card::update)?;
        let (stop, stopped) = sync_channel(1);
        let updater = std::thread::Builder::new().name("views".into()).spawn(move || {
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                for card in &mut cards {
                    // A folder that somebody removed is not created again.
                    let _ = card.update();
                }
            }
        })?;
        (self.stop, self.updater) = (Some(stop), Some(updater));
        Ok(())
    }
}

impl Drop for Views {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(updater) = self.updater.take() {
            let _ = updater.join();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The values of a device that change.
struct Card {
    host: Arc<DaemonHost>,
    /// The folder of its port.
    port: PathBuf,
    /// The entries of its host's view that list it.
    listed: Vec<(PathBuf, PathBuf)>,
    shown: BTreeMap<String, String>,
    scratch: PathBuf,
}

impl Card {
    /// Writes the files whose values have changed. A reader finds the old value or the new one.
    fn update(&mut self) -> io::Result<()> {
        let (counters, state) =
            (self.host.counters(), self.host.driver.control(|driver| driver.hca().port_state()));
        for (entry, target) in &self.listed {
            match self.host.is_removed.load(Ordering::Relaxed) {
                true if entry.is_symlink() => std::fs::remove_file(entry)?,
                false if !entry.is_symlink() => symlink(target, entry)?,
                _ => {}
            }
        }
        let (state, physical) = match state {
            PortState::Active => ("4: ACTIVE", "5: LinkUp"),
            PortState::Down => ("1: DOWN", "3: Disabled"),
        };
        let mut values = vec![("state".into(), state.into()), ("phys_state".into(), physical.into())];
        values.extend(counter_files(&counters).map(|(name, value)| (name, value.to_string())));
        for (name, value) in values {
            if self.shown.get(&name) != Some(&value) {
                write_line(&self.scratch, &value)?;
                std::fs::rename(&self.scratch, self.port.join(&name))?;
                self.shown.insert(name, value);
            }
        }
        Ok(())
    }
}

/// The files of counters, with their names below the folder of a port.
fn counter_files(counters: &Counters) -> impl Iterator<Item = (String, u64)> {
    let port = counters.port_files().map(|(name, value)| (format!("counters/{name}"), value));
    let lifespan = ("lifespan", INTERVAL.as_millis() as u64);
    let hardware = counters.hardware_files().chain([lifespan]);
    port.chain(hardware.map(|(name, value)| (format!("hw_counters/{name}"), value)))
}

/// The files of a device.
struct DeviceFiles<'a> {
    device: &'a HostDevice,
    gids: &'a [Gid],
}

impl DeviceFiles<'_> {
    /// Creates the files below the root of a host's view; returns the folder of the port.
    fn create(&self, root: &Path) -> io::Result<PathBuf> {
        let sys = root.join("sys");
        if !root.exists() {
            // A complete `/sys` for programs that can be given another root.
            link_entries(Path::new("/sys"), &sys, &["class", "devices"])?;
            link_entries(Path::new("/sys/class"), &sys.join("class"), &["infiniband", "infiniband_verbs"])?;
            link_entries(Path::new("/sys/devices"), &sys.join("devices"), &[PCI_ROOT])?;
        }
        let name = self.device.device_name.as_str();
        let (node, slot) = self.node_and_slot();
        let pci = sys.join("devices").join(PCI_ROOT).join(&slot);
        self.write_pci_device(&pci, &slot)?;

        let device = pci.join("infiniband").join(name);
        self.write_device(&device)?;
        let verbs = pci.join("infiniband_verbs").join(&node);
        let files = [("ibdev", name), ("abi_version", "1"), ("dev", NULL_DEVICE_NUMBER)];
        write_files(&verbs, &files)?;
        for folder in [&device, &verbs] {
            symlink(format!("../../../{slot}"), folder.join("device"))?;
        }
        let nodes = root.join("dev/infiniband");
        for folder in [sys.join("class/infiniband"), sys.join("class/infiniband_verbs"), nodes.clone()] {
            std::fs::create_dir_all(folder)?;
        }
        self.entries(root).iter().try_for_each(|(entry, target)| symlink(target, entry))?;
        let version = sys.join("class/infiniband_verbs/abi_version");
        if !version.exists() {
            write_line(&version, UVERBS_ABI_VERSION)?;
        }

        if !nodes.join("rdma_cm").is_symlink() {
            symlink(NULL, nodes.join("rdma_cm"))?;
        }
        Ok(device.join("ports/1"))
    }

    /// The name of its device node, and its PCI slot.
    fn node_and_slot(&self) -> (String, String) {
        let number = self.device.device_number();
        (format!("uverbs{number}"), format!("5fca:00:{number:02x}.0"))
    }

    /// The links by which programs find the device, with their targets.
    fn entries(&self, root: &Path) -> Vec<(PathBuf, PathBuf)> {
        let (node, slot) = self.node_and_slot();
        let in_class = |class: &str, entry: &str| {
            let target = format!("../../devices/{PCI_ROOT}/{slot}/{class}/{entry}");
            (root.join("sys/class").join(class).join(entry), target.into())
        };
        vec![
            in_class("infiniband", &self.device.device_name),
            in_class("infiniband_verbs", &node),
            (root.join("dev/infiniband").join(&node), NULL.into()),
        ]
    }

    /// The files from which programs place a device: its NUMA node, processors and kind.
    fn write_pci_device(&self, pci: &Path, slot: &str) -> io::Result<()> {
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_else(|_| "0".into());
        let files = [
            ("vendor", "0xffff"),
            ("device", "0xffff"),
            ("subsystem_vendor", "0xffff"),
            ("subsystem_device", "0xffff"),
            ("class", "0x020700"),
            ("revision", "0x00"),
            ("numa_node", "-1"),
            ("local_cpulist", online.trim()),
            ("uevent", &format!("DRIVER=softhca\nPCI_CLASS=20700\nPCI_ID=FFFF:FFFF\nPCI_SLOT_NAME={slot}")),
        ];
        write_files(pci, &files)?;
        symlink("../../../bus/pci", pci.join("subsystem"))?;
        let net = pci.join("net");
        std::fs::create_dir_all(&net)?;
        if let Some(name) = self.gids.first().and_then(|gid| interface_name(*gid)) {
            symlink(Path::new("/sys/class/net").join(&name), net.join(&name))?;
        }
        Ok(())
    }

    fn write_device(&self, device: &Path) -> io::Result<()> {
        let guid = hex_groups(&Gid::from(self.device.address).guid().to_be_bytes());
        let files = [
            ("board_id", "SoftHCA"),
            ("hca_type", "SoftHCA"),
            ("fw_ver", env!("CARGO_PKG_VERSION")),
            ("hw_rev", "0"),
            ("node_type", "1: CA"),
            ("node_desc", &format!("SoftHCA {}", self.device.host)),
            ("node_guid", &guid),
            ("sys_image_guid", &guid),
            ("uevent", &format!("NAME={}", self.device.device_name)),
        ];
        write_files(device, &files)?;
        let port = device.join("ports/1");
        let files = [
            ("rate", "56 Gb/sec (4X FDR)"),
            ("lid", "0x0"),
            ("lid_mask_count", "0"),
            ("sm_lid", "0x0"),
            ("sm_sl", "0"),
            ("cap_mask", "0x04010000"),
            ("link_layer", "Ethernet"),
            ("pkeys/0", "0xffff"),
        ];
        for folder in ["pkeys", "gids", "gid_attrs/types", "gid_attrs/ndevs", "counters", "hw_counters"] {
            std::fs::create_dir_all(port.join(folder))?;
        }
        write_files(&port, &files)?;
        for (index, gid) in self.gids.iter().enumerate() {
            write_line(&port.join(format!("gids/{index}")), &hex_groups(&gid.0))?;
            write_line(&port.join(format!("gid_attrs/types/{index}")), "RoCE v2")?;
            let interface = interface_name(*gid).unwrap_or_default();
            write_line(&port.join(format!("gid_attrs/ndevs/{index}")), &interface)?;
        }
        Ok(())
    }
}

/// The name of the network interface with the address of a GID.
fn interface_name(gid: Gid) -> Option<String> {
    interface_of(gid.ip()).map(|interface| interface.name)
}

/// Groups of 16 bits, as in sysfs.
pub(crate) fn hex_groups(bytes: &[u8]) -> String {
    let words = bytes.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1]));
    words.collect::<Vec<_>>().join(":")
}

/// Creates a read-only file with a line, for all users.
pub(crate) fn write_line(path: &Path, text: &str) -> io::Result<()> {
    let _ = std::fs::remove_file(path);
    std::fs::write(path, format!("{text}\n"))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o444))
}

/// Creates a folder with files.
pub(crate) fn write_files(folder: &Path, files: &[(&str, &str)]) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    files.iter().try_for_each(|(name, text)| write_line(&folder.join(name), text))
}

/// Creates a folder with a link to every entry of another one, except for some.
pub(crate) fn link_entries(from: &Path, at: &Path, except: &[&str]) -> io::Result<()> {
    std::fs::create_dir_all(at)?;
    for entry in std::fs::read_dir(from).into_iter().flatten().flatten() {
        if !except.iter().any(|name| entry.file_name() == *name) {
            symlink(entry.path(), at.join(entry.file_name()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_and_gids_have_the_format_of_sysfs() {
        let gid = Gid::from(std::net::IpAddr::from([127, 0, 0, 2]));
        assert_eq!(hex_groups(&gid.0), "0000:0000:0000:0000:0000:ffff:7f00:0002");
        assert_eq!(hex_groups(&0x0200_00ff_7f00_0002_u64.to_be_bytes()), "0200:00ff:7f00:0002");
    }

    #[test]
    fn counters_have_the_names_of_drivers() {
        let counters = Counters { sent_bytes: 4096, out_of_sequence: 3, ..Counters::default() };
        let files: BTreeMap<String, u64> = counter_files(&counters).collect();
        assert_eq!(files["counters/port_xmit_data"], 1024, "in words of four bytes");
        assert_eq!([files["hw_counters/out_of_sequence"], files["hw_counters/out_of_seq_request"]], [3, 3]);
        assert_eq!(files["counters/symbol_error"], 0);
    }
}
