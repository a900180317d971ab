//! What the programs share: options as `getopt` reads them, the device, and the steps before a connection.

use softhca::cm::{EventChannel, EventType, Id, PortSpace, resolve};
use softhca::{CompletionQueue, Device, block_on, spawn};
use std::collections::BTreeMap;
use std::error::Error;
use std::future::Future;
use std::str::FromStr;

/// Errors of both ends end up in `main`.
pub type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

/// The name under which a server says that it listens.
const LISTENING: &str = "the server listens";

/// Bytes of the routing header in front of every datagram.
pub const GRH: u32 = 40;

/// Listens, and tells a client in the same process, or in the same `World`.
pub fn listen(
    device: &Device,
    channel: &EventChannel,
    space: PortSpace,
    address: &str,
    backlog: u32,
) -> Result<Id, softhca::Error> {
    let listener = channel.create_id(space)?;
    listener.bind(resolve(channel.context(), address)?)?;
    listener.listen(backlog)?;
    device.endpoint_exchange().publish(LISTENING, ());
    Ok(listener)
}

/// Finds address and route of a server, `HOST:PORT`.
pub async fn find(id: &Id, server: &str) -> Result<(), softhca::Error> {
    let channel = id.channel();
    id.resolve_address(None, resolve(channel.context(), server)?)?;
    channel.next().await?.expect(EventType::AddressResolved)?;
    id.resolve_route()?;
    channel.next().await?.expect(EventType::RouteResolved)?;
    Ok(())
}

/// Waits for so many completions of a queue; returns the immediate data of the last.
pub async fn complete(queue: &CompletionQueue, count: u64) -> Result<u32, Box<dyn Error + Send + Sync>> {
    let mut immediate = 0;
    for _ in 0..count {
        let completion = queue.next().await;
        if !completion.status.is_success() {
            return Err(format!("a request failed: {:?}", completion.status).into());
        }
        immediate = completion.imm_data;
    }
    Ok(immediate)
}

/// Options of one letter, some with a value.
#[derive(Clone, Debug, Default)]
pub struct Options {
    given: BTreeMap<char, String>,
}

impl Options {
    /// Reads these arguments; in `letters`, one with a value is followed by a colon.
    pub fn parse(letters: &str, arguments: impl IntoIterator<Item = String>) -> Result<Options, String> {
        let mut options = Options::default();
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let mut rest = argument.strip_prefix('-').unwrap_or("").chars();
            let letter = rest.next().ok_or(format!("{argument:?} is no option"))?;
            let known = letters.find(letter).filter(|_| letter != ':');
            let at = known.ok_or(format!("unknown option -{letter}"))?;
            let value = match letters[at + 1..].starts_with(':') {
                false => String::new(),
                true if rest.as_str().is_empty() => {
                    arguments.next().ok_or(format!("-{letter} needs a value"))?
                }
                true => rest.as_str().into(),
            };
            options.given.insert(letter, value);
        }
        Ok(options)
    }

    /// Whether an option is there.
    pub fn has(&self, letter: char) -> bool {
        self.given.contains_key(&letter)
    }

    /// The value of an option.
    pub fn text(&self, letter: char) -> Option<&str> {
        self.given.get(&letter).map(String::as_str)
    }

    /// The value of an option as a number, or this one.
    pub fn number<T: FromStr>(&self, letter: char, otherwise: T) -> Result<T, String> {
        let Some(text) = self.text(letter) else { return Ok(otherwise) };
        text.parse().map_err(|_| format!("-{letter} {text:?} is not a number that fits"))
    }

    /// Sets an option.
    pub fn with(mut self, letter: char, value: &str) -> Options {
        self.given.insert(letter, value.into());
        self
    }
}

/// The card: a daemon's if the environment names one, else one in this process.
pub fn device() -> Result<Device, softhca::Error> {
    let named = |name| std::env::var_os(name).is_some();
    match named("SOFTHCA_DAEMON") || named("SOFTHCA_HOST") {
        #[cfg(target_os = "linux")]
        true => Device::daemon(),
        _ => Device::embedded(),
    }
}

/// Runs both ends in this process, each on a card of its own. The client gets the server's address.
pub fn both<S, C>(server: impl FnOnce(Device) -> S, client: impl FnOnce(Device, String) -> C) -> Outcome
where
    S: Future<Output = Outcome> + 'static,
    C: Future<Output = Outcome>,
{
    let [here, there] = [Device::embedded()?, Device::embedded()?];
    let address = there.address().to_string();
    block_on(async {
        let serving = spawn(server(there));
        here.endpoint_exchange().lookup::<()>(LISTENING).await;
        client(here, address).await?;
        serving.await
    })
}

/// How much the two ends of a test do, and where.
pub struct Settings {
    /// How many connections.
    pub connections: usize,
    /// How many messages each way, over each.
    pub messages: u64,
    /// Bytes of a message.
    pub size: u32,
    /// Where the server listens.
    pub port: u16,
}

impl Settings {
    /// What `-c`, `-C`, `-S` and `-p` say.
    pub fn from_options(options: &Options, port: u16) -> Result<Settings, String> {
        Ok(Settings {
            connections: options.number('c', 1)?,
            messages: options.number('C', 10)?,
            size: options.number('S', 100)?,
            port: options.number('p', port)?,
        })
    }

    /// The address of the server.
    pub fn server(&self, options: &Options) -> String {
        format!("{}:{}", options.text('s').expect("a client has the server's address"), self.port)
    }

    /// The address at which the server listens: `-b`, else every IPv4 address.
    pub fn listen_at(&self, options: &Options) -> String {
        format!("{}:{}", options.text('b').unwrap_or("0.0.0.0"), self.port)
    }
}

/// Runs the end that the options ask for: the client with `-s ADDRESS`, the server with `-q`, else both in this process.
pub fn run<S, C>(
    options: Options,
    server: impl FnOnce(Device, Options) -> S,
    client: impl FnOnce(Device, Options) -> C,
) -> Outcome
where
    S: Future<Output = Outcome> + 'static,
    C: Future<Output = Outcome>,
{
    match (options.has('s'), options.has('q')) {
        (true, _) => block_on(client(device()?, options)),
        (_, true) => block_on(server(device()?, options)),
        _ => {
            let copy = options.clone();
            both(
                move |device| server(device, copy),
                |device, address| client(device, options.with('s', &address)),
            )
        }
    }
}

/// The last lines of a test, by which people see how it ended.
pub fn conclude(result: Outcome) -> Outcome {
    println!("test complete");
    println!("return status {}", if result.is_ok() { 0 } else { -1 });
    result
}
