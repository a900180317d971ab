//! Measures the throughput and latency of plain UDP sockets. Run it in release mode on an idle machine.

use softhca_udp::{charge, raw};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

fn main() -> Result<(), raw::RawError> {
    let [here, there]: [IpAddr; 2] = [2, 3].map(|last| Ipv4Addr::new(127, 90, 0, last).into());
    println!("datagram  segments  charged  assumed");
    for (len, segments) in [(64, 1), (64, 64), (1082, 1), (1082, 60), (4154, 1), (4154, 2), (4154, 15)] {
        let charged = raw::measure_charge(here, len, segments)?;
        println!("{len:>8}  {segments:>8}  {charged:>7}  {:>7}", charge(len, segments));
    }
    for _ in 0..3 {
        for len in [4096 + 58, 1024 + 58, 64] {
            let figures = raw::stream(here, there, len, Duration::from_secs(1))?;
            println!(
                "stream of {len} B datagrams: {:.2} GB/s, {:.2} M datagrams/s, {:.1} a chunk, {} dropped",
                figures.gigabytes_per_second(),
                figures.million_datagrams_per_second(),
                figures.datagrams as f64 / figures.chunks.max(1) as f64,
                figures.dropped,
            );
        }
        let figures = raw::ping_pong(here, there, 64, 50_000)?;
        println!(
            "64 B round trip, both spinning: {:?} median, {:?} least, {:?} at 99 %",
            figures.median, figures.min, figures.percentile_99
        );
    }
    Ok(())
}
