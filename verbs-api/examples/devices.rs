//! Lists devices, as `ibv_devices` does, and with `-v` what each offers, as `ibv_devinfo -v` does:
//! `cargo run --example devices -- -v`.

use softhca::{Device, Error};

fn main() -> Result<(), Error> {
    // A process sees its host's device only: an embedded card is made when it is asked for.
    let devices = [Device::embedded()?];
    if std::env::args().any(|argument| argument == "-v") {
        devices.iter().for_each(describe);
        return Ok(());
    }
    println!("    {:<16}\t   node GUID", "device");
    println!("    {:<16}\t----------------", "------");
    for device in &devices {
        println!("    {:<16}\t{:016x}", device.name(), device.guid());
    }
    Ok(())
}

fn describe(device: &Device) {
    let (limits, port) = (device.attributes().limits, device.port_attributes());
    let guid = device.guid();
    let groups = [guid >> 48, guid >> 32 & 0xffff, guid >> 16 & 0xffff, guid & 0xffff];
    let line = |name: &str, value: String| println!("\t{name}:\t{}{value}", "\t".repeat(2 - name.len() / 12));
    println!("hca_id:\t{}", device.name());
    line("transport", "InfiniBand (0)".into());
    line("node_guid", groups.map(|group| format!("{group:04x}")).join(":"));
    line("phys_port_cnt", "1".into());
    line("max_qp", limits.max_qp.to_string());
    line("max_qp_wr", limits.max_qp_wr.to_string());
    line("max_sge", limits.max_sge.to_string());
    line("max_cq", limits.max_cq.to_string());
    line("max_cqe", limits.max_cqe.to_string());
    line("max_mr", limits.max_mr.to_string());
    line("max_pd", limits.max_pd.to_string());
    line("max_srq", limits.max_srq.to_string());
    line("max_ah", limits.max_ah.to_string());
    line("max_qp_rd_atom", limits.max_qp_rd_atom.to_string());
    line("max_mcast_grp", limits.max_mcast_grp.to_string());
    println!("\t\tport:\t{}", port.port_num);
    println!("\t\t\tstate:\t\t\tPORT_ACTIVE (4)");
    println!("\t\t\tmax_mtu:\t\t{} ({})", port.max_mtu.bytes(), port.max_mtu as u8);
    println!("\t\t\tactive_mtu:\t\t{} ({})", port.active_mtu.bytes(), port.active_mtu as u8);
    println!("\t\t\tmax_msg_sz:\t\t{:#x}", limits.max_msg_sz);
    println!("\t\t\tlink_layer:\t\tEthernet");
    // The GID of RoCEv2 is an IP address; an IPv4 address is mapped into IPv6.
    println!("\t\t\tGID[  0]:\t\t{}, RoCE v2", port.gid);
}
