//! Several connections take their receives from one shared receive queue, like `ibv_srq_pingpong`.
//!
//! A server with a thousand clients cannot keep receive buffers ready for each of them. With a shared receive queue, it
//! keeps as many as messages can arrive at once, from any client. The completion names the queue pair that received a
//! message.
//!
//! ```text
//! cargo run --release --example srq_pingpong                  both sides in this process
//! cargo run --release --example srq_pingpong -- --server      one side, waits on TCP port 18515
//! cargo run --release --example srq_pingpong -- HOST          the other side
//! ```
//!
//! Options: `-s BYTES` per message, `-n COUNT` of round trips over all queue pairs, `-q COUNT` of queue pairs, `-e`
//! to sleep until a completion event instead of polling, `-p PORT` of the exchange. `common/pingpong.rs` has the
//! options and the message loop.

mod common;

use common::Outcome;
use common::pingpong::{self, Options, PingPong, RECV_WR_ID, SEND_WR_ID, Side};
use softhca::{
    AccessFlags, ConnectOptions, CqNotify, Device, QpType, QueuePair, ReceiveRequest, SendRequest,
};
use std::net::TcpStream;

fn main() -> Outcome {
    pingpong::run(4096, 8, play)
}

fn play(side: Side, mut stream: TcpStream, options: &Options) -> Outcome {
    let device = Device::embedded()?;
    let context = device.open();
    let pd = context.allocate_protection_domain()?;
    let mr = pd.allocate_region(options.size.into(), AccessFlags::LOCAL_WRITE)?;
    let channel = context.create_completion_channel()?;
    let cq = context.create_completion_queue_with_channel(256, &channel)?;
    let srq = pd.create_shared_receive_queue(64, 1)?;
    let queue_pairs: Vec<QueuePair> = (0..options.queue_pairs)
        .map(|_| pd.create_queue_pair(QpType::Rc, &cq).shared_receive_queue(&srq).build())
        .collect::<Result<_, _>>()?;

    // One receive per message that can be in flight; all queue pairs take from them.
    let buffer = [mr.sge(0, options.size)];
    let receive = ReceiveRequest { wr_id: RECV_WR_ID, sg_list: &buffer };
    let send = SendRequest::send(SEND_WR_ID, &buffer);
    for _ in &queue_pairs {
        srq.post_recv(&receive)?;
    }
    cq.request_notification(CqNotify::NextCompletion);
    for qp in &queue_pairs {
        let peer = qp.connect_over_stream(&mut stream, &ConnectOptions::default())?;
        if side == Side::Client {
            println!("  QPN {} to GID {}, QPN {}", qp.qpn(), peer.gid, peer.qpn);
        }
    }
    let qpns: Vec<_> = queue_pairs.iter().map(QueuePair::qpn).collect();
    let pingpong = PingPong { side, options, channel: &channel, cq: &cq, stream };
    pingpong.run(
        &qpns,
        || srq.post_recv(&receive),
        |qpn| {
            let qp = queue_pairs.iter().find(|qp| qp.qpn() == qpn);
            qp.expect("a completion of one of the queue pairs").post_send(&send)
        },
    )
}
