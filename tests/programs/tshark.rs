//! tshark decodes every opcode that the HCA emits with the same fields as our own parser.
//!
//! tshark shows the ICRC without checking it, so comparing it compares the bytes that we computed.

use libtest_mimic::Trial;
use softhca_engine::{AddressVector, CongestionSettings, QpType};
use softhca_fabric::{Action, InclusiveRange, Repeat, Selector};
use softhca_tests::needs;
use softhca_tests::pair::{Pair, Setup};
use softhca_tests::verbs::QpOptions;
use softhca_trace::{
    CapturePoints, CaptureReader, CaptureWriter, Mad, NameTable, Packet, PacketContents, PacketDirection,
    Record, RocePacket, RoceVersion, Tap,
};
use softhca_types::{Operation, ReceiveWorkRequest, SendImmOrInvalidate, SendWorkRequest, UdDestination};
use softhca_wire::{
    AddressHeaders, Bth, Icrc, MacAddress, Opcode, Operation as WireOperation, Pfc, Psn, Qpn, QueueKey,
    RemoteKey, Service,
};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;

const QUEUE_KEY: QueueKey = QueueKey(0x1234_5678);

pub fn trials() -> Vec<Trial> {
    vec![
        needs!("tshark", every_opcode_is_decoded_like_tshark_does),
        needs!("tshark", roce_v1_is_decoded_like_tshark_does),
        needs!("tshark", canonical_captures_are_decoded_like_tshark_does),
        needs!("tshark", cm_messages_are_decoded_like_tshark_does),
        needs!("tshark", fault_rules_add_a_packet_comment),
        needs!("tshark", tshark_shows_pauses_cnps_and_comments),
    ]
}

/// A capture of the packets on the link of a simulation while `act` runs.
fn captured(mut pair: Pair, framing: RoceVersion, act: impl FnOnce(&mut Pair)) -> Vec<u8> {
    let writer = CaptureWriter::with_version(Vec::new(), framing).expect("a capture");
    let tap =
        Tap::new(writer, NameTable::from_world(&pair.world), CapturePoints::Senders).expect("a capture");
    let tap = Rc::new(RefCell::new(tap));
    pair.world.set_sink(tap.clone());
    act(&mut pair);
    pair.run();
    pair.world.set_sink(());
    let mut tap = Rc::into_inner(tap).expect("the world let go of it").into_inner();
    tap.finish().expect("a whole capture");
    tap.into_inner()
}

/// SENDs and WRITEs of one and of several packets, with and without immediate data.
fn sends_and_writes(pair: &mut Pair) {
    let (a, b) = (pair.a, pair.b);
    for length in [5, 3000] {
        let gather = [a.sge(0, length)];
        for imm_or_invalidate in [SendImmOrInvalidate::None, SendImmOrInvalidate::Immediate(0x0102_0304)] {
            pair.post_receive(1, 0, 4096);
            pair.post(1, Operation::Send(imm_or_invalidate), &gather);
        }
        for immediate in [None, Some(0x0506_0708)] {
            pair.post_receive(1, 0, 4096);
            pair.post(2, Operation::Write { remote: b.remote(64), imm_data: immediate }, &gather);
        }
        pair.world.run();
    }
}

/// READs of one and of several packets, and both atomics.
fn reads_and_atomics(pair: &mut Pair) {
    let (a, b) = (pair.a, pair.b);
    pair.post_read(1, 0, 0, 5);
    pair.post_read(2, 0, 0, 3000);
    pair.post(3, Operation::FetchAdd { remote: b.remote(8), add: 3 }, &[a.sge(0, 8)]);
    pair.post(4, Operation::CompareSwap { remote: b.remote(8), compare: 3, swap: 1 << 40 }, &[a.sge(0, 8)]);
}

/// A SEND with invalidate that the peer rejects, because it has no such rkey.
fn invalidation(pair: &mut Pair, length: u32) {
    pair.post_receive(1, 0, 4096);
    let gather = [pair.a.sge(0, length)];
    pair.post(1, Operation::Send(SendImmOrInvalidate::Invalidate(RemoteKey(0x77))), &gather);
}

