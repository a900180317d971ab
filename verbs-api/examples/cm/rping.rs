//! Pings over RDMA, as `rping` does: the client says where its data is, the server READs it and WRITEs it back.
//!
//! ```text
//! cm rping -v -C 5              both ends in this process
//! cm rping -s -v                the server
//! cm rping -c -a HOST -v -C 5   the client
//! ```
//!
//! Options: `-s`, `-c`, `-a ADDRESS`, `-p PORT`, `-S SIZE`, `-C COUNT`, `-v` prints the data, `-V` checks it, `-q`
//! connects a queue pair that the program moves through its states itself.

use super::common::{self, Options, Outcome};
use softhca::cm::{ConnectionParameters, Event, EventChannel, EventType, Id, PortSpace};
use softhca::{
    AccessFlags, CompletionOpcode, CompletionQueue, Context, Device, MemoryRegion, QpState, QpType,
    QueuePair, ReceiveRequest, RemoteAddress, RemoteKey, SendRequest, block_on,
};

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Mutex;
use std::task::Poll;

/// The location of a buffer, which the two sides send each other.
const ADVICE: u32 = 16;

pub fn run(options: Options) -> Outcome {
    match (options.has('s'), options.has('c')) {
        (true, _) => block_on(serve(common::device()?, options)),
        (_, true) => block_on(ping(common::device()?, options)),
        _ => {
            let copy = options.clone();
            common::both(
                move |device| serve(device, copy),
                |device, address| ping(device, options.with('a', &address)),
            )
        }
    }
}

/// A connection's queue pair and its memory.
struct Side {
    queue: CompletionQueue,
    pair: QueuePair,
    /// Room for an advice that comes, one that goes, and the data: two buffers at the client.
    advice: MemoryRegion,
    source: MemoryRegion,
    sink: MemoryRegion,
    size: u32,
    /// Work requests that completed before anybody asked for them. The peer's next message may overtake the
    /// acknowledgement of ours.
    early: Mutex<Vec<CompletionOpcode>>,
}

impl Side {
    fn new(
        context: &Context,
        id: &Id,
        options: &Options,
    ) -> Result<Side, Box<dyn std::error::Error + Send + Sync>> {
        let size: u32 = options.number('S', 64)?;
        let domain = context.allocate_protection_domain()?;
        let queue = context.create_completion_queue(16)?;
        let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
        let rights = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        let [advice, source, sink] = [2 * ADVICE, size, size]
            .map(|bytes| domain.allocate_region(bytes.into(), rights))
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?
            .try_into()
            .unwrap_or_else(|_| unreachable!("three regions"));
        if options.has('q') {
            // The identifier tells what takes the queue pair to INIT; the rest follows when the peer is known.
            pair.modify(&id.qp_attributes(QpState::Init)?)?;
        } else {
            id.attach_queue_pair(&pair)?;
        }
        let side = Side { queue, pair, advice, source, sink, size, early: Mutex::default() };
        side.expect_advice()?;
        Ok(side)
    }

    fn expect_advice(&self) -> Result<(), softhca::Error> {
        self.pair.post_recv(&ReceiveRequest { wr_id: 0, sg_list: &[self.advice.sge(0, ADVICE)] })
    }

    /// Tells the peer where a buffer is.
    fn advise(&self, region: &MemoryRegion) -> Result<(), softhca::Error> {
        let mut bytes = region.address().to_be_bytes().to_vec();
        bytes.extend(region.rkey().0.to_be_bytes());
        bytes.extend(self.size.to_be_bytes());
        self.advice.write_at(u64::from(ADVICE), &bytes);
        self.pair.post_send(&SendRequest::send(1, &[self.advice.sge(u64::from(ADVICE), ADVICE)]))
    }

    /// The peer's announcement of its buffer.
    fn advised(&self) -> (RemoteAddress, u32) {
        let bytes = self.advice.read_at(0, ADVICE.into());
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let address = u64::from_be_bytes(bytes[..8].try_into().expect("eight bytes"));
        (RemoteAddress { address, rkey: RemoteKey(word(8)) }, word(12))
    }

    /// Waits until every one of these has completed; anything that failed is an error.
    async fn completed(&self, operations: &[CompletionOpcode]) -> Outcome {
        let mut left = operations.to_vec();
        left.retain(|operation| !self.came_early(*operation));
        while !left.is_empty() {
            let completion = self.queue.next().await;
            if !completion.status.is_success() {
                return Err(format!("cq completion failed status {:?}", completion.status).into());
            }
            match left.iter().position(|operation| *operation == completion.opcode) {
                Some(place) => drop(left.swap_remove(place)),
                None => self.early.lock().expect("no panic").push(completion.opcode),
            }
        }
        Ok(())
    }

    /// Whether one of these has completed already; it counts once.
    fn came_early(&self, operation: CompletionOpcode) -> bool {
        let mut early = self.early.lock().expect("no panic");
        let place = early.iter().position(|other| *other == operation);
        place.map(|place| early.swap_remove(place)).is_some()
    }
}

