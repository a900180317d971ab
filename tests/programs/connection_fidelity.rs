//! Connection management compared with Linux rxe: our messages differ from its captures only in the listed fields:
//! identifiers, GUIDs and times.

use cm::common::Options;
use cm::{rping, udaddy};
use libtest_mimic::Trial;
use softhca::cm::{ConnectionParameters, Connector};
use softhca::{Mtu, QpType, Settings, sim::World};
use softhca_fabric::{EventSink, NetworkEvent, Stage};
use softhca_tests::{capture, needs};
use softhca_trace::{CaptureReader, CaptureWriter, PacketDirection};
use softhca_wire::cm::{Datagram, Message, RdmaCmHeader};
use softhca_wire::{Bth, Deth, Icrc, Qpn, TransportPacket};
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::{Arc, Mutex};

#[allow(dead_code, reason = "its main is the example's")]
#[path = "../../verbs-api/examples/cm/main.rs"]
mod cm;

pub fn trials() -> Vec<Trial> {
    let plain = |name: &str, test: fn()| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    vec![
        plain(
            "a_connection_differs_from_rxe_in_identifiers_only",
            a_connection_differs_from_rxe_in_identifiers_only,
        ),
        plain(
            "a_rejection_differs_from_rxe_in_identifiers_only",
            a_rejection_differs_from_rxe_in_identifiers_only,
        ),
        plain("sidr_differs_from_rxe_in_identifiers_only", sidr_differs_from_rxe_in_identifiers_only),
        plain(
            "rping_sends_the_same_packets_as_rxe_in_the_same_order",
            rping_sends_the_same_packets_as_rxe_in_the_same_order,
        ),
        needs!("tshark", tshark_decodes_rping_like_that_of_rxe),
    ]
}

/// A packet with its time and address headers.
type CapturedPacket = (u64, softhca_wire::AddressHeaders, Vec<u8>);

#[derive(Clone, Default)]
struct FrameSink(Arc<Mutex<Vec<CapturedPacket>>>);

impl EventSink for FrameSink {
    fn on_event(&mut self, now: softhca::Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::Frame { stage: Stage::Admitted, addressing, packet, .. } = *event {
            self.0.lock().unwrap().push((now.nanos(), *addressing, packet.to_vec()));
        }
    }
}

/// Packets between a client at 10.0.0.1 and a server at 10.0.0.2, the addresses of the captures.
fn capture_simulation(mtu: Mtu, build: impl FnOnce(&mut World)) -> Vec<CapturedPacket> {
    let eye = FrameSink::default();
    let mut world = World::new(4);
    world.settings(Settings { mtu, ..Settings::default() });
    world.event_sink(eye.clone());
    build(&mut world);
    world.run().unwrap();
    drop(world);
    let seen = eye.0.lock().unwrap();
    seen.clone()
}

fn options(letters: &[(char, &str)]) -> Options {
    letters.iter().fold(Default::default(), |options: Options, (letter, value)| options.with(*letter, value))
}

fn our_rping() -> Vec<CapturedPacket> {
    capture_simulation(Mtu::B1024, |world| {
        world.host("client", |device| async move {
            device.endpoint_exchange().lookup::<()>("the server listens").await;
            rping::ping(device, options(&[('a', "server"), ('C', "5"), ('V', "")])).await
        });
        world.host("server", |device| rping::serve(device, options(&[])));
    })
}

/// The packets of an rxe capture.
fn rxe_packets(name: &str) -> Vec<CapturedPacket> {
    let records = CaptureReader::open(&capture(name)).expect("a capture");
    let records = records.map(|record| record.expect("a whole record"));
    let roce = records.filter_map(|record| {
        let frame = record.frame().ok()?;
        Some((record.time_ns, frame.network.addressing()?, frame.packet.to_vec()))
    });
    roce.collect()
}