/// Datagrams with and without immediate data.
fn datagrams() -> Vec<u8> {
    captured(Pair::new(), RoceVersion::V2, |pair| {
        let qps = [pair.a, pair.b].map(|end| {
            let mut verbs = pair.world.verbs(end.host);
            let options = QpOptions::default();
            let qp = verbs.create_queue_pair(QpType::Ud, end.domain, end.cq, options).unwrap();
            verbs.start_datagrams(qp, QUEUE_KEY, Psn::new(77)).unwrap();
            qp
        });
        let vector = AddressVector::to(pair.world.host(pair.b.host).address().into());
        let handle = pair.world.verbs(pair.a.host).create_address_handle(pair.a.domain, vector).unwrap();
        let (gather, scatter) = ([pair.a.sge(0, 101)], [pair.b.sge(0, 200)]);
        for imm_or_invalidate in [SendImmOrInvalidate::None, SendImmOrInvalidate::Immediate(9)] {
            pair.world
                .verbs(pair.b.host)
                .post_receive(qps[1], &ReceiveWorkRequest { wr_id: 1, sg_list: &scatter })
                .unwrap();
            let mut request = SendWorkRequest::new(1, Operation::Send(imm_or_invalidate), &gather);
            request.ud = UdDestination { ah: handle.0, remote_qpn: qps[1], remote_qkey: QUEUE_KEY };
            pair.world.verbs(pair.a.host).post_send(qps[0], &request).unwrap();
        }
    })
}

/// A packet with a CE mark, so that the receiver sends a CNP.
fn ecn_marked(pair: &mut Pair) {
    pair.add_rule(
        Selector { psn: Some(InclusiveRange::exactly(0)), ..Selector::default() },
        Repeat::times(1),
        Action::MarkCe,
    );
    pair.post_write(1, 0, 0, 3000);
}

/// An RNR NAK.
fn rnr_nak(pair: &mut Pair) {
    pair.post_send(1, 0, 10);
    pair.world.run_for(std::time::Duration::from_micros(100));
    pair.post_receive(1, 0, 100);
}

fn records(file: &[u8]) -> Vec<Record> {
    CaptureReader::new(file).expect("a capture").map(|record| record.expect("a record")).collect()
}

const FIELDS: [&str; 17] = [
    "_ws.malformed",
    "frame.time_epoch",
    "infiniband.bth.opcode",
    "infiniband.bth.destqp",
    "infiniband.bth.psn",
    "infiniband.bth.a",
    "infiniband.bth.padcnt",
    "infiniband.reth.va",
    "infiniband.reth.r_key",
    "infiniband.reth.dmalen",
    "infiniband.aeth.syndrome",
    "infiniband.aeth.msn",
    "infiniband.deth.q_key",
    "infiniband.deth.srcqp",
    "infiniband.immdt",
    "infiniband.mad.attributeid",
    "infiniband.invariant.crc",
];

/// These fields of every packet, decoded by tshark.
fn tshark(name: &str, file: &[u8], fields: &[&str]) -> Vec<Vec<String>> {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name).with_extension("pcapng");
    std::fs::write(&path, file).expect("a file in the target folder");
    let mut command = Command::new("tshark");
    command.arg("-r").arg(&path).args(["-n", "-T", "fields", "-E", "separator=|", "-E", "occurrence=f"]);
    // Heuristic dissectors would misinterpret the payload of tests. What is for people to open has another one.
    let is_for_people = name == "canonical";
    for protocol in ["rpcordma", "smb_direct", "nvme-rdma", "lnet", "iser", "infiniband_sdp", "smc", "fcoib"]
    {
        if !is_for_people {
            command.args(["--disable-protocol", protocol]);
        }
    }
    for field in fields {
        command.args(["-e", field]);
    }
    let output = command.output().expect("tshark runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines().map(|line| line.split('|').map(str::to_owned).collect()).collect()
}

/// Parses a number of tshark: decimal, hexadecimal, or bytes with colons.
fn number(text: &str) -> Option<u64> {
    let text = text.replace(':', "");
    match text.strip_prefix("0x") {
        _ if text.is_empty() => None,
        Some(digits) => Some(u64::from_str_radix(digits, 16).expect("a number")),
        None => Some(text.parse().expect("a number")),
    }
}

