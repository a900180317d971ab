//! Two sides exchange a message back and forth, like `ibv_rc_pingpong`, `ibv_uc_pingpong`, `ibv_ud_pingpong` and
//! `ibv_srq_pingpong`.
//!
//! ```text
//! cargo run --release --example pingpong                  both sides in this process
//! cargo run --release --example pingpong -- --server      one side, waits on TCP port 18515
//! cargo run --release --example pingpong -- HOST          the other side
//! ```
//!
//! Options: `--type rc|uc|ud|srq`, `-s BYTES` per message, `-n COUNT` of round trips over all queue pairs, `-q COUNT`
//! of queue pairs, `-e` to sleep until a completion event instead of polling, `-p PORT` of the exchange.
//! `exchange.rs` has the options and the message loop.

mod exchange;

use exchange::{Options, Outcome, PingPong, RECV_WR_ID, SEND_WR_ID, Side, Transport};
use softhca::{
    AccessFlags, AddressVector, ConnectOptions, CqNotify, Device, Endpoint, QpType, QueueKey, QueuePair,
    ReceiveRequest, SendRequest,
};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

fn main() -> Outcome {
    exchange::run(|side, stream, options| match options.transport {
        Transport::Rc => connected(QpType::Rc, false, side, stream, options),
        Transport::Uc => connected(QpType::Uc, false, side, stream, options),
        Transport::Srq => connected(QpType::Rc, true, side, stream, options),
        Transport::Ud => datagrams(side, stream, options),
    })
}

fn print_addresses(own: &Endpoint, peer: &Endpoint) {
    println!("  local address:  GID {}, QPN {}", own.gid, own.qpn);
    println!("  remote address: GID {}, QPN {}", peer.gid, peer.qpn);
}

/// Connected queue pairs, reliable or not. An unreliable connection has no acknowledgements: a send completes when its
/// packets are sent, and the loss of a packet silently loses the whole message. Between two SoftHCA devices on one
/// machine, no packet is lost.
///
/// A server with a thousand clients cannot keep receive buffers ready for each of them. With a shared receive queue,
/// it keeps as many as messages can arrive at once, from any client.
fn connected(kind: QpType, is_shared: bool, side: Side, mut stream: TcpStream, options: &Options) -> Outcome {
    // A device and its resources: a protection domain, registered memory, a completion queue and queue pairs.
    let device = Device::embedded()?;
    let context = device.open();
    let pd = context.allocate_protection_domain()?;
    let mr = pd.allocate_region(options.size.into(), AccessFlags::LOCAL_WRITE)?;
    let channel = context.create_completion_channel()?;
    let cq = context.create_completion_queue_with_channel(256, &channel)?;
    let srq = is_shared.then(|| pd.create_shared_receive_queue(64, 1)).transpose()?;
    let create = || match &srq {
        Some(srq) => pd.create_queue_pair(kind, &cq).shared_receive_queue(srq).build(),
        None => pd.create_queue_pair(kind, &cq).build(),
    };
    let queue_pairs: Vec<QueuePair> = (0..options.queue_pairs).map(|_| create()).collect::<Result<_, _>>()?;

    let buffer = [mr.sge(0, options.size)];
    let receive = ReceiveRequest { wr_id: RECV_WR_ID, sg_list: &buffer };
    let send = SendRequest::send(SEND_WR_ID, &buffer);
    let find = |qpn| queue_pairs.iter().find(|qp| qp.qpn() == qpn).expect("one of the queue pairs");
    let post_recv = |qpn| match &srq {
        Some(srq) => srq.post_recv(&receive),
        None => find(qpn).post_recv(&receive),
    };
    cq.request_notification(CqNotify::NextCompletion);
    // A message needs a posted receive: post it in INIT, before the peer can send.
    for qp in &queue_pairs {
        qp.init(&ConnectOptions::default())?;
        post_recv(qp.qpn())?;
    }
    // One call takes a queue pair from INIT through RTR to RTS.
    for qp in &queue_pairs {
        let peer = qp.connect_over_stream(&mut stream, &ConnectOptions::default())?;
        if side == Side::Client {
            print_addresses(&qp.endpoint(), &peer);
        }
    }
    let qpns: Vec<_> = queue_pairs.iter().map(QueuePair::qpn).collect();
    let pingpong = PingPong { side, options, channel: &channel, cq: &cq, stream };
    pingpong.run(&qpns, post_recv, |qpn| find(qpn).post_send(&send))
}

/// The length of the GRH.
const GRH: u32 = 40;

/// A queue pair accepts a datagram only with its own Q_Key.
const QKEY: QueueKey = QueueKey(0x1111_1111);

/// Datagrams need no connection: every send names its destination, with an address handle (the host), a QPN and a
/// Q_Key. A message fits one packet, and the first 40 bytes of every receive hold the global routing header (GRH).
fn datagrams(side: Side, mut stream: TcpStream, options: &Options) -> Outcome {
    let device = Device::embedded()?;
    let context = device.open();
    let pd = context.allocate_protection_domain()?;
    let mr = pd.allocate_region((GRH + options.size).into(), AccessFlags::LOCAL_WRITE)?;
    let channel = context.create_completion_channel()?;
    let cq = context.create_completion_queue_with_channel(16, &channel)?;
    let qp = pd.create_queue_pair(QpType::Ud, &cq).build()?;

    // A datagram without a posted receive is dropped. The GRH precedes the data.
    let buffer = [mr.sge(0, GRH + options.size)];
    let data = [mr.sge(GRH.into(), options.size)];
    let receive = ReceiveRequest { wr_id: RECV_WR_ID, sg_list: &buffer };
    qp.init_ud(QKEY)?;
    qp.post_recv(&receive)?;
    cq.request_notification(CqNotify::NextCompletion);
    qp.start_ud(QKEY)?;

    // Exchange endpoints, one line each way, then create an address handle for the peer.
    writeln!(stream, "{}", qp.endpoint())?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    let peer: Endpoint = line.parse()?;
    let ah = pd.create_address_handle(AddressVector::to(peer.gid))?;
    let send = SendRequest::send(SEND_WR_ID, &data).ud_address(&ah, peer.qpn, QKEY);
    if side == Side::Client {
        print_addresses(&qp.endpoint(), &peer);
    }
    let pingpong = PingPong { side, options, channel: &channel, cq: &cq, stream };
    pingpong.run(&[qp.qpn()], |_| qp.post_recv(&receive), |_| qp.post_send(&send))
}
