//! Connects several queue pairs and sends messages both ways, as `ucmatose` does.
//!
//! ```text
//! cm ucmatose                     both ends in this process
//! cm ucmatose -q               the server
//! cm ucmatose -s HOST          the client
//! ```
//!
//! Options: `-s ADDRESS` of the server, `-q` to be it, `-b ADDRESS` to listen at (0.0.0.0; `::` for IPv6, too), `-p PORT`, `-c CONNECTIONS`, `-C MESSAGES`, `-S SIZE`,
//! `-t TOS`, `-m` moves the identifiers to another channel once they are connected.

use super::common::{self, Options, Outcome, Settings, complete};
use softhca::cm::{CmOption, ConnectionParameters, EventChannel, EventType, Id, PortSpace};
use softhca::{
    AccessFlags, CompletionQueue, Context, Device, MemoryRegion, QpType, QueuePair, ReceiveRequest,
    SendRequest,
};

/// The port unless said.
const PORT: u16 = 7471;

/// A connection of many.
struct Node {
    id: Id,
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
        let pair = domain.create_queue_pair(QpType::Rc, &sends).recv_cq(&receives);
        let pair = pair.max_send_wr(slots).max_recv_wr(slots).build()?;
        let region = domain.allocate_region(settings.size.max(1).into(), AccessFlags::LOCAL_WRITE)?;
        id.attach_queue_pair(&pair)?;
        for message in 0..settings.messages {
            pair.post_recv(&ReceiveRequest { wr_id: message, sg_list: &[region.sge(0, settings.size)] })?;
        }
        Ok(Node { id, sends, receives, pair, region })
    }

    fn post_sends(&self, settings: &Settings) -> Result<(), softhca::Error> {
        for message in 0..settings.messages {
            self.pair.post_send(&SendRequest::send(message, &[self.region.sge(0, settings.size)]))?;
        }
        Ok(())
    }
}

/// Takes so many events of a kind.
async fn events(channel: &EventChannel, kind: EventType, count: usize) -> Outcome {
    for _ in 0..count {
        channel.next().await?.expect(kind)?;
    }
    Ok(())
}

/// Moves the identifiers to a new channel, if that is asked for.
fn migrate(channel: EventChannel, nodes: &[Node], options: &Options) -> Result<EventChannel, softhca::Error> {
    if !options.has('m') {
        return Ok(channel);
    }
    println!("migrating to new event channel");
    let new = EventChannel::new(channel.context())?;
    for node in nodes {
        node.id.migrate(&new)?;
    }
    Ok(new)
}

pub async fn server(device: Device, options: Options) -> Outcome {
    println!("cmatose: starting server");
    let settings = Settings::from_options(&options, PORT)?;
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let _listener = common::listen(&device, &channel, PortSpace::Tcp, &settings.listen_at(&options), 100)?;
    let (mut nodes, mut established) = (Vec::new(), 0);
    while established < settings.connections {
        let event = channel.next().await?;
        match event.kind {
            EventType::ConnectRequest => {
                let node = Node::new(&context, event.id, &settings)?;
                node.id.accept(&ConnectionParameters::default())?;
                nodes.push(node);
            }
            _ => {
                event.expect(EventType::Established)?;
                established += 1;
            }
        }
    }
    if settings.messages > 0 {
        println!("initiating data transfers");
        for node in &nodes {
            node.post_sends(&settings)?;
        }
        println!("completing sends");
        for node in &nodes {
            complete(&node.sends, settings.messages).await?;
        }
        println!("receiving data transfers");
        for node in &nodes {
            complete(&node.receives, settings.messages).await?;
        }
        println!("data transfers complete");
    }
    let channel = migrate(channel, &nodes, &options)?;
    println!("cmatose: disconnecting");
    for node in &nodes {
        node.id.disconnect()?;
    }
    events(&channel, EventType::Disconnected, nodes.len()).await?;
    println!("disconnected");
    Ok(())
}

pub async fn client(device: Device, options: Options) -> Outcome {
    println!("cmatose: starting client");
    let settings = Settings::from_options(&options, PORT)?;
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    println!("cmatose: connecting");
    let server = settings.server(&options);
    let mut nodes = Vec::new();
    for _ in 0..settings.connections {
        let id = channel.create_id(PortSpace::Tcp)?;
        if options.has('t') {
            id.set_option(CmOption::TypeOfService(options.number('t', 0)?))?;
        }
        common::find(&id, &server).await?;
        nodes.push(Node::new(&context, id, &settings)?);
    }
    for node in &nodes {
        node.id.connect(&ConnectionParameters::default())?;
    }
    events(&channel, EventType::Established, nodes.len()).await?;
    if settings.messages > 0 {
        println!("receiving data transfers");
        for node in &nodes {
            complete(&node.receives, settings.messages).await?;
        }
        println!("sending replies");
        for node in &nodes {
            node.post_sends(&settings)?;
        }
        for node in &nodes {
            complete(&node.sends, settings.messages).await?;
        }
        println!("data transfers complete");
    }
    let channel = migrate(channel, &nodes, &options)?;
    events(&channel, EventType::Disconnected, nodes.len()).await?;
    for node in &nodes {
        node.id.disconnect()?;
    }
    println!("disconnected");
    Ok(())
}
