//! Two unreliable connections exchange a message back and forth, like `ibv_uc_pingpong`.
//!
//! An unreliable connection has no acknowledgements: a send completes when its packets are sent, and the loss of a
//! packet silently loses the whole message. Between two SoftHCA devices on one machine, no packet is lost.
//!
//! ```text
//! cargo run --release --example uc_pingpong                  both sides in this process
//! cargo run --release --example uc_pingpong -- --server      one side, waits on TCP port 18515
//! cargo run --release --example uc_pingpong -- HOST          the other side
//! ```
//!
//! Options: `-s BYTES` per message, `-n COUNT` of round trips, `-e` to sleep until a completion event instead of
//! polling, `-p PORT` of the exchange. `common/pingpong.rs` has the options and the message loop.

mod common;

use common::Outcome;
use common::pingpong::{self, Options, PingPong, RECV_WR_ID, SEND_WR_ID, Side};
use softhca::{AccessFlags, ConnectOptions, CqNotify, Device, QpType, ReceiveRequest, SendRequest};
use std::net::TcpStream;

fn main() -> Outcome {
    pingpong::run(4096, 1, play)
}

fn play(side: Side, mut stream: TcpStream, options: &Options) -> Outcome {
    // A device and its resources: a protection domain, registered memory, a completion queue and a queue pair.
    let device = Device::embedded()?;
    let context = device.open();
    let pd = context.allocate_protection_domain()?;
    let mr = pd.allocate_region(options.size.into(), AccessFlags::LOCAL_WRITE)?;
    let channel = context.create_completion_channel()?;
    let cq = context.create_completion_queue_with_channel(16, &channel)?;
    let qp = pd.create_queue_pair(QpType::Uc, &cq).build()?;

    // A message needs a posted receive: post it in INIT, before the peer can send.
    let buffer = [mr.sge(0, options.size)];
    let receive = ReceiveRequest { wr_id: RECV_WR_ID, sg_list: &buffer };
    let send = SendRequest::send(SEND_WR_ID, &buffer);
    qp.init(&ConnectOptions::default())?;
    qp.post_recv(&receive)?;
    cq.request_notification(CqNotify::NextCompletion);

    // One call takes the queue pair from INIT through RTR to RTS. UC has no timeout and no retry counts.
    let peer = qp.connect_over_stream(&mut stream, &ConnectOptions::default())?;
    if side == Side::Client {
        println!("  local address:  GID {}, QPN {}", qp.endpoint().gid, qp.qpn());
        println!("  remote address: GID {}, QPN {}", peer.gid, peer.qpn);
    }
    let pingpong = PingPong { side, options, channel: &channel, cq: &cq, stream };
    pingpong.run(&[qp.qpn()], || qp.post_recv(&receive), |_| qp.post_send(&send))
}