/// Waits for the peer's advice, or for the end of the connection.
async fn advice_or_end(
    side: &Side,
    channel: &EventChannel,
) -> Result<bool, Box<dyn std::error::Error + Send + Sync>> {
    if side.came_early(CompletionOpcode::Receive) {
        return Ok(true);
    }
    let (mut advice, mut event) = (pin!(side.queue.next()), pin!(channel.next()));
    poll_fn(|context| {
        if let Poll::Ready(completion) = advice.as_mut().poll(context)
            && completion.status.is_success()
        {
            return Poll::Ready(Ok(completion.opcode == CompletionOpcode::Receive));
        }
        match event.as_mut().poll(context) {
            Poll::Ready(Ok(event)) if event.kind == EventType::Disconnected => Poll::Ready(Ok(false)),
            Poll::Ready(Ok(event)) => {
                Poll::Ready(Err(format!("{}, status {}", event.kind, event.status).into()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error.into())),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
/// The server: takes one client, and serves it until it leaves.
pub async fn serve(device: Device, options: Options) -> Outcome {
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let port: u16 = options.number('p', 7174)?;
    let address = format!("{}:{port}", options.text('a').unwrap_or("0.0.0.0"));
    let _listener = common::listen(&device, &channel, PortSpace::Tcp, &address, 3)?;
    let Event { id, .. } = channel.next().await?.expect(EventType::ConnectRequest)?;
    let side = Side::new(&context, &id, &options)?;
    let parameters = ConnectionParameters { qpn: side.pair.qpn(), ..ConnectionParameters::default() };
    if options.has('q') {
        side.pair.modify(&id.qp_attributes(QpState::ReadyToReceive)?)?;
        side.pair.modify(&id.qp_attributes(QpState::ReadyToSend)?)?;
    }
    id.accept(&parameters)?;
    channel.next().await?.expect(EventType::Established)?;

    let mut rounds = 0;
    let most: u64 = options.number('C', 0)?;
    while (most == 0 || rounds < most) && advice_or_end(&side, &channel).await? {
        // The client's data is at its source: read it.
        let (remote, length) = side.advised();
        side.expect_advice()?;
        let length = length.min(side.size);
        side.pair.post_send(&SendRequest::rdma_read(2, &[side.sink.sge(0, length)], remote))?;
        side.completed(&[CompletionOpcode::Read]).await?;
        let data = side.sink.read_at(0, length.into());
        if options.has('v') {
            println!("server ping data: {}", text(&data));
        }
        // Go ahead: the client says where its sink is.
        side.advise(&side.sink)?;
        side.completed(&[CompletionOpcode::Send, CompletionOpcode::Receive]).await?;
        let (remote, _) = side.advised();
        side.expect_advice()?;
        side.pair.post_send(&SendRequest::rdma_write(3, &[side.sink.sge(0, length)], remote))?;
        side.completed(&[CompletionOpcode::Write]).await?;
        side.advise(&side.sink)?;
        side.completed(&[CompletionOpcode::Send]).await?;
        rounds += 1;
    }
    if most != 0 && rounds == most {
        channel.next().await?.expect(EventType::Disconnected)?;
    }
    println!("server DISCONNECT EVENT...");
    id.disconnect()?;
    Ok(())
}

/// The client: pings, and leaves.
pub async fn ping(device: Device, options: Options) -> Outcome {
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let port: u16 = options.number('p', 7174)?;
    let address = options.text('a').ok_or("-c needs -a ADDRESS of the server")?;
    let id = channel.create_id(PortSpace::Tcp)?;
    common::find(&id, &format!("{address}:{port}")).await?;
    let side = Side::new(&context, &id, &options)?;
    let parameters = ConnectionParameters { qpn: side.pair.qpn(), ..ConnectionParameters::default() };
    id.connect(&parameters)?;
    if options.has('q') {
        channel.next().await?.expect(EventType::ConnectResponse)?;
        side.pair.modify(&id.qp_attributes(QpState::ReadyToReceive)?)?;
        side.pair.modify(&id.qp_attributes(QpState::ReadyToSend)?)?;
        id.establish()?;
    } else {
        channel.next().await?.expect(EventType::Established)?;
    }

    let count: u64 = options.number('C', 5)?;
    for round in 0..count {
        let data = pattern(round, side.size as usize);
        side.source.write_at(0, &data);
        side.advise(&side.source)?;
        // The server has read it, and asks for the place to write to.
        side.completed(&[CompletionOpcode::Send, CompletionOpcode::Receive]).await?;
        side.expect_advice()?;
        side.advise(&side.sink)?;
        side.completed(&[CompletionOpcode::Send, CompletionOpcode::Receive]).await?;
        side.expect_advice()?;
        let back = side.sink.read_at(0, side.size.into());
        if options.has('V') && back != data {
            return Err("data mismatch!".into());
        }
        if options.has('v') {
            println!("ping data: {}", text(&back));
        }
    }
    id.disconnect()?;
    channel.next().await?.expect(EventType::Disconnected)?;
    println!("client DISCONNECT EVENT...");
    Ok(())
}

/// The data of a ping: its number, then letters from one that moves on with each.
fn pattern(round: u64, size: usize) -> Vec<u8> {
    let mut data = format!("rdma-ping-{round}: ").into_bytes();
    let letters = (b'A'..=b'z').cycle().skip(round as usize % 58);
    data.extend(letters.take(size));
    data.truncate(size.saturating_sub(1));
    data.resize(size, 0);
    data
}

fn text(data: &[u8]) -> String {
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    String::from_utf8_lossy(&data[..end]).into()
}
