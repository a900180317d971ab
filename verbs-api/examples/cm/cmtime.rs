//! Measures each step of making and ending connections, as `cmtime` does.
//!
//! ```text
//! cm cmtime -c 100              both ends in this process
//! cm cmtime -q -c 100           the server
//! cm cmtime -s HOST -c 100      the client
//! ```
//!
//! Options: `-s ADDRESS` of the server, `-q` to be it, `-b ADDRESS` to listen at, `-p PORT`, `-c CONNECTIONS`.

use super::common::{self, Options, Outcome, Settings};
use softhca::cm::{ConnectionParameters, EventChannel, EventType, Id, PortSpace, resolve};
use softhca::{Device, QpType, QueuePair};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The port unless said.
const PORT: u16 = 7471;

/// How long a step took, for each connection.
#[derive(Default)]
struct Step {
    started: BTreeMap<u32, Instant>,
    took: Vec<Duration>,
    begin: Option<Instant>,
    end: Option<Instant>,
}

impl Step {
    fn start(&mut self, id: u32) {
        let now = Instant::now();
        self.begin.get_or_insert(now);
        self.started.insert(id, now);
    }

    fn end(&mut self, id: u32) {
        let now = Instant::now();
        self.end = Some(now);
        self.took.extend(self.started.remove(&id).map(|start| now - start));
    }

    fn print(&self, name: &str) {
        let total = self.begin.zip(self.end).map_or(Duration::ZERO, |(begin, end)| end - begin);
        let most = self.took.iter().max().copied().unwrap_or_default();
        let least = self.took.iter().min().copied().unwrap_or_default();
        let each = total.as_secs_f64() * 1e6 / self.took.len().max(1) as f64;
        println!(
            "{name:<13}: {:>10.2} {:>10.2} {:>10.2} {each:>10.2}",
            total.as_secs_f64() * 1e3,
            most.as_secs_f64() * 1e3,
            least.as_secs_f64() * 1e6,
        );
    }
}

pub async fn server(device: Device, options: Options) -> Outcome {
    let count: usize = options.number('c', 100)?;
    let settings = Settings::from_options(&options, PORT)?;
    let context = device.open();
    let (domain, queue) = (context.allocate_protection_domain()?, context.create_completion_queue(16)?);
    let channel = EventChannel::new(&context)?;
    let _listener = common::listen(&device, &channel, PortSpace::Tcp, &settings.listen_at(&options), 0)?;
    let (mut nodes, mut ended) = (Vec::new(), 0);
    while ended < count {
        let event = channel.next().await?;
        match event.kind {
            EventType::ConnectRequest => {
                let pair =
                    domain.create_queue_pair(QpType::Rc, &queue).max_send_wr(1).max_recv_wr(1).build()?;
                event.id.attach_queue_pair(&pair)?;
                event.id.accept(&ConnectionParameters::default())?;
                nodes.push(event.id);
            }
            EventType::Disconnected => {
                event.id.disconnect()?;
                ended += 1;
            }
            EventType::TimewaitExit => {}
            _ => drop(event.expect(EventType::Established)?),
        }
    }
    Ok(())
}

pub async fn client(device: Device, options: Options) -> Outcome {
    let count: usize = options.number('c', 100)?;
    let settings = Settings::from_options(&options, PORT)?;
    let context = device.open();
    let (domain, queue) = (context.allocate_protection_domain()?, context.create_completion_queue(16)?);
    let channel = EventChannel::new(&context)?;
    let peer = resolve(&context, &settings.server(&options))?;
    let mut steps: BTreeMap<&str, Step> = BTreeMap::new();

    let mut ids: Vec<Id> = Vec::new();
    for number in 0..count as u32 {
        let step = steps.entry("create id").or_default();
        step.start(number);
        ids.push(channel.create_id(PortSpace::Tcp)?);
        step.end(number);
    }
    // Steps that an event ends are begun for all before the first is waited for.
    run(&mut steps, "resolve addr", &channel, &ids, EventType::AddressResolved, |id| {
        id.resolve_address(None, peer)
    })
    .await?;
    run(&mut steps, "resolve route", &channel, &ids, EventType::RouteResolved, Id::resolve_route).await?;
    let mut pairs: Vec<QueuePair> = Vec::new();
    for id in &ids {
        let step = steps.entry("create qp").or_default();
        step.start(id.handle());
        let pair = domain.create_queue_pair(QpType::Rc, &queue).max_send_wr(1).max_recv_wr(1).build()?;
        id.attach_queue_pair(&pair)?;
        pairs.push(pair);
        step.end(id.handle());
    }
    let parameters = ConnectionParameters::default();
    run(&mut steps, "connect", &channel, &ids, EventType::Established, |id| id.connect(&parameters)).await?;
    run(&mut steps, "disconnect", &channel, &ids, EventType::Disconnected, Id::disconnect).await?;
    for (number, id) in ids.into_iter().enumerate() {
        let step = steps.entry("destroy").or_default();
        step.start(number as u32);
        drop(id);
        step.end(number as u32);
    }

    println!("step              total ms     max ms     min us  us / conn");
    for name in
        ["create id", "resolve addr", "resolve route", "create qp", "connect", "disconnect", "destroy"]
    {
        steps[name].print(name);
    }
    Ok(())
}

/// Begins a step for every connection, and waits until it has ended for all.
async fn run(
    steps: &mut BTreeMap<&'static str, Step>,
    name: &'static str,
    channel: &EventChannel,
    ids: &[Id],
    kind: EventType,
    begin: impl Fn(&Id) -> Result<(), softhca::Error>,
) -> Outcome {
    let step = steps.entry(name).or_default();
    for id in ids {
        step.start(id.handle());
        begin(id)?;
    }
    let mut left = ids.len();
    while left > 0 {
        let event = channel.next().await?;
        // An earlier connection may be forgotten meanwhile.
        if event.kind == EventType::TimewaitExit {
            continue;
        }
        let event = event.expect(kind)?;
        step.end(event.id.handle());
        left -= 1;
    }
    Ok(())
}
