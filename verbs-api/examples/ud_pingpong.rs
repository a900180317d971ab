//! Two datagram queue pairs exchange a message back and forth, like `ibv_ud_pingpong`.
//!
//! Datagrams need no connection: every send names its destination, with an address handle (the host), a QPN and a
//! Q_Key. A message fits one packet, and the first 40 bytes of every receive hold the global routing header (GRH).
//!
//! ```text
//! cargo run --release --example ud_pingpong                  both sides in this process
//! cargo run --release --example ud_pingpong -- --server      one side, waits on TCP port 18515
//! cargo run --release --example ud_pingpong -- HOST          the other side
//! ```
//!
//! Options: `-s BYTES` per message, `-n COUNT` of round trips, `-e` to sleep until a completion event instead of
//! polling, `-p PORT` of the exchange. `common/pingpong.rs` has the options and the message loop.

mod common;

use common::Outcome;
use common::pingpong::{self, Options, PingPong, RECV_WR_ID, SEND_WR_ID, Side};
use softhca::{
    AccessFlags, AddressVector, CqNotify, Device, Endpoint, QpType, QueueKey, ReceiveRequest, SendRequest,
};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

/// The length of the GRH.
const GRH: u32 = 40;

/// A queue pair accepts a datagram only with its own Q_Key.
const QKEY: QueueKey = QueueKey(0x1111_1111);

fn main() -> Outcome {
    pingpong::run(1024, 1, play)
}

fn play(side: Side, mut stream: TcpStream, options: &Options) -> Outcome {
    // A device and its resources: a protection domain, registered memory, a completion queue and a queue pair.
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
        println!("  local address:  GID {}, QPN {}", qp.endpoint().gid, qp.qpn());
        println!("  remote address: GID {}, QPN {}", peer.gid, peer.qpn);
    }
    let pingpong = PingPong { side, options, channel: &channel, cq: &cq, stream };
    pingpong.run(&[qp.qpn()], || qp.post_recv(&receive), |_| qp.post_send(&send))
}
