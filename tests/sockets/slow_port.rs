//! The switch of an embedded device's port pauses its senders.

use softhca::{Device, EmbeddedOptions, PortSwitch, sim::ReceiverSettings};
use softhca_engine::Instant;
use softhca_fabric::{
    EventSink, FabricEvent, LinkSettings, NetworkEvent, PfcSettings, Stage, SwitchSettings,
};
use softhca_tests::process::TEST_TIMEOUT;
use softhca_types::AccessFlags;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};

const ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE);

/// The pauses of priority 3 at a device's port.
#[derive(Clone, Default)]
struct PauseSink(Arc<Mutex<Vec<(Stage, u16)>>>, Arc<Mutex<Vec<FabricEvent>>>);

impl EventSink for PauseSink {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        match *event {
            NetworkEvent::PauseFrame { stage, pause, .. } => {
                self.0.lock().unwrap().extend(pause.pause[3].map(|quanta| (stage, quanta)));
            }
            NetworkEvent::Fabric(event) => self.1.lock().unwrap().push(event),
            _ => {}
        }
    }
}

/// Bob's device has a switch with a 20 Mb/s port. Alice's device is paused and resumed over real sockets without loss,
/// which would be fatal.
#[test]
fn an_embedded_device_with_a_slow_port_pauses_its_senders() {
    let pauses = [PauseSink::default(), PauseSink::default()];
    let slow = PortSwitch {
        line: LinkSettings {
            bits_per_second: NonZeroU64::new(1_000_000_000),
            delay_ns: 1_000,
            ..LinkSettings::default()
        },
        settings: SwitchSettings {
            pfc: Some(PfcSettings { xoff: 16_384, xon: 14_336, ..PfcSettings::default() }),
            ..SwitchSettings::default()
        },
        receiver: ReceiverSettings { bits_per_second: Some(20_000_000), ..ReceiverSettings::default() },
    };
    let ends = [None, Some(slow)].into_iter().zip(&pauses).map(|(switch, pauses)| {
        let witness = Box::new(pauses.clone());
        let options = EmbeddedOptions { switch, event_sink: witness, ..EmbeddedOptions::default() };
        let context = Device::embedded_with(options).unwrap().open();
        let domain = context.allocate_protection_domain().unwrap();
        let queue = context.create_completion_queue(16).unwrap();
        let pair = domain.create_queue_pair(softhca::QpType::Rc, &queue).build().unwrap();
        (context, domain.allocate_region(1 << 19, ACCESS).unwrap(), queue, pair)
    });
    let ends: Vec<_> = ends.collect();
    let [(alice, from, queue, sender), (bob, to, _, receiver)] = &ends[..] else { unreachable!() };
    let path = softhca::ConnectOptions { traffic_class: 3 << 5, ..softhca::ConnectOptions::default() };
    sender.connect(&receiver.endpoint(), &path).unwrap();
    receiver.connect(&sender.endpoint(), &path).unwrap();
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    let (mut id, is_end) = (0, |event: &FabricEvent| matches!(event, FabricEvent::PauseEnded { .. }));
    // A sender that is rarely scheduled does not fill the queue, so retry.
    while !pauses[0].1.lock().unwrap().iter().any(is_end) {
        assert!(std::time::Instant::now() < deadline, "the queue never fills");
        let bytes = vec![id as u8 + 1; 1 << 19];
        from.write_at(0, &bytes);
        sender
            .post_send(&softhca::SendRequest::rdma_write(id, &[from.sge(0, 1 << 19)], to.remote_address(0)))
            .unwrap();
        let completion = queue.wait_for(TEST_TIMEOUT).expect("a completion");
        assert!(completion.status.is_success(), "{completion:?}");
        assert!(to.read_at(0, 1 << 19) == bytes, "the data arrived unchanged");
        id += 1;
    }
    assert!(alice.counters().rx_pause_frames > 0);
    assert_eq!((alice.counters().retransmitted_pkts, bob.counters().out_of_sequence), (0, 0));
    let [received, sent] = [&pauses[0], &pauses[1]].map(|pauses| pauses.0.lock().unwrap().clone());
    assert_eq!(sent.first(), Some(&(Stage::Admitted, u16::MAX)), "Bob's port sends a pause");
    assert_eq!(received.first(), Some(&(Stage::Delivered, u16::MAX)), "Alice's port receives it");
}
