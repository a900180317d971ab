//! A program's view of its device in `/sys/class` and `/dev`.
//!
//! The verbs libraries do not need it. Some programs look there themselves: UCX for a device node, pyverbs for the
//! network interface of a device.

use softhca::Gid;
use softhca_daemon::MountNamespace;
use softhca_queue::control::RuntimeDir;
use softhca_udp::interface_of;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where the kernel lists RDMA devices.
const SYS_CLASS: &str = "/sys/class";
const DEV: &str = "/dev";
/// The prefix of RDMA folders in `/sys/class`; those of real devices are hidden.
const INFINIBAND: &str = "infiniband";
/// The uverbs ABI version that rdma-core's libibverbs accepts.
const UVERBS_ABI_VERSION: &str = "6";
/// A device node that can be opened and does nothing.
const NULL: &str = "/dev/null";
const NULL_DEVICE_NUMBER: &str = "1:3";

/// The device that is shown.
pub struct SysfsDevice {
    pub host: String,
    pub device: String,
    pub guid: u64,
    pub gids: Vec<Gid>,
}

impl SysfsDevice {
    /// Opens the device of a host and queries its attributes.
    pub fn query(name: Option<&str>, host: &str) -> Result<SysfsDevice, softhca::Error> {
        let device = softhca::Device::daemon_host(name, Some(host))?;
        let context = device.open();
        let gids = (0..context.gid_table_len()).filter_map(|index| context.gid(index)).collect();
        Ok(SysfsDevice { host: host.into(), device: device.name().into(), guid: device.guid(), gids })
    }

    /// Builds the view of a program on this host.
    pub fn build_view(&self) -> io::Result<MountNamespace> {
        let folder = &view_folder()?;
        let mut view = MountNamespace::new();
        view.tmpfs(folder);
        let (classes, nodes) = (folder.join("class"), folder.join("dev"));
        mirror_folder(&mut view, Path::new(SYS_CLASS), &classes)?;
        mirror_folder(&mut view, Path::new(DEV), &nodes)?;
        self.write_sysfs(&mut view, &classes);
        self.write_device_nodes(&mut view, &nodes);
        view.bind(&classes, Path::new(SYS_CLASS));
        view.bind(&nodes, Path::new(DEV));
        view.unmount(folder);
        Ok(view)
    }

    fn uverbs_name(&self) -> String {
        let number = self.device.trim_start_matches(|c: char| !c.is_ascii_digit());
        format!("uverbs{number}")
    }

    fn write_device_nodes(&self, view: &mut MountNamespace, nodes: &Path) {
        let folder = nodes.join(INFINIBAND);
        view.mkdir(&folder);
        for name in [self.uverbs_name().as_str(), "rdma_cm"] {
            let at = folder.join(name);
            view.file(&at, "");
            view.bind(Path::new(NULL), &at);
        }
    }

    fn write_sysfs(&self, view: &mut MountNamespace, classes: &Path) {
        let (node, number) = (self.uverbs_name(), &self.device);
        let verbs = classes.join("infiniband_verbs");
        write_files(view, &verbs, &[("abi_version", UVERBS_ABI_VERSION)]);
        write_files(
            view,
            &verbs.join(&node),
            &[("ibdev", number), ("abi_version", "1"), ("dev", NULL_DEVICE_NUMBER)],
        );

        let devices = classes.join(INFINIBAND);
        let device = devices.join(&self.device);
        let guid = hex_groups(&self.guid.to_be_bytes());
        view.mkdir(&devices);
        write_files(
            view,
            &device,
            &[
                ("board_id", "SoftHCA"),
                ("hca_type", "SoftHCA"),
                ("fw_ver", env!("CARGO_PKG_VERSION")),
                ("hw_rev", "0"),
                ("node_type", "1: CA"),
                ("node_desc", &format!("SoftHCA {}", self.host)),
                ("node_guid", &guid),
                ("sys_image_guid", &guid),
            ],
        );
        self.write_interfaces(view, &device.join("device"), &node);
        view.mkdir(&device.join("ports"));
        self.write_port(view, &device.join("ports/1"));
    }