/// The same fields, decoded by us.
fn our_fields(roce: &RocePacket<'_>) -> [Option<u64>; 15] {
    let header = &roce.transport.header;
    let bth = header.bth;
    [
        Some(bth.opcode.byte().into()),
        Some(bth.destination_qp.value().into()),
        Some(bth.psn.value().into()),
        Some(bth.ack_request.into()),
        Some(bth.pad.into()),
        header.reth.map(|reth| reth.virtual_address).or(header.atomic.map(|atomic| atomic.virtual_address)),
        header.reth.map(|reth| reth.rkey.0.into()).or(header.atomic.map(|atomic| atomic.rkey.0.into())),
        header.reth.map(|reth| reth.dma_length.into()),
        header.aeth.map(|aeth| aeth.syndrome.byte().into()),
        header.aeth.map(|aeth| aeth.msn.into()),
        header.deth.map(|deth| deth.qkey.0.into()),
        header.deth.map(|deth| deth.source_qp.value().into()),
        header.immediate.map(|immediate| immediate.0.into()),
        match roce.mad {
            Some(Mad::Cm(datagram)) => Some(datagram.message.attribute_id().into()),
            _ => None,
        },
        Some(u32::from_be_bytes(roce.frame.icrc().0).into()),
    ]
}

/// Compares every packet of captures and returns the opcodes. tshark starts once and reads them as sections of one file.
fn compare(file_name: &str, captures: &[(String, Vec<u8>)]) -> BTreeSet<Opcode> {
    let sections: Vec<u8> = captures.iter().flat_map(|(_, file)| file).copied().collect();
    let mut lines = tshark(file_name, &sections, &FIELDS).into_iter();
    let mut seen = BTreeSet::new();
    for (name, file) in captures {
        let records = records(file);
        let own = lines.by_ref().take(records.len()).collect();
        compare_packets(name, &records, own, &mut seen);
    }
    assert_eq!(lines.count(), 0, "tshark finds more packets");
    seen
}

fn compare_packets(name: &str, records: &[Record], lines: Vec<Vec<String>>, seen: &mut BTreeSet<Opcode>) {
    assert_eq!(records.len(), lines.len(), "{name}");
    for (record, line) in records.iter().zip(lines) {
        let packet = Packet::new(record, 0);
        assert_eq!(line[0], "", "tshark considers this malformed: {packet}");
        let roce = match &packet.contents {
            PacketContents::Roce(roce) => roce,
            PacketContents::Pause(_) => continue,
            _ => panic!("{name}: {packet}"),
        };
        assert!(roce.icrc_ok, "{name}: {packet}");
        let seconds = format!("{}.{:09}", record.time_ns / 1_000_000_000, record.time_ns % 1_000_000_000);
        assert_eq!(line[1], seconds);
        let expected = our_fields(roce);
        let opcode = roce.transport.header.bth.opcode;
        let known = match () {
            // tshark decodes only the BTH of XRC packets, and does not show the ICRC of CNPs.
            () if opcode.service() == Service::Xrc => 5,
            () if opcode == Opcode::CNP => expected.len() - 1,
            () => expected.len(),
        };
        for (index, field) in FIELDS[2..].iter().enumerate().take(known) {
            let text = &line[index + 2];
            let theirs = match *field {
                "infiniband.immdt" if !text.is_empty() => {
                    Some(u64::from_str_radix(&text.replace(':', ""), 16).expect("bytes"))
                }
                _ => number(text),
            };
            assert_eq!(theirs, expected[index], "{name}: {field}: {packet}\n{line:?}");
        }
        seen.insert(roce.transport.header.bth.opcode);
    }
}

fn every_opcode_is_decoded_like_tshark_does() {
    let of = |kind, act: fn(&mut Pair)| captured(Setup::with_kind(kind).build(), RoceVersion::V2, act);
    let mut captures = Vec::new();
    for kind in [QpType::Rc, QpType::XrcInitiator] {
        captures.extend([
            (format!("{kind:?} data"), of(kind, sends_and_writes)),
            (format!("{kind:?} reads"), of(kind, reads_and_atomics)),
            (format!("{kind:?} invalidate one"), of(kind, |pair| invalidation(pair, 5))),
            (format!("{kind:?} invalidate many"), of(kind, |pair| invalidation(pair, 3000))),
        ]);
    }
    let mut setup = Setup::default();
    setup.settings.congestion = CongestionSettings::DCQCN;
    captures.extend([
        ("RNR".into(), of(QpType::Rc, rnr_nak)),
        ("UC data".into(), of(QpType::Uc, sends_and_writes)),
        ("UD data".into(), datagrams()),
        ("notification".into(), captured(setup.build(), RoceVersion::V2, ecn_marked)),
    ]);
    let seen = compare("opcodes", &captures);
    // The HCA does not send these.
    let never = [WireOperation::Flush, WireOperation::AtomicWrite];
    let expected: BTreeSet<Opcode> =
        Opcode::all().filter(|opcode| !never.contains(&opcode.operation())).collect();
    assert_eq!(seen, expected);
}

