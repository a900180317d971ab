//! What a program sees of its card in `/sys/class` and `/dev`.
//!
//! Verbs need none of it: the libraries answer from the daemon. Programs look there by themselves, for a device
//! node before they use a device (UCX), or for the interface behind it (pyverbs).

use softhca::Gid;
use softhca_daemon::View;
use softhca_udp::interface_of;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where the kernel shows what RDMA devices there are.
const CLASSES: &str = "/sys/class";
const NODES: &str = "/dev";
/// Folders of RDMA devices in `/sys/class`: those of real ones are hidden.
const DEVICES: &str = "infiniband";
/// The versions of the kernel's interface that libibverbs of rdma-core accepts.
const VERBS_VERSION: &str = "6";
/// A node that can be opened, and does nothing.
const NULL: &str = "/dev/null";
const NULL_NUMBER: &str = "1:3";

/// The card that is shown.
pub struct Shown {
    pub host: String,
    pub device: String,
    pub guid: u64,
    pub gids: Vec<Gid>,
}

impl Shown {
    /// Opens the card of a host to see what is true of it.
    pub fn of(name: Option<&str>, host: &str) -> Result<Shown, softhca::Error> {
        let device = softhca::Device::daemon_host(name, Some(host))?;
        let card = device.open();
        let gids = (0..card.gids()).filter_map(|index| card.gid(index)).collect();
        Ok(Shown { host: host.into(), device: device.name().into(), guid: device.guid(), gids })
    }

    /// The view of a program on this host. `place` is an empty folder that it is put together in.
    pub fn view(&self, place: &Path) -> io::Result<View> {
        let mut view = View::new();
        view.memory(place);
        let (classes, nodes) = (place.join("class"), place.join("dev"));
        repeat(&mut view, Path::new(CLASSES), &classes)?;
        repeat(&mut view, Path::new(NODES), &nodes)?;
        self.write_classes(&mut view, &classes);
        self.write_nodes(&mut view, &nodes);
        view.bind(&classes, Path::new(CLASSES));
        view.bind(&nodes, Path::new(NODES));
        view.detach(place);
        Ok(view)
    }

    fn node(&self) -> String {
        let number = self.device.trim_start_matches(|c: char| !c.is_ascii_digit());
        format!("uverbs{number}")
    }

    fn write_nodes(&self, view: &mut View, nodes: &Path) {
        let folder = nodes.join(DEVICES);
        view.folder(&folder);
        for name in [self.node().as_str(), "rdma_cm"] {
            let at = folder.join(name);
            view.file(&at, "");
            view.bind(Path::new(NULL), &at);
        }
    }

    fn write_classes(&self, view: &mut View, classes: &Path) {
        let (node, number) = (self.node(), &self.device);
        let verbs = classes.join("infiniband_verbs");
        write(view, &verbs, &[("abi_version", VERBS_VERSION)]);
        write(view, &verbs.join(&node), &[("ibdev", number), ("abi_version", "1"), ("dev", NULL_NUMBER)]);

        let devices = classes.join(DEVICES);
        let device = devices.join(&self.device);
        let guid = words(&self.guid.to_be_bytes());
        view.folder(&devices);
        write(
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
        view.folder(&device.join("ports"));
        self.write_port(view, &device.join("ports/1"));
    }

    /// The interface that the card's address belongs to, and its own names, as a PCI device would have them.
    fn write_interfaces(&self, view: &mut View, folder: &Path, node: &str) {
        view.folder(folder);
        for (kind, name) in [(DEVICES, self.device.as_str()), ("infiniband_verbs", node)] {
            view.folder(&folder.join(kind));
            view.link(&folder.join(kind).join(name), &Path::new(CLASSES).join(kind).join(name));
        }
        view.folder(&folder.join("net"));
        if let Some(name) = self.gids.first().and_then(|gid| interface(*gid)) {
            view.link(&folder.join("net").join(&name), &Path::new(CLASSES).join("net").join(&name));
        }
    }

    fn write_port(&self, view: &mut View, port: &Path) {
        write(
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
        write(view, &port.join("pkeys"), &[("0", "0xffff")]);
        let (gids, attributes) = (port.join("gids"), port.join("gid_attrs"));
        for folder in [&gids, &attributes, &attributes.join("types"), &attributes.join("ndevs")] {
            view.folder(folder);
        }
        for (index, gid) in self.gids.iter().enumerate() {
            let index = index.to_string();
            line(view, &gids.join(&index), &words(&gid.0));
            line(view, &attributes.join("types").join(&index), "RoCE v2");
            line(view, &attributes.join("ndevs").join(&index), &interface(*gid).unwrap_or_default());
        }
    }
}

/// Whether this machine allows a view at all: shows one to a program that does nothing.
pub fn is_allowed(place: &Path) -> io::Result<()> {
    let shown = Shown { host: String::new(), device: "softhca0".into(), guid: 0, gids: Vec::new() };
    let mut command = Command::new("/bin/true");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    shown.view(place)?.show_to(&mut command);
    command.status().map(drop)
}

/// The name of the interface that has the address of a GID.
fn interface(gid: Gid) -> Option<String> {
    interface_of(gid.ip()).map(|interface| interface.name)
}

/// Sixteen bits at a time, as sysfs has them.
fn words(bytes: &[u8]) -> String {
    let words = bytes.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1]));
    words.collect::<Vec<_>>().join(":")
}

fn line(view: &mut View, at: &Path, text: &str) {
    view.file(at, &format!("{text}\n"));
}

/// A folder with files.
fn write(view: &mut View, folder: &Path, files: &[(&str, &str)]) {
    view.folder(folder);
    for (name, text) in files {
        line(view, &folder.join(name), text);
    }
}

/// A folder with everything that another one has, but for RDMA devices.
fn repeat(view: &mut View, from: &Path, at: &Path) -> io::Result<()> {
    view.folder(at);
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(from)?.map_while(Result::ok).map(|entry| entry.path()).collect();
    entries.sort();
    for entry in entries {
        let Some(name) = entry.file_name() else { continue };
        if name.to_string_lossy().starts_with(DEVICES) {
            continue;
        }
        let place = at.join(name);
        let kind = std::fs::symlink_metadata(&entry)?.file_type();
        if kind.is_symlink() {
            view.link(&place, &std::fs::read_link(&entry)?);
            continue;
        }
        if kind.is_dir() {
            view.folder(&place);
        } else {
            view.file(&place, "");
        }
        view.bind(&entry, &place);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_written_as_sysfs_does() {
        let gid = Gid::from(std::net::IpAddr::from([127, 0, 0, 2]));
        assert_eq!(words(&gid.0), "0000:0000:0000:0000:0000:ffff:7f00:0002");
        assert_eq!(words(&0x0200_00ff_7f00_0002_u64.to_be_bytes()), "0200:00ff:7f00:0002");
    }
}