    /// The network interface of the device's address and the names of the device, as for a PCI device.
    fn write_interfaces(&self, view: &mut MountNamespace, folder: &Path, node: &str) {
        view.mkdir(folder);
        for (kind, name) in [(INFINIBAND, self.device.as_str()), ("infiniband_verbs", node)] {
            view.mkdir(&folder.join(kind));
            view.symlink(&folder.join(kind).join(name), &Path::new(SYS_CLASS).join(kind).join(name));
        }
        view.mkdir(&folder.join("net"));
        if let Some(name) = self.gids.first().and_then(|gid| interface_name(*gid)) {
            view.symlink(&folder.join("net").join(&name), &Path::new(SYS_CLASS).join("net").join(&name));
        }
    }

    fn write_port(&self, view: &mut MountNamespace, port: &Path) {
        write_files(
            view,
            port,
            &[
                ("state", "4: ACTIVE"),
                ("phys_state", "5: LinkUp"),
                ("rate", "56 Gb/sec (4X FDR)"),
                ("lid", "0x0"),
                ("lid_mask_count", "0"),
                ("sm_lid", "0x0"),
                ("sm_sl", "0"),
                ("cap_mask", "0x04010000"),
                ("link_layer", "Ethernet"),
            ],
        );
        write_files(view, &port.join("pkeys"), &[("0", "0xffff")]);
        let (gids, attributes) = (port.join("gids"), port.join("gid_attrs"));
        for folder in [&gids, &attributes, &attributes.join("types"), &attributes.join("ndevs")] {
            view.mkdir(folder);
        }
        for (index, gid) in self.gids.iter().enumerate() {
            let index = index.to_string();
            write_line(view, &gids.join(&index), &hex_groups(&gid.0));
            write_line(view, &attributes.join("types").join(&index), "RoCE v2");
            write_line(
                view,
                &attributes.join("ndevs").join(&index),
                &interface_name(*gid).unwrap_or_default(),
            );
        }
    }
}

/// The folder in which views are assembled.
fn view_folder() -> io::Result<PathBuf> {
    let runtime = RuntimeDir::for_user();
    runtime.create()?;
    let folder = runtime.path().join("view");
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Checks that this machine allows a view, by running `/bin/true` with one.
pub fn check_allowed() -> io::Result<()> {
    let shown = SysfsDevice { host: String::new(), device: "softhca0".into(), guid: 0, gids: Vec::new() };
    let mut command = Command::new("/bin/true");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    shown.build_view()?.apply_to(&mut command);
    command.status().map(drop)
}

/// The name of the network interface with the address of a GID.
fn interface_name(gid: Gid) -> Option<String> {
    interface_of(gid.ip()).map(|interface| interface.name)
}

/// Groups of 16 bits, as in sysfs.
fn hex_groups(bytes: &[u8]) -> String {
    let words = bytes.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1]));
    words.collect::<Vec<_>>().join(":")
}

fn write_line(view: &mut MountNamespace, at: &Path, text: &str) {
    view.file(at, &format!("{text}\n"));
}

/// Creates a folder with files.
fn write_files(view: &mut MountNamespace, folder: &Path, files: &[(&str, &str)]) {
    view.mkdir(folder);
    for (name, text) in files {
        write_line(view, &folder.join(name), text);
    }
}

/// Mirrors a folder except for RDMA devices.
fn mirror_folder(view: &mut MountNamespace, from: &Path, at: &Path) -> io::Result<()> {
    view.mkdir(at);
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(from)?.map_while(Result::ok).map(|entry| entry.path()).collect();
    entries.sort();
    for entry in entries {
        let Some(name) = entry.file_name() else { continue };
        if name.to_string_lossy().starts_with(INFINIBAND) {
            continue;
        }
        let target = at.join(name);
        let kind = std::fs::symlink_metadata(&entry)?.file_type();
        if kind.is_symlink() {
            view.symlink(&target, &std::fs::read_link(&entry)?);
            continue;
        }
        if kind.is_dir() {
            view.mkdir(&target);
        } else {
            view.file(&target, "");
        }
        view.bind(&entry, &target);
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
}
