//! Sends to a multicast group, or receives from it, as `mckey` does.
//!
//! ```text
//! cm mckey -m 239.1.2.3         one sender and one receiver on one card
//! cm mckey -m 239.1.2.3 -r      a receiver
//! cm mckey -m 239.1.2.3 -s      a sender
//! ```
//!
//! Options: `-m GROUP`, `-s` sends, `-r` receives, `-C MESSAGES`, `-S SIZE`.

use super::common::{self, GRH, Options, Outcome};
use softhca::cm::{EventParameters, Id, PortSpace};
use softhca::{
    AccessFlags, CompletionQueue, Context, MemoryRegion, ProtectionDomain, QpType, QueuePair, ReceiveRequest,
};
use softhca::{Gid, SendRequest};
use std::net::IpAddr;

pub fn run(options: &Options) -> Outcome {
    let context = common::device()?.open();
    match (options.has('s'), options.has('r')) {
        (true, false) => Member::join(&context, "client", options)?.send(options),
        (false, true) => Member::join(&context, "server", options)?.receive(options),
        _ => both(&context, options),
    }
}

fn both(context: &Context, options: &Options) -> Outcome {
    let receiver = Member::join(context, "server", options)?;
    let sender = Member::join(context, "client", options)?;
    sender.send(options)?;
    receiver.receive(options)
}

/// A queue pair in the group.
struct Member {
    id: Id,
    group: IpAddr,
    domain: ProtectionDomain,
    queue: CompletionQueue,
    pair: QueuePair,
    region: MemoryRegion,
}

impl Member {
    fn join(
        context: &Context,
        name: &str,
        options: &Options,
    ) -> Result<Member, Box<dyn std::error::Error + Send + Sync>> {
        println!("mckey: starting {name}");
        let group: IpAddr = options.text('m').ok_or("-m GROUP is needed")?.parse()?;
        let (messages, size): (u32, u32) = (options.number('C', 10)?, options.number('S', 100)?);
        let id = Id::synchronous(context, PortSpace::Udp)?;
        id.bind("0.0.0.0:0".parse()?)?;
        let domain = context.allocate_protection_domain()?;
        let queue = context.create_completion_queue(2 * messages.max(1))?;
        let pair = domain
            .create_queue_pair(QpType::Ud, &queue)
            .max_send_wr(messages)
            .max_recv_wr(messages)
            .build()?;
        let region = domain.allocate_region((size + GRH).into(), AccessFlags::LOCAL_WRITE)?;
        id.attach_queue_pair(&pair)?;
        for message in 0..u64::from(messages) {
            let scatter = [region.sge(0, size + GRH)];
            pair.post_recv(&ReceiveRequest { wr_id: message, sg_list: &scatter })?;
        }
        println!("mckey: joining");
        id.join_multicast(group)?;
        println!("mckey: joined dgid: {} mlid 0x0 sl 0", Gid::from(group));
        Ok(Member { id, group, domain, queue, pair, region })
    }

    fn send(self, options: &Options) -> Outcome {
        let (messages, size): (u64, u32) = (options.number('C', 10)?, options.number('S', 100)?);
        let EventParameters::Ud(target) = self.id.detail() else {
            return Err("the join named no group".into());
        };
        let handle = self.domain.create_address_handle(target.address_vector)?;
        println!("initiating data transfers");
        for message in 0..messages {
            let gather = [self.region.sge(u64::from(GRH), size)];
            let send = SendRequest::send_with_imm(message, &gather, self.pair.qpn().value());
            self.pair.post_send(&send.ud_address(&handle, target.qpn, target.qkey))?;
        }
        self.complete(messages)?;
        println!("data transfers complete");
        Ok(self.id.leave_multicast(self.group)?)
    }

    fn receive(self, options: &Options) -> Outcome {
        println!("receiving data transfers");
        self.complete(options.number('C', 10)?)?;
        println!("data transfers complete");
        Ok(self.id.leave_multicast(self.group)?)
    }

    fn complete(&self, count: u64) -> Outcome {
        for _ in 0..count {
            let completion = self.queue.wait()?;
            if !completion.status.is_success() {
                return Err(format!("mckey: a request failed: {:?}", completion.status).into());
            }
        }
        Ok(())
    }
}