/// The captures of the book: their names and bytes.
fn canonical_captures() -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/captures");
    // Always in one order: a connection of one section tells Wireshark what those of a later one carry.
    let paths: BTreeSet<PathBuf> = std::fs::read_dir(folder)
        .expect("the folder of captures")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    let captures: Vec<(String, Vec<u8>)> = paths
        .iter()
        .filter(|path| path.extension().is_some_and(|end| end == "pcapng"))
        .map(|path| {
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            (name, std::fs::read(path).expect("a capture"))
        })
        .collect();
    assert!(captures.len() >= 40, "{}", captures.len());
    captures
}

/// Wireshark guesses the protocol in the payload. It must not find one that is not there.
fn canonical_captures_are_decoded_like_tshark_does() {
    let captures = canonical_captures();
    compare("canonical", &captures);
    let sections: Vec<u8> = captures.into_iter().flat_map(|(_, file)| file).collect();
    for line in tshark("canonical", &sections, &["frame.protocols", "frame.time_epoch"]) {
        let innermost = line[0].rsplit(':').next().unwrap_or_default();
        assert!(["infiniband", "data", "macc"].contains(&innermost), "{line:?}");
    }
}

/// CM messages of Linux.
fn cm_messages_are_decoded_like_tshark_does() {
    for name in ["rdma_client", "ucmatose_cmreject", "udaddy"] {
        let mut file = CaptureWriter::new(Vec::new()).expect("a capture");
        let interface = file.add_interface("eth0", "").expect("an interface");
        for record in CaptureReader::open(&softhca_tests::capture(name)).expect("a capture") {
            let record = record.expect("a whole record");
            let Ok(frame) = record.frame() else { continue };
            let addressing = frame.network.addressing().expect("RoCEv2");
            file.write_packet(
                record.time_ns,
                interface,
                PacketDirection::Outbound,
                &addressing,
                frame.packet,
                None,
            )
            .expect("room");
        }
        compare(name, &[(name.into(), file.into_inner())]);
    }
}

fn roce_v1_is_decoded_like_tshark_does() {
    let file = captured(Pair::new(), RoceVersion::V1, sends_and_writes);
    compare("rc_version_1", &[("RoCE v1".into(), file)]);
}

fn fault_rules_add_a_packet_comment() {
    let mut pair = Pair::new();
    let selector = Selector { psn: Some(InclusiveRange::exactly(1)), ..Selector::default() };
    pair.add_rule(selector, Repeat::times(1), Action::Drop);
    let file = captured(pair, RoceVersion::V2, |pair| pair.post_write(1, 0, 0, 3000));
    let lines = tshark("comments", &file, &["frame.interface_name", "frame.comment"]);
    let comments: Vec<_> = lines.iter().map(|line| (&line[0][..], &line[1][..])).collect();
    let dropped = ("alice", "dropped by rule 1");
    assert_eq!(comments, [("alice", ""), dropped, ("alice", ""), ("bob", "")]);
}

fn tshark_shows_pauses_cnps_and_comments() {
    let mut writer = CaptureWriter::new(Vec::new()).expect("a capture");
    let alice = writer.add_interface("alice", "10.0.0.1").expect("an interface");
    let bob = writer.add_interface("bob", "10.0.0.2").expect("an interface");
    let host = |last| std::net::Ipv4Addr::new(10, 0, 0, last).into();
    let addressing = AddressHeaders { identification: 77, ..AddressHeaders::between(host(2), host(1)) };
    let mut notification = vec![0; Bth::LEN + 16 + 4];
    Bth::new(Opcode::CNP, Qpn::new(0x11), Psn::new(0)).emit(&mut notification);
    Icrc::write(&addressing, &mut notification);
    writer
        .write_packet(
            5,
            bob,
            PacketDirection::Outbound,
            &addressing,
            &notification,
            Some("bob saw a CE mark"),
        )
        .unwrap();
    let source = MacAddress::from_ip(host(1));
    let pause = Pfc { source, pause: [None, None, None, Some(0xffff), None, None, None, Some(0)] };
    writer.write_pause(6, alice, PacketDirection::Outbound, &pause, None).unwrap();
    let fields =
        ["_ws.malformed", "frame.interface_name", "frame.comment", "infiniband.bth.opcode", "macc.opcode"];
    let lines = tshark("pauses", &writer.into_inner(), &fields);
    assert_eq!(lines, [["", "bob", "bob saw a CE mark", "129", ""], ["", "alice", "", "", "0x0101"]]);
}