/// The MADs among these packets, with their headers.
fn messages(seen: &[CapturedPacket]) -> Vec<(Bth, Deth, Datagram)> {
    let read = |(_, _, bytes): &CapturedPacket| {
        let (transport, _) = Icrc::split(bytes).expect("an ICRC");
        let transport = TransportPacket::parse(transport).expect("a packet");
        let header = transport.header;
        (header.bth.destination_qp == Qpn::GSI).then(|| {
            (
                header.bth,
                header.deth.expect("a datagram"),
                Datagram::parse(transport.payload).expect("a message"),
            )
        })
    };
    seen.iter().filter_map(read).collect()
}

/// The fields in which two values differ, found in their debug output. A nested field has its own name.
fn differing(ours: &impl std::fmt::Debug, theirs: &impl std::fmt::Debug) -> Vec<String> {
    let [ours, theirs] = [format!("{ours:#?}"), format!("{theirs:#?}")];
    assert_eq!(ours.lines().count(), theirs.lines().count(), "{ours}\n{theirs}");
    let mut fields = Vec::new();
    let mut field = String::new();
    for (our, their) in ours.lines().zip(theirs.lines()) {
        if let Some((name, _)) = our.trim().split_once(':') {
            field = name.into();
        }
        if our != their && !fields.contains(&field) {
            fields.push(field.clone());
        }
    }
    fields
}

/// Compares the messages of each kind in order; returns the differing fields of each kind.
fn compare(ours: &[CapturedPacket], rxe: &[CapturedPacket]) -> BTreeMap<&'static str, Vec<String>> {
    let [ours, rxe] = [messages(ours), messages(rxe)];
    let names =
        |all: &[(Bth, Deth, Datagram)]| -> Vec<_> { all.iter().map(|one| one.2.message.name()).collect() };
    assert_eq!(names(&ours), names(&rxe), "the same messages in the same order");
    let mut found: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
    for ((our_bth, our_deth, our), (bth, deth, their)) in ours.iter().zip(&rxe) {
        let fields = found.entry(our.message.name()).or_default();
        let mut all = differing(our_bth, bth);
        all.extend(differing(our_deth, deth));
        all.extend(differing(&our.header, &their.header));
        all.extend(differing(&our.message, &their.message));
        for name in all {
            if !fields.contains(&name) {
                fields.push(name);
            }
        }
        // Of the private data, only the client's port differs.
        let data = |message: &Message| match message {
            Message::Req(req) => Some(req.private_data.0.to_vec()),
            Message::SidrReq(req) => Some(req.private_data.0.to_vec()),
            _ => None,
        };
        if let (Some(mut our), Some(mut their)) = (data(&our.message), data(&their.message)) {
            assert!(RdmaCmHeader::parse(&our).is_ok());
            [&mut our, &mut their].into_iter().for_each(|data| data[2..4].fill(0));
            assert_eq!(our, their);
        }
    }
    found
}

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| name.to_string()).collect()
}

fn a_connection_differs_from_rxe_in_identifiers_only() {
    let found = compare(&our_rping(), &rxe_packets("rping.pcap"));
    let identifiers = ["transaction_id", "local_id"];
    let expected = BTreeMap::from([
        (
            "REQ",
            names(&[
                identifiers[0],
                identifiers[1],
                "local_ca_guid",
                "local_qpn",
                "starting_psn",
                "flow_label",
                "private_data",
            ]),
        ),
        (
            "REP",
            names(&["transaction_id", "local_id", "remote_id", "local_qpn", "starting_psn", "local_ca_guid"]),
        ),
        ("RTU", names(&["transaction_id", "local_id", "remote_id"])),
        ("DREQ", names(&["transaction_id", "local_id", "remote_id", "remote_qpn"])),
        ("DREP", names(&["transaction_id", "local_id", "remote_id"])),
    ]);
    assert_eq!(found, expected);
}

