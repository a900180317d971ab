//! A host with memory, and clients that use it one-sided.

use softhca::{
    AccessFlags, CompletionQueue, ConnectOptions, Device, Error, MemoryRegion, QpType, QueuePair,
    RemoteAddress, SendFlags, SendRequest,
};

/// The memory of a host, and the queue pairs through which clients reach it.
pub struct Served {
    pub region: MemoryRegion,
    _pairs: Vec<QueuePair>,
}

/// Registers memory and connects clients to it. Their names are those of the connections.
pub async fn serve(device: &Device, length: u64, clients: &[&str]) -> Result<Served, Error> {
    let context = device.open();
    let domain = context.allocate_protection_domain()?;
    let queue = context.create_completion_queue(16)?;
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let region = domain.allocate_region(length, AccessFlags::LOCAL_WRITE | access)?;
    device.endpoint_exchange().publish("memory", region.remote_address(0));
    let mut pairs = Vec::new();
    for client in clients {
        let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
        pair.exchange_and_connect(&device.endpoint_exchange(), client, &ConnectOptions::default()).await?;
        pairs.push(pair);
    }
    Ok(Served { region, _pairs: pairs })
}

/// A client of the memory.
pub struct Client {
    pair: QueuePair,
    queue: CompletionQueue,
    /// The source of WRITEs, and the target of READs and atomics.
    pub buffer: MemoryRegion,
    memory: RemoteAddress,
}

impl Client {
    pub async fn connect(device: &Device, name: &str) -> Result<Client, Error> {
        let context = device.open();
        let domain = context.allocate_protection_domain()?;
        let queue = context.create_completion_queue(16)?;
        let buffer = domain.allocate_region(4096, AccessFlags::LOCAL_WRITE)?;
        let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
        let exchange = device.endpoint_exchange();
        pair.exchange_and_connect(&exchange, name, &ConnectOptions::default()).await?;
        let memory = exchange.lookup("memory").await;
        Ok(Client { pair, queue, buffer, memory })
    }

    /// The address of a byte of the memory.
    pub fn at(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { address: self.memory.address + offset, ..self.memory }
    }

    /// Posts work requests in one list. Only the last one is signaled, and this waits for it.
    pub async fn run(&self, requests: Vec<SendRequest<'_>>) -> Result<(), Error> {
        let last = requests.len() - 1;
        let requests: Vec<_> = requests
            .into_iter()
            .enumerate()
            .map(|(index, request)| match index == last {
                true => request,
                false => request.flags(SendFlags::empty()),
            })
            .collect();
        self.pair.post_send_list(&requests)?;
        let completion = self.queue.next().await;
        assert!(completion.status.is_success(), "{completion}");
        Ok(())
    }

    /// Compares and swaps eight bytes, and returns the previous value.
    pub async fn compare_and_swap(&self, offset: u64, compare: u64, swap: u64) -> Result<u64, Error> {
        let result = [self.buffer.sge(0, 8)];
        self.run(vec![SendRequest::compare_and_swap(1, &result, self.at(offset), compare, swap)]).await?;
        Ok(self.buffer.load(0))
    }

    /// Reads eight bytes.
    pub async fn read(&self, offset: u64) -> Result<u64, Error> {
        let result = [self.buffer.sge(0, 8)];
        self.run(vec![SendRequest::rdma_read(1, &result, self.at(offset))]).await?;
        Ok(self.buffer.load(0))
    }
}
