use super::*;

/// A pcap file with one record of `data`, in the byte order that `word` writes.
fn pcap(magic: u32, word: fn(u32) -> [u8; 4], link: u32, original: u32, data: &[u8]) -> Vec<u8> {
    let half = |major: u16, minor: u16| {
        if word(1)[0] == 1 {
            word(u32::from(minor) << 16 | u32::from(major))
        } else {
            word(u32::from(major) << 16 | u32::from(minor))
        }
    };
    let mut file = Vec::new();
    for part in [word(magic), half(2, 4), word(0), word(0), word(65535), word(link)] {
        file.extend(part);
    }
    for part in [word(5), word(7), word(data.len() as u32), word(original)] {
        file.extend(part);
    }
    file.extend(data);
    file
}

fn block(kind: u32, body: &[u8], word: fn(u32) -> [u8; 4]) -> Vec<u8> {
    let mut padded = body.to_vec();
    padded.resize(body.len().next_multiple_of(4), 0);
    let length = word(padded.len() as u32 + 12);
    [&word(kind)[..], &length, &padded, &length].concat()
}

fn records(file: &[u8]) -> Vec<Record> {
    CaptureReader::new(file).expect("a capture").map(|record| record.expect("a record")).collect()
}

fn failure(file: &[u8]) -> String {
    match CaptureReader::new(file) {
        Err(error) => error.to_string(),
        Ok(capture) => capture.filter_map(Result::err).next().expect("an error").to_string(),
    }
}

#[test]
fn both_byte_orders_and_both_resolutions_of_pcap_are_read() {
    for (magic, fraction_ns) in [(0xa1b2_c3d4, 7000), (0xa1b2_3c4d, 7)] {
        for word in [u32::to_be_bytes, u32::to_le_bytes] {
            let [record] = &records(&pcap(magic, word, 1, 3, b"abc"))[..] else { panic!("one record") };
            assert_eq!(record.time_ns, 5_000_000_000 + fraction_ns);
            assert_eq!(
                (record.offset, record.link_type, &record.data[..]),
                (24, LinkType::Ethernet, &b"abc"[..])
            );
        }
    }
}

#[test]
fn both_byte_orders_of_pcapng_are_read_with_the_clock_of_the_interface() {
    for word in [u32::to_be_bytes as fn(u32) -> [u8; 4], u32::to_le_bytes] {
        let big = word(1)[3] == 1;
        let halves = |a: u16, b: u16| {
            if big {
                word(u32::from(a) << 16 | u32::from(b))
            } else {
                word(u32::from(b) << 16 | u32::from(a))
            }
        };
        let section =
            block(0x0a0d_0d0a, &[word(0x1a2b_3c4d), halves(1, 0), [0xff; 4], [0xff; 4]].concat(), word);
        let mut nanoseconds = [halves(101, 0), word(0), halves(9, 1)].concat();
        nanoseconds.extend([9, 0, 0, 0]);
        let packet = |interface| {
            let fixed = [word(interface), word(0), word(1500), word(3), word(4)].concat();
            block(6, &[&fixed[..], b"abc"].concat(), word)
        };
        let file = [
            section,
            block(1, &[halves(1, 0), word(2)].concat(), word),
            block(1, &nanoseconds, word),
            block(0x0000_0bad, b"skipped", word),
            packet(0),
            packet(1),
            block(3, &[&word(3)[..], b"abc"].concat(), word),
        ]
        .concat();
        let read = records(&file);
        let seen: Vec<_> =
            read.iter().map(|r| (r.time_ns, r.link_type, r.data.len(), r.original_len)).collect();
        assert_eq!(
            seen,
            [
                (1_500_000, LinkType::Ethernet, 3, 4),
                (1_500, LinkType::Ip, 3, 4),
                (1_500, LinkType::Ethernet, 2, 3)
            ]
        );
    }
}

#[test]
fn what_cannot_be_read_is_named_with_its_place() {
    let good = pcap(0xa1b2_c3d4, u32::to_le_bytes, 1, 3, b"abc");
    insta::assert_snapshot!(
        [
            failure(b""),
            failure(b"not a capture"),
            failure(b"\x1f\x8b\x08\x00"),
            failure(&good[..20]),
            failure(&good[..30]),
            failure(&good[..42]),
            failure(&pcap(0xa1b2_c3d4, u32::to_le_bytes, 105, 3, b"abc")),
            failure(&[&good[..], &[0xff; 16]].concat()),
            failure(&block(0x0a0d_0d0a, &[0; 16], u32::to_le_bytes)),
        ]
        .join("\n")
    );
}
