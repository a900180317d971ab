//! Five mistakes that programs with verbs make, and the message of each: `cargo run --example five_mistakes`.

use softhca::sim::World;
use softhca::{
    AccessFlags, AsyncEvent, Completion, CompletionQueue, ConnectOptions, Context, Device, Error,
    MemoryRegion, ProtectionDomain, QpType, QueuePair, ReceiveRequest, RemoteAddress, RemoteKey, SendRequest,
};
use std::time::Duration;

const ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE);
const TIMEOUT: Duration = Duration::from_secs(20);

/// A host with a ring of slots, into which its peer writes with WRITE_WITH_IMM.
struct Host {
    context: Context,
    _pd: ProtectionDomain,
    cq: CompletionQueue,
    ring: MemoryRegion,
    qp: QueuePair,
}

impl Host {
    fn new(device: &Device, cqe: u32, access: AccessFlags) -> Result<Host, Error> {
        let context = device.open();
        let pd = context.allocate_protection_domain()?;
        let cq = context.create_completion_queue(cqe)?;
        let ring = pd.allocate_region(4096, access)?;
        let qp = pd.create_queue_pair(QpType::Rc, &cq).build()?;
        qp.init(&ConnectOptions::default())?;
        Ok(Host { context, _pd: pd, cq, ring, qp })
    }

    fn write_slot(&self, slot: u32, remote: RemoteAddress) -> Result<(), Error> {
        let gather = [self.ring.sge(0, 64)];
        self.qp.post_send(&SendRequest::rdma_write_with_imm(slot.into(), &gather, remote, slot))
    }

    fn completion(&self) -> Completion {
        self.cq.wait_for(TIMEOUT).expect("a completion")
    }
}

/// A sender and a receiver that has so many receives posted.
fn connect(devices: &[Device; 2], cqe: u32, access: AccessFlags, receives: u64) -> Result<[Host; 2], Error> {
    let hosts = [Host::new(&devices[0], 16, ACCESS)?, Host::new(&devices[1], cqe, access)?];
    for wr_id in 0..receives {
        hosts[1].qp.post_recv(&ReceiveRequest { wr_id, sg_list: &[] })?;
    }
    hosts[0].qp.connect_both(&hosts[1].qp, &ConnectOptions::default())?;
    Ok(hosts)
}

/// Makes the mistakes one after the other.
pub fn messages(devices: &[Device; 2]) -> Result<[String; 5], Error> {
    let [a, b] = connect(devices, 16, ACCESS, 8)?;
    let right = b.ring.remote_address(0);
    a.write_slot(0, right)?;
    assert!(a.completion().status.is_success());
    a.write_slot(1, RemoteAddress { rkey: RemoteKey(right.rkey.0 ^ 0xff00), ..right })?;
    let wrong_rkey = a.completion().to_string();

    let [a, b] = connect(devices, 16, ACCESS, 0)?;
    a.write_slot(0, b.ring.remote_address(0))?;
    let missing_receive = a.completion().to_string();

    let unconnected = Host::new(&devices[0], 16, ACCESS)?;
    let wrong_state = unconnected.write_slot(0, right).unwrap_err().to_string();

    let [a, b] = connect(devices, 16, AccessFlags::LOCAL_WRITE, 8)?;
    a.write_slot(0, b.ring.remote_address(0))?;
    let missing_access = a.completion().to_string();

    let [a, b] = connect(devices, 1, ACCESS, 8)?;
    a.write_slot(0, b.ring.remote_address(0))?;
    a.write_slot(1, b.ring.remote_address(64))?;
    let overflow = loop {
        match b.context.wait_async_event(TIMEOUT).expect("an asynchronous event") {
            event @ AsyncEvent::CompletionQueueError(_) => break event.to_string(),
            _ => continue,
        }
    };
    Ok([wrong_rkey, missing_receive, wrong_state, missing_access, overflow])
}

#[allow(dead_code, reason = "a test runs the mistakes on other devices")]
fn main() -> Result<(), Error> {
    let mut world = World::new(7);
    let devices = ["alice", "bob"].map(|name| world.device(name));
    for message in messages(&devices)? {
        println!("{message}");
    }
    Ok(())
}
