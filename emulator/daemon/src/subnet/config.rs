//! The settings of a subnet.

use softhca_control::SubnetSettings;
use softhca_subnet::Topology;
use std::path::Path;

/// The topology of a daemon without another one.
pub const DEFAULT_TOPOLOGY: &str = "one-switch";

softhca_wire::named_enum! {
    /// The subnet manager of the daemon.
    #[derive(Default)]
    pub enum SubnetManager {
        /// A small one, at the first HCA.
        #[default]
        Builtin => "builtin",
        /// None: a program manages the subnet, such as OpenSM.
        None => "none",
    }
}

/// The InfiniBand subnet of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubnetConfig {
    /// The nodes and links.
    pub topology: Topology,
    /// The generator, or the path of the file with a checksum.
    pub name: String,
    /// The subnet manager.
    pub manager: SubnetManager,
}

impl SubnetConfig {
    /// Generates a topology such as `fat-tree:4`, or reads the file with this path.
    pub fn read(text: &str, manager: SubnetManager) -> Result<SubnetConfig, String> {
        let (topology, name) = match Topology::generate(text) {
            Some(topology) => (topology.map_err(|error| error.to_string())?, text.into()),
            None => {
                let failed = |error: std::io::Error| {
                    format!("{text}: {error}; expected a file, or {}", softhca_subnet::GENERATORS)
                };
                let path = Path::new(text).canonicalize().map_err(failed)?;
                let bytes = read_bounded(&path).map_err(failed)?;
                let content = String::from_utf8_lossy(&bytes);
                let topology = Topology::parse(&content).map_err(|error| format!("{text}: {error}"))?;
                (topology, format!("{} (checksum {:08x})", path.display(), crc32fast::hash(&bytes)))
            }
        };
        if topology.hcas().next().is_none() {
            return Err(format!("{text}: the topology has no HCA"));
        }
        Ok(SubnetConfig { topology, name, manager })
    }

    /// The settings as clients see them.
    pub fn settings(&self) -> SubnetSettings {
        SubnetSettings { topology: self.name.clone(), sm: self.manager.name().into() }
    }
}

/// Reads a file up to just more than the longest topology, whose error names the limit.
fn read_bounded(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(softhca_subnet::MAX_FILE as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
