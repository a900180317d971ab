//! Output of `softhca trace` for valid and damaged captures.

use softhca_wire::{
    AddressHeaders, Bth, EtherType, Ethernet, Gid, Grh, Icrc, MacAddress, NetworkHeaders, Opcode, Pfc, Psn,
    Qpn, RoceFrame,
};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn softhca(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_softhca"));
    command.args(arguments).output().expect("the command runs")
}

/// Standard output, standard error if not empty, and the exit code.
fn format_output(arguments: &[&str], file: &Path) -> String {
    let file = file.to_str().expect("a path in UTF-8");
    let output = softhca(&[arguments, &[file]].concat());
    let mut text = String::from_utf8(output.stdout).expect("UTF-8");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8").replace(file, "FILE");
    if !stderr.is_empty() {
        text += &format!("stderr: {stderr}");
    }
    text + &format!("exit {}", output.status.code().expect("an exit code"))
}

fn capture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures");
    folder.join(name).with_extension("pcap")
}

/// Writes a capture of these frames, a microsecond apart, each with its length on the wire.
fn write_capture(name: &str, link: u32, frames: &[(Vec<u8>, usize)]) -> PathBuf {
    let words = [0xa1b2_c3d4u32, 0x0004_0002, 0, 0, 65535, link];
    let mut file: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    for (number, (frame, original)) in frames.iter().enumerate() {
        let words = [1, number as u32, frame.len() as u32, *original as u32];
        file.extend(words.into_iter().flat_map(u32::to_le_bytes));
        file.extend(frame);
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, file).expect("a file in the target folder");
    path
}

fn uncut(frame: Vec<u8>) -> (Vec<u8>, usize) {
    let length = frame.len();
    (frame, length)
}

fn addressing() -> AddressHeaders {
    let host = |last| Ipv4Addr::new(10, 0, 0, last).into();
    AddressHeaders { traffic_class: 3, ..AddressHeaders::between(host(1), host(2)) }
}

/// The packet from the BTH up to the ICRC.
fn packet(opcode: u8, payload: &[u8]) -> Vec<u8> {
    let opcode = Opcode::from_byte(opcode).expect("a defined opcode");
    let mut packet = vec![0; Bth::LEN];
    Bth::new(opcode, Qpn::new(0x11), Psn::new(0xff_ffff)).emit(&mut packet);
    packet.extend(payload);
    packet.extend([0; 4]);
    packet
}

fn with_icrc(opcode: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = packet(opcode, payload);
    Icrc::write(&addressing(), &mut packet);
    packet
}

fn in_frame(packet: &[u8]) -> Vec<u8> {
    RoceFrame::new(&addressing(), packet).to_vec()
}

fn roce_v1_frame() -> Vec<u8> {
    let packet = packet(0x04, b"RoCE version one");
    let (transport, _) = Icrc::split(&packet).expect("long enough");
    let gid = |last| Gid::from(std::net::IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, last)));
    let grh = Grh {
        source: gid(1),
        destination: gid(2),
        traffic_class: 0,
        flow_label: 0,
        payload_length: packet.len() as u16,
        hop_limit: 1,
    };
    let sealed = [transport, &Icrc::compute_v1(&grh, transport).0].concat();
    let ethernet = Ethernet {
        destination: MacAddress([2, 0, 0, 0, 0, 2]),
        source: MacAddress([2, 0, 0, 0, 0, 1]),
        vlan: None,
        ether_type: EtherType::ROCE,
    };
    let frame = RoceFrame {
        ethernet: Some(ethernet),
        network: NetworkHeaders::V1(grh),
        packet: &sealed,
        ethernet_padding: &[],
    };
    frame.to_vec()
}

#[test]
fn a_connection_is_printed_from_req_to_drep() {
    insta::assert_snapshot!(format_output(&["trace", "--check"], &capture("rdma_client")));
}

#[test]
fn every_operation_is_printed_with_its_fields() {
    insta::assert_snapshot!(format_output(&["trace"], &capture("vt_odd")));
}

#[test]
fn json_output_has_the_contract_keys() {
    insta::assert_snapshot!(format_output(&["trace", "--json"], &capture("rdma_client")));
}

#[test]
fn other_protocols_are_packets_but_not_roce() {
    insta::assert_snapshot!(format_output(&["trace"], &capture("mckey")));
}

