//! Connection management, most of it in virtual time.

mod connections;
mod datagrams;
mod dialogue;
mod identifiers;
mod real;
mod requests;

use softhca::cm::{Connector, EventType, Id, Listener};
use softhca::{
    Context, Device, Error, QpType, QueuePair,
    fault::{CmMessage, PacketClass, PacketClasses, Selector},
    sim::{LogEntryKind, Report},
};

type Outcome = Result<(), Error>;

fn pair(context: &Context) -> Result<QueuePair, Error> {
    let queue = context.create_completion_queue(16)?;
    context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()
}

/// Accepts one connection, and waits until the peer ends it.
async fn serve_one(device: Device) -> Outcome {
    let context = device.open();
    let listener = Listener::bind(&context, "0.0.0.0:7174")?;
    let connection = listener.accept().await?.accept(&pair(&context)?).await?;
    connection.wait_disconnected().await
}

async fn connect_and_leave(device: Device) -> Outcome {
    let context = device.open();
    let connection = Connector::new(&context).connect(&pair(&context)?, "server:7174").await?;
    connection.disconnect().await
}

fn only(message: CmMessage) -> Selector {
    Selector { classes: Some(PacketClasses::Only(PacketClass::Cm(message))), ..Selector::default() }
}

/// The CM messages and events of the two hosts, in order.
fn trace(report: &Report) -> Vec<String> {
    let lines = report.log.iter().filter_map(|entry| match entry.kind {
        LogEntryKind::Event(softhca::trace::Event::CmSent { message, retransmission: again, .. }) => {
            let again = if again { " again" } else { "" };
            Some(format!("{} sends {}{again}", entry.host, message.name()))
        }
        LogEntryKind::Event(softhca::trace::Event::CmEventRaised { event: kind, status, .. }) => {
            let kind = kind.name().trim_start_matches("RDMA_CM_EVENT_");
            Some(format!("{} hears {kind} {status}", entry.host))
        }
        _ => None,
    });
    lines.collect()
}

/// Finds address and path, and waits for both events.
async fn resolve(id: &Id, peer: &str) -> Outcome {
    id.resolve_address(None, peer.parse().expect("an address"))?;
    id.channel().next().await?.expect(EventType::AddressResolved)?;
    id.resolve_route()?;
    id.channel().next().await?.expect(EventType::RouteResolved)?;
    Ok(())
}
