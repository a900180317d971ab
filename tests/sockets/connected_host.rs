//! One end of a connection, on any device.

use softhca::{
    AccessFlags, Completion, CompletionQueue, ConnectOptions, Context, Device, Endpoint, Error, Gid,
    MemoryRegion, ProtectionDomain, Psn, QpType, Qpn, QueuePair, RemoteAddress, RemoteKey, SendRequest,
};
use softhca_tests::process::TEST_TIMEOUT;

pub const ALL_ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);

/// One end of a connection with its resources.
pub struct ConnectedHost {
    pub context: Context,
    pub domain: ProtectionDomain,
    pub queue: CompletionQueue,
    pub pair: QueuePair,
    pub region: MemoryRegion,
}

impl ConnectedHost {
    pub fn new(device: &Device, bytes: u64) -> ConnectedHost {
        ConnectedHost::try_new(device, bytes).unwrap()
    }

    /// As `new`, on a daemon that may end meanwhile.
    pub fn try_new(device: &Device, bytes: u64) -> Result<ConnectedHost, Error> {
        let context = device.open();
        let domain = context.allocate_protection_domain()?;
        let queue = context.create_completion_queue(256)?;
        let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
        let region = domain.allocate_region(bytes, ALL_ACCESS)?;
        Ok(ConnectedHost { context, domain, queue, pair, region })
    }

    /// The connection data for the other end, as a line.
    pub fn open_device(&self) -> String {
        let Endpoint { gid, qpn: queue_pair, psn } = self.pair.endpoint();
        let gid: Vec<String> = gid.0.iter().map(|byte| byte.to_string()).collect();
        let RemoteAddress { address, rkey: key } = self.region.remote_address(0);
        format!("{} {} {} {address} {}", gid.join(","), queue_pair.value(), psn.value(), key.0)
    }

    /// Connects to the end that wrote the line, and returns its remote address.
    pub fn connect(&self, card: &str) -> RemoteAddress {
        self.connect_over(card, &ConnectOptions::default())
    }

    pub fn connect_over(&self, card: &str, path: &ConnectOptions) -> RemoteAddress {
        let fields: Vec<&str> = card.split(' ').collect();
        let bytes: Vec<u8> = fields[0].split(',').map(|byte| byte.parse().unwrap()).collect();
        let number = |index: usize| fields[index].parse::<u64>().unwrap();
        let peer = Endpoint {
            gid: Gid(bytes.try_into().unwrap()),
            qpn: Qpn::new(number(1) as u32),
            psn: Psn::new(number(2) as u32),
        };
        self.pair.connect(&peer, path).unwrap();
        RemoteAddress { address: number(3), rkey: RemoteKey(number(4) as u32) }
    }

    /// Writes the start of the region to that of another end.
    pub fn write(&self, id: u64, length: u32, to: RemoteAddress) {
        self.pair.post_send(&SendRequest::rdma_write(id, &[self.region.sge(0, length)], to)).unwrap();
    }

    pub fn finish(&self) -> Completion {
        let completion = self.queue.wait_for(TEST_TIMEOUT).expect("a completion");
        assert!(completion.status.is_success(), "{completion:?}");
        completion
    }
}
