//! Connects a queue pair to itself with the crate ibverbs-rs.

use ibverbs_rs::channel::Channel;
use ibverbs_rs::ibverbs;

fn main() {
    let context = ibverbs::open_device("softhca0").expect("the device");
    let domain = context.allocate_pd().expect("a protection domain");
    let channel = Channel::builder().pd(&domain).build().expect("a queue pair");
    let endpoint = channel.endpoint();
    channel.handshake(endpoint).expect("a connection");
}