fn a_rejection_differs_from_rxe_in_identifiers_only() {
    // The capture has path MTU 4096; ucmatose uses retry count 5 and RNR retry count 0.
    let ours = capture_simulation(Mtu::B4096, |world| {
        world.host("client", |device| async move {
            let context = device.open();
            let queue = context.create_completion_queue(1)?;
            let pair = context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()?;
            let parameters = ConnectionParameters {
                retry_count: 5,
                rnr_retry_count: 0,
                ..ConnectionParameters::default()
            };
            let connector = Connector::new(&context).parameters(parameters);
            assert!(connector.connect(&pair, "server:7471").await.is_err());
            Ok::<(), softhca::Error>(())
        });
        world.device("server");
    });
    // QP1 had sent packets before the capture.
    let found = compare(&ours, &rxe_packets("ucmatose_cmreject.pcap"));
    let identifiers = ["psn", "transaction_id", "local_id", "local_ca_guid", "local_qpn", "starting_psn"];
    let expected = BTreeMap::from([
        ("REQ", names(&[&identifiers[..], &["flow_label", "private_data"]].concat())),
        ("REJ", names(&["psn", "transaction_id", "remote_id"])),
    ]);
    assert_eq!(found, expected);
}

fn sidr_differs_from_rxe_in_identifiers_only() {
    let options = |letters: &[(char, &str)]| {
        letters
            .iter()
            .fold(Default::default(), |options: Options, (letter, value)| options.with(*letter, value))
    };
    let (server, client) = (options(&[('C', "3")]), options(&[('s', "server"), ('C', "3")]));
    let ours = capture_simulation(Mtu::B1024, |world| {
        world.host("client", |device| async move {
            device.endpoint_exchange().lookup::<()>("the server listens").await;
            udaddy::client(device, client).await
        });
        world.host("server", |device| udaddy::server(device, server));
    });
    // rxe's client has two queue pairs: compare its first request and response.
    let rxe = rxe_packets("udaddy.pcap");
    let found = compare(&ours, &[rxe[0].clone(), rxe[2].clone()]);
    let expected = BTreeMap::from([
        ("SIDR_REQ", names(&["psn", "transaction_id", "request_id", "private_data"])),
        ("SIDR_REP", names(&["psn", "transaction_id", "request_id", "qpn"])),
    ]);
    assert_eq!(found, expected);
}

/// Source address, opcode and CM message of each packet.
fn lines(seen: &[CapturedPacket]) -> Vec<String> {
    let line = |(_, addressing, bytes): &CapturedPacket| {
        let (transport, _) = Icrc::split(bytes).expect("an ICRC");
        let transport = TransportPacket::parse(transport).expect("a packet");
        let message = Datagram::parse(transport.payload).ok().map_or("", |datagram| datagram.message.name());
        format!("{} {} {message}", addressing.source, transport.header.bth.opcode)
    };
    seen.iter().map(line).collect()
}

fn rping_sends_the_same_packets_as_rxe_in_the_same_order() {
    assert_eq!(lines(&our_rping()), lines(&rxe_packets("rping.pcap")));
}

/// Source, opcode and CM attribute of each packet according to tshark.
fn tshark_lines(name: &str, file: &std::path::Path) -> Vec<String> {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(file).args(["-Y", "infiniband", "-T", "fields"]);
    for field in ["ip.src", "infiniband.bth.opcode", "infiniband.mad.attributeid"] {
        command.args(["-e", field]);
    }
    let output = command.output().expect("tshark runs");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(String::from).collect()
}

fn tshark_decodes_rping_like_that_of_rxe() {
    let mut writer = CaptureWriter::new(Vec::new()).expect("a capture");
    let wire = writer.add_interface("link", "between client and server").expect("an interface");
    for (time_ns, addressing, packet) in our_rping() {
        writer
            .write_packet(time_ns, wire, PacketDirection::Outbound, &addressing, &packet, None)
            .expect("a packet");
    }
    let path = std::env::temp_dir().join(format!("softhca-rping-{}.pcapng", std::process::id()));
    std::fs::write(&path, writer.into_inner()).expect("a file");
    let ours = tshark_lines("ours", &path);
    let _ = std::fs::remove_file(&path);
    assert_eq!(ours.len(), 65);
    assert_eq!(ours, tshark_lines("rxe's", &capture("rping.pcap")));
}
