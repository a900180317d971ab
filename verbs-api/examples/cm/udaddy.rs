//! Finds datagram queue pairs by their service and sends messages both ways, as `udaddy` does.
//!
//! ```text
//! cm udaddy                     both ends in this process
//! cm udaddy -q               the server
//! cm udaddy -s HOST          the client
//! ```
//!
//! Options: `-s ADDRESS` of the server, `-q` to be it, `-b ADDRESS` to listen at (0.0.0.0; `::` for IPv6, too), `-p PORT`, `-c CONNECTIONS`, `-C MESSAGES`, `-S SIZE`.

use super::common::{self, GRH, Options, Outcome, Settings, complete};
use softhca::cm::{ConnectionParameters, EventChannel, EventType, Id, PortSpace, UdParameters};
use softhca::{
    AccessFlags, AddressHandle, AddressVector, CompletionQueue, Context, Device, Gid, MemoryRegion,
    ProtectionDomain, QpType, Qpn, QueuePair, ReceiveRequest, SendRequest,
};

/// The port unless said.
const PORT: u16 = 7174;

/// A queue pair, and the one that it talks to.
struct Node {
    id: Id,
    domain: ProtectionDomain,
    sends: CompletionQueue,
    receives: CompletionQueue,
    pair: QueuePair,
    region: MemoryRegion,
}

impl Node {
    fn new(context: &Context, id: Id, settings: &Settings) -> Result<Node, softhca::Error> {
        let slots = (settings.messages as u32).max(1);
        let domain = context.allocate_protection_domain()?;
        let [sends, receives] =
            [context.create_completion_queue(slots)?, context.create_completion_queue(slots)?];
        let pair = domain.create_queue_pair(QpType::Ud, &sends).recv_cq(&receives);
        let pair = pair.max_send_wr(slots).max_recv_wr(slots).build()?;
        let region = domain.allocate_region((settings.size + GRH).into(), AccessFlags::LOCAL_WRITE)?;
        id.attach_queue_pair(&pair)?;
        for message in 0..settings.messages {
            let scatter = [region.sge(0, settings.size + GRH)];
            pair.post_recv(&ReceiveRequest { wr_id: message, sg_list: &scatter })?;
        }
        Ok(Node { id, domain, sends, receives, pair, region })
    }

    /// Sends every message, with the own queue pair's number as immediate data.
    fn post_sends(&self, settings: &Settings, handle: &AddressHandle, to: &UdParameters) -> Outcome {
        for message in 0..settings.messages {
            let gather = [self.region.sge(u64::from(GRH), settings.size)];
            let send = SendRequest::send_with_imm(message, &gather, self.pair.qpn().value());
            self.pair.post_send(&send.ud_address(handle, to.qpn, to.qkey))?;
        }
        Ok(())
    }

    /// The GID of the sender of the last message: the source in the routing header, IPv4 in its end.
    fn sender(&self) -> Gid {
        let header = self.region.read_at(0, GRH.into());
        match header[0] >> 4 {
            6 => Gid(header[8..24].try_into().expect("sixteen bytes")),
            _ => {
                let octets: [u8; 4] = header[32..36].try_into().expect("four bytes");
                Gid::from(std::net::IpAddr::from(octets))
            }
        }
    }
}

/// Names a queue pair to each client, receives, and answers.
pub async fn server(device: Device, options: Options) -> Outcome {
    println!("udaddy: starting server");
    let settings = Settings::from_options(&options, PORT)?;
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let _listener = common::listen(&device, &channel, PortSpace::Udp, &settings.listen_at(&options), 100)?;
    let mut nodes = Vec::new();
    while nodes.len() < settings.connections {
        let request = channel.next().await?.expect(EventType::ConnectRequest)?;
        let node = Node::new(&context, request.id, &settings)?;
        node.id.accept(&ConnectionParameters::default())?;
        nodes.push(node);
    }
    if settings.messages > 0 {
        println!("receiving data transfers");
        let mut peers = Vec::new();
        for node in &nodes {
            // The immediate data is the number of the sender's queue pair.
            let queue_pair = Qpn::new(complete(&node.receives, settings.messages).await?);
            let path = AddressVector::to(node.sender());
            let target =
                UdParameters { address_vector: path, qpn: queue_pair, qkey: softhca::cm::RDMA_UDP_QKEY };
            peers.push((target, node.domain.create_address_handle(path)?));
        }
        println!("sending replies");
        for (node, (target, handle)) in nodes.iter().zip(&peers) {
            node.post_sends(&settings, handle, target)?;
            complete(&node.sends, settings.messages).await?;
        }
        println!("data transfers complete");
    }
    Ok(())
}

/// Asks for queue pairs, sends to them, and receives.
pub async fn client(device: Device, options: Options) -> Outcome {
    println!("udaddy: starting client");
    let settings = Settings::from_options(&options, PORT)?;
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    println!("udaddy: connecting");
    let server = settings.server(&options);
    let mut nodes = Vec::new();
    for _ in 0..settings.connections {
        let id = channel.create_id(PortSpace::Udp)?;
        common::find(&id, &server).await?;
        let node = Node::new(&context, id, &settings)?;
        node.id.connect(&ConnectionParameters::default())?;
        let event = channel.next().await?.expect(EventType::Established)?;
        let target = event.target().ok_or("the server named no queue pair")?;
        let handle = node.domain.create_address_handle(target.address_vector)?;
        nodes.push((node, target, handle));
    }
    if settings.messages > 0 {
        println!("initiating data transfers");
        for (node, target, handle) in &nodes {
            node.post_sends(&settings, handle, target)?;
        }
        println!("receiving data transfers");
        for (node, ..) in &nodes {
            complete(&node.receives, settings.messages).await?;
        }
        println!("data transfers complete");
    }
    Ok(())
}
