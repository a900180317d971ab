//! A server for many connections in async code, on tokio with real sockets and in virtual time:
//! `cargo run --example async_server -- CLIENTS`.

use softhca::cm::{ConnectRequest, Connector, Listener};
use softhca::sim::World;
use softhca::{
    AccessFlags, CompletionQueue, CompletionStatus, ConnectOptions, Context, Device, MemoryRegion, QpType,
    QueuePair, ReceiveRequest, SendRequest, spawn_send,
};

/// The result of a task.
pub type Outcome = Result<(), Box<dyn std::error::Error + Send + Sync>>;

const PORT: u16 = 7471;
/// The most bytes of a message.
const SIZE: u32 = 64;

/// A queue pair with its completion queue and its buffer.
struct Endpoint {
    cq: CompletionQueue,
    mr: MemoryRegion,
    qp: QueuePair,
}

impl Endpoint {
    /// Creates a queue pair with a posted receive: the peer may send as soon as it is connected.
    fn new(context: &Context) -> Result<Endpoint, softhca::Error> {
        let pd = context.allocate_protection_domain()?;
        let cq = context.create_completion_queue(4)?;
        let mr = pd.allocate_region(SIZE.into(), AccessFlags::LOCAL_WRITE)?;
        let qp = pd.create_queue_pair(QpType::Rc, &cq).build()?;
        qp.init(&ConnectOptions::default())?;
        let endpoint = Endpoint { cq, mr, qp };
        endpoint.post_receive()?;
        Ok(endpoint)
    }

    fn post_receive(&self) -> Result<(), softhca::Error> {
        self.qp.post_recv(&ReceiveRequest { wr_id: 0, sg_list: &[self.mr.sge(0, SIZE)] })
    }

    fn send(&self, message: &[u8]) -> Result<(), softhca::Error> {
        self.qp.post_send(&SendRequest::send(1, &[]).inline_data(message))
    }

    /// The next message of the peer.
    async fn receive(&self) -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> {
        loop {
            let completion = self.cq.next().await;
            if completion.status != CompletionStatus::Success {
                return Err(completion.to_string().into());
            }
            if completion.opcode.is_receive() {
                let message = self.mr.read_at(0, completion.byte_len.into());
                self.post_receive()?;
                return Ok(message);
            }
        }
    }
}

/// Serves so many connections at the same time, each in a task of its own.
pub async fn serve(context: Context, connections: usize) -> Outcome {
    let listener = Listener::bind(&context, &format!("0.0.0.0:{PORT}"))?;
    let mut tasks = Vec::new();
    for _ in 0..connections {
        let request = listener.accept().await?;
        tasks.push(spawn_send(echo(context.clone(), request)));
    }
    for task in tasks {
        task.await?;
    }
    Ok(())
}

/// Returns every message to its sender, until the sender says goodbye.
async fn echo(context: Context, request: ConnectRequest) -> Outcome {
    let endpoint = Endpoint::new(&context)?;
    let connection = request.accept(&endpoint.qp).await?;
    loop {
        let message = endpoint.receive().await?;
        endpoint.send(&message)?;
        if message == b"goodbye" {
            break;
        }
    }
    Ok(connection.wait_disconnected().await?)
}

/// Sends messages to the server and compares what comes back.
pub async fn exchange(context: Context, server: String, client: usize) -> Outcome {
    let endpoint = Endpoint::new(&context)?;
    let connection = Connector::new(&context).connect(&endpoint.qp, &format!("{server}:{PORT}")).await?;
    for message in [format!("client {client}"), "how are you".into(), "goodbye".into()] {
        endpoint.send(message.as_bytes())?;
        assert_eq!(endpoint.receive().await?, message.as_bytes());
    }
    Ok(connection.disconnect().await?)
}

/// A server and its clients on real sockets, in the current tokio runtime.
pub async fn run_on_sockets(clients: usize) -> Outcome {
    let server = Device::embedded()?;
    let serving = spawn_send(serve(server.open(), clients));
    let client = Device::embedded()?.open();
    let exchanges: Vec<_> = (0..clients)
        .map(|number| spawn_send(exchange(client.clone(), server.address().to_string(), number)))
        .collect();
    for exchange in exchanges {
        exchange.await?;
    }
    serving.await
}

/// Runs this code on a host for each client, in virtual time.
pub fn run_in_world(clients: usize) -> softhca::sim::Report {
    let mut world = World::new(7);
    world.host("server", move |device| serve(device.open(), clients));
    for client in 0..clients {
        world.host(&format!("client-{client}"), move |device| {
            exchange(device.open(), "server".into(), client)
        });
    }
    world.run().unwrap()
}

#[allow(dead_code, reason = "the tests of the async API use the functions above")]
fn main() -> Outcome {
    let clients = std::env::args().nth(1).map_or(Ok(8), |count| count.parse())?;
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(run_on_sockets(clients))?;
    println!("{clients} clients were served on real sockets");
    let report = run_in_world(clients);
    println!("{clients} clients were served in {:?} of virtual time", report.ended_at);
    Ok(())
}