fn damaged_capture() -> PathBuf {
    let good = in_frame(&with_icrc(0x04, b"good"));
    let mut damaged = good.clone();
    *damaged.last_mut().expect("an ICRC") ^= 1;
    let mut opcode = with_icrc(0x04, b"good");
    opcode[0] = 0x1f;
    let mut checksum = good.clone();
    checksum[24] ^= 1;
    let mut foreign = good.clone();
    foreign[36..38].copy_from_slice(&53u16.to_be_bytes());
    let pause = Pfc {
        source: MacAddress([2, 0, 0, 0, 0, 1]),
        pause: [None, None, None, Some(65535), Some(0), None, None, None],
    };
    let length = good.len();
    let padded = [&good[..], &[0; 6]].concat();
    let frames = [
        uncut(good.clone()),
        uncut(padded),
        uncut(roce_v1_frame()),
        uncut(in_frame(&with_icrc(0x81, &[0; 16]))),
        uncut(damaged),
        uncut(in_frame(&opcode)),
        uncut(in_frame(&with_icrc(0x04, b"odd"))),
        uncut(checksum),
        (good[..length - 1].to_vec(), length),
        (good[..20].to_vec(), length),
        (foreign[..40].to_vec(), length),
        uncut(foreign),
        uncut(pause.emit().to_vec()),
    ];
    write_capture("damaged.pcap", 1, &frames)
}

#[test]
fn damaged_packets_are_counted_and_explained() {
    let file = damaged_capture();
    insta::assert_snapshot!(format_output(&["trace"], &file));
    insta::assert_snapshot!("damaged_packets_in_json", format_output(&["trace", "--json"], &file));
    assert!(format_output(&["trace", "--check"], &file).ends_with("exit 1"));
}

#[test]
fn raw_ip_captures_are_supported() {
    let ip = in_frame(&with_icrc(0x04, b"good")).split_off(14);
    for link in [101, 228] {
        let file = write_capture(&format!("raw{link}.pcap"), link, &[uncut(ip.clone())]);
        let text = format_output(&["trace", "--check"], &file);
        assert!(text.ends_with("1 packets, 1 roce, 1 icrc ok, 0 icrc bad, 0 malformed\nexit 0"), "{text}");
    }
}

#[test]
fn a_file_that_is_not_a_capture_is_rejected_with_a_reason() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let cut = folder.join("cut.pcap");
    let bytes = std::fs::read(capture("vt_oob")).expect("a capture");
    std::fs::write(&cut, &bytes[..bytes.len() - 5]).expect("a file in the target folder");
    let text = folder.join("text.pcap");
    std::fs::write(&text, "This is not a capture.").expect("a file in the target folder");
    let outputs = [&folder.join("missing.pcap"), &text, &cut].map(|file| format_output(&["trace"], file));
    insta::assert_snapshot!(outputs.join("\n\n"));
}

#[test]
fn each_connection_has_a_ladder() {
    insta::assert_snapshot!(format_output(&["trace", "--ladder"], &capture("rdma_client")));
    insta::assert_snapshot!(
        "every_operation_in_a_ladder",
        format_output(&["trace", "--ladder"], &capture("vt_odd"))
    );
    insta::assert_snapshot!(
        "a_loss_in_a_ladder",
        format_output(&["trace", "--ladder"], &capture("vt_loss_write"))
    );
    insta::assert_snapshot!(
        "unreliable_ladders",
        format_output(&["trace", "--ladder"], &capture("vt_uc_ops"))
    );
}

#[test]
fn ladders_can_be_filtered_by_queue_pair_and_time() {
    let arguments = ["trace", "--ladder", "--qp", "1", "--from", "100ms", "--to", "0.125"];
    insta::assert_snapshot!(format_output(&arguments, &capture("rdma_client")));
    let wrong = format_output(&["trace", "--ladder", "--from", "soon"], &capture("rdma_client"));
    assert!(wrong.contains("`soon` is not a time") && wrong.ends_with("exit 2"), "{wrong}");
    assert!(format_output(&["trace", "--ladder", "--json"], &capture("rdma_client")).ends_with("exit 2"));
}

#[test]
fn a_capture_is_converted_to_roce_v1() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("roce-v1.pcapng");
    let name = target.to_str().expect("a path in UTF-8");
    let before = format_output(&["trace"], &capture("vt_odd"));
    assert_eq!(
        format_output(&["trace", "--roce-v1", name], &capture("vt_odd")),
        before,
        "the output stays the same"
    );
    let after = format_output(&["trace", "--check"], &target);
    assert!(after.ends_with("exit 0"), "{after}");
    // The same packets with right ICRCs; only the addresses look otherwise.
    let last = |text: &str| text.lines().rev().nth(1).expect("the packet counts").to_owned();
    assert_eq!(last(&after), last(&before));
    let rejected = format_output(&["trace", "--roce-v1", "/nowhere/at/all.pcapng"], &capture("vt_odd"));
    assert!(
        rejected.contains("cannot write /nowhere/at/all.pcapng") && rejected.ends_with("exit 2"),
        "{rejected}"
    );
}
